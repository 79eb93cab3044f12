/* y[row, columns] += (x[row] A^T) B^T for the rows of every adapter of a batch, in place in the page pool. Its
 * elements are float32, or bfloat16 that is widened in registers, and so are 8-bit floats, of which an adapter may be
 * beside others of the pool's type; sums are float32.
 *
 * Each byte of an adapter is used once or twice, so this runs at the speed of memory. The order of reading is known,
 * but jumps from row to row of B and from adapter to adapter, which the processor does not foresee: what comes next
 * is fetched by hand. The sums of a row are made in the same order whatever rows come with it. */

#include "vectors.h"

enum {
    ROWS = 4, /* that share each reading of A and B */
    SUMS = 8, /* vectors of y in registers */
    AHEAD = 2048 /* bytes between reading and fetching of A */
};

typedef struct {
    int64_t column, width; /* of y */
    int64_t offset, rank;  /* in the pool: A [rank, in], B transposed [rank, width] */
    int32_t float8;        /* both are 8-bit floats, and offset is in bytes */
    float scale;           /* of x A^T */
} Part;

typedef struct {
    int64_t start, stop; /* rows of x and y */
    const Part *parts;
    int64_t count;
} Segment;

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, in, width, rank;
    const char *a, *b; /* A [rank, in], B transposed [rank, width] */
    const char *next;  /* the A of the next part, or this one's again */
    float scale;
} Work;

/* h[row, r] = scale * x[row] . A[r] */
INLINE void shrink(const int rows, const Kind kind, const Work w, int64_t r, float *h) {
    const int64_t whole = w.in - w.in % LANES, size = size_of(kind);
    const char *a = w.a + r * w.in * size;
    vector sum[ROWS];
    UNROLL for (int i = 0; i < rows; i++) sum[i] = all(0);
    for (int64_t k = 0; k < whole; k += LANES) {
        __builtin_prefetch(a + k * size + AHEAD);
        const vector one = widen(kind, a + k * size);
        UNROLL for (int i = 0; i < rows; i++) sum[i] += one * load(w.x + i * w.x_stride + k);
    }
    for (int i = 0; i < rows; i++) {
        float one = total(sum[i]);
        for (int64_t k = whole; k < w.in; k++) one += widen_one(kind, a + k * size) * w.x[i * w.x_stride + k];
        h[i * w.rank + r] = one * w.scale;
    }
}

/* y[row, c:] += h[row] B[:, c:] for so many vectors of columns; those that follow are fetched meanwhile. */
INLINE void expand(const int rows, const int vectors, const Kind kind, const Work w, int64_t c, const float *h) {
    const int64_t size = size_of(kind), run = vectors * LANES * size, step = w.width * size;
    const char *b = w.b + c * size;
    vector sum[ROWS][SUMS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = load(w.y + i * w.y_stride + c + v * LANES);
    for (int64_t r = 0; r < w.rank; r++, b += step) {
        fetch(b + run, run);
        UNROLL for (int v = 0; v < vectors; v++) {
            const vector one = widen(kind, b + v * LANES * size);
            UNROLL for (int i = 0; i < rows; i++) sum[i][v] += all(h[i * w.rank + r]) * one;
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) store(w.y + i * w.y_stride + c + v * LANES, sum[i][v]);
}

INLINE void both(const int rows, const Kind kind, const Work w) {
    const int vectors = SUMS / rows;
    const int64_t size = size_of(kind), most = vectors * LANES;
    float h[ROWS * w.rank];
    int64_t c = 0;
    for (int64_t r = 0; r < w.rank; r++) {
        fetch(w.b + r * w.width * size, least(most, w.width) * size); /* where `expand` begins */
        shrink(rows, kind, w, r, h);
    }
    fetch(w.next, AHEAD);
    for (; c + most <= w.width; c += most) expand(rows, vectors, kind, w, c, h);
    for (; c + LANES <= w.width; c += LANES) expand(rows, 1, kind, w, c, h);
    for (; c < w.width; c++)
        for (int i = 0; i < rows; i++) {
            float sum = w.y[i * w.y_stride + c];
            for (int64_t k = 0; k < w.rank; k++)
                sum += h[i * w.rank + k] * widen_one(kind, w.b + (k * w.width + c) * size);
            w.y[i * w.y_stride + c] = sum;
        }
}

/* At most ROWS rows of x and y. */
INLINE void some(const int64_t rows, const Kind kind, const Work w) {
    switch (rows) {
        case 1: both(1, kind, w); break;
        case 2: both(2, kind, w); break;
        case 3: both(3, kind, w); break;
        default: both(4, kind, w);
    }
}

INLINE const char *begin(const char *pool, const Part *part, const Kind kind) {
    return pool + part->offset * size_of(part->float8 ? FLOAT8 : kind);
}

/* parts, rows: the most that a segment has. */
INLINE void add(const Kind kind, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
                const char *pool, const Segment *segments, int64_t count, int64_t parts, int64_t rows) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS, total = count * parts * blocks;
    const int64_t run = total < 32 ? 1 : 4; /* in a row, so that the next one is this thread's, too */
#pragma omp parallel for schedule(dynamic, run) if (total > 1)
    for (int64_t n = 0; n < total; n++) {
        const int64_t p = n / blocks % parts, after = n + 1 < total ? n + 1 : n;
        const Segment *segment = segments + n / (blocks * parts), *next = segments + after / (blocks * parts);
        const int64_t start = segment->start + n % blocks * ROWS;
        if (p >= segment->count || start >= segment->stop) continue;
        const Part *part = segment->parts + p, *soon = next->parts + least(after / blocks % parts, next->count - 1);
        const int64_t height = least(segment->stop - start, ROWS), size = size_of(part->float8 ? FLOAT8 : kind);
        const char *const a = begin(pool, part, kind);
        const Work w = {y + start * y_stride + part->column, x + start * x_stride, y_stride, x_stride, in,
                        part->width, part->rank, a, a + part->rank * in * size, begin(pool, soon, kind), part->scale};
        if (part->float8) some(height, FLOAT8, w);
        else some(height, kind, w);
    }
}

#define LORA_ADD(name, kind)                                                                               \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in, const char *pool,  \
              const Segment *segments, int64_t count, int64_t parts, int64_t rows) {                       \
        add(kind, y, y_stride, x, x_stride, in, pool, segments, count, parts, rows);                       \
    }

LORA_ADD(lora_add_float32, FLOAT32)
LORA_ADD(lora_add_bfloat16, BFLOAT16)
