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

/* Entries lie too far apart for the processor to see where the next ones are. */
static inline void fetch(const element *entry, long size) {
    for (long i = 0; i < size * (long)sizeof(element); i += 64) __builtin_prefetch((const char *)entry + i);
}

/* Fetches what is a few slots ahead. */
static inline void fetch_ahead(const struct head *h, const element *entry) {
    fetch(entry + AHEAD * h->slot_stride, h->size);
}

/* scores [count] of one query head; places: where each position's entry begins. */
static inline __attribute__((always_inline)) void score(const struct head *h, const element *q, const long *places,
                                                        float *scores, long count, long size) {
    for (long p = 0; p < count; p++) {
        const element *key = h->keys + places[p];
        fetch(h->keys + places[p + AHEAD < count ? p + AHEAD : p], size);
        vec even = (vec){}, odd = (vec){};
        long d = 0;
        for (; d + 2 * W <= size; d += 2 * W) {
            even += load(q + d) * load(key + d);
            odd += load(q + d + W) * load(key + d + W);
        }
        if (d < size) even += load(q + d) * load(key + d);
        float value = sum_of(even + odd) * h->scale;
        scores[p] = h->soft_cap > 0 ? h->soft_cap * tanhf(value / h->soft_cap) : value;
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

/* out [vectors * W] = the sum of the positions' values from column `d` on, by their weights. */
static inline __attribute__((always_inline)) void gather(const struct head *h, const long *places, const float *weights,
                                                         element *out, long count, long d, int vectors) {
    vec sums[4] = {};
    for (long p = 0; p < count; p++) {
        const element *value = h->values + places[p] + d;
        fetch(h->values + places[p + AHEAD < count ? p + AHEAD : p] + d, vectors * W);
        for (int v = 0; v < vectors; v++) sums[v] += load(value + v * W) * weights[p];
    }
    for (int v = 0; v < vectors; v++) store(out + v * W, sums[v]);
}

/* scratch: count longs, and a row of floats for the scores of a query head. */
static inline __attribute__((always_inline)) void attend_sized(const struct head *h, long *places, long size) {
    long count = h->context - h->start, width = (count + W - 1) / W * W, d;
    float *scores = (float *)(places + count);
    for (long p = 0; p < count; p++) places[p] = entry_of(h, h->start + p);
    for (long g = 0; g < h->group; g++) {
        element *out = h->out + g * size;
        score(h, h->q + g * h->q_stride, places, scores, count, size);
        softmax(scores, count, width);
        for (d = 0; d + 4 * W <= size; d += 4 * W) gather(h, places, scores, out + d, count, d, 4);
        for (; d < size; d += W) gather(h, places, scores, out + d, count, d, 1);
    }
}

static void attend(const struct head *h, long *places) {
    if (h->size == 64) attend_sized(h, places, 64); /* the usual sizes, known to the compiler */
    else if (h->size == 128) attend_sized(h, places, 128);
    else attend_sized(h, places, h->size);
}

/* What an attention kernel answers where it does not answer 0. */
#define NO_MEMORY 1
#define UNSOUND 2

/* Whether a request's numbers can be followed: its context, `rows` of it new, is not above `most`, and its blocks from
 * that of position `start` on are some of the cache's. */
static int is_sound(const int32_t *table, long context, long rows, long start, long most, long block_size,
                    long blocks) {
    if (rows < 0 || context < rows || context > most) return 0;
    for (long i = start / block_size; i * block_size < context; i++)
        if (table[i] < 0 || table[i] >= blocks) return 0;
    return 1;
}

static inline long first_seen(long position, long window) {
    return window > 0 && position + 1 > window ? position + 1 - window : 0;
}

/* out [B, H, D] of q [B, H, D] against the paged caches [blocks, S, K, D]; a context of 0 gives zeros.
 * sizes: B, H, K, D, S, stride of a query token, of a query head, of a block table, the longest context, the window or 0,
 * blocks of a cache. Answers UNSOUND before anything is read or written. */
int attention_decode(const element *q, const element *k_cache, const element *v_cache, const int32_t *tables,
                     const int32_t *contexts, element *out, const int64_t *sizes, float scale, float soft_cap,
                     int threads) {
    long heads = sizes[1], kv_heads = sizes[2], size = sizes[3], window = sizes[9], failed = 0;
    long group = heads / kv_heads, items = sizes[0] * kv_heads;
    for (long b = 0; b < sizes[0]; b++)
        if (!is_sound(tables + b * sizes[7], contexts[b], 0, first_seen(contexts[b] - 1, window), sizes[8], sizes[4],
                      sizes[10]))
            return UNSOUND;
    if (items * group * size * sizes[8] < 32768) threads = 1; /* waking a thread would cost more */
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : failed)
    for (long item = 0; item < items; item++) {
        long request = item / kv_heads, kv_head = item % kv_heads, context = contexts[request];
        element *result = out + (request * heads + kv_head * group) * size;
        if (context == 0) {
            memset(result, 0, group * size * sizeof(element));
            continue;
        }
        long start = first_seen(context - 1, window);
        long *scratch = malloc((context - start) * (sizeof(long) + sizeof(float)) + W * sizeof(float));
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
    return failed ? NO_MEMORY : 0;
}

#define ROWS 32  /* rows whose scores are held at a time: a row is a query head of a token */
#define KEYS 256 /* positions that are held at a time */
#define LINE 32  /* keys that lie side by side once packed */
#define STEP 8   /* rows whose scores are in registers */
#define MOST 256 /* rows of a key-value head that one thread takes, for which it packs the keys once */

/* Some tokens of one request with all query heads of one key-value head. A token's rows lie side by side: row r is head
 * r % group of token r / group, which is at `position` + r / group. */
struct part {
    struct head head; /* of the first token */
    long rows, position, window, token_stride, out_stride;
};

/* What a thread works in: keys [KEYS / LINE, D, LINE] and values [KEYS, D] of some positions, as floats; for each row its
 * query [D], what it sums up [D], and the maximum and sum of its weights so far. One piece of memory, which `keys` begins. */
struct scratch {
    float *keys, *values, *queries, *total, *top, *sum;
};

/* Room for `keys` positions and `rows` rows; all null where there is no memory. */
static struct scratch make_scratch(long keys, long rows, long size) {
    float *memory = malloc((2 * (keys + rows) * size + 2 * rows) * sizeof(float));
    if (!memory) return (struct scratch){};
    float *queries = memory + 2 * keys * size, *top = queries + 2 * rows * size;
    return (struct scratch){memory, memory + keys * size, queries, queries + rows * size, top, top + rows};
}

/* The keys and values of `count` positions from `first` on, with zeros for those below `lowest` and up to a whole line. */
static void pack_keys(const struct head *h, const struct scratch *s, long first, long count, long lowest) {
    long size = h->size, padded = (count + LINE - 1) / LINE * LINE;
    for (long i = 0; i < padded; i++) {
        float *column = s->keys + i / LINE * LINE * size + i % LINE, *row = s->values + i * size;
        if (first + i < lowest || i >= count) {
            for (long d = 0; d < size; d++) column[d * LINE] = 0;
            memset(row, 0, size * sizeof(float));
            continue;
        }
        long entry = entry_of(h, first + i);
        fetch_ahead(h, h->keys + entry);
        fetch_ahead(h, h->values + entry);
        for (long d = 0; d < size; d++) column[d * LINE] = get(h->keys + entry + d);
        copy_in(row, h->values + entry, size);
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
static void weigh(const struct part *p, float *scores, float *total, float *top, float *sum, long first, long count,
                  long position) {
    long lowest = first_seen(position, p->window) - first, above = position + 1 - first;
    float soft_cap = p->head.soft_cap;
    lowest = lowest > 0 ? lowest : 0;
    above = above < count ? above : count; /* past the last that is seen */
    if (above <= lowest) {
        memset(scores, 0, count * sizeof(float));
        return;
    }
    if (soft_cap > 0)
        for (long i = 0; i < count; i += W) { /* tanh(x) = 1 - 2 / (exp(2 x) + 1) */
            vec *x = (vec *)(scores + i);
            *x = soft_cap - 2 * soft_cap / (exp_of(*x * (2 / soft_cap)) + 1.0f);
        }
    for (long i = 0; i < lowest; i++) scores[i] = -INFINITY;
    for (long i = above; i < count; i++) scores[i] = -INFINITY;
    vec highest = *(vec *)scores;
    for (long i = W; i < count; i += W) highest = choose(*(vec *)(scores + i) > highest, *(vec *)(scores + i), highest);
    float new_top = *top;
    for (int i = 0; i < W; i++) new_top = highest[i] > new_top ? highest[i] : new_top;
    vec added = (vec){};
    for (long i = 0; i < count; i += W) {
        vec weight = exp_of(*(vec *)(scores + i) - new_top);
        *(vec *)(scores + i) = weight;
        added += weight;
    }
    float factor = exp_of(splat(*top - new_top))[0];
    *sum = *sum * factor + sum_of(added);
    *top = new_top;
    for (long d = 0; d < p->head.size; d += W) *(vec *)(total + d) *= factor;
}

/* Adds the packed positions from `first` on, `count` of them, to ROWS rows of a part or what there is from row `r` on. */
static void add_keys(const struct part *p, const struct scratch *s, long r, long first, long count) {
    float scores[ROWS * KEYS] __attribute__((aligned(64)));
    long size = p->head.size, group = p->head.group, rows = p->rows - r < ROWS ? p->rows - r : ROWS;
    long last = p->position + (r + rows - 1) / group, padded = (rows + STEP - 1) / STEP * STEP;
    if (last < first || first + count <= first_seen(p->position + r / group, p->window)) return;
    count = last + 1 - first < count ? last + 1 - first : count;
    count = (count + LINE - 1) / LINE * LINE;
    for (long i = 0; i < padded; i += STEP)
        for (long k = 0; k < count; k += LINE)
            score_line(s->queries + (r + i) * size, s->keys + k * size, scores + i * KEYS + k, size);
    for (long i = 0; i < rows; i++)
        weigh(p, scores + i * KEYS, s->total + (r + i) * size, s->top + r + i, s->sum + r + i, first, count,
              p->position + (r + i) / group);
    for (long i = 0; i < padded; i += 4) {
        float *total = s->total + (r + i) * size;
        long d = 0;
        for (; d + 4 * W <= size; d += 4 * W)
            add_values(scores + i * KEYS, s->values + d, total + d, count, size, 4);
        for (; d < size; d += W) add_values(scores + i * KEYS, s->values + d, total + d, count, size, 1);
    }
}

/* All rows of a part. Positions are taken KEYS at a time, counted from 0: so a row's sums do not depend on which other
 * rows are in its part. */
static void attend_part(const struct part *p, const struct scratch *s) {
    const struct head *h = &p->head;
    long size = h->size, group = h->group, padded = (p->rows + STEP - 1) / STEP * STEP;
    memset(s->queries, 0, padded * size * sizeof(float));
    memset(s->total, 0, padded * size * sizeof(float));
    for (long r = 0; r < p->rows; r++) {
        const element *q = h->q + r / group * p->token_stride + r % group * h->q_stride;
        for (long d = 0; d < size; d += W) *(vec *)(s->queries + r * size + d) = load(q + d) * h->scale;
        s->top[r] = -INFINITY;
        s->sum[r] = 0;
    }
    for (long first = h->start / KEYS * KEYS; first < h->context; first += KEYS) {
        long count = h->context - first < KEYS ? h->context - first : KEYS;
        pack_keys(h, s, first, count, h->start);
        for (long r = 0; r < p->rows; r += ROWS) add_keys(p, s, r, first, count);
    }
    for (long r = 0; r < p->rows; r++) {
        element *out = h->out + r / group * p->out_stride + r % group * size;
        for (long d = 0; d < size; d += W) store(out + d, *(vec *)(s->total + r * size + d) / s->sum[r]);
    }
}

/* Tokens that a thread takes at a time: with few of them its keys are packed often, with many some threads have none. */
static long tokens_of_part(long tokens, long group, long kv_heads, long threads) {
    long parts = (2 * threads + kv_heads - 1) / kv_heads, each = (tokens + parts - 1) / parts;
    long least = (ROWS + group - 1) / group, most = MOST / group;
    each = each < least ? least : each;
    return each < most ? each : most > 0 ? most : 1;
}

/* out [T, H, D] of q [T, H, D] against the paged caches [blocks, S, K, D]; request b has the rows starts[b] to
 * starts[b + 1], which are the last of its context. sizes: B, H, K, D, S, stride of a query token, of a query head, of a
 * block table, the longest context, the window or 0, blocks of a cache, T. Answers UNSOUND before anything is read or
 * written. */
int attention_prefill(const element *q, const element *k_cache, const element *v_cache, const int32_t *tables,
                      const int32_t *starts, const int32_t *contexts, element *out, const int64_t *sizes, float scale,
                      float soft_cap, int threads) {
    long heads = sizes[1], kv_heads = sizes[2], size = sizes[3], window = sizes[9], group = heads / kv_heads;
    long failed = 0;
    for (long b = 0; b < sizes[0]; b++) {
        long rows = (long)starts[b + 1] - starts[b];
        if (!is_sound(tables + b * sizes[7], contexts[b], rows, first_seen(contexts[b] - rows, window), sizes[8],
                      sizes[4], sizes[10]))
            return UNSOUND;
    }
    if (starts[0] != 0 || starts[sizes[0]] != sizes[11]) return UNSOUND;
    for (long b = 0; b < sizes[0]; b++) {
        long tokens = starts[b + 1] - starts[b], before = contexts[b] - tokens;
        if (tokens == 0) continue;
        long each = tokens_of_part(tokens, group, kv_heads, threads), parts = (tokens + each - 1) / each;
        long keys = contexts[b] < KEYS ? (contexts[b] + LINE - 1) / LINE * LINE : KEYS;
#pragma omp parallel num_threads(threads) reduction(+ : failed) if (tokens * contexts[b] > 256)
        {
            struct scratch s = make_scratch(keys, (each < tokens ? each : tokens) * group + STEP, size);
            if (!s.keys) failed++;
#pragma omp for schedule(dynamic)
            for (long item = kv_heads * parts - 1; item >= 0; item--) { /* the long contexts first */
                if (!s.keys) continue;
                long kv_head = item % kv_heads, first = item / kv_heads * each, token = starts[b] + first;
                long count = tokens - first < each ? tokens - first : each, position = before + first;
                long row = kv_head * group;
                struct part p = {{q + token * sizes[5] + row * sizes[6], k_cache + kv_head * size,
                                  v_cache + kv_head * size, tables + b * sizes[7], out + (token * heads + row) * size,
                                  sizes[6], group, size, sizes[4], kv_heads * size, first_seen(position, window),
                                  position + count, scale, soft_cap},
                                 count * group, position, window, sizes[5], heads * size};
                attend_part(&p, &s);
            }
            free(s.keys);
        }
    }
    return failed ? NO_MEMORY : 0;
}
