/* y = x W^T + bias by products of integers: W in 8 bits with a scale for each output, or in 4 bits with one for each
 * BLOCK inputs; x is rounded here to 8 bits with a scale for each row and BLOCK inputs.
 *
 * The sum of a block is an integer, exact and the same in every form below. Blocks are added in float32, in order of
 * their inputs, each by one fused multiply-add. So a row's bits depend neither on other rows nor on the form.
 *
 * W [out, in] lies in panels of PANEL outputs, `in` padded with zeros to whole blocks. 8 bits: [panels, in / 4, PANEL,
 * 4], signed. 4 bits: [panels, in / 8, PANEL, 4] bytes, inputs 0 to 3 in the low halves, 4 to 7 in the high ones, as
 * value + 8. Some blocks are unpacked to what the form multiplies, then up to ROWS rows use them, so W is read once for
 * all of these. For at most FEW rows blocks are unpacked in registers.
 *
 * PAIRS: 16-bit integers, two products to a sum of 32 bits (pmaddwd).
 * BYTES: 4 bits only: unsigned times signed bytes, two products to a sum of 16 bits (pmaddubsw). It cannot saturate:
 *        a product is at most 15 * 127, and 16 of them are added in 16 bits before they are widened: 30,480.
 * DOTS:  four products of bytes to a sum of 32 bits (vpdpbusd, sdot), which never saturates.
 * Where a form takes weights as unsigned, they are value + zero; zero times the sum of the inputs is subtracted. */

#include "team.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

enum { VECTORS = 2, PANEL = LANES * VECTORS, BLOCK = 32, DEPTH = 8 /* blocks unpacked at a time */ };
#ifdef __AVX512F__
enum { HEIGHT = 8, ROWS = 64 }; /* rows of a tile, whose sums are in registers; rows that use unpacked blocks */
#else
enum { HEIGHT = 6, ROWS = 96 };
#endif
enum { WORD = 4 * LANES, MOST_WORDS = 4, AHEAD = 4096 };
enum { FEW = 4 }; /* rows, at most, for which blocks are unpacked in registers */

typedef enum { EIGHT, FOUR } Bits;
typedef enum { PAIRS, BYTES, DOTS } Form;

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define HAS_BYTES 1
#else
#define HAS_BYTES 0
#endif

#define NOT_UNROLLED _Pragma("GCC unroll 1")
/* Keeps the compiler from loading words of the next row before the sums of this one are done: all words at once would
 * leave too few registers for the sums. */
#if defined(EMULATED)
#define SETTLE(sum) __asm__ volatile("" ::: "memory")
#elif defined(__AVX512F__)
#define SETTLE(sum) __asm__ volatile("" : "+v"(sum)::"memory")
#elif defined(__AVX2__)
#define SETTLE(sum) __asm__ volatile("" : "+x"(sum)::"memory")
#else
#define SETTLE(sum) __asm__ volatile("" ::: "memory")
#endif

/* Whether the compiler's assembler knows the instruction of DOTS. EMULATED: it is computed in plain C, for tests. */
#if defined(EMULATED)
#define HAS_DOTS 1
#elif defined(__x86_64__) && defined(__AVX2__)
#define HAS_DOTS KNOWN_SINCE(11, 12)
#elif defined(__aarch64__) && defined(__linux__)
#define HAS_DOTS KNOWN_SINCE(9, 9)
#else
#define HAS_DOTS 0
#endif

INLINE int step_inputs(Form form) { return form == PAIRS ? 2 : 4; } /* in 32 bits of x */
INLINE int steps_of(Form form) { return BLOCK / step_inputs(form); }

INLINE int zero_of(Bits bits, Form form) {
#if defined(__aarch64__) && !defined(EMULATED)
    return bits == FOUR ? 8 : 0;
#else
    return bits == FOUR ? 8 : form == DOTS ? 128 : 0;
#endif
}

/* sum + a[0] b[0] + a[1] b[1], of 16-bit integers. */
INLINE integers add_pairs(integers sum, integers a, integers b) {
#if defined(__AVX512BW__)
    return sum + (integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX512F__)
    __m128i x[2], y[2];
    integers made;
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    for (int i = 0; i < 2; i++) x[i] = _mm_madd_epi16(x[i], y[i]);
    memcpy(&made, x, sizeof made);
    return sum + made;
#else
    return sum + (a >> 16) * (b >> 16) + ((a << 16) >> 16) * ((b << 16) >> 16);
#endif
}

/* 16-bit sums of two products each, of unsigned bytes a and signed b. */
INLINE integers add_bytes(integers sum, integers a, integers b) {
#if defined(__AVX512BW__)
    return (integers)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)a, (__m512i)b));
#elif HAS_BYTES
    return (integers)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b));
