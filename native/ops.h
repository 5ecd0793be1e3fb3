/* The ops. forward.c is written over this table; each backend fills it in (host_ops, cuda_ops).
 *
 * num_tokens is the number of rows to launch for: on the host it equals batch->num_tokens; in a CUDA graph it is the
 * graph's bucket, and kernels read the true number from batch->num_tokens. Each op returns 0, or -1 with the
 * message set (error.h). `y` rows are token rows of the named state buffers. */
#ifndef COLIBRI_OPS_H
#define COLIBRI_OPS_H

#include "model.h"

typedef struct Ops {
    const char *(*name)(void);          /* "host avx2", "host portable", "cuda sm_90" */
    int64_t (*scratch_bytes)(void);
    /* bytes at `source` to the device's `target`, through chunks, two a thread, which are best page-locked; host: NULL */
    int (*upload)(void *target, const void *source, int64_t bytes, void *chunks, int64_t chunk_bytes, int num_threads,
                  void *stream);
    int (*begin)(Model *m, int num_tokens); /* once a step, before the first op */
    /* x[t] = embed[tokens[t]] * embedding_multiplier, or a bare stack's input[t] */
    int (*embed)(Model *m, int num_tokens);
    /* out[t] = the norm of x[t] times weight plus bias (NULL: none); rows of HIDDEN */
    int (*norm)(Model *m, int num_tokens, float *out, const float *x, const float *weight, const float *bias);
    /* qkv[t] = qkv_weight normed[t] + bias */
    int (*qkv)(Model *m, int num_tokens, const Layer *layer);
    /* q[t] and kv[t], where qkv[t] is not all: LATENT from the latents in it, MOA by normed[t]'s experts */
    int (*queries)(Model *m, int num_tokens, int layer);
    /* norms, clips and rotates q and k, then stores k and v at (layer, slot, kv head, position) of the caches */
    int (*rope)(Model *m, int num_tokens, int layer);
    /* attention[t] = softmax(attention_scale q k) v over the positions of the token's slot that it sees */
    int (*attention)(Model *m, int num_tokens, int layer);
    /* x[t] += residual_multiplier * (attention_out attention[t] + bias); MOA: the chosen experts' weighted sum */
    int (*attention_out)(Model *m, int num_tokens, const Layer *layer);
    /* router_logits of `input` rows, then all that routing yields: ids, weights, offsets, assignments, active experts,
     * totals */
    int (*router)(Model *m, int num_tokens, int layer, const float *input);
    /* mlp_out = mlp_down (activation(gate input) * up input), with a shared_gate times sigmoid(shared_gate . input) */
    int (*mlp)(Model *m, int num_tokens, const Layer *layer, const float *input);
    /* expert_mid = activation(gate input) * up input, for each assignment */
    int (*experts_up)(Model *m, int num_tokens, const Layer *layer, const float *input);
    /* expert_out = down expert_mid */
    int (*experts_down)(Model *m, int num_tokens, const Layer *layer);
    /* x[t] = (residual ? x[t] : 0) + residual_multiplier * (sum over slots, in order, of expert_weights * expert_out,
     * then mlp_out, then ffn_out_bias, as far as the layer has them) */
    int (*combine)(Model *m, int num_tokens, const Layer *layer, int residual);
    /* normed[i] = the final norm of x[logit_rows[i]]; logits[i] = (lm_head normed[i] + bias) * logits_multiplier */
    int (*gather_norm)(Model *m, int num_logits);
    int (*lm_head)(Model *m, int num_logits);
    /* sampled[i] from logits[i]: greedy takes the lowest index among equals */
    int (*sample)(Model *m, int num_logits);
} Ops;

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
