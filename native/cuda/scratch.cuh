/* The layout of the scratch block: the step's batch, copied to the device by begin; the routing's and the products'
 * part; attention's. */
#ifndef COLIBRI_CUDA_SCRATCH_CUH
#define COLIBRI_CUDA_SCRATCH_CUH

#include "products.cuh"

/* Parts of a logit's sum: each of so many columns, and a block's work. */
constexpr int LOGIT_LANES = 64;
constexpr int SLICE_COLUMNS = round_up(ceil_div(HIDDEN, 8), LOGIT_LANES);
constexpr int LOGIT_SLICES = ceil_div(HIDDEN, SLICE_COLUMNS);

/* Tiles of up to 8 tokens in a step of the decode kernels, at most. */
constexpr int TILE_BOUND = min_of(NUM_EXPERTS, DECODE_ASSIGNMENTS) + DECODE_ASSIGNMENTS / 8;

/* The routing's and the products' part. */
struct Scratch {
    float partial_logits[LOGIT_SLICES][MAX_STEP_TOKENS][NUM_EXPERTS];
    int32_t routed_blocks;                                /* of a step's tokens; 0 between steps */
    int32_t fault;                                        /* MAX_STEP_TOKENS minus a token without a choice, or 0 */
    int32_t next_item, done_blocks;                       /* of the product at work; 0 between products */
    int32_t arrived[TILE_BOUND * Largest::PANELS];        /* splits that are done; 0 between products */
    float partials[Largest::PARTIALS];                    /* of the latest product */
};

int64_t cuda_attention_scratch_bytes();
inline int64_t scratch_round(int64_t bytes) { return (bytes + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT; }
inline Batch *device_batch(const Model *m) { return (Batch *)m->state.scratch; }
inline Scratch *scratch_of(const Model *m) {
    return (Scratch *)((char *)m->state.scratch + scratch_round(sizeof(Batch)));
}
inline char *attention_scratch(const Model *m) { return (char *)scratch_of(m) + scratch_round(sizeof(Scratch)); }
inline int64_t cuda_scratch_bytes() {
    return scratch_round(sizeof(Batch)) + scratch_round(sizeof(Scratch)) + cuda_attention_scratch_bytes();
}

#endif
