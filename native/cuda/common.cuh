/* What the CUDA ops share: launches chained by programmatic dependent launch, conversions, warp sums, the
 * asynchronous copies and the matrix instruction, the parts of the scratch block, and the declaration of every op.
 *
 * A kernel starts while the one before it still runs. It must call pdl_wait() before it reads what that one wrote or
 * writes anything at all, and pdl_trigger() (after pdl_wait(), so that all earlier kernels are known to be complete)
 * as soon as the next one may start. Every kernel calls both: else the chain of waits has a hole. */
#ifndef COLIBRI_CUDA_COMMON_CUH
#define COLIBRI_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "../error.h"
#include "../ops.h"

static_assert(EXPERT_FORMAT != DTYPE_F32, "CUDA runs f16 and bf16 weights; convert the model with one of these dtypes");
static_assert(EXPERT_FORMAT == DENSE_FORMAT, "CUDA runs weights of one dtype; convert the model with --dtype");
typedef uint16_t weight_t; /* an element of a panel: the bits of an f16 or bf16 */

/* The ops of ops.h. */
int cuda_upload(void *target, const void *source, int64_t bytes, void *chunks, int64_t chunk_bytes, int num_threads,
                void *stream);
#define OP(op, has) Op cuda_##op;
OPS(OP)
#undef OP

/* q_b and kv_b of ATTENTION_LATENT: from the latents of qkv to q and kv. */
int cuda_latent_products(Model *m, int num_tokens, int layer);

/* The scratch block: the step's batch, copied to the device by begin; the routing's and the products' part; attention's. */
int64_t cuda_product_scratch_bytes();
int64_t cuda_attention_scratch_bytes();
inline int64_t scratch_round(int64_t bytes) { return (bytes + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT; }
inline Batch *device_batch(const Model *m) { return (Batch *)m->state.scratch; }
inline char *product_scratch(const Model *m) { return (char *)m->state.scratch + scratch_round(sizeof(Batch)); }
inline char *attention_scratch(const Model *m) { return product_scratch(m) + scratch_round(cuda_product_scratch_bytes()); }
inline int64_t cuda_scratch_bytes() {
    return scratch_round(sizeof(Batch)) + scratch_round(cuda_product_scratch_bytes()) + cuda_attention_scratch_bytes();
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

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

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Clusters: blocks that run at the same time and write into each other's shared memory, from sm_90 on; before, each
 * block is one. What a block wrote before it arrived, all see once they have waited. */
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* Writes 32 bits where the cluster's first block has `shared`. */
template <typename T> __device__ __forceinline__ void store_to_first_block(T *shared, T value) {
    static_assert(sizeof(T) == 4, "32 bits");
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n .reg .b32 address;\n"
                 "mapa.shared::cluster.u32 address, %0, 0;\n"
                 "st.shared::cluster.b32 [address], %1;\n}" ::"r"(shared_address(shared)), "r"(*(uint32_t *)&value)
                 : "memory");
#else
    *shared = value;
#endif
}

/* Makes what the cluster's first block has at `shared` at least `value`. */
__device__ __forceinline__ void raise_in_first_block(int *shared, int value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n .reg .b32 address;\n"
                 "mapa.shared::cluster.u32 address, %0, 0;\n"
                 "red.relaxed.cluster.shared::cluster.max.s32 [address], %1;\n}" ::"r"(shared_address(shared)), "r"(value)
                 : "memory");
#else
    atomicMax(shared, value);
#endif
}

/* One weight as float. */
__device__ __forceinline__ float to_float(weight_t bits) {
#if EXPERT_FORMAT == DTYPE_BF16
    return __uint_as_float((uint32_t)bits << 16);
#else
    return __half2float(__ushort_as_half(bits));
#endif
}

/* Two neighbouring weights, the first in the low half, as floats. */
__device__ __forceinline__ float2 to_float2(uint32_t bits) {
    return make_float2(to_float((weight_t)bits), to_float((weight_t)(bits >> 16)));
}

/* Two floats rounded to weight_t, `low` in the low half. A float beyond f16's range becomes its largest number. */
__device__ __forceinline__ uint32_t to_weights(float low, float high) {
#if EXPERT_FORMAT == DTYPE_BF16
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    const float largest = 65504.0f;
    __half2 pair = __floats2half2_rn(fminf(fmaxf(low, -largest), largest), fminf(fmaxf(high, -largest), largest));
#endif
    return *(uint32_t *)&pair;
}

/* The sum over the warp's lanes, in every lane, in one fixed order. */
template <typename T> __device__ __forceinline__ T warp_sum(T value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

/* The sum over the lanes up to this one. */
template <typename T> __device__ __forceinline__ T warp_sum_up_to(T value) {
    for (int distance = 1; distance < 32; distance *= 2) {
        T before = __shfl_up_sync(~0u, value, distance);
        if (threadIdx.x % 32 >= distance) value += before;
    }
    return value;
}

/* The sum over a block of THREADS, in every thread, in an order that THREADS fixes. A kernel calls it once a T. */
template <int THREADS, typename T> __device__ T block_sum(T value) {
    __shared__ T warps[THREADS / 32];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    T sum = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) sum += warps[warp];
    return sum;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

__device__ __forceinline__ float activate(float value) {
#if ACTIVATION == ACTIVATION_GELU
    return 0.5f * value * (1.0f + erff(value * 0.70710678f));
#elif ACTIVATION == ACTIVATION_RELU
    return value < 0.0f ? 0.0f : value; /* NaN stays NaN */
#else
    return value / (1.0f + expf(-value));
#endif
}

/* The header's numbers of ACTIVATION_CLAMPED_SWIGLU. */
struct Swiglu {
    float alpha, limit;
};
inline Swiglu swiglu_of(const Model *m) { return {m->header.swiglu_alpha, m->header.swiglu_limit}; }

/* A gated output of its two sums. */
__device__ __forceinline__ float activate_gated(float gate, float up, const Swiglu &swiglu) {
#if ACTIVATION == ACTIVATION_CLAMPED_SWIGLU
    gate = gate > swiglu.limit ? swiglu.limit : gate; /* NaN stays NaN */
    up = up > swiglu.limit ? swiglu.limit : up < -swiglu.limit ? -swiglu.limit : up;
    return gate / (1.0f + expf(-swiglu.alpha * gate)) * (up + 1.0f);
#else
    return activate(gate) * up;
#endif
}

/* 16 bytes to shared memory, zeros where `valid` is false; completes with cp_async_wait. */
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until all but the newest `pending` groups of this thread have arrived. */
template <int pending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* Four 8x8 matrices of 16-bit elements whose rows start at the 32 lanes' addresses; trans: each one transposed. */
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}

/* c += a b: 16 rows, 16 columns of a; 8 columns of b. */
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if EXPERT_FORMAT == DTYPE_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#endif
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
