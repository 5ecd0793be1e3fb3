/* Routing: logits, each token's experts and their weights, and the lists that the expert products work from.
 *
 * The logits' sums are split over columns into slices that the shape fixes; router_kernel adds the slices in order and
 * routes, one warp a token. Order is (score descending, expert ascending): the warp takes the best one out k times, each
 * by two reductions over its lanes. One block goes on to build the lists: the first of a cluster, or the one that is
 * done last. For few tokens one kernel does all, a cluster whose blocks have a slice each and hand their sums to the
 * first one's shared memory. */
#include "products.cuh"

namespace {

constexpr int LOGIT_WARPS = LOGIT_LANES / 8;           /* that share 16 experts' columns of a slice */
constexpr int LOGIT_EXPERTS = 16;                      /* of a warp: four lanes' float4 of one column */
constexpr int LANE_COLUMNS = SLICE_COLUMNS / LOGIT_LANES;
constexpr int VECTOR = HIDDEN % 4 == 0 && LANE_COLUMNS % 4 == 0 ? 4 : HIDDEN % 2 == 0 && LANE_COLUMNS % 2 == 0 ? 2 : 1;
constexpr int PER_LANE = ceil_div(NUM_EXPERTS, 32);    /* experts of a lane: lane, lane + 32, ... */
constexpr int GROUP_SIZE = NUM_EXPERTS / NUM_GROUPS;
constexpr int GROUPS_PER_LANE = ceil_div(NUM_GROUPS, 32);
constexpr int WARPS = 2 * LOGIT_WARPS;                 /* of a block that routes */
constexpr int CLUSTER_BLOCKS = CUDA_ARCH >= 90 ? 8 : 1; /* at most: a GPU need not have more */
constexpr float INFINITE = __builtin_huge_valf();

/* Where in a slice of columns the lane's first of each VECTOR neighbours are. */
__device__ int lane_column(int slice, int warp, int i) {
    return slice * SLICE_COLUMNS + ((i / VECTOR * LOGIT_WARPS + warp) * 8 + threadIdx.x % 32 / 4) * VECTOR;
}

/* The lane's weights of 16 experts: four experts of each of its columns. */
__device__ __forceinline__ void load_router(float4 (&weight)[LANE_COLUMNS], const float *router, int slice, int warp,
                                            int first_expert) {
    int expert = first_expert + threadIdx.x % 4 * 4;
    const float *rows = router + ((int64_t)expert / PANEL_ROWS * HIDDEN) * PANEL_ROWS + expert % PANEL_ROWS;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        int c = lane_column(slice, warp, i) + i % VECTOR;
        weight[i] = c < HIDDEN ? *(const float4 *)(rows + (int64_t)c * PANEL_ROWS) : make_float4(0, 0, 0, 0);
    }
}

/* The lane's columns of rows [0, num_rows) of x, at most TOKENS; zeros for others. */
template <int TOKENS>
__device__ __forceinline__ void load_rows(float (&value)[TOKENS][LANE_COLUMNS], const float *x, int num_rows, int slice,
                                          int warp) {
    struct alignas(4 * VECTOR) Columns { float of[VECTOR]; };
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i += VECTOR) {
            int c = lane_column(slice, warp, i);
            Columns columns = {};
            if (t < num_rows && c < HIDDEN) columns = *(const Columns *)(x + (int64_t)t * HIDDEN + c);
#pragma unroll
            for (int v = 0; v < VECTOR; v++) value[t][i + v] = columns.of[v];
        }
}

/* Adds up over the lanes with the same experts. At each step a lane hands half of its tokens over, until it has one. */
template <int TOKENS, int OFFSET = 16>
__device__ __forceinline__ void add_lanes(float (&total)[4], const float (&sum)[TOKENS][4]) {
    constexpr int KEPT = TOKENS > 1 ? TOKENS / 2 : 1;
    bool is_upper = TOKENS > 1 && threadIdx.x & OFFSET;
    float next[KEPT][4];
#pragma unroll
    for (int t = 0; t < KEPT; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float given = is_upper ? sum[t][e] : sum[TOKENS - KEPT + t][e];
            next[t][e] = (is_upper ? sum[TOKENS - KEPT + t][e] : sum[t][e]) + __shfl_xor_sync(~0u, given, OFFSET);
        }
    if constexpr (OFFSET > 4) {
        add_lanes<KEPT, OFFSET / 2>(total, next);
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) total[e] = next[0][e];
    }
}

