// Depthwise convolution without dilation, one output channel per input channel: the strips of strip.cuh, one thread
// for VEC channels of COLUMNS base positions, walking down the rows with the filters and the sums in registers. What
// depthwise.cu re-reads from caches for each tap, this reads once, so that memory and not the caches sets the pace.
//
// depthwise_strip_kernel, forward (BACKWARD = 0) and data gradient (BACKWARD = 1), as in depthwise.cu:
//   source    ((n*height + h)*width + w)*SOURCE_PITCH + channel      T
//   filter    (C, R, S) dense                                        T
//   bias      (C,) float32 or null
//   add       output's shape, pixels OTHER_PITCH apart             T or null
//   output    (images, out_height, out_width, C) dense               T
//   parts     (items, 2, C) float32: sums and sums of squares of what a thread wrote, as stored; where STATS is 1
//   Sums are taken in the order of the filter's rows and columns (going back, both reversed), from the bias on; `add`
//   comes last.
//   Grid x block: one thread per vector of channels, strip, run of rows and image, the first fastest.
//   FLOP: 2 * R * S per value of the coarser image. Bytes: source and output once; of parts 8 for each run of a
//   channel.
//
// depthwise_strip_weight_kernel (WEIGHT = 1, BACKWARD = 0)
//     dw[c,r,s] = sum_{n,p,q} dy[n,p,q,c] x[n, p*sh - ph + r, q*sw - pw + s, c]
//   output    (chunks, C, R*S) float32 partials, added up in order by sum_partials_kernel (channel_sum.cu)
//   Block: LANES vectors of channels x DEEP threads that take every DEEP-th item (a strip of a run of rows) of a chunk;
//   their sums are added up in order. Grid: chunks x slabs of channels, slabs fastest.
//   Dynamic shared memory: 4 * DEEP * R * S * LANES * VEC bytes.
//   Outside of an image dy and x are zeros that are multiplied: a NaN reaches all taps of its own filter.
//   FLOP: 2 * R * S per value of dy. Bytes: dy and x once, and 4 * chunks * |dw| twice.
//
// Macros: DTYPE, VEC, COLUMNS; CHANNELS, SOURCE_PITCH (x in the weight gradient) and OTHER_PITCH (add, or dy in the
// weight gradient): known pitches make every address a constant away from that of a row, half of all instructions
// otherwise; those of strip.cuh; RESIDENT, the blocks that a multiprocessor shall hold; STATS, of a forward pass;
// WEIGHT, and of the weight gradient LANES and DEEP.
#include "common.cuh"
#include "strip.cuh"

#ifndef STATS
#define STATS 0
#endif

struct Problem {
    i64 items;              // strips of runs of rows of all images
    i64 chunk;              // items of a partial sum
    int strips, runs, run;  // strips across an image, runs of rows down it, base rows of a run
    int slabs;
    Strips at;
};

#if WEIGHT
constexpr int THREADS = LANES * DEEP;
#else
constexpr int THREADS = 128;
#endif
constexpr int WINDOW = (COLUMNS - 1) * STEP_W + SIGHT;  // columns of the source that a strip sees

struct Item {
    i64 image;
    int row, column;  // the first base position

    __device__ __forceinline__ Item(i64 item, const Problem& p) {
        const i64 line = item / p.strips;
        column = static_cast<int>(item - line * p.strips) * COLUMNS;
        image = line / p.runs;
        row = static_cast<int>(line - image * p.runs) * p.run;
    }
};

// Bit by bit: which of COUNT columns from `column` on lie inside of an image.
template <int COUNT>
DEVICE u32 columns_inside(int column, int width) {
    u32 inside = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) inside |= u32(static_cast<u32>(column + i) < static_cast<u32>(width)) << i;
    return inside;
}

// COUNT columns of a row, as they lie in memory; zeros for those that are not inside.
template <int COUNT, int PITCH>
struct Line {
    Raw<T, VEC> pixels[COUNT];

    __device__ __forceinline__ void load(const T* from, u32 inside) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (inside >> i & 1) {
                pixels[i] = load_raw<VEC>(from + i * PITCH);
            } else {
#pragma unroll
                for (int j = 0; j < VEC; ++j) pixels[i].items[j] = T{};
            }
        }
    }

    __device__ __forceinline__ void floats(float (&values)[COUNT][VEC]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) unpack(pixels[i], values[i]);
    }
};

#if !WEIGHT

using Sums = float[SPREAD_H][COLUMNS * SPREAD_W][VEC];

