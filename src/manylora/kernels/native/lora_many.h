/* Many rows. Parts of A and B are widened once, and stay in the cache while all rows are multiplied by them. The sums
 * of a row are made in the same order as with few rows. */

#pragma once

#include "lora_rounded.h"

enum {
    TALL = 64,        /* rows of a task */
    DEPTH = 256,      /* inputs, a multiple of 2 * LANES, */
    RANKS = 8 * WIDE, /* and ranks of the part of A that stays in the cache */
    LOW = 32768       /* coefficients of all rows that are computed together */
};

/* Keeps a value in a register: it is loaded once, rather than by each instruction that uses it. */
INLINE vector in_register(vector value) {
#if defined(__AVX2__) && !defined(EMULATED)
    __asm__("" : "+v"(value));
#endif
    return value;
}

/* sums[row, j] += x[row] . a[j] over `depth` inputs, lane by lane; a [WIDE, DEPTH]. first: the sums are 0 before. */
INLINE void shrink_tile(const int rows, const float *x, int64_t x_stride, const float *a, int64_t depth, int first,
                        vector *sums) {
    vector sum[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) sum[i][j] = first ? all(0) : sums[i * RANKS + j];
    for (int64_t k = 0; k < depth; k += LANES) {
        vector one[WIDE];
        UNROLL for (int j = 0; j < WIDE; j++) one[j] = in_register(load(a + j * DEPTH + k));
        UNROLL for (int i = 0; i < rows; i++) {
            const vector in = in_register(load(x + i * x_stride + k));
            UNROLL for (int j = 0; j < WIDE; j++) sum[i][j] = multiply_add(one[j], in, sum[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) sums[i * RANKS + j] = sum[i][j];
}

/* sums[row] = h[row] b; b [rank, WIDE] vectors, sums [rows, 2 * WIDE] vectors, of which a half is written. */
INLINE void expand_tile(const int rows, const float *h, int64_t rank, const vector *b, vector *sums) {
    vector sum[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < WIDE; v++) sum[i][v] = all(0);
    for (int64_t r = 0; r < rank; r++, b += WIDE) {
        vector one[WIDE];
        UNROLL for (int v = 0; v < WIDE; v++) one[v] = in_register(b[v]);
        UNROLL for (int i = 0; i < rows; i++) {
            const vector low = all(h[i * rank + r]);
            UNROLL for (int v = 0; v < WIDE; v++) sum[i][v] = multiply_add(low, one[v], sum[i][v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < WIDE; v++) sums[i * 2 * WIDE + v] = sum[i][v];
}

/* Does all rows by `tile`, whose argument is a constant number of rows: it does those from i on, and adds them to i. */
#define TILES(rows, tile)                        \
    for (int64_t i = 0, left; (left = (rows) - i) > 0;) { \
        if (left >= ROWS) tile(ROWS)             \
        else if (left >= 4) tile(4)              \
        else if (left >= 2) tile(2)              \
        else tile(1)                             \
    }

/* For `ranks` rows of a, rounded up to a multiple of WIDE. */
static void ONCE shrink_tiles(int64_t rows, int64_t ranks, const float *x, int64_t x_stride, const float *a,
                              int64_t depth, int first, vector *sums) {
#define TILE(height)                                                                                          \
    {                                                                                                         \
        for (int64_t j = 0; j < ranks; j += WIDE)                                                             \
            shrink_tile(height, x + i * x_stride, x_stride, a + j * DEPTH, depth, first, sums + i * RANKS + j); \
        i += height;                                                                                          \
    }
    TILES(rows, TILE)
#undef TILE
}

static void ONCE expand_tiles(int64_t rows, const float *h, int64_t rank, const vector *b, vector *sums) {
#define TILE(height)                                                            \
    {                                                                           \
        expand_tile(height, h + i * rank, rank, b, sums + i * 2 * WIDE);        \
        i += height;                                                            \
    }
    TILES(rows, TILE)
#undef TILE
}

/* As `shrink`, of all coefficients. */
INLINE void shrink_many(int64_t rows, const Kind kind, const Work *w, float *h) {
    const int64_t whole = w->in - w->in % (2 * LANES), size = size_of(kind);
    vector sums[TALL * RANKS], two[2];
    float a[RANKS * DEPTH];
    if (!whole) memset(sums, 0, sizeof sums);
    for (int64_t r = 0; r < w->rank; r += RANKS) {
        const int64_t ranks = least(RANKS, w->rank - r), tiled = (ranks + WIDE - 1) / WIDE * WIDE;
        for (int64_t k = 0; k < whole; k += DEPTH) {
            const int64_t depth = least(DEPTH, whole - k);
            for (int64_t j = 0; j < tiled; j++) /* the last one is repeated up to a whole tile */
                for (int64_t n = 0; n < depth; n += 2 * LANES) {
                    widen_joined(kind, w->a + (least(r + j, w->rank - 1) * w->in + k + n) * size, two);
                    store(a + j * DEPTH + n, two[0]);
                    store(a + j * DEPTH + n + LANES, two[1]);
                }
            shrink_tiles(rows, ranks, w->x + k, w->x_stride, a, depth, k == 0, sums);
        }
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < ranks; j++)
                h[i * w->rank + r + j] = coefficient(kind, w, i, r + j, total(sums[i * RANKS + j]));
    }
}

/* As `expand`, of all columns. */
INLINE void expand_many(int64_t rows, const Kind kind, const Work *w, const float *h) {
    const int64_t whole = w->width - w->width % (2 * LANES), size = size_of(kind);
    vector b[2 * WIDE * w->rank], sums[TALL * 2 * WIDE];
    for (int64_t c = 0; c < whole; c += 2 * WIDE * LANES) {
        const int64_t pairs = least(WIDE, (whole - c) / (2 * LANES)), halves = 2 * pairs > WIDE ? 2 : 1;
        for (int64_t r = 0; r < w->rank; r++)
            for (int64_t p = 0; p < pairs; p++) {
                vector two[2];
                widen_joined(kind, w->b + (r * w->width + c + p * 2 * LANES) * size, two);
                for (int64_t v = 2 * p; v < 2 * p + 2; v++)
                    b[(v / WIDE * w->rank + r) * WIDE + v % WIDE] = two[v % 2];
            }
        for (int64_t half = 0; half < halves; half++)
            expand_tiles(rows, h, w->rank, b + half * WIDE * w->rank, sums + half * WIDE);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t v = 0; v < 2 * pairs; v += 2)
                settle(kind, w, i, c + v * LANES, sums[i * 2 * WIDE + v], sums[i * 2 * WIDE + v + 1]);
    }
    if (whole < w->width) last_columns(kind, w, rows, whole, h);
}

INLINE void many_rows(int64_t rows, const Kind kind, Work w) {
    const int64_t block = least(TALL, LOW / w.rank);
    float h[block * w.rank];
    for (; rows > 0; rows -= block, w.x += block * w.x_stride, w.y += block * w.y_stride) {
        const int64_t height = least(rows, block);
        if (kind == BFLOAT16 && w.rounds) shrink_rounded(height, &w, 0, w.rank, h);
        else shrink_many(height, kind, &w, h);
        expand_many(height, kind, &w, h);
        if (w.rounded) w.rounded += block * rounded_stride(w.in);
    }
}

static void many(Kind kind, int64_t rows, const Work *w) {
    switch (kind) {
        case FLOAT32: many_rows(rows, FLOAT32, *w); break;
        case BFLOAT16: many_rows(rows, BFLOAT16, *w); break;
        case FLOAT8: many_rows(rows, FLOAT8, *w); break;
        default: break;
    }
}
