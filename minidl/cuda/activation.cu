// Activation functions and their gradients.
//
// x, y, dy, kept, add, dx: any shape, T, dense or rows at a pitch. FUNCTION names one of the structs below:
//   activate:            y = value(x);  NaN stays NaN
//   activate_backward:   dx = dy * slope(kept) (+ add when ADD is 1), where kept is the output y or the input x, as the
//                        struct says. What a ReLU cuts off is dropped, not multiplied: infinite gradients leave no NaN.
//
// Mapping: Share (common.cuh). Cost per element, s = sizeof(T): activate 2s bytes, activate_backward 3s, with add 4s;
// floor on an H200 at 4.2 TB/s in bf16 per million elements: 0.95, 1.43 and 1.90 us. Up to some 25 instructions per element
// (the error function) fit into that time.

#include "common.cuh"
#include "exponential.cuh"

DEVICE float clamp_above(float a, float bound) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(bound));
    return y;
}

// Near zero by its series, where 1 - 2 / (e^2x + 1) would cancel.
DEVICE float hyperbolic(float x) {
    const float z = x * x;
    const float series =
        x * fmaf(z, fmaf(z, fmaf(z, fmaf(z, 62.0f / 2835.0f, -17.0f / 315.0f), 2.0f / 15.0f), -1.0f / 3.0f), 1.0f);
    return fabsf(x) < 0.3f ? series : 1.0f - 2.0f * reciprocal(exponential(2.0f * x) + 1.0f);
}

// Distribution and density of the normal law. The tail is e^(-x^2/2) times a polynomial in t = 1 / (1 + 0.31 |x|), fitted
// to 2e-7 relative; the same on CPUs (_activation.h).
struct Normal {
    float below, density;

    __device__ __forceinline__ explicit Normal(float x) {
        const float a = fabsf(x), t = reciprocal(fmaf(0.31f, a, 1.0f)), peak = exponential(-0.5f * a * a);
        float q = 0.07177965342998505f;
        q = fmaf(q, t, -0.28363126516342163f);
        q = fmaf(q, t, 0.3109051287174225f);
        q = fmaf(q, t, -0.030559580773115158f);
        q = fmaf(q, t, 0.22064556181430817f);
        q = fmaf(q, t, 0.21540401875972748f);
        q = fmaf(q, t, 0.2481444776058197f);
        q = fmaf(q, t, 0.24731215834617615f);
        const float tail = 0.5f * q * t * peak;
        below = x < 0.0f ? tail : 1.0f - tail;
        density = 0.3989422804014327f * peak;
    }
};

// Each: value(x, a), and gradient(dy, kept, a), a being the slope of leaky_relu.
struct relu {  // keeps y
    DEVICE float value(float x, float) { return clamp_below(x, 0.0f); }
    DEVICE float gradient(float dy, float y, float) { return y > 0.0f ? dy : 0.0f; }
};
struct relu6 {  // keeps y
    DEVICE float value(float x, float) { return clamp_above(clamp_below(x, 0.0f), 6.0f); }
    DEVICE float gradient(float dy, float y, float) { return y > 0.0f && y < 6.0f ? dy : 0.0f; }
};
struct leaky_relu {  // keeps y
    DEVICE float value(float x, float a) { return x > 0.0f ? x : a * x; }
    DEVICE float gradient(float dy, float y, float a) { return y > 0.0f ? dy : a * dy; }
};
struct sigmoid {  // keeps y
    DEVICE float value(float x, float) { return logistic(x); }
    DEVICE float gradient(float dy, float y, float) { return dy * y * (1.0f - y); }
};
struct tanh_ {  // keeps y
    DEVICE float value(float x, float) { return hyperbolic(x); }
    DEVICE float gradient(float dy, float y, float) { return dy * fmaf(-y, y, 1.0f); }
};
struct silu {  // keeps x
    DEVICE float value(float x, float) { return x * logistic(x); }
    DEVICE float gradient(float dy, float x, float) {
        return dy * logistic(x) * fmaf(x, logistic(-x), 1.0f);  // 1 - logistic(x) would cancel
    }
};
struct gelu {  // keeps x
    DEVICE float value(float x, float) { return x * Normal(x).below; }
    DEVICE float gradient(float dy, float x, float) {
        const Normal at(x);
        return dy * fmaf(x, at.density, at.below);
    }
};
struct gelu_tanh {  // keeps x; (1 + tanh u) / 2 is the logistic function of 2u, which does not cancel
    static constexpr float scale = 1.5957691216057308f, cubic = 0.044715f;
    DEVICE float value(float x, float) { return x * logistic(scale * fmaf(cubic * x * x, x, x)); }
    DEVICE float gradient(float dy, float x, float) {
        const float u = scale * fmaf(cubic * x * x, x, x), inner = scale * fmaf(3.0f * cubic * x, x, 1.0f);
        return dy * logistic(u) * fmaf(x * inner, logistic(-u), 1.0f);
    }
};
struct hardswish {  // keeps x
    DEVICE float value(float x, float) { return x * clamp_above(clamp_below(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f); }
    DEVICE float gradient(float dy, float x, float) {
        return x >= 3.0f ? dy : x > -3.0f ? dy * fmaf(x, 1.0f / 3.0f, 0.5f) : 0.0f;
    }
};

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(256, 4)
activate_kernel(const T* __restrict__ x, T* __restrict__ y, float a, Walk walk) {
    const Share at(walk, UNROLL);
    Raw<T, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0]) + at.channel); },
        [&](int u, int row) {
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = FUNCTION::value(v[i], a);
            store(y + row_offset(row, walk.pitch[1]) + at.channel, v);
        });
    const i64 i = tail_element(walk);
    if (i >= 0) y[i] = from_float<T>(FUNCTION::value(to_float(x[i]), a));
}

#else

extern "C" __global__ void __launch_bounds__(256, 4)
activate_backward_kernel(const T* __restrict__ dy, const T* __restrict__ kept, const T* __restrict__ add,
                         T* __restrict__ dx, float a, Walk walk) {
    const Share at(walk, UNROLL);
    Raw<T, VEC> raw_dy[UNROLL], raw_kept[UNROLL], more[ADD ? UNROLL : 1];
    for_rows<UNROLL>(
        at,
        [&](int u, int row) {
            raw_dy[u] = load_raw<VEC>(dy + row_offset(row, walk.pitch[0]) + at.channel);
            raw_kept[u] = load_raw<VEC>(kept + row_offset(row, walk.pitch[1]) + at.channel);
            if (ADD) more[u] = load_raw<VEC>(add + row_offset(row, walk.pitch[3]) + at.channel);
        },
        [&](int u, int row) {
            float g[VEC], v[VEC], z[VEC] = {};
            unpack(raw_dy[u], g);
            unpack(raw_kept[u], v);
            if (ADD) unpack(more[u], z);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[i] = FUNCTION::gradient(g[i], v[i], a) + z[i];
            store(dx + row_offset(row, walk.pitch[2]) + at.channel, g);
        });
    const i64 i = tail_element(walk);
    if (i >= 0)
        dx[i] = from_float<T>(FUNCTION::gradient(to_float(dy[i]), to_float(kept[i]), a) + (ADD ? to_float(add[i]) : 0.0f));
}

#endif
