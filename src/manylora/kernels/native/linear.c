/* y = x W^T + bias in float32, W in panels of any kind.
 *
 * A tile of up to TILE_ROWS rows and one panel is summed in registers. With few rows the speed of memory is the limit,
 * and memory is read fastest as several streams: they take several panels at once. More rows are packed first, those
 * of a tile side by side, so that a tile reads one stream. A chunk of W then stays in the L1 cache for all tiles,
 * while the next one is prefetched. For many rows a chunk is widened once for all tiles. Not so bfloat16 with AVX2,
 * which is widened at no cost beside the multiplications: there a longer chunk stays in the cache as it is.
 *
 * Scale and offset are applied to the sums of a block, which never belongs to two groups. A sum is one chain of
 * multiply-adds over a block, kept in memory between chunks, so it is the same whatever rows come with it. Blocks that
 * are shorter than a chunk are small: there a tile applies scales itself, and adds to the results of all blocks. */

#include "panels.h"

#ifdef __AVX512F__
enum { TILE_ROWS = 8, CHUNK = 128, MANY = 2 * TILE_ROWS, WIDENS_PAIRS = 1 };
#else
enum { TILE_ROWS = 6, CHUNK = 256, MANY = 6 * TILE_ROWS, WIDENS_PAIRS = 0 };
#endif

enum {
    STREAMS = 4,      /* panels that few rows read at once, at most */
    FEW = TILE_ROWS / 2, /* rows */
    RUN = 4,          /* panels in a row for a thread, which prefetches the next one itself */
    TALL = 128,       /* tiles whose sums are kept at once */
    AHEAD = 2048,     /* bytes from what is read to what is prefetched, with one tile */
    SMALL = 1 << 15   /* multiplications, at most, that one thread does alone */
};

typedef struct {
    float *sums;    /* [panels, rows, PANEL]; of small blocks the results */
    const float *x; /* for one panel: packed [depth, rows]; for several: rows, `stride` apart */
    int64_t stride;
    const char *w;
    int64_t hop, depth; /* bytes from panel to panel; inputs */
    const char *next;   /* is prefetched meanwhile: */
    int64_t pace;       /* so many bytes for each row of the panel */
    /* Of small blocks: */
    const float *scale, *offset; /* [panels, blocks, PANEL], panels `scale_hop` apart; offset NULL: none */
    const float *totals;         /* [rows, blocks], rows `totals_hop` apart */
    int64_t block, scale_hop, totals_hop; /* block: inputs */
} Tile;

enum { MOST = STREAMS * VECTORS };
typedef struct {
    const float *x;
    const char *w, *next;
} Place;

/* The same for input i of a row, from x on, and the panel whose sums begin at `sum`. */
INLINE void add_one(const int rows, const int panels, const Tile *t, const float *x, int i, const vector *in,
                    vector sum[TILE_ROWS][MOST], int first) {
    UNROLL for (int r = 0; r < rows; r++) {
        const vector one = all(panels > 1 ? x[r * t->stride + i] : x[i * rows + r]);
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][first + v] = multiply_add(one, in[v], sum[r][first + v]);
    }
}

