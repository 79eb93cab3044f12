/* Decode attention over pages in place. Keys and values are float32 or bfloat16, everything else float32.
 *
 * The speed of memory is the limit, so a token's keys and values are read from it once, for all heads of the task.
 * Those of the next run are prefetched meanwhile: they are short pieces, and the hardware's prefetching does not
 * follow the jumps between them. The sums of a head are made in the same order however heads are divided among
 * threads. */

#include "team.h"

enum { MOST = LARGEST_HEAD / LANES /* vectors in a head */, RUN = 16 /* tokens that stay in the cache from query to query */ };

typedef struct {
    const char *keys, *values;
    const int32_t *blocks;                    /* of this sequence */
    int64_t size, stride, dim, begin, end;    /* tokens of a block; elements from token to token, of a head; tokens */
    int64_t group, first, last;               /* queries of a kv head; kv heads of this task */
} Task;

INLINE int64_t place(const Task *t, int64_t token) {
    return (t->blocks[token / t->size] * t->size + token % t->size) * t->stride;
}

/* Runs of up to RUN tokens of one block: tokens [token, stop), whose first row lies at `at`. */
#define FOR_RUNS(t)                                                                                     \
    for (int64_t token = (t)->begin, stop, at; token < (t)->end; token = stop)                          \
        if (at = place(t, token),                                                                        \
            stop = least(least((t)->end, token + RUN), (token / (t)->size + 1) * (t)->size), 1)

/* Vector v of a head. whole: heads are whole vectors; otherwise the last one may be a part. */
INLINE vector piece(const int whole, const Task *t, const float *head, int v) {
    return whole ? load(head + v * LANES) : load_some(head + v * LANES, t->dim - v * LANES);
}

/* The same of a head in a cache. */
INLINE vector cached(const Kind kind, const int whole, const Task *t, const char *head, int v) {
    if (kind == FLOAT32) return piece(whole, t, (const float *)head, v);
    const int64_t left = t->dim - v * LANES;
    if (whole || left >= LANES) return widen(kind, head + v * LANES * size_of(kind));
    char some[2 * LANES] = {0};
    memcpy(some, head + v * LANES * size_of(kind), left * size_of(kind));
    return widen(kind, some);
}

/* What the run of tokens [token, stop), which begins at `at`, prefetches of the next run, head by head; in the order of
 * memory where the task reads all heads. */
typedef struct {
    const char *from;
    int64_t head, step; /* bytes from head to head, and from token to token of one */
} Next;

INLINE Next next_run(const Kind kind, const Task *t, const char *cache, int64_t token, int64_t stop, int64_t at) {
    const int in_order = (t->last - t->first) * t->dim == t->stride;
    const int64_t size = size_of(kind);
    return (Next){cache + (stop < t->end ? place(t, stop) : at) * size, (in_order ? (stop - token) * t->dim : t->dim) * size,
                  (in_order ? t->dim : t->stride) * size};
}

/* score[h, token] = scale * q[h] . key[token]; count: vectors in a head */
INLINE void scores_of(const Kind kind, const int count, const int whole, const Task *t, const float *q, float scale,
                      float *score, int64_t longest) {
    const int64_t size = size_of(kind), stride = t->stride * size;
    FOR_RUNS(t) {
        const Next next = next_run(kind, t, t->keys, token, stop, at);
        for (int64_t h = t->first; h < t->last; h++)
            for (int64_t g = 0; g < t->group; g++) {
                const char *key = t->keys + (at + h * t->dim) * size, *ahead = next.from + h * next.head;
                const float *const one = q + (h * t->group + g) * t->dim;
                float *const to = score + (h * t->group + g) * longest;
                vector query[MOST];
                UNROLL for (int v = 0; v < count; v++) query[v] = piece(whole, t, one, v) * all(scale);
                for (int64_t i = token; i < stop; i++, key += stride, ahead += next.step) {
                    if (!g) fetch(ahead, count * LANES * size);
                    vector sum = query[0] * cached(kind, whole, t, key, 0);
                    UNROLL for (int v = 1; v < count; v++) sum = multiply_add(query[v], cached(kind, whole, t, key, v), sum);
                    to[i] = total(sum);
                }
            }
    }
}

/* out[h] = sum over tokens of score[h, token] * value[token] */
INLINE void mix(const Kind kind, const int count, const int whole, const Task *t, float *out, const float *score,
                int64_t longest) {
    const int64_t size = size_of(kind), stride = t->stride * size;
    FOR_RUNS(t) {
        const Next next = next_run(kind, t, t->values, token, stop, at);
        for (int64_t h = t->first; h < t->last; h++)
            for (int64_t g = 0; g < t->group; g++) {
                const char *value = t->values + (at + h * t->dim) * size, *ahead = next.from + h * next.head;
                const float *const from = score + (h * t->group + g) * longest;
                float *const to = out + (h * t->group + g) * t->dim;
                vector sum[MOST];
                UNROLL for (int v = 0; v < count; v++) sum[v] = token == t->begin ? all(0) : piece(whole, t, to, v);
                for (int64_t i = token; i < stop; i++, value += stride, ahead += next.step) {
                    if (!g) fetch(ahead, count * LANES * size);
                    const vector weight = all(from[i]);
                    UNROLL for (int v = 0; v < count; v++) sum[v] = multiply_add(weight, cached(kind, whole, t, value, v), sum[v]);
                }
                UNROLL for (int v = 0; v < count; v++) store_some(to + v * LANES, sum[v], whole ? LANES : t->dim - v * LANES);
            }
    }
}

