/* y[row, columns] += (x[row] A^T) B^T for the rows of every adapter of a batch, in place in the page pool. Its
 * elements are float32, or bfloat16 that is widened in registers; sums are float32. A pair of vectors of bfloat16 is
 * one of words, whose halves are its even and its odd elements: x is split likewise, and what is added to y is joined.
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
} Work;

/* The next 2 * LANES elements, in the order of `split`. */
INLINE void widen_two(Kind kind, const char *at, vector two[2]) {
    UNROLL for (int i = 0; i < 2; i++)
        two[i] = kind == BFLOAT16 ? widen_pairs(at, i) : load((const float *)at + i * LANES);
}

/* h[row, r] = x[row] . A[r] */
INLINE void shrink(const int rows, const Kind kind, const Work w, int64_t r, float *h) {
    const int64_t whole = w.in - w.in % (2 * LANES), size = size_of(kind);
    const char *a = w.a + r * w.in * size;
    vector sum[ROWS], one[2];
    UNROLL for (int i = 0; i < rows; i++) sum[i] = all(0);
    for (int64_t k = 0; k < whole; k += 2 * LANES) {
        fetch(a + k * size + AHEAD, 2 * LANES * size);
        widen_two(kind, a + k * size, one);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int p = 0; p < 2; p++) sum[i] += one[p] * load(w.x + i * w.x_stride + k + p * LANES);
    }
    for (int i = 0; i < rows; i++) {
        float one = total(sum[i]);
        for (int64_t k = whole; k < w.in; k++) one += widen_one(kind, a + k * size) * w.x[i * w.x_stride + k];
        h[i * w.rank + r] = one;
    }
}

/* y[row, c:] += h[row] B[:, c:] for so many pairs of vectors of columns; those that follow are fetched meanwhile. */
INLINE void expand(const int rows, const int pairs, const Kind kind, const Work w, int64_t c, const float *h) {
    const int64_t size = size_of(kind), run = pairs * 2 * LANES * size, step = w.width * size;
    const char *b = w.b + c * size;
    vector sum[ROWS][SUMS], one[2];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < 2 * pairs; v++) sum[i][v] = all(0);
    for (int64_t r = 0; r < w.rank; r++, b += step) {
        fetch(b + run, run);
        UNROLL for (int v = 0; v < pairs; v++) {
            widen_two(kind, b + v * 2 * LANES * size, one);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int p = 0; p < 2; p++) sum[i][2 * v + p] += all(h[i * w.rank + r]) * one[p];
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < pairs; v++) {
            float *const y = w.y + i * w.y_stride + c + v * 2 * LANES;
            vector low = sum[i][2 * v], high = sum[i][2 * v + 1];
            if (kind == BFLOAT16) join(&low, &high);
            store(y, load(y) + low);
            store(y + LANES, load(y + LANES) + high);
        }
}

INLINE void both(const int rows, const Kind kind, const Work w) {
    const int pairs = SUMS / rows / 2;
    const int64_t size = size_of(kind), most = pairs * 2 * LANES;
    float h[ROWS * w.rank];
    int64_t c = 0;
    for (int64_t r = 0; r < w.rank; r++) {
        fetch(w.b + r * w.width * size, least(most, w.width) * size); /* where `expand` begins */
        shrink(rows, kind, w, r, h);
    }
    fetch(w.next, AHEAD);
    for (; c + most <= w.width; c += most) expand(rows, pairs, kind, w, c, h);
    for (; c + 2 * LANES <= w.width; c += 2 * LANES) expand(rows, 1, kind, w, c, h);
    for (; c < w.width; c++)
        for (int i = 0; i < rows; i++) {
            float sum = w.y[i * w.y_stride + c];
            for (int64_t k = 0; k < w.rank; k++)
                sum += h[i * w.rank + k] * widen_one(kind, w.b + (k * w.width + c) * size);
            w.y[i * w.y_stride + c] = sum;
        }
}

/* Rows of x as `widen_two` has those of A: whole pairs of vectors, the even elements first. */
static void split(float *out, const float *x, int64_t x_stride, int64_t in, int64_t rows) {
    const int64_t whole = in - in % (2 * LANES);
#pragma omp parallel for if (rows > 64)
    for (int64_t row = 0; row < rows; row++) {
        const float *const from = x + row * x_stride;
        float *const to = out + row * in;
        for (int64_t k = 0; k < whole; k += 2 * LANES)
            UNROLL for (int i = 0; i < LANES; i++) {
                to[k + i] = from[k + 2 * i];
                to[k + LANES + i] = from[k + 2 * i + 1];
            }
        for (int64_t k = whole; k < in; k++) to[k] = from[k];
    }
}

/* parts, rows: the most that a segment has. */
INLINE void add(const Kind kind, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
                const char *pool, const Segment *segments, int64_t count, int64_t parts, int64_t rows, float *room) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS, total = count * parts * blocks, size = size_of(kind);
    const int64_t run = total < 32 ? 1 : 4; /* in a row, so that the next one is this thread's, too */
    if (kind == BFLOAT16) {
        int64_t end = 0;
        for (int64_t s = 0; s < count; s++) end = end < segments[s].stop ? segments[s].stop : end;
        split(room, x, x_stride, in, end);
        x = room, x_stride = in;
    }
#pragma omp parallel for schedule(dynamic, run) if (total > 1)
    for (int64_t n = 0; n < total; n++) {
        const int64_t p = n / blocks % parts, after = n + 1 < total ? n + 1 : n;
        const Segment *segment = segments + n / (blocks * parts), *next = segments + after / (blocks * parts);
        const int64_t start = segment->start + n % blocks * ROWS;
        if (p >= segment->count || start >= segment->stop) continue;
        const Part *part = segment->parts + p, *soon = next->parts + least(after / blocks % parts, next->count - 1);
        const char *const a = pool + part->offset * size;
        const Work w = {y + start * y_stride + part->column, x + start * x_stride, y_stride, x_stride, in,
                        part->width, part->rank, a, a + part->rank * in * size, pool + soon->offset * size};
        switch (least(segment->stop - start, ROWS)) {
            case 1: both(1, kind, w); break;
            case 2: both(2, kind, w); break;
            case 3: both(3, kind, w); break;
            default: both(4, kind, w);
        }
    }
}

/* room: for the rows of x up to the last that a segment has; of bfloat16 only. */
#define LORA_ADD(name, kind)                                                                               \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in, const char *pool,  \
              const Segment *segments, int64_t count, int64_t parts, int64_t rows, float *room) {          \
        add(kind, y, y_stride, x, x_stride, in, pool, segments, count, parts, rows, room);                 \
    }

LORA_ADD(lora_add_float32, FLOAT32)
LORA_ADD(lora_add_bfloat16, BFLOAT16)
