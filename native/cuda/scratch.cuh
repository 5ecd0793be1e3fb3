/* The scratch block: the step's batch, copied to the device by begin; the routing's and the products' part;
 * attention's. */
#ifndef COLIBRI_CUDA_SCRATCH_CUH
#define COLIBRI_CUDA_SCRATCH_CUH

#include "../model.h"

int64_t cuda_product_scratch_bytes();
int64_t cuda_attention_scratch_bytes();
inline int64_t scratch_round(int64_t bytes) { return (bytes + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT; }
inline Batch *device_batch(const Model *m) { return (Batch *)m->state.scratch; }
inline char *product_scratch(const Model *m) { return (char *)m->state.scratch + scratch_round(sizeof(Batch)); }
inline char *attention_scratch(const Model *m) { return product_scratch(m) + scratch_round(cuda_product_scratch_bytes()); }
inline int64_t cuda_scratch_bytes() {
    return scratch_round(sizeof(Batch)) + scratch_round(cuda_product_scratch_bytes()) + cuda_attention_scratch_bytes();
}

#endif
