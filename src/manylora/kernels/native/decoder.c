/* A step of a whole decoder in one parallel region. All rows are computed as in decoding, each with its own length; a
 * short prompt is several such rows. Between operations threads wait at a barrier, which takes a microsecond; a call
 * from Python for each operation takes ten, and lets the threads fall asleep. The operations are those that are
 * otherwise called one by one, so the bits are the same. All is float32 but weights, pages of adapters, keys, values and the tables.
 * After its attention the last layer computes only rows whose logits are wanted, as no other row is read again. */

#include "bfloat16.h"

typedef struct {
    const char *w, *scale, *offset; /* NULL: none */
    const float *bias;
    int64_t kind, in, out, group, scales;
} Weight;

enum { QKV, OUT, UP_GATE, DOWN, LINEARS };
enum { PARTS = 3 }; /* of a linear layer, stacked by outputs, if their formats differ */
enum { CALLS = 2 }; /* a fused projection's adapters, then those of its parts */

typedef struct {
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* NULL: none */
    const float *q_norm, *k_norm;                                                 /* both or none */
    Weight linear[LINEARS][PARTS]; /* w NULL: no further part */
    char *keys, *values; /* of this layer, [blocks, size, kv_heads, dim] */
    int64_t window, rotary; /* < 0: none; which cos and sin */
    float scale, cap;
} Layer;

typedef struct {
    const Layer *layer;
    int64_t layers, hidden, heads, kv_heads, dim, size, inner, widest, activation;
    int64_t cache_kind; /* of keys and values */
    int64_t norm_heads; /* whether q and k are normalised head by head */
    int64_t pairs;      /* as of Rotation */
    int64_t most_scores; /* at most, of all rows and heads */
    const float *norm;
    Weight head[PARTS];
    Weight table;          /* of the embedding, [vocabulary, hidden] */
    int64_t table_width;   /* of its panels; 1: float32 or bfloat16, row by row */
    float eps, embedding_scale;
} Decoder;

typedef struct {
    const int64_t *ids; /* [rows], tokens; NULL: x is given */
    float *x;           /* [rows, hidden], is changed; NULL where there are ids */
    float *logits;      /* [wanted, head rows] */
    int64_t *best;      /* [wanted], as of best_tokens */
    const float *cos[2], *sin[2]; /* [turns, turned] */
    const int64_t *places[2];     /* [rows], as of Rotation */
    const int64_t *slots, *lengths; /* [rows] */
    const int64_t *wanted;          /* rows whose logits are computed, ascending */
    const int32_t *table; /* [rows, columns] */
    const Adapters *adapters; /* [layers, LINEARS, CALLS]; NULL: none */
    const Adapters *last;     /* [LINEARS, CALLS] of the last layer, whose rows count the wanted ones */
    const char *pool;
    int64_t pool_kind, rows, turns[2], turned, columns, wanted_rows;
} Step;

typedef struct {
    float *x, *seen, *wide, *q, *mixed, *gated, *delta, *post, *room, *scores;
    int64_t widest, longest; /* `room` has 2 * rows * widest; the most tokens that a row attends to */
} Memory;

INLINE float *take(float **from, int64_t size) {
    float *const taken = *from;
    *from += (size + LINE / 4 - 1) / (LINE / 4) * (LINE / 4);
    return taken;
}

static Memory divide(const Decoder *d, const Step *s, int64_t longest, float *at, float **end) {
    const int64_t q = s->rows * d->heads * d->dim, hidden = s->rows * d->hidden;
    const Memory m = {s->x ? s->x : take(&at, hidden), take(&at, hidden), take(&at, s->rows * d->widest), take(&at, q),
                      take(&at, 2 * q), take(&at, s->rows * d->inner), take(&at, hidden), take(&at, hidden),
                      take(&at, 2 * s->rows * d->widest), take(&at, s->rows * d->heads * longest), d->widest, longest};
    *end = at;
    return m;
}

