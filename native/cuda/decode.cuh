/* Products for few tokens: experts', and dense ones, which are those of one expert that has all tokens.
 *
 * Bound by reading weights, so a block an SM goes through items (tile of one expert's tokens, panel, part of the
 * columns), and every warp that multiplies keeps its own ring of copies in flight across items; one more warp adds up
 * their sums and writes an item's outputs, while the others are at the next. SMs are not equally fast, so where items
 * are large, a block takes the next one that nobody has. Weights are the first operand of the matrix instruction,
 * tokens its 8 columns.
 *
 * The order of every sum is fixed by the shape: a warp takes each WARPS-th piece of its item, then warps are added in
 * order, then, by the last of a panel's parts to arrive, the parts in order. */
#ifndef COLIBRI_CUDA_DECODE_CUH
#define COLIBRI_CUDA_DECODE_CUH

#include "launch.cuh"
#include "tiles.cuh"

namespace decode {
namespace {

constexpr int WARPS = 8;                 /* that multiply; one more finishes their items */
constexpr int THREADS = (WARPS + 1) * 32;
constexpr int SUM_ROWS = PANEL_ROWS + 4; /* padded, so that a warp's stores meet no bank twice */

/* Up to 8 * COLUMNS_OF_8 tokens of the expert at `place`: assignments [first, first + count). */
struct Tile {
    int16_t place, count;
    int32_t first;
};

constexpr int QUEUE = 4;              /* a block's latest items; a warp asks at most two ahead */
constexpr int UNKNOWN = -1, ASKED = -2;

struct Shared {
    alignas(1024) char rings[WARPS][RING_BYTES];
    float sums[WARPS / 2][8][SUM_ROWS];
    uint64_t full[WARPS][RING_STAGES];
    Tile tiles[TILE_BOUND];
    int queue[QUEUE];                 /* the block's i-th item is at i % QUEUE */
    int num_tiles;
    uint16_t assignments[DECODE_ASSIGNMENTS];
};

constexpr int PER_LANE = ceil_div(NUM_EXPERTS, 32);

/* The places of the experts whose tiles a lane lists, asked for before the previous kernel's end: no kernel writes
 * them. */
struct LanePlaces {
    int of[PER_LANE];