enum { PAIR = 2 };
/* The same of kinds that have words. x is divided by their factors. */
INLINE void add_words(const int rows, const int panels, const Kind kind, const Tile *t, int64_t depth, Place *from,
                      vector sum[TILE_ROWS][MOST]) {
    const int inputs = inputs_of(kind), each = in_word(kind), apart = inputs - words_of(kind) * each;
    const int step = panels > 1 ? 1 : rows;
    const float *x = from->x;
    const char *w = from->w, *next = from->next;
    for (int64_t k = 0; k < depth; k += inputs, w += bytes_of(kind), x += inputs * step, next += t->pace) {
        if (panels == 1) fetch_some(next, t->pace);
        const int pair = rows == 1 && panels % PAIR == 0 ? PAIR : 1;
        UNROLL for (int p = 0; p < panels; p += pair) {
            vector in[VECTORS];
            UNROLL for (int q = p; q < p + pair && panels > 1; q++) fetch(w + q * t->hop + AHEAD, bytes_of(kind));
            for (int number = 0; number < words_of(kind); number++) {
                words word[PAIR][VECTORS];
                UNROLL for (int q = 0; q < pair; q++)
                    UNROLL for (int v = 0; v < VECTORS; v++) word[q][v] = word_at(w + (p + q) * t->hop, v, number);
                UNROLL for (int i = 0; i < each; i++)
                    UNROLL for (int q = 0; q < pair; q++) {
                        UNROLL for (int v = 0; v < VECTORS; v++) in[v] = one_of(kind, word[q][v], i);
                        add_one(rows, panels, t, x + number * each * step, i, in, sum, (p + q) * VECTORS);
                    }
                KEEP_ORDER;
            }
            UNROLL for (int i = inputs - apart; i < inputs; i++)
                UNROLL for (int q = 0; q < pair; q++) {
                    UNROLL for (int v = 0; v < VECTORS; v++) in[v] = apart_of(kind, w + (p + q) * t->hop, v, i + 1 == inputs);
                    add_one(rows, panels, t, x, i, in, sum, (p + q) * VECTORS);
                    KEEP_ORDER;
                }
        }
    }
    *from = (Place){x, w, next};
}

/* sum += x W^T over `depth` inputs. Rows and panels are known to the compiler, so that the sums stay in registers. */
INLINE void add_inputs(const int rows, const int panels, const Kind kind, const Tile *t, int64_t depth, Place *from,
                       vector sum[TILE_ROWS][MOST]) {
    if (has_words(kind)) {
        add_words(rows, panels, kind, t, depth, from, sum);
        return;
    }
    const int inputs = inputs_of(kind), wide = panels * VECTORS, step = panels > 1 ? inputs : inputs * rows;
    const float *x = from->x;
    const char *w = from->w, *next = from->next;
    for (int64_t k = 0; k < depth; k += inputs, w += bytes_of(kind), x += step, next += t->pace) {
        if (panels == 1) __builtin_prefetch(next);
        else UNROLL for (int p = 0; p < panels; p++) fetch(w + p * t->hop + AHEAD, bytes_of(kind));
        UNROLL for (int i = 0; i < inputs; i++) {
            vector few[TILE_ROWS];
            if (panels > 1) UNROLL for (int r = 0; r < rows; r++) few[r] = all(x[r * t->stride + i]);
            if (panels > 1) UNROLL for (int v = 0; v < wide; v++) {
                const vector in = weights(kind, w + v / VECTORS * t->hop, v % VECTORS, i);
                UNROLL for (int r = 0; r < rows; r++) sum[r][v] = multiply_add(few[r], in, sum[r][v]);
            }
            vector in[VECTORS];
            if (panels == 1) UNROLL for (int v = 0; v < wide; v++) in[v] = weights(kind, w, v, i);
            if (panels == 1) UNROLL for (int r = 0; r < rows; r++) {
                const vector one = all(x[i * rows + r]);
                UNROLL for (int v = 0; v < wide; v++) sum[r][v] = multiply_add(one, in[v], sum[r][v]);
            }
            KEEP_ORDER;
        }
    }
    *from = (Place){x, w, next};
}

INLINE float *sums_of(const Tile *t, int rows, int r, int v) {
    return t->sums + (v / VECTORS * rows + r) * PANEL + v % VECTORS * LANES;
}

INLINE void tile(const int rows, const int panels, const Kind kind, const Tile t) {
    const int wide = panels * VECTORS;
    Place from = {t.x, t.w, t.next};
    vector sum[TILE_ROWS][MOST];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < wide; v++) sum[r][v] = load(sums_of(&t, rows, r, v));
    add_inputs(rows, panels, kind, &t, t.depth, &from, sum);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < wide; v++) store(sums_of(&t, rows, r, v), sum[r][v]);
}

