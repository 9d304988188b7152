/* Kernels for a CPU: what a decode step does to a few tokens, without the cost of a dozen small operations each.
 *
 * native.py compiles this file once for each element type, for the machine that it runs on, where a C compiler is there.
 * Vectors are GCC's, 16 floats wide: the compiler makes of them what the machine has. All arithmetic is in fp32.
 * Shape letters are those of the kernels: T tokens, B requests, H query heads, K key-value heads, D head size.
 */
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

static inline float sum_of(vec x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
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

static void copy_in(float *to, const element *from, long count) {
    long i = 0;
    for (; i + W <= count; i += W) *(vec *)(to + i) = load(from + i);
    for (; i < count; i++) to[i] = get(from + i);
}

static void copy_out(element *to, const float *from, long count) {
    long i = 0;
    for (; i + W <= count; i += W) store(to + i, *(const vec *)(from + i));
    for (; i < count; i++) put(to + i, from[i]);
}

#define DEPTH 12 /* rows of a weight that are held in registers at a time, two vectors of each */

/* total [rows, stride] += x [rows, DEPTH of inner] lines [DEPTH, columns] for the columns n to n + 2 W. */
static inline void product_block(const float *x, const element *lines, float *total, long rows, long inner, long columns,
                                 long stride) {
    vec left[DEPTH], right[DEPTH];
    for (int j = 0; j < DEPTH; j++) {
        const element *line = lines + j * columns;
        left[j] = load(line);
        right[j] = load(line + W);
        __builtin_prefetch(line + DEPTH * columns);
        __builtin_prefetch((const char *)(line + DEPTH * columns) + 64);
    }
    for (long m = 0; m < rows; m++) {
        const float *row = x + m * inner;
        float *sums = total + m * stride;
        vec first = *(vec *)sums, second = *(vec *)(sums + W);
        for (int j = 0; j < DEPTH; j++) {
            vec factor = splat(row[j]);
            first += left[j] * factor;
            second += right[j] * factor;
        }
        *(vec *)sums = first;
        *(vec *)(sums + W) = second;
    }
}

/* total [rows, stride] += x [rows, inner] weight [inner, columns], of which `width` columns. A few rows of the weight at
 * a time are held in registers while all rows of x pass by, and the next ones are fetched ahead. */
static void product(const float *x, const element *weight, float *total, long rows, long inner, long columns, long width,
                    long stride) {
    long k = 0;
    for (; k + DEPTH <= inner; k += DEPTH)
        for (long n = 0; n + 2 * W <= width; n += 2 * W)
            product_block(x + k, weight + k * columns + n, total + n, rows, inner, columns, stride);
    for (; k < inner; k++)
        for (long n = 0; n < width / (2 * W) * 2 * W; n += W)
            for (long m = 0; m < rows; m++)
                *(vec *)(total + m * stride + n) += load(weight + k * columns + n) * x[m * inner + k];
    for (k = 0; k < inner; k++) /* the columns at the end that fill no two vectors */
        for (long m = 0; m < rows; m++)
            for (long n = width / (2 * W) * 2 * W; n < width; n++)
                total[m * stride + n] += get(weight + k * columns + n) * x[m * inner + k];
}

/* y [rows, columns] = x [rows, inner] weight [inner, columns] (+ bias [columns]), as elements, or `wide` as the float
 * sums themselves. Threads take `tile` columns at a time, whose sums lie close together. Answers 1 where there is no
 * memory for the sums, else 0. */
int linear(const element *x, const element *weight, const element *bias, void *y, long rows, long inner, long columns,
           long tile, int wide, int threads) {
    long tiles = (columns + tile - 1) / tile, stride = tile + W; /* no power of two: rows must not share cache sets */
    float *scratch = malloc((rows * inner + tiles * rows * stride) * sizeof(float));
    if (!scratch) return 1;
    copy_in(scratch, x, rows * inner);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < tiles; t++) {
        long first = t * tile, width = first + tile < columns ? tile : columns - first;
        float *total = scratch + rows * inner + t * rows * stride;
        for (long m = 0; m < rows; m++)
            if (bias) copy_in(total + m * stride, bias + first, width);
            else memset(total + m * stride, 0, width * sizeof(float));
        product(scratch, weight + first, total, rows, inner, columns, width, stride);
        for (long m = 0; m < rows; m++)
            if (wide) memcpy((float *)y + m * columns + first, total + m * stride, width * sizeof(float));
            else copy_out((element *)y + m * columns + first, total + m * stride, width);
    }
    free(scratch);
    return 0;
}

/* y = norm(residual += x) * weight, or of x itself where residual is null. Rows of x are x_stride elements apart. */
void rms_norm(const element *x, const element *weight, element *residual, element *y, long rows, long size,
              long x_stride, float eps) {
    for (long row = 0; row < rows; row++) {
        const element *source = x + row * x_stride;
        if (residual) {
            element *stream = residual + row * size;
            for (long i = 0; i < size; i += W) store(stream + i, load(stream + i) + load(source + i));
            source = stream;
        }
        vec squares = (vec){};
        for (long i = 0; i < size; i += W) squares += load(source + i) * load(source + i);
        float factor = 1.0f / sqrtf(sum_of(squares) / size + eps);
        for (long i = 0; i < size; i += W) store(y + row * size + i, load(source + i) * factor * load(weight + i));
    }
}