    __device__ explicit LanePlaces(const Job &job) {
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            of[j] = place_of(job, min((int)threadIdx.x % 32 * PER_LANE + j, NUM_EXPERTS - 1));
    }
};

/* The routing as a list of tiles, and the assignments, in shared memory. Ends with a barrier. */
template <int TILE_TOKENS> __device__ void list_tiles(Shared &s, const Job &job, const LanePlaces &places) {
    for (int i = threadIdx.x; i < DECODE_ASSIGNMENTS; i += THREADS) s.assignments[i] = job.assignments[i];
    if (threadIdx.x < 32) {
        int lane = threadIdx.x, offset[PER_LANE + 1], own = 0;
#pragma unroll
        for (int j = 0; j <= PER_LANE; j++) offset[j] = job.offsets[min(lane * PER_LANE + j, NUM_EXPERTS)];
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) own += (offset[j + 1] - offset[j] + TILE_TOKENS - 1) / TILE_TOKENS;
        int up_to = warp_sum_up_to(own);
        Tile *next = s.tiles + up_to - own;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            for (int first = offset[j]; first < offset[j + 1]; first += TILE_TOKENS)
                *next++ = {(int16_t)places.of[j], (int16_t)min(offset[j + 1] - first, TILE_TOKENS), first};
        if (lane == 31) s.num_tiles = up_to;
    }
    __syncthreads();
}

/* The same where one expert has all tokens, in their order. */
template <int TILE_TOKENS> __device__ void list_all_tokens(Shared &s, const Job &job) {
    int num_tokens = *job.num_tokens, i = threadIdx.x, first = i * TILE_TOKENS;
    if (i < num_tokens) s.assignments[i] = i;
    if (first < num_tokens) s.tiles[i] = {0, (int16_t)min(num_tokens - first, TILE_TOKENS), first};
    if (i == 0) s.num_tiles = (num_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    __syncthreads();
}

/* The block's item number `turn`: the first warp that wants to know takes it from the list, the others wait. */
__device__ int take_item(Shared &s, const Job &job, int turn) {
    int item = 0;
    if (threadIdx.x % 32 == 0) {
        int *place = &s.queue[turn % QUEUE];
        item = atomicCAS(place, UNKNOWN, ASKED);
        if (item == UNKNOWN) {
            item = gridDim.x + atomicAdd(job.next_item, 1);
            atomicExch(place, item);
        }
        while (item == ASKED) item = atomicAdd(place, 0);
    }
    return __shfl_sync(~0u, item, 0);
}

/* A place in a warp's stream of pieces: an item, and a piece of it. */
template <class P> struct Cursor {
    static constexpr int CHUNKS = ceil_div(P::COLUMNS, CHUNK), PART = ceil_div(CHUNKS, P::SPLITS);
    /* Items so large that a full ring of copies is within one, the last part of a panel's included. */
    static constexpr bool TAKES_ITEMS = (CHUNKS - (P::SPLITS - 1) * PART) / WARPS > RING_STAGES;
    int turn, item, tile, panel, split;
    int chunk, end; /* pieces of this warp: chunk, chunk + WARPS, ... < end */

    __device__ void start(Shared &s, const Job &job, int next_turn) {
        turn = next_turn;
        item = TAKES_ITEMS && turn > 0 ? take_item(s, job, turn) : blockIdx.x + turn * gridDim.x;
        split = item % P::SPLITS;
        if constexpr (P::ALL_TOKENS) { /* tiles take a panel one after another, while the L2 cache has it */
            panel = item / P::SPLITS / s.num_tiles;
            tile = item / P::SPLITS % s.num_tiles;
        } else {
            panel = item / P::SPLITS % P::PANELS;
            tile = item / P::SPLITS / P::PANELS;
        }
        chunk = split * PART + threadIdx.x / 32;
        end = min(split * PART + PART, CHUNKS);
    }

    /* To this piece, or the next one that the warp has in the block's items; true if the item is another one. */
    __device__ bool settle(Shared &s, const Job &job, int num_items) {
        if (chunk < end || item >= num_items) return false;
        while (chunk >= end && item < num_items) start(s, job, turn + 1);
        return true;
    }
};

/* Columns 2t, 2t+1, 2t+8, 2t+9, ... of a piece of one row, t = lane % 4: what a lane holds of the second operand. */
template <class P> __device__ __forceinline__ void load_input(float2 (&x)[CHUNK / 8], const float *row, int chunk) {
    int first = chunk * CHUNK + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        int c = first + i * 8;
        x[i] = make_float2(0.0f, 0.0f);
        if (!row) continue;
        if constexpr (P::COLUMNS % CHUNK == 0 && P::STRIDE % 2 == 0 && P::FIRST % 2 == 0) {
            x[i] = *(const float2 *)(row + c);
        } else {
            if (c < P::COLUMNS) x[i].x = row[c];
            if (c + 1 < P::COLUMNS) x[i].y = row[c + 1];
        }
    }
}

/* acc += one piece of weights times the tokens' inputs. */
template <class P, int COLUMNS_OF_8>
__device__ __forceinline__ void multiply(float (&acc)[COLUMNS_OF_8][4][4], uint32_t stage,
                                         const float2 (&x)[COLUMNS_OF_8][CHUNK / 8], int num_tokens) {
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++) {
        uint32_t high[COLUMNS_OF_8][2], low[COLUMNS_OF_8][2];
#pragma unroll
        for (int n = 0; n < COLUMNS_OF_8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                split_inputs<P>(high[n][i], low[n][i], x[n][step * 2 + i].x, x[n][step * 2 + i].y);
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            uint32_t a[4];
            load_tile(a, stage, tile, step);
#pragma unroll
            for (int n = 0; n < COLUMNS_OF_8; n++) {
                if (n > 0 && n * 8 >= num_tokens) continue;
                if (P::IS_DENSE) multiply_add(acc[n][tile], a, low[n][0], low[n][1]);
                multiply_add(acc[n][tile], a, high[n][0], high[n][1]);
            }
        }
    }
}

/* One warp's sums of 8 tokens, to be added up. Rows g and g + 8 of each 16, tokens 2t and 2t + 1. */
__device__ __forceinline__ void store_sums(float (*sums)[SUM_ROWS], const float (&acc)[4][4]) {
    int row = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[token + i % 2][tile * 16 + row + i / 2 * 8] = acc[tile][i];
}