#else
    return sum; /* this form is not used */
#endif
}

/* sum + four products of bytes, those of b signed, those of a unsigned or, on aarch64, signed. As inline assembly, so
 * that the library can be compiled for processors without the instruction. */
INLINE integers add_dots(integers sum, integers a, integers b) {
#if defined(EMULATED)
    for (int i = 0; i < 32; i += 8)
        sum += (integers)((words)a << (24 - i) >> 24) * ((b << (24 - i)) >> 24);
#elif !HAS_DOTS /* this form is not used */
#elif defined(__AVX512F__)
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVX2__)
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#elif defined(__aarch64__)
    typedef int32_t quad __attribute__((vector_size(16)));
    quad s[2], x[2], y[2];
    memcpy(s, &sum, sizeof s);
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 2; i++)
        __asm__(".arch_extension dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(s[i]) : "w"(x[i]), "w"(y[i]));
    memcpy(&sum, s, sizeof s);
#endif
    return sum;
}

/* Whether this processor has the instruction of DOTS that was compiled in. */
int64_t integer_dots(void) {
#if defined(EMULATED) || !HAS_DOTS
    return HAS_DOTS;
#elif defined(__x86_64__) /* by bit numbers: older compilers have no names for them */
    unsigned eax = 7, ebx, ecx = LANES == 8, edx;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return LANES == 8 ? eax >> 4 & 1 : ecx >> 11 & 1; /* AVX-VNNI, AVX512-VNNI */
#else
    return getauxval(AT_HWCAP) >> 20 & 1; /* ASIMDDP */
#endif
}

INLINE integers load_word(const char *at) { return *(const any_integers *)at; }
INLINE void store_word(char *at, integers word) { *(any_integers *)at = word; }

/* Even and odd bytes to 16 bits. */
INLINE void to_pairs(integers word, int is_signed, integers *even, integers *odd) {
    typedef int16_t shorts __attribute__((vector_size(WORD)));
    typedef uint16_t others __attribute__((vector_size(WORD)));
    *even = is_signed ? (integers)((shorts)((others)word << 8) >> 8) : word & 0x00ff00ff;
    *odd = is_signed ? (integers)((shorts)word >> 8) : (integers)((words)word >> 8) & 0x00ff00ff;
}

INLINE int words_of(Bits bits, Form form) { return (bits == FOUR ? 2 : 1) * (form == PAIRS ? 2 : 1); }

/* Unpacks a word of W to the words_of(bits, form) words that a form multiplies, in order of their inputs. */
INLINE void expand(const Bits bits, const Form form, integers word, integers *to) {
    if (bits == FOUR) {
        const integers low = word & 0x0f0f0f0f, high = (integers)((words)word >> 4) & 0x0f0f0f0f;
        if (form == PAIRS) {
            to_pairs(low, 0, to, to + 1);
            to_pairs(high, 0, to + 2, to + 3);
        } else to[0] = low, to[1] = high;
    } else if (form == PAIRS) to_pairs(word, 1, to, to + 1);
    else to[0] = zero_of(bits, form) ? word ^ (int32_t)0x80808080 : word;
}

/* Unpacks `count` blocks of a panel to the words that a form multiplies: [steps, VECTORS] of WORD bytes. ahead: bytes
 * from what is read to what is prefetched. */
INLINE void unpack(const Bits bits, const Form form, char *to, const char *w, int64_t count, int64_t ahead) {
    const int64_t lines = count * BLOCK / (bits == FOUR ? 8 : 4), step = VECTORS * WORD;
    const int wide = words_of(bits, form);
    for (int64_t i = 0; i < lines; i++, w += step, to += wide * step) {
        fetch(w + ahead, step);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            integers made[MOST_WORDS];
            expand(bits, form, load_word(w + v * WORD), made);
            UNROLL for (int j = 0; j < wide; j++) store_word(to + j * step + v * WORD, made[j]);
        }
    }
}

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, rows;
    const char *w;
    int64_t in, out;
    const char *scale; /* EIGHT: float [panels, PANEL]; FOUR: bfloat16 [panels, blocks, PANEL] */
    const float *bias;
    char *rounded;  /* [rows, blocks, BLOCK] of 1 or, in PAIRS, 2 bytes */
    float *steps;   /* [rows, blocks]: the scales of x */
    int32_t *moves; /* [rows, blocks]: -zero times the sum of the inputs */
    int64_t blocks;
} Call;

