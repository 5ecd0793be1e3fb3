/* Declares every exported function. Python derives its ctypes signatures from this text.
 * A function that returns int gives 0, or -1 with the message in colibri_error(). */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stdint.h>

#define COLIBRI_HOST 0
#define COLIBRI_CUDA 1

#pragma GCC visibility push(default)

/* The calling thread's last error, in one line. */
const char *colibri_error(void);
/* SHA-256 of the headers in native/ as the library was built, its first 12 digits: what Python reads has the same. */
const char *colibri_digest(void);
/* The baked configuration, as struct Config of config.h. */
int colibri_config(void *config);
/* The path that `backend` runs on this machine: "host avx2", "host portable", "cuda sm_90"; NULL where not built in. */
const char *colibri_path(int backend);
/* sizeof(struct Model): the block that colibri_bind fills in. */
int64_t colibri_model_bytes(void);
/* Bytes of the state block for a file header, so many KV slots and positions of each; 0 with an error where the backend
 * is missing. */
int64_t colibri_state_bytes(int backend, const void *header, int num_slots, int context);
/* Makes a model of a checked file header, its weights (struct Weights, struct Layer[num_layers]), a zeroed state block
 * and a batch. The caller fills State.place before the first step. */
int colibri_bind(void *model, int backend, const void *header, const void *weights, const void *layers, void *state,
                 void *batch, int num_slots, int context, int num_threads, void *stream);
/* Copies a mapped file's bytes to the device's `target`, with threads that fill two chunks each, page-locked ones. */
int colibri_upload(void *target, const void *source, int64_t bytes, void *chunks, int64_t chunk_bytes,
                   int num_threads, void *stream);
/* One step over the model's batch: embed, layers, logits, sampled tokens. num_tokens, num_logits: launch sizes. */
int colibri_forward(void *model, int num_tokens, int num_logits);
/* Part `part` of that step, or of a bare stack's: 0 up to the first router, then from one router to the next,
 * num_layers to the end. */
int colibri_forward_part(void *model, int num_tokens, int num_logits, int part);
/* Other logits of the latest step's num_tokens tokens, by the batch's logit_rows and samplers as they are now. */
int colibri_forward_logits(void *model, int num_tokens, int num_logits);
/* Draws or scores the token of each struct Draw, with host threads; of either backend's logits. */
int colibri_draw(void *draws, int num_draws, int num_threads);
/* One step of a bare MoE stack, in place on state.x. */
int colibri_forward_stack(void *model, int num_tokens);
/* One op of ops.h by its name, on the model's state as colibri_forward would call it: for tests and benchmarks. */
int colibri_run_op(void *model, const char *op, int num_rows, int layer);
/* Waits until no thread reads for a step that is over: call it before memory of a model is given back. */
int colibri_rest(void);
/* Turns a fault that the step left in the batch into an error. Call it when the step has completed. */
int colibri_check(const void *model);
/* From now on, a fault in that mapping of a file (cut off by another, or on a disk that fails) writes the line and
 * exits with 2. */
int colibri_guard(const void *data, int64_t bytes, const char *line);
/* Ends one colibri_guard of that mapping, and waits until no thread reads it. */
int colibri_unguard(const void *data);
/* Makes the panel of few bits (INT8, INT4, FP8) whose weights are the nearest to 64 rows of `columns` wide weights of
 * dtype `source`, all finite. unit: with INT8 and INT4 the tensor's scale, a power of two. */
int colibri_search(const void *rows, int source, int64_t columns, int dtype, int group, float unit, void *panel,
                   int num_threads);
/* Reads `bytes` at `data` with all threads, as fast as the machine can: the ceiling that decode is measured against. */
double colibri_read_sum(const void *data, int64_t bytes, int num_threads);
/* Fused multiply-adds a second over all threads, measured for about `seconds`. */
double colibri_fma_rate(double seconds, int num_threads);

#pragma GCC visibility pop

#endif
