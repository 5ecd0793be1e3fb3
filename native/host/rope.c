/* From a row of qkv to queries, and to keys and values in the caches. */
#include <math.h>
#include <string.h>

#include "host.h"

#define HALF (ROTARY_DIM / 2)

/* Cosines and sines of this step's positions, once for all layers. The angle is taken in double: a rounding of it
 * would grow with the position. */
void host_fill_rope_table(const Model *m, int num_tokens) {
    const BinHeader *h = &m->header;
    float *row = rope_table(m);
    for (int t = 0; t < num_tokens; t++, row += ROTARY_DIM) {
        int length = m->batch->rope_lengths[t];
        int is_long = ROPE_KIND == ROPE_LONG && is_long_rope(length, h->rope_original_positions);
        const float *frequencies = is_long ? m->weights.rope_long_frequencies : m->weights.rope_frequencies;
        float factor = is_long ? h->rope_long_attention_factor : h->rope_attention_factor;
        for (int i = 0; i < HALF; i++) {
            float frequency = frequencies[i];
            if (ROPE_KIND == ROPE_DYNAMIC)
                frequency = dynamic_frequency(frequency, i, length, h->rope_original_positions, h->rope_dynamic_factor);
            double angle = m->batch->positions[t] * (double)frequency;
            row[i] = (float)cos(angle) * factor;
            row[HALF + i] = (float)sin(angle) * factor;
        }
    }
}

static void rotate(float *head, const float *table) {
    const float *cosine = table, *sine = table + HALF;
    for (int i = 0; i < HALF; i++) {
        float a = head[i], b = head[i + HALF];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + HALF] = b * cosine[i] + a * sine[i];
    }
}

typedef struct Rope {
    const Model *model;
    const Kernels *kernels;
    const Layer *weights;
    LayerCache cache;
} Rope;

/* `heads` heads side by side: normed, clipped, rotated. */
static void prepare(const Rope *r, float *row, int heads, const float *norm, const float *table) {
    const BinHeader *h = &r->model->header;
    if (QK_NORM == QK_NORM_ALL && norm) r->kernels->rms_norm(row, row, norm, h->norm_eps, heads * HEAD_DIM);
    for (int head = 0; head < heads; head++, row += HEAD_DIM) {
        if (QK_NORM == QK_NORM_HEAD && norm) r->kernels->rms_norm(row, row, norm, h->norm_eps, HEAD_DIM);
        for (int i = 0; h->clip_qkv > 0 && i < HEAD_DIM; i++)
            row[i] = fminf(fmaxf(row[i], -h->clip_qkv), h->clip_qkv);
        if (ROPE_KIND != ROPE_NONE && table) rotate(row, table);
    }
}

static void rope_token(const void *job, long t) {
    const Rope *r = job;
    const Model *m = r->model;
    const float *table = rope_table(m) + t * ROTARY_DIM;
    float *row = m->state.qkv + t * QKV_ROWS, *k = row + QKV_ROWS - 2 * NUM_KV_HEADS * HEAD_DIM;
    float *v = k + NUM_KV_HEADS * HEAD_DIM;
    prepare(r, q_row(m, t), NUM_HEADS, r->weights->q_norm, table);
    if (ATTENTION_KIND == ATTENTION_LATENT) {
        rotate(row + QKV_ROWS - ROTARY_DIM, table); /* one for all heads */
        k = m->state.kv + t * KV_B_ROWS;
        v = k + NUM_HEADS * NOPE_DIM;
    } else {
        prepare(r, k, NUM_KV_HEADS, r->weights->k_norm, table);
        prepare(r, v, NUM_KV_HEADS, NULL, NULL);
    }
    for (int head = 0; head < NUM_KV_HEADS; head++) {
        int64_t at = cache_row(r->cache, m->batch->slots[t], head, m->batch->positions[t]);
        float *key = m->state.key_cache + at * HEAD_DIM;
        if (ATTENTION_KIND == ATTENTION_LATENT) {
            memcpy(key, row + QKV_ROWS - ROTARY_DIM, sizeof(float) * ROTARY_DIM);
            memcpy(key + ROTARY_DIM, k + head * NOPE_DIM, sizeof(float) * NOPE_DIM);
        } else {
            memcpy(key, k + head * HEAD_DIM, sizeof(float) * HEAD_DIM);
        }
        memcpy(m->state.value_cache + at * V_HEAD_DIM, v + head * V_HEAD_DIM, sizeof(float) * V_HEAD_DIM);
    }
}

int host_rope(Model *m, int num_tokens, int layer) {
    Rope rope = {m, host_kernels(), &m->weights.layers[layer], layer_cache(m, layer)};
    parallel_for(m->num_threads, num_tokens, 4.0 * num_tokens * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, rope_token,
                 &rope);
    return 0;
}
