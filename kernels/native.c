/* Kernels for a CPU: what a decode step does to a few tokens, without the cost of a dozen small operations each.
 *
 * native.py compiles the native files once for each element type, for the machine that it runs on, where a C compiler
 * is there. Shape letters are those of the kernels: T tokens, B requests, H query heads, K key-value heads, D head size.
 */
#include "native.h"

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
              long x_stride, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows >= 8)
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

/* y = the head x with its pairs turned: halves of 2 half elements, or neighbours. What follows them in y is left alone.
 * x and y may be one. */
static inline void turn(const element *x, element *y, const float *cos, const float *sin, long half, int interleaved) {
    long i = 0, apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    if (!interleaved)
        for (; i + W <= half; i += W) {
            vec c = *(const vec *)(cos + i), s = *(const vec *)(sin + i);
            vec a = load(x + i), b = load(x + half + i);
            store(y + i, a * c - b * s);
            store(y + half + i, b * c + a * s);
        }
    for (; i < half; i++) {
        float a = get(x + i * step), b = get(x + i * step + apart);
        put(y + i * step, a * cos[i] - b * sin[i]);
        put(y + i * step + apart, b * cos[i] + a * sin[i]);
    }
}

/* Turns the halves of each head of x [T, heads, ...] in place; cos and sin [T, half]. */
void rotary(element *x, const float *cos, const float *sin, long tokens, long heads, long half, long token_stride,
            long head_stride) {
    for (long t = 0; t < tokens; t++)
        for (long h = 0; h < heads; h++) {
            element *head = x + t * token_stride + h * head_stride;
            turn(head, head, cos + t * half, sin + t * half, half, 0);
        }
}

/* qkv [T, heads + 2 kv_heads, size]: turns the query heads in place; k_cache[slots[t]] = turned key heads and
 * v_cache[slots[t]] = value heads, where slots[t] is not negative. Answers -1, or the first token whose slot lies past
 * the cache, and then nothing is written. One thread: a thousand tokens take less than waking a second one may. */
long rotary_cache_write(element *qkv, const float *cos, const float *sin, element *k_cache, element *v_cache,
                        const int64_t *slots, long tokens, long heads, long kv_heads, long size, long half,
                        long token_stride, long capacity, int interleaved) {
    for (long t = 0; t < tokens; t++)
        if (slots[t] >= capacity) return t;
    long width = kv_heads * size;
    for (long t = 0; t < tokens; t++) {
        const float *c = cos + t * half, *s = sin + t * half;
        element *q = qkv + t * token_stride, *k = q + heads * size;
        for (long h = 0; h < heads; h++) turn(q + h * size, q + h * size, c, s, half, interleaved);
        if (slots[t] < 0) continue;
        element *entry = k_cache + slots[t] * width;
        for (long h = 0; h < kv_heads; h++) {
            turn(k + h * size, entry + h * size, c, s, half, interleaved);
            long rest = h * size + 2 * half;
            memcpy(entry + rest, k + rest, (size - 2 * half) * sizeof(element));
        }
        memcpy(v_cache + slots[t] * width, k + width, width * sizeof(element));
    }
    return -1;
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
