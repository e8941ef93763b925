// The forward of attention, and the log-mass of the slots from the weights that it makes.
#pragma once

#include "attention.h"
#include "teacher.h"

namespace csakit {
namespace {

template <class E>
class Forward {
  public:
    explicit Forward(const Attention& p) : p_(p), shape_(p), memory_(p, shape_) {
        const long h = shape_.columns;
        for (Buffer* x : {&top_, &total_, &factor_, &moment_}) x->floats(h);
        most_ = p.mass ? p.indices.slots : 0;
        scores_.floats((most_ + 2 * shape_.step) * h);
        out_.floats(h * padded(shape_.value_width));
        packed_.floats(h * padded(shape_.width));
        left_.floats(shape_.step * h);
    }

    void run(const Block& block) {
        for (long piece = 0, kept = -1; piece < shape_.pieces; ++piece) {
            const long group = shape_.group(p_, piece);
            if (group != kept) memory_.keep(block.batch, block.begin, block.end, kept = group);
            for (long t = block.begin; t < block.end; ++t) {
                unit_.batch = block.batch, unit_.token = t, unit_.piece = piece;
                if (p_.ranges.valid[block.batch * p_.tokens + t])
                    query();
                else
                    padding();
            }
        }
    }

  private:
    void padding() {
        std::fill_n(out_.get(), shape_.value_width, 0.f);
        for (long h = 0; h < shape_.heads; ++h) store_row(p_.out, unit_.batch, unit_.token, first_head() + h, out_.get(), 1);
        std::fill_n(lse(), shape_.heads, -INF);
        if (p_.mass) std::fill_n(mass(), p_.indices.slots, -INF);
    }

    void query() {
        memory_.find(unit_);
        head_rows(q_, widened_, p_.q, unit_.batch, unit_.token, first_head(), shape_.heads);
        pack_for_dots(packed(), q_.data(), shape_.heads, elements<E>(shape_.width));
        for (long h = 0; h < shape_.columns; ++h) {
            const float sink = p_.sink && h < shape_.heads ? p_.sink[first_head() + h] : -INF;
            top_.get()[h] = std::isfinite(sink) ? sink : -INF;
            total_.get()[h] = 0;
        }
        tops_.clear();
        bool started = false;
        memory_.blocks(unit_, [&](long first, long count) {
            // the weights of entries stay until the log-mass is made
            float* weights = scores_.get() + (p_.mass && first >= unit_.window ? first - unit_.window : most_) * shape_.columns;
            point(rows_, weights, count, shape_.columns);
            dots(count, memory_.key.data(), packed(), shape_.heads, elements<E>(shape_.width), rows_.data(), 0);
            soften(weights, count, started);
            if (p_.mass && first >= unit_.window) tops_.insert(tops_.end(), top_.get(), top_.get() + shape_.columns);
            add_values(weights, count, started);
            started = true;
        });
        finish(started);
        if (p_.mass) log_mass();
    }

    // products -> exp(scale * product - top) with the top so far; what has been summed under an earlier top is scaled.
    void soften(float* products, long count, bool started) {
        const long columns = shape_.columns;
        const float scale = float(p_.scale);
        bool rescale = false;
        for (long h = 0; h < columns; h += LANES) {
            const Vec before = load(top_.get() + h);
            Vec top = before;
            for (long n = 0; n < count; ++n) top = greater(load(products + n * columns + h) * scale, top);
            store(top_.get() + h, top);
            const Vec base = top == -INF ? Vec{} : top;
            const Vec factor = exponential(before - base);
            store(moment_.get() + h, factor);
            for (long i = 0; i < LANES; ++i) rescale |= factor[i] != 1.f;
            Vec total = load(total_.get() + h) * factor;
            for (long n = 0; n < count; ++n) {
                const Vec e = exponential(load(products + n * columns + h) * scale - base);
                store(products + n * columns + h, e);
                total += e;
            }
            store(total_.get() + h, total);
        }
        if (!started || !rescale) return;
        const long width = padded(shape_.value_width);
        for (long h = 0; h < shape_.heads; ++h) {
            float* out = out_.get() + h * width;
            for (long d = 0; d < width; d += LANES) store(out + d, load(out + d) * moment_.get()[h]);
        }
    }

    void add_values(const float* weights, long count, bool started) {
        E* const buffer = reinterpret_cast<E*>(left_.get());
        point(columns_, along_rows(buffer, weights, shape_.columns, count, shape_.columns), shape_.heads, 1);
        point(outs_, out_.get(), shape_.heads, padded(shape_.value_width));
        for_panels(shape_.value_width, [&](long first, long columns) {
            const Rows<E> b{memory_.value.data(), first};
            product(shape_.heads, columns_.data(), 0, shape_.columns, b, elements<E>(count), outs_.data(), first, columns, started);
        });
    }

