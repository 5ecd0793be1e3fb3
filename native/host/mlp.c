/* Computes what every token takes: a dense layer's whole FFN, or the shared expert of a layer with experts. */
#include <math.h>

#include "host.h"

typedef struct Gate {
    const float *gate, *input; /* (HIDDEN), (*, HIDDEN) */
    float *rows;               /* (*, HIDDEN), each times sigmoid(gate . its input) */
} Gate;

static void gate_row(const void *job, long t) {
    const Gate *g = job;
    double sum = 0;
    for (int i = 0; i < HIDDEN; i++) sum += (double)g->gate[i] * g->input[t * HIDDEN + i];
    float weight = 1.0f / (1.0f + expf(-(float)sum));
    for (int i = 0; i < HIDDEN; i++) g->rows[t * HIDDEN + i] *= weight;
}

int host_mlp(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    const float *input = ffn_input(m);
    const int ffn = weights->router ? SHARED_FFN : DENSE_FFN;
    host_dense(m, num_tokens, (Product){
        MATRIX(weights, mlp_up), .form = DENSE_FORM, .input = input, .output = m->state.mlp_mid,
        .columns = HIDDEN, .outputs = ffn, .scale = 1, .epilogue = ACTIVATE});
    host_dense(m, num_tokens, (Product){
        MATRIX(weights, mlp_down), .form = DENSE_FORM, .input = m->state.mlp_mid, .output = m->state.mlp_out,
        .columns = ffn, .outputs = HIDDEN, .scale = 1});
    Gate gate = {weights->shared_gate, input, m->state.mlp_out};
    if (weights->shared_gate) parallel_for(m->num_threads, num_tokens, 2.0 * num_tokens * HIDDEN, gate_row, &gate);
    return 0;
}
