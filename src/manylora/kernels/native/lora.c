/* y[row, columns] += (x[row] A^T) B^T for the rows of every adapter of a batch, in place in the page pool; with DoRA
 * what is then in y, less the bias, is multiplied by a magnitude. Numbers are float32, or bfloat16 that is widened in
 * registers, and so are 8-bit floats, of which an adapter may be beside others of the pool's type; sums are float32.
 * A pair of vectors of bfloat16 is one of words, whose halves are its even and its odd elements; those of A, and what is
 * added to y, are joined.
 *
 * Where linear layers round x to bfloat16, x A^T of a row in bfloat16 does so too, by the processor's products of pairs:
 * along the inputs, lane by lane, whatever rows come with it.
 *
 * With few rows each byte of an adapter is used once or twice, so this runs at the speed of memory. The order of reading
 * is known, but jumps from row to row of B and from adapter to adapter, which the processor does not foresee: what
 * comes next is fetched by hand. A row or two alone, as where every sequence has its own adapter, go along A and then B
 * from their first byte to the last, as memory is read fastest. With many rows, parts of A and B are widened once and multiplied from the cache. In
 * both, and whatever rows come with it, the sums of a row are made in the same order. */

#include "bfloat16.h"

enum {
#ifdef __AVX512F__
    ROWS = 8,  /* that share each reading of A and B, at most */
    SUMS = 16, /* in registers, at least two for a row */
#else
    ROWS = 4,
    SUMS = 8,
#endif
    AHEAD = 2048,      /* bytes of the next part */
    ALONG = 2,        /* rows at most that read A and B as they lie, */
    FAR = 8192,       /* so many bytes before they are needed; */
    RUN = 4096,       /* columns whose sums are kept meanwhile */
    WIDE = 3,         /* with many rows: coefficients, or vectors of columns, of a tile; */
    FEW = 2 * ROWS,
    TALL = 64,        /* rows of a task; */
    DEPTH = 256,      /* inputs, a multiple of 2 * LANES, */
    RANKS = 8 * WIDE, /* and coefficients, whose part of A stays in the cache; */
    LOW = 32768,      /* room for all coefficients of these rows */
    ROOM = 16384,     /* room for those of few rows that threads share; */
    LONELY = 4,       /* which they do where there are fewer tasks for a thread. */
    LARGE = 65536,    /* numbers of A and B that are worth a start of threads */
    LEAST_ROUNDED = 128 /* inputs of a linear layer that rounds them, as in panels.py */
};
_Static_assert(SUMS >= 2 * ROWS, "`expand` goes on by pairs of vectors for each row");

typedef struct { /* TABLE_ROW of kernels/row_format.py */
    int64_t offset, rank;   /* in the pool: A [rank, in], B transposed [rank, width], with DoRA a magnitude [width] */
    int64_t dora, encoding; /* offset is in numbers of the encoding */
    float scale;            /* of x A^T */
    int32_t next; /* so many parts later is the row of another adapter, for the same rows and columns; 0: none */
    int64_t vectors; /* of a row whose A and B others have too: weights of columns [width], of ranks [rank]; -1: none */
} Row;

enum { DORA = 1, DORA_MIXED }; /* mixed: its change of y is added to those of others, each times its scale */

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
    const char *weights;   /* [width], of what is added to y; NULL: 1 */
    const char *ranks;     /* [rank], of the coefficients; NULL: 1 */
    const float *bias;     /* [width], which is in y; NULL: none */
    const char *next;      /* the A of the next part, or this one's again */
    float scale;
    int rounds;              /* x is rounded to bfloat16, as A is, */
    const uint16_t *rounded; /* which was done, rows rounded_stride(in) apart; NULL: not yet */
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

/* What the last inputs add to a sum, where they are no pair of vectors. */
static float ONCE last_inputs(Kind kind, const char *a, const float *x, int64_t count, float sum) {
    for (int64_t k = 0; k < count; k++) sum += widen_one(kind, a + k * size_of(kind)) * x[k];
    return sum;
}

INLINE float scaled(const Kind kind, const Work *w, int64_t r, float sum) {
    return w->ranks ? sum * (w->scale * widen_one(kind, w->ranks + r * size_of(kind))) : sum * w->scale;
}

/* h = scale * x[row] . A[r], of which `sum` has whole pairs of vectors. */
INLINE float coefficient(const Kind kind, const Work *w, int64_t row, int64_t r, float sum) {
    const int64_t whole = w->in - w->in % (2 * LANES);
    if (whole < w->in)
        sum = last_inputs(kind, w->a + (r * w->in + whole) * size_of(kind), w->x + row * w->x_stride + whole,
                          w->in - whole, sum);
    return scaled(kind, w, r, sum);
}

