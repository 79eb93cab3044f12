/* Lays the blocks of GGUF's types out in panels, as of panels.h or of integer.c, in as many bytes. Scales that a block
 * stores as products of two numbers stay so; their product in float32 is exact, so the values are those of
 * gguf/blocks.py bit for bit. */

#include "panels.h"

typedef enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K } Type;

static const struct {
    int inputs, bytes, group; /* of a block; inputs that share a scale */
    int bits;
} LAYOUT[] = {{32, 18, 32, 4}, {32, 20, 32, 4}, {32, 22, 32, 5}, {32, 24, 32, 5}, {32, 34, 32, 8}, {256, 144, 32, 4},
              {256, 176, 32, 5}, {256, 210, 16, 6}};

/* Value k of group g is code[k] * scale * scales[g] + offset * offsets[g]; of blocks with one group without the integers. */
typedef struct {
    uint8_t code[CODED_INPUTS];
    uint16_t scale, offset; /* float16 */
    int8_t scales[MOST_GROUPS], offsets[MOST_GROUPS];
} Block;

static uint16_t half(const uint8_t *at) { return at[0] | at[1] << 8; }

/* 32 codes: the low halves of 16 bytes, then the high ones; a fifth bit from `bits`, which may be 0. */
static void halves_of_32(const uint8_t *packed, uint32_t bits, uint8_t *to) {
    for (int i = 0; i < 16; i++) {
        to[i] = (packed[i] & 15) | (bits >> i & 1) << 4;
        to[i + 16] = packed[i] >> 4 | (bits >> (i + 16) & 1) << 4;
    }
}

static uint32_t word(const uint8_t *at) { return half(at) | (uint32_t)half(at + 2) << 16; }

