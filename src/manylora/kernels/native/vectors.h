/* Vectors of the processor's width, by the compilers' vector extension. Loads and stores may be unaligned. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

enum { LINE = 64 };

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t octets __attribute__((vector_size(LANES), aligned(1)));
/* At any address, of anything: what GCC makes of memcpy to a vector goes through the stack, ten times slower. */
typedef float any_vector __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t any_integers __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define ONCE __attribute__((noinline))
#ifdef __clang__
#define KNOWN_SINCE(gcc, clang) (__clang_major__ >= clang)
#else
#define KNOWN_SINCE(gcc, clang) (__GNUC__ >= gcc)
#endif
#define UNROLL _Pragma("GCC unroll 16")
/* Keeps the compiler from moving later loads before it, where what they load would occupy registers. */
#define KEEP_ORDER __asm__ volatile("" ::: "memory")

INLINE vector load(const float *at) { return *(const vector *)at; }
INLINE void store(float *at, vector value) { *(vector *)at = value; }
INLINE vector all(float value) { return value - (vector){0}; } /* 0 + value: one instruction more, and -0 becomes 0 */

/* a * b + c, rounded once where the instruction set has a fused multiply-add. By the options in __init__.py compilers
 * neither fuse operations nor reorder sums themselves, so rounding is as it is written here. */
INLINE vector multiply_add(vector a, vector b, vector c) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    float32x4_t x[2], y[2], sum[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(sum, &c, sizeof c);
    for (int i = 0; i < 2; i++) sum[i] = vfmaq_f32(sum[i], x[i], y[i]);
    memcpy(&c, sum, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}

/* Types of elements in memory; in registers all are float32. */
typedef enum { FLOAT32, BFLOAT16, INT8, INT4, FLOAT4, UINT4, INT5, UINT5, INT6, FLOAT8 } Kind; /* FLOAT8: e4m3, without infinities */

/* INT4, UINT4, and FLOAT4 (e2m1 times 2, so that all values are integers): two elements to a byte. */
INLINE int is_four_bits(Kind kind) { return kind == INT4 || kind == FLOAT4 || kind == UINT4; }

/* Bytes of an element of the other kinds. */
INLINE int64_t size_of(Kind kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

/* LANES integers of 16 or 8 bits, widened to 32. By intrinsics where there are any: what GCC makes of
 * __builtin_convertvector is several times slower. */
INLINE words widen_uint16(const char *at) {
#if defined(__AVX512F__)
    return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__AVX2__)
    return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
#else
    halves some;
    memcpy(&some, at, sizeof some);
    return __builtin_convertvector(some, words);
#endif
}

INLINE words widen_uint8(const char *at) {
#if defined(__AVX512F__)
    return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const octets *)at, words);
#endif
}

INLINE integers widen_int8(const char *at) {
#if defined(__AVX512F__)
    return (integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    return (integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const bytes *)at, integers);
#endif
}

/* A NaN becomes 480; none is ever stored. */
INLINE vector widen_float8(const char *at) {
#if defined(__AVX512F__) && defined(__F16C__)
    /* float16's exponent has a bias that is 8 larger, hence the factor 256. Its subnormals are no slower here. */
    const __m256i code = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)), 7);
    return (vector)_mm512_cvtph_ps(_mm256_and_si256(code, _mm256_set1_epi16((short)0xBFFF))) * all(256);
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i code = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)at)), 7);
    return (vector)_mm256_cvtph_ps(_mm_and_si128(code, _mm_set1_epi16((short)0xBFFF))) * all(256);
#else
    /* A subnormal is m * 2^-9. Read as a normal number it is 2^-7 + m * 2^-10, so twice that less 2^-6 is right. */
    const words code = widen_uint8(at), size = code & 0x7F;
    const vector number = (vector)((size << 20) + (120u << 23));
    const words step = (words)(number - all(0.015625f)) & (words)(size < 8);
    return (vector)((words)(number + (vector)step) | (code & 0x80) << 24);
