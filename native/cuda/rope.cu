/* Rotates q and k by their token's position and stores k and v in the caches: a thread a pair of values. */
#include <cmath>

#include "common.cuh"

#if NUM_HEADS

namespace {

constexpr int THREADS = 128;
constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIRS = (NUM_HEADS + 2 * NUM_KV_HEADS) * HALF; /* a token */

__global__ void rope_kernel(float *qkv, float *keys, float *values, const Batch *batch, LayerCache cache,
                            const float *frequencies) {
    pdl_wait();
    pdl_trigger();
    int token = blockIdx.x, pair = blockIdx.y * THREADS + threadIdx.x;
    if (token >= batch->num_tokens || pair >= PAIRS) return;
    int position = batch->positions[token], slot = batch->slots[token], head = pair / HALF, i = pair % HALF;
    float *row = qkv + (int64_t)token * PAIRS * 2 + head * HEAD_DIM;
    float low = row[i], high = row[i + HALF];
    if (ROPE_KIND == ROPE_DEFAULT && head < NUM_HEADS + NUM_KV_HEADS) {
        float sine, cosine, x = low;
        double turns = position * (frequencies[i] * (0.5 / M_PI)); /* an angle's rounding would grow with the position */
        sincospif(2.0f * (float)(turns - rint(turns)), &sine, &cosine);
        low = x * cosine - high * sine;
        high = high * cosine + x * sine;
    }
    bool value = head >= NUM_HEADS + NUM_KV_HEADS;
    if (!value) row[i] = low, row[i + HALF] = high;
    if (head >= NUM_HEADS) {
        int kv_head = head - NUM_HEADS - (value ? NUM_KV_HEADS : 0);
        float *entry = (value ? values : keys) + cache_row(cache, slot, kv_head, position) * HEAD_DIM;
        entry[i] = low, entry[i + HALF] = high;
    }
}

} // namespace

int cuda_rope(Model *m, int num_tokens, int layer) {
    return launch(m, "rope", rope_kernel, dim3(num_tokens, ceil_div(PAIRS, THREADS)), THREADS, 0, m->state.qkv,
                  m->state.key_cache, m->state.value_cache, device_batch(m), layer_cache(m, layer),
                  m->weights.rope_frequencies);
}

#endif