/* The scales and offsets of Q4_K and Q5_K: 8 of each, in 6 bits. The offsets are subtracted. */
static void scales_of_8(const uint8_t *block, Block *to) {
    const uint8_t *const packed = block + 4;
    to->scale = half(block), to->offset = half(block + 2) ^ 0x8000;
    for (int g = 0; g < 8; g++) {
        const int low = g < 4;
        to->scales[g] = low ? packed[g] & 63 : (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
        to->offsets[g] = low ? packed[g + 4] & 63 : packed[g + 4] >> 4 | (packed[g] >> 6) << 4;
    }
}

static void read_block(const Type type, const uint8_t *from, Block *to) {
    to->scale = half(from);
    switch (type) {
        case Q4_0: halves_of_32(from + 2, 0, to->code); break;
        case Q4_1: to->offset = half(from + 2), halves_of_32(from + 4, 0, to->code); break;
        case Q5_0: halves_of_32(from + 6, word(from + 2), to->code); break;
        case Q5_1: to->offset = half(from + 2), halves_of_32(from + 8, word(from + 4), to->code); break;
        case Q8_0: memcpy(to->code, from + 2, 32); break;
        case Q4_K:
        case Q5_K: {
            const uint8_t *const fifth = from + 16, *const packed = from + (type == Q5_K ? 48 : 16);
            scales_of_8(from, to);
            for (int g = 0; g < 8; g++)
                for (int i = 0; i < 32; i++) {
                    const int code = packed[g / 2 * 32 + i] >> g % 2 * 4 & 15;
                    to->code[g * 32 + i] = type == Q5_K ? code | (fifth[i] >> g & 1) << 4 : code;
                }
            break;
        }
        case Q6_K:
            to->scale = half(from + 208), memcpy(to->scales, from + 192, 16);
            for (int i = 0; i < CODED_INPUTS; i++) {
                const int side = i / 128, part = i % 128 / 32, at = i % 32;
                const int low = from[side * 64 + part % 2 * 32 + at] >> part / 2 * 4 & 15;
                to->code[i] = low | (from[128 + side * 32 + at] >> part * 2 & 3) << 4;
            }
    }
}

/* Output j of a panel: `count` codes, from the panel's row `to` on. */
INLINE void place_codes(const int bits, char *to, const uint8_t *code, int count, int64_t j) {
    if (bits == 8) {
        for (int k = 0; k < count; k++) to[k * PANEL + j] = (char)code[k];
        return;
    }
    const Kind kind = bits == 4 ? UINT4 : bits == 5 ? UINT5 : INT6;
    const int inputs = inputs_of(kind), number = words_of(kind), each = in_word(kind);
    uint32_t *row = (uint32_t *)to + j;
    for (int k = 0; k < count; k += inputs, row += number * PANEL) {
        uint32_t made[5] = {0};
        for (int i = 0; i < number * each; i++) made[i / each] |= (uint32_t)code[k + i] << bits * (i % each);
        for (int i = number * each; i < inputs; i++) { /* as of apart_of */
            const int is_second = i + 1 == inputs && bits == 5, first = is_second ? 3 : 0;
            const uint32_t one = code[k + i];
            made[first] |= one << 30, made[first + 1] |= (one >> 2 & 3) << 30;
            made[2] |= bits == 6 ? one >> 4 << 30 : one >> 4 << (is_second ? 31 : 30);
        }
        for (int i = 0; i < number; i++) row[i * PANEL] = made[i];
    }
}

/* The same as of integer.c. */
INLINE void place_bytes(const int bits, char *to, const uint8_t *code, int count, int64_t j) {
    const int inputs = bits == 8 ? 4 : bits == 4 ? 8 : bits == 5 ? 32 : 16, number = inputs * bits / 32;
    uint32_t *row = (uint32_t *)to + j;
    for (int k = 0; k < count; k += inputs, row += number * PANEL) {
        uint32_t made[5] = {0};
        for (int i = 0; i < inputs; i++) {
            const uint32_t one = code[k + i];
            const int at = i % 4 * 8;
            if (bits == 8) made[0] |= one << at;
            else made[i / 8] |= (one & 15) << (at + i / 4 % 2 * 4);
            if (bits == 5 || bits == 6) made[number - 1] |= one >> 4 << (at + i / 4 * (bits - 4));
        }
        for (int i = 0; i < number; i++) row[i * PANEL] = made[i];
    }
}

/* Of output j of a panel, block b of `count`: the float16 number, and for CODED its integers. */
INLINE void place_scales(const int groups, char *to, int64_t panel, int64_t b, int64_t count, int64_t j, uint16_t whole,
                         const int8_t *codes) {
    char *const at = to + (panel * count + b) * (groups > 1 ? 2 + groups : 2) * PANEL;
    memcpy(at + 2 * j, &whole, sizeof whole);
    for (int g = 0; groups > 1 && g < groups; g++) at[(2 + g) * PANEL + j] = codes[g];
}

/* values, scales, offsets: zeros. data: [rows, in / inputs, bytes]. */
INLINE void lay_out(const Type type, int64_t form, char *values, char *scales, char *offsets, const char *data, int64_t rows, int64_t in) {
    const int64_t inputs = LAYOUT[type].inputs, size = LAYOUT[type].bytes, bits = LAYOUT[type].bits, count = in / inputs;
    const int groups = (int)(inputs / LAYOUT[type].group);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++)
        for (int64_t b = 0; b < count; b++)
            for (int64_t j = 0; j < least(PANEL, rows - panel * PANEL); j++) {
                Block block;
                read_block(type, (const uint8_t *)data + ((panel * PANEL + j) * count + b) * size, &block);
                char *const to = values + (panel * in + b * inputs) * bits / 8 * PANEL;
                (form < INTEGERS ? place_codes : place_bytes)((int)bits, to, block.code, (int)inputs, j);
                place_scales(groups, scales, panel, b, count, j, block.scale, block.scales);
                if (offsets) place_scales(groups, offsets, panel, b, count, j, block.offset, block.offsets);
            }
}

/* form: of the products, as in a kind. */
void lay_out_blocks(int64_t type, int64_t form, char *values, char *scales, char *offsets, const char *data, int64_t rows, int64_t in) {
#define LAY_OUT(NAME) \
    case NAME: lay_out(NAME, form, values, scales, offsets, data, rows, in); break;
#pragma omp parallel
    switch (type) { LAY_OUT(Q4_0) LAY_OUT(Q4_1) LAY_OUT(Q5_0) LAY_OUT(Q5_1) LAY_OUT(Q8_0) LAY_OUT(Q4_K) LAY_OUT(Q5_K) LAY_OUT(Q6_K) }
}
