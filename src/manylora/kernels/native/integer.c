/* y = x W^T + bias by products of integers: x is rounded here to 8 bits with a scale for each row and SHARE inputs. W is
 * in 8 bits with a scale for each output, in 4 bits with one for each SHARE inputs, or in the bits of one of GGUF's types
 * with scales, and offsets, of groups.
 *
 * The sum of a group is an integer, exact and the same in every form below. Groups are added in float32, in order of
 * their inputs, each by one fused multiply-add, and one more for an offset. So a row's bits depend neither on other rows
 * nor on the form.
 *
 * W [out, in] lies in panels of PANEL outputs, `in` padded with zeros to whole blocks. 8 bits: [panels, in / 4, PANEL]
 * words of 4 inputs. 4 bits: [panels, in / 8, PANEL] words, inputs 0 to 3 in the low halves of the bytes, 4 to 7 in the
 * high ones, as value + 8 where there are no offsets. 5 and 6 bits: for each 32 and 16 inputs words of their lower 4 bits,
 * then one whose byte i has the upper bits of inputs i, i + 4, ..., the first in the lowest bits. Some blocks are unpacked
 * to what the form multiplies, then up to ROWS rows use them, so W is read once for all of these. For at most FEW rows
 * blocks are unpacked in registers.
 *
 * PAIRS: 16-bit integers, two products to a sum of 32 bits (pmaddwd).
 * BYTES: at most 6 bits: unsigned times signed bytes, two products to a sum of 16 bits (pmaddubsw). It cannot saturate:
 *        of 4 bits a product is at most 15 * 127, and 16 of them are added in 16 bits before they are widened: 30,480;
 *        of 6 bits 4 of them, at most 63 * 127: 32,004.
 * DOTS:  four products of bytes to a sum of 32 bits (vpdpbusd, sdot), which never saturates.
 * Where a form takes weights as unsigned, they are value + zero; zero times the sum of the inputs is subtracted. */

#include "panels.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

enum { SHARE = 32, DEPTH = 8 /* blocks of SHARE inputs unpacked at a time */ };
#ifdef __AVX512F__
enum { HEIGHT = 8, ROWS = 64 }; /* rows of a tile, whose sums are in registers; rows that use unpacked blocks */
#else
enum { HEIGHT = 6, ROWS = 96 };
#endif
enum { WORD = 4 * LANES, MOST_WORDS = 4, AHEAD = 4096 };
enum { FEW = 4 }; /* rows, at most, for which blocks are unpacked in registers */

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
INLINE int group_of(Kind kind) { return kind == INT6 ? 16 : SHARE; } /* inputs whose products are one integer */
INLINE int has_offsets(Kind kind) { return kind == UINT4 || kind == UINT5; }
INLINE int has_upper(Kind kind) { return is_five(kind) || kind == INT6; } /* bits, in a word of their own */
INLINE int64_t group_bytes(Kind kind) { return (group_of(kind) / (kind == INT8 ? 4 : 8) + has_upper(kind)) * 4 * PANEL; }

