/* From rows of qkv to queries, and to keys and values in the caches: q and k normed, clipped and rotated by their
 * token's position. A block has some heads of one token: as many as are normed together, of q, of k or of v. */
#include <cmath>

#include "launch.cuh"
#include "numbers.cuh"
#include "scratch.cuh"

#if NUM_HEADS

namespace {

constexpr int PAIRS = HEAD_DIM / 2; /* of a head: the rotated dimensions i and i + HALF, then the others */
constexpr int HALF = ROPE_KIND != ROPE_NONE ? ROTARY_DIM / 2 : 0;

constexpr int heads_of_block() {
    if (QK_NORM == QK_NORM_ALL) return NUM_HEADS;
    return QK_NORM == QK_NORM_HEAD || PAIRS > 128 ? 1 : 128 / PAIRS;
}
constexpr int HEADS = heads_of_block();
constexpr int THREADS = HEADS * PAIRS < 1024 ? round_up(HEADS * PAIRS, 32) : 1024;
constexpr int PER_THREAD = ceil_div(HEADS * PAIRS, THREADS);
constexpr int Q_BLOCKS = ceil_div(NUM_HEADS, HEADS), KV_BLOCKS = ceil_div(NUM_KV_HEADS, HEADS);

struct Arguments {
    float *qkv, *q, *keys, *values;
    const float *kv; /* ATTENTION_LATENT: the heads' k but for the rotated part, then their v */
    const float *q_norm, *k_norm, *frequencies, *long_frequencies;
    const Batch *batch;
    LayerCache cache;
    float eps, clip, factor, long_factor;
    uint32_t original_positions;
};

/* A pair's two places in its head. */
__device__ int first_of(int pair) { return pair < HALF ? pair : pair + HALF; }
__device__ int second_of(int pair) { return pair < HALF ? pair + HALF : first_of(pair) + PAIRS - HALF; }

__device__ float clipped(float value, float limit) { return limit > 0.0f ? fminf(fmaxf(value, -limit), limit) : value; }

__device__ void rotate(float2 &x, int position, float frequency, float factor) {
    float sine, cosine, low = x.x;
    double turns = position * (frequency * (0.5 / M_PI)); /* an angle's rounding would grow with the position */
    sincospif(2.0f * (float)(turns - rint(turns)), &sine, &cosine);
    sine *= factor, cosine *= factor;
    x.x = low * cosine - x.y * sine;
    x.y = x.y * cosine + low * sine;
}

/* Where a value of a head of q, or of k before it is rotated, comes from. */
__device__ const float *source(const Arguments &a, int token, bool is_q, int head, int dim) {
    const float *row = a.qkv + (int64_t)token * QKV_ROWS;
    if (is_q) return OWN_Q ? a.q + ((int64_t)token * NUM_HEADS + head) * HEAD_DIM + dim : row + head * HEAD_DIM + dim;
    if (ATTENTION_KIND != ATTENTION_LATENT) return row + QKV_ROWS - (2 * NUM_KV_HEADS - head) * HEAD_DIM + dim;
    if (dim < ROTARY_DIM) return row + QKV_ROWS - ROTARY_DIM + dim; /* one for all heads */
    return a.kv + (int64_t)token * KV_B_ROWS + head * NOPE_DIM + dim - ROTARY_DIM;
}

/* The norm of `count` heads: over each by itself where blocks have one head, else over all of them. */
__device__ void norm_heads(float2 (&x)[PER_THREAD], const float *weight, int count, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) squares += x[i].x * x[i].x + x[i].y * x[i].y;
    float scale = 1.0f / sqrtf(block_sum<THREADS>(squares) / (count * HEAD_DIM) + eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        int pair = threadIdx.x + i * THREADS, head = pair / PAIRS;
        if (head >= count) continue;
        x[i].x *= scale * weight[head * HEAD_DIM + first_of(pair % PAIRS)];
        x[i].y *= scale * weight[head * HEAD_DIM + second_of(pair % PAIRS)];
    }
}

