/* The model, written once: a step as a sequence of ops. */
#include <string.h>

#include "colibri.h"
#include "error.h"
#include "ops.h"

/* From a layer's input up to its choice of experts. */
static int route(Model *m, int num_tokens, int l) {
    const Ops *ops = m->ops;
    m->layer = l;
    if (!NUM_HEADS) return ops->router(m, num_tokens, l);
    TRY(ops->attention_norm(m, num_tokens, l));
    TRY(ops->qkv(m, num_tokens, l));
    if (ops->queries) TRY(ops->queries(m, num_tokens, l));
    TRY(ops->rope(m, num_tokens, l));
    TRY(ops->attention(m, num_tokens, l));
    TRY(ops->attention_out(m, num_tokens, l));
    TRY(ops->ffn_norm(m, num_tokens, l));
    return m->weights.layers[l].router ? ops->router(m, num_tokens, l) : 0;
}

/* The chosen experts and the mlp that every token takes, up to the layer's output. */
static int experts(Model *m, int num_tokens, int l) {
    const Ops *ops = m->ops;
    m->layer = l;
    if (m->weights.layers[l].mlp_up) TRY(ops->mlp(m, num_tokens, l));
    if (m->weights.layers[l].router) {
        TRY(ops->experts_up(m, num_tokens, l));
        TRY(ops->experts_down(m, num_tokens, l));
    }
    return ops->combine(m, num_tokens, l);
}

static int logits(Model *m, int num_logits) {
    m->layer = -1;
    TRY(m->ops->gather_norm(m, num_logits, -1));
    TRY(m->ops->lm_head(m, num_logits, -1));
    return m->ops->sample(m, num_logits, -1);
}

int colibri_forward_part(void *model, int num_tokens, int num_logits, int part) {
    Model *m = model;
    const Ops *ops = m->ops;
    m->layer = -1;
    if (part > 0) TRY(experts(m, num_tokens, part - 1));
    if (part == 0) TRY(ops->begin(m, num_tokens, -1));
    if (part == 0) TRY(ops->embed(m, num_tokens, -1));
    if (part < (int)m->header.num_layers) return route(m, num_tokens, part);
    return num_logits ? logits(m, num_logits) : 0;
}

int colibri_forward_logits(void *model, int num_tokens, int num_logits) {
    Model *m = model;
    m->layer = -1;
    TRY(m->ops->begin(m, num_tokens, -1));
    return logits(m, num_logits);
}

int colibri_forward(void *model, int num_tokens, int num_logits) {
    for (int part = 0; part <= (int)((Model *)model)->header.num_layers; part++)
        TRY(colibri_forward_part(model, num_tokens, num_logits, part));
    return 0;
}

int colibri_forward_stack(void *model, int num_tokens) { return colibri_forward(model, num_tokens, 0); }

int colibri_run_op(void *model, const char *op, int num_rows, int l) {
    Model *m = model;
    m->layer = l;
#define OP(name, has) \
    if (strcmp(op, #name) == 0 && m->ops->name) return m->ops->name(m, num_rows, l) || colibri_rest() ? -1 : 0;
    OPS(OP)
#undef OP
    return fail("op=%s, expected one of native/ops.h that this model has", op);
}