INLINE int zero_of(Kind kind, Form form) {
#if defined(__aarch64__) && !defined(EMULATED)
    const int eight = 0;
#else
    const int eight = form == DOTS ? 128 : 0;
#endif
    return kind == INT8 ? eight : kind == INT4 ? 8 : kind == INT5 ? 16 : kind == INT6 ? 32 : 0;
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

/* Words of a form in a word of W. */
INLINE int wide_of(Kind kind, Form form) { return (kind == INT8 ? 1 : 2) * (form == PAIRS ? 2 : 1); }

/* Unpacks a word of W to the words that a form multiplies, in order of their inputs. upper: of the inputs from here on. */
INLINE void expand(const Kind kind, const Form form, integers word, words *upper, integers *to) {
    if (kind != INT8) {
        integers low = word & 0x0f0f0f0f, high = (integers)((words)word >> 4) & 0x0f0f0f0f;
        if (has_upper(kind)) {
            const int bits = kind == INT6 ? 2 : 1, mask = kind == INT6 ? 0x30303030 : 0x10101010;
            low |= (integers)(*upper << 4) & mask, high |= (integers)(*upper << (4 - bits)) & mask;
            *upper >>= 2 * bits;
        }
        if (form == PAIRS) {
            to_pairs(low, 0, to, to + 1);
            to_pairs(high, 0, to + 2, to + 3);
        } else to[0] = low, to[1] = high;
    } else if (form == PAIRS) to_pairs(word, 1, to, to + 1);
    else to[0] = zero_of(kind, form) ? word ^ (int32_t)0x80808080 : word;
}

/* Unpacks `count` groups of a panel to the words that a form multiplies: [steps, VECTORS] of WORD bytes. ahead: bytes
 * from what is read to what is prefetched. */
INLINE void unpack(const Kind kind, const Form form, char *to, const char *w, int64_t count, int64_t ahead) {
    const int step = VECTORS * WORD, wide = wide_of(kind, form), lines = group_of(kind) / (kind == INT8 ? 4 : 8);
    for (int64_t g = 0; g < count; g++, w += has_upper(kind) * step) {
        words upper[VECTORS];
        if (has_upper(kind)) UNROLL for (int v = 0; v < VECTORS; v++) upper[v] = (words)load_word(w + lines * step + v * WORD);
        for (int i = 0; i < lines; i++, w += step, to += wide * step) {
            fetch(w + ahead, step);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                integers made[MOST_WORDS];
                expand(kind, form, load_word(w + v * WORD), upper + v, made);
                UNROLL for (int j = 0; j < wide; j++) store_word(to + j * step + v * WORD, made[j]);
            }
        }
    }
}

typedef struct {
    const Linear *l; /* scales: INT8 float [panels, PANEL]; INT4 bfloat16 [panels, groups, PANEL]; or of a GGUF type */
    char *rounded;   /* [rows, blocks, SHARE] of 1 or, in PAIRS, 2 bytes */
    float *steps;    /* [rows, blocks]: the scales of x */
    int32_t *moves;  /* [rows, groups]: the sum of the inputs, with offsets, else -zero times it */
    int64_t blocks, groups;
} Call;

/* A block of x to 8 bits. A value that is not finite makes the scale, and so the row of y, not finite either. */
INLINE void round_block(const Kind kind, const Form form, const float *x, char *to, float *step, int32_t *moves) {
    int32_t n[SHARE], most = 0;
    memcpy(n, x, sizeof n);
    for (int i = 0; i < SHARE; i++) most = most > (n[i] & 0x7fffffff) ? most : n[i] & 0x7fffffff;
    float largest;
    memcpy(&largest, &most, sizeof largest);
    const int none = most < 0x0da24260; /* below 1e-30, where 127 / largest might not be finite */
    const float by = none ? 0 : (float)(127.0 / (double)largest);
    UNROLL for (int i = 0; i < SHARE; i += LANES) { /* to nearest even: 1.5 * 2^23 + n has n in its lowest bits */
        const integers whole = (integers)(load(x + i) * by + 12582912.0f) - 0x4b400000;
        memcpy(n + i, &whole, sizeof whole);
    }
    for (int g = 0; g < SHARE; g += group_of(kind)) {
        int32_t sum = 0; /* of NaN and infinity n is too large to be summed */
        for (int i = 0; i < group_of(kind); i++) sum += (int8_t)n[g + i];
        moves[g / group_of(kind)] = has_offsets(kind) ? sum : -zero_of(kind, form) * sum;
    }
    if (form == PAIRS) {
        int16_t *q = (int16_t *)to;
        for (int i = 0; i < SHARE; i += 4) { /* as the weights of four inputs are unpacked: even, odd */
            q[i] = (int16_t)n[i], q[i + 1] = (int16_t)n[i + 2];
            q[i + 2] = (int16_t)n[i + 1], q[i + 3] = (int16_t)n[i + 3];
        }
    } else {
        int8_t *q = (int8_t *)to;
        for (int i = 0; i < SHARE; i++) q[i] = (int8_t)n[i];
    }
    *step = none ? 0 : largest * (1 / 127.0f);
}

