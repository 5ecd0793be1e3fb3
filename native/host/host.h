/* What the host ops share. The kernels are the code that depends on the instruction set: kernels.h, compiled once
 * for each; everything else is plain C around them. */
#ifndef HOST_H
#define HOST_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"
#include "error.h"
#include "ops.h"

#define TOKEN_CHUNK 96 /* rows of one work item of a product: the sums of a panel and a chunk stay in the L1/L2 cache */
#define PART_ROWS 16   /* rows of a router's panel in one work item: it has few rows, but several threads */
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

typedef float PanelSums[PANEL_ROWS];

/* What the caches hold of a slot and kv head in one layer. */
typedef struct Timeline {
    const float *keys, *values; /* the caches: rows of HEAD_DIM and V_HEAD_DIM */
    LayerCache cache;
    int slot, kv_head;
} Timeline;

typedef struct Kernels {
    const char *path; /* what colibri_path() says */
    /* By format: sums[t][row] = sum over columns of panel[column][row] * in[t][column], t < num_tokens <= TOKEN_CHUNK;
     * rows from num_rows on are not asked for; next is a panel that the thread is likely to read next */
    void (*product[NUM_DTYPES])(const void *panel, int columns, int num_rows, int num_tokens, const float *const *in,
                                PanelSums *sums, const void *next);
    /* experts_up's activation, in place: PANEL_ROWS values, or with gated experts half as many of the pairs */
    void (*activate)(float *sums, const BinHeader *header);
    /* out = x * rsqrt(mean(x^2) + eps) * weight; (length) each; may be in place */
    void (*rms_norm)(float *out, const float *x, const float *weight, float eps, int length);
    /* the same of x - mean(x), plus bias unless it is NULL */
    void (*layer_norm)(float *out, const float *x, const float *weight, const float *bias, float eps, int length);
    /* out (V_HEAD_DIM) = softmax(scale * keys q) values of num_positions positions from `first` on; q (HEAD_DIM).
     * sink: a logit that joins the softmax and takes no value, or NULL */
    void (*attend)(float *out, const float *q, const Timeline *seen, int first, int num_positions, float scale,
                   const float *sink);
    /* the sum of `words` 32-bit words, modulo 2^32 */
    uint32_t (*read_sum)(const uint32_t *data, int64_t words);
    /* runs so many times through independent fused multiply-adds; the number of multiply-adds done */
    int64_t (*fma_loop)(int64_t iterations);
} Kernels;

extern const Kernels portable_kernels;
#ifdef __x86_64__
extern const Kernels avx2_kernels;
#endif

/* The kernels for this machine, or those that COLIBRI_ISA names; NULL with an error if it names none. */
const Kernels *host_kernels(void);

/* Calls run(job, item) for each item, on up to num_threads threads. `cost` is the whole job's in multiply-adds:
 * small jobs stay on the calling thread. Items must not depend on one another. */
void parallel_for(int num_threads, long items, double cost, void (*run)(const void *job, long item), const void *job);

/* A product over panels: rows of `input` times the matrices of the experts they are assigned to. */
typedef struct Product {
    const void *panels;         /* a matrix as panels.h says */
    Form form;                  /* of the panels */
    const float *input;         /* (*, columns) */
    float *output;              /* (*, outputs) */
    int columns;
    int input_stride;           /* of input's rows; 0: columns */
    int outputs;                /* values of one output row */
    int item_rows;              /* of a panel that a work item takes: all, or PART_ROWS */
    int item_outputs;           /* values of an output row that come of them */
    int num_stored;             /* experts in panels */
    const int32_t *place;       /* (experts), of each in panels and bias; NULL: expert e at place e */
    int num_active;
    const int32_t *active;      /* (num_active) experts */
    const int32_t *offsets;     /* expert e has rows offsets[e] .. offsets[e + 1] */
    const float *bias;          /* (num_stored, outputs), gated (num_stored, gate then up); NULL: none */
    float scale;                /* STORE, ADD: of the sum and its bias */
    const int32_t *assignments; /* row r's output row, and its input row after division by input_divisor; NULL: r */
    int input_divisor;
    enum { STORE, ADD, ACTIVATE } epilogue;
} Product;

void host_product(const Model *m, const Product *product);
/* output[i] = matrix input[i] of a matrix (outputs, columns) that is no expert's, for i < num_rows; item_rows 0: all
 * of a panel */
void host_dense(const Model *m, int num_rows, Product product);
/* The product's fields that follow from the last routing, for matrices that have all experts. */
Product host_grouped(const Model *m);
/* Ids, weights and assignments from `router` (NUM_EXPERTS, HIDDEN) and, where not NULL, its two biases. */
int host_route(Model *m, int num_tokens, int layer, const float *input, const float *router, const float *logit_bias,
               const float *correction);
/* x[t] = (residual ? x[t] : 0) + residual_multiplier * (sum over slots [+ mlp_out] [+ bias]) */
void host_add_up(const Model *m, int num_tokens, int residual, int num_slots, const float *mlp_out, const float *bias);

/* (MAX_STEP_TOKENS, cosine and sine, ROTARY_DIM/2) */
static inline float *rope_table(const Model *m) { return m->state.scratch; }
/* Token t's query heads (NUM_HEADS, HEAD_DIM). */
static inline float *q_row(const Model *m, int64_t t) {
    return OWN_Q ? m->state.q + t * NUM_HEADS * HEAD_DIM : m->state.qkv + t * QKV_ROWS;
}

void host_fill_rope_table(const Model *m, int num_tokens);

/* A float's bits, mapped so that unsigned order is the order of numbers, with -0 equal to +0. */
static inline uint32_t orderable(float value) {
    union { float f; uint32_t u; } bits = {value + 0.0f}; /* -0 + 0 is +0 */
    return bits.u & 0x80000000u ? ~bits.u : bits.u | 0x80000000u;
}

#endif
