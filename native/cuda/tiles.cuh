/* What products share: the weights' pieces and tiles, what a product reads and writes, and how its outputs end.
 *
 * A warp has a ring of panel pieces in shared memory, filled by asynchronous copies: by the bulk copy engine on sm_90
 * and later, by cp.async before. Both leave a piece of CHUNK columns as [column][64 rows], the eighths of a column's
 * 128 bytes swizzled: eighth p of column c is at place p ^ (c % 8), so that ldmatrix meets no bank twice. Columns past
 * the last are zeros. PORTABLE_COPY takes cp.async everywhere. */
#ifndef COLIBRI_CUDA_TILES_CUH
#define COLIBRI_CUDA_TILES_CUH

#include <cuda.h>

#include "../error.h"
#include "ptx.cuh"
#include "scratch.cuh"

#if CUDA_ARCH >= 90 && !defined(PORTABLE_COPY)
#define BULK_COPY 1
#else
#define BULK_COPY 0
#endif

constexpr int CHUNK = 32;                                      /* columns of a piece */
constexpr int CHUNK_BYTES = CHUNK * PANEL_ROWS * (int)sizeof(weight_t);
constexpr int RING_STAGES = CUDA_ARCH == 80 || CUDA_ARCH == 90 || CUDA_ARCH == 100 ? 3 : 2; /* deeper ones are slower */
constexpr int RING_BYTES = RING_STAGES * CHUNK_BYTES;          /* of a warp, aligned to 1024 */

/* Where a kernel's weights are: experts' panels of one matrix. */
struct Panels {
#if BULK_COPY
    CUtensorMap map; /* dimensions: 64 rows, columns, panel * NUM_EXPERTS + expert */
#endif
    const weight_t *data;
};

#if BULK_COPY
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

/* The driver's function, found at run time: the library is not linked with the driver. */
inline EncodeTiled tensor_map_encoder() {
    static const EncodeTiled encode = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        return (EncodeTiled)function;
    }();
    return encode;
}

