/* Lists the ops. OPS(O) is the only list of them: struct Ops, colibri_run_op, and the declarations and tables of both
 * backends come from it, and forward.c is written with it. Every op is
 *
 *     int op(Model *m, int num_rows, int layer);
 *
 * num_rows is the number of rows to launch for. On the host it equals batch->num_tokens (num_logits for the last three
 * ops). In a CUDA graph it is the graph's bucket, and kernels read the true number from the batch. An op outside of the
 * layers ignores layer. Each op returns 0, or -1 with the message set (error.h). Names are those of state buffers,
 * which have a row for each token, and of the layer's tensors. `input` is ffn_input(). */
#ifndef COLIBRI_OPS_H
#define COLIBRI_OPS_H

#include "cache.h"

/* O(name, has): has is 0 in a configuration that never calls the op; its place in the table is NULL then. */
#define OPS(O) \
    /* once a step, before the first op */ \
    O(begin, 1) \
    /* x[t] = embed[tokens[t]] * embedding_multiplier, or a bare stack's input[t] */ \
    O(embed, 1) \
    /* normed[t] = the norm of x[t], by norm_kind, times attention_norm plus attention_norm_bias (NULL: none) */ \
    O(attention_norm, NUM_HEADS > 0) \
    /* qkv[t] = qkv normed[t] + qkv_bias */ \
    O(qkv, NUM_HEADS > 0) \
    /* q[t] and kv[t], where qkv[t] is not all: LATENT from the latents in it, MOA by normed[t]'s experts */ \
    O(queries, NUM_HEADS > 0 && ATTENTION_KIND != ATTENTION_GQA) \
    /* norms, clips and rotates q and k, then stores k and v at (layer, slot, kv head, position) of the caches */ \
    O(rope, NUM_HEADS > 0) \
    /* attention[t] = softmax(attention_scale q k) v over the positions of the token's slot that it sees */ \
    O(attention, NUM_HEADS > 0) \
    /* x[t] += residual_multiplier * (attention_out attention[t] + bias); MOA: the chosen experts' weighted sum */ \
    O(attention_out, NUM_HEADS > 0) \
    /* normed[t] = the norm of x[t] by ffn_norm and ffn_norm_bias */ \
    O(ffn_norm, NUM_HEADS > 0) \
    /* router_logits of input, then all that routing yields: ids, weights, offsets, assignments, active experts, \
     * totals */ \
    O(router, 1) \
    /* mlp_out = mlp_down (activation(gate input) * up input), with a shared_gate times \
     * sigmoid(shared_gate . input) */ \
    O(mlp, MLP_FFN > 0) \
    /* expert_mid = activation(gate input) * up input, for each assignment */ \
    O(experts_up, 1) \
    /* expert_out = down expert_mid */ \
    O(experts_down, 1) \
    /* x[t] = (HAS_RESIDUAL ? x[t] : 0) + residual_multiplier * (sum over slots, in order, of expert_weights * \
     * expert_out, then mlp_out, then ffn_out_bias, as far as the layer has them) */ \
    O(combine, 1) \
    /* normed[i] = the final norm of x[logit_rows[i]] */ \
    O(gather_norm, NUM_HEADS > 0) \
    /* logits[i] = (lm_head normed[i] + bias) * logits_multiplier */ \
    O(lm_head, NUM_HEADS > 0) \
    /* sampled[i] from logits[i]: greedy takes the lowest index among equals */ \
    O(sample, NUM_HEADS > 0)

typedef int Op(Model *m, int num_rows, int layer);

typedef struct Ops {
    const char *(*name)(void);          /* "host avx2", "host portable", "cuda sm_90" */
    uint32_t cuda_version;              /* Config's */
    int64_t (*scratch_bytes)(void);
    /* bytes at `source` to the device's `target`, through chunks, two a thread, best page-locked; host: NULL */
    int (*upload)(void *target, const void *source, int64_t bytes, void *chunks, int64_t chunk_bytes, int num_threads,
                  void *stream);
#define OP(op, has) Op *op;
    OPS(OP)
#undef OP
} Ops;

#define OP(op, has) Op host_##op;
OPS(OP)
#undef OP

#ifdef __cplusplus
extern "C" {
#endif

extern const Ops host_ops;
/* That the process may have so many threads for them, each with its stack. */
int host_check_threads(int num_threads);
#if CUDA_ARCH
extern const Ops cuda_ops;
#endif

#ifdef __cplusplus
}
#endif

#endif
