// Vectors of floats, and the few functions on them that the kernels need. AVX2 has 16 registers of 8 floats, AVX512 32 of 16.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace csakit {

#if defined(__AVX512F__) || defined(CSAKIT_EMULATE)
constexpr long LANES = 16, TILE_ROWS = 12;
#else
constexpr long LANES = 8, TILE_ROWS = 6;
#endif
constexpr long PANEL = 2 * LANES;  // columns of a register tile: TILE_ROWS x 2 accumulators leave room for operands
constexpr float INF = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));
typedef uint16_t MemoryHalfVec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef float MemoryVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // anywhere in memory

inline Vec load(const float* p) { return *reinterpret_cast<const MemoryVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<MemoryVec*>(p) = x; }
inline void store_half_words(uint16_t* p, IntVec x) { *reinterpret_cast<MemoryHalfVec*>(p) = __builtin_convertvector(x, HalfVec); }
inline Vec every(float x) { return x - Vec{}; }
inline long padded(long n) { return (n + LANES - 1) / LANES * LANES; }
inline bool any(IntVec x) {
    int32_t all = 0;
    for (long i = 0; i < LANES; ++i) all |= x[i];
    return all != 0;
}
inline float greatest(Vec x) {  // not NaN, if greater has made x
    float top = x[0];
    for (long i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
    return top;
}

// x[0], .. x[7] -> their sums
inline __m256 sums_of_8(const __m256* x) {
    __m256 pair[4], quad[2];
    for (int i = 0; i < 4; ++i) {
        const __m256 a = x[2 * i], b = x[2 * i + 1];
        pair[i] = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 2; ++i) {
        const __m256 a = pair[2 * i], b = pair[2 * i + 1];
        quad[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20), _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
}

// What has instructions of its own:
//   greater, smaller   y where either is NaN
//   sum                of the lanes
//   sums               lane i is the sum of x[i]
//   half_words         LANES numbers of 16 bits as numbers of 32
#if defined(__AVX512F__)
inline Vec greater(Vec x, Vec y) { return reinterpret_cast<Vec>(_mm512_max_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y))); }
inline Vec smaller(Vec x, Vec y) { return reinterpret_cast<Vec>(_mm512_min_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y))); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x)); }
inline Vec sums(const Vec (&x)[LANES]) {
    __m256 half[16];
    for (int i = 0; i < 16; ++i) {
        const __m512 all = reinterpret_cast<__m512>(x[i]);
        half[i] = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    }
    return reinterpret_cast<Vec>(_mm512_insertf32x8(_mm512_castps256_ps512(sums_of_8(half)), sums_of_8(half + 8), 1));
}
inline IntVec half_words(const uint16_t* p) {
    return reinterpret_cast<IntVec>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
#elif defined(CSAKIT_EMULATE)  // the lanes of AVX512 on any processor, for tests
inline Vec greater(Vec x, Vec y) { return x > y ? x : y; }
inline Vec smaller(Vec x, Vec y) { return x < y ? x : y; }
inline float sum(Vec x) {
    float total = 0;
    for (long i = 0; i < LANES; ++i) total += x[i];
    return total;
}
inline Vec sums(const Vec (&x)[LANES]) {
    Vec result{};
    for (long i = 0; i < LANES; ++i) result[i] = sum(x[i]);
    return result;
}
inline IntVec half_words(const uint16_t* p) {
    IntVec result{};
    for (long i = 0; i < LANES; ++i) result[i] = p[i];
    return result;
}
#else
inline Vec greater(Vec x, Vec y) { return reinterpret_cast<Vec>(_mm256_max_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y))); }
inline Vec smaller(Vec x, Vec y) { return reinterpret_cast<Vec>(_mm256_min_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y))); }
inline float sum(Vec x) {
    const __m256 all = reinterpret_cast<__m256>(x);
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline Vec sums(const Vec (&x)[LANES]) { return reinterpret_cast<Vec>(sums_of_8(reinterpret_cast<const __m256*>(x))); }
inline IntVec half_words(const uint16_t* p) {
    return reinterpret_cast<IntVec>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#endif

// e^x within 2 units in the last place; 0 below -87.7 (where the true value is denormal), NaN for NaN.
inline Vec exponential(Vec x) {
    const float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number and leaves that in the low bits
    const Vec low = every(-88.0296919f), high = every(88.f);  // low is -127 ln 2: its power of two has exponent bits 0, which are 0
    const Vec y = smaller(high, greater(low, x));
    const Vec rounded = y * 1.44269504f + shift, n = rounded - shift;
    const Vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    const IntVec power = (reinterpret_cast<IntVec>(rounded) << 23) + 0x3f800000;  // the shift's own bits leave at the top
    return p * reinterpret_cast<Vec>(power);
}

// ln x of positive, normal x, within 2 units in the last place.
inline Vec logarithm(Vec x) {
    const IntVec bits = reinterpret_cast<IntVec>(x);
    IntVec exponent = (bits >> 23) - 126;
    Vec m = reinterpret_cast<Vec>((bits & 0x007fffff) | 0x3f000000);  // 0.5 .. 1
    const IntVec small = m < 0.707106781f;
    exponent += small;  // true is -1
    m = (small ? m + m : m) - 1.f;
    const Vec e = __builtin_convertvector(exponent, Vec), z = m * m;
    Vec p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    return m + (p * m * z + e * -2.12194440e-4f - z * 0.5f) + e * 0.693359375f;
}

inline float to_float(uint16_t bfloat) {
    const uint32_t bits = uint32_t(bfloat) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline Vec load(const uint16_t* bfloats) { return reinterpret_cast<Vec>(half_words(bfloats) << 16); }

inline void widen(float* to, const uint16_t* from, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = to_float(from[i]);
}

// to[column * ld + row] = from[row][column] of an 8 x 8 block of 4 bytes each
inline void transpose8(float* to, long ld, const float* const* from, long column) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from[i] + column);
    for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * ld, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * ld, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

}  // namespace csakit
