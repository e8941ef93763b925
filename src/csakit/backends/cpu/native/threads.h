// Threads of one call. They are started for the call and joined in it: no pool, no second OpenMP runtime beside torch's.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace csakit {

class Barrier {
  public:
    explicit Barrier(long threads) : threads_(threads), waiting_(0), turn_(0) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const long turn = turn_;
        if (++waiting_ == threads_) {
            waiting_ = 0, ++turn_;
            all_.notify_all();
        } else {
            all_.wait(lock, [&] { return turn != turn_; });
        }
    }

  private:
    const long threads_;
    long waiting_, turn_;
    std::mutex mutex_;
    std::condition_variable all_;
};

// body(number) on `threads` threads; the caller's is number 0.
template <class F>
void in_parallel(long threads, F body) {
    std::vector<std::thread> others;
    others.reserve(threads - 1);
    for (long number = 1; number < threads; ++number) others.emplace_back([&body, number] { body(number); });
    body(0);
    for (auto& thread : others) thread.join();
}

// How many of the threads there are a call should use: each needs enough multiplications to be worth its start.
inline long useful_threads(long threads, long multiplications, long blocks) {
    const long worth = 1l << 22;
    return std::max(1l, std::min({threads, multiplications / worth, blocks}));
}

// Consecutive queries of one batch row.
struct Block {
    long batch, begin, end;
};

struct Blocks {
    long batch, tokens, size;
    long per_row() const { return (tokens + size - 1) / size; }
    long count() const { return batch * per_row(); }
    Block operator[](long number) const {
        const long begin = number % per_row() * size;
        return {number / per_row(), begin, std::min(begin + size, tokens)};
    }
};

// body(thread, block) for every block, whichever thread is free.
template <class F>
void for_blocks(const Blocks& blocks, long threads, F body) {
    std::atomic<long> next{0};
    in_parallel(threads, [&](long number) {
        for (long block; (block = next++) < blocks.count();) body(number, blocks[block]);
    });
}

}  // namespace csakit
