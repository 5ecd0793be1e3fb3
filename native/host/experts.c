/* Computes a layer's experts: two grouped products, and the sum of each token's parts. */
#include "host.h"

Product host_grouped(const Model *m) {
    return (Product){.form = EXPERT_FORM, .num_stored = NUM_EXPERTS, .num_active = *m->state.num_active,
                     .active = m->state.active_experts, .offsets = m->state.expert_offsets,
                     .assignments = m->state.assignments, .item_rows = PANEL_ROWS, .item_outputs = PANEL_ROWS,
                     .scale = 1};
}

/* The same of a layer's own experts, each at its place. */
static Product placed(const Model *m, int layer) {
    Product p = host_grouped(m);
    p.num_stored = STORED_EXPERTS;
    p.place = places(m, layer);
    return p;
}

int host_experts_up(Model *m, int num_tokens, int layer) {
    (void)num_tokens; /* the offsets count them */
    const Layer *weights = &m->weights.layers[layer];
    Product p = placed(m, layer);
    p.panels = weights->experts_up;
    p.tensor_scale = (float)weights->experts_up_scale;
    p.bias = EXPERT_BIAS ? weights->experts_up_bias : NULL;
    p.input = ffn_input(m);
    p.input_divisor = EXPERTS_PER_TOKEN;
    p.output = m->state.expert_mid;
    p.columns = HIDDEN;
    p.outputs = FFN;
    p.item_outputs = PANEL_ROWS / (1 + GATED);
    p.epilogue = ACTIVATE;
    host_product(m, &p);
    return 0;
}

int host_experts_down(Model *m, int num_tokens, int layer) {
    (void)num_tokens;
    const Layer *weights = &m->weights.layers[layer];
    Product p = placed(m, layer);
    p.panels = weights->experts_down;
    p.tensor_scale = (float)weights->experts_down_scale;
    p.bias = EXPERT_BIAS ? weights->experts_down_bias : NULL;
    p.input = m->state.expert_mid;
    p.input_divisor = 1;
    p.output = m->state.expert_out;
    p.columns = FFN;
    p.outputs = HIDDEN;
    host_product(m, &p);
    return 0;
}

#define ADD_UP_COLUMNS 256
#define ADD_UP_PARTS CEIL_DIV(HIDDEN, ADD_UP_COLUMNS)

typedef struct Sum {
    const Model *model;
    int residual, num_slots;
    const float *mlp_out, *bias; /* (*, HIDDEN), (HIDDEN), or NULL */
} Sum;

/* One item is ADD_UP_COLUMNS of a token's columns. */
static void add_up_part(const void *job, long item) {
    const Sum *s = job;
    const State *state = &s->model->state;
    const int64_t t = item / ADD_UP_PARTS, first = item % ADD_UP_PARTS * ADD_UP_COLUMNS;
    const int count = HIDDEN - first < ADD_UP_COLUMNS ? (int)(HIDDEN - first) : ADD_UP_COLUMNS;
    const float *weight = state->expert_weights + t * EXPERTS_PER_TOKEN;
    const float *out = state->expert_out + t * EXPERTS_PER_TOKEN * HIDDEN + first;
    const float multiplier = s->model->header.residual_multiplier;
    float *restrict x = state->x + t * HIDDEN + first;
    float sum[ADD_UP_COLUMNS] = {0};
    for (int i = 0; s->num_slots && i < count; i++) sum[i] = weight[0] * out[i];
    for (int slot = 1; slot < s->num_slots; slot++)
        for (int i = 0; i < count; i++) sum[i] += weight[slot] * out[(int64_t)slot * HIDDEN + i];
    for (int i = 0; s->mlp_out && i < count; i++) sum[i] += s->mlp_out[t * HIDDEN + first + i];
    for (int i = 0; s->bias && i < count; i++) sum[i] += s->bias[first + i];
    for (int i = 0; i < count; i++) x[i] = s->residual ? x[i] + sum[i] * multiplier : sum[i] * multiplier;
}

void host_add_up(const Model *m, int num_tokens, int residual, int num_slots, const float *mlp_out, const float *bias) {
    Sum sum = {m, residual, num_slots, mlp_out, bias};
    const double cost = 8.0 * num_tokens * (num_slots + 1) * HIDDEN; /* what is added up lies in other cores' caches */
    parallel_for(m->num_threads, (long)num_tokens * ADD_UP_PARTS, cost, add_up_part, &sum);
}

int host_combine(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    host_add_up(m, num_tokens, HAS_RESIDUAL, weights->router ? EXPERTS_PER_TOKEN : 0,
                weights->mlp_up ? m->state.mlp_out : NULL, weights->ffn_out_bias);
    return 0;
}
