// Convolution, forward and data gradient, as an implicit matrix product (Chetlur et al., "cuDNN: efficient primitives
// for deep learning", 2014): the matrix of patches is gathered on the fly and never stored. sm_80 and newer.
//
//   forward (BACKWARD = 0):
//     y[n,p,q,k]  = bias[k] + add[n,p,q,k] + sum_{r,s,c} x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, c] w[k,r,s,c]
//   data gradient (BACKWARD = 1):
//     dx[n,h,w,c] = bias[c] + add[n,h,w,c] + sum_{r,s,k} dy[n,p,q,k] w[k,r,s,c]
//                   over the r, s for which there are p, q with p*sh - ph + r*dh = h and q*sw - pw + s*dw = w
//
// One product of rows (output pixels) x columns (output channels of one group), summed over depth (taps x source
// channels of the group). A strided data gradient falls apart into stride_h * stride_w classes of output pixels by
// their parity; each class sees its own taps, and inside a class the source coordinate is again affine in the output
// position and the tap, so no product with a structural zero is made. The forward pass is the case of a single class.
//
//   source    x[((n*height + h)*width + w)*source_pitch + group*depth + c]      T, forward: x; data gradient: dy
//   filter    (K, R, S, C/groups) dense                                         T
//   bias      (out_channels,) float32 or null
//   add       output's shape, pixels add_pitch apart                            T or null
//   output    (images, out_height, out_width, groups*columns) dense             T
//
// Macros: DTYPE, TF32, BACKWARD; TILE_M x TILE_N, the tile of rows x columns of one block;
// VEC_X, VEC_W, VEC_Y: elements per access to source, filter and output (with add), at most 16 bytes.
// Block: 128 threads. Grid: one block per class, row tile, group and column tile, the last fastest, so that blocks
// which share source pixels run together. Four stages of cp.async feed the product; see tile.cuh.
// Dynamic shared memory: max(4 * 64 * (TILE_M + TILE_N), 4 * TILE_M * TILE_N) bytes.
// FLOP: 2 * rows * columns * depth * taps per group. Bytes: source + filter + output (+ add), the source once per
// column tile and tap as far as the L2 cache does not keep it.
#include "tile.cuh"

// Output pixels of one parity class: (row + i*class_step_h, column + j*class_step_w) for i, j = 0, 1, ...
// Its tap (a, b) is the filter's (first_h + a*tap_step_h, first_w + b*tap_step_w) and reads the source at
// (i*step_h + offset_h + a*delta_h, j*step_w + offset_w + b*delta_w).
struct Class {
    int row, column;
    int taps_h, taps_w;
    int first_h, first_w;
    int offset_h, offset_w;
};

struct Problem {
    i64 source_pitch, add_pitch;
    int images, height, width;
    int out_height, out_width;
    int groups, depth, columns;
    int kernel_h, kernel_w;
    int step_h, step_w;
    int delta_h, delta_w;
    int tap_step_h, tap_step_w;
    int class_step_h, class_step_w;
    int tiles_m, tiles_n;
    Class classes[16];
};

constexpr int OUTSIDE = -(1 << 30);  // a coordinate that no tap brings back into the image

// The forward pass runs over taps and channels as one row of the filter; the data gradient, whose filter rows are not
// neighbours, pads the channels of every tap to whole stages.
#ifndef CACHE
#define CACHE 0
#endif
DEVICE int channels_per_tap(int depth) { return PACKED ? depth : ceil_div(depth, DEPTH) * DEPTH; }

// Where a thread stands in the depth: its channel and its tap.
struct Position {
    int channel, tap_h, tap_w;

    __device__ __forceinline__ Position(int start, int wrap, int taps_w) {
        const int tap = PACKED && taps_w ? start / wrap : 0;
        channel = start - tap * wrap;
        tap_h = PACKED && taps_w ? tap / taps_w : 0;
        tap_w = tap - tap_h * taps_w;
    }

    // One stage further; whole_taps and rest are DEPTH divided by the channels per tap.
    __device__ __forceinline__ void advance(int whole_taps, int rest, int wrap, const Class& c) {
        if constexpr (PACKED) {
            channel += rest;
            tap_w += whole_taps;
            if (channel >= wrap) channel -= wrap, ++tap_w;
            while (tap_w >= c.taps_w) tap_w -= c.taps_w, ++tap_h;
        } else {
            const bool row_done = ++tap_w == c.taps_w;
            tap_w = row_done ? 0 : tap_w;
            tap_h += row_done;
            const bool taps_done = tap_h == c.taps_h;
            tap_h = taps_done ? 0 : tap_h;
            channel += taps_done ? DEPTH : 0;
        }
    }
};

