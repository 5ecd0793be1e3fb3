/* Finds weights of few bits for wide ones: 64 rows become a panel, a group of columns at a time.
 *
 * tests/reference_search.py computes the same bits in NumPy: a row's sums run over its columns in order, and nothing is
 * contracted (-ffp-contract=off), so that they depend on neither the instruction set nor the threads. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "host.h"

/* A minimum is then one instruction; sums keep their order. */
#pragma GCC optimize("finite-math-only", "no-signed-zeros")

#define LANES 8 /* rows at a time */
#define NUM_CANDIDATES 16
#define NUM_TRIES 4 /* candidates at a time */
#define ROUNDING 12582912.0f /* 1.5 * 2^23: adding it leaves a small number's nearest integer, ties to even */
#define INLINE static inline __attribute__((always_inline))

typedef struct Search {
    const void *rows; /* [PANEL_ROWS][columns] of dtype `source` */
    int source;
    int64_t columns;
    Form form;
    float unit; /* the tensor's scale, a power of two */
    char *panel;
    void (*run)(const struct Search *search, long column_group);
} Search;

/* The rows of a group that are searched side by side. */
typedef struct Rows {
    float values[MAX_GROUP][LANES] __attribute__((aligned(32))); /* in INT8 and INT4 divided by the unit */
    uint8_t codes[MAX_GROUP][LANES];
    uint16_t halves[LANES]; /* the scales of INT8 and INT4 */
    float scales[LANES];    /* those of FP8 */
    int count;              /* columns */
} Rows;

#define EACH_LANE for (int l = 0; l < LANES; l++)

INLINE float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    return half & 0x8000 ? -value : value;
}

/* To nearest, ties to even; beyond 65504 infinite. */
INLINE uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = bits >> 16 & 0x8000;
    float size = fabsf(value);
    bits &= 0x7fffffff;
    const uint32_t small = (uint32_t)(((size < 0x1p-14f ? size : 0) * 0x1p24f + 0x1p23f) - 0x1p23f);
    const uint32_t normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    return sign | (uint16_t)(size >= 65520.0f ? 0x7c00 : size < 0x1p-14f ? small : normal);
}

