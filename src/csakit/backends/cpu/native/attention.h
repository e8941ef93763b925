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
    float* mass;       // [batch, tokens, sets, slots] or null
    double* d_sink;    // [heads], zeroed, or null
    int64_t batch, tokens, heads, groups, num_entries, value_width, threads;
    double scale;
};

namespace {

struct Shape {
    long pieces, heads, columns, width, value_width, step;

    explicit Shape(const Attention& p) {
        pieces = std::lcm(p.indices.data ? p.indices.sets : 1, p.groups);
        heads = p.heads / pieces, columns = padded(heads);
        width = p.q.width, value_width = p.value_width;
        // rows of a block: their scores fit the first-level cache, they themselves half of the second
        const long by_scores = 6144 / columns, by_rows = 65536 / padded(width);
        step = std::clamp<long>(std::min(by_scores, by_rows), 48, 384) / 12 * 12;
    }
    long set(const Attention& p, long piece) const { return piece * (p.indices.data ? p.indices.sets : 1) / pieces; }
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
class Memory {
  public:
    Memory(const Attention& p, const Shape& shape)
        : p_(p), shape_(shape), keys_{RowReader(p.kv), RowReader(p.entries)}, values_{RowReader(p.values), RowReader(p.entry_values)} {
        key.resize(shape.step), value.resize(shape.step);
    }

    std::vector<const float*> key, value;  // of the block fetched last

    // The rows of the windows of queries begin .. end.
    void keep_window(long batch, long begin, long end, long group) {
        long first = std::numeric_limits<long>::max(), stop = 0;
        for (long t = begin; t < end; ++t) {
            const long at = batch * p_.tokens + t, count = window_count(p_, at, t);
            if (!p_.ranges.valid[at] || !count) continue;
            first = std::min(first, window_first(p_, at)), stop = std::max(stop, window_first(p_, at) + count);
        }
        if (first >= stop) return;
        keys_[0].keep(batch, group, first, stop);
        if (p_.values.data) values_[0].keep(batch, group, first, stop);
    }

    void find(Unit& unit) const {
        const long at = unit.batch * p_.tokens + unit.token;
        unit.window_first = window_first(p_, at), unit.window = window_count(p_, at, unit.token);
        unit.entries.clear(), slots.clear();
        unit.entry_first = std::max(p_.ranges.entry_start[at], 0);
        const long stop = entry_stop(p_, at);
        unit.entry_count = std::max<long>(0, stop - unit.entry_first);
        if (!p_.indices.data || !p_.entries.data) return;
        const long first = (at * p_.indices.sets + shape_.set(p_, unit.piece)) * p_.indices.slots;
        for (long k = 0; k < p_.indices.slots && unit.entry_count; ++k) {
            const int64_t entry = p_.indices.at(first + k);
            if (entry >= unit.entry_first && entry < stop) unit.entries.push_back(int32_t(entry)), slots.push_back(k);
        }
        unit.entry_count = unit.entries.size();
    }

