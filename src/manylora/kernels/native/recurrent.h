/* What the kernels of recurrent layers have in common: the convolution over the last inputs of a sequence, and where
 * its states are. */

#pragma once

#include "team.h"

enum { LARGEST = 256, MOST_TAPS = 16 }; /* as in recurrent.py: dimensions of a head, inputs of the convolution */

typedef struct {
    const float *x;           /* [rows, channels] */
    const float *taps, *bias; /* [count, channels]; [channels], or NULL */
    float *inputs;            /* [slots, count - 1, channels] */
    float *mixed;             /* room for [rows, channels] */
    int64_t x_stride, count, channels;
} Convolution;

typedef struct { /* as StateBatch */
    const int64_t *starts, *reads, *writes, *cuts, *saves;
    int64_t sequences;
} States;

INLINE float one_exponential(float x) { return exponential(all(x))[0]; }

/* log(1 + exp(x)), also where exp(x) is far below 1. */
INLINE float softplus(float x) {
    if (x > 20) return x;
    return log1pf(one_exponential(x));
}

INLINE vector silu(vector x) { return x / (1 + exponential(-x)); }

/* The input of the convolution at `position`, counted from the first row of the sequence; inputs before that row are in
 * the state. NULL: zeros. */
INLINE const float *input_at(const Convolution *c, const States *states, int64_t s, int64_t position) {
    if (position >= 0) return c->x + (states->starts[s] + position) * c->x_stride;
    if (states->reads[s] < 0) return NULL;
    return c->inputs + ((states->reads[s] + 1) * (c->count - 1) + position) * c->channels;
}

static void ONCE convolve(const Convolution *c, const States *states, int64_t s, int64_t position, float *to) {
    const float *rows[MOST_TAPS];
    for (int64_t tap = 0; tap < c->count; tap++) rows[tap] = input_at(c, states, s, position - c->count + 1 + tap);
    for (int64_t i = 0; i < c->channels; i += LANES) {
        const int64_t left = c->channels - i;
        vector sum = c->bias ? load_some(c->bias + i, left) : all(0);
        for (int64_t tap = 0; tap < c->count; tap++)
            if (rows[tap])
                sum = multiply_add(load_some(rows[tap] + i, left), load_some(c->taps + tap * c->channels + i, left), sum);
        store_some(to + i, silu(sum), left);
    }
}

/* Stores the last inputs up to row `rows` of a sequence in a slot, which may be the one that they are read from. */
static void keep_inputs(const Convolution *c, const States *states, int64_t s, int64_t rows, int64_t slot) {
    const int64_t channels = c->channels, count = c->count - 1;
    float *const to = c->inputs + slot * count * channels;
    for (int64_t i = 0; i < count; i++) {
        const float *const from = input_at(c, states, s, rows - count + i);
        if (from) memmove(to + i * channels, from, channels * sizeof *to);
        else memset(to + i * channels, 0, channels * sizeof *to);
    }
}

/* All rows, to `mixed`, and then the last inputs of each sequence to its slots. */
static void convolve_team(const Convolution *c, const States *states) {
    const int64_t rows = states->starts[states->sequences];
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        int64_t s = 0;
        while (row >= states->starts[s + 1]) s++;
        convolve(c, states, s, row - states->starts[s], c->mixed + row * c->channels);
    }
#pragma omp for schedule(static) nowait
    for (int64_t s = 0; s < states->sequences; s++) {
        if (states->cuts[s]) keep_inputs(c, states, s, states->cuts[s], states->saves[s]);
        keep_inputs(c, states, s, states->starts[s + 1] - states->starts[s], states->writes[s]);
    }
}
