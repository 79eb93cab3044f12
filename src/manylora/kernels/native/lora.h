/* What the work for few rows and for many has in common: the tables that Python fills, the numbers of A and B in
 * registers, and how sums are added to y.
 *
 * A and B are read by pairs of vectors, 2 * LANES elements. Of bfloat16 that is one vector of words, whose low halves
 * are the even elements and whose high halves are the odd ones. Those of A are put in order at once, by `join`; those
 * of B stay apart until the sums are added to y. */

#pragma once

#include "team.h"

enum {
#ifdef __AVX512F__
    ROWS = 8,  /* at most, for which A and B are read once */
    SUMS = 16, /* vectors in registers, at least two for a row */
#else
    ROWS = 4,
    SUMS = 8,
#endif
    ALONG = 2, /* rows, at most, for which A and B are read in the order of memory */
    FAR = 8192 /* and prefetched so many bytes ahead */
};

typedef struct { /* TABLE_ROW of kernels/row_format.py */
    int64_t offset, rank;   /* in the pool: A [rank, in], B transposed [rank, width], with DoRA a magnitude [width] */
    int64_t dora, encoding; /* offset is in numbers of the encoding */
    float scale;            /* of x A^T */
    int32_t next; /* in a mix: how many parts later the next adapter is, for the same rows and columns; 0: none */
    int64_t vectors; /* where A and B are shared, offset of weights of columns [width], then of ranks [rank]; or -1 */
} Row;

enum { DORA = 1, DORA_MIXED }; /* mixed: the changes of y by all of a mix are added, each times its scale */

typedef struct {
    int64_t column, width; /* of y */
    Row row;
} Part;

/* The kind of an adapter's numbers: the pool's, or that of its encoding. */
INLINE Kind kind_of(const Row *row, Kind pool) { return row->encoding == 1 ? FLOAT8 : pool; }

struct Segment {
    int64_t start, stop; /* rows of x and y */
    const Part *parts;
    int64_t count;
};

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, in, width, rank;
    const char *a, *b;     /* A [rank, in], B transposed [rank, width] */
    const char *magnitude; /* [width]; NULL: no DoRA */
    const char *weights;   /* [width], of what is added to y; NULL: 1 */
    const char *ranks;     /* [rank], of the coefficients; NULL: 1 */
    const float *bias;     /* [width], which is in y; NULL: none */
    const char *next;      /* A of the next part, or of this one again: is prefetched */
    float scale;
    int rounds;              /* whether x is rounded to bfloat16 */
    const uint16_t *rounded; /* x so rounded, rows rounded_stride(in) apart; NULL: not done yet */
} Work;

/* 2 * LANES elements; of bfloat16 the even ones, then the odd ones. */
INLINE void widen_two(Kind kind, const char *at, vector two[2]) {
    UNROLL for (int i = 0; i < 2; i++)
        two[i] = kind == BFLOAT16 ? widen_pairs(at, i) : widen(kind, at + i * LANES * size_of(kind));
}

INLINE void widen_joined(Kind kind, const char *at, vector two[2]) {
    widen_two(kind, at, two);
    if (kind == BFLOAT16) join(&two[0], &two[1]);
}

/* Adds the last inputs, which do not fill a pair of vectors, to a dot product. */
static float ONCE last_inputs(Kind kind, const char *a, const float *x, int64_t count, float sum) {
    for (int64_t k = 0; k < count; k++) sum += widen_one(kind, a + k * size_of(kind)) * x[k];
    return sum;
}

INLINE float scaled(const Kind kind, const Work *w, int64_t r, float sum) {
    return w->ranks ? sum * (w->scale * widen_one(kind, w->ranks + r * size_of(kind))) : sum * w->scale;
}

/* The coefficient scale * x[row] . A[r]; `sum` has the dot product of all whole pairs of vectors. */
INLINE float coefficient(const Kind kind, const Work *w, int64_t row, int64_t r, float sum) {
    const int64_t whole = w->in - w->in % (2 * LANES);
    if (whole < w->in)
        sum = last_inputs(kind, w->a + (r * w->in + whole) * size_of(kind), w->x + row * w->x_stride + whole,
                          w->in - whole, sum);
    return scaled(kind, w, r, sum);
}

/* Adds a row's sums for two vectors of columns to y, which is then multiplied by the magnitude. */
INLINE void settle(const Kind kind, const Work *w, int64_t row, int64_t c, vector low, vector high) {
    float *const y = w->y + row * w->y_stride + c;
    vector magnitude[2];
    if (w->weights) {
        widen_joined(kind, w->weights + c * size_of(kind), magnitude);
        low *= magnitude[0], high *= magnitude[1];
    }
    vector sum[2] = {load(y) + low, load(y + LANES) + high};
    if (w->magnitude) {
        widen_joined(kind, w->magnitude + c * size_of(kind), magnitude);
        for (int i = 0; i < 2; i++) {
            const vector bias = w->bias ? load(w->bias + c + i * LANES) : all(0);
            sum[i] = multiply_add(sum[i] - bias, magnitude[i], bias);
        }
    }
    store(y, sum[0]);
    store(y + LANES, sum[1]);
}

/* y[row, c:] from h, as `expand` and `settle`, for the last columns, which do not fill a pair of vectors. */
static void ONCE last_columns(Kind kind, const Work *w, int64_t rows, int64_t c, const float *h) {
    const int64_t size = size_of(kind);
    for (; c < w->width; c++)
        for (int64_t i = 0; i < rows; i++) {
            float *const y = w->y + i * w->y_stride + c, bias = w->bias ? w->bias[c] : 0, sum = w->weights ? 0 : *y;
            for (int64_t k = 0; k < w->rank; k++)
                sum += h[i * w->rank + k] * widen_one(kind, w->b + (k * w->width + c) * size);
            if (w->weights) sum = *y + sum * widen_one(kind, w->weights + c * size);
            *y = w->magnitude ? (sum - bias) * widen_one(kind, w->magnitude + c * size) + bias : sum;
        }
}

/* Prefetches a line of A and B, or beyond their end one of the next part, into the L2 cache. */
INLINE void fetch_far(const Work *w, const char *end, const char *at) {
    __builtin_prefetch(at < end ? at : w->next + (at - end), 0, 2);
}

INLINE const char *end_of(const Kind kind, const Work *w) { return w->b + w->rank * w->width * size_of(kind); }
