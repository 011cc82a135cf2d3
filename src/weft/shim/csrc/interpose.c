/* dlsym, stood in front of: the CUDA runtime (also the copies inside cuBLAS, cuDNN and NCCL) finds the driver
 * through it, and so does Triton; some programs find NCCL through it. Everything that weft does not hook goes
 * straight on to the libc's dlsym by a jump, so that dlsym still sees its true caller, which RTLD_NEXT depends on. */
#define _GNU_SOURCE
#include "cuda_shim.h"

#include <dlfcn.h>
#include <string.h>

typedef void *(*dlsym_fn)(void *, const char *);

__attribute__((visibility("hidden"))) dlsym_fn weft_libc_dlsym;

/* Answers of the filter besides a function of ours. */
#define ASK_LIBC ((void *)0)
#define FOUND_NOTHING ((void *)1)

/* dlsym is called before anything else is ready, the sanitizers' own start-up included. */
#define EARLY __attribute__((no_sanitize_address, no_sanitize_thread, no_sanitize_undefined))

EARLY static void find_libc_dlsym(void) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5", NULL};
    for (int i = 0; versions[i] && !weft_libc_dlsym; i++)
        weft_libc_dlsym = (dlsym_fn)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
}

void *weft_real_symbol(void *handle, const char *name) {
    if (UNLIKELY(!weft_libc_dlsym))
        find_libc_dlsym();
    return weft_libc_dlsym ? weft_libc_dlsym(handle, name) : NULL;
}

/* The program may ask dlerror next: it must hear of its own question, and of none of ours. */
static void *found_nothing(const char *name) {
    weft_real_symbol(RTLD_NEXT, name);
    return FOUND_NOTHING;
}

static void *found(void *ours) {
    dlerror();
    return ours;
}

static void *substitute(void *handle, const char *name, bool cuda) {
    void *ours = cuda ? weft_cuda_own(name) : weft_hip_own(name);
    void *real = ours ? weft_real_symbol(handle, name) : NULL;
    if (!real)
        return ASK_LIBC;
    if (real == ours) { /* asked of the whole program, which meets ours first: is there a driver behind it? */
        bool driver = cuda ? weft_cuda_driver(name) : weft_hip_driver(name);
        return driver ? found(ours) : found_nothing(name);
    }
    if (!weft_enabled())
        return ASK_LIBC;
    cuda ? weft_cuda_found(name, real) : weft_hip_found(name, real);
    return ours;
}

static void *substitute_nccl(void *handle, const char *name) {
    void *ours, *real = weft_nccl_own(name, &ours) ? weft_real_symbol(handle, name) : NULL;
    if (!real)
        return ASK_LIBC;
    if (real == ours)
        return weft_nccl_library(name) ? found(ours) : found_nothing(name);
    return weft_enabled() ? found(weft_nccl_substitute(name, real)) : ASK_LIBC;
}

/* Our function where `name` is one that we stand in front of and `handle` has it. */
EARLY __attribute__((visibility("hidden"), used)) void *weft_dlsym_filter(void *handle, const char *name) {
    if (UNLIKELY(!weft_libc_dlsym))
        find_libc_dlsym();
    bool cuda = name && name[0] == 'c' && name[1] == 'u', hip = name && name[0] == 'h' && name[1] == 'i';
    bool nccl = name && name[0] == 'n' && name[1] == 'c' && name[2] == 'c';
    if (LIKELY(!cuda && !hip && !nccl) || handle == RTLD_NEXT)
        return ASK_LIBC;
    return nccl ? substitute_nccl(handle, name) : substitute(handle, name, cuda);
}

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call weft_dlsym_filter\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    testq %rax, %rax\n"
        "    jne 1f\n"
        "    jmp *weft_libc_dlsym(%rip)\n"
        "1:  cmpq $1, %rax\n"
        "    jne 2f\n"
        "    xorl %eax, %eax\n"
        "2:  ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, %function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    stp x0, x1, [sp, #-32]!\n"
        "    .cfi_adjust_cfa_offset 32\n"
        "    str x30, [sp, #16]\n"
        "    .cfi_rel_offset 30, 16\n"
        "    bl weft_dlsym_filter\n"
        "    mov x9, x0\n"
        "    ldp x0, x1, [sp]\n"
        "    ldr x30, [sp, #16]\n"
        "    add sp, sp, #32\n"
        "    .cfi_adjust_cfa_offset -32\n"
        "    .cfi_restore 30\n"
        "    cbnz x9, 1f\n"
        "    adrp x10, weft_libc_dlsym\n"
        "    ldr x10, [x10, :lo12:weft_libc_dlsym]\n"
        "    br x10\n"
        "1:  cmp x9, #1\n"
        "    csel x0, xzr, x9, eq\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#else
EXPORT void *dlsym(void *restrict handle, const char *restrict name) {
    void *ours = weft_dlsym_filter(handle, name);
    return ours == FOUND_NOTHING ? NULL : ours ? ours : weft_libc_dlsym(handle, name);
}
#endif
