/* Multiplies by panels: the experts' matrices and, as products of one expert, the dense ones. Holds the dense ops. */
#include "host.h"

/* Work items go expert by expert, panel by panel, chunk of rows by chunk of rows: an expert's inputs stay in the cache
 * over its panels, and a panel comes from memory once, however many chunks use it. */
typedef struct Items {
    const Product *product;
    const Kernels *kernels;
    ProductKernel *multiply;
    const BinHeader *header;
    const char *quantized; /* the input's rows, where weights are integers, each of row_bytes; else NULL */
    int64_t row_bytes;
    long count;
    long first[NUM_EXPERTS + 1]; /* of each active expert */
} Items;

/* Adds the bias of an item's rows. Gate and up rows alternate in groups of GATE_GROUP; the bias has all gates first. */
static void add_bias(const Product *p, int place, int first_output, float *sums) {
    const int gated = p->item_outputs < p->item_rows;
    const float *bias = p->bias + (int64_t)place * (1 + gated) * p->outputs + first_output;
    for (int i = 0; i < p->item_outputs && first_output + i < p->outputs; i++) {
        sums[gated ? gate_row_of(i) : i] += bias[i];
        if (gated) sums[gate_row_of(i) + GATE_GROUP] += bias[p->outputs + i];
    }
}

static void store_row(const Product *p, float *output, const float *sums, int count) {
    for (int i = 0; i < count; i++) {
        float value = p->scale * sums[i];
        output[i] = p->epilogue == ADD ? output[i] + value : value;
    }
}

/* One item: so many outputs of the assignments [from, to). */
typedef struct Work {
    const char *panel; /* or the part of it from the item's first row on */
    int place, first_output, num_outputs;
    int from, to;
} Work;

static Work work_of(const Items *items, long item) {
    const Product *p = items->product;
    int active = 0;
    while (item >= items->first[active + 1]) active++;
    int expert = p->active[active], begin = p->offsets[expert], num_rows = p->offsets[expert + 1] - begin;
    int num_chunks = CEIL_DIV(num_rows, TOKEN_CHUNK), place = p->place ? p->place[expert] : expert;
    int part = (int)((item - items->first[active]) / num_chunks), chunk = (item - items->first[active]) % num_chunks;
    int parts = PANEL_ROWS / p->item_rows, left = p->outputs - part * p->item_outputs;
    int64_t offset = panel_offset(p->form, p->columns, p->num_stored, part / parts, place);
    if (part % parts) offset += element_offset(p->form.dtype, 0, part % parts * p->item_rows);
    return (Work){.panel = (const char *)p->panels + offset, .place = place, .first_output = part * p->item_outputs,
                  .num_outputs = left < p->item_outputs ? left : p->item_outputs,
                  .from = begin + (int)((int64_t)num_rows * chunk / num_chunks),
                  .to = begin + (int)((int64_t)num_rows * (chunk + 1) / num_chunks)};
}

static void scale_sums(float *sums, float scale) {
    for (int i = 0; i < PANEL_ROWS; i++) sums[i] *= scale;
}

static void run_item(const void *job, long item) {
    const Items *items = job;
    const Product *p = items->product;
    const Work work = work_of(items, item);
    const void *next = work_of(items, item + 1 < items->count ? item + 1 : item).panel;
    ProductKernel *multiply = items->multiply;
    const Form form = p->form;
    const int columns = p->columns, outputs = p->epilogue == ACTIVATE ? PANEL_ROWS : work.num_outputs;
    const int num_rows = work.to - work.from;
    const void *in[TOKEN_CHUNK] = {NULL};
    PanelSums sums[TOKEN_CHUNK] __attribute__((aligned(64)));
    for (int i = 0; i < num_rows; i++) {
        int64_t row = (p->assignments ? p->assignments[work.from + i] : work.from + i) / p->input_divisor;
        in[i] = items->quantized ? (const void *)(items->quantized + row * items->row_bytes) : product_input(p, row);
    }
    may_be_taken();
    multiply(form, work.panel, columns, outputs, num_rows, in, sums, next);
    if (was_taken()) return;
    for (int i = 0; i < num_rows; i++) {
        if (p->tensor_scale) scale_sums(sums[i], p->tensor_scale);
        if (p->bias) add_bias(p, work.place, work.first_output, sums[i]);
        if (p->epilogue == ACTIVATE) items->kernels->activate(sums[i], items->header);
        int64_t row = p->assignments ? p->assignments[work.from + i] : work.from + i;
        store_row(p, p->output + row * p->outputs + work.first_output, sums[i], work.num_outputs);
    }
}

void host_product(const Model *m, const Product *p) {
    const Isa *isa = host_isa();
    const int is_integers = takes_integers(p->form);
    Items items = {.product = p, .kernels = isa->kernels, .header = &m->header,
                   .multiply = (is_integers ? isa->integers->product : isa->kernels->product)[p->form.dtype]};
    int num_parts = CEIL_DIV(p->outputs, p->item_outputs), num_rows = 0;
    for (int i = 0; i < p->num_active; i++) {
        int rows = p->offsets[p->active[i] + 1] - p->offsets[p->active[i]];
        items.first[i + 1] = items.first[i] + (long)num_parts * CEIL_DIV(rows, TOKEN_CHUNK);
        num_rows += rows;
    }
    items.count = items.first[p->num_active];
    if (is_integers) {
        items.quantized = host_quantize(m, p, num_rows / p->input_divisor);
        items.row_bytes = quantized_bytes(p->columns, p->form.group);
    }
    double cost = (double)num_rows * num_parts * p->item_rows * p->columns;
    parallel_for(m->num_threads, items.count, cost, run_item, &items);
}

void host_dense(const Model *m, int num_rows, Product p) {
    const int32_t offsets[2] = {0, num_rows}, active[1] = {0};
    if (!p.item_rows) p.item_rows = PANEL_ROWS;
    p.item_outputs = p.epilogue == ACTIVATE ? PANEL_ROWS / (1 + GATED) : p.item_rows;
    p.num_stored = p.num_active = p.input_divisor = 1;
    p.active = active;
    p.offsets = offsets;
    host_product(m, &p);
}

int host_qkv(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    host_dense(m, num_tokens, (Product){
        MATRIX(weights, qkv), .form = DENSE_FORM, .input = m->state.normed, .output = m->state.qkv, .columns =
        HIDDEN, .outputs = QKV_ROWS, .bias = weights->qkv_bias, .scale = 1});
    return 0;
}

#if ATTENTION_KIND != ATTENTION_MOA
int host_attention_out(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    host_dense(m, num_tokens, (Product){
        MATRIX(weights, attention_out), .form = DENSE_FORM, .input = m->state.attention, .output = m->state.x,
        .columns = NUM_HEADS * V_HEAD_DIM, .outputs = HIDDEN, .bias = weights->attention_out_bias, .scale =
        m->header.residual_multiplier, .epilogue = ADD});
    return 0;
}
#endif

int host_lm_head(Model *m, int num_logits, int layer) {
    (void)layer;
    const Weights *weights = &m->weights; /* tied: lm_head is embed */
    host_dense(m, num_logits, (Product){
        MATRIX(weights, lm_head), .form = EMBED_FORM, .input =
        m->state.normed, .output = m->state.logits, .columns = HIDDEN, .outputs = VOCAB_SIZE, .bias =
        m->weights.lm_head_bias, .scale = m->header.logits_multiplier});
    return 0;
}
