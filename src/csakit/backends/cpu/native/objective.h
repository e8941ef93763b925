// The objective of the indexer, row by row: KL(teacher || student) in nats, and its gradient for the scores.
//
//   teacher = softmax(log-mass), student = softmax(scores), both over the slots whose score is not -inf
//   gradient = factor / sets * (student - teacher)
#pragma once

#include "arrays.h"
#include "threads.h"

namespace csakit {

struct Objective {
    const float *scores, *mass;  // [rows, sets, slots]
    const uint8_t* valid;        // [rows]
    const float* factor;         // [rows], or null: no gradient
    float *kl, *gradient;        // [rows], [rows, sets, slots]
    int64_t rows, sets, slots, threads;
};

namespace {

class Divergences {
  public:
    explicit Divergences(const Objective& p) : p_(p), width_(padded(p.slots)) {
        for (Buffer* x : {&scores_, &mass_, &student_, &teacher_}) x->floats(width_);
    }

    void run(long row) {
        double total = 0;
        for (long set = 0; set < p_.sets; ++set) {
            const long at = (row * p_.sets + set) * p_.slots;
            if (p_.valid[row] && softmax(at)) {
                total += divergence();
                if (p_.factor) differentiate(at, p_.factor[row] / float(p_.sets));
            } else if (p_.factor) {
                std::fill_n(p_.gradient + at, p_.slots, 0.f);
            }
        }
        p_.kl[row] = float(total / double(p_.sets));
    }

  private:
    // Scores and log-mass less their greatest, and e to the power of that; false where there is no teacher.
    bool softmax(long at) {
        std::memcpy(scores_.get(), p_.scores + at, p_.slots * sizeof(float));
        std::memcpy(mass_.get(), p_.mass + at, p_.slots * sizeof(float));
        for (long j = p_.slots; j < width_; ++j) scores_.get()[j] = mass_.get()[j] = -INF;
        for (long j = 0; j < width_; j += LANES) {
            const Vec mass = load(mass_.get() + j);
            store(mass_.get() + j, load(scores_.get() + j) == -INF ? every(-INF) : mass);
        }
        student_total_ = exponentials(student_.get(), scores_.get());
        teacher_total_ = exponentials(teacher_.get(), mass_.get());
        return teacher_total_ != 0;
    }

    double exponentials(float* to, float* from) const {
        Vec most = every(-INF);
        for (long j = 0; j < width_; j += LANES) most = greater(load(from + j), most);
        float top = greatest(most);
        if (top == -INF) top = 0;
        return in_runs([&](long j) {
            const Vec x = load(from + j) - top, e = exponential(x);
            store(from + j, x);
            store(to + j, e);
            return e;
        });
    }

    double divergence() const {
        const Vec gap = every(float(std::log(teacher_total_) - std::log(student_total_)));
        const double total = in_runs([&](long j) {
            const Vec share = load(teacher_.get() + j), term = share * (load(mass_.get() + j) - load(scores_.get() + j) - gap);
            return share == 0.f ? Vec{} : term;  // 0 ln 0 = 0
        });
        return total / teacher_total_;
    }

    void differentiate(long at, float factor) {
        const Vec student = every(float(factor / student_total_)), teacher = every(float(factor / teacher_total_));
        for (long j = 0; j < width_; j += LANES) {
            const Vec x = load(student_.get() + j) * student - load(teacher_.get() + j) * teacher;
            store(student_.get() + j, x);
        }
        std::memcpy(p_.gradient + at, student_.get(), p_.slots * sizeof(float));
    }

    // The sum of f(j) over vectors j: runs in float, the whole in double.
    template <class F>
    double in_runs(F f) const {
        const long run = 64 * LANES;
        double total = 0;
        for (long first = 0; first < width_; first += run) {
            Vec part{};
            for (long j = first; j < std::min(first + run, width_); j += LANES) part += f(j);
            total += sum(part);
        }
        return total;
    }

    const Objective& p_;
    const long width_;
    double student_total_ = 0, teacher_total_ = 0;
    Buffer scores_, mass_, student_, teacher_;
};

}  // namespace

void objective(const Objective& p) {
    const Blocks blocks{1, p.rows, 16};
    const long threads = useful_threads(p.threads, p.rows * p.sets * p.slots * 64, blocks.count());
    std::vector<std::unique_ptr<Divergences>> workers;
    for (long i = 0; i < threads; ++i) workers.push_back(std::make_unique<Divergences>(p));
    for_blocks(blocks, threads, [&](long number, const Block& block) {
        for (long row = block.begin; row < block.end; ++row) workers[number]->run(row);
    });
}

}  // namespace csakit
