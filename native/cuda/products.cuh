/* Products with the weights: their shapes, what one reads, writes and ends with, and their part of the scratch block. */
#ifndef COLIBRI_CUDA_PRODUCTS_CUH
#define COLIBRI_CUDA_PRODUCTS_CUH

#include "common.cuh"

constexpr int min_of(int a, int b) { return a < b ? a : b; }
template <class T> constexpr T max_of(T a) { return a; }
template <class T, class... Rest> constexpr T max_of(T a, T b, Rest... rest) { return max_of(a > b ? a : b, rest...); }

/* A step of up to DECODE_TOKENS tokens is bound by reading weights and split over the GPU by panels (decode.cuh); a
 * longer one is bound by multiplying (prefill.cuh). */
constexpr int DECODE_TOKENS = min_of(MAX_TOKENS, 64);
constexpr int DECODE_ASSIGNMENTS = DECODE_TOKENS * EXPERTS_PER_TOKEN;

/* How many parts a panel's columns fall into, each a work item of its own: the fewest that give one token's experts
 * enough items to even out over a GPU, in parts of 64 KiB at least. It depends on the shape alone, and so do sums. */
constexpr int column_splits(int experts, int panels, int columns) {
    int splits = 1;
    while (splits < 8 && experts * panels * splits < 96 && columns / (2 * splits) >= 512) splits *= 2;
    return splits;
}

/* Products with matrices of EXPERTS_ experts, SLOTS_ of which each token has. A single expert has all tokens. What
 * follows `PARTIALS` is what most products are, and others say otherwise. */
template <int EXPERTS_, int SLOTS_, int ROWS, int COLUMNS_> struct Product {
    static constexpr int EXPERTS = EXPERTS_, ASSIGNMENTS = DECODE_TOKENS * SLOTS_, COLUMNS = COLUMNS_, OUTPUTS = ROWS;
    static constexpr bool ALL_TOKENS = EXPERTS == 1;
    static constexpr int STORED = EXPERTS; /* of its experts, in memory */
    static constexpr int PANELS = ceil_div(ROWS, PANEL_ROWS), SPLITS = column_splits(SLOTS_, PANELS, COLUMNS);
    static constexpr int64_t PARTIALS = SPLITS > 1 ? (int64_t)SPLITS * ASSIGNMENTS * PANELS * PANEL_ROWS : 0;
    static constexpr int STRIDE = COLUMNS, FIRST = 0; /* the input: columns FIRST, FIRST + 1, ... of rows of STRIDE */
    static constexpr int INPUT_DIVISOR = 1;           /* an assignment's input row is its number divided by this */
    static constexpr bool KNOWN_BEFORE = true; /* the routing, or the number of rows, when the kernel before began */
    static constexpr bool IS_GATED = false, ACTIVATES = false, HAS_BIAS = false;
    static constexpr bool IS_DENSE = false; /* inputs lose nothing; the output, with its bias, is multiplied by job.scale */
    static constexpr bool ADDS = false;     /* to what the output holds */
};

/* Rows of a gated matrix: gate and up alternate in groups of GATE_GROUP. */
constexpr int gated_rows(int ffn) { return 2 * GATE_GROUP * ceil_div(ffn, GATE_GROUP); }

struct Up : Product<NUM_EXPERTS, EXPERTS_PER_TOKEN, GATED ? gated_rows(FFN) : FFN, HIDDEN> {
    static constexpr const char *NAME = "experts_up";
    static constexpr int OUTPUTS = FFN, INPUT_DIVISOR = EXPERTS_PER_TOKEN, STORED = STORED_EXPERTS;
    static constexpr bool IS_GATED = GATED, ACTIVATES = true, HAS_BIAS = EXPERT_BIAS, KNOWN_BEFORE = false;
};

struct Down : Product<NUM_EXPERTS, EXPERTS_PER_TOKEN, HIDDEN, FFN> {
    static constexpr const char *NAME = "experts_down";
    static constexpr int STORED = STORED_EXPERTS;
    static constexpr bool HAS_BIAS = EXPERT_BIAS;
};

