/* What the threads of a team do together. Each function is called by all of them, and returns when all is done; outside
 * a parallel region the caller does it alone. So a step of a decoder is one region, and an operation alone another,
 * with the same bits. */

#pragma once

#include "vectors.h"

#ifdef _OPENMP /* omp.h comes with few compilers */
int omp_get_num_threads(void);
int omp_get_thread_num(void);
INLINE int64_t number_of_threads(void) { return omp_get_num_threads(); }
INLINE int64_t thread_number(void) { return omp_get_thread_num(); }
#else
INLINE int64_t number_of_threads(void) { return 1; }
INLINE int64_t thread_number(void) { return 0; }
#endif

typedef struct { /* of linear.c */
    float *y;
    const float *x;
    int64_t y_stride, x_stride, rows;
    const char *w;
    int64_t in, out;
    const float *scale, *offset; /* NULL: none */
    int64_t group;               /* inputs that share a scale; without scales `in` */
    const float *bias;           /* NULL: none */
    float *room;                 /* x packed, then the sums of its blocks */
} Linear;

typedef struct Segment Segment; /* of lora.h */

typedef struct { /* the adapters of a linear layer; count 0: none */
    const Segment *segments;
    int64_t count, parts, rows; /* parts, rows: the most that a segment has */
} Adapters;

typedef struct { /* of attention.c */
    float *out;
    const float *q, *keys, *values; /* caches [blocks, size, kv_heads, dim] */
    const int32_t *table;           /* [n, columns] */
    const int64_t *lengths;         /* [n] */
    float *scores;                  /* room for n * heads * longest */
    int64_t out_stride, q_stride, columns, n, heads, kv_heads, dim, size, longest;
    int64_t window;   /* < 0: none */
    float scale, cap; /* cap 0: none */
    const float *sinks; /* [heads], or NULL */
} Attention;

typedef struct { /* of elementwise.c */
    float *q_out; /* [rows, heads, dim] */
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    const float *cos, *sin; /* [..., turned] */
    float *k_cache, *v_cache;
    const int64_t *slots;
    int64_t rows, heads, kv_heads, dim, turned; /* turned 0: q is left alone */
    int64_t pairs;                              /* neighbours are turned together, not the two halves' elements */
    const int64_t *places; /* [rows], of each in cos and sin, of which there are any number; NULL: row by row */
} Rotation;

/* Of a linear layer that rounds x, kind is that of W + FORMS * form: one of bfloat16.c, or of integer.c. */
enum { FORMS = 8, INTEGERS = 3, INTEGER_DOTS };

void linear_team(int64_t kind, const Linear *c);
void bfloat16_team(int64_t kind, const Linear *c);
void integer_team(int64_t kind, const Linear *c);
/* kind: of the pool, + FORMS where x is rounded to bfloat16, as by a linear layer; rounded: what that has made of x, or
 * NULL. bias: part of y, or NULL. */
void lora_team(int64_t kind, const char *pool, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
               const float *bias, const Adapters *adapters, const uint16_t *rounded, float *room, int64_t floats);
void attention_team(const Attention *a);
void norm_row(float *to, const float *in, const float *weight, int64_t width, float eps);
/* As add_rms_norm; without a weight only the sum. */
void norm_team(float *total, float *out, const float *x, int64_t x_stride, const float *delta, int64_t delta_stride,
               const float *weight, int64_t rows, int64_t width, float eps);
void gate_team(float *out, const float *y, int64_t y_stride, int64_t rows, int64_t width, int64_t activation);
void rotate_team(const Rotation *r);
void best_team(int64_t *best, const float *logits, int64_t rows, int64_t width);
