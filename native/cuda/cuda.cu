/* The CUDA backend's table. */
#include "launch.cuh"
#include "scratch.cuh"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static const char *name() {
    return "cuda sm_" TEXT(CUDA_ARCH) ", CUDA " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__);
}

extern "C" const Ops cuda_ops = {
    .name = name, .scratch_bytes = cuda_scratch_bytes, .upload = cuda_upload, .begin = cuda_begin, .embed = cuda_embed,
#if NUM_HEADS
    .norm = cuda_norm, .qkv = cuda_qkv,
#if ATTENTION_KIND == ATTENTION_GQA
    .queries = nullptr,
#else
    .queries = cuda_queries,
#endif
    .rope = cuda_rope, .attention = cuda_attention, .attention_out = cuda_attention_out,
#else
    .norm = nullptr, .qkv = nullptr, .queries = nullptr, .rope = nullptr, .attention = nullptr,
    .attention_out = nullptr,
#endif
    .router = cuda_router,
#if MLP_FFN
    .mlp = cuda_mlp,
#else
    .mlp = nullptr,
#endif
    .experts_up = cuda_experts_up, .experts_down = cuda_experts_down, .combine = cuda_combine,
#if NUM_HEADS
    .gather_norm = cuda_gather_norm, .lm_head = cuda_lm_head, .sample = cuda_sample,
#else
    .gather_norm = nullptr, .lm_head = nullptr, .sample = nullptr,
#endif
};
