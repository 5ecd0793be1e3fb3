/* The shapes of the experts' and the mlp's products, and the MoE's part of the scratch block. */
#ifndef COLIBRI_CUDA_MOE_CUH
#define COLIBRI_CUDA_MOE_CUH

#include "common.cuh"

constexpr int min_of(int a, int b) { return a < b ? a : b; }
template <class T> constexpr T max_of(T a) { return a; }
template <class T, class... Rest> constexpr T max_of(T a, T b, Rest... rest) { return max_of(a > b ? a : b, rest...); }

/* A step of up to DECODE_TOKENS tokens is bound by reading weights and split over the GPU by panels; a longer one goes
 * to the grouped product of prefill.cu. */
constexpr int DECODE_TOKENS = min_of(MAX_TOKENS, 64);
constexpr int DECODE_ASSIGNMENTS = DECODE_TOKENS * K;

/* How many parts a panel's columns fall into, each a work item of its own: the fewest that give one token's experts
 * enough items to even out over a GPU, in parts of 64 KiB at least. It depends on the shape alone, and so do sums. */
constexpr int column_splits(int experts, int panels, int columns) {
    int splits = 1;
    while (splits < 8 && experts * panels * splits < 128 && columns / (2 * splits) >= 512) splits *= 2;
    return splits;
}

/* Products with matrices of EXPERTS_ experts, SLOTS_ of which each token has. A single expert has all tokens. */
template <int EXPERTS_, int SLOTS_, int ROWS, int COLUMNS_> struct Product {
    static constexpr int EXPERTS = EXPERTS_, ASSIGNMENTS = DECODE_TOKENS * SLOTS_, COLUMNS = COLUMNS_;
    static constexpr bool ALL_TOKENS = EXPERTS == 1;
    static constexpr int PANELS = ceil_div(ROWS, PANEL_ROWS), SPLITS = column_splits(SLOTS_, PANELS, COLUMNS);
    static constexpr int64_t PARTIALS = SPLITS > 1 ? (int64_t)SPLITS * ASSIGNMENTS * PANELS * PANEL_ROWS : 0;
};

/* Rows of a gated matrix: gate and up alternate in groups of GATE_GROUP. */
constexpr int gated_rows(int ffn) { return 2 * GATE_GROUP * ceil_div(ffn, GATE_GROUP); }

struct Up : Product<NUM_EXPERTS, K, GATED ? gated_rows(FFN) : FFN, HIDDEN> {
    static constexpr const char *NAME = "experts_up";
    static constexpr int OUTPUTS = FFN, INPUT_DIVISOR = K, INDEX = 0; /* of a routing's two products */
    static constexpr bool IS_GATED = GATED, ACTIVATES = true, HAS_BIAS = EXPERT_BIAS, ROUTED_BEFORE = false;
};

struct Down : Product<NUM_EXPERTS, K, HIDDEN, FFN> {
    static constexpr const char *NAME = "experts_down";
    static constexpr int OUTPUTS = HIDDEN, INPUT_DIVISOR = 1, INDEX = 1;
    static constexpr bool IS_GATED = false, ACTIVATES = false, HAS_BIAS = EXPERT_BIAS, ROUTED_BEFORE = true;
};

/* ATTENTION_MOA's experts, which have a routing of their own: a slot's query heads, and what comes of their attention. */
constexpr int MOA_COLUMNS = ATTENTION_KIND == ATTENTION_MOA ? NUM_KV_HEADS * HEAD_DIM : 0;
struct MoaIn : Product<NUM_EXPERTS, K, MOA_COLUMNS, HIDDEN> {
    static constexpr const char *NAME = "attention_experts_in";
    static constexpr int OUTPUTS = MOA_COLUMNS, INPUT_DIVISOR = K, INDEX = 0;
    static constexpr bool IS_GATED = false, ACTIVATES = false, HAS_BIAS = false, ROUTED_BEFORE = false;
};

struct MoaOut : Product<NUM_EXPERTS, K, MOA_COLUMNS ? HIDDEN : 0, MOA_COLUMNS> {
    static constexpr const char *NAME = "attention_experts_out";
    static constexpr int OUTPUTS = HIDDEN, INPUT_DIVISOR = 1, INDEX = 1;
    static constexpr bool IS_GATED = false, ACTIVATES = false, HAS_BIAS = false, ROUTED_BEFORE = true;
};

