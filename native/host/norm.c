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

int host_norm(Model *m, int num_tokens, float *out, const float *x, const float *weight, const float *bias) {
    Norm norm = {host_kernels(), out, x, weight, bias, m->header.norm_eps, NULL};
    parallel_for(m->num_threads, num_tokens, 2.0 * num_tokens * HIDDEN, norm_row, &norm);
    return 0;
}

int host_gather_norm(Model *m, int num_logits) {
    const Weights *w = &m->weights;
    Norm norm = {host_kernels(), m->state.normed, m->state.x, w->final_norm, w->final_norm_bias,
                 m->header.final_norm_eps, m->batch->logit_rows};
    parallel_for(m->num_threads, num_logits, 2.0 * num_logits * HIDDEN, norm_row, &norm);
    return 0;
}