// Pixel of the output image for position `index` of a class, as an offset in pixels of the whole output.
DEVICE i64 output_pixel(const Problem& p, const Class& c, i64 index, int class_height, int class_width) {
    const i64 per_image = i64(class_height) * class_width;
    const i64 image = index / per_image;
    const int rest = static_cast<int>(index - image * per_image);
    const int i = rest / class_width, j = rest - i * class_width;
    return (image * p.out_height + c.row + i * p.class_step_h) * p.out_width + c.column + j * p.class_step_w;
}

// The gathered operand: TILE_M output pixels x DEPTH source values. A thread copies one column of vectors.
struct Source {
    static constexpr int COLUMNS = DEPTH / VEC_X;
    static constexpr int STEP = THREADS / COLUMNS;
    static constexpr int ROWS = TILE_M / STEP;

    const T* row_start[ROWS];  // of source pixel (row_h, row_w), which may lie outside of the image
    int row_h[ROWS], row_w[ROWS];

    static __device__ __forceinline__ int row() { return threadIdx.x / COLUMNS; }
    static __device__ __forceinline__ int start() { return threadIdx.x % COLUMNS * VEC_X; }

    __device__ __forceinline__ Source(const T* source, const Problem& p, const Class& c, i64 first, i64 count,
                                      int class_height, int class_width) {
        // One wide division per tile; from there on a row is near enough for 32 bits.
        const int per_image = class_height * class_width;
        const i64 first_image = first / per_image;
        const int first_rest = static_cast<int>(first - first_image * per_image);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int index = first_rest + row() + i * STEP;
            const int image = index / per_image, rest = index - image * per_image;
            const int y = rest / class_width, x = rest - y * class_width;
            const bool inside = first + row() + i * STEP < count;
            row_h[i] = inside ? y * p.step_h + c.offset_h : OUTSIDE;
            row_w[i] = x * p.step_w + c.offset_w;
            const i64 pixel = ((first_image + image) * p.height + y * p.step_h + c.offset_h) * p.width + row_w[i];
            row_start[i] = source + pixel * p.source_pitch;
        }
    }

    __device__ __forceinline__ void copy(unsigned char* tile, const Problem& p, const Class& c,
                                         const Position& at) const {
        const int h = at.tap_h * p.delta_h, w = at.tap_w * p.delta_w;
        const i64 offset = (i64(h) * p.width + w) * p.source_pitch + at.channel;
        const bool readable = at.tap_h < c.taps_h && at.channel < p.depth;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool inside = readable && static_cast<u32>(row_h[i] + h) < static_cast<u32>(p.height) &&
                                static_cast<u32>(row_w[i] + w) < static_cast<u32>(p.width);
            copy_values<VEC_X, CACHE>(tile + Tile<TILE_M, true>::offset(row() + i * STEP, start()), row_start[i] + offset,
                               inside);
        }
    }
};

// The filter: TILE_N output channels x DEPTH. Contiguous along the depth going forward, along the channels going back.
struct Filter {
    static constexpr bool DEPTH_INNER = !BACKWARD;
    static constexpr int COLUMNS = (DEPTH_INNER ? DEPTH : TILE_N) / VEC_W;
    static constexpr int STEP = THREADS / COLUMNS;
    static constexpr int ROWS = (DEPTH_INNER ? TILE_N : DEPTH) / STEP;
    static_assert(BACKWARD || VEC_W == VEC_X, "forward, source and filter share their place in the depth");

    static __device__ __forceinline__ int row() { return threadIdx.x / COLUMNS; }
    static __device__ __forceinline__ int start() { return threadIdx.x % COLUMNS * VEC_W; }

    static __device__ __forceinline__ void copy(unsigned char* tile, const T* filter, const Problem& p, const Class& c,
                                                const Position& at, int group, int first_column) {
        const int taps = p.kernel_h * p.kernel_w;
        const int tap = (c.first_h + at.tap_h * p.tap_step_h) * p.kernel_w + c.first_w + at.tap_w * p.tap_step_w;
        if constexpr (DEPTH_INNER) {
            const i64 pitch = i64(taps) * p.depth;
            const int column = first_column + row();
            const T* from = filter + (i64(group) * p.columns + column) * pitch + i64(tap) * p.depth + at.channel;
            const bool readable = at.tap_h < c.taps_h && at.channel < p.depth;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                copy_values<VEC_W>(tile + Tile<TILE_N, true>::offset(row() + i * STEP, start()),
                                   from + i * STEP * pitch, readable && column + i * STEP < p.columns);
        } else {
            // A thread's place in the depth is its row here, not where it stands in the source.
            const i64 pitch = i64(taps) * p.columns;
            const int channel = at.channel - Source::start() + row();
            const int column = first_column + start();
            const T* from = filter + (i64(group) * p.depth + channel) * pitch + i64(tap) * p.columns + column;
            const bool readable = at.tap_h < c.taps_h && column < p.columns;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                copy_values<VEC_W>(tile + Tile<TILE_N, false>::offset(start(), row() + i * STEP),
                                   from + i * STEP * pitch, readable && channel + i * STEP < p.depth);
        }
    }
};

