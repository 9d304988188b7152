/* Products with weights that keep 4 or 8 bits a value and are multiplied out in registers.
 *
 * packed.py packs a weight [columns, inner] into blocks of TILE columns by GROUP rows, all blocks of a tile in a row:
 * for each column a scale (fp16), with 4 bits also an offset (fp16), then codes in words of 32 bits. A word holds
 * 32 / bits rows of one column, the first in its lowest bits; the words of a block go by rows, then by columns.
 * value = code * scale + offset; codes of 4 bits count from 0, codes of 8 bits have a sign and no offset.
 */
#include "native.h"

#define TILE 32
#define GROUP 32
#define DEPTH 8      /* rows of a weight that are held in registers at a time, two vectors of each */
#define MOST_ROWS 64 /* rows of x whose sums lie on the stack */

static inline long block_bytes(int bits) { return TILE * (bits == 4 ? 4 + GROUP / 2 : 2 + GROUP); }

/* 16 numbers of fp16. A finite one is its bits, moved, times 2^112: the difference of the two exponents' biases. */
static inline vec from_fp16(const uint8_t *p) {
    lanes bits = __builtin_convertvector(*(const halves *)p, lanes);
    return (vec)((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;
}

/* A block's scales and offsets, of its two vectors of columns. */
struct scales { vec scale[2], offset[2]; };

static inline struct scales scales_of(const uint8_t *block, int bits) {
    struct scales s = {{from_fp16(block), from_fp16(block + 2 * W)}, {}};
    if (bits == 4) {
        s.offset[0] = from_fp16(block + 2 * TILE);
        s.offset[1] = from_fp16(block + 2 * TILE + 2 * W);
    }
    return s;
}

/* The values of rows k to k + DEPTH of a block, in its columns from `side` * W on. */
static inline void values_of(const uint8_t *block, const struct scales *s, int bits, int k, int side, vec *values) {
    const uint8_t *words = block + 2 * TILE * (bits == 4 ? 2 : 1) + TILE * k * bits / 8 + side * W * 4;
    if (bits == 4) {
        lanes codes = *(const lanes *)words;
        for (int j = 0; j < DEPTH; j++)
            values[j] = __builtin_convertvector(codes >> 4 * j & 15, vec) * s->scale[side] + s->offset[side];
    } else {
        for (int j = 0; j < DEPTH; j++) {
            lanes codes = *(const lanes *)(words + j / 4 * TILE * 4);
            values[j] = __builtin_convertvector(codes << (24 - j % 4 * 8) >> 24, vec) * s->scale[side];
        }
    }
}

/* total [rows, TILE] += x [rows, GROUP of inner] block [GROUP, TILE]. */
static inline __attribute__((always_inline)) void product_block(const float *x, const uint8_t *block, float *total,
                                                                long rows, long inner, int bits) {
    struct scales s = scales_of(block, bits);
    for (int k = 0; k < GROUP; k += DEPTH) {
        vec left[DEPTH], right[DEPTH];
        values_of(block, &s, bits, k, 0, left);
        values_of(block, &s, bits, k, 1, right);
        for (long m = 0; m < rows; m++) {
            const float *row = x + m * inner + k;
            vec first = *(vec *)(total + m * TILE), second = *(vec *)(total + m * TILE + W);
            for (int j = 0; j < DEPTH; j++) {
                vec factor = splat(row[j]);
                first += left[j] * factor;
                second += right[j] * factor;
            }
            *(vec *)(total + m * TILE) = first;
            *(vec *)(total + m * TILE + W) = second;
        }
    }
}

/* total [rows, TILE] += x [rows, inner] tile [inner, TILE]. */
static void product_tile(const float *x, const uint8_t *tile, float *total, long rows, long inner, int bits) {
    const long bytes = block_bytes(bits);
    for (long k = 0; k < inner; k += GROUP, tile += bytes) {
        for (long ahead = 2 * bytes; ahead < 3 * bytes; ahead += 64) __builtin_prefetch(tile + ahead);
        if (bits == 4) product_block(x + k, tile, total, rows, inner, 4);
        else product_block(x + k, tile, total, rows, inner, 8);
    }
}

/* total [rows, TILE] = x [rows, inner] tile (+ bias [TILE]). */
static void sums_of_tile(const float *x, const uint8_t *tile, const element *bias, float *total, long rows, long inner,
                         int bits) {
    for (long m = 0; m < rows; m++)
        if (bias) copy_in(total + m * TILE, bias, TILE);
        else memset(total + m * TILE, 0, TILE * sizeof(float));
    product_tile(x, tile, total, rows, inner, bits);
}

/* x itself where its elements are floats; else a copy in `memory`, or null where there is none. */
static const float *as_floats(const element *x, long count, float **memory) {
#ifdef BFLOAT16
    *memory = malloc(count * sizeof(float));
    if (*memory) copy_in(*memory, x, count);
    return *memory;
#else
    (void)count;
    *memory = 0;
    return x;
#endif
}

/* y [rows, columns] = x [rows, inner] weight (+ bias [columns]), as elements, or `wide` as the float sums themselves.
 * Answers 1 where there is no memory for x in floats, else 0. */
int linear_packed(const element *x, const uint8_t *weight, const element *bias, void *y, long rows, long inner,
                  long columns, int bits, int wide, int threads) {
    long bytes = inner / GROUP * block_bytes(bits);
    float *memory;
    const float *floats = as_floats(x, rows * inner, &memory);
    if (!floats) return 1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < columns / TILE; t++)
        for (long begin = 0; begin < rows; begin += MOST_ROWS) {
            float total[MOST_ROWS * TILE] __attribute__((aligned(64)));
            long count = rows - begin < MOST_ROWS ? rows - begin : MOST_ROWS;
            sums_of_tile(floats + begin * inner, weight + t * bytes, bias ? bias + t * TILE : 0, total, count, inner,
                         bits);
            for (long m = 0; m < count; m++) {
                long place = (begin + m) * columns + t * TILE;
                if (wide) memcpy((float *)y + place, total + m * TILE, TILE * sizeof(float));
                else copy_out((element *)y + place, total + m * TILE, TILE);
            }
        }
    free(memory);
    return 0;
}

/* y [rows, columns] = silu(gate) * up of the sums with a weight of twice the columns, gate first, and its bias. The sums
 * never leave the thread that made them. Answers as linear_packed does. */
int linear_packed_silu(const element *x, const uint8_t *weight, const element *bias, element *y, long rows, long inner,
                       long columns, int bits, int threads) {
    long bytes = inner / GROUP * block_bytes(bits), tiles = columns / TILE;
    float *memory;
    const float *floats = as_floats(x, rows * inner, &memory);
    if (!floats) return 1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < tiles; t++)
        for (long begin = 0; begin < rows; begin += MOST_ROWS) {
            float gate[MOST_ROWS * TILE] __attribute__((aligned(64))), up[MOST_ROWS * TILE] __attribute__((aligned(64)));
            long count = rows - begin < MOST_ROWS ? rows - begin : MOST_ROWS;
            const float *part = floats + begin * inner;
            sums_of_tile(part, weight + t * bytes, bias ? bias + t * TILE : 0, gate, count, inner, bits);
            sums_of_tile(part, weight + (tiles + t) * bytes, bias ? bias + columns + t * TILE : 0, up, count, inner,
                         bits);
            for (long i = 0; i < count * TILE; i += W) {
                vec value = *(vec *)(gate + i);
                store(y + (begin + i / TILE) * columns + t * TILE + i % TILE,
                      value / (1.0f + exp_of(-value)) * *(vec *)(up + i));
            }
        }
    free(memory);
    return 0;
}

