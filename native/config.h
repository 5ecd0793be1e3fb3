/* Holds the model's shape, which is compiled in. The defaults are those of models/moe-32.pt; -DNAME=VALUE changes one.
 * colibri_config() exports them as struct Config. Its fields have the names of the file header's fields, and loading
 * compares the two. Offsets are 64-bit wherever an element count can pass 2^31. */
#ifndef COLIBRI_CONFIG_H
#define COLIBRI_CONFIG_H

#include "panels.h"

#ifndef NUM_EXPERTS
#define NUM_EXPERTS 32
#endif
#ifndef EXPERTS_PER_TOKEN
#define EXPERTS_PER_TOKEN 2
#endif
#ifndef HIDDEN
#define HIDDEN 128
#endif
#ifndef FFN
#define FFN 96
#endif
#ifndef NUM_HEADS
#define NUM_HEADS 8
#endif
#ifndef NUM_KV_HEADS
#define NUM_KV_HEADS 4
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 16
#endif
#ifndef VOCAB_SIZE
#define VOCAB_SIZE 256
#endif
#ifndef WEIGHT_DTYPE
#define WEIGHT_DTYPE DTYPE_F16
#endif
#ifndef EXPERT_DTYPE
#define EXPERT_DTYPE 0 /* as WEIGHT_DTYPE; else a DTYPE code + 1 */
#endif
#ifndef DENSE_DTYPE
#define DENSE_DTYPE 0
#endif
#ifndef COMPUTE_DTYPE
#define COMPUTE_DTYPE 0
#endif
#ifndef EMBED_DTYPE
#define EMBED_DTYPE 0 /* as the dense matrices */
#endif
#ifndef EXPERT_GROUP
#define EXPERT_GROUP 0
#endif
#ifndef DENSE_GROUP
#define DENSE_GROUP 0
#endif
#ifndef EMBED_GROUP
#define EMBED_GROUP 0
#endif
#ifndef EXPERT_ZERO_POINTS
#define EXPERT_ZERO_POINTS 0
#endif
#ifndef DENSE_ZERO_POINTS
#define DENSE_ZERO_POINTS 0
#endif
#ifndef EMBED_ZERO_POINTS
#define EMBED_ZERO_POINTS 0
#endif
#ifndef ACTIVATION
#define ACTIVATION ACTIVATION_SILU
#endif
#ifndef GATED
#define GATED 1
#endif
#ifndef ROUTER_KIND
#define ROUTER_KIND ROUTER_SOFTMAX
#endif
#ifndef ROUTER_BIAS
#define ROUTER_BIAS 0
#endif
#ifndef RENORMALIZE
#define RENORMALIZE 1
#endif
#ifndef NUM_GROUPS
#define NUM_GROUPS 1
#endif
#ifndef TOPK_GROUPS
#define TOPK_GROUPS 1
#endif
#ifndef NORM_KIND
#define NORM_KIND NORM_RMS
#endif
#ifndef ROPE_KIND
#define ROPE_KIND ROPE_DEFAULT
#endif
#ifndef ATTENTION_KIND
#define ATTENTION_KIND ATTENTION_GQA
#endif
#ifndef V_HEAD_DIM
#define V_HEAD_DIM HEAD_DIM
#endif
#ifndef ROTARY_DIM
#define ROTARY_DIM HEAD_DIM
#endif
#ifndef Q_LORA_RANK
#define Q_LORA_RANK 0
#endif
#ifndef KV_LORA_RANK
#define KV_LORA_RANK 0
#endif
#ifndef QK_NORM
#define QK_NORM QK_NORM_NONE
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef EXPERT_BIAS
#define EXPERT_BIAS 0
#endif
#ifndef DENSE_FFN
#define DENSE_FFN 0
#endif
#ifndef SHARED_FFN
#define SHARED_FFN 0
#endif
#ifndef SHARED_GATE
#define SHARED_GATE 0
#endif
#ifndef STORED_EXPERTS
#define STORED_EXPERTS NUM_EXPERTS /* places of a layer's experts in memory; State.place says which expert has which, or none */
#endif
#ifndef CUDA_ARCH
#define CUDA_ARCH 0 /* 90 in an sm_90 build */
#endif
#ifndef MAX_BATCH
#define MAX_BATCH 32
#endif
#ifndef MAX_STEP_TOKENS
#define MAX_STEP_TOKENS 512
#endif
#ifndef MAX_STEP_LOGITS
#define MAX_STEP_LOGITS (MAX_BATCH > 64 ? MAX_BATCH : 64) /* tokens of a step whose logits are computed at once */
#endif
#ifndef WINDOW_PIECE
#define WINDOW_PIECE 128 /* tokens of one session in a step where layers keep only a window, unless it is larger */
#endif

