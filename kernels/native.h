/* What the native kernels share: vectors of floats, and elements that are loaded into and stored from them.
 *
 * Vectors are GCC's, 16 floats wide: the compiler makes of them what the machine has. All arithmetic is in fp32.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define W 16 /* floats a vector */

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

static inline vec splat(float x) { return x - (vec){}; } /* 0 + x would not be x for -0, and is added at run time */
static inline vec choose(lanes mask, vec a, vec b) { return (vec)((mask & (lanes)a) | (~mask & (lanes)b)); }

#ifdef BFLOAT16
typedef uint16_t element;

static inline vec load(const element *p) { return (vec)(__builtin_convertvector(*(const halves *)p, lanes) << 16); }

static inline void store(element *p, vec x) {
    lanes bits = (lanes)x, odd = (bits >> 16) & 1; /* to nearest, ties to even; no number stays none */
    lanes rounded = ((bits + 0x7fff + odd) >> 16) & 0xffff;
    lanes is_nan = x != x;
    *(halves *)p = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), halves);
}

static inline float get(const element *p) {
    uint32_t bits = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline void put(element *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof x);
    *p = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
typedef float element;

static inline vec load(const element *p) { return *(const vec *)p; }
static inline void store(element *p, vec x) { *(vec *)p = x; }
static inline float get(const element *p) { return *p; }
static inline void put(element *p, float x) { *p = x; }
#endif

typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

static inline float sum_of(vec x) {
    union { vec whole; vec8 half[2]; } a = {x};
    union { vec8 whole; vec4 half[2]; } b = {a.half[0] + a.half[1]};
    vec4 c = b.half[0] + b.half[1];
    return (c[0] + c[1]) + (c[2] + c[3]);
}

/* exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, where the series up to r^7 errs by less than 1e-8. Past the ends of the
 * normal numbers it is 0 and infinity; NaN stays NaN. */
static inline vec exp_of(vec x) {
    vec bounded = choose(x < -87.0f, splat(-87.0f), choose(x > 88.0f, splat(88.0f), x));
    vec shifted = bounded * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 leaves n in the low bits */
    vec n = shifted - 12582912.0f;
    vec r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = splat(1.0f / 5040);
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    vec scaled = (vec)((lanes)y + (((lanes)shifted - 0x4b400000) << 23));
    scaled = choose(x < -87.0f, (vec){}, choose(x > 88.0f, splat(INFINITY), scaled));
    return choose(x != x, x, scaled);
}

static inline void copy_in(float *to, const element *from, long count) {
    long i = 0;
    for (; i + W <= count; i += W) *(vec *)(to + i) = load(from + i);
    for (; i < count; i++) to[i] = get(from + i);
}

static inline void copy_out(element *to, const float *from, long count) {
    long i = 0;
    for (; i + W <= count; i += W) store(to + i, *(const vec *)(from + i));
    for (; i < count; i++) put(to + i, from[i]);
}
