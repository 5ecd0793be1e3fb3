/* How a matrix is stored: the only place that knows its geometry, its bytes and their order. A matrix [rows, columns]
 * is panels of PANEL_ROWS rows, [row panel][expert][column][PANEL_ROWS], the last panel filled up with zero rows; one
 * that is not an expert's is the same with one expert. A format is a DTYPE_* code. */
#ifndef COLIBRI_PANELS_H
#define COLIBRI_PANELS_H

#include "format.h"

#define PANEL_ROWS 64 /* rows of one panel; the header's interleave_rows */
#define GATE_GROUP 8  /* a gated matrix: 8 gate rows, 8 up rows, 8 gate rows, ... */

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

static inline HOST_DEVICE int64_t element_bytes(int format) { return format == DTYPE_F32 ? 4 : 2; }

/* One expert's panel. */
static inline HOST_DEVICE int64_t panel_bytes(int format, int64_t columns) {
    return columns * PANEL_ROWS * element_bytes(format);
}

/* From a matrix's start to row panel `panel` of the expert that stands at `place`, of num_stored. */
static inline HOST_DEVICE int64_t panel_offset(int format, int64_t columns, int64_t num_stored, int64_t panel,
                                               int64_t place) {
    return (panel * num_stored + place) * panel_bytes(format, columns);
}

/* From a panel's start to one of its elements, or to the rest of a column's rows. */
static inline HOST_DEVICE int64_t element_offset(int format, int64_t column, int row) {
    return (column * PANEL_ROWS + row) * element_bytes(format);
}

/* The row of a gated panel in which its output i has its gate; the same output's up row is GATE_GROUP later. */
static inline HOST_DEVICE int gate_row_of(int output) {
    return output / GATE_GROUP * 2 * GATE_GROUP + output % GATE_GROUP;
}

#endif