/* The same over some small blocks, with scales and offsets. */
INLINE void small_blocks(const int rows, const int panels, const Kind kind, const Tile t) {
    const int wide = panels * VECTORS;
    Place from = {t.x, t.w, t.next};
    for (int64_t b = 0; b < t.depth / t.block; b++) {
        vector sum[TILE_ROWS][MOST];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < wide; v++) sum[r][v] = (vector){0};
        add_inputs(rows, panels, kind, &t, t.block, &from, sum);
        UNROLL for (int v = 0; v < wide; v++) {
            const int64_t at = v / VECTORS * t.scale_hop + b * PANEL + v % VECTORS * LANES;
            const vector scale = load(t.scale + at), offset = t.offset ? load(t.offset + at) : scale;
            UNROLL for (int r = 0; r < rows; r++) {
                vector one = sum[r][v] * scale;
                if (t.offset) one = multiply_add(offset, all(t.totals[r * t.totals_hop + b]), one);
                store(sums_of(&t, rows, r, v), load(sums_of(&t, rows, r, v)) + one);
            }
        }
    }
}

/* Separate functions: if all were inlined into one, compilers would keep some of the sums in memory. */
#define TILE(kind, n, p) \
    static void ONCE tile_##kind##_##n##_##p(const Tile t) { tile(n, p, kind, t); }
#define SMALL_COLUMN(kind, n) \
    static void ONCE small_##kind##_##n(const Tile t) { small_blocks(n, 1, kind, t); }
#define SMALL_STREAM(kind, n) \
    static void ONCE small_stream_##kind##_##n(const Tile t) { small_blocks(n, SEVERAL(n), kind, t); }
#define COLUMN(kind, n) TILE(kind, n, 1)
#define SEVERAL(n) (TILE_ROWS / (n) < STREAMS ? TILE_ROWS / (n) : STREAMS) /* panels for so many rows */
#define STREAM(kind, n) \
    static void ONCE stream_##kind##_##n(const Tile t) { tile(n, SEVERAL(n), kind, t); }
#ifdef __AVX512F__
#define HEIGHTS(DO, kind) DO(kind, 1) DO(kind, 2) DO(kind, 3) DO(kind, 4) DO(kind, 5) DO(kind, 6) DO(kind, 7) DO(kind, 8)
#define FEW_HEIGHTS(DO, kind) DO(kind, 1) DO(kind, 2) DO(kind, 3) DO(kind, 4)
#else
#define HEIGHTS(DO, kind) DO(kind, 1) DO(kind, 2) DO(kind, 3) DO(kind, 4) DO(kind, 5) DO(kind, 6)
#define FEW_HEIGHTS(DO, kind) DO(kind, 1) DO(kind, 2) DO(kind, 3)
#endif
#define SCALED(DO) DO(FLOAT32) DO(INT8) DO(INT4) DO(UINT4) DO(FLOAT4) /* FLOAT32: what was widened */
#define KINDS(DO) DO(BFLOAT16) SCALED(DO)
#define SMALL_KINDS(DO) SCALED(DO) DO(INT5) DO(UINT5) DO(INT6) /* the last three have only small blocks */
#define DEFINE(kind) HEIGHTS(COLUMN, kind) FEW_HEIGHTS(STREAM, kind)
#define DEFINE_SMALL(kind) HEIGHTS(SMALL_COLUMN, kind) FEW_HEIGHTS(SMALL_STREAM, kind)
/* One row and two panels, so that few panels can be divided among threads. */
#define TWO(kind) static void ONCE two_##kind(const Tile t) { tile(1, 2, kind, t); }
#define SMALL_TWO(kind) static void ONCE small_two_##kind(const Tile t) { small_blocks(1, 2, kind, t); }
KINDS(DEFINE)
KINDS(TWO)
SMALL_KINDS(DEFINE_SMALL)
SMALL_KINDS(SMALL_TWO)

