/* Routing: logits, each token's experts and their weights, and the lists that the expert products work from.
 *
 * The logits' sums are split over columns into slices that the shape fixes; router_kernel adds the slices in order and
 * routes, one warp a token. Order is (score descending, expert ascending) by a bitonic network over the warp's lanes,
 * on words of which the upper half is the score and the lower half tells the expert. The block that is done last goes
 * on to build the lists. */
#include "moe.cuh"

namespace {

constexpr int LOGIT_THREADS = 256;
constexpr int LOGIT_EXPERTS = 16;                      /* of one block: four lanes' float4 of one column */
constexpr int PER_LANE = ceil_div(NUM_EXPERTS, 32);    /* experts of a lane: lane, lane + 32, ... */
constexpr int GROUP_SIZE = NUM_EXPERTS / NUM_GROUPS;
constexpr int GROUPS_PER_LANE = ceil_div(NUM_GROUPS, 32);
constexpr int WARPS = 8;                               /* of router_kernel: tokens of a block */
constexpr float INFINITE = __builtin_huge_valf();

using Key = unsigned long long;

/* Grid (slices, experts / 16, rows / TOKENS): partial_logits of one slice of columns. Padding rows have them too, for
 * the true number of tokens would take longer to read. */
template <int TOKENS>
__global__ void __launch_bounds__(LOGIT_THREADS)
router_logits_kernel(MoeScratch *scratch, const float *x, const float *router, int num_rows) {
    __shared__ float sums[LOGIT_THREADS / 32][TOKENS][LOGIT_EXPERTS];
    constexpr int STEPS = SLICE_COLUMNS / LOGIT_LANES;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = blockIdx.y * LOGIT_EXPERTS + lane % 4 * 4;
    int column = blockIdx.x * SLICE_COLUMNS + warp * 8 + lane / 4, token = blockIdx.z * TOKENS;
    const float *rows = router + ((int64_t)expert / PANEL_ROWS * HIDDEN) * PANEL_ROWS + expert % PANEL_ROWS;
    float4 weight[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int c = column + i * LOGIT_LANES;
        weight[i] = c < HIDDEN ? *(const float4 *)(rows + (int64_t)c * PANEL_ROWS) : make_float4(0, 0, 0, 0);
    }
    pdl_wait();
    pdl_trigger();
    float value[TOKENS][STEPS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int c = column + i * LOGIT_LANES;
            value[t][i] = token + t < num_rows && c < HIDDEN ? x[(int64_t)(token + t) * HIDDEN + c] : 0.0f;
        }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            sum[0] = fmaf(weight[i].x, value[t][i], sum[0]);
            sum[1] = fmaf(weight[i].y, value[t][i], sum[1]);
            sum[2] = fmaf(weight[i].z, value[t][i], sum[2]);
            sum[3] = fmaf(weight[i].w, value[t][i], sum[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            for (int offset = 16; offset >= 4; offset /= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], offset);
            if (lane < 4) sums[warp][t][lane * 4 + e] = sum[e];
        }
    }
    __syncthreads();
    int t = threadIdx.x / LOGIT_EXPERTS, e = blockIdx.y * LOGIT_EXPERTS + threadIdx.x % LOGIT_EXPERTS;
    if (t >= TOKENS || token + t >= num_rows || e >= NUM_EXPERTS) return;
    float total = 0.0f;
    for (int w = 0; w < LOGIT_THREADS / 32; w++) total += sums[w][t][threadIdx.x % LOGIT_EXPERTS];
    scratch->partial_logits[blockIdx.x][token + t][e] = total;
}

