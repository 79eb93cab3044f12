/* Mamba-2 after a causal convolution. Heads are independent of each other; the rows of a sequence are computed one
 * after another, always in the same way, so neither the chunks of a prompt nor other sequences change a bit. */

#include "recurrent.h"

typedef struct {
    Convolution convolution;
    States states;
    float *out;     /* [rows, values] */
    const float *x; /* [z; v; b; c; d] */
    int64_t x_stride;
    const float *decay, *shift, *skip, *norm; /* norm NULL: there is none */
    float *memory;
    /* norm_groups 0: neither the gate nor the norm is applied */
    int64_t heads, groups, head_dim, state_dim, norm_groups, gate_first;
    float least, most, eps;
} Mamba2;

/* One row of one head. from: its memory before, [head_dim, state_dim], or NULL for zeros; to: its memory after, which
 * may be `from`. dim: state_dim, in the machine code a constant where it is common. */
INLINE void remember(const Mamba2 *m, const float *from, float *to, const float *b, const float *c, const float *v, float step,
                     float keep, float skip, float *y, int64_t dim) {
    const vector kept = all(keep);
    for (int64_t j = 0; j < m->head_dim; j++) {
        const float *const old = from + j * dim;
        float *const row = to + j * dim;
        const vector added = all(step * v[j]);
        vector sum = all(0);
        for (int64_t i = 0; i < dim; i += LANES) {
            const vector before = from ? load_some(old + i, dim - i) * kept : all(0);
            const vector after = multiply_add(added, load_some(b + i, dim - i), before);
            store_some(row + i, after, dim - i);
            sum = multiply_add(after, load_some(c + i, dim - i), sum);
        }
        y[j] = total(sum) + skip * v[j];
    }
}

static void ONCE remember_any(const Mamba2 *m, const float *from, float *to, const float *b, const float *c, const float *v,
                              float step, float keep, float skip, float *y) {
    remember(m, from, to, b, c, v, step, keep, skip, y, m->state_dim);
}

static void ONCE remember_128(const Mamba2 *m, const float *from, float *to, const float *b, const float *c, const float *v,
                              float step, float keep, float skip, float *y) {
    remember(m, from, to, b, c, v, step, keep, skip, y, 128);
}

static void ONCE run_head(const Mamba2 *m, int64_t s, int64_t head) {
    const States *const at = &m->states;
    const int64_t dim = m->state_dim, values = m->heads * m->head_dim, channels = m->convolution.channels;
    const int64_t size = dim * m->head_dim, group = head / (m->heads / m->groups);
    float *const own = m->memory + (at->writes[s] * m->heads + head) * size;
    const float *from = at->reads[s] < 0 ? NULL : m->memory + (at->reads[s] * m->heads + head) * size;
    for (int64_t row = at->starts[s]; row < at->starts[s + 1]; row++, from = own) {
        const float *const mixed = m->convolution.mixed + row * channels;
        const float raw = softplus(m->x[row * m->x_stride + values + channels + head] + m->shift[head]);
        const float step = raw < m->least ? m->least : raw > m->most ? m->most : raw;
        const float keep = one_exponential(m->decay[head] * step);
        const float *const v = mixed + head * m->head_dim, *const b = mixed + values + group * dim;
        const float *const c = b + m->groups * dim;
        float *const y = m->out + row * values + head * m->head_dim;
        if (dim == 128) remember_128(m, from, own, b, c, v, step, keep, m->skip[head], y);
        else remember_any(m, from, own, b, c, v, step, keep, m->skip[head], y);
        if (at->cuts[s] && row + 1 == at->starts[s] + at->cuts[s])
            memcpy(m->memory + (at->saves[s] * m->heads + head) * size, own, size * sizeof *own);
    }
}

/* A group of a row: y times silu(z), before the norm or after it. */
static void ONCE finish(const Mamba2 *m, float *y, const float *z, const float *norm, int64_t dim) {
    if (m->gate_first || !norm)
        for (int64_t i = 0; i < dim; i += LANES) {
            const vector gated = load_some(y + i, dim - i) * silu(load_some(z + i, dim - i));
            store_some(y + i, gated, dim - i);
        }
    if (!norm) return;
    const float scale = 1 / sqrtf(squares(y, dim) / dim + m->eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vector normed = load_some(y + i, dim - i) * scale * load_some(norm + i, dim - i);
        store_some(y + i, m->gate_first ? normed : normed * silu(load_some(z + i, dim - i)), dim - i);
    }
}

static void mamba_team(const Mamba2 *m) {
    const int64_t values = m->heads * m->head_dim, dim = m->norm_groups ? values / m->norm_groups : 0;
    const int64_t rows = m->states.starts[m->states.sequences];
    convolve_team(&m->convolution, &m->states);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < m->states.sequences * m->heads; i++) run_head(m, i / m->heads, i % m->heads);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * m->norm_groups; i++) {
        const int64_t row = i / m->norm_groups, first = i % m->norm_groups * dim;
        finish(m, m->out + row * values + first, m->x + row * m->x_stride + first, m->norm ? m->norm + first : NULL, dim);
    }
}

/* As `ReferenceOps.mamba2`. */
void mamba2(float *out, const float *x, int64_t x_stride, float *mixed, const float *taps, const float *bias, const float *decay,
            const float *shift, const float *skip, const float *norm, float *inputs, float *memory, const int64_t *starts,
            const int64_t *reads, const int64_t *writes, const int64_t *cuts, const int64_t *saves, int64_t sequences,
            int64_t taps_count, int64_t heads, int64_t groups, int64_t head_dim, int64_t state_dim, int64_t norm_groups,
            int64_t gate_first, float least, float most, float eps) {
    const int64_t values = heads * head_dim, channels = values + 2 * groups * state_dim;
    const Convolution convolution = {x + values, taps, bias, inputs, mixed, x_stride, taps_count, channels};
    const States states = {starts, reads, writes, cuts, saves, sequences};
    const Mamba2 m = {convolution, states, out, x, x_stride, decay, shift, skip, norm, memory, heads, groups, head_dim, state_dim,
                      norm_groups, gate_first, least, most, eps};
#pragma omp parallel if (starts[sequences] * values * state_dim > 16384)
    mamba_team(&m);
}
