/* The weights of linear layers, as linear.c and bfloat16.c read them.
 *
 * W is kept in float32, bfloat16, int8, int4, uint4 or float4. The last four are integers v with
 * W[n, k] = scale[n, g] v[n, k] + offset[n, g], g = k / group; offsets may be missing.
 *
 * W [out, in] is packed in panels of PANEL outputs, the last one padded with zeros:
 * - float32 and int8 as [panels, in, PANEL];
 * - bfloat16 and 4 bits as [panels, in / 2, PANEL] pairs of an even input, in the low half, and the next one. A
 *   pair of bfloat16 is 4 bytes, and either half is widened by one instruction; one of 4 bits is a byte. int4 is v + 8;
 * - scales and offsets as [panels, groups, PANEL]. */

#pragma once

#include "team.h"

#ifdef __AVX512F__
enum { VECTORS = 3 };
#else
enum { VECTORS = 2 };
#endif
enum { PANEL = LANES * VECTORS, BLOCK = 1024 /* inputs, at most, to whose sum a scale is applied */ };

/* How many inputs one row of a panel has weights for, and the bytes of a row. */
INLINE int inputs_of(Kind kind) { return is_four_bits(kind) || kind == BFLOAT16 ? 2 : 1; }
INLINE int64_t bytes_of(Kind kind) { return is_four_bits(kind) ? PANEL : PANEL * size_of(kind) * inputs_of(kind); }

INLINE vector weights(Kind kind, const char *row, int v, int input) {
    if (kind == INT4 || kind == UINT4) return widen_halves(kind, row + v * LANES, input);
    if (kind == FLOAT4) return widen_float4(row + v * LANES, input);
    if (kind == BFLOAT16) return widen_pairs(row + v * LANES * 4, input);
    return widen(kind, row + v * LANES * size_of(kind));
}

INLINE int64_t block_of(const Linear *c) { return least(c->group, BLOCK); }
INLINE int64_t blocks_of(const Linear *c) { return (c->in + block_of(c) - 1) / block_of(c); }

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
