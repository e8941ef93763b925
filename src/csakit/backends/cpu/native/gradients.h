// Gradients of rows that many queries share: keys, values, entries, index keys.
//
// The backward runs in rounds of some queries, each in two phases with a barrier between. In the first, threads share the queries and
// leave their weights [n][columns] in a Unit. In the second, threads share the channels (and, with many threads, the rows) of the
// gradients, and each adds all queries in order. So no thread needs a gradient array of its own, and the sum is the same for any
// number of threads.
#pragma once

#include "arrays.h"
#include "product.h"
#include "threads.h"

namespace csakit {

struct Unit {  // what one query (and one group of its heads) adds to the gradients of the rows it attends
    long batch = 0, token = 0, piece = 0;
    long window_first = 0, window = 0;  // rows of the window, then
    std::vector<int32_t> entries;       // the first entry_count are the chosen ones; empty: a range
    long entry_first = 0, entry_count = 0;
    Buffer weights;  // [window + entries][columns]
    std::vector<double> sink;

    long count() const { return window + entry_count; }
    long entry(long n) const { return entries.empty() ? entry_first + n : entries[n]; }
};

// Rows of weights and of the gradient of one unit. Of the part `part` of `parts` only, by row number.
template <class E>
struct Targets {
    std::vector<const E*> weights;
    std::vector<float*> rows;

    void collect(const Unit& unit, long columns, const Array& window, const Array& entries, long group, long part, long parts) {
        weights.clear(), rows.clear();
        const auto add = [&](long n, long row, const Array& to) {
            if (parts > 1 && (row >> 5) % parts != part) return;
            weights.push_back(reinterpret_cast<const E*>(unit.weights.get()) + n * columns);
            rows.push_back(const_cast<float*>(row_of<float>(to, unit.batch, row, group)));
        };
        for (long n = 0; n < unit.window; ++n) add(n, unit.window_first + n, window);
        for (long n = 0; n < unit.entry_count; ++n) add(unit.window + n, unit.entry(n), entries);
    }
};

// Heads first .. first + count of a query's row of x; null: none of them.
struct Heads {
    const Array* x;
    long first, count;
};

// Columns of rows that are too far apart for the processor to fetch ahead: so the lines of the next panel are asked for here.
template <long N, class Number>
__attribute__((noinline)) void copy_panel(float* to, const Number* from, long stride, long rows) {
    for (long r = 0; r < rows; ++r, from += stride, to += N * LANES) {
        __builtin_prefetch(from + N * LANES);
        for (long n = 0; n < N; ++n) store(to + n * LANES, load(from + n * LANES));
    }
}

// Columns first .. first + columns of heads, at to[.][columns]; zeros in the padding to `rows`. Returns the end.
inline float* pack_heads(float* to, const Heads& heads, const Unit& unit, long rows, long first, long columns) {
    if (!heads.x) return to;
    const Array& x = *heads.x;
    const long live = std::clamp<long>(x.width - first, 0, columns);
    float* const end = to + heads.count * columns;
    const auto copy_from = [&](const auto* row) {
        using Number = std::remove_const_t<std::remove_pointer_t<decltype(row)>>;
        const auto copy = columns == PANEL ? copy_panel<2, Number> : copy_panel<1, Number>;
        copy(to, row + first, x.group, heads.count);
    };
    if (live == columns && x.bfloat) {
        copy_from(reinterpret_cast<const uint16_t*>(row_of<Pair>(x, unit.batch, unit.token, heads.first)));
    } else if (live == columns) {
        copy_from(row_of<float>(x, unit.batch, unit.token, heads.first));
    } else {
        for (long h = heads.first; to < end; ++h, to += columns) {
            copy_columns(to, x, unit.batch, unit.token, h, first, live);
            std::fill(to + live, to + columns, 0.f);
        }
    }
    return std::fill_n(end, (rows - heads.count) * columns, 0.f);
}

// The right operand of the second phase, `rows` rows of each part, laid out to fit weights [n][a's rows, b's rows]. Returns its depth.
inline long pack_panel(float* to, const Heads& a, const Heads& b, const Unit& unit, long rows, long first, long columns) {
    return (pack_heads(pack_heads(to, a, unit, rows, first, columns), b, unit, rows, first, columns) - to) / columns;
}

inline IntVec half_words(const Heads& heads, const Unit& unit, long h, long first) {
    if (!heads.x || h >= heads.count || first >= heads.x->width) return IntVec{};
    const auto* row = reinterpret_cast<const uint16_t*>(row_of<Pair>(*heads.x, unit.batch, unit.token, heads.first + h)) + first;
    if (first + LANES <= heads.x->width) return half_words(row);
    uint16_t some[LANES] = {};
    std::copy_n(row, heads.x->width - first, some);
    return half_words(some);
}

inline long pack_panel(Pair* to, const Heads& a, const Heads& b, const Unit& unit, long rows, long first, long columns) {
    for (long h = 0; h < rows; ++h, to += columns)
        for (long d = 0; d < columns; d += LANES)
            store_elements(to + d, paired(half_words(a, unit, h, first + d), half_words(b, unit, h, first + d)));
    return rows;
}

// What one thread does in the second phase: some panels of channels, and with more threads than panels some of the rows.
struct Share {
    long number, threads, parts;

    Share(long number_, long threads_, long width) : number(number_), threads(threads_) {
        const long panels = std::max<long>(1, width / PANEL);
        parts = (threads + panels - 1) / panels;
    }

    // body(part, for_each_panel) for each part of the rows; for_each_panel(f) calls f(first column, columns).
    template <class F>
    void for_parts(long width, F body) const {
        for (long part = 0; part < parts; ++part)
            body(part, [&](auto f) {
                for_panels(width, [&](long first, long columns) {
                    if ((first / PANEL * parts + part) % threads == number) f(first, columns);
                });
            });
    }
};

class Rounds {
  public:
    // bytes: of the weights of one query's unit.
    Rounds(long batch, long tokens, long pieces, long bytes, long threads) : pieces_(pieces), threads_(threads) {
        const long most = 24l << 20, queries = std::clamp<long>(most / std::max(1l, bytes * pieces), 1, 16 * threads);
        per_round_ = threads == 1 ? 1 : std::min(queries, 2 * threads);
        blocks_ = {batch, tokens, std::clamp<long>(queries / per_round_, 1, 8)};
    }

    // first(thread, block, its units), barrier, second(thread, unit) by every thread, last(unit) by one.
    template <class First, class Second, class Last>
    void run(First first, Second second, Last last) const {
        std::vector<Unit> units(per_round_ * blocks_.size * pieces_);
        std::atomic<long> next{0};
        Barrier barrier(threads_);
        const long count = blocks_.count();
        in_parallel(threads_, [&](long number) {
            for (long begin = 0; begin < count; begin += per_round_) {
                const long end = std::min(begin + per_round_, count);
                for (long b; (b = begin + next++) < end;) {
                    const Block block = blocks_[b];
                    first(number, block, &units[(b - begin) * blocks_.size * pieces_]);
                }
                barrier.wait();
                const auto for_units = [&](auto f) {
                    for (long b = begin; b < end; ++b)
                        for (long u = 0; u < (blocks_[b].end - blocks_[b].begin) * pieces_; ++u)
                            f(units[(b - begin) * blocks_.size * pieces_ + u]);
                };
                for_units([&](const Unit& unit) {
                    if (unit.count()) second(number, unit);
                });
                if (number == 0) for_units(last), next = 0;
                barrier.wait();
            }
        });
    }

  private:
    long pieces_, threads_, per_round_;
    Blocks blocks_;
};

}  // namespace csakit
