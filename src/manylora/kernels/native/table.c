/* Rows of an embedding's table, which may be a weight in panels of any kind, in float32. */

#include "panels.h"

/* Input k of a panel's row `lane`, as an integer where there are scales. */
INLINE float one_weight(const Kind kind, int has_bytes, const char *panel, int64_t width, int64_t lane, int64_t k) {
    static const float float4[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    if (kind == FLOAT32) return widen_one(FLOAT32, panel + (k * width + lane) * 4);
    if (kind == BFLOAT16) return widen_one(BFLOAT16, panel + (k / 2 * width + lane) * 4 + k % 2 * 2);
    if (kind == INT8) return ((const int8_t *)panel)[has_bytes ? (k / 4 * width + lane) * 4 + k % 4 : k * width + lane];
    const int input = (int)(k % inputs_of(kind)), each = in_word(kind), number = input / each;
    const uint32_t *const row = (const uint32_t *)(panel + k / inputs_of(kind) * bytes_of(kind)) + lane;
    int code = number < words_of(kind) ? row[number * PANEL] >> input % each * bits_of(kind) & ((1 << bits_of(kind)) - 1) : 0;
    if (number == words_of(kind)) { /* as of apart_of */
        const int is_last = input + 1 == inputs_of(kind), first = kind == INT6 || !is_last ? 0 : 3;
        const uint32_t top = row[2 * PANEL];
        code = row[first * PANEL] >> 30 | (row[(first + 1) * PANEL] >> 28 & 12);
        code |= kind == INT6 ? top >> 26 & 0x30 : (is_last ? top >> 27 : top >> 26) & 0x10;
    }
    if (has_bytes) {
        const int at = input % 4 * 8, upper = is_four_bits(kind) ? 0 : bits_of(kind) - 4;
        code = row[input / 8 * PANEL] >> (at + input / 4 % 2 * 4) & 15;
        if (upper) code |= (row[(words_of(kind) - 1) * PANEL] >> (at + input / 4 * upper) & ((1 << upper) - 1)) << 4;
    }
    return kind == FLOAT4 ? float4[code] : (float)(code - (kind == INT4 ? 8 : kind == INT5 ? 16 : kind == INT6 ? 32 : 0));
}

INLINE void one_row(const Kind kind, int has_bytes, const Linear *t, int64_t width, int64_t id, float factor, float *to) {
    const int64_t panel = id / width, lane = id % width;
    const char *const at = t->w + (width == 1 ? id * t->in * size_of(kind) : panel * (t->in / inputs_of(kind)) * bytes_of(kind));
    float room[2][PANEL];
    for (int64_t g = 0; g < t->in / t->group; g++) {
        const float *const scale = widen_scales(t, t->scale, panel, g, 1, room[0]);
        const float *const offset = widen_scales(t, t->offset, panel, g, 1, room[1]);
        for (int64_t k = g * t->group; k < (g + 1) * t->group; k++) {
            float one = one_weight(kind, has_bytes, at, width, lane, k);
            if (scale) one *= scale[lane];
            if (offset) one += offset[lane];
            to[k] = one * factor;
        }
    }
}

void look_up_team(int64_t kind, const Linear *t, int64_t width, const int64_t *ids, int64_t count, float factor, float *to) {
#define ROW(KIND) \
    case KIND: one_row(KIND, kind >= FORMS * INTEGERS, t, width, id, factor, to + i * t->in); break;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
        const int64_t id = 0 <= ids[i] && ids[i] < t->out ? ids[i] : 0;
        switch (kind % FORMS) {
            ROW(FLOAT32) ROW(BFLOAT16) ROW(INT8) ROW(INT4) ROW(UINT4) ROW(FLOAT4) ROW(INT5) ROW(UINT5) ROW(INT6)
        }
    }
}

void look_up_rows(int64_t kind, float *to, const int64_t *ids, int64_t count, const char *w, int64_t in, int64_t out,
                  const char *scale, const char *offset, int64_t group, int64_t scales) {
    const Linear t = {.w = w, .in = in, .out = out, .scale = scale, .offset = offset, .group = group, .scales = scales};
#pragma omp parallel if (count > 1)
    look_up_team(kind, &t, PANEL, ids, count, 1, to);
}
