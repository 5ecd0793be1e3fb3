/* Quantises the rows that a product with weights of integers takes: once a product, before its panels. */
#include "host.h"

typedef struct Rows {
    const Product *product;
    void (*quantize)(const float *x, int columns, int group, QuantizedRow row);
    char *quantized;
} Rows;

static void quantize_row(const void *job, long i) {
    const Rows *rows = job;
    const Product *p = rows->product;
    void *to = rows->quantized + i * quantized_bytes(p->columns, p->form.group);
    rows->quantize(product_input(p, i), p->columns, p->form.group, quantized_row(to, p->columns, p->form.group));
}

static char *quantized_rows(const Model *m) {
    return (char *)m->state.scratch + CEIL_DIV(sizeof(float) * MAX_STEP_TOKENS * ROTARY_DIM, 64) * 64;
}

const char *host_quantize(const Model *m, const Product *p, int num_rows) {
    Rows rows = {p, host_isa()->integers->quantize, quantized_rows(m)};
    parallel_for(m->num_threads, num_rows, 4.0 * num_rows * p->columns, quantize_row, &rows);
    return rows.quantized;
}

/* The most that a product takes: rows of a token, or of an assignment. */
int64_t host_quantized_bytes(void) {
    const int columns[] = {HIDDEN, NUM_HEADS * V_HEAD_DIM, MLP_FFN, Q_LORA_RANK, KV_LORA_RANK};
    const int columns_of_assignments[] = {FFN, (ATTENTION_KIND == ATTENTION_MOA) * NUM_KV_HEADS * HEAD_DIM};
    int64_t most = 0;
    for (int group = 32; USES_INTEGERS && group <= MAX_GROUP; group *= 2) {
        for (unsigned i = 0; i < sizeof columns / sizeof *columns; i++) {
            int64_t bytes = MAX_STEP_TOKENS * quantized_bytes(columns[i], group);
            most = bytes > most ? bytes : most;
        }
        for (unsigned i = 0; i < 2; i++) {
            int64_t bytes = MAX_STEP_TOKENS * EXPERTS_PER_TOKEN * quantized_bytes(columns_of_assignments[i], group);
            most = bytes > most ? bytes : most;
        }
    }
    return most;
}
