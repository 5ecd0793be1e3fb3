/* ATTENTION_MOA's experts, whose routing is their own: a token's queries, and the sum of what they make of their
 * attention. */
#include "prefill.cuh"

#if ATTENTION_KIND == ATTENTION_MOA
int cuda_queries(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    TRY(cuda_route(m, num_tokens, layer, m->state.normed, weights->attention_router, nullptr, nullptr, false));
    return product<MoaIn>(m, num_tokens, job_of<MoaIn>(m, weights->attention_experts_in, nullptr, m->state.normed,
                                                       m->state.q));
}

int cuda_attention_out(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    TRY(product<MoaOut>(m, num_tokens, job_of<MoaOut>(m, weights.attention_experts_out, nullptr, m->state.attention,
                                                      m->state.expert_out)));
    return cuda_add_up(m, num_tokens, 1, true, nullptr, weights.attention_out_bias);
}
#endif
