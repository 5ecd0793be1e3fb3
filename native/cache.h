/* Defines the KV cache. No other file knows how long it is or where a position lies in it. */
#ifndef COLIBRI_CACHE_H
#define COLIBRI_CACHE_H

#include "model.h"

/* How long the KV cache is, from the header's fields, num_windowed, the number of layers with a window, and context,
 * the positions of a slot. A layer with a window keeps a ring of positions: the window of a step's first token and all
 * that the step brings. */
#define CACHE_BLOCK 64  /* positions of one kv head that lie together; readers go block by block */
#define CACHE_GROUP 128 /* positions; a ring is a multiple of it, and so whole blocks */
#define CACHE_VALUES(B) \
    B(whole_piece, (window > WINDOW_PIECE ? window : WINDOW_PIECE)) \
    B(piece, (whole_piece < MAX_STEP_TOKENS ? whole_piece : MAX_STEP_TOKENS)) \
    B(needed, (window + piece + CACHE_GROUP - 1) / CACHE_GROUP * CACHE_GROUP) \
    B(ring, (needed < context ? needed : context)) \
    B(is_limited, (num_windowed > 0) * (ring < context)) \
    B(max_piece, (is_limited ? piece : MAX_STEP_TOKENS)) /* tokens of one slot in a step */ \
    B(cache_positions, (num_layers - num_windowed) * context + num_windowed * ring) /* of a slot and kv head */

typedef struct CacheSizes {
    int64_t ring;
    int64_t max_piece;
    int64_t cache_positions;
} CacheSizes;

/* Of the first num_layers layers. */
static inline CacheSizes cache_sizes(const BinHeader *header, int64_t num_layers, int64_t context) {
    int64_t window = header->window, num_windowed = 0;
    for (int l = 0; l < num_layers; l++) num_windowed += layer_bit(header->window_layers, l);
#define VALUE(name, expression) int64_t name = (expression);
    CACHE_VALUES(VALUE)
#undef VALUE
    CacheSizes sizes = {ring, max_piece, cache_positions};
    return sizes;
}

/* A layer's part of either cache: [slot][kv head][positions]. */
typedef struct LayerCache {
    int64_t first_row;
    int32_t positions; /* that the layer keeps: the context's, or a ring of them */
    int32_t window;    /* positions that a token sees, its own included; 0: all up to its own */
} LayerCache;

static inline LayerCache layer_cache(const Model *m, int layer) {
    CacheSizes before = cache_sizes(&m->header, layer, m->context);
    int windowed = layer_bit(m->header.window_layers, layer);
    LayerCache cache = {m->num_slots * NUM_KV_HEADS * before.cache_positions,
                        windowed ? (int32_t)before.ring : m->context, windowed ? (int32_t)m->header.window : 0};
    return cache;
}

/* The row of a position of a slot and kv head in either cache: position p of them all at p % positions. */
static inline HOST_DEVICE int64_t cache_row(LayerCache cache, int slot, int kv_head, int position) {
    return cache.first_row + ((int64_t)slot * NUM_KV_HEADS + kv_head) * cache.positions + position % cache.positions;
}

/* Positions CACHE_BLOCK * block and on, of one slot and kv head, are one row after another from this one. */
static inline HOST_DEVICE int64_t cache_block(LayerCache cache, int slot, int kv_head, int block) {
    return cache_row(cache, slot, kv_head, block * CACHE_BLOCK);
}

/* The rows of `count` positions from `position` on, CACHE_BLOCK at most: parts of one block or two. */
typedef struct CacheSpan {
    int64_t blocks[2];
    int32_t first; /* row of blocks[0] */
} CacheSpan;

static inline HOST_DEVICE CacheSpan cache_span(LayerCache cache, int slot, int kv_head, int position, int count) {
    CacheSpan span = {{cache_block(cache, slot, kv_head, position / CACHE_BLOCK),
                       cache_block(cache, slot, kv_head, (position + count - 1) / CACHE_BLOCK)},
                      position % CACHE_BLOCK};
    return span;
}

static inline HOST_DEVICE int64_t span_row(const CacheSpan *span, int i) {
    int row = span->first + i;
    return row < CACHE_BLOCK ? span->blocks[0] + row : span->blocks[1] + row - CACHE_BLOCK;
}

#endif