inline int describe_panels(Panels *panels, const weight_t *data, Form form, int columns, int num_panels) {
    const cuuint64_t sizes[3] = {PANEL_ROWS, (cuuint64_t)columns, (cuuint64_t)num_panels};
    const cuuint64_t strides[2] = {(cuuint64_t)element_offset(form.dtype, 1, 0),
                                   (cuuint64_t)panel_sizes(form, columns).panel_bytes};
    const cuuint32_t box[3] = {PANEL_ROWS, CHUNK, 1}, steps[3] = {1, 1, 1};
    panels->data = data;
    EncodeTiled encode = tensor_map_encoder();
    if (encode && encode(&panels->map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, (void *)data, sizes, strides, box, steps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS)
        return 0;
    return fail("cuda: tensor map of %d columns=refused, expected one; see python -m colibri.run --doctor", columns);
}
#else
inline int describe_panels(Panels *panels, const weight_t *data, Form, int, int) {
    panels->data = data;
    return 0;
}
#endif

/* Pieces come out in the order in which they were asked for. All lanes call everything together. */
struct Ring {
    uint32_t stages;             /* shared address of the first piece */
    uint32_t barriers;           /* of RING_STAGES mbarriers, one a piece */
    int filled = 0, used = 0;    /* the next piece's place, to fill and to use */
    uint32_t phase = 0;          /* of the barrier to wait for */

    __device__ Ring(void *memory, uint64_t *full) : stages(shared_address(memory)), barriers(shared_address(full)) {}

    __device__ void begin(const Panels &panels) {
#if BULK_COPY
        if (threadIdx.x % 32 == 0) {
            for (int i = 0; i < RING_STAGES; i++) begin_barrier(barriers + i * 8);
            prefetch_tensor_map(&panels.map);
            publish_barriers();
        }
        __syncwarp();
#endif
    }

    /* Asks for CHUNK columns from `column` of the panel with index panel * NUM_EXPERTS + expert, unless !wanted. */
    template <class P>
    __device__ __forceinline__ void fill(const Panels &panels, int index, int column, bool wanted) {
        uint32_t stage = stages + filled * CHUNK_BYTES;
#if BULK_COPY
        if (wanted && threadIdx.x % 32 == 0) {
            uint32_t full = barriers + filled * 8;
            uint64_t once = evict_first(); /* weights are: what is read again keeps its place in the L2 cache */
            expect_bytes(full, CHUNK_BYTES);
            copy_box(stage, &panels.map, 0, column, index, full, once);
        }
#else
        int lane = threadIdx.x % 32, eighth = lane % 8;
        const weight_t *from = panels.data + column_index(P::COLUMNS, 1, index, 0, column) + eighth * 8;
        for (int c = lane / 8; c < CHUNK && wanted; c += 4) {
            bool valid = column + c < P::COLUMNS;
            cp_async_16(stage + c * 128 + (eighth ^ (c % 8)) * 16,
                        valid ? from + column_index(P::COLUMNS, 1, 0, 0, c) : panels.data, valid);
        }
        cp_async_commit();
#endif
        filled = filled + 1 == RING_STAGES ? 0 : filled + 1;
    }

    /* Waits for the next piece; its shared address. */
    __device__ __forceinline__ uint32_t next() {
#if BULK_COPY
        wait_barrier(barriers + used * 8, phase);
#else
        cp_async_wait<RING_STAGES - 1>();
        __syncwarp();
#endif
        uint32_t stage = stages + used * CHUNK_BYTES;
        used = used + 1 == RING_STAGES ? 0 : used + 1;
        if (used == 0) phase ^= 1;
        return stage;
    }
};

/* The 16 rows from 16 * tile and 16 columns from 16 * step of a piece, as a matrix instruction's first operand. */
__device__ __forceinline__ void load_tile(uint32_t (&a)[4], uint32_t stage, int tile, int step) {
    int lane = threadIdx.x % 32, column = step * 16 + lane % 8 + lane / 16 * 8, eighth = tile * 2 + lane / 8 % 2;
    load_matrices_transposed(a, stage + column * 128 + (eighth ^ (lane % 8)) * 16);
}

/* What one product reads and writes. */
struct Job {
    const weight_t *weights;    /* a matrix as panels.h says */
    const float *bias;          /* (STORED, OUTPUTS), gated all gates, then all ups of an expert; or NULL */
    const float *input;         /* (num_tokens or num_tokens * k, STRIDE), at column FIRST */
    float *output;              /* (num_tokens * k, OUTPUTS), where all tokens are one expert's (num_tokens, OUTPUTS) */
    float scale;
    Swiglu swiglu;
    const int32_t *num_tokens;
    const int32_t *offsets;     /* (NUM_EXPERTS + 1) */
    const int32_t *assignments; /* (num_tokens * k) */
    float *partials;            /* (SPLITS, ASSIGNMENTS, PANELS * PANEL_ROWS) */
    int32_t *arrived;           /* (tiles, PANELS) */
    int32_t *next_item;         /* the first that no block has taken, apart from each one's first */
    int32_t *done_blocks;
    const int32_t *place = nullptr; /* (NUM_EXPERTS), of each expert in weights and bias; NULL: expert e at place e */
};

/* An expert without a place is a fault of the router's; what is read in its stead goes nowhere. */
__device__ __forceinline__ int place_of(const Job &job, int expert) {
    return job.place ? max(job.place[expert], 0) : expert;
}

template <class P>
Job job_of(Model *m, const void *weights, const float *bias, const float *input, float *output) {
    Scratch *scratch = scratch_of(m);
    return {(const weight_t *)weights, bias, input + P::FIRST, output, 1.0f, swiglu_of(m), &device_batch(m)->num_tokens,
            m->state.expert_offsets, m->state.assignments, scratch->partials, scratch->arrived,
            &scratch->next_item, &scratch->done_blocks};
}

/* An output of its sum, gated its sums. */
template <class P>
__device__ __forceinline__ float finish_output(const Job &job, int expert, int output, float value, float up) {
    if (P::HAS_BIAS && job.bias) {
        const float *bias = job.bias + (int64_t)expert * (P::IS_GATED ? 2 : 1) * P::OUTPUTS;
        bias += min(output, P::OUTPUTS - 1);
        value += bias[0];
        if (P::IS_GATED) up += bias[P::OUTPUTS];
    }
    if (P::IS_DENSE) return job.scale * value;
    if (P::IS_GATED) return activate_gated(value, up, job.swiglu);
    return P::ACTIVATES ? activate(value) : value;
}

/* Two neighbouring inputs as weights; where P::IS_DENSE, `low` is what the rounding took off. */
template <class P> __device__ __forceinline__ void split_inputs(uint32_t &high, uint32_t &low, float x, float y) {
    high = to_weights(x, y);
    if (!P::IS_DENSE) return;
    float2 rounded = to_float2(high);
    low = to_weights(x - rounded.x, y - rounded.y);
}

#endif
