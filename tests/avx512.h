/* Included before the kernels' sources: AVX-512's intrinsics in portable C by libsimde-dev, so that the code for
 * processors with AVX-512 runs on others. What simde 0.7 lacks is added here. */
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <stdint.h>

typedef uint16_t sixteen_uint16 __attribute__((vector_size(32)));
typedef uint8_t sixteen_uint8 __attribute__((vector_size(16)));
typedef int8_t sixteen_int8 __attribute__((vector_size(16)));
typedef int32_t sixteen_int32 __attribute__((vector_size(64)));

#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtph_ps
#define _mm512_cvtepu16_epi32(x) ((__m512i)__builtin_convertvector((sixteen_uint16)(x), sixteen_int32))
#define _mm512_cvtepu8_epi32(x) ((__m512i)__builtin_convertvector((sixteen_uint8)(x), sixteen_int32))
#define _mm512_cvtepi8_epi32(x) ((__m512i)__builtin_convertvector((sixteen_int8)(x), sixteen_int32))
#define _mm512_cvtepi32_epi16(x) ((__m256i)__builtin_convertvector((sixteen_int32)(x), sixteen_uint16))
#define _mm512_cvtph_ps(x) widen_sixteen_float16((simde__m256i)(x))

static inline __m512 widen_sixteen_float16(simde__m256i code) {
    simde__m128i half[2];
    simde__m256 wide[2];
    __m512 result;
    __builtin_memcpy(half, &code, sizeof half);
    wide[0] = simde_mm256_cvtph_ps(half[0]);
    wide[1] = simde_mm256_cvtph_ps(half[1]);
    __builtin_memcpy(&result, wide, sizeof result);
    return result;
}

#define __AVX512F__ 1
#define EMULATED 1 /* vectors are in no register, for which instructions could be asked by name */
#ifndef __F16C__
#define __F16C__ 1
#endif
