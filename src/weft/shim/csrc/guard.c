/* Protects the memory mapped from files in the job's folder. If such a file is truncated, or lost with a network file
 * system, an access raises SIGBUS, which would end the program. The handler maps a zero page instead: weft then has no
 * policy, its counts are lost, and the program continues as it would without weft.
 *
 * The handler is installed only if the program has none; a handler that the program sets later replaces it. */
#define _GNU_SOURCE
#include "weft.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANGES = 16 };

static struct {
    _Atomic uintptr_t start, end;
} ranges[RANGES];
static _Atomic uint32_t range_count;
static _Atomic uintptr_t page_size;

static bool guarded(uintptr_t address) {
    for (int i = 0; i < RANGES; i++)
        if (address >= atomic_load(&ranges[i].start) && address < atomic_load(&ranges[i].end))
            return true;
    return false;
}

static bool replace_page(uintptr_t address) {
    uintptr_t size = atomic_load(&page_size);
    void *page = (void *)(address / size * size);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap(page, size, PROT_READ | PROT_WRITE, flags, -1, 0) == page;
}

/* Any other bus error gets the default action: a fault recurs when the handler returns, a sent signal is re-raised. */
static void on_bus_error(int number, siginfo_t *info, void *context) {
    int before = errno;
    (void)context;
    bool fault = info->si_code > 0; /* otherwise a process sent the signal */
    if (!fault || !guarded((uintptr_t)info->si_addr) || !replace_page((uintptr_t)info->si_addr)) {
        signal(number, SIG_DFL);
        if (!fault)
            raise(number);
    }
    errno = before;
}

static void handle_bus_errors(void) {
    struct sigaction now, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL)
        sigaction(SIGBUS, &ours, NULL);
}

EXPORT void weft_shim_guard(void *memory, size_t size) {
    uint32_t place = atomic_fetch_add(&range_count, 1) % RANGES;
    atomic_store(&page_size, (uintptr_t)sysconf(_SC_PAGESIZE));
    atomic_store(&ranges[place].end, 0);
    atomic_store(&ranges[place].start, (uintptr_t)memory);
    atomic_store(&ranges[place].end, (uintptr_t)memory + size);
    handle_bus_errors();
}
