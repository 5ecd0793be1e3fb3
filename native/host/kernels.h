/* The kernels, written once over GCC's vectors. kernels_avx2.c and kernels_portable.c include this text after setting
 * what formats.h asks for.
 *
 * Vectors run over the rows of a panel, so each output is one running sum over columns 0, 1, 2, ... in fp32. Blocking
 * columns or tiling tokens keeps that sum in place and its order as it is: an output's bits depend neither on
 * the tokens beside it nor on the thread. */
#include <math.h>

#include "formats.h"

#define COLUMN_BLOCK 64 /* columns of a panel converted to fp32 at once: 16 KiB, for the L1 cache; 32 to 256 measured */
#define PREFETCH_BYTES 8192 /* measured best of 1024 to 32768, for a panel of 16-bit weights */
#define TILE_TOKENS 6    /* 2 vectors of rows x 6 tokens: 12 sums, 2 weights and an input in 16 registers */

/* sums[t][first_row + ...] += weights x inputs over `columns` columns: `vectors` vectors of rows by `tokens` tokens,
 * both constants where this is inlined, so that the sums live in registers; is_few: of FP8, which are rounded alike on
 * every machine. With `next`, asks for the weights of some
 * columns ahead, at the end for those at next: the processor's own prefetcher starts anew at each panel. */
