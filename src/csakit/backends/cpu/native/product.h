// The one matrix product of this library, and the two ways its right operand is laid out.
//
//   c[m][j] (+)= sum_k a[m][k * step] * b(k)[j]        m < rows, k < depth, j < columns
//
// The rows of a and c are given by pointers. So attended rows are used where they lie, gradients are added where they belong, and
// [n][heads] serves as it is (step 1) and transposed (step = heads). A register tile holds TILE_ROWS x PANEL of c.
#pragma once

#include <algorithm>

#include "simd.h"

namespace csakit {

struct Packed {  // rows of b one after another
    const float* data;
    long stride;
    const float* operator()(long k) const { return data + k * stride; }
};

struct Scattered {  // rows of b anywhere
    const float* const* data;
    long column;
    const float* operator()(long k) const { return data[k] + column; }
};

template <long M, long N, class B>
inline __attribute__((always_inline)) void accumulate(Vec (&total)[M][N], const float* const* a, long a_column, long step, B b, long depth) {
    const float* left[M];
    for (long m = 0; m < M; ++m) {
        left[m] = a[m] + a_column;
        for (long n = 0; n < N; ++n) total[m][n] = Vec{};
    }
    for (long k = 0; k < depth; ++k) {
        const float* row = b(k);
        Vec right[N];
        for (long n = 0; n < N; ++n) right[n] = load(row + n * LANES);
        for (long m = 0; m < M; ++m)
            for (long n = 0; n < N; ++n) total[m][n] += left[m][k * step] * right[n];
    }
}

template <long M, long N, class B>
__attribute__((noinline)) void tile(const float* const* a, long a_column, long step, B b, long depth, float* const* c, long c_column, bool add) {
    Vec total[M][N];
    accumulate<M, N>(total, a, a_column, step, b, depth);
    for (long m = 0; m < M; ++m)
        for (long n = 0; n < N; ++n) {
            float* to = c[m] + c_column + n * LANES;
            store(to, add ? load(to) + total[m][n] : total[m][n]);
        }
}

template <long M, long N, class B>
void tile_of(long rows, const float* const* a, long a_column, long step, B b, long depth, float* const* c, long c_column, bool add) {
    if (rows == M)
        tile<M, N, B>(a, a_column, step, b, depth, c, c_column, add);
    else if constexpr (M > 1)
        tile_of<M - 1, N, B>(rows, a, a_column, step, b, depth, c, c_column, add);
}

// columns is LANES or PANEL.
template <class B>
__attribute__((noinline)) void product(long rows, const float* const* a, long a_column, long step, B b, long depth, float* const* c, long c_column, long columns,
             bool add) {
    const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long t = 0, m = 0; t < tiles; ++t) {
        const long count = rows / tiles + (t < rows % tiles);  // tiles of nearly equal height: no thin one at the end
        if (columns == PANEL)
            tile_of<TILE_ROWS, 2, B>(count, a + m, a_column, step, b, depth, c + m, c_column, add);
        else
            tile_of<TILE_ROWS, 1, B>(count, a + m, a_column, step, b, depth, c + m, c_column, add);
        m += count;
    }
}

// Calls f(first column, columns) for panels that cover `width` columns, padded to whole vectors.
template <class F>
void for_panels(long width, F f) {
    for (long first = 0; first < width; first += PANEL) f(first, std::min(PANEL, padded(width - first)));
}

// Rows of a small matrix [rows][width] as the right operand that turns a product into dots with them: for each panel of rows
// [width][columns], times factor, padded with zeros. `to` holds width * padded(rows) floats.
inline void pack_transposed(float* to, const float* const* from, long rows, long width, float factor) {
    for_panels(rows, [&](long first, long columns) {
        float* panel = to + first * width;
        for (long r = 0; r < columns; r += 8) {
            const long live = std::clamp<long>(rows - first - r, 0, 8);
            const float* const* block = from + first + r;
            long d = 0;
            if (live == 8)
                for (; d + 8 <= width; d += 8) transpose8(panel + d * columns + r, columns, block, d, factor);
            for (; d < width; ++d)
                for (long i = 0; i < 8; ++i) panel[d * columns + r + i] = i < live ? block[i][d] * factor : 0;
        }
    });
}

// c[n][h] = rows[n] . q[h] for a q that pack_transposed has laid out.
inline void dots(long count, const float* const* rows, const float* packed, long heads, long width, float* const* c, long c_column) {
    const long depth = 256;  // of a panel that stays in the first-level cache together with the rows that pass by
    for_panels(heads, [&](long first, long columns) {
        for (long d = 0; d < width; d += depth) {
            const Packed b{packed + first * width + d * columns, columns};
            product(count, rows, d, 1, b, std::min(depth, width - d), c, c_column + first, columns, d > 0);
        }
    });
}

}  // namespace csakit
