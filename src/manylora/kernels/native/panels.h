/* The weights of linear layers, as linear.c and bfloat16.c read them.
 *
 * W is kept in float32, bfloat16, int8, int4, uint4, float4, int5, uint5 or int6. All but the first two are integers v
 * with W[n, k] = scale[n, g] v[n, k] + offset[n, g], g = k / group; offsets may be missing.
 *
 * W [out, in] is packed in panels of PANEL outputs, the last one padded with zeros:
 * - float32 and int8 as [panels, in, PANEL];
 * - bfloat16 as [panels, in / 2, PANEL] pairs of an even input, in the low half, and the next one: either half is widened
 *   by one instruction;
 * - 4 bits as [panels, in / 8, PANEL] words, 5 as [panels, in / 32, 5, PANEL], 6 as [panels, in / 16, 3, PANEL]. int4 is
 *   v + 8, int5 v + 16, int6 v + 32;
 * - scales and offsets as [panels, groups, PANEL] in float32 (WHOLE) or float16 (HALVED), or as GGUF's types with blocks
 *   of CODED inputs have them: of each block [panels, in / CODED], PANEL float16 numbers, then for each group of it PANEL
 *   integers of 8 bits by which they are multiplied. */

#pragma once

#include "team.h"

#ifdef __AVX512F__
enum { VECTORS = 3 };
#else
enum { VECTORS = 2 };
#endif
enum { PANEL = LANES * VECTORS, BLOCK = 1024 /* inputs, at most, to whose sum a scale is applied */ };
enum { CODED_INPUTS = 256, MOST_GROUPS = CODED_INPUTS / 16 }; /* groups: for which scales are widened at once */

/* A row of a panel: 4 bits are 8 inputs in a word; 5 bits 32 in 5 words, of which 6 in the lowest 30 bits of each, then
 * the last two in the bits that are left; 6 bits 16 in 3 words, 5 in each, then the last. */
INLINE int is_five(Kind kind) { return kind == INT5 || kind == UINT5; }
INLINE int has_words(Kind kind) { return is_four_bits(kind) || is_five(kind) || kind == INT6; }
INLINE int words_of(Kind kind) { return is_five(kind) ? 5 : kind == INT6 ? 3 : 1; }
INLINE int bits_of(Kind kind) { return is_five(kind) ? 5 : kind == INT6 ? 6 : 4; }
INLINE int in_word(Kind kind) { return 32 / bits_of(kind); }
INLINE int inputs_of(Kind kind) {
    return is_five(kind) ? 32 : kind == INT6 ? 16 : is_four_bits(kind) ? 8 : kind == BFLOAT16 ? 2 : 1;
}
INLINE int64_t bytes_of(Kind kind) {
    return has_words(kind) ? 4 * PANEL * words_of(kind) : PANEL * size_of(kind) * inputs_of(kind);
}

/* Where a code lies in its word it is a number times this factor, a power of two. It is converted there, and the inputs
 * are divided by it, which rounds nothing. input: of a row. */
INLINE float factor_of(const Kind kind, const int input) {
    const int i = input % in_word(kind), is_apart = input >= words_of(kind) * in_word(kind);
    return !has_words(kind) || kind == FLOAT4 || is_apart || (is_four_bits(kind) && i == 7) ? 1
                                                                                            : (float)(1 << bits_of(kind) * i);
}

/* Codes times `factor`: INT4 as -8 to 7, INT5 as -16 to 15, INT6 as -32 to 31. */
INLINE vector number_of(const Kind kind, const words code, const float factor) {
    const float zero = kind == INT4 ? 8 : kind == INT5 ? 16 : kind == INT6 ? 32 : 0;
    const vector made = __builtin_convertvector((integers)code, vector);
    return zero ? made - all(zero * factor) : made;
}

/* The weights of input i of a word, times their factor. */
INLINE vector one_of(const Kind kind, const words word, const int i) {
    if (kind == FLOAT4) return widen_float4(word >> 4 * i);
    const int at = bits_of(kind) * i;
    return number_of(kind, at == 28 ? word >> 28 : word & ((1u << bits_of(kind)) - 1) << at, factor_of(kind, i));
}