#endif
}

/* float16, also its subnormals, infinities and NaNs. */
INLINE vector widen_float16(const char *at) {
#if defined(__AVX512F__)
    return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    const words code = widen_uint16(at), size = code & 0x7fff, high = (words)(size >= 0x7c00);
    const vector small = __builtin_convertvector((integers)size, vector) * all(0x1p-24f);
    const words normal = (size << 13) + ((112u << 23) & ~high) + ((224u << 23) & high);
    const words tiny = (words)(size < 0x400);
    return (vector)(((words)small & tiny) | (normal & ~tiny) | (code & 0x8000) << 16);
#endif
}

/* LANES elements at any address: in a file they lie behind a header of any length. */
INLINE vector widen(Kind kind, const char *at) {
    if (kind == FLOAT8) return widen_float8(at);
    if (kind == FLOAT32) return *(const any_vector *)at;
    if (kind == INT8) return __builtin_convertvector(widen_int8(at), vector);
    return (vector)(widen_uint16(at) << 16);
}

/* FLOAT4: codes, in the lowest 4 bits, as 0, 1, 2, 3, 4, 6, 8, 12 or the negative of these. */
INLINE vector widen_float4(const words index) {
#if defined(__AVX512F__)
    const __m512 table = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return (vector)_mm512_permutexvar_ps((__m512i)index, table);
#elif defined(__AVX2__) /* three bits index it, the fourth is the sign */
    const __m256 table = {0, 1, 2, 3, 4, 6, 8, 12};
    return (vector)((words)_mm256_permutevar8x32_ps(table, (__m256i)index) ^ (index & 8) << 28);
#else
    const words size = index & 7, large = (words)(size > 1), below = (words)((index & 8) != 0);
    const words number = ((size & 1) | (large & 2)) << ((size >> 1) + large);
    return __builtin_convertvector((integers)((number ^ below) - below), vector);
#endif
}

#if defined(__x86_64__) && !defined(__AVX512F__)
/* None of the 16 registers is free for this constant, so it is loaded each time. */
static const volatile words UPPER = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                     0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
#else
#define UPPER 0xffff0000u
#endif

/* BFLOAT16: the low or the high halves of LANES words. */
INLINE vector widen_pairs(const char *at, int high) {
    typedef uint32_t pairs __attribute__((vector_size(4 * LANES), aligned(2)));
    const words both = *(const pairs *)at;
    return (vector)(high ? both & UPPER : both << 16);
}

/* float32 to bfloat16: rounded to nearest, ties to even. What was widened from bfloat16 is unchanged. */
INLINE words nearest(words bits) { return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; }

INLINE void narrow(Kind kind, char *at, words bits) {
    if (kind == FLOAT32) {
        memcpy(at, &bits, sizeof bits);
        return;
    }
    const words upper = nearest(bits);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16((__m512i)upper));
#elif defined(__AVX2__)
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)upper, (__m256i)upper), 8);
    _mm_storeu_si128((__m128i *)at, _mm256_castsi256_si128(both));
#else
    const halves made = __builtin_convertvector(upper, halves);
    memcpy(at, &made, sizeof made);
#endif
}

/* bfloat16 from float32 that may be NaN: rounding alone makes some NaNs zeros or infinities. */
INLINE void narrow_any(char *at, words bits) {
    const words nan = (words)((bits & 0x7fffffff) > 0x7f800000);
    narrow(BFLOAT16, at, (bits & ~nan) | (nan & 0x7fc00000));
}