/* A warp's part of a slice of the logits: TOKENS (1, 2, 4 or 8) rows, 16 experts. */
template <int TOKENS>
__device__ __forceinline__ void add_columns(float (*sums)[LOGIT_EXPERTS], const float4 (&weight)[LANE_COLUMNS],
                                            const float (&value)[TOKENS][LANE_COLUMNS]) {
    float sum[TOKENS][4] = {}, total[4];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) {
            sum[t][0] = fmaf(weight[i].x, value[t][i], sum[t][0]);
            sum[t][1] = fmaf(weight[i].y, value[t][i], sum[t][1]);
            sum[t][2] = fmaf(weight[i].z, value[t][i], sum[t][2]);
            sum[t][3] = fmaf(weight[i].w, value[t][i], sum[t][3]);
        }
    add_lanes(total, sum);
    int row = threadIdx.x % 32 / 4 * TOKENS / 8; /* where 8 / TOKENS lanes have the same, they all write it */
    *(float4 *)&sums[row][threadIdx.x % 4 * 4] = make_float4(total[0], total[1], total[2], total[3]);
}

/* Grid (slices, experts / 16, rows / TOKENS): partial_logits of one slice of columns. Padding rows have them too, for
 * the true number of tokens would take longer to read. */
template <int TOKENS>
__global__ void __launch_bounds__(LOGIT_WARPS * 32)
router_logits_kernel(Scratch *scratch, const float *x, const float *router, int num_rows) {
    __shared__ alignas(16) float sums[LOGIT_WARPS][TOKENS][LOGIT_EXPERTS];
    int warp = threadIdx.x / 32, token = blockIdx.z * TOKENS;
    float4 weight[LANE_COLUMNS];
    float value[TOKENS][LANE_COLUMNS];
    load_router(weight, router, blockIdx.x, warp, blockIdx.y * LOGIT_EXPERTS);
    pdl_wait();
    pdl_trigger();
    load_rows(value, x + (int64_t)token * HIDDEN, num_rows - token, blockIdx.x, warp);
    add_columns(sums[warp], weight, value);
    __syncthreads();
    int t = threadIdx.x / LOGIT_EXPERTS, e = blockIdx.y * LOGIT_EXPERTS + threadIdx.x % LOGIT_EXPERTS;
    if (t >= TOKENS || token + t >= num_rows || e >= NUM_EXPERTS) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < LOGIT_WARPS; w++) total += sums[w][t][threadIdx.x % LOGIT_EXPERTS];
    scratch->partial_logits[blockIdx.x][token + t][e] = total;
}

/* Larger for a larger score; 1 for what cannot be chosen, -inf and NaN. -0 is +0. */
__device__ uint32_t orderable(float score) {
    if (!(score > -INFINITE)) return 1;
    uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ bool can_be_chosen(uint32_t word) { return word > 1; }

/* Takes the best out of the warp's words and returns its index, in every lane: of the largest words the one with the
 * lowest index, and in `best` its word. A lane's words are those with the indices lane, lane + 32, ...; 0 for an index
 * that does not exist, and for what has been taken. */
template <int COUNT> __device__ __forceinline__ int take_best(uint32_t (&words)[COUNT], uint32_t &best) {
    int lane = threadIdx.x % 32, index = COUNT * 32;
    best = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j++) best = max(best, words[j]);
    best = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int j = COUNT - 1; j >= 0; j--)
        if (words[j] == best) index = lane + j * 32;
    index = __reduce_min_sync(~0u, index);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        if (lane + j * 32 == index) words[j] = 0;
    return index;
}

/* A lane's value of index lane + j * 32, j = index / 32, from the lane that has it. */
template <int COUNT> __device__ __forceinline__ float value_of(const float (&values)[COUNT], int index) {
    float found = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        float value = __shfl_sync(~0u, values[j], index % 32);
        if (index / 32 == j) found = value;
    }
    return found;
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
    uint32_t words[GROUPS_PER_LANE], best;
    bool allowed[PER_LANE] = {};
#pragma unroll
    for (int i = 0; i < GROUPS_PER_LANE; i++) {
        int group = lane + i * 32;
        words[i] = group < NUM_GROUPS ? orderable(group_score(scores, group)) : 0;
    }
    for (int i = 0; i < TOPK_GROUPS; i++) {
        int group = take_best(words, best);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) allowed[j] |= (lane + j * 32) / GROUP_SIZE == group;
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (!allowed[j]) score[j] = -INFINITE;
}

