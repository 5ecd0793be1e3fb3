/* Products for many tokens: experts', a grouped matrix product over the assignments, which router.cu has sorted, and
 * dense ones, of one expert that has all tokens; then products for any number of tokens.
 *
 * A block has two panels (128 rows) of one expert and up to 64 of its tokens; eight warps take 32 rows times 32 tokens
 * each. Weights come by cp.async, three stages deep; inputs are rounded to weight_t on their way to shared memory. One
 * warp sums an output over all columns in order, so that its bits depend on nothing but its row. */
#ifndef COLIBRI_CUDA_PREFILL_CUH
#define COLIBRI_CUDA_PREFILL_CUH

#include "decode.cuh"

namespace prefill {
namespace {

constexpr int THREADS = 256;
constexpr int TILE_TOKENS = 64;
constexpr int STEP_COLUMNS = 64;
constexpr int STAGES = 3;
constexpr int PER_LANE = ceil_div(NUM_EXPERTS, 32);

constexpr int INPUT_BYTES = TILE_TOKENS * STEP_COLUMNS * 2;

template <class P> struct Shared {
    alignas(1024) char weights[STAGES][2][STEP_COLUMNS * 128]; /* as in tiles.cuh */
    char inputs[2][P::IS_DENSE ? 2 : 1][INPUT_BYTES];          /* high, low: [token][column], swizzled likewise */
    int expert_place, first, count;                            /* the block's tile */
};

/* The expert and the assignments of tile blockIdx.x, count 0 where there is no such tile. Ends with a barrier. */
template <class P> __device__ void find_tile(Shared<P> &s, const Job &job) {
    const int32_t *offsets = job.offsets;
    int lane = threadIdx.x, before_all = 0, wanted = blockIdx.x;
    if (lane == 0) s.count = 0;
    for (int j = 0; j < PER_LANE && lane < 32; j++) {
        __syncwarp();
        int e = lane + j * 32, begin = e < NUM_EXPERTS ? offsets[e] : 0, end = e < NUM_EXPERTS ? offsets[e + 1] : 0;
        int place = place_of(job, min(e, NUM_EXPERTS - 1));
        int own = (end - begin + TILE_TOKENS - 1) / TILE_TOKENS, up_to = warp_sum_up_to(own);
        int index = wanted - (before_all + up_to - own);
        if (index >= 0 && index < own) {
            s.expert_place = place;
            s.first = begin + index * TILE_TOKENS;
            s.count = min(end - s.first, TILE_TOKENS);
        }
        before_all += __shfl_sync(~0u, up_to, 31);
    }
    __syncthreads();
}

/* The same where one expert has all tokens, in their order. */
template <class P> __device__ void find_tokens(Shared<P> &s, int num_tokens) {
    if (threadIdx.x == 0) {
        s.expert_place = 0;
        s.first = blockIdx.x * TILE_TOKENS;
        s.count = max(min(num_tokens - s.first, TILE_TOKENS), 0);
    }
    __syncthreads();
}

/* The assignment of a token of the block's tile. */
template <class P> __device__ int assignment_of(const Shared<P> &s, const Job &job, int token) {
    return P::ALL_TOKENS ? s.first + token : job.assignments[s.first + token];
}

/* Asks for the columns of step `step` of both panels; always one group of copies. */
template <class P> __device__ void fill_weights(Shared<P> &s, const Job &job, int step) {
    constexpr int PIECES = STEP_COLUMNS * 8;
    for (int i = threadIdx.x; i < 2 * PIECES && step * STEP_COLUMNS < P::COLUMNS; i += THREADS) {
        int half = i / PIECES, c = i / 8 % STEP_COLUMNS, eighth = i % 8, column = step * STEP_COLUMNS + c;
        int panel = blockIdx.y * 2 + half;
        bool valid = panel < P::PANELS && column < P::COLUMNS;
        const weight_t *from =
            job.weights + column_index(P::COLUMNS, P::STORED, panel, s.expert_place, column) + eighth * 8;
        cp_async_16(shared_address(s.weights[step % STAGES][half]) + c * 128 + (eighth ^ (c % 8)) * 16,
                    valid ? from : job.weights, valid);
    }
    cp_async_commit();
}

/* 16 columns of one token's input, a quarter of a step; zeros past the end and for no token. */
template <class P> __device__ void load_input(float (&x)[16], const float *row, int step) {
    int first = step * STEP_COLUMNS + threadIdx.x % 4 * 16;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        float4 v = make_float4(0, 0, 0, 0);
        if constexpr (P::COLUMNS % 4 == 0 && P::STRIDE % 4 == 0 && P::FIRST % 4 == 0) {
            if (row && first + i < P::COLUMNS) v = *(const float4 *)(row + first + i);
        } else if (row) {
            if (first + i < P::COLUMNS) v.x = row[first + i];
            if (first + i + 1 < P::COLUMNS) v.y = row[first + i + 1];
            if (first + i + 2 < P::COLUMNS) v.z = row[first + i + 2];
            if (first + i + 3 < P::COLUMNS) v.w = row[first + i + 3];
        }
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
}

template <class P> __device__ void store_input(Shared<P> &s, int step, const float (&x)[16]) {
    int token = threadIdx.x / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int j = 0; j < 4; j++) split_inputs<P>(high[j], low[j], x[i * 8 + j * 2], x[i * 8 + j * 2 + 1]);
        int place = token * 128 + ((quarter * 2 + i) ^ (token % 8)) * 16;
        *(uint4 *)(s.inputs[step % 2][0] + place) = {high[0], high[1], high[2], high[3]};
        if (P::IS_DENSE) *(uint4 *)(s.inputs[step % 2][P::IS_DENSE] + place) = {low[0], low[1], low[2], low[3]};
    }
}

