/* The dense products q/k/v, those of latent attention, attention_out, lm_head; and the mlp that every token takes. */
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

#if NUM_HEADS

int cuda_qkv(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    return product<Qkv>(m, num_tokens, job_of<Qkv>(m, weights.qkv, weights.qkv_bias, m->state.normed, m->state.qkv));
}

#if ATTENTION_KIND == ATTENTION_LATENT
int cuda_latent_products(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
#if Q_LORA_RANK
    TRY(product<QB>(m, num_tokens, job_of<QB>(m, weights.q_b, nullptr, m->state.qkv, m->state.q)));
#endif
    return product<KvB>(m, num_tokens, job_of<KvB>(m, weights.kv_b, nullptr, m->state.qkv, m->state.kv));
}
#endif

#if ATTENTION_KIND != ATTENTION_MOA
int cuda_attention_out(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    Job job = job_of<AttentionOut>(m, weights.attention_out, weights.attention_out_bias, m->state.attention,
                                   m->state.x);
    job.scale = m->header.residual_multiplier;
    return product<AttentionOut>(m, num_tokens, job);
}
#endif

int cuda_lm_head(Model *m, int num_logits, int) {
    Job job = job_of<LmHead>(m, m->weights.lm_head, m->weights.lm_head_bias, m->state.normed, m->state.logits);
    job.scale = m->header.logits_multiplier;
    job.num_tokens = &device_batch(m)->num_logits;
    return product<LmHead>(m, num_logits, job);
}

#endif
