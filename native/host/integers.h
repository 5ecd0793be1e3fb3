/* Multiplies quantised rows by weights of few bits that are integers: INT8, INT4 and MXFP4, whose doubled values are.
 * Written once and compiled for each instruction set, as formats.h is, with PAIRS besides: 1 where products are of two
 * columns and 16 bits (vpmaddubsw, vpmaddwd), 0 where four columns are one step (vpdpbusd, or plain C).
 *
 * A group's products are added up exactly, as integers, in whatever order; then comes one fused multiply-add a row and
 * group, groups in order. Bits depend on nothing else. */
#include <math.h>

#include "formats.h"

#define VECTORS (PANEL_ROWS / LANES)
#define PART 4           /* vectors whose sums stay in registers while a group is read */
#define FEW_TOKENS 3     /* up to which weights are used as they come; else a group is unpacked first */
#define TILE_VECTORS (LANES == 16 ? 4 : 2)
#define TILE_TOKENS 6    /* TILE_VECTORS x 6 sums, the weights and an input in 16 registers, or in 32 */
#define AHEAD_BYTES 32768 /* that weights are asked for before their turn, at most a panel; 4096 to 98304 measured */
#define NEAR_BYTES 1024   /* 512 to 2048 measured */
#define MXFP4_ZERO 12

typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef int16_t pairs __attribute__((vector_size(4 * LANES)));

/* A group of a panel's columns. */
typedef struct Group {
    const uint8_t *units; /* its weights */
    int num_units;
    ptrdiff_t ahead;      /* from each byte of the group to the one that is asked for meanwhile */
    int num_bytes;        /* of the group */
    float scales[PANEL_ROWS] __attribute__((aligned(64)));
    int32_t zeros[PANEL_ROWS] __attribute__((aligned(64))); /* to be taken off each weight */
} Group;

/* A group's part of a quantised row. */
typedef struct Input {
    const int8_t *values;
    float scale;
    int32_t sum; /* of the values */
} Input;

INLINE ivec repeat(const void *four_bytes) {
    int32_t word;
    memcpy(&word, four_bytes, sizeof word);
    return word - (ivec){0};
}

/* Asks for what comes AHEAD_BYTES after PART vectors of weights, for the L2 cache, and NEAR_BYTES after, for L1. */
INLINE void ask_ahead(const Group *group, const uint8_t *weights) {
    for (int byte = 0; byte < PART * 4 * LANES; byte += 64) {
        __builtin_prefetch(weights + group->ahead + byte, 0, 2);
        __builtin_prefetch(weights + NEAR_BYTES + byte);
    }
}

/* Asks for a share of what comes ahead of a group, for the L2 cache: many tokens leave time for that. */
INLINE void ask_share(const Group *group, int share, int num_shares) {
    const int lines = CEIL_DIV(group->num_bytes, 64);
    const uint8_t *end = group->units + group->num_units * UNIT_BYTES + group->ahead;
    for (int line = lines * share / num_shares; line < lines * (share + 1) / num_shares; line++)
        __builtin_prefetch(end - 64 * (lines - line), 0, 2);
}

/* The doubled values of e2m1 plus MXFP4_ZERO, so that none is negative. */
static const uint8_t mxfp4_codes[16] __attribute__((aligned(16), unused)) = {
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Unsigned weights, from nibbles. */
INLINE bytes looked_up(bytes nibbles, int dtype) {
    if (dtype == DTYPE_INT4) return nibbles;
#if LANES == 16
    __m128i codes = _mm_load_si128((const __m128i *)mxfp4_codes);
    return (bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(codes), (__m512i)nibbles);
#elif AVX2
    __m128i codes = _mm_load_si128((const __m128i *)mxfp4_codes);
    return (bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), (__m256i)nibbles);
#else
    return __builtin_shuffle(*(const bytes *)mxfp4_codes, nibbles);
#endif
}
INLINE bytes low(bytes both, int dtype) { return looked_up(both & 15, dtype); }
INLINE bytes high(bytes both, int dtype) { return looked_up((bytes)((uvec)both >> 4) & 15, dtype); }

#if PAIRS
/* Adds products of a group's part: PART vectors of rows from `vector` on, times one token's values. vpmaddubsw would
 * saturate at INT8's 255 * 127 * 2. The weight less 128 without its sign, times the value with it, is at most
 * 128 * 127 * 2. Of nibbles, sums of several pairs fit into 16 bits. */
