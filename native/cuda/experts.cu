/* The MoE layer's experts and the sum over a token's slots. */
#include "prefill.cuh"

namespace {

/* A thread an output. */
template <int SLOTS>
__global__ void combine_kernel(float *x, const float *out, const float *weights, const float *mlp_out,
                               const float *bias, const Batch *batch, int residual, float multiplier) {
    pdl_wait();
    pdl_trigger();
    int token = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= batch->num_tokens || i >= HIDDEN) return;
    float value[SLOTS + 1], sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++)
        value[slot] = out[((int64_t)token * EXPERTS_PER_TOKEN + slot) * HIDDEN + i];
    float *to = x + (int64_t)token * HIDDEN + i;
    float base = residual ? *to : 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) sum = fmaf(weights[token * EXPERTS_PER_TOKEN + slot], value[slot], sum);
    if (mlp_out) sum += mlp_out[(int64_t)token * HIDDEN + i];
    if (bias) sum += bias[i];
    *to = base + multiplier * sum;
}

} // namespace

int cuda_add_up(Model *m, int num_tokens, int residual, bool has_slots, const float *mlp_out, const float *bias) {
    dim3 grid(ceil_div(HIDDEN, 128), num_tokens);
    auto kernel = has_slots ? combine_kernel<EXPERTS_PER_TOKEN> : combine_kernel<0>;
    return launch(m, "combine", kernel, grid, 128, 0, m->state.x, m->state.expert_out, m->state.expert_weights,
                  mlp_out, bias, device_batch(m), residual, m->header.residual_multiplier);
}

int cuda_experts_up(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    Job job = job_of<Up>(m, weights.experts_up, weights.experts_up_bias, ffn_input(m), m->state.expert_mid);
    job.place = places(m, layer);
    return product<Up>(m, num_tokens, job);
}

int cuda_experts_down(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    Job job = job_of<Down>(m, weights.experts_down, weights.experts_down_bias, m->state.expert_mid,
                           m->state.expert_out);
    job.place = places(m, layer);
    return product<Down>(m, num_tokens, job);
}

int cuda_combine(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    return cuda_add_up(m, num_tokens, HAS_RESIDUAL, weights.router, weights.mlp_up ? m->state.mlp_out : nullptr,
                       weights.ffn_out_bias);
}
