/* Decode attention over pages in place. float32. */

#include "vectors.h"

enum { MOST = 16 }; /* vectors in a head */

typedef struct {
    const float *keys, *values;
    const int32_t *blocks; /* of this sequence */
    int64_t size, stride, head; /* tokens of a block; floats from token to token, and to this head */
} Pages;

INLINE int64_t place(const Pages *pages, int64_t token) {
    return (pages->blocks[token / pages->size] * pages->size + token % pages->size) * pages->stride + pages->head;
}

/* Each token t in [begin, end) with its place; block by block, for division is slow. */
#define FOR_TOKENS(at)                                                                            \
    for (int64_t block = begin / pages->size, t = begin; t < end; block++)                        \
        for (int64_t at = place(pages, t), stop = least(end, (block + 1) * pages->size); t < stop; \
             t++, at += pages->stride)

/* score[t] = scale * q . key[t] for t in [begin, end); count: vectors in a head */
INLINE void scores_of(const int count, const float *q, const Pages *pages, int64_t begin, int64_t end, float scale, float *score) {
    vector query[MOST];
    UNROLL for (int v = 0; v < count; v++) query[v] = load(q + v * LANES) * all(scale);
    FOR_TOKENS(at) {
        const float *key = pages->keys + at;
        vector sum = query[0] * load(key);
        UNROLL for (int v = 1; v < count; v++) sum += query[v] * load(key + v * LANES);
        score[t] = total(sum);
    }
}

/* out = sum over t of score[t] * value[t] */
INLINE void mix(const int count, float *out, const Pages *pages, int64_t begin, int64_t end, const float *score) {
    vector sum[MOST];
    UNROLL for (int v = 0; v < count; v++) sum[v] = all(0);
    FOR_TOKENS(at) {
        const float *value = pages->values + at;
        const vector weight = all(score[t]);
        UNROLL for (int v = 0; v < count; v++) sum[v] += weight * load(value + v * LANES);
    }
    UNROLL for (int v = 0; v < count; v++) store(out + v * LANES, sum[v]);
}

static void softmax(float *score, int64_t begin, int64_t end) {
    float top = score[begin], sum = 0;
    for (int64_t t = begin; t < end; t++) top = score[t] > top ? score[t] : top;
    for (int64_t t = begin; t < end; t++) sum += score[t] = expf(score[t] - top);
    for (int64_t t = begin; t < end; t++) score[t] /= sum;
}

#define HEAD(n)                                                  \
    case n:                                                      \
        scores_of(n, q, pages, begin, end, scale, score);        \
        softmax(score, begin, end);                              \
        mix(n, out, pages, begin, end, score);                   \
        break;

static void one_head(int64_t dim, float *out, const float *q, const Pages *pages, int64_t begin, int64_t end,
                     float scale, float *score) {
    switch (dim % LANES ? 0 : dim / LANES) {
        HEAD(1) HEAD(2) HEAD(3) HEAD(4) HEAD(5) HEAD(6) HEAD(8) HEAD(16)
        default: /* sizes that no common model has */
            FOR_TOKENS(at) {
                const float *key = pages->keys + at;
                float sum = 0;
                for (int64_t i = 0; i < dim; i++) sum += q[i] * key[i];
                score[t] = scale * sum;
            }
            softmax(score, begin, end);
            for (int64_t i = 0; i < dim; i++) out[i] = 0;
            FOR_TOKENS(at) {
                const float *value = pages->values + at;
                for (int64_t i = 0; i < dim; i++) out[i] += score[t] * value[i];
            }
    }
}

/* One query for each of n sequences. q, out [n, heads, dim] with row strides; caches [blocks, size, kv_heads, dim];
 * table [n, columns]; lengths [n]; window < 0: none; scores: room for n * heads * longest floats. */
void decode_attention(float *out, int64_t out_stride, const float *q, int64_t q_stride, const float *keys,
                      const float *values, const int32_t *table, int64_t columns, const int64_t *lengths,
                      int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t size, float scale,
                      int64_t window, float *scores, int64_t longest) {
    const int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (int64_t s = 0; s < n; s++)
        for (int64_t h = 0; h < kv_heads; h++) {
            const Pages pages = {keys, values, table + s * columns, size, kv_heads * dim, h * dim};
            const int64_t begin = window >= 0 && lengths[s] > window ? lengths[s] - window : 0;
            for (int64_t head = h * group; head < (h + 1) * group; head++)
                one_head(dim, out + s * out_stride + head * dim, q + s * q_stride + head * dim, &pages, begin, lengths[s],
                         scale, scores + (s * heads + head) * longest);
        }
}
