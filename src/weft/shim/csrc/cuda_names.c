/* The names by which the program looked up its kernels. Drivers before CUDA 12.3 cannot return them later. */
#define _GNU_SOURCE
#include "cuda_shim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KNOWN = 1 << 18 };

static weft_map names; /* by handle */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void note(void *handle, const char *name) {
    uint64_t key = (uint64_t)(uintptr_t)handle;
    if (!handle || !name || weft_cuda()->cuFuncGetName || !weft_attach(WEFT_API_CUDA))
        return;
    pthread_mutex_lock(&lock);
    char *before = weft_map_find(&names, key, 0);
    char *copy = (before && strcmp(before, name) == 0) || names.live >= KNOWN ? NULL : strndup(name, WEFT_NAME - 1);
    if (copy && !weft_map_put(&names, key, 0, copy))
        free(copy);
    else if (copy)
        free(before); /* safe: read only under the lock */
    pthread_mutex_unlock(&lock);
}

bool weft_name_noted(void *handle, char *out, size_t size) {
    pthread_mutex_lock(&lock);
    const char *name = weft_map_find(&names, (uint64_t)(uintptr_t)handle, 0);
    if (name)
        snprintf(out, size, "%s", name);
    pthread_mutex_unlock(&lock);
    return name != NULL;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
    CUresult result = REAL(cuModuleGetFunction)(f, module, name);
    if (result == CUDA_SUCCESS && f)
        note(*f, name);
    return result;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    CUresult result = REAL(cuLibraryGetKernel)(kernel, library, name);
    if (result == CUDA_SUCCESS && kernel)
        note(*kernel, name);
    return result;
}

CUresult cuKernelGetFunction(CUfunction *f, CUkernel kernel) {
    char name[WEFT_NAME];
    CUresult result = REAL(cuKernelGetFunction)(f, kernel);
    if (result == CUDA_SUCCESS && f && !weft_cuda()->cuFuncGetName && weft_name_noted(kernel, name, sizeof name))
        note(*f, name);
    return result;
}

void weft_forget_names(void) {
    pthread_mutex_init(&lock, NULL);
    weft_map_clear(&names);
}
