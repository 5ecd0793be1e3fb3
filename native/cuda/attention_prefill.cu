/* Causal attention of many tokens over the KV cache: a block takes all spans of a token and tile, one after another. */
#include "attention.cuh"

#if NUM_HEADS

namespace {

/* Grid: (tokens, TILES). WINDOW: the layer has one. */
template <bool WINDOW>
__global__ void __launch_bounds__(THREADS) attention_prefill_kernel(const __grid_constant__ Arguments a) {
    __shared__ Shared s;
    pdl_wait();
    pdl_trigger();
    int token = blockIdx.x, tile = blockIdx.y;
    int num_tokens = a.batch->num_tokens, position = a.batch->positions[token], slot = a.batch->slots[token];
    if (token >= num_tokens) return;
    Reach reach(position, WINDOW ? a.cache.window : 0);
    Seen seen = begin_tile<WINDOW>(s, a, token, tile, slot, reach);
    Partial all[PER_THREAD];
    clear(all);
#pragma unroll 1
    for (int span = 0; span < reach.num_spans; span++) {
        Partial one[PER_THREAD] = {};
        attend_span<WINDOW>(one, s, seen, reach, span, a.scale);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) merge(all[i], one[i]);
    }
    write_outputs(a, all, token, tile);
}

} // namespace

int cuda_attention_prefill(Model *m, int num_tokens, int layer) {
    Arguments arguments = attention_arguments(m, layer);
    auto kernel = arguments.cache.window ? attention_prefill_kernel<true> : attention_prefill_kernel<false>;
    return launch(m, "attention", kernel, dim3(num_tokens, TILES), THREADS, 0, arguments);
}

#endif
