// Parameter updates on flat arenas. Learning rate, loss scale and the verdict on overflow stay on the device: the host
// decides nothing, so a whole training step can be captured in a graph.
//
// sgd_update       master, momentum: (n,) float32, updated in place; grad: (n,) float32; working: (n,) storage type,
//                  receives the rounded master; segment_of: (n / 64,) int32; segments: (S, 4) float32 rows
//                  [lr_scale, weight_decay, momentum_scale, 0]; control: float32[8], see scalars.cuh.
//                      g = grad / loss_scale + weight_decay * w
//                      buf = (momentum * buf + weight_decay * w) + grad / loss_scale
//                      w -= lr * lr_scale * (NESTEROV ? g + momentum * buf : buf)    (without momentum: * g)
//                  where momentum is the control's times the segment's. Sutskever et al., "On the importance of
//                  initialization and momentum in deep learning" (ICML 2013), the learning rate outside the buffer.
//                  bytes per element: grad 4 + master 8 + momentum 8 + working 2 or 4 + segment number 1/16; 8 FLOP.
//                  Without GRADIENT the last term of buf is there already and buf is only read: 4 + 8 + working.
// sgd_begin        buf = momentum * buf + weight_decay * w, to which backward passes then add: the bits of sgd_update
//                  with gradients apart. 12 bytes per element.
// find_nonfinite   grad: (n,) float32; control[NONFINITE] = 1 when any element is Inf or NaN. Every writer writes the same
//                  value, so their order does not matter; clear_nonfinite zeroes the flag first. 4 bytes per element.
// update_loss_scale   one thread: dynamic loss scaling, Micikevicius et al., "Mixed precision training" (ICLR 2018).
//
// -DGRADIENT, -DMOMENTUM, -DNESTEROV, -DWORKING: 0 or 1; absent arrays are null pointers. Every pointer is 16-byte
// aligned.
#include "common.cuh"
#include "scalars.cuh"

#define BLOCK 256
#define CHUNK 64  // elements that share a segment

// The buffer before the gradient comes: rounded alike wherever it is computed.
DEVICE float decayed(float w, float buf, float decay, float momentum) {
    return __fmaf_rn(momentum, buf, __fmul_rn(decay, w));
}

// A thread's groups of four neighbours, all of whose loads are issued before the first use: load(u, i) of each group
// that begins at an element i below n, then store(u, i).
template <int UNROLL, class Load, class Store>
DEVICE void for_groups(i64 n, Load load, Store store) {
    const i64 first = i64(blockIdx.x) * (BLOCK * 4 * UNROLL) + threadIdx.x * 4;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
        if (first + u * (BLOCK * 4) < n) load(u, first + u * (BLOCK * 4));
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
        if (first + u * (BLOCK * 4) < n) store(u, first + u * (BLOCK * 4));
}

DEVICE float4 four(const float* p) { return *reinterpret_cast<const float4*>(p); }

DEVICE void put_four(float* p, const float4& v) { *reinterpret_cast<float4*>(p) = v; }

#ifdef MOMENTUM
#define UNROLL 2