INLINE void tile(const void *panel, int format, int is_few, int columns, int first_row, int vectors, int tokens,
                 const float *const *in, int first_column, PanelSums *sums, const char *next) {
    const int64_t column_bytes = element_offset(format, 1, 0);
    vec sum[8][TILE_TOKENS];
    const float *x[TILE_TOKENS];
    for (int t = 0; t < tokens; t++) x[t] = in[t] + first_column;
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) sum[v][t] = load(&sums[t][first_row + v * LANES]);
    for (int c = 0; c < columns; c++) {
        vec weight[8];
        if (next) {
            int ahead = c + PREFETCH_BYTES / (int)column_bytes;
            const char *at = ahead < columns ? (const char *)panel + ahead * column_bytes
                                             : next + (ahead - columns) * column_bytes;
            for (int byte = 0; byte < element_offset(format, 0, vectors * LANES); byte += 64)
                __builtin_prefetch(at + element_offset(format, 0, first_row) + byte);
        }
        for (int v = 0; v < vectors; v++)
            weight[v] = load_weight(panel, element_offset(format, c, first_row + v * LANES), format);
        for (int t = 0; t < tokens; t++) {
            vec input = splat(x[t][c]);
            for (int v = 0; v < vectors; v++)
                sum[v][t] = is_few ? fused(weight[v], input, sum[v][t]) : fma_(weight[v], input, sum[v][t]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) store(&sums[t][first_row + v * LANES], sum[v][t]);
}

/* All rows of a panel for a tile of 1 to 6 tokens; at least 8 sums in flight hide the latency of the addition. */
INLINE void tile_rows(const void *panel, int format, int is_few, int columns, int num_rows, int tokens,
                      const float *const *in, int first_column, PanelSums *sums, const char *next) {
#define TILES(vectors, count)                                                                  \
    for (int row = 0; row < num_rows; row += vectors * LANES)                                  \
        tile(panel, format, is_few, columns, row, vectors, count, in, first_column, sums, next);
    const int is_part = num_rows <= PART_ROWS; /* perhaps a panel's last rows: wider tiles would read beyond it */
    switch (tokens) {
        case 1: if (is_part) { TILES(2, 1) } else { TILES(8, 1) } break;
        case 2: if (is_part) { TILES(2, 2) } else { TILES(4, 2) } break;
        case 3: if (is_part) { TILES(2, 3) } else { TILES(4, 3) } break;
        case 4: TILES(2, 4) break;
        case 5: TILES(2, 5) break;
        case 6: TILES(2, 6) break;
    }
#undef TILES
}

INLINE void product(const void *panel, int format, int columns, int num_rows, int num_tokens, const float *const *in,
                    PanelSums *sums, const void *next) {
    memset(sums, 0, sizeof *sums * num_tokens);
    if (num_tokens <= 3) {
        tile_rows(panel, format, 0, columns, num_rows, num_tokens, in, 0, sums, next);
        return;
    }
    float converted[COLUMN_BLOCK * PANEL_ROWS] __attribute__((aligned(64)));
    int is_converted = format != DTYPE_F32;
    int num_tiles = CEIL_DIV(num_tokens, TILE_TOKENS);
    for (int c = 0; c < columns; c += COLUMN_BLOCK) {
        int block = columns - c < COLUMN_BLOCK ? columns - c : COLUMN_BLOCK;
        const char *block_start = (const char *)panel + element_offset(format, c, 0);
        const void *weights = is_converted ? (const void *)converted : block_start;
        for (int i = 0; is_converted && i < block * PANEL_ROWS; i += LANES)
            store(&converted[i], load_weight(block_start, element_offset(format, 0, i), format));
        /* the weights that come after this block arrive in the L2 cache while it is worked on */
        const int64_t block_bytes = element_offset(format, COLUMN_BLOCK, 0), lines = block_bytes / 64;
        const char *following = c + COLUMN_BLOCK < columns ? block_start + block_bytes : next;
        for (int i = 0; i < num_tiles; i++) {
            int from = num_tokens * i / num_tiles, to = num_tokens * (i + 1) / num_tiles;
            for (int64_t line = lines * i / num_tiles; line < lines * (i + 1) / num_tiles; line++)
                __builtin_prefetch(following + line * 64, 0, 2);
            tile_rows(weights, DTYPE_F32, 0, block, num_rows, to - from, in + from, c, sums + from, NULL);
        }
    }
}

#define PRODUCT(name, dtype)                                                                                          \
    static void name(Form form, const void *panel, int columns, int num_rows, int num_tokens, const void *const *in,  \
                     PanelSums *sums, const void *next) {                                                             \
        (void)form;                                                                                                   \
        product(panel, dtype, columns, num_rows, num_tokens, (const float *const *)in, sums, next);                   \
    }
PRODUCT(product_f32, DTYPE_F32)
PRODUCT(product_f16, DTYPE_F16)
PRODUCT(product_bf16, DTYPE_BF16)
#undef PRODUCT

/* Units of e4m3 to floats [column][PANEL_ROWS]; asks for as many bytes at next. */
INLINE void unpack_fp8(float *weights, const uint8_t *units, int num_units, const char *next) {
    for (int u = 0; u < num_units; u++)
        for (int row = 0; row < PANEL_ROWS; row += LANES) {
            const ivec codes = load_ints(units + u * UNIT_BYTES + row * 4);
            if (row * 4 % 64 == 0) __builtin_prefetch(next + u * UNIT_BYTES + row * 4, 0, 2);
            for (int c = 0; c < 4; c++)
                store(weights + (4 * u + c) * PANEL_ROWS + row, from_e4m3(codes >> 8 * c & 255));
        }
}

/* The same of FP8: a group's sum, in the order of its columns, then times its scale. */
static void product_fp8(Form form, const void *panel, int columns, int num_rows, int num_tokens, const void *const *in,
                        PanelSums *sums, const void *next) {
    float weights[COLUMN_BLOCK * PANEL_ROWS] __attribute__((aligned(64)));
    PanelSums part[TOKEN_CHUNK] __attribute__((aligned(64)));
    const int num_tiles = CEIL_DIV(num_tokens, TILE_TOKENS);
    const int64_t table_bytes = panel_sizes(form, columns).table_bytes;
    (void)num_rows;
    memset(sums, 0, sizeof *sums * num_tokens);
    for (int first = 0; first < columns; first += form.group) {
        const uint8_t *table = (const uint8_t *)panel + group_offset(form, first / form.group);
        const int last = first + form.group < columns ? first + form.group : columns;
        memset(part, 0, sizeof *part * num_tokens);
        for (int c = first; c < last; c += COLUMN_BLOCK) {
            const int block = last - c < COLUMN_BLOCK ? last - c : COLUMN_BLOCK;
            const uint8_t *units = table + table_bytes + (c - first) / 4 * UNIT_BYTES;
            unpack_fp8(weights, units, CEIL_DIV(block, 4), (const char *)next + (units - (const uint8_t *)panel));
            for (int i = 0; i < num_tiles; i++) {
                const int from = num_tokens * i / num_tiles, to = num_tokens * (i + 1) / num_tiles;
                tile_rows(weights, DTYPE_F32, 1, block, PANEL_ROWS, to - from, (const float *const *)in + from, c,
                          part + from, NULL);
            }
        }
        for (int t = 0; t < num_tokens; t++)
            for (int row = 0; row < PANEL_ROWS; row += LANES)
                store(sums[t] + row, fused(load(part[t] + row), load_scales(table, row, DTYPE_FP8),
                                           load(sums[t] + row)));
    }
}

/* exp(high + low), within about 2 units in the last place; 0 below -104, inf above 88.73. `low` is small against
 * `high` and carries what does not fit into it. */
INLINE vec exponential(vec high, vec low) {
    high = choose(high < -104.0f, splat(-104.0f), high);
    high = choose(high > 89.0f, splat(89.0f), high);
    vec n = fma_(high + low, splat(1.44269504f), splat(0x1.8p23f)) - 0x1.8p23f; /* rounds to an integer */
    vec r = fma_(n, splat(-0.693359375f), high) + fma_(n, splat(2.12194440e-4f), low);
    vec p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f));
    p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f));
    p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f));
    p = fma_(p, r * r, r) + 1.0f;
    /* 2^n in two factors, so that subnormal results and n = 128 come out right; NaN has passed through p */
    ivec whole = __builtin_convertvector(choose(n == n, n, splat(0.0f)), ivec), half = whole >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
}

