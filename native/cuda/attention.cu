/* Causal attention over the KV cache, a block for one token, one tile of queries that share a kv head, and one chunk of
 * positions. Chunks are counted from the first position that the token sees and are merged in their order, for few
 * tokens by the last block of the token to finish, for a long prompt by one block that takes all chunks: the same bits
 * either way. */
#include "attention.cuh"

#if NUM_HEADS

namespace {

constexpr int SPLIT_TOKENS = MAX_TOKENS < 64 ? MAX_TOKENS : 64; /* more fill the GPU without splitting positions */

/* What a block leaves for the last of its token and tile. */
struct ChunkResult {
    Values::vector_t value[OUTPUTS / Values::WIDTH];
    float maximum[QUERIES], sum[QUERIES];
};

/* What another block has written, past this SM's cache. */
__device__ __forceinline__ Values::vector_t read_vector(const Values::vector_t *from) {
    using short_t = std::conditional_t<Values::WIDTH == 2, float2, float>;
    using bits_t = std::conditional_t<Values::WIDTH == 4, float4, short_t>;
    bits_t bits = __ldcg((const bits_t *)from);
    return *(Values::vector_t *)&bits;
}

/* Publishes this block's chunk; true in the last of the (token, tile)'s blocks, with all chunks merged in out. */
__device__ bool merge_chunks(Partial (&out)[PER_THREAD], ChunkResult *chunks, int *arrived, int chunk, int num_chunks) {
    __shared__ bool last;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (!is_output(i)) continue;
        chunks[chunk].value[output_vector(i)] = out[i].value;
        if (output_vector(i) * Values::WIDTH % V_HEAD_DIM > 0) continue;
        chunks[chunk].maximum[query_of(i)] = out[i].maximum, chunks[chunk].sum[query_of(i)] = out[i].sum;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == num_chunks - 1;
        if (last) *arrived = 0; /* for the next layer */
    }
    __syncthreads();
    if (!last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        out[i] = {-INFINITY, 0.0f, {}};
#pragma unroll 4
        for (const ChunkResult *c = chunks; c < chunks + num_chunks && is_output(i); c++)
            merge(out[i], {__ldcg(&c->maximum[query_of(i)]), __ldcg(&c->sum[query_of(i)]),
                           read_vector(&c->value[output_vector(i)])});
    }
    return true;
}

/* Grid: (tokens, TILES, chunks), or (tokens, TILES) where a block takes every chunk. WINDOW: the layer has one. */
template <bool WINDOW>
__global__ void __launch_bounds__(THREADS) attention_kernel(Arguments a, ChunkResult *chunks, int *arrived) {
    __shared__ Shared s;
    pdl_wait();
    pdl_trigger();
    int token = blockIdx.x, tile = blockIdx.y, chunk = blockIdx.z;
    int num_tokens = a.batch->num_tokens, position = a.batch->positions[token], slot = a.batch->slots[token];
    if (token >= num_tokens) return;
    int first = WINDOW && position >= a.cache.window ? position - a.cache.window + 1 : 0;
    int num_positions = position - first + 1, num_chunks = (num_positions - 1) / CHUNK + 1;
    if (chunk >= num_chunks) return;
    const float *query = a.q + (int64_t)token * Q_STRIDE;
    for (int i = threadIdx.x; i < QUERIES * HEAD_DIM; i += THREADS)
        s.query[i / HEAD_DIM][i % HEAD_DIM] = query[head_of(tile, i / HEAD_DIM) * HEAD_DIM + i % HEAD_DIM];
    int64_t row = cache_row(a.cache, slot, tile * QUERIES / GROUP, 0);
    Seen seen = {a.keys + row * HEAD_DIM, a.values + row * V_HEAD_DIM, WINDOW ? first % a.cache.positions : 0,
                 a.cache.positions};

    Partial all[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) all[i] = {-INFINITY, 0.0f, {}};
#pragma unroll 1
    for (; chunk < num_chunks; chunk++) {
        Partial one[PER_THREAD] = {};
        attend<WINDOW>(one, s, seen, chunk * CHUNK, min(CHUNK, num_positions - chunk * CHUNK), a.scale);
        if (gridDim.z > 1 && num_chunks > 1) {
            int index = token * TILES + tile;
            if (!merge_chunks(one, chunks + (int64_t)index * CHUNKS, &arrived[index], chunk, num_chunks)) return;
            chunk = num_chunks;
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) merge(all[i], one[i]);
    }
    float *out = a.out + (int64_t)token * NUM_HEADS * V_HEAD_DIM;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (!is_output(i)) continue;
        int head = head_of(tile, query_of(i));
        if (SINKS) merge(all[i], {a.sinks[head], 1.0f, {}});
#pragma unroll
        for (int v = 0; v < Values::WIDTH; v++) all[i].value.of[v] /= all[i].sum;
        int column = output_vector(i) * Values::WIDTH % V_HEAD_DIM;
        *(Values::vector_t *)(out + head * V_HEAD_DIM + column) = all[i].value;
    }
}

} // namespace

int64_t cuda_attention_scratch_bytes() {
    return scratch_round(SPLIT_TOKENS * TILES * sizeof(int)) +
           scratch_round((int64_t)SPLIT_TOKENS * TILES * CHUNKS * sizeof(ChunkResult));
}

int cuda_attention(Model *m, int num_tokens, int layer) {
    int *arrived = (int *)attention_scratch(m);
    ChunkResult *chunks = (ChunkResult *)(attention_scratch(m) + scratch_round(SPLIT_TOKENS * TILES * sizeof(int)));
    const State &s = m->state;
    Arguments arguments = {s.attention, OWN_Q ? s.q : s.qkv, s.key_cache, s.value_cache, m->weights.layers[layer].sinks,
                           device_batch(m), layer_cache(m, layer), m->header.attention_scale};
    int window = arguments.cache.window, longest = window && window < MAX_SEQ_LEN ? window : MAX_SEQ_LEN;
    dim3 grid(num_tokens, TILES, num_tokens <= SPLIT_TOKENS ? ceil_div(longest, CHUNK) : 1);
    return launch(m, "attention", window ? attention_kernel<true> : attention_kernel<false>, grid, THREADS, 0,
                  arguments, chunks, arrived);
}

#else
int64_t cuda_attention_scratch_bytes() { return 0; }
#endif