/* All warps of the block, wherever they are: three times for each 8 tokens of an item. */
__device__ __forceinline__ void meet() { asm volatile("barrier.cta.sync 0;" ::: "memory"); }

/* The multiplying warps' sums of 8 tokens into shared memory, as those of pairs of warps. */
__device__ __forceinline__ void hand_over(Shared &s, float (&acc)[4][4]) {
    int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
    float (*sums)[SUM_ROWS] = s.sums[warp % (WARPS / 2)];
    meet(); /* the last sums have been read */
    if (warp >= WARPS / 2) store_sums(sums, acc);
    meet();
    if (warp < WARPS / 2) {
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[tile][i] += sums[token + i % 2][tile * 16 + row + i / 2 * 8];
        store_sums(sums, acc);
    }
    meet(); /* the sums are whole */
}

__device__ __forceinline__ float add_warps(const Shared &s, int token, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int pair = 0; pair < WARPS / 2; pair++) sum += s.sums[pair][token][row];
    return sum;
}

/* Outputs that a lane has at once, so that it waits once for what it reads from the device's memory. */
template <class P> constexpr int OUTPUTS_AT_ONCE = P::ADDS || P::HAS_BIAS || P::SPLITS > 1 ? 8 : 1;

/* Writes the outputs of one panel for tokens [0, count) of one expert's tile; value(token, row) is a sum. By a warp. */
template <class P, class Value>
__device__ __forceinline__ void write_outputs(const Job &job, int expert, int panel, int count, const uint16_t *rows,
                                              Value value) {
    constexpr int PER_PANEL = P::IS_GATED ? PANEL_ROWS / 2 : PANEL_ROWS, AT_ONCE = OUTPUTS_AT_ONCE<P>;
    for (int first = threadIdx.x % 32; first < count * PER_PANEL; first += 32 * AT_ONCE) {
        float *to[AT_ONCE], result[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int i = min(first + j * 32, count * PER_PANEL - 1), token = i / PER_PANEL, place = i % PER_PANEL;
            int row = P::IS_GATED ? place / GATE_GROUP * 2 * GATE_GROUP + place % GATE_GROUP : place;
            int output = panel * PER_PANEL + place;
            bool is_output = first + j * 32 < count * PER_PANEL && output < P::OUTPUTS;
            to[j] = is_output ? job.output + (int64_t)rows[token] * P::OUTPUTS + output : nullptr;
            result[j] = finish_output<P>(job, expert, output, value(token, row),
                                         P::IS_GATED ? value(token, row + GATE_GROUP) : 0.0f);
            if (P::ADDS && is_output) result[j] += *to[j];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (to[j]) *to[j] = result[j];
    }
}

/* Counts what the warp has written; true in the last of a panel's parts, where what the others wrote can be read. */
template <class P> __device__ __forceinline__ bool is_last_part(int32_t *arrived) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence();
        before = atomicAdd(arrived, 1);
        if (before == P::SPLITS - 1) *arrived = 0; /* for the next product */
    }
    bool is_last = __shfl_sync(~0u, before, 0) == P::SPLITS - 1;
    if (is_last) __threadfence();
    return is_last;
}

/* The outputs of a panel whose columns are in parts. */
template <class P>
__device__ void add_parts(const Shared &s, const Job &job, const Cursor<P> &at, const Tile &tile) {
    constexpr int ROWS = P::PANELS * PANEL_ROWS;
    const float *parts = job.partials + (int64_t)tile.first * ROWS + at.panel * PANEL_ROWS;
    write_outputs<P>(job, tile.place, at.panel, tile.count, s.assignments + tile.first, [&](int token, int row) {
        float part[P::SPLITS], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < P::SPLITS; i++)
            part[i] = __ldcg(&parts[((int64_t)i * P::ASSIGNMENTS + token) * ROWS + row]);
#pragma unroll
        for (int i = 0; i < P::SPLITS; i++) sum += part[i];
        return sum;
    });
}

