/* The gated delta rule after a causal convolution. Heads are independent of each other; the rows of a sequence are
 * computed one after another, always in the same way, so neither the chunks of a prompt nor other sequences change a
 * bit. */

#include "recurrent.h"

typedef struct {
    Convolution convolution;
    States states;
    float *out;         /* [rows, values] */
    const float *z;     /* the gates of values, in x */
    const float *gates; /* [b; a] */
    int64_t x_stride, gates_stride;
    const float *decay, *shift, *norm;
    float *memory;
    int64_t key_heads, heads, key_dim, value_dim;
    float eps;
} DeltaRule;

INLINE void scaled(float *to, const float *x, int64_t dim, float scale) {
    for (int64_t i = 0; i < dim; i += LANES) store_some(to + i, load_some(x + i, dim - i) * scale, dim - i);
}

/* One row of one head. from: its memory before, [value_dim, key_dim], or NULL for zeros; to: its memory after, which
 * may be `from`. y: room for value_dim. dim: key_dim, in the machine code a constant where it is common. */
INLINE void remember(const DeltaRule *c, const float *from, float *to, const float *q, const float *k, const float *v,
                     float beta, float keep, float *y, int64_t dim) {
    vector both = all(0);
    for (int64_t i = 0; i < dim; i += LANES) both = multiply_add(load_some(q + i, dim - i), load_some(k + i, dim - i), both);
    const float qk = total(both);
    for (int64_t j = 0; j < c->value_dim; j++) {
        float *const row = to + j * dim;
        if (!from) {
            const float change = v[j] * beta;
            scaled(row, k, dim, change);
            y[j] = qk * change;
            continue;
        }
        const float *const old = from + j * dim;
        vector known = all(0), seen = all(0);
        for (int64_t i = 0; i < dim; i += LANES) {
            const vector some = load_some(old + i, dim - i);
            known = multiply_add(some, load_some(k + i, dim - i), known);
            seen = multiply_add(some, load_some(q + i, dim - i), seen);
        }
        const float change = (v[j] - keep * total(known)) * beta;
        y[j] = keep * total(seen) + qk * change;
        const vector kept = all(keep), changed = all(change);
        for (int64_t i = 0; i < dim; i += LANES)
            store_some(row + i, multiply_add(changed, load_some(k + i, dim - i), load_some(old + i, dim - i) * kept), dim - i);
    }
}

static void ONCE remember_any(const DeltaRule *c, const float *from, float *to, const float *q, const float *k, const float *v,
                              float beta, float keep, float *y) {
    remember(c, from, to, q, k, v, beta, keep, y, c->key_dim);
}

static void ONCE remember_128(const DeltaRule *c, const float *from, float *to, const float *q, const float *k, const float *v,
                              float beta, float keep, float *y) {
    remember(c, from, to, q, k, v, beta, keep, y, 128);
}

/* y / its root mean square, times norm and silu(z). */
static void ONCE finish(const DeltaRule *c, const float *y, const float *z, float *out) {
    const int64_t dim = c->value_dim;
    const float scale = 1 / sqrtf(squares(y, dim) / dim + c->eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vector normed = load_some(y + i, dim - i) * scale * load_some(c->norm + i, dim - i);
        store_some(out + i, normed * silu(load_some(z + i, dim - i)), dim - i);
    }
}

static void ONCE run_head(const DeltaRule *c, int64_t s, int64_t head) {
    const States *const at = &c->states;
    const int64_t dim = c->key_dim, keys = c->key_heads * dim, values = c->heads * c->value_dim, channels = 2 * keys + values;
    const int64_t size = dim * c->value_dim, group = head / (c->heads / c->key_heads);
    float *const own = c->memory + (at->writes[s] * c->heads + head) * size;
    const float *from = at->reads[s] < 0 ? NULL : c->memory + (at->reads[s] * c->heads + head) * size;
    float q[LARGEST], k[LARGEST], y[LARGEST];
    for (int64_t row = at->starts[s]; row < at->starts[s + 1]; row++, from = own) {
        const float *const mixed = c->convolution.mixed + row * channels, *const gates = c->gates + row * c->gates_stride;
        scaled(q, mixed + group * dim, dim, 1 / (sqrtf(squares(mixed + group * dim, dim) + 1e-6f) * sqrtf(dim)));
        scaled(k, mixed + keys + group * dim, dim, 1 / sqrtf(squares(mixed + keys + group * dim, dim) + 1e-6f));
        const float beta = 1 / (1 + one_exponential(-gates[head]));
        const float keep = one_exponential(c->decay[head] * softplus(gates[c->heads + head] + c->shift[head]));
        const float *const v = mixed + 2 * keys + head * c->value_dim;
        if (dim == 128) remember_128(c, from, own, q, k, v, beta, keep, y);
        else remember_any(c, from, own, q, k, v, beta, keep, y);
        finish(c, y, c->z + row * c->x_stride + head * c->value_dim, c->out + row * values + head * c->value_dim);
        if (at->cuts[s] && row + 1 == at->starts[s] + at->cuts[s])
            memcpy(c->memory + (at->saves[s] * c->heads + head) * size, own, size * sizeof *own);
    }
}

static void delta_team(const DeltaRule *c) {
    convolve_team(&c->convolution, &c->states);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < c->states.sequences * c->heads; i++) run_head(c, i / c->heads, i % c->heads);
}

/* As `ReferenceOps.delta_rule`. */
void delta_rule(float *out, const float *x, int64_t x_stride, const float *gates, int64_t gates_stride, float *mixed,
                const float *taps, const float *decay, const float *shift, const float *norm, float *inputs, float *memory,
                const int64_t *starts, const int64_t *reads, const int64_t *writes, const int64_t *cuts, const int64_t *saves,
                int64_t sequences, int64_t taps_count, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
                float eps) {
    const int64_t channels = 2 * key_heads * key_dim + heads * value_dim;
    const Convolution convolution = {x, taps, NULL, inputs, mixed, x_stride, taps_count, channels};
    const States states = {starts, reads, writes, cuts, saves, sequences};
    const DeltaRule c = {convolution, states, out, x + channels, gates, x_stride, gates_stride, decay, shift, norm, memory,
                         key_heads, heads, key_dim, value_dim, eps};
#pragma omp parallel if (starts[sequences] * heads * key_dim * value_dim > 16384)
    delta_team(&c);
}
