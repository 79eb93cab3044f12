/* y = x W^T + bias in float32, W kept in float32, bfloat16, int8 or int4. The last two are integers v with
 * W[n, k] = scale[n, g] v[n, k] + offset[n, g], g = k / group; offsets may be missing.
 *
 * W [out, in] is packed in panels of PANEL outputs: [panels, in, PANEL], the last one padded with zeros; of bfloat16
 * and int4 [panels, in / 2, PANEL] pairs of an even input, in the low half, and the next one: 4 bytes, which take one
 * instruction each to widen, or 1, 8 being zero; scales and offsets [panels, groups, PANEL]. A tile of up to TILE_ROWS rows of x and one panel is summed in
 * registers; x is read as it lies. With few rows this streams W once, at the speed of memory; with many, a block of
 * W is widened once for all tiles. Memory is fetched ahead of the arithmetic, so that both work at once. No block is
 * in two groups: integers are summed, and scale and offset enter once for each block. The sums of a row are made in
 * the same order whatever rows come with it. */

#include "vectors.h"

enum { VECTORS = 3, PANEL = LANES * VECTORS, BLOCK = 1024, AHEAD = 4096 /* bytes between reading and fetching */ };

/* What a tile brings into the cache: what it reads itself a little later, or its share of the next block, so many
 * lines for each row of the panel. Known to the compiler, because branches cost more here than all they would save. */
typedef enum { STREAMS, ONE_LINE, TWO_LINES } Fetch;

/* Inputs whose weights lie in one row of a panel, and its bytes. */
INLINE int inputs_of(Kind kind) { return kind == INT4 || kind == BFLOAT16 ? 2 : 1; }
INLINE int64_t bytes_of(Kind kind) { return kind == INT4 ? PANEL : PANEL * size_of(kind) * inputs_of(kind); }

INLINE vector weights(Kind kind, const char *row, int v, int input) {
    if (kind == INT4) return widen_halves(row + v * LANES, input);
    if (kind == BFLOAT16) return widen_pairs(row + v * LANES * 4, input);
    return widen(kind, row + v * LANES * size_of(kind));
}

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, columns;
    const float *scale, *offset, *bias; /* of this panel and group; NULL: none */
    const float *totals;                /* of each row of x, over the inputs of the block: what an offset meets */
    int64_t totals_stride;
    int adds;         /* to y, which holds the products of the depths before */
    const char *next; /* block, to be fetched meanwhile, */
    int64_t hop;      /* so many bytes for each row of the panel */
} Tile;

/* Takes a tile's sums, rows of PANEL, to y. A function of its own, so that no height rounds otherwise. */
static void ONCE finish(int rows, Tile t, const float *sums) {
    for (int r = 0; r < rows; r++) {
        const float whole = t.offset ? t.totals[r * t.totals_stride] : 0;
        for (int64_t c = 0; c < t.columns; c++) {
            float *to = t.y + r * t.y_stride + c;
            const float scaled = t.scale ? sums[r * PANEL + c] * t.scale[c] : sums[r * PANEL + c];
            const float moved = t.offset ? scaled + t.offset[c] * whole : scaled;
            *to = moved + (t.adds ? *to : t.bias ? t.bias[c] : 0);
        }
    }
}

INLINE void tile(const int rows, const Kind kind, const Fetch fetches, Tile t, const char *w, int64_t depth) {
    vector sum[TILE_ROWS][VECTORS];
    float sums[TILE_ROWS * PANEL];
    const int inputs = inputs_of(kind);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = all(0);
    for (int64_t k = 0; k < depth; k += inputs, w += bytes_of(kind)) {
        if (fetches == STREAMS) fetch(w + AHEAD, bytes_of(kind));
        else UNROLL for (int i = 0; i < fetches; i++) __builtin_prefetch(t.next + k * t.hop + i * LINE, 0, 2);
        UNROLL for (int i = 0; i < inputs; i++) {
            vector in[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) in[v] = weights(kind, w, v, i);
            UNROLL for (int r = 0; r < rows; r++) {
                const vector one = all(t.x[r * t.x_stride + k + i]);
                UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = multiply_add(one, in[v], sum[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * LANES, sum[r][v]);
    finish(rows, t, sums);
}

/* The number of rows is known to the compiler in each case, so that the sums stay in registers. */
#define CASE(n) \
    case n: tile(n, kind, fetches, t, w, depth); break;

INLINE void one_tile(const Kind kind, const Fetch fetches, Tile t, int64_t rows, const char *w, int64_t depth) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#ifdef __AVX512F__
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
}

INLINE void tiles(const Kind kind, const Tile all, int64_t rows, const char *w, int64_t depth) {
    const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t i = 0; i < count; i++) { /* of equal height: 9 rows are 4 and 5 */
        const int64_t start = rows * i / count, height = rows * (i + 1) / count - start;
        Tile t = all;
        t.y += start * t.y_stride;
        t.x += start * t.x_stride;
        t.totals += start * t.totals_stride;
        t.hop = (all.hop + count - 1) / count;
        t.next += i * t.hop * depth;
        if (count == 1) one_tile(kind, STREAMS, t, height, w, depth);
        else if (t.hop * inputs_of(kind) > LINE) one_tile(kind, TWO_LINES, t, height, w, depth);
        else one_tile(kind, ONE_LINE, t, height, w, depth);
    }
}

/* totals[row, g] = the sum of x[row] over the inputs of block g. */
static void sum_blocks(float *totals, const float *x, int64_t x_stride, int64_t rows, int64_t in, int64_t block) {
    const int64_t count = (in + block - 1) / block;
#pragma omp parallel for if (rows > TILE_ROWS)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < count; g++) {
            const float *from = x + r * x_stride + g * block;
            const int64_t depth = least(in - g * block, block), whole = depth - depth % LANES;
            vector sum = all(0);
            for (int64_t k = 0; k < whole; k += LANES) sum += load(from + k);
            float one = total(sum);
            for (int64_t k = whole; k < depth; k++) one += from[k];
            totals[r * count + g] = one;
        }
}

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, rows;
    const char *w;
    int64_t in, out;
    const float *scale, *offset;
    float *totals;
    int64_t group;
    const float *bias;
} Call;

