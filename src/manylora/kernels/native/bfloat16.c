/* y = x W^T + bias by the processor's instructions for bfloat16. x is rounded to bfloat16 once for each call; W is
 * bfloat16, or integers of 8 or 4 bits, which bfloat16 represents exactly; sums are float32.
 *
 * DOTS:  vdpbf16ps. For each pair of inputs the product of the odd one is added to the sum, then that of the even one,
 *        each by a fused multiply-add.
 * TILES: tdpbf16ps. Of 32 inputs the products of the even ones are summed from zero, each by a fused multiply-add, and
 *        so are those of the odd ones. The two sums are added, and the result is added to the sum of all inputs.
 * Both round to nearest even, and take numbers below 2^-126, operands and results, as zeros, whatever MXCSR says. A
 * process uses only one of them, as their bits differ.
 *
 * A panel is taken in chunks of at most CHUNK inputs. A chunk stays in the L1 cache while all rows are multiplied by
 * it, and integers are unpacked once for all of them. Between chunks sums are kept in memory; each tile prefetches a
 * share of the next chunk. All tiles of a call have the same number of rows, so the last one may overlap the one
 * before it. A row's sum is one chain of additions over the inputs of a block, whatever rows are beside it. */

#include "bfloat16.h"
#include "panels.h"
#if defined(__x86_64__) && defined(__linux__)
#include <unistd.h>
#endif

enum {
    DEPTH = 32,       /* inputs of a tile */
    CHUNK = 8 * DEPTH,
    TALL = 16,        /* rows of a tile of TILES */
    WIDE = 8,         /* rows of a tile of DOTS */
    BAND = 256,       /* rows whose sums are kept at once */
    NEAR = 4,         /* tiles of DOTS, at most, for which chunks are so short that the L1 cache holds two */
    PANELS_IN_A_ROW = 4,
    AHEAD = 4096      /* bytes from what is read to what is prefetched */
};

typedef enum { NONE, DOTS, TILES } Form;

#if HAS_FORMS
/* sums [rows, PANEL] += x W^T over `inputs`. x: bfloat16, rows `stride` elements apart. w: pairs [inputs / 2, PANEL].
 * Both go on up to a whole tile, w with zeros. For each pair `pace` bytes are prefetched, from `next` on. */
typedef struct {
    float *sums;
    const uint16_t *x;
    int64_t stride;
    const char *w;
    int64_t inputs;
    const char *next;
    int64_t pace;
} Tile;
typedef void Run(int rows, const Tile *t);

INLINE void dots(const int rows, const Tile *t) {
    const uint16_t *const x = t->x;
    const int64_t stride = t->stride, inputs = t->inputs, pace = t->pace;
    const char *w = t->w, *next = t->next;
    vector sum[WIDE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = load(t->sums + r * PANEL + v * LANES);
    for (int64_t k = 0; k < inputs; k += 2, w += 4 * PANEL, next += pace) {
        words in[VECTORS];
        __builtin_prefetch(next);
        if (pace > LINE) __builtin_prefetch(next + LINE);
        if (pace > 2 * LINE) __builtin_prefetch(next + 2 * LINE);
        UNROLL for (int v = 0; v < VECTORS; v++) in[v] = load_words(w + v * 4 * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * stride + k, sizeof pair);
            const words one = (words){0} + pair;
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = add_pairs(sum[r][v], one, in[v]);
        }
        KEEP_ORDER;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(t->sums + r * PANEL + v * LANES, sum[r][v]);
}

#define CASE(n)     \
    case n:         \
        dots(n, t); \
        break;

static void ONCE run_dots(int rows, const Tile *t) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
}

#if defined(EMULATED)
static void configure(int rows) { (void)rows; }
static void release(void) {}

static void run_tiles(int rows, const Tile *t) {
    for (int64_t k = 0; k < t->inputs; k += DEPTH)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) {
                vector even = all(0), odd = all(0);
                for (int i = 0; i < DEPTH; i += 2) {
                    const uint16_t *const one = t->x + r * t->stride + k + i;
                    const words in = load_words(t->w + (k + i) * 2 * PANEL + v * 4 * LANES);
                    even = fused((words){0} + ((uint32_t)one[0] << 16), in << 16, even);
                    odd = fused((words){0} + ((uint32_t)one[1] << 16), in & 0xffff0000u, odd);
                }
                float *const sum = t->sums + r * PANEL + v * LANES;
                store(sum, flush(flush(load(sum)) + flush(even + odd)));
            }
}
#else
/* Tile registers 0 to 2 are for sums, 3 for rows of x, 4 to 6 for weights. Compilers use none by themselves. */
static void configure(int rows) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int i = 0; i < 7; i++) {
        tiles.bytes[i] = 4 * LANES;
        tiles.rows[i] = i < 4 ? rows : DEPTH / 2;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(tiles));
}