// inside: of the columns of a base row's outputs, the first of which lies in column `first`. Where STATS is 1 what is
// written is added to `sum` and `square`.
DEVICE void write_rows(const Sums& sums, i64 image, int base, int first, u32 inside, int channel, const T* add,
                       T* output, const Problem& p, float (&sum)[VEC], float (&square)[VEC]) {
    const Strips& at = p.at;
#pragma unroll
    for (int out = 0; out < SPREAD_H; ++out) {
        const int row = base * SPREAD_H + at.output_h + out;
        if (row < 0 || row >= at.out_height) continue;
        const i64 pixel = (image * at.out_height + row) * at.out_width + first;
        T* const to = output + pixel * CHANNELS + channel;
        const T* const other_from = add ? add + pixel * OTHER_PITCH + channel : nullptr;
#pragma unroll
        for (int j = 0; j < COLUMNS * SPREAD_W; ++j) {
            if (!(inside >> j & 1)) continue;
            float value[VEC];
#pragma unroll
            for (int e = 0; e < VEC; ++e) value[e] = sums[out][j][e];
            if (add) {
                float other[VEC];
                load<T, VEC>(other_from + j * OTHER_PITCH, other);
#pragma unroll
                for (int e = 0; e < VEC; ++e) value[e] += other[e];
            }
            const Raw<T, VEC> stored = pack<T>(value);
            store_raw(to + j * CHANNELS, stored);
            unpack(stored, value);
#pragma unroll
            for (int e = 0; e < VEC && STATS; ++e) {
                sum[e] += value[e];
                square[e] = fmaf(value[e], value[e], square[e]);
            }
        }
    }
}

