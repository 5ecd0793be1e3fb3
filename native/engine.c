/* What Python calls to make a model of memory that it owns. */
#include <string.h>

#include "colibri.h"
#include "error.h"
#include "ops.h"

const char *colibri_digest(void) {
    return HEADERS; /* from the Makefile */
}

int colibri_config(void *config) {
#define VALUE(field, macro) .field = (macro),
    Config baked = {CONFIG_FIELDS(VALUE)};
#undef VALUE
#if CUDA_ARCH
    baked.cuda_version = cuda_ops.cuda_version;
#endif
    memcpy(config, &baked, sizeof baked);
    return 0;
}

static const Ops *ops_of(int backend) {
    if (backend == COLIBRI_HOST) return &host_ops;
#if CUDA_ARCH
    if (backend == COLIBRI_CUDA) return &cuda_ops;
#endif
    fail("backend: %d, expected %d (host)%s; build with make ARCH=sm_90 or another GPU architecture", backend,
         COLIBRI_HOST, CUDA_ARCH ? " or 1 (cuda)" : ", since this library has no CUDA backend");
    return NULL;
}

const char *colibri_path(int backend) {
    const Ops *ops = ops_of(backend);
    return ops ? ops->name() : NULL;
}

int64_t colibri_model_bytes(void) { return sizeof(Model); }

/* Lays the buffers out one after another, each on a page of its own; with base 0 it only counts. */
static int64_t lay_out(State *state, uintptr_t base, const Ops *ops, const BinHeader *header, int64_t num_slots,
                       int64_t context) {
    int64_t offset = 0, num_layers = header->num_layers;
    int64_t cache_positions = cache_sizes(header, num_layers, context).cache_positions;
#define PLACE(name, type, rows, columns)                                                              \
    state->name = (type *)(base + offset);                                                            \
    offset += ((int64_t)sizeof(type) * (int64_t)(rows) * (int64_t)(columns) + DATA_ALIGNMENT - 1) /   \
              DATA_ALIGNMENT * DATA_ALIGNMENT;
    STATE_BUFFERS(PLACE)
#undef PLACE
    state->scratch = (void *)(base + offset);
    return offset + ops->scratch_bytes();
}

int64_t colibri_state_bytes(int backend, const void *header, int num_slots, int context) {
    const Ops *ops = ops_of(backend);
    State state;
    return ops ? lay_out(&state, 0, ops, header, num_slots, context) : 0;
}

int colibri_bind(void *model, int backend, const void *header, const void *weights, const void *layers, void *state,
                 void *batch, int num_slots, int context, int num_threads, void *stream) {
    Model *m = model;
    memset(m, 0, sizeof *m);
    m->ops = ops_of(backend);
    if (!m->ops || !m->ops->name()) return -1;
    memcpy(&m->header, header, sizeof m->header);
    memcpy(&m->weights, weights, sizeof m->weights);
    m->weights.layers = layers;
    m->batch = batch;
    m->stream = stream;
    m->num_slots = num_slots;
    m->context = context;
    m->num_threads = num_threads;
    lay_out(&m->state, (uintptr_t)state, m->ops, &m->header, num_slots, context);
    return backend == COLIBRI_HOST ? host_check_threads(num_threads) : 0;
}

int colibri_upload(void *target, const void *source, int64_t bytes, void *chunks, int64_t chunk_bytes, int num_threads,
                   void *stream) {
    const Ops *ops = ops_of(COLIBRI_CUDA);
    return ops ? ops->upload(target, source, bytes, chunks, chunk_bytes, num_threads, stream) : -1;
}

int colibri_check(const void *model) {
    const Batch *b = ((const Model *)model)->batch;
    if (b->fault == FAULT_ROUTER_LOGIT)
        return fail("layers.%d.router: logits of token %d are NaN, +inf or fewer than k=%d finite, expected finite; "
                    "the weights or the input hold NaN or inf", b->fault_layer, b->fault_token, EXPERTS_PER_TOKEN);
    if (b->fault == FAULT_EXPERT)
        return fail("layers.%d: expert %d was chosen and has no place in memory, expected all chosen experts there; "
                    "give it one in State.place", b->fault_layer, b->fault_token);
    if (b->fault == FAULT_LOGIT) {
        int row = 0;
        while (row < b->num_logits - 1 && b->sampled[row] >= 0) row++;
        return fail("lm_head: logits of token %d hold NaN, expected numbers; the weights hold NaN or inf",
                    b->logit_rows[row]);
    }
    return 0;
}