/* The weight of lane i's expert, for lanes i < k; `chosen` is its logit. */
__device__ float weigh(float chosen, const float (&logits)[PER_LANE], float routed_scaling, float renormalize_min) {
    constexpr bool OVER_CHOSEN = ROUTER_KIND == ROUTER_TOPK_SOFTMAX || RENORMALIZE;
    bool is_slot = threadIdx.x % 32 < EXPERTS_PER_TOKEN;
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

/* The weight of the expert that ROUTER_SPARSEMIXER has just chosen for its logit, in every lane: by a softmax over those
 * left whose logits lie near it. `first` is the one that was chosen before, or none. */
__device__ float sparsemix(const float (&logits)[PER_LANE], int chosen, int first, float jitter) {
    float largest = value_of(logits, chosen), total = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        bool is_far = (largest - logits[j]) / fmaxf(fabsf(logits[j]), largest) > 2.0f * jitter; /* 0/0 is not */
        if (!is_far && threadIdx.x % 32 + j * 32 != first) total += expf(logits[j] - largest);
    }
    return 1.0f / warp_sum(total);
}

/* What the routing of a layer reads and writes besides the scratch. */
struct Routing {
    State state;
    const Batch *batch;
    Batch *host_batch;
    const float *bias, *logit_bias; /* (NUM_EXPERTS) or NULL */
    float routed_scaling, renormalize_min, jitter;
    int layer;
    const int32_t *place; /* (NUM_EXPERTS), of the layer's FFN; NULL: of another routing, which the totals leave out */
};

/* A row's routing, by one warp. */
struct Choice {
    float logits[PER_LANE]; /* of experts lane, lane + 32, ... */
    int expert;             /* lane i < k: the i-th best, and its weight */
    float weight;
    bool is_bad;            /* in every lane: the logits allow no choice */
};

template <int ROWS>
__device__ Choice route_token(const Routing &r, const float (*partials)[ROWS][NUM_EXPERTS], int token) {
    int lane = threadIdx.x % 32;
    Choice choice = {};
    float (&logits)[PER_LANE] = choice.logits, score[PER_LANE];
    bool is_bad = false;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane + j * 32;
        float part[LOGIT_SLICES];
#pragma unroll
        for (int s = 0; s < LOGIT_SLICES; s++)
            part[s] = partials[s][token][min(e, NUM_EXPERTS - 1)];
        logits[j] = 0.0f;
#pragma unroll
        for (int s = 0; s < LOGIT_SLICES; s++) logits[j] += part[s];
        if (r.logit_bias) logits[j] += r.logit_bias[min(e, NUM_EXPERTS - 1)];
        if (e >= NUM_EXPERTS) logits[j] = -INFINITE;
        is_bad |= !(logits[j] < INFINITE);
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) score[j] = logits[j];
    if (ROUTER_KIND != ROUTER_SPARSEMIXER) {
        choice_scores(score, logits, r.bias);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) is_bad |= !(score[j] < INFINITE); /* a bias can be what is NaN or inf */
        if constexpr (NUM_GROUPS > 1) limit_groups(score);
    }
    uint32_t words[PER_LANE], best;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) words[j] = lane + j * 32 < NUM_EXPERTS ? orderable(score[j]) : 0;
    int first = NUM_EXPERTS;
#pragma unroll
    for (int slot = 0; slot < EXPERTS_PER_TOKEN; slot++) {
        int expert = take_best(words, best);
        is_bad |= !can_be_chosen(best);
        if (lane == slot) choice.expert = expert;
        if constexpr (ROUTER_KIND == ROUTER_SPARSEMIXER) {
            float weight = sparsemix(logits, expert, first, r.jitter);
            if (lane == slot) choice.weight = weight;
            first = expert;
        }
    }
    if (ROUTER_KIND != ROUTER_SPARSEMIXER)
        choice.weight = weigh(value_of(logits, choice.expert), logits, r.routed_scaling, r.renormalize_min);
    choice.is_bad = __any_sync(~0u, is_bad);
    return choice;
}

__device__ void store_choice(const State &s, int token, const Choice &choice) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (lane + j * 32 < NUM_EXPERTS) s.router_logits[token * NUM_EXPERTS + lane + j * 32] = choice.logits[j];
    if (lane < EXPERTS_PER_TOKEN) {
        s.expert_ids[token * EXPERTS_PER_TOKEN + lane] = choice.expert;
        s.expert_weights[token * EXPERTS_PER_TOKEN + lane] = choice.weight;
    }
}