/* To nearest, ties to even; beyond 448 as 448. */
INLINE uint8_t float_to_e4m3(float value) {
    uint32_t bits;
    float size = fabsf(value);
    size = size > 448.0f ? 448.0f : size;
    memcpy(&bits, &size, sizeof bits);
    uint8_t sign = signbit(value) ? 0x80 : 0;
    if (size < 0x1p-6f) return sign | (uint8_t)((size * 512.0f + 0x1p23f) - 0x1p23f);
    return sign | (uint8_t)(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

INLINE float wide_value(const void *rows, int source, int64_t i) {
    if (source == DTYPE_F32) return ((const float *)rows)[i];
    const uint16_t bits = ((const uint16_t *)rows)[i];
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return source == DTYPE_F16 ? half_to_float(bits) : value;
}

INLINE void load_rows(const Search *s, int source, int first_row, int64_t first, float factor, Rows *to) {
    EACH_LANE {
        const int64_t start = (first_row + l) * s->columns + first;
        for (int c = 0; c < to->count; c++) to->values[c][l] = wide_value(s->rows, source, start + c) * factor;
    }
}

INLINE float nearest(float value, float low, float high) {
    float q = value < low ? low : value;
    q = q > high ? high : q;
    return (q + ROUNDING) - ROUNDING;
}

/* Of each row the value farthest from zero. */
INLINE void find_far(const Rows *rows, float *far) {
    float most[LANES] = {0}, least[LANES] = {0};
    for (int c = 0; c < rows->count; c++)
        EACH_LANE {
            const float value = rows->values[c][l];
            most[l] = value > most[l] ? value : most[l];
            least[l] = value < least[l] ? value : least[l];
        }
    EACH_LANE far[l] = -least[l] >= most[l] ? least[l] : most[l];
}

/* Takes NUM_TRIES scales of each row, rounded to f16, where the sum of squared errors is below the least so far. */
INLINE void try_scales(Rows *rows, const float (*scales)[LANES], float low, float high, float *least) {
    float errors[NUM_TRIES][LANES] = {0}, rounded[NUM_TRIES][LANES], inverse[NUM_TRIES][LANES];
    uint16_t halves[NUM_TRIES][LANES];
    for (int t = 0; t < NUM_TRIES; t++)
        EACH_LANE {
            const uint16_t half = float_to_half(scales[t][l]);
            const int is_scale = (half & 0x7fff) != 0 && (half & 0x7fff) != 0x7c00;
            halves[t][l] = half;
            rounded[t][l] = is_scale ? half_to_float(half) : 0;
            inverse[t][l] = is_scale ? 1.0f / rounded[t][l] : 0;
        }
    for (int c = 0; c < rows->count; c++)
        for (int t = 0; t < NUM_TRIES; t++)
            EACH_LANE {
                const float value = rows->values[c][l] * inverse[t][l], error = value - nearest(value, low, high);
                errors[t][l] += error * error; /* in squares of the scale */
            }
    for (int t = 0; t < NUM_TRIES; t++)
        EACH_LANE {
            const float error = errors[t][l] * (rounded[t][l] * rounded[t][l]);
            const int is_better = rounded[t][l] != 0 && error < least[l];
            least[l] = is_better ? error : least[l];
            rows->halves[l] = is_better ? halves[t][l] : rows->halves[l];
        }
}

INLINE void find_inverse(const Rows *rows, float *inverse) {
    EACH_LANE inverse[l] = rows->halves[l] ? 1.0f / half_to_float(rows->halves[l]) : 0;
}

/* The scale that fits the codes of the best one so far. */
INLINE void refine(const Rows *rows, float low, float high, float (*scales)[LANES]) {
    float products[LANES] = {0}, squares[LANES] = {0}, inverse[LANES];
    find_inverse(rows, inverse);
    for (int c = 0; c < rows->count; c++)
        EACH_LANE {
            const float q = nearest(rows->values[c][l] * inverse[l], low, high);
            products[l] += rows->values[c][l] * q;
            squares[l] += q * q;
        }
    memset(scales, 0, NUM_TRIES * sizeof *scales);
    EACH_LANE scales[0][l] = squares[l] > 0 ? products[l] / squares[l] : 0;
}

/* Finds the f16 scales with the least sums of squared errors, and their codes: of candidates that put a row's value
 * farthest from zero at -first, -(first + step), ..., then of the one that fits the best one's codes. A scale may be
 * negative; it is 0 for zeros. */
INLINE void search_integers(Rows *rows, float high, float first, float step) {
    const float low = -high - 1;
    float far[LANES], least[LANES], scales[NUM_TRIES][LANES], inverse[LANES];
    find_far(rows, far);
    EACH_LANE {
        least[l] = FLT_MAX;
        rows->halves[l] = 0;
    }
    for (int i = 0; i < NUM_CANDIDATES; i += NUM_TRIES) {
        for (int t = 0; t < NUM_TRIES; t++) EACH_LANE scales[t][l] = far[l] / -(first + (i + t) * step);
        try_scales(rows, scales, low, high, least);
    }
    refine(rows, low, high, scales);
    try_scales(rows, scales, low, high, least);
    find_inverse(rows, inverse);
    for (int c = 0; c < rows->count; c++)
        EACH_LANE {
            const float q = nearest(rows->values[c][l] * inverse[l], low, high);
            rows->codes[c][l] = (uint8_t)((int)q + (int)high + 1);
        }
}

/* Finds FP8's scales, by which a row's value farthest from zero is 448, and its codes. */
INLINE void scale_floats(Rows *rows) {
    float far[LANES];
    find_far(rows, far);
    EACH_LANE rows->scales[l] = fabsf(far[l]) / 448.0f;
    for (int c = 0; c < rows->count; c++)
        EACH_LANE rows->codes[c][l] = rows->scales[l] ? float_to_e4m3(rows->values[c][l] / rows->scales[l]) : 0;
}

/* Searches in rows first_row + LANES of a group; count: its columns. */
INLINE void search_rows(const Search *s, int first_row, int64_t first, int count, char *table, uint8_t *units) {
    const int dtype = s->form.dtype, is_nibbles = dtype == DTYPE_INT4, unit = is_nibbles ? 8 : 4;
    const float factor = dtype == DTYPE_FP8 ? 1.0f : 1.0f / s->unit;
    Rows rows;
    rows.count = count;
    memset(rows.codes, dtype == DTYPE_INT8 ? 128 : is_nibbles ? 8 : 0, sizeof rows.codes);
    if (s->source == DTYPE_F32) load_rows(s, DTYPE_F32, first_row, first, factor, &rows);
    else if (s->source == DTYPE_F16) load_rows(s, DTYPE_F16, first_row, first, factor, &rows);
    else load_rows(s, DTYPE_BF16, first_row, first, factor, &rows);
    if (dtype == DTYPE_FP8) scale_floats(&rows);
    else if (dtype == DTYPE_INT8) search_integers(&rows, 127, 120.0f, 0.75f);
    else search_integers(&rows, 7, 6.75f, 0.1875f);
    if (dtype == DTYPE_FP8) memcpy(table + first_row * sizeof *rows.scales, rows.scales, sizeof rows.scales);
    else memcpy(table + first_row * sizeof *rows.halves, rows.halves, sizeof rows.halves);
    for (int c = 0; c < count; c += unit)
        EACH_LANE
            for (int j = 0; j < 4; j++)
                units[c / unit * UNIT_BYTES + (first_row + l) * 4 + j] =
                    is_nibbles ? rows.codes[c + j][l] | rows.codes[c + 4 + j][l] << 4 : rows.codes[c + j][l];
}

INLINE void search_group(const Search *s, long column_group) {
    const PanelSizes sizes = panel_sizes(s->form, s->columns);
    const int64_t first = column_group * s->form.group, left = s->columns - first;
    char *table = s->panel + group_offset(s->form, column_group);
    for (int row = 0; row < PANEL_ROWS; row += LANES)
        search_rows(s, row, first, left < s->form.group ? (int)left : s->form.group, table,
                    (uint8_t *)table + sizes.table_bytes);
}

static void search_portable(const Search *search, long column_group) { search_group(search, column_group); }

#ifdef __x86_64__
__attribute__((target("avx2"))) static void search_avx2(const Search *search, long column_group) {
    search_group(search, column_group);
}
#endif

static void search_item(const void *job, long column_group) {
    ((const Search *)job)->run(job, column_group);
}

int colibri_search(const void *rows, int source, int64_t columns, int dtype, int group, float unit, void *panel,
                   int num_threads) {
    Search search = {rows, source, columns, {dtype, group, 0}, unit, panel, search_portable};
    if (source >= NUM_WIDE_DTYPES || (dtype != DTYPE_INT8 && dtype != DTYPE_INT4 && dtype != DTYPE_FP8))
        return fail("colibri_search: source=%d, dtype=%d, expected wide weights, and int8, int4 or fp8", source, dtype);
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) search.run = search_avx2;
#endif
    parallel_for(num_threads, CEIL_DIV(columns, group), 200.0 * columns * PANEL_ROWS, search_item, &search);
    return 0;
}
