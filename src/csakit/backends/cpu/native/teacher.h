// The log-mass of attended entries: the logarithm of what all heads of a set give each of them.
//
//   log_mass[j] = ln sum_h exp(logit[j][h] - lse[h])
#pragma once

#include "attention.h"

namespace csakit {
namespace {

inline float log_of_sum(float x, float y) {
    const double top = std::max(x, y);
    return top == -INF ? x + y : float(top + std::log(std::exp(x - top) + std::exp(y - top)));
}

// Products [count][columns] of one query -> their log-mass; lse holds +inf in the padding, and for a head that attends nothing.
inline void log_mass_of(float* to, float* sums, float* products, long count, long columns, float scale, const float* lse) {
    for (long j = 0; j < count; ++j) {
        float* x = products + j * columns;
        Vec most = every(-INF), total{};
        for (long h = 0; h < columns; h += LANES) {
            const Vec own = load(x + h) * scale - load(lse + h);
            store(x + h, own);
            most = greater(own, most);
        }
        float top = greatest(most);
        if (top == -INF) top = 0;
        for (long h = 0; h < columns; h += LANES) total += exponential(load(x + h) - top);
        to[j] = top, sums[j] = sum(total);
    }
    for (long j = 0; j < count; j += LANES) {
        const Vec total = load(sums + j);  // 0 where no head gives anything, NaN where one does
        const Vec logs = total > 0.f ? logarithm(total) : (total == 0.f ? every(-INF) : total);
        store(to + j, load(to + j) + logs);
    }
}

// lse [columns] of a query's heads as log_mass_of wants it.
inline void ready_lse(float* to, const float* lse, long heads, long columns) {
    for (long h = 0; h < columns; ++h) to[h] = h < heads && lse[h] != -INF ? lse[h] : INF;
}

// From an lse that is given, for attention that ran elsewhere.
template <class E>
class Teacher {
  public:
    explicit Teacher(const Attention& p) : p_(p), shape_(p), memory_(p, shape_) {
        packed_.floats(shape_.columns * padded(shape_.width)), lse_.floats(shape_.columns);
        scores_.floats(shape_.step * shape_.columns), sums_.floats(padded(shape_.step)), logs_.floats(padded(shape_.step));
    }

    void run(const Block& block) {
        for (long t = block.begin; t < block.end; ++t)
            for (long piece = 0; piece < shape_.pieces; ++piece) {
                unit_.batch = block.batch, unit_.token = t, unit_.piece = piece;
                query();
            }
    }

  private:
    void query() {
        const long at = unit_.batch * p_.tokens + unit_.token, head = unit_.piece * shape_.heads;
        const long slots = p_.indices.data ? p_.indices.slots : p_.num_entries;
        float* mass = p_.mass + (at * p_.sets + shape_.set(p_, unit_.piece)) * slots;
        const bool first = unit_.piece % (shape_.pieces / p_.sets) == 0;  // a set's heads may have several KV heads: pieces add up
        if (first) std::fill_n(mass, slots, -INF);
        if (!p_.ranges.valid[at]) return;
        memory_.find(unit_);
        if (!unit_.count()) return;
        head_rows(q_, widened_, p_.q, unit_.batch, unit_.token, head, shape_.heads);
        pack_for_dots(packed(), q_.data(), shape_.heads, elements<E>(shape_.width));
        ready_lse(lse_.get(), p_.lse + at * p_.heads + head, shape_.heads, shape_.columns);
        memory_.blocks(unit_, [&](long begin, long count) {
            point(rows_, scores_.get(), count, shape_.columns);
            dots(count, memory_.key.data(), packed(), shape_.heads, elements<E>(shape_.width), rows_.data(), 0);
            log_mass_of(logs_.get(), sums_.get(), scores_.get(), count, shape_.columns, float(p_.scale), lse_.get());
            for (long j = 0; j < count; ++j) {
                float& to = mass[p_.indices.data ? memory_.slots[begin + j] : unit_.entry(begin + j)];
                to = first ? logs_.get()[j] : log_of_sum(to, logs_.get()[j]);
            }
        });
    }

    E* packed() const { return reinterpret_cast<E*>(packed_.get()); }

    const Attention& p_;
    const Shape shape_;
    Memory<E> memory_;
    Unit unit_;
    Buffer packed_, lse_, scores_, sums_, logs_, widened_;
    std::vector<const E*> q_;
    std::vector<float*> rows_;
};

}  // namespace

void log_mass(const Attention& p) {
    const Blocks blocks{p.batch, p.tokens, 16};
    const long threads = useful_threads(p.threads, Work(p).rows * p.heads * p.q.width, blocks.count());
    with_elements(in_pairs(p), [&](auto element) {
        std::vector<std::unique_ptr<Teacher<decltype(element)>>> workers;
        for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<Teacher<decltype(element)>>(p));
        for_blocks(blocks, threads, [&](long number, const Block& block) { workers[number]->run(block); });
    });
}

}  // namespace csakit