    void fetch(const Unit& unit, bool window, long first, long count) {
        const long group = shape_.group(p_, unit.piece);
        const auto read = [&](RowReader& reader, std::vector<const float*>& to) {
            if (window)
                reader.window(to.data(), unit.batch, group, unit.window_first + first, count);
            else
                reader.rows(to.data(), unit.batch, group, count, [&](long n) { return unit.entry(first + n); });
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

    mutable std::vector<long> slots;  // of the entries found last

  private:
    const Attention& p_;
    const Shape& shape_;
    RowReader keys_[2], values_[2];  // window, entries
};

template <class T>
void point(std::vector<T*>& to, T* first, long count, long stride) {
    to.resize(count);
    for (long i = 0; i < count; ++i) to[i] = first + i * stride;
}

class Forward {
  public:
    explicit Forward(const Attention& p) : p_(p), shape_(p), memory_(p, shape_) {
        const long h = shape_.columns;
        for (Buffer* x : {&top_, &total_, &factor_, &moment_}) x->floats(h);
        most_ = p.mass ? p.indices.slots : 0;
        scores_.floats((most_ + 2 * shape_.step) * h);
        out_.floats(h * padded(shape_.value_width));
        packed_.floats(h * shape_.width);
    }

    void run(const Block& block) {
        for (long piece = 0, kept = -1; piece < shape_.pieces; ++piece) {
            const long group = shape_.group(p_, piece);
            if (group != kept) memory_.keep_window(block.batch, block.begin, block.end, kept = group);
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
        pack_transposed(packed_.get(), q_.data(), shape_.heads, shape_.width, float(p_.scale));
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
            dots(count, memory_.key.data(), packed_.get(), shape_.heads, shape_.width, rows_.data(), 0);
            soften(weights, count, started);
            if (p_.mass && first >= unit_.window) tops_.insert(tops_.end(), top_.get(), top_.get() + shape_.columns);
            add_values(weights, count, started);
            started = true;
        });
        finish(started);
        if (p_.mass) log_mass();
    }

    // scores -> exp(score - top) with the top so far; what has been summed under an earlier top is scaled.
    void soften(float* scores, long count, bool started) {
        const long columns = shape_.columns;
        bool rescale = false;
        for (long h = 0; h < columns; h += LANES) {
            const Vec before = load(top_.get() + h);
            Vec top = before;
            for (long n = 0; n < count; ++n) top = greater(load(scores + n * columns + h), top);
            store(top_.get() + h, top);
            const Vec base = top == -INF ? Vec{} : top;
            const Vec factor = exponential(before - base);
            store(moment_.get() + h, factor);
            for (long i = 0; i < LANES; ++i) rescale |= factor[i] != 1.f;
            Vec total = load(total_.get() + h) * factor;
            for (long n = 0; n < count; ++n) {
                const Vec e = exponential(load(scores + n * columns + h) - base);
                store(scores + n * columns + h, e);
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
        point(columns_, weights, shape_.heads, 1);
        point(outs_, out_.get(), shape_.heads, padded(shape_.value_width));
        for_panels(shape_.value_width, [&](long first, long columns) {
            const Scattered b{memory_.value.data(), first};
            product(shape_.heads, columns_.data(), 0, shape_.columns, b, count, outs_.data(), first, columns, started);
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
        const long columns = shape_.columns, count = unit_.entry_count;
        const bool first = unit_.piece % (shape_.pieces / p_.indices.sets) == 0;  // a set's heads may have several KV heads: pieces add up
        if (first) std::fill_n(mass(), p_.indices.slots, -INF);
        sums_.floats(padded(count));
        const long tops = tops_.size() / columns;
        for (long block = 0; block < tops; ++block) {
            float* factor = tops_.data() + block * columns;  // its top, and from here on what the weights of the block lack
            for (long h = 0; h < columns; h += LANES) {
                const Vec top = load(factor + h), last = load(top_.get() + h);
                const Vec shift = (top == -INF ? Vec{} : top) - (last == -INF ? Vec{} : last);
                store(factor + h, exponential(shift) * load(factor_.get() + h));
            }
            for (long j = block * shape_.step; j < std::min(count, (block + 1) * shape_.step); ++j) {
                Vec total{};
                for (long h = 0; h < columns; h += LANES) total += load(scores_.get() + j * columns + h) * load(factor + h);
                sums_.get()[j] = sum(total);
            }
        }
        logs_.floats(padded(count));
        for (long j = 0; j < count; j += LANES) store(logs_.get() + j, logarithm(load(sums_.get() + j)));
        for (long j = 0; j < count; ++j) {
            const bool exact = !(sums_.get()[j] >= 1e8f * std::numeric_limits<float>::min());
            const float own = exact ? exact_log_mass(j) : logs_.get()[j];
            float& to = mass()[memory_.slots[j]];
            to = first ? own : log_of_sum(to, own);
        }
    }

    static float log_of_sum(float x, float y) {
        const double top = std::max(x, y);
        return top == -INF ? x + y : float(top + std::log(std::exp(x - top) + std::exp(y - top)));
    }

    float exact_log_mass(long j) {
        memory_.fetch(unit_, false, j, 1);
        float* c = scores_.get() + most_ * shape_.columns;
        dots(1, memory_.key.data(), packed_.get(), shape_.heads, shape_.width, &c, 0);
        double top = -INF, total = 0;
        for (long h = 0; h < shape_.heads; ++h) c[h] -= lse()[h], top = c[h] > top ? c[h] : top;
        if (top == -INF) {
            for (long h = 0; h < shape_.heads; ++h) total += c[h];  // NaN if one is
            return float(total);
        }
        for (long h = 0; h < shape_.heads; ++h) total += std::exp(c[h] - top);
        return float(top + std::log(total));
    }

    static float base(float top) { return top == -INF ? 0 : top; }
    long first_head() const { return unit_.piece * shape_.heads; }
    float* lse() const { return p_.lse + (unit_.batch * p_.tokens + unit_.token) * p_.heads + first_head(); }
    float* mass() const {
        const long set = (unit_.batch * p_.tokens + unit_.token) * p_.indices.sets + shape_.set(p_, unit_.piece);
        return p_.mass + set * p_.indices.slots;
    }

    const Attention& p_;
    const Shape shape_;
    Memory memory_;
    Unit unit_;
    long most_;
    Buffer scores_, out_, packed_, widened_, top_, total_, factor_, moment_, sums_, logs_;
    std::vector<float> tops_;
    std::vector<const float*> q_, columns_;
    std::vector<float*> rows_, outs_;
};

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

void attend(const Attention& p) {
    const Blocks blocks{p.batch, p.tokens, 16};
    const long threads = useful_threads(p.threads, 2 * Work(p).rows * p.heads * p.q.width, blocks.count());
    std::vector<std::unique_ptr<Forward>> workers;
    for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<Forward>(p));
    for_blocks(blocks, threads, [&](long number, const Block& block) { workers[number]->run(block); });
}

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