INLINE void round_row(const Kind kind, const Form form, const Call *c, int64_t row) {
    const float *x = c->l->x + row * c->l->x_stride;
    const int64_t size = SHARE * (form == PAIRS ? 2 : 1);
    for (int64_t b = 0; b < c->blocks; b++) {
        const int64_t left = c->l->in - b * SHARE, at = row * c->blocks + b;
        float some[SHARE] = {0};
        if (left < SHARE) memcpy(some, x + b * SHARE, left * sizeof *x);
        round_block(kind, form, left < SHARE ? some : x + b * SHARE, c->rounded + at * size, c->steps + at,
                    c->moves + at * (SHARE / group_of(kind)));
    }
}

/* Adds the products of some rows, from `row` on, with `count` groups, from `group` on. packed: w is W itself, not
 * unpacked groups. scale, offset: of these groups, [count, PANEL], float32 of a file's and else bfloat16. */
INLINE void tile(const int rows, const int packed, const Kind kind, const int is_file, const Form form, const Call *c,
                 int64_t row, int64_t group, int64_t count, const char *w, const char *scale, const float *offset,
                 float *sums) {
    const int steps = group_of(kind) / step_inputs(form), wide = packed ? wide_of(kind, form) : 1;
    const int widens = form == BYTES && kind != INT4 && kind != UINT4; /* after each two steps */
    const int64_t stride = c->groups * steps * 4;
    const char *x = c->rounded + row * stride + group * steps * 4;
    for (int64_t g = 0; g < count; g++) {
        const int64_t at = row * c->groups + group + g, block = (group + g) / (SHARE / group_of(kind)) + row * c->blocks;
        integers sum[HEIGHT][VECTORS], part[HEIGHT][VECTORS];
        words upper[VECTORS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                sum[r][v] = part[r][v] = (integers){0} + (has_offsets(kind) || form == BYTES ? 0 : c->moves[at + r * c->groups]);
        if (packed && has_upper(kind))
            UNROLL for (int v = 0; v < VECTORS; v++) upper[v] = (words)load_word(w + group_bytes(kind) - VECTORS * WORD + v * WORD);
        NOT_UNROLLED for (int s = 0; s < steps; s += wide, w += VECTORS * WORD) {
            integers in[VECTORS][MOST_WORDS];
            if (packed) fetch(w + AHEAD, VECTORS * WORD);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const integers word = load_word(w + v * WORD);
                if (packed) expand(kind, form, word, upper + v, in[v]);
                else in[v][0] = word;
            }
            UNROLL for (int j = 0; j < wide; j++, x += 4)
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t some;
                    memcpy(&some, x + r * stride, sizeof some);
                    const integers one = (integers){0} + some;
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        part[r][v] = form == PAIRS   ? add_pairs(part[r][v], in[v][j], one)
                                     : form == BYTES ? add_bytes(part[r][v], in[v][j], one)
                                                     : add_dots(part[r][v], in[v][j], one);
                    UNROLL for (int v = 0; v < VECTORS; v++) SETTLE(part[r][v]);
                }
            if (widens && (s + wide) % 2 == 0)
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        sum[r][v] = add_pairs(sum[r][v], part[r][v], (integers){0} + 0x00010001);
                        part[r][v] = (integers){0};
                    }
        }
        if (packed && has_upper(kind)) w += VECTORS * WORD;
        UNROLL for (int r = 0; r < rows; r++) {
            const vector step = all(c->steps[block + r * c->blocks]);
            const int32_t move = c->moves[at + r * c->groups];
            UNROLL for (int v = 0; v < VECTORS; v++) {
                float *to = sums + r * PANEL + v * LANES;
                const int64_t place = g * PANEL + v * LANES;
                integers whole = widens ? sum[r][v] : part[r][v];
                if (form == BYTES && !widens) whole = add_pairs((integers){0}, whole, (integers){0} + 0x00010001);
                if (form == BYTES && !has_offsets(kind)) whole += move;
                vector by = step, made = load(to);
                if (is_file) by *= load((const float *)scale + place);
                else if (kind != INT8) by *= widen(BFLOAT16, scale + place * 2);
                made = multiply_add(__builtin_convertvector(whole, vector), by, made);
                if (has_offsets(kind)) made = multiply_add(load(offset + place), step * all((float)move), made);
                store(to, made);
            }
        }
    }
}

