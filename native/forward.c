/* The model, written once: a step as a sequence of ops. */
#include <string.h>

#include "colibri.h"
#include "error.h"
#include "ops.h"

/* From a layer's input up to its choice of experts. */
static int route(Model *m, int num_tokens, int l) {
    const Ops *ops = m->ops;
    const Layer *layer = &m->weights.layers[l];
    State *s = &m->state;
    m->layer = l;
    if (!NUM_HEADS) return ops->router(m, num_tokens, l, s->x);
    TRY(ops->norm(m, num_tokens, s->normed, s->x, layer->attention_norm, layer->attention_norm_bias));
    TRY(ops->qkv(m, num_tokens, layer));
    if (ATTENTION_KIND != ATTENTION_GQA) TRY(ops->queries(m, num_tokens, l));
    TRY(ops->rope(m, num_tokens, l));
    TRY(ops->attention(m, num_tokens, l));
    TRY(ops->attention_out(m, num_tokens, layer));
    TRY(ops->norm(m, num_tokens, s->normed, s->x, layer->ffn_norm, layer->ffn_norm_bias));
    return layer->router ? ops->router(m, num_tokens, l, s->normed) : 0;
}

/* The chosen experts and the mlp that every token takes, up to the layer's output. */
static int experts(Model *m, int num_tokens, int l) {
    const Ops *ops = m->ops;
    const Layer *layer = &m->weights.layers[l];
    const float *input = NUM_HEADS ? m->state.normed : m->state.x;
    m->layer = l;
    if (layer->mlp_up) TRY(ops->mlp(m, num_tokens, layer, input));
    if (layer->router) {
        TRY(ops->experts_up(m, num_tokens, layer, input));
        TRY(ops->experts_down(m, num_tokens, layer));
    }
    return ops->combine(m, num_tokens, layer, NUM_HEADS > 0);
}

int colibri_forward_part(void *model, int num_tokens, int num_logits, int part) {
    Model *m = model;
    const Ops *ops = m->ops;
    m->layer = -1;
    if (part > 0) TRY(experts(m, num_tokens, part - 1));
    if (part == 0) TRY(ops->begin(m, num_tokens));
    if (part == 0) TRY(ops->embed(m, num_tokens));
    if (part < (int)m->header.num_layers) return route(m, num_tokens, part);
    m->layer = -1;
    if (num_logits == 0) return 0;
    TRY(ops->gather_norm(m, num_logits));
    TRY(ops->lm_head(m, num_logits));
    return ops->sample(m, num_logits);
}

int colibri_forward(void *model, int num_tokens, int num_logits) {
    for (int part = 0; part <= (int)((Model *)model)->header.num_layers; part++)
        TRY(colibri_forward_part(model, num_tokens, num_logits, part));
    return 0;
}

int colibri_forward_stack(void *model, int num_tokens) { return colibri_forward(model, num_tokens, 0); }

int colibri_run_op(void *model, const char *op, int num_rows, int l) {
    Model *m = model;
    const Ops *ops = m->ops;
    const Layer *layer = &m->weights.layers[l];
    const float *input = NUM_HEADS ? m->state.normed : m->state.x;
    m->layer = l;
#define OP(name, ...) if (strcmp(op, #name) == 0) return ops->name(m, num_rows, ##__VA_ARGS__);
    OP(begin)
    OP(embed)
    OP(norm, m->state.normed, m->state.x, layer->ffn_norm, layer->ffn_norm_bias)
    OP(qkv, layer)
    OP(queries, l)
    OP(rope, l)
    OP(attention, l)
    OP(attention_out, layer)
    OP(router, l, input)
    OP(mlp, layer, input)
    OP(experts_up, layer, input)
    OP(experts_down, layer)
    OP(combine, layer, NUM_HEADS > 0)
    OP(gather_norm)
    OP(lm_head)
    OP(sample)
#undef OP
    return fail("op=%s, expected one of native/ops.h", op);
}
