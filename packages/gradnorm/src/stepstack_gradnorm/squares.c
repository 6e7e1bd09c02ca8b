/* The sums of squares of many runs of numbers, in one pass over memory. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 32, BLOCK = 32 * LANES };

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_fp32(float x) { return x; }

static inline float from_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }

/* The magnitude, which is enough. The product with 2^112 makes the exponent fp32's, that of a subnormal too. */
static inline float from_fp16(uint16_t x) {
    uint32_t not_finite = (x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return from_bits((uint32_t)(x & 0x7fff) << 13 | not_finite) * 0x1p112f;
}

/* In each lane, 32 squares are added up in fp32 and these sums in fp64. Should squares have left fp32's range, so that
   the sum is infinite or so small that what was lost counts, everything is added up in fp64. */
#define DEFINE_SUM(name, type, load)                                                                                   \
    static double name(const type *x, int64_t size) {                                                                  \
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

DEFINE_SUM(sum_fp32, float, from_fp32)
DEFINE_SUM(sum_bf16, uint16_t, from_bf16)
DEFINE_SUM(sum_fp16, uint16_t, from_fp16)

/* sums[i] is that of the i-th run. */
#define DEFINE_SUMS(name, type, sum)                                                                                   \
    void name(const type *const *runs, const int64_t *sizes, int64_t count, double *sums, int threads) {               \
        _Pragma("omp parallel for num_threads(threads) schedule(dynamic)")                                             \
        for (int64_t i = 0; i < count; i++)                                                                            \
            sums[i] = sum(runs[i], sizes[i]);                                                                          \
    }

DEFINE_SUMS(sums_fp32, float, sum_fp32)
DEFINE_SUMS(sums_bf16, uint16_t, sum_bf16)
DEFINE_SUMS(sums_fp16, uint16_t, sum_fp16)
