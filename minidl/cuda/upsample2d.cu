// Resizing of images, nearest and bilinear, NHWC, and the gradient.
//
//   x (N, height, width, C) at a pitch per pixel; y (N, out_h, out_w, C) dense; dy at a pitch; dx dense.
//
// Along an axis output o reads inputs lo and lo + 1 with weights 1 - w and w, where lo + w = max((a o + b) / d, 0):
// whole numbers (resize_axis in shapes.py), so that every device finds the same pixels and weights. Both axes are
// resized one after the other: a row of the image is resized across once, for all outputs that read it. Backward each
// input pixel gathers from the outputs that read it, row by row.
//
// With -DFIXED=1 a, b and d of both axes are macros: quotients by small whole numbers are then a few instructions.
//
// A thread owns VEC neighbouring channels of one column and walks down `strip` rows of what it writes; an image has
// `strips` of them. bytes: x once (neighbours share it through the caches) and y once; 4 FLOP per element of y each way
// when bilinear. Floor on an H200 at 4.2 TB/s, bf16, twofold: 0.60 us per million elements of y. Four loads, their
// weights and 48 operations for each output, as the formula has it, take twice as long as the memory. Tried: the two
// rows that outputs lie between in turns, so that none is moved between registers, a quarter fewer instructions and no
// less time; strips of 2 to 28 rows, none better in all sizes and types.
#include "common.cuh"
#include "grid.cuh"
#include "ahead.cuh"

struct Axis {
    int a, b, d, size, out;
};

// The axes as the compiler knows them.
DEVICE void settle(Axis& down, Axis& across) {
#if FIXED
    down.a = DOWN_A, down.b = DOWN_B, down.d = DOWN_D;
    across.a = ACROSS_A, across.b = ACROSS_B, across.d = ACROSS_D;
#endif
}

struct Tap {
    int low, high;
    float weight;  // of high
};

DEVICE Tap tap(const Axis& axis, int o) {
    const int at = max(axis.a * o + axis.b, 0), low = at / axis.d;
    const int high = min(low + BILINEAR, axis.size - 1);
    return {low, high, BILINEAR ? float(at - low * axis.d) / float(axis.d) : 0.0f};
}

// The first output that lies at input i or behind it; without those `at` i.
DEVICE int reader(const Axis& axis, int i, bool at = true) {
    if (i < 0 || (i == 0 && at)) return 0;
    if (i >= axis.size || axis.a == 0) return axis.out;
    return min((i * axis.d - axis.b + axis.a - at) / axis.a, axis.out);
}

// With what weight output o reads input i.
DEVICE float share(const Axis& axis, int o, int i) {
    const Tap at = tap(axis, o);
    return (at.low == i ? 1.0f - at.weight : 0.0f) + (at.high == i ? at.weight : 0.0f);
}

// The strip that a thread writes: image, column, first channel, and rows from begin to end.
struct Strip {
    int n, column, c, begin, end;
    bool inside;

    __device__ __forceinline__ Strip(int rows, int strips, int strip, int height, int width, int channels) {
        const u32 vectors = u32(channels) / VEC;
        const Place at = place(rows, width * vectors);
        n = u32(at.row) / u32(strips);
        column = u32(at.item) / vectors;
        c = (at.item - column * vectors) * VEC;
        begin = (at.row - n * strips) * strip;
        end = min(begin + strip, height);
        inside = at.inside;
    }
};

#if defined(FORWARD)

// Fused in one way only: what a row gives depends on no strip.
DEVICE float between(float a, float b, float weight) { return fmaf(b, weight, __fmul_rn(a, 1.0f - weight)); }

// Two neighbours in a row of x, on their way.
struct Neighbours {
    Raw<T, VEC> left, right;

    __device__ __forceinline__ void fetch(const T* __restrict__ from, i64 to_right) {
        left = load_raw<VEC>(from);
        right = load_raw<VEC>(from + to_right);
    }
    __device__ __forceinline__ void mix(float weight, float (&v)[VEC]) const {
        float w[VEC];
        unpack(left, v);
        unpack(right, w);
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[e] = between(v[e], w[e], weight);
    }
};

