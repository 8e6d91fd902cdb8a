// How the kernels of Hopper normalise their input as they read it: x is the input of a batch norm with a ReLU over it,
// and what a product sees are relu((x - mean)*rstd*gamma + beta), with the bits that a pass of its own would write
// (normalize.cuh). They are never in memory. Padding lies behind the ReLU: its zeros stay zeros.
//
// Instructions are what this costs: beside products of up to 128 columns, what is issued while the matrix units are
// busy adds to their time, one for one or nearly so (measured on an H200, in registers and in shared memory alike);
// beside 256 columns it is hidden.
//
// NORMALIZED 1: in float32. 2: in packed 16-bit arithmetic, relu(x*s + t) with s = rstd*gamma and t = beta - mean*s
// rounded to T, in one instruction for two values where the other takes five; before the rounding of the result, which
// both have, off by at most u (|s*x| + |t|), u = 2^-8 of bfloat16, 2^-11 of float16.
#pragma once
#include "hopper.cuh"
#include "normalize.cuh"

// The batch norm: moments (2, channels), mean and rstd; gamma, beta (channels,).
struct Norm {
    const float *moments, *gamma, *beta;
    int channels;
};

// What two neighbouring channels need; behind the last one zeros, which make zeros of zeros.
#if NORMALIZED == 2
struct Affine {
    u32 scale = 0, shift = 0;

    __device__ __forceinline__ Affine() {}
    // of: the block of eight channels that they are of, which exists or does not.
    __device__ __forceinline__ Affine(const Norm& norm, int of, int channel) {
        if (of >= norm.channels) return;
        const float2 mean = *reinterpret_cast<const float2*>(norm.moments + channel);
        float2 s = *reinterpret_cast<const float2*>(norm.moments + norm.channels + channel);
        const float2 gamma = *reinterpret_cast<const float2*>(norm.gamma + channel);
        const float2 beta = *reinterpret_cast<const float2*>(norm.beta + channel);
        s.x *= gamma.x, s.y *= gamma.y;
        scale = Rounding<T>::round_pair(s.x, s.y);
        shift = Rounding<T>::round_pair(fmaf(-mean.x, s.x, beta.x), fmaf(-mean.y, s.y, beta.y));
    }

    // To shared memory, and from there.
    __device__ __forceinline__ void store(u32 address) const {
        store_shared(address, make_uint2(scale, shift));
    }
    __device__ __forceinline__ void load(u32 address) {
        const uint2 words = load_shared_pair(address);
        scale = words.x, shift = words.y;
    }

    // Of a pair of values as they lie in memory, zeros where they are not inside of an image. NaN stays NaN.
    __device__ __forceinline__ u32 operator()(u32 pair, bool inside = true) const {
        u32 y;
#if DTYPE == 1
        asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(scale), "r"(shift));
#else
        asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(scale), "r"(shift));
#endif
        return inside ? y : 0;
    }
};
#else
struct Affine {
    float2 scale = {0, 0}, shift = {0, 0};

    __device__ __forceinline__ Affine() {}
    // of: the block of eight channels that they are of, which exists or does not.
    __device__ __forceinline__ Affine(const Norm& norm, int of, int channel) {
        if (of >= norm.channels) return;
        const float2 mean = *reinterpret_cast<const float2*>(norm.moments + channel);
        scale = *reinterpret_cast<const float2*>(norm.moments + norm.channels + channel);
        const float2 gamma = *reinterpret_cast<const float2*>(norm.gamma + channel);
        shift = *reinterpret_cast<const float2*>(norm.beta + channel);
        scale.x *= gamma.x, scale.y *= gamma.y;
        shift = {shift_of(mean.x, scale.x, shift.x), shift_of(mean.y, scale.y, shift.y)};
    }
    // For pairs of values of one channel.
    __device__ __forceinline__ Affine(const Norm& norm, int channel) {
        if (channel >= norm.channels) return;
        scale.x = norm.moments[norm.channels + channel] * norm.gamma[channel];
        shift.x = shift_of(norm.moments[channel], scale.x, norm.beta[channel]);
        scale.y = scale.x, shift.y = shift.x;
    }

