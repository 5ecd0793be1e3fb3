/* Shows the whole model on one page: weights, state, and the batch of one step. Every pointer carries its shape.
 *
 * C allocates nothing: Python owns every block of memory and hands it in. Weights point into the mapped file on the
 * host, and into device memory on a device. Python reads the structs and tables here (colibri/headers.py). */
#ifndef COLIBRI_MODEL_H
#define COLIBRI_MODEL_H

#include <math.h>

#include "config.h"

/* A matrix as it is stored: panels.h says how. */
typedef void expert_t;
typedef void dense_t;
typedef void embed_t;

#define TENSOR_POINTER(name, type, experts, rows, columns) const type *name;
#define TENSOR_SCALE(name, type, experts, rows, columns) double name##_scale;

typedef struct Layer {
    LAYER_TENSORS(TENSOR_POINTER) /* shapes: format.h; NULL where a dimension is 0 */
    LAYER_TENSORS(TENSOR_SCALE)   /* BinTensor.scale, qkv_scale of qkv */
} Layer;

typedef struct Weights {
    MODEL_TENSORS(TENSOR_POINTER)
    MODEL_TENSORS(TENSOR_SCALE)
    const Layer *layers; /* (num_layers), in host memory for both backends */
} Weights;

/* One forward call's input and output, filled in and read by Python. For CUDA it lies in page-locked mapped memory,
 * at the same address on both sides. Token t belongs to KV slot slots[t] and stands at positions[t] there; the
 * tokens of one slot come in the order of their positions, at most max_piece (cache.h) in a step. logit_rows
 * names the tokens whose logits are wanted; sampled[i], sampler fields and logits row i belong to logit_rows[i]. */
typedef struct Batch {
    const float *input;                   /* (num_tokens, HIDDEN) of a bare stack, where its step can read them */
    int32_t num_tokens;
    int32_t num_logits;
    int32_t sample;                       /* 0: logits only */
    int32_t fault;                        /* 0, or FAULT_*; written by the device */
    int32_t fault_layer;                  /* of the router's faults; FAULT_LOGIT is where -1 was sampled */
    int32_t fault_token;                  /* of FAULT_ROUTER_LOGIT the token, of FAULT_EXPERT the expert */
    int32_t tokens[MAX_STEP_TOKENS];
    int32_t positions[MAX_STEP_TOKENS];
    int32_t slots[MAX_STEP_TOKENS];
    int32_t rope_lengths[MAX_STEP_TOKENS]; /* ROPE_LONG, ROPE_DYNAMIC: length whose frequencies rotate the token */
    int32_t logit_rows[MAX_STEP_LOGITS];
    float temperature[MAX_STEP_LOGITS];   /* 0: greedy */
    int32_t top_k[MAX_STEP_LOGITS];       /* 0: all */
    float top_p[MAX_STEP_LOGITS];         /* 1: all */
    float uniform[MAX_STEP_LOGITS];       /* in [0, 1): the draw, from the caller's seeded generator */
    int32_t sampled[MAX_STEP_LOGITS];
} Batch;

#define MAX_TOP 20 /* likeliest tokens that are told of a position */

/* One token that is drawn by more than Batch's samplers, or only scored, from a row of logits in host memory. */
typedef struct Draw {
    const float *logits;         /* (VOCAB_SIZE) as the model gave them */
    float *changed;              /* (VOCAB_SIZE) to work in; not read where the token is only scored */
    const int32_t *biased;       /* (num_biased) tokens */
    const float *biases;         /* (num_biased) what is added to their logits */
    const int32_t *seen;         /* (num_seen) tokens of the prompt and of the answer so far, each once */
    const int32_t *counts;       /* (num_seen) how often the answer so far has each */
    const int32_t *barred;       /* (num_barred) tokens that may not be drawn */
    const uint32_t *allowed;     /* a bit a token, the lowest first: others may not be drawn; NULL: all may */
    double logprob;              /* written: of the token, by the logits as the model gave them */
    double top_logprobs[MAX_TOP]; /* written: those of top */
    int32_t top[MAX_TOP];        /* written: the num_top likeliest tokens, best first */
    int32_t num_top;             /* -1: no log-probabilities are wanted */
    int32_t rank;                /* written: 1 and the number of tokens that are likelier */
    int32_t token;               /* that is scored; -1: it is drawn, and written here; it stays -1 for NaN */
    int32_t num_biased;
    int32_t num_seen;
    int32_t num_barred;
    int32_t top_k;               /* 0: all */
    float temperature;           /* 0: greedy */
    float top_p;                 /* 1: all */
    float min_p;                 /* 0: all */
    float uniform;               /* in [0, 1): the draw */
    float repetition_penalty;    /* divides positive logits of what was seen, multiplies others; 1: none */
    float frequency_penalty;     /* is taken off once for each time that the answer has the token */
    float presence_penalty;      /* is taken off once where the answer has it */
} Draw;

#define FAULT_ROUTER_LOGIT 1 /* a NaN or +inf router logit, or fewer than k finite ones */
#define FAULT_LOGIT 2        /* a NaN among the logits to sample from */
#define FAULT_EXPERT 3       /* a chosen expert whose place is -1 */

