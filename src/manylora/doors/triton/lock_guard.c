/* Stands between Triton's stub and pthread_mutex_lock; see bls_worker.py. */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Of Python: the thread that has its lock, this thread, PyEval_SaveThread and PyEval_RestoreThread. */
static void *(*running)(void), *(*own)(void), *(*release)(void);
static void (*take)(void *thread);

void set_python(void *(*running_)(void), void *(*own_)(void), void *(*release_)(void), void (*take_)(void *))
{
    running = running_, own = own_, release = release_, take = take_;
}

/* As pthread_mutex_lock, but while it waits, other threads may have Python's lock. Nor does it wait for that
   with the mutex: some are shared with the server, for which a thread with Python's lock may be waiting. */
int lock_politely(pthread_mutex_t *mutex)
{
    void *thread = own();
    if (!thread || running() != thread)
        return pthread_mutex_lock(mutex);
    int failed;
    while ((failed = pthread_mutex_trylock(mutex)) == EBUSY) {
        release();
        failed = pthread_mutex_lock(mutex);
        if (!failed)
            pthread_mutex_unlock(mutex);
        take(thread);
        if (failed)
            return failed;
    }
    return failed;
}

/* closed: whether the loader has made the slot's page read-only. Else it writes to it, when a function is first called. */
static int replace(void **slot, int closed)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)slot & ~(page - 1);
    if (closed && mprotect((void *)start, page, PROT_READ | PROT_WRITE))
        return 0;
    __atomic_store_n(slot, (void *)lock_politely, __ATOMIC_SEQ_CST);
    if (closed)
        mprotect((void *)start, page, PROT_READ);
    return 1;
}

/* The first of all: the program itself. Its calls of other libraries go through slots, one for each function. */
static int visit(struct dl_phdr_info *info, size_t size, void *count)
{
    uintptr_t base = info->dlpi_addr, strings = 0, symbols = 0, closed = 0, open = 0, tables[2] = {0, 0};
    size_t sizes[2] = {0, 0};
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t start = base + part->p_vaddr, python = (uintptr_t)release;
        if (part->p_type == PT_LOAD && python >= start && python < start + part->p_memsz)
            return 1; /* Python is in it, and would be changed with it. */
        if (part->p_type == PT_GNU_RELRO) /* whole pages, as the loader closes them */
            closed = start & ~(page - 1), open = (start + part->p_memsz) & ~(page - 1);
        if (part->p_type != PT_DYNAMIC)
            continue;
        for (const ElfW(Dyn) *one = (void *)start; one->d_tag != DT_NULL; one++) {
            uintptr_t value = one->d_un.d_ptr, at = value < base ? value + base : value;
            if (one->d_tag == DT_STRTAB) strings = at;
            if (one->d_tag == DT_SYMTAB) symbols = at;
            if (one->d_tag == DT_JMPREL) tables[0] = at;
            if (one->d_tag == DT_PLTRELSZ) sizes[0] = value;
            if (one->d_tag == DT_RELA) tables[1] = at;
            if (one->d_tag == DT_RELASZ) sizes[1] = value;
        }
    }
    for (int i = 0; i < 2 && strings && symbols; i++) {
        const ElfW(Rela) *table = (void *)tables[i];
        for (size_t n = 0; table && n < sizes[i] / sizeof *table; n++) {
            const ElfW(Sym) *symbol = (const ElfW(Sym) *)symbols + ELF64_R_SYM(table[n].r_info);
            uintptr_t slot = base + table[n].r_offset;
            if (!strcmp((const char *)strings + symbol->st_name, "pthread_mutex_lock"))
                *(int *)count += replace((void **)slot, slot >= closed && slot < open);
        }
    }
    return 1;
}

/* How many slots of the program lead to lock_politely from now on. set_python comes first. */
int install(void)
{
    int count = 0;
    dl_iterate_phdr(visit, &count);
    return count;
}
