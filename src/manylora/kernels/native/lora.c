/* y[row, columns] += (x[row] A^T) B^T for the rows of every adapter of a batch, A and B being read in the page pool;
 * with DoRA what is then in y, less the bias, is multiplied by a magnitude. The pool is of float32 or bfloat16, and any
 * adapter in it may be of 8-bit floats instead. Numbers are widened in registers; sums are float32.
 *
 * lora_few.h and lora_many.h do the work of one adapter, for few rows and for many; here it is divided among threads.
 * Whatever rows come with it, the sums of a row are made in the same order. */

#include "lora_few.h"
#include "lora_many.h"

enum {
    ROOM = 16384,     /* coefficients, at most, of tasks that are shared among threads, */
    LONELY = 4,       /* as they are where there are fewer of them for each thread */
    LARGE = 65536,    /* numbers of A and B for which threads are started */
    LEAST_ROUNDED = 128 /* inputs, at least, of a linear layer that rounds them: ROUNDED_INPUTS of panels.py */
};

typedef struct {
    Kind stored;
    int rounds; /* as of Work */
    const uint16_t *rounded;
    const char *pool;
    float *y;
    const float *x, *bias;
    int64_t y_stride, x_stride, in, parts;
    const Segment *segments;
    int64_t block, blocks, tasks; /* rows of a task, tasks of a part, and of all */
} Call;

typedef struct { /* a part for some rows; height 0: there is nothing to do */
    const Part *part;
    int64_t start, height;
} Task;

INLINE Task task_at(const Call *c, int64_t n) {
    const Segment *const segment = c->segments + n / (c->blocks * c->parts);
    const int64_t p = n / c->blocks % c->parts, start = segment->start + n % c->blocks * c->block;
    const int64_t height = p < segment->count ? least(segment->stop - start, c->block) : 0;
    return (Task){segment->parts + p, start, height > 0 ? height : 0};
}

INLINE const char *begin(const Call *c, const Part *part) {
    return c->pool + part->row.offset * size_of(kind_of(&part->row, c->stored));
}

/* part: the task's, or one that is mixed with it. next: the part that is read after it. */
INLINE Work work_of(const Call *c, const Task *task, const Part *part, const Part *next) {
    const int64_t size = size_of(kind_of(&part->row, c->stored)), rank = part->row.rank;
    const char *const a = begin(c, part), *const b = a + rank * c->in * size, *const end = b + rank * part->width * size;
    const char *const own = part->row.vectors < 0 ? NULL : c->pool + part->row.vectors * size;
    return (Work){c->y + task->start * c->y_stride + part->column, c->x + task->start * c->x_stride, c->y_stride,
                  c->x_stride, c->in, part->width, rank, a, b,
                  part->row.dora == DORA ? end : NULL, part->row.dora == DORA_MIXED ? end : own,
                  own ? own + part->width * size : NULL, c->bias ? c->bias + part->column : NULL, begin(c, next),
                  part->row.scale, c->rounds,
                  c->rounded ? c->rounded + task->start * rounded_stride(c->in) : NULL};
}

/* For each adapter of a mix, in the order in which they are always added. */
#define EACH_MEMBER(part, first) \
    for (const Part *part = first, *last = NULL; part != last; last = part, part += part->row.next)

/* Before any adapter of a mix is added to y: multiplies y, less the bias, by 1 + the sum of scale * (magnitude - 1) of
 * those with DoRA. Columns [from, to): `from` is a multiple of 2 * LANES, and so is `to`, or the width. */
static void ONCE weigh_base(const Call *c, const Task *task, int64_t from, int64_t to) {
    int mixed = 0;
    EACH_MEMBER(part, task->part) mixed |= part->row.dora == DORA_MIXED;
    if (!mixed) return;
    const Work first = work_of(c, task, task->part, task->part);
    int64_t column = from;
    for (; column + 2 * LANES <= to; column += 2 * LANES) {
        vector weight[2] = {all(1), all(1)}, one[2];
        EACH_MEMBER(part, task->part) {
            if (part->row.dora != DORA_MIXED) continue;
            const Work w = work_of(c, task, part, part);
            widen_joined(c->stored, w.weights + column * size_of(c->stored), one);
            for (int i = 0; i < 2; i++) weight[i] = multiply_add(one[i] - all(1), all(w.scale), weight[i]);
        }
        for (int64_t row = 0; row < task->height; row++)
            for (int i = 0; i < 2; i++) {
                float *const y = first.y + row * first.y_stride + column + i * LANES;
                const vector bias = first.bias ? load(first.bias + column + i * LANES) : all(0);
                store(y, multiply_add(load(y) - bias, weight[i], bias));
            }
    }
    for (; column < to; column++) {
        float weight = 1;
        EACH_MEMBER(part, task->part) {
            if (part->row.dora != DORA_MIXED) continue;
            const Work w = work_of(c, task, part, part);
            weight += (widen_one(c->stored, w.weights + column * size_of(c->stored)) - 1) * w.scale;
        }
        for (int64_t row = 0; row < task->height; row++) {
            float *const y = first.y + row * first.y_stride + column, bias = first.bias ? first.bias[column] : 0;
            *y = (*y - bias) * weight + bias;
        }
    }
}

static void whole_tasks(const Call *c) {
    const int64_t run = c->tasks < 32 ? 1 : 4; /* tasks in a row for a thread, which prefetches the next one itself */
#pragma omp for schedule(dynamic, run)
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        const int64_t after = n + 1 < c->tasks ? n + 1 : n;
        const Segment *const soon = c->segments + after / (c->blocks * c->parts);
        const Part *const following = soon->parts + least(after / c->blocks % c->parts, soon->count - 1);
        weigh_base(c, &task, 0, task.part->width);
        EACH_MEMBER(part, task.part) {
            const Work w = work_of(c, &task, part, part->row.next ? part + part->row.next : following);
            const Kind kind = kind_of(&part->row, c->stored);
            if (task.height > FEW) many(kind, task.height, &w);
            else few(kind, task.height, &w);
        }
    }
}

