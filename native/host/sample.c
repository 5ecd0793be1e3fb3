/* The next token of each row of logits. Temperature, then the top_k largest, then of those the fewest whose
 * probabilities reach top_p; equal logits count by index. The draw walks the kept tokens in index order. No sorting:
 * both limits are found digit by digit from histograms of the logits' bits, in a memory that does not grow with the
 * vocabulary. */
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

static int draw(const Row *row, int top_k, float top_p, float uniform) {
    Limit limit = {0, VOCAB_SIZE};
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

/* sampled[i] = -1 where a logit is NaN. */
static void sample_row(const void *job, long i) {
    const Model *m = job;
    Batch *b = m->batch;
    const float *logits = m->state.logits + i * VOCAB_SIZE;
    int best = 0;
    b->sampled[i] = -1;
    for (int j = 0; j < VOCAB_SIZE; j++) {
        if (logits[j] != logits[j]) return;
        if (logits[j] > logits[best]) best = j;
    }
    Row row = {logits, logits[best], b->temperature[i]};
    b->sampled[i] = row.temperature > 0 ? draw(&row, b->top_k[i], b->top_p[i], b->uniform[i]) : best;
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
