// Losses that compare every element with a target, and their gradients.
//
//   x, t, dx: `count` elements of T, dense; totals double[2]: sum of the terms, their number (over all ranks); partial (blocks, 2)
//   double, the same of each block. LOSS names one of the structs below, with parameters a and b.
//
// A block sums CHUNK neighbouring elements, a thread runs of RUN (row.cuh), in float32 within a run and then in double.
// Bytes per element: forward 2 sizeof(T), backward 3 sizeof(T); at most some 30 instructions.
#define LANES 256
#include "common.cuh"
#include "exponential.cuh"
#include "row.cuh"

constexpr int CHUNK = 8192;

// log(1 + e^-|x|), which lies in (0, log 2].
DEVICE float log_one_plus(float x) {
    const float e = exponential(-fabsf(x));
    return e < 1e-4f ? e : logf(1.0f + e);
}

DEVICE float power(float x, float exponent) {
    if (exponent == 0.0f) return 1.0f;
    return x > 0.0f ? exp2f(exponent * log2f(x)) : 0.0f;
}

// Binary cross entropy on logits; a: weight of the positive terms.
struct bce_with_logits {
    DEVICE float value(float x, float t, float a, float) {
        return (1.0f - t) * x + (1.0f + (a - 1.0f) * t) * (log_one_plus(x) + fmaxf(-x, 0.0f));
    }
    DEVICE float gradient(float x, float t, float a, float) { return (1.0f - t) - (1.0f + (a - 1.0f) * t) * logistic(-x); }
};

struct mse {
    DEVICE float value(float x, float t, float, float) { return (x - t) * (x - t); }
    DEVICE float gradient(float x, float t, float, float) { return 2.0f * (x - t); }
};

// Lin et al., "Focal loss for dense object detection" (ICCV 2017), on logits; a: weight of the positive terms, 1 - a of the
// others; b: the focusing exponent, 0 or at least 1.
struct focal {
    DEVICE float value(float x, float t, float a, float b) {
        const float miss = t * logistic(-x) + (1.0f - t) * logistic(x);
        return (a * t + (1.0f - a) * (1.0f - t)) * bce_with_logits::value(x, t, 1.0f, 0.0f) * power(miss, b);
    }
    DEVICE float gradient(float x, float t, float a, float b) {
        const float p = logistic(x), q = logistic(-x), miss = t * q + (1.0f - t) * p;
        const float loss = bce_with_logits::value(x, t, 1.0f, 0.0f);
        const float bend = b == 0.0f ? 0.0f : loss * b * power(miss, b - 1.0f) * (1.0f - 2.0f * t) * p * q;
        return (a * t + (1.0f - a) * (1.0f - t)) * (((1.0f - t) * p - t * q) * power(miss, b) + bend);
    }
};

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
pointwise_loss(const T* __restrict__ x, const T* __restrict__ t, double* __restrict__ partial, i64 count, float a, float b) {
    __shared__ double scratch[32];
    const i64 begin = i64(blockIdx.x) * CHUNK;
    const int size = int(min(count - begin, i64(CHUNK)));
    double total = 0.0;
    for (int i = threadIdx.x * RUN; i < size; i += RowShare::STEP) {
        float v[RUN], w[RUN], part = 0.0f;
        load_run(x + begin, i, size, 0.0f, v);
        load_run(t + begin, i, size, 0.0f, w);
#pragma unroll
        for (int e = 0; e < RUN; ++e)
            if (i + e < size) part += LOSS::value(v[e], w[e], a, b);
        total += part;
    }
    total = block_sum<BLOCK>(total, scratch);
    if (threadIdx.x > 0) return;
    partial[2 * i64(blockIdx.x)] = total;
    partial[2 * i64(blockIdx.x) + 1] = size;
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
pointwise_loss_backward(const T* __restrict__ x, const T* __restrict__ t, const double* __restrict__ totals,
                        const float* __restrict__ scale, T* __restrict__ dx, i64 count, float a, float b) {
    const i64 begin = i64(blockIdx.x) * CHUNK;
    const int size = int(min(count - begin, i64(CHUNK)));
    const float factor = totals[1] > 0.0 ? (scale ? scale[0] : 1.0f) / float(totals[1]) : 0.0f;
    for (int i = threadIdx.x * RUN; i < size; i += RowShare::STEP) {
        float v[RUN], w[RUN];
        load_run(x + begin, i, size, 0.0f, v);
        load_run(t + begin, i, size, 0.0f, w);
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] = LOSS::gradient(v[e], w[e], a, b) * factor;
        store_run(dx + begin, i, size, v);
    }
}

#endif
