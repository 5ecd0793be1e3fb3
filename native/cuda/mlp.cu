/* The mlp that every token takes, a dense layer's or the shared experts', which is stored like one gated expert. */
#include "prefill.cuh"

#if MLP_FFN

namespace {

template <int FFN_> int mlp(Model *m, int num_tokens, const Layer &weights) {
    if constexpr (FFN_ > 0) {
        TRY(product<MlpUp<FFN_>>(m, num_tokens,
                                 job_of<MlpUp<FFN_>>(m, weights.mlp_up, nullptr, ffn_input(m), m->state.mlp_mid)));
        TRY(product<MlpDown<FFN_>>(m, num_tokens, job_of<MlpDown<FFN_>>(m, weights.mlp_down, nullptr, m->state.mlp_mid,
                                                                        m->state.mlp_out)));
    }
    return 0;
}

constexpr int GATE_THREADS = 256;

/* rows[t] *= sigmoid(gate . input[t]), a block a row. */
__global__ void __launch_bounds__(GATE_THREADS)
gate_kernel(float *rows, const float *input, const float *gate, const int *num_rows) {
    pdl_wait();
    pdl_trigger();
    if ((int)blockIdx.x >= *num_rows) return;
    const float *x = input + (int64_t)blockIdx.x * HIDDEN;
    float *row = rows + (int64_t)blockIdx.x * HIDDEN, sum = 0.0f;
    for (int i = threadIdx.x; i < HIDDEN; i += GATE_THREADS) sum = fmaf(gate[i], x[i], sum);
    float weight = 1.0f / (1.0f + expf(-block_sum<GATE_THREADS>(sum)));
    for (int i = threadIdx.x; i < HIDDEN; i += GATE_THREADS) row[i] *= weight;
}

} // namespace

int cuda_mlp(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    TRY((weights.router ? mlp<SHARED_FFN> : mlp<DENSE_FFN>)(m, num_tokens, weights));
    if (!weights.shared_gate) return 0;
    return launch(m, "shared_gate", gate_kernel, num_tokens, GATE_THREADS, 0, m->state.mlp_out, ffn_input(m),
                  weights.shared_gate, &device_batch(m)->num_tokens);
}

#endif
