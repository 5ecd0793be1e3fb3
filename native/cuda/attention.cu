/* Causal attention over the KV cache, a block for one token, one tile of queries that share a kv head, and one chunk of
 * positions. Chunks are counted from the first position that the token sees and are merged in their order, for few
 * tokens by the last block of the token to finish, for a long prompt by one block that takes all chunks: the same bits
 * either way. */
#include "common.cuh"

#if NUM_HEADS

namespace {

constexpr int THREADS = 128;
constexpr int SPLIT_TOKENS = MAX_TOKENS < 64 ? MAX_TOKENS : 64; /* more fill the GPU without splitting positions */
constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int LONGEST = HEAD_DIM > V_HEAD_DIM ? HEAD_DIM : V_HEAD_DIM;

/* Queries of one block: a divisor of GROUP, bounded by what they hold in shared memory and registers. */
constexpr int tile_queries() {
    int queries = 8;
    while (GROUP % queries != 0 || (queries > 1 && queries * LONGEST > 1024)) queries--;
    return queries;
}
constexpr int QUERIES = tile_queries();
constexpr int TILES = NUM_HEADS / QUERIES;

/* Positions of one block: at most 64 chunks of a sequence, as far as shared memory allows. */
constexpr int chunk_positions() {
    int positions = round_up(ceil_div(MAX_SEQ_LEN, 64), THREADS);
    return positions > 1024 ? 1024 : positions;
}
constexpr int CHUNK = chunk_positions();
constexpr int CHUNKS = ceil_div(MAX_SEQ_LEN, CHUNK);

constexpr int VECTOR = HEAD_DIM % 4 == 0 ? 4 : 2;
using vector_t = std::conditional_t<VECTOR == 4, float4, float2>;

constexpr int LANES = V_HEAD_DIM < THREADS ? V_HEAD_DIM : THREADS;  /* threads that share a row of values ... */
constexpr int STREAMS = THREADS / LANES;                           /* ... and rows that are summed side by side */
constexpr int PER_LANE = ceil_div(V_HEAD_DIM, LANES);
constexpr int OUTPUTS = QUERIES * V_HEAD_DIM;           /* of a block ... */
constexpr int PER_THREAD = ceil_div(OUTPUTS, THREADS); /* ... and those that a thread keeps */

struct Shared {
    alignas(16) float query[QUERIES][HEAD_DIM]; /* read as vectors */
    float score[CHUNK][QUERIES]; /* then exp(score - maximum) */
    float stream[STREAMS][OUTPUTS];
    float maximum[QUERIES], sum[QUERIES];
};

/* The keys and values of a kv head that one token sees: rows `first`, first + 1, ..., in a ring of `ring` rows. */
struct Seen {
    const float *keys, *values;
    int first, ring;
};

/* Row of position p of those; below 2 * ring before it is taken back into the ring. */
template <bool WINDOW> __device__ int64_t row_of(const Seen &seen, int p) {
    int row = seen.first + p;
    return WINDOW && row >= seen.ring ? row - seen.ring : row;
}

/* softmax(scores) v of one or more chunks is value / sum; maximum is what exp was taken relative to. */
struct Partial {
    float maximum, sum, value;
};

/* What a block leaves for the last of its token and tile. */
struct ChunkResult {
    float maximum[QUERIES], sum[QUERIES], value[OUTPUTS];
};

/* Written with explicit roundings, so that both places it is inlined in give the same bits. */
__device__ void merge(Partial &all, Partial next) {
    float maximum = fmaxf(all.maximum, next.maximum);
    float old_scale = expf(all.maximum - maximum), new_scale = expf(next.maximum - maximum);
    all.sum = __fmaf_rn(all.sum, old_scale, __fmul_rn(next.sum, new_scale));
    all.value = __fmaf_rn(all.value, old_scale, __fmul_rn(next.value, new_scale));
    all.maximum = maximum;
}

template <typename Vector> __device__ void add_product(float &sum, Vector a, Vector b) {
    sum += a.x * b.x, sum += a.y * b.y;
    if constexpr (sizeof(Vector) == sizeof(float4)) sum += a.z * b.z, sum += a.w * b.w;
}

/* score[p] = scale * q k[p], a thread a position. */
template <bool WINDOW>
__device__ void score_positions(Shared &s, const Seen &seen, int first, int num_positions, float scale) {
    for (int p = threadIdx.x; p < num_positions; p += THREADS) {
        const float *row = seen.keys + row_of<WINDOW>(seen, first + p) * HEAD_DIM;
        const vector_t *key = reinterpret_cast<const vector_t *>(row);
        float dot[QUERIES] = {};
#pragma unroll 4
        for (int d = 0; d < HEAD_DIM / VECTOR; d++) {
            vector_t k = key[d];
#pragma unroll
            for (int q = 0; q < QUERIES; q++)
                add_product(dot[q], reinterpret_cast<const vector_t *>(s.query[q])[d], k);
        }
#pragma unroll
        for (int q = 0; q < QUERIES; q++) s.score[p][q] = dot[q] * scale;
    }
}

/* Scores become exponentials; their maximum and sum, a warp a query. */
__device__ void exponentiate(Shared &s, int num_positions) {
    int lane = threadIdx.x % 32;
    for (int q = threadIdx.x / 32; q < QUERIES; q += THREADS / 32) {
        float maximum = -INFINITY, sum = 0.0f;
        for (int p = lane; p < num_positions; p += 32) maximum = fmaxf(maximum, s.score[p][q]);
        for (int step = 16; step > 0; step /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
        for (int p = lane; p < num_positions; p += 32) sum += s.score[p][q] = expf(s.score[p][q] - maximum);
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) s.maximum[q] = maximum, s.sum[q] = sum;
    }
}

/* stream[i] = the sum over positions i, i + STREAMS, ... of score * value. */
template <bool WINDOW> __device__ void sum_values(Shared &s, const Seen &seen, int first, int num_positions) {
    int stream = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (stream >= STREAMS) return;
    float acc[QUERIES][PER_LANE] = {};
#pragma unroll 8
    for (int p = stream; p < num_positions; p += STREAMS) {
        const float *values = seen.values + row_of<WINDOW>(seen, first + p) * V_HEAD_DIM;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int d = lane + i * LANES;
            float value = d < V_HEAD_DIM ? values[d] : 0.0f;
#pragma unroll
            for (int q = 0; q < QUERIES; q++) acc[q][i] += s.score[p][q] * value;
        }
    }
#pragma unroll
    for (int q = 0; q < QUERIES; q++)
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int d = lane + i * LANES;
            if (d < V_HEAD_DIM) s.stream[stream][q * V_HEAD_DIM + d] = acc[q][i];
        }
}