// Adds row `in` of a step to the sums of an age.
DEVICE void add_row(Sums& sums, const float (&values)[WINDOW][VEC], const float (&weights)[KERNEL_H * KERNEL_W][VEC],
                    int age, int in) {
#pragma unroll
    for (int out = 0; out < SPREAD_H; ++out) {
        const int r = tap_row(age, in, out);
        if (r >= KERNEL_H) continue;
#pragma unroll
        for (int sight = 0; sight < SIGHT; ++sight)
#pragma unroll
            for (int u = 0; u < SPREAD_W; ++u) {
                const int s = tap_column(sight, u);
                if (s >= KERNEL_W) continue;
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int e = 0; e < VEC; ++e)
                        sums[out][j * SPREAD_W + u][e] =
                            fmaf(values[j * STEP_W + sight][e], weights[r * KERNEL_W + s][e],
                                 sums[out][j * SPREAD_W + u][e]);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
depthwise_strip_kernel(const T* __restrict__ source, const T* __restrict__ filter, const float* __restrict__ bias,
                       const T* __restrict__ add, T* __restrict__ output, float* __restrict__ parts,
                       const __grid_constant__ Problem p) {
    await_predecessor();
    const int vectors = CHANNELS / VEC;
    const i64 index = i64(blockIdx.x) * THREADS + threadIdx.x, number = index / vectors;
    if (number >= p.items) return;
    const int channel = static_cast<int>(index - number * vectors) * VEC;
    const Item item(number, p);
    const Strips& at = p.at;

    float weights[KERNEL_H * KERNEL_W][VEC], shift[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        shift[e] = bias ? bias[channel + e] : 0.0f;
#pragma unroll
        for (int t = 0; t < KERNEL_H * KERNEL_W; ++t)
            weights[t][e] = to_float(filter[i64(channel + e) * (KERNEL_H * KERNEL_W) + t]);
    }

    const int column = item.column * STEP_W + at.source_w, first = item.column * SPREAD_W + at.output_w;
    const T* const image = source + (item.image * at.height * at.width + column) * SOURCE_PITCH + channel;
    const u32 seen = columns_inside<WINDOW>(column, at.width);
    const u32 written = columns_inside<COLUMNS * SPREAD_W>(first, at.out_width);
    int row = item.row * STEP_H + at.source_h;
    Sums sums[AGES];
    Line<WINDOW, SOURCE_PITCH> lines[STEP_H];
    const auto load_row = [&](int in, bool wanted) {
        const bool there = wanted && static_cast<u32>(row + in) < static_cast<u32>(at.height);
        lines[in].load(image + (row + in) * at.width * i64(SOURCE_PITCH), there ? seen : 0);
    };
#pragma unroll
    for (int in = 0; in < STEP_H; ++in) load_row(in, true);
    const int last = item.row + (p.run < at.base_h - item.row ? p.run : at.base_h - item.row);  // base rows end here
    float sum[VEC] = {}, square[VEC] = {};
#pragma unroll 1
    for (int base = item.row - (AGES - 1); base < last; ++base) {
#pragma unroll
        for (int age = AGES - 1; age >= 0; --age)
#pragma unroll
            for (int out = 0; out < SPREAD_H; ++out)
#pragma unroll
                for (int j = 0; j < COLUMNS * SPREAD_W; ++j)
#pragma unroll
                    for (int e = 0; e < VEC; ++e)
                        sums[age][out][j][e] = age ? sums[age ? age - 1 : 0][out][j][e] : shift[e];
        row += STEP_H;
#pragma unroll
        for (int in = 0; in < STEP_H; ++in) {
            float values[WINDOW][VEC];
            lines[in].floats(values);
            // The next step's, so that it is on its way while this one is summed.
            load_row(in, base + 1 < last);
#pragma unroll
            for (int age = AGES - 1; age >= 0; --age) add_row(sums[age], values, weights, age, in);
        }
        if (base >= item.row)
            write_rows(sums[AGES - 1], item.image, base, first, written, channel, add, output, p, sum, square);
    }
#pragma unroll
    for (int e = 0; e < VEC && STATS; ++e) {
        parts[number * 2 * CHANNELS + channel + e] = sum[e];
        parts[(number * 2 + 1) * CHANNELS + channel + e] = square[e];
    }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
depthwise_strip_weight_kernel(const T* __restrict__ dy, const T* __restrict__ x, float* __restrict__ output,
                              const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(16) float scratch[];  // [thread of a lane][channel of the slab][tap]
    constexpr int TAPS = KERNEL_H * KERNEL_W, SLAB = LANES * VEC;
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const int first_channel = blockIdx.x % p.slabs * SLAB, channel = first_channel + lane * VEC;
    const i64 chunk = blockIdx.x / p.slabs;
    const i64 end = (chunk + 1) * p.chunk < p.items ? (chunk + 1) * p.chunk : p.items;
    const Strips& at = p.at;

    float sums[TAPS][VEC] = {};
    if (channel < CHANNELS) {
        for (i64 number = chunk * p.chunk + depth; number < end; number += DEEP) {
            const Item item(number, p);
            const int column = item.column * STEP_W + at.source_w;
            const T* const image = x + (item.image * at.height * at.width + column) * SOURCE_PITCH + channel;
            const T* const gradient = dy + (item.image * at.base_h * at.base_w + item.column) * OTHER_PITCH + channel;
            const u32 seen = columns_inside<WINDOW>(column, at.width);
            const u32 given = columns_inside<COLUMNS>(item.column, at.base_w);
            const int last = item.row + (p.run < at.base_h - item.row ? p.run : at.base_h - item.row);
            int row = item.row * STEP_H + at.source_h;
            Line<WINDOW, SOURCE_PITCH> lines[STEP_H];
            Line<COLUMNS, OTHER_PITCH> next;
            float gradients[AGES][COLUMNS][VEC] = {};
            const auto load_gradient = [&](int base) {
                next.load(gradient + base * at.base_w * i64(OTHER_PITCH), base < last ? given : 0);
            };
            const auto load_row = [&](int in, bool wanted) {
                const bool there = wanted && static_cast<u32>(row + in) < static_cast<u32>(at.height);
                lines[in].load(image + (row + in) * at.width * i64(SOURCE_PITCH), there ? seen : 0);
            };
            load_gradient(item.row);
#pragma unroll
            for (int in = 0; in < STEP_H; ++in) load_row(in, true);
#pragma unroll 1
            for (int base = item.row; base < last + AGES - 1; ++base) {
#pragma unroll
                for (int age = AGES - 1; age > 0; --age)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                        for (int e = 0; e < VEC; ++e) gradients[age][j][e] = gradients[age - 1][j][e];
                next.floats(gradients[0]);
                load_gradient(base + 1);
                row += STEP_H;
#pragma unroll
                for (int in = 0; in < STEP_H; ++in) {
                    float values[WINDOW][VEC];
                    lines[in].floats(values);
                    load_row(in, base + 1 < last + AGES - 1);
#pragma unroll
                    for (int age = 0; age < AGES; ++age) {
                        const int r = tap_row(age, in, 0);
                        if (r >= KERNEL_H) continue;
#pragma unroll
                        for (int s = 0; s < KERNEL_W; ++s)
#pragma unroll
                            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                                for (int e = 0; e < VEC; ++e)
                                    sums[r * KERNEL_W + s][e] = fmaf(gradients[age][j][e], values[j * STEP_W + s][e],
                                                                     sums[r * KERNEL_W + s][e]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TAPS; ++t)
#pragma unroll
        for (int e = 0; e < VEC; ++e) scratch[(depth * SLAB + lane * VEC + e) * TAPS + t] = sums[t][e];
    __syncthreads();
    output += (chunk * CHANNELS + first_channel) * TAPS;
    const int wanted = (CHANNELS - first_channel < SLAB ? CHANNELS - first_channel : SLAB) * TAPS;
    for (int i = threadIdx.x; i < wanted; i += THREADS) {
        float sum = scratch[i];
#pragma unroll
        for (int d = 1; d < DEEP; ++d) sum += scratch[d * SLAB * TAPS + i];
        output[i] = sum;
    }
}

#endif