    // To shared memory, and from there.
    __device__ __forceinline__ void store(u32 address) const {
        store_shared(address, make_float4(scale.x, scale.y, shift.x, shift.y));
    }
    __device__ __forceinline__ void load(u32 address) {
        const uint4 words = load_shared(address);
        scale = {__uint_as_float(words.x), __uint_as_float(words.y)};
        shift = {__uint_as_float(words.z), __uint_as_float(words.w)};
    }

    // Of a pair of values as they lie in memory, each inside of an image; outside zeros stay zeros. The rounding keeps
    // NaN.
    __device__ __forceinline__ u32 operator()(u32 pair, u32 first, u32 second) const {
        static_assert(FOLDED, "of 16-bit types");
        Raw<T, 2> raw;
        raw.pairs[0] = pair;
        float v[2];
        unpack(raw, v);
        fma_where(first, v[0], scale.x, shift.x);
        fma_where(second, v[1], scale.y, shift.y);
        u32 y;
#if DTYPE == 1
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(v[1]), "f"(v[0]));
#else
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(v[1]), "f"(v[0]));
#endif
        return y;
    }
    __device__ __forceinline__ u32 operator()(u32 pair, u32 inside = 1) const {
        return (*this)(pair, inside, inside);
    }

private:
    // A predicate costs nothing, where a selection afterwards would be an instruction.
    static __device__ __forceinline__ void fma_where(u32 wanted, float& v, float scale, float shift) {
        asm("{\n .reg .pred wanted;\n setp.ne.b32 wanted, %3, 0;\n @wanted fma.rn.f32 %0, %0, %1, %2;\n}"
            : "+f"(v)
            : "f"(scale), "f"(shift), "r"(wanted));
    }
};
#endif

// For warps that normalise in shared memory what the engine has brought there, rows of 128 bytes with 64 channels of a
// pixel each: eight neighbours take a row, and each thread the same chunk of eight channels of all of its rows.
struct Chunk {
    Affine pairs[4];

    __device__ __forceinline__ void load(const Norm& norm, int channel) {
        channel += threadIdx.x % 8 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = Affine(norm, channel, channel + 2 * i);
    }

    __device__ __forceinline__ uint4 operator()(uint4 x) const {
        return make_uint4(pairs[0](x.x), pairs[1](x.y), pairs[2](x.z), pairs[3](x.w));
    }
};

constexpr int UNIT = 16;  // rows that a warp normalises at a time

// Where the i-th of a thread's chunks of a unit is, in row lane / 8 + 4 * i. Rows that are eight apart are swizzled
// alike, those that are four apart the other way.
DEVICE u32 place_in_unit(u32 rows, int i) {
    const u32 row = threadIdx.x % 32 / 8, chunk = (threadIdx.x % 8) ^ row;
    return ((rows + row * 128 + chunk * 16) ^ (i % 2 * 64)) + i * 512;
}

// A warp: normalises units `first`, first + STEP, ... below `units` of rows that begin where an atom does.
// inside(unit), which is asked for one after the other, has a bit for each row of a unit: only those that are set
// change. Before the engine may read them, fence_for_engine() and __syncwarp().
template <int STEP, class Inside>
DEVICE void normalize_rows(const Chunk& chunk, u32 rows, int first, int units, Inside inside) {
    uint4 values[4];
    rows += first * UNIT * 128;
    if (first < units)
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = load_shared(place_in_unit(rows, i));
    for (int unit = first; unit < units; unit += STEP, rows += STEP * UNIT * 128) {
        const u32 bits = inside(unit) >> threadIdx.x % 32 / 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 normalized = chunk(values[i]);
            if (unit + STEP < units) values[i] = load_shared(place_in_unit(rows + STEP * UNIT * 128, i));
            store_shared(place_in_unit(rows, i), normalized, bits & 1 << 4 * i);
        }
    }
}
