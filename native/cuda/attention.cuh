/* What both attention kernels share: a block works on one token and a tile of queries that share a kv head.
 *
 * The positions that a token sees are split by their number alone, counted from the first: into spans, and a span into
 * pieces. A piece is what a block has in shared memory at once: scores, their exponentials, and the sum of the values.
 * A span's pieces are merged in order, then a token's spans in order. So bits depend on neither the capacity of the
 * cache, nor the batch, nor the number of blocks, nor the kernel. */
#ifndef COLIBRI_CUDA_ATTENTION_CUH
#define COLIBRI_CUDA_ATTENTION_CUH

#include "launch.cuh"
#include "numbers.cuh"
#include "scratch.cuh"

#if NUM_HEADS

namespace {

constexpr int THREADS = 128;
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

constexpr int PIECE = 64;     /* positions */
constexpr int MAX_SPANS = 64; /* of a token */

/* What a token sees: `count` positions from `first` on, in spans of one piece up to PIECE * MAX_SPANS positions, and of
 * twice as many at each doubling of those. */
struct Reach {
    int first, count, span, num_spans;

    __device__ Reach(int position, int window) {
        first = window && position >= window ? position - window + 1 : 0;
        count = position - first + 1;
        int doublings = 32 - __clz((count - 1) / (PIECE * MAX_SPANS));
        span = PIECE << doublings;
        num_spans = ((count - 1) / PIECE >> doublings) + 1;
    }
};

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
        float score[PIECE][QUERIES]; /* then exp(score - maximum) */
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

/* softmax(scores) v of one or more pieces is value / sum; maximum is what exp was taken relative to. */
struct Partial {
    float maximum, sum;
    Values::vector_t value;
};

/* A thread's i-th vector of outputs, and its query. */
__device__ __forceinline__ int output_vector(int i) { return threadIdx.x + i * THREADS; }
__device__ __forceinline__ bool is_output(int i) { return output_vector(i) < OUTPUTS / Values::WIDTH; }
__device__ __forceinline__ int query_of(int i) { return output_vector(i) * Values::WIDTH / V_HEAD_DIM; }

/* Written with explicit roundings, so that all places it is inlined in give the same bits. */
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
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                /* without a branch, behind which the rows would be asked for one by one */
                float score = p < num_positions ? s.score[min(p, PIECE - 1)][q] : 0.0f;
#pragma unroll
                for (int i = 0; i < Values::PER_LANE; i++)
#pragma unroll
                    for (int v = 0; v < Values::WIDTH; v++) acc[q][i].of[v] += score * value[r][i].of[v];
            }
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

/* One piece: a thread's outputs of it. */
template <bool WINDOW>
__device__ void attend(Partial (&out)[PER_THREAD], Shared &s, const Seen &seen, int first, int num_positions,
                       float scale) {
    __syncthreads(); /* queries are there, and the last piece's streams have been read */
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

inline Arguments attention_arguments(const Model *m, int layer) {
    const State &s = m->state;
    return {s.attention, OWN_Q ? s.q : s.qkv, s.key_cache, s.value_cache, m->weights.layers[layer].sinks,
            device_batch(m), layer_cache(m, layer), m->header.attention_scale};
}

/* Where a tile's keys and values are; its queries go to shared memory. */
template <bool WINDOW>
__device__ Seen begin_tile(Shared &s, const Arguments &a, int token, int tile, int slot, const Reach &reach) {
    const float *query = a.q + (int64_t)token * Q_STRIDE;
    for (int i = threadIdx.x; i < QUERIES * HEAD_DIM; i += THREADS)
        s.query[i / HEAD_DIM][i % HEAD_DIM] = query[head_of(tile, i / HEAD_DIM) * HEAD_DIM + i % HEAD_DIM];
    int64_t row = cache_row(a.cache, slot, tile * QUERIES / GROUP, 0);
    return {a.keys + row * HEAD_DIM, a.values + row * V_HEAD_DIM, WINDOW ? reach.first % a.cache.positions : 0,
            a.cache.positions};
}

__device__ __forceinline__ void clear(Partial (&all)[PER_THREAD]) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) all[i] = {-INFINITY, 0.0f, {}};
}

/* One span: its pieces in order. */
template <bool WINDOW>
__device__ __forceinline__ void attend_span(Partial (&out)[PER_THREAD], Shared &s, const Seen &seen, const Reach &reach,
                                            int index, float scale) {
    int first = index * reach.span, end = min(first + reach.span, reach.count);
#pragma unroll 1
    for (int start = first; start < end; start += PIECE) {
        Partial one[PER_THREAD] = {};
        attend<WINDOW>(one, s, seen, start, min(PIECE, end - start), scale);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (start > first) merge(out[i], one[i]);
            else out[i] = one[i];
        }
    }
}

/* The sinks, and the softmax's division. */
__device__ void write_outputs(const Arguments &a, Partial (&all)[PER_THREAD], int token, int tile) {
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

/* For more than DECODE_TOKENS tokens. */
int cuda_attention_prefill(Model *m, int num_tokens, int layer);

#endif

#endif
