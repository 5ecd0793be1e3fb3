/* Causal attention over the KV cache, a block for one token, one tile of queries that share a kv head, and one chunk of
 * positions. Chunks are counted from the first position that the token sees and are merged in their order, for few
 * tokens by the last block of the token to finish, for a long prompt by one block that takes all chunks: the same bits
 * either way. */
#include "launch.cuh"
#include "numbers.cuh"
#include "scratch.cuh"

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
    int positions = round_up(ceil_div(MAX_SEQ_LEN, 64), 64);
    return positions > 1024 ? 1024 : positions;
}
constexpr int CHUNK = chunk_positions();
constexpr int CHUNKS = ceil_div(MAX_SEQ_LEN, CHUNK);

/* The largest power of two that is at most both; the first is one. */
constexpr int at_most(int power, int limit) { return power <= limit ? power : at_most(power / 2, limit); }

template <int N> struct alignas(N * 4) Vector { float of[N]; };

/* How threads share rows of COLUMNS floats: LANES a row, as many rows at once as there are threads, and each thread
 * asks for those of several rounds before it waits. */
template <int COLUMNS, int MOST_LANES> struct Rows {
    static constexpr int WIDTH = COLUMNS % 4 == 0 ? 4 : COLUMNS % 2 == 0 ? 2 : 1;
    using vector_t = Vector<WIDTH>;
    static constexpr int VECTORS = COLUMNS / WIDTH;
    static constexpr int LANES = at_most(MOST_LANES, VECTORS), PER_LANE = ceil_div(VECTORS, LANES);
    static constexpr int AT_ONCE = THREADS / LANES, ROUNDS = at_most(8, ceil_div(32, PER_LANE * WIDTH));

    /* The lane's vectors of a row; past its end, the last one's. */
    __device__ static void load(vector_t (&to)[PER_LANE], const float *row) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) to[i] = ((const vector_t *)row)[min(vector(i), VECTORS - 1)];
    }
    __device__ static int vector(int i) { return threadIdx.x % LANES + i * LANES; }
    __device__ static bool is_within(int i) { return VECTORS % LANES == 0 || vector(i) < VECTORS; }
};
using Keys = Rows<HEAD_DIM, 8>;
using Values = Rows<V_HEAD_DIM, THREADS>;
constexpr int STREAMS = Values::AT_ONCE;       /* rows of values that are summed side by side */
constexpr int OUTPUTS = QUERIES * V_HEAD_DIM;  /* of a block ... */
constexpr int PER_THREAD = ceil_div(OUTPUTS / Values::WIDTH, THREADS); /* ... and vectors of them that a thread keeps */

struct Shared {
    alignas(16) float query[QUERIES][HEAD_DIM]; /* read as vectors */
    union {
        float score[CHUNK][QUERIES]; /* then exp(score - maximum) */
        alignas(16) float stream[STREAMS][OUTPUTS];
    };
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
    float maximum, sum;
    Values::vector_t value;
};

/* What a block leaves for the last of its token and tile. */
struct ChunkResult {
    Values::vector_t value[OUTPUTS / Values::WIDTH];
    float maximum[QUERIES], sum[QUERIES];
};

/* A thread's i-th vector of outputs, and its query. */
__device__ __forceinline__ int output_vector(int i) { return threadIdx.x + i * THREADS; }
__device__ __forceinline__ bool is_output(int i) { return output_vector(i) < OUTPUTS / Values::WIDTH; }
__device__ __forceinline__ int query_of(int i) { return output_vector(i) * Values::WIDTH / V_HEAD_DIM; }

/* Written with explicit roundings, so that both places it is inlined in give the same bits. */
__device__ __forceinline__ void merge(Partial &all, const Partial &next) {
    float maximum = fmaxf(all.maximum, next.maximum);
    float old_scale = expf(all.maximum - maximum), new_scale = expf(next.maximum - maximum);
    all.sum = __fmaf_rn(all.sum, old_scale, __fmul_rn(next.sum, new_scale));
#pragma unroll
    for (int v = 0; v < Values::WIDTH; v++)
        all.value.of[v] = __fmaf_rn(all.value.of[v], old_scale, __fmul_rn(next.value.of[v], new_scale));
    all.maximum = maximum;
}

