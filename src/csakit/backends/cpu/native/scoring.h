// Index scores, the greatest of them, and their gradients.
//
//   score[t][e] = scale * sum_i weight[t][i] * relu(q[t][i] . k[e])      over the I heads of a set
//
// Keys are packed so that vectors run over keys: the weighted sum over heads then happens in the registers that hold the products, and
// no score of a single head is ever stored.

#pragma once

#include "arrays.h"
#include "gradients.h"
#include "product.h"
#include "threads.h"

namespace csakit {

struct Scoring {
    Array q, k;            // [batch, tokens, heads, width], [batch, entries, 1, width]
    Array d_q, d_k;        // d_k: float32, zeroed, width padded to whole vectors
    const float* weights;  // [batch, tokens, heads] or null: ones
    float* d_weights;
    const float* d_scores;  // [batch, tokens, sets, slots]
    Indices indices;        // of d_scores; null: slots are all entries
    Ranges ranges;
    int32_t* chosen;  // [batch, tokens, sets, topk]; null: every score goes to scores [batch, tokens, sets, entries]
    float* scores;
    int64_t batch, tokens, heads, entries, sets, topk, relu, threads;
    double scale;
};

namespace {

struct Span {  // entries begin .. end
    long begin, end;
    long count() const { return std::max<long>(0, end - begin); }
};

Span visible(const Scoring& p, long batch, long token) {
    const long at = batch * p.tokens + token;
    if (!p.ranges.valid[at]) return {0, 0};
    return {std::max(p.ranges.entry_start[at], 0), std::min<long>(p.ranges.entry_stop[at], p.entries)};
}

struct ScoreWork {
    long most_rows = 0, rows = 0;  // of one query, of all
    explicit ScoreWork(const Scoring& p) {
        for (long at = 0; at < p.batch * p.tokens; ++at) {
            const long count = visible(p, at / p.tokens, at % p.tokens).count();
            const long own = p.indices.data ? std::min<long>(count, p.indices.slots) : count;
            most_rows = std::max(most_rows, own), rows += own;
        }
    }
};

template <long M, long N, class E>
__attribute__((noinline)) void weighted_tile(const E* const* q, const Packed<E>& keys, long width, const float* weights, bool relu,
                                             Vec (&score)[N]) {
    Vec total[M][N];
    accumulate<M, N>(total, q, 0, 1, keys, width);
    for (long m = 0; m < M; ++m)
        for (long n = 0; n < N; ++n) {
            const Vec x = total[m][n];
            score[n] += (relu ? (x < 0.f ? Vec{} : x) : x) * weights[m];
        }
}

template <long M, long N, class E>
void weighted_tile_of(long rows, const E* const* q, const Packed<E>& keys, long width, const float* weights, bool relu, Vec (&score)[N]) {
    if (rows == M)
        weighted_tile<M, N>(q, keys, width, weights, relu, score);
    else if constexpr (M > 1)
        weighted_tile_of<M - 1, N>(rows, q, keys, width, weights, relu, score);
}

// Scores of N vectors of keys for the heads of one set, before the scale.
template <long N, class E>
void score_keys(long heads, const E* const* q, const Packed<E>& keys, long width, const float* weights, bool relu, float* to) {
    Vec score[N] = {};
    const long tiles = (heads + TILE_ROWS - 1) / TILE_ROWS;
    for (long t = 0, m = 0; t < tiles; ++t) {
        const long count = heads / tiles + (t < heads % tiles);
        weighted_tile_of<TILE_ROWS, N>(count, q + m, keys, width, weights + m, relu, score);
        m += count;
    }
    for (long n = 0; n < N; ++n) store(to + n * LANES, score[n]);
}

// Whether everything is bfloat16 and falls into pairs.
inline bool in_pairs(const Scoring& p) { return p.q.bfloat && p.k.bfloat && p.k.width % 2 == 0; }

template <class E>
class Scorer {
  public:
    explicit Scorer(const Scoring& p)
        : p_(p), heads_(p.heads / p.sets), width_(elements<E>(p.k.width)), ones_(heads_, 1.f), keys_(p.k), rows_(keys_at_once) {}

