/* y[row, columns] += (x[row] A^T) B^T for the rows of every adapter of a batch, in place in the page pool; with DoRA
 * what is then in y, less the bias, is multiplied by a magnitude. Numbers are float32, or bfloat16 that is widened in
 * registers, and so are 8-bit floats, of which an adapter may be beside others of the pool's type; sums are float32. A
 * pair of vectors of bfloat16 is one of words, whose halves are its even and its odd elements; those of A, and what is
 * added to y, are joined.
 *
 * With few rows each byte of an adapter is used once or twice, so this runs at the speed of memory. The order of reading
 * is known, but jumps from row to row of B and from adapter to adapter, which the processor does not foresee: what
 * comes next is fetched by hand. With many rows, parts of A and B are widened once and multiplied from the cache. In
 * both, and whatever rows come with it, the sums of a row are made in the same order. */

#include "team.h"

enum {
#ifdef __AVX512F__
    ROWS = 8,  /* that share each reading of A and B, at most */
    SUMS = 16, /* in registers, at least two for a row */
#else
    ROWS = 4,
    SUMS = 8,
#endif
    AHEAD = 2048,      /* bytes of the next part */
    WIDE = 3,         /* with many rows: coefficients, or vectors of columns, of a tile; */
    FEW = 2 * ROWS,
    TALL = 64,        /* rows of a task; */
    DEPTH = 256,      /* inputs, a multiple of 2 * LANES, */
    RANKS = 8 * WIDE, /* and coefficients, whose part of A stays in the cache; */
    LOW = 32768       /* room for all coefficients of these rows */
};
_Static_assert(SUMS >= 2 * ROWS, "`expand` goes on by pairs of vectors for each row");

typedef struct { /* TABLE_ROW of kernels/row_format.py */
    int64_t offset, rank;   /* in the pool: A [rank, in], B transposed [rank, width], with DoRA a magnitude [width] */
    int64_t dora, encoding; /* offset is in numbers of the encoding */
    float scale;            /* of x A^T */
    int32_t next; /* so many parts later is the row of another adapter, for the same rows and columns; 0: none */
} Row;

typedef struct {
    int64_t column, width; /* of y */
    Row row;
} Part;

/* The type of a row's numbers: the pool's, or that of an encoding. */
INLINE Kind kind_of(const Row *row, Kind pool) { return row->encoding == 1 ? FLOAT8 : pool; }

struct Segment {
    int64_t start, stop; /* rows of x and y */
    const Part *parts;
    int64_t count;
};

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, in, width, rank;
    const char *a, *b;     /* A [rank, in], B transposed [rank, width] */
    const char *magnitude; /* [width]; NULL: no DoRA */
    const float *bias;     /* [width], which is in y; NULL: none */
    const char *next;      /* the A of the next part, or this one's again */
    float scale;
} Work;

/* The next 2 * LANES elements; of bfloat16 the even ones first, which `join` undoes. */
INLINE void widen_two(Kind kind, const char *at, vector two[2]) {
    UNROLL for (int i = 0; i < 2; i++)
        two[i] = kind == BFLOAT16 ? widen_pairs(at, i) : widen(kind, at + i * LANES * size_of(kind));
}

INLINE void widen_joined(Kind kind, const char *at, vector two[2]) {
    widen_two(kind, at, two);
    if (kind == BFLOAT16) join(&two[0], &two[1]);
}

/* What the last inputs add to a sum, where they are no pair of vectors. A function of its own, and so is that of the
 * last columns: they round in one way. */
static float ONCE last_inputs(Kind kind, const char *a, const float *x, int64_t count, float sum) {
    for (int64_t k = 0; k < count; k++) sum += widen_one(kind, a + k * size_of(kind)) * x[k];
    return sum;
}

/* h = scale * x[row] . A[r], of which `sum` has whole pairs of vectors. */
INLINE float coefficient(const Kind kind, const Work *w, int64_t row, int64_t r, float sum) {
    const int64_t whole = w->in - w->in % (2 * LANES);
    if (whole < w->in)
        sum = last_inputs(kind, w->a + (r * w->in + whole) * size_of(kind), w->x + row * w->x_stride + whole,
                          w->in - whole, sum);
    return sum * w->scale;
}

