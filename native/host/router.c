/* Chooses the experts of each token, in the order (score descending, expert ascending), with -0 equal to +0. Softmax
 * and sigmoid rise with the logit, so without a bias the logits themselves are compared. Experts whose scores round to
 * the same number, or to 0, then keep the order of their logits. */
#include <math.h>
#include <string.h>

#include "host.h"

#define SORT_LANES 32
#define GROUP_SIZE (NUM_EXPERTS / NUM_GROUPS)
#define UP_TO_LANES(n) (CEIL_DIV(n, SORT_LANES) * SORT_LANES)

/* A score and the index it belongs to, in one comparable word: larger is better, and of equal scores the lower index.
 * A word below 2^32 is nobody's. */
static uint64_t key_of(float score, int index) { return (uint64_t)orderable(score) << 32 | (uint32_t)~index; }
static int index_of(uint64_t key) { return (int)~(uint32_t)key; }
static int is_valid(uint64_t key) { return key >> 32 != 0; }

/* Where lane i meets lane i ^ stride, the larger key goes to the lower lane if `descending`. */
static void exchange(uint64_t *keys, int i, int stride, int descending) {
    uint64_t a = keys[i], b = keys[i ^ stride];
    int swap = descending ? a < b : a > b;
    keys[i] = swap ? b : a;
    keys[i ^ stride] = swap ? a : b;
}

static void merge_stage(uint64_t *keys, int size) {
    for (int stride = size / 2; stride > 0; stride /= 2)
        for (int i = 0; i < SORT_LANES; i++)
            if (!(i & stride)) exchange(keys, i, stride, !(i & size));
}

/* The bitonic network of 32 lanes: largest first. */
static void sort_lanes(uint64_t *keys) {
    for (int size = 2; size <= SORT_LANES; size *= 2) merge_stage(keys, size);
}

/* The 32 largest of `count` keys, largest first; count is a multiple of 32. Sorts 32 at a time and merges: of two
 * descending runs, one reversed, the larger of each pair are the best 32, and they form a bitonic run. */
static void best_of(uint64_t *keys, int count) {
    sort_lanes(keys);
    for (int first = SORT_LANES; first < count; first += SORT_LANES) {
        sort_lanes(keys + first);
        for (int i = 0; i < SORT_LANES; i++) {
            uint64_t other = keys[first + SORT_LANES - 1 - i];
            if (other > keys[i]) keys[i] = other;
        }
        merge_stage(keys, SORT_LANES);
    }
}

/* exp(shift) times the sigmoid, without overflow or needless underflow. */
static float sigmoid(float logit, float shift) {
    return expf((logit < 0 ? logit : 0) + shift) / (1.0f + expf(-fabsf(logit)));
}

/* The scores that experts are chosen by; -inf for one that never is. */
static void choice_scores(const float *logits, const float *bias, float *score) {
    float largest = -INFINITY, total = 0;
    for (int e = 0; e < NUM_EXPERTS; e++) largest = logits[e] > largest ? logits[e] : largest;
    for (int e = 0; e < NUM_EXPERTS; e++) total += expf(logits[e] - largest);
    for (int e = 0; e < NUM_EXPERTS; e++) {
        score[e] = logits[e];
        if (bias && logits[e] > -INFINITY) {
            if (ROUTER_KIND == ROUTER_SOFTMAX) score[e] = expf(logits[e] - largest) / total;
            if (ROUTER_KIND == ROUTER_SIGMOID) score[e] = sigmoid(logits[e], 0);
            score[e] += bias[e];
        }
    }
}

/* A group's score: its best expert's; with sigmoid the sum of its two best, of the scores themselves. */
static float group_score(const float *logits, const float *bias, const float *score, int group) {
    float best = -INFINITY, second = -INFINITY;
    for (int e = group * GROUP_SIZE; e < (group + 1) * GROUP_SIZE; e++) {
        if (score[e] == -INFINITY) continue;
        float value = ROUTER_KIND == ROUTER_SIGMOID && !bias ? sigmoid(logits[e], 0) : score[e];
        if (value > best) {
            second = best;
            best = value;
        } else if (value > second) {
            second = value;
        }
    }
    return ROUTER_KIND == ROUTER_SIGMOID && second > -INFINITY ? best + second : best;
}