/* What a step works in. B(name, type, rows, columns); num_slots and the CACHE_VALUES of cache.h are run-time values.
 * x is the residual stream, and a bare MoE stack's input and output. */
#define STATE_BUFFERS(B) \
    B(key_cache,        float,    num_slots * NUM_KV_HEADS * cache_positions, HEAD_DIM) /* rows by cache_row() */ \
    B(value_cache,      float,    num_slots * NUM_KV_HEADS * cache_positions, V_HEAD_DIM) \
    B(place,            int32_t,  num_layers, NUM_EXPERTS) /* of an expert, below STORED_EXPERTS; -1: none */ \
    B(x,                float,    MAX_STEP_TOKENS, HIDDEN) \
    B(normed,           float,    MAX_STEP_TOKENS, HIDDEN) \
    B(qkv,              float,    MAX_STEP_TOKENS, QKV_ROWS) \
    B(q,                float,    MAX_STEP_TOKENS, OWN_Q * NUM_HEADS * HEAD_DIM) \
    B(dynamic_frequencies, float, MAX_STEP_TOKENS * (ROPE_KIND == ROPE_DYNAMIC), ROTARY_DIM / 2) /* of a GPU */ \
    B(kv,               float,    MAX_STEP_TOKENS, KV_B_ROWS) /* the heads' k without the rotated part, then v */ \
    B(attention,        float,    MAX_STEP_TOKENS, NUM_HEADS * V_HEAD_DIM) \
    B(router_logits,    float,    MAX_STEP_TOKENS, NUM_EXPERTS) \
    B(expert_ids,       int32_t,  MAX_STEP_TOKENS, EXPERTS_PER_TOKEN)  /* best first */ \
    B(expert_weights,   float,    MAX_STEP_TOKENS, EXPERTS_PER_TOKEN) \
    B(expert_offsets,   int32_t,  1, NUM_EXPERTS + 1) /* expert e's assignments: [offsets[e], offsets[e+1]) */ \
    B(assignments,      int32_t,  1, MAX_STEP_TOKENS * EXPERTS_PER_TOKEN) /* token * k + slot, by expert, token */ \
    B(active_experts,   int32_t,  1, NUM_EXPERTS)     /* those with a token, ascending */ \
    B(num_active,       int32_t,  1, 1) \
    B(expert_mid,       float,    MAX_STEP_TOKENS * EXPERTS_PER_TOKEN, FFN)    /* row token * k + slot */ \
    B(expert_out,       float,    MAX_STEP_TOKENS * EXPERTS_PER_TOKEN, HIDDEN) /* row token * k + slot */ \
    B(mlp_mid,          float,    MAX_STEP_TOKENS, MLP_FFN)    /* rows of the layer's own width */ \
    B(mlp_out,          float,    MAX_STEP_TOKENS, HIDDEN * (MLP_FFN > 0)) \
    B(logits,           float,    MAX_STEP_LOGITS, VOCAB_SIZE) \
    B(routed_tokens,    uint64_t, num_layers, NUM_EXPERTS) /* assignments since the start */ \
    B(experts_read,     uint64_t, 1, 1)                    /* sum of num_active since the start */

#define STATE_POINTER(name, type, rows, columns) type *name;

typedef struct State {
    STATE_BUFFERS(STATE_POINTER)
    void *scratch; /* a backend's own: ops->scratch_bytes() */
} State;

typedef struct Model {
    BinHeader header;
    Weights weights;
    State state;
    Batch *batch;
    const struct Ops *ops;
    void *stream;        /* CUDA only: a CUstream */
    int32_t num_slots;   /* KV-cache timelines */
    int32_t context;     /* positions of each */
    int32_t num_threads; /* host only */
    int32_t layer;       /* that is being run or launched; -1 outside of the layers */
} Model;

/* Where a layer's experts stand in its matrices and biases, (NUM_EXPERTS); -1 is one that is not here. */
static inline const int32_t *places(const Model *m, int layer) {
    return m->state.place + (int64_t)layer * NUM_EXPERTS;
}

/* What a layer's router, mlp and experts read: the normed residual stream, or a bare stack's input as it is. */
static inline const float *ffn_input(const Model *m) { return HAS_RESIDUAL ? m->state.normed : m->state.x; }

/* Whether frequencies for so many positions are others than rope_frequencies. */
static inline HOST_DEVICE int is_long_rope(int32_t length, uint32_t original) { return (uint32_t)length > original; }

/* ROPE_DYNAMIC's frequency of a pair. */
static inline HOST_DEVICE float dynamic_frequency(float frequency, int pair, int32_t length, uint32_t original,
                                                  float factor) {
    if (!is_long_rope(length, original)) return frequency;
    double stretch = 1 + (double)factor * ((uint32_t)length - original) / original;
    return (float)(frequency / pow(stretch, 2 * pair / (ROTARY_DIM - 2.0)));
}

/* Whether a layer is in window_layers or dense_layers, which have the first 128. */
static inline int layer_bit(const uint32_t *mask, int layer) {
    return layer < 128 && mask[layer / 32] >> layer % 32 & 1;
}

#endif