static void release(void) { __asm__ volatile("tilerelease"); }

#define LOAD(tile, at, step) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"(step) : "memory")
#define STORE(tile, at, step) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"(step) : "memory")
#define ADD(sum, w) __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm3, %%tmm" #sum ::)

static void run_tiles(int rows, const Tile *t) {
    const int64_t row = 4 * PANEL, step = 2 * t->stride, paces = DEPTH / 2 * t->pace;
    const float *const sums = t->sums;
    const char *w = t->w, *next = t->next;
    (void)rows;
    LOAD(0, sums, row);
    LOAD(1, sums + LANES, row);
    LOAD(2, sums + 2 * LANES, row);
    for (int64_t k = 0; k < t->inputs; k += DEPTH, w += DEPTH / 2 * row, next += paces) {
        for (int64_t i = 0; i < paces; i += LINE) __builtin_prefetch(next + i);
        LOAD(3, t->x + k, step);
        LOAD(4, w, row);
        LOAD(5, w + 4 * LANES, row);
        LOAD(6, w + 8 * LANES, row);
        ADD(0, 4);
        ADD(1, 5);
        ADD(2, 6);
    }
    STORE(0, sums, row);
    STORE(1, sums + LANES, row);
    STORE(2, sums + 2 * LANES, row);
}
#endif

INLINE uint16_t *rounded(const Linear *c, int64_t row) { return (uint16_t *)c->room + row * rounded_stride(c->in); }

static void round_row(const Linear *c, int64_t row) {
    uint16_t *const to = rounded(c, row);
    round_inputs(to, c->x + row * c->x_stride, c->in);
    for (int64_t g = 0; c->offset && g < blocks_of(c); g++) {
        const int64_t first = g * block_of(c), stop = least(c->in, first + block_of(c));
        totals_of(c)[row * blocks_of(c) + g] = sum_of(BFLOAT16, (const char *)(to + first), stop - first);
    }
}

/* The weights of an even input i and the next one, as pairs, from a panel's row on. odd: whether there is a next one. */
INLINE words pair(const Kind kind, const char *row, int v, int i, int odd) {
    const int inputs = inputs_of(kind), at = i % inputs, next = (i + 1) % inputs;
    const char *const from = row + i / inputs * bytes_of(kind), *const beside = row + (i + 1) / inputs * bytes_of(kind);
    const vector low = weights(kind, from, v, at) * all(1 / factor_of(kind, at));
    const vector high = odd ? weights(kind, beside, v, next) * all(1 / factor_of(kind, next)) : all(0);
    return (words)low >> 16 | ((words)high & 0xffff0000u);
}

/* The weights of inputs [k, k + depth) of a panel as a Run reads them: W itself where it has that form, else `room`. */
INLINE const char *pairs_of(const Kind kind, const Linear *c, int64_t p, int64_t k, int64_t depth, char *room) {
    const char *w = c->w + (p * c->in + k) / inputs_of(kind) * bytes_of(kind);
    const int step = inputs_of(kind) > 2 ? inputs_of(kind) : 2;
    const int64_t used = (depth + 1) / 2 * 4 * PANEL, whole = (depth + DEPTH - 1) / DEPTH * DEPTH / 2 * 4 * PANEL;
    if (kind == BFLOAT16 && used == whole) return w;
    if (kind == BFLOAT16) memcpy(room, w, used);
    else for (int64_t i = 0; i < depth; i += step, w += bytes_of(kind) * (step / inputs_of(kind))) {
        fetch(w + AHEAD, bytes_of(kind) * (step / inputs_of(kind)));
        UNROLL for (int j = 0; j < step; j += 2)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const words made = pair(kind, w, v, j, step > 2 || i + 1 < depth);
                memcpy(room + (i + j) * 2 * PANEL + v * 4 * LANES, &made, sizeof made);
            }
    }
    memset(room + used, 0, whole - used);
    return room;
}

