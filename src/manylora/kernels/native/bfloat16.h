/* Products of pairs of bfloat16 by the instruction vdpbf16ps, and the rounding of inputs for it. It rounds to nearest
 * even, and takes numbers below 2^-126, operands and results, as zeros, whatever MXCSR says. */

#pragma once

#include "team.h"

/* Whether the compiler's assembler knows the instructions. EMULATED: they are computed in plain C, for tests. */
#if defined(EMULATED)
#define HAS_FORMS 1
#elif defined(__x86_64__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_FORMS KNOWN_SINCE(11, 12)
#else
#define HAS_FORMS 0
#endif

#if defined(EMULATED)
INLINE vector flush(vector value) {
    const words size = (words)value & 0x7fffffff;
    return (vector)((words)value & ~((words)(size < 0x00800000) & 0x7fffffff));
}

INLINE vector fused(words a, words b, vector sum) {
    return flush(multiply_add(flush((vector)a), flush((vector)b), flush(sum)));
}
#endif

/* sum + a[1] b[1] + a[0] b[0], of pairs of bfloat16. */
INLINE vector add_pairs(vector sum, words a, words b) {
#if defined(EMULATED)
    return fused(a << 16, b << 16, fused(a & 0xffff0000u, b & 0xffff0000u, sum));
#elif HAS_FORMS
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return sum; /* is not called */
#endif
}

INLINE words load_words(const char *at) { return (words)*(const any_integers *)at; }

/* Elements from one row of rounded inputs to the next. Zeros follow the inputs, so that a whole tile can be read from
 * any of them on. It is an odd number of cache lines: rows a power of two apart would share few sets of the cache. */
INLINE int64_t rounded_stride(int64_t in) { return (((in + 31) / 32 + 1) | 1) * 32; }

/* A row of inputs in bfloat16, and zeros up to the next one. */
INLINE void round_inputs(uint16_t *to, const float *x, int64_t in) {
    for (int64_t k = 0; k < in; k += LANES) narrow_any((char *)(to + k), (words)load_some(x + k, in - k));
    memset(to + in, 0, (rounded_stride(in) - in) * sizeof *to);
}
