/* Compiles the products of integers for x86-64 with AMX: where there are many tokens, 16 rows of a panel by 16 tokens
 * are a tile of sums, and a step takes 64 columns, or 32. Fewer tokens, and a short last group, are AVX-512 VNNI's. */
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

static void set_shapes(int columns) {
    TileShapes shapes __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i <= WEIGHTS; i++) {
        shapes.rows[i] = BLOCK;
        shapes.row_bytes[i] = 4 * BLOCK;
    }
    shapes.row_bytes[VALUES] = columns;
    shapes.rows[WEIGHTS] = columns / 4;
    _tile_loadconfig(&shapes);
}

/* sums[token][row] of a block, from weights in units of four columns and values [token][MAX_GROUP]. */
static void multiply_block(int32_t (*sums)[PANEL_ROWS], const char *weights, const int8_t *values, int columns,
                           int columns_of_step) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < columns; c += columns_of_step) {
        const char *units = weights + c / 4 * UNIT_BYTES;
        _tile_loadd(VALUES, values + c, MAX_GROUP);
#define MULTIPLY(part)                                                \
        _tile_loadd(WEIGHTS, units + part * 4 * BLOCK, UNIT_BYTES);   \
        _tile_dpbsud(part, VALUES, WEIGHTS);
        MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3)
#undef MULTIPLY
    }
#define STORE(part) _tile_stored(part, (char *)sums + part * 4 * BLOCK, sizeof *sums);
    STORE(0) STORE(1) STORE(2) STORE(3)
#undef STORE
}

/* A group times many tokens. */
INLINE void tiles_of_tokens(const Group *group, int dtype, int num_tokens, const Input *in, PanelSums *sums) {
    const int columns = (dtype == DTYPE_INT8 ? 4 : 8) * group->num_units;
    const int columns_of_step = columns % STEP_COLUMNS ? STEP_COLUMNS / 2 : STEP_COLUMNS;
    if (columns % columns_of_step) {
        many_tokens(group, dtype, num_tokens, in, sums);
        return;
    }
    char steps[MAX_GROUP * PANEL_ROWS] __attribute__((aligned(64)));
    int8_t values[BLOCK][MAX_GROUP] __attribute__((aligned(64))) = {{0}};
    int32_t block[BLOCK][PANEL_ROWS] __attribute__((aligned(64)));
    const char *weights = unpack(steps, group, dtype);
    set_shapes(columns_of_step);
    for (int first = 0; first < num_tokens; first += BLOCK) {
        const int count = num_tokens - first < BLOCK ? num_tokens - first : BLOCK;
        ask_share(group, first / BLOCK, CEIL_DIV(num_tokens, BLOCK));
        for (int t = 0; t < count; t++) memcpy(values[t], in[first + t].values, columns);
        multiply_block(block, weights, values[0], columns, columns_of_step);
        for (int t = 0; t < count; t++)
            for (int row = 0; row < PANEL_ROWS; row += LANES) {
                ivec off = load_ints(group->zeros + row) * in[first + t].sum;
                add_group(sums[first + t], group, row, load_ints(block[t] + row) - off, in[first + t].scale);
            }
    }
    _tile_release();
}

INTEGER_KERNELS(amx_integers, tiles_of_tokens);
#endif