INLINE void dot_part(ivec *sum, const Group *group, int vector, int dtype, const int8_t *x) {
    const uint8_t *units = group->units + vector * 4 * LANES;
    const int num_units = group->num_units;
    const __m256i ones = _mm256_set1_epi16(1);
    if (dtype == DTYPE_INT8) {
        for (int u = 0; u < num_units; u++) {
            ask_ahead(group, units + u * UNIT_BYTES);
            for (int v = 0; v < PART; v++) {
                __m256i weights = (__m256i)(load_ints(units + u * UNIT_BYTES + v * 4 * LANES) ^ (int)0x80808080);
                __m256i values = _mm256_sign_epi8((__m256i)repeat(x + 4 * u), weights);
                sum[v] += (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), values), ones);
            }
        }
        return;
    }
    const int most = dtype == DTYPE_INT4 ? 4 : 2; /* units: 8 * 15 * 127 * 2, or 4 * 24 * 127 * 2 */
    for (int first = 0; first < num_units; first += most) {
        pairs part[PART] = {0};
        const int last = first + most < num_units ? first + most : num_units;
        for (int u = first; u < last; u++) {
            ask_ahead(group, units + u * UNIT_BYTES);
            for (int v = 0; v < PART; v++) {
                bytes both = (bytes)load_ints(units + u * UNIT_BYTES + v * 4 * LANES);
                part[v] += (pairs)_mm256_maddubs_epi16((__m256i)low(both, dtype), (__m256i)repeat(x + 8 * u));
                part[v] += (pairs)_mm256_maddubs_epi16((__m256i)high(both, dtype), (__m256i)repeat(x + 8 * u + 4));
            }
        }
        for (int v = 0; v < PART; v++) sum[v] += (ivec)_mm256_madd_epi16((__m256i)part[v], ones);
    }
}

#define STEPS 2 /* of four columns: columns 0 and 2, then 1 and 3 */
typedef int32_t Words[TOKEN_CHUNK][STEPS * MAX_GROUP / 4];
INLINE int dot_zero(int dtype) { return dtype == DTYPE_INT8 ? 128 : 0; } /* what dot_part has taken off */

/* sum + the products of each lane's two weights and values of 16 bits. */
INLINE ivec step(ivec sum, ivec weights, ivec values) {
    return sum + (ivec)_mm256_madd_epi16((__m256i)weights, (__m256i)values);
}

/* Weights of four columns less their zero points, as two steps. */
INLINE void put_unit(char *steps, int unit, int num_units, int row, bytes weights, ivec zeros) {
    const ivec even = 0x00ff00ff - (ivec){0};
    pairs off = (pairs)(zeros | zeros << 16);
    pairs first = (pairs)((ivec)weights & even) - off, second = (pairs)((ivec)weights >> 8 & even) - off;
    memcpy(steps + unit * UNIT_BYTES + row * 4, &first, sizeof first);
    memcpy(steps + (num_units + unit) * UNIT_BYTES + row * 4, &second, sizeof second);
}

/* Values of a group's units of four columns, in the order of the steps. */
INLINE const void *values_of_steps(int32_t *words, int num_units, const int8_t *x) {
    for (int u = 0; u < num_units; u += LANES) { /* a row's values end with whole groups */
        pairs first = (pairs)load_ints(x + 4 * u) << 8 >> 8;
        memcpy(words + u, &first, sizeof first);
    }
    for (int u = 0; u < num_units; u += LANES) {
        pairs second = (pairs)load_ints(x + 4 * u) >> 8;
        memcpy(words + num_units + u, &second, sizeof second);
    }
    return words;
}
#else
/* sum + the products of each lane's four unsigned weights and four values. */
INLINE ivec step(ivec sum, ivec weights, ivec values) {
#if LANES == 16
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)values);
#elif AVX2
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)values);
#else
    const ivec even = 0x00ff00ff - (ivec){0}; /* products fit into 16 bits: 255 * 127 */
    pairs first = (pairs)(weights & even) * ((pairs)values << 8 >> 8);
    pairs second = (pairs)(weights >> 8 & even) * ((pairs)values >> 8);
    return sum + ((ivec)first << 16 >> 16) + ((ivec)first >> 16) + ((ivec)second << 16 >> 16) + ((ivec)second >> 16);
