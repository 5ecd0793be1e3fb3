/* Loads weights: from the bytes of each format to vectors of numbers. Holds what else vectors of one instruction set
 * need. A file that includes this sets LANES (floats in a vector) and AVX2 (1: fused multiply-add and f16 conversion in
 * hardware) first, so that the same text is compiled for each. */
#ifndef FORMATS_H
#define FORMATS_H

#include <string.h>
#if AVX2
#include <immintrin.h>
#endif

#include "host.h"

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE ivec load_ints(const void *p) { ivec v; memcpy(&v, p, sizeof v); return v; }
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

#if AVX2 && LANES == 16
INLINE vec splat(float x) { return _mm512_set1_ps(x); }
INLINE vec fma_(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vec load_bf16(const void *p) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
INLINE ivec load_bytes(const void *p) { return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#elif AVX2
INLINE vec splat(float x) { return _mm256_set1_ps(x); }
INLINE vec fma_(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float fma_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE vec load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec load_bf16(const void *p) {
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
INLINE ivec load_bytes(const void *p) { return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
INLINE vec splat(float x) { return (vec){x, x, x, x}; }
INLINE vec fma_(vec a, vec b, vec c) { return a * b + c; }
INLINE float fma_one(float a, float b, float c) { return a * b + c; }
INLINE ivec load_u16(const void *from) {
    const uint16_t *p = from;
    return (ivec){p[0], p[1], p[2], p[3]};
}
/* Shifts exponent and mantissa into place and corrects the exponent by a multiplication, which also makes
 * subnormal f16 normal; inf and NaN keep the largest exponent. */
INLINE vec load_f16(const void *p) {
    ivec half = load_u16(p), magnitude = (half & 0x7fff) << 13;
    ivec special = (half & 0x7c00) == 0x7c00;
    ivec number = (ivec)((vec)magnitude * 0x1p112f);
    return (vec)((special & (magnitude | 0x7f800000)) | (~special & number) | (half & 0x8000) << 16);
}
INLINE vec load_bf16(const void *p) { return (vec)(load_u16(p) << 16); }
INLINE ivec load_bytes(const void *from) {
    const uint8_t *p = from;
    return (ivec){p[0], p[1], p[2], p[3]};
}
#endif

/* a * b + c, rounded once on every machine: where weights of few bits are, bits do not depend on the machine. */
INLINE vec fused(vec a, vec b, vec c) {
#if AVX2
    return fma_(a, b, c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Numbers of e4m3, from their bytes. Below 2^-6 there is no leading 1: it is put there, and subtracted. */
INLINE vec from_e4m3(ivec code) {
    ivec magnitude = code & 0x7f, is_small = magnitude < 8;
    vec number = (vec)((magnitude << 20) + (120 << 23) + (is_small & 1 << 23)) - (vec)(is_small & (127 - 6) << 23);
    return (vec)((ivec)number | (code & 0x80) << 24);
}

/* Scales of LANES rows of a group, from row `row` on; of MXFP4 half of them, since its weights are doubled. */
INLINE vec load_scales(const uint8_t *table, int row, int dtype) {
    if (dtype == DTYPE_FP8) return load((const float *)table + row);
    if (dtype != DTYPE_MXFP4) return load_f16((const uint16_t *)table + row);
    ivec exponent = load_bytes(table + row) - 1; /* of 2^(exponent - 127); 2^-127 and 2^-128 are subnormal */
    ivec is_small = exponent < 1;
    return (vec)((is_small & (exponent + 2) << 21) | (~is_small & exponent << 23));
}

/* A vector of a panel's wide weights from so many bytes on. */
INLINE vec load_weight(const void *panel, int64_t offset, int dtype) {
    const void *from = (const char *)panel + offset;
    return dtype == DTYPE_F32 ? load(from) : dtype == DTYPE_F16 ? load_f16(from) : load_bf16(from);
}

#endif
