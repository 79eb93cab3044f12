/* h = scale * x A^T where A is bfloat16 and linear layers round x to it, for few rows and for many: by the processor's
 * products of pairs. Every lane has a sum of its own; they are added in the end, whatever rows come with it. */

#pragma once

#include "bfloat16.h"
#include "lora.h"

enum { WIDE = 3 /* with many rows: coefficients, or vectors of columns, of a tile */ };

/* h[row, r:] for `ranks` coefficients. x is rounded, its rows `stride` elements apart. */
INLINE void shrink_pairs(const int rows, const int ranks, const Work *w, const uint16_t *x, int64_t stride, int64_t r,
                         float *h) {
    const int64_t step = w->in * 2, whole = w->in - w->in % (2 * LANES);
    const char *a = w->a + r * step, *const end = end_of(BFLOAT16, w);
    vector sum[ROWS][WIDE];
    words one[WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = all(0);
    for (int64_t k = 0; k < whole; k += 2 * LANES) {
        UNROLL for (int j = 0; j < ranks; j++) {
            if (ranks == 1) fetch_far(w, end, a + k * 2 + FAR);
            one[j] = load_words(a + j * step + k * 2);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            const words in = load_words((const char *)(x + i * stride + k));
            UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = add_pairs(sum[i][j], one[j], in);
        }
    }
    if (whole < w->in) UNROLL for (int j = 0; j < ranks; j++) {
        words some = {0};
        memcpy(&some, a + j * step + whole * 2, (w->in - whole) * 2);
        UNROLL for (int i = 0; i < rows; i++)
            sum[i][j] = add_pairs(sum[i][j], some, load_words((const char *)(x + i * stride + whole)));
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) h[i * w->rank + r + j] = scaled(BFLOAT16, w, r + j, total(sum[i][j]));
}

INLINE void shrink_tall(const int rows, const Work *w, const uint16_t *x, int64_t from, int64_t to, float *h) {
    const int64_t stride = rounded_stride(w->in);
    int64_t r = from;
    for (; rows > ALONG && r + WIDE <= to; r += WIDE) shrink_pairs(rows, WIDE, w, x, stride, r, h);
    for (; r < to; r++) shrink_pairs(rows, 1, w, x, stride, r, h);
}

/* h[row, from:to] for all rows; x is rounded here, unless it was before. */
static void ONCE shrink_rounded(int64_t rows, const Work *w, int64_t from, int64_t to, float *h) {
    const int64_t stride = rounded_stride(w->in);
    uint16_t room[w->rounded ? 1 : ROWS * stride];
    for (int64_t i = 0, height; i < rows; i += height, h += height * w->rank) {
        const uint16_t *const x = w->rounded ? w->rounded + i * stride : room;
        const int64_t left = rows - i;
        height = left >= ROWS ? ROWS : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t n = 0; !w->rounded && n < height; n++)
            round_inputs(room + n * stride, w->x + (i + n) * w->x_stride, w->in);
        if (height == ROWS) shrink_tall(ROWS, w, x, from, to, h);
        else if (height == 4) shrink_tall(4, w, x, from, to, h);
        else if (height == 2) shrink_tall(2, w, x, from, to, h);
        else shrink_tall(1, w, x, from, to, h);
    }
}
