/* Loading an adapter: values of a file to float32, and rows to their pages, at the speed of memory. No threads are
 * started here; callers have their own. */

#include <errno.h>
#include <unistd.h>

#include "vectors.h"

enum { TILE = 128 }; /* a multiple of LANES */

typedef struct {
    const char *source;             /* A [experts, rank, in], B [experts, out, rank], `more` numbers */
    char *target;                   /* for each expert A [rank, in], B [rank, out], and its share of the numbers */
    int64_t experts, rank, in, out; /* of one expert */
    int64_t more;
} Row;

typedef struct {
    int64_t a, b; /* where A [rank, in] and B [out, rank] begin in the file */
    char *target; /* A [rank, in] and B [rank, out] */
    int64_t rank, in, out;
    double scale; /* of B, as float32 */
} Stored;

/* Words whose highest bit is set where a value is infinite or NaN, its exponent being all ones; those of many values
 * are combined by OR. */
INLINE words exponents(words bits) { return (bits & 0x7fffffff) + 0x00800000; }

INLINE uint32_t exponent(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7fffffff) + 0x00800000;
}

INLINE int is_finite(words seen) {
    uint32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= seen[lane];
    return !(any >> 31);
}

/* target = source * scale as float32; returns whether all of target is finite. source may be the target or, of 2 bytes
 * each, its second half: no value is overwritten before it is read. */
INLINE int64_t widen_all(const Kind kind, float *target, const char *source, int64_t count, float scale) {
    const int64_t size = size_of(kind);
    const int written = (const char *)target != source || scale != 1;
    words seen = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vector value = widen(kind, source + i * size) * scale;
        if (written) store(target + i, value);
        seen |= exponents((words)value);
    }
    for (; i < count; i++) {
        const float value = widen_one(kind, source + i * size) * scale;
        if (written) target[i] = value;
        seen[0] |= exponent(value);
    }
    return is_finite(seen);
}

int64_t widen_float32(float *target, const char *source, int64_t count, float scale) {
    return widen_all(FLOAT32, target, source, count, scale);
}

int64_t widen_bfloat16(float *target, const char *source, int64_t count, float scale) {
    return widen_all(BFLOAT16, target, source, count, scale);
}

INLINE void narrow_one(Kind kind, char *at, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (kind != FLOAT32) bits = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) << 16;
    memcpy(at, (char *)&bits + 4 - size_of(kind), size_of(kind)); /* little-endian: the upper half */
}

/* Converts `count` elements to another kind. seen: takes their `exponents`, or NULL. */
INLINE void move(const Kind to, const Kind from, char *target, const char *source, int64_t count, words *seen) {
    const int64_t size = size_of(from), made = size_of(to);
    if (to == from && !seen) {
        memcpy(target, source, count * size);
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const words bits = (words)widen(from, source + i * size);
        if (seen) *seen |= exponents(bits);
        narrow(to, target + i * made, bits);
    }
    for (; i < count; i++) {
        const float value = widen_one(from, source + i * size);
        if (seen) (*seen)[0] |= exponent(value);
        narrow_one(to, target + i * made, value);
    }
}

INLINE void see(const Kind kind, const char *source, int64_t count, words *seen) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) *seen |= exponents((words)widen(kind, source + i * size_of(kind)));
    for (; i < count; i++) (*seen)[0] |= exponent(widen_one(kind, source + i * size_of(kind)));
}

/* Transposes LANES rows of LANES elements. */
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

/* Transposes B [out, rank] to [rank, out], LANES x LANES elements at a time in registers. TILE rows of B stay in the
 * cache until they are done. seen: takes the `exponents` of the values times scale; NULL: scale is 1. */
INLINE void turn_all(const Kind to, const Kind from, char *target, const char *source, int64_t rank, int64_t out,
                     float scale, words *seen) {
    const int64_t size = size_of(from), made = size_of(to);
    for (int64_t first = 0; first < out; first += TILE)
        for (int64_t r = 0; r < rank; r += LANES)
            for (int64_t c = first; c < least(first + TILE, out); c += LANES) {
                const char *block = source + (c * rank + r) * size;
                char *turned = target + (r * out + c) * made;
                if (r + LANES <= rank && c + LANES <= out) {
                    words v[LANES];
                    UNROLL for (int i = 0; i < LANES; i++) {
                        v[i] = (words)widen(from, block + i * rank * size);
                        if (!seen) continue;
                        v[i] = (words)((vector)v[i] * scale);
                        *seen |= exponents(v[i]);
                    }
                    turn(v);
                    UNROLL for (int k = 0; k < LANES; k++) narrow(to, turned + k * out * made, v[k]);
                    continue;
                }
                for (int64_t k = 0; k < least(LANES, rank - r); k++)
                    for (int64_t i = 0; i < least(LANES, out - c); i++) {
                        float value = widen_one(from, block + (i * rank + k) * size);
                        if (seen) (*seen)[0] |= exponent(value *= scale);
                        narrow_one(to, turned + (k * out + i) * made, value);
                    }
            }
}

