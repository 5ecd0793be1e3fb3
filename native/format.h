/* Defines the .bin file, version 2: its header, its tensor directory, its codes, and the list of tensors in a model.
 *
 * This file is the only definition. C compiles it, and Python reads its text (colibri/headers.py). The reader needs one
 * struct field a line, fixed-width types, no padding, and one #define of a plain integer a line. All integers are
 * little-endian. README.md has the rules of the format in MUST sentences. */
#ifndef COLIBRI_FORMAT_H
#define COLIBRI_FORMAT_H

#include <stdint.h>

#define FORMAT_VERSION 2
#define DATA_ALIGNMENT 4096
#define MAX_RANK 3
#define MAX_TENSORS 65536 /* so that a damaged count does not keep a reader busy */
#define MAX_EXPERTS 256
#define MAX_K 16
#define MAX_HEAD_DIM 512

/* weight_dtype, BinTensor.dtype; expert_dtype, dense_dtype, embed_dtype and compute_dtype have 1 more, and 0 for what
 * their lines below say */
#define DTYPE_F32 0
#define DTYPE_F16 1
#define DTYPE_BF16 2
#define NUM_WIDE_DTYPES 3 /* each weight by itself; from here on weights of few bits, in groups that share a scale */
#define DTYPE_INT8 3
#define DTYPE_INT4 4
#define DTYPE_FP8 5       /* e4m3 */
#define DTYPE_MXFP4 6     /* e2m1, scales in e8m0 */
#define NUM_DTYPES 7

/* activation */
#define ACTIVATION_SILU 0
#define ACTIVATION_GELU 1 /* the exact one, with erf */
#define ACTIVATION_RELU 2
#define ACTIVATION_CLAMPED_SWIGLU 3 /* g = min(gate, limit), u = up within +-limit: g sigmoid(alpha g) (u + 1) */

/* router_kind: how a token's logits become k experts and their weights */
#define ROUTER_SOFTMAX 0      /* softmax over all experts, then the k largest */
#define ROUTER_TOPK_SOFTMAX 1 /* the k largest logits, then softmax over them */
#define ROUTER_SIGMOID 2      /* sigmoid; chosen by score + router_bias, weighted by the score alone, like softmax */
#define ROUTER_SPARSEMIXER 3  /* two, one after the other, each by a softmax over the logits near the largest left */

/* norm_kind */
#define NORM_NONE 0
#define NORM_RMS 1
#define NORM_LAYER 2 /* the mean is subtracted first */

/* rope_kind */
#define ROPE_NONE 0
#define ROPE_DEFAULT 1 /* pairs (i, i + rotary_dim/2) of a head, by rope_frequencies[i] a position */
#define ROPE_LONG 2    /* longrope: in a sequence of more than rope_original_positions, by rope_long_frequencies[i] */
#define ROPE_DYNAMIC 3 /* dynamic NTK: for a length L of more than N = rope_original_positions, rope_frequencies[i] is
                        * divided by (1 + rope_dynamic_factor * (L - N) / N) ^ (2i / (rotary_dim - 2)) */

/* attention_kind */
#define ATTENTION_GQA 0    /* num_heads / num_kv_heads neighbouring query heads share a kv head */
#define ATTENTION_LATENT 1 /* k and v of each head come from one latent; k's rotated part is one for all heads */
#define ATTENTION_MOA 2    /* k experts make num_kv_heads query heads each; head h has kv head h % num_kv_heads */

/* qk_norm: an RMS norm of q and k before they rotate */
#define QK_NORM_NONE 0
#define QK_NORM_HEAD 1 /* of each head */
#define QK_NORM_ALL 2  /* of all heads' rows together */

