// The gradients of attention. Probabilities are made anew from lse.
#pragma once

#include "attention.h"

namespace csakit {
namespace {

class Backward {
  public:
    Backward(const Attention& p, const Shape& shape) : p_(p), shape_(shape), memory_(p, shape) {
        packed_q_.floats(shape.columns * shape.width), packed_d_out_.floats(shape.columns * shape.value_width);
        dq_.floats(shape.columns * padded(shape.width));
        lse_.floats(shape.columns), delta_.floats(shape.columns);
        panel_.floats(2 * shape.columns * PANEL);
    }

    // First phase: gradient of q, and the weights of the queries of a block: [n][dlogit of H heads, probability of H heads].
    void run(const Block& block, Unit* units) {
        for (long piece = 0, kept = -1; piece < shape_.pieces; ++piece) {
            const long group = shape_.group(p_, piece);
            if (group != kept) memory_.keep_window(block.batch, block.begin, block.end, kept = group);
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
                targets_.collect(unit, 2 * h, window, entries, group, part, share.parts);
                for_each_panel([&](long first, long columns) {
                    float* panel = panel_.get();
                    if (!values) panel = pack_panel(panel, p_.q, unit, head, shape_.heads, first, columns, float(p_.scale));
                    if (values || (shared && first < shape_.value_width))
                        panel = pack_panel(panel, p_.d_out, unit, head, shape_.heads, first, columns, 1);
                    const long depth = (panel - panel_.get()) / columns;
                    product(targets_.rows.size(), targets_.weights.data(), values ? h : 0, 1, Packed{panel_.get(), columns}, depth,
                            targets_.rows.data(), first, columns, true);
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
        pack_transposed(packed_q_.get(), q_.data(), shape_.heads, shape_.width, float(p_.scale));
        head_rows(d_out_, widened_, p_.d_out, unit.batch, unit.token, head, shape_.heads);
        pack_transposed(packed_d_out_.get(), d_out_.data(), shape_.heads, shape_.value_width, 1);
        for (long i = 0; i < h; ++i) {
            const float lse = i < shape_.heads ? p_.lse[at * p_.heads + head + i] : INF;
            lse_.get()[i] = lse == -INF ? INF : lse;  // nothing attended: probabilities 0, never NaN
            delta_.get()[i] = 0;
        }
        float* weights = unit.weights.floats(unit.count() * 2 * h);
        memory_.blocks(unit, [&](long first, long count) {
            point(rows_, weights + first * 2 * h, count, 2 * h);
            dots(count, memory_.key.data(), packed_q_.get(), shape_.heads, shape_.width, rows_.data(), h);
            dots(count, memory_.value.data(), packed_d_out_.get(), shape_.heads, shape_.value_width, rows_.data(), 0);
            probabilities(weights + first * 2 * h, count);
        });
        bool started = false;
        memory_.blocks(unit, [&](long first, long count) {
            float* block = weights + first * 2 * h;
            for (long n = 0; n < count; ++n)
                for (long i = 0; i < h; i += LANES) {
                    float* d = block + n * 2 * h + i;
                    store(d, load(d + h) * (load(d) - load(delta_.get() + i)));
                }
            point(columns_, static_cast<const float*>(block), shape_.heads, 1);
            for_panels(shape_.width, [&](long d, long columns) {
                const Scattered b{memory_.key.data(), d};
                product(shape_.heads, columns_.data(), 0, 2 * h, b, count, dqs_.data(), d, columns, started);
            });
            started = true;
        });
        for (long i = 0; i < shape_.heads; ++i) {
            store_row(p_.d_q, unit.batch, unit.token, head + i, dqs_[i], float(p_.scale));
            const float sink = p_.d_sink ? p_.sink[head + i] : INF;
            if (std::isfinite(sink)) unit.sink[i] = std::exp(sink - lse_.get()[i]) * delta_.get()[i];
        }
    }

    // logits -> exp(logit - lse), and delta += sum of probability * (d_out . value)
    void probabilities(float* weights, long count) {
        const long h = shape_.columns;
        for (long i = 0; i < h; i += LANES) {
            const Vec lse = load(lse_.get() + i);
            Vec delta = load(delta_.get() + i);
            for (long n = 0; n < count; ++n) {
                float* d = weights + n * 2 * h + i;
                const Vec p = exponential(load(d + h) - lse);
                store(d + h, p);
                delta += p * load(d);
            }
            store(delta_.get() + i, delta);
        }
    }

    const Attention& p_;
    const Shape& shape_;
    Memory memory_;
    Targets targets_;
    Buffer packed_q_, packed_d_out_, dq_, lse_, delta_, panel_, widened_;
    std::vector<const float*> q_, d_out_, columns_;
    std::vector<float*> rows_, dqs_;
};

}  // namespace

void attend_backward(const Attention& p) {
    const Shape shape(p);
    const Work work(p);
    const long threads = useful_threads(p.threads, 5 * work.rows * p.heads * p.q.width, p.batch * p.tokens);
    const bool values = p.values.data || p.entry_values.data;
    const Rounds rounds(p.batch, p.tokens, shape.pieces, work.most_rows * 2 * shape.columns * sizeof(float), threads);
    std::vector<std::unique_ptr<Backward>> workers;
    for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<Backward>(p, shape));
    rounds.run(
        [&](long number, const Block& block, Unit* units) { workers[number]->run(block, units); },
        [&](long number, const Unit& unit) {
            workers[number]->add(unit, Share(number, threads, shape.width + (values ? shape.value_width : 0)));
        },
        [&](const Unit& unit) {
            for (long h = 0; p.d_sink && h < shape.heads; ++h) p.d_sink[unit.piece * shape.heads + h] -= unit.sink[h];
        });
}

}  // namespace csakit
