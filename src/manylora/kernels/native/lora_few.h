/* Few rows. Each byte of an adapter is used once or twice, so the speed of memory is the limit. Reading jumps from row
 * to row of B and from adapter to adapter, which the hardware's prefetching does not follow, so what comes next is
 * prefetched here. For one row or two, as where every sequence has its own adapter, A and then B are read from the
 * first byte to the last, the fastest way to read memory. */

#pragma once

#include "lora_rounded.h"

enum {
    FEW = 2 * ROWS,
    AHEAD = 2048, /* bytes of the next part that are prefetched */
    RUN = 4096    /* columns whose sums are kept where B is read in the order of memory */
};
_Static_assert(SUMS >= 2 * ROWS, "`expand` goes on by pairs of vectors for each row");

/* h[row, r:] = scale * x[row] . A[r:] for `ranks` coefficients; A is prefetched for the next ones. */
INLINE void shrink(const int rows, const int ranks, const Kind kind, const Work w, int64_t r, float *h) {
    const int64_t whole = w.in - w.in % (2 * LANES), size = size_of(kind), step = w.in * size;
    const char *a = w.a + r * step, *const end = end_of(kind, &w);
    vector sum[ROWS][SUMS], one[SUMS][2];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = all(0);
    for (int64_t k = 0; k < whole; k += 2 * LANES) {
        UNROLL for (int j = 0; j < ranks; j++) {
            if (rows <= ALONG) fetch_far(&w, end, a + k * size + FAR);
            else fetch(a + (ranks + j) * step + k * size, 2 * LANES * size);
            widen_joined(kind, a + j * step + k * size, one[j]);
        }
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int p = 0; p < 2; p++) {
                const vector x = load(w.x + i * w.x_stride + k + p * LANES);
                UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = multiply_add(one[j][p], x, sum[i][j]);
            }
    }
    float sums[ROWS][SUMS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) sums[i][j] = total(sum[i][j]); /* where i and j are constants */
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < ranks; j++) h[i * w.rank + r + j] = coefficient(kind, &w, i, r + j, sums[i][j]);
}

/* y[row, c:] += h[row] B[:, c:] for `pairs` pairs of vectors of columns; B is prefetched for the next ones. */
INLINE void expand(const int rows, const int pairs, const Kind kind, const Work w, int64_t c, const float *h) {
    const int64_t size = size_of(kind), run = pairs * 2 * LANES * size, step = w.width * size;
    const char *b = w.b + c * size;
    vector sum[ROWS][SUMS], one[2];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < 2 * pairs; v++) sum[i][v] = all(0);
    for (int64_t r = 0; r < w.rank; r++, b += step) {
        fetch(b + run, run);
        UNROLL for (int v = 0; v < pairs; v++) {
            widen_two(kind, b + v * 2 * LANES * size, one);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int p = 0; p < 2; p++)
                    sum[i][2 * v + p] = multiply_add(all(h[i * w.rank + r]), one[p], sum[i][2 * v + p]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < pairs; v++) {
            vector low = sum[i][2 * v], high = sum[i][2 * v + 1];
            if (kind == BFLOAT16) join(&low, &high);
            settle(kind, &w, i, c + v * 2 * LANES, low, high);
        }
}

/* sums[row] += h[row, r] B[r, c:] for `pairs` pairs of vectors of columns. first: the sums are 0 before. */
INLINE void add_along(const int rows, const int first, const Kind kind, const Work *w, int64_t r, int64_t c,
                      int64_t pairs, const float *h, vector (*sums)[RUN / LANES]) {
    const int64_t size = size_of(kind);
    const char *b = w->b + (r * w->width + c) * size, *const end = end_of(kind, w);
    vector one[2];
    for (int64_t v = 0; v < 2 * pairs; v += 2, b += 2 * LANES * size) {
        fetch_far(w, end, b + FAR);
        widen_two(kind, b, one);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int p = 0; p < 2; p++)
                sums[i][v + p] = multiply_add(all(h[i * w->rank + r]), one[p], first ? all(0) : sums[i][v + p]);
    }
}

