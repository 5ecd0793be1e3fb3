/* The norm, a block a row: of every token, or of the tokens whose logits are wanted. */
#include "launch.cuh"
#include "numbers.cuh"
#include "scratch.cuh"

namespace {

constexpr int THREADS = HIDDEN >= 4096 ? 1024 : HIDDEN >= 1024 ? 256 : 64;
constexpr int PER_THREAD = (HIDDEN + THREADS - 1) / THREADS;

/* The row's mean, summed in double: that of a residual stream may be a thousand times its deviation. */
__device__ float mean_of(const float (&values)[PER_THREAD]) {
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) sum += values[j];
    return (float)(block_sum<THREADS>(sum) / HIDDEN);
}

/* Row i of out comes from row i of x, or rows[i]. */
__global__ void __launch_bounds__(THREADS)
norm_kernel(float *out, const float *x, const float *weight, const float *bias, const int *num_rows, const int *rows,
            float eps) {
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
    }
    float mean = NORM_KIND == NORM_LAYER ? mean_of(values) : 0.0f;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        if (NORM_KIND == NORM_LAYER) values[j] = threadIdx.x + j * THREADS < HIDDEN ? values[j] - mean : 0.0f;
        squares += values[j] * values[j];
    }
    float scale = NORM_KIND == NORM_NONE ? 1.0f : 1.0f / sqrtf(block_sum<THREADS>(squares) / HIDDEN + eps);
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        int c = threadIdx.x + j * THREADS;
        if (c >= HIDDEN) continue;
        float value = NORM_KIND == NORM_NONE ? values[j] : values[j] * scale * weight[c];
        out[(int64_t)i * HIDDEN + c] = NORM_KIND == NORM_LAYER && bias ? value + bias[c] : value;
    }
}

/* normed[i] of x[i], or of x[rows[i]]. */
int norm(Model *m, int launch_rows, const float *weight, const float *bias, const int *num_rows, const int *rows,
         float eps) {
    return launch(m, "norm", norm_kernel, launch_rows, THREADS, 0, m->state.normed, m->state.x, weight, bias, num_rows,
                  rows, eps);
}

} // namespace

int cuda_attention_norm(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    return norm(m, num_tokens, weights.attention_norm, weights.attention_norm_bias, &device_batch(m)->num_tokens,
                nullptr, m->header.norm_eps);
}

int cuda_ffn_norm(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    return norm(m, num_tokens, weights.ffn_norm, weights.ffn_norm_bias, &device_batch(m)->num_tokens, nullptr,
                m->header.norm_eps);
}

int cuda_gather_norm(Model *m, int num_logits, int) {
    const Batch *batch = device_batch(m);
    return norm(m, num_logits, m->weights.final_norm, m->weights.final_norm_bias, &batch->num_logits,
                batch->logit_rows, m->header.final_norm_eps);
}