/* Larger for a larger score; 0 for what cannot be chosen, -inf and NaN. -0 is +0. */
__device__ uint32_t orderable(float score) {
    if (!(score > -INFINITE)) return 0;
    uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Words of one score differ in the index, lower first; the word 0, an index's that does not exist, comes last. */
__device__ Key key_of(float score, int index) { return (Key)orderable(score) << 32 | (uint32_t)~index; }
__device__ int index_of(Key key) { return (int)~(uint32_t)key; }
__device__ bool can_be_chosen(Key key) { return key >> 32 != 0; }

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }
__device__ __forceinline__ Key smaller(Key a, Key b) { return a > b ? b : a; }

/* Of lanes i and i ^ stride, the lower one keeps the larger key where `descending`. */
__device__ __forceinline__ Key exchange(Key key, int stride, bool descending) {
    Key other = __shfl_xor_sync(~0u, key, stride);
    bool is_lower = (threadIdx.x & stride) == 0;
    return is_lower == descending ? larger(key, other) : smaller(key, other);
}

template <int COUNT> __device__ __forceinline__ void merge_stage(Key (&keys)[COUNT], int size) {
    bool descending = size == 32 || (threadIdx.x & size) == 0;
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) keys[i] = exchange(keys[i], stride, descending);
}

/* Of two descending runs, one reversed, the larger of each two keys are the best 32, and they form a bitonic run. */
template <int COUNT> __device__ Key merge_runs(const Key (&runs)[COUNT]) {
    if constexpr (COUNT == 1) {
        return runs[0];
    } else {
        constexpr int HALF = (COUNT + 1) / 2;
        Key merged[HALF];
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            merged[i] = runs[i];
            if (i + HALF < COUNT) merged[i] = larger(runs[i], __shfl_xor_sync(~0u, runs[i + HALF], 31));
        }
        merge_stage(merged, 32);
        return merge_runs(merged);
    }
}

/* The 32 largest of the warp's keys, largest first, a lane each. */
template <int COUNT> __device__ Key best_of(Key (&keys)[COUNT]) {
#pragma unroll
    for (int size = 2; size <= 32; size *= 2) merge_stage(keys, size);
    return merge_runs(keys);
}

/* exp(shift) times the sigmoid, without overflow or needless underflow. */
__device__ float sigmoid(float logit, float shift) {
    return expf(fminf(logit, 0.0f) + shift) / (1.0f + expf(-fabsf(logit)));
}

__device__ float sum_of_exp(const float (&logits)[PER_LANE], float largest) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) sum += expf(logits[j] - largest);
    return warp_sum(sum);
}

__device__ float largest_of(const float (&logits)[PER_LANE]) {
    float largest = -INFINITE;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) largest = fmaxf(largest, logits[j]);
    return warp_max(largest);
}

/* The scores that experts are chosen by. Softmax and sigmoid rise with the logit, so without a bias it is compared. */
__device__ void choice_scores(float (&score)[PER_LANE], const float (&logits)[PER_LANE], const float *bias) {
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) score[j] = logits[j];
    if (!ROUTER_BIAS) return;
    float largest = 0.0f, total = 1.0f;
    if (ROUTER_KIND == ROUTER_SOFTMAX) {
        largest = largest_of(logits);
        total = sum_of_exp(logits, largest);
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        if (!(logits[j] > -INFINITE)) continue;
        if (ROUTER_KIND == ROUTER_SOFTMAX) score[j] = expf(logits[j] - largest) / total;
        if (ROUTER_KIND == ROUTER_SIGMOID) score[j] = sigmoid(logits[j], 0.0f);
        score[j] += bias[threadIdx.x % 32 + j * 32];
    }
}

/* A group's score: its best expert's; with sigmoid the sum of its two best, of the scores themselves. `scores` is the
 * warp's own shared array. */
__device__ float group_score(const float *scores, int group) {
    float best = -INFINITE, second = -INFINITE;
    for (int e = group * GROUP_SIZE; e < (group + 1) * GROUP_SIZE; e++) {
        float value = scores[e];
        if (!(value > -INFINITE)) continue;
        if (ROUTER_KIND == ROUTER_SIGMOID && !ROUTER_BIAS) value = sigmoid(value, 0.0f);
        if (value > best) {
            second = best;
            best = value;
        } else {
            second = fmaxf(second, value);
        }
    }
    return ROUTER_KIND == ROUTER_SIGMOID && second > -INFINITE ? best + second : best;
}

