/* Latent attention's queries, keys and values: norms of the latents within a row of qkv, in place, then their
 * products. */
#include "prefill.cuh"

#if ATTENTION_KIND == ATTENTION_LATENT && NUM_HEADS

namespace {

constexpr int THREADS = 256;
constexpr int LATENT = QKV_ROWS - ROTARY_DIM - KV_LORA_RANK; /* where keys' and values' begins */

/* A block a latent: keys' and values', then q's where it has one. Grid: (tokens, latents). */
__global__ void __launch_bounds__(THREADS)
latent_norm_kernel(float *qkv, const float *kv_weight, const float *q_weight, const int *num_tokens, float eps) {
    pdl_wait();
    pdl_trigger();
    if ((int)blockIdx.x >= *num_tokens) return;
    bool is_q = blockIdx.y == 1;
    float *row = qkv + (int64_t)blockIdx.x * QKV_ROWS + (is_q ? 0 : LATENT);
    const float *weight = is_q ? q_weight : kv_weight;
    int length = is_q ? Q_LORA_RANK : KV_LORA_RANK;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < length; i += THREADS) squares += row[i] * row[i];
    float scale = 1.0f / sqrtf(block_sum<THREADS>(squares) / length + eps);
    for (int i = threadIdx.x; i < length; i += THREADS) row[i] = row[i] * scale * weight[i];
}

/* q_b and kv_b: from the latents of qkv to q and kv. */
int latent_products(Model *m, int num_tokens, const Layer &weights) {
#if Q_LORA_RANK
    TRY(product<QB>(m, num_tokens, job_of<QB>(m, weights.q_b, nullptr, m->state.qkv, m->state.q)));
#endif
    return product<KvB>(m, num_tokens, job_of<KvB>(m, weights.kv_b, nullptr, m->state.qkv, m->state.kv));
}

} // namespace

int cuda_queries(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    TRY(launch(m, "latent_norm", latent_norm_kernel, dim3(num_tokens, 1 + (Q_LORA_RANK > 0)), THREADS, 0, m->state.qkv,
               weights.kv_a_norm, weights.q_a_norm, &device_batch(m)->num_tokens, m->header.latent_norm_eps));
    return latent_products(m, num_tokens, weights);
}

#endif
