/* OpenMP for the kernels, on the runtime that torch has loaded, so that the process has only that one.
 *
 * GCC's code and clang's call functions of their own runtimes; neither torch nor the compiler's wheel has clang's. Those
 * that the kernels need are here, on top of three functions that the runtimes of GCC, LLVM and Intel all have. Until
 * `use_openmp` is called there is one thread.
 *
 * Barriers within a region are here as well, not in the runtime. GCC's keeps a team for each thread that ever began a
 * region. Where these have more threads than there are processors, as after an engine was loaded by another thread
 * than its own, it lets a waiting thread sleep after 2 microseconds. A step has hundreds of barriers, and to wake a
 * thread takes ten times as long. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

enum { SPINS = 1000 /* before a thread sleeps: some 20 to 50 microseconds */ };
enum { ARGUMENTS = 40, LOOPS = 8, DEPTH = 4, STATIC_CHUNKS = 33, MODIFIERS = 3 << 29 };
#define OURS __attribute__((visibility("hidden"))) /* another runtime in the process may have the same names */

#ifdef __clang__
typedef void (*Body)(int32_t *thread, int32_t *bound, ...);
#else
typedef void (*Body)(void *data);
#endif
typedef struct Place Place; /* in the source; not read */

static struct {
    void (*parallel)(void (*run)(void *), void *data, unsigned threads, unsigned flags);
    int (*number)(void), (*count)(void);
    int processors; /* of this process; more threads do not spin */
} runtime;

static int processors(void) {
#ifdef __linux__
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) ? INT32_MAX : CPU_COUNT(&allowed); /* more than a set holds */
#else
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

/* GOMP_parallel, omp_get_thread_num, omp_get_num_threads */
void use_openmp(void *parallel, void *number, void *count) {
    runtime.parallel = parallel, runtime.number = number, runtime.count = count;
    runtime.processors = processors();
}

/* A loop whose iterations threads take as they get to them. A region has many loops, one after another: each entry is
 * used again LOOPS loops later, once all threads have left it. */
typedef struct {
    _Alignas(64) _Atomic int64_t taken;
    _Atomic int64_t left, uses;
} Loop;

/* A barrier. */
typedef struct {
    _Alignas(64) _Atomic int32_t arrived, sleeping;
    _Alignas(64) _Atomic int32_t meetings; /* how often all threads have met */
} Meeting;

typedef struct {
    Body body;
    void *arguments[ARGUMENTS];
    Loop loops[LOOPS];
    Meeting meeting;
} Team;

typedef struct {
    Team *team;
    int number, count;
    int64_t begun;                     /* loops of this region */
    int64_t first, step, trips, chunk; /* of the loop this thread is in */
} Thread;

static _Thread_local Thread self = {.count = 1};