/* Takes a row's sums for two vectors of columns to y. */
INLINE void settle(const Kind kind, const Work *w, int64_t row, int64_t c, vector low, vector high) {
    float *const y = w->y + row * w->y_stride + c;
    vector magnitude[2];
    if (w->weights) {
        widen_joined(kind, w->weights + c * size_of(kind), magnitude);
        low *= magnitude[0], high *= magnitude[1];
    }
    vector sum[2] = {load(y) + low, load(y + LANES) + high};
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
            float *const y = w->y + i * w->y_stride + c, bias = w->bias ? w->bias[c] : 0, sum = w->weights ? 0 : *y;
            for (int64_t k = 0; k < w->rank; k++)
                sum += h[i * w->rank + k] * widen_one(kind, w->b + (k * w->width + c) * size);
            if (w->weights) sum = *y + sum * widen_one(kind, w->weights + c * size);
            *y = w->magnitude ? (sum - bias) * widen_one(kind, w->magnitude + c * size) + bias : sum;
        }
}

/* Begins to bring a line of the part into the second cache, or one of the next part. */
INLINE void fetch_far(const Work *w, const char *end, const char *at) {
    __builtin_prefetch(at < end ? at : w->next + (at - end), 0, 2);
}

INLINE const char *end_of(const Kind kind, const Work *w) { return w->b + w->rank * w->width * size_of(kind); }

