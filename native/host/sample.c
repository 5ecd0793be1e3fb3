/* Samples the next token of each row of logits: applies the temperature, keeps those with at least min_p of the largest
 * probability, the top_k largest of them, then the fewest of those whose probabilities reach top_p. Equal logits count
 * by index. The draw walks the kept tokens in index order. Nothing is sorted: limits are found digit by digit from
 * histograms of the logits' bits, so that the memory does not grow with the vocabulary.
 *
 * A step samples by its batch. colibri_draw samples one row for each struct Draw, whose bias, penalties, barred and
 * allowed tokens change the logits before that, and tells log-probabilities of the logits as the model gave them. */
#include <math.h>
#include <string.h>

#include "host.h"

/* What is kept: keys above `key`, and those equal to it up to index `last`. */
typedef struct Limit {
    uint32_t key;
    int last;
} Limit;

static int is_kept(Limit limit, uint32_t key, int i) {
    return key > limit.key || (key == limit.key && i <= limit.last);
}

typedef struct Row {
    const float *logits; /* (VOCAB_SIZE) */
    float largest;
    float temperature;
} Row;

/* exp((logit - largest) / temperature): probability up to a factor. An infinite largest leaves itself alone. */
static double mass(const Row *row, int i) {
    float logit = row->logits[i];
    if (logit == -INFINITY && row->largest > logit) return 0; /* most of what a mask leaves: expf() takes longer */
    return logit == row->largest ? 1.0 : expf((logit - row->largest) / row->temperature);
}

static double measure(const Row *row, int i, int counting) { return counting ? 1.0 : mass(row, i); }

static double total_mass(const Row *row, Limit limit) {
    double total = 0;
    for (int i = 0; i < VOCAB_SIZE; i++)
        if (is_kept(limit, orderable(row->logits[i]), i)) total += mass(row, i);
    return total;
}

/* The fewest best tokens within `outer` whose count or mass reaches `target`. */
static Limit limit_at(const Row *row, Limit outer, int counting, double target) {
    uint32_t prefix = 0;
    double above = 0; /* of the keys above the prefix */
    for (int shift = 24; shift >= 0; shift -= 8) {
        double histogram[256] = {0};
        int lowest = 256;
        for (int i = 0; i < VOCAB_SIZE; i++) {
            uint32_t key = orderable(row->logits[i]), digit = key >> shift & 255;
            if (((key ^ prefix) >> shift) >> 8 || !is_kept(outer, key, i)) continue;
            histogram[digit] += measure(row, i, counting);
            if ((int)digit < lowest) lowest = digit;
        }
        int digit = 255;
        for (; digit > lowest && above + histogram[digit] < target; digit--) above += histogram[digit];
        prefix |= (uint32_t)digit << shift;
    }
    Limit limit = {prefix, -1};
    for (int i = 0; i < VOCAB_SIZE && (limit.last < 0 || above < target); i++)
        if (orderable(row->logits[i]) == prefix && is_kept(outer, prefix, i)) {
            above += measure(row, i, counting);
            limit.last = i;
        }
    return limit;
}

/* All tokens whose mass is at least min_p: those of the largest logit have 1. */
static Limit likely(const Row *row, float min_p) {
    Limit limit = {orderable(row->largest), VOCAB_SIZE};
    for (int i = 0; i < VOCAB_SIZE; i++) {
        uint32_t key = orderable(row->logits[i]);
        if (key < limit.key && mass(row, i) >= min_p) limit.key = key;
    }
    return limit;
}

static int draw(const Row *row, int top_k, float top_p, float min_p, float uniform) {
    Limit limit = {0, VOCAB_SIZE};
    if (min_p > 0) limit = likely(row, min_p);
    if (top_k > 0 && top_k < VOCAB_SIZE) limit = limit_at(row, limit, 1, top_k);
    double total = total_mass(row, limit);
    if (top_p < 1) {
        limit = limit_at(row, limit, 0, top_p * total);
        total = total_mass(row, limit);
    }
    double reached = 0, target = uniform * total;
    int drawn = 0;
    for (int i = 0; i < VOCAB_SIZE; i++) {
        if (!is_kept(limit, orderable(row->logits[i]), i)) continue;
        double step = mass(row, i);
        if (step > 0) drawn = i;
        if ((reached += step) > target) break;
    }
    return drawn;
}