/* score[p] = scale * q k[p], Keys::LANES threads a position. */
template <bool WINDOW>
__device__ void score_positions(Shared &s, const Seen &seen, int first, int num_positions, float scale) {
    constexpr int ROUNDS = Keys::ROUNDS;
    for (int start = threadIdx.x / Keys::LANES; start - (int)threadIdx.x / Keys::LANES < num_positions;
         start += Keys::AT_ONCE * ROUNDS) {
        Keys::vector_t key[ROUNDS][Keys::PER_LANE];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            int p = min(start + r * Keys::AT_ONCE, num_positions - 1);
            Keys::load(key[r], seen.keys + row_of<WINDOW>(seen, first + p) * HEAD_DIM);
        }
#pragma unroll
        for (int q = 0; q < QUERIES; q++) {
            float dot[ROUNDS] = {};
#pragma unroll
            for (int i = 0; i < Keys::PER_LANE; i++) {
                if (!Keys::is_within(i)) continue;
                Keys::vector_t query = ((const Keys::vector_t *)s.query[q])[Keys::vector(i)];
#pragma unroll
                for (int r = 0; r < ROUNDS; r++)
#pragma unroll
                    for (int v = 0; v < Keys::WIDTH; v++) dot[r] += query.of[v] * key[r][i].of[v];
            }
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                for (int step = Keys::LANES / 2; step > 0; step /= 2) dot[r] += __shfl_xor_sync(~0u, dot[r], step);
                int p = start + r * Keys::AT_ONCE;
                if (threadIdx.x % Keys::LANES == 0 && p < num_positions) s.score[p][q] = dot[r] * scale;
            }
        }
    }
}

/* Scores become exponentials; their maximum and sum, a warp a query. */
__device__ void exponentiate(Shared &s, int num_positions) {
    int lane = threadIdx.x % 32;
    for (int q = threadIdx.x / 32; q < QUERIES; q += THREADS / 32) {
        float maximum = -INFINITY, sum = 0.0f;
#pragma unroll 1
        for (int p = lane; p < num_positions; p += 32) maximum = fmaxf(maximum, s.score[p][q]);
        maximum = warp_max(maximum);
#pragma unroll 1
        for (int p = lane; p < num_positions; p += 32) sum += s.score[p][q] = expf(s.score[p][q] - maximum);
        sum = warp_sum(sum);
        if (lane == 0) s.maximum[q] = maximum, s.sum[q] = sum;
    }
}

/* stream[i] = the sum over positions i, i + STREAMS, ... of score * value. */
template <bool WINDOW> __device__ void sum_values(Shared &s, const Seen &seen, int first, int num_positions) {
    constexpr int ROUNDS = Values::ROUNDS;
    int stream = threadIdx.x / Values::LANES;
    Values::vector_t acc[QUERIES][Values::PER_LANE] = {};
    for (int start = stream; start < num_positions; start += STREAMS * ROUNDS) {
        Values::vector_t value[ROUNDS][Values::PER_LANE];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            int p = min(start + r * STREAMS, num_positions - 1);
            Values::load(value[r], seen.values + row_of<WINDOW>(seen, first + p) * V_HEAD_DIM);
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            int p = start + r * STREAMS;
            if (p >= num_positions) break;
#pragma unroll
            for (int q = 0; q < QUERIES; q++)
#pragma unroll
                for (int i = 0; i < Values::PER_LANE; i++)
#pragma unroll
                    for (int v = 0; v < Values::WIDTH; v++) acc[q][i].of[v] += s.score[p][q] * value[r][i].of[v];
        }
    }
    __syncthreads(); /* the scores have been read, and streams take their place */
#pragma unroll
    for (int q = 0; q < QUERIES; q++)
#pragma unroll
        for (int i = 0; i < Values::PER_LANE; i++)
            if (Values::is_within(i))
                ((Values::vector_t *)(s.stream[stream] + q * V_HEAD_DIM))[Values::vector(i)] = acc[q][i];
}

/* One chunk: a thread's outputs of it. */
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
        if (!is_output(i)) continue;
        out[i] = {s.maximum[query_of(i)], s.sum[query_of(i)], {}};
        for (int stream = 0; stream < STREAMS; stream++) {
            Values::vector_t value = ((const Values::vector_t *)s.stream[stream])[output_vector(i)];
#pragma unroll
            for (int v = 0; v < Values::WIDTH; v++) out[i].value.of[v] += value.of[v];
        }
    }
}

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
