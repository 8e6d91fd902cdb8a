// Depthwise convolution: every output channel k sees one input channel, k / m, where m is the channel multiplier. A
// matrix product would be all padding, so these kernels are direct and bound by memory: float32 FFMA on vectors of
// channels.
//
// depthwise_kernel
//   forward (BACKWARD = 0):
//     y[n,p,q,k]  = bias[k] + add[n,p,q,k] + sum_{r,s} x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, k/m] w[k,r,s]
//   data gradient (BACKWARD = 1):
//     dx[n,h,w,c] = bias[c] + add[n,h,w,c] + sum_{r,s,j<m} dy[n,p,q,c*m + j] w[c*m + j,r,s]
//                   over the r, s for which there are p, q with p*sh - ph + r*dh = h and q*sw - pw + s*dw = w
//   source    ((n*height + h)*width + w)*source_pitch + channel      T, forward: x; data gradient: dy
//   filter    (K, R, S) dense                                        T
//   bias      (channels,) float32 or null
//   add       output's shape, pixels other_pitch apart               T or null
//   output    (images, out_height, out_width, channels) dense        T
//   Block: LANES vectors of channels x 256/LANES pixels, PASSES pixels per thread one after the other. The filters of
//   these channels, a slab, lie in shared memory as float32: 4 * R * S * LANES * VEC (* m backward) bytes.
//   Grid: pixel blocks x slabs, slabs fastest.
//   FLOP: 2 * R * S (* m backward) per output value. Bytes: source and output once, taps are re-read from L1.
//
// depthwise_weight_kernel
//     dw[k,r,s] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, k/m]
//   output    (chunks, K, R*S) float32 partials, added up in order by sum_partials_kernel (channel_sum.cu)
//   Block: as above, TAPS taps at a time in registers. Grid: chunks of pixels x tap groups x slabs, slabs fastest.
//   FLOP: 2 * R * S per value of dy. Bytes: dy and x once per tap group, and 4 * chunks * |dw| twice.
//
// Macros: DTYPE; VEC (1 when m > 1); LANES, a power of two; MULTIPLIER (m); KERNEL_W, STRIDE_H, STRIDE_W; BACKWARD or
// TAPS. Chunks and the LANES of the weight gradient depend on the sizes alone, so the bits depend neither on the device
// nor on VEC.
#include "common.cuh"

static_assert(VEC == 1 || MULTIPLIER == 1, "vectors need output and input channels side by side");

constexpr int THREADS = 256;
constexpr int DEEP = THREADS / LANES;  // pixels that a block handles at a time
constexpr int SLAB = LANES * VEC;      // channels of a block

struct Problem {
    i64 source_pitch, other_pitch;  // other: add, or dy in the weight gradient
    i64 pixels, chunk;              // pixels in all, and per block (a chunk of the weight gradient)
    int height, width;              // of the source
    int out_height, out_width;      // of the image whose pixels are counted
    int channels;                   // of the output; in the weight gradient of dy
    int kernel_h;
    int padding_h, padding_w;
    int dilation_h, dilation_w;
    int slabs;
};

struct Pixel {
    i64 image;
    int y, x;
};

// `index` counts pixels from the start of image `image`.
DEVICE Pixel pixel_at(i64 image, int index, const Problem& p) {
    const int per_image = p.out_height * p.out_width;
    const int further = index / per_image;
    const int rest = index - further * per_image;
    const int y = rest / p.out_width;
    return {image + further, y, rest - y * p.out_width};
}

template <int N>
DEVICE void load_or_zero(const T* from, bool inside, float (&value)[N]) {
    Raw<T, N> raw;
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = 0.0f;
    if (inside) {
        raw = load_raw<N>(from);
        unpack(raw, value);
    }
}

#ifdef BACKWARD

constexpr int PASSES = 8;
constexpr int UNROLL_W = KERNEL_W <= 8 ? KERNEL_W : 1;