static void embed(const Decoder *d, const Step *s, float *x) {
    const Weight *const t = &d->table;
    const Linear table = {.w = t->w, .in = t->in, .out = t->out, .scale = t->scale, .offset = t->offset, .group = t->group,
                          .scales = t->scales};
    look_up_team(t->kind, &table, d->table_width, s->ids, s->rows, d->embedding_scale, x);
}

INLINE const Adapters *of(const Adapters *layer, int linear) { return layer ? layer + linear * CALLS : NULL; }

INLINE int64_t width_of(const Weight *w) { return w[0].out + w[1].out + w[2].out; }

/* w: PARTS. */
static void apply(const Weight *w, const Adapters *adapters, const Step *s, const Memory *m, float *y, const float *x) {
    const int64_t width = width_of(w);
    int64_t column = 0;
    int rounded = 0; /* whether the last part left x in `room` */
    for (const Weight *p = w; p < w + PARTS && p->w; column += p->out, p++) {
        const Linear c = {y + column, x, width, p->in, s->rows, p->w, p->in, p->out, p->scale, p->offset, p->group,
                          p->bias, m->room, p->scales};
        linear_team(p->kind, &c);
        rounded = p->kind >= FORMS && p->kind < FORMS * INTEGERS;
    }
    const int64_t used = rounded ? s->rows * rounded_stride(w->in) / 2 : 0;
    for (int i = 0; adapters && i < CALLS; i++)
        if (adapters[i].count)
            lora_team(s->pool_kind, s->pool, y, width, x, w->in, w->in, w->bias, adapters + i,
                      rounded ? (const uint16_t *)m->room : NULL, m->room + used, 2 * s->rows * m->widest - used);
}

/* x += delta, where there is one; returns their norm. */
static const float *add(const Decoder *d, const Step *s, float *x, const float *delta, const float *weight, float *out) {
    norm_team(x, out, x, d->hidden, delta, d->hidden, weight, s->rows, d->hidden, d->eps);
    return weight ? out : x;
}

/* Norms of heads that are a part of wider rows, to [rows, heads, dim]: of each head, or of all heads of a row. */
static void norm_heads(const Decoder *d, const Step *s, float *out, const float *x, int64_t stride, int64_t heads,
                       const float *weight) {
    const int64_t width = d->norm_heads ? d->dim : heads * d->dim, parts = heads * d->dim / width;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s->rows * parts; i++)
        norm_row(out + i * width, x + i / parts * stride + i % parts * width, weight, width, d->eps);
}

/* The output of the attention, [rows, heads * dim]. */
static const float *attend(const Decoder *d, const Layer *l, const Adapters *adapters, const Step *s, const Memory *m,
                           const float *seen) {
    const int64_t q_size = d->heads * d->dim, kv_size = d->kv_heads * d->dim, width = width_of(l->linear[QKV]);
    const int64_t turned = l->rotary < 0 ? 0 : s->turned, number = l->rotary < 0 ? 0 : l->rotary;
    Rotation r = {m->q, m->wide, m->wide + q_size, m->wide + q_size + kv_size, width, width, width,
                  s->cos[number], s->sin[number], l->keys, l->values, s->slots, s->rows, d->heads, d->kv_heads,
                  d->dim, turned, d->pairs, s->places[number], d->cache_kind};
    apply(l->linear[QKV], of(adapters, QKV), s, m, m->wide, seen);
    if (l->q_norm) { /* `mixed` is not in use yet */
        float *const q = m->mixed, *const k = m->mixed + s->rows * q_size;
        norm_heads(d, s, q, r.q, width, d->heads, l->q_norm);
        norm_heads(d, s, k, r.k, width, d->kv_heads, l->k_norm);
        r.q = q, r.k = k, r.q_stride = q_size, r.k_stride = kv_size;
    }
    rotate_team(&r);
    const float *const queries = turned ? m->q : r.q;
    float *const mixed = queries == m->mixed ? m->q : m->mixed;
    const Attention a = {mixed, queries, l->keys, l->values, s->table, s->lengths, m->scores, q_size,
                         turned ? q_size : r.q_stride, s->columns, s->rows, d->heads, d->kv_heads, d->dim, d->size,
                         m->longest, l->window, l->scale, l->cap, NULL, d->cache_kind};
    attention_team(&a);
    return mixed;
}

