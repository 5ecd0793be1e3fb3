/* Keeps the last error of each thread, one message in the form "where: name=got, expected rule; fix". */
#ifndef COLIBRI_ERROR_H
#define COLIBRI_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/* Sets the message (printf format) and returns -1, so that an op can `return fail(...)`. */
int fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define TRY(call) do { if ((call) != 0) return -1; } while (0)

#ifdef __cplusplus
}
#endif

#endif