/* ATTENTION_MOA's experts, which have a routing of their own: a slot's query heads, and what comes of their attention. */
constexpr int MOA_COLUMNS = ATTENTION_KIND == ATTENTION_MOA ? NUM_KV_HEADS * HEAD_DIM : 0;
struct MoaIn : Product<NUM_EXPERTS, EXPERTS_PER_TOKEN, MOA_COLUMNS, HIDDEN> {
    static constexpr const char *NAME = "attention_experts_in";
    static constexpr int INPUT_DIVISOR = EXPERTS_PER_TOKEN;
    static constexpr bool KNOWN_BEFORE = false;
};

struct MoaOut : Product<NUM_EXPERTS, EXPERTS_PER_TOKEN, MOA_COLUMNS ? HIDDEN : 0, MOA_COLUMNS> {
    static constexpr const char *NAME = "attention_experts_out";
};

/* The mlp of that width: it is stored like one gated expert. A bare stack can begin with it. */
template <int FFN_> struct MlpUp : Product<1, 1, gated_rows(FFN_), HIDDEN> {
    static constexpr const char *NAME = "mlp_up";
    static constexpr int OUTPUTS = FFN_;
    static constexpr bool IS_GATED = true, ACTIVATES = true, KNOWN_BEFORE = NUM_HEADS > 0;
};

template <int FFN_> struct MlpDown : Product<1, 1, FFN_ ? HIDDEN : 0, FFN_> {
    static constexpr const char *NAME = "mlp_down";
};

template <int ROWS, int COLUMNS, int STRIDE_ = COLUMNS, int FIRST_ = 0> struct Dense : Product<1, 1, ROWS, COLUMNS> {
    static constexpr int STRIDE = STRIDE_, FIRST = FIRST_;
    static constexpr bool HAS_BIAS = true, IS_DENSE = true;
};

struct Qkv : Dense<NUM_HEADS ? QKV_ROWS : 0, HIDDEN> {
    static constexpr const char *NAME = "qkv";
};

/* Of ATTENTION_LATENT: queries, and keys and values, from their latents within a row of qkv. */
struct QB : Dense<Q_LORA_RANK ? NUM_HEADS * HEAD_DIM : 0, Q_LORA_RANK, QKV_ROWS> {
    static constexpr const char *NAME = "q_b";
};
struct KvB : Dense<KV_B_ROWS, KV_LORA_RANK, QKV_ROWS, QKV_ROWS - ROTARY_DIM - KV_LORA_RANK> {
    static constexpr const char *NAME = "kv_b";
};

struct AttentionOut : Dense<NUM_HEADS && ATTENTION_KIND != ATTENTION_MOA ? HIDDEN : 0, NUM_HEADS * V_HEAD_DIM> {
    static constexpr const char *NAME = "attention_out";
    static constexpr bool ADDS = true;
};

struct LmHead : Dense<VOCAB_SIZE, HIDDEN> {
    static constexpr const char *NAME = "lm_head";
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
                          MlpDown<SHARED_FFN>, Qkv, QB, KvB, AttentionOut, LmHead>;

struct Scratch {
    float partial_logits[LOGIT_SLICES][MAX_TOKENS][NUM_EXPERTS];
    int32_t routed_blocks;                                /* of a step's tokens; 0 between steps */
    int32_t fault;                                        /* MAX_TOKENS minus a token whose logits allow no choice, or 0 */
    int32_t next_item, done_blocks;                       /* of the product at work; 0 between products */
    int32_t arrived[TILE_BOUND * Largest::PANELS];        /* splits that are done; 0 between products */
    float partials[Largest::PARTIALS];                    /* of the latest product */
};

inline Scratch *scratch_of(const Model *m) { return reinterpret_cast<Scratch *>(product_scratch(m)); }

/* What one product reads and writes. */
struct Job {
    const weight_t *weights;
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
        const float *bias = job.bias + (int64_t)expert * (P::IS_GATED ? 2 : 1) * P::OUTPUTS + min(output, P::OUTPUTS - 1);
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

/* Ids, weights and lists from `router` and, where not NULL, its two biases; counted: in the totals of the layer's FFN. */
int cuda_route(Model *m, int num_tokens, int layer, const float *input, const float *router, const float *logit_bias,
               const float *correction, bool counted);

#endif
