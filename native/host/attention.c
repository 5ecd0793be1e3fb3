#include "host.h"

typedef struct Attention {
    const Model *model;
    const Kernels *kernels;
    const Layer *weights;
    LayerCache cache;
} Attention;

/* 1 in a model without attention, where nothing calls this: so that nothing divides by zero. */
enum { KV_HEADS = NUM_HEADS ? NUM_KV_HEADS : 1, GROUP = NUM_HEADS ? NUM_HEADS / KV_HEADS : 1 };

/* One item is a token and a KV head, with all query heads that share it. */
static void attend_item(const void *job, long item) {
    const Attention *a = job;
    const Model *m = a->model;
    int64_t t = item / KV_HEADS;
    int kv_head = item % KV_HEADS, position = m->batch->positions[t];
    int window = a->cache.window, first = window && position >= window ? position - window + 1 : 0;
    const Timeline seen = {m->state.key_cache, m->state.value_cache, a->cache, m->batch->slots[t], kv_head};
    for (int i = 0; i < GROUP; i++) {
        int head = ATTENTION_KIND == ATTENTION_MOA ? i * KV_HEADS + kv_head : kv_head * GROUP + i;
        a->kernels->attend(m->state.attention + (t * NUM_HEADS + head) * V_HEAD_DIM, q_row(m, t) + head * HEAD_DIM,
                           &seen, first, position - first + 1, m->header.attention_scale,
                           SINKS ? a->weights->sinks + head : NULL);
    }
}

int host_attention(Model *m, int num_tokens, int layer) {
    Attention attention = {m, host_kernels(), &m->weights.layers[layer], layer_cache(m, layer)};
    int window = attention.cache.window;
    double cost = 0;
    for (int t = 0; t < num_tokens; t++) {
        int positions = m->batch->positions[t] + 1;
        cost += (double)(window && positions > window ? window : positions) * NUM_HEADS * (HEAD_DIM + V_HEAD_DIM);
    }
    parallel_for(m->num_threads, (long)num_tokens * NUM_KV_HEADS, cost, attend_item, &attention);
    return 0;
}