/* Weights that were widened; one copy of this code for all kinds. */
static void ONCE wide_tiles(const Tile t, int64_t rows, const char *w, int64_t depth) {
    tiles(FLOAT32, t, rows, w, depth);
}

/* The outputs of panel p. wide: room for a block. */
INLINE void one_panel(const Kind kind, const Call *c, int64_t p, float *wide) {
    const int64_t groups = c->in / c->group, step = bytes_of(kind), column = p * PANEL;
    const int64_t block = least(c->group, BLOCK), blocks = (c->in + block - 1) / block;
    const int inputs = inputs_of(kind);
    const int widens = c->rows > (kind == FLOAT32 ? 4 : 2) * TILE_ROWS; /* float32: only a copy that lies well */
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t k = b * block, depth = least(c->in - k, block), at = (p * groups + k / c->group) * PANEL;
        const int64_t height = depth / inputs;
        const char *part = c->w + (p * c->in + k) / inputs * step;
        const Tile t = {c->y + column, c->x + k, c->y_stride, c->x_stride, least(c->out - column, PANEL),
                        c->scale ? c->scale + at : NULL, c->offset ? c->offset + at : NULL,
                        c->bias ? c->bias + column : NULL, c->totals + b, blocks, k > 0, part + height * step,
                        (step + inputs - 1) / inputs};
        if (!widens && kind == FLOAT32) wide_tiles(t, c->rows, part, depth);
        else if (!widens) tiles(kind, t, c->rows, part, depth);
        if (!widens) continue;
        for (int64_t i = 0; i < height; i++)
            UNROLL for (int h = 0; h < inputs; h++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    store(wide + (i * inputs + h) * PANEL + v * LANES, weights(kind, part + i * step, v, h));
        wide_tiles(t, c->rows, (const char *)wide, depth);
    }
}

static void linear(const Kind kind, const Call c) {
    const int64_t panels = (c.out + PANEL - 1) / PANEL, block = least(c.group, BLOCK);
    const int64_t run = panels < 16 ? 1 : 4; /* panels in a row, so that the next one is this thread's, too */
    if (!c.rows) return;
    if (c.offset) sum_blocks(c.totals, c.x, c.x_stride, c.rows, c.in, block);
#pragma omp parallel for schedule(dynamic, run)
    for (int64_t p = 0; p < panels; p++) {
        float wide[BLOCK * PANEL];
        switch (kind) { /* in here: the body of a parallel loop is a function that its kind is an argument of */
            case FLOAT32: one_panel(FLOAT32, &c, p, wide); break;
            case BFLOAT16: one_panel(BFLOAT16, &c, p, wide); break;
            case INT8: one_panel(INT8, &c, p, wide); break;
            case INT4: one_panel(INT4, &c, p, wide); break;
            case FLOAT8: break; /* no weights are */
        }
    }
}

/* totals: room for [rows, in / the lesser of group and BLOCK, rounded up], where there are offsets. group: inputs
 * that share a scale, a divisor of `in` and, above BLOCK, a multiple of it; without scales `in`. */
#define LINEAR(name, kind)                                                                                           \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows, const char *w, int64_t in, \
              int64_t out, const float *scale, const float *offset, float *totals, int64_t group,                    \
              const float *bias) {                                                                                   \
        linear(kind, (Call){y, x, y_stride, x_stride, rows, w, in, out, scale, offset, totals, group, bias}); \
    }

LINEAR(linear_float32, FLOAT32)
LINEAR(linear_bfloat16, BFLOAT16)
LINEAR(linear_int8, INT8)
LINEAR(linear_int4, INT4)

/* Rows of W, elements of `size` bytes, to panels; `rows` may end within the last. A few inputs at a time, so that
 * the lines that are written stay in the cache until they are full. */
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