typedef void Run(Tile t);
#define TWO_NAME(kind) [kind] = two_##kind,
#define SMALL_TWO_NAME(kind) [kind] = small_two_##kind,
static Run *const TWO_TILES[FLOAT8] = {KINDS(TWO_NAME)}, *const SMALL_TWO_TILES[FLOAT8] = {SMALL_KINDS(SMALL_TWO_NAME)};
#define COLUMN_NAME(kind, n) tile_##kind##_##n##_1,
#define STREAM_NAME(kind, n) stream_##kind##_##n,
#define COLUMNS(kind) [kind] = {HEIGHTS(COLUMN_NAME, kind)},
#define STREAMS_OF(kind) [kind] = {FEW_HEIGHTS(STREAM_NAME, kind)},
static Run *const TILES[FLOAT8][TILE_ROWS] = {KINDS(COLUMNS)}, *const FEW_TILES[FLOAT8][FEW] = {KINDS(STREAMS_OF)};
#define SMALL_NAME(kind, n) small_##kind##_##n,
#define SMALL_STREAM_NAME(kind, n) small_stream_##kind##_##n,
#define SMALLS(kind) [kind] = {HEIGHTS(SMALL_NAME, kind)},
#define SMALL_STREAMS(kind) [kind] = {FEW_HEIGHTS(SMALL_STREAM_NAME, kind)},
static Run *const SMALL_TILES[FLOAT8][TILE_ROWS] = {SMALL_KINDS(SMALLS)};
static Run *const FEW_SMALL_TILES[FLOAT8][FEW] = {SMALL_KINDS(SMALL_STREAMS)};

/* The first row of a tile. Tiles are of nearly equal height: 9 rows are 4 and 5. */
INLINE int64_t start_of(const Linear *c, int64_t tile, int64_t tiles) { return c->rows * tile / tiles; }

enum { MOST_INPUTS = 32 }; /* of a panel's row */

/* What x is multiplied by for the weights of a kind, of MOST_INPUTS inputs one after the other. */
INLINE void factors(const Kind kind, float *by) {
    for (int i = 0; i < MOST_INPUTS; i++) by[i] = 1 / factor_of(kind, i % inputs_of(kind));
}

/* The rows of a tile side by side: [in, rows]. */
INLINE void pack(const Kind kind, const Linear *c, int64_t row, int64_t rows) {
    const float *const x = c->x + row * c->x_stride;
    float *const to = c->room + row * c->in, by[MOST_INPUTS];
    int64_t k = 0;
    factors(kind, by);
    for (; k + LANES <= c->in; k += LANES)
        for (int64_t r = 0; r < rows; r++) {
            vector some = load(x + r * c->x_stride + k);
            if (has_words(kind)) some *= load(by + k % MOST_INPUTS);
            UNROLL for (int i = 0; i < LANES; i++) to[(k + i) * rows + r] = some[i];
        }
    for (; k < c->in; k++)
        for (int64_t r = 0; r < rows; r++) to[k * rows + r] = x[r * c->x_stride + k] * by[k % MOST_INPUTS];
}

INLINE void scale_row(const Kind kind, const Linear *c, int64_t row) {
    const float *const x = c->x + row * c->x_stride;
    float *const to = c->room + row * c->in, by[MOST_INPUTS];
    factors(kind, by);
    for (int64_t k = 0; k < c->in; k += LANES)
        store_some(to + k, load_some(x + k, c->in - k) * load(by + k % MOST_INPUTS), c->in - k);
}

static void sum_blocks(const Linear *c, int64_t row) {
    const int64_t block = block_of(c), count = blocks_of(c);
    for (int64_t g = 0; g < count; g++) {
        const char *const from = (const char *)(c->x + row * c->x_stride + g * block);
        totals_of(c)[row * count + g] = sum_of(FLOAT32, from, least(c->in - g * block, block));
    }
}

void ONCE finish_panel(const Linear *c, const float *sums, int64_t row, int64_t rows, int64_t p, int64_t k) {
    const int64_t column = p * PANEL, columns = least(c->out - column, PANEL);
    float room[2][PANEL];
    const float *const scale = widen_scales(c, c->scale, p, k / c->group, 1, room[0]);
    const float *const offset = widen_scales(c, c->offset, p, k / c->group, 1, room[1]);
    const float *const bias = c->bias ? c->bias + column : NULL;
    for (int64_t r = 0; r < rows; r++, sums += PANEL) {
        float *const to = c->y + (row + r) * c->y_stride + column;
        const float whole = offset ? totals_of(c)[(row + r) * blocks_of(c) + k / block_of(c)] : 0;
        for (int64_t i = 0; i < columns; i += LANES) {
            vector one = load(sums + i);
            if (scale) one *= load(scale + i);
            if (offset) one = multiply_add(load(offset + i), all(whole), one);
            if (k) one += load_some(to + i, columns - i);
            else if (bias) one += load_some(bias + i, columns - i);
            store_some(to + i, one, columns - i);
        }
    }
}

