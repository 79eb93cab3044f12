/* Preloaded into tritonserver, between its HTTP and gRPC front ends and its core; see installation.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_ARGUMENT = 3, BYTES = 13, DATA_ERROR = -3 };
enum { MOST_PARTS = 1024, MOST_DIMENSIONS = 16, MOST_STRINGS = 65536, MOST_ID = 1024, MOST_EXPANSION = 32 };
static const unsigned long FREE_EXPANSION = 64ul << 20;

static __thread int parts; /* of the request that this thread reads; a request is read by one thread */

static void *refused(const char *text)
{
    void *(*make)(int, const char *) = dlsym(RTLD_DEFAULT, "TRITONSERVER_ErrorNew");
    return make(INVALID_ARGUMENT, text);
}

/* Defines `name`, which first evaluates `refusal`, then calls the core's own function. */
#define GUARD(name, parameters, arguments, refusal)           \
    void *name parameters                                     \
    {                                                         \
        static void *(*own) parameters;                       \
        void *error = refusal;                                \
        if (error)                                            \
            return error;                                     \
        if (!own)                                             \
            own = dlsym(RTLD_NEXT, #name);                    \
        return own arguments;                                 \
    }

static void *count(void)
{
    char text[96];
    if (++parts <= MOST_PARTS)
        return NULL;
    snprintf(text, sizeof text, "a request has at most %d inputs, outputs and parameters", MOST_PARTS);
    return refused(text);
}

static void *check_shape(const char *input, int type, const int64_t *shape, uint64_t dimensions)
{
    char text[192];
    int64_t strings = type == BYTES;
    if (dimensions > MOST_DIMENSIONS) {
        snprintf(text, sizeof text, "input '%.64s' has %llu dimensions, of at most %d", input,
                 (unsigned long long)dimensions, MOST_DIMENSIONS);
        return refused(text);
    }
    for (uint64_t i = 0; i < dimensions; i++)
        if (__builtin_mul_overflow(strings, shape[i], &strings))
            strings = INT64_MAX;
    if (strings > MOST_STRINGS) {
        snprintf(text, sizeof text, "input '%.64s' has %lld strings, of at most %d", input, (long long)strings,
                 MOST_STRINGS);
        return refused(text);
    }
    return count();
}

static void *check_id(const char *id)
{
    char text[96];
    if (!id || strnlen(id, MOST_ID + 1) <= MOST_ID)
        return NULL;
    snprintf(text, sizeof text, "the id of a request has at most %d bytes", MOST_ID);
    return refused(text);
}

GUARD(TRITONSERVER_InferenceRequestNew, (void **request, void *server, const char *model, int64_t version),
      (request, server, model, version), (parts = 0, NULL))
GUARD(TRITONSERVER_InferenceRequestSetId, (void *request, const char *id), (request, id), check_id(id))
GUARD(TRITONSERVER_InferenceRequestAddInput,
      (void *request, const char *name, int type, const int64_t *shape, uint64_t dimensions),
      (request, name, type, shape, dimensions), check_shape(name, type, shape, dimensions))
GUARD(TRITONSERVER_InferenceRequestAddRequestedOutput, (void *request, const char *name), (request, name), count())
GUARD(TRITONSERVER_InferenceRequestSetStringParameter, (void *request, const char *key, const char *value),
      (request, key, value), count())
GUARD(TRITONSERVER_InferenceRequestSetIntParameter, (void *request, const char *key, int64_t value),
      (request, key, value), count())
GUARD(TRITONSERVER_InferenceRequestSetBoolParameter, (void *request, const char *key, _Bool value),
      (request, key, value), count())
GUARD(TRITONSERVER_InferenceRequestSetDoubleParameter, (void *request, const char *key, double value),
      (request, key, value), count())
/* The front ends call it for outputs with the parameter 'classification', and for nothing else. */
GUARD(TRITONSERVER_ServerModelBatchProperties,
      (void *server, const char *model, int64_t version, uint32_t *flags, void **data),
      (server, model, version, flags, data),
      refused("outputs cannot be classified: leave out their parameter 'classification'"))

/* The first fields of zlib's z_stream. */
struct stream {
    const void *in;
    unsigned in_left;
    unsigned long read;
    void *out;
    unsigned out_left;
    unsigned long written;
};

/* gRPC decompresses with it, and limits neither the size nor the ratio. */
int inflate(struct stream *stream, int flush)
{
    static int (*own)(struct stream *, int);
    if (!own)
        own = (int (*)(struct stream *, int))dlsym(RTLD_NEXT, "inflate");
    int result = own(stream, flush);
    if (stream && stream->written > FREE_EXPANSION && stream->written / MOST_EXPANSION > stream->read)
        return DATA_ERROR;
    return result;
}

/* It is for tritonserver alone: the processes of its models start without it. */
__attribute__((constructor)) static void leave_environment(void)
{
    const char *preloaded = getenv("LD_PRELOAD");
    if (!preloaded || !dlsym(RTLD_DEFAULT, "TRITONSERVER_ServerNew"))
        return;
    const char *others = strchr(preloaded, ':'); /* ours is the first */
    if (others)
        setenv("LD_PRELOAD", others + 1, 1);
    else
        unsetenv("LD_PRELOAD");
}
