/* Computes ATTENTION_MOA, where query heads and output matrices are experts' and have a routing of their own. */
#include "host.h"

#if ATTENTION_KIND == ATTENTION_MOA

int host_queries(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    TRY(host_route(m, num_tokens, layer, m->state.normed, weights->attention_router, NULL, NULL));
    Product p = host_grouped(m);
    p.panels = weights->attention_experts_in;
    p.tensor_scale = (float)weights->attention_experts_in_scale;
    p.input = m->state.normed;
    p.input_divisor = EXPERTS_PER_TOKEN;
    p.output = m->state.q; /* heads of slot 0, then of slot 1, ... */
    p.columns = HIDDEN;
    p.outputs = NUM_KV_HEADS * HEAD_DIM;
    host_product(m, &p);
    return 0;
}

int host_attention_out(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    Product p = host_grouped(m);
    p.panels = weights->attention_experts_out;
    p.tensor_scale = (float)weights->attention_experts_out_scale;
    p.input = m->state.attention;
    p.input_divisor = 1;
    p.output = m->state.expert_out; /* of the query heads that the slot's expert made */
    p.columns = NUM_KV_HEADS * HEAD_DIM;
    p.outputs = HIDDEN;
    host_product(m, &p);
    host_add_up(m, num_tokens, 1, EXPERTS_PER_TOKEN, NULL, weights->attention_out_bias);
    return 0;
}

#endif
