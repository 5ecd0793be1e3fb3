/* The dense products q/k/v, those of latent attention, attention_out and lm_head: out[t] = scale * (W in[t] + bias),
 * for one token as for a whole prompt.
 *
 * Decode is bound by reading W, so weights go straight from memory into the registers of a matrix instruction: a lane
 * loads 8 rows (16 bytes) of 4 columns, and byte permutes pair the columns up. Inputs are split into two weight-typed
 * parts, high and low, so that they lose nothing that matters.
 *
 * A row's columns are cut by the shape alone: into segments, those into one range a warp, and a range is summed from
 * its first column to its last. Ranges are added in order, then segments in order: decode gives each segment a block
 * and lets the last of a panel's blocks to finish add them up, a long prompt gives all segments to one block. Either
 * way the bits of a row's result depend on nothing but the row. */
#include "common.cuh"

#if NUM_HEADS

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 8;              /* tokens of one matrix instruction */
constexpr int MAX_TILES = 8;         /* of one block */
constexpr int STEP = 16;             /* columns of one matrix instruction */
constexpr int DEPTH = 4;             /* steps that a warp has in flight */
constexpr int SEGMENT_COLUMNS = 512; /* at least, so that a block has 64 KiB to read ... */
constexpr int ENOUGH_BLOCKS = 2048;  /* ... and no more blocks than keep a GPU evenly loaded */

constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

} // namespace

/* Of a matrix; its input is columns FIRST, FIRST + 1, ... of rows of STRIDE. In no namespace: there, what a shape leaves
 * unused would be a warning. */
template <int ROWS_, int COLUMNS_, int STRIDE_ = COLUMNS_, int FIRST_ = 0> struct Shape {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, STRIDE = STRIDE_, FIRST = FIRST_;
    static constexpr bool WHOLE_STEPS = COLUMNS % STEP == 0;
    static constexpr bool VECTORS = WHOLE_STEPS && STRIDE % 4 == 0 && FIRST % 4 == 0;
    static constexpr int PANELS = ceil_div(ROWS, PANEL_ROWS);
    static constexpr int SEGMENTS = at_most(ceil_div(COLUMNS, SEGMENT_COLUMNS), at_least(1, ENOUGH_BLOCKS / PANELS));
    static constexpr int WARP_COLUMNS = round_up(ceil_div(COLUMNS, SEGMENTS * WARPS), STEP);
};

namespace {

using Qkv = Shape<QKV_ROWS, HIDDEN>;
using AttentionOut = Shape<HIDDEN, NUM_HEADS * V_HEAD_DIM>;
using LmHead = Shape<VOCAB_SIZE, HIDDEN>;
#if ATTENTION_KIND == ATTENTION_LATENT
using KvB = Shape<KV_B_ROWS, KV_LORA_RANK, QKV_ROWS, QKV_ROWS - ROTARY_DIM - KV_LORA_RANK>;
#else
using KvB = Qkv;
#endif
#if Q_LORA_RANK
using QB = Shape<NUM_HEADS * HEAD_DIM, Q_LORA_RANK, QKV_ROWS>;
#else
using QB = Qkv;
#endif

/* The scratch part: how many of a panel's blocks have arrived, then every segment's sums. Zero at first, and after
 * each product. */
constexpr int64_t SEGMENT_FLOATS = MAX_TILES * TILE * PANEL_ROWS;
template <class S> constexpr int64_t SPLIT_FLOATS = S::SEGMENTS > 1 ? S::PANELS * S::SEGMENTS * SEGMENT_FLOATS : 0;
template <class... S> constexpr int64_t arrived_bytes() {
    int panels = 0;
    ((panels = at_least(panels, S::PANELS)), ...);
    return panels * (int64_t)sizeof(int);
}
template <class... S> constexpr int64_t most_floats() {
    int64_t floats = 0;
    ((floats = floats > SPLIT_FLOATS<S> ? floats : SPLIT_FLOATS<S>), ...);
    return floats;
}
constexpr int64_t ARRIVED_BYTES = arrived_bytes<Qkv, QB, KvB, AttentionOut, LmHead>();

/* Columns c..c+3 of one input row, as the high and the low parts of a matrix instruction's operand. */
template <class S> __device__ void load_input(uint2 &high, uint2 &low, const float *row, int c) {
    float x[4];
    if constexpr (S::VECTORS) {
        float4 v = *reinterpret_cast<const float4 *>(row + c);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = c + i < S::COLUMNS ? row[c + i] : 0.0f;
    }
    high = {to_weights(x[0], x[1]), to_weights(x[2], x[3])};
    float2 a = to_float2(high.x), b = to_float2(high.y);
    low = {to_weights(x[0] - a.x, x[1] - a.y), to_weights(x[2] - b.x, x[3] - b.y)};
}

/* This lane's 8 rows of columns c..c+3, where c counts from the panel's first column. */
template <class S> __device__ void load_weights(uint4 (&w)[4], const uint4 *panel, int c, int end) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bool inside = S::WHOLE_STEPS ? c < end : c + i < end;
        w[i] = inside ? __ldcs(panel + (int64_t)(c + i) * (PANEL_ROWS / 8)) : make_uint4(0, 0, 0, 0);
    }
}

