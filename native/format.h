/* The .bin file, version 2: header, tensor directory, codes, and the list of tensors a model has.
 *
 * This file is the only definition. C compiles it; Python reads its text (colibri/headers.py), which asks for
 * one struct field a line, fixed-width types, no padding, and one #define of a plain integer a line.
 * All integers are little-endian. README.md has the rules of the format in MUST sentences.
 */
#ifndef COLIBRI_FORMAT_H
#define COLIBRI_FORMAT_H

#include <stdint.h>

#define FORMAT_VERSION 2
#define DATA_ALIGNMENT 4096
#define PANEL_ROWS 64 /* rows of one panel; the header's interleave_rows */
#define GATE_GROUP 8  /* gated experts: 8 gate rows, 8 up rows, 8 gate rows, ... */
#define MAX_RANK 3

/* weight_dtype, BinTensor.dtype */
#define DTYPE_F32 0
#define DTYPE_F16 1
#define DTYPE_BF16 2

/* activation */
#define ACTIVATION_SILU 0
#define ACTIVATION_GELU 1 /* the exact one, with erf */
#define ACTIVATION_RELU 2

/* router_kind: how a token's logits become k experts and their weights */
#define ROUTER_SOFTMAX 0      /* softmax over all experts, then the k largest */
#define ROUTER_TOPK_SOFTMAX 1 /* the k largest logits, then softmax over them */
#define ROUTER_SIGMOID 2      /* sigmoid; chosen by score + router_bias, weighted by the score alone */

/* norm_kind */
#define NORM_NONE 0
#define NORM_RMS 1

/* rope_kind */
#define ROPE_NONE 0
#define ROPE_DEFAULT 1 /* pairs (i, i + head_dim/2), frequency rope_theta^(-2i/head_dim) */

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
    uint32_t weight_dtype;      /* of every matrix but the router, which is F32 like every vector */
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
    uint32_t reserved[30];      /* 0 */
} BinHeader;                    /* 256 bytes */

typedef struct BinTensor {
    char name[64];              /* "embed", "layers.3.experts_up"; zero-padded */
    uint32_t dtype;
    uint32_t rank;              /* 1: a plain vector; 2, 3: panels */
    uint32_t crc32;             /* CRC-32 of the data as stored, panel padding included */
    uint32_t reserved;          /* 0 */
    uint64_t shape[MAX_RANK];   /* [length], [rows, columns] or [num_experts, rows, columns]; the rest 0 */
    uint64_t offset;            /* from the start of the file; a multiple of DATA_ALIGNMENT */
    uint64_t bytes;             /* stored bytes, panel padding included */
} BinTensor;                    /* 120 bytes */

/* A matrix [rows, columns] is stored in panels of PANEL_ROWS rows: [row panel][expert][column][64 rows], the last
 * panel filled up with zero rows. A matrix that is not an expert's is the same with one expert.
 *
 * T(name, type, experts, rows, columns): a tensor with a zero dimension is not in the file; experts 0 means a plain
 * matrix, columns 0 a vector. The expressions are in the header's fields. weight_t is weight_dtype.
 * In a gated experts_up, gate and up rows alternate in groups of GATE_GROUP, and both are filled up with zero rows
 * to a multiple of it: stored rows are 2 * GATE_GROUP * ceil(ffn / GATE_GROUP), then whole panels; the shape in the
 * directory stays [num_experts, 2 * ffn, hidden]. */
#define MODEL_TENSORS(T) \
    T(embed,       weight_t, 0, vocab_size, hidden) \
    T(final_norm,  float,    0, hidden * (vocab_size > 0), 0) \
    T(lm_head,     weight_t, 0, vocab_size * (1 - tied_embeddings), hidden)

#define LAYER_TENSORS(T) \
    T(attention_norm, float,    0, hidden * (num_heads > 0), 0) \
    T(qkv,            weight_t, 0, (num_heads + 2 * num_kv_heads) * head_dim, hidden) \
    T(attention_out,  weight_t, 0, hidden * (num_heads > 0), num_heads * head_dim) \
    T(ffn_norm,       float,    0, hidden * (num_heads > 0), 0) \
    T(router,         float,    0, num_experts, hidden) \
    T(router_bias,    float,    0, num_experts * router_bias, 0) \
    T(experts_up,     weight_t, num_experts, ffn * (1 + gated), hidden) \
    T(experts_down,   weight_t, num_experts, hidden, ffn)

#endif