/* h[row, r:] = scale * x[row] . A[r:] for so many coefficients; those that follow are fetched meanwhile. */
INLINE void shrink(const int rows, const int ranks, const Kind kind, const Work w, int64_t r, float *h) {
    const int64_t whole = w.in - w.in % (2 * LANES), size = size_of(kind), step = w.in * size;
    const char *a = w.a + r * step, *const end = end_of(kind, &w);
    vector sum[ROWS][SUMS], one[SUMS][2];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = all(0);
    for (int64_t k = 0; k < whole; k += 2 * LANES) {
        UNROLL for (int j = 0; j < ranks; j++) {
            if (rows <= ALONG) fetch_far(&w, end, a + k * size + FAR);
            else fetch(a + (ranks + j) * step + k * size, 2 * LANES * size);
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

/* As `shrink`, of bfloat16, by products of pairs: x is rounded, rows `stride` elements apart. */
INLINE void shrink_pairs(const int rows, const int ranks, const Work *w, const uint16_t *x, int64_t stride, int64_t r,
                         float *h) {
    const int64_t step = w->in * 2, whole = w->in - w->in % (2 * LANES);
    const char *a = w->a + r * step, *const end = end_of(BFLOAT16, w);
    vector sum[ROWS][WIDE];
    words one[WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = all(0);
    for (int64_t k = 0; k < whole; k += 2 * LANES) {
        UNROLL for (int j = 0; j < ranks; j++) {
            if (ranks == 1) fetch_far(w, end, a + k * 2 + FAR);
            one[j] = load_words(a + j * step + k * 2);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            const words in = load_words((const char *)(x + i * stride + k));
            UNROLL for (int j = 0; j < ranks; j++) sum[i][j] = add_pairs(sum[i][j], one[j], in);
        }
    }
    if (whole < w->in) UNROLL for (int j = 0; j < ranks; j++) {
        words some = {0};
        memcpy(&some, a + j * step + whole * 2, (w->in - whole) * 2);
        UNROLL for (int i = 0; i < rows; i++)
            sum[i][j] = add_pairs(sum[i][j], some, load_words((const char *)(x + i * stride + whole)));
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < ranks; j++) h[i * w->rank + r + j] = scaled(BFLOAT16, w, r + j, total(sum[i][j]));
}

INLINE void shrink_tall(const int rows, const Work *w, const uint16_t *x, int64_t from, int64_t to, float *h) {
    const int64_t stride = rounded_stride(w->in);
    int64_t r = from;
    for (; rows > ALONG && r + WIDE <= to; r += WIDE) shrink_pairs(rows, WIDE, w, x, stride, r, h);
    for (; r < to; r++) shrink_pairs(rows, 1, w, x, stride, r, h);
}

/* h[row, from:to] of so many rows, x being rounded. */
static void ONCE shrink_rounded(int64_t rows, const Work *w, int64_t from, int64_t to, float *h) {
    const int64_t stride = rounded_stride(w->in);
    uint16_t room[w->rounded ? 1 : ROWS * stride];
    for (int64_t i = 0, height; i < rows; i += height, h += height * w->rank) {
        const uint16_t *const x = w->rounded ? w->rounded + i * stride : room;
        const int64_t left = rows - i;
        height = left >= ROWS ? ROWS : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t n = 0; !w->rounded && n < height; n++)
            round_inputs(room + n * stride, w->x + (i + n) * w->x_stride, w->in);
        if (height == ROWS) shrink_tall(ROWS, w, x, from, to, h);
        else if (height == 4) shrink_tall(4, w, x, from, to, h);
        else if (height == 2) shrink_tall(2, w, x, from, to, h);
        else shrink_tall(1, w, x, from, to, h);
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
            vector low = sum[i][2 * v], high = sum[i][2 * v + 1];
            if (kind == BFLOAT16) join(&low, &high);
            settle(kind, &w, i, c + v * 2 * LANES, low, high);
        }
}

/* sums[row] += h[row, r] B[r, c:], for so many pairs of vectors of columns; first: they begin with 0. */
INLINE void add_along(const int rows, const int first, const Kind kind, const Work *w, int64_t r, int64_t c,
                      int64_t pairs, const float *h, vector (*sums)[RUN / LANES]) {
    const int64_t size = size_of(kind);
    const char *b = w->b + (r * w->width + c) * size, *const end = end_of(kind, w);
    vector one[2];
    for (int64_t v = 0; v < 2 * pairs; v += 2, b += 2 * LANES * size) {
        fetch_far(w, end, b + FAR);
        widen_two(kind, b, one);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int p = 0; p < 2; p++)
                sums[i][v + p] = multiply_add(all(h[i * w->rank + r]), one[p], first ? all(0) : sums[i][v + p]);
    }
}

/* As `expand`, along the rows of B, for columns that are whole pairs of vectors. The sums are the same. */
INLINE void expand_along(const int rows, const Kind kind, const Work w, int64_t from, int64_t to, const float *h) {
    vector sums[ALONG][RUN / LANES];
    for (int64_t c = from; c < to; c += RUN) {
        const int64_t pairs = least(RUN, to - c) / (2 * LANES);
        add_along(rows, 1, kind, &w, 0, c, pairs, h, sums);
        for (int64_t r = 1; r < w.rank; r++) add_along(rows, 0, kind, &w, r, c, pairs, h, sums);
        for (int64_t v = 0; v < 2 * pairs; v += 2)
            UNROLL for (int i = 0; i < rows; i++) {
                vector low = sums[i][v], high = sums[i][v + 1];
                if (kind == BFLOAT16) join(&low, &high);
                settle(kind, &w, i, c + v * LANES, low, high);
            }
    }
}

/* h[row, from:to] of so many rows, and below y[row, from:to]. A sum has the same bits in every such share. */
INLINE void shrink_share(const int rows, const Kind kind, const Work w, int64_t from, int64_t to, float *h) {
    const int ranks = rows <= ALONG ? 1 : SUMS / rows < 4 ? SUMS / rows : 4;
    int64_t r = from;
    for (; r + ranks <= to; r += ranks) shrink(rows, ranks, kind, w, r, h);
    for (; r < to; r++) shrink(rows, 1, kind, w, r, h);
}

INLINE void expand_share(const int rows, const Kind kind, const Work w, int64_t from, int64_t to, const float *h) {
    const int pairs = SUMS / rows / 2;
    int64_t c = from;
    if (rows <= ALONG) {
        c = to - (to - from) % (2 * LANES);
        expand_along(rows, kind, w, from, c, h);
    }
    for (; c + pairs * 2 * LANES <= to; c += pairs * 2 * LANES) expand(rows, pairs, kind, w, c, h);
    for (; c + 2 * LANES <= to; c += 2 * LANES) expand(rows, 1, kind, w, c, h);
    if (c < to) last_columns(kind, &w, rows, c, h);
}

/* Does `share` for all rows of w, in which `height` is known, as many as it takes. */
#define HEIGHTS(rows, share)                                                       \
    for (int64_t left = rows; left > 0;) {                                         \
        const int64_t height = left >= ROWS ? ROWS : left >= 4 ? 4 : left;         \
        if (height == ROWS) share(ROWS);                                           \
        else if (height == 4) share(4);                                            \
        else if (height == 3) share(3);                                            \
        else if (height == 2) share(2);                                            \
        else share(1);                                                             \
        w.x += height * w.x_stride, w.y += height * w.y_stride, h += height * w.rank; \
        left -= height;                                                            \
    }

INLINE void shrink_heights(const Kind kind, int64_t rows, Work w, int64_t from, int64_t to, float *h) {
#define SHARE(height) shrink_share(height, kind, w, from, to, h)
    HEIGHTS(rows, SHARE)
#undef SHARE
}

INLINE void expand_heights(const Kind kind, int64_t rows, Work w, int64_t from, int64_t to, const float *h) {
#define SHARE(height) expand_share(height, kind, w, from, to, h)
    HEIGHTS(rows, SHARE)
#undef SHARE
}

static void ONCE shrink_few(Kind kind, int64_t rows, const Work *w, int64_t from, int64_t to, float *h) {
    switch (kind) {
        case FLOAT32: shrink_heights(FLOAT32, rows, *w, from, to, h); break;
        case BFLOAT16:
            if (w->rounds) shrink_rounded(rows, w, from, to, h);
            else shrink_heights(BFLOAT16, rows, *w, from, to, h);
            break;
        case FLOAT8: shrink_heights(FLOAT8, rows, *w, from, to, h); break;
        default: break; /* no pool is of integers */
    }
}

static void ONCE expand_few(Kind kind, int64_t rows, const Work *w, int64_t from, int64_t to, const float *h) {
    switch (kind) {
        case FLOAT32: expand_heights(FLOAT32, rows, *w, from, to, h); break;
        case BFLOAT16: expand_heights(BFLOAT16, rows, *w, from, to, h); break;
        case FLOAT8: expand_heights(FLOAT8, rows, *w, from, to, h); break;
        default: break;
    }
}

static void few(Kind kind, int64_t rows, const Work *w) {
    const int64_t size = size_of(kind), most = SUMS / least(rows, ROWS) / 2 * 2 * LANES;
    float h[rows * w->rank];
    const int jumps = rows > ALONG;
    for (int64_t k = 0; jumps && k < w->rank; k++)
        fetch(w->b + k * w->width * size, least(most, w->width) * size); /* where `expand` begins */
    shrink_few(kind, rows, w, 0, w->rank, h);
    if (jumps) fetch(w->next, AHEAD);
    expand_few(kind, rows, w, 0, w->width, h);
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

INLINE void many_rows(int64_t rows, const Kind kind, Work w) {
    const int64_t block = least(TALL, LOW / w.rank);
    float h[block * w.rank];
    for (; rows > 0; rows -= block, w.x += block * w.x_stride, w.y += block * w.y_stride) {
        const int64_t height = least(rows, block);
        if (kind == BFLOAT16 && w.rounds) shrink_rounded(height, &w, 0, w.rank, h);
        else shrink_many(height, kind, &w, h);
        expand_many(height, kind, &w, h);
        if (w.rounded) w.rounded += block * rounded_stride(w.in);
    }
}

static void many(Kind kind, int64_t rows, const Work *w) {
    switch (kind) {
        case FLOAT32: many_rows(rows, FLOAT32, *w); break;
        case BFLOAT16: many_rows(rows, BFLOAT16, *w); break;
        case FLOAT8: many_rows(rows, FLOAT8, *w); break;
        default: break;
    }
}

typedef struct {
    Kind stored;
    int rounds; /* as of Work */
    const uint16_t *rounded;
    const char *pool;
    float *y;
    const float *x, *bias;
    int64_t y_stride, x_stride, in, parts;
    const Segment *segments;
    int64_t block, blocks, tasks; /* rows of a task, tasks of a part, and of all */
} Call;

typedef struct { /* a part for some rows; height 0: there is nothing to do */
    const Part *part;
    int64_t start, height;
} Task;

INLINE Task task_at(const Call *c, int64_t n) {
    const Segment *const segment = c->segments + n / (c->blocks * c->parts);
    const int64_t p = n / c->blocks % c->parts, start = segment->start + n % c->blocks * c->block;
    const int64_t height = p < segment->count ? least(segment->stop - start, c->block) : 0;
    return (Task){segment->parts + p, start, height > 0 ? height : 0};
}

INLINE const char *begin(const Call *c, const Part *part) {
    return c->pool + part->row.offset * size_of(kind_of(&part->row, c->stored));
}

/* part: the task's, or one that is mixed with it. next: what is read after it. */
INLINE Work work_of(const Call *c, const Task *task, const Part *part, const Part *next) {
    const int64_t size = size_of(kind_of(&part->row, c->stored)), rank = part->row.rank;
    const char *const a = begin(c, part), *const b = a + rank * c->in * size, *const end = b + rank * part->width * size;
    const char *const own = part->row.vectors < 0 ? NULL : c->pool + part->row.vectors * size;
    return (Work){c->y + task->start * c->y_stride + part->column, c->x + task->start * c->x_stride, c->y_stride,
                  c->x_stride, c->in, part->width, rank, a, b,
                  part->row.dora == DORA ? end : NULL, part->row.dora == DORA_MIXED ? end : own,
                  own ? own + part->width * size : NULL, c->bias ? c->bias + part->column : NULL, begin(c, next),
                  part->row.scale, c->rounds,
                  c->rounded ? c->rounded + task->start * rounded_stride(c->in) : NULL};
}

/* Goes through the adapters that are mixed, in the one order in which they are added. */
#define EACH_MEMBER(part, first) \
    for (const Part *part = first, *last = NULL; part != last; last = part, part += part->row.next)

/* What y has of the base, less the bias, times 1 and scale * (magnitude - 1) of each member with DoRA: before any member
 * adds to y. Columns from a multiple of 2 * LANES on, to one or to the last. */
static void ONCE weigh_base(const Call *c, const Task *task, int64_t from, int64_t to) {
    int mixed = 0;
    EACH_MEMBER(part, task->part) mixed |= part->row.dora == DORA_MIXED;
    if (!mixed) return;
    const Work first = work_of(c, task, task->part, task->part);
    int64_t column = from;
    for (; column + 2 * LANES <= to; column += 2 * LANES) {
        vector weight[2] = {all(1), all(1)}, one[2];
        EACH_MEMBER(part, task->part) {
            if (part->row.dora != DORA_MIXED) continue;
            const Work w = work_of(c, task, part, part);
            widen_joined(c->stored, w.weights + column * size_of(c->stored), one);
            for (int i = 0; i < 2; i++) weight[i] = multiply_add(one[i] - all(1), all(w.scale), weight[i]);
        }
        for (int64_t row = 0; row < task->height; row++)
            for (int i = 0; i < 2; i++) {
                float *const y = first.y + row * first.y_stride + column + i * LANES;
                const vector bias = first.bias ? load(first.bias + column + i * LANES) : all(0);
                store(y, multiply_add(load(y) - bias, weight[i], bias));
            }
    }
    for (; column < to; column++) {
        float weight = 1;
        EACH_MEMBER(part, task->part) {
            if (part->row.dora != DORA_MIXED) continue;
            const Work w = work_of(c, task, part, part);
            weight += (widen_one(c->stored, w.weights + column * size_of(c->stored)) - 1) * w.scale;
        }
        for (int64_t row = 0; row < task->height; row++) {
            float *const y = first.y + row * first.y_stride + column, bias = first.bias ? first.bias[column] : 0;
            *y = (*y - bias) * weight + bias;
        }
    }
}

static void whole_tasks(const Call *c) {
    const int64_t run = c->tasks < 32 ? 1 : 4; /* in a row, so that the next one is this thread's, too */
#pragma omp for schedule(dynamic, run)
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        const int64_t after = n + 1 < c->tasks ? n + 1 : n;
        const Segment *const soon = c->segments + after / (c->blocks * c->parts);
        const Part *const following = soon->parts + least(after / c->blocks % c->parts, soon->count - 1);
        weigh_base(c, &task, 0, task.part->width);
        EACH_MEMBER(part, task.part) {
            const Work w = work_of(c, &task, part, part->row.next ? part + part->row.next : following);
            const Kind kind = kind_of(&part->row, c->stored);
            if (task.height > FEW) many(kind, task.height, &w);
            else few(kind, task.height, &w);
        }
    }
}

/* What tasks add up to: coefficients, floats of them for all rows, and vectors of B that are read. */
typedef struct {
    int64_t ranks, floats, pairs, vectors;
} Sizes;

INLINE Sizes sizes_of(const Task *task) {
    Sizes sizes = {.pairs = (task->part->width + 2 * LANES - 1) / (2 * LANES)};
    EACH_MEMBER(part, task->part) sizes.ranks += part->row.rank;
    sizes.floats = sizes.ranks * task->height;
    sizes.vectors = sizes.ranks * sizes.pairs;
    return sizes;
}

static Sizes sizes_of_all(const Call *c) {
    Sizes all = {0};
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        const Sizes one = sizes_of(&task);
        all.ranks += one.ranks, all.floats += one.floats, all.pairs += one.pairs, all.vectors += one.vectors;
    }
    return all;
}

/* Where the share of a thread begins: a multiple of so many, unless some threads would then have none. */
INLINE int64_t border(int64_t whole, int64_t thread, int64_t unit) {
    const int64_t threads = number_of_threads();
    if (whole < unit * threads) unit = 1;
    return least(whole, (whole * thread / threads + unit - 1) / unit * unit);
}

/* Fewer tasks than would keep all threads busy: each has a share of all coefficients, then of all columns. */
static void shared_tasks(const Call *c, const Sizes *all, float *room) {
    const int64_t thread = thread_number(), threads = number_of_threads();
    int64_t from = border(all->ranks, thread, 4), to = border(all->ranks, thread + 1, 4);
    float *h = room;
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        EACH_MEMBER(part, task.part) {
            const int64_t rank = part->row.rank;
            if (to > 0 && from < rank) {
                const Work w = work_of(c, &task, part, part);
                shrink_few(kind_of(&part->row, c->stored), task.height, &w, from > 0 ? from : 0, least(to, rank), h);
            }
            from -= rank, to -= rank, h += rank * task.height;
        }
    }
#pragma omp barrier
    const int64_t unit = all->pairs < SUMS / 2 * threads ? 1 : SUMS / 2; /* pairs of vectors of columns */
    int64_t first = all->vectors * thread / threads, end = all->vectors * (thread + 1) / threads;
    h = room;
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        const Sizes one = sizes_of(&task);
        if (one.ranks && end > 0 && first < one.vectors) {
            const int64_t width = task.part->width, step = unit * one.ranks;
            from = first > 0 ? (first + step - 1) / step * unit * 2 * LANES : 0;
            to = end < one.vectors ? (end + step - 1) / step * unit * 2 * LANES : width;
            const float *low = h;
            if (from < least(to, width)) weigh_base(c, &task, from, least(to, width));
            EACH_MEMBER(part, task.part) {
                const Work w = work_of(c, &task, part, part);
                if (from < least(to, width))
                    expand_few(kind_of(&part->row, c->stored), task.height, &w, from, least(to, width), low);
                low += part->row.rank * task.height;
            }
        }
        first -= one.vectors, end -= one.vectors, h += one.floats;
    }
