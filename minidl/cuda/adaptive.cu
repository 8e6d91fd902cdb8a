// Adaptive parameter updates on flat arenas, clipping of gradients, averages of weights. As in optim.cu all scalars
// stay on the device.
//
// master, first, second, momentum (n,) float32, updated in place; grad (n,) float32, still multiplied by the loss
// scale; working (n,) storage type, receives the rounded master, or null; segment_of (n / 64,) int; segments (S, 4)
// float rows [lr_scale, weight_decay, momentum_scale, 1 if the trust ratio applies]; control float[8] as in optim.cu,
// record float[8]: [beta1, beta2, eps, step, 1 - beta1^step, 1 - beta2^step, trust coefficient, 0]; norms (S, 2) float.
//
// adam_advance    one thread: the step and its two corrections, unless the gradients overflowed.
// adamw_update    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (decay w + (m / c1) / (sqrt(v / c2) + eps))
//                 Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019). 28 bytes + working per
//                 element.
// lars_update     g += decay w;  buf = momentum buf + trust g;  w -= lr buf,
//                 trust = coefficient |w| / (|g| + decay |w|)
//                 You, Gitman and Ginsburg, "Large batch training of convolutional networks" (2017). 20 bytes + working.
// lamb_moments    m and v as AdamW; leaves the squares of w and of u = m / c1 / (sqrt(v / c2) + eps) + decay w per
//                 chunk.
// lamb_update     w -= lr (|w| / |u|) u, u computed again. You et al., "Large batch optimization for deep learning"
//                 (ICLR 2020). The two: 24 + 16 bytes + working per element.
// norm_sums       squares of w and g per chunk of 64: 8 bytes per element.
// segment_norms   a block for each segment adds its chunks: norms[s] = (|w|, |g or u|).
// clip_values     g = min(max(g, -limit), limit), the limit times the loss scale.   8 bytes per element
// squares         partial (blocks,) double: sums of g^2 of each block's fixed run.   4 bytes per element
// clip_norm       g *= min(1, limit / |g|); nothing is written where the factor is 1.   0 or 8 bytes per element
// blend           average = keep average + (1 - keep) x.   12 bytes per element
//
// One thread: four neighbours; a chunk of 64 elements, which shares a segment, is half a warp. Arrays are 16-byte
// aligned.
#include "common.cuh"
#include "scalars.cuh"

#define BLOCK 256
#define CHUNK 64

struct Four {
    float v[4];
    __device__ __forceinline__ Four() {}
    __device__ __forceinline__ explicit Four(const float* p) { load(p, v); }
};

DEVICE i64 first_element() { return (i64(blockIdx.x) * BLOCK + threadIdx.x) * 4; }

DEVICE void finish(float* master, T* working, i64 i, const Four& w) {
    store(master + i, w.v);
    if (WORKING) store(working + i, w.v);
}

// Adds the squares of two vectors over a chunk. Every thread of a half warp is inside or none.
DEVICE void leave_squares(const Four& a, const Four& b, float2* partial, i64 i) {
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        x = fmaf(a.v[e], a.v[e], x);
        y = fmaf(b.v[e], b.v[e], y);
    }
    const u32 half = 0xffffu << (threadIdx.x & 16);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(half, x, offset);
        y += __shfl_xor_sync(half, y, offset);
    }
    if (threadIdx.x % 16 == 0) partial[i / CHUNK] = make_float2(x, y);
}

// The direction of Adam, and with it the decay of LAMB.
DEVICE float direction(float m, float v, const float* record) {
    return m / record[CORRECTION1] / (sqrtf(v / record[CORRECTION2]) + record[EPS]);
}

DEVICE void moments(Four& m, Four& v, const Four& g, const float* record, float unscale) {
    const float b1 = record[BETA1], b2 = record[BETA2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float d = g.v[e] * unscale;
        m.v[e] = b1 * m.v[e] + (1.0f - b1) * d;
        v.v[e] = b2 * v.v[e] + (1.0f - b2) * d * d;
    }
}