/* What the blocks of a step find out together, in the shared memory of the one that goes on alone. */
struct Lists {
    int fault;                           /* MAX_TOKENS minus the lowest token whose logits allow no choice, or 0 */
    int absent;                          /* NUM_EXPERTS minus the lowest chosen expert without a place, or 0 */
    int totals[NUM_EXPERTS];             /* assignments */
    int starts[NUM_EXPERTS];             /* each expert's next assignment's place */
    uint32_t takers[WARPS][NUM_EXPERTS]; /* bit l of warp w: that its lane l has an assignment of the expert */
};

__device__ void clear(Lists &lists) {
    if (threadIdx.x == 0) lists.fault = lists.absent = 0;
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += WARPS * 32) lists.totals[e] = 0;
    for (int e = threadIdx.x % 32; e < NUM_EXPERTS; e += 32) lists.takers[threadIdx.x / 32][e] = 0;
}

/* Makes a fault known to the host, unless an earlier layer's is. By one thread. */
__device__ void report_fault(const Routing &r, const Lists &lists) {
    volatile Batch *batch = r.host_batch;
    if (batch->fault != 0 || (!lists.fault && !lists.absent)) return;
    batch->fault_layer = r.layer;
    batch->fault_token = lists.fault ? MAX_TOKENS - lists.fault : NUM_EXPERTS - lists.absent;
    __threadfence_system();
    batch->fault = lists.fault ? FAULT_ROUTER_LOGIT : FAULT_EXPERT;
}

constexpr unsigned ACTIVE = 1 << 23; /* one expert, counted in the same word as assignments */
static_assert(MAX_TOKENS * EXPERTS_PER_TOKEN < ACTIVE, "too many assignments to count beside the experts");

/* From the experts' totals, by one warp: where each one's assignments start, and the list of those that have any. */
__device__ void list_experts(const State &s, Lists &lists, const int32_t *place) {
    int lane = threadIdx.x % 32, total[PER_LANE];
    unsigned own = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane * PER_LANE + j;
        total[j] = e < NUM_EXPERTS ? lists.totals[e] : 0;
        own += total[j] + (total[j] > 0 ? ACTIVE : 0);
    }
    unsigned up_to = warp_sum_up_to(own);
    int start = (up_to - own) % ACTIVE, num_active = (up_to - own) / ACTIVE;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane * PER_LANE + j;
        if (e >= NUM_EXPERTS) break;
        lists.starts[e] = start;
        s.expert_offsets[e] = start;
        if (total[j] > 0) s.active_experts[num_active++] = e;
        if (total[j] > 0 && place && place[e] < 0) atomicMax(&lists.absent, NUM_EXPERTS - e);
        start += total[j];
    }
    if (lane == 31) {
        s.expert_offsets[NUM_EXPERTS] = up_to % ACTIVE;
        *s.num_active = up_to / ACTIVE;
        if (place) atomicAdd((unsigned long long *)s.experts_read, up_to / ACTIVE);
    }
}

/* Moves the experts' starts past the round's assignments. */
__device__ void end_round(Lists &lists) {
    __syncthreads();
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += WARPS * 32)
        for (int w = 0; w < WARPS; w++) {
            lists.starts[e] += __popc(lists.takers[w][e]);
            lists.takers[w][e] = 0;
        }
    __syncthreads();
}

/* Sorts `count` assignments by expert, then by token; `ids` are their experts where a block's shared memory has them
 * all. By one block, whose lists are clear; an assignment's place is its expert's start plus those before it, which
 * the takers' bits tell, a round of a thread each at a time. (The atomics are on integers: their order is no matter.) */
__device__ void dispatch(const Routing &r, Lists &lists, const int *ids, int count) {
    const State &s = r.state;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto expert_of = [&](int i) { return ids ? ids[i] : __ldcg(&s.expert_ids[i]); };
    for (int i = threadIdx.x; i < count; i += WARPS * 32) atomicAdd(&lists.totals[expert_of(i)], 1);
    for (int first = 0;; first += WARPS * 32) {
        int i = first + threadIdx.x, expert = 0;
        if (i < count) {
            expert = expert_of(i);
            atomicOr(&lists.takers[warp][expert], 1u << lane);
        }
        __syncthreads();
        if (first == 0) {
            if (warp == 0) list_experts(s, lists, r.place);
            __syncthreads();
        }
        if (i < count) {
            int place = lists.starts[expert] + __popc(lists.takers[warp][expert] & ((1u << lane) - 1));
            for (int w = 0; w < warp; w++) place += __popc(lists.takers[w][expert]);
            s.assignments[place] = i;
        }
        if (first + WARPS * 32 >= count) break;
        end_round(lists);
    }
    for (int e = threadIdx.x; e < NUM_EXPERTS && r.place; e += WARPS * 32)
        if (lists.totals[e])
            atomicAdd((unsigned long long *)&s.routed_tokens[(int64_t)r.layer * NUM_EXPERTS + e], lists.totals[e]);
}

