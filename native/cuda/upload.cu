/* The model's file to the device. */
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "launch.cuh"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14; an older one refuses it, and a page is mapped when it is read */
#endif

/* An error, if there was none before. */
static void keep(cudaError_t &error, cudaError_t result) {
    if (error == cudaSuccess) error = result;
}

/* Maps all pages of a piece at once, which is quicker than one fault after another. */
static void map_pages(const char *start, int64_t bytes) {
    uintptr_t page = sysconf(_SC_PAGESIZE), first = (uintptr_t)start / page * page;
    madvise((void *)first, (uintptr_t)start + bytes - first, MADV_POPULATE_READ);
}

/* One thread's share of the pieces: it fills one of its two chunks while the other is on its way. */
static cudaError_t send(char *target, const char *source, int64_t bytes, char *chunks, int64_t chunk_bytes,
                        cudaStream_t stream) {
    cudaEvent_t sent[2] = {};
    cudaError_t error = cudaSuccess;
    for (cudaEvent_t &event : sent) keep(error, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    int turn = 0;
#pragma omp for schedule(dynamic)
    for (int64_t offset = 0; offset < bytes; offset += chunk_bytes) {
        int64_t size = bytes - offset < chunk_bytes ? bytes - offset : chunk_bytes;
        char *chunk = chunks + turn * chunk_bytes;
        keep(error, cudaEventSynchronize(sent[turn]));
        if (error != cudaSuccess) continue;
        map_pages(source + offset, size);
        memcpy(chunk, source + offset, size);
        keep(error, cudaMemcpyAsync(target + offset, chunk, size, cudaMemcpyHostToDevice, stream));
        keep(error, cudaEventRecord(sent[turn], stream));
        turn ^= 1;
    }
    for (cudaEvent_t event : sent)
        if (event) cudaEventDestroy(event);
    return error;
}

int cuda_upload(void *target, const void *source, int64_t bytes, void *chunks, int64_t chunk_bytes, int num_threads,
                void *stream) {
    cudaError_t error = cudaSuccess;
    TRY(host_check_threads(num_threads));
#pragma omp parallel num_threads(num_threads)
    {
        char *own = (char *)chunks + 2 * chunk_bytes * omp_get_thread_num();
        cudaError_t result = send((char *)target, (const char *)source, bytes, own, chunk_bytes, (cudaStream_t)stream);
#pragma omp critical
        keep(error, result);
    }
    keep(error, cudaStreamSynchronize((cudaStream_t)stream));
    if (error == cudaSuccess) return 0;
    return fail("GPU: copying the weights: %s, expected success; see python -m colibri.run --doctor",
                cudaGetErrorString(error));
}