#if defined(UPDATE)

extern "C" __global__ void __launch_bounds__(BLOCK)
adamw_update(float* __restrict__ master, const float* __restrict__ grad, float* __restrict__ first,
             float* __restrict__ second, T* __restrict__ working, const int* __restrict__ segment_of,
             const float4* __restrict__ segments, const float* __restrict__ control, const float* __restrict__ record,
             i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n || control[NONFINITE] != 0.0f) return;
    const float4 segment = segments[segment_of[i / CHUNK]];
    Four w(master + i), m(first + i), v(second + i);
    const Four g(grad + i);
    moments(m, v, g, record, 1.0f / control[LOSS_SCALE]);
    const float rate = control[LEARNING_RATE] * segment.x;
#pragma unroll
    for (int e = 0; e < 4; ++e) w.v[e] -= rate * (segment.y * w.v[e] + direction(m.v[e], v.v[e], record));
    store(first + i, m.v);
    store(second + i, v.v);
    finish(master, working, i, w);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
lars_update(float* __restrict__ master, const float* __restrict__ grad, float* __restrict__ momentum,
            T* __restrict__ working, const int* __restrict__ segment_of, const float4* __restrict__ segments,
            const float2* __restrict__ norms, const float* __restrict__ control, const float* __restrict__ record,
            i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n || control[NONFINITE] != 0.0f) return;
    const int at = segment_of[i / CHUNK];
    const float4 segment = segments[at];
    const float2 norm = norms[at];
    const bool adapts = segment.w != 0.0f && norm.x > 0.0f && norm.y > 0.0f;
    const float trust = adapts ? record[TRUST] * norm.x / (norm.y + segment.y * norm.x) : 1.0f;
    const float unscale = 1.0f / control[LOSS_SCALE], keep = control[MOMENTUM_FACTOR] * segment.z;
    const float rate = control[LEARNING_RATE] * segment.x;
    Four w(master + i), b(momentum + i);
    const Four g(grad + i);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        b.v[e] = keep * b.v[e] + trust * (g.v[e] * unscale + segment.y * w.v[e]);
        w.v[e] -= rate * b.v[e];
    }
    store(momentum + i, b.v);
    finish(master, working, i, w);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
lamb_update(float* __restrict__ master, const float* __restrict__ first, const float* __restrict__ second,
            T* __restrict__ working, const int* __restrict__ segment_of, const float4* __restrict__ segments,
            const float2* __restrict__ norms, const float* __restrict__ control, const float* __restrict__ record,
            i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n || control[NONFINITE] != 0.0f) return;
    const int at = segment_of[i / CHUNK];
    const float4 segment = segments[at];
    const float2 norm = norms[at];
    const float trust = segment.w != 0.0f && norm.x > 0.0f && norm.y > 0.0f ? norm.x / norm.y : 1.0f;
    const float rate = control[LEARNING_RATE] * segment.x * trust;
    Four w(master + i);
    const Four m(first + i), v(second + i);
#pragma unroll
    for (int e = 0; e < 4; ++e) w.v[e] -= rate * (segment.y * w.v[e] + direction(m.v[e], v.v[e], record));
    finish(master, working, i, w);
}

#else

extern "C" __global__ void adam_advance(const float* control, float* record) {
    await_predecessor();
    if (control[NONFINITE] != 0.0f) return;
    record[STEP] += 1.0f;
    record[CORRECTION1] = float(1.0 - pow(double(record[BETA1]), double(record[STEP])));
    record[CORRECTION2] = float(1.0 - pow(double(record[BETA2]), double(record[STEP])));
}

extern "C" __global__ void __launch_bounds__(BLOCK)
lamb_moments(const float* __restrict__ master, const float* __restrict__ grad, float* __restrict__ first,
             float* __restrict__ second, float2* __restrict__ partial, const int* __restrict__ segment_of,
             const float4* __restrict__ segments, const float* __restrict__ control,
             const float* __restrict__ record, i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n || control[NONFINITE] != 0.0f) return;
    const float decay = segments[segment_of[i / CHUNK]].y;
    const Four w(master + i), g(grad + i);
    Four m(first + i), v(second + i), u;
    moments(m, v, g, record, 1.0f / control[LOSS_SCALE]);
    store(first + i, m.v);
    store(second + i, v.v);