    void run(const Block& block) {
        Span all{std::numeric_limits<long>::max(), 0};
        for (long t = block.begin; t < block.end; ++t) {
            const Span own = visible(p_, block.batch, t);
            if (own.count()) all = {std::min(all.begin, own.begin), std::max(all.end, own.end)};
        }
        const long stride = padded(all.count()) + PANEL;
        scores_.floats((block.end - block.begin) * p_.sets * stride);
        packed_.floats(keys_at_once * p_.k.width);
        for (long first = all.begin; first < all.end; first += keys_at_once) {
            const long count = std::min(keys_at_once, all.end - first);
            keys_.rows(rows_.data(), block.batch, 0, count, [&](long n) { return first + n; });
            pack_transposed(packed(), rows_.data(), count, width_);
            for (long t = block.begin; t < block.end; ++t) {
                const Span own = visible(p_, block.batch, t);
                if (own.begin >= first + count || own.end <= first || !own.count()) continue;
                head_rows(q_, widened_, p_.q, block.batch, t, 0, p_.heads);
                for (long set = 0; set < p_.sets; ++set) {
                    float* to = scores_.get() + ((t - block.begin) * p_.sets + set) * stride + first - all.begin;
                    score(own, first, count, block.batch * p_.tokens + t, set, to);
                }
            }
        }
        for (long t = block.begin; t < block.end; ++t)
            for (long set = 0; set < p_.sets; ++set) {
                const Span own = visible(p_, block.batch, t);
                float* scores = scores_.get() + ((t - block.begin) * p_.sets + set) * stride + (own.count() ? own.begin - all.begin : 0);
                for (long n = 0; n < own.count(); ++n) scores[n] *= float(p_.scale);
                const long at = (block.batch * p_.tokens + t) * p_.sets + set;
                if (p_.chosen)
                    choose(scores, own, p_.chosen + at * p_.topk, p_.scores + at * p_.topk);
                else
                    std::copy_n(scores, own.count(), std::fill_n(p_.scores + at * p_.entries, p_.entries, -INF) - p_.entries + own.begin);
            }
    }

  private:
    static constexpr long keys_at_once = 128;

    void score(const Span& own, long first, long count, long at, long set, float* to) {
        const float* weights = p_.weights ? p_.weights + at * p_.heads + set * heads_ : ones_.data();
        for_panels(count, [&](long n, long columns) {
            if (own.begin >= first + n + columns || own.end <= first + n) return;
            const Packed<E> panel{packed() + n * width_, columns};
            const auto f = columns == PANEL ? score_keys<2, E> : score_keys<1, E>;
            f(heads_, q_.data() + set * heads_, panel, width_, weights, p_.relu, to + n);
        });
    }

    // The topk greatest, ties to the lowest entry, ascending. One number orders both: the bits of the score upside down, then the entry.
    void choose(const float* scores, const Span& own, int32_t* chosen, float* values) {
        const long count = own.count();
        std::fill_n(chosen, p_.topk, -1);
        std::fill_n(values, p_.topk, -INF);
        if (count <= p_.topk) {
            std::iota(chosen, chosen + count, int32_t(own.begin));
            std::copy_n(scores, count, values);
            return;
        }
        const long listed = shortlist(scores, count);
        order_.resize(listed);
        for (long i = 0; i < listed; ++i) order_[i] = rank(scores[listed_[i]], listed_[i]);
        std::nth_element(order_.begin(), order_.begin() + p_.topk - 1, order_.end());
        const uint64_t last = order_[p_.topk - 1];
        for (long i = 0, slot = 0; i < listed; ++i) {
            const int32_t n = listed_[i];
            if (rank(scores[n], n) <= last) chosen[slot] = int32_t(own.begin) + n, values[slot++] = scores[n];
        }
    }

    // Fills listed_ with numbers below count, ascending, the topk greatest among them; how many there are. A sample says from where on a
    // score is likely to be among the greatest; if that was too high all are listed.
    long shortlist(const float* scores, long count) {
        const long step = 16, wanted = p_.topk + p_.topk / 4 + 8 * step;
        listed_.resize(count);
        if (count >= 2 * wanted) {
            order_.clear();
            for (long n = 0; n < count; n += step) order_.push_back(rank(scores[n], n));
            std::nth_element(order_.begin(), order_.begin() + wanted / step, order_.end());
            const float least = scores[uint32_t(order_[wanted / step])];
            long listed = 0;
            for (long n = 0; n < count; ++n) {
                listed_[listed] = int32_t(n);
                listed += !(scores[n] < least);  // NaN is listed
            }
            if (listed >= p_.topk) return listed;
        }
        std::iota(listed_.begin(), listed_.end(), 0);
        return count;
    }

