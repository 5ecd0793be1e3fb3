/* The experts of a layer: two grouped products and the sum over a token's experts. */
#include "host.h"

static Product grouped(const Model *m) {
    return (Product){.num_experts = NUM_EXPERTS, .num_active = *m->state.num_active, .active = m->state.active_experts,
                     .offsets = m->state.expert_offsets, .assignments = m->state.assignments};
}

int host_experts_up(Model *m, int num_tokens, const Layer *layer, const float *input) {
    (void)num_tokens; /* the offsets count them */
    Product p = grouped(m);
    p.panels = layer->experts_up;
    p.input = input;
    p.input_divisor = K;
    p.output = m->state.expert_mid;
    p.columns = HIDDEN;
    p.outputs = FFN;
    p.item_rows = PANEL_ROWS;
    p.item_outputs = PANEL_ROWS / (1 + GATED);
    p.epilogue = ACTIVATE;
    host_product(m, &p);
    return 0;
}

int host_experts_down(Model *m, int num_tokens, const Layer *layer) {
    (void)num_tokens;
    Product p = grouped(m);
    p.panels = layer->experts_down;
    p.input = m->state.expert_mid;
    p.input_divisor = 1;
    p.output = m->state.expert_out;
    p.columns = FFN;
    p.outputs = HIDDEN;
    p.item_rows = p.item_outputs = PANEL_ROWS;
    host_product(m, &p);
    return 0;
}

typedef struct Combine {
    const Model *model;
    int residual;
} Combine;

static void combine_token(const void *job, long t) {
    const Combine *combine = job;
    const State *s = &combine->model->state;
    const float *weight = s->expert_weights + t * K, *out = s->expert_out + t * K * HIDDEN;
    float *x = s->x + t * HIDDEN;
    for (int i = 0; i < HIDDEN; i++) {
        float sum = weight[0] * out[i];
        for (int slot = 1; slot < K; slot++) sum += weight[slot] * out[(int64_t)slot * HIDDEN + i];
        x[i] = combine->residual ? x[i] + sum : sum;
    }
}

int host_combine(Model *m, int num_tokens, int residual) {
    Combine combine = {m, residual};
    parallel_for(m->num_threads, num_tokens, (double)num_tokens * K * HIDDEN, combine_token, &combine);
    return 0;
}