/* Takes a row's sums for two vectors of columns to y. */
INLINE void settle(const Kind kind, const Work *w, int64_t row, int64_t c, vector low, vector high) {
    float *const y = w->y + row * w->y_stride + c;
    vector sum[2] = {load(y) + low, load(y + LANES) + high}, magnitude[2];
    if (w->magnitude) {
        widen_joined(kind, w->magnitude + c * size_of(kind), magnitude);
        for (int i = 0; i < 2; i++) {
            const vector bias = w->bias ? load(w->bias + c + i * LANES) : all(0);
            sum[i] = multiply_add(sum[i] - bias, magnitude[i], bias);
        }
    }
    store(y, sum[0]);
    store(y + LANES, sum[1]);
}

/* y[row, c:] for columns that are no pair of vectors. */
static void ONCE last_columns(Kind kind, const Work *w, int64_t rows, int64_t c, const float *h) {
    const int64_t size = size_of(kind);
    for (; c < w->width; c++)
        for (int64_t i = 0; i < rows; i++) {
            float *const y = w->y + i * w->y_stride + c, bias = w->bias ? w->bias[c] : 0, sum = *y;
            for (int64_t k = 0; k < w->rank; k++)
                sum += h[i * w->rank + k] * widen_one(kind, w->b + (k * w->width + c) * size);
            *y = w->magnitude ? (sum - bias) * widen_one(kind, w->magnitude + c * size) + bias : sum;
        }
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
            widen_joined(kind, a + j * step + k * size, one[j]);
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
        for (int j = 0; j < ranks; j++) h[i * w.rank + r + j] = coefficient(kind, &w, i, r + j, sums[i][j]);
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
            vector low = sum[i][2 * v], high = sum[i][2 * v + 1];
            if (kind == BFLOAT16) join(&low, &high);
            settle(kind, &w, i, c + v * 2 * LANES, low, high);
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
    if (c < w.width) last_columns(kind, &w, rows, c, h);
}

/* Loaded once, rather than by each instruction that has it as an operand. */
INLINE vector in_register(vector value) {
#if defined(__AVX2__) && !defined(EMULATED)
    __asm__("" : "+v"(value));
#endif
    return value;
}