/* values [inner, tiles * TILE] of some tiles that lie together. */
void unpack(const uint8_t *weight, element *values, long tiles, long inner, int bits, int threads) {
    const long bytes = block_bytes(bits), columns = tiles * TILE;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < tiles; t++)
        for (long k = 0; k < inner; k += GROUP) {
            const uint8_t *block = weight + (t * inner + k) / GROUP * bytes;
            struct scales s = scales_of(block, bits);
            for (int i = 0; i < GROUP; i += DEPTH)
                for (int side = 0; side < 2; side++) {
                    vec part[DEPTH];
                    values_of(block, &s, bits, i, side, part);
                    for (int j = 0; j < DEPTH; j++)
                        store(values + (k + i + j) * columns + t * TILE + side * W, part[j]);
                }
        }
}

/* y[t] [inner] = row ids[t] of the weight. Answers -1, or the first token whose id is none of the weight's `columns`. */
long embedding_packed(const int64_t *ids, const uint8_t *weight, element *y, long tokens, long inner, long columns,
                      int bits) {
    for (long t = 0; t < tokens; t++) {
        if (ids[t] < 0 || ids[t] >= columns) return t;
        const uint8_t *tile = weight + ids[t] / TILE * (inner / GROUP) * block_bytes(bits);
        long lane = ids[t] % TILE, side = lane / W;
        for (long k = 0; k < inner; k += GROUP, tile += block_bytes(bits)) {
            struct scales s = scales_of(tile, bits);
            for (int i = 0; i < GROUP; i += DEPTH) {
                vec part[DEPTH];
                values_of(tile, &s, bits, i, side, part);
                for (int j = 0; j < DEPTH; j++) put(y + t * inner + k + i + j, part[j][lane % W]);
            }
        }
    }
    return -1;
}
