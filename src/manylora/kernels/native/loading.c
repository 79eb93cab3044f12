/* Bringing an adapter in: the values of a file to float32, and rows into their pages, at the speed of memory.
 * Callers have threads of their own; none is started here. */

#include "vectors.h"

enum { TILE = 128 }; /* a multiple of LANES */

typedef struct {
    const char *source;             /* A [experts, rank, in], B [experts, out, rank], then so many more */
    char *target;                   /* for each expert A [rank, in] and B [rank, out]; then the same */
    int64_t experts, rank, in, out; /* of one expert */
    int64_t more;
} Row;

/* target = source * scale as float32; source may be the target, or, half as wide, its rear half: no value is written
 * over before it was read. Whether all of target is finite. */
INLINE int64_t widen_all(const Kind kind, float *target, const char *source, int64_t count, float scale) {
    const int64_t size = size_of(kind);
    const int written = (const char *)target != source || scale != 1;
    uint32_t one_by_one = 0;
    words seen = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vector value = widen(kind, source + i * size) * scale;
        if (written) store(target + i, value);
        seen |= ((words)value & 0x7fffffff) + 0x00800000; /* the highest bit: the exponent is all ones */
    }
    for (; i < count; i++) {
        const float value = widen_one(kind, source + i * size) * scale;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (written) target[i] = value;
        one_by_one |= (bits & 0x7fffffff) + 0x00800000;
    }
    for (int lane = 0; lane < LANES; lane++) one_by_one |= seen[lane];
    return !(one_by_one >> 31);
}

int64_t widen_float32(float *target, const char *source, int64_t count, float scale) {
    return widen_all(FLOAT32, target, source, count, scale);
}

int64_t widen_bfloat16(float *target, const char *source, int64_t count, float scale) {
    return widen_all(BFLOAT16, target, source, count, scale);
}

/* The upper half of float32, to the nearest, ties to even; bfloat16 that was widened comes out as it was. */
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

INLINE void narrow_one(Kind kind, char *at, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (kind != FLOAT32) bits = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) << 16;
    memcpy(at, (char *)&bits + 4 - size_of(kind), size_of(kind)); /* little-endian: the upper half */
}

/* A run of elements to another kind. */
INLINE void move(const Kind to, const Kind from, char *target, const char *source, int64_t count) {
    const int64_t size = size_of(from), made = size_of(to);
    if (to == from) {
        memcpy(target, source, count * size);
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) narrow(to, target + i * made, (words)widen(from, source + i * size));
    for (; i < count; i++) narrow_one(to, target + i * made, widen_one(from, source + i * size));
}

/* LANES rows of LANES elements to their columns. */
INLINE void turn(words *v) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) { /* b[i + k]: column k of each quarter, of rows i to i + 3 */
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    UNROLL for (int k = 0; k < 4; k++) {
        const __m512i even = _mm512_shuffle_i32x4(b[k], b[k + 4], 0x88), odd = _mm512_shuffle_i32x4(b[k], b[k + 4], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(b[k + 8], b[k + 12], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(b[k + 8], b[k + 12], 0xdd);
        v[k] = (words)_mm512_shuffle_i32x4(even, even2, 0x88);
        v[k + 4] = (words)_mm512_shuffle_i32x4(odd, odd2, 0x88);
        v[k + 8] = (words)_mm512_shuffle_i32x4(even, even2, 0xdd);
        v[k + 12] = (words)_mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
#elif defined(__AVX2__)
    __m256i a[8], b[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32((__m256i)v[i], (__m256i)v[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32((__m256i)v[i], (__m256i)v[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) { /* b[i + k]: column k of each half, of rows i to i + 3 */
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    UNROLL for (int k = 0; k < 4; k++) {
        v[k] = (words)_mm256_permute2x128_si256(b[k], b[k + 4], 0x20);
        v[k + 4] = (words)_mm256_permute2x128_si256(b[k], b[k + 4], 0x31);
    }
#else
    words turned[LANES];
    for (int i = 0; i < LANES; i++)
        for (int k = 0; k < LANES; k++) turned[k][i] = v[i][k];
    memcpy(v, turned, sizeof turned);
#endif
}

/* B [out, rank] to [rank, out]: LANES x LANES of it in registers, columns in tiles that stay in the cache while their
 * coefficients are gone through. */
INLINE void turn_all(const Kind to, const Kind from, char *target, const char *source, int64_t rank, int64_t out) {
    const int64_t size = size_of(from), made = size_of(to);
    for (int64_t first = 0; first < out; first += TILE)
        for (int64_t r = 0; r < rank; r += LANES)
            for (int64_t c = first; c < least(first + TILE, out); c += LANES) {
                const char *block = source + (c * rank + r) * size;
                char *turned = target + (r * out + c) * made;
                if (r + LANES <= rank && c + LANES <= out) {
                    words v[LANES];
                    UNROLL for (int i = 0; i < LANES; i++) v[i] = (words)widen(from, block + i * rank * size);
                    turn(v);
                    UNROLL for (int k = 0; k < LANES; k++) narrow(to, turned + k * out * made, v[k]);
                    continue;
                }
                for (int64_t k = 0; k < least(LANES, rank - r); k++)
                    for (int64_t i = 0; i < least(LANES, out - c); i++)
                        narrow_one(to, turned + (k * out + i) * made, widen_one(from, block + (i * rank + k) * size));
            }
}

INLINE void lay_out(const Kind to, const Kind from, const Row *rows, int64_t count) {
    const int64_t size = size_of(from), made = size_of(to);
    for (const Row *row = rows; row < rows + count; row++) {
        const int64_t a = row->rank * row->in, b = row->rank * row->out;
        for (int64_t e = 0; e < row->experts; e++) {
            char *pair = row->target + e * (a + b) * made;
            move(to, from, pair, row->source + e * a * size, a);
            turn_all(to, from, pair + a * made, row->source + (row->experts * a + e * b) * size, row->rank, row->out);
        }
        const int64_t end = row->experts * (a + b);
        move(to, from, row->target + end * made, row->source + end * size, row->more);
    }
}

#define LAY_OUT(name, to, from) \
    void name(const Row *rows, int64_t count) { lay_out(to, from, rows, count); }

LAY_OUT(lay_out_float32_float32, FLOAT32, FLOAT32)
LAY_OUT(lay_out_float32_bfloat16, FLOAT32, BFLOAT16)
LAY_OUT(lay_out_bfloat16_float32, BFLOAT16, FLOAT32)
LAY_OUT(lay_out_bfloat16_bfloat16, BFLOAT16, BFLOAT16)
