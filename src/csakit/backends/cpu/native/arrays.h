// What a call hands over (made in calls.py: every field is a word of 8 bytes), and rows of it as float pointers.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "simd.h"

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

inline const float* float_row(const Array& x, long batch, long row, long group) {
    return static_cast<const float*>(x.data) + batch * x.batch + row * x.row + group * x.group;
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
    if (x.bfloat)
        for (long d = 0; d < x.width; ++d) static_cast<uint16_t*>(x.data)[at + d] = to_bfloat(from[d] * factor);
    else
        for (long d = 0; d < x.width; ++d) static_cast<float*>(x.data)[at + d] = from[d] * factor;
}

// Rows `first .. first + count` of the groups axis (heads of a token) as float pointers; bfloat16 is widened into the buffer.
inline void head_rows(std::vector<const float*>& rows, Buffer& buffer, const Array& x, long batch, long token, long first, long count) {
    rows.resize(count);
    float* copy = x.bfloat ? buffer.floats(count * x.width) : nullptr;
    for (long h = 0; h < count; ++h) {
        if (copy) copy_row(copy + h * x.width, x, batch, token, first + h);
        rows[h] = copy ? copy + h * x.width : float_row(x, batch, token, first + h);
    }
}

// Attended rows as float pointers. float32 rows whose width is whole vectors are used where they lie; others are copied, padded with
// zeros. Copies of a window are kept for the neighbouring queries that share most of it.
class RowReader {
  public:
    explicit RowReader(const Array& x)
        : x_(x), width_(padded(x.width)), stride_((width_ + 15) / 16 * 16 + 16), direct_(!x.bfloat && x.width % LANES == 0 && x.width <= 256) {}

    bool direct() const { return direct_; }

    // Makes rows first .. stop of a group the kept ones.
    void keep(long batch, long group, long first, long stop) {
        if (direct_ || stop - first > most_kept) {
            kept_first_ = kept_stop_ = 0;
            return;
        }
        float* to = kept_.floats((stop - first) * stride_);
        for (long row = first; row < stop; ++row) copy(to + (row - first) * stride_, batch, row, group);
        kept_first_ = first, kept_stop_ = stop;
    }

    void window(const float** to, long batch, long group, long first, long count) {
        if (first >= kept_first_ && first + count <= kept_stop_) {
            for (long n = 0; n < count; ++n) to[n] = kept_.get() + (first + n - kept_first_) * stride_;
        } else {
            rows(to, batch, group, count, [&](long n) { return first + n; });
        }
    }

    template <class F>
    void rows(const float** to, long batch, long group, long count, F row) {
        if (direct_) {
            for (long n = 0; n < count; ++n) to[n] = float_row(x_, batch, row(n), group);
            return;
        }
        float* copies = gathered_.floats(count * stride_);
        for (long n = 0; n < count; ++n) {
            copy(copies + n * stride_, batch, row(n), group);
            to[n] = copies + n * stride_;
        }
    }

  private:
    static constexpr long most_kept = 1024;

    void copy(float* to, long batch, long row, long group) const {
        copy_row(to, x_, batch, row, group);
        std::fill(to + x_.width, to + width_, 0.f);
    }

    const Array& x_;
    const long width_, stride_;
    const bool direct_;
    Buffer kept_, gathered_;
    long kept_first_ = 0, kept_stop_ = 0;
};

}  // namespace csakit