INLINE int is_small(const Linear *c) { return c->scale && c->group <= CHUNK && CHUNK % c->group == 0; }

typedef float ScaleRoom[2][STREAMS][MOST_GROUPS * PANEL];

/* A tile of small blocks, from input k of panel p on and of `panels` that are so many apart; its totals are those of the
 * first row. */
INLINE Tile with_scales(Tile t, const Linear *c, int64_t p, int64_t panels, int64_t apart, int64_t k, ScaleRoom room) {
    const int64_t count = c->in / c->group;
    t.scale = widen_scales(c, c->scale, p, k / c->group, t.depth / c->group, room[0][0]);
    t.offset = widen_scales(c, c->offset, p, k / c->group, t.depth / c->group, room[1][0]);
    for (int64_t i = 1; i < panels && c->scales != WHOLE; i++) {
        widen_scales(c, c->scale, p + i * apart, k / c->group, t.depth / c->group, room[0][i]);
        widen_scales(c, c->offset, p + i * apart, k / c->group, t.depth / c->group, room[1][i]);
    }
    t.totals = totals_of(c) + k / c->group;
    t.block = c->group, t.scale_hop = c->scales == WHOLE ? apart * count * PANEL : MOST_GROUPS * PANEL, t.totals_hop = count;
    return t;
}

/* Writes the results of small blocks to y, with the bias. */
static void ONCE write_panel(const Linear *c, const float *sums, int64_t row, int64_t rows, int64_t p) {
    const int64_t column = p * PANEL, columns = least(c->out - column, PANEL);
    for (int64_t r = 0; r < rows; r++, sums += PANEL)
        for (int64_t i = 0; i < columns; i += LANES) {
            vector one = load(sums + i);
            if (c->bias) one += load_some(c->bias + column + i, columns - i);
            store_some(c->y + (row + r) * c->y_stride + column + i, one, columns - i);
        }
}

/* Few rows and the panels [first, last). If they can be divided among as many streams as FEW_TILES take, each stream
 * has its panels in a row, so that what it prefetches is its next panel; else they are taken one by one. */
INLINE void few_rows(const Kind kind, const Linear *c, int64_t first, int64_t last) {
    const int small = kind != FLOAT32 && kind != BFLOAT16 && is_small(c);
    const int64_t row_bytes = bytes_of(kind), inputs = inputs_of(kind), panel_bytes = c->in / inputs * row_bytes;
    const int64_t most = SEVERAL(c->rows), all_of = last - first;
    const int64_t count = all_of % most == 0 ? most : c->rows == 1 && all_of % 2 == 0 ? 2 : 1, apart = all_of / count;
    const int64_t block = !small ? block_of(c) : c->scales == WHOLE ? BLOCK : CODED_INPUTS;
    Run *const run = count == 1      ? (small ? SMALL_TILES : TILES)[kind][c->rows - 1]
                     : count == most ? (small ? FEW_SMALL_TILES : FEW_TILES)[kind][c->rows - 1]
                                     : (small ? SMALL_TWO_TILES : TWO_TILES)[kind];
    float sums[STREAMS * FEW * PANEL];
    ScaleRoom scales;
    for (int64_t p = first; p < first + apart; p++)
        for (int64_t k = 0; k < c->in; k += block) {
            const char *const w = c->w + p * panel_bytes + k / inputs * row_bytes;
            Tile t = {sums, c->x + k, c->x_stride, w, apart * panel_bytes, least(c->in - k, block), w, 0, 0};
            if (small) t = with_scales(t, c, p, count, apart, k, scales);
            if (!small || !k) memset(sums, 0, count * c->rows * PANEL * sizeof *sums);
            float some[BLOCK * FEW]; /* for one panel rows are packed */
            if (count == 1) {
                for (int64_t i = 0; i < t.depth; i++)
                    for (int64_t r = 0; r < c->rows; r++) some[i * c->rows + r] = c->x[r * c->x_stride + k + i];
                t.x = some;
            }
            run(t);
            for (int64_t i = 0; i < count; i++) {
                const float *const made = sums + i * c->rows * PANEL;
                if (!small) finish_panel(c, made, 0, c->rows, p + i * apart, k);
                else if (k + block >= c->in) write_panel(c, made, 0, c->rows, p + i * apart);
            }
        }
}

