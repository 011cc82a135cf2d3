/* Intercepts dlsym. The CUDA runtime (including its copies inside cuBLAS, cuDNN and NCCL) and Triton find the driver
 * through it; some programs find NCCL through it. A lookup of a symbol that weft does not hook jumps to the next dlsym,
 * which therefore still sees its true caller; RTLD_NEXT depends on that. */
#define _GNU_SOURCE
#include "cuda_shim.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>
#include <sys/auxv.h>

typedef void *(*dlsym_fn)(void *, const char *);

/* There are two: the libc's, which resolves RTLD_NEXT from the shim's position, and the next one after the shim, which
 * belongs to another tool if that also intercepts dlsym. */
static dlsym_fn libc_dlsym;
__attribute__((visibility("hidden"))) dlsym_fn weft_next_dlsym;

/* Results of the filter that are not one of our functions. */
#define ASK_NEXT ((void *)0)
#define FOUND_NOTHING ((void *)1)

/* dlsym is called before anything else is initialized, even during the sanitizers' own start-up. */
#define EARLY __attribute__((no_sanitize_address, no_sanitize_thread, no_sanitize_undefined))

extern void *dlvsym(void *, const char *, const char *) __attribute__((weak)); /* musl has none */

EARLY static void find_dlsym(void) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5", "GLIBC_2.27",
                                           "GLIBC_2.36", "GLIBC_2.2",  "GLIBC_2.0",   NULL};
    for (int i = 0; dlvsym && versions[i] && !libc_dlsym; i++)
        libc_dlsym = (dlsym_fn)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (!libc_dlsym)
        libc_dlsym = (dlsym_fn)weft_elf_symbol("dlsym");
    dlsym_fn next = libc_dlsym ? (dlsym_fn)libc_dlsym(RTLD_NEXT, "dlsym") : NULL;
    weft_next_dlsym = next ? next : libc_dlsym;
}

void *weft_real_symbol(void *handle, const char *name) {
    if (UNLIKELY(!weft_next_dlsym))
        find_dlsym();
    return weft_next_dlsym ? weft_next_dlsym(handle, name) : NULL;
}

void *weft_next_symbol(const char *name) {
    if (UNLIKELY(!weft_next_dlsym))
        find_dlsym();
    return libc_dlsym ? libc_dlsym(RTLD_NEXT, name) : NULL;
}

void weft_pin_library(void *function) {
    Dl_info info;
    if (dladdr(function, &info) && info.dli_fname)
        dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

typedef struct {
    const char *const *words;
    weft_files *found;
} file_search;

static int note_file(struct dl_phdr_info *info, size_t size, void *data) {
    file_search *s = data;
    weft_files *found = s->found;
    const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    (void)size;
    for (const char *const *word = s->words; name && *word; word++)
        if (strstr(name, *word) && strlen(info->dlpi_name) < sizeof *found->paths) {
            strcpy(found->paths[found->count++], info->dlpi_name);
            break;
        }
    return found->count == (int)(sizeof found->paths / sizeof *found->paths);
}

/* The loader holds its lock while it iterates, so the callback only collects names and opens nothing. */
void weft_loaded_files(const char *const *words, weft_files *found) {
    file_search s = {words, found};
    found->count = 0;
    dl_iterate_phdr(note_file, &s);
}

/* The program may call dlerror next: it must get the error of its own lookup, not of one of ours. */
static void *found_nothing(const char *name) {
    weft_next_symbol(name);
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
        return ASK_NEXT;
    if (real == ours) { /* a global lookup finds ours first: is there a driver behind it? */
        bool driver = cuda ? weft_cuda_driver(name) : weft_hip_driver(name);
        return driver ? found(ours) : found_nothing(name);
    }
    if (!weft_enabled())
        return ASK_NEXT;
    cuda ? weft_cuda_found(name, real) : weft_hip_found(name, real);
    return ours;
}

static void *substitute_nccl(void *handle, const char *name) {
    void *ours, *real = weft_nccl_own(name, &ours) ? weft_real_symbol(handle, name) : NULL;
    if (!real)
        return ASK_NEXT;
    if (real == ours)
        return weft_nccl_library(name) ? found(ours) : found_nothing(name);
    return weft_enabled() ? found(weft_nccl_substitute(name, real)) : ASK_NEXT;
}

/* Programs that find cuBLAS with dlsym get its own functions. A global lookup finds ours first; it must find nothing if
 * there is no cuBLAS. */
static void *substitute_cublas(void *handle, const char *name) {
    void *ours = weft_cublas_own(name);
    if (!ours || weft_real_symbol(handle, name) != ours)
        return ASK_NEXT;
    return weft_cublas_library(name) ? found(ours) : found_nothing(name);
}

static bool in_program(void *caller) {
    Dl_info of_caller, of_program;
    return dladdr(caller, &of_caller) && dladdr((void *)getauxval(AT_ENTRY), &of_program) &&
           of_caller.dli_fbase == of_program.dli_fbase;
}

/* Only the program itself comes before the shim: what is next for it without the shim is what is next for the shim. */
static void *next_for(void *caller, const char *name) {
    void *nccl;
    bool ours = weft_cuda_own(name) || weft_cublas_own(name) || weft_hip_own(name) || weft_nccl_own(name, &nccl);
    return ours && in_program(caller) && !weft_next_symbol(name) ? FOUND_NOTHING : ASK_NEXT;
}

/* Our function, if `name` is one that we intercept and `handle` has it. */
EARLY __attribute__((visibility("hidden"), used)) void *weft_dlsym_filter(void *handle, const char *name,
                                                                          void *caller) {
    if (UNLIKELY(!weft_next_dlsym))
        find_dlsym();
    bool cuda = name && name[0] == 'c' && name[1] == 'u', hip = name && name[0] == 'h' && name[1] == 'i';
    bool nccl = name && name[0] == 'n' && name[1] == 'c' && name[2] == 'c';
    if (LIKELY(!cuda && !hip && !nccl))
        return ASK_NEXT;
    if (handle == RTLD_NEXT)
        return next_for(caller, name);
    if (cuda && name[2] == 'b')
        return substitute_cublas(handle, name);
    return nccl ? substitute_nccl(handle, name) : substitute(handle, name, cuda);
}

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    movq (%rsp), %rdx\n"
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
        "    jmp *weft_next_dlsym(%rip)\n"
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
        "    mov x2, x30\n"
        "    bl weft_dlsym_filter\n"
        "    mov x9, x0\n"
        "    ldp x0, x1, [sp]\n"
        "    ldr x30, [sp, #16]\n"
        "    add sp, sp, #32\n"
        "    .cfi_adjust_cfa_offset -32\n"
        "    .cfi_restore 30\n"
        "    cbnz x9, 1f\n"
        "    adrp x10, weft_next_dlsym\n"
        "    ldr x10, [x10, :lo12:weft_next_dlsym]\n"
        "    br x10\n"
        "1:  cmp x9, #1\n"
        "    csel x0, xzr, x9, eq\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#else
EXPORT void *dlsym(void *restrict handle, const char *restrict name) {
    void *ours = weft_dlsym_filter(handle, name, __builtin_return_address(0));
    return ours == FOUND_NOTHING ? NULL : ours ? ours : weft_next_dlsym(handle, name);
}
#endif
