/* The model, written once: a step as a sequence of ops. */
#include <string.h>

#include "colibri.h"
#include "error.h"
#include "ops.h"

static int attention_block(Model *m, int num_tokens, int l) {
    const Ops *ops = m->ops;
    const Layer *layer = &m->weights.layers[l];
    TRY(ops->norm(m, num_tokens, m->state.normed, m->state.x, layer->attention_norm));
    TRY(ops->qkv(m, num_tokens, layer));
    TRY(ops->rope(m, num_tokens, l));
    TRY(ops->attention(m, num_tokens, l));
    return ops->attention_out(m, num_tokens, layer);
}

static int moe_block(Model *m, int num_tokens, int l, const float *input, int residual) {
    const Ops *ops = m->ops;
    const Layer *layer = &m->weights.layers[l];
    TRY(ops->router(m, num_tokens, l, input));
    TRY(ops->experts_up(m, num_tokens, layer, input));
    TRY(ops->experts_down(m, num_tokens, layer));
    return ops->combine(m, num_tokens, residual);
}

int colibri_forward(void *model, int num_tokens, int num_logits) {
    Model *m = model;
    const Ops *ops = m->ops;
    TRY(ops->begin(m, num_tokens));
    TRY(ops->embed(m, num_tokens));
    for (int l = 0; l < (int)m->header.num_layers; l++) {
        TRY(attention_block(m, num_tokens, l));
        TRY(ops->norm(m, num_tokens, m->state.normed, m->state.x, m->weights.layers[l].ffn_norm));
        TRY(moe_block(m, num_tokens, l, m->state.normed, 1));
    }
    if (num_logits == 0) return 0;
    TRY(ops->gather_norm(m, num_logits));
    TRY(ops->lm_head(m, num_logits));
    return ops->sample(m, num_logits);
}

int colibri_forward_stack(void *model, int num_tokens) {
    Model *m = model;
    TRY(m->ops->begin(m, num_tokens));
    for (int l = 0; l < (int)m->header.num_layers; l++) TRY(moe_block(m, num_tokens, l, m->state.x, 0));
    return 0;
}

int colibri_run_op(void *model, const char *op, int num_rows, int l) {
    Model *m = model;
    const Ops *ops = m->ops;
    const Layer *layer = &m->weights.layers[l];
    const float *input = NUM_HEADS ? m->state.normed : m->state.x;
#define OP(name, ...) if (strcmp(op, #name) == 0) return ops->name(m, num_rows, ##__VA_ARGS__);
    OP(begin)
    OP(embed)
    OP(norm, m->state.normed, m->state.x, layer->ffn_norm)
    OP(qkv, layer)
    OP(rope, l)
    OP(attention, l)
    OP(attention_out, layer)
    OP(router, l, input)
    OP(experts_up, layer, input)
    OP(experts_down, layer)
    OP(combine, NUM_HEADS > 0)
    OP(gather_norm)
    OP(lm_head)
    OP(sample)
#undef OP
    return fail("op=%s, expected one of native/ops.h", op);
}
