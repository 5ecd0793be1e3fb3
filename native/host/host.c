/* Holds the host backend's table of ops. */
#include "host.h"

static const char *name(void) {
    const Isa *isa = host_isa();
    return isa ? isa->path : NULL;
}

static int64_t scratch_bytes(void) {
    return CEIL_DIV((int64_t)sizeof(float) * MAX_STEP_TOKENS * ROTARY_DIM, 64) * 64 + host_quantized_bytes();
}

#define OP(op, has) .op = (has) ? host_##op : NULL,
const Ops host_ops = {.name = name, .scratch_bytes = scratch_bytes, OPS(OP)};
#undef OP