/* What comes after the products of all items of this block, by a warp of its own, whose waits hold up nothing. */
template <class P> __device__ void finish_items(Shared &s, const Job &job, int num_items) {
    constexpr int ROWS = P::PANELS * PANEL_ROWS;
    Cursor<P> at;
    for (at.start(s, job, 0); at.item < num_items; at.start(s, job, at.turn + 1)) {
        const Tile tile = s.tiles[at.tile];
        for (int first = 0; first < tile.count; first += 8) {
            int count = min(tile.count - first, 8);
            for (int i = 0; i < 3; i++) meet(); /* as in hand_over */
            if (threadIdx.x % 32 == 0) s.queue[at.turn % QUEUE] = UNKNOWN; /* all warps know it */
            if constexpr (P::SPLITS == 1) {
                write_outputs<P>(job, tile.place, at.panel, count, s.assignments + tile.first + first,
                                 [&](int token, int row) { return add_warps(s, token, row); });
            } else {
                float *part = job.partials + ((int64_t)at.split * P::ASSIGNMENTS + tile.first + first) * ROWS;
                for (int i = threadIdx.x % 32; i < count * PANEL_ROWS; i += 32)
                    part[i / PANEL_ROWS * ROWS + at.panel * PANEL_ROWS + i % PANEL_ROWS] =
                        add_warps(s, i / PANEL_ROWS, i % PANEL_ROWS);
            }
        }
        if constexpr (P::SPLITS > 1)
            if (is_last_part<P>(job.arrived + at.tile * P::PANELS + at.panel)) add_parts(s, job, at, tile);
    }
}

/* Asks for the piece that `ahead` stands at, and takes it to the next. */
template <class P>
__device__ __forceinline__ void refill(Ring &ring, const Panels &panels, Cursor<P> &ahead, Shared &s, const Job &job,
                                       int num_items) {
    bool wanted = ahead.item < num_items;
    int index = wanted ? ahead.panel * P::STORED + s.tiles[ahead.tile].place : 0;
    ring.fill<P>(panels, index, ahead.chunk * CHUNK, wanted);
    ahead.chunk += WARPS;
    ahead.settle(s, job, num_items);
}

/* The tokens' inputs for a warp's pieces, asked for some pieces ahead. */
template <class P, int COLUMNS_OF_8> struct Inputs {
    Cursor<P> at;
    int row[COLUMNS_OF_8]; /* of job.input, this lane's tokens', or -1 */

    __device__ void find_rows(const Shared &s, const Job &job, int num_items) {
        Tile tile = {0, 0, 0};
        if (at.item < num_items) tile = s.tiles[at.tile];
#pragma unroll
        for (int n = 0; n < COLUMNS_OF_8; n++) {
            int token = n * 8 + threadIdx.x % 32 / 4;
            row[n] = token < tile.count ? s.assignments[tile.first + token] / P::INPUT_DIVISOR : -1;
        }
    }

    __device__ __forceinline__ void ask(float2 (&x)[COLUMNS_OF_8][CHUNK / 8], Shared &s, const Job &job,
                                        int num_items) {
#pragma unroll
        for (int n = 0; n < COLUMNS_OF_8; n++)
            load_input<P>(x[n], row[n] < 0 ? nullptr : job.input + (int64_t)row[n] * P::STRIDE, at.chunk);
        at.chunk += WARPS;
        if (at.settle(s, job, num_items)) find_rows(s, job, num_items);
    }
};

/* Pieces whose inputs a warp has asked for before it needs them, as far as registers go. */
template <class P, int COLUMNS_OF_8> constexpr int INPUT_AHEAD = COLUMNS_OF_8 <= 2 ? 2 : P::IS_DENSE ? 0 : 1;

/* The products of all items of this block, by all warps but one. */
template <class P, int COLUMNS_OF_8>
__device__ void multiply_items(Ring &ring, const Panels &panels, Cursor<P> &ahead, Shared &s, const Job &job,
                               int num_items) {
    constexpr int AHEAD = INPUT_AHEAD<P, COLUMNS_OF_8>;
    float2 x[AHEAD + 1][COLUMNS_OF_8][CHUNK / 8];
    Inputs<P, COLUMNS_OF_8> inputs;
    inputs.at.start(s, job, 0);
    inputs.at.settle(s, job, num_items);
    inputs.find_rows(s, job, num_items);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) inputs.ask(x[i], s, job, num_items);
    Cursor<P> at;
    for (at.start(s, job, 0); at.item < num_items; at.start(s, job, at.turn + 1)) {
        const Tile tile = s.tiles[at.tile];
        float acc[COLUMNS_OF_8][4][4];
#pragma unroll
        for (int i = 0; i < COLUMNS_OF_8 * 16; i++) acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
        for (; at.chunk < at.end; at.chunk += WARPS) {
            inputs.ask(x[AHEAD], s, job, num_items);
            multiply<P, COLUMNS_OF_8>(acc, ring.next(), x[0], tile.count);
            __syncwarp(); /* the piece has been read by all lanes */
            refill(ring, panels, ahead, s, job, num_items);
#pragma unroll
            for (int i = 0; i < AHEAD * COLUMNS_OF_8 * (CHUNK / 8); i++)
                (&x[0][0][0])[i] = (&x[0][0][0])[i + COLUMNS_OF_8 * (CHUNK / 8)];
        }
#pragma unroll
        for (int n = 0; n < COLUMNS_OF_8; n++)
            if (n * 8 < tile.count) hand_over(s, acc[n]);
    }
}