#pragma omp barrier
}

void lora_team(int64_t stored, const char *pool, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
               const float *bias, const Adapters *adapters, const uint16_t *rounded, float *room, int64_t floats) {
    const int64_t rows = adapters->rows, pieces = adapters->count * adapters->parts;
    int64_t block = TALL; /* rows of a task, fewer where threads would be idle */
    while (block > ROWS && pieces * ((rows + block - 1) / block) < (block > 2 * FEW ? 8 : 4)) block /= 2;
    const int64_t blocks = (rows + block - 1) / block;
    const Call c = {stored % FORMS, stored >= FORMS && in >= LEAST_ROUNDED, rounded, pool, y, x, bias, y_stride,
                    x_stride, in, adapters->parts, adapters->segments, block, blocks, pieces * blocks};
    const int64_t threads = number_of_threads();
    if (threads > 1 && least(rows, block) <= FEW && c.tasks < LONELY * threads) {
        const Sizes all = sizes_of_all(&c);
        if (all.floats <= floats) {
            shared_tasks(&c, &all, room);
            return;
        }
    }
    whole_tasks(&c);
}

/* Whether the sums are worth a team of threads. */
static int is_large(const Segment *segments, int64_t count, int64_t parts, int64_t rows, int64_t in) {
    if (count * parts * rows != 1 || !segments->count) return count * parts * rows > 1;
    const Task task = {segments->parts, segments->start, 1};
    return sizes_of(&task).ranks * (in + task.part->width) >= LARGE;
}

#define LORA_ADD(name, kind)                                                                              \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in, const char *pool, \
              const float *bias, const Segment *segments, int64_t count, int64_t parts, int64_t rows) {   \
        const Adapters adapters = {segments, count, parts, rows};                                         \
        float room[ROOM];                                                                                 \
        _Pragma("omp parallel if (is_large(segments, count, parts, rows, in))")                           \
            lora_team(kind, pool, y, y_stride, x, x_stride, in, bias, &adapters, NULL, room, ROOM);       \
    }

LORA_ADD(lora_add_float32, FLOAT32)
LORA_ADD(lora_add_bfloat16, BFLOAT16)
LORA_ADD(lora_add_rounded, BFLOAT16 + FORMS)
