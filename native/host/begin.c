/* Begins a step: checks its batch, and puts its tokens' embeddings into x. */
#include <math.h>
#include <string.h>

#include "host.h"

#define CHECK_RANGE(array, i, limit, fix)                                                                \
    if (b->array[i] < 0 || b->array[i] >= (limit))                                                       \
        return fail("batch: " #array "[%d]=%d, expected 0 to %d; " fix, i, b->array[i], (int)(limit)-1);

int host_begin(Model *m, int num_tokens, int layer) {
    (void)layer;
    Batch *b = m->batch;
    if (!host_kernels()) return -1;
    if (num_tokens < 1 || num_tokens > MAX_STEP_TOKENS || num_tokens != b->num_tokens)
        return fail("batch: num_tokens=%d in a step of %d, expected the same number from 1 to %d; build with a larger "
                    "MAX_STEP_TOKENS or send fewer tokens", b->num_tokens, num_tokens, MAX_STEP_TOKENS);
    if (b->num_logits < 0 || b->num_logits > num_tokens || b->num_logits > MAX_STEP_LOGITS)
        return fail("batch: num_logits=%d, expected 0 to num_tokens=%d and at most MAX_STEP_LOGITS=%d; ask for each "
                    "token's logits once at most", b->num_logits, num_tokens, MAX_STEP_LOGITS);
    for (int t = 0; NUM_HEADS && t < num_tokens; t++) {
        CHECK_RANGE(tokens, t, VOCAB_SIZE, "the text was made for another vocabulary")
        CHECK_RANGE(slots, t, m->num_slots, "open the model with more sessions")
        CHECK_RANGE(positions, t, m->context, "the context is full: open the model with a larger one")
    }
    int piece = (int)cache_sizes(&m->header, m->header.num_layers, m->context).max_piece;
    for (int t = piece; NUM_HEADS && t < num_tokens; t++)
        if (b->slots[t] == b->slots[t - piece] && b->positions[t] - b->positions[t - piece] >= piece)
            return fail("batch: more than %d tokens of slot %d, expected no more in one step of a model with a window; "
                        "send the rest in another", piece, b->slots[t]);
    for (int i = 0; i < b->num_logits; i++) CHECK_RANGE(logit_rows, i, num_tokens, "name tokens of this batch")
    b->fault = 0;
    if (NUM_HEADS && ROPE_KIND != ROPE_NONE) host_fill_rope_table(m, num_tokens);
    return 0;
}

static float to_float(const void *element, int format) {
    if (format == DTYPE_F32) return *(const float *)element;
    const uint16_t weight = *(const uint16_t *)element;
    if (format == DTYPE_BF16) {
        union { uint32_t u; float f; } bits = {(uint32_t)weight << 16};
        return bits.f;
    }
    int exponent = weight >> 10 & 31, mantissa = weight & 1023;
    float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                     : ldexpf(exponent ? mantissa + 1024 : mantissa, (exponent ? exponent : 1) - 25);
    return weight & 0x8000 ? -magnitude : magnitude;
}

int host_embed(Model *m, int num_tokens, int layer) {
    (void)layer;
    if (!NUM_HEADS) memcpy(m->state.x, m->batch->input, sizeof(float) * HIDDEN * num_tokens);
    for (int t = 0; NUM_HEADS && t < num_tokens; t++) {
        int token = m->batch->tokens[t];
        const char *panel = (const char *)m->weights.embed +
                            panel_offset(EMBED_FORM, HIDDEN, 1, token / PANEL_ROWS, 0);
        for (int i = 0; i < HIDDEN; i++)
            m->state.x[(int64_t)t * HIDDEN + i] = m->header.embedding_multiplier *
                to_float(panel + element_offset(EMBED_FORMAT, i, token % PANEL_ROWS), EMBED_FORMAT);
    }
    return 0;
}
