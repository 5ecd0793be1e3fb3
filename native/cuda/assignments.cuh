/* The lists that the expert products work from: each expert's assignments, and the experts that have any. */
#ifndef COLIBRI_CUDA_ASSIGNMENTS_CUH
#define COLIBRI_CUDA_ASSIGNMENTS_CUH

#include "choose.cuh"

namespace {

/* What the blocks of a step find out together, in the shared memory of the one that goes on alone. */
struct Lists {
    int fault;                           /* MAX_STEP_TOKENS minus the lowest token whose logits allow no choice, or 0 */
    int absent;                          /* NUM_EXPERTS minus the lowest chosen expert without a place, or 0 */
    int totals[NUM_EXPERTS];             /* assignments */
    int starts[NUM_EXPERTS];             /* each expert's next assignment's place */
    uint32_t takers[WARPS][NUM_EXPERTS]; /* bit l of warp w: that its lane l has an assignment of the expert */
};

__device__ void clear(Lists &lists) {
    if (threadIdx.x == 0) lists.fault = lists.absent = 0;
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += WARPS * 32) lists.totals[e] = 0;
    for (int e = threadIdx.x % 32; e < NUM_EXPERTS; e += 32) lists.takers[threadIdx.x / 32][e] = 0;
}

/* Makes a fault known to the host, unless an earlier layer's is. By one thread. */
__device__ void report_fault(const Routing &r, const Lists &lists) {
    volatile Batch *batch = r.host_batch;
    if (!lists.fault && !lists.absent) return; /* before a look over the bus */
    if (batch->fault != 0) return;
    batch->fault_layer = r.layer;
    batch->fault_token = lists.fault ? MAX_STEP_TOKENS - lists.fault : NUM_EXPERTS - lists.absent;
    __threadfence_system();
    batch->fault = lists.fault ? FAULT_ROUTER_LOGIT : FAULT_EXPERT;
}

constexpr unsigned ACTIVE = 1 << 23; /* one expert, counted in the same word as assignments */
static_assert(MAX_STEP_TOKENS * EXPERTS_PER_TOKEN < ACTIVE, "too many assignments to count beside the experts");

/* From the experts' totals, by one warp: where each one's assignments start, and the list of those that have any. */
__device__ void list_experts(const State &s, Lists &lists, bool counted) {
    int lane = threadIdx.x % 32, total[PER_LANE];
    unsigned own = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane * PER_LANE + j;
        total[j] = e < NUM_EXPERTS ? lists.totals[e] : 0;
        own += total[j] + (total[j] > 0 ? ACTIVE : 0);
    }
    unsigned up_to = warp_sum_up_to(own);
    int start = (up_to - own) % ACTIVE, num_active = (up_to - own) / ACTIVE;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane * PER_LANE + j;
        if (e >= NUM_EXPERTS) break;
        lists.starts[e] = start;
        s.expert_offsets[e] = start;
        if (total[j] > 0) s.active_experts[num_active++] = e;
        start += total[j];
    }
    if (lane == 31) {
        s.expert_offsets[NUM_EXPERTS] = up_to % ACTIVE;
        *s.num_active = up_to / ACTIVE;
        if (counted) atomicAdd((unsigned long long *)s.experts_read, up_to / ACTIVE);
    }
}

/* Moves the experts' starts past the round's assignments. */
__device__ void end_round(Lists &lists) {
    __syncthreads();
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += WARPS * 32)
        for (int w = 0; w < WARPS; w++) {
            lists.starts[e] += __popc(lists.takers[w][e]);
            lists.takers[w][e] = 0;
        }
    __syncthreads();
}

static_assert(NUM_EXPERTS <= WARPS * 32, "a thread has one expert's place");

/* The place of the thread's expert, asked for before the previous kernel's end: no kernel writes places. */
__device__ int own_place(const Routing &r) { return r.place && threadIdx.x < NUM_EXPERTS ? r.place[threadIdx.x] : 0; }

/* Sorts `count` assignments by expert, then by token; `ids` are their experts where a block's shared memory has them
 * all; `place` is own_place(). By one block, whose lists are clear. An assignment stands at its expert's start plus
 * those before it, which the takers' bits tell, a round of a thread each at a time. (The atomics are on integers: order
 * is no matter.) */
__device__ void dispatch(const Routing &r, Lists &lists, int place, const int *ids, int count) {
    const State &s = r.state;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto expert_of = [&](int i) { return ids ? ids[i] : __ldcg(&s.expert_ids[i]); };
    for (int i = threadIdx.x; i < count; i += WARPS * 32) atomicAdd(&lists.totals[expert_of(i)], 1);
    for (int first = 0;; first += WARPS * 32) {
        int i = first + threadIdx.x, expert = 0;
        if (i < count) {
            expert = expert_of(i);
            atomicOr(&lists.takers[warp][expert], 1u << lane);
        }
        __syncthreads();
        if (first == 0) {
            if (place < 0 && lists.totals[threadIdx.x] > 0) atomicMax(&lists.absent, NUM_EXPERTS - (int)threadIdx.x);
            if (warp == 0) list_experts(s, lists, r.place);
            __syncthreads();
        }
        if (i < count) {
            int at = lists.starts[expert] + __popc(lists.takers[warp][expert] & ((1u << lane) - 1));
            for (int w = 0; w < warp; w++) at += __popc(lists.takers[w][expert]);
            s.assignments[at] = i;
        }
        if (first + WARPS * 32 >= count) break;
        end_round(lists);
    }
    for (int e = threadIdx.x; e < NUM_EXPERTS && r.place; e += WARPS * 32)
        if (lists.totals[e])
            atomicAdd((unsigned long long *)&s.routed_tokens[(int64_t)r.layer * NUM_EXPERTS + e], lists.totals[e]);
}

} // namespace

#endif