    static uint64_t rank(float score, long entry) {
        score += 0.f;  // -0 equals 0
        uint32_t bits;
        std::memcpy(&bits, &score, 4);
        bits = score != score ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;  // NaN is greatest, so that it shows in the loss
        return uint64_t(~bits) << 32 | uint64_t(entry);
    }

    E* packed() const { return reinterpret_cast<E*>(packed_.get()); }

    const Scoring& p_;
    const long heads_, width_;  // width in elements
    const std::vector<float> ones_;
    RowReader<E> keys_;
    Buffer scores_, packed_, widened_;
    std::vector<const E*> rows_, q_;
    std::vector<uint64_t> order_;
    std::vector<int32_t> listed_;
};

template <class E>
class ScoreBackward {
  public:
    explicit ScoreBackward(const Scoring& p)
        : p_(p), heads_(p.heads / p.sets), depth_(padded(elements<E>(heads_))), columns_(depth_ * (1 + in_pairs)), keys_(p.k) {
        packed_.floats(columns_ * padded(p.k.width)), panel_.floats(columns_ * PANEL), dq_.floats(columns_ * padded(p.k.width));
        weights_.floats(columns_), d_weights_.floats(columns_);
        rows_.resize(step + 1), left_.floats(step * columns_);
    }

    // First phase: gradients of q and of the weights, and the gradients of the products [n][heads] of the queries of a block.
    void run(const Block& block, Unit* units) {
        for (long t = block.begin; t < block.end; ++t)
            for (long set = 0; set < p_.sets; ++set, ++units) {
                units->batch = block.batch, units->token = t, units->piece = set;
                query(*units);
            }
    }

    void add(const Unit& unit, const Share& share) {
        const long head = unit.piece * heads_, first_half = in_pairs ? std::min(heads_, depth_) : heads_;
        const long depth = in_pairs ? depth_ : heads_;  // the padding of heads is left out
        share.for_parts(p_.k.width, [&](long part, auto for_each_panel) {
            targets_.collect(unit, depth_, p_.d_k, p_.d_k, 0, part, share.parts);
            for_each_panel([&](long first, long columns) {
                E* const panel = reinterpret_cast<E*>(panel_.get());
                const Heads a{&p_.q, head, first_half}, b{in_pairs ? &p_.q : nullptr, head + first_half, heads_ - first_half};
                pack_panel(panel, a, b, unit, depth, first, columns);
                product(targets_.rows.size(), targets_.weights.data(), 0, 1, Packed<E>{panel, columns}, depth, targets_.rows.data(), first,
                        columns, true);
            });
        });
    }

  private:
    static constexpr long step = 96;
    static constexpr bool in_pairs = std::is_same_v<E, Pair>;

    void find(Unit& unit) {
        const Span own = visible(p_, unit.batch, unit.token);
        const long slots = p_.indices.data ? p_.indices.slots : p_.entries;
        const long first = ((unit.batch * p_.tokens + unit.token) * p_.sets + unit.piece) * slots;
        unit.entries.clear(), slope_.clear();
        unit.entry_first = own.begin;
        for (long k = 0; p_.indices.data && k < slots && own.count(); ++k) {
            const int64_t entry = p_.indices.at(first + k);
            if (entry < own.begin || entry >= own.end) continue;
            unit.entries.push_back(int32_t(entry));
            slope_.push_back(p_.d_scores[first + k] * float(p_.scale));
        }
        for (long e = own.begin; !p_.indices.data && e < own.end; ++e) slope_.push_back(p_.d_scores[first + e] * float(p_.scale));
        unit.entry_count = slope_.size();
    }