/* One step: acc += 64 rows x 16 columns of W times the inputs of up to TILES * 8 tokens. Matrix instruction j has rows
 * 8g + 2j as its upper and 8g + 2j + 1 as its lower half, g = lane / 4; lane % 4 picks the columns. */
template <class S, int TILES>
__device__ void multiply(float (&acc)[TILES][4][4], const uint4 (&w)[4], const float *in, int c, int num_tokens) {
    uint32_t a[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = j == 0 ? w[i].x : j == 1 ? w[i].y : j == 2 ? w[i].z : w[i].w;
        a[j][0] = __byte_perm(x[0], x[1], 0x5410), a[j][1] = __byte_perm(x[0], x[1], 0x7632);
        a[j][2] = __byte_perm(x[2], x[3], 0x5410), a[j][3] = __byte_perm(x[2], x[3], 0x7632);
    }
    int token = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        if (n * TILE >= num_tokens) break;
        uint2 high = {0, 0}, low = {0, 0};
        if (n * TILE + token < num_tokens) load_input<S>(high, low, in + (int64_t)(n * TILE + token) * S::STRIDE, c);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            multiply_add(acc[n][j], a[j], low.x, low.y);
            multiply_add(acc[n][j], a[j], high.x, high.y);
        }
    }
}

/* acc = this warp's range of columns of one segment. `w` holds the range's first DEPTH steps on entry. */
template <class S, int TILES>
__device__ void sum_range(float (&acc)[TILES][4][4], uint4 (&w)[DEPTH][4], const uint4 *panel, const float *in,
                          int begin, int end, int num_tokens) {
#pragma unroll
    for (int i = 0; i < TILES * 16; i++) acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
    int c = begin + threadIdx.x % 4 * 4;
    for (; begin < end; begin += STEP * DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (begin + d * STEP < end) multiply<S, TILES>(acc, w[d], in, c, num_tokens);
            load_weights<S>(w[d], panel, c + STEP * DEPTH, end);
            c += STEP;
        }
    }
}

/* total += the block's sum over its warps, in order; thread i keeps outputs i and i + 256 of each tile. */
template <int TILES>
__device__ void add_warps(float (&total)[TILES][2], const float (&acc)[TILES][4][4], int num_tokens) {
    __shared__ alignas(16) float ranges[WARPS][TILE][PANEL_ROWS];
    int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4 * 8, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        if (n * TILE >= num_tokens) break;
        __syncthreads(); /* the last tile's sums have been read */
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                *reinterpret_cast<float2 *>(&ranges[warp][token + i][row + 2 * j]) = {acc[n][j][i], acc[n][j][i + 2]};
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int output = threadIdx.x + i * WARPS * 32;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += ranges[w][output / PANEL_ROWS][output % PANEL_ROWS];
            total[n][i] += sum;
        }
    }
}

/* Publishes this block's segment; true in the last of the panel's blocks, with all segments in total. */
template <class S, int TILES>
__device__ bool add_segments(float (&total)[TILES][2], float *partials, int *arrived, int panel, int segment,
                             int num_tokens) {
    __shared__ bool last;
    float *mine = partials + ((int64_t)panel * S::SEGMENTS + segment) * SEGMENT_FLOATS + threadIdx.x;
#pragma unroll
    for (int n = 0; n < TILES; n++)
        for (int i = 0; i < 2; i++)
            if (n * TILE < num_tokens) mine[(n * 2 + i) * WARPS * 32] = total[n][i];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&arrived[panel], 1) == S::SEGMENTS - 1;
        if (last) arrived[panel] = 0; /* for the next product */
    }
    __syncthreads();
    if (!last) return false;
    __threadfence();
    const float *all = partials + (int64_t)panel * S::SEGMENTS * SEGMENT_FLOATS + threadIdx.x;
#pragma unroll
    for (int n = 0; n < TILES; n++)
        for (int i = 0; i < 2; i++) {
            total[n][i] = 0.0f;
            for (int s = 0; s < S::SEGMENTS && n * TILE < num_tokens; s++)
                total[n][i] += __ldcg(&all[s * SEGMENT_FLOATS + (n * 2 + i) * WARPS * 32]);
        }
    return true;
}

