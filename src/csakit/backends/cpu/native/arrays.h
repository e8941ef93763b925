// What a call hands over (made in calls.py: every field is a word of 8 bytes), and rows of it as float pointers.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "pairs.h"

namespace csakit {

struct Array {  // [batch, rows, groups, width]; strides in elements, that of width is 1
    void* data;  // null: not given
    int64_t batch, row, group, width;
    int64_t bfloat;  // 1: bfloat16, 0: float32
};

struct Ranges {  // of a Layout, each [batch, tokens]
    const uint8_t* valid;
    const int32_t *window_start, *entry_start, *entry_stop;
    int64_t kv_offset;
};

struct Indices {  // [batch, tokens, sets, slots], contiguous
    const void* data;     // null: every visible entry
    int64_t slots, wide;  // wide: int64, else int32
    int64_t at(long i) const { return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i]; }
};

struct Aligned {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};

class Buffer {  // scratch of one thread; grows, never shrinks
  public:
    float* floats(long count) {
        if (count > capacity_) {
            data_.reset(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t(64))));
            capacity_ = count;
        }
        return data_.get();
    }
    float* get() const { return data_.get(); }

  private:
    std::unique_ptr<float[], Aligned> data_;
    long capacity_ = 0;
};

template <class E>
const E* row_of(const Array& x, long batch, long row, long group) {
    using Number = std::conditional_t<std::is_same_v<E, float>, float, uint16_t>;
    return reinterpret_cast<const E*>(static_cast<const Number*>(x.data) + batch * x.batch + row * x.row + group * x.group);
}

// Channels first .. first + count of a row as floats at `to`, whatever its type.
inline void copy_columns(float* to, const Array& x, long batch, long row, long group, long first, long count) {
    const long at = batch * x.batch + row * x.row + group * x.group + first;
    if (x.bfloat)
        widen(to, static_cast<const uint16_t*>(x.data) + at, count);
    else
        std::memcpy(to, static_cast<const float*>(x.data) + at, count * sizeof(float));
}

inline void copy_row(float* to, const Array& x, long batch, long row, long group) { copy_columns(to, x, batch, row, group, 0, x.width); }

inline void store_row(const Array& x, long batch, long row, long group, const float* from, float factor) {
    const long at = batch * x.batch + row * x.row + group * x.group;
    long d = 0;
    if (x.bfloat) {
        uint16_t* to = static_cast<uint16_t*>(x.data) + at;
        for (; d + LANES <= x.width; d += LANES) store_half_words(to + d, rounded(load(from + d) * factor));
        for (; d < x.width; ++d) to[d] = uint16_t(rounded(every(from[d] * factor))[0]);
    } else {
        float* to = static_cast<float*>(x.data) + at;
        for (; d + LANES <= x.width; d += LANES) store(to + d, load(from + d) * factor);
        for (; d < x.width; ++d) to[d] = from[d] * factor;
    }
}

// Rows `first .. first + count` of the groups axis (heads of a token) as pointers; as floats, bfloat16 is widened into the buffer.
template <class E>
void head_rows(std::vector<const E*>& rows, Buffer& buffer, const Array& x, long batch, long token, long first, long count) {
    rows.resize(count);
    for (long h = 0; h < count; ++h) rows[h] = row_of<E>(x, batch, token, first + h);
    if constexpr (std::is_same_v<E, float>) {
        float* copy = x.bfloat ? buffer.floats(count * x.width) : nullptr;
        for (long h = 0; h < count && copy; ++h, copy += x.width) {
            copy_row(copy, x, batch, token, first + h);
            rows[h] = copy;
        }
    }
}

// Attended rows as pointers. Rows of the right type whose width is whole vectors are used where they lie, unless they are so wide that
// those of a panel fall on each other in the first-level cache; others are copied, padded with zeros. Copies are kept for neighbouring
// queries that share most of them.
template <class E>
class RowReader {
  public:
    explicit RowReader(const Array& x)
        : x_(x),
          width_(elements<E>(padded(x.width))),
          stride_((width_ + 15) / 16 * 16 + 16),
          direct_(bool(x.bfloat) == std::is_same_v<E, Pair> && x.width % LANES == 0 && width_ <= 256) {}

    // Rows first .. stop of a group, and no others, will be asked for until the next call, `uses` times: keeps them if that pays.
    void keep(long batch, long group, long first, long stop, long uses) {
        kept_first_ = kept_stop_ = first;
        if (direct_ || 2 * (stop - first) > uses || (stop - first) * stride_ > most_kept) return;
        E* to = room(kept_, (stop - first) * stride_);
        for (long row = first; row < stop; ++row) copy(to + (row - first) * stride_, batch, row, group);
        kept_stop_ = stop;
    }

    template <class F>
    void rows(const E** to, long batch, long group, long count, F row) {
        if (direct_) {
            for (long n = 0; n < count; ++n) to[n] = row_of<E>(x_, batch, row(n), group);
            return;
        }
        if (kept_stop_ > kept_first_) {
            const E* kept = reinterpret_cast<const E*>(kept_.get()) - kept_first_ * stride_;
            for (long n = 0; n < count; ++n) to[n] = kept + row(n) * stride_;
            return;
        }
        E* copies = room(gathered_, count * stride_);
        for (long n = 0; n < count; ++n) {
            copy(copies + n * stride_, batch, row(n), group);
            to[n] = copies + n * stride_;
        }
    }

  private:
    static constexpr long most_kept = 1l << 18;  // 1 MiB

    static E* room(Buffer& buffer, long count) { return reinterpret_cast<E*>(buffer.floats(count)); }

    void copy(E* to, long batch, long row, long group) const {
        if constexpr (std::is_same_v<E, float>) {
            copy_row(to, x_, batch, row, group);
            std::fill(to + x_.width, to + width_, 0.f);
        } else {
            std::memcpy(static_cast<void*>(to), row_of<E>(x_, batch, row, group), x_.width * 2);
            std::memset(reinterpret_cast<char*>(to) + x_.width * 2, 0, (width_ * 2 - x_.width) * 2);
        }
    }

    const Array& x_;
    const long width_, stride_;  // in elements
    const bool direct_;
    Buffer kept_, gathered_;
    long kept_first_ = 0, kept_stop_ = 0;
};

}  // namespace csakit