/* sums[row, j] += x[row] . a[j] over `depth` inputs, lane by lane; a [WIDE, DEPTH]; first: they begin with 0. */
INLINE void shrink_tile(const int rows, const float *x, int64_t x_stride, const float *a, int64_t depth, int first,
                        vector *sums) {
    vector sum[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) sum[i][j] = first ? all(0) : sums[i * RANKS + j];
    for (int64_t k = 0; k < depth; k += LANES) {
        vector one[WIDE];
        UNROLL for (int j = 0; j < WIDE; j++) one[j] = in_register(load(a + j * DEPTH + k));
        UNROLL for (int i = 0; i < rows; i++) {
            const vector in = in_register(load(x + i * x_stride + k));
            UNROLL for (int j = 0; j < WIDE; j++) sum[i][j] = multiply_add(one[j], in, sum[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) sums[i * RANKS + j] = sum[i][j];
}

/* sums[row] = h[row] b; b [rank, WIDE] vectors, sums [rows, 2 * WIDE], of which these are a half. */
INLINE void expand_tile(const int rows, const float *h, int64_t rank, const vector *b, vector *sums) {
    vector sum[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < WIDE; v++) sum[i][v] = all(0);
    for (int64_t r = 0; r < rank; r++, b += WIDE) {
        vector one[WIDE];
        UNROLL for (int v = 0; v < WIDE; v++) one[v] = in_register(b[v]);
        UNROLL for (int i = 0; i < rows; i++) {
            const vector low = all(h[i * rank + r]);
            UNROLL for (int v = 0; v < WIDE; v++) sum[i][v] = multiply_add(low, one[v], sum[i][v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < WIDE; v++) sums[i * 2 * WIDE + v] = sum[i][v];
}

/* Does `TILE`, in which `height` and `i` are known, for the rows from i on, as many as it takes. */
#define TILES(rows, tile)                        \
    for (int64_t i = 0, left; (left = (rows) - i) > 0;) { \
        if (left >= ROWS) tile(ROWS)             \
        else if (left >= 4) tile(4)              \
        else if (left >= 2) tile(2)              \
        else tile(1)                             \
    }

/* For `ranks` rows of a, rounded up to WIDE. */
static void ONCE shrink_tiles(int64_t rows, int64_t ranks, const float *x, int64_t x_stride, const float *a,
                              int64_t depth, int first, vector *sums) {
#define TILE(height)                                                                                          \
    {                                                                                                         \
        for (int64_t j = 0; j < ranks; j += WIDE)                                                             \
            shrink_tile(height, x + i * x_stride, x_stride, a + j * DEPTH, depth, first, sums + i * RANKS + j); \
        i += height;                                                                                          \
    }
    TILES(rows, TILE)
#undef TILE
}

static void ONCE expand_tiles(int64_t rows, const float *h, int64_t rank, const vector *b, vector *sums) {
#define TILE(height)                                                            \
    {                                                                           \
        expand_tile(height, h + i * rank, rank, b, sums + i * 2 * WIDE);        \
        i += height;                                                            \
    }
    TILES(rows, TILE)
#undef TILE
}

/* As `shrink`, of all coefficients. */
INLINE void shrink_many(int64_t rows, const Kind kind, const Work *w, float *h) {
    const int64_t whole = w->in - w->in % (2 * LANES), size = size_of(kind);
    vector sums[TALL * RANKS], two[2];
    float a[RANKS * DEPTH];
    if (!whole) memset(sums, 0, sizeof sums);
    for (int64_t r = 0; r < w->rank; r += RANKS) {
        const int64_t ranks = least(RANKS, w->rank - r), tiled = (ranks + WIDE - 1) / WIDE * WIDE;
        for (int64_t k = 0; k < whole; k += DEPTH) {
            const int64_t depth = least(DEPTH, whole - k);
            for (int64_t j = 0; j < tiled; j++) /* after the last, that one again */
                for (int64_t n = 0; n < depth; n += 2 * LANES) {
                    widen_joined(kind, w->a + (least(r + j, w->rank - 1) * w->in + k + n) * size, two);
                    store(a + j * DEPTH + n, two[0]);
                    store(a + j * DEPTH + n + LANES, two[1]);
                }
            shrink_tiles(rows, ranks, w->x + k, w->x_stride, a, depth, k == 0, sums);
        }
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < ranks; j++)
                h[i * w->rank + r + j] = coefficient(kind, w, i, r + j, total(sums[i * RANKS + j]));
    }
}

/* As `expand`, of all columns. */
INLINE void expand_many(int64_t rows, const Kind kind, const Work *w, const float *h) {
    const int64_t whole = w->width - w->width % (2 * LANES), size = size_of(kind);
    vector b[2 * WIDE * w->rank], sums[TALL * 2 * WIDE];
    for (int64_t c = 0; c < whole; c += 2 * WIDE * LANES) {
        const int64_t pairs = least(WIDE, (whole - c) / (2 * LANES)), halves = 2 * pairs > WIDE ? 2 : 1;
        for (int64_t r = 0; r < w->rank; r++)
            for (int64_t p = 0; p < pairs; p++) {
                vector two[2];
                widen_joined(kind, w->b + (r * w->width + c + p * 2 * LANES) * size, two);
                for (int64_t v = 2 * p; v < 2 * p + 2; v++)
                    b[(v / WIDE * w->rank + r) * WIDE + v % WIDE] = two[v % 2];
            }
        for (int64_t half = 0; half < halves; half++)
            expand_tiles(rows, h, w->rank, b + half * WIDE * w->rank, sums + half * WIDE);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t v = 0; v < 2 * pairs; v += 2)
                settle(kind, w, i, c + v * LANES, sums[i * 2 * WIDE + v], sums[i * 2 * WIDE + v + 1]);
    }
    if (whole < w->width) last_columns(kind, w, rows, whole, h);
}

INLINE void many(int64_t rows, const Kind kind, Work w) {
    const int64_t block = least(TALL, LOW / w.rank);
    float h[block * w.rank];
    for (; rows > 0; rows -= block, w.x += block * w.x_stride, w.y += block * w.y_stride) {
        const int64_t height = least(rows, block);
        shrink_many(height, kind, &w, h);
        expand_many(height, kind, &w, h);
    }
}

/* Rows of x and y of one adapter. */
INLINE void some(int64_t rows, const Kind kind, Work w) {
    if (rows > FEW) {
        many(rows, kind, w);
        return;
    }
    for (; rows >= ROWS; rows -= ROWS, w.x += ROWS * w.x_stride, w.y += ROWS * w.y_stride) both(ROWS, kind, w);
    for (; rows >= 4; rows -= 4, w.x += 4 * w.x_stride, w.y += 4 * w.y_stride) both(4, kind, w);
    if (rows == 3) both(3, kind, w);
    if (rows == 2) both(2, kind, w);
    if (rows == 1) both(1, kind, w);
}

INLINE const char *begin(const char *pool, const Part *part, const Kind kind) {
    return pool + part->row.offset * size_of(kind_of(&part->row, kind));
}

void lora_team(Kind stored, const char *pool, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
               const float *bias, const Adapters *adapters) {
    const Segment *const segments = adapters->segments;
    const int64_t rows = adapters->rows, parts = adapters->parts, count = adapters->count;
    int64_t block = TALL; /* rows of a task, fewer where threads would be idle */
    while (block > ROWS && count * parts * ((rows + block - 1) / block) < (block > 2 * FEW ? 8 : 4)) block /= 2;
    const int64_t blocks = (rows + block - 1) / block, total = count * parts * blocks;
    const int64_t run = total < 32 ? 1 : 4; /* in a row, so that the next one is this thread's, too */
#pragma omp for schedule(dynamic, run)
    for (int64_t n = 0; n < total; n++) {
        const int64_t p = n / blocks % parts, after = n + 1 < total ? n + 1 : n;
        const Segment *segment = segments + n / (blocks * parts), *next = segments + after / (blocks * parts);
        const int64_t start = segment->start + n % blocks * block;
        if (p >= segment->count || start >= segment->stop) continue;
        const Part *part = segment->parts + p, *soon = next->parts + least(after / blocks % parts, next->count - 1);
        const int64_t height = least(segment->stop - start, block);
        for (int64_t more = 1; more; part += more) { /* adapters that are mixed, in one order */
            more = part->row.next;
            const Kind kind = kind_of(&part->row, stored);
            const int64_t size = size_of(kind);
            const char *const a = begin(pool, part, stored), *const b = a + part->row.rank * in * size;
            const Work w = {y + start * y_stride + part->column, x + start * x_stride, y_stride, x_stride, in,
                            part->width, part->row.rank, a, b,
                            part->row.dora ? b + part->row.rank * part->width * size : NULL,
                            bias ? bias + part->column : NULL, begin(pool, more ? part + more : soon, stored),
                            part->row.scale};
            switch (kind) { /* in here: the body of a parallel loop is a function that its kind is an argument of */
                case FLOAT32: some(height, FLOAT32, w); break;
                case BFLOAT16: some(height, BFLOAT16, w); break;
                case FLOAT8: some(height, FLOAT8, w); break;
                default: break; /* no pool is of integers */
            }
        }
    }
}

#define LORA_ADD(name, kind)                                                                              \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in, const char *pool, \
              const float *bias, const Segment *segments, int64_t count, int64_t parts, int64_t rows) {   \
        const Adapters adapters = {segments, count, parts, rows};                                         \
        _Pragma("omp parallel if (count * parts * rows > 1)")                                             \
            lora_team(kind, pool, y, y_stride, x, x_stride, in, bias, &adapters);                         \
    }

LORA_ADD(lora_add_float32, FLOAT32)
LORA_ADD(lora_add_bfloat16, BFLOAT16)