/* Takes the experts of all but the best TOPK_GROUPS groups out of the choice. */
__device__ void limit_groups(float (&score)[PER_LANE]) {
    __shared__ float all_scores[WARPS][NUM_GROUPS > 1 ? NUM_EXPERTS : 1];
    float *scores = all_scores[threadIdx.x / 32];
    int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (lane + j * 32 < NUM_EXPERTS) scores[lane + j * 32] = score[j];
    __syncwarp();
    Key keys[GROUPS_PER_LANE];
    bool allowed[PER_LANE] = {};
#pragma unroll
    for (int i = 0; i < GROUPS_PER_LANE; i++) {
        int group = lane + i * 32;
        keys[i] = group < NUM_GROUPS ? key_of(group_score(scores, group), group) : 0;
    }
    /* More groups than lanes may be allowed, so the best are taken out one sort at a time. */
    for (int taken = 0; taken < TOPK_GROUPS; taken += 32) {
        Key sorted[GROUPS_PER_LANE];
#pragma unroll
        for (int i = 0; i < GROUPS_PER_LANE; i++) sorted[i] = keys[i];
        Key best = best_of(sorted);
        for (int i = 0; i < 32 && taken + i < TOPK_GROUPS; i++) {
            int group = index_of(__shfl_sync(~0u, best, i));
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) allowed[j] |= (lane + j * 32) / GROUP_SIZE == group;
#pragma unroll
            for (int j = 0; j < GROUPS_PER_LANE; j++)
                if (lane + j * 32 == group) keys[j] = 0;
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (!allowed[j]) score[j] = -INFINITE;
}

/* The weight of lane i's expert, for lanes i < K; `chosen` is its logit. */
__device__ float weigh(float chosen, const float (&logits)[PER_LANE], float routed_scaling, float renormalize_min) {
    constexpr bool OVER_CHOSEN = ROUTER_KIND == ROUTER_TOPK_SOFTMAX || RENORMALIZE;
    bool is_slot = threadIdx.x % 32 < K;
    /* Weights that are divided by their sum are taken relative to the largest, so that they cannot all underflow. */
    float largest = 0.0f, total = 1.0f, weight;
    if (OVER_CHOSEN) {
        largest = warp_max(is_slot ? chosen : -INFINITE);
    } else if (ROUTER_KIND != ROUTER_SIGMOID) {
        largest = largest_of(logits);
        total = sum_of_exp(logits, largest);
    }
    float shift = ROUTER_KIND == ROUTER_SIGMOID && OVER_CHOSEN && largest < 0.0f ? -largest : 0.0f;
    weight = ROUTER_KIND == ROUTER_SIGMOID ? sigmoid(chosen, shift) : expf(chosen - largest);
    if (OVER_CHOSEN) total = warp_sum(is_slot ? weight : 0.0f);
    if (OVER_CHOSEN && ROUTER_KIND != ROUTER_TOPK_SOFTMAX && renormalize_min > 0.0f) {
        /* what the relative weights are in true scores: `unit` each */
        float unit = ROUTER_KIND == ROUTER_SIGMOID ? expf(-shift) : 1.0f / sum_of_exp(logits, largest);
        if (!(total * unit >= renormalize_min)) total = renormalize_min / unit;
    }
    return weight / total * routed_scaling;
}

/* ROUTER_SPARSEMIXER: the largest logit, then the largest of the others, in lanes 0 and 1; each one's weight is by a
 * softmax over those of what is left whose logits lie near it. */
__device__ Key sparsemix(const float (&logits)[PER_LANE], float jitter, float &weight) {
    int lane = threadIdx.x % 32, first = NUM_EXPERTS;
    Key chosen = 0;
    for (int slot = 0; slot < 2; slot++) {
        Key best = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            int e = lane + j * 32;
            if (e < NUM_EXPERTS && e != first) best = larger(best, key_of(logits[j], e));
        }
        for (int offset = 16; offset > 0; offset /= 2) best = larger(best, __shfl_xor_sync(~0u, best, offset));
        float largest = -INFINITE, total = 0.0f;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            if (lane + j * 32 == index_of(best)) largest = logits[j];
        largest = __shfl_sync(~0u, largest, index_of(best) % 32);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            bool is_far = (largest - logits[j]) / fmaxf(fabsf(logits[j]), largest) > 2.0f * jitter; /* 0/0 is not */
            if (!is_far && lane + j * 32 != first) total += expf(logits[j] - largest);
        }
        total = warp_sum(total);
        if (lane == slot) {
            chosen = best;
            weight = 1.0f / total;
        }
        first = index_of(best);
    }
    return chosen;
}