    void finish(bool started) {
        for (long h = 0; h < shape_.columns; ++h) {
            float* factor = factor_.get() + h;
            *factor = 0;
            if (h >= shape_.heads) continue;
            const float top = base(top_.get()[h]);
            const float total = total_.get()[h] + (p_.sink ? std::exp(p_.sink[first_head() + h] - top) : 0.f);
            *factor = total == 0 ? 0 : 1 / total;
            lse()[h] = top + std::log(total);
            float* out = out_.get() + h * padded(shape_.value_width);
            if (!started) std::fill_n(out, shape_.value_width, 0.f);
            store_row(p_.out, unit_.batch, unit_.token, first_head() + h, out, *factor);
        }
    }

    // log_mass[j] = ln sum_h exp(score - lse), from the weights that are there: exp(score - top of their block). Where the sum is so small
    // that terms may have underflowed, once more in log space.
    void log_mass() {
        const float enough = 1e8f * std::numeric_limits<float>::min();
        const long count = unit_.entry_count, all = p_.indices.slots;
        add_heads();
        float* const logs = logs_.floats(padded(count));
        IntVec low{};
        std::fill(sums_.get() + count, sums_.get() + padded(count), 1.f);
        for (long j = 0; j < count; j += LANES) {
            const Vec total = load(sums_.get() + j);
            low |= ~(total >= enough);
            store(logs + j, logarithm(total));
        }
        if (any(low))
            for (long j = 0; j < count; ++j)
                if (!(sums_.get()[j] >= enough)) logs[j] = exact_log_mass(j);
        const bool first = unit_.piece % (shape_.pieces / p_.sets) == 0;  // a set's heads may have several KV heads: pieces add up
        if (first && count && memory_.slots[count - 1] == count - 1) {     // no empty slot before the last
            std::fill_n(std::copy_n(logs, count, mass()), all - count, -INF);
            return;
        }
        if (first) std::fill_n(mass(), all, -INF);
        for (long j = 0; j < count; ++j) {
            float& to = mass()[memory_.slots[j]];
            to = first ? logs[j] : log_of_sum(to, logs[j]);
        }
    }

    // sums_[j] = sum_h exp(score - lse)
    void add_heads() {
        const long columns = shape_.columns, count = unit_.entry_count, tops = tops_.size() / columns;
        sums_.floats(padded(count) + LANES);
        for (long block = 0; block < tops; ++block) {
            float* factor = tops_.data() + block * columns;  // its top, and from here on what the weights of the block lack
            for (long h = 0; h < columns; h += LANES) {
                const Vec top = load(factor + h), last = load(top_.get() + h);
                const Vec shift = (top == -INF ? Vec{} : top) - (last == -INF ? Vec{} : last);
                store(factor + h, exponential(shift) * load(factor_.get() + h));
            }
            for (long j = block * shape_.step; j < std::min(count, (block + 1) * shape_.step); j += LANES) {
                Vec totals[LANES];  // of this row and those that follow; what is past the block is made again, or not used
                for (long n = 0; n < LANES; ++n) {
                    const float* weights = scores_.get() + (j + n) * columns;
                    totals[n] = load(weights) * load(factor);
                    for (long h = LANES; h < columns; h += LANES) totals[n] += load(weights + h) * load(factor + h);
                }
                store(sums_.get() + j, sums(totals));
            }
        }
    }

    float exact_log_mass(long j) {
        memory_.fetch(unit_, false, j, 1);
        float *c = scores_.get() + most_ * shape_.columns, own[LANES] = {}, total[LANES] = {};
        dots(1, memory_.key.data(), packed(), shape_.heads, elements<E>(shape_.width), &c, 0);
        ready_lse(moment_.get(), lse(), shape_.heads, shape_.columns);
        log_mass_of(own, total, c, 1, shape_.columns, float(p_.scale), moment_.get());
        return own[0];
    }

    E* packed() const { return reinterpret_cast<E*>(packed_.get()); }
    static float base(float top) { return top == -INF ? 0 : top; }
    long first_head() const { return unit_.piece * shape_.heads; }
    float* lse() const { return p_.lse + (unit_.batch * p_.tokens + unit_.token) * p_.heads + first_head(); }
    float* mass() const {
        const long set = (unit_.batch * p_.tokens + unit_.token) * p_.sets + shape_.set(p_, unit_.piece);
        return p_.mass + set * p_.indices.slots;
    }

    const Attention& p_;
    const Shape shape_;
    Memory<E> memory_;
    Unit unit_;
    long most_;
    Buffer scores_, out_, packed_, left_, widened_, top_, total_, factor_, moment_, sums_, logs_;
    std::vector<float> tops_;
    std::vector<const E*> q_, columns_;
    std::vector<float*> rows_, outs_;
};

}  // namespace

void attend(const Attention& p) {
    const Blocks blocks{p.batch, p.tokens, 16};
    const long threads = useful_threads(p.threads, 2 * Work(p).rows * p.heads * p.q.width, blocks.count());
    with_elements(in_pairs(p), [&](auto element) {
        std::vector<std::unique_ptr<Forward<decltype(element)>>> workers;
        for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<Forward<decltype(element)>>(p));
        for_blocks(blocks, threads, [&](long number, const Block& block) { workers[number]->run(block); });
    });
}

}  // namespace csakit