/* Sums over tasks: of ranks, coefficients of all rows, and pairs of vectors in a row of B and in all its rows. */
typedef struct {
    int64_t ranks, floats, pairs, vectors;
} Sizes;

INLINE Sizes sizes_of(const Task *task) {
    Sizes sizes = {.pairs = (task->part->width + 2 * LANES - 1) / (2 * LANES)};
    EACH_MEMBER(part, task->part) sizes.ranks += part->row.rank;
    sizes.floats = sizes.ranks * task->height;
    sizes.vectors = sizes.ranks * sizes.pairs;
    return sizes;
}

static Sizes sizes_of_all(const Call *c) {
    Sizes all = {0};
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        const Sizes one = sizes_of(&task);
        all.ranks += one.ranks, all.floats += one.floats, all.pairs += one.pairs, all.vectors += one.vectors;
    }
    return all;
}

/* Where the share of a thread begins: at a multiple of `unit`, unless some threads would then have nothing to do. */
INLINE int64_t border(int64_t whole, int64_t thread, int64_t unit) {
    const int64_t threads = number_of_threads();
    if (whole < unit * threads) unit = 1;
    return least(whole, (whole * thread / threads + unit - 1) / unit * unit);
}

/* For fewer tasks than would keep all threads busy: each thread does a share of all coefficients, then, when all of
 * them are there, a share of all columns. */
static void shared_tasks(const Call *c, const Sizes *all, float *room) {
    const int64_t thread = thread_number(), threads = number_of_threads();
    int64_t from = border(all->ranks, thread, 4), to = border(all->ranks, thread + 1, 4);
    float *h = room;
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        EACH_MEMBER(part, task.part) {
            const int64_t rank = part->row.rank;
            if (to > 0 && from < rank) {
                const Work w = work_of(c, &task, part, part);
                shrink_few(kind_of(&part->row, c->stored), task.height, &w, from > 0 ? from : 0, least(to, rank), h);
            }
            from -= rank, to -= rank, h += rank * task.height;
        }
    }
#pragma omp barrier
    const int64_t unit = all->pairs < SUMS / 2 * threads ? 1 : SUMS / 2; /* pairs of vectors of columns */
    int64_t first = all->vectors * thread / threads, end = all->vectors * (thread + 1) / threads;
    h = room;
    for (int64_t n = 0; n < c->tasks; n++) {
        const Task task = task_at(c, n);
        if (!task.height) continue;
        const Sizes one = sizes_of(&task);
        if (one.ranks && end > 0 && first < one.vectors) {
            const int64_t width = task.part->width, step = unit * one.ranks;
            from = first > 0 ? (first + step - 1) / step * unit * 2 * LANES : 0;
            to = end < one.vectors ? (end + step - 1) / step * unit * 2 * LANES : width;
            const float *low = h;
            if (from < least(to, width)) weigh_base(c, &task, from, least(to, width));
            EACH_MEMBER(part, task.part) {
                const Work w = work_of(c, &task, part, part);
                if (from < least(to, width))
                    expand_few(kind_of(&part->row, c->stored), task.height, &w, from, least(to, width), low);
                low += part->row.rank * task.height;
            }
        }
        first -= one.vectors, end -= one.vectors, h += one.floats;
    }
#pragma omp barrier
}

void lora_team(int64_t stored, const char *pool, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in,
               const float *bias, const Adapters *adapters, const uint16_t *rounded, float *room, int64_t floats) {
    const int64_t rows = adapters->rows, pieces = adapters->count * adapters->parts;
    int64_t block = TALL; /* rows of a task: fewer, where threads would be idle otherwise */
    while (block > ROWS && pieces * ((rows + block - 1) / block) < (block > 2 * FEW ? 8 : 4)) block /= 2;
    const int64_t blocks = (rows + block - 1) / block;
    const Call c = {stored % FORMS, stored >= FORMS && in >= LEAST_ROUNDED, rounded, pool, y, x, bias, y_stride,
                    x_stride, in, adapters->parts, adapters->segments, block, blocks, pieces * blocks};
    const int64_t threads = number_of_threads();
    if (threads > 1 && least(rows, block) <= FEW && c.tasks < LONELY * threads) {
        const Sizes all = sizes_of_all(&c);
        if (all.floats <= floats) {
            shared_tasks(&c, &all, room);
            return;
        }
    }
    whole_tasks(&c);
}

/* Whether there is enough to do for several threads. */
static int is_large(const Segment *segments, int64_t count, int64_t parts, int64_t rows, int64_t in) {
    if (count * parts * rows != 1 || !segments->count) return count * parts * rows > 1;
    const Task task = {segments->parts, segments->start, 1};
    return sizes_of(&task).ranks * (in + task.part->width) >= LARGE;
}

#define LORA_ADD(name, kind)                                                                              \
    void name(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t in, const char *pool, \
              const float *bias, const Segment *segments, int64_t count, int64_t parts, int64_t rows) {   \
        const Adapters adapters = {segments, count, parts, rows};                                         \
        float room[ROOM];                                                                                 \
        _Pragma("omp parallel if (is_large(segments, count, parts, rows, in))")                           \
            lora_team(kind, pool, y, y_stride, x, x_stride, in, bias, &adapters, NULL, room, ROOM);       \
    }

LORA_ADD(lora_add_float32, FLOAT32)
LORA_ADD(lora_add_bfloat16, BFLOAT16)
LORA_ADD(lora_add_rounded, BFLOAT16 + FORMS)
