/* The sums of squares of many runs of numbers, in one pass over memory.

   Threads are made for a call and joined before it returns. A pool would be gone in a forked child that still waits for
   it, and would be one more beside the pools of whatever else is loaded; making them costs microseconds, and only calls
   of a large part of a millisecond have more than one. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 32, BLOCK = 32 * LANES, MOST_THREADS = 256 };

/* In a wheel the code is there for several kinds of CPU, and the one that fits is chosen when it is loaded. Translated
   on the machine that runs it (-DONE_CPU), it is for that one. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ONE_CPU)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float from_fp32(float x) { return x; }

INLINE float from_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }

/* The magnitude, which is enough. The product with 2^112 makes the exponent fp32's, that of a subnormal too. */
INLINE float from_fp16(uint16_t x) {
    uint32_t not_finite = (x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return from_bits((uint32_t)(x & 0x7fff) << 13 | not_finite) * 0x1p112f;
}

/* In each lane, 32 squares are added up in fp32 and these sums in fp64. Should squares have left fp32's range, so that
   the sum is infinite or so small that what was lost counts, everything is added up in fp64. */
#define DEFINE_SUM(name, type, load)                                                                                   \
    FOR_EACH_CPU double name(const void *from, int64_t size) {                                                         \
        const type *x = from;                                                                                          \
        double wide[LANES] = {0}, sum = 0;                                                                             \
        int64_t i = 0;                                                                                                 \
        for (; i + BLOCK <= size; i += BLOCK) {                                                                        \
            float narrow[LANES] = {0};                                                                                 \
            for (int row = 0; row < BLOCK; row += LANES)                                                               \
                for (int lane = 0; lane < LANES; lane++)                                                               \
                    narrow[lane] += load(x[i + row + lane]) * load(x[i + row + lane]);                                 \
            for (int lane = 0; lane < LANES; lane++)                                                                   \
                wide[lane] += narrow[lane];                                                                            \
        }                                                                                                              \
        for (; i + LANES <= size; i += LANES)                                                                          \
            for (int lane = 0; lane < LANES; lane++)                                                                   \
                wide[lane] += load(x[i + lane]) * load(x[i + lane]);                                                   \
        for (int lane = 0; i + lane < size; lane++)                                                                    \
            wide[lane] += load(x[i + lane]) * load(x[i + lane]);                                                       \
        for (int lane = 8; lane < LANES; lane += 8)                                                                    \
            for (int k = 0; k < 8; k++)                                                                                \
                wide[k] += wide[lane + k];                                                                             \
        for (int k = 0; k < 8; k++)                                                                                    \
            sum += wide[k];                                                                                            \
        if (sum > 1e-30 * size && sum < INFINITY)                                                                      \
            return sum;                                                                                                \
        sum = 0;                                                                                                       \
        for (i = 0; i < size; i++)                                                                                     \
            sum += (double)load(x[i]) * load(x[i]);                                                                    \
        return sum;                                                                                                    \
    }

DEFINE_SUM(stepstack_sum_fp32, float, from_fp32)
DEFINE_SUM(stepstack_sum_bf16, uint16_t, from_bf16)
DEFINE_SUM(stepstack_sum_fp16, uint16_t, from_fp16)

struct work {
    double (*sum)(const void *, int64_t);
    const void *const *runs;
    const int64_t *sizes;
    int64_t count;
    double *sums;
    atomic_llong next;
};

static void *worker(void *argument) {
    struct work *work = argument;
    for (int64_t i; (i = atomic_fetch_add(&work->next, 1)) < work->count;)
        work->sums[i] = work->sum(work->runs[i], work->sizes[i]);
    return NULL;
}

static void by_threads(struct work work, int threads) {
    pthread_t others[MOST_THREADS];
    int made = 0;
    for (; made < threads - 1 && made < MOST_THREADS; made++)
        if (pthread_create(&others[made], NULL, worker, &work))
            break; /* those there are do the rest */
    worker(&work);
    for (int i = 0; i < made; i++)
        pthread_join(others[i], NULL);
}

/* sums[i] is that of the i-th run, by up to so many threads. */
#define DEFINE_SQUARES(name, sum)                                                                                      \
    void name(const void *const *runs, const int64_t *sizes, int64_t count, double *sums, int threads) {               \
        by_threads((struct work){sum, runs, sizes, count, sums, 0}, threads);                                          \
    }

DEFINE_SQUARES(stepstack_squares_fp32, stepstack_sum_fp32)
DEFINE_SQUARES(stepstack_squares_bf16, stepstack_sum_bf16)
DEFINE_SQUARES(stepstack_squares_fp16, stepstack_sum_fp16)
