#include <math.h>
#include <string.h>

#include "host.h"

/* Cosines and sines of this step's positions, once for all layers. The angle is taken in double: a rounding of it
 * would grow with the position. */
void host_fill_rope_table(const Model *m, int num_tokens) {
    const int half = HEAD_DIM / 2;
    float *row = rope_table(m);
    double frequency[HEAD_DIM / 2 + 1];
    for (int i = 0; i < half; i++) frequency[i] = pow(m->header.rope_theta, -(double)i / half);
    for (int t = 0; t < num_tokens; t++, row += HEAD_DIM)
        for (int i = 0; i < half; i++) {
            double angle = m->batch->positions[t] * frequency[i];
            row[i] = (float)cos(angle);
            row[half + i] = (float)sin(angle);
        }
}

static void rotate(float *head, const float *table) {
    const float *cosine = table, *sine = table + HEAD_DIM / 2;
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        float a = head[i], b = head[i + HEAD_DIM / 2];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + HEAD_DIM / 2] = b * cosine[i] + a * sine[i];
    }
}

int host_rope(Model *m, int num_tokens, int layer) {
    const Batch *b = m->batch;
    const size_t head_bytes = sizeof(float) * HEAD_DIM;
    for (int t = 0; t < num_tokens; t++) {
        float *q = m->state.qkv + (int64_t)t * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM;
        float *k = q + NUM_HEADS * HEAD_DIM, *v = k + NUM_KV_HEADS * HEAD_DIM;
        for (int head = 0; ROPE_KIND == ROPE_DEFAULT && head < NUM_HEADS + NUM_KV_HEADS; head++)
            rotate(q + head * HEAD_DIM, rope_table(m) + (int64_t)t * HEAD_DIM);
        int64_t cache_head = ((int64_t)layer * m->num_slots + b->slots[t]) * NUM_KV_HEADS;
        for (int head = 0; head < NUM_KV_HEADS; head++) {
            int64_t at = ((cache_head + head) * MAX_SEQ_LEN + b->positions[t]) * HEAD_DIM;
            memcpy(m->state.key_cache + at, k + head * HEAD_DIM, head_bytes);
            memcpy(m->state.value_cache + at, v + head * HEAD_DIM, head_bytes);
        }
    }
    return 0;
}