typedef struct {
    int64_t row, rows, group, count;
    const char *w, *scale;
    const float *offset;
    float *sums;
} Part;

#define CASE(n) \
    case n: tile(n, packed, kind, is_file, form, c, p.row, p.group, p.count, p.w, p.scale, p.offset, p.sums); break;

/* packed: for at most `few` rows. */
INLINE void one_tile(const int packed, const int few, const Kind kind, const int is_file, const Form form, const Call *c, const Part p) {
    switch (p.rows) { CASE(1) }
    if (!packed || few > 1) switch (p.rows) { CASE(2) CASE(3) CASE(4) }
    if (!packed) switch (p.rows) {
        CASE(5) CASE(6)
#ifdef __AVX512F__
        CASE(7) CASE(8)
#endif
    }
}

/* Tiles of unpacked groups, in functions that several kinds share: the less code, the sooner it is compiled. */
#if HAS_BYTES
#define SHORT_FORM BYTES
#else
#define SHORT_FORM PAIRS
#endif
typedef void Tiles(const Call *c, const Part p);
#define TILES_OF(kind, is_file, form, name) \
    static void ONCE name(const Call *c, const Part p) { one_tile(0, 0, kind, is_file, form, c, p); }
#define BOTH(kind, is_file, form, name) TILES_OF(kind, is_file, form, name##_short) TILES_OF(kind, is_file, DOTS, name##_dots)
BOTH(INT8, 0, PAIRS, eight)
BOTH(INT4, 0, SHORT_FORM, four)
BOTH(INT4, 1, SHORT_FORM, file)
BOTH(UINT4, 1, SHORT_FORM, file_offsets)
BOTH(INT6, 1, SHORT_FORM, file_six)
#if HAS_BYTES
TILES_OF(INT8, 1, PAIRS, file_eight_short)
TILES_OF(INT5, 1, BYTES, file_five_short)
TILES_OF(UINT5, 1, BYTES, file_five_offsets_short)
#else
#define file_eight_short file_short
#define file_five_short file_short
#define file_five_offsets_short file_offsets_short
#endif
#define file_eight_dots file_dots
#define file_five_dots file_dots
#define file_five_offsets_dots file_offsets_dots

/* Writes the sums of some rows, from `row` on, to y. scale: of each output, or NULL. */
static void ONCE finish(const Linear *l, int64_t row, int64_t rows, int64_t column, const float *scale, const float *sums) {
    const int64_t columns = least(l->out - column, PANEL);
    float bias[PANEL] = {0};
    if (l->bias) memcpy(bias, l->bias + column, columns * sizeof *bias);
    for (int64_t r = 0; r < rows; r++) {
        float *y = l->y + (row + r) * l->y_stride + column, some[PANEL], *to = columns < PANEL ? some : y;
        for (int64_t i = 0; i < PANEL; i += LANES)
            store(to + i, multiply_add(load(sums + r * PANEL + i), scale ? load(scale + i) : all(1), load(bias + i)));
        if (columns < PANEL) memcpy(y, some, columns * sizeof *y);
    }
}

