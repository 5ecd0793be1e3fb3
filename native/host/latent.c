/* Computes queries, keys and values of latent attention: norms of the latents within a row of qkv, then products. */
#include "host.h"

#if ATTENTION_KIND == ATTENTION_LATENT

typedef struct Latents {
    const Model *model;
    const Kernels *kernels;
    const Layer *weights;
} Latents;

/* Norms of the latents within a row of qkv, in place. */
static void norm_latents(const void *job, long t) {
    const Latents *l = job;
    float eps = l->model->header.latent_norm_eps, *row = l->model->state.qkv + t * QKV_ROWS;
    if (Q_LORA_RANK) l->kernels->rms_norm(row, row, l->weights->q_a_norm, eps, Q_LORA_RANK);
    l->kernels->rms_norm(row + QKV_ROWS - ROTARY_DIM - KV_LORA_RANK, row + QKV_ROWS - ROTARY_DIM - KV_LORA_RANK,
                         l->weights->kv_a_norm, eps, KV_LORA_RANK);
}

int host_queries(Model *m, int num_tokens, int layer) {
    Latents latents = {m, host_kernels(), &m->weights.layers[layer]};
    parallel_for(m->num_threads, num_tokens, 2.0 * num_tokens * (Q_LORA_RANK + KV_LORA_RANK), norm_latents, &latents);
    if (Q_LORA_RANK)
        host_dense(m, num_tokens, (Product){
            MATRIX(latents.weights, q_b), .form = DENSE_FORM, .input = m->state.qkv, .input_stride = QKV_ROWS,
            .columns = Q_LORA_RANK, .output = m->state.q, .outputs = NUM_HEADS * HEAD_DIM, .scale = 1});
    host_dense(m, num_tokens, (Product){
        MATRIX(latents.weights, kv_b), .form = DENSE_FORM, .input = m->state.qkv + QKV_ROWS - ROTARY_DIM -
        KV_LORA_RANK, .input_stride = QKV_ROWS, .columns = KV_LORA_RANK, .output = m->state.kv, .outputs = KV_B_ROWS,
        .scale = 1});
    return 0;
}

#endif
