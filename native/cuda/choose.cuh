/* The choice of a token's experts from its logits and the experts' weights, by one warp. Order is (score descending,
 * expert ascending): the warp takes the best one out k times, each by two reductions over its lanes. */
#ifndef COLIBRI_CUDA_CHOOSE_CUH
#define COLIBRI_CUDA_CHOOSE_CUH

#include "logits.cuh"
#include "numbers.cuh"

namespace {

constexpr int PER_LANE = ceil_div(NUM_EXPERTS, 32);    /* experts of a lane: lane, lane + 32, ... */
constexpr int GROUP_SIZE = NUM_EXPERTS / NUM_GROUPS;
constexpr int GROUPS_PER_LANE = ceil_div(NUM_GROUPS, 32);
constexpr int WARPS = 2 * LOGIT_WARPS;                 /* of a block that routes */
constexpr float INFINITE = __builtin_huge_valf();

/* Larger for a larger score; 1 for what cannot be chosen, -inf and NaN. -0 is +0. */
__device__ uint32_t orderable(float score) {
    if (!(score > -INFINITE)) return 1;
    uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ bool can_be_chosen(uint32_t word) { return word > 1; }

/* Takes the best out of the warp's words and returns its index, in every lane: of the largest words the one with the
 * lowest index, and in `best` its word. A lane's words are those with the indices lane, lane + 32, ...; 0 for an index
 * that does not exist, and for what has been taken. */
template <int COUNT> __device__ __forceinline__ int take_best(uint32_t (&words)[COUNT], uint32_t &best) {
    int lane = threadIdx.x % 32, index = COUNT * 32;
    best = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j++) best = max(best, words[j]);
    best = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int j = COUNT - 1; j >= 0; j--)
        if (words[j] == best) index = lane + j * 32;
    index = __reduce_min_sync(~0u, index);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        if (lane + j * 32 == index) words[j] = 0;
    return index;
}

/* A lane's value of index lane + j * 32, j = index / 32, from the lane that has it. */
template <int COUNT> __device__ __forceinline__ float value_of(const float (&values)[COUNT], int index) {
    float found = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        float value = __shfl_sync(~0u, values[j], index % 32);
        if (index / 32 == j) found = value;
    }
    return found;
}

/* exp(shift) times the sigmoid, without overflow or needless underflow. */
__device__ float sigmoid(float logit, float shift) {
    return expf(fminf(logit, 0.0f) + shift) / (1.0f + expf(-fabsf(logit)));
}

__device__ float sum_of_exp(const float (&logits)[PER_LANE], float largest) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) sum += expf(logits[j] - largest);
    return warp_sum(sum);
}

__device__ float largest_of(const float (&logits)[PER_LANE]) {
    float largest = -INFINITE;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) largest = fmaxf(largest, logits[j]);
    return warp_max(largest);
}

/* The scores that experts are chosen by. Softmax and sigmoid rise with the logit, so without a bias it is compared. */
__device__ void choice_scores(float (&score)[PER_LANE], const float (&logits)[PER_LANE], const float *bias) {
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) score[j] = logits[j];
    if (!ROUTER_BIAS) return;
    float largest = 0.0f, total = 1.0f;
    if (ROUTER_KIND == ROUTER_SOFTMAX) {
        largest = largest_of(logits);
        total = sum_of_exp(logits, largest);
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        if (!(logits[j] > -INFINITE)) continue;
        if (ROUTER_KIND == ROUTER_SOFTMAX) score[j] = expf(logits[j] - largest) / total;
        if (ROUTER_KIND == ROUTER_SIGMOID) score[j] = sigmoid(logits[j], 0.0f);
        score[j] += bias[threadIdx.x % 32 + j * 32];
    }
}

/* A group's score: its best expert's; with sigmoid the sum of its two best, of the scores themselves. `scores` is the
 * warp's own shared array. */
__device__ float group_score(const float *scores, int group) {
    float best = -INFINITE, second = -INFINITE;
    for (int e = group * GROUP_SIZE; e < (group + 1) * GROUP_SIZE; e++) {
        float value = scores[e];
        if (!(value > -INFINITE)) continue;
        if (ROUTER_KIND == ROUTER_SIGMOID && !ROUTER_BIAS) value = sigmoid(value, 0.0f);
        if (value > best) {
            second = best;
            best = value;
        } else {
            second = fmaxf(second, value);
        }
    }
    return ROUTER_KIND == ROUTER_SIGMOID && second > -INFINITE ? best + second : best;
}

/* Takes the experts of all but the best TOPK_GROUPS groups out of the choice. */
__device__ void limit_groups(float (&score)[PER_LANE]) {
    __shared__ float all_scores[WARPS][NUM_GROUPS > 1 ? NUM_EXPERTS : 1];
    float *scores = all_scores[threadIdx.x / 32];
    int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (lane + j * 32 < NUM_EXPERTS) scores[lane + j * 32] = score[j];
    __syncwarp();
    uint32_t words[GROUPS_PER_LANE], best;
    bool allowed[PER_LANE] = {};
#pragma unroll
    for (int i = 0; i < GROUPS_PER_LANE; i++) {
        int group = lane + i * 32;
        words[i] = group < NUM_GROUPS ? orderable(group_score(scores, group)) : 0;
    }
    for (int i = 0; i < TOPK_GROUPS; i++) {
        int group = take_best(words, best);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) allowed[j] |= (lane + j * 32) / GROUP_SIZE == group;
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (!allowed[j]) score[j] = -INFINITE;
}