INLINE void lay_out(const Kind to, const Kind from, const Row *rows, int64_t count) {
    const int64_t size = size_of(from), made = size_of(to);
    for (const Row *row = rows; row < rows + count; row++) {
        const int64_t a = row->rank * row->in, b = row->rank * row->out, more = row->more / row->experts;
        for (int64_t e = 0; e < row->experts; e++) {
            char *pair = row->target + e * (a + b + more) * made;
            move(to, from, pair, row->source + e * a * size, a, NULL);
            turn_all(to, from, pair + a * made, row->source + (row->experts * a + e * b) * size, row->rank, row->out, 1,
                     NULL);
            move(to, from, pair + (a + b) * made, row->source + (row->experts * (a + b) + e * more) * size, more, NULL);
        }
    }
}

#define LAY_OUT(name, to, from) \
    void name(const Row *rows, int64_t count) { lay_out(to, from, rows, count); }

LAY_OUT(lay_out_float32_float32, FLOAT32, FLOAT32)
LAY_OUT(lay_out_float32_bfloat16, FLOAT32, BFLOAT16)
LAY_OUT(lay_out_bfloat16_float32, BFLOAT16, FLOAT32)
LAY_OUT(lay_out_bfloat16_bfloat16, BFLOAT16, BFLOAT16)

INLINE int read_all(int file, char *target, int64_t size, int64_t at) {
    while (size > 0) {
        const int64_t got = pread(file, target, size, at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        target += got, at += got, size -= got;
    }
    return 1;
}

/* Reads rows of a file to their pages. room: for the larger of a row's matrices, which stays in the cache. Returns the
 * index of a row that could not be read or is not finite, or `count`. */
INLINE int64_t read_rows(const Kind to, const Kind from, int file, const Stored *rows, int64_t count, char *room) {
    for (int64_t i = 0; i < count; i++) {
        const Stored *row = rows + i;
        const int64_t a = row->rank * row->in, b = row->rank * row->out;
        words seen = {0};
        char *first = to == from ? row->target : room; /* what needs no conversion is checked in its page */
        if (!read_all(file, first, a * size_of(from), row->a)) return i;
        if (to == from) see(from, first, a, &seen);
        else move(to, from, row->target, room, a, &seen);
        if (!read_all(file, room, b * size_of(from), row->b)) return i;
        turn_all(to, from, row->target + a * size_of(to), room, row->rank, row->out, (float)row->scale, &seen);
        if (!is_finite(seen)) return i;
    }
    return count;
}

#define ROWS_OF(call, name, to, from)                                           \
    int64_t name(int64_t file, const Stored *rows, int64_t count, char *room) { \
        return call(to, from, (int)file, rows, count, room);                    \
    }

ROWS_OF(read_rows, read_rows_float32_float32, FLOAT32, FLOAT32)
ROWS_OF(read_rows, read_rows_float32_bfloat16, FLOAT32, BFLOAT16)
ROWS_OF(read_rows, read_rows_bfloat16_float32, BFLOAT16, FLOAT32)
ROWS_OF(read_rows, read_rows_bfloat16_bfloat16, BFLOAT16, BFLOAT16)

/* Reads rows of a file, A [rank, in] and B [out, rank] times its scale, to their targets as kind `to`, and to `room` as
 * float32. There a row begins with the eight bytes that precede such numbers in a digest, and takes whole cache lines.
 * Returns the index of a row that could not be read or is not finite, or `count`. */
INLINE int64_t take_rows(const Kind to, const Kind from, int file, const Stored *rows, int64_t count, char *room) {
    static const char name[8] = "float32";
    for (int64_t i = 0; i < count; i++) {
        const Stored *row = rows + i;
        const int64_t a = row->rank * row->in, b = row->rank * row->out, size = sizeof name + 4 * (a + b);
        char *numbers = memcpy(room, name, sizeof name);
        numbers += sizeof name;
        char *stored_b = numbers + 4 * (a + b) - size_of(from) * b; /* at the end of its float32, as widen_all allows */
        char *stored_a = numbers + 4 * a - size_of(from) * a;
        if (!read_all(file, stored_a, a * size_of(from), row->a)) return i;
        if (!widen_all(from, (float *)numbers, stored_a, a, 1)) return i;
        if (!read_all(file, stored_b, b * size_of(from), row->b)) return i;
        if (!widen_all(from, (float *)(numbers + 4 * a), stored_b, b, (float)row->scale)) return i;
        move(to, FLOAT32, row->target, numbers, a + b, NULL);
        room += (size + LINE - 1) / LINE * LINE;
    }
    return count;
}

ROWS_OF(take_rows, take_rows_float32_float32, FLOAT32, FLOAT32)
ROWS_OF(take_rows, take_rows_float32_bfloat16, FLOAT32, BFLOAT16)
ROWS_OF(take_rows, take_rows_bfloat16_float32, BFLOAT16, FLOAT32)
ROWS_OF(take_rows, take_rows_bfloat16_bfloat16, BFLOAT16, BFLOAT16)