/* acc += TILES times 16 rows times 32 tokens times one step's columns. */
template <class P, int TILES>
__device__ __forceinline__ void multiply_tiles(float (&acc)[TILES][4][4], uint32_t weights, int first_tile,
                                               uint32_t inputs, int first_token) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < STEP_COLUMNS / 16; step++) {
        uint32_t high[2][4], low[2][4], a[4];
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            int token = first_token + pair * 16 + lane / 16 * 8 + lane % 8, eighth = step * 2 + lane / 8 % 2;
            uint32_t place = inputs + token * 128 + (eighth ^ (lane % 8)) * 16;
            load_matrices(high[pair], place);
            if (P::IS_DENSE) load_matrices(low[pair], place + INPUT_BYTES);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            load_tile(a, weights, first_tile + tile, step);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint32_t *h = high[n / 2] + n % 2 * 2, *l = low[n / 2] + n % 2 * 2;
                if (P::IS_DENSE) multiply_add(acc[tile][n], a, l[0], l[1]);
                multiply_add(acc[tile][n], a, h[0], h[1]);
            }
        }
    }
}

/* acc += 32 rows times 32 tokens times one step's columns. The matrix instruction truncates as it adds, so where inputs
 * are to lose nothing, a step is summed by itself. */
template <class P>
__device__ __forceinline__ void multiply(float (&acc)[2][4][4], uint32_t weights, uint32_t inputs, int first_token) {
    int first_tile = threadIdx.x / 32 % 2 * 2;
    if constexpr (P::IS_DENSE) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            float sum[1][4][4] = {};
            multiply_tiles<P>(sum, weights, first_tile + tile, inputs, first_token);
#pragma unroll
            for (int i = 0; i < 16; i++) acc[tile][i / 4][i % 4] += sum[0][i / 4][i % 4];
        }
    } else {
        multiply_tiles<P>(acc, weights, first_tile, inputs, first_token);
    }
}

/* A lane has rows g and g + 8 of each 16, of tokens 2t and 2t + 1 of each 8: of a gated expert, both halves of one
 * output. */
template <class P>
__device__ void write_outputs(const Shared<P> &s, const Job &job, const float (&acc)[2][4][4], int panel,
                              int first_token) {
    constexpr int PER_TILE = P::IS_GATED ? 8 : 16;
    int g = threadIdx.x % 32 / 4, first_tile = threadIdx.x / 32 % 2 * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int token = first_token + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (token >= s.count) continue;
        float *row = job.output + (int64_t)assignment_of<P>(s, job, token) * P::OUTPUTS;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            int output = (panel * 4 + first_tile + tile) * PER_TILE + g;
            float upper = acc[tile][i / 2][i % 2], lower = acc[tile][i / 2][i % 2 + 2];
            auto write = [&](int place, float value, float up) {
                if (place >= P::OUTPUTS) return;
                float result = finish_output<P>(job, s.expert_place, place, value, up);
                row[place] = P::ADDS ? row[place] + result : result;
            };
            write(output, upper, lower);
            if (!P::IS_GATED) write(output + 8, lower, 0.0f);
        }
    }
}

/* Grid: (tiles at most, pairs of panels). */
template <class P> __global__ void __launch_bounds__(THREADS, 2) prefill_kernel(const __grid_constant__ Job job) {
    extern __shared__ char memory[];
    Shared<P> &s = *(Shared<P> *)(memory + (1024 - shared_address(memory) % 1024) % 1024);
    pdl_wait();
    pdl_trigger();
    if constexpr (P::ALL_TOKENS)
        find_tokens(s, *job.num_tokens);
    else
        find_tile(s, job);
    if (s.count == 0) return;
    int warp = threadIdx.x / 32, half = warp / 2 % 2, first_token = warp / 4 * 32, token = threadIdx.x / 4;
    const float *row = nullptr;
    if (token < s.count)
        row = job.input + (int64_t)(assignment_of<P>(s, job, token) / P::INPUT_DIVISOR) * P::STRIDE;
    float acc[2][4][4] = {}, x[16];
    for (int i = 0; i < STAGES - 1; i++) fill_weights<P>(s, job, i);
    load_input<P>(x, row, 0);
    store_input(s, 0, x);
    bool has_work = blockIdx.y * 2 + half < P::PANELS && first_token < s.count;
    for (int step = 0; step * STEP_COLUMNS < P::COLUMNS; step++) {
        load_input<P>(x, row, step + 1);
        cp_async_wait<STAGES - 2>();
        __syncthreads(); /* this step's weights and inputs have arrived; the last step's have been read */
        fill_weights<P>(s, job, step + STAGES - 1);
        if (has_work)
            multiply<P>(acc, shared_address(s.weights[step % STAGES][half]), shared_address(s.inputs[step % 2]),
                        first_token);
        store_input(s, step + 1, x);
    }
    if (has_work) write_outputs<P>(s, job, acc, blockIdx.y * 2 + half, first_token);
}

template <class P> int start(Model *m, int launch_rows, const Job &job) {
    int tiles = P::ALL_TOKENS ? ceil_div(launch_rows, TILE_TOKENS)
                              : min_of(NUM_EXPERTS, launch_rows * EXPERTS_PER_TOKEN) +
                                    launch_rows * EXPERTS_PER_TOKEN / TILE_TOKENS;
    dim3 grid(tiles, ceil_div(P::PANELS, 2));
    return launch(m, P::NAME, prefill_kernel<P>, grid, THREADS, sizeof(Shared<P>) + 1024, job);
}

} // namespace
} // namespace prefill

template <class P> int product(Model *m, int launch_rows, const Job &job) {
    return launch_rows > DECODE_TOKENS ? prefill::start<P>(m, launch_rows, job) : decode::start<P>(m, launch_rows, job);
}

#endif
