/* Operations that a team of threads does together: all of them call the function, which returns when the work is done.
 * Outside a parallel region the caller does it alone. So a whole step of a decoder can be one region, or each operation
 * a region of its own, with the same bits. */

#pragma once

#include "vectors.h"

#ifdef _OPENMP /* few compilers come with omp.h */
int omp_get_num_threads(void);
int omp_get_thread_num(void);
INLINE int64_t number_of_threads(void) { return omp_get_num_threads(); }
INLINE int64_t thread_number(void) { return omp_get_thread_num(); }
#else
INLINE int64_t number_of_threads(void) { return 1; }
INLINE int64_t thread_number(void) { return 0; }
#endif

typedef enum { WHOLE, HALVED, CODED } Scales;

typedef struct { /* of linear.c */
    float *y;
    const float *x;
    int64_t y_stride, x_stride, rows;
    const char *w;
    int64_t in, out;
    const char *scale, *offset; /* NULL: none */
    int64_t group;              /* inputs that share a scale; without scales `in` */
    const float *bias;           /* NULL: none */
    float *room;                 /* x packed, then its sums over blocks of inputs */
    int64_t scales;              /* how they and offsets are stored, as of panels.h */
} Linear;

typedef struct Segment Segment; /* of lora.h */

typedef struct { /* the adapters of a linear layer; count 0: none */
    const Segment *segments;
    int64_t count, parts, rows; /* parts, rows: the most that a segment has */
} Adapters;

typedef struct { /* of attention.c */
    float *out;
    const float *q;
    const char *keys, *values;      /* caches [blocks, size, kv_heads, dim] of `kind` */
    const int32_t *table;           /* [n, columns] */
    const int64_t *lengths;         /* [n] */
    float *scores;                  /* room for n * heads * longest */
    int64_t out_stride, q_stride, columns, n, heads, kv_heads, dim, size, longest;
    int64_t window;   /* < 0: none */
    float scale, cap; /* cap 0: none */
    const float *sinks; /* [heads], or NULL */
    int64_t kind; /* FLOAT32 or BFLOAT16 */
} Attention;

enum { LARGEST_HEAD = 256 }; /* elements of a head, of attention and of caches that are not float32 */

typedef struct { /* of elementwise.c */
    float *q_out; /* [rows, heads, dim] */
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    const float *cos, *sin; /* [..., turned] */
    char *k_cache, *v_cache; /* of `kind` */
    const int64_t *slots;
    int64_t rows, heads, kv_heads, dim, turned; /* turned: dimensions that are rotated; 0: q is left alone */
    int64_t pairs;                              /* whether 2i and 2i + 1 are rotated together, or i and i + turned / 2 */
    const int64_t *places; /* [rows], the row of cos and sin for each; NULL: in order */
    int64_t kind;          /* FLOAT32 or BFLOAT16 */
} Rotation;

/* The kind of a linear layer that rounds x is that of W + FORMS * form: a form of bfloat16.c, or these of integer.c. */
enum { FORMS = 16, INTEGERS = 3, INTEGER_DOTS };

void linear_team(int64_t kind, const Linear *c);
void bfloat16_team(int64_t kind, const Linear *c);
/* factor times rows `ids` of a table, to [count, in]. width: of its panels; 1: float32 or bfloat16, row by row. */
void look_up_team(int64_t kind, const Linear *table, int64_t width, const int64_t *ids, int64_t count, float factor,
                  float *to);
void integer_team(int64_t kind, const Linear *c);
/* kind: of the pool, + FORMS where x is rounded to bfloat16 as in a linear layer. rounded: x, if the layer has rounded
 * it already, else NULL. bias: what was added to y before, or NULL. room: for `floats` floats. */
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
