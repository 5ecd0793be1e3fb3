/* Router logits. Their sums are split over columns into slices that the shape fixes; a block has a slice's columns for
 * 16 experts and up to 8 rows. */
#ifndef COLIBRI_CUDA_LOGITS_CUH
#define COLIBRI_CUDA_LOGITS_CUH

#include "launch.cuh"
#include "scratch.cuh"

namespace {

constexpr int LOGIT_WARPS = LOGIT_LANES / 8;           /* that share 16 experts' columns of a slice */
constexpr int LOGIT_EXPERTS = 16;                      /* of a warp: four lanes' float4 of one column */
constexpr int LANE_COLUMNS = SLICE_COLUMNS / LOGIT_LANES;
constexpr int VECTOR = HIDDEN % 4 == 0 && LANE_COLUMNS % 4 == 0 ? 4 : HIDDEN % 2 == 0 && LANE_COLUMNS % 2 == 0 ? 2 : 1;

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

#endif
