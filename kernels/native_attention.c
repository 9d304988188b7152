/* Attention against the paged cache: of one token a request (decode), and of many (prefill). */
#include "native.h"

#define AHEAD 6 /* slots between an entry that is read and one that is fetched */

/* One key-value head of one request. keys, values: its first entry of slot 0; slots lie slot_stride elements apart. */
struct head {
    const element *q, *keys, *values;
    const int32_t *table;
    element *out;
    long q_stride, group, size, block_size, slot_stride, start, context;
    float scale, soft_cap;
};

/* Where the entry of a position begins, counted in elements from that of slot 0. */
static long entry_of(const struct head *h, long position) {
    return ((long)h->table[position / h->block_size] * h->block_size + position % h->block_size) * h->slot_stride;
}

/* Entries lie too far apart for the processor to see where the next ones are: fetches what is a few slots ahead. */
static inline void fetch_ahead(const struct head *h, const element *entry) {
    const char *next = (const char *)(entry + AHEAD * h->slot_stride);
    for (long i = 0; i < h->size * (long)sizeof(element); i += 64) __builtin_prefetch(next + i);
}

/* scores [group, width] of the positions from start on. */
static void score(const struct head *h, float *scores, long width) {
    for (long p = 0; p < h->context - h->start; p++) {
        const element *key = h->keys + entry_of(h, h->start + p);
        fetch_ahead(h, key);
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
        const element *value = h->values + entry_of(h, h->start + p);
        fetch_ahead(h, value);
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

#define ROWS 32  /* tokens of a head that are attended with at a time */
#define KEYS 256 /* positions whose scores are held at a time */
#define LINE 32  /* keys that lie side by side once packed */
#define STEP 8   /* tokens whose scores are in registers */
#define MOST 256 /* largest head size */

/* What the threads share of one key-value head: keys [positions / LINE, D, LINE] and values [positions, D] of the
 * positions from `start` on, as floats, padded with zeros. */
struct context {
    float *keys, *values;
    long start, end, size, window;
    float soft_cap;
};

static void pack_context(const struct context *c, const element *keys, const element *values, const int32_t *table,
                         long block_size, long slot_stride) {
    long count = c->end - c->start, padded = (count + LINE - 1) / LINE * LINE;
    memset(c->keys + count / LINE * LINE * c->size, 0, (padded - count / LINE * LINE) * c->size * sizeof(float));
    memset(c->values + count * c->size, 0, (padded - count) * c->size * sizeof(float));
    for (long i = 0; i < count; i++) {
        long position = c->start + i;
        long slot = (long)table[position / block_size] * block_size + position % block_size;
        const element *key = keys + slot * slot_stride;
        float *column = c->keys + i / LINE * LINE * c->size + i % LINE;
        for (long d = 0; d < c->size; d++) column[d * LINE] = get(key + d);
        copy_in(c->values + i * c->size, values + slot * slot_stride, c->size);
    }
}

/* scores [STEP, KEYS] of q [STEP, D] with LINE keys. */
static void score_line(const float *q, const float *keys, float *scores, long size) {
    vec sums[STEP][2] = {};
    for (long d = 0; d < size; d++) {
        vec left = *(const vec *)(keys + d * LINE), right = *(const vec *)(keys + d * LINE + W);
        for (int r = 0; r < STEP; r++) {
            vec factor = splat(q[r * size + d]);
            sums[r][0] += left * factor;
            sums[r][1] += right * factor;
        }
    }
    for (int r = 0; r < STEP; r++) {
        *(vec *)(scores + r * KEYS) = sums[r][0];
        *(vec *)(scores + r * KEYS + W) = sums[r][1];
    }
}

/* total [4, D], of which `vectors` * W columns, += weights [4, KEYS] values [count, D]. */
static inline __attribute__((always_inline)) void add_values(const float *weights, const float *values, float *total,
                                                             long count, long size, int vectors) {
    vec sums[4][4];
    for (int r = 0; r < 4; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = *(vec *)(total + r * size + v * W);
    for (long p = 0; p < count; p++)
        for (int r = 0; r < 4; r++) {
            vec factor = splat(weights[r * KEYS + p]);
            for (int v = 0; v < vectors; v++) sums[r][v] += *(const vec *)(values + p * size + v * W) * factor;
        }
    for (int r = 0; r < 4; r++)
        for (int v = 0; v < vectors; v++) *(vec *)(total + r * size + v * W) = sums[r][v];
}

/* The scores of one row for the positions from `first` on become weights; the row's sums so far are brought to the new
 * maximum. `position` is the row's own. */
static void weigh(const struct context *c, float *scores, float *total, float *top, float *sum, long first, long count,
                  long position) {
    long lowest = c->window > 0 && position - c->window + 1 > first ? position - c->window + 1 - first : 0;
    long above = position + 1 - first < count ? position + 1 - first : count; /* past the last that is seen */
    if (above <= lowest) {
        memset(scores, 0, count * sizeof(float));
        return;
    }
    if (c->soft_cap > 0)
        for (long p = 0; p < count; p += W) { /* tanh(x) = 1 - 2 / (exp(2 x) + 1) */
            vec *x = (vec *)(scores + p);
            *x = c->soft_cap - 2 * c->soft_cap / (exp_of(*x * (2 / c->soft_cap)) + 1.0f);
        }
    for (long p = 0; p < lowest; p++) scores[p] = -INFINITY;
    for (long p = above; p < count; p++) scores[p] = -INFINITY;
    vec highest = *(vec *)scores;
    for (long p = W; p < count; p += W) highest = choose(*(vec *)(scores + p) > highest, *(vec *)(scores + p), highest);
    float new_top = *top;
    for (int i = 0; i < W; i++) new_top = highest[i] > new_top ? highest[i] : new_top;
    vec added = (vec){};
    for (long p = 0; p < count; p += W) {
        vec weight = exp_of(*(vec *)(scores + p) - new_top);
        *(vec *)(scores + p) = weight;
        added += weight;
    }
    float factor = exp_of(splat(*top - new_top))[0];
    *sum = *sum * factor + sum_of(added);
    *top = new_top;
    for (long d = 0; d < c->size; d += W) *(vec *)(total + d) *= factor;
}

/* out rows, `out_stride` apart, of q rows, `q_stride` apart, whose first is at `position`. */
static void attend_rows(const struct context *c, const element *q, element *out, long rows, long position,
                        long q_stride, long out_stride, float scale) {
    float queries[ROWS * MOST] __attribute__((aligned(64))), total[ROWS * MOST] __attribute__((aligned(64)));
    float scores[ROWS * KEYS] __attribute__((aligned(64))), top[ROWS], sum[ROWS];
    long size = c->size, padded = (rows + STEP - 1) / STEP * STEP;
    memset(queries, 0, padded * size * sizeof(float));
    memset(total, 0, padded * size * sizeof(float));
    for (long r = 0; r < rows; r++) {
        for (long d = 0; d < size; d += W) *(vec *)(queries + r * size + d) = load(q + r * q_stride + d) * scale;
        top[r] = -INFINITY;
        sum[r] = 0;
    }
    long begin = c->window > 0 && position - c->window + 1 > c->start ? position - c->window + 1 : c->start;
    begin = c->start + (begin - c->start) / LINE * LINE;
    for (long first = begin; first < position + rows; first += KEYS) {
        long count = position + rows - first < KEYS ? position + rows - first : KEYS;
        count = (count + LINE - 1) / LINE * LINE;
        for (long r = 0; r < padded; r += STEP)
            for (long p = 0; p < count; p += LINE)
                score_line(queries + r * size, c->keys + (first - c->start + p) * size, scores + r * KEYS + p, size);
        for (long r = 0; r < rows; r++)
            weigh(c, scores + r * KEYS, total + r * size, top + r, sum + r, first, count, position + r);
        const float *values = c->values + (first - c->start) * size;
        for (long r = 0; r < padded; r += 4) {
            long d = 0;
            for (; d + 4 * W <= size; d += 4 * W)
                add_values(scores + r * KEYS, values + d, total + r * size + d, count, size, 4);
            for (; d < size; d += W) add_values(scores + r * KEYS, values + d, total + r * size + d, count, size, 1);
        }
    }
    for (long r = 0; r < rows; r++)
        for (long d = 0; d < size; d += W) store(out + r * out_stride + d, *(vec *)(total + r * size + d) / sum[r]);
}

/* out [T, H, D] of q [T, H, D] against the paged caches [blocks, S, K, D]; request b has the rows starts[b] to
 * starts[b + 1], which are the last of its context. sizes: B, H, K, D, S, stride of a query token, of a query head, of a
 * block table, the window or 0. Answers 1 where there is no memory for a context in floats, else 0. */
int attention_prefill(const element *q, const element *k_cache, const element *v_cache, const int32_t *tables,
                      const int32_t *starts, const int32_t *contexts, element *out, const int64_t *sizes, float scale,
                      float soft_cap, int threads) {
    long heads = sizes[1], kv_heads = sizes[2], size = sizes[3], window = sizes[8], group = heads / kv_heads;
    for (long request = 0; request < sizes[0]; request++) {
        long rows = starts[request + 1] - starts[request], before = contexts[request] - rows;
        if (rows <= 0) continue;
        long lowest = window > 0 && before - window + 1 > 0 ? before - window + 1 : 0;
        long padded = (contexts[request] - lowest + LINE - 1) / LINE * LINE, blocks = (rows + ROWS - 1) / ROWS;
        float *memory = aligned_alloc(64, 2 * kv_heads * padded * size * sizeof(float));
        if (!memory) return 1;
#pragma omp parallel num_threads(threads) if (rows * contexts[request] > 256)
        {
#pragma omp for schedule(static)
            for (long head = 0; head < kv_heads; head++) {
                float *keys = memory + 2 * head * padded * size;
                struct context c = {keys, keys + padded * size, lowest, contexts[request], size, window, soft_cap};
                pack_context(&c, k_cache + head * size, v_cache + head * size, tables + request * sizes[7], sizes[4],
                             kv_heads * size);
            }
#pragma omp for schedule(dynamic)
            for (long item = heads * blocks - 1; item >= 0; item--) { /* the long rows first */
                long head = item % heads, block = item / heads, row = block * ROWS;
                float *keys = memory + 2 * (head / group) * padded * size;
                struct context c = {keys, keys + padded * size, lowest, contexts[request], size, window, soft_cap};
                long count = rows - row < ROWS ? rows - row : ROWS, token = starts[request] + row;
                attend_rows(&c, q + token * sizes[5] + head * sizes[6], out + (token * heads + head) * size, count,
                            before + row, sizes[5], heads * size, scale);
            }
        }
        free(memory);
    }
    return 0;
}
