/* What torch has no call for, on a CPU in float32: adapters row by row, and decode attention over pages.
 *
 * Semantics are those of kernels/spec.py. Sums are reordered (-ffast-math), so results agree with the
 * reference to rounding, and are the same for a row whatever its company. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    int64_t start, stop;   /* rows of x and y */
    int64_t first, count;  /* its parts */
} Segment;

typedef struct {
    int64_t column, width;  /* of y */
    int64_t offset, rank;   /* in the pool: A [rank, in], B transposed [rank, width] */
} Part;

static float dot(const float *restrict a, const float *restrict b, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void add_scaled(float *restrict y, const float *restrict x, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += scale * x[i];
}

/* y[row, columns] += (x[row] A^T) B^T for every row of every segment. */
void lora_add(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in_dim, const float *pool,
              const Segment *segments, int64_t num_segments, const Part *parts) {
#pragma omp parallel for schedule(dynamic, 1) if (num_segments > 1)
    for (int64_t s = 0; s < num_segments; s++) {
        for (int64_t p = segments[s].first; p < segments[s].first + segments[s].count; p++) {
            const Part part = parts[p];
            const float *a = pool + part.offset, *b = a + part.rank * in_dim;
            for (int64_t row = segments[s].start; row < segments[s].stop; row++) {
                const float *in = x + row * x_stride;
                float *out = y + row * y_stride + part.column;
                for (int64_t r = 0; r < part.rank; r++)
                    add_scaled(out, b + r * part.width, dot(in, a + r * in_dim, in_dim), part.width);
            }
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
                for (int64_t g = 0; g < group; g++) add_scaled(to + g * dim, value, mine[g * longest + t], dim);
            }
        }
    }
}
