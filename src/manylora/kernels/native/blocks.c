/* Lays the blocks of GGUF's types out in panels, as they are read from a file. Scales that a block stores as products
 * of two numbers are multiplied in float32, so the values are those of gguf/blocks.py bit for bit. */

#include "panels.h"

typedef enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K } Type;

enum { MOST_INPUTS = 256, MOST_GROUPS = 16 };

static const struct {
    int inputs, bytes, group; /* of a block; inputs that share a scale */
    int is_four, has_offsets; /* whether values take 4 bits */
} LAYOUT[] = {{32, 18, 32, 1, 0}, {32, 20, 32, 1, 1}, {32, 22, 32, 0, 0}, {32, 24, 32, 0, 1},
              {32, 34, 32, 0, 0}, {256, 144, 32, 1, 1}, {256, 176, 32, 0, 1}, {256, 210, 16, 0, 0}};

typedef struct {
    int8_t value[MOST_INPUTS];
    float scale[MOST_GROUPS], offset[MOST_GROUPS];
} Block;

static float half(const uint8_t *at) {
    const uint32_t code = at[0] | at[1] << 8, size = code & 0x7fff;
    float value = size * 0x1p-24f; /* a subnormal number */
    if (size >= 0x400) {
        const uint32_t bits = size >= 0x7c00 ? 0x7f800000 | (size & 0x3ff) << 13 : (size << 13) + (112u << 23);
        memcpy(&value, &bits, sizeof value);
    }
    return code & 0x8000 ? -value : value;
}

/* 32 values: the low halves of 16 bytes, then the high ones; a fifth bit from `bits`, which may be 0. */
static void halves_of_32(const uint8_t *packed, uint32_t bits, int less, int8_t *to) {
    for (int i = 0; i < 16; i++) {
        to[i] = (int8_t)(((packed[i] & 15) | (bits >> i & 1) << 4) - less);
        to[i + 16] = (int8_t)((packed[i] >> 4 | (bits >> (i + 16) & 1) << 4) - less);
    }
}

static uint32_t word(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* The scales and offsets of Q4_K and Q5_K: 8 of each, in 6 bits. */
static void scales_of_8(const uint8_t *block, Block *to) {
    const float by = half(block), below = half(block + 2);
    const uint8_t *const packed = block + 4;
    for (int g = 0; g < 8; g++) {
        const int low = g < 4;
        const int scale = low ? packed[g] & 63 : (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
        const int least = low ? packed[g + 4] & 63 : packed[g + 4] >> 4 | (packed[g] >> 6) << 4;
        to->scale[g] = by * (float)scale;
        to->offset[g] = -(below * (float)least);
    }
}

static void read_block(const Type type, const uint8_t *from, Block *to) {
    switch (type) {
        case Q4_0: to->scale[0] = half(from), halves_of_32(from + 2, 0, 0, to->value); break;
        case Q4_1:
            to->scale[0] = half(from), to->offset[0] = half(from + 2);
            halves_of_32(from + 4, 0, 0, to->value);
            break;
        case Q5_0: to->scale[0] = half(from), halves_of_32(from + 6, word(from + 2), 16, to->value); break;
        case Q5_1:
            to->scale[0] = half(from), to->offset[0] = half(from + 2);
            halves_of_32(from + 8, word(from + 4), 0, to->value);
            break;
        case Q8_0: to->scale[0] = half(from), memcpy(to->value, from + 2, 32); break;
        case Q4_K:
        case Q5_K: {
            const uint8_t *const fifth = from + 16, *const packed = from + (type == Q5_K ? 48 : 16);
            scales_of_8(from, to);
            for (int g = 0; g < 8; g++)
                for (int i = 0; i < 32; i++) {
                    const int code = packed[g / 2 * 32 + i] >> g % 2 * 4 & 15;
                    to->value[g * 32 + i] = (int8_t)(type == Q5_K ? code | (fifth[i] >> g & 1) << 4 : code);
                }
            break;
        }
        case Q6_K: {
            const float by = half(from + 208);
            for (int g = 0; g < 16; g++) to->scale[g] = by * (float)(int8_t)from[192 + g];
            for (int i = 0; i < MOST_INPUTS; i++) {
                const int side = i / 128, part = i % 128 / 32, at = i % 32;
                const int low = from[side * 64 + part % 2 * 32 + at] >> part / 2 * 4 & 15;
                to->value[i] = (int8_t)((low | (from[128 + side * 32 + at] >> part * 2 & 3) << 4) - 32);
            }
            break;
        }
    }
}

/* values, scales, offsets: as of panels.h, zeros. data: [rows, in / inputs, bytes]. */
INLINE void lay_out(const Type type, char *values, float *scales, float *offsets, const char *data, int64_t rows,
                    int64_t in) {
    const int64_t inputs = LAYOUT[type].inputs, group = LAYOUT[type].group, size = LAYOUT[type].bytes;
    const int64_t count = in / inputs, groups = in / group;
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++)
        for (int64_t b = 0; b < count; b++)
            for (int64_t j = 0; j < least(PANEL, rows - panel * PANEL); j++) {
                Block block;
                read_block(type, (const uint8_t *)data + ((panel * PANEL + j) * count + b) * size, &block);
                char *const to = values + (panel * in + b * inputs) / (LAYOUT[type].is_four ? 2 : 1) * PANEL + j;
                const int64_t at = (panel * groups + b * (inputs / group)) * PANEL + j;
                if (LAYOUT[type].is_four)
                    for (int k = 0; k < inputs; k += 2)
                        to[k / 2 * PANEL] = (char)(block.value[k] | block.value[k + 1] << 4);
                else
                    for (int k = 0; k < inputs; k++) to[k * PANEL] = block.value[k];
                for (int g = 0; g < inputs / group; g++) {
                    scales[at + g * PANEL] = block.scale[g];
                    if (LAYOUT[type].has_offsets) offsets[at + g * PANEL] = block.offset[g];
                }
            }
}

void lay_out_blocks(int64_t type, char *values, float *scales, float *offsets, const char *data, int64_t rows,
                    int64_t in) {
#define LAY_OUT(NAME) \
    case NAME: lay_out(NAME, values, scales, offsets, data, rows, in); break;
#pragma omp parallel
    switch (type) { LAY_OUT(Q4_0) LAY_OUT(Q4_1) LAY_OUT(Q5_0) LAY_OUT(Q5_1) LAY_OUT(Q8_0) LAY_OUT(Q4_K) LAY_OUT(Q5_K) LAY_OUT(Q6_K) }
}