/* Copies the wanted rows of [rows, width] to contiguous rows. */
static void gather(const Step *s, float *to, const float *from, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s->wanted_rows; i++)
        memcpy(to + i * width, from + s->wanted[i] * width, width * sizeof *to);
}

static const float *post_norm(const Decoder *d, const Step *s, const Memory *m, const float *x, const float *weight) {
    if (!weight) return x;
    norm_team(NULL, m->post, x, d->hidden, NULL, 0, weight, s->rows, d->hidden, d->eps);
    return m->post;
}

static void step(const Decoder *d, const Step *s, const Memory *m) {
    const float *delta = NULL;
    Memory apart = *m;
    apart.x = m->seen, apart.seen = m->x;
    Step few = *s;
    few.rows = s->wanted_rows;
    if (s->ids) embed(d, s, m->x);
    for (int64_t i = 0; i < d->layers; i++) {
        const Layer *const l = d->layer + i;
        const Adapters *adapters = s->adapters ? s->adapters + i * LINEARS * CALLS : NULL;
        const float *seen = add(d, s, m->x, delta, l->attention_norm, m->seen);
        const float *mixed = attend(d, l, adapters, s, m, seen);
        if (i == d->layers - 1 && s->wanted_rows < s->rows) {
            const int64_t width = d->heads * d->dim;
            gather(s, m->wide, mixed, width); /* `wide` and `seen` are not read again */
            gather(s, m->seen, m->x, d->hidden);
            mixed = m->wide, adapters = s->last, s = &few, m = &apart;
            if (!s->rows) return;
        }
        apply(l->linear[OUT], of(adapters, OUT), s, m, m->delta, mixed);
        seen = add(d, s, m->x, post_norm(d, s, m, m->delta, l->attention_post_norm), l->mlp_norm, m->seen);
        apply(l->linear[UP_GATE], of(adapters, UP_GATE), s, m, m->wide, seen);
        gate_team(m->gated, m->wide, 2 * d->inner, s->rows, d->inner, d->activation);
        apply(l->linear[DOWN], of(adapters, DOWN), s, m, m->delta, m->gated);
        delta = post_norm(d, s, m, m->delta, l->mlp_post_norm);
    }
    const float *const seen = add(d, s, m->x, delta, d->norm, m->seen);
    if (!s->rows) return;
    apply(d->head, NULL, s, m, s->logits, seen);
    best_team(s->best, s->logits, s->rows, width_of(d->head)); /* while the logits are in the caches */
}

static int64_t largest(const int64_t *of, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++)
        if (of[i] > found) found = of[i];
    return found;
}

/* memory: room for `floats` floats. Returns 0 if the step is done. Otherwise nothing is done: a positive number says
 * how many floats are needed, a negative one that a row is beyond the end of cos and sin, or that there would be too
 * many scores. */
int64_t decode_step(const Decoder *d, const Step *s, float *memory, int64_t floats) {
    const int64_t longest = largest(s->lengths, s->rows);
    if (s->rows * d->heads * longest > d->most_scores) return -1;
    for (int i = 0; i < 2; i++)
        if (s->places[i] && largest(s->places[i], s->rows) >= s->turns[i]) return -1;
    float *end;
    const Memory m = divide(d, s, longest, memory, &end);
    if (end - memory > floats) return end - memory;
#pragma omp parallel
    step(d, s, &m);
    return 0;
}
