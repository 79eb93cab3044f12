/* Vectors as wide as the processor has, by the compiler's extension; loads may be unaligned. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, TILE_ROWS = 8 };
#else
enum { LANES = 8, TILE_ROWS = 4 };
#endif

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE vector load(const float *at) { return *(const vector *)at; }
INLINE void store(float *at, vector value) { *(vector *)at = value; }
INLINE vector all(float value) { return (vector){0} + value; }

/* Elements in memory; all are float32 in registers. */
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

/* A single float32 or bfloat16. */
INLINE float widen_one(Kind kind, const char *at) {
    uint32_t bits = 0;
    memcpy((char *)&bits + 4 - size_of(kind), at, size_of(kind)); /* little-endian: the upper half */
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The sum of the lanes, as a tree: GCC and clang make few instructions of these halves. */
INLINE float total(vector v) {
    typedef float half __attribute__((vector_size(2 * LANES)));
    typedef float quarter __attribute__((vector_size(LANES)));
    half h[2];
    quarter q[2];
    memcpy(h, &v, sizeof v);
    h[0] += h[1];
    memcpy(q, h, sizeof *h);
    q[0] += q[1];
    float sum = 0;
    for (int i = 0; i < LANES / 4; i++) sum += q[0][i];
    return sum;
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