/* A block of x to 8 bits. A value that is not finite makes the scale, and so the row of y, not finite either. */
INLINE void round_block(const Form form, const int zero, const float *x, char *to, float *step, int32_t *move) {
    int32_t n[BLOCK], most = 0, sum = 0;
    memcpy(n, x, sizeof n);
    for (int i = 0; i < BLOCK; i++) most = most > (n[i] & 0x7fffffff) ? most : n[i] & 0x7fffffff;
    float largest;
    memcpy(&largest, &most, sizeof largest);
    const int none = most < 0x0da24260; /* below 1e-30, where 127 / largest might not be finite */
    const float by = none ? 0 : (float)(127.0 / (double)largest);
    UNROLL for (int i = 0; i < BLOCK; i += LANES) { /* to nearest even: 1.5 * 2^23 + n has n in its lowest bits */
        const integers whole = (integers)(load(x + i) * by + 12582912.0f) - 0x4b400000;
        memcpy(n + i, &whole, sizeof whole);
    }
    for (int i = 0; i < BLOCK; i++) sum += (int8_t)n[i]; /* of NaN and infinity n is too large to be summed */
    if (form == PAIRS) {
        int16_t *q = (int16_t *)to;
        for (int i = 0; i < BLOCK; i += 4) { /* as the weights of four inputs are unpacked: even, odd */
            q[i] = (int16_t)n[i], q[i + 1] = (int16_t)n[i + 2];
            q[i + 2] = (int16_t)n[i + 1], q[i + 3] = (int16_t)n[i + 3];
        }
    } else {
        int8_t *q = (int8_t *)to;
        for (int i = 0; i < BLOCK; i++) q[i] = (int8_t)n[i];
    }
    *step = none ? 0 : largest * (1 / 127.0f);
    *move = -zero * sum;
}

INLINE void round_row(const Bits bits, const Form form, const Call *c, int64_t row) {
    const float *x = c->x + row * c->x_stride;
    char *to = c->rounded + row * c->blocks * BLOCK * (form == PAIRS ? 2 : 1);
    for (int64_t b = 0; b < c->blocks; b++) {
        const int64_t left = c->in - b * BLOCK, at = row * c->blocks + b;
        float some[BLOCK] = {0};
        if (left < BLOCK) memcpy(some, x + b * BLOCK, left * sizeof *x);
        round_block(form, zero_of(bits, form), left < BLOCK ? some : x + b * BLOCK,
                    to + b * BLOCK * (form == PAIRS ? 2 : 1), c->steps + at, c->moves + at);
    }
}

/* Adds the products of some rows, from `row` on, with `count` blocks, from `block` on. packed: w is W itself, not
 * unpacked blocks. */
INLINE void tile(const int rows, const int packed, const Bits bits, const Form form, const Call *c, int64_t row,
                 int64_t block, int64_t count, const char *w, const char *scale, float *sums) {
    const int steps = steps_of(form), wide = packed ? words_of(bits, form) : 1;
    const int64_t stride = c->blocks * steps * 4;
    const char *x = c->rounded + row * stride + block * steps * 4;
    for (int64_t b = 0; b < count; b++) {
        const int64_t at = row * c->blocks + block + b;
        integers sum[HEIGHT][VECTORS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                sum[r][v] = (integers){0} + (form == DOTS ? c->moves[at + r * c->blocks] : 0);
        NOT_UNROLLED for (int s = 0; s < steps; s += wide, w += VECTORS * WORD) {
            integers in[VECTORS][MOST_WORDS];
            if (packed) fetch(w + AHEAD, VECTORS * WORD);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const integers word = load_word(w + v * WORD);
                if (packed) expand(bits, form, word, in[v]);
                else in[v][0] = word;
            }
            UNROLL for (int j = 0; j < wide; j++, x += 4)
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t some;
                    memcpy(&some, x + r * stride, sizeof some);
                    const integers one = (integers){0} + some;
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        sum[r][v] = form == PAIRS   ? add_pairs(sum[r][v], in[v][j], one)
                                    : form == BYTES ? add_bytes(sum[r][v], in[v][j], one)
                                                    : add_dots(sum[r][v], in[v][j], one);
                    UNROLL for (int v = 0; v < VECTORS; v++) SETTLE(sum[r][v]);
                }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const vector step = all(c->steps[at + r * c->blocks]);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                float *to = sums + r * PANEL + v * LANES;
                const char *of = scale + (b * PANEL + v * LANES) * 2;
                integers whole = sum[r][v];
                if (form == BYTES) whole = add_pairs((integers){0}, whole, (integers){0} + 0x00010001);
                if (bits == FOUR && form != DOTS) whole += c->moves[at + r * c->blocks];
                const vector by = bits == FOUR ? step * widen(BFLOAT16, of) : step;
                store(to, multiply_add(__builtin_convertvector(whole, vector), by, load(to)));
            }
        }
    }
}

#define CASE(n) \
    case n: tile(n, 0, bits, form, c, row, block, count, wide, scale, sums); break;
#define FEW_CASE(n) \
    case n: tile(n, 1, bits, form, c, 0, 0, c->blocks, w, scale, sums); break;