/* Takes the experts of all but the best TOPK_GROUPS groups out of the choice. */
static void limit_groups(const float *logits, const float *bias, float *score) {
    uint64_t keys[UP_TO_LANES(NUM_GROUPS)] = {0};
    char allowed[NUM_GROUPS] = {0};
    for (int g = 0; g < NUM_GROUPS; g++) keys[g] = key_of(group_score(logits, bias, score, g), g);
    /* more groups than lanes may be allowed, so the best are taken out one sort at a time */
    for (int taken = 0; taken < TOPK_GROUPS;) {
        uint64_t sorted[UP_TO_LANES(NUM_GROUPS)];
        memcpy(sorted, keys, sizeof keys);
        best_of(sorted, UP_TO_LANES(NUM_GROUPS));
        for (int i = 0; i < SORT_LANES && taken < TOPK_GROUPS; i++, taken++) {
            allowed[index_of(sorted[i])] = 1;
            keys[index_of(sorted[i])] = 0;
        }
    }
    for (int e = 0; e < NUM_EXPERTS; e++)
        if (!allowed[e / GROUP_SIZE]) score[e] = -INFINITY;
}

/* The chosen experts' weights: softmax over all or over them, or sigmoids, as they are or divided by their sum. */
static void weigh(const float *logits, const int32_t *ids, const BinHeader *h, float *weights) {
    const int over_chosen = ROUTER_KIND == ROUTER_TOPK_SOFTMAX || RENORMALIZE;
    const int is_sigmoid = ROUTER_KIND == ROUTER_SIGMOID;
    float largest = -INFINITY, total = 0, unit = 1;
    /* Weights that are divided by their sum are taken relative to the largest, so that they cannot all underflow. */
    for (int i = 0; i < (over_chosen ? EXPERTS_PER_TOKEN : NUM_EXPERTS); i++) {
        float logit = logits[over_chosen ? ids[i] : i];
        if (logit > largest) largest = logit;
    }
    for (int e = 0; !over_chosen && e < NUM_EXPERTS; e++) total += expf(logits[e] - largest);
    const float shift = is_sigmoid && over_chosen && largest < 0 ? -largest : 0;
    for (int slot = 0; slot < EXPERTS_PER_TOKEN; slot++)
        weights[slot] = is_sigmoid ? sigmoid(logits[ids[slot]], shift) : expf(logits[ids[slot]] - largest);
    for (int slot = 0; over_chosen && slot < EXPERTS_PER_TOKEN; slot++) total += weights[slot];
    if (over_chosen && h->renormalize_min > 0 && ROUTER_KIND != ROUTER_TOPK_SOFTMAX) {
        float all = 0; /* what the relative weights are in true scores: `unit` each */
        for (int e = 0; !is_sigmoid && e < NUM_EXPERTS; e++) all += expf(logits[e] - largest);
        unit = is_sigmoid ? expf(-shift) : 1.0f / all;
        if (!(total * unit >= h->renormalize_min)) total = h->renormalize_min / unit;
    }
    for (int slot = 0; slot < EXPERTS_PER_TOKEN; slot++) {
        if (over_chosen || !is_sigmoid) weights[slot] /= total;
        weights[slot] *= h->routed_scaling;
    }
}

/* Two experts, one after the other: the largest of what is left, weighed by a softmax over those of what is left whose
 * logits lie near it. */
static int sparsemix(const float *logits, float jitter, int32_t *ids, float *weights) {
    float left[NUM_EXPERTS];
    memcpy(left, logits, sizeof left);
    for (int slot = 0; slot < EXPERTS_PER_TOKEN; slot++) {
        int best = 0;
        for (int e = 1; e < NUM_EXPERTS; e++)
            if (left[e] > left[best]) best = e;
        float largest = left[best], total = 0;
        if (largest == -INFINITY) return 0;
        for (int e = 0; e < NUM_EXPERTS; e++) {
            int far = (largest - logits[e]) / fmaxf(fabsf(logits[e]), largest) > 2 * jitter; /* 0/0 is not */
            if (!far) total += expf(left[e] - largest);
        }
        ids[slot] = best;
        weights[slot] = 1.0f / total;
        left[best] = -INFINITY;
    }
    return 1;
}

typedef struct Route {
    const Model *model;
    const float *bias; /* (NUM_EXPERTS) or NULL */
} Route;