/* What the routing of a layer reads and writes besides the scratch. */
struct Routing {
    State state;
    const Batch *batch;
    Batch *host_batch;
    const float *bias, *logit_bias; /* (NUM_EXPERTS) or NULL */
    float routed_scaling, renormalize_min, jitter;
    int layer;
    bool counted; /* in the layer's totals */
};

/* One row by one warp: its logits, experts (into `ids` too) and weights; true where the logits allow no choice. */
__device__ bool route_token(const Routing &r, const MoeScratch *scratch, int token, bool is_token, int *ids) {
    int lane = threadIdx.x % 32;
    float logits[PER_LANE], score[PER_LANE];
    bool is_bad = false;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane + j * 32;
        float part[LOGIT_SLICES];
#pragma unroll
        for (int s = 0; s < LOGIT_SLICES; s++)
            part[s] = scratch->partial_logits[s][token][min(e, NUM_EXPERTS - 1)];
        logits[j] = 0.0f;
#pragma unroll
        for (int s = 0; s < LOGIT_SLICES; s++) logits[j] += part[s];
        if (r.logit_bias) logits[j] += r.logit_bias[min(e, NUM_EXPERTS - 1)];
        if (e >= NUM_EXPERTS) logits[j] = -INFINITE;
        is_bad |= !(logits[j] < INFINITE);
    }
    Key best;
    float weight = 0.0f;
    if constexpr (ROUTER_KIND == ROUTER_SPARSEMIXER) {
        best = sparsemix(logits, r.jitter, weight);
    } else {
        choice_scores(score, logits, r.bias);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) is_bad |= !(score[j] < INFINITE); /* a bias can be what is NaN or inf */
        if constexpr (NUM_GROUPS > 1) limit_groups(score);
        Key keys[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) keys[j] = lane + j * 32 < NUM_EXPERTS ? key_of(score[j], lane + j * 32) : 0;
        best = best_of(keys);
        float chosen = -INFINITE;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            float logit = __shfl_sync(~0u, logits[j], index_of(best) & 31);
            if (index_of(best) / 32 == j) chosen = logit;
        }
        weight = weigh(chosen, logits, r.routed_scaling, r.renormalize_min);
    }
    int expert = index_of(best);
    is_bad |= lane < K && !can_be_chosen(best);
    if (!is_token) return false;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (lane + j * 32 < NUM_EXPERTS) r.state.router_logits[token * NUM_EXPERTS + lane + j * 32] = logits[j];
    if (lane < K) {
        ids[lane] = r.state.expert_ids[token * K + lane] = expert;
        r.state.expert_weights[token * K + lane] = weight;
    }
    return __any_sync(~0u, is_bad);
}