/* Rows of a layer's qkv matrix, as in format.h; and whether q is a row of its own, not the first part of qkv's. */
#define GQA_ROWS ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
#define LATENT_ROWS (Q_LORA_RANK + (Q_LORA_RANK == 0) * NUM_HEADS * HEAD_DIM + KV_LORA_RANK + ROTARY_DIM)
#define MOA_ROWS (2 * NUM_KV_HEADS * HEAD_DIM)
#define QKV_ROWS \
    ((ATTENTION_KIND == ATTENTION_GQA) * GQA_ROWS + (ATTENTION_KIND == ATTENTION_LATENT) * LATENT_ROWS + \
     (ATTENTION_KIND == ATTENTION_MOA) * MOA_ROWS)
#define OWN_Q ((ATTENTION_KIND == ATTENTION_LATENT) * (Q_LORA_RANK > 0) + (ATTENTION_KIND == ATTENTION_MOA))
#define NOPE_DIM ((ATTENTION_KIND == ATTENTION_LATENT) * (HEAD_DIM - ROTARY_DIM)) /* of k that comes from the latent */
#define KV_B_ROWS ((ATTENTION_KIND == ATTENTION_LATENT) * NUM_HEADS * (NOPE_DIM + V_HEAD_DIM))
#define HAS_RESIDUAL (NUM_HEADS > 0) /* a bare stack's layer writes over its input */
#define MLP_FFN (DENSE_FFN > SHARED_FFN ? DENSE_FFN : SHARED_FFN)

/* DTYPE codes of the experts' matrices, of the embedding's and all others, and of operands and caches beside weights of
 * few bits. */
#define EXPERT_FORMAT (EXPERT_DTYPE ? EXPERT_DTYPE - 1 : WEIGHT_DTYPE)
#define DENSE_FORMAT (DENSE_DTYPE ? DENSE_DTYPE - 1 : WEIGHT_DTYPE)
#define EMBED_FORMAT (EMBED_DTYPE ? EMBED_DTYPE - 1 : DENSE_FORMAT)
#define EXPERT_FORM ((Form){EXPERT_FORMAT, EXPERT_GROUP, EXPERT_ZERO_POINTS})
#define DENSE_FORM ((Form){DENSE_FORMAT, DENSE_GROUP, DENSE_ZERO_POINTS})
#define EMBED_FORM \
    ((Form){EMBED_FORMAT, EMBED_DTYPE ? EMBED_GROUP : DENSE_GROUP, EMBED_DTYPE ? EMBED_ZERO_POINTS : DENSE_ZERO_POINTS})
#define COMPUTE_FORMAT (COMPUTE_DTYPE ? COMPUTE_DTYPE - 1 : WEIGHT_DTYPE)

/* Every value that is baked in: struct Config's field, which is the header's up to interleave_rows and the library's
 * own from there on, and the macro that sets it. */
