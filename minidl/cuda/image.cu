// Images of bytes or float32 to normalised images of the storage type.
//
// x      (elements) dense, channels innermost                SOURCE: u8 or float
// scale  (channels), shift (channels)                        float32
// y      (elements) dense: round(x * scale + shift)          T
//
// Product and sum are rounded to float32 one after the other, never fused, so that the CPU gives the same bits.
// Mapping: a block takes STEPS * blockDim.x vectors of VEC elements, threads side by side; a thread STEPS of them, and
// the elements behind the last vector one by one. Where blockDim.x * VEC is a multiple of the channels, as the launcher
// sees to for few of them, all its vectors begin with one channel, and scale and shift stay in registers.
// Cost: bytes = elements * (sizeof SOURCE + sizeof T), each once; floor on an H200 at 4.2 TB/s for 256 images of
// 224 x 224 x 3 bytes to bf16: 28 us.
//
// Macros: DTYPE, SOURCE, VEC.
#include "common.cuh"

DEVICE float to_float(u8 x) { return float(x); }

constexpr int STEPS = 4;

extern "C" __global__ void __launch_bounds__(256)
normalise_kernel(const SOURCE* __restrict__ x, const float* __restrict__ scale, const float* __restrict__ shift,
                 T* __restrict__ y, i64 elements, int channels) {
    await_predecessor();
    const int step = blockDim.x * VEC;
    const i64 begin = i64(blockIdx.x) * (STEPS * step) + threadIdx.x * VEC;
    Raw<SOURCE, VEC> raw[STEPS];
#pragma unroll
    for (int u = 0; u < STEPS; ++u)
        if (begin + u * step + VEC <= elements) raw[u] = load_raw<VEC>(x + begin + u * step);
    int channel = int(begin % channels);
    const int advance = step % channels;
    float factor[VEC], term[VEC];
    const auto fetch = [&] {
        int k = channel;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            factor[e] = scale[k];
            term[e] = shift[k];
            if (++k == channels) k = 0;
        }
    };
    const auto value = [&](SOURCE of, int e) { return __fadd_rn(__fmul_rn(to_float(of), factor[e]), term[e]); };
    fetch();
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
        const i64 first = begin + u * step;
        if (u > 0 && advance) {
            channel = (channel + advance) % channels;
            fetch();
        }
        if (first + VEC <= elements) {
            float v[VEC];
#pragma unroll
            for (int e = 0; e < VEC; ++e) v[e] = value(raw[u].items[e], e);
            store(y + first, v);
        } else {
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                if (first + e < elements) y[first + e] = from_float<T>(value(x[first + e], e));
        }
    }
}