INLINE void one_panel(const Kind kind, const Form form, int64_t height, const Linear *c, int64_t p) {
    Run *const run = form == TILES ? run_tiles : run_dots;
    float sums[BAND * PANEL];
    char room[CHUNK * 2 * PANEL] __attribute__((aligned(LINE)));
    const int64_t stride = rounded_stride(c->in), block = block_of(c), last = c->rows - height;
    for (int64_t first = 0; first < c->rows; first += BAND)
        for (int64_t k = 0; k < c->in; k += block) {
            const int64_t stop = least(c->in, k + block), rows = least(c->rows - first, BAND);
            const int64_t tiles = (rows + height - 1) / height, chunk = form == DOTS && tiles <= NEAR ? 4 * DEPTH : CHUNK;
            memset(sums, 0, tiles * height * PANEL * sizeof *sums);
            for (int64_t at = k; at < stop; at += chunk) {
                const int64_t depth = least(stop - at, chunk), bytes = depth * 2 * PANEL;
                const char *const w = pairs_of(kind, c, p, at, depth, room);
                const char *const next = tiles == 1 ? w + AHEAD : w + bytes; /* next chunk: a share for each tile */
                const int64_t pace = w == room ? 0 : 4 * PANEL / tiles;      /* unpacking prefetches W itself */
                for (int64_t i = 0; i < tiles; i++) {
                    const int64_t r = i * height;
                    run(height, &(Tile){sums + r * PANEL, rounded(c, least(first + r, last)) + at, stride, w, depth,
                                        pace ? next + bytes * i / tiles : w, pace});
                }
            }
            for (int64_t r = 0; r < rows; r += height) {
                const int64_t again = first + r - least(first + r, last); /* rows that the tile before has done */
                finish_panel(c, sums + (r + again) * PANEL, first + r, least(rows - r, height), p, k);
            }
        }
}

/* A thread takes several panels in a row, so that it prefetches what it needs next itself. The last panels are taken
 * one by one, so that all threads end at about the same time. */
INLINE void linear(const Kind kind, const Form form, const Linear *c) {
    const int64_t panels = (c->out + PANEL - 1) / PANEL, height = least(c->rows, form == TILES ? TALL : WIDE);
    const int64_t some = panels / PANELS_IN_A_ROW - number_of_threads(), runs = some > 0 ? some : 0;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < c->rows; r++) round_row(c, r);
    if (form == TILES) configure(height);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < panels - runs * (PANELS_IN_A_ROW - 1); task++) {
        const int64_t alone = task - runs, first = task < runs ? task * PANELS_IN_A_ROW : runs * PANELS_IN_A_ROW + alone;
        const int64_t stop = first + (task < runs ? PANELS_IN_A_ROW : 1);
        for (int64_t p = first; p < stop; p++) one_panel(kind, form, height, c, p);
    }
    if (form == TILES) release();
}

/* A bit for each form that the processor has and the system allows. To ask for TILES allows them to the process. */
int64_t bfloat16_forms(void) {
#if defined(EMULATED)
    return 0;
#else
    unsigned eax = 7, ebx, ecx = 0, edx, more = 7, one = 1;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    const int has_tiles = edx >> 22 & edx >> 24 & 1; /* AMX-BF16, AMX-TILE */
    if (eax >= 1) __asm__("cpuid" : "+a"(more), "=b"(ebx), "+c"(one), "=d"(edx));
    else more = 0;
    const int allowed = has_tiles && !syscall(158, 0x1023, 18); /* arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA */
    return (more >> 5 & 1) << DOTS | allowed << TILES;
#endif
}
#else
INLINE void linear(const Kind kind, const Form form, const Linear *c) { (void)kind, (void)form, (void)c; }
int64_t bfloat16_forms(void) { return 0; }
#endif

/* By all threads of a team. kind: of W, + FORMS * form. `in` is at least ROUNDED_INPUTS of panels.py, from which on
 * rounded x, padded, needs no more memory than x. */
void bfloat16_team(int64_t kind, const Linear *c) {
    switch (kind) { /* known to the compiler in each case */
        case BFLOAT16 + FORMS * DOTS: linear(BFLOAT16, DOTS, c); break;
        case INT8 + FORMS * DOTS: linear(INT8, DOTS, c); break;
        case INT4 + FORMS * DOTS: linear(INT4, DOTS, c); break;
        case UINT4 + FORMS * DOTS: linear(UINT4, DOTS, c); break;
        case FLOAT4 + FORMS * DOTS: linear(FLOAT4, DOTS, c); break;
        case INT5 + FORMS * DOTS: linear(INT5, DOTS, c); break;
        case UINT5 + FORMS * DOTS: linear(UINT5, DOTS, c); break;
        case INT6 + FORMS * DOTS: linear(INT6, DOTS, c); break;
        case BFLOAT16 + FORMS * TILES: linear(BFLOAT16, TILES, c); break;
        case INT8 + FORMS * TILES: linear(INT8, TILES, c); break;
        case INT4 + FORMS * TILES: linear(INT4, TILES, c); break;
        case UINT4 + FORMS * TILES: linear(UINT4, TILES, c); break;
        case FLOAT4 + FORMS * TILES: linear(FLOAT4, TILES, c); break;
        case INT5 + FORMS * TILES: linear(INT5, TILES, c); break;
        case UINT5 + FORMS * TILES: linear(UINT5, TILES, c); break;
        case INT6 + FORMS * TILES: linear(INT6, TILES, c); break;
    }
}
