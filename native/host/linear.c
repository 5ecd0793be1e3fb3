/* Products with panels: the experts' and, as products of one expert, the dense ones. */
#include "host.h"

/* Work items go expert by expert, panel by panel, chunk of rows by chunk of rows: an expert's inputs stay in the cache
 * over its panels, and a panel comes from memory once, however many chunks use it. */
typedef struct Items {
    const Product *product;
    const Kernels *kernels;
    const BinHeader *header;
    long first[NUM_EXPERTS + 1]; /* of each active expert */
} Items;

/* Adds the bias of a panel's rows. Gate and up rows alternate in groups of GATE_GROUP; the bias has all gates first. */
static void add_bias(const Product *p, int expert, int first, float *sums) {
    const int gated = p->panel_outputs < PANEL_ROWS;
    const float *bias = p->bias + (int64_t)expert * (1 + gated) * p->outputs;
    for (int row = 0; row < PANEL_ROWS; row++) {
        int half = gated ? row / GATE_GROUP % 2 : 0;
        int output = first + (gated ? row / (2 * GATE_GROUP) * GATE_GROUP + row % GATE_GROUP : row);
        if (output < p->outputs) sums[row] += bias[half * p->outputs + output];
    }
}

static void store_row(const Product *p, float *output, const float *sums, int count) {
    if (p->epilogue == ACTIVATE)
        for (int i = 0; i < count; i++) output[i] = sums[i];
    else
        for (int i = 0; i < count; i++)
            output[i] = p->epilogue == ADD ? output[i] + p->scale * sums[i] : p->scale * sums[i];
}

static void run_item(const void *job, long item) {
    const Items *items = job;
    const Product *p = items->product;
    int active = 0;
    while (item >= items->first[active + 1]) active++;
    int expert = p->active[active], begin = p->offsets[expert], num_rows = p->offsets[expert + 1] - begin;
    int num_chunks = CEIL_DIV(num_rows, TOKEN_CHUNK);
    int panel = (int)((item - items->first[active]) / num_chunks), chunk = (item - items->first[active]) % num_chunks;
    int from = begin + (int)((int64_t)num_rows * chunk / num_chunks);
    int to = begin + (int)((int64_t)num_rows * (chunk + 1) / num_chunks);

    const int64_t stride = p->input_stride ? p->input_stride : p->columns;
    const float *in[TOKEN_CHUNK];
    PanelSums sums[TOKEN_CHUNK] __attribute__((aligned(64)));
    for (int r = from; r < to; r++) {
        int row = p->assignments ? p->assignments[r] : r;
        in[r - from] = p->input + (int64_t)(row / p->input_divisor) * stride;
    }
    int64_t element = ((int64_t)panel * p->num_experts + expert) * p->columns * PANEL_ROWS;
    int first = panel * p->panel_outputs, count = p->outputs - first;
    if (count > p->panel_outputs) count = p->panel_outputs;
    if (p->is_float)
        items->kernels->float_product((const float *)p->panels + element, p->columns, count, to - from, in, sums);
    else
        items->kernels->weight_product((const weight_t *)p->panels + element, p->columns,
                                       p->epilogue == ACTIVATE ? PANEL_ROWS : count, to - from, in, sums);
    for (int r = from; r < to; r++) {
        if (p->bias) add_bias(p, expert, first, sums[r - from]);
        if (p->epilogue == ACTIVATE) items->kernels->activate(sums[r - from], items->header);
        int64_t row = p->assignments ? p->assignments[r] : r;
        store_row(p, p->output + row * p->outputs + first, sums[r - from], count);
    }
}

void host_product(const Model *m, const Product *p) {
    Items items = {.product = p, .kernels = host_kernels(), .header = &m->header};
    int num_panels = CEIL_DIV(p->outputs, p->panel_outputs), num_rows = 0;
    for (int i = 0; i < p->num_active; i++) {
        int rows = p->offsets[p->active[i] + 1] - p->offsets[p->active[i]];
        items.first[i + 1] = items.first[i] + (long)num_panels * CEIL_DIV(rows, TOKEN_CHUNK);
        num_rows += rows;
    }
    double cost = (double)num_rows * num_panels * PANEL_ROWS * p->columns;
    parallel_for(m->num_threads, items.first[p->num_active], cost, run_item, &items);
}

void host_dense(const Model *m, int num_rows, Product p) {
    const int32_t offsets[2] = {0, num_rows}, active[1] = {0};
    p.panel_outputs = p.epilogue == ACTIVATE ? PANEL_ROWS / (1 + GATED) : PANEL_ROWS;
    p.num_experts = p.num_active = p.input_divisor = 1;
    p.active = active;
    p.offsets = offsets;
    host_product(m, &p);
}

int host_qkv(Model *m, int num_tokens, const Layer *layer) {
    host_dense(m, num_tokens, (Product){
        .panels = layer->qkv, .input = m->state.normed, .output = m->state.qkv, .columns = HIDDEN,
        .outputs = QKV_ROWS, .bias = layer->qkv_bias, .scale = 1});
    return 0;
}

int host_lm_head(Model *m, int num_logits) {
    host_dense(m, num_logits, (Product){
        .panels = m->header.tied_embeddings ? m->weights.embed : m->weights.lm_head, .input = m->state.normed,
        .output = m->state.logits, .columns = HIDDEN, .outputs = VOCAB_SIZE, .bias = m->weights.lm_head_bias,
        .scale = m->header.logits_multiplier});
    return 0;
}
