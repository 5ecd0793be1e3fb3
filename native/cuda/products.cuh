/* The products with the weights and their shapes. */
#ifndef COLIBRI_CUDA_PRODUCTS_CUH
#define COLIBRI_CUDA_PRODUCTS_CUH

#include "numbers.cuh"

/* A step of up to DECODE_TOKENS tokens is bound by reading weights and split over the GPU by panels (decode.cuh); a
 * longer one is bound by multiplying (prefill.cuh). */
constexpr int DECODE_TOKENS = min_of(MAX_STEP_TOKENS, 64);
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
    static constexpr Form FORM = EXPERTS == 1 ? DENSE_FORM : EXPERT_FORM;
    static constexpr int PANELS = ceil_div(ROWS, PANEL_ROWS), SPLITS = column_splits(SLOTS_, PANELS, COLUMNS);
    static constexpr int64_t PARTIALS = SPLITS > 1 ? (int64_t)SPLITS * ASSIGNMENTS * PANELS * PANEL_ROWS : 0;
    static constexpr int STRIDE = COLUMNS, FIRST = 0; /* the input: columns FIRST, FIRST + 1, ... of rows of STRIDE */
    static constexpr int INPUT_DIVISOR = 1;           /* an assignment's input row is its number divided by this */
    static constexpr bool KNOWN_BEFORE = true; /* the routing, or the number of rows, when the kernel before began */
    static constexpr bool IS_GATED = false, ACTIVATES = false, HAS_BIAS = false;
    static constexpr bool IS_DENSE = false; /* inputs lose nothing; job.scale multiplies the output and its bias */
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

/* ATTENTION_MOA's experts, which have a routing of their own: a slot's query heads, and what their attention gives. */
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
    static constexpr Form FORM = EMBED_FORM;
};

template <class... P> struct LargestOf {
    static constexpr int PANELS = max_of(P::PANELS...);
    static constexpr int64_t PARTIALS = max_of((int64_t)1, P::PARTIALS...);
};
using Largest = LargestOf<Up, Down, MoaIn, MoaOut, MlpUp<DENSE_FFN>, MlpDown<DENSE_FFN>, MlpUp<SHARED_FFN>,
                          MlpDown<SHARED_FFN>, Qkv, QB, KvB, AttentionOut, LmHead>;

#endif
