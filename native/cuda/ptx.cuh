/* Instructions that C++ has no words for: clusters of blocks, asynchronous copies, matrix loads and the matrix
 * instruction. */
#ifndef COLIBRI_CUDA_PTX_CUH
#define COLIBRI_CUDA_PTX_CUH

#include <cuda_runtime.h>

#include "../model.h"

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
                 "red.relaxed.cluster.shared::cluster.max.s32 [address], %1;\n}" ::"r"(shared_address(shared)),
                 "r"(value) : "memory");
#else
    atomicMax(shared, value);
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

/* mbarriers, by their shared addresses, and copies by the bulk copy engine, from sm_90 on. A barrier's phase ends when
 * it has been told to expect bytes and they have arrived. */
__device__ __forceinline__ void begin_barrier(uint32_t barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

/* Makes barriers that have begun known to the copy engine. */
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Until the phase of that parity has ended. */
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n .reg .pred arrived;\n"
                 "again_%=: mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
                 "@!arrived bra again_%=;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* The L2 cache's policy for what is read once. */
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* A box of a tensor of three dimensions, from (x, y, z), to shared memory; `barrier` counts its bytes. */
__device__ __forceinline__ void copy_box(uint32_t shared, const void *map, int x, int y, int z, uint32_t barrier,
                                         uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier),
                 "l"(policy) : "memory");
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
#if COMPUTE_FORMAT == DTYPE_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#endif
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