/* A single float32, bfloat16 or 8-bit float. */
INLINE float widen_one(Kind kind, const char *at) {
    uint32_t bits = 0;
    if (kind == FLOAT8) {
        const int code = (uint8_t)*at, size = code & 0x7F;
        const float number = size < 8 ? size * 0x1p-9f : (8 + size % 8) * (float)(1 << size / 8) * 0x1p-10f;
        return code & 0x80 ? -number : number;
    }
    memcpy((char *)&bits + 4 - size_of(kind), at, size_of(kind)); /* little-endian: the upper half */
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The sum of the lanes. Adding halves of the vector takes few instructions with GCC and clang. */
INLINE float total(vector v) {
    typedef float half __attribute__((vector_size(2 * LANES)));
    typedef float quarter __attribute__((vector_size(LANES)));
    half h[2];
    quarter q[2];
    memcpy(h, &v, sizeof v);
    h[0] += h[1];
    memcpy(q, h, sizeof *h);
    q[0] += q[1];
    float sum = q[0][0];
    for (int i = 1; i < LANES / 4; i++) sum += q[0][i];
    return sum;
}

/* Prefetches memory into the L1 cache. The address need not be valid. */
INLINE void fetch(const char *from, int64_t size) {
    UNROLL for (int64_t i = 0; i < size; i += LINE) __builtin_prefetch(from + i);
}

/* The same for sizes that are not known to the compiler. */
INLINE void fetch_some(const char *from, int64_t size) {
    for (int64_t i = 0; i < size; i += LINE) __builtin_prefetch(from + i);
}

INLINE vector choose(integers which, vector a, vector b) {
    return (vector)((which & (integers)a) | (~which & (integers)b));
}

/* A polynomial at x, by Horner's rule: `first` is the leading coefficient, the last of `terms` the constant one. */
INLINE vector polynomial(vector x, vector first, const float *terms, const int count) {
    UNROLL for (int i = 0; i < count; i++) first = multiply_add(first, x, all(terms[i]));
    return first;
}

/* exp(x) to about 2 units in the last place. x is limited to [-87, 88]; NaN stays NaN. */
INLINE vector exponential(vector x) {
    const vector bounded = choose(x < -87, all(-87), choose(x > 88, all(88), x));
    const vector shifted = multiply_add(bounded, all(1.44269504f), all(127.5f));
    const integers power = __builtin_convertvector(shifted, integers); /* with the exponent's bias of 127 */
    const vector r = multiply_add(__builtin_convertvector(power - 127, vector), all(-0.693147181f), bounded);
    static const float terms[] = {1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 0.16666667f, 0.5f, 1, 1};
    return (vector)(power << 23) * polynomial(r, all(1.9841270e-4f), terms, 7);
}

/* The first `count` lanes, or all if there are more; the others are zeros, and are not stored. */
INLINE vector load_some(const float *at, int64_t count) {
    if (count >= LANES) return load(at);
    float some[LANES] = {0};
    memcpy(some, at, count * sizeof *at);
    return load(some);
}

INLINE void store_some(float *at, vector value, int64_t count) {
    if (count >= LANES) store(at, value);
    else memcpy(at, &value, count * sizeof *at);
}

INLINE float squares(const float *x, int64_t count) {
    vector sum[4] = {all(0), all(0), all(0), all(0)}; /* with one each addition would wait for the last */
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        UNROLL for (int v = 0; v < 4; v++) {
            const vector some = load(x + i + v * LANES);
            sum[v] = multiply_add(some, some, sum[v]);
        }
    for (; i < count; i += LANES) {
        const vector some = load_some(x + i, count - i);
        sum[0] = multiply_add(some, some, sum[0]);
    }
    return total((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* The even and the odd ones of 2 * LANES elements to the first LANES of them and the last. */
INLINE void join(vector *even, vector *odd) {
    const vector e = *even, o = *odd;
#if defined(__AVX512F__)
    const integers first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    *even = (vector)_mm512_permutex2var_ps((__m512)e, (__m512i)first, (__m512)o);
    *odd = (vector)_mm512_permutex2var_ps((__m512)e, (__m512i)(first + 8), (__m512)o);
#else
    for (int i = 0; i < LANES; i++) {
        const int from = i / 2;
        (*even)[i] = i % 2 ? o[from] : e[from];
        (*odd)[i] = i % 2 ? o[LANES / 2 + from] : e[LANES / 2 + from];
    }
#endif
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
