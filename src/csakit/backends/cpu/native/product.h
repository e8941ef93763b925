// The one matrix product of this library, and the two ways its right operand is laid out.
//
//   c[m][j] (+)= sum_k a[m][k * step] * b(k)[j]        m < rows, k < depth, j < columns
//
// Elements of a and b are floats, or pairs of bfloat16 whose two products are added.
// The rows of a and c are given by pointers. So attended rows are used where they lie, gradients are added where they belong, and
// [n][heads] serves as it is (step 1) and transposed (step = heads). A register tile holds TILE_ROWS x PANEL of c.
#pragma once

#include <algorithm>

#include "pairs.h"

namespace csakit {

template <class E>
struct Packed {  // rows of b one after another
    const E* data;
    long stride;
    auto operator()(long k, long n) const { return load_elements(data + k * stride + n * LANES); }
};

template <class E>
struct Rows;  // rows of b anywhere

template <>
struct Rows<float> {
    const float* const* data;
    long column;
    Vec operator()(long k, long n) const { return load(data[k] + column + n * LANES); }
};

template <>
struct Rows<Pair> {  // two rows at a step
    const Pair* const* data;
    long column;
    IntVec operator()(long k, long n) const {
        const auto row = [&](long r) { return half_words(reinterpret_cast<const uint16_t*>(data[r]) + column + n * LANES); };
        return paired(row(2 * k), row(2 * k + 1));
    }
};

template <long M, long N, class E, class B>
inline __attribute__((always_inline)) void accumulate(Vec (&total)[M][N], const E* const* a, long a_column, long step, B b, long depth) {
    const E* left[M];
    for (long m = 0; m < M; ++m) {
        left[m] = a[m] + a_column;
        for (long n = 0; n < N; ++n) total[m][n] = Vec{};
    }
    for (long k = 0; k < depth; ++k) {
        decltype(b(0, 0)) right[N];
        for (long n = 0; n < N; ++n) right[n] = b(k, n);
        for (long m = 0; m < M; ++m)
            for (long n = 0; n < N; ++n) total[m][n] = multiply_add(total[m][n], left[m][k * step], right[n]);
    }
}

template <long M, long N, class E, class B>
__attribute__((noinline)) void tile(const E* const* a, long a_column, long step, B b, long depth, float* const* c, long c_column,
                                    bool add) {
    Vec total[M][N];
    accumulate<M, N>(total, a, a_column, step, b, depth);
    for (long m = 0; m < M; ++m)
        for (long n = 0; n < N; ++n) {
            float* to = c[m] + c_column + n * LANES;
            store(to, add ? load(to) + total[m][n] : total[m][n]);
        }
}

template <long M, long N, class E, class B>
void tile_of(long rows, const E* const* a, long a_column, long step, B b, long depth, float* const* c, long c_column, bool add) {
    if (rows == M)
        tile<M, N>(a, a_column, step, b, depth, c, c_column, add);
    else if constexpr (M > 1)
        tile_of<M - 1, N>(rows, a, a_column, step, b, depth, c, c_column, add);
}

// columns is LANES or PANEL.
template <class E, class B>
__attribute__((noinline)) void product(long rows, const E* const* a, long a_column, long step, B b, long depth, float* const* c,
                                       long c_column, long columns, bool add) {
    const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long t = 0, m = 0; t < tiles; ++t) {
        const long count = rows / tiles + (t < rows % tiles);  // tiles of nearly equal height: no thin one at the end
        if (columns == PANEL)
            tile_of<TILE_ROWS, 2>(count, a + m, a_column, step, b, depth, c + m, c_column, add);
        else
            tile_of<TILE_ROWS, 1>(count, a + m, a_column, step, b, depth, c + m, c_column, add);
        m += count;
    }
}

// Calls f(first column, columns) for panels that cover `width` columns, padded to whole vectors.
template <class F>
void for_panels(long width, F f) {
    for (long first = 0; first < width; first += PANEL) f(first, std::min(PANEL, padded(width - first)));
}

// Rows of a small matrix [rows][width] as the right operand that turns a product into dots with them: for each panel of rows
// [width][columns], padded with zeros. `to` holds width * padded(rows) elements.
template <class E>
void pack_transposed(E* to, const E* const* from, long rows, long width) {
    for_panels(rows, [&](long first, long columns) {
        E* panel = to + first * width;
        for (long r = 0; r < columns; r += 8) {
            const long live = std::clamp<long>(rows - first - r, 0, 8);
            const E* const* block = from + first + r;
            long d = 0;
            if (live == 8)
                for (; d + 8 <= width; d += 8)
                    transpose8(reinterpret_cast<float*>(panel + d * columns + r), columns, reinterpret_cast<const float* const*>(block), d);
            for (; d < width; ++d)
                for (long i = 0; i < 8; ++i) panel[d * columns + r + i] = i < live ? block[i][d] : E{};
        }
    });
}

// Dots with few rows q, [H][padded(width)] with zeros in the padding: vectors run over the width, so that no lane idles. Writes a whole
// vector of c, zeros after the dots.
template <long H>
__attribute__((noinline)) void few_dots(long count, const float* const* rows, const float* q, long width, float* const* c, long c_column) {
    constexpr long at_once = LANES / H;
    const long stride = padded(width);
    for (long n = 0; n < count; n += at_once) {
        const float* row[at_once];
        for (long r = 0; r < at_once; ++r) row[r] = rows[std::min(n + r, count - 1)];
        Vec total[LANES] = {};
        for (long d = 0; d < stride; d += LANES)
            for (long r = 0; r < at_once; ++r)
                for (long h = 0; h < H; ++h) total[r * H + h] += load(row[r] + d) * load(q + h * stride + d);
        const Vec found = sums(total);
        for (long r = 0; r < std::min(at_once, count - n); ++r) {
            Vec own{};
            for (long h = 0; h < H; ++h) own[h] = found[r * H + h];
            store(c[n + r] + c_column, own);
        }
    }
}

constexpr long FEW = LANES / 2;  // rows q; more of them fill the lanes better

// Rows q [heads][width] laid out for dots with them. `to` holds padded(heads) * padded(width) elements.
template <class E>
void pack_for_dots(E* to, const E* const* q, long heads, long width) {
    if constexpr (std::is_same_v<E, float>)
        if (heads <= FEW) {
            for (long h = 0; h < FEW; ++h, to += padded(width)) {
                const long live = h < heads ? width : 0;
                std::fill(std::copy_n(q[std::min(h, heads - 1)], live, to), to + padded(width), 0.f);
            }
            return;
        }
    pack_transposed(to, q, heads, width);
}

// c[n][h] = rows[n] . q[h] for a q that pack_for_dots has laid out. Rows are padded with zeros to whole vectors.
template <class E>
void dots(long count, const E* const* rows, const E* packed, long heads, long width, float* const* c, long c_column) {
    if constexpr (std::is_same_v<E, float>)
        if (heads <= FEW) {
            const auto f = heads == 1 ? few_dots<1> : heads == 2 ? few_dots<2> : heads <= 4 ? few_dots<4> : few_dots<FEW>;
            return f(count, rows, packed, width, c, c_column);
        }
    const long depth = 256;  // of a panel that stays in the first-level cache together with the rows that pass by
    for_panels(heads, [&](long first, long columns) {
        for (long d = 0; d < width; d += depth) {
            const Packed<E> b{packed + first * width + d * columns, columns};
            product(count, rows, d, 1, b, std::min(depth, width - d), c, c_column + first, columns, d > 0);
        }
    });
}

}  // namespace csakit
