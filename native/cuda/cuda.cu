/* The CUDA backend's table. */
#include <cmath>

#include "common.cuh"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static const char *name() {
    return "cuda sm_" TEXT(CUDA_ARCH) ", CUDA " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__);
}

/* What only the host can do so far. */
static int check(const Model *m) {
    const BinHeader &h = m->header;
    const bool plain_attention = ATTENTION_KIND == ATTENTION_GQA && QK_NORM == QK_NORM_NONE && !SINKS &&
                                 ROTARY_DIM == HEAD_DIM && !h.qkv_bias && !h.attention_out_bias && !h.window &&
                                 h.clip_qkv == 0 && (!NUM_HEADS || h.rope_attention_factor == 1) &&
                                 (!NUM_HEADS || std::fabs(h.attention_scale * std::sqrt((double)HEAD_DIM) - 1) < 1e-6);
    const bool plain_ffn = ROUTER_KIND != ROUTER_SPARSEMIXER && ACTIVATION != ACTIVATION_CLAMPED_SWIGLU &&
                           !h.router_logit_bias && !EXPERT_BIAS && !DENSE_FFN && !SHARED_FFN && !h.ffn_out_bias &&
                           h.renormalize_min == 0;
    const bool plain_rest = NORM_KIND != NORM_LAYER && !h.lm_head_bias && h.residual_multiplier == 1 &&
                            (!NUM_HEADS || (h.embedding_multiplier == 1 && h.logits_multiplier == 1 &&
                                            h.final_norm_eps == h.norm_eps));
    if (plain_attention && plain_ffn && plain_rest) return 0;
    return fail("backend: cuda does not compute this model's %s yet, expected the host; run it with --backend host",
                !plain_attention ? "attention" : !plain_ffn ? "experts" : "norms or multipliers");
}

extern "C" const Ops cuda_ops = {
    .name = name, .scratch_bytes = cuda_scratch_bytes, .check = check, .begin = cuda_begin,
    .embed = cuda_embed,
#if NUM_HEADS
    .norm = cuda_norm, .qkv = cuda_qkv, .queries = nullptr, .rope = cuda_rope,
    .attention = cuda_attention, .attention_out = cuda_attention_out,
#else
    .norm = nullptr, .qkv = nullptr, .queries = nullptr, .rope = nullptr, .attention = nullptr,
    .attention_out = nullptr,
#endif
    .router = cuda_router, .mlp = nullptr, .experts_up = cuda_experts_up, .experts_down = cuda_experts_down, .combine = cuda_combine,
#if NUM_HEADS
    .gather_norm = cuda_gather_norm, .lm_head = cuda_lm_head, .sample = cuda_sample,
#else
    .gather_norm = nullptr, .lm_head = nullptr, .sample = nullptr,
#endif
};
