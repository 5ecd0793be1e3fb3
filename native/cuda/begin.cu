/* What a step begins with: the batch comes over from host memory, and its tokens' embeddings become x. */
#include "launch.cuh"
#include "numbers.cuh"
#include "scratch.cuh"

namespace {

constexpr int THREADS = 128;
/* The batch's arrays that go over: of tokens, then of logits. */
constexpr int TOKEN_ARRAYS = (offsetof(Batch, logit_rows) - offsetof(Batch, tokens)) / sizeof(Batch::tokens);
constexpr int LOGIT_ARRAYS = (offsetof(Batch, sampled) - offsetof(Batch, logit_rows)) / sizeof(Batch::logit_rows);

/* Grid: (blocks of tokens, those arrays). One trip over the bus: nothing read decides what to read. */
__global__ void begin_kernel(Batch *copy, const Batch *batch, int num_tokens) {
    pdl_wait();
    pdl_trigger();
    int i = blockIdx.x * THREADS + threadIdx.x, array = blockIdx.y, logit_array = array - TOKEN_ARRAYS;
    int at = logit_array < 0 ? array * MAX_STEP_TOKENS
                             : TOKEN_ARRAYS * MAX_STEP_TOKENS + logit_array * MAX_STEP_LOGITS;
    if (i < num_tokens && (logit_array < 0 || i < MAX_STEP_LOGITS))
        (copy->tokens + at)[i] = __ldcv(batch->tokens + at + i);
    if (i == 0 && blockIdx.y == 0) {
        copy->input = (const float *)__ldcv((const unsigned long long *)&batch->input);
        copy->num_tokens = __ldcv(&batch->num_tokens);
        copy->num_logits = __ldcv(&batch->num_logits);
        copy->sample = __ldcv(&batch->sample);
    }
}

__global__ void embed_kernel(float *x, const weight_t *embed, const Batch *batch, float multiplier) {
    pdl_wait();
    pdl_trigger();
    int t = blockIdx.x, i = blockIdx.y * THREADS + threadIdx.x;
    if (t >= batch->num_tokens || i >= HIDDEN) return;
    if (!NUM_HEADS) { /* over the bus, from where the caller has it */
        x[(int64_t)t * HIDDEN + i] = __ldcv(batch->input + (int64_t)t * HIDDEN + i);
        return;
    }
    int row = batch->tokens[t];
    const weight_t *column = embed + column_index(HIDDEN, 1, row / PANEL_ROWS, 0, i);
    x[(int64_t)t * HIDDEN + i] = to_float(column[row % PANEL_ROWS]) * multiplier;
}

/* ROPE_DYNAMIC's, once for all layers. */
__global__ void frequencies_kernel(float *out, const float *frequencies, const Batch *batch,
                                   uint32_t original_positions, float factor) {
    pdl_wait();
    pdl_trigger();
    int t = blockIdx.x, pair = blockIdx.y * THREADS + threadIdx.x;
    if (t >= batch->num_tokens || pair >= ROTARY_DIM / 2) return;
    out[(int64_t)t * (ROTARY_DIM / 2) + pair] =
        dynamic_frequency(frequencies[pair], pair, batch->rope_lengths[t], original_positions, factor);
}

} // namespace

int cuda_begin(Model *m, int num_tokens, int) {
    TRY(launch(m, "begin", begin_kernel, dim3(ceil_div(num_tokens, THREADS), TOKEN_ARRAYS + LOGIT_ARRAYS), THREADS, 0,
               device_batch(m), m->batch, num_tokens));
    if (!NUM_HEADS || ROPE_KIND != ROPE_DYNAMIC) return 0;
    return launch(m, "frequencies", frequencies_kernel, dim3(num_tokens, ceil_div(ROTARY_DIM / 2, THREADS)), THREADS, 0,
                  m->state.dynamic_frequencies, m->weights.rope_frequencies, device_batch(m),
                  m->header.rope_original_positions, m->header.rope_dynamic_factor);
}

int cuda_embed(Model *m, int num_tokens, int) {
    return launch(m, "embed", embed_kernel, dim3(num_tokens, ceil_div(HIDDEN, THREADS)), THREADS, 0, m->state.x,
                  (const weight_t *)m->weights.embed, device_batch(m), m->header.embedding_multiplier);
}