INLINE void one_tile(const Bits bits, const Form form, const Call *c, int64_t rows, int64_t row, int64_t block,
                     int64_t count, const char *wide, const char *scale, float *sums) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#ifdef __AVX512F__
        CASE(7) CASE(8)
#endif
    }
}

INLINE void few_rows(const Bits bits, const Form form, const Call *c, const char *w, const char *scale, float *sums) {
    switch (c->rows) { FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4) }
}

/* Writes the sums of some rows, from `row` on, to y. scale: of each output, or NULL. */
static void ONCE finish(const Call *c, int64_t row, int64_t rows, int64_t column, const float *scale,
                        const float *sums) {
    const int64_t columns = least(c->out - column, PANEL);
    float bias[PANEL] = {0};
    if (c->bias) memcpy(bias, c->bias + column, columns * sizeof *bias);
    for (int64_t r = 0; r < rows; r++) {
        float *y = c->y + (row + r) * c->y_stride + column, some[PANEL], *to = columns < PANEL ? some : y;
        for (int64_t i = 0; i < PANEL; i += LANES)
            store(to + i, multiply_add(load(sums + r * PANEL + i), scale ? load(scale + i) : all(1), load(bias + i)));
        if (columns < PANEL) memcpy(y, some, columns * sizeof *y);
    }
}

INLINE void one_panel(const Bits bits, const Form form, const Call *c, int64_t p) {
    char wide[DEPTH * BLOCK * PANEL * (form == PAIRS ? 2 : 1)];
    const int64_t bytes = BLOCK * PANEL / (bits == FOUR ? 2 : 1), panel = c->blocks * bytes;
    const char *scale = (const char *)c->scale + (bits == FOUR ? p * c->blocks * PANEL * 2 : 0);
    for (int64_t row = 0; row < c->rows; row += ROWS) {
        float sums[ROWS * PANEL] = {0};
        const int64_t rows = least(c->rows - row, ROWS), tiles = (rows + HEIGHT - 1) / HEIGHT;
        const int64_t depth = tiles == 1 ? 1 : DEPTH;
        if (c->rows <= FEW) few_rows(bits, form, c, c->w + p * panel, scale, sums);
        else for (int64_t b = 0; b < c->blocks; b += depth) {
            const int64_t count = least(c->blocks - b, depth);
            unpack(bits, form, wide, c->w + p * panel + b * bytes, count, tiles == 1 ? AHEAD : count * bytes);
            for (int64_t i = 0; i < tiles; i++) { /* of nearly equal height: 7 rows are 3 and 4 */
                const int64_t start = rows * i / tiles, height = rows * (i + 1) / tiles - start;
                one_tile(bits, form, c, height, row + start, b, count, wide,
                         bits == FOUR ? scale + b * PANEL * 2 : NULL, sums + start * PANEL);
            }
        }
        finish(c, row, rows, p * PANEL, bits == FOUR ? NULL : (const float *)scale + p * PANEL, sums);
    }
}

/* By all threads of a team. */
INLINE void linear(const Bits bits, const Form form, const Linear *l) {
    const int64_t blocks = (l->in + BLOCK - 1) / BLOCK, all = l->rows * blocks, panels = (l->out + PANEL - 1) / PANEL;
    const int64_t run = panels < 16 ? 1 : 4; /* panels in a row for a thread, which prefetches the next one itself */
    float *const steps = l->room;
    const Call c = {l->y, l->x, l->y_stride, l->x_stride, l->rows, l->w, l->in, l->out, l->scale, l->bias,
                    (char *)(steps + 2 * all), steps, (int32_t *)(steps + all), blocks};
#pragma omp for schedule(static)
    for (int64_t r = 0; r < c.rows; r++) round_row(bits, form, &c, r);
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < panels; first += run)
        for (int64_t p = first; p < least(panels, first + run); p++) one_panel(bits, form, &c, p);
}

/* By all threads of a team. kind: of W, + FORMS * (INTEGERS or, where integer_dots() says so, INTEGER_DOTS). c->room
 * has 18 floats for each row and BLOCK inputs. */
void integer_team(int64_t kind, const Linear *c) {
    switch (kind) { /* known to the compiler in each case */
        case INT8 + FORMS * INTEGERS: linear(EIGHT, PAIRS, c); break;
        case INT4 + FORMS * INTEGERS: linear(FOUR, HAS_BYTES ? BYTES : PAIRS, c); break;
        case INT8 + FORMS * INTEGER_DOTS: linear(EIGHT, DOTS, c); break;
        case INT4 + FORMS * INTEGER_DOTS: linear(FOUR, DOTS, c); break;
    }
}

int64_t integer_width(void) { return PANEL; }
