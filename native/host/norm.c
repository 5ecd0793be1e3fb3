#include <string.h>

#include "host.h"

typedef struct Norm {
    const Kernels *kernels;
    float *out;
    const float *x, *weight, *bias;
    float eps;
    const int32_t *rows; /* of x; NULL: all, in order */
} Norm;

static void norm_row(const void *job, long i) {
    const Norm *n = job;
    const float *x = n->x + (int64_t)(n->rows ? n->rows[i] : i) * HIDDEN;
    float *out = n->out + i * HIDDEN;
    if (NORM_KIND == NORM_RMS)
        n->kernels->rms_norm(out, x, n->weight, n->eps, HIDDEN);
    else if (NORM_KIND == NORM_LAYER)
        n->kernels->layer_norm(out, x, n->weight, n->bias, n->eps, HIDDEN);
    else
        memcpy(out, x, sizeof(float) * HIDDEN);
}

/* normed[i] of x[i], or of x[rows[i]]. */
static int norm(Model *m, int num_rows, const float *weight, const float *bias, float eps, const int32_t *rows) {
    Norm norm = {host_kernels(), m->state.normed, m->state.x, weight, bias, eps, rows};
    parallel_for(m->num_threads, num_rows, 2.0 * num_rows * HIDDEN, norm_row, &norm);
    return 0;
}

int host_attention_norm(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    return norm(m, num_tokens, weights->attention_norm, weights->attention_norm_bias, m->header.norm_eps, NULL);
}

int host_ffn_norm(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    return norm(m, num_tokens, weights->ffn_norm, weights->ffn_norm_bias, m->header.norm_eps, NULL);
}

int host_gather_norm(Model *m, int num_logits, int layer) {
    (void)layer;
    const Weights *w = &m->weights;
    return norm(m, num_logits, w->final_norm, w->final_norm_bias, m->header.final_norm_eps, m->batch->logit_rows);
}
