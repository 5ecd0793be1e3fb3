/* The next token of each row of logits, a block a row: the algorithm of host/sample.c. Probabilities are counted in
 * fixed point, so that a sum is the same in any order and the histograms can be filled by atomic adds. */
#include "launch.cuh"
#include "numbers.cuh"
#include "scratch.cuh"

#if NUM_HEADS

namespace {

constexpr int THREADS = VOCAB_SIZE >= 1024 ? 1024 : round_up(VOCAB_SIZE, 32);
constexpr int PER_THREAD = ceil_div(VOCAB_SIZE, THREADS);
constexpr float ONE = 1ull << 44; /* the largest probability, which is 1 up to a factor */
static_assert(VOCAB_SIZE <= 1 << 19, "the probabilities' sum must fit 64 bits");

using count_t = unsigned long long;

/* Unsigned integers in the order of the floats, -0 equal to +0. */
__device__ uint32_t orderable(float value) {
    uint32_t bits = __float_as_uint(value + 0.0f);
    return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

__device__ float from_orderable(uint32_t key) { return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : ~0u)); }

/* What is kept: keys above `key`, and those equal to it up to index `last`. */
struct Limit {
    uint32_t key;
    int last;
    __device__ bool keeps(uint32_t other, int i) const { return other > key || (other == key && i <= last); }
};

struct Row {
    const float *logits; /* (VOCAB_SIZE) */
    float largest;
    float temperature;
    __device__ count_t mass(float logit) const {
        return __float2ull_rn(ONE * (logit == largest ? 1.0f : expf((logit - largest) / temperature)));
    }
};

/* The sum of the values of the threads before this one; `total` is that of all. */
__device__ count_t sum_before(count_t value, count_t &total) {
    __shared__ count_t warps[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    count_t sum = warp_sum_up_to(value);
    __syncthreads(); /* the last call's sums have been read */
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    count_t before = 0;
    total = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w == warp) before = total;
        total += warps[w];
    }
    return before + sum - value;
}

template <typename Measure> __device__ count_t sum_all(Measure measure) {
    count_t sum = 0, total;
    for (int i = threadIdx.x; i < VOCAB_SIZE; i += THREADS) sum += measure(i);
    sum_before(sum, total);
    return total;
}

/* The first index at which the running sum of measure(i) is above target, which is less than the whole sum. */
template <typename Measure> __device__ int first_above(Measure measure, count_t target) {
    __shared__ int found;
    int begin = threadIdx.x * PER_THREAD, end = min(begin + PER_THREAD, VOCAB_SIZE);
    count_t sum = 0, total;
    for (int i = begin; i < end; i++) sum += measure(i);
    count_t reached = sum_before(sum, total);
    if (reached <= target && reached + sum > target) {
        for (; (reached += measure(begin)) <= target; begin++) {}
        found = begin;
    }
    __syncthreads();
    return found;
}

/* The highest digit at which above + histogram, summed from the top, reaches target; above gets what lies higher. */
__device__ int find_digit(const count_t *histogram, count_t target, count_t &above) {
    __shared__ int digit;
    __shared__ count_t higher;
    if (threadIdx.x < 32) {
        int top = 255 - threadIdx.x * 8;
        count_t sum = 0;
        for (int i = 0; i < 8; i++) sum += histogram[top - i];
        count_t reached = above + warp_sum_up_to(sum);
        if (reached >= target && reached - sum < target) {
            reached -= sum;
            for (; reached + histogram[top] < target; top--) reached += histogram[top];
            digit = top, higher = reached;
        }
    }
    __syncthreads();
    above = higher;
    return digit;
}

/* The fewest best tokens within `outer` whose count or mass reaches `target`, which is at most all of it. */
__device__ Limit limit_at(const Row &row, Limit outer, bool counting, count_t target) {
    __shared__ count_t histogram[256];
    uint32_t prefix = 0;
    count_t above = 0; /* of the keys above the prefix */
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += THREADS) histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < VOCAB_SIZE; i += THREADS) {
            float logit = row.logits[i];
            uint32_t key = orderable(logit);
            if ((key ^ prefix) >> shift >> 8 || !outer.keeps(key, i)) continue;
            atomicAdd(&histogram[key >> shift & 255], counting ? 1 : row.mass(logit));
        }
        __syncthreads();
        prefix |= (uint32_t)find_digit(histogram, target, above) << shift;
        __syncthreads(); /* the histogram and find_digit's result have been read */
    }
    count_t each = counting ? 1 : row.mass(from_orderable(prefix)), wanted = (target - above + each - 1) / each;
    auto equal = [&](int i) { return orderable(row.logits[i]) == prefix && outer.keeps(prefix, i) ? 1 : 0; };
    return {prefix, first_above(equal, wanted - 1)};
}

__device__ int draw(const Row &row, int top_k, float top_p, float uniform) {
    Limit limit = {0, VOCAB_SIZE};
    if (top_k > 0 && top_k < VOCAB_SIZE) limit = limit_at(row, limit, true, top_k);
    auto kept = [&](int i) {
        float logit = row.logits[i];
        return limit.keeps(orderable(logit), i) ? row.mass(logit) : 0;
    };
    count_t total = sum_all(kept);
    if (top_p < 1) {
        limit = limit_at(row, limit, false, (count_t)ceil((double)top_p * total));
        total = sum_all(kept);
    }
    return first_above(kept, (count_t)((double)uniform * total));
}

/* The largest logit's index, the lowest among equals; -1 where one is NaN. */
__device__ int find_largest(const float *logits) {
    __shared__ uint64_t warps[32];
    uint64_t best = 0;
    bool has_nan = false;
    for (int i = threadIdx.x; i < VOCAB_SIZE; i += THREADS) {
        float logit = logits[i];
        has_nan |= logit != logit;
        uint64_t key = (uint64_t)orderable(logit) << 32 | ~(uint32_t)i;
        best = key > best ? key : best;
    }
    for (int step = 16; step > 0; step /= 2) {
        uint64_t other = __shfl_xor_sync(~0u, best, step);
        best = other > best ? other : best;
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    if (__syncthreads_or(has_nan)) return -1;
    for (int w = 0; w < THREADS / 32; w++) best = warps[w] > best ? warps[w] : best;
    return (int)~(uint32_t)best;
}

/* `batch` is the device's copy; results go to the caller's own, in host memory. A fault of the router stays. */
__global__ void __launch_bounds__(THREADS) sample_kernel(Batch *result, const float *logits, const Batch *batch) {
    pdl_wait();
    pdl_trigger();
    int i = blockIdx.x;
    if (!batch->sample || i >= batch->num_logits) return;
    logits += (int64_t)i * VOCAB_SIZE;
    int token = find_largest(logits);
    if (token >= 0 && batch->temperature[i] > 0) {
        Row row = {logits, logits[token], batch->temperature[i]};
        token = draw(row, batch->top_k[i], batch->top_p[i], batch->uniform[i]);
    }
    if (threadIdx.x > 0) return;
    result->sampled[i] = token;
    volatile int32_t *fault = &result->fault;
    if (token < 0 && *fault == 0) *fault = FAULT_LOGIT;
}

} // namespace

int cuda_sample(Model *m, int num_logits, int) {
    return launch(m, "sample", sample_kernel, num_logits, THREADS, 0, m->batch, m->state.logits, device_batch(m));
}

#endif