/* Grid: (panels * segments) for up to 64 tokens, else (panels, tiles of 64 tokens). */
template <class S, int TILES, bool ADD>
__global__ void __launch_bounds__(WARPS * 32, TILES <= 2 ? 2 : 1)
linear_kernel(float *out, const weight_t *weight, const float *bias, float scale, const float *in, const int *num_rows,
              float *partials, int *arrived) {
    bool split = S::SEGMENTS > 1 && gridDim.y == 1;
    int panel = split ? blockIdx.x / S::SEGMENTS : blockIdx.x;
    int segment = split ? blockIdx.x % S::SEGMENTS : 0, segments_end = split ? segment + 1 : S::SEGMENTS;
    int begin = (segment * WARPS + threadIdx.x / 32) * S::WARP_COLUMNS;
    const uint4 *rows = reinterpret_cast<const uint4 *>(weight) + (int64_t)panel * S::COLUMNS * (PANEL_ROWS / 8) +
                        threadIdx.x % 32 / 4;
    uint4 w[DEPTH][4];
    auto prefetch = [&] {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            load_weights<S>(w[d], rows, begin + threadIdx.x % 4 * 4 + d * STEP, min(begin + S::WARP_COLUMNS, S::COLUMNS));
    };
    prefetch();
    int row = panel * PANEL_ROWS + threadIdx.x % PANEL_ROWS;
    bias = bias && row < S::ROWS ? bias + row : nullptr;
    if (bias) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias));
    pdl_wait();
    pdl_trigger();
    int first = blockIdx.y * MAX_TILES * TILE, num_tokens = min(*num_rows - first, MAX_TILES * TILE);
    if (num_tokens <= 0) return;
    float total[TILES][2] = {};
    for (;;) {
        float acc[TILES][4][4];
        sum_range<S, TILES>(acc, w, rows, in + (int64_t)first * S::STRIDE + S::FIRST, begin,
                            min(begin + S::WARP_COLUMNS, S::COLUMNS), num_tokens);
        add_warps<TILES>(total, acc, num_tokens);
        if (++segment == segments_end) break;
        begin += WARPS * S::WARP_COLUMNS;
        prefetch();
    }
    if (split && !add_segments<S, TILES>(total, partials, arrived, panel, segment - 1, num_tokens)) return;
    float constant = bias ? *bias : 0.0f;
#pragma unroll
    for (int n = 0; n < TILES; n++)
        for (int i = 0; i < 2; i++) {
            int token = n * TILE + i * (TILE / 2) + threadIdx.x / PANEL_ROWS;
            float *y = out + (int64_t)(first + token) * S::ROWS + row, value = scale * (total[n][i] + constant);
            if (token < num_tokens && row < S::ROWS) *y = ADD ? *y + value : value;
        }
}

/* What a product adds and multiplies with at its end. */
struct Epilogue {
    const float *bias; /* (ROWS), or NULL */
    float scale;
};

template <class S, bool ADD = false>
int linear(Model *m, int launch_rows, float *out, const weight_t *weight, Epilogue end, const float *in,
           const int *num_rows) {
    int *arrived = (int *)linear_scratch(m);
    float *partials = (float *)(linear_scratch(m) + scratch_round(ARRIVED_BYTES));
    auto start = [&](auto kernel, dim3 grid) {
        return launch(m, "linear", kernel, grid, WARPS * 32, 0, out, weight, end.bias, end.scale, in, num_rows,
                      partials, arrived);
    };
    dim3 split(S::PANELS * S::SEGMENTS);
    if (launch_rows <= TILE) return start(linear_kernel<S, 1, ADD>, split);
    if (launch_rows <= 2 * TILE) return start(linear_kernel<S, 2, ADD>, split);
    if (launch_rows <= 4 * TILE) return start(linear_kernel<S, 4, ADD>, split);
    if (launch_rows <= MAX_TILES * TILE) return start(linear_kernel<S, MAX_TILES, ADD>, split);
    return start(linear_kernel<S, MAX_TILES, ADD>, dim3(S::PANELS, ceil_div(launch_rows, MAX_TILES * TILE)));
}

} // namespace

int64_t cuda_linear_scratch_bytes() {
    return scratch_round(ARRIVED_BYTES) +
           scratch_round(most_floats<Qkv, QB, KvB, AttentionOut, LmHead>() * sizeof(float));
}

int cuda_qkv(Model *m, int num_tokens, const Layer *layer) {
    return linear<Qkv>(m, num_tokens, m->state.qkv, layer->qkv, {layer->qkv_bias, 1.0f}, m->state.normed,
                       &device_batch(m)->num_tokens);
}

#if ATTENTION_KIND == ATTENTION_LATENT
int cuda_latent_products(Model *m, int num_tokens, const Layer *layer) {
    const int *num_rows = &device_batch(m)->num_tokens;
#if Q_LORA_RANK
    TRY(linear<QB>(m, num_tokens, m->state.q, layer->q_b, {nullptr, 1.0f}, m->state.qkv, num_rows));
#endif
    return linear<KvB>(m, num_tokens, m->state.kv, layer->kv_b, {nullptr, 1.0f}, m->state.qkv, num_rows);
}
#endif

#if ATTENTION_KIND != ATTENTION_MOA
int cuda_attention_out(Model *m, int num_tokens, const Layer *layer) {
    return linear<AttentionOut, true>(m, num_tokens, m->state.x, layer->attention_out,
                                      {layer->attention_out_bias, m->header.residual_multiplier}, m->state.attention,
                                      &device_batch(m)->num_tokens);
}
#endif

int cuda_lm_head(Model *m, int num_logits) {
    return linear<LmHead>(m, num_logits, m->state.logits, m->weights.lm_head,
                          {m->weights.lm_head_bias, m->header.logits_multiplier}, m->state.normed,
                          &device_batch(m)->num_logits);
}

#else
int64_t cuda_linear_scratch_bytes() { return 0; }
#endif