typedef struct BinHeader {
    char magic[4];              /* "COLI" */
    uint32_t version;           /* FORMAT_VERSION */
    uint32_t num_experts;
    uint32_t k;                 /* experts per token */
    uint32_t header_bytes;      /* sizeof(BinHeader) */
    uint32_t header_crc32;      /* CRC-32 of header and directory, this field taken as 0 */
    uint64_t file_bytes;
    uint64_t directory_offset;  /* of num_tensors BinTensor */
    uint32_t num_tensors;
    uint32_t num_layers;
    uint32_t hidden;
    uint32_t ffn;               /* rows of one expert's up projection */
    uint32_t num_heads;         /* 0: a stack of MoE layers without attention */
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t vocab_size;        /* 0: hidden states in, hidden states out */
    uint32_t max_positions;     /* positions the model was trained for; 0: no limit of its own */
    uint32_t weight_dtype;      /* F32, F16 or BF16, of matrices; routers and vectors are F32; see expert_dtype */
    uint32_t activation;
    uint32_t gated;             /* 1: down(activation(gate x) * up x); 0: down(activation(up x)) */
    uint32_t router_kind;
    uint32_t router_bias;       /* 1: each layer has a correction bias */
    uint32_t renormalize;       /* 1: the k weights are divided by their sum */
    uint32_t num_groups;        /* group-limited routing; 1: not limited */
    uint32_t topk_groups;       /* groups that a token may choose from */
    float routed_scaling;       /* the k weights are multiplied by this at the end */
    uint32_t norm_kind;
    float norm_eps;
    uint32_t rope_kind;
    float rope_theta;
    uint32_t tied_embeddings;   /* 1: the LM head is the embedding */
    uint32_t interleave_rows;   /* PANEL_ROWS */
    uint32_t attention_kind;
    uint32_t v_head_dim;        /* head_dim but for ATTENTION_LATENT */
    uint32_t q_lora_rank;       /* ATTENTION_LATENT: rows of q's own latent; 0: q straight from the input */
    uint32_t kv_lora_rank;      /* ATTENTION_LATENT: rows of the latent */
    uint32_t qkv_bias;
    uint32_t attention_out_bias;
    uint32_t qk_norm;
    uint32_t sinks;             /* 1: a logit a head joins the softmax and takes no value */
    uint32_t rotary_dim;        /* the first so many dimensions of a head rotate; even */
    uint32_t window;            /* position p sees p-window+1 .. p on the layers of window_layers; 0: none */
    uint32_t norm_bias;         /* 1: NORM_LAYER's */
    uint32_t router_logit_bias; /* 1: added to the logits; router_bias only to what is chosen by */
    uint32_t expert_bias;       /* 1: of both of an expert's matrices */
    uint32_t dense_ffn;         /* rows of the up projection on the layers of dense_layers */
    uint32_t shared_ffn;        /* of a MoE layer's shared expert; 0: none */
    uint32_t shared_gate;       /* 1: the shared expert times sigmoid(shared_gate . x) */
    uint32_t ffn_out_bias;      /* 1: added once to a layer's sum of experts */
    uint32_t lm_head_bias;
    float attention_scale;      /* of q . k */
    float clip_qkv;             /* q, k and v are clamped to +-this after their norms; 0: not */
    float rope_attention_factor; /* of cosine and sine */
    float renormalize_min;      /* with renormalize, the sum counts as at least this */
    float router_jitter;        /* ROUTER_SPARSEMIXER: logits within 2 * this, relative, are near */
    float swiglu_alpha;
    float swiglu_limit;
    float final_norm_eps;
    float latent_norm_eps;
    float embedding_multiplier;
    float residual_multiplier;  /* of what attention and experts add to the residual stream */
    float logits_multiplier;
    uint32_t window_layers[4];  /* bit l: layer l has the window */
    uint32_t dense_layers[4];   /* bit l: layer l has no experts */
    uint64_t tokenizer_offset;  /* a tokenizer.json, a multiple of DATA_ALIGNMENT; 0: none */
    uint64_t tokenizer_bytes;
    uint32_t tokenizer_crc32;
    uint32_t num_eos;
    uint32_t eos_ids[8];        /* num_eos tokens that end a text */
    uint32_t add_bos;           /* 1: bos_id begins a prompt, also where tokenizer.json does not put it there */
    uint32_t bos_id;            /* with add_bos; else 0 */
    uint32_t rope_original_positions; /* ROPE_LONG, ROPE_DYNAMIC: lengths up to it have rope_frequencies as they are */
    float rope_long_attention_factor; /* ROPE_LONG: of cosine and sine where rope_long_frequencies hold */
    float rope_dynamic_factor;  /* ROPE_DYNAMIC: at least 1 */
    uint32_t expert_dtype;      /* of the experts' matrices: 0 weight_dtype, else a DTYPE code + 1 */
    uint32_t dense_dtype;       /* of every other matrix, likewise */
    uint32_t compute_dtype;     /* 16 bits, of operands and caches beside weights of few bits; likewise */
    uint64_t settings_offset;   /* JSON: chat templates, special tokens, sampling; like tokenizer_offset */
    uint64_t settings_bytes;
    uint32_t settings_crc32;
    uint32_t embed_dtype;       /* of embed and lm_head: 0 as the dense matrices in all, else a DTYPE code + 1 */
    uint32_t expert_group;      /* columns of a row that share a scale, with an expert_dtype of few bits; else 0 */
    uint32_t dense_group;       /* with dense_dtype, likewise */
    uint32_t embed_group;       /* with embed_dtype, likewise */
    uint32_t expert_zero_points; /* 1: each row of a group has a zero point, in INT8 and INT4; 0: they are 128 and 8 */
    uint32_t dense_zero_points;
    uint32_t embed_zero_points;
    uint32_t reserved[22];      /* 0 */
} BinHeader;                    /* 512 bytes */

