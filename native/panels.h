/* Defines how a matrix is stored. No other file knows its geometry, its bytes or their order. A matrix [rows,
 * columns] is cut into panels of PANEL_ROWS rows: [row panel][expert][one panel]. The last panel is filled up with zero
 * rows. A matrix that is not an expert's is stored as that of one expert.
 *
 * A panel of wide weights (F32, F16, BF16) is [column][PANEL_ROWS]. One of few bits is its groups of columns, the last
 * of which may be short. A group is:
 *   scales [PANEL_ROWS]: f16 in INT8 and INT4, f32 in FP8, an e8m0 exponent of one byte in MXFP4
 *   zero points [PANEL_ROWS] of one byte, where Form says so
 *   [unit of columns][PANEL_ROWS][4 bytes]; a unit is
 *     4 columns in INT8 (unsigned bytes) and FP8 (e4m3)
 *     8 columns in INT4 (unsigned) and MXFP4 (e2m1): byte j has column j in its low half and column 4 + j in its high
 * A weight u of INT8 and INT4 is (u - zero point) * scale * the tensor's scale, where a group without zero points has
 * 128 and 8; one of FP8 and MXFP4 is its value times the scale. What fills up a group's last unit or the last panel is
 * worth zero (u = zero point; code 0), and a row that fills up a panel has scale 0. */
#ifndef COLIBRI_PANELS_H
#define COLIBRI_PANELS_H

#include "format.h"

#define PANEL_ROWS 64 /* rows of one panel; the header's interleave_rows */
#define GATE_GROUP 8  /* a gated matrix: 8 gate rows, 8 up rows, 8 gate rows, ... */
#define UNIT_BYTES (4 * PANEL_ROWS)
#define MAX_GROUP 128 /* columns of a group */

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

/* How the weights of a matrix are stored. */
typedef struct Form {
    int32_t dtype;       /* a DTYPE code */
    int32_t group;       /* columns that share a scale; 0 for wide weights */
    int32_t zero_points; /* 1: rows of a group have them */
} Form;

/* Sizes, from a Form's fields and the matrix's columns. */
#define PANEL_VALUES(B) \
    B(is_few, dtype >= NUM_WIDE_DTYPES) \
    B(is_nibbles, (dtype == DTYPE_INT4) + (dtype == DTYPE_MXFP4)) \
    B(unit, 4 + 4 * is_nibbles) /* columns in UNIT_BYTES */ \
    B(scale_bytes, (dtype == DTYPE_MXFP4) + 4 * (dtype == DTYPE_FP8) + \
      2 * ((dtype == DTYPE_INT8) + (dtype == DTYPE_INT4))) /* of one row and group */ \
    B(table_bytes, PANEL_ROWS * (scale_bytes + zero_points)) /* before a group's units */ \
    B(column_groups, is_few * ((columns + group - 1) / (group + 1 - is_few))) \
    B(element_bytes, 2 + 2 * (dtype == DTYPE_F32)) /* of a wide weight */ \
    B(panel_bytes, (1 - is_few) * columns * PANEL_ROWS * element_bytes + column_groups * table_bytes + \
      is_few * ((columns + unit - 1) / unit) * UNIT_BYTES) /* of one expert */

typedef struct PanelSizes {
    int64_t unit;
    int64_t table_bytes;
    int64_t column_groups;
    int64_t panel_bytes;
} PanelSizes;

static inline HOST_DEVICE PanelSizes panel_sizes(Form form, int64_t columns) {
    const int64_t dtype = form.dtype, group = form.group, zero_points = form.zero_points;
#define VALUE(name, expression) const int64_t name = (expression);
    PANEL_VALUES(VALUE)
#undef VALUE
    PanelSizes sizes = {unit, table_bytes, column_groups, panel_bytes};
    return sizes;
}

/* From a matrix's start to row panel `panel` of the expert that stands at `place`, of num_stored. */
static inline HOST_DEVICE int64_t panel_offset(Form form, int64_t columns, int64_t num_stored, int64_t panel,
                                               int64_t place) {
    return (panel * num_stored + place) * panel_sizes(form, columns).panel_bytes;
}

/* From a panel's start to one of its wide weights, or to the rest of a column's rows. */
static inline HOST_DEVICE int64_t element_offset(int dtype, int64_t column, int row) {
    const Form form = {dtype, 0, 0};
    return (column * PANEL_ROWS + row) * (panel_sizes(form, 1).panel_bytes / PANEL_ROWS);
}

/* From a wide matrix's start to a column's first row in a panel, counted in weights; its other rows follow. */
static inline HOST_DEVICE int64_t column_index(int64_t columns, int64_t num_stored, int64_t panel, int64_t place,
                                               int64_t column) {
    return ((panel * num_stored + place) * columns + column) * PANEL_ROWS;
}

/* From a panel's start to a group of few bits: its scales, then, table_bytes later, its units. */
static inline HOST_DEVICE int64_t group_offset(Form form, int64_t column_group) {
    const PanelSizes sizes = panel_sizes(form, form.group);
    return column_group * sizes.panel_bytes;
}

/* The row of a gated panel in which its output i has its gate; the same output's up row is GATE_GROUP later. */
static inline HOST_DEVICE int gate_row_of(int output) {
    return output / GATE_GROUP * 2 * GATE_GROUP + output % GATE_GROUP;
}

#endif