#pragma unroll
    for (int e = 0; e < 4; ++e) u.v[e] = decay * w.v[e] + direction(m.v[e], v.v[e], record);
    leave_squares(w, u, partial, i);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
norm_sums(const float* __restrict__ master, const float* __restrict__ grad, float2* __restrict__ partial,
          const float* __restrict__ control, i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n) return;
    const Four w(master + i);
    Four g(grad + i);
    const float unscale = 1.0f / control[LOSS_SCALE];
#pragma unroll
    for (int e = 0; e < 4; ++e) g.v[e] *= unscale;
    leave_squares(w, g, partial, i);
}

// bounds (segments + 1,): the chunks of the arena at which segments begin; partial begins with that of the first
// segment.
extern "C" __global__ void __launch_bounds__(1024)
segment_norms(const float2* __restrict__ partial, const int* __restrict__ bounds, float2* __restrict__ norms) {
    await_predecessor();
    __shared__ double scratch[2][32];
    double x = 0.0, y = 0.0;
#pragma unroll 4
    for (int chunk = bounds[blockIdx.x] - bounds[0] + threadIdx.x; chunk < bounds[blockIdx.x + 1] - bounds[0];
         chunk += 1024) {
        const float2 part = partial[chunk];
        x += part.x;
        y += part.y;
    }
    x = block_sum<1024>(x, scratch[0]);
    y = block_sum<1024>(y, scratch[1]);
    if (threadIdx.x == 0) norms[blockIdx.x] = make_float2(float(sqrt(x)), float(sqrt(y)));
}

extern "C" __global__ void __launch_bounds__(BLOCK)
clip_values(float* __restrict__ grad, const float* __restrict__ control, float limit, i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n) return;
    Four g(grad + i);
    const float most = limit * control[LOSS_SCALE];
#pragma unroll
    for (int e = 0; e < 4; ++e) g.v[e] = g.v[e] > most ? most : g.v[e] < -most ? -most : g.v[e];  // NaN stays
    store(grad + i, g.v);
}

#define RUN 16  // vectors of four for each thread

extern "C" __global__ void __launch_bounds__(BLOCK)
squares(const float* __restrict__ grad, double* __restrict__ partial, i64 n) {
    await_predecessor();
    __shared__ double scratch[32];
    double sum = 0.0;
#pragma unroll 4
    for (int u = 0; u < RUN; ++u) {
        const i64 i = (i64(blockIdx.x) * RUN + u) * (BLOCK * 4) + threadIdx.x * 4;
        if (i >= n) break;
        const Four g(grad + i);
        float part = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) part = fmaf(g.v[e], g.v[e], part);
        sum += part;
    }
    sum = block_sum<BLOCK>(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
clip_norm(float* __restrict__ grad, const double* __restrict__ total, const float* __restrict__ control,
          float limit, i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n) return;
    const float norm = float(sqrt(total[0])), most = limit * control[LOSS_SCALE];
    if (!(norm > most)) return;  // a NaN would stay in what lies between the parameters, which no pass writes again
    const float factor = most / norm;
    Four g(grad + i);
#pragma unroll
    for (int e = 0; e < 4; ++e) g.v[e] *= factor;
    store(grad + i, g.v);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
blend(float* __restrict__ average, const float* __restrict__ x, float keep, i64 n) {
    await_predecessor();
    const i64 i = first_element();
    if (i >= n) return;
    Four a(average + i);
    const Four b(x + i);
#pragma unroll
    for (int e = 0; e < 4; ++e) a.v[e] = fmaf(keep, a.v[e] - b.v[e], b.v[e]);
    store(average + i, a.v);
}

#endif