typedef struct BinTensor {
    char name[64];              /* "embed", "layers.3.experts_up"; zero-padded */
    uint32_t dtype;
    uint32_t rank;              /* 1: a plain vector; 2, 3: panels */
    uint32_t crc32;             /* CRC-32 of the data as stored, panel padding included */
    float scale;                /* INT8, INT4: of every weight, on top of its group's; else 0 */
    uint64_t shape[MAX_RANK];   /* [length], [rows, columns] or [num_experts, rows, columns]; the rest 0 */
    uint64_t offset;            /* from the start of the file; a multiple of DATA_ALIGNMENT */
    uint64_t bytes;             /* stored bytes, panel padding included */
} BinTensor;                    /* 120 bytes */

/* A matrix [rows, columns] is stored in panels, as in panels.h.
 *
 * T(name, type, experts, rows, columns): a tensor with a zero dimension is not in the file; experts 0 means a plain
 * matrix, columns 0 a vector. The expressions are in the header's fields. expert_t has expert_dtype, expert_group and
 * expert_zero_points, dense_t and embed_t likewise, float F32.
 * In a gated experts_up, and in mlp_up, gate and up rows alternate in groups of GATE_GROUP, and both are filled up with
 * zero rows to a multiple of it: stored rows are 2 * GATE_GROUP * ceil(ffn / GATE_GROUP), then whole panels; the shape
 * in the directory stays [num_experts, 2 * ffn, hidden]. */
#define MODEL_TENSORS(T) \
    T(embed,            embed_t,  0, vocab_size, hidden) \
    T(final_norm,       float,    0, hidden * (vocab_size > 0), 0) \
    T(final_norm_bias,  float,    0, hidden * norm_bias, 0) \
    T(lm_head,          embed_t,  0, vocab_size * (1 - tied_embeddings), hidden) \
    T(lm_head_bias,     float,    0, vocab_size * lm_head_bias, 0) \
    T(rope_frequencies, float,    0, rotary_dim / 2, 0) \
    T(rope_long_frequencies, float, 0, (rope_kind == 2) * (rotary_dim / 2), 0)

/* What a layer's expressions use beyond the header's fields; `dense` is 1 on the layers of dense_layers. Rows of qkv:
 * GQA q, k, v; LATENT q's latent (or q), latent, k's rotated part; MOA k, v. */
#define LAYER_VALUES(B) \
    B(moe, 1 - dense) \
    B(mlp_ffn, dense * dense_ffn + (1 - dense) * shared_ffn) \
    B(gqa_rows, (attention_kind == 0) * (num_heads + 2 * num_kv_heads) * head_dim) \
    B(latent_q_rows, q_lora_rank + (q_lora_rank == 0) * num_heads * head_dim) \
    B(latent_rows, (attention_kind == 1) * (latent_q_rows + kv_lora_rank + rotary_dim)) \
    B(moa_rows, (attention_kind == 2) * 2 * num_kv_heads * head_dim) \
    B(qkv_rows, gqa_rows + latent_rows + moa_rows) \
    B(kv_b_rows, (attention_kind == 1) * num_heads * (head_dim - rotary_dim + v_head_dim)) \
    B(moa_experts, (attention_kind == 2) * num_experts)

/* mlp: what every token takes, a dense layer's whole FFN or the shared expert; stored like one gated expert. A head's
 * rows in q_b and of q are its rotated dimensions, then the others; kv_b has all heads' k, then all heads' v. A gated
 * experts_up_bias is, expert by expert, all gates, then all ups. */