extern "C" __global__ void __launch_bounds__(256, 4)
upsample2d(const T* __restrict__ x, T* __restrict__ y, int rows, int strips, int strip, int channels, i64 pitch,
           Axis down, Axis across) {
    await_predecessor();
    settle(down, across);
    const Strip at(rows, strips, strip, down.out, across.out, channels);
    if (!at.inside) return;
    const Tap h = tap(across, at.column);
    const i64 line = across.size * pitch, out_line = i64(across.out) * channels;
    const T* image = x + at.n * down.size * line + h.low * pitch + at.c;
    T* out = y + (i64(at.n) * down.out + at.begin) * out_line + i64(at.column) * channels + at.c;
#if BILINEAR
    const i64 to_right = (h.high - h.low) * pitch;
    int low = tap(down, at.begin).low, high = min(low + 1, down.size - 1);
    const int last = tap(down, at.end - 1).high;
    float upper[VEC], lower[VEC];  // rows low and high of x, resized across
    Neighbours above, next;
    above.fetch(image + low * line, to_right);
    next.fetch(image + high * line, to_right);
    above.mix(h.weight, upper);
    next.mix(h.weight, lower);
    // Row high + 1 arrives while outputs between these two are made.
    const auto look_ahead = [&] {
        if (high < last) next.fetch(image + (high + 1) * line, to_right);
    };
    const auto take = [&](int row, float (&v)[VEC]) {
        if (row > high + 1) next.fetch(image + row * line, to_right);
        next.mix(h.weight, v);
    };
    look_ahead();
    for (int p = at.begin; p < at.end; ++p, out += out_line) {
        const Tap v = tap(down, p);
        if (v.low != low) {
            if (v.low == high) {
#pragma unroll
                for (int e = 0; e < VEC; ++e) upper[e] = lower[e];
            } else {
                take(v.low, upper);
            }
            if (v.high != high) take(v.high, lower);
            low = v.low;
            high = v.high;
            look_ahead();
        }
        float mixed[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) mixed[e] = between(upper[e], lower[e], v.weight);
        store(out, mixed);
    }
#else
    Raw<T, VEC> raw;
    int low = -1;  // the row that it is of
    for (int p = at.begin; p < at.end; ++p, out += out_line) {
        const int wanted = tap(down, p).low;
        if (wanted != low) raw = load_raw<VEC>(image + wanted * line);
        low = wanted;
        store_raw(out, raw);
    }
#endif
}

#else

// READERS: the most outputs that read one input, along a row. HELD of them, of AHEAD rows, are on their way, each
// thread's through its own part of shared memory: registers that loads are to fill cannot be told apart, so that
// whoever waits for the oldest waits for all. L1 serves the neighbours, which need half of them too.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
upsample2d_backward(const T* __restrict__ dy, T* __restrict__ dx, int rows, int strips, int strip, int channels,
                    i64 pitch, Axis down, Axis across) {
    await_predecessor();
    settle(down, across);
    const Strip at(rows, strips, strip, down.size, across.size, channels);
    if (!at.inside) return;
    const int first = reader(across, at.column - BILINEAR, !BILINEAR), readers = reader(across, at.column + 1) - first;
    const i64 line = across.out * pitch;
    const T* image = dy + at.n * down.out * line + first * pitch + at.c;
    T* out = dx + ((i64(at.n) * down.size + at.begin) * across.size + at.column) * channels + at.c;
    // Behind the last reader: the same once more, with no weight.
    float weight[HELD];
    int offset[HELD];
    int p = reader(down, at.begin - BILINEAR), h = at.begin - BILINEAR;
    const int last = readers > 0 ? reader(down, at.end) : p;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        weight[k] = k < readers ? share(across, first + k, at.column) : 0.0f;
        offset[k] = min(k, readers - 1) * int(pitch);
    }
    extern __shared__ uint4 memory[];
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    T* const parts = reinterpret_cast<T*>(memory) + thread * VEC;  // of reader k of the row in place r at [r][k]
    const int part = threads * VEC;
    float here[VEC] = {}, below[VEC] = {};  // sums of rows h and h + 1
    const T* from = image + p * line;  // of the next row to be asked for
    int asked = p;
    const auto fetch = [&](T* to) {
        if (asked++ < last) {
#pragma unroll
            for (int k = 0; k < HELD; ++k) start_copy<false>(to + k * part, from + offset[k]);
            from += line;
        }
        commit_copies();
    };
    const auto finish_row = [&] {
        if (h >= at.begin) {
            store(out, here);
            out += i64(across.size) * channels;
        }
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            here[e] = below[e];
            below[e] = 0.0f;
        }
        ++h;
    };
    const auto gather = [&](const Raw<T, VEC>& part, float factor, float (&sum)[VEC]) {
        float g[VEC];
        unpack(part, g);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] = fmaf(g[e], factor, sum[e]);
    };
#pragma unroll
    for (int r = 0; r < AHEAD; ++r) fetch(parts + r * HELD * part);
    T* row = parts;
#pragma unroll 1
    while (p < last) {
        await_copies<AHEAD - 1>();
        float sum[VEC] = {};
#pragma unroll
        for (int k = 0; k < HELD; ++k) gather(load_raw<VEC>(row + k * part), weight[k], sum);
        fetch(row);
        row = row == parts + (AHEAD - 1) * HELD * part ? parts : row + HELD * part;
        if (READERS > HELD)
            for (int k = HELD; k < readers; ++k)
                gather(load_raw<VEC>(image + p * line + k * pitch), share(across, first + k, at.column), sum);
        const Tap v = tap(down, p++);
#pragma unroll 1
        while (h < v.low) finish_row();
        const float lower = v.high > v.low ? v.weight : 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            here[e] = fmaf(sum[e], 1.0f - lower, here[e]);
            if (BILINEAR) below[e] = fmaf(sum[e], lower, below[e]);
        }
    }
    while (h < at.end) finish_row();
}

#endif
