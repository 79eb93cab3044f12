/* Stands between Triton's binding and NumPy's PyArray_NewFromDescr; see shape_guard.py. */
#include <stdint.h>

enum { MOST_DIMENSIONS = 16 };
static const int64_t MOST_ELEMENTS = (int64_t)1 << 59;
static const int64_t NOTHING[MOST_DIMENSIONS];

typedef void *(*Make)(void *kind, void *descr, int dims, const int64_t *shape, const int64_t *strides, void *data,
                      int flags, void *parent);
static Make numpys_own;

void set_numpys_own(Make function) { numpys_own = function; }

static int is_possible(int dims, const int64_t *shape)
{
    int64_t elements = 1;
    if (dims >= MOST_DIMENSIONS)
        return 0;
    for (int i = 0; i < dims; i++)
        if (shape[i] < 0 || (shape[i] && __builtin_mul_overflow(elements, shape[i], &elements)))
            return 0;
    return elements <= MOST_ELEMENTS;
}

void *checked(void *kind, void *descr, int dims, const int64_t *shape, const int64_t *strides, void *data, int flags,
              void *parent)
{
    if (!is_possible(dims, shape))
        return numpys_own(kind, descr, MOST_DIMENSIONS, NOTHING, 0, data, flags, parent);
    return numpys_own(kind, descr, dims, shape, strides, data, flags, parent);
}