// Source coordinate that tap `tap` of output coordinate `at` reads, or -1.
template <int STRIDE>
DEVICE int source_coordinate(int at, int tap, int padding, int dilation, int size) {
    if (BACKWARD) {
        const int strided = at + padding - tap * dilation;
        const int coordinate = strided / STRIDE;
        return strided >= 0 && coordinate * STRIDE == strided && coordinate < size ? coordinate : -1;
    }
    const int coordinate = at * STRIDE - padding + tap * dilation;
    return coordinate >= 0 && coordinate < size ? coordinate : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
depthwise_kernel(const T* __restrict__ source, const T* __restrict__ filter, const float* __restrict__ bias,
                 const T* __restrict__ add, T* __restrict__ output, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(16) float weights[];  // [j][tap][channel of the slab]
    constexpr int FAN = BACKWARD ? MULTIPLIER : 1;    // filters that meet in one output channel
    const int taps = p.kernel_h * KERNEL_W;
    const int first_channel = blockIdx.x % p.slabs * SLAB;
    for (int i = threadIdx.x; i < FAN * taps * SLAB; i += THREADS) {
        const int channel = first_channel + i % SLAB, tap = i / SLAB % taps, j = i / SLAB / taps;
        weights[i] = channel < p.channels ? to_float(filter[i64(channel * FAN + j) * taps + tap]) : 0.0f;
    }
    __syncthreads();

    const int local = threadIdx.x % LANES * VEC;
    const int channel = first_channel + local;
    if (channel >= p.channels) return;
    const int source_channel = BACKWARD ? channel * MULTIPLIER : channel / MULTIPLIER;
    float shift[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) shift[e] = bias ? bias[channel + e] : 0.0f;

    const i64 first = blockIdx.x / p.slabs * i64(PASSES * DEEP);
    const i64 first_image = first / (p.out_height * p.out_width);
    const int first_rest = static_cast<int>(first - first_image * (p.out_height * p.out_width));
    for (int i = threadIdx.x / LANES; i < PASSES * DEEP; i += DEEP) {
        const i64 index = first + i;
        if (index >= p.pixels) return;
        const Pixel at = pixel_at(first_image, first_rest + i, p);
        float sum[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] = shift[e];
        for (int r = 0; r < p.kernel_h; ++r) {
            const int h = source_coordinate<STRIDE_H>(at.y, r, p.padding_h, p.dilation_h, p.height);
            if (h < 0) continue;
            const T* line = source + (at.image * p.height + h) * p.width * p.source_pitch + source_channel;
#pragma unroll UNROLL_W
            for (int s = 0; s < KERNEL_W; ++s) {
                const int w = source_coordinate<STRIDE_W>(at.x, s, p.padding_w, p.dilation_w, p.width);
#pragma unroll
                for (int j = 0; j < FAN; ++j) {
                    float value[VEC];
                    load_or_zero(line + w * p.source_pitch + j, w >= 0, value);
                    const float* weight = weights + ((j * p.kernel_h + r) * KERNEL_W + s) * SLAB + local;
#pragma unroll
                    for (int e = 0; e < VEC; ++e) sum[e] = fmaf(value[e], weight[e], sum[e]);
                }
            }
        }
        if (add) {
            float other[VEC];
            load<T, VEC>(add + index * p.other_pitch + channel, other);
#pragma unroll
            for (int e = 0; e < VEC; ++e) sum[e] += other[e];
        }
        store<T, VEC>(output + index * p.channels + channel, sum);
    }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS, 2)
depthwise_weight_kernel(const T* __restrict__ dy, const T* __restrict__ x, float* __restrict__ output,
                        const __grid_constant__ Problem p) {
    await_predecessor();
    __shared__ float scratch[DEEP][SLAB + 1];
    const int taps = p.kernel_h * KERNEL_W;
    const int groups = ceil_div(taps, TAPS);
    const int first_channel = blockIdx.x % p.slabs * SLAB;
    const int first_tap = blockIdx.x / p.slabs % groups * TAPS;
    const i64 chunk = blockIdx.x / p.slabs / groups;
    const i64 first = chunk * p.chunk;
    const int count = static_cast<int>(first + p.chunk < p.pixels ? p.chunk : p.pixels - first);
    const i64 first_image = first / (p.out_height * p.out_width);
    const int first_rest = static_cast<int>(first - first_image * (p.out_height * p.out_width));

    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const int channel = first_channel + lane * VEC;
    float sum[TAPS][VEC] = {};
    if (channel < p.channels) {
        for (int i = depth; i < count; i += DEEP) {
            const Pixel at = pixel_at(first_image, first_rest + i, p);
            float gradient[VEC];
            load<T, VEC>(dy + (first + i) * p.other_pitch + channel, gradient);
            const T* image = x + at.image * p.height * p.width * p.source_pitch + channel / MULTIPLIER;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) {
                const int r = (first_tap + t) / KERNEL_W, s = (first_tap + t) % KERNEL_W;
                const int h = at.y * STRIDE_H - p.padding_h + r * p.dilation_h;
                const int w = at.x * STRIDE_W - p.padding_w + s * p.dilation_w;
                const bool inside = r < p.kernel_h && h >= 0 && h < p.height && w >= 0 && w < p.width;
                float value[VEC];
                load_or_zero(image + (i64(h) * p.width + w) * p.source_pitch, inside, value);
#pragma unroll
                for (int e = 0; e < VEC; ++e) sum[t][e] = fmaf(gradient[e], value[e], sum[t][e]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) scratch[depth][lane * VEC + e] = sum[t][e];
        __syncthreads();
        for (int half = DEEP / 2; half > 0; half /= 2) {
            if (depth < half)
#pragma unroll
                for (int e = 0; e < VEC; ++e) scratch[depth][lane * VEC + e] += scratch[depth + half][lane * VEC + e];
            __syncthreads();
        }
        for (int c = threadIdx.x; c < SLAB; c += THREADS)
            if (first_channel + c < p.channels && first_tap + t < taps)
                output[(chunk * p.channels + first_channel + c) * taps + first_tap + t] = scratch[0][c];
        __syncthreads();
    }
}

#endif
