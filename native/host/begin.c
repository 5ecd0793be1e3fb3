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
    if (!host_isa()) return -1;
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

/* The zero point of a row of a group, and its scale. */
static int zero_of(Form form, const uint8_t *table, int64_t table_bytes, int row) {
    if (form.zero_points) return table[table_bytes - PANEL_ROWS + row];
    return form.dtype == DTYPE_INT8 ? 128 : 8;
}

/* A weight of few bits. */
static float few_bits(Form form, const uint8_t *panel, int column, int row, float tensor_scale) {
    const PanelSizes sizes = panel_sizes(form, column + 1);
    const uint8_t *table = panel + group_offset(form, column / form.group);
    const int within = column % form.group, unit = (int)sizes.unit, place = within % unit;
    const uint8_t *four = table + sizes.table_bytes + within / unit * UNIT_BYTES + row * 4;
    const int code = unit == 4 ? four[place] : four[place % 4] >> place / 4 * 4 & 15;
    if (form.dtype == DTYPE_FP8) {
        int exponent = code >> 3 & 15, mantissa = (code & 7) + 8 * (exponent > 0);
        float number = ldexpf((float)(code & 128 ? -mantissa : mantissa), (exponent ? exponent : 1) - 10);
        return number * ((const float *)table)[row];
    }
    if (form.dtype == DTYPE_MXFP4) {
        static const float numbers[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        return ldexpf(code & 8 ? -numbers[code & 7] : numbers[code], table[row] - 127);
    }
    float scale = to_float((const uint16_t *)table + row, DTYPE_F16);
    return (float)(code - zero_of(form, table, sizes.table_bytes, row)) * scale * tensor_scale;
}

static float embedding(const char *panel, int column, int row, float tensor_scale) {
    if (EMBED_FORMAT >= NUM_WIDE_DTYPES)
        return few_bits(EMBED_FORM, (const uint8_t *)panel, column, row, tensor_scale);
    return to_float(panel + element_offset(EMBED_FORMAT, column, row), EMBED_FORMAT);
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
                embedding(panel, i, token % PANEL_ROWS, (float)m->weights.embed_scale);
    }
    return 0;
}