DEVICE void step(float& w, float& buf, float g, float lr, float decay, float momentum, float unscale) {
#if MOMENTUM && GRADIENT
    buf = __fmaf_rn(g, unscale, decayed(w, buf, decay, momentum));
#endif
#if !MOMENTUM || NESTEROV
    g = g * unscale + decay * w;
#endif
#if MOMENTUM
    g = NESTEROV ? g + momentum * buf : buf;
#endif
    w = __fmaf_rn(-lr, g, w);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
sgd_update(float* __restrict__ master, const float* __restrict__ grad, float* __restrict__ momentum_buffer,
           T* __restrict__ working, const int* __restrict__ segment_of, const float4* __restrict__ segments,
           const float* __restrict__ control, i64 n) {
    await_predecessor();
    if (control[NONFINITE] != 0.0f) return;
    const float lr = control[LEARNING_RATE], unscale = 1.0f / control[LOSS_SCALE];
    const float momentum = control[MOMENTUM_FACTOR];
    float4 w[UNROLL], g[UNROLL], buf[UNROLL], segment[UNROLL];
    for_groups<UNROLL>(
        n,
        [&](int u, i64 i) {
            segment[u] = segments[segment_of[i / CHUNK]];
            w[u] = four(master + i);
            if (GRADIENT) g[u] = four(grad + i);
            if (MOMENTUM) buf[u] = four(momentum_buffer + i);
        },
        [&](int u, i64 i) {
            const float rate = lr * segment[u].x, decay = segment[u].y, factor = momentum * segment[u].z;
            step(w[u].x, buf[u].x, g[u].x, rate, decay, factor, unscale);
            step(w[u].y, buf[u].y, g[u].y, rate, decay, factor, unscale);
            step(w[u].z, buf[u].z, g[u].z, rate, decay, factor, unscale);
            step(w[u].w, buf[u].w, g[u].w, rate, decay, factor, unscale);
            put_four(master + i, w[u]);
            if (MOMENTUM && GRADIENT) put_four(momentum_buffer + i, buf[u]);
            if (WORKING) {
                const float rounded[4] = {w[u].x, w[u].y, w[u].z, w[u].w};
                store(working + i, rounded);
            }
        });
}

#else

#define UNROLL 4

extern "C" __global__ void __launch_bounds__(BLOCK)
sgd_begin(const float* __restrict__ master, float* __restrict__ momentum_buffer, const int* __restrict__ segment_of,
          const float4* __restrict__ segments, const float* __restrict__ control, i64 n) {
    await_predecessor();
    const float momentum = control[MOMENTUM_FACTOR];
    float4 w[UNROLL], buf[UNROLL], segment[UNROLL];
    for_groups<UNROLL>(
        n,
        [&](int u, i64 i) {
            segment[u] = segments[segment_of[i / CHUNK]];
            w[u] = four(master + i);
            buf[u] = four(momentum_buffer + i);
        },
        [&](int u, i64 i) {
            const float decay = segment[u].y, factor = momentum * segment[u].z;
            buf[u].x = decayed(w[u].x, buf[u].x, decay, factor);
            buf[u].y = decayed(w[u].y, buf[u].y, decay, factor);
            buf[u].z = decayed(w[u].z, buf[u].z, decay, factor);
            buf[u].w = decayed(w[u].w, buf[u].w, decay, factor);
            put_four(momentum_buffer + i, buf[u]);
        });
}

extern "C" __global__ void clear_nonfinite(float* control) {
    await_predecessor();
    control[NONFINITE] = 0.0f;
}

// Inf and NaN are exactly the patterns whose exponent is all ones: the largest magnitude, as an integer, tells.
DEVICE u32 magnitude(float value) {
    return __float_as_uint(value) & 0x7fffffffu;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
find_nonfinite(const float* __restrict__ grad, float* __restrict__ control, i64 n) {
    await_predecessor();
    u32 largest = 0;
    for_groups<UNROLL>(
        n,
        [&](int, i64 i) {
            if (i + 4 <= n) {
                const float4 g = four(grad + i);
                largest = max(largest, max(max(magnitude(g.x), magnitude(g.y)), max(magnitude(g.z), magnitude(g.w))));
            } else {
                for (i64 k = i; k < n; ++k) largest = max(largest, magnitude(grad[k]));
            }
        },
        [](int, i64) {});
    if (largest >= 0x7f800000u) control[NONFINITE] = 1.0f;
}

extern "C" __global__ void update_loss_scale(float* control) {
    await_predecessor();
    if (control[NONFINITE] != 0.0f) {
        control[LOSS_SCALE] = fmaxf(control[LOSS_SCALE] * 0.5f, 1.0f);
        control[GOOD_STEPS] = 0.0f;
        control[SKIPPED_STEPS] += 1.0f;
        return;
    }
    control[GOOD_STEPS] += 1.0f;
    if (control[GOOD_STEPS] < control[GROWTH_INTERVAL]) return;
    control[LOSS_SCALE] = fminf(control[LOSS_SCALE] * 2.0f, 16777216.0f);
    control[GOOD_STEPS] = 0.0f;
}

#endif