/* True in the last block to get here, whose fault becomes all blocks', and where what the others wrote can be read. */
__device__ bool is_last_block(Scratch *scratch, Lists &lists) {
    __shared__ int arrived;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        if (lists.fault) atomicMax(&scratch->fault, lists.fault);
        __threadfence();
        arrived = atomicAdd(&scratch->routed_blocks, 1) + 1;
    }
    __syncthreads();
    if (arrived != (int)gridDim.x) return false;
    __threadfence();
    if (threadIdx.x == 0) {
        lists.fault = __ldcg(&scratch->fault);
        scratch->routed_blocks = scratch->fault = 0; /* for the next layer */
    }
    return true;
}

/* A warp a row. As many blocks as fit are a cluster, whose first block is handed all experts and goes on; what the
 * others store in the device's memory is not waited for. */
__global__ void __launch_bounds__(WARPS * 32)
router_kernel(const __grid_constant__ Routing r, Scratch *scratch, int num_rows) {
    __shared__ Lists lists;
    __shared__ int ids[CLUSTER_BLOCKS * WARPS * EXPERTS_PER_TOKEN];
    bool is_cluster = gridDim.x <= CLUSTER_BLOCKS;
    clear(lists);
    cluster_arrive();
    pdl_wait();
    pdl_trigger();
    int num_tokens = r.batch->num_tokens, lane = threadIdx.x % 32;
    int token = blockIdx.x * WARPS + threadIdx.x / 32;
    Choice choice = {};
    if (token < num_rows) choice = route_token(r, scratch->partial_logits, token);
    bool is_token = token < num_tokens;
    cluster_wait(); /* the first block has begun, and its lists are clear */
    if (is_token && choice.is_bad && lane == 0) raise_in_first_block(&lists.fault, MAX_TOKENS - token);
    if (is_token && is_cluster && lane < EXPERTS_PER_TOKEN)
        store_to_first_block(&ids[token * EXPERTS_PER_TOKEN + lane], choice.expert);
    if (is_cluster) cluster_arrive();
    if (is_token) store_choice(r.state, token, choice);
    if (is_cluster) cluster_wait();
    if (is_cluster ? blockIdx.x != 0 : !is_last_block(scratch, lists)) return;
    dispatch(r, lists, is_cluster ? ids : nullptr, num_tokens * EXPERTS_PER_TOKEN);
    if (threadIdx.x == 0) report_fault(r, lists);
}

/* For few tokens all in one: a cluster of which a block or two have a slice of the columns, and the first routes. */
constexpr int SHARES = NUM_EXPERTS > 64 && (CUDA_ARCH == 90 || CUDA_ARCH == 100) ? 2 : 1; /* of a slice's experts */
constexpr int LOGIT_GROUPS = ceil_div(NUM_EXPERTS, 2 * SHARES * LOGIT_EXPERTS);           /* of a warp */
constexpr int SMALL_TOKENS = 4;
constexpr bool FITS_CLUSTER = LOGIT_SLICES <= CLUSTER_BLOCKS && LOGIT_GROUPS <= 4 && /* in shared memory */
                              LOGIT_GROUPS * LANE_COLUMNS <= 16;                      /* and in 64 registers */

