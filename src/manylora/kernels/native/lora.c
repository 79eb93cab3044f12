/* y[row, columns] += (x[row] A^T) B^T for the rows of every adapter of a batch, in place in the page pool. */

#include "vectors.h"

enum { ROWS = 4 }; /* that share each reading of A and B */

typedef struct {
    int64_t column, width; /* of y */
    int64_t offset, rank;  /* in the pool: A [rank, in], B transposed [rank, width] */
} Part;

typedef struct {
    int64_t start, stop; /* rows of x and y */
    const Part *parts;
    int64_t count;
} Segment;

/* h[row, r] = x[row] . a[r] */
INLINE void shrink(const int rows, const float *x, int64_t x_stride, const float *a, int64_t in, int64_t rank, float *h) {
    const int64_t whole = in - in % LANES;
    for (int64_t r = 0; r < rank; r++, a += in) {
        vector sum[ROWS];
        UNROLL for (int i = 0; i < rows; i++) sum[i] = all(0);
        for (int64_t k = 0; k < whole; k += LANES) {
            const vector here = load(a + k);
            UNROLL for (int i = 0; i < rows; i++) sum[i] += here * load(x + i * x_stride + k);
        }
        for (int i = 0; i < rows; i++) {
            float one = total(sum[i]);
            for (int64_t k = whole; k < in; k++) one += a[k] * x[i * x_stride + k];
            h[i * rank + r] = one;
        }
    }
}

/* y[row] += h[row] B, b = B [rank, width] */
INLINE void expand(const int rows, float *y, int64_t y_stride, const float *h, const float *b, int64_t width, int64_t rank) {
    const int64_t whole = width - width % (2 * LANES);
    for (int64_t c = 0; c < whole; c += 2 * LANES) {
        vector sum[ROWS][2];
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int v = 0; v < 2; v++) sum[i][v] = load(y + i * y_stride + c + v * LANES);
        for (int64_t r = 0; r < rank; r++) {
            const vector left = load(b + r * width + c), right = load(b + r * width + c + LANES);
            UNROLL for (int i = 0; i < rows; i++) {
                sum[i][0] += all(h[i * rank + r]) * left;
                sum[i][1] += all(h[i * rank + r]) * right;
            }
        }
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int v = 0; v < 2; v++) store(y + i * y_stride + c + v * LANES, sum[i][v]);
    }
    for (int i = 0; i < rows; i++)
        for (int64_t c = whole; c < width; c++) {
            float sum = y[i * y_stride + c];
            for (int64_t r = 0; r < rank; r++) sum += h[i * rank + r] * b[r * width + c];
            y[i * y_stride + c] = sum;
        }
}

INLINE void both(const int rows, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
                 const float *a, const Part *part) {
    float h[ROWS * part->rank];
    shrink(rows, x, x_stride, a, in, part->rank, h);
    expand(rows, y + part->column, y_stride, h, a + part->rank * in, part->width, part->rank);
}

/* parts, rows: the most that a segment has. */
void lora_add(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in, const float *pool,
              const Segment *segments, int64_t count, int64_t parts, int64_t rows) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic, 1) collapse(3) if (count * parts * blocks > 1)
    for (int64_t s = 0; s < count; s++)
        for (int64_t p = 0; p < parts; p++)
            for (int64_t b = 0; b < blocks; b++) {
                const Segment *segment = segments + s;
                const int64_t start = segment->start + b * ROWS;
                if (p >= segment->count || start >= segment->stop) continue;
                const Part *part = segment->parts + p;
                float *const out = y + start * y_stride;
                const float *const from = x + start * x_stride, *const a = pool + part->offset;
                switch (least(segment->stop - start, ROWS)) {
                    case 1: both(1, out, y_stride, from, x_stride, in, a, part); break;
                    case 2: both(2, out, y_stride, from, x_stride, in, a, part); break;
                    case 3: both(3, out, y_stride, from, x_stride, in, a, part); break;
                    default: both(4, out, y_stride, from, x_stride, in, a, part);
                }
            }
}