/* x/2 erfc(-x/sqrt(2)): erfc(z) by the Chebyshev fit t exp(-z^2 + P(t)), t = 1/(1 + z/2), whose relative error stays
 * under 1.2e-7 as far as exp reaches. -z^2 = -x^2/2 is split into an exact part and a small one, because its own
 * rounding would count z^2 times as much in the result. */
INLINE vec gelu(vec x) {
    vec size = (vec)((ivec)x & 0x7fffffff);
    size = choose(size > 16.0f, splat(16.0f), size); /* where erfc has long been 0 */
    vec size_high = (vec)((ivec)size & 0x7ffff000);
    vec t = 1.0f / fma_(size, splat(0.35355339f), splat(1.0f));
    vec p = splat(0.17087277f);
    p = fma_(p, t, splat(-0.82215223f));
    p = fma_(p, t, splat(1.48851587f));
    p = fma_(p, t, splat(-1.13520398f));
    p = fma_(p, t, splat(0.27886807f));
    p = fma_(p, t, splat(-0.18628806f));
    p = fma_(p, t, splat(0.09678418f));
    p = fma_(p, t, splat(0.37409196f));
    p = fma_(p, t, splat(1.00002368f));
    p = fma_(p, t, splat(-1.26551223f));
    vec low = fma_(0.5f * (size_high - size), size_high + size, p);
    vec tail = t * exponential(-0.5f * size_high * size_high, low); /* erfc(|z|) */
    return 0.5f * x * choose(x > 0.0f, 2.0f - tail, tail);
}

INLINE vec activation(vec x) {
    if (ACTIVATION == ACTIVATION_GELU) return gelu(x);
    if (ACTIVATION == ACTIVATION_RELU) return (vec)(~(x < 0.0f) & (ivec)x); /* NaN stays NaN */
    return x / (1.0f + exponential(-x, splat(0.0f)));
}