/* As `expand`, with the same bits, but along the rows of B. [from, to) are whole pairs of vectors. */
INLINE void expand_along(const int rows, const Kind kind, const Work w, int64_t from, int64_t to, const float *h) {
    vector sums[ALONG][RUN / LANES];
    for (int64_t c = from; c < to; c += RUN) {
        const int64_t pairs = least(RUN, to - c) / (2 * LANES);
        add_along(rows, 1, kind, &w, 0, c, pairs, h, sums);
        for (int64_t r = 1; r < w.rank; r++) add_along(rows, 0, kind, &w, r, c, pairs, h, sums);
        for (int64_t v = 0; v < 2 * pairs; v += 2)
            UNROLL for (int i = 0; i < rows; i++) {
                vector low = sums[i][v], high = sums[i][v + 1];
                if (kind == BFLOAT16) join(&low, &high);
                settle(kind, &w, i, c + v * LANES, low, high);
            }
    }
}

/* h[row, from:to] and, below, y[row, from:to] for `rows` rows. A sum has the same bits in whatever share it is. */
INLINE void shrink_share(const int rows, const Kind kind, const Work w, int64_t from, int64_t to, float *h) {
    const int ranks = rows <= ALONG ? 1 : SUMS / rows < 4 ? SUMS / rows : 4;
    int64_t r = from;
    for (; r + ranks <= to; r += ranks) shrink(rows, ranks, kind, w, r, h);
    for (; r < to; r++) shrink(rows, 1, kind, w, r, h);
}

INLINE void expand_share(const int rows, const Kind kind, const Work w, int64_t from, int64_t to, const float *h) {
    const int pairs = SUMS / rows / 2;
    int64_t c = from;
    if (rows <= ALONG) {
        c = to - (to - from) % (2 * LANES);
        expand_along(rows, kind, w, from, c, h);
    }
    for (; c + pairs * 2 * LANES <= to; c += pairs * 2 * LANES) expand(rows, pairs, kind, w, c, h);
    for (; c + 2 * LANES <= to; c += 2 * LANES) expand(rows, 1, kind, w, c, h);
    if (c < to) last_columns(kind, &w, rows, c, h);
}

/* Does all rows of w by `share`, whose argument is a constant number of rows. */
#define HEIGHTS(rows, share)                                                       \
    for (int64_t left = rows; left > 0;) {                                         \
        const int64_t height = left >= ROWS ? ROWS : left >= 4 ? 4 : left;         \
        if (height == ROWS) share(ROWS);                                           \
        else if (height == 4) share(4);                                            \
        else if (height == 3) share(3);                                            \
        else if (height == 2) share(2);                                            \
        else share(1);                                                             \
        w.x += height * w.x_stride, w.y += height * w.y_stride, h += height * w.rank; \
        left -= height;                                                            \
    }

INLINE void shrink_heights(const Kind kind, int64_t rows, Work w, int64_t from, int64_t to, float *h) {
#define SHARE(height) shrink_share(height, kind, w, from, to, h)
    HEIGHTS(rows, SHARE)
#undef SHARE
}

INLINE void expand_heights(const Kind kind, int64_t rows, Work w, int64_t from, int64_t to, const float *h) {
#define SHARE(height) expand_share(height, kind, w, from, to, h)
    HEIGHTS(rows, SHARE)
#undef SHARE
}

static void ONCE shrink_few(Kind kind, int64_t rows, const Work *w, int64_t from, int64_t to, float *h) {
    switch (kind) {
        case FLOAT32: shrink_heights(FLOAT32, rows, *w, from, to, h); break;
        case BFLOAT16:
            if (w->rounds) shrink_rounded(rows, w, from, to, h);
            else shrink_heights(BFLOAT16, rows, *w, from, to, h);
            break;
        case FLOAT8: shrink_heights(FLOAT8, rows, *w, from, to, h); break;
        default: break; /* no pool is of integers */
    }
}

static void ONCE expand_few(Kind kind, int64_t rows, const Work *w, int64_t from, int64_t to, const float *h) {
    switch (kind) {
        case FLOAT32: expand_heights(FLOAT32, rows, *w, from, to, h); break;
        case BFLOAT16: expand_heights(BFLOAT16, rows, *w, from, to, h); break;
        case FLOAT8: expand_heights(FLOAT8, rows, *w, from, to, h); break;
        default: break;
    }
}

static void few(Kind kind, int64_t rows, const Work *w) {
    const int64_t size = size_of(kind), most = SUMS / least(rows, ROWS) / 2 * 2 * LANES;
    float h[rows * w->rank];
    const int jumps = rows > ALONG;
    for (int64_t k = 0; jumps && k < w->rank; k++)
        fetch(w->b + k * w->width * size, least(most, w->width) * size); /* where `expand` begins */
    shrink_few(kind, rows, w, 0, w->rank, h);
    if (jumps) fetch(w->next, AHEAD);
    expand_few(kind, rows, w, 0, w->width, h);
}
