/* The CUDA backend's table. */
#include "launch.cuh"
#include "scratch.cuh"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static const char *name() {
    return "cuda sm_" TEXT(CUDA_ARCH) ", CUDA " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__);
}

#define OP(op, has) .op = (has) ? cuda_##op : nullptr,
extern "C" const Ops cuda_ops = {
    .name = name, .cuda_version = CUDART_VERSION, .scratch_bytes = cuda_scratch_bytes, .upload = cuda_upload, OPS(OP)};
#undef OP