#endif
}

/* Adds products of a group's part: PART vectors of rows from `vector` on, times one token's values. High nibbles of
 * INT4 stay where they are, 16 times as large. */
INLINE void dot_part(ivec *sum, const Group *group, int vector, int dtype, const int8_t *x) {
    const uint8_t *units = group->units + vector * 4 * LANES;
    ivec sixteenfold[PART] = {0};
    for (int u = 0; u < group->num_units; u++) {
        ask_ahead(group, units + u * UNIT_BYTES);
        for (int v = 0; v < PART; v++) {
            bytes weights = (bytes)load_ints(units + u * UNIT_BYTES + v * 4 * LANES);
            if (dtype == DTYPE_INT8) {
                sum[v] = step(sum[v], (ivec)weights, repeat(x + 4 * u));
            } else {
                sum[v] = step(sum[v], (ivec)low(weights, dtype), repeat(x + 8 * u));
                if (dtype == DTYPE_INT4)
                    sixteenfold[v] = step(sixteenfold[v], (ivec)(weights & 0xf0), repeat(x + 8 * u + 4));
                else
                    sum[v] = step(sum[v], (ivec)high(weights, dtype), repeat(x + 8 * u + 4));
            }
        }
    }
    for (int v = 0; v < PART; v++) sum[v] += sixteenfold[v] >> 4;
}

#define STEPS 1 /* of four columns */
typedef int32_t Words[1][1];
INLINE int dot_zero(int dtype) { (void)dtype; return 0; }
INLINE void put_unit(char *steps, int unit, int num_units, int row, bytes weights, ivec zeros) {
    (void)num_units, (void)zeros;
    memcpy(steps + unit * UNIT_BYTES + row * 4, &weights, sizeof weights);
}
INLINE const void *values_of_steps(int32_t *words, int num_units, const int8_t *x) {
    (void)words, (void)num_units;
    return x;
}
#endif

/* Reads what is beside the weights of the group at `table`, which has so many columns. */
INLINE void read_group(Group *group, Form form, const uint8_t *table, int table_bytes, int columns) {
    const int unit = form.dtype == DTYPE_INT8 ? 4 : 8;
    const int zero = form.dtype == DTYPE_INT8 ? 128 : form.dtype == DTYPE_INT4 ? 8 : MXFP4_ZERO;
    group->units = table + table_bytes;
    group->num_units = CEIL_DIV(columns, unit);
    for (int row = 0; row < PANEL_ROWS; row += LANES) {
        store(group->scales + row, load_scales(table, row, form.dtype));
        ivec zeros = form.zero_points ? load_bytes(group->units - PANEL_ROWS + row) : zero - (ivec){0};
        memcpy(group->zeros + row, &zeros, sizeof zeros);
    }
}

/* sums[row ...] += a group's exact sums, as numbers. */
INLINE void add_group(float *sums, const Group *group, int row, ivec sum, float scale) {
    vec both = load(group->scales + row) * splat(scale);
    store(sums + row, fused(__builtin_convertvector(sum, vec), both, load(sums + row)));
}

/* A group times few tokens. */
INLINE void few_tokens(const Group *group, int dtype, int num_tokens, const Input *in, PanelSums *sums) {
    const int table_bytes = group->num_bytes - group->num_units * UNIT_BYTES;
    for (int byte = -table_bytes; byte < 0; byte += 64) __builtin_prefetch(group->units + group->ahead + byte, 0, 2);
    for (int t = 0; t < num_tokens; t++)
        for (int vector = 0; vector < VECTORS; vector += PART) {
            ivec sum[PART] = {0};
            dot_part(sum, group, vector, dtype, in[t].values);
            for (int v = 0; v < PART; v++) {
                const int row = (vector + v) * LANES;
                ivec off = (load_ints(group->zeros + row) - dot_zero(dtype)) * in[t].sum;
                add_group(sums[t], group, row, sum[v] - off, in[t].scale);
            }
        }
}