/* Sets the list of items back, after the last block has taken its last one. */
__device__ void leave(const Job &job) {
    if (threadIdx.x == 0 && atomicAdd(job.done_blocks, 1) == (int)gridDim.x - 1) {
        *job.next_item = 0;
        *job.done_blocks = 0;
    }
}

/* Waits for the previous kernel where that tells what there is to do. */
template <class P> __device__ __forceinline__ void wait_for_routing() {
    if (P::KNOWN_BEFORE) return;
    pdl_wait();
    pdl_trigger();
}

/* A block an SM. Where what there is to do was known before the previous kernel began, copies start while that runs. */
template <class P, int COLUMNS_OF_8>
__global__ void __launch_bounds__(THREADS, 1)
decode_kernel(const __grid_constant__ Panels panels, const __grid_constant__ Job job) {
    extern __shared__ char memory[];
    Shared &s = *(Shared *)(memory + (1024 - shared_address(memory) % 1024) % 1024);
    int warp = threadIdx.x / 32;
    bool finishes = warp == WARPS;
    Ring ring(s.rings[warp % WARPS], s.full[warp % WARPS]);
    if (!finishes) ring.begin(panels);
    if (threadIdx.x < QUEUE) s.queue[threadIdx.x] = UNKNOWN;
    if constexpr (P::ALL_TOKENS) {
        wait_for_routing<P>();
        list_all_tokens<COLUMNS_OF_8 * 8>(s, job);
    } else {
        LanePlaces places(job);
        wait_for_routing<P>();
        list_tiles<COLUMNS_OF_8 * 8>(s, job, places);
    }
    int num_items = s.num_tiles * P::PANELS * P::SPLITS;
    Cursor<P> ahead;
    if (!finishes) {
        ahead.start(s, job, 0);
        ahead.settle(s, job, num_items);
        for (int i = 0; i < RING_STAGES; i++) refill(ring, panels, ahead, s, job, num_items);
    }
    if (P::KNOWN_BEFORE) {
        pdl_wait();
        pdl_trigger();
    }
    if (finishes)
        finish_items<P>(s, job, num_items);
    else
        multiply_items<P, COLUMNS_OF_8>(ring, panels, ahead, s, job, num_items);
    if (Cursor<P>::TAKES_ITEMS) leave(job);
}

/* A second block on an SM, of the next kernel, would take bandwidth from the one that is at work: this much shared
 * memory keeps it away. */
constexpr int ALONE = CUDA_ARCH == 90 || CUDA_ARCH == 100 ? 116 << 10 : 0;

template <class P> int start(Model *m, int launch_rows, const Job &job) {
    Panels panels;
    TRY(describe_panels(&panels, job.weights, P::FORM, P::COLUMNS, P::PANELS * P::STORED));
    dim3 grid(num_multiprocessors());
    size_t bytes = max_of((int)sizeof(Shared) + 1024, ALONE);
    int wide_items = P::PANELS * P::SPLITS * ceil_div(launch_rows, 32);
    bool few_items = P::ALL_TOKENS && wide_items * 2 < (int)grid.x; /* small tiles then share the work better */
    if (launch_rows <= 8 || few_items)
        return launch(m, P::NAME, decode_kernel<P, 1>, grid, THREADS, bytes, panels, job);
    if constexpr (P::ALL_TOKENS) /* an expert seldom has more than 16 */
        if (launch_rows > 16) return launch(m, P::NAME, decode_kernel<P, 4>, grid, THREADS, bytes, panels, job);
    return launch(m, P::NAME, decode_kernel<P, 2>, grid, THREADS, bytes, panels, job);
}

} // namespace
} // namespace decode

#endif
