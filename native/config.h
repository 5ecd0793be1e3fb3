/* The model's shape, baked in. Each is a -D away from another model; the defaults are models/moe-32.pt's.
 * colibri_config() exports them as struct Config, whose fields carry the names of the file header's fields, and
 * loading compares the two. Offsets are 64-bit wherever an element count can pass 2^31. */
#ifndef COLIBRI_CONFIG_H
#define COLIBRI_CONFIG_H

#include "format.h"

#ifndef NUM_EXPERTS
#define NUM_EXPERTS 32
#endif
#ifndef K
#define K 2
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
#ifndef CUDA_ARCH
#define CUDA_ARCH 0 /* 90 in an sm_90 build */
#endif
#ifndef MAX_BATCH
#define MAX_BATCH 32
#endif
#ifndef MAX_SEQ_LEN
#define MAX_SEQ_LEN 512
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

#define MAX_TOKENS (MAX_BATCH > MAX_SEQ_LEN ? MAX_BATCH : MAX_SEQ_LEN) /* of one forward call */

#ifdef __cplusplus
#define STATIC_ASSERT(condition) static_assert(condition, "native/config.h: expected " #condition "; correct DEFINES")
#else
#define STATIC_ASSERT(condition) _Static_assert(condition, "native/config.h: expected " #condition "; correct DEFINES")
#endif

STATIC_ASSERT(NUM_EXPERTS >= 1 && NUM_EXPERTS <= 256);
STATIC_ASSERT(K >= 1 && K <= 16 && K <= NUM_EXPERTS);
STATIC_ASSERT(HIDDEN >= 1 && FFN >= 1 && MAX_BATCH >= 1 && MAX_SEQ_LEN >= 1 && WINDOW_PIECE >= 1);
STATIC_ASSERT(NUM_HEADS == 0 || (NUM_KV_HEADS >= 1 && NUM_HEADS % (NUM_KV_HEADS ? NUM_KV_HEADS : 1) == 0));
STATIC_ASSERT(NUM_HEADS == 0 || (HEAD_DIM >= 2 && HEAD_DIM % 2 == 0 && HEAD_DIM <= 512));
STATIC_ASSERT((NUM_HEADS == 0) == (VOCAB_SIZE == 0));
STATIC_ASSERT(NUM_EXPERTS % NUM_GROUPS == 0 && TOPK_GROUPS >= 1 && TOPK_GROUPS <= NUM_GROUPS);
STATIC_ASSERT(TOPK_GROUPS * (NUM_EXPERTS / NUM_GROUPS) >= K);
STATIC_ASSERT(ROUTER_KIND != ROUTER_SPARSEMIXER || K == 2);
STATIC_ASSERT(ROTARY_DIM % 2 == 0 && ROTARY_DIM <= HEAD_DIM);
STATIC_ASSERT(NUM_HEADS == 0 || (V_HEAD_DIM >= 1 && V_HEAD_DIM <= 512));
STATIC_ASSERT(ATTENTION_KIND != ATTENTION_LATENT || (NUM_KV_HEADS == NUM_HEADS && KV_LORA_RANK >= 1));
STATIC_ASSERT(ATTENTION_KIND != ATTENTION_LATENT || ROTARY_DIM < HEAD_DIM);
STATIC_ASSERT(ATTENTION_KIND == ATTENTION_LATENT || (V_HEAD_DIM == HEAD_DIM && KV_LORA_RANK == 0 && Q_LORA_RANK == 0));
STATIC_ASSERT(ATTENTION_KIND != ATTENTION_MOA || NUM_HEADS == K * NUM_KV_HEADS);
STATIC_ASSERT(MLP_FFN == 0 || GATED);

typedef struct Config {
    uint32_t num_experts;
    uint32_t k;
    uint32_t hidden;
    uint32_t ffn;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t vocab_size;
    uint32_t weight_dtype;
    uint32_t activation;
    uint32_t gated;
    uint32_t router_kind;
    uint32_t router_bias;
    uint32_t renormalize;
    uint32_t num_groups;
    uint32_t topk_groups;
    uint32_t norm_kind;
    uint32_t rope_kind;
    uint32_t attention_kind;
    uint32_t v_head_dim;
    uint32_t rotary_dim;
    uint32_t q_lora_rank;
    uint32_t kv_lora_rank;
    uint32_t qk_norm;
    uint32_t sinks;
    uint32_t expert_bias;
    uint32_t dense_ffn;
    uint32_t shared_ffn;
    uint32_t shared_gate;
    uint32_t interleave_rows;
    uint32_t max_batch;         /* from here on the library's own: not in the file */
    uint32_t max_seq_len;
    uint32_t window_piece;
    uint32_t cuda_arch;         /* 0: no CUDA backend; 90 for sm_90 */
} Config;

#endif
