/* Holds the host backend's table of ops. */
#include "host.h"

static const char *name(void) {
    const Kernels *kernels = host_kernels();
    return kernels ? kernels->path : NULL;
}

static int64_t scratch_bytes(void) { return (int64_t)sizeof(float) * MAX_STEP_TOKENS * ROTARY_DIM; }

#define OP(op, has) .op = (has) ? host_##op : NULL,
const Ops host_ops = {.name = name, .scratch_bytes = scratch_bytes, OPS(OP)};
#undef OP
