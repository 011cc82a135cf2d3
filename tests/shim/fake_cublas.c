/* A libcublas with cuBLASLt for tests: it notes the SM target of each GEMM, and launches one kernel. With FAKE_OLD it
 * has no SM target, as before CUDA 11.4. */
#include "cuda_api.h"

#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { LOG = 256 };

typedef struct {
    CUstream stream;
    int target;
} handle;

typedef struct {
    int target;
} desc;

extern void *fake_kernel(const char *, int, int, int);
extern CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **, void **);

static int targets[LOG], count, refuse_target, refuse_gemm;
static CUfunction kernel;

API int fake_gemms(void) { return count; }
API int fake_gemm_target(int i) { return targets[i]; }
API int fake_handle_target(void *h) { return ((handle *)h)->target; }
API void fake_refuse(int target, int gemm) {
    refuse_target = target;
    refuse_gemm = gemm;
}

static int run(int target, CUstream stream) {
    if (target && refuse_gemm)
        return 7;
    if (!kernel)
        kernel = fake_kernel("nvjet_hsh_256x128", 128, 0, 0);
    targets[count++ % LOG] = target;
    return cuLaunchKernel(kernel, 132, 1, 1, 384, 1, 1, 0, stream, NULL, NULL) ? 14 : 0;
}

API int cublasCreate_v2(void **h) { return *h = calloc(1, sizeof(handle)), 0; }
API int cublasSetStream_v2(void *h, CUstream stream) { return ((handle *)h)->stream = stream, 0; }
API int cublasGetStream_v2(void *h, CUstream *stream) { return *stream = ((handle *)h)->stream, 0; }
#ifndef FAKE_OLD
API int cublasSetSmCountTarget(void *h, int target) {
    if (target && refuse_target)
        return 7;
    return ((handle *)h)->target = target, 0;
}
API int cublasGetSmCountTarget(void *h, int *target) { return *target = ((handle *)h)->target, 0; }
#endif

#define GEMM(name, args, ...) API int name(void *h, __VA_ARGS__);
#include "cublas_hooks.def"

int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at, int lda,
                 const void *b, int bt, int ldb, const void *beta, void *c, int ct, int ldc, int compute, int algo) {
    if (ta != 1 || tb != 0 || m != 2 || n != 3 || k != 4 || alpha != (void *)5 || a != (void *)6 || at != 7 || lda != 8 ||
        b != (void *)9 || bt != 10 || ldb != 11 || beta != (void *)12 || c != (void *)13 || ct != 14 || ldc != 15 ||
        compute != 16 || algo != 17)
        return 99; /* arguments must arrive unchanged */
    return run(((handle *)h)->target, ((handle *)h)->stream);
}

int cublasSgemm_v2(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b,
                   int ldb, const void *beta, void *c, int ldc) {
    (void)ta, (void)tb, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)beta, (void)c;
    return ldc == 14 ? run(((handle *)h)->target, ((handle *)h)->stream) : 99;
}

/* --- cuBLASLt -------------------------------------------------------------------------------------------------------- */

API int cublasLtMatmulDescCreate(void **d, int compute, int scale) {
    return (void)compute, (void)scale, *d = calloc(1, sizeof(desc)), 0;
}
#ifndef FAKE_OLD
API int cublasLtMatmulDescSetAttribute(void *d, int attribute, const void *value, size_t size) {
    if (attribute != 15 || size != sizeof(int))
        return 7;
    return memcpy(&((desc *)d)->target, value, size), 0;
}
API int cublasLtMatmulDescGetAttribute(void *d, int attribute, void *value, size_t size, size_t *written) {
    if (attribute != 15 || size != sizeof(int))
        return 7;
    return memcpy(value, &((desc *)d)->target, size), *written = size, 0;
}
#endif

/* An algorithm holds the SM target that it was chosen for. */
API int cublasLtMatmulAlgoGetHeuristic(void *lt, void *d, void *a, void *b, void *c, void *dd, void *preference, int wanted,
                                       int *results, int *found) {
    (void)lt, (void)a, (void)b, (void)c, (void)dd, (void)preference;
    *results = ((desc *)d)->target;
    return *found = wanted > 0, 0;
}

API int cublasLtMatmul(void *lt, void *d, const void *alpha, const void *a, void *ad, const void *b, void *bd,
                       const void *beta, const void *c, void *cd, void *out, void *dd, const int *algo, void *workspace,
                       size_t size, CUstream stream) {
    (void)lt, (void)alpha, (void)a, (void)ad, (void)b, (void)bd, (void)beta, (void)c, (void)cd, (void)out, (void)dd;
    (void)workspace, (void)size;
    if (algo && *algo != ((desc *)d)->target)
        return 8; /* run with another SM target than it was chosen for */
    return run(((desc *)d)->target, stream);
}
