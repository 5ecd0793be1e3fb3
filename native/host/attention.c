#include "host.h"

typedef struct Attention {
    const Model *model;
    const Kernels *kernels;
    int layer;
} Attention;

/* 1 in a model without attention, where nothing calls this: so that nothing divides by zero. */
enum { KV_HEADS = NUM_HEADS ? NUM_KV_HEADS : 1, GROUP = NUM_HEADS ? NUM_HEADS / KV_HEADS : 1 };

/* One item is a token and a KV head, with all query heads that share it. */
static void attend_item(const void *job, long item) {
    const Attention *a = job;
    const Model *m = a->model;
    int64_t t = item / KV_HEADS;
    int kv_head = item % KV_HEADS;
    int64_t cache_head = ((int64_t)a->layer * m->num_slots + m->batch->slots[t]) * NUM_KV_HEADS + kv_head;
    int64_t at = cache_head * MAX_SEQ_LEN * HEAD_DIM;
    for (int head = kv_head * GROUP; head < (kv_head + 1) * GROUP; head++)
        a->kernels->attend(m->state.attention + (t * NUM_HEADS + head) * HEAD_DIM,
                           m->state.qkv + (t * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM,
                           m->state.key_cache + at, m->state.value_cache + at, m->batch->positions[t] + 1);
}

int host_attention(Model *m, int num_tokens, int layer) {
    Attention attention = {m, host_kernels(), layer};
    double cost = 0;
    for (int t = 0; t < num_tokens; t++) cost += 2.0 * (m->batch->positions[t] + 1) * NUM_HEADS * HEAD_DIM;
    parallel_for(m->num_threads, (long)num_tokens * NUM_KV_HEADS, cost, attend_item, &attention);
    return 0;
}
