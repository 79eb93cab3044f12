/* y = x W^T + bias in float32, W kept in float32, bfloat16, or int8 with a scale for each row of W.
 *
 * W [out, in] is packed in panels of PANEL outputs: [panels, in, PANEL], the last one padded with zeros. A tile of
 * up to TILE_ROWS rows of x and one panel is summed in registers; x is read as it lies. With few rows this streams
 * W once, at the speed of memory; with many, a block of W is widened once for all tiles. While a block is
 * multiplied the next one is fetched, so that memory and arithmetic work at once. The sums of a row are made in the
 * same order whatever rows come with it. */

#include "vectors.h"

enum { VECTORS = 3, PANEL = LANES * VECTORS, BLOCK = 256 };
typedef enum { FLOAT32, BFLOAT16, INT8 } Kind;

INLINE int64_t size_of(Kind kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

INLINE vector widen(Kind kind, const char *at) {
    if (kind == FLOAT32) return load((const float *)at);
    if (kind == INT8) return __builtin_convertvector(__builtin_convertvector(*(const bytes *)at, integers), vector);
    const words bits = __builtin_convertvector(*(const halves *)at, words) << 16;
    vector value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, columns;
    const float *scale, *bias; /* of this panel; NULL: none */
    int adds;                  /* to y, which holds the products of the depths before */
    const char *next;          /* to be fetched meanwhile, */
    int64_t hop;               /* so many bytes for each input */
} Tile;

/* Takes a tile's sums, rows of PANEL, to y. Apart from the sums, so that they are compiled once for each height. */
static void __attribute__((noinline)) finish(int rows, Tile t, const float *sums) {
    for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < t.columns; c++) {
            float *to = t.y + r * t.y_stride + c;
            const float scaled = t.scale ? sums[r * PANEL + c] * t.scale[c] : sums[r * PANEL + c];
            *to = scaled + (t.adds ? *to : t.bias ? t.bias[c] : 0);
        }
}

INLINE void tile(const int rows, const Kind kind, Tile t, const char *w, int64_t depth) {
    vector sum[TILE_ROWS][VECTORS];
    float sums[TILE_ROWS * PANEL];
    const int64_t step = PANEL * size_of(kind);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = all(0);
    for (int64_t k = 0; k < depth; k++, w += step) {
        vector in[VECTORS];
        const char *soon = t.next + k * t.hop;
        __builtin_prefetch(soon, 0, 2);
        if (t.hop > 64) __builtin_prefetch(soon + 64, 0, 2);
        if (t.hop > 128) __builtin_prefetch(soon + 128, 0, 2);
        UNROLL for (int v = 0; v < VECTORS; v++) in[v] = widen(kind, w + v * LANES * size_of(kind));
        UNROLL for (int r = 0; r < rows; r++) {
            const vector one = all(t.x[r * t.x_stride + k]);
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] += one * in[v];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * LANES, sum[r][v]);
    finish(rows, t, sums);
}

/* The number of rows is known to the compiler in each case, so that the sums stay in registers. */
#define CASE(n) \
    case n: tile(n, kind, t, w, depth); break;

INLINE void tiles(const Kind kind, Tile t, int64_t rows, const char *w, int64_t depth) {
    const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    float *const y = t.y;
    const float *const x = t.x;
    const char *const next = t.next;
    t.hop = (t.hop + count - 1) / count; /* each tile fetches its share */
    for (int64_t i = 0; i < count; i++) { /* of equal height: 9 rows are 4 and 5 */
        const int64_t start = rows * i / count, stop = rows * (i + 1) / count;
        t.y = y + start * t.y_stride;
        t.x = x + start * t.x_stride;
        t.next = next + i * t.hop * depth;
        switch (stop - start) {
            CASE(1) CASE(2) CASE(3) CASE(4)
#ifdef __AVX512F__
            CASE(5) CASE(6) CASE(7) CASE(8)
#endif
        }
    }
}

INLINE void linear(const Kind kind, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
                   const char *w, int64_t in, int64_t out, const float *scale, const float *bias) {
    const int64_t panels = (out + PANEL - 1) / PANEL, step = PANEL * size_of(kind);
    const int widens = rows > (kind == FLOAT32 ? 4 : 1) * TILE_ROWS; /* float32: only a copy that lies well */
    const int64_t run = panels < 16 ? 1 : 4; /* panels in a row, so that the next one is this thread's, too */
    if (!rows) return;
#pragma omp parallel for schedule(dynamic, run)
    for (int64_t p = 0; p < panels; p++) {
        float wide[BLOCK * PANEL];
        const int64_t column = p * PANEL;
        for (int64_t k = 0; k < in; k += BLOCK) {
            const int64_t depth = least(in - k, BLOCK);
            const char *part = w + (p * in + k) * step;
            const Tile t = {y + column, x + k, y_stride, x_stride, least(out - column, PANEL),
                            scale ? scale + column : NULL, bias ? bias + column : NULL, k > 0,
                            part + depth * step, step};
            if (!widens) {
                tiles(kind, t, rows, part, depth);
                continue;
            }
            for (int64_t i = 0; i < depth * PANEL; i += LANES) store(wide + i, widen(kind, part + i * size_of(kind)));
            tiles(FLOAT32, t, rows, (const char *)wide, depth);
        }
    }
}

#define LINEAR(name, kind)                                                                                           \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows, const char *w, int64_t in, \
              int64_t out, const float *scale, const float *bias) {                                                  \
        linear(kind, y, y_stride, x, x_stride, rows, w, in, out, scale, bias);                                       \
    }

LINEAR(linear_float32, FLOAT32)
LINEAR(linear_bfloat16, BFLOAT16)
LINEAR(linear_int8, INT8)

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
