/* Norms, activations, rotary embeddings and greedy choice, which torch would do in several small calls each. float32;
 * rows in parallel where there are many. */

#include "team.h"

enum { MANY = 64 /* rows */, MANY_LOGITS = 1 << 17 };
enum { SILU, GELU, GELU_TANH };

void ONCE norm_row(float *to, const float *in, const float *weight, int64_t width, float eps) {
    const float scale = 1 / sqrtf(squares(in, width) / width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) to[i] = weight[i] * (in[i] * scale);
}

void norm_team(float *total, float *out, const float *x, int64_t x_stride, const float *delta, int64_t delta_stride,
               const float *weight, int64_t rows, int64_t width, float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * x_stride;
        if (delta) {
            const float *const more = delta + row * delta_stride;
            float *const whole = total + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) whole[i] = in[i] + more[i];
            in = whole;
        }
        if (weight) norm_row(out + row * width, in, weight, width, eps);
    }
}

/* total = x + delta, or x itself where there is no delta;
 * out [rows, width] = weight * total / sqrt(mean(total^2) + eps) */
void add_rms_norm(float *total, float *out, const float *x, int64_t x_stride, const float *delta, int64_t delta_stride,
                  const float *weight, int64_t rows, int64_t width, float eps) {
#pragma omp parallel if (rows > MANY)
    norm_team(total, out, x, x_stride, delta, delta_stride, weight, rows, width, eps);
}

/* The activation is gate * share(gate). (1 + tanh(a)) / 2 = 1 / (1 + exp(-2a)) */
INLINE vector share(int activation, vector gate) {
    if (activation == SILU) return 1 / (1 + exponential(-gate));
    if (activation == GELU_TANH) return 1 / (1 + exponential(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)));
    for (int i = 0; i < LANES; i++) gate[i] = 0.5f * (1 + erff(gate[i] * 0.70710678f));
    return gate;
}

static void ONCE gate_row(float *out, const float *up, int64_t width, int64_t activation) {
    const float *const gates = up + width;
    for (int64_t i = 0; i < width; i += LANES) {
        const vector gate = load_some(gates + i, width - i);
        store_some(out + i, load_some(up + i, width - i) * gate * share(activation, gate), width - i);
    }
}

void gate_team(float *out, const float *y, int64_t y_stride, int64_t rows, int64_t width, int64_t activation) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) gate_row(out + row * width, y + row * y_stride, width, activation);
}

/* out [rows, width] = f(gate) * up, rows of y being up and gate */
void gated(float *out, const float *y, int64_t y_stride, int64_t rows, int64_t width, int64_t activation) {
#pragma omp parallel if (rows > MANY)
    gate_team(out, y, y_stride, rows, width, activation);
}

/* x [heads, dim] with the first `turned` dimensions of each head rotated: x cos + (-x2, x1) sin, where x1 and x2 are
 * their halves. pairs: x1 and x2 are the even and the odd ones, which become the halves. */
static void ONCE turn(float *to, const float *x, const float *cos, const float *sin, int64_t heads, int64_t dim, int64_t turned,
                      int64_t pairs) {
    const int64_t half = turned / 2;
    for (int64_t h = 0; h < heads; h++, x += dim, to += dim) {
        const float *const from = pairs ? to : x;
        if (pairs)
            for (int64_t i = 0; i < half; i++) to[i] = x[2 * i], to[half + i] = x[2 * i + 1];
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            const float first = from[i], second = from[half + i];
            to[i] = first * cos[i] - second * sin[i];
            to[half + i] = second * cos[half + i] + first * sin[half + i];
        }
        for (int64_t i = turned; i < dim; i++) to[i] = x[i];
    }
}

static void ONCE round_row(char *to, const float *x, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) narrow_any(to + i * 2, (words)load(x + i));
    if (i < count) {
        char rest[2 * LANES];
        narrow_any(rest, (words)load_some(x + i, count - i));
        memcpy(to + i * 2, rest, (count - i) * 2);
    }
}

/* A row's keys and values to row `at` of the caches. */
static void keep(const Rotation *r, int64_t row, int64_t at, const float *cos, const float *sin) {
    const float *const k = r->k + row * r->k_stride, *const v = r->v + row * r->v_stride;
    const int64_t width = r->kv_heads * r->dim, place = at * width * size_of(r->kind);
    if (r->kind == FLOAT32) {
        turn((float *)(r->k_cache + place), k, cos, sin, r->kv_heads, r->dim, r->turned, r->pairs);
        memcpy(r->v_cache + place, v, width * sizeof *v);
        return;
    }
    float head[LARGEST_HEAD];
    for (int64_t h = 0; h < r->kv_heads; h++) {
        turn(head, k + h * r->dim, cos, sin, 1, r->dim, r->turned, r->pairs);
        round_row(r->k_cache + place + h * r->dim * 2, head, r->dim);
    }
    round_row(r->v_cache + place, v, width);
}

void rotate_team(const Rotation *r) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < r->rows; row++) {
        const int64_t place = (r->places ? r->places[row] : row) * r->turned;
        const float *const c = r->cos + place, *const s = r->sin + place;
        if (r->turned)
            turn(r->q_out + row * r->heads * r->dim, r->q + row * r->q_stride, c, s, r->heads, r->dim, r->turned, r->pairs);
        keep(r, row, r->slots[row], c, s);
    }
}

/* Rotated q to q_out [rows, heads, dim]; rotated k, and v, to row slots[row] of the caches, rounded to their kind,
 * FLOAT32 or BFLOAT16 (dim is at most LARGEST_HEAD then). The heads of a row are contiguous; cos, sin [rows, turned];
 * turned 0: q is left alone. */
void rotate_and_store(float *q_out, const float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v,
                      int64_t v_stride, const float *cos, const float *sin, int64_t kind, char *k_cache, char *v_cache,
                      const int64_t *slots, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t turned) {
    const Rotation r = {q_out, q, k, v, q_stride, k_stride, v_stride, cos, sin, k_cache, v_cache, slots, rows, heads,
                        kv_heads, dim, turned, 0, NULL, kind};
#pragma omp parallel if (rows > MANY)
    rotate_team(&r);
}

/* Where the largest number of a row is, the first of equal ones; -1 if any is NaN or infinite. */
static int64_t ONCE best_of(const float *x, int64_t width) {
    vector most = all(-INFINITY), sum = {0};
    integers places = {0}, here = {0};
    for (int i = 0; i < LANES; i++) here[i] = i;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES, here += LANES) {
        const vector some = load(x + i);
        const integers more = some > most;
        most = choose(more, some, most);
        places = (more & here) | (~more & places);
        sum += some - some; /* 0, or NaN from then on */
    }
    float largest = -INFINITY, wrong = total(sum);
    int64_t place = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] > largest || (most[lane] == largest && places[lane] < place)) largest = most[lane], place = places[lane];
    for (; i < width; i++) {
        wrong += x[i] - x[i];
        if (x[i] > largest) largest = x[i], place = i;
    }
    return wrong == 0 ? place : -1;
}

/* best [rows] of logits [rows, width]; width below 2^31 */
void best_team(int64_t *best, const float *logits, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) best[row] = best_of(logits + row * width, width);
}

void best_tokens(int64_t *best, const float *logits, int64_t rows, int64_t width) {
#pragma omp parallel if (rows > 1 && rows * width > MANY_LOGITS)
    best_team(best, logits, rows, width);
}