    void query(Unit& unit) {
        const long at = unit.batch * p_.tokens + unit.token, head = unit.piece * heads_, width = p_.k.width;
        find(unit);
        std::fill_n(d_weights_.get(), columns_, 0.f);
        std::fill_n(weights_.get(), columns_, 0.f);
        for (long i = 0; i < heads_; ++i) weights_.get()[i] = p_.weights ? p_.weights[at * p_.heads + head + i] : 1;
        dqs_.resize(heads_);
        for (long i = 0; i < heads_; ++i) dqs_[i] = dq_.get() + i * padded(width);
        if (unit.count()) {
            head_rows(q_, widened_, p_.q, unit.batch, unit.token, head, heads_);
            pack_for_dots(packed(), q_.data(), heads_, elements<E>(width));
        } else {
            std::fill_n(dq_.get(), heads_ * padded(width), 0.f);
        }
        float* products = unit.weights.floats(unit.count() * columns_);
        for (long first = 0; first < unit.count(); first += step) {
            const long count = std::min(step, unit.count() - first);
            float* block = products + first * columns_;
            keys_.rows(rows_.data(), unit.batch, 0, count, [&](long n) { return unit.entry(first + n); });
            rows_[count] = rows_[count - 1];
            to_.resize(count);
            for (long n = 0; n < count; ++n) to_[n] = block + n * columns_;
            dots(count, rows_.data(), packed(), heads_, elements<E>(width), to_.data(), 0);
            differentiate(block, slope_.data() + first, count);
            const E* left = along_rows(reinterpret_cast<E*>(left_.get()), block, columns_, count, padded(heads_));
            from_.resize(heads_);
            for (long i = 0; i < heads_; ++i) from_[i] = left + i;
            for_panels(width, [&](long d, long columns) {
                const Rows<E> b{rows_.data(), d};
                product(heads_, from_.data(), 0, columns_, b, elements<E>(count), dqs_.data(), d, columns, first > 0);
            });
        }
        along_columns<E>(products, unit.count(), columns_);
        for (long i = 0; i < heads_; ++i) store_row(p_.d_q, unit.batch, unit.token, head + i, dqs_[i], 1);
        if (p_.d_weights) std::copy_n(d_weights_.get(), heads_, p_.d_weights + at * p_.heads + head);
    }

    // products -> their gradients; relu'(0) = 0
    void differentiate(float* products, const float* slope, long count) {
        for (long i = 0; i < columns_; i += LANES) {
            const Vec weight = load(weights_.get() + i);
            Vec d_weight = load(d_weights_.get() + i);
            for (long n = 0; n < count; ++n) {
                const Vec x = load(products + n * columns_ + i), g = weight * slope[n];
                if (p_.relu) {
                    d_weight += (x <= 0.f ? Vec{} : x) * slope[n];
                    store(products + n * columns_ + i, x <= 0.f ? Vec{} : g);
                } else {
                    d_weight += x * slope[n];
                    store(products + n * columns_ + i, g);
                }
            }
            store(d_weights_.get() + i, d_weight);
        }
    }

    E* packed() const { return reinterpret_cast<E*>(packed_.get()); }

    const Scoring& p_;
    const long heads_, depth_, columns_;  // depth: what weights of an entry hold, in elements
    RowReader<E> keys_;
    Targets<E> targets_;
    Buffer packed_, panel_, left_, dq_, weights_, d_weights_, widened_;
    std::vector<float> slope_;
    std::vector<const E*> rows_, q_, from_;
    std::vector<float*> to_, dqs_;
};

}  // namespace

void score(const Scoring& p) {
    const Blocks blocks{p.batch, p.tokens, 16};
    const long threads = useful_threads(p.threads, ScoreWork(p).rows * p.heads * p.k.width, blocks.count());
    with_elements(in_pairs(p), [&](auto element) {
        std::vector<std::unique_ptr<Scorer<decltype(element)>>> workers;
        for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<Scorer<decltype(element)>>(p));
        for_blocks(blocks, threads, [&](long number, const Block& block) { workers[number]->run(block); });
    });
}

void score_backward(const Scoring& p) {
    const ScoreWork work(p);
    const long threads = useful_threads(p.threads, 3 * work.rows * p.heads * p.k.width, p.batch * p.tokens);
    const Rounds rounds(p.batch, p.tokens, p.sets, work.most_rows * padded(p.heads / p.sets) * sizeof(float), threads);
    with_elements(in_pairs(p), [&](auto element) {
        std::vector<std::unique_ptr<ScoreBackward<decltype(element)>>> workers;
        for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<ScoreBackward<decltype(element)>>(p));
        rounds.run([&](long number, const Block& block, Unit* units) { workers[number]->run(block, units); },
                   [&](long number, const Unit& unit) { workers[number]->add(unit, Share(number, threads, p.k.width)); },
                   [](const Unit&) {});
    });
}

}  // namespace csakit
