/* Decode attention over pages in place, and what goes into the pages. float32. */

#include "vectors.h"

static float dot(const float *restrict a, const float *restrict b, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* One query for each of n sequences. q, out [n, heads, dim] with row strides; caches [blocks, size, kv_heads, dim];
 * table [n, columns]; lengths [n]; window < 0: none; scores: room for n * heads * longest floats. */
void decode_attention(float *out, int64_t out_stride, const float *q, int64_t q_stride, const float *keys,
                      const float *values, const int32_t *table, int64_t columns, const int64_t *lengths,
                      int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t size, float scale,
                      int64_t window, float *scores, int64_t longest) {
    const int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (int64_t s = 0; s < n; s++) {
        for (int64_t h = 0; h < kv_heads; h++) {
            const int64_t length = lengths[s];
            const int64_t begin = window >= 0 && length > window ? length - window : 0;
            float *mine = scores + (s * heads + h * group) * longest;
            for (int64_t t = begin; t < length; t++) {
                const int64_t slot = (int64_t)table[s * columns + t / size] * size + t % size;
                const float *key = keys + (slot * kv_heads + h) * dim;
                for (int64_t g = 0; g < group; g++)
                    mine[g * longest + t] = scale * dot(q + s * q_stride + (h * group + g) * dim, key, dim);
            }
            for (int64_t g = 0; g < group; g++) {
                float *score = mine + g * longest, top = score[begin], sum = 0;
                for (int64_t t = begin; t < length; t++) top = score[t] > top ? score[t] : top;
                for (int64_t t = begin; t < length; t++) sum += score[t] = expf(score[t] - top);
                for (int64_t t = begin; t < length; t++) score[t] /= sum;
            }
            float *to = out + s * out_stride + h * group * dim;
            for (int64_t i = 0; i < group * dim; i++) to[i] = 0;
            for (int64_t t = begin; t < length; t++) {
                const int64_t slot = (int64_t)table[s * columns + t / size] * size + t % size;
                const float *value = values + (slot * kv_heads + h) * dim;
                for (int64_t g = 0; g < group; g++) {
                    const float weight = mine[g * longest + t];
                    float *sum = to + g * dim;
                    for (int64_t i = 0; i < dim; i++) sum[i] += weight * value[i];
                }
            }
        }
    }
}

/* cache[slots[row]] = x[row], rows of `width` floats. */
void store_rows(float *cache, const float *x, int64_t x_stride, const int64_t *slots, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        memcpy(cache + slots[row] * width, x + row * x_stride, width * sizeof *cache);
}