/* Steps of a group times some tokens: TILE_VECTORS vectors of rows by `tokens`, a constant where this is inlined. */
INLINE void tile(const Group *group, const char *weights, int num_steps, int tokens, const void *const *values,
                 const Input *in, PanelSums *sums) {
    for (int vector = 0; vector < VECTORS; vector += TILE_VECTORS) {
        ivec sum[TILE_VECTORS][TILE_TOKENS];
        for (int v = 0; v < TILE_VECTORS; v++)
            for (int t = 0; t < tokens; t++)
                sum[v][t] = PAIRS ? (ivec){0} : load_ints(group->zeros + (vector + v) * LANES) * -in[t].sum;
        for (int s = 0; s < num_steps; s++) {
            ivec weight[TILE_VECTORS];
            for (int v = 0; v < TILE_VECTORS; v++)
                weight[v] = load_ints(weights + s * UNIT_BYTES + (vector + v) * 4 * LANES);
            for (int t = 0; t < tokens; t++) {
                ivec value = repeat((const char *)values[t] + 4 * s);
                for (int v = 0; v < TILE_VECTORS; v++) sum[v][t] = step(sum[v][t], weight[v], value);
            }
        }
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < TILE_VECTORS; v++)
                add_group(sums[t], group, (vector + v) * LANES, sum[v][t], in[t].scale);
    }
}

/* Unpacks a group's weights, or names them where they are fit for steps as they are. */
INLINE const char *unpack(char *steps, const Group *group, int dtype) {
    if (!PAIRS && dtype == DTYPE_INT8) return (const char *)group->units;
    const int halves = dtype == DTYPE_INT8 ? 1 : 2, num_units = halves * group->num_units;
    for (int u = 0; u < group->num_units; u++)
        for (int row = 0; row < PANEL_ROWS; row += LANES) {
            bytes weights = (bytes)load_ints(group->units + u * UNIT_BYTES + row * 4);
            ivec zeros = load_ints(group->zeros + row);
            if (dtype == DTYPE_INT8) {
                put_unit(steps, u, num_units, row, weights, zeros);
            } else {
                put_unit(steps, 2 * u, num_units, row, low(weights, dtype), zeros);
                put_unit(steps, 2 * u + 1, num_units, row, high(weights, dtype), zeros);
            }
        }
    return steps;
}