#define LAYER_TENSORS(T) \
    T(attention_norm,        float,    0, hidden * (num_heads > 0), 0) \
    T(attention_norm_bias,   float,    0, hidden * norm_bias, 0) \
    T(qkv,                   dense_t,  0, qkv_rows, hidden) \
    T(qkv_bias,              float,    0, qkv_rows * qkv_bias, 0) \
    T(q_norm,                float,    0, (qk_norm == 1) * head_dim + (qk_norm == 2) * num_heads * head_dim, 0) \
    T(k_norm,                float,    0, (qk_norm == 1) * head_dim + (qk_norm == 2) * num_kv_heads * head_dim, 0) \
    T(q_a_norm,              float,    0, q_lora_rank, 0) \
    T(q_b,                   dense_t,  0, (q_lora_rank > 0) * num_heads * head_dim, q_lora_rank) \
    T(kv_a_norm,             float,    0, kv_lora_rank, 0) \
    T(kv_b,                  dense_t,  0, kv_b_rows, kv_lora_rank) \
    T(sinks,                 float,    0, num_heads * sinks, 0) \
    T(attention_router,      float,    0, moa_experts, hidden) \
    T(attention_experts_in,  expert_t, moa_experts, num_kv_heads * head_dim, hidden) \
    T(attention_experts_out, expert_t, moa_experts, hidden, num_kv_heads * head_dim) \
    T(attention_out,         dense_t,  0, (attention_kind < 2) * hidden * (num_heads > 0), num_heads * v_head_dim) \
    T(attention_out_bias,    float,    0, hidden * attention_out_bias, 0) \
    T(ffn_norm,              float,    0, hidden * (num_heads > 0), 0) \
    T(ffn_norm_bias,         float,    0, hidden * norm_bias, 0) \
    T(mlp_up,                dense_t,  0, 2 * mlp_ffn, hidden) \
    T(mlp_down,              dense_t,  0, hidden * (mlp_ffn > 0), mlp_ffn) \
    T(shared_gate,           float,    0, hidden * shared_gate * moe, 0) \
    T(router,                float,    0, num_experts * moe, hidden) \
    T(router_bias,           float,    0, num_experts * router_bias * moe, 0) \
    T(router_logit_bias,     float,    0, num_experts * router_logit_bias * moe, 0) \
    T(experts_up,            expert_t, num_experts * moe, ffn * (1 + gated), hidden) \
    T(experts_up_bias,       float,    0, num_experts * (1 + gated) * ffn * expert_bias * moe, 0) \
    T(experts_down,          expert_t, num_experts * moe, hidden, ffn) \
    T(experts_down_bias,     float,    0, num_experts * hidden * expert_bias * moe, 0) \
    T(ffn_out_bias,          float,    0, hidden * ffn_out_bias, 0)

/* What MODEL_RULES say of the experts', the dense and the embedding matrices: of name_dtype, name_group and
 * name_zero_points. */