/* The clamped SwiGLU's product of a gate and an up value. */
INLINE vec clamped(vec gate, vec up, const BinHeader *h) {
    vec limit = splat(h->swiglu_limit);
    gate = choose(gate > limit, limit, gate);
    up = choose(up > limit, limit, choose(up < -limit, -limit, up));
    return gate / (1.0f + exponential(-h->swiglu_alpha * gate, splat(0.0f))) * (up + 1.0f);
}

static void activate(float *sums, const BinHeader *header) {
    for (int i = 0; i < PANEL_ROWS; i += LANES) {
        if (!GATED) {
            store(sums + i, activation(load(sums + i)));
        } else if (i % (2 * GATE_GROUP) < GATE_GROUP) {
            int out = i / (2 * GATE_GROUP) * GATE_GROUP + i % GATE_GROUP; /* gate_row_of(out) is i */
            vec gate = load(sums + i), up = load(sums + i + GATE_GROUP);
            int is_clamped = ACTIVATION == ACTIVATION_CLAMPED_SWIGLU;
            store(sums + out, is_clamped ? clamped(gate, up, header) : activation(gate) * up);
        }
    }
}

INLINE float add_lanes(vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

INLINE float dot(const float *a, const float *b, int n) {
    vec sum[4] = {0};
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int v = 0; v < 4; v++) sum[v] = fma_(load(a + i + v * LANES), load(b + i + v * LANES), sum[v]);
    for (; i + LANES <= n; i += LANES) sum[0] = fma_(load(a + i), load(b + i), sum[0]);
    float total = add_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < n; i++) total = fma_one(a[i], b[i], total);
    return total;
}

static void rms_norm(float *out, const float *x, const float *weight, float eps, int length) {
    float scale = 1.0f / sqrtf(dot(x, x, length) / length + eps);
    for (int i = 0; i < length; i++) out[i] = x[i] * scale * weight[i];
}

