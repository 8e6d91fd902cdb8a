// Losses that compare every element with a target, and their gradients.
//
//   x, t, dx: `count` elements of T, dense; totals double[2]: sum of the terms, their number (over all ranks); partial
//   (blocks, 2) double, the same of each block. LOSS names one of the structs below, with parameters a and b; FOCUS
//   is b of `focal` where it is a small whole number, as in the paper, else -1.
//
// A block takes CHUNK neighbouring elements, a thread runs of RUN (row.cuh), HELD at a time, in float32 within a run
// and then in double. Bytes per element: forward 2 sizeof(T), backward 3 sizeof(T). In bf16 the memory leaves time for
// some 32 instructions per element forward and 47 backward, or for 4 and 6 special functions; a focal loss takes 28 and
// 38, and 2 of these. In five blocks of a multiprocessor in place of four it and BCE take 4 % less time, MSE 1 %
// more.
#define LANES 256
#define HELD (VEC * sizeof(T) == 16 ? 2 : 1)
#define PER 1
#include "common.cuh"
#include "exponential.cuh"
#include "row.cuh"

#ifndef FOCUS
#define FOCUS -1
#endif

constexpr int CHUNK = 8192;

// log(1 + e), e in [0, 1], within 2e-7 of itself: e times the polynomial of least relative error (Remez).
DEVICE float log_one_plus(float e) {
    float q = 0.0052326940931379795f;
    q = fmaf(q, e, -0.02950523979961872f);
    q = fmaf(q, e, 0.07822595536708832f);
    q = fmaf(q, e, -0.13663245737552643f);
    q = fmaf(q, e, 0.19106006622314453f);
    q = fmaf(q, e, -0.2484298199415207f);
    q = fmaf(q, e, 0.3331909775733948f);
    q = fmaf(q, e, -0.4999949336051941f);
    q = fmaf(q, e, 0.9999999403953552f);
    return q * e;
}

// x^(exponent - less), x in [0, 1]; a product where FOCUS says that the exponent is a small whole number.
DEVICE float power(float x, float exponent, int less) {
#if FOCUS >= 0
    float product = 1.0f;
#pragma unroll
    for (int i = less; i < FOCUS; ++i) product *= x;
    return product;
#else
    return x > 0.0f ? exp2f((exponent - less) * log2f(x)) : 0.0f;
#endif
}

// Binary cross entropy on logits; a: weight of the positive terms.
struct bce_with_logits {
    DEVICE float value(float x, float t, float a, float) {
        return (1.0f - t) * x + (1.0f + (a - 1.0f) * t) * (log_one_plus(exponential(-fabsf(x))) + fmaxf(-x, 0.0f));
    }
    DEVICE float gradient(float x, float t, float a, float) {
        return (1.0f - t) - (1.0f + (a - 1.0f) * t) * logistic(-x);
    }
};

struct mse {
    DEVICE float value(float x, float t, float, float) { return (x - t) * (x - t); }
    DEVICE float gradient(float x, float t, float, float) { return 2.0f * (x - t); }
};

// Lin et al., "Focal loss for dense object detection" (ICCV 2017), on logits; a: weight of the positive terms, 1 - a of
// the others; b: the focusing exponent, 0 or at least 1.
struct focal {
    // Of the class that the sign of x is for: its probability `sure` = 1 / (1 + e), and how far the target is that
    // class, and the other one. Value and gradient take two special functions each.
    struct Signed {
        float e, sure, same, other, entropy;

        __device__ __forceinline__ Signed(float x, float t) {
            e = exponential(-fabsf(x));
            sure = reciprocal(1.0f + e);
            same = x < 0.0f ? 1.0f - t : t;
            other = x < 0.0f ? t : 1.0f - t;
            entropy = fmaf(other, fabsf(x), log_one_plus(e));
        }
    };
    DEVICE float weight(float t, float a) { return fmaf(t, 2.0f * a - 1.0f, 1.0f - a); }

    DEVICE float value(float x, float t, float a, float b) {
        const Signed at(x, t);
        return weight(t, a) * at.entropy * power(at.sure * fmaf(at.same, at.e, at.other), b, 0);
    }
    DEVICE float gradient(float x, float t, float a, float b) {
        const Signed at(x, t);
        const float right = at.same * at.e, miss = at.other + right, slope = at.other - right;  // shares of `sure`
        const float bend = b * at.e * (at.other - at.same) * at.entropy;
        const float rise = FOCUS == 0
                               ? at.sure * slope
                               : power(at.sure * miss, b, 1) * (at.sure * at.sure) * fmaf(slope, miss, bend);
        return (x < 0.0f ? -rise : rise) * weight(t, a);
    }
};

// f(i, x, t) for each of a thread's runs among `size` elements; it begins at element i.
template <class F>
DEVICE void for_chunk(const T* __restrict__ x, const T* __restrict__ t, int size, F f) {
    const HeldRows at;
    for (int begin = 0; begin < size; begin += HELD * RowShare::STEP) {
        RowPart<> left, right;
        left.fetch(x, begin + at.first, size);
        right.fetch(t, begin + at.first, size);
        for_runs(begin + at.first, size, [&](int r, int i) {
            if (i >= size) return;
            float v[RUN], w[RUN];
            left.run(r, i, size, 0.0f, v);
            right.run(r, i, size, 0.0f, w);
            f(i, v, w);
        });
    }
}

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(BLOCK, 5)
pointwise_loss(const T* __restrict__ x, const T* __restrict__ t, double* __restrict__ partial, i64 count, float a,
               float b) {
    await_predecessor();
    __shared__ double scratch[32];
    const i64 begin = i64(blockIdx.x) * CHUNK;
    const int size = int(min(count - begin, i64(CHUNK)));
    double total = 0.0;
    for_chunk(x + begin, t + begin, size, [&](int i, const float (&v)[RUN], const float (&w)[RUN]) {
        float part = 0.0f;
#pragma unroll
        for (int e = 0; e < RUN; ++e)
            if (RUN == VEC || i + e < size) part += LOSS::value(v[e], w[e], a, b);
        total += part;
    });
    total = block_sum<BLOCK>(total, scratch);
    if (threadIdx.x > 0) return;
    partial[2 * i64(blockIdx.x)] = total;
    partial[2 * i64(blockIdx.x) + 1] = size;
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, 5)
pointwise_loss_backward(const T* __restrict__ x, const T* __restrict__ t, const double* __restrict__ totals,
                        const float* __restrict__ scale, T* __restrict__ dx, i64 count, float a, float b) {
    await_predecessor();
    const i64 begin = i64(blockIdx.x) * CHUNK;
    const int size = int(min(count - begin, i64(CHUNK)));
    const float factor = totals[1] > 0.0 ? (scale ? scale[0] : 1.0f) / float(totals[1]) : 0.0f;
    for_chunk(x + begin, t + begin, size, [&](int i, const float (&v)[RUN], const float (&w)[RUN]) {
        float g[RUN];
#pragma unroll
        for (int e = 0; e < RUN; ++e) g[e] = LOSS::gradient(v[e], w[e], a, b) * factor;
        store_run(dx + begin, i, size, g);
    });
}

#endif