/* Makes the lowest token at fault known to the host, unless an earlier layer's is. By one block. */
__device__ void report_fault(const Routing &r, const MoeScratch *scratch, int num_tokens) {
    __shared__ int first;
    if (threadIdx.x == 0) first = num_tokens;
    __syncthreads();
    for (int t = threadIdx.x; t < num_tokens; t += blockDim.x)
        if (__ldcg(&scratch->faults[t])) atomicMin(&first, t);
    __syncthreads();
    volatile Batch *batch = r.host_batch;
    if (threadIdx.x != 0 || batch->fault != 0) return;
    batch->fault_layer = r.layer;
    batch->fault_token = first;
    __threadfence_system();
    batch->fault = FAULT_ROUTER_LOGIT;
}

/* Walks warp w's range of the assignments, whose experts are `ids` where a block's shared memory has them all;
 * counts[w][e] is how many of them so far are expert e's. With `write`, each is put into its place: where its expert's
 * begin, plus those of the ranges before, plus those before it in the range. */
template <bool write>
__device__ void walk_range(const State &s, const int *ids, int (*counts)[NUM_EXPERTS], const int *starts, int begin,
                           int end) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int first = begin; first < end; first += 32) {
        int i = first + lane;
        int expert = i < end ? (ids ? ids[i] : __ldcg(&s.expert_ids[i])) : NUM_EXPERTS;
        unsigned peers = __match_any_sync(~0u, expert);
        int rank = __popc(peers & ((1u << lane) - 1)), count = i < end ? counts[warp][expert] : 0;
        __syncwarp();
        if (write && i < end) s.assignments[starts[expert] + count + rank] = i;
        if (i < end && rank == 0) counts[warp][expert] = count + __popc(peers);
        __syncwarp();
    }
}

constexpr unsigned ACTIVE = 1 << 23; /* one expert, counted in the same word as assignments */
static_assert(MAX_TOKENS * K < ACTIVE, "too many assignments to count beside the experts");

/* From totals of the experts, by one warp: where each one's assignments start, and the list of those that have any. */
__device__ void list_experts(const State &s, const int *totals, int *starts, bool counted) {
    int lane = threadIdx.x % 32, total[PER_LANE];
    unsigned own = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane * PER_LANE + j;
        total[j] = e < NUM_EXPERTS ? totals[e] : 0;
        own += total[j] + (total[j] > 0 ? ACTIVE : 0);
    }
    unsigned up_to = own;
    for (int distance = 1; distance < 32; distance *= 2) {
        unsigned before = __shfl_up_sync(~0u, up_to, distance);
        if (lane >= distance) up_to += before;
    }
    int start = (up_to - own) % ACTIVE, num_active = (up_to - own) / ACTIVE;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane * PER_LANE + j;
        if (e >= NUM_EXPERTS) break;
        starts[e] = start;
        s.expert_offsets[e] = start;
        if (total[j] > 0) s.active_experts[num_active++] = e;
        start += total[j];
    }
    if (lane == 31) {
        s.expert_offsets[NUM_EXPERTS] = up_to % ACTIVE;
        *s.num_active = up_to / ACTIVE;
        if (counted) *s.experts_read += up_to / ACTIVE;
    }
}

/* Sorts the assignments by expert, then by token: counts each warp's range, finds where every expert and range begins,
 * then puts each assignment into its place. By one block. */
__device__ void dispatch(const Routing &r, const int *ids, int num_tokens) {
    const State &s = r.state;
    __shared__ int counts[WARPS][NUM_EXPERTS], totals[NUM_EXPERTS], starts[NUM_EXPERTS];
    int warp = threadIdx.x / 32, range = (num_tokens * K + WARPS - 1) / WARPS;
    int begin = min(warp * range, num_tokens * K), end = min(begin + range, num_tokens * K);
    for (int e = threadIdx.x % 32; e < NUM_EXPERTS; e += 32) counts[warp][e] = 0;
    __syncwarp();
    walk_range<false>(s, ids, counts, starts, begin, end);
    __syncthreads();
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += WARPS * 32) {
        int total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            int count = counts[w][e];
            counts[w][e] = total; /* of the ranges before */
            total += count;
        }
        totals[e] = total;
    }
    __syncthreads();
    if (warp == 0) list_experts(s, totals, starts, r.counted);
    __syncthreads();
    walk_range<true>(s, ids, counts, starts, begin, end);
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += WARPS * 32)
        if (r.counted && totals[e]) s.routed_tokens[(int64_t)r.layer * NUM_EXPERTS + e] += totals[e];
}