/* Fills in one token's experts and weights; the first id is -1 where the logits allow no choice. */
static void route_token(const void *job, long t) {
    const Route *route = job;
    const State *s = &route->model->state;
    const float *logits = s->router_logits + t * NUM_EXPERTS;
    int32_t *ids = s->expert_ids + t * EXPERTS_PER_TOKEN;
    float score[NUM_EXPERTS];
    uint64_t keys[UP_TO_LANES(NUM_EXPERTS)] = {0};
    ids[0] = -1;
    for (int e = 0; e < NUM_EXPERTS; e++)
        if (!(logits[e] < INFINITY)) return;
    if (ROUTER_KIND == ROUTER_SPARSEMIXER) {
        if (!sparsemix(logits, route->model->header.router_jitter, ids, s->expert_weights + t * EXPERTS_PER_TOKEN))
            ids[0] = -1;
        return;
    }
    choice_scores(logits, route->bias, score);
    for (int e = 0; e < NUM_EXPERTS; e++)
        if (!(score[e] < INFINITY)) return; /* a bias can be what is NaN or inf */
    if (NUM_GROUPS > 1) limit_groups(logits, route->bias, score);
    for (int e = 0; e < NUM_EXPERTS; e++)
        if (score[e] > -INFINITY) keys[e] = key_of(score[e], e);
    best_of(keys, UP_TO_LANES(NUM_EXPERTS));
    if (!is_valid(keys[EXPERTS_PER_TOKEN - 1])) return;
    for (int slot = 0; slot < EXPERTS_PER_TOKEN; slot++) ids[slot] = index_of(keys[slot]);
    weigh(logits, ids, &route->model->header, s->expert_weights + t * EXPERTS_PER_TOKEN);
}

/* Sorts assignments by expert, then by token, and counts those of a layer's FFN. */
static void dispatch(const Model *m, int num_tokens, int layer, int counted) {
    const State *s = &m->state;
    int32_t next[NUM_EXPERTS] = {0}, active = 0;
    for (int i = 0; i < num_tokens * EXPERTS_PER_TOKEN; i++) next[s->expert_ids[i]]++;
    s->expert_offsets[0] = 0;
    for (int e = 0; e < NUM_EXPERTS; e++) {
        int32_t count = next[e];
        if (counted) s->routed_tokens[(int64_t)layer * NUM_EXPERTS + e] += count;
        if (count) s->active_experts[active++] = e;
        next[e] = s->expert_offsets[e];
        s->expert_offsets[e + 1] = s->expert_offsets[e] + count;
    }
    *s->num_active = active;
    if (counted) *s->experts_read += active;
    for (int i = 0; i < num_tokens * EXPERTS_PER_TOKEN; i++) s->assignments[next[s->expert_ids[i]]++] = i;
}

static int fault(Model *m, int kind, int layer, int which) {
    m->batch->fault = kind;
    m->batch->fault_layer = layer;
    m->batch->fault_token = which;
    return colibri_check(m);
}

int host_route(Model *m, int num_tokens, int layer, const float *input, const float *router, const float *logit_bias,
               const float *correction) {
    host_dense(m, num_tokens, (Product){
        .panels = router, .form = {DTYPE_F32, 0, 0}, .item_rows = PART_ROWS, .input = input,
        .output = m->state.router_logits,
        .bias = logit_bias, .columns = HIDDEN, .outputs = NUM_EXPERTS, .scale = 1});
    Route route = {m, correction};
    double cost = 2000.0 * num_tokens * CEIL_DIV(NUM_EXPERTS, SORT_LANES);
    parallel_for(m->num_threads, num_tokens, cost, route_token, &route);
    for (int t = 0; t < num_tokens; t++)
        if (m->state.expert_ids[(int64_t)t * EXPERTS_PER_TOKEN] < 0) return fault(m, FAULT_ROUTER_LOGIT, layer, t);
    dispatch(m, num_tokens, layer, router == m->weights.layers[layer].router);
    return 0;
}

int host_router(Model *m, int num_tokens, int layer) {
    const Layer *weights = &m->weights.layers[layer];
    TRY(host_route(m, num_tokens, layer, ffn_input(m), weights->router, weights->router_logit_bias,
                   ROUTER_BIAS ? weights->router_bias : NULL));
    for (int i = 0; i < *m->state.num_active; i++)
        if (places(m, layer)[m->state.active_experts[i]] < 0)
            return fault(m, FAULT_EXPERT, layer, m->state.active_experts[i]);
    return 0;
}