OURS int omp_get_thread_num(void) { return self.number; }
OURS int omp_get_num_threads(void) { return self.count; }
static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` takes no time */
#endif
}

/* Sleeps until *at is no longer `value`, or less. */
static void sleep_while(_Atomic int32_t *at, int32_t value) {
#ifdef __linux__
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL);
#else
    sched_yield();
#endif
}

static void wake_all(_Atomic int32_t *at) {
#ifdef __linux__
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT32_MAX);
#endif
}

static void meet(void) {
    if (self.count == 1) return;
    Meeting *const m = &self.team->meeting;
    const int32_t before = m->meetings;
    if (++m->arrived == self.count) {
        m->arrived = 0;
        m->meetings++;
        if (m->sleeping) wake_all(&m->meetings);
        return;
    }
    for (int i = self.count > runtime.processors ? SPINS : 0; i < SPINS; i++) {
        if (m->meetings != before) return;
        relax();
    }
    m->sleeping++; /* before `meetings` is read again: the last thread changes that and then reads this */
    while (m->meetings == before) sleep_while(&m->meetings, before);
    m->sleeping--;
}

static void enter(void) {
    Loop *const loop = &self.team->loops[self.begun % LOOPS];
    while (loop->uses != self.begun / LOOPS) sched_yield();
}

static int64_t take(int64_t count) {
    return (self.team->loops[self.begun % LOOPS].taken += count) - count;
}

static void leave(void) {
    Loop *const loop = &self.team->loops[self.begun++ % LOOPS];
    if (++loop->left < self.count) return;
    loop->taken = loop->left = 0;
    loop->uses++;
}

static void begin(int64_t first, int64_t last, int64_t step, int64_t chunk) {
    const int64_t distance = step > 0 ? last - first : first - last, size = step > 0 ? step : -step;
    self.first = first, self.step = step;
    self.trips = distance < 0 ? 0 : distance / size + 1;
    if (self.count > 1) {
        self.chunk = chunk < 1 ? 1 : chunk;
        enter();
    } else self.chunk = 0;
}

/* The next iterations of this thread, [*first, *last]; 0: there are none. */
static int next(int64_t *first, int64_t *last) {
    int64_t at = 0, end = self.trips;
    if (self.chunk) {
        at = take(self.chunk);
        end = at + self.chunk < self.trips ? at + self.chunk : self.trips;
    }
    if (at >= end) {
        if (self.chunk) leave();
        return 0;
    }
    if (!self.chunk) self.trips = 0;
    *first = self.first + at * self.step;
    *last = self.first + (end - 1) * self.step;
    return 1;
}

#ifdef __clang__

static void call(Team *team) {
    void **const a = team->arguments;
    int32_t thread = self.number, bound = 0;
    team->body(&thread, &bound, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
               a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28],
               a[29], a[30], a[31], a[32], a[33], a[34], a[35], a[36], a[37], a[38], a[39]);
}

#else

static void call(Team *team) { team->body(team->arguments[0]); }

#endif

/* A region's work, on each thread of the runtime's. */
static void run(void *data) {
    Team *const team = data;
    const Thread before = self;
    self = (Thread){.team = team, .count = 1};
    if (runtime.parallel && !before.team) self.number = runtime.number(), self.count = runtime.count();
    call(team);
    self = before;
}

static void begin_region(Team *team, unsigned threads) {
    if (runtime.parallel && !self.team) runtime.parallel(run, team, threads, 0);
    else run(team); /* a region inside another has one thread */
}

#ifdef __clang__

static _Thread_local Thread outer[DEPTH];
static _Thread_local int depth;
static _Thread_local unsigned wanted;

OURS int32_t __kmpc_global_thread_num(Place *place) { return self.number; }

OURS void __kmpc_fork_call(Place *place, int32_t count, Body body, ...) {
    Team team = {.body = body};
    va_list given;
    if (count > ARGUMENTS) __builtin_trap(); /* the region uses too many variables */
    va_start(given, body);
    for (int32_t i = 0; i < count; i++) team.arguments[i] = va_arg(given, void *);
    va_end(given);
    const unsigned threads = wanted;
    wanted = 0;
    begin_region(&team, threads);
}

OURS void __kmpc_push_num_threads(Place *place, int32_t thread, int32_t count) { wanted = count; }

OURS void __kmpc_serialized_parallel(Place *place, int32_t thread) {
    if (depth == DEPTH) __builtin_trap();
    outer[depth++] = self;
    self = (Thread){.count = 1};
}

OURS void __kmpc_end_serialized_parallel(Place *place, int32_t thread) { self = outer[--depth]; }
OURS int32_t __kmpc_masked(Place *place, int32_t thread, int32_t filter) { return self.number == filter; }
OURS void __kmpc_end_masked(Place *place, int32_t thread) {}
OURS int32_t __kmpc_master(Place *place, int32_t thread) { return self.number == 0; }
OURS void __kmpc_end_master(Place *place, int32_t thread) {}

OURS void __kmpc_barrier(Place *place, int32_t thread) { meet(); }

OURS int32_t __kmpc_single(Place *place, int32_t thread) {
    if (self.count == 1) return 1;
    enter();
    const int first = take(1) == 0;
    leave();
    return first;
}

OURS void __kmpc_end_single(Place *place, int32_t thread) {}

/* This thread's share of [*first, *last]; without a chunk it is in one piece. */
static void share(int32_t kind, int64_t *first, int64_t *last, int64_t *stride, int64_t step, int64_t chunk) {
    const int64_t count = self.count, number = self.number;
    const int64_t trips = (*last - *first) / step + 1;
    if ((step > 0 ? *first > *last : *first < *last)) return;
    if ((kind & ~MODIFIERS) == STATIC_CHUNKS && chunk > 0) {
        *stride = chunk * step * count;
        *first += chunk * step * number;
        *last = *first + (chunk - 1) * step;
        return;
    }
    const int64_t each = trips / count, more = trips % count;
    *stride = trips * step;
    *first += (number * each + (number < more ? number : more)) * step;
    *last = *first + (each + (number < more) - 1) * step;
}

OURS void __kmpc_for_static_fini(Place *place, int32_t thread) {}

/* For loops whose counters have 4 and 8 bytes. None needs to know which thread has the last iteration. */
#define COUNTERS(NAME, TYPE, STEP)                                                                                      \
    OURS void __kmpc_for_static_init_##NAME(Place *place, int32_t thread, int32_t kind, int32_t *is_last, TYPE *first,  \
                                            TYPE *last, STEP *stride, STEP step, STEP chunk) {                          \
        int64_t from = *first, to = *last, by = *stride;                                                                \
        share(kind, &from, &to, &by, step, chunk);                                                                      \
        *first = (TYPE)from, *last = (TYPE)to, *stride = (STEP)by;                                                      \
    }                                                                                                                   \
    OURS void __kmpc_dispatch_init_##NAME(Place *place, int32_t thread, int32_t kind, TYPE first, TYPE last, STEP step, \
                                          STEP chunk) {                                                                 \
        begin(first, last, step, chunk);                                                                                \
    }                                                                                                                   \
    OURS int32_t __kmpc_dispatch_next_##NAME(Place *place, int32_t thread, int32_t *is_last, TYPE *first, TYPE *last,   \
                                             STEP *stride) {                                                            \
        int64_t from, to;                                                                                               \
        if (!next(&from, &to)) return 0;                                                                                \
        *first = (TYPE)from, *last = (TYPE)to, *stride = (STEP)self.step;                                               \
        return 1;                                                                                                       \
    }
COUNTERS(4, int32_t, int32_t)
COUNTERS(4u, uint32_t, int32_t)
COUNTERS(8, int64_t, int64_t)
COUNTERS(8u, uint64_t, int64_t)

OURS void __kmpc_dispatch_deinit(Place *place, int32_t thread) {}

#else

OURS void GOMP_parallel(Body body, void *data, unsigned threads, unsigned flags) {
    Team team = {.body = body, .arguments = {data}};
    if (threads == 1) run(&(Team){.body = body, .arguments = {data}});
    else begin_region(&team, threads);
}

OURS void GOMP_barrier(void) { meet(); }

/* [*first, *end) are the next iterations. */
#define LOOPS_OF(NAME)                                                                                            \
    OURS bool GOMP_loop_##NAME##_next(long *first, long *end) {                                                   \
        int64_t from, to;                                                                                         \
        if (!next(&from, &to)) return false;                                                                      \
        *first = from, *end = to + self.step;                                                                     \
        return true;                                                                                              \
    }                                                                                                             \
    OURS bool GOMP_loop_##NAME##_start(long from, long to, long step, long chunk, long *first, long *end) {       \
        begin(from, step > 0 ? to - 1 : to + 1, step, chunk);                                                     \
        return GOMP_loop_##NAME##_next(first, end);                                                               \
    }
LOOPS_OF(dynamic)
LOOPS_OF(nonmonotonic_dynamic) /* since GCC 9 */

OURS void GOMP_loop_end(void) { meet(); }

#endif
