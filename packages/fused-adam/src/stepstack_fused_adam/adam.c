/* A step of Adam for many runs of memory at once, in one pass: the CPU's form of `_definition.adam`.

   Work is done a block of 256 elements at a time. What is stored in 16 or 8 bits is first widened to fp32 buffers that
   stay in the innermost cache, then the arithmetic runs over fp32 arrays, then results are rounded back. So each way to
   store a number is one small loop, whatever it is combined with. A block is always whole: the rest of a run goes through
   padded copies. So the same instructions compute every element, and no cut of the runs and no number of threads
   changes a bit.

   Threads are made for a call and joined before it returns. A pool would be gone in a forked child that still waits for
   it, and would be one more beside the pools of whatever else is loaded; making them costs microseconds, and only calls
   of milliseconds have more than one. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 256, SCALED = 64, CHUNK = 1 << 15, MOST_THREADS = 256 };
enum { NONE, FP32, BF16, FP16, CODES, REMAINDER };

/* In a wheel the code is there for several kinds of CPU, and the one that fits is chosen when it is loaded. Translated
   on the machine that runs it (-DONE_CPU), it is for that one. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ONE_CPU)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))
#define EACH for (int i = 0; i < BLOCK; i++)
#define EACH_SCALED for (int i = 0; i < SCALED; i++)
#define SCALES for (int scale = 0; scale < BLOCK / SCALED; scale++)

/* How the numbers of these runs are stored: one of the names above each. */
struct form {
    int32_t param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, decoupled;
};

/* Where a run has its numbers; null where the form has none. Parameter and gradient may be elsewhere in each step. */
struct run {
    char *param, *grad, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master, *remainder_high, *remainder_low;
    float *exp_avg_scale, *exp_avg_sq_scale;
    const float *step;
    int64_t numel;
};

/* Of a step, as 0-d tensors have them. */
struct scalars {
    const float *lr, *alpha1, *alpha2, *eps, *weight_decay, *divisor;
};

struct numbers {
    float decay, weight_decay, inverse, alpha1, alpha2, keep2, rate, root, eps;
};