constexpr int FAULTY = 1 << 15; /* one block with a fault, counted in the same word as blocks */
static_assert(ceil_div(MAX_TOKENS, WARPS) < FAULTY, "too many blocks to count beside the faulty ones");

/* True in the last block to get here, in which `is_bad` becomes true if any block's is. What the others wrote before
 * can be read then. */
__device__ bool is_last_block(MoeScratch *scratch, bool &is_bad) {
    __shared__ int arrived;
    is_bad = __syncthreads_or(is_bad);
    if (gridDim.x == 1) return true;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int own = is_bad ? FAULTY + 1 : 1;
        arrived = atomicAdd(&scratch->routed_blocks, own) + own;
        if (arrived % FAULTY == (int)gridDim.x) scratch->routed_blocks = 0; /* for the next layer */
    }
    __syncthreads();
    is_bad = arrived >= FAULTY;
    if (arrived % FAULTY != (int)gridDim.x) return false;
    __threadfence();
    return true;
}

/* A warp a row. */
__global__ void __launch_bounds__(WARPS * 32)
router_kernel(const __grid_constant__ Routing r, MoeScratch *scratch, int num_rows) {
    __shared__ int ids[WARPS * K];
    pdl_wait();
    pdl_trigger();
    int num_tokens = r.batch->num_tokens, token = blockIdx.x * WARPS + threadIdx.x / 32;
    bool is_bad = false;
    if (token < num_rows) is_bad = route_token(r, scratch, token, token < num_tokens, ids + threadIdx.x / 32 * K);
    if (threadIdx.x % 32 == 0 && token < num_tokens) scratch->faults[token] = is_bad;
    if (!is_last_block(scratch, is_bad)) return;
    dispatch(r, gridDim.x == 1 ? ids : nullptr, num_tokens);
    if (is_bad) report_fault(r, scratch, num_tokens);
}
int launch_logits(Model *m, int num_rows, const float *router, const float *input) {
    dim3 grid(LOGIT_SLICES, ceil_div(NUM_EXPERTS, LOGIT_EXPERTS), num_rows);
    auto kernel = router_logits_kernel<1>;
    if (num_rows > 4) {
        grid.z = ceil_div(num_rows, 8);
        kernel = router_logits_kernel<8>;
    }
    return launch(m, "router_logits", kernel, grid, LOGIT_THREADS, 0, moe(m), input, router, num_rows);
}

} // namespace

int64_t cuda_moe_scratch_bytes() { return sizeof(MoeScratch); }

int cuda_route(Model *m, int num_tokens, int layer, const float *input, const float *router, const float *logit_bias,
               const float *correction, bool counted) {
    const BinHeader *h = &m->header;
    Routing routing = {m->state, device_batch(m), m->batch, correction, logit_bias, h->routed_scaling,
                       h->renormalize_min, h->router_jitter, layer, counted};
    TRY(launch_logits(m, num_tokens, router, input));
    dim3 grid(ceil_div(num_tokens, WARPS));
    return launch(m, "router", router_kernel, grid, WARPS * 32, 0, routing, moe(m), num_tokens);
}

int cuda_router(Model *m, int num_tokens, int layer, const float *input) {
    const Layer *weights = &m->weights.layers[layer];
    return cuda_route(m, num_tokens, layer, input, weights->router, weights->router_logit_bias,
                      ROUTER_BIAS ? weights->router_bias : nullptr, true);
}
