/* Routing: logits, each token's experts and their weights, and the lists that the expert products work from.
 *
 * router_kernel adds the logits' slices in order and routes, one warp a token. One block goes on to build the lists:
 * the first of a cluster, or the one that is done last. For few tokens one kernel does all, a cluster whose blocks have
 * a slice each and hand their sums to the first one's shared memory. */
#include "assignments.cuh"
#include "launch.cuh"
#include "logits.cuh"
#include "ptx.cuh"

namespace {

constexpr int CLUSTER_BLOCKS = CUDA_ARCH >= 90 ? 8 : 1; /* at most: a GPU need not have more */

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
    int place = own_place(r);
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
    if (is_token && choice.is_bad && lane == 0) raise_in_first_block(&lists.fault, MAX_STEP_TOKENS - token);
    if (is_token && is_cluster && lane < EXPERTS_PER_TOKEN)
        store_to_first_block(&ids[token * EXPERTS_PER_TOKEN + lane], choice.expert);
    if (is_cluster) cluster_arrive();
    if (is_token) store_choice(r.state, token, choice);
    if (is_cluster) cluster_wait();
    if (is_cluster ? blockIdx.x != 0 : !is_last_block(scratch, lists)) return;
    dispatch(r, lists, place, is_cluster ? ids : nullptr, num_tokens * EXPERTS_PER_TOKEN);
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
    int place = own_place(r);
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
        if (choice.is_bad && threadIdx.x % 32 == 0) atomicMax(&lists.fault, MAX_STEP_TOKENS - warp);
        store_choice(r.state, warp, choice);
    }
    __syncthreads();
    dispatch(r, lists, place, ids, num_tokens * EXPERTS_PER_TOKEN);
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

} // namespace

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
