/* The CUDA backend's table. */
#include "common.cuh"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static const char *name() {
    return "cuda sm_" TEXT(CUDA_ARCH) ", CUDA " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__);
}

/* What only the host can do so far. */
static int check(const Model *m) {
    const BinHeader &h = m->header;
    const bool plain_ffn = ROUTER_KIND != ROUTER_SPARSEMIXER && ACTIVATION != ACTIVATION_CLAMPED_SWIGLU &&
                           !h.router_logit_bias && !EXPERT_BIAS && !DENSE_FFN && !SHARED_FFN && !h.ffn_out_bias &&
                           h.renormalize_min == 0 && h.residual_multiplier == 1;
    if (plain_ffn && ATTENTION_KIND != ATTENTION_MOA) return 0;
    return fail("backend: cuda does not compute this model's experts yet, expected the host; run it with --backend host");
}

#if ATTENTION_KIND == ATTENTION_LATENT
#define QUERIES cuda_queries
#else
#define QUERIES nullptr
#endif

extern "C" const Ops cuda_ops = {
    .name = name, .scratch_bytes = cuda_scratch_bytes, .check = check, .begin = cuda_begin,
#if NUM_HEADS
    .embed = cuda_embed, .norm = cuda_norm, .qkv = cuda_qkv, .queries = QUERIES, .rope = cuda_rope,
    .attention = cuda_attention,
#if ATTENTION_KIND == ATTENTION_MOA
    .attention_out = nullptr,
#else
    .attention_out = cuda_attention_out,
#endif
#else
    .embed = nullptr, .norm = nullptr, .qkv = nullptr, .queries = nullptr, .rope = nullptr, .attention = nullptr,
    .attention_out = nullptr,
#endif
    .router = cuda_router, .mlp = nullptr, .experts_up = cuda_experts_up, .experts_down = cuda_experts_down, .combine = cuda_combine,
#if NUM_HEADS
    .gather_norm = cuda_gather_norm, .lm_head = cuda_lm_head, .sample = cuda_sample,
#else
    .gather_norm = nullptr, .lm_head = nullptr, .sample = nullptr,
#endif
};