template <int TOKENS>
__global__ void __launch_bounds__(WARPS * 32)
small_router_kernel(const __grid_constant__ Routing r, Scratch *scratch, const float *x, const float *router,
                    int num_rows) {
    constexpr int EXPERTS = LOGIT_GROUPS * 2 * LOGIT_EXPERTS; /* of a share */
    __shared__ alignas(16) float sums[LOGIT_GROUPS * 2][LOGIT_WARPS][TOKENS][LOGIT_EXPERTS];
    __shared__ float partials[LOGIT_SLICES][TOKENS][NUM_EXPERTS]; /* the first block's */
    __shared__ Lists lists;
    __shared__ int ids[TOKENS * EXPERTS_PER_TOKEN];
    clear(lists);
    cluster_arrive();
    int warp = threadIdx.x / 32, part = warp % LOGIT_WARPS, slice = blockIdx.x / SHARES;
    int first = blockIdx.x % SHARES * EXPERTS;
    float4 weight[LOGIT_GROUPS][LANE_COLUMNS];
#pragma unroll
    for (int g = 0; g < LOGIT_GROUPS; g++)
        load_router(weight[g], router, slice, part, first + (g * 2 + warp / LOGIT_WARPS) * LOGIT_EXPERTS);
    pdl_wait();
    int num_tokens = r.batch->num_tokens;
    float value[TOKENS][LANE_COLUMNS];
    load_rows(value, x, num_rows, slice, part);
#pragma unroll
    for (int g = 0; g < LOGIT_GROUPS; g++) add_columns(sums[g * 2 + warp / LOGIT_WARPS][part], weight[g], value);
    __syncthreads();
    cluster_wait(); /* the first block has begun, and has its shared memory */
    for (int i = threadIdx.x; i < TOKENS * EXPERTS; i += WARPS * 32) {
        int t = i / EXPERTS, e = i % EXPERTS;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < LOGIT_WARPS; w++) total += sums[e / LOGIT_EXPERTS][w][t][e % LOGIT_EXPERTS];
        if (first + e < NUM_EXPERTS) store_to_first_block(&partials[slice][t][first + e], total);
    }
    cluster_arrive();
    cluster_wait();
    pdl_trigger(); /* here, for blocks that come earlier find these SMs full, and crowd on others */
    if (blockIdx.x != 0) return;
    if (warp < TOKENS && warp < num_tokens) {
        Choice choice = route_token(r, partials, warp);
        if (threadIdx.x % 32 < EXPERTS_PER_TOKEN) ids[warp * EXPERTS_PER_TOKEN + threadIdx.x % 32] = choice.expert;
        if (choice.is_bad && threadIdx.x % 32 == 0) atomicMax(&lists.fault, MAX_TOKENS - warp);
        store_choice(r.state, warp, choice);
    }
    __syncthreads();
    dispatch(r, lists, ids, num_tokens * EXPERTS_PER_TOKEN);
    if (threadIdx.x == 0) report_fault(r, lists);
}

template <bool FITS>
int launch_small(Model *m, int num_rows, const Routing &routing, const float *router, const float *input) {
    if constexpr (FITS) {
        auto kernel = num_rows == 1 ? small_router_kernel<1> : small_router_kernel<SMALL_TOKENS>;
        constexpr int BLOCKS = LOGIT_SLICES * SHARES;
        return launch_clusters(m, "small_router", kernel, BLOCKS, BLOCKS, WARPS * 32, 0, routing, scratch_of(m), input,
                               router, num_rows);
    }
    return 0;
}

int launch_logits(Model *m, int num_rows, const float *router, const float *input) {
    dim3 grid(LOGIT_SLICES, ceil_div(NUM_EXPERTS, LOGIT_EXPERTS), num_rows);
    auto kernel = router_logits_kernel<1>;
    if (num_rows > 4) {
        grid.z = ceil_div(num_rows, 8);
        kernel = router_logits_kernel<8>;
    }
    return launch(m, "router_logits", kernel, grid, LOGIT_WARPS * 32, 0, scratch_of(m), input, router, num_rows);
}

} // namespace

int64_t cuda_product_scratch_bytes() { return sizeof(Scratch); }

int cuda_route(Model *m, int num_tokens, int layer, const float *input, const float *router, const float *logit_bias,
               const float *correction, bool counted) {
    const BinHeader *h = &m->header;
    Routing routing = {m->state, device_batch(m), m->batch, correction, logit_bias, h->routed_scaling,
                       h->renormalize_min, h->router_jitter, layer, counted ? places(m, layer) : nullptr};
    if (FITS_CLUSTER && num_tokens <= SMALL_TOKENS)
        return launch_small<FITS_CLUSTER>(m, num_tokens, routing, router, input);
    TRY(launch_logits(m, num_tokens, router, input));
    int blocks = ceil_div(num_tokens, WARPS);
    return launch_clusters(m, "router", router_kernel, blocks, blocks <= CLUSTER_BLOCKS ? blocks : 1, WARPS * 32, 0,
                           routing, scratch_of(m), num_tokens);
}

int cuda_router(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    return cuda_route(m, num_tokens, layer, ffn_input(m), weights->router, weights->router_logit_bias,
                      ROUTER_BIAS ? weights->router_bias : nullptr, true);
}
