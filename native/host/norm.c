#include <string.h>

#include "host.h"

typedef struct Norm {
    const Model *model;
    const Kernels *kernels;
    float *out;
    const float *x, *weight;
    const int32_t *rows; /* of x; NULL: all, in order */
} Norm;

static void norm_row(const void *job, long i) {
    const Norm *n = job;
    const float *x = n->x + (int64_t)(n->rows ? n->rows[i] : i) * HIDDEN;
    if (NORM_KIND == NORM_RMS)
        n->kernels->norm(n->out + i * HIDDEN, x, n->weight, n->model->header.norm_eps);
    else
        memcpy(n->out + i * HIDDEN, x, sizeof(float) * HIDDEN);
}

int host_norm(Model *m, int num_tokens, float *out, const float *x, const float *weight) {
    Norm norm = {m, host_kernels(), out, x, weight, NULL};
    parallel_for(m->num_threads, num_tokens, 2.0 * num_tokens * HIDDEN, norm_row, &norm);
    return 0;
}

int host_gather_norm(Model *m, int num_logits) {
    Norm norm = {m, host_kernels(), m->state.normed, m->state.x, m->weights.final_norm, m->batch->logit_rows};
    parallel_for(m->num_threads, num_logits, 2.0 * num_logits * HIDDEN, norm_row, &norm);
    return 0;
}
