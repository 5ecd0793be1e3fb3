/* The dense products: q/k/v, attention_out and lm_head. */
#include "prefill.cuh"

#if NUM_HEADS

int cuda_qkv(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    return product<Qkv>(m, num_tokens, job_of<Qkv>(m, weights.qkv, weights.qkv_bias, m->state.normed, m->state.qkv));
}

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
