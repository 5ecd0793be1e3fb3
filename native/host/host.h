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

/* Whether a matrix of this model is of that dtype; whether any is of integers, which take quantised rows. */
#define USES(dtype) (EXPERT_FORMAT == (dtype) || DENSE_FORMAT == (dtype) || EMBED_FORMAT == (dtype))
#define USES_INTEGERS (USES(DTYPE_INT8) || USES(DTYPE_INT4) || USES(DTYPE_MXFP4))

/* What this compiler can compile products of integers for. */
#ifdef __x86_64__
#define HAS_AVX512_VNNI (__GNUC__ >= 8)
#define HAS_AVX_VNNI (__GNUC__ >= 11)
#define HAS_AMX (__GNUC__ >= 11)
#endif

typedef float PanelSums[PANEL_ROWS];

/* What the caches hold of a slot and kv head in one layer. */
typedef struct Timeline {
    const float *keys, *values; /* the caches: rows of HEAD_DIM and V_HEAD_DIM */
    LayerCache cache;
    int slot, kv_head;
} Timeline;

/* A row of a product's input where weights are integers: 8 bits a value, a scale for each group of columns. */
typedef struct QuantizedRow {
    int8_t *values;  /* of whole groups, the last filled up with zeros */
    float *scales;   /* of each group */
    int32_t *sums;   /* of a group's values */
} QuantizedRow;

static inline int64_t quantized_bytes(int columns, int group) {
    const int groups = CEIL_DIV(columns, group);
    return CEIL_DIV((int64_t)groups * (group + 8), 64) * 64;
}

static inline QuantizedRow quantized_row(const void *row, int columns, int group) {
    const int groups = CEIL_DIV(columns, group);
    int8_t *values = (int8_t *)row;
    float *scales = (float *)(values + groups * group);
    return (QuantizedRow){values, scales, (int32_t *)(scales + groups)};
}

/* sums[t][row] = sum over columns of panel[column][row] * in[t][column], t < num_tokens <= TOKEN_CHUNK; rows from
 * num_rows on are not asked for; next is a panel that the thread is likely to read next. Of weights that are integers,
 * in[t] is a QuantizedRow's values, and the sums lack the tensor's scale. */
typedef void ProductKernel(Form form, const void *panel, int columns, int num_rows, int num_tokens,
                           const void *const *in, PanelSums *sums, const void *next);

typedef struct Kernels {
    ProductKernel *product[NUM_DTYPES]; /* NULL where the model has no such weights, or they are integers */
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

typedef struct IntegerKernels {
    ProductKernel *product[NUM_DTYPES];
    void (*quantize)(const float *x, int columns, int group, QuantizedRow row);
} IntegerKernels;

extern const Kernels portable_kernels, avx2_kernels;
extern const IntegerKernels portable_integers, avx2_integers, avxvnni_integers, vnni_integers, amx_integers;

/* What this machine's instruction set, or the one that COLIBRI_ISA names, runs. */
typedef struct Isa {
    const char *name, *path; /* "avx2"; what colibri_path() says, "host avx2" */
    const Kernels *kernels;
    const IntegerKernels *integers;
    int (*is_here)(void);
} Isa;

/* NULL with an error if COLIBRI_ISA names none of this machine's. */
const Isa *host_isa(void);
static inline const Kernels *host_kernels(void) { return host_isa()->kernels; }

/* Calls run(job, item) for each item, on up to num_threads threads. `cost` is the whole job's in multiply-adds:
 * small jobs stay on the calling thread. Items must not depend on one another. */
void parallel_for(int num_threads, long items, double cost, void (*run)(const void *job, long item), const void *job);
/* Between the two, run() only reads, and of what the job points to weights and inputs alone: if the item takes too
 * long, another thread does it, and the job may be over. Then was_taken() is 1, and run() returns at once. */
void may_be_taken(void);
int was_taken(void);
double seconds(void); /* of a clock that only goes forward */

/* A Product's panels: the matrix of that name of struct Layer or Weights. */
#define MATRIX(owner, name) .panels = (owner)->name, .tensor_scale = (float)(owner)->name##_scale

/* A product over panels: rows of `input` times the matrices of the experts they are assigned to. */
typedef struct Product {
    const void *panels;         /* a matrix as panels.h says */
    Form form;                  /* of the panels */
    const float *input;         /* (*, columns) */
    float *output;              /* (*, outputs) */
    float tensor_scale;         /* of INT8 and INT4 */
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

static inline const float *product_input(const Product *p, int64_t row) {
    return p->input + row * (p->input_stride ? p->input_stride : p->columns);
}
static inline int takes_integers(Form form) { return form.dtype >= NUM_WIDE_DTYPES && form.dtype != DTYPE_FP8; }

/* The first num_rows rows of a product's input, quantised, one each quantized_bytes(); until the next call. */
const char *host_quantize(const Model *m, const Product *product, int num_rows);
int64_t host_quantized_bytes(void); /* of the scratch memory, after rope_table */
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
