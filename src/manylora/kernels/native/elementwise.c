/* What would be several small calls otherwise. float32, rows in parallel where there are many. */

#include "vectors.h"

enum { MANY = 64 };

/* out [rows, width] = weight * x / sqrt(mean(x^2) + eps) */
void rms_norm(float *restrict out, const float *restrict x, int64_t x_stride, const float *restrict weight,
              int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * x_stride;
        float sum = 0;
        for (int64_t i = 0; i < width; i++) sum += in[i] * in[i];
        const float scale = 1 / sqrtf(sum / width + eps);
        for (int64_t i = 0; i < width; i++) out[row * width + i] = weight[i] * (in[i] * scale);
    }
}

/* out [rows, heads, dim] = x cos + rotated(x) sin, halves of dim; cos, sin [rows, dim]; a head of x is whole. */
void rotary(float *restrict out, const float *restrict x, int64_t x_stride, int64_t head_stride, const float *restrict cos,
            const float *restrict sin, int64_t rows, int64_t heads, int64_t dim) {
    const int64_t half = dim / 2;
#pragma omp parallel for if (rows > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * dim, *s = sin + row * dim;
        for (int64_t h = 0; h < heads; h++) {
            const float *in = x + row * x_stride + h * head_stride;
            float *to = out + (row * heads + h) * dim;
            for (int64_t i = 0; i < half; i++) {
                to[i] = in[i] * c[i] - in[half + i] * s[i];
                to[half + i] = in[half + i] * c[half + i] + in[i] * s[half + i];
            }
        }
    }
}