/* Steps of a group times tokens, more than FEW_TOKENS, and so in tiles of 3 to TILE_TOKENS. */
static __attribute__((noinline)) void tiles(const Group *group, const char *weights, int num_steps, int num_tokens,
                                            const void *const *values, const Input *in, PanelSums *sums) {
    const int num_tiles = CEIL_DIV(num_tokens, TILE_TOKENS);
    for (int i = 0; i < num_tiles; i++) {
        const int from = num_tokens * i / num_tiles, to = num_tokens * (i + 1) / num_tiles;
        ask_share(group, i, num_tiles);
#define TILE(count) \
        case count: tile(group, weights, num_steps, count, values + from, in + from, sums + from); break;
        switch (to - from) { TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
    }
}

/* A group times many tokens. */
INLINE void many_tokens(const Group *group, Form form, int num_tokens, const Input *in, PanelSums *sums) {
    const int dtype = form.dtype;
    char steps[STEPS * MAX_GROUP * PANEL_ROWS] __attribute__((aligned(64)));
    Words words;
    const void *values[TOKEN_CHUNK];
    const int num_units = (dtype == DTYPE_INT8 ? 1 : 2) * group->num_units; /* of four columns */
    const char *weights = unpack(steps, group, dtype);
    for (int t = 0; t < num_tokens; t++)
        values[t] = values_of_steps(words[STEPS == 1 ? 0 : t], num_units, in[t].values);
    tiles(group, weights, STEPS * num_units, num_tokens, values, in, sums);
}

typedef void ManyTokens(const Group *group, Form form, int num_tokens, const Input *in, PanelSums *sums);
INLINE void no_tiles(Form form) { (void)form; }
INLINE void no_end(void) {}

/* The product of kernels.h's table, for a dtype that is constant where this is inlined. */
INLINE void integer_product(Form form, int dtype, const void *panel, int columns, int num_tokens,
                            const void *const *rows, PanelSums *sums, const void *next, ManyTokens *many,
                            void (*begin)(Form form), void (*end)(void)) {
    const int num_groups = CEIL_DIV(columns, form.group), padded = num_groups * form.group;
    const int table_bytes = (int)panel_sizes(form, columns).table_bytes, group_bytes = (int)group_offset(form, 1);
    const int wanted = CEIL_DIV(AHEAD_BYTES, group_bytes), groups_ahead = wanted < num_groups ? wanted : num_groups;
    const uint8_t *table = panel;
    Group group;
    Input in[TOKEN_CHUNK];
    form.dtype = dtype;
    memset(sums, 0, sizeof *sums * num_tokens);
    if (num_tokens > FEW_TOKENS) begin(form);
    for (int g = 0; g < num_groups; g++, table += group_bytes) {
        const int first = g * form.group, left = columns - first;
        read_group(&group, form, table, table_bytes, left < form.group ? left : form.group);
        group.num_bytes = table_bytes + group.num_units * UNIT_BYTES;
        group.ahead = groups_ahead * group_bytes;
        if (g + groups_ahead >= num_groups)
            group.ahead += (const uint8_t *)next - (const uint8_t *)panel - num_groups * group_bytes;
        for (int t = 0; t < num_tokens; t++) {
            const char *row = rows[t]; /* a QuantizedRow */
            in[t].values = (const int8_t *)row + first;
            in[t].scale = ((const float *)(row + padded))[g];
            in[t].sum = ((const int32_t *)(row + padded))[num_groups + g];
        }
        if (num_tokens <= FEW_TOKENS) few_tokens(&group, dtype, num_tokens, in, sums);
        else many(&group, form, num_tokens, in, sums);
    }
    if (num_tokens > FEW_TOKENS) end();
}

typedef int8_t octets __attribute__((vector_size(LANES)));

/* xq = x / (absmax / 127), rounded to nearest even, of each group of columns. A group with NaN or infinity has the
 * scale NaN; one so small that its scale is 0 is 0. */
static void quantize(const float *x, int columns, int group, QuantizedRow row) {
    for (int g = 0; g < CEIL_DIV(columns, group); g++) {
        const int first = g * group, count = columns - first < group ? columns - first : group;
        float values[MAX_GROUP] __attribute__((aligned(64)));
        memcpy(values, x + first, sizeof *values * count);
        memset(values + count, 0, sizeof *values * (group - count));
        ivec most = {0}, total = {0}; /* of numbers without a sign, bits have the same order */
        for (int i = 0; i < group; i += LANES) {
            ivec bits = load_ints(values + i) & INT32_MAX, is_more = bits > most;
            most = (bits & is_more) | (most & ~is_more);
        }
        union { int32_t i; float f; } absmax = {0};
        for (int lane = 0; lane < LANES; lane++) absmax.i = most[lane] > absmax.i ? most[lane] : absmax.i;
        const int is_finite = absmax.i < 0x7f800000;
        const float scale = is_finite ? absmax.f / 127.0f : NAN;
        for (int i = 0; i < group; i += LANES) {
            vec value = scale > 0 ? load(values + i) / scale : splat(0); /* of subnormal scales it can be above 127 */
            value = choose(value > 127.0f, splat(127.0f), choose(value < -127.0f, splat(-127.0f), value));
            const ivec rounded = __builtin_convertvector((value + 0x1.8p23f) - 0x1.8p23f, ivec);
            const octets narrow = __builtin_convertvector(rounded, octets);
            memcpy(row.values + first + i, &narrow, sizeof narrow);
            total += rounded;
        }
        row.scales[g] = scale;
        row.sums[g] = 0;
        for (int lane = 0; lane < LANES; lane++) row.sums[g] += total[lane];
    }
}

#define INTEGER_PRODUCT(name, dtype, many, begin, end)                                                                \
    static void name(Form form, const void *panel, int columns, int num_rows, int num_tokens, const void *const *in,  \
                     PanelSums *sums, const void *next) {                                                             \
        (void)num_rows;                                                                                               \
        integer_product(form, dtype, panel, columns, num_tokens, in, sums, next, many, begin, end);                   \
    }

#define INTEGER_KERNELS(name, many, begin, end) \
    INTEGER_PRODUCT(product_int8, DTYPE_INT8, many, begin, end) \
    INTEGER_PRODUCT(product_int4, DTYPE_INT4, many, begin, end) \
    INTEGER_PRODUCT(product_mxfp4, DTYPE_MXFP4, many, begin, end) \
    const IntegerKernels name = {{[DTYPE_INT8] = USES(DTYPE_INT8) ? product_int8 : NULL, \
                                  [DTYPE_INT4] = USES(DTYPE_INT4) ? product_int4 : NULL, \
                                  [DTYPE_MXFP4] = USES(DTYPE_MXFP4) ? product_mxfp4 : NULL}, quantize}
