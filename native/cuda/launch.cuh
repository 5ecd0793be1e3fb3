/* Launches, chained by programmatic dependent launch, and the ops that launch.
 *
 * A kernel starts while the one before it still runs. It must call pdl_wait() before it reads what that one wrote or
 * writes anything at all, and pdl_trigger() (after pdl_wait(), so that all earlier kernels are known to be complete)
 * as soon as the next one may start. Every kernel calls both: else the chain of waits has a hole. */
#ifndef COLIBRI_CUDA_LAUNCH_CUH
#define COLIBRI_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include <cstdio>

#include "../error.h"
#include "../ops.h"

/* The ops of ops.h. */
int cuda_upload(void *target, const void *source, int64_t bytes, void *chunks, int64_t chunk_bytes, int num_threads,
                void *stream);
#define OP(op, has) Op cuda_##op;
OPS(OP)
#undef OP

/* Ids, weights and lists from `router` and, where not NULL, its two biases; counted: in the totals of the layer. */
int cuda_route(Model *m, int num_tokens, int layer, const float *input, const float *router, const float *logit_bias,
               const float *correction, bool counted);

/* x[t] = (residual ? x[t] : 0) + multiplier * (the slots' outputs in order + mlp_out + bias), the last two where not
 * NULL. */
int cuda_add_up(Model *m, int num_tokens, int residual, bool has_slots, const float *mlp_out, const float *bias);

/* Launches on the model's stream; the kernel may start before the one before it has ended (see above). Every
 * `cluster_blocks` of the grid's x form a cluster; more than 1 from sm_90 on. */
template <typename... Parameters, typename... Arguments>
int launch_clusters(const Model *m, const char *name, void (*kernel)(Parameters...), dim3 grid, int cluster_blocks,
                    int threads, size_t shared_bytes, Arguments... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)cluster_blocks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = (cudaStream_t)m->stream;
    config.attrs = attributes;
    config.numAttrs = CUDA_ARCH < 90 ? 0 : cluster_blocks > 1 ? 2 : 1;
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 << 10)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (error == cudaSuccess && cluster_blocks > 8)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
    if (error == cudaSuccess) return 0;
    char layer[32] = "cuda";
    if (m->layer >= 0) snprintf(layer, sizeof layer, "layers.%d", m->layer);
    return fail("%s: %s_kernel=%s, expected a launch; see python -m colibri.run --doctor", layer, name,
                cudaGetErrorString(error));
}

template <typename... Parameters, typename... Arguments>
int launch(const Model *m, const char *name, void (*kernel)(Parameters...), dim3 grid, int threads,
           size_t shared_bytes, Arguments... arguments) {
    return launch_clusters(m, name, kernel, grid, 1, threads, shared_bytes, arguments...);
}

inline int num_multiprocessors() {
    static const int count = [] {
        int device = 0, value = 1;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
        return value;
    }();
    return count;
}

__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