INLINE void widen_chunk(const Kind kind, float *wide, const char *w, int64_t depth) {
    for (int64_t k = 0; k < depth; k += inputs_of(kind), w += bytes_of(kind))
        UNROLL for (int i = 0; i < inputs_of(kind); i++, wide += PANEL)
            UNROLL for (int v = 0; v < VECTORS; v++) store(wide + v * LANES, weights(kind, w, v, i));
}

/* Tiles [first, last) of panel p. */
INLINE void many_rows(const Kind kind, const Linear *c, int64_t p, int64_t first, int64_t last, int64_t tiles) {
    const int small = kind != FLOAT32 && kind != BFLOAT16 && is_small(c);
    const int64_t row_bytes = bytes_of(kind), inputs = inputs_of(kind), count = last - first;
    const int64_t block = small ? c->in : block_of(c);
    const int many = kind != FLOAT32 && c->rows > (kind == BFLOAT16 ? MANY : 2 * TILE_ROWS);
    const int widens = many && (kind != BFLOAT16 || WIDENS_PAIRS);
    const Kind read = widens ? FLOAT32 : kind;
    Run *const *const run = (small ? SMALL_TILES : TILES)[read];
    const int64_t chunk = many && !widens ? 2 * CHUNK : CHUNK;
    float sums[TALL][TILE_ROWS * PANEL], wide[CHUNK * PANEL];
    ScaleRoom scales;
    for (int64_t k = 0; k < c->in; k += block) {
        const int64_t stop = least(c->in, k + block);
        memset(sums, 0, count * sizeof *sums);
        for (int64_t at = k; at < stop; at += chunk) {
            const int64_t depth = least(stop - at, chunk), height = depth / inputs;
            const char *const w = c->w + (p * c->in + at) / inputs * row_bytes, *const next = w + height * row_bytes;
            const int64_t pace = row_bytes / count / (widens ? inputs : 1); /* each tile prefetches its share */
            const Tile whole = {NULL, NULL, 0, widens ? (const char *)wide : w, 0, depth, NULL, pace};
            Tile one = small ? with_scales(whole, c, p, 1, 1, at, scales) : whole;
            if (widens) widen_chunk(kind, wide, w, depth);
            for (int64_t t = 0; t < count; t++) {
                const int64_t row = start_of(c, first + t, tiles), rows = start_of(c, first + t + 1, tiles) - row;
                one.sums = sums[t], one.x = c->room + row * c->in + at * rows;
                one.next = count == 1 ? w + AHEAD : next + height * row_bytes * t / count;
                if (small) one.totals = totals_of(c) + row * (c->in / c->group) + at / c->group;
                run[rows - 1](one);
            }
        }
        for (int64_t t = 0; t < count; t++) {
            const int64_t row = start_of(c, first + t, tiles), rows = start_of(c, first + t + 1, tiles) - row;
            if (small) write_panel(c, sums[t], row, rows, p);
            else finish_panel(c, sums[t], row, rows, p, k);
        }
    }
}

