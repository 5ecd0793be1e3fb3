/* Arithmetic that the kernels share: weights to floats and back, sums over warps and blocks, activations. */
#ifndef COLIBRI_CUDA_NUMBERS_CUH
#define COLIBRI_CUDA_NUMBERS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../model.h"

static_assert(EXPERT_FORMAT != DTYPE_F32, "CUDA runs f16 and bf16 weights; convert the model with one of these dtypes");
static_assert(EXPERT_FORMAT == COMPUTE_FORMAT && DENSE_FORMAT == COMPUTE_FORMAT && EMBED_FORMAT == COMPUTE_FORMAT,
              "CUDA runs weights of one dtype; convert the model with --dtype");
typedef uint16_t weight_t; /* the bits of an f16 or bf16, as COMPUTE_FORMAT says: a weight, or an operand beside it */

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
template <class T> constexpr T max_of(T a) { return a; }
template <class T, class... Rest> constexpr T max_of(T a, T b, Rest... rest) { return max_of(a > b ? a : b, rest...); }

/* One weight as float. */
__device__ __forceinline__ float to_float(weight_t bits) {
#if COMPUTE_FORMAT == DTYPE_BF16
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
#if COMPUTE_FORMAT == DTYPE_BF16
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

#endif
