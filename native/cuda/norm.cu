/* RMS norm, a block a row: of every token, or of the tokens whose logits are wanted. */
#include "common.cuh"

namespace {

constexpr int THREADS = HIDDEN >= 4096 ? 1024 : HIDDEN >= 1024 ? 256 : 64;
constexpr int PER_THREAD = (HIDDEN + THREADS - 1) / THREADS;

/* The block's sum, in an order that THREADS fixes. */
__device__ float sum_block(float value) {
    __shared__ float warps[THREADS / 32];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < THREADS / 32; warp++) sum += warps[warp];
    return sum;
}

/* Row i of out comes from row i of x, or rows[i]. */
__global__ void __launch_bounds__(THREADS)
norm_kernel(float *out, const float *x, const float *weight, const int *num_rows, const int *rows, float eps) {
    pdl_wait();
    pdl_trigger();
    int i = blockIdx.x;
    if (i >= *num_rows) return;
    const float *row = x + (int64_t)(rows ? rows[i] : i) * HIDDEN;
    float values[PER_THREAD], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        int c = threadIdx.x + j * THREADS;
        values[j] = c < HIDDEN ? row[c] : 0.0f;
        squares += values[j] * values[j];
    }
    float scale = NORM_KIND == NORM_NONE ? 1.0f : 1.0f / sqrtf(sum_block(squares) / HIDDEN + eps);
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        int c = threadIdx.x + j * THREADS;
        if (c < HIDDEN) out[(int64_t)i * HIDDEN + c] = values[j] * scale * weight[c];
    }
}

} // namespace

int cuda_norm(Model *m, int num_tokens, float *out, const float *x, const float *weight, const float *) {
    return launch(m, "norm", norm_kernel, num_tokens, THREADS, 0, out, x, weight, &device_batch(m)->num_tokens,
                  nullptr, m->header.norm_eps);
}

int cuda_gather_norm(Model *m, int num_logits) {
    const Batch *batch = device_batch(m);
    return launch(m, "norm", norm_kernel, num_logits, THREADS, 0, m->state.normed, m->state.x,
                  m->weights.final_norm, &batch->num_logits, batch->logit_rows, m->header.norm_eps);
}