/* tiles_of: those of unpacked groups. */
INLINE void one_panel(const Kind kind, const int is_file, const Form form, Tiles *tiles_of, const Call *c, int64_t p) {
    const int few = is_file && form != DOTS ? 1 : FEW;
    char wide[DEPTH * SHARE * PANEL * (form == PAIRS ? 2 : 1)];
    float room[2][MOST_GROUPS * PANEL];
    const Linear *const l = c->l;
    const int64_t bytes = group_bytes(kind), depth = DEPTH * (SHARE / group_of(kind));
    for (int64_t row = 0; row < l->rows; row += ROWS) {
        float sums[ROWS * PANEL];
        const int64_t rows = least(l->rows - row, ROWS), tiles = (rows + HEIGHT - 1) / HEIGHT;
        memset(sums, 0, rows * PANEL * sizeof *sums);
        for (int64_t g = 0, count; g < c->groups; g += count) {
            count = least(c->groups - g, depth);
            const char *const w = l->w + (p * c->groups + g) * bytes;
            const char *scale = l->scale + (p * c->groups + g) * PANEL * 2;
            const float *offset = NULL;
            if (is_file) scale = (const char *)widen_scales(l, l->scale, p, g, count, room[0]);
            if (is_file && has_offsets(kind)) offset = widen_scales(l, l->offset, p, g, count, room[1]);
            if (l->rows <= few) {
                one_tile(1, few, kind, is_file, form, c, (Part){0, rows, g, count, w, scale, offset, sums});
                continue;
            }
            unpack(kind, form, wide, w, count, tiles == 1 ? AHEAD : count * bytes);
            for (int64_t i = 0; i < tiles; i++) { /* of nearly equal height: 7 rows are 3 and 4 */
                const int64_t start = rows * i / tiles, height = rows * (i + 1) / tiles - start;
                tiles_of(c, (Part){row + start, height, g, count, wide, scale, offset, sums + start * PANEL});
            }
        }
        finish(l, row, rows, p * PANEL, kind == INT8 && !is_file ? (const float *)l->scale + p * PANEL : NULL, sums);
    }
}

/* By all threads of a team. */
INLINE void linear(const Kind kind, const int is_file, const Form form, Tiles *tiles_of, const Linear *l) {
    const int64_t blocks = (l->in + SHARE - 1) / SHARE, all = l->rows * blocks, panels = (l->out + PANEL - 1) / PANEL;
    /* Panels in a row for a thread, which prefetches the next one itself; the last ones are taken a few at a time, so
     * that all threads end together. */
    const int64_t least_run = 48 / PANEL, run = panels < 16 * least_run ? least_run : 4 * least_run;
    const int64_t runs = panels * 3 / 4 / run, rest = panels - runs * run;
    const int64_t parts = SHARE / group_of(kind);
    float *const steps = l->room;
    const Call c = {l, (char *)(steps + (1 + parts) * all), steps, (int32_t *)(steps + all), blocks, blocks * parts};
#pragma omp for schedule(static)
    for (int64_t r = 0; r < l->rows; r++) round_row(kind, form, &c, r);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < runs + (rest + least_run - 1) / least_run; task++) {
        const int64_t first = task < runs ? task * run : runs * run + (task - runs) * least_run;
        const int64_t end = least(first + (task < runs ? run : least_run), panels);
        for (int64_t p = first; p < end; p++) one_panel(kind, is_file, form, tiles_of, &c, p);
    }
}

#define FORMS_OF(kind, is_file, form, tiles_of) \
    case kind + FORMS * INTEGERS: linear(kind, is_file, form, tiles_of##_short, c); break; \
    case kind + FORMS * INTEGER_DOTS: linear(kind, is_file, DOTS, tiles_of##_dots, c); break;

/* By all threads of a team. kind: of W, + FORMS * (INTEGERS or, where integer_dots() says so, INTEGER_DOTS). c->room
 * has 19 floats for each row and SHARE inputs. */
void integer_team(int64_t kind, const Linear *c) {
    if (c->scales == WHOLE) switch (kind) { /* known to the compiler in each case */
        FORMS_OF(INT8, 0, PAIRS, eight) FORMS_OF(INT4, 0, SHORT_FORM, four)
    }
    else switch (kind) {
        FORMS_OF(INT8, 1, PAIRS, file_eight)
        FORMS_OF(INT4, 1, SHORT_FORM, file)
        FORMS_OF(UINT4, 1, SHORT_FORM, file_offsets)
        FORMS_OF(INT5, 1, SHORT_FORM, file_five)
        FORMS_OF(UINT5, 1, SHORT_FORM, file_five_offsets)
        FORMS_OF(INT6, 1, SHORT_FORM, file_six)
    }
}
