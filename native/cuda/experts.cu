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
    for (int slot = 0; slot < SLOTS; slot++) value[slot] = out[((int64_t)token * K + slot) * HIDDEN + i];
    float *to = x + (int64_t)token * HIDDEN + i;
    float base = residual ? *to : 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) sum = fmaf(weights[token * K + slot], value[slot], sum);
    if (mlp_out) sum += mlp_out[(int64_t)token * HIDDEN + i];
    if (bias) sum += bias[i];
    *to = base + multiplier * sum;
}

} // namespace

int cuda_add_up(Model *m, int num_tokens, int residual, bool has_slots, const float *mlp_out, const float *bias) {
    dim3 grid(ceil_div(HIDDEN, 128), num_tokens);
    return launch(m, "combine", has_slots ? combine_kernel<K> : combine_kernel<0>, grid, 128, 0, m->state.x,
                  m->state.expert_out, m->state.expert_weights, mlp_out, bias, device_batch(m), residual,
                  m->header.residual_multiplier);
}

int cuda_experts_up(Model *m, int num_tokens, const Layer *layer, const float *input) {
    return product<Up>(m, num_tokens,
                       job_of<Up>(m, layer->experts_up, layer->experts_up_bias, input, m->state.expert_mid));
}

int cuda_experts_down(Model *m, int num_tokens, const Layer *layer) {
    return product<Down>(m, num_tokens, job_of<Down>(m, layer->experts_down, layer->experts_down_bias,
                                                     m->state.expert_mid, m->state.expert_out));
}

int cuda_combine(Model *m, int num_tokens, const Layer *layer, int residual) {
    return cuda_add_up(m, num_tokens, residual, layer->router, layer->mlp_up ? m->state.mlp_out : nullptr,
                  layer->ffn_out_bias);
}
