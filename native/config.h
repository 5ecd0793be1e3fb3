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
#ifndef CUDA_ARCH
#define CUDA_ARCH 0 /* 90 in an sm_90 build */
#endif
#ifndef MAX_BATCH
#define MAX_BATCH 32
#endif
#ifndef MAX_SEQ_LEN
#define MAX_SEQ_LEN 512
#endif

#define MAX_TOKENS (MAX_BATCH > MAX_SEQ_LEN ? MAX_BATCH : MAX_SEQ_LEN) /* of one forward call */

#ifdef __cplusplus
#define STATIC_ASSERT(condition) static_assert(condition, "native/config.h: expected " #condition "; correct DEFINES")
#else
#define STATIC_ASSERT(condition) _Static_assert(condition, "native/config.h: expected " #condition "; correct DEFINES")
#endif

STATIC_ASSERT(NUM_EXPERTS >= 1 && NUM_EXPERTS <= 256);
STATIC_ASSERT(K >= 1 && K <= 16 && K <= NUM_EXPERTS);
STATIC_ASSERT(HIDDEN >= 1 && FFN >= 1 && MAX_BATCH >= 1 && MAX_SEQ_LEN >= 1);
STATIC_ASSERT(NUM_HEADS == 0 || (NUM_KV_HEADS >= 1 && NUM_HEADS % (NUM_KV_HEADS ? NUM_KV_HEADS : 1) == 0));
STATIC_ASSERT(NUM_HEADS == 0 || (HEAD_DIM >= 2 && HEAD_DIM % 2 == 0 && HEAD_DIM <= 512));
STATIC_ASSERT((NUM_HEADS == 0) == (VOCAB_SIZE == 0));
STATIC_ASSERT(NUM_EXPERTS % NUM_GROUPS == 0 && TOPK_GROUPS >= 1 && TOPK_GROUPS <= NUM_GROUPS);
STATIC_ASSERT(TOPK_GROUPS * (NUM_EXPERTS / NUM_GROUPS) >= K);

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
    uint32_t interleave_rows;
    uint32_t max_batch;         /* from here on the library's own: not in the file */
    uint32_t max_seq_len;
    uint32_t cuda_arch;         /* 0: no CUDA backend; 90 for sm_90 */
} Config;

#endif