static float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float from_bf16(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

/* To the nearest, ties to even. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits = float_to_bits(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* The product with 2^112 makes the exponent fp32's, that of a subnormal too. */
INLINE float from_fp16(uint16_t x) {
    uint32_t not_finite = (x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    float magnitude = bits_to_float((uint32_t)(x & 0x7fff) << 13) * 0x1p112f;
    return bits_to_float(float_to_bits(magnitude) | not_finite | (uint32_t)(x & 0x8000) << 16);
}

/* To the nearest, ties to even. Adding 0.5 lets the adder round what becomes a subnormal. */
INLINE uint16_t to_fp16(float x) {
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    uint32_t normal = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
    uint32_t subnormal = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000;
    uint32_t magnitude = bits < 0x38800000 ? subnormal : normal;
    magnitude = bits >= 0x477ff000 ? 0x7c00 : magnitude;
    return sign | (bits > 0x7f800000 ? 0x7e00 : magnitude);
}

INLINE const float *widened(int form, const char *from, float *buffer) {
    const uint16_t *halves = (const uint16_t *)from;
    if (form == BF16)
        EACH buffer[i] = from_bf16(halves[i]);
    else if (form == FP16)
        EACH buffer[i] = from_fp16(halves[i]);
    else
        return (const float *)from;
    return buffer;
}

INLINE void narrowed(int form, const float *restrict from, char *to) {
    uint16_t *restrict halves = (uint16_t *)to;
    if (form == BF16)
        EACH halves[i] = to_bf16(from[i]);
    else if (form == FP16)
        EACH halves[i] = to_fp16(from[i]);
    else if ((const char *)from != to)
        memcpy(to, from, BLOCK * sizeof *from);
}

/* `_remainder.join` and `_remainder.split`. */
INLINE void
join(const uint16_t *restrict param, const int8_t *restrict high, const uint8_t *restrict low, float *restrict to) {
    EACH to[i] = bits_to_float(((uint32_t)param[i] << 16) + (uint32_t)(high[i] * 256 + low[i]));
}

INLINE void split(const float *restrict from, uint16_t *restrict param, int8_t *restrict high, uint8_t *restrict low) {
    EACH {
        uint32_t bits = from[i] != from[i] ? 0x7fc00000 : float_to_bits(from[i]);
        uint32_t rounded = (bits + 0x8000) & 0xffff0000, rest = bits - rounded;
        param[i] = rounded >> 16;
        high[i] = (int8_t)(rest >> 8);
        low[i] = (uint8_t)rest;
    }
}

/* `_block8`: codes of blocks of 64, each with its largest magnitude as scale. */
INLINE void decode_first(const int8_t *restrict codes, float scale, float *restrict to) {
    EACH_SCALED {
        float root = (float)codes[i] / 127;
        to[i] = root * fabsf(root) * scale;
    }
}

INLINE void decode_second(const uint8_t *restrict codes, float scale, float *restrict to) {
    EACH_SCALED {
        float root = (float)codes[i] / 255, square = root * root;
        to[i] = square * square * scale;
    }
}

/* The bits of magnitudes are in the order of the magnitudes, with NaN above all. */
INLINE float largest(const float *from) {
    uint32_t most = 0;
    EACH_SCALED {
        uint32_t bits = float_to_bits(from[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return bits_to_float(most);
}

/* Two factors that are one over a scale. One alone could be subnormal, or infinite. */
struct divisor {
    float first, then;
};

INLINE struct divisor divisor(float scale) {
    float first = scale < 1e-30f ? 0x1p100f : scale > 1e30f ? 0x1p-100f : 1;
    return (struct divisor){first, scale == 0 ? 1 : 1 / (scale * first)};
}

INLINE float encode_first(const float *restrict from, int8_t *restrict codes) {
    float scale = largest(from);
    struct divisor by = divisor(scale);
    EACH_SCALED {
        float share = from[i] * by.first * by.then, code = rintf(sqrtf(fabsf(share)) * 127);
        int32_t whole = (int32_t)(share < 0 ? -code : code); /* of NaN the most negative number */
        codes[i] = (int8_t)(whole < -127 ? 0 : whole);
    }
    return scale;
}

INLINE float encode_second(const float *restrict from, uint8_t *restrict codes) {
    float scale = largest(from);
    struct divisor by = divisor(scale);
    EACH_SCALED {
        float exact = sqrtf(sqrtf(from[i] * by.first * by.then)) * 255, nearest = rintf(exact);
        float dither = (float)(int32_t)(float_to_bits(from[i]) * 2654435769u >> 9 & 0x7fff) / 0x8000;
        int32_t whole = (int32_t)(fabsf(exact - nearest) < 2e-3f ? nearest : floorf(exact + dither));
        whole = whole < 1 ? 1 : whole > 255 ? 255 : whole;
        codes[i] = (uint8_t)(from[i] > 0 ? whole : 0);
    }
    return scale;
}

/* A block in fp32, in the order of the definition. */
INLINE void
adam(float *restrict theta, const float *restrict grad, float *restrict m, float *restrict v, float *restrict v_max,
     const struct numbers by, int decoupled, int amsgrad) {
    EACH {
        float g = grad[i] * by.inverse, x = theta[i];
        if (decoupled)
            x *= by.decay;
        else
            g += by.weight_decay * x;
        float mean = m[i] + by.alpha1 * (g - m[i]);
        float square = by.keep2 * v[i] + by.alpha2 * g * g, hat = square;
        if (amsgrad) {
            hat = v_max[i] >= square || v_max[i] != v_max[i] ? v_max[i] : square;
            v_max[i] = hat;
        }
        m[i] = mean;
        v[i] = square;
        theta[i] = x - by.rate * mean / (sqrtf(hat) * by.root + by.eps);
    }
}

INLINE void block_step(const struct form *form, struct run at, const struct numbers *by) {
    float grads[BLOCK], weights[BLOCK], means[BLOCK], squares[BLOCK], maxima[BLOCK];
    const float *grad = widened(form->grad, at.grad, grads);
    float *theta, *m = means, *v = squares, *v_max = NULL;
    if (form->master == REMAINDER)
        join((uint16_t *)at.param, (int8_t *)at.remainder_high, (uint8_t *)at.remainder_low, theta = weights);
    else
        theta = form->master == FP32 ? (float *)at.master : (float *)widened(form->param, at.param, weights);
    if (form->exp_avg == CODES)
        SCALES decode_first((int8_t *)at.exp_avg + scale * SCALED, at.exp_avg_scale[scale], means + scale * SCALED);
    else
        m = (float *)widened(form->exp_avg, at.exp_avg, means);
    if (form->exp_avg_sq == CODES)
        SCALES decode_second((uint8_t *)at.exp_avg_sq + scale * SCALED, at.exp_avg_sq_scale[scale],
                             squares + scale * SCALED);
    else
        v = (float *)widened(form->exp_avg_sq, at.exp_avg_sq, squares);
    if (form->max_exp_avg_sq)
        v_max = (float *)widened(form->max_exp_avg_sq, at.max_exp_avg_sq, maxima);
    if (v_max && form->decoupled)
        adam(theta, grad, m, v, v_max, *by, 1, 1);
    else if (v_max)
        adam(theta, grad, m, v, v_max, *by, 0, 1);
    else if (form->decoupled)
        adam(theta, grad, m, v, NULL, *by, 1, 0);
    else
        adam(theta, grad, m, v, NULL, *by, 0, 0);
    if (form->exp_avg == CODES)
        SCALES at.exp_avg_scale[scale] = encode_first(m + scale * SCALED, (int8_t *)at.exp_avg + scale * SCALED);
    else
        narrowed(form->exp_avg, m, at.exp_avg);
    if (form->exp_avg_sq == CODES)
        SCALES at.exp_avg_sq_scale[scale] =
            encode_second(v + scale * SCALED, (uint8_t *)at.exp_avg_sq + scale * SCALED);
    else
        narrowed(form->exp_avg_sq, v, at.exp_avg_sq);
    if (v_max)
        narrowed(form->max_exp_avg_sq, v_max, at.max_exp_avg_sq);
    if (form->master == REMAINDER)
        split(theta, (uint16_t *)at.param, (int8_t *)at.remainder_high, (uint8_t *)at.remainder_low);
    else
        narrowed(form->param, theta, at.param);
}

static int size_of(int form) { return form == FP32 ? 4 : form == CODES ? 1 : 2; }

static struct run moved(const struct form *form, struct run at, int64_t by) {
    at.param += by * size_of(form->param);
    at.grad += by * size_of(form->grad);
    at.exp_avg += by * size_of(form->exp_avg);
    at.exp_avg_sq += by * size_of(form->exp_avg_sq);
    if (form->max_exp_avg_sq)
        at.max_exp_avg_sq += by * size_of(form->max_exp_avg_sq);
    if (form->master == FP32)
        at.master += by * 4;
    if (form->master == REMAINDER)
        at.remainder_high += by, at.remainder_low += by;
    if (form->exp_avg == CODES)
        at.exp_avg_scale += by / SCALED;
    if (form->exp_avg_sq == CODES)
        at.exp_avg_sq_scale += by / SCALED;
    return at;
}

/* The numbers of a run's step. Both bias corrections are taken out of the elements: they are one number each. */
static struct numbers numbers_of(const struct scalars *by, float step) {
    float alpha1 = *by->alpha1, alpha2 = *by->alpha2, lr = *by->lr;
    /* 1 - beta^t, without the cancellation */
    float correction1 = -expm1f(step * log1pf(-alpha1)), correction2 = -expm1f(step * log1pf(-alpha2));
    return (struct numbers){
        .decay = 1 - lr * *by->weight_decay,
        .weight_decay = *by->weight_decay,
        .inverse = 1 / *by->divisor,
        .alpha1 = alpha1,
        .alpha2 = alpha2,
        .keep2 = 1 - alpha2,
        .rate = lr / correction1,
        .root = 1 / sqrtf(correction2),
        .eps = *by->eps,
    };
}

/* The first `numel` elements of a run, which are whole blocks, or its end. */
FOR_EACH_CPU void stepstack_chunk(const struct form *form, struct run at, int64_t numel, const struct numbers *by) {
    int64_t done = 0;
    for (; done + BLOCK <= numel; done += BLOCK)
        block_step(form, moved(form, at, done), by);
    if (done == numel)
        return;
    float room[8][BLOCK] = {0}, scales[2][BLOCK / SCALED] = {0};
    struct run rest = moved(form, at, done), padded = rest;
    int64_t left = numel - done, blocks = (left + SCALED - 1) / SCALED;
    char **from[] = {&rest.param,          &rest.grad,   &rest.exp_avg,        &rest.exp_avg_sq,
                     &rest.max_exp_avg_sq, &rest.master, &rest.remainder_high, &rest.remainder_low};
    char **to[] = {&padded.param,          &padded.grad,   &padded.exp_avg,        &padded.exp_avg_sq,
                   &padded.max_exp_avg_sq, &padded.master, &padded.remainder_high, &padded.remainder_low};
    int forms[] = {form->param,          form->grad,   form->exp_avg, form->exp_avg_sq,
                   form->max_exp_avg_sq, form->master, CODES,         CODES};
    for (int i = 0; i < 8; i++)
        if (*from[i])
            memcpy(*to[i] = (char *)room[i], *from[i], left * size_of(forms[i]));
    if (form->exp_avg == CODES)
        memcpy(padded.exp_avg_scale = scales[0], rest.exp_avg_scale, blocks * sizeof(float));
    if (form->exp_avg_sq == CODES)
        memcpy(padded.exp_avg_sq_scale = scales[1], rest.exp_avg_sq_scale, blocks * sizeof(float));
    block_step(form, padded, by);
    for (int i = 0; i < 8; i++)
        if (*from[i] && i != 1)
            memcpy(*from[i], room[i], left * size_of(forms[i]));
    if (form->exp_avg == CODES)
        memcpy(rest.exp_avg_scale, scales[0], blocks * sizeof(float));
    if (form->exp_avg_sq == CODES)
        memcpy(rest.exp_avg_sq_scale, scales[1], blocks * sizeof(float));
}

struct work {
    const struct form *form;
    const struct run *runs;
    const int64_t *first_chunk; /* of each run, and one more: of all */
    int64_t count;
    const struct scalars *by;
    atomic_llong next;
};

static void *worker(void *argument) {
    struct work *work = argument;
    int64_t chunks = work->first_chunk[work->count], run = 0;
    float step = NAN;
    struct numbers by = {0};
    for (int64_t chunk; (chunk = atomic_fetch_add(&work->next, 1)) < chunks;) {
        while (work->first_chunk[run + 1] <= chunk) /* a worker's chunks come in order */
            run++;
        struct run at = work->runs[run];
        if (*at.step != step)
            by = numbers_of(work->by, step = *at.step);
        int64_t start = (chunk - work->first_chunk[run]) * CHUNK, left = at.numel - start;
        stepstack_chunk(work->form, moved(work->form, at, start), left < CHUNK ? left : CHUNK, &by);
    }
    return NULL;
}

/* A step of all runs by up to so many threads, of these parameters with these gradients. Nothing happens if `skip` is
   not 0. Returns 0, or -1 if there is no memory for a list of the runs. */
int stepstack_adam(const struct form *form, struct run *runs, char *const *params, char *const *grads, int64_t count,
                   const struct scalars *by, const float *skip, int threads) {
    if (*skip != 0)
        return 0;
    int64_t *first_chunk = malloc((count + 1) * sizeof *first_chunk);
    if (!first_chunk)
        return -1;
    first_chunk[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        runs[i].param = params[i];
        runs[i].grad = grads[i];
        first_chunk[i + 1] = first_chunk[i] + (runs[i].numel + CHUNK - 1) / CHUNK;
    }
    struct work work = {form, runs, first_chunk, count, by, 0};
    pthread_t others[MOST_THREADS];
    int made = 0;
    for (; made < threads - 1 && made < MOST_THREADS; made++)
        if (pthread_create(&others[made], NULL, worker, &work))
            break; /* those there are do the rest */
    worker(&work);
    for (int i = 0; i < made; i++)
        pthread_join(others[i], NULL);
    free(first_chunk);
    return 0;
}