/* By all threads of a team. */
INLINE void linear(const Kind kind, const Linear *c) {
    const int64_t panels = (c->out + PANEL - 1) / PANEL, tiles = (c->rows + TILE_ROWS - 1) / TILE_ROWS;
    const int few = c->rows <= FEW;
    const int64_t share = panels / (SEVERAL(c->rows) * number_of_threads() * 2); /* of a stream: 2 tasks for a thread */
    const int64_t run = few ? SEVERAL(c->rows) * (share < 1 ? 1 : least(share, 2 * RUN)) : panels < 16 ? 1 : RUN;
    /* Panels of the last tasks, so that all threads end together. Their sums must be enough to hide how long one takes. */
    const int64_t small = few ? (c->rows == 1 && VECTORS > 2 ? 2 : SEVERAL(c->rows)) : run;
    const int64_t runs = few && run > small ? (panels * 3 / 4) / run : panels / run;
    if (!few) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = start_of(c, t, tiles);
            pack(kind, c, row, start_of(c, t + 1, tiles) - row);
        }
    }
    Linear scaled = *c; /* for few rows: x times the factors of its weights */
    const int scales = few && has_words(kind) && kind != FLOAT4;
    if (scales) scaled.x = c->room, scaled.x_stride = c->in;
    if (scales || c->offset) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < c->rows; r++) {
            if (c->offset) sum_blocks(c, r);
            if (scales) scale_row(kind, c, r);
        }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < runs + (panels - runs * run + small - 1) / small; task++) {
        const int64_t first = task < runs ? task * run : runs * run + (task - runs) * small;
        const int64_t last = least(first + (task < runs ? run : small), panels);
        if (few) few_rows(kind, &scaled, first, last);
        else for (int64_t p = first; p < last; p++)
            for (int64_t t = 0; t < tiles; t += TALL) many_rows(kind, c, p, t, least(tiles, t + TALL), tiles);
    }
}

void linear_team(int64_t kind, const Linear *c) {
    if (!c->rows) return;
    if (kind >= FORMS) {
        (kind >= FORMS * INTEGERS ? integer_team : bfloat16_team)(kind, c);
        return;
    }
    switch (kind) { /* known to the compiler in each case */
        case FLOAT32: linear(FLOAT32, c); break;
        case BFLOAT16: linear(BFLOAT16, c); break;
        case INT8: linear(INT8, c); break;
        case INT4: linear(INT4, c); break;
        case UINT4: linear(UINT4, c); break;
        case FLOAT4: linear(FLOAT4, c); break;
        case INT5: linear(INT5, c); break;
        case UINT5: linear(UINT5, c); break;
        case INT6: linear(INT6, c); break;
    }
}

/* room: for x, [rows, in], and, with offsets, for [rows, blocks] more, where a block is of min(group, BLOCK) inputs.
 * group: inputs that share a scale, a divisor of `in` and, above BLOCK, a multiple of it; without scales `in`. */
void linear_layer(int64_t kind, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
                  const char *w, int64_t in, int64_t out, const char *scale, const char *offset, float *room,
                  int64_t group, const float *bias, int64_t scales) {
    const Linear c = {y, x, y_stride, x_stride, rows, w, in, out, scale, offset, group, bias, room, scales};
#pragma omp parallel if (rows * in * out > SMALL)
    linear_team(kind, &c);
}

/* Copies rows of W, elements of `size` bytes, to panels; the last panel is padded with zeros. A few inputs at a time,
 * so that cache lines are full before they leave the cache. */
#define LAY_OUT(TYPE)                                                                                                \
    for (int64_t panel = 0; panel * PANEL < rows; panel++)                                                           \
        for (int64_t block = 0; block < in; block += 64)                                                             \
            for (int64_t j = 0; j < PANEL; j++) {                                                                    \
                const int64_t row = panel * PANEL + j, end = block + 64 < in ? block + 64 : in;                      \
                for (int64_t k = block; k < end; k++)                                                                \
                    ((TYPE *)out)[(panel * in + k) * PANEL + j] = row < rows ? ((const TYPE *)x)[row * in + k] : 0;  \
            }

void lay_out_panels(char *out, const char *x, int64_t size, int64_t rows, int64_t in) {
    if (size == 1) LAY_OUT(uint8_t)
    if (size == 2) LAY_OUT(uint16_t)
    if (size == 4) LAY_OUT(uint32_t)
}

int64_t panel_width(void) { return PANEL; }
int64_t panel_block(void) { return BLOCK; }
