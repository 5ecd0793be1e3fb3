/* The shapes of the two expert products, and the MoE's part of the scratch block. */
#ifndef COLIBRI_CUDA_MOE_CUH
#define COLIBRI_CUDA_MOE_CUH

#include "common.cuh"

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

/* A step of up to DECODE_TOKENS tokens is bound by reading weights and split over the GPU by panels; a longer one goes
 * to the grouped product of prefill.cu. */
constexpr int DECODE_TOKENS = min_of(MAX_TOKENS, 64);
constexpr int DECODE_ASSIGNMENTS = DECODE_TOKENS * K;

/* How many parts a panel's columns fall into, each a work item of its own: the fewest that give one token's experts
 * enough items to even out over a GPU, in parts of 64 KiB at least. It depends on the shape alone, and so do sums. */
constexpr int column_splits(int panels, int columns) {
    int splits = 1;
    while (splits < 8 && K * panels * splits < 128 && columns / (2 * splits) >= 512) splits *= 2;
    return splits;
}

/* experts_up: rows of ffn, gate and up alternating in groups of GATE_GROUP where experts are gated. */
struct Up {
    static constexpr const char *NAME = "experts_up";
    static constexpr int COLUMNS = HIDDEN, OUTPUTS = FFN, INPUT_DIVISOR = K;
    static constexpr bool IS_GATED = GATED, ACTIVATES = true, ROUTED_BEFORE = false;
    static constexpr int INDEX = 0; /* of the two products */
    static constexpr int PANELS = ceil_div(GATED ? 2 * GATE_GROUP * ceil_div(FFN, GATE_GROUP) : FFN, PANEL_ROWS);
    static constexpr int SPLITS = column_splits(PANELS, COLUMNS);
    static constexpr int64_t PARTIALS = SPLITS > 1 ? (int64_t)SPLITS * DECODE_ASSIGNMENTS * PANELS * PANEL_ROWS : 1;
};

struct Down {
    static constexpr const char *NAME = "experts_down";
    static constexpr int COLUMNS = FFN, OUTPUTS = HIDDEN, INPUT_DIVISOR = 1;
    static constexpr bool IS_GATED = false, ACTIVATES = false, ROUTED_BEFORE = true;
    static constexpr int INDEX = 1;
    static constexpr int PANELS = ceil_div(HIDDEN, PANEL_ROWS);
    static constexpr int SPLITS = column_splits(PANELS, COLUMNS);
    static constexpr int64_t PARTIALS = SPLITS > 1 ? (int64_t)SPLITS * DECODE_ASSIGNMENTS * PANELS * PANEL_ROWS : 1;
};

/* Parts of a logit's sum: each of so many columns, and a block's work. */
constexpr int LOGIT_LANES = 64;
constexpr int SLICE_COLUMNS = round_up(ceil_div(HIDDEN, 8), LOGIT_LANES);
constexpr int LOGIT_SLICES = ceil_div(HIDDEN, SLICE_COLUMNS);

constexpr int TILE_BOUND = min_of(NUM_EXPERTS, DECODE_ASSIGNMENTS) + DECODE_ASSIGNMENTS / 8;

struct MoeScratch {
    float partial_logits[LOGIT_SLICES][MAX_TOKENS][NUM_EXPERTS];
    int32_t faults[MAX_TOKENS];                           /* 1: the token's logits allow no choice */
    int32_t routed_blocks;                                /* of a step's tokens; 0 between steps */
    int32_t next_item[2], done_blocks[2];                 /* of experts_up, experts_down; 0 between products */
    int32_t arrived[TILE_BOUND * max_of(Up::PANELS, Down::PANELS)]; /* splits that are done; 0 between products */
    float up_partials[Up::PARTIALS];
    float down_partials[Down::PARTIALS];
};

/* Longer steps: prefill.cu. */
int prefill_up(Model *m, int num_tokens, const Layer *layer, const float *input);
int prefill_down(Model *m, int num_tokens, const Layer *layer);

inline MoeScratch *moe(const Model *m) { return reinterpret_cast<MoeScratch *>(moe_scratch(m)); }

#endif
