// What a matrix product multiplies at a step of its depth: a float, or a pair of bfloat16 on processors that multiply and add pairs at
// twice the rate (AVX512-BF16). Elsewhere bfloat16 is widened: made of other instructions, pairs would be slower than floats.
#pragma once

#include <type_traits>

#include "simd.h"

namespace csakit {

#if defined(__AVX512BF16__) || defined(CSAKIT_EMULATE)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

struct __attribute__((packed, aligned(2), may_alias)) Pair {
    uint32_t bits;  // the first in the low half
};

typedef int32_t MemoryIntVec __attribute__((vector_size(LANES * 4), aligned(2), may_alias));

inline Vec load_elements(const float* p) { return load(p); }
inline IntVec load_elements(const Pair* p) { return *reinterpret_cast<const MemoryIntVec*>(p); }
inline void store_elements(Pair* p, IntVec x) { *reinterpret_cast<MemoryIntVec*>(p) = x; }

inline Vec multiply_add(Vec total, float left, Vec right) { return total + left * right; }

inline Vec multiply_add(Vec total, Pair left, IntVec right) {
    const IntVec both = IntVec{} + int32_t(left.bits);
#ifdef __AVX512BF16__
    return reinterpret_cast<Vec>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(total), reinterpret_cast<__m512bh>(both), reinterpret_cast<__m512bh>(right)));
#else
    const IntVec high = IntVec{} + int32_t(0xffff0000);
    total += reinterpret_cast<Vec>(both << 16) * reinterpret_cast<Vec>(right << 16);
    return total + reinterpret_cast<Vec>(both & high) * reinterpret_cast<Vec>(right & high);
#endif
}

// bfloat16 of floats, to nearest and ties to even, in the low halves; the high halves are 0.
inline IntVec rounded(Vec x) {
#ifdef __AVX512BF16__
    return reinterpret_cast<IntVec>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)))));
#else
    const IntVec bits = reinterpret_cast<IntVec>(x);
    const IntVec near = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    return x == x ? near : IntVec{} + 0x7fc0;
#endif
}

inline IntVec paired(IntVec first, IntVec second) { return first | (second << 16); }

template <class E>
constexpr long elements(long numbers) {  // that hold so many numbers
    return std::is_same_v<E, Pair> ? (numbers + 1) / 2 : numbers;
}

// f(an element): whichever a call works with.
template <class F>
void with_elements([[maybe_unused]] bool pairs, F f) {
    if constexpr (PAIRS)
        if (pairs) return f(Pair{});
    f(0.f);
}

// Floats [count][columns], rows `stride` apart, as the left operand of sums over count: pairs are of rows 2n and 2n + 1, or 0.
inline const float* along_rows(float*, const float* from, long, long, long) { return from; }

inline const Pair* along_rows(Pair* to, const float* from, long stride, long count, long columns) {
    for (long n = 0; n < count; n += 2)
        for (long h = 0; h < columns; h += LANES) {
            const IntVec second = n + 1 < count ? rounded(load(from + (n + 1) * stride + h)) : IntVec{};
            store_elements(to + n / 2 * stride + h, paired(rounded(load(from + n * stride + h)), second));
        }
    return to;
}

// Floats [count][columns] as the left operand of sums over columns, in place: pairs are of columns h and h + columns / 2.
template <class E>
void along_columns([[maybe_unused]] float* floats, [[maybe_unused]] long count, [[maybe_unused]] long columns) {
    if constexpr (std::is_same_v<E, Pair>) {
        const long half = columns / 2;
        Pair* to = reinterpret_cast<Pair*>(floats);
        for (const float* row = floats; row < floats + count * columns; row += columns)
            for (long h = 0; h < half; h += LANES, to += LANES)
                store_elements(to, paired(rounded(load(row + h)), rounded(load(row + half + h))));
    }
}

}  // namespace csakit