/* The largest logit's index, the lowest among equals; -1 where one is NaN. */
static int find_largest(const float *logits) {
    int best = 0;
    for (int j = 0; j < VOCAB_SIZE; j++) {
        if (logits[j] != logits[j]) return -1;
        if (logits[j] > logits[best]) best = j;
    }
    return best;
}

/* The token; -1 where a logit is NaN. */
static int choose(const float *logits, float temperature, int top_k, float top_p, float min_p, float uniform) {
    int best = find_largest(logits);
    if (best < 0 || !(temperature > 0)) return best;
    Row row = {logits, logits[best], temperature};
    return draw(&row, top_k, top_p, min_p, uniform);
}

static void sample_row(const void *job, long i) {
    const Model *m = job;
    Batch *b = m->batch;
    b->sampled[i] = choose(m->state.logits + i * VOCAB_SIZE, b->temperature[i], b->top_k[i], b->top_p[i], 0,
                           b->uniform[i]);
}

int host_sample(Model *m, int num_logits, int layer) {
    (void)layer;
    Batch *b = m->batch;
    if (!b->sample) return 0;
    parallel_for(m->num_threads, num_logits, 50.0 * num_logits * VOCAB_SIZE, sample_row, m);
    for (int i = 0; i < num_logits; i++)
        if (b->sampled[i] < 0) {
            b->fault = FAULT_LOGIT;
            return colibri_check(m);
        }
    return 0;
}

/* d->changed = the logits with the bias and the penalties; minus infinity for tokens that may not be drawn. */
static void change(const Draw *d) {
    memcpy(d->changed, d->logits, sizeof(float) * VOCAB_SIZE);
    for (int i = 0; i < d->num_biased; i++) d->changed[d->biased[i]] += d->biases[i];
    for (int i = 0; i < d->num_seen; i++) {
        float *logit = &d->changed[d->seen[i]];
        *logit = *logit > 0 ? *logit / d->repetition_penalty : *logit * d->repetition_penalty;
        *logit -= d->frequency_penalty * d->counts[i];
        *logit -= d->counts[i] > 0 ? d->presence_penalty : 0;
    }
    for (int i = 0; i < d->num_barred; i++) d->changed[d->barred[i]] = -INFINITY;
    for (int i = 0; d->allowed && i < VOCAB_SIZE; i++)
        if (!(d->allowed[i / 32] >> i % 32 & 1)) d->changed[i] = -INFINITY;
}

static double log_probability(const Row *row, int i, double log_total) {
    float logit = row->logits[i];
    return (logit == row->largest ? 0.0 : (double)logit - row->largest) - log_total;
}

/* Log-probability and rank of d->token, and the num_top likeliest tokens, best first; token = -1 for NaN. */
static void score(Draw *d) {
    int best = find_largest(d->logits), count = 0;
    if (best < 0) {
        d->token = -1;
        return;
    }
    Row row = {d->logits, d->logits[best], 1};
    double log_total = log(total_mass(&row, (Limit){0, VOCAB_SIZE}));
    d->rank = 1;
    for (int i = 0; i < VOCAB_SIZE; i++) {
        float logit = d->logits[i];
        d->rank += logit > d->logits[d->token];
        if (count == d->num_top && (count == 0 || !(logit > d->logits[d->top[count - 1]]))) continue;
        int at = count < d->num_top ? count++ : count - 1;
        for (; at > 0 && logit > d->logits[d->top[at - 1]]; at--) d->top[at] = d->top[at - 1];
        d->top[at] = i;
    }
    for (int i = 0; i < count; i++) d->top_logprobs[i] = log_probability(&row, d->top[i], log_total);
    d->logprob = log_probability(&row, d->token, log_total);
}

static void draw_row(const void *job, long i) {
    Draw *d = (Draw *)job + i;
    if (d->token < 0) {
        change(d);
        d->token = choose(d->changed, d->temperature, d->top_k, d->top_p, d->min_p, d->uniform);
    }
    if (d->num_top >= 0 && d->token >= 0) score(d);
}

int colibri_draw(void *draws, int num_draws, int num_threads) {
    parallel_for(num_threads, num_draws, 100.0 * num_draws * VOCAB_SIZE, draw_row, draws);
    return 0;
}
