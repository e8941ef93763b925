// Attention over window, entries and sink, its log-mass, and its gradients. One query after another: a query touches its own rows and no
// others, so what it does not see has no influence, not even as NaN.
//
// The scores of a query are held transposed, [n][heads]: softmax and the sum over heads of the log-mass then run over whole vectors of
// heads, and a row of scores belongs to one attended row. Rows are taken in blocks that fit the cache, with a running maximum.
// H heads of a piece: the heads that share one selection set and one KV head.

#pragma once

#include "arrays.h"
#include "gradients.h"
#include "product.h"
#include "threads.h"

namespace csakit {

struct Attention {
    Array q, kv, entries, values, entry_values;  // values null: the keys are the values
    Array out, d_out, d_q;                       // [batch, tokens, heads, width]
    Array d_kv, d_entries, d_values, d_entry_values;  // float32, zeroed, width padded to whole vectors
    const float* sink;  // [heads] or null
    Indices indices;
    Ranges ranges;
    float* lse;        // [batch, tokens, heads]
    float* mass;       // [batch, tokens, sets, slots] or null; [batch, tokens, sets, num_entries] without indices
    double* d_sink;    // [heads], zeroed, or null
    int64_t batch, tokens, heads, groups, sets, num_entries, value_width, threads;
    double scale;
};

namespace {

struct Shape {
    long pieces, heads, columns, width, value_width, step;

    explicit Shape(const Attention& p) {
        pieces = std::lcm(p.sets, p.groups);
        heads = p.heads / pieces, columns = padded(heads);
        width = p.q.width, value_width = p.value_width;
        // rows of a block: their scores fit the first-level cache, they themselves half of the second
        const long by_scores = 6144 / columns, by_rows = 65536 / padded(width);
        step = std::clamp<long>(std::min(by_scores, by_rows), 48, 384) / 12 * 12;
    }
    long set(const Attention& p, long piece) const { return piece * p.sets / pieces; }
    long group(const Attention& p, long piece) const { return piece * p.groups / pieces; }
};

inline long window_first(const Attention& p, long at) { return std::max(p.ranges.window_start[at], 0); }

inline long window_count(const Attention& p, long at, long token) {
    return p.kv.data ? std::max<long>(0, token + p.ranges.kv_offset + 1 - window_first(p, at)) : 0;
}

inline long entry_stop(const Attention& p, long at) {
    return p.entries.data ? std::min<long>(p.ranges.entry_stop[at], p.num_entries) : 0;
}

struct Work {
    long most_rows = 0, rows = 0;  // of one query, of all
    explicit Work(const Attention& p) {
        for (long at = 0; at < p.batch * p.tokens; ++at) {
            if (!p.ranges.valid[at]) continue;
            const long visible = std::max<long>(0, entry_stop(p, at) - std::max(p.ranges.entry_start[at], 0));
            const long own = window_count(p, at, at % p.tokens) + (p.indices.data ? std::min<long>(visible, p.indices.slots) : visible);
            most_rows = std::max(most_rows, own), rows += own;
        }
    }
};

// The rows one query attends, block by block.
template <class E>
class Memory {
  public:
    Memory(const Attention& p, const Shape& shape)
        : p_(p),
          shape_(shape),
          keys_{RowReader<E>(p.kv), RowReader<E>(p.entries)},
          values_{RowReader<E>(p.values), RowReader<E>(p.entry_values)} {
        key.resize(shape.step + 1), value.resize(shape.step + 1);
    }

    std::vector<const E*> key, value;  // of the block fetched last, the last one twice: pairs of rows need an even number

    // What queries begin .. end will ask for most of all is made ready.
    void keep(long batch, long begin, long end, long group) {
        for (const bool window : {true, false}) {
            long first = std::numeric_limits<long>::max(), stop = 0, uses = 0;
            for (long t = begin; t < end; ++t) {
                const long at = batch * p_.tokens + t, from = window ? window_first(p_, at) : std::max(p_.ranges.entry_start[at], 0);
                const long count = window ? window_count(p_, at, t) : entry_stop(p_, at) - from;
                if (!p_.ranges.valid[at] || count <= 0) continue;
                first = std::min(first, from), stop = std::max(stop, from + count);
                uses += !window && p_.indices.data ? std::min<long>(count, p_.indices.slots) : count;
            }
            keys_[!window].keep(batch, group, std::min(first, stop), stop, uses);
            if (window ? p_.values.data : p_.entry_values.data) values_[!window].keep(batch, group, std::min(first, stop), stop, uses);
        }
    }

    void find(Unit& unit) const {
        const long at = unit.batch * p_.tokens + unit.token;
        unit.window_first = window_first(p_, at), unit.window = window_count(p_, at, unit.token);
        unit.entry_first = std::max(p_.ranges.entry_start[at], 0);
        const long stop = entry_stop(p_, at);
        unit.entry_count = std::max<long>(0, stop - unit.entry_first);
        unit.entries.clear();
        if (!p_.indices.data || !unit.entry_count) return;
        const long first = (at * p_.sets + shape_.set(p_, unit.piece)) * p_.indices.slots;
        unit.entry_count = p_.indices.wide ? pick(unit, stop, static_cast<const int64_t*>(p_.indices.data) + first)
                                           : pick(unit, stop, static_cast<const int32_t*>(p_.indices.data) + first);
    }

    void fetch(const Unit& unit, bool window, long first, long count) {
        const long group = shape_.group(p_, unit.piece);
        const auto read = [&](RowReader<E>& reader, std::vector<const E*>& to) {
            if (window)
                reader.rows(to.data(), unit.batch, group, count, [&](long n) { return unit.window_first + first + n; });
            else
                reader.rows(to.data(), unit.batch, group, count, [&](long n) { return unit.entry(first + n); });
            to[count] = to[count - 1];
        };
        read(keys_[!window], key);
        if (window ? p_.values.data : p_.entry_values.data)
            read(values_[!window], value);
        else
            value = key;
    }

    // Calls f(first row of all, count) for each block, with its rows fetched.
    template <class F>
    void blocks(const Unit& unit, F f) {
        for (const bool window : {true, false}) {
            const long total = window ? unit.window : unit.entry_count;
            for (long first = 0; first < total; first += shape_.step) {
                const long count = std::min(shape_.step, total - first);
                fetch(unit, window, first, count);
                f((window ? 0 : unit.window) + first, count);
            }
        }
    }

    mutable std::vector<int32_t> slots;  // of the entries found last

  private:
    // The visible ones of the chosen entries, and their slots; how many they are.
    template <class T>
    long pick(Unit& unit, long stop, const T* chosen) const {
        unit.entries.resize(p_.indices.slots), slots.resize(p_.indices.slots);
        long found = 0;
        for (long k = 0; k < p_.indices.slots; ++k) {
            unit.entries[found] = int32_t(chosen[k]), slots[found] = int32_t(k);
            found += chosen[k] >= unit.entry_first && chosen[k] < stop;
        }
        return found;
    }

    const Attention& p_;
    const Shape& shape_;
    RowReader<E> keys_[2], values_[2];  // window, entries
};

// Whether everything is bfloat16 and falls into pairs.
inline bool in_pairs(const Attention& p) {
    for (const Array* x : {&p.q, &p.kv, &p.entries, &p.values, &p.entry_values, &p.d_out})
        if (x->data && (!x->bfloat || x->width % 2)) return false;
    return p.value_width % 2 == 0;
}

template <class T>
void point(std::vector<T*>& to, T* first, long count, long stride) {
    to.resize(count);
    for (long i = 0; i < count; ++i) to[i] = first + i * stride;
}

}  // namespace
}  // namespace csakit