/* score = cap tanh(score / cap); near 0 by a polynomial, as 1 - 2 / (1 + exp(2x)) loses its digits there */
static void bound(float *score, int64_t begin, int64_t end, float cap) {
    static const float terms[] = {2.06390888e-2f, -5.37397155e-2f, 1.33314422e-1f, -3.33332819e-1f};
    for (int64_t t = begin; t < end; t += LANES) {
        const vector x = load_some(score + t, end - t) / cap, z = x * x;
        const vector near = multiply_add(x * z, polynomial(z, all(-5.70498873e-3f), terms, 4), x);
        const vector far = 1 - 2 / (1 + exponential(2 * x));
        store_some(score + t, cap * choose(z < 0.390625f, near, far), end - t);
    }
}

/* sink: one more score, which counts in the sum but belongs to no token; or NULL */
static void softmax(float *score, int64_t begin, int64_t end, const float *sink) {
    vector sums = all(0), tops = all(score[begin]);
    float top = sink && *sink > score[begin] ? *sink : score[begin], sum;
    int64_t rest = begin;
    for (; rest + LANES <= end; rest += LANES) tops = choose(load(score + rest) > tops, load(score + rest), tops);
    for (int v = 0; v < LANES; v++) top = tops[v] > top ? tops[v] : top;
    for (; rest < end; rest++) top = score[rest] > top ? score[rest] : top;
    for (int64_t t = begin; t < end; t += LANES) {
        const vector one = exponential(load_some(score + t, end - t) - top);
        store_some(score + t, one, end - t);
        sums += load_some(score + t, end - t);
    }
    sum = total(sums);
    if (sink) sum += exponential(all(*sink - top))[0];
    sum = 1 / sum;
    for (int64_t t = begin; t < end; t++) score[t] *= sum;
}

INLINE void attend(const Kind kind, const int count, const int whole, const Task *t, float *out, const float *q, float scale,
                   float cap, const float *sinks, float *score, int64_t longest) {
    scores_of(kind, count, whole, t, q, scale, score, longest);
    for (int64_t head = t->first * t->group; head < t->last * t->group; head++) {
        if (cap) bound(score + head * longest, t->begin, t->end, cap);
        softmax(score + head * longest, t->begin, t->end, sinks ? sinks + head : NULL);
    }
    mix(kind, count, whole, t, out, score, longest);
}

#define HEAD(n) \
    case n: attend(kind, n, 1, &t, to, from, scale, cap, a->sinks, score, longest); break;

INLINE void attention_of(const Kind kind, const Attention *a) {
    const int few = a->n < 2 * number_of_threads(); /* then heads are divided among threads, too */
    const int64_t parts = few ? a->kv_heads : 1, each = a->kv_heads / parts;
#pragma omp for schedule(dynamic, 1)
    for (int64_t p = 0; p < a->n * parts; p++) {
        const int64_t s = p / parts, first = p % parts * each, longest = a->longest;
        const Task t = {a->keys, a->values, a->table + s * a->columns, a->size, a->kv_heads * a->dim, a->dim,
                        a->window >= 0 && a->lengths[s] > a->window ? a->lengths[s] - a->window : 0, a->lengths[s],
                        a->heads / a->kv_heads, first, first + each};
        float *const to = a->out + s * a->out_stride, *const score = a->scores + s * a->heads * longest;
        const float *const from = a->q + s * a->q_stride, scale = a->scale, cap = a->cap;
        switch (a->dim % LANES ? 0 : a->dim / LANES) {
            HEAD(1) HEAD(2) HEAD(3) HEAD(4) HEAD(5) HEAD(6) HEAD(8) HEAD(16)
            default: attend(kind, (a->dim + LANES - 1) / LANES, 0, &t, to, from, scale, cap, a->sinks, score, longest); /* for few models */
        }
    }
}

static void ONCE attention_float32(const Attention *a) { attention_of(FLOAT32, a); }
static void ONCE attention_bfloat16(const Attention *a) { attention_of(BFLOAT16, a); }

void attention_team(const Attention *a) { (a->kind == BFLOAT16 ? attention_bfloat16 : attention_float32)(a); }

/* One query for each of n sequences. q, out [n, heads, dim] with row strides; kind: of the caches [blocks, size,
 * kv_heads, dim], FLOAT32 or BFLOAT16; table [n, columns]; lengths [n]; window < 0: none; cap 0: none; sinks [heads] or
 * NULL; scores: room for n * heads * longest floats. dim is at most LARGEST_HEAD. */
void decode_attention(float *out, int64_t out_stride, const float *q, int64_t q_stride, int64_t kind, const char *keys,
                      const char *values, const int32_t *table, int64_t columns, const int64_t *lengths,
                      int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t size, float scale,
                      int64_t window, float cap, const float *sinks, float *scores, int64_t longest) {
    const Attention a = {out, q, keys, values, table, lengths, scores, out_stride, q_stride, columns, n, heads,
                         kv_heads, dim, size, longest, window, scale, cap, sinks, kind};
#pragma omp parallel
    attention_team(&a);
}
