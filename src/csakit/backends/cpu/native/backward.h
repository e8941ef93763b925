// The gradients of attention. Probabilities are made anew from lse.
#pragma once

#include "attention.h"

namespace csakit {
namespace {

template <class E>
class Backward {
  public:
    Backward(const Attention& p, const Shape& shape) : p_(p), shape_(shape), memory_(p, shape) {
        packed_q_.floats(shape.columns * padded(shape.width)), packed_d_out_.floats(shape.columns * padded(shape.value_width));
        dq_.floats(shape.columns * padded(shape.width));
        lse_.floats(shape.columns), delta_.floats(shape.columns);
        panel_.floats(2 * shape.columns * PANEL), left_.floats(shape.step * 2 * shape.columns);
    }

    // First phase: gradient of q, and the weights of the queries of a block: [n][scale * dlogit of H heads, probability of H heads].
    void run(const Block& block, Unit* units) {
        for (long piece = 0, kept = -1; piece < shape_.pieces; ++piece) {
            const long group = shape_.group(p_, piece);
            if (group != kept) memory_.keep(block.batch, block.begin, block.end, kept = group);
            for (long t = block.begin; t < block.end; ++t) {
                Unit& unit = units[(t - block.begin) * shape_.pieces + piece];
                unit.batch = block.batch, unit.token = t, unit.piece = piece;
                query(unit);
            }
        }
    }

    // Second phase: this thread's share of the gradients of one unit's rows.
    void add(const Unit& unit, const Share& share) {
        const bool shared = !p_.values.data && !p_.entry_values.data;
        const long h = shape_.columns, group = shape_.group(p_, unit.piece), head = unit.piece * shape_.heads;
        for (const bool values : {false, true}) {
            if (values && shared) continue;
            const Array &window = values ? p_.d_values : p_.d_kv, &entries = values ? p_.d_entry_values : p_.d_entries;
            share.for_parts(values ? shape_.value_width : shape_.width, [&](long part, auto for_each_panel) {
                targets_.collect(unit, elements<E>(2 * h), window, entries, group, part, share.parts);
                for_each_panel([&](long first, long columns) {
                    const Heads q{values ? nullptr : &p_.q, head, shape_.heads};
                    const Heads d_out{values || (shared && first < shape_.value_width) ? &p_.d_out : nullptr, head, shape_.heads};
                    E* const panel = reinterpret_cast<E*>(panel_.get());
                    const auto add = [&](const Heads& a, const Heads& b, long rows, long left_column) {
                        const long depth = pack_panel(panel, a, b, unit, rows, first, columns);
                        product(targets_.rows.size(), targets_.weights.data(), left_column, 1, Packed<E>{panel, columns}, depth,
                                targets_.rows.data(), first, columns, true);
                    };
                    const bool pairs = std::is_same_v<E, Pair>;  // of both
                    if (pairs || (shape_.heads == h && q.x)) {
                        add(q, d_out, h, 0);
                    } else {  // without the padding between them
                        if (q.x) add(q, {}, shape_.heads, 0);
                        if (d_out.x) add({}, d_out, shape_.heads, h);
                    }
                });
            });
        }
    }