/* The weight of lane i's expert, for lanes i < k; `chosen` is its logit. */
__device__ float weigh(float chosen, const float (&logits)[PER_LANE], float routed_scaling, float renormalize_min) {
    constexpr bool OVER_CHOSEN = ROUTER_KIND == ROUTER_TOPK_SOFTMAX || RENORMALIZE;
    bool is_slot = threadIdx.x % 32 < EXPERTS_PER_TOKEN;
    /* Weights that are divided by their sum are taken relative to the largest, so that they cannot all underflow. */
    float largest = 0.0f, total = 1.0f, weight;
    if (OVER_CHOSEN) {
        largest = warp_max(is_slot ? chosen : -INFINITE);
    } else if (ROUTER_KIND != ROUTER_SIGMOID) {
        largest = largest_of(logits);
        total = sum_of_exp(logits, largest);
    }
    float shift = ROUTER_KIND == ROUTER_SIGMOID && OVER_CHOSEN && largest < 0.0f ? -largest : 0.0f;
    weight = ROUTER_KIND == ROUTER_SIGMOID ? sigmoid(chosen, shift) : expf(chosen - largest);
    if (OVER_CHOSEN) total = warp_sum(is_slot ? weight : 0.0f);
    if (OVER_CHOSEN && ROUTER_KIND != ROUTER_TOPK_SOFTMAX && renormalize_min > 0.0f) {
        /* what the relative weights are in true scores: `unit` each */
        float unit = ROUTER_KIND == ROUTER_SIGMOID ? expf(-shift) : 1.0f / sum_of_exp(logits, largest);
        if (!(total * unit >= renormalize_min)) total = renormalize_min / unit;
    }
    return weight / total * routed_scaling;
}

/* The weight of the expert that ROUTER_SPARSEMIXER has just chosen for its logit, in every lane: by a softmax over
 * those left whose logits lie near it. `first` is the one that was chosen before, or none. */
__device__ float sparsemix(const float (&logits)[PER_LANE], int chosen, int first, float jitter) {
    float largest = value_of(logits, chosen), total = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        bool is_far = (largest - logits[j]) / fmaxf(fabsf(logits[j]), largest) > 2.0f * jitter; /* 0/0 is not */
        if (!is_far && threadIdx.x % 32 + j * 32 != first) total += expf(logits[j] - largest);
    }
    return 1.0f / warp_sum(total);
}

/* What the routing of a layer reads and writes besides the scratch. */
struct Routing {
    State state;
    const Batch *batch;
    Batch *host_batch;
    const float *bias, *logit_bias; /* (NUM_EXPERTS) or NULL */
    float routed_scaling, renormalize_min, jitter;
    int layer;
    const int32_t *place; /* (NUM_EXPERTS), of the layer's FFN; NULL: of another routing, which the totals leave out */
};

/* A row's routing, by one warp. */
struct Choice {
    float logits[PER_LANE]; /* of experts lane, lane + 32, ... */
    int expert;             /* lane i < k: the i-th best, and its weight */
    float weight;
    bool is_bad;            /* in every lane: the logits allow no choice */
};

template <int ROWS>
__device__ Choice route_token(const Routing &r, const float (*partials)[ROWS][NUM_EXPERTS], int token) {
    int lane = threadIdx.x % 32;
    Choice choice = {};
    float (&logits)[PER_LANE] = choice.logits, score[PER_LANE];
    bool is_bad = false;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int e = lane + j * 32;
        float part[LOGIT_SLICES];
#pragma unroll
        for (int s = 0; s < LOGIT_SLICES; s++)
            part[s] = partials[s][token][min(e, NUM_EXPERTS - 1)];
        logits[j] = 0.0f;
#pragma unroll
        for (int s = 0; s < LOGIT_SLICES; s++) logits[j] += part[s];
        if (r.logit_bias) logits[j] += r.logit_bias[min(e, NUM_EXPERTS - 1)];
        if (e >= NUM_EXPERTS) logits[j] = -INFINITE;
        is_bad |= !(logits[j] < INFINITE);
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) score[j] = logits[j];
    if (ROUTER_KIND != ROUTER_SPARSEMIXER) {
        choice_scores(score, logits, r.bias);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) is_bad |= !(score[j] < INFINITE); /* a bias can be what is NaN or inf */
        if constexpr (NUM_GROUPS > 1) limit_groups(score);
    }
    uint32_t words[PER_LANE], best;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) words[j] = lane + j * 32 < NUM_EXPERTS ? orderable(score[j]) : 0;
    int first = NUM_EXPERTS;
#pragma unroll
    for (int slot = 0; slot < EXPERTS_PER_TOKEN; slot++) {
        int expert = take_best(words, best);
        is_bad |= !can_be_chosen(best);
        if (lane == slot) choice.expert = expert;
        if constexpr (ROUTER_KIND == ROUTER_SPARSEMIXER) {
            float weight = sparsemix(logits, expert, first, r.jitter);
            if (lane == slot) choice.weight = weight;
            first = expert;
        }
    }
    if (ROUTER_KIND != ROUTER_SPARSEMIXER)
        choice.weight = weigh(value_of(logits, choice.expert), logits, r.routed_scaling, r.renormalize_min);
    choice.is_bad = __any_sync(~0u, is_bad);
    return choice;
}

__device__ void store_choice(const State &s, int token, const Choice &choice) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (lane + j * 32 < NUM_EXPERTS) s.router_logits[token * NUM_EXPERTS + lane + j * 32] = choice.logits[j];
    if (lane < EXPERTS_PER_TOKEN) {
        s.expert_ids[token * EXPERTS_PER_TOKEN + lane] = choice.expert;
        s.expert_weights[token * EXPERTS_PER_TOKEN + lane] = choice.weight;
    }
}

} // namespace

#endif
