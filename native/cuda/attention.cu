/* Causal attention of few tokens over the KV cache. An item is one span of a token for one tile of queries; there are
 * as many as the step's tokens have, whatever the cache could hold. The first few spans of each token have a block
 * each, and then blocks share the others. The last block to finish a span of a token and tile merges them all. */
#include "attention.cuh"

#if NUM_HEADS

namespace {

constexpr int FEW_SPANS = 8; /* a short context's: so many of each token and tile have a block of their own */
constexpr bool SMALL_HEADS = LONGEST <= 64; /* which leave registers for more blocks on an SM */
constexpr int SM_BLOCKS = 6; /* of the kernel at work on an SM at once: so many blocks there are at least */

/* What a block leaves of a span for the last of its token and tile. */
struct SpanResult {
    Values::vector_t value[OUTPUTS / Values::WIDTH];
    float maximum[QUERIES], sum[QUERIES];
};

/* A part of the scratch block. */
struct AttentionScratch {
    int32_t arrived[DECODE_TOKENS * TILES]; /* spans that are done; 0 between layers */
    alignas(16) SpanResult results[DECODE_TOKENS * TILES][MAX_SPANS];
};

/* What another block has written, past this SM's cache. */
__device__ __forceinline__ Values::vector_t read_vector(const Values::vector_t *from) {
    using short_t = std::conditional_t<Values::WIDTH == 2, float2, float>;
    using bits_t = std::conditional_t<Values::WIDTH == 4, float4, short_t>;
    bits_t bits = __ldcg((const bits_t *)from);
    return *(Values::vector_t *)&bits;
}

/* Publishes one span; true in the last block of the token and tile, where what the others wrote can be read. */
__device__ bool publish(const Partial (&one)[PER_THREAD], SpanResult &result, int32_t *arrived, int num_spans) {
    __shared__ bool last;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (!is_output(i)) continue;
        result.value[output_vector(i)] = one[i].value;
        if (output_vector(i) * Values::WIDTH % V_HEAD_DIM > 0) continue;
        result.maximum[query_of(i)] = one[i].maximum, result.sum[query_of(i)] = one[i].sum;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == num_spans - 1;
        if (last) *arrived = 0; /* for the next layer */
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

/* Several results are asked for at once, so that few waits add up. */
__device__ __forceinline__ void merge_spans(Partial (&all)[PER_THREAD], const SpanResult *results, int num_spans) {
    constexpr int AT_ONCE = 4;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (!is_output(i)) continue;
#pragma unroll 1
        for (int first = 0; first < num_spans; first += AT_ONCE) {
            Partial next[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const SpanResult &r = results[min(first + j, num_spans - 1)];
                next[j] = {__ldcg(&r.maximum[query_of(i)]), __ldcg(&r.sum[query_of(i)]),
                           read_vector(&r.value[output_vector(i)])};
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (first + j < num_spans) merge(all[i], next[j]);
        }
    }
}

/* One of a step's spans, if it is there. */
struct Span {
    int token, position, slot, index;
    bool is_there;
};

/* The span number `wanted` of the step: first the `few` that each token may have, then the longer tokens' others, token
 * by token. By whole warps, each for itself. */
__device__ Span find_span(const Batch *batch, int window, int wanted, int num_rows, int few) {
    if (wanted < num_rows * few) {
        int token = wanted % num_rows, index = wanted / num_rows;
        int position = batch->positions[token], slot = batch->slots[token];
        bool is_there = token < batch->num_tokens && index < Reach(position, window).num_spans;
        return {token, position, slot, index, is_there};
    }
    Span found = {};
    int total = num_rows * few;
#pragma unroll 1
    for (int first = 0; first < num_rows && !found.is_there; first += 32) {
        int lane = threadIdx.x % 32, token = min(first + lane, num_rows - 1);
        int position = batch->positions[token], slot = batch->slots[token];
        int own = first + lane < batch->num_tokens ? max(Reach(position, window).num_spans - few, 0) : 0;
        int up_to = total + warp_sum_up_to(own);
        unsigned beyond = __ballot_sync(~0u, up_to > wanted);
        if (beyond) {
            int owner = __ffs(beyond) - 1;
            found = {first + owner, __shfl_sync(~0u, position, owner), __shfl_sync(~0u, slot, owner),
                     few + wanted - __shfl_sync(~0u, up_to - own, owner), true};
        }
        total = __shfl_sync(~0u, up_to, 31);
    }
    return found;
}

/* Whether a token has more than `few` spans. By whole warps, each for itself. */
__device__ bool has_long_token(const Batch *batch, int window, int num_rows, int few) {
    int lane = threadIdx.x % 32;
    bool is_long = false;
    for (int token = lane; token < min(num_rows, batch->num_tokens); token += 32)
        is_long |= Reach(batch->positions[token], window).num_spans > few;
    return __any_sync(~0u, is_long);
}

/* The span's result goes to those of its token and tile; the last one ends them. */
__device__ __forceinline__ void finish_span(const Arguments &a, AttentionScratch *scratch, Partial (&one)[PER_THREAD],
                                            const Span &at, int tile, int num_spans) {
    int place = at.token * TILES + tile;
    SpanResult *results = scratch->results[place];
    if (num_spans > 1 && !publish(one, results[at.index], &scratch->arrived[place], num_spans)) return;
    Partial all[PER_THREAD];
    clear(all);
    if (num_spans > 1) {
        merge_spans(all, results, num_spans);
    } else {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) merge(all[i], one[i]);
    }
    write_outputs(a, all, at.token, tile);
}

/* WINDOW: the layer has one. */
template <bool WINDOW>
__global__ void __launch_bounds__(THREADS, SMALL_HEADS ? 8 : SM_BLOCKS)
attention_kernel(const __grid_constant__ Arguments a, AttentionScratch *scratch, int num_rows, int few) {
    __shared__ Shared s;
    __shared__ Span at; /* the item's, where it takes no registers */
    pdl_wait();
    pdl_trigger();
    int window = WINDOW ? a.cache.window : 0;
#pragma unroll 1
    for (int item = blockIdx.x;; item += gridDim.x) {
        bool is_first = item < num_rows * few * TILES;
        Span found = find_span(a.batch, window, item / TILES, num_rows, few);
        if (!found.is_there && !is_first) return;
        if (found.is_there) {
            Reach reach(found.position, window);
            __syncthreads(); /* the last item's span has been read */
            if (threadIdx.x == 0) at = found;
            Seen seen = begin_tile<WINDOW>(s, a, found.token, item % TILES, found.slot, reach);
            Partial one[PER_THREAD] = {};
            attend_span<WINDOW>(one, s, seen, reach, found.index, a.scale);
            finish_span(a, scratch, one, at, item % TILES, Reach(at.position, window).num_spans);
        }
        if (is_first && !has_long_token(a.batch, window, num_rows, few)) return;
    }
}

} // namespace

int64_t cuda_attention_scratch_bytes() { return sizeof(AttentionScratch); }

int cuda_attention(Model *m, int num_tokens, int layer) {
    if (num_tokens > DECODE_TOKENS) return cuda_attention_prefill(m, num_tokens, layer);
    Arguments arguments = attention_arguments(m, layer);
    int window = arguments.cache.window, tiles = num_tokens * TILES;
    int most_spans = window ? min_of(ceil_div(window, PIECE), MAX_SPANS) : MAX_SPANS; /* of a token */
    int few = min_of(most_spans, FEW_SPANS);
    int blocks = min_of(tiles * most_spans, max_of(tiles * few, SM_BLOCKS * num_multiprocessors()));
    return launch(m, "attention", window ? attention_kernel<true> : attention_kernel<false>, blocks, THREADS, 0,
                  arguments, (AttentionScratch *)attention_scratch(m), num_tokens, few);
}

#else
int64_t cuda_attention_scratch_bytes() { return 0; }
#endif