  private:
    void query(Unit& unit) {
        const long h = shape_.columns, head = unit.piece * shape_.heads, at = unit.batch * p_.tokens + unit.token;
        unit.sink.assign(shape_.heads, 0);
        unit.window = unit.entry_count = 0;
        if (p_.ranges.valid[at]) memory_.find(unit);
        point(dqs_, dq_.get(), shape_.heads, padded(shape_.width));
        if (!unit.count()) {
            std::fill_n(dq_.get(), shape_.width, 0.f);
            for (long i = 0; i < shape_.heads; ++i) store_row(p_.d_q, unit.batch, unit.token, head + i, dq_.get(), 1);
            return;
        }
        head_rows(q_, widened_, p_.q, unit.batch, unit.token, head, shape_.heads);
        pack_for_dots(packed(packed_q_), q_.data(), shape_.heads, elements<E>(shape_.width));
        head_rows(d_out_, widened_, p_.d_out, unit.batch, unit.token, head, shape_.heads);
        pack_for_dots(packed(packed_d_out_), d_out_.data(), shape_.heads, elements<E>(shape_.value_width));
        for (long i = 0; i < h; ++i) {
            const float lse = i < shape_.heads ? p_.lse[at * p_.heads + head + i] : INF;
            lse_.get()[i] = lse == -INF ? INF : lse;  // nothing attended: probabilities 0, never NaN
            delta_.get()[i] = 0;
        }
        float* weights = unit.weights.floats(unit.count() * 2 * h);
        memory_.blocks(unit, [&](long first, long count) {
            point(rows_, weights + first * 2 * h, count, 2 * h);
            dots(count, memory_.key.data(), packed(packed_q_), shape_.heads, elements<E>(shape_.width), rows_.data(), h);
            dots(count, memory_.value.data(), packed(packed_d_out_), shape_.heads, elements<E>(shape_.value_width), rows_.data(), 0);
            probabilities(weights + first * 2 * h, count);
        });
        bool started = false;
        memory_.blocks(unit, [&](long first, long count) {
            float* block = weights + first * 2 * h;
            for (long n = 0; n < count; ++n)
                for (long i = 0; i < h; i += LANES) {
                    float* d = block + n * 2 * h + i;
                    store(d, load(d + h) * (load(d) - load(delta_.get() + i)) * float(p_.scale));
                }
            point(columns_, along_rows(packed(left_), block, 2 * h, count, h), shape_.heads, 1);
            for_panels(shape_.width, [&](long d, long columns) {
                const Rows<E> b{memory_.key.data(), d};
                product(shape_.heads, columns_.data(), 0, 2 * h, b, elements<E>(count), dqs_.data(), d, columns, started);
            });
            started = true;
        });
        along_columns<E>(weights, unit.count(), 2 * h);
        for (long i = 0; i < shape_.heads; ++i) {
            store_row(p_.d_q, unit.batch, unit.token, head + i, dqs_[i], 1);
            const float sink = p_.d_sink ? p_.sink[head + i] : INF;
            if (std::isfinite(sink)) unit.sink[i] = std::exp(sink - lse_.get()[i]) * delta_.get()[i];
        }
    }

    // products -> exp(scale * product - lse), and delta += sum of probability * (d_out . value)
    void probabilities(float* weights, long count) {
        const long h = shape_.columns;
        for (long i = 0; i < h; i += LANES) {
            const Vec lse = load(lse_.get() + i);
            Vec delta = load(delta_.get() + i);
            for (long n = 0; n < count; ++n) {
                float* d = weights + n * 2 * h + i;
                const Vec p = exponential(load(d + h) * float(p_.scale) - lse);
                store(d + h, p);
                delta += p * load(d);
            }
            store(delta_.get() + i, delta);
        }
    }

    static E* packed(const Buffer& buffer) { return reinterpret_cast<E*>(buffer.get()); }

    const Attention& p_;
    const Shape& shape_;
    Memory<E> memory_;
    Targets<E> targets_;
    Buffer left_, packed_q_, packed_d_out_, dq_, lse_, delta_, panel_, widened_;
    std::vector<const E*> q_, d_out_, columns_;
    std::vector<float*> rows_, dqs_;
};

}  // namespace

void attend_backward(const Attention& p) {
    const Shape shape(p);
    const Work work(p);
    const long threads = useful_threads(p.threads, 5 * work.rows * p.heads * p.q.width, p.batch * p.tokens);
    const bool values = p.values.data || p.entry_values.data;
    const Rounds rounds(p.batch, p.tokens, shape.pieces, work.most_rows * 2 * shape.columns * sizeof(float), threads);
    with_elements(in_pairs(p), [&](auto element) {
        std::vector<std::unique_ptr<Backward<decltype(element)>>> workers;
        for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<Backward<decltype(element)>>(p, shape));
        rounds.run(
            [&](long number, const Block& block, Unit* units) { workers[number]->run(block, units); },
            [&](long number, const Unit& unit) {
                workers[number]->add(unit, Share(number, threads, shape.width + (values ? shape.value_width : 0)));
            },
            [&](const Unit& unit) {
                for (long h = 0; p.d_sink && h < shape.heads; ++h) p.d_sink[unit.piece * shape.heads + h] -= unit.sink[h];
            });
    });
}

}  // namespace csakit