/* `count` heads of q or k of one token. */
__device__ void query_or_key(const Arguments &a, int token, bool is_q, int first_head, int count) {
    const bool whole = is_q || ATTENTION_KIND != ATTENTION_LATENT;
    int position = a.batch->positions[token], slot = a.batch->slots[token];
    bool is_long = ROPE_KIND == ROPE_LONG && is_long_rope(a.batch->rope_lengths[token], a.original_positions);
    const float *frequencies = is_long ? a.long_frequencies : a.frequencies;
    float factor = is_long ? a.long_factor : a.factor;
    if (ROPE_KIND == ROPE_DYNAMIC) frequencies += (int64_t)token * HALF;
    float2 x[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        int pair = threadIdx.x + i * THREADS, head = pair / PAIRS;
        x[i] = {0.0f, 0.0f};
        if (head >= count) continue;
        x[i].x = *source(a, token, is_q, first_head + head, first_of(pair % PAIRS));
        x[i].y = *source(a, token, is_q, first_head + head, second_of(pair % PAIRS));
    }
    if (QK_NORM != QK_NORM_NONE && whole) norm_heads(x, is_q ? a.q_norm : a.k_norm, count, a.eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        int pair = threadIdx.x + i * THREADS, head = first_head + pair / PAIRS;
        if (pair / PAIRS >= count) continue;
        pair %= PAIRS;
        if (whole) x[i] = {clipped(x[i].x, a.clip), clipped(x[i].y, a.clip)};
        if (pair < HALF) rotate(x[i], position, frequencies[pair], factor);
        if (whole) {
            *const_cast<float *>(source(a, token, is_q, head, first_of(pair))) = x[i].x;
            *const_cast<float *>(source(a, token, is_q, head, second_of(pair))) = x[i].y;
        }
        if (is_q) continue;
        float *key = a.keys + cache_row(a.cache, slot, head, position) * HEAD_DIM;
        key[first_of(pair)] = x[i].x, key[second_of(pair)] = x[i].y;
    }
}

__device__ void value_heads(const Arguments &a, int token, int first_head, int count) {
    const bool latent = ATTENTION_KIND == ATTENTION_LATENT;
    int position = a.batch->positions[token], slot = a.batch->slots[token];
    float *row = a.qkv + (int64_t)token * QKV_ROWS + QKV_ROWS - NUM_KV_HEADS * HEAD_DIM;
    const float *from = latent ? a.kv + (int64_t)token * KV_B_ROWS + NUM_HEADS * NOPE_DIM : row;
    for (int i = threadIdx.x; i < count * V_HEAD_DIM; i += THREADS) {
        int head = first_head + i / V_HEAD_DIM, dim = i % V_HEAD_DIM;
        float value = from[head * V_HEAD_DIM + dim];
        if (!latent && a.clip > 0.0f) row[head * V_HEAD_DIM + dim] = value = clipped(value, a.clip);
        a.values[cache_row(a.cache, slot, head, position) * V_HEAD_DIM + dim] = value;
    }
}

/* Grid: (tokens, blocks of q's heads, then of k's, then of v's). */
__global__ void __launch_bounds__(THREADS) rope_kernel(Arguments a) {
    pdl_wait();
    pdl_trigger();
    int token = blockIdx.x, block = blockIdx.y;
    if (token >= a.batch->num_tokens) return;
    bool is_q = block < Q_BLOCKS, is_v = block >= Q_BLOCKS + KV_BLOCKS;
    int first_head = HEADS * (is_q ? block : (block - Q_BLOCKS) % KV_BLOCKS);
    int count = min(HEADS, (is_q ? NUM_HEADS : NUM_KV_HEADS) - first_head);
    if (is_v) value_heads(a, token, first_head, count);
    else query_or_key(a, token, is_q, first_head, count);
}

} // namespace

int cuda_rope(Model *m, int num_tokens, int layer) {
    const Layer &weights = m->weights.layers[layer];
    const State &s = m->state;
    Arguments arguments = {s.qkv, s.q, s.key_cache, s.value_cache, s.kv, weights.q_norm, weights.k_norm,
                           ROPE_KIND == ROPE_DYNAMIC ? s.dynamic_frequencies : m->weights.rope_frequencies,
                           m->weights.rope_long_frequencies, device_batch(m), layer_cache(m, layer), m->header.norm_eps,
                           m->header.clip_qkv, m->header.rope_attention_factor, m->header.rope_long_attention_factor,
                           m->header.rope_original_positions};
    return launch(m, "rope", rope_kernel, dim3(num_tokens, Q_BLOCKS + 2 * KV_BLOCKS), THREADS, 0, arguments);
}

#endif