#define CONFIG_FIELDS(F) \
    F(num_experts, NUM_EXPERTS) \
    F(k, EXPERTS_PER_TOKEN) \
    F(hidden, HIDDEN) \
    F(ffn, FFN) \
    F(num_heads, NUM_HEADS) \
    F(num_kv_heads, NUM_KV_HEADS) \
    F(head_dim, HEAD_DIM) \
    F(vocab_size, VOCAB_SIZE) \
    F(weight_dtype, WEIGHT_DTYPE) \
    F(expert_dtype, EXPERT_DTYPE) \
    F(dense_dtype, DENSE_DTYPE) \
    F(compute_dtype, COMPUTE_DTYPE) \
    F(embed_dtype, EMBED_DTYPE) \
    F(expert_group, EXPERT_GROUP) \
    F(dense_group, DENSE_GROUP) \
    F(embed_group, EMBED_GROUP) \
    F(expert_zero_points, EXPERT_ZERO_POINTS) \
    F(dense_zero_points, DENSE_ZERO_POINTS) \
    F(embed_zero_points, EMBED_ZERO_POINTS) \
    F(activation, ACTIVATION) \
    F(gated, GATED) \
    F(router_kind, ROUTER_KIND) \
    F(router_bias, ROUTER_BIAS) \
    F(renormalize, RENORMALIZE) \
    F(num_groups, NUM_GROUPS) \
    F(topk_groups, TOPK_GROUPS) \
    F(norm_kind, NORM_KIND) \
    F(rope_kind, ROPE_KIND) \
    F(attention_kind, ATTENTION_KIND) \
    F(v_head_dim, V_HEAD_DIM) \
    F(rotary_dim, ROTARY_DIM) \
    F(q_lora_rank, Q_LORA_RANK) \
    F(kv_lora_rank, KV_LORA_RANK) \
    F(qk_norm, QK_NORM) \
    F(sinks, SINKS) \
    F(expert_bias, EXPERT_BIAS) \
    F(dense_ffn, DENSE_FFN) \
    F(shared_ffn, SHARED_FFN) \
    F(shared_gate, SHARED_GATE) \
    F(interleave_rows, PANEL_ROWS) \
    F(max_batch, MAX_BATCH) \
    F(max_step_tokens, MAX_STEP_TOKENS) \
    F(max_step_logits, MAX_STEP_LOGITS) \
    F(window_piece, WINDOW_PIECE) \
    F(stored_experts, STORED_EXPERTS) \
    F(cuda_arch, CUDA_ARCH)

#ifdef __cplusplus
#define STATIC_ASSERT(condition, text) static_assert(condition, "native/config.h: expected " text "; correct DEFINES")
#else
#define STATIC_ASSERT(condition, text) _Static_assert(condition, "native/config.h: expected " text "; correct DEFINES")
#endif

STATIC_ASSERT(MAX_BATCH >= 1 && MAX_BATCH <= MAX_STEP_TOKENS, "1 <= MAX_BATCH <= MAX_STEP_TOKENS");
STATIC_ASSERT(MAX_STEP_LOGITS >= 1 && MAX_STEP_LOGITS <= MAX_STEP_TOKENS, "1 <= MAX_STEP_LOGITS <= MAX_STEP_TOKENS");
STATIC_ASSERT(WINDOW_PIECE >= 1, "WINDOW_PIECE >= 1");

/* MODEL_RULES of the values that are baked in. Nothing calls it. */
static inline void check_model_rules(void) {
#define VALUE(field, macro) field = (macro),
    enum { CONFIG_FIELDS(VALUE) };
#undef VALUE
#define RULE(field, condition, words) STATIC_ASSERT(condition, #condition);
    MODEL_RULES(RULE)
#undef RULE
}

STATIC_ASSERT(STORED_EXPERTS >= 1 && STORED_EXPERTS <= NUM_EXPERTS, "1 <= STORED_EXPERTS <= NUM_EXPERTS");

#define CONFIG_FIELD(field, macro) uint32_t field;

typedef struct Config {
    CONFIG_FIELDS(CONFIG_FIELD)
    uint32_t cuda_version; /* of the CUDA that made the kernels, 13000 for 13.0; 0 in a host library */
} Config;

#endif