#define FORM_RULES(R, name) \
    R(name##_dtype, name##_dtype <= NUM_DTYPES, \
      "0, 1 (f32), 2 (f16), 3 (bf16), 4 (int8), 5 (int4), 6 (fp8) or 7 (mxfp4)") \
    R(name##_group, name##_dtype > NUM_WIDE_DTYPES || name##_group == 0, "0 without weights of few bits") \
    R(name##_group, (name##_dtype != DTYPE_INT8 + 1 && name##_dtype != DTYPE_INT4 + 1) || \
      name##_group == 32 || name##_group == 64 || name##_group == 128, "32, 64 or 128 with int8 and int4") \
    R(name##_group, name##_dtype != DTYPE_FP8 + 1 || name##_group == 128, "128 with fp8") \
    R(name##_group, name##_dtype != DTYPE_MXFP4 + 1 || name##_group == 32, "32 with mxfp4") \
    R(name##_zero_points, name##_zero_points == 0 || (name##_zero_points == 1 && \
      (name##_dtype == DTYPE_INT8 + 1 || name##_dtype == DTYPE_INT4 + 1)), "0, or 1 with int8 and int4")

/* What every model keeps to, in the header's fields. R(field, condition, words): the condition is true, else an error
 * reads field=got, expected words, with the value of each {name}. config.h asserts the list of what is baked in, Python
 * evaluates it for files and configs: && and || go from left to right, so that none divides by zero. nvcc refuses even
 * a division by zero that is not reached, as by a bare stack's num_kv_heads. */
#define MODEL_RULES(R) \
    R(num_experts, num_experts >= 1 && num_experts <= MAX_EXPERTS, "1 to {MAX_EXPERTS}") \
    R(k, k >= 1 && k <= MAX_K && k <= num_experts, "1 to {MAX_K}, and at most num_experts={num_experts}") \
    R(k, router_kind != ROUTER_SPARSEMIXER || k == 2, "2 with router_kind=sparsemixer") \
    R(num_groups, num_groups >= 1 && num_experts % num_groups == 0, "a divisor of num_experts={num_experts}") \
    R(topk_groups, topk_groups >= 1 && topk_groups <= num_groups, "1 to num_groups={num_groups}") \
    R(topk_groups, topk_groups * (num_experts / num_groups) >= k, "enough groups to hold k={k} experts") \
    R(hidden, hidden >= 1, "at least 1") \
    R(ffn, ffn >= 1, "at least 1") \
    R(vocab_size, (num_heads == 0) == (vocab_size == 0), \
      "0 for a bare stack of MoE layers (num_heads=0) and at least 1 otherwise") \
    R(num_kv_heads, num_heads > 0 || num_kv_heads == 0, "0 for num_heads=0") \
    R(head_dim, num_heads > 0 || head_dim == 0, "0 for num_heads=0") \
    R(num_kv_heads, num_heads == 0 || (num_kv_heads >= 1 && num_heads % (num_kv_heads + (num_kv_heads == 0)) == 0), \
      "a divisor of num_heads={num_heads}") \
    R(head_dim, num_heads == 0 || (head_dim >= 2 && head_dim <= MAX_HEAD_DIM && head_dim % 2 == 0), \
      "an even number from 2 to {MAX_HEAD_DIM}") \
    R(rotary_dim, rotary_dim % 2 == 0 && rotary_dim <= head_dim, "an even number up to head_dim={head_dim}") \
    R(rotary_dim, attention_kind != ATTENTION_LATENT || rotary_dim < head_dim, \
      "below head_dim={head_dim} with a latent") \
    R(rotary_dim, num_heads == 0 || rope_kind != ROPE_DYNAMIC || rotary_dim >= 4, "at least 4 with rope_kind=dynamic") \
    R(v_head_dim, attention_kind == ATTENTION_LATENT || v_head_dim == head_dim, "head_dim={head_dim}") \
    R(v_head_dim, attention_kind != ATTENTION_LATENT || (v_head_dim >= 1 && v_head_dim <= MAX_HEAD_DIM), \
      "1 to {MAX_HEAD_DIM}") \
    R(kv_lora_rank, (kv_lora_rank > 0) == (attention_kind == ATTENTION_LATENT), "at least 1 with a latent, else 0") \
    R(q_lora_rank, attention_kind == ATTENTION_LATENT || q_lora_rank == 0, "0 without a latent") \
    R(num_kv_heads, attention_kind != ATTENTION_LATENT || num_kv_heads == num_heads, \
      "num_heads={num_heads} with a latent") \
    R(num_heads, attention_kind != ATTENTION_MOA || num_heads == k * num_kv_heads, \
      "k * num_kv_heads, with k={k} and num_kv_heads={num_kv_heads}, with experts of attention") \
    R(weight_dtype, weight_dtype < NUM_WIDE_DTYPES, "0 (f32), 1 (f16) or 2 (bf16)") \
    FORM_RULES(R, expert) \
    FORM_RULES(R, dense) \
    FORM_RULES(R, embed) \
    R(compute_dtype, compute_dtype == 0 || compute_dtype == DTYPE_F16 + 1 || compute_dtype == DTYPE_BF16 + 1, \
      "0 (weight_dtype), 2 (f16) or 3 (bf16)") \
    R(compute_dtype, compute_dtype != 0 || (expert_dtype <= NUM_WIDE_DTYPES && dense_dtype <= NUM_WIDE_DTYPES && \
      embed_dtype <= NUM_WIDE_DTYPES), "2 (f16) or 3 (bf16) with weights of few bits") \
    R(gated, gated == 1 || (dense_ffn == 0 && shared_ffn == 0), "1 with dense_ffn or shared_ffn")

#endif
