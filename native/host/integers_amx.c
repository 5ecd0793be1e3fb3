/* Compiles the products of integers for x86-64 with AMX: where there are many tokens, 16 rows of a panel by 16 tokens
 * are a tile of sums, and a step takes 64 columns, or 32. Fewer tokens are AVX-512 VNNI's. */
#include "host.h"

#if HAS_AMX
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,amx-tile,amx-int8")
#define LANES 16
#define AVX2 1
#define PAIRS 0
#include "integers.h"

#define BLOCK 16       /* tokens of a tile; also its rows of a panel */
#define STEP_COLUMNS 64 /* at most */
#define VALUES 4     /* tile registers; 0 to 3 are the sums of the panel's rows */
#define WEIGHTS 5

/* What ldtilecfg reads. */
typedef struct TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* The columns of a step. A short last group has as many as the others: beyond its end, values are zero. */
INLINE int columns_of_step(Form form) { return form.group < STEP_COLUMNS ? form.group : STEP_COLUMNS; }

static void begin_tiles(Form form) {
    TileShapes shapes __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i <= WEIGHTS; i++) {
        shapes.rows[i] = BLOCK;
        shapes.row_bytes[i] = 4 * BLOCK;
    }
    shapes.row_bytes[VALUES] = columns_of_step(form);
    shapes.rows[WEIGHTS] = columns_of_step(form) / 4;
    _tile_loadconfig(&shapes);
}

static void end_tiles(void) { _tile_release(); }

/* Whether a group's weights less their zero points are numbers of 8 bits with a sign. */
INLINE int has_signed(const Group *group, Form form) {
    ivec too_large = {0};
    for (int row = 0; form.zero_points && row < PANEL_ROWS; row += LANES)
        too_large |= load_ints(group->zeros + row) > 128;
    return form.zero_points ? form.dtype != DTYPE_INT8 && _mm512_test_epi32_mask((__m512i)too_large,
                                                                                 (__m512i)too_large) == 0 : 1;
}

/* Weights of a group in units of four columns, less `off` times their zero points. */
INLINE void unpack_units(char *units, const Group *group, int dtype, int off) {
    for (int u = 0; u < group->num_units; u++)
        for (int row = 0; row < PANEL_ROWS; row += LANES) {
            const bytes weights = (bytes)load_ints(group->units + u * UNIT_BYTES + row * 4);
            const bytes zeros = (bytes)(load_ints(group->zeros + row) * (off * 0x01010101));
            char *to = units + (dtype == DTYPE_INT8 ? u : 2 * u) * UNIT_BYTES + row * 4;
            const bytes first = (dtype == DTYPE_INT8 ? weights : low(weights, dtype)) - zeros;
            const bytes second = high(weights, dtype) - zeros;
            memcpy(to, &first, sizeof first);
            if (dtype != DTYPE_INT8) memcpy(to + UNIT_BYTES, &second, sizeof second);
        }
}

/* sums[token][row] of a block, from weights in units of four columns. */
INLINE void multiply_block(int32_t (*sums)[PANEL_ROWS], const char *weights, const int8_t (*values)[MAX_GROUP],
                           Form form) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < form.group; c += columns_of_step(form)) {
        const char *units = weights + c / 4 * UNIT_BYTES;
        _tile_loadd(VALUES, values[0] + c, MAX_GROUP);
#define MULTIPLY(part)                                                                         \
        _tile_loadd(WEIGHTS, units + part * 4 * BLOCK, UNIT_BYTES);                            \
        if (form.dtype == DTYPE_INT8 && form.zero_points) _tile_dpbsud(part, VALUES, WEIGHTS); \
        else _tile_dpbssd(part, VALUES, WEIGHTS);
        MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3)
#undef MULTIPLY
    }
#define STORE(part) _tile_stored(part, (char *)sums + part * 4 * BLOCK, sizeof *sums);
    STORE(0) STORE(1) STORE(2) STORE(3)
#undef STORE
}

INLINE void add_block(PanelSums *sums, int32_t (*block)[PANEL_ROWS], const Group *group, const Input *in, int count,
                      int is_off) {
    for (int row = 0; row < PANEL_ROWS; row += LANES)
        for (int t = 0; t < count; t++) {
            ivec sum = load_ints(block[t] + row);
            if (!is_off) sum -= load_ints(group->zeros + row) * in[t].sum;
            add_group(sums[t], group, row, sum, in[t].scale);
        }
}

/* Copies a block's values. Here, and of sums, a tile that is read at once would wait for what was just stored. */
INLINE void copy_values(int8_t (*values)[MAX_GROUP], const Input *in, int first, int num_tokens, Form form) {
    const int count = num_tokens - first < BLOCK ? num_tokens - first : BLOCK;
    for (int t = 0; t < count; t++)
        for (int c = 0; c < form.group; c += 32) memcpy(values[t] + c, in[first + t].values + c, 32);
}

/* A group times many tokens. While a block is multiplied, the next one's values are copied, and the sums of the one
 * before it are added up. */
INLINE void tiles_of_tokens(const Group *group, Form form, int num_tokens, const Input *in, PanelSums *sums) {
    char units[MAX_GROUP * PANEL_ROWS] __attribute__((aligned(64)));
    int8_t values[2][BLOCK][MAX_GROUP] __attribute__((aligned(64)));
    int32_t blocks[2][BLOCK][PANEL_ROWS] __attribute__((aligned(64)));
    const int is_off = has_signed(group, form), num_blocks = CEIL_DIV(num_tokens, BLOCK);
    copy_values(values[0], in, 0, num_tokens, form);
    unpack_units(units, group, form.dtype, is_off);
    for (int b = 0; b <= num_blocks; b++) {
        const int before = (b - 1) * BLOCK, left = num_tokens - before;
        copy_values(values[(b + 1) % 2], in, (b + 1) * BLOCK, num_tokens, form);
        if (b < num_blocks) {
            ask_share(group, b, num_blocks);
            multiply_block(blocks[b % 2], units, values[b % 2], form);
        }
        if (b > 0)
            add_block(sums + before, blocks[(b - 1) % 2], group, in + before, left < BLOCK ? left : BLOCK, is_off);
    }
}

INTEGER_KERNELS(amx_integers, tiles_of_tokens, begin_tiles, end_tiles);
#endif