INLINE words word_at(const char *row, int v, int number) {
    return (words)*(const any_integers *)(row + (number * PANEL + v * LANES) * 4);
}

/* The weights of the last input of a row of 5 or 6 bits, or of the one before it, in vector v. */
INLINE vector apart_of(const Kind kind, const char *row, int v, int is_last) {
    const int first = kind == INT6 || !is_last ? 0 : 3;
    const words a = word_at(row, v, first), b = word_at(row, v, first + 1), c = word_at(row, v, 2);
    const words top = kind == INT6 ? c >> 26 & 0x30 : (is_last ? c >> 27 : c >> 26) & 0x10;
    return number_of(kind, a >> 30 | (b >> 28 & 12) | top, 1);
}

/* Of kinds that have words times their factor. */
INLINE vector weights(const Kind kind, const char *row, int v, int input) {
    if (has_words(kind) && input >= words_of(kind) * in_word(kind)) return apart_of(kind, row, v, input + 1 == inputs_of(kind));
    if (has_words(kind)) return one_of(kind, word_at(row, v, input / in_word(kind)), input % in_word(kind));
    if (kind == BFLOAT16) return widen_pairs(row + v * LANES * 4, input);
    return widen(kind, row + v * LANES * size_of(kind));
}

INLINE int64_t block_of(const Linear *c) { return least(c->group, BLOCK); }
INLINE int64_t blocks_of(const Linear *c) { return (c->in + block_of(c) - 1) / block_of(c); }

/* The scales of `count` groups of panel p, from group g on, or the offsets, in float32: [count, PANEL]. from: c->scale or
 * c->offset. room: for them, if they are stored otherwise; of CODED, all are of one block. */
INLINE const float *widen_scales(const Linear *c, const char *from, int64_t p, int64_t g, int64_t count, float *room) {
    const int64_t groups = c->in / c->group;
    if (!from || c->scales == WHOLE) return from ? (const float *)from + (p * groups + g) * PANEL : NULL;
    if (c->scales == HALVED) {
        const char *const at = from + (p * groups + g) * PANEL * 2;
        for (int64_t i = 0; i < count * VECTORS; i++) store(room + i * LANES, widen_float16(at + i * LANES * 2));
        fetch_some(at + count * PANEL * 2, count * PANEL * 2); /* the next ones */
        return room;
    }
    const int64_t in_block = CODED_INPUTS / c->group, size = (2 + in_block) * PANEL;
    const char *const block = from + (p * (groups / in_block) + g / in_block) * size;
    const char *const codes = block + (2 + g % in_block) * PANEL;
    vector whole[VECTORS];
    fetch_some(block + size, size);
    UNROLL for (int v = 0; v < VECTORS; v++) whole[v] = widen_float16(block + v * LANES * 2);
    for (int64_t i = 0; i < count * PANEL; i += PANEL)
        UNROLL for (int v = 0; v < VECTORS; v++)
            store(room + i + v * LANES, whole[v] * widen(INT8, codes + i + v * LANES));
    return room;
}

/* The sums of x over the inputs of each block, [rows, blocks], by which offsets are multiplied. */
INLINE float *totals_of(const Linear *c) { return c->room + c->rows * c->in; }

INLINE float sum_of(const Kind kind, const char *x, int64_t count) {
    const int64_t whole = count - count % LANES, size = size_of(kind);
    vector sum = all(0);
    for (int64_t k = 0; k < whole; k += LANES) sum += widen(kind, x + k * size);
    float one = total(sum);
    for (int64_t k = whole; k < count; k++) one += widen_one(kind, x + k * size);
    return one;
}

/* Applies scale and offset to the sums [rows, PANEL] of panel p over the block that begins at input k. Adds them to y;
 * the first block is written instead, with the bias. */
void finish_panel(const Linear *c, const float *sums, int64_t row, int64_t rows, int64_t p, int64_t k);
