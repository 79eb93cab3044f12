/* y[row, columns] += (x[row] A^T) B^T for the rows of every adapter of a batch, in place in the page pool. Its
 * elements are float32, or bfloat16 that is widened in registers, and so are 8-bit floats, of which an adapter may be
 * beside others of the pool's type; sums are float32. A pair of vectors of bfloat16 is one of words, whose halves are
 * its even and its odd elements; those of A, and what is added to y, are joined.
 *
 * Each byte of an adapter is used once or twice, so this runs at the speed of memory. The order of reading is known,
 * but jumps from row to row of B and from adapter to adapter, which the processor does not foresee: what comes next
 * is fetched by hand. The sums of a row are made in the same order whatever rows come with it. */

#include "vectors.h"

enum {
#ifdef __AVX512F__
    ROWS = 8,  /* that share each reading of A and B, at most */
    SUMS = 16, /* in registers, at least two for a row */
#else
    ROWS = 4,
    SUMS = 8,
#endif
    AHEAD = 2048 /* bytes of the next part */
};
_Static_assert(SUMS >= 2 * ROWS, "`expand` goes on by pairs of vectors for each row");

typedef struct { /* TABLE_ROW of kernels/row_format.py */
    int64_t offset, rank;   /* in the pool: A [rank, in], B transposed [rank, width] */
    int64_t dora, encoding; /* no row with DoRA comes here; offset is in numbers of the encoding */
    float scale;            /* of x A^T */
} Row;

typedef struct {
    int64_t column, width; /* of y */
    Row row;
} Part;

/* The type of a row's numbers: the pool's, or that of an encoding. */
INLINE Kind kind_of(const Row *row, Kind pool) { return row->encoding == 1 ? FLOAT8 : pool; }

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

/* The next 2 * LANES elements; of bfloat16 the even ones first, which `join` undoes. */
INLINE void widen_two(Kind kind, const char *at, vector two[2]) {
    UNROLL for (int i = 0; i < 2; i++)
        two[i] = kind == BFLOAT16 ? widen_pairs(at, i) : widen(kind, at + i * LANES * size_of(kind));
}

/* h[row, r:] = scale * x[row] . A[r:] for so many coefficients; those that follow are fetched meanwhile. */
INLINE void shrink(const int rows, const int ranks, const Kind kind, const Work w, int64_t r, float *h) {
    const int64_t whole = w.in - w.in % (2 * LANES), size = size_of(kind), step = w.in * size;
    const char *a = w.a + r * step;
    vector sum[ROWS][SUMS], one[SUMS][2];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = all(0);
    for (int64_t k = 0; k < whole; k += 2 * LANES) {
        UNROLL for (int j = 0; j < ranks; j++) {
            fetch(a + (ranks + j) * step + k * size, 2 * LANES * size);
            widen_two(kind, a + j * step + k * size, one[j]);
            if (kind == BFLOAT16) join(&one[j][0], &one[j][1]);
        }
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int p = 0; p < 2; p++) {
                const vector x = load(w.x + i * w.x_stride + k + p * LANES);
                UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = multiply_add(one[j][p], x, sum[i][j]);
            }
    }
    float sums[ROWS][SUMS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) sums[i][j] = total(sum[i][j]); /* here, where i and j are known */
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < ranks; j++) {
            float one = sums[i][j];
            for (int64_t k = whole; k < w.in; k++)
                one += widen_one(kind, a + j * step + k * size) * w.x[i * w.x_stride + k];
            h[i * w.rank + r + j] = one * w.scale;
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
                UNROLL for (int p = 0; p < 2; p++)
                    sum[i][2 * v + p] = multiply_add(all(h[i * w.rank + r]), one[p], sum[i][2 * v + p]);
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
    const int pairs = SUMS / rows / 2, ranks = SUMS / rows < 4 ? SUMS / rows : 4;
    const int64_t size = size_of(kind), most = pairs * 2 * LANES;
    float h[ROWS * w.rank];
    int64_t c = 0, r = 0;
    for (int64_t k = 0; k < w.rank; k++)
        fetch(w.b + k * w.width * size, least(most, w.width) * size); /* where `expand` begins */
    for (; r + ranks <= w.rank; r += ranks) shrink(rows, ranks, kind, w, r, h);
    for (; r < w.rank; r++) shrink(rows, 1, kind, w, r, h);
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

/* At most ROWS rows of x and y. */
INLINE void some(int64_t rows, const Kind kind, Work w) {
    if (rows == ROWS) {
        both(ROWS, kind, w);
        return;
    }
    for (; rows >= 4; rows -= 4, w.x += 4 * w.x_stride, w.y += 4 * w.y_stride) both(4, kind, w);
    if (rows == 3) both(3, kind, w);
    if (rows == 2) both(2, kind, w);
    if (rows == 1) both(1, kind, w);
}

INLINE const char *begin(const char *pool, const Part *part, const Kind kind) {
    return pool + part->row.offset * size_of(kind_of(&part->row, kind));
}

/* parts, rows: the most that a segment has. */
static void add(const Kind stored, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
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
        const Kind kind = kind_of(&part->row, stored);
        const int64_t height = least(segment->stop - start, ROWS), size = size_of(kind);
        const char *const a = begin(pool, part, stored);
        const Work w = {y + start * y_stride + part->column, x + start * x_stride, y_stride, x_stride, in,
                        part->width, part->row.rank, a, a + part->row.rank * in * size, begin(pool, soon, stored),
                        part->row.scale};
        switch (kind) { /* in here: the body of a parallel loop is a function that its kind is an argument of */
            case FLOAT32: some(height, FLOAT32, w); break;
            case BFLOAT16: some(height, BFLOAT16, w); break;
            case FLOAT8: some(height, FLOAT8, w); break;
            default: break; /* no pool is of integers */
        }
    }
}

#define LORA_ADD(name, kind)                                                                               \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in, const char *pool,  \
              const Segment *segments, int64_t count, int64_t parts, int64_t rows) {                       \
        add(kind, y, y_stride, x, x_stride, in, pool, segments, count, parts, rows);                       \
    }

LORA_ADD(lora_add_float32, FLOAT32)
LORA_ADD(lora_add_bfloat16, BFLOAT16)