// Adds bias and `add` in float32, rounds once, writes whole vectors.
DEVICE void write_tile(const float* staged, const float* bias, const T* add, T* output, const Problem& p,
                       const Class& c, int group, i64 first, i64 count, int first_column, int class_height,
                       int class_width) {
    constexpr int COLUMNS = TILE_N / VEC_Y;
    constexpr int STEP = THREADS / COLUMNS;
    const int local_column = threadIdx.x % COLUMNS * VEC_Y;
    if (first_column + local_column >= p.columns) return;
    const int column = group * p.columns + first_column + local_column;
    const int channels = p.groups * p.columns;
    const bool dense = p.class_step_h == 1 && p.class_step_w == 1;
    float shift[VEC_Y];
#pragma unroll
    for (int e = 0; e < VEC_Y; ++e) shift[e] = bias ? bias[column + e] : 0.0f;
#pragma unroll 4
    for (int row = threadIdx.x / COLUMNS; row < TILE_M; row += STEP) {
        if (first + row >= count) return;
        const i64 pixel = dense ? first + row : output_pixel(p, c, first + row, class_height, class_width);
        float value[VEC_Y];
        load<float, VEC_Y>(staged + row * TILE_N + staged_column(row, local_column), value);
#pragma unroll
        for (int e = 0; e < VEC_Y; ++e) value[e] += shift[e];
        if (add) {
            float other[VEC_Y];
            load<T, VEC_Y>(add + pixel * p.add_pitch + column, other);
#pragma unroll
            for (int e = 0; e < VEC_Y; ++e) value[e] += other[e];
        }
        store<T, VEC_Y>(output + pixel * channels + column, value);
    }
}

// Blocks per multiprocessor that the registers must leave room for. Wide tiles spend them on accumulators, exact
// float32 on two levels of them, narrow vectors on the many rows that a thread then copies.
constexpr bool HEAVY = TILE_M * TILE_N > 32 * THREADS * 2 || (DTYPE == 0 && !TF32) || Source::ROWS > 8;
#ifndef RESIDENT
#define RESIDENT ((HEAVY ? 2 : 3) * 128 / THREADS)
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
conv2d_kernel(const T* __restrict__ source, const T* __restrict__ filter, const float* __restrict__ bias,
              const T* __restrict__ add, T* __restrict__ output, const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char shared[];
    using Product = TileProduct<TILE_M, TILE_N, true, Filter::DEPTH_INNER>;
    constexpr int STAGE = Product::A::BYTES + Product::B::BYTES;

    u32 block = blockIdx.x;
    const int first_column = block % p.tiles_n * TILE_N;
    block /= p.tiles_n;
    const int group = block % p.groups;
    block /= p.groups;
    const i64 first = i64(block % p.tiles_m) * TILE_M;
    const Class& c = p.classes[block / p.tiles_m];

    const int class_height = (p.out_height - c.row + p.class_step_h - 1) / p.class_step_h;
    const int class_width = (p.out_width - c.column + p.class_step_w - 1) / p.class_step_w;
    const i64 count = i64(p.images) * class_height * class_width;
    if (first >= count) return;  // the classes of a launch share the largest one's number of tiles

    const int wrap = channels_per_tap(p.depth);
    const int whole_taps = DEPTH / wrap, rest = DEPTH % wrap;
    const int taps = c.taps_h * c.taps_w;
    const int stages = taps == 0 ? 0 : static_cast<int>(ceil_div(i64(taps) * wrap, i64(DEPTH)));
    const Source rows(source + group * p.depth, p, c, first, count, class_height, class_width);
    Position at(Source::start(), wrap, c.taps_w);

    const auto copy = [&](int index) {
        unsigned char* stage = shared + index % STAGES * STAGE;
        rows.copy(stage, p, c, at);
        Filter::copy(stage + Product::A::BYTES, filter, p, c, at, group, first_column);
        at.advance(whole_taps, rest, wrap, c);
        commit_copies();
    };

    Product product;
    product.clear();
    for (int index = 0; index < STAGES - 1; ++index) copy(index);
    for (int index = 0; index < stages; ++index) {
        await_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all, and the one before it is no longer read
        const unsigned char* stage = shared + index % STAGES * STAGE;
        product.accumulate(stage, stage + Product::A::BYTES, [&] { copy(index + STAGES - 1); });
    }
    await_copies<0>();
    __syncthreads();

    float* staged = reinterpret_cast<float*>(shared);
    product.stage(staged);
    __syncthreads();
    write_tile(staged, bias, add, output, p, c, group, first, count, first_column, class_height, class_width);
}