/* One chunk; a thread gets outputs threadIdx.x, threadIdx.x + THREADS, ... of [query][V_HEAD_DIM]. */
template <bool WINDOW>
__device__ void attend(Partial (&out)[PER_THREAD], Shared &s, const Seen &seen, int first, int num_positions,
                       float scale) {
    __syncthreads(); /* queries are there, and the last chunk's streams have been read */
    score_positions<WINDOW>(s, seen, first, num_positions, scale);
    __syncthreads();
    exponentiate(s, num_positions);
    __syncthreads();
    sum_values<WINDOW>(s, seen, first, num_positions);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        int output = threadIdx.x + i * THREADS;
        if (output >= OUTPUTS) continue;
        out[i] = {s.maximum[output / V_HEAD_DIM], s.sum[output / V_HEAD_DIM], 0.0f};
        for (int stream = 0; stream < STREAMS; stream++) out[i].value += s.stream[stream][output];
    }
}

/* Publishes this block's chunk; true in the last of the (token, tile)'s blocks, with all chunks merged in out. */
__device__ bool merge_chunks(Partial (&out)[PER_THREAD], ChunkResult *chunks, int *arrived, int chunk, int num_chunks) {
    __shared__ bool last;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        int output = threadIdx.x + i * THREADS, query = output / V_HEAD_DIM;
        if (output >= OUTPUTS) continue;
        chunks[chunk].value[output] = out[i].value;
        if (output % V_HEAD_DIM > 0) continue;
        chunks[chunk].maximum[query] = out[i].maximum, chunks[chunk].sum[query] = out[i].sum;
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
        int output = threadIdx.x + i * THREADS, query = output / V_HEAD_DIM;
        out[i] = {-INFINITY, 0.0f, 0.0f};
        for (const ChunkResult *c = chunks; c < chunks + num_chunks && output < OUTPUTS; c++)
            merge(out[i], {__ldcg(&c->maximum[query]), __ldcg(&c->sum[query]), __ldcg(&c->value[output])});
    }
    return true;
}

/* The query head that is a tile's query number `query`. */
__device__ int head_of(int tile, int query) {
    if (ATTENTION_KIND != ATTENTION_MOA) return tile * QUERIES + query;
    return (tile * QUERIES % GROUP + query) * NUM_KV_HEADS + tile * QUERIES / GROUP;
}

struct Arguments {
    float *out;               /* (tokens, NUM_HEADS, V_HEAD_DIM) */
    const float *q;           /* rows of Q_STRIDE */
    const float *keys, *values, *sinks;
    const Batch *batch;
    LayerCache cache;
    float scale;
};
constexpr int Q_STRIDE = OWN_Q ? NUM_HEADS * HEAD_DIM : QKV_ROWS;

/* Grid: (tokens, TILES, chunks), or (tokens, TILES) where a block takes every chunk. WINDOW: the layer has one. */
template <bool WINDOW>
__global__ void __launch_bounds__(THREADS) attention_kernel(Arguments a, ChunkResult *chunks, int *arrived) {
    __shared__ Shared s;
    pdl_wait();
    pdl_trigger();
    int token = blockIdx.x, tile = blockIdx.y, chunk = blockIdx.z;
    if (token >= a.batch->num_tokens) return;
    int position = a.batch->positions[token];
    int first = WINDOW && position >= a.cache.window ? position - a.cache.window + 1 : 0;
    int num_positions = position - first + 1, num_chunks = (num_positions - 1) / CHUNK + 1;
    if (chunk >= num_chunks) return;
    const float *query = a.q + (int64_t)token * Q_STRIDE;
    for (int i = threadIdx.x; i < QUERIES * HEAD_DIM; i += THREADS)
        s.query[i / HEAD_DIM][i % HEAD_DIM] = query[head_of(tile, i / HEAD_DIM) * HEAD_DIM + i % HEAD_DIM];
    int64_t row = cache_row(a.cache, a.batch->slots[token], tile * QUERIES / GROUP, 0);
    Seen seen = {a.keys + row * HEAD_DIM, a.values + row * V_HEAD_DIM, WINDOW ? first % a.cache.positions : 0,
                 a.cache.positions};

    Partial all[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) all[i] = {-INFINITY, 0.0f, 0.0f};
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
        int output = threadIdx.x + i * THREADS, head = head_of(tile, output / V_HEAD_DIM);
        if (output >= OUTPUTS) continue;
        if (SINKS) merge(all[i], {a.sinks[head], 1.0f, 0.0f});
        out[head * V_HEAD_DIM + output % V_HEAD_DIM] = all[i].value / all[i].sum;
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