/* In two passes: the variance of a row whose mean is large against it would drown in one. */
static void layer_norm(float *out, const float *x, const float *weight, const float *bias, float eps, int length) {
    double sum = 0;
    for (int i = 0; i < length; i++) sum += x[i];
    float mean = (float)(sum / length);
    for (int i = 0; i < length; i++) out[i] = x[i] - mean;
    float scale = 1.0f / sqrtf(dot(out, out, length) / length + eps);
    for (int i = 0; i < length; i++) out[i] = out[i] * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

#define VECTORS(length) ((length) ? CEIL_DIV(length, LANES) : 1)

/* Vector i of a head of so many dimensions; zeros beyond its end. */
INLINE vec load_head(const float *head, int i, int length) {
    const int left = length - i * LANES;
    if (left >= LANES) return load(head + i * LANES);
    float part[LANES] = {0};
    for (int lane = 0; lane < left; lane++) part[lane] = head[i * LANES + lane];
    return load(part);
}

/* Adds neighbouring lanes of a, then of b. Over LANES vectors, LANES - 1 times, this yields the sum of each. */
INLINE vec add_pairs(vec a, vec b) {
#if LANES == 8
    const ivec even = {0, 2, 4, 6, 8, 10, 12, 14};
#else
    const ivec even = {0, 2, 4, 6};
#endif
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

/* q times LANES keys. */
INLINE vec scores(const vec *q, const float *const *keys) {
    vec sum[LANES];
    for (int i = 0; i < LANES; i++) {
        sum[i] = q[0] * load_head(keys[i], 0, HEAD_DIM);
        for (int d = 1; d < VECTORS(HEAD_DIM); d++) sum[i] = fma_(q[d], load_head(keys[i], d, HEAD_DIM), sum[i]);
    }
    for (int count = LANES; count > 1; count /= 2)
        for (int i = 0; i < count / 2; i++) sum[i] = add_pairs(sum[2 * i], sum[2 * i + 1]);
    return sum[0];
}

/* Softmax as it goes, CACHE_BLOCK positions after another, so that any context fits into a fixed buffer. */
static void attend(float *out, const float *q, const Timeline *seen, int first, int num_positions, float scale,
                   const float *sink) {
    float score[CACHE_BLOCK] __attribute__((aligned(32)));
    float largest = sink ? *sink : -INFINITY, total = sink ? 1.0f : 0.0f;
    vec query[VECTORS(HEAD_DIM)], sum[VECTORS(V_HEAD_DIM)] = {0};
    for (int d = 0; d < VECTORS(HEAD_DIM); d++) query[d] = load_head(q, d, HEAD_DIM);
    for (int done = 0; done < num_positions; done += CACHE_BLOCK) {
        int count = num_positions - done < CACHE_BLOCK ? num_positions - done : CACHE_BLOCK;
        const CacheSpan span = cache_span(seen->cache, seen->slot, seen->kv_head, first + done, count);
        float before = largest;
        for (int i = 0; i < count; i += LANES) {
            const float *key[LANES];
            for (int j = 0; j < LANES; j++) /* the last one again instead of keys that are not there */
                key[j] = seen->keys + span_row(&span, i + j < count ? i + j : count - 1) * HEAD_DIM;
            store(score + i, scores(query, key) * scale);
        }
        for (int i = 0; i < count; i++) largest = score[i] > largest ? score[i] : largest;
        for (int i = count; i < CACHE_BLOCK; i++) score[i] = -INFINITY; /* whose exponential is 0 */
        vec mass = {0};
        for (int i = 0; i < CACHE_BLOCK; i += LANES) {
            vec part = exponential(load(score + i) - largest, splat(0.0f));
            store(score + i, part);
            mass += part;
        }
        float shrink = expf(before - largest);
        total = total * shrink + add_lanes(mass);
        for (int d = 0; d < VECTORS(V_HEAD_DIM); d++) sum[d] *= shrink;
        for (int i = 0; i < count; i++) {
            const float *value = seen->values + span_row(&span, i) * V_HEAD_DIM;
            for (int d = 0; d < VECTORS(V_HEAD_DIM); d++)
                sum[d] = fma_(splat(score[i]), load_head(value, d, V_HEAD_DIM), sum[d]);
        }
    }
    for (int d = 0; d < VECTORS(V_HEAD_DIM); d++) sum[d] /= total;
    memcpy(out, sum, sizeof(float) * V_HEAD_DIM);
}

static uint32_t read_sum(const uint32_t *data, int64_t words) {
    uvec sum[8] = {0};
    int64_t i = 0;
    for (; i + 8 * LANES <= words; i += 8 * LANES)
        for (int v = 0; v < 8; v++) sum[v] += (uvec)load((const float *)data + i + v * LANES);
    uint32_t total = 0;
    for (int v = 0; v < 8; v++)
        for (int lane = 0; lane < LANES; lane++) total += sum[v][lane];
    for (; i < words; i++) total += data[i];
    return total;
}

static int64_t fma_loop(int64_t iterations) {
    enum { CHAINS = 12 };
    volatile float unknown = 0.5f; /* so that the compiler neither folds the loop nor joins equal chains */
    vec sum[CHAINS], a = splat(unknown), b = splat(unknown);
    for (int v = 0; v < CHAINS; v++) sum[v] = splat(unknown);
    for (int64_t i = 0; i < iterations; i++)
        for (int v = 0; v < CHAINS; v++) sum[v] = fma_(sum[v], a, b);
    for (int v = 1; v < CHAINS; v++) sum[0] += sum[v];
    unknown = sum[0][0];
    return iterations * CHAINS * LANES;
}

#define KERNELS(name) \
    const Kernels name = {{[DTYPE_F32] = product_f32, [DTYPE_F16] = USES(DTYPE_F16) ? product_f16 : NULL, \
                           [DTYPE_BF16] = USES(DTYPE_BF16) ? product_bf16 : NULL, \
                           [DTYPE_FP8] = USES(DTYPE_FP8) ? product_fp8 : NULL}, \
                          activate, rms_norm, layer_norm, attend, read_sum, fma_loop}