/* The mlp of that width: it is stored like one gated expert, has all tokens, and so waits for no routing. */
template <int FFN_> struct MlpUp : Product<1, 1, gated_rows(FFN_), HIDDEN> {
    static constexpr const char *NAME = "mlp_up";
    static constexpr int OUTPUTS = FFN_, INPUT_DIVISOR = 1, INDEX = 0;
    static constexpr bool IS_GATED = true, ACTIVATES = true, HAS_BIAS = false, ROUTED_BEFORE = true;
};

template <int FFN_> struct MlpDown : Product<1, 1, FFN_ ? HIDDEN : 0, FFN_> {
    static constexpr const char *NAME = "mlp_down";
    static constexpr int OUTPUTS = HIDDEN, INPUT_DIVISOR = 1, INDEX = 1;
    static constexpr bool IS_GATED = false, ACTIVATES = false, HAS_BIAS = false, ROUTED_BEFORE = true;
};

/* Parts of a logit's sum: each of so many columns, and a block's work. */
constexpr int LOGIT_LANES = 64;
constexpr int SLICE_COLUMNS = round_up(ceil_div(HIDDEN, 8), LOGIT_LANES);
constexpr int LOGIT_SLICES = ceil_div(HIDDEN, SLICE_COLUMNS);

constexpr int TILE_BOUND = min_of(NUM_EXPERTS, DECODE_ASSIGNMENTS) + DECODE_ASSIGNMENTS / 8;

template <class... P> struct LargestOf {
    static constexpr int PANELS = max_of(P::PANELS...);
    static constexpr int64_t PARTIALS = max_of((int64_t)1, P::PARTIALS...);
};
using Largest = LargestOf<Up, Down, MoaIn, MoaOut, MlpUp<DENSE_FFN>, MlpDown<DENSE_FFN>, MlpUp<SHARED_FFN>,
                          MlpDown<SHARED_FFN>>;

struct MoeScratch {
    float partial_logits[LOGIT_SLICES][MAX_TOKENS][NUM_EXPERTS];
    int32_t routed_blocks;                                /* of a step's tokens; 0 between steps */
    int32_t fault;                                        /* MAX_TOKENS minus a token whose logits allow no choice, or 0 */
    int32_t next_item[2], done_blocks[2];                 /* by INDEX: one may begin as another ends; 0 between */
    int32_t arrived[TILE_BOUND * Largest::PANELS];        /* splits that are done; 0 between products */
    float partials[Largest::PARTIALS];                    /* of the latest product */
};

/* An output's sum or sums with the expert's biases, activated: (num_experts, OUTPUTS) each, gated all gates, then all
 * ups of an expert. */
template <class P>
__device__ __forceinline__ float finish_output(const float *bias, const Swiglu &swiglu, int expert, int output,
                                               float value, float up) {
    if constexpr (P::HAS_BIAS) {
        bias += (int64_t)expert * (P::IS_GATED ? 2 : 1) * P::OUTPUTS + min(output, P::OUTPUTS - 1);
        value += bias[0];
        if (P::IS_GATED) up += bias[P::OUTPUTS];
    }
    if (P::IS_GATED) return activate_gated(value, up, swiglu);
    return P::ACTIVATES ? activate(value) : value;
}

/* Longer steps: prefill.cu. */
int prefill_up(Model *m, int num_tokens, const Layer *layer, const float *input);
int prefill_down(Model *m, int num_tokens, const Layer *layer);
int prefill_moa_in(Model *m, int num_tokens, const Layer *layer);
int prefill_moa_out(Model *m, int num_tokens, const Layer *layer);
int prefill_mlp(Model *m, int num_tokens, const Layer *layer, const float *input);

/* Ids, weights and lists from `router` and, where not NULL, its two biases; counted: in the totals of the layer's FFN. */
int cuda_route(Model *m, int num_tokens, int layer, const float *input, const float *router, const float *logit_bias,
               const float *correction, bool counted);

inline MoeScratch *moe(const Model *m) { return reinterpret_cast<MoeScratch *>(moe_scratch(m)); }

#endif
