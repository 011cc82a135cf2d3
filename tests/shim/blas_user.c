/* A library that is linked to cuBLAS, as torch is. */
#include "cuda_api.h"

#define API __attribute__((visibility("default")))
#define GEMM(name, args, ...) extern int name(void *h, __VA_ARGS__);
#include "cublas_hooks.def"
extern int cublasCreate_v2(void **);
extern int cublasSetStream_v2(void *, CUstream);
extern int cublasSetSmCountTarget(void *, int) __attribute__((weak));
extern int cublasLtMatmulDescCreate(void **, int, int);
extern int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, int *, int *);
extern int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *,
                          const void *, void *, void *, void *, const int *, void *, size_t, CUstream);

static void *handle;

API void *user_handle(void *stream) {
    if (!handle)
        cublasCreate_v2(&handle);
    cublasSetStream_v2(handle, stream);
    return handle;
}
API int user_gemm(void *stream) {
    return cublasGemmEx(user_handle(stream), 1, 0, 2, 3, 4, (void *)5, (void *)6, 7, 8, (void *)9, 10, 11, (void *)12,
                        (void *)13, 14, 15, 16, 17);
}
API int user_sgemm(void *stream) {
    return cublasSgemm_v2(user_handle(stream), 1, 0, 2, 3, 4, (void *)5, (void *)6, 8, (void *)9, 11, (void *)12, (void *)13, 14);
}

/* `user_sgemm` called from 32 call sites. */
#define PLACE                                                                                                          \
    if (at-- == 0)                                                                                                     \
        result = cublasSgemm_v2(user_handle(stream), 1, 0, 2, 3, 4, (void *)5, (void *)6, 8, (void *)9, 11,            \
                                (void *)12, (void *)13, 14);
#define PLACES_8 PLACE PLACE PLACE PLACE PLACE PLACE PLACE PLACE
__attribute__((optimize("no-crossjumping"), noinline)) static int at_place(void *stream, int at) {
    int result = 99;
    PLACES_8 PLACES_8 PLACES_8 PLACES_8 return result;
}
API int user_places(void *stream, int places) {
    int failed = 0;
    for (int i = 0; i < 3200; i++)
        failed |= at_place(stream, i % places);
    return failed;
}
API int user_target(int sms) { return cublasSetSmCountTarget(handle, sms); }

/* `choose`: 0 by the call itself, 1 by the heuristic just before, 2 once for all calls */
API int user_lt(void *stream, int choose) {
    static int kept, found;
    static void *desc;
    int algo = 0;
    if (!desc)
        cublasLtMatmulDescCreate(&desc, 0, 0);
    if (choose == 0)
        return cublasLtMatmul(0, desc, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, stream);
    if (choose == 1) {
        if (cublasLtMatmulAlgoGetHeuristic(0, desc, 0, 0, 0, 0, 0, 1, &algo, &found) || !found)
            return 98;
        return cublasLtMatmul(0, desc, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, &algo, 0, 0, stream);
    }
    return cublasLtMatmul(0, desc, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, &kept, 0, 0, stream);
}