/* y [rows, size] = silu(gate) * up; a row of x holds gate and up, `size` elements each. */
void silu_and_mul(const element *x, element *y, long rows, long size, long x_stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const element *gate = x + row * x_stride, *up = gate + size;
        for (long i = 0; i < size; i += W) {
            vec value = load(gate + i);
            store(y + row * size + i, value / (1.0f + exp_of(-value)) * load(up + i));
        }
    }
}

/* Turns the halves of each head of x [T, heads, ...] in place; cos and sin [T, half]. */
void rotary(element *x, const float *cos, const float *sin, long tokens, long heads, long half, long token_stride,
            long head_stride) {
    for (long t = 0; t < tokens; t++)
        for (long h = 0; h < heads; h++) {
            element *a = x + t * token_stride + h * head_stride, *b = a + half;
            for (long i = 0; i < half; i += W) {
                vec c = *(vec *)(cos + t * half + i), s = *(vec *)(sin + t * half + i);
                vec first = load(a + i), second = load(b + i);
                store(a + i, first * c - second * s);
                store(b + i, second * c + first * s);
            }
        }
}

/* One key-value head of one request. keys, values: its first entry of slot 0; slots lie slot_stride elements apart. */
struct head {
    const element *q, *keys, *values;
    const int32_t *table;
    element *out;
    long q_stride, group, size, block_size, slot_stride, start, context;
    float scale, soft_cap;
};

static long slot_of(const struct head *h, long position) {
    return ((long)h->table[position / h->block_size] * h->block_size + position % h->block_size) * h->slot_stride;
}

/* scores [group, width] of the positions from start on. */
static void score(const struct head *h, float *scores, long width) {
    for (long p = 0; p < h->context - h->start; p++) {
        const element *key = h->keys + slot_of(h, h->start + p);
        for (long g = 0; g < h->group; g++) {
            vec dot = (vec){};
            for (long d = 0; d < h->size; d += W) dot += load(h->q + g * h->q_stride + d) * load(key + d);
            float value = sum_of(dot) * h->scale;
            scores[g * width + p] = h->soft_cap > 0 ? h->soft_cap * tanhf(value / h->soft_cap) : value;
        }
    }
}

/* Scores of one query head become weights that add up to 1; what lies past `count` becomes 0. */
static void softmax(float *row, long count, long width) {
    float top = -INFINITY;
    for (long p = 0; p < count; p++) top = row[p] > top ? row[p] : top;
    for (long p = count; p < width; p++) row[p] = -INFINITY;
    vec total = (vec){};
    for (long p = 0; p < width; p += W) {
        vec weight = exp_of(*(vec *)(row + p) - top);
        *(vec *)(row + p) = weight;
        total += weight;
    }
    float factor = 1.0f / sum_of(total);
    for (long p = 0; p < count; p++) row[p] *= factor;
}

static void attend(const struct head *h, float *scores) {
    long count = h->context - h->start, width = (count + W - 1) / W * W;
    float *total = scores + h->group * width;
    score(h, scores, width);
    for (long g = 0; g < h->group; g++) softmax(scores + g * width, count, width);
    memset(total, 0, h->group * h->size * sizeof(float));
    for (long p = 0; p < count; p++) {
        const element *value = h->values + slot_of(h, h->start + p);
        for (long g = 0; g < h->group; g++)
            for (long d = 0; d < h->size; d += W)
                *(vec *)(total + g * h->size + d) += load(value + d) * scores[g * width + p];
    }
    for (long i = 0; i < h->group * h->size; i += W) store(h->out + i, *(vec *)(total + i));
}

/* out [B, H, D] of q [B, H, D] against the paged caches [blocks, S, K, D]; a context of 0 gives zeros.
 * sizes: B, H, K, D, S, stride of a query token, of a query head, of a block table, the longest context, the window or 0.
 * Answers 1 where there is no memory for the scores, else 0. */
int attention_decode(const element *q, const element *k_cache, const element *v_cache, const int32_t *tables,
                     const int32_t *contexts, element *out, const int64_t *sizes, float scale, float soft_cap,
                     int threads) {
    long heads = sizes[1], kv_heads = sizes[2], size = sizes[3], window = sizes[9], failed = 0;
    long group = heads / kv_heads, items = sizes[0] * kv_heads;
    if (items * group * size * sizes[8] < 32768) threads = 1; /* waking a thread would cost more */
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : failed)
    for (long item = 0; item < items; item++) {
        long request = item / kv_heads, kv_head = item % kv_heads, context = contexts[request];
        element *result = out + (request * heads + kv_head * group) * size;
        if (context <= 0) {
            memset(result, 0, group * size * sizeof(element));
            continue;
        }
        long start = window > 0 && context > window ? context - window : 0;
        float *scratch = malloc(group * (context - start + W + size) * sizeof(float));
        if (!scratch) {
            failed++;
            continue;
        }
        struct head h = {q + request * sizes[5] + kv_head * group * sizes[6], k_cache + kv_head * size,
                         v_cache + kv_head * size, tables + request * sizes[7], result, sizes[6], group, size, sizes[4],
                         kv_heads * size, start, context, scale, soft_cap};
        attend(&h, scratch);
        free(scratch);
    }
    return failed > 0;
}

/* cache[slots[t]] = value[t], entries of `width` elements; a negative slot is padding. Answers -1, or the first token
 * whose slot lies past the cache; those before it are written then. */
long cache_write(const element *value, element *cache, const int64_t *slots, long tokens, long width, long stride,
                 long capacity) {
    for (long t = 0; t < tokens; t++) {
        if (slots[t] >= capacity) return t;
        if (slots[t] >= 0) memcpy(cache + slots[t] * width, value + t * stride, width * sizeof(element));
    }
    return -1;
}
