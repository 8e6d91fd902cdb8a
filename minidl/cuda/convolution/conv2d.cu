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
// The depth runs over chunks of 128 bytes of channels, over the taps within a chunk: a chunk's pixels are then re-read
// while the caches hold them, and all threads stand at the same tap. Forward with other channel counts it is PACKED:
// one row of taps and channels, cut anywhere. The choice depends on the channels and the storage type alone.
//
// Macros: DTYPE, TF32, BACKWARD, PACKED; TILE_M x TILE_N, the tile of rows x columns of one block; STAGES; FAR: 1 when
// offsets inside the images of a tile need 64 bits; VEC_X, VEC_W, VEC_Y: elements per access to source, filter and
// output (with add), at most 16 bytes.
// Grid: blockIdx.y is the class; blockIdx.x counts row tiles, groups and column tiles, the last fastest, so that blocks
// which share source pixels run together. STAGES stages of cp.async feed the product; see tile.cuh.
// Dynamic shared memory: max(STAGES * 128 * (TILE_M + TILE_N), 4 * TILE_M * TILE_N) bytes.
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

// Packed, channels of neighbouring taps follow each other; otherwise those of every tap are padded to whole stages.
DEVICE int channels_per_tap(int depth) { return PACKED ? depth : ceil_div(depth, DEPTH) * DEPTH; }

// Where a stage stands in the depth: a tap, and the first of its channels. Packed, each thread stands for itself.
struct Position {
    int channel, tap_h, tap_w;

    __device__ __forceinline__ Position(int start, int wrap, int taps_w) : channel(0), tap_h(0), tap_w(0) {
        if (PACKED && taps_w) {
            const int tap = start / wrap;
            channel = start - tap * wrap;
            tap_h = tap / taps_w;
            tap_w = tap - tap_h * taps_w;
        }
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

    // Whether there is any more to read; past the end stages are filled with zeros that nobody multiplies.
    __device__ __forceinline__ bool inside(const Class& c, int depth, int start) const {
        return PACKED ? tap_h < c.taps_h : channel + (BACKWARD ? start : 0) < depth;  // forward depth is whole stages
    }
};

// What a block computes. Worked out before the main loop and again behind it: kept, it would cost registers there.
struct Block {
    const Class& c;
    int first_column, group;
    int class_height, class_width;
    i64 first, count;  // its first row, and the rows of its class

    __device__ __forceinline__ explicit Block(const Problem& p) : c(p.classes[blockIdx.y]) {
        u32 block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));  // volatile: not the value of the other time
        first_column = block % p.tiles_n * TILE_N;
        block /= p.tiles_n;
        group = block % p.groups;
        first = i64(block / p.groups) * TILE_M;
        class_height = (p.out_height - c.row + p.class_step_h - 1) / p.class_step_h;
        class_width = (p.out_width - c.column + p.class_step_w - 1) / p.class_step_w;
        count = i64(p.images) * class_height * class_width;
    }

    // Pixel of the output image for a row, as an offset in pixels of the whole output.
    __device__ __forceinline__ i64 output_pixel(const Problem& p, i64 row) const {
        const i64 per_image = i64(class_height) * class_width;
        const i64 image = row / per_image;
        const int rest = static_cast<int>(row - image * per_image);
        const int i = rest / class_width, j = rest - i * class_width;
        return (image * p.out_height + c.row + i * p.class_step_h) * p.out_width + c.column + j * p.class_step_w;
    }
};

// 32 bits, unless the images of one tile take more vectors.
#if FAR
using Offset = i64;
#else
using Offset = int;
#endif

// The gathered operand: TILE_M output pixels x DEPTH source values. A thread copies one column of vectors.
struct Source {
    using Operand = Tile<TILE_M, true>;
    static constexpr int COLUMNS = DEPTH / VEC_X;
    static constexpr int STEP = THREADS / COLUMNS;
    static constexpr int ROWS = TILE_M / STEP;

    const char* from;              // of the tile's first image at the position last copied
    i64 place;                     // of that position, in bytes
    Offset offset[ROWS];           // of a row's pixel from there, in vectors; the pixel may lie outside of the image
    int row_h[ROWS], row_w[ROWS];  // its coordinates at the first tap

    static __device__ __forceinline__ int row() { return threadIdx.x / COLUMNS; }
    static __device__ __forceinline__ int start() { return threadIdx.x % COLUMNS * VEC_X; }

    __device__ __forceinline__ Source(const T* source, const Problem& p, const Block& block) : place(0) {
        const Class& c = block.c;
        // One wide division per tile; from there on a row is near enough for 32 bits.
        const int per_image = block.class_height * block.class_width;
        const i64 first_image = block.first / per_image;
        const int first_rest = static_cast<int>(block.first - first_image * per_image);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int index = first_rest + row() + i * STEP;
            const int image = index / per_image, rest = index - image * per_image;
            const int y = rest / block.class_width, x = rest - y * block.class_width;
            const bool inside = block.first + row() + i * STEP < block.count;
            row_h[i] = inside ? y * p.step_h + c.offset_h : OUTSIDE;
            row_w[i] = x * p.step_w + c.offset_w;
            const i64 pixel = (i64(image) * p.height + y * p.step_h + c.offset_h) * p.width + row_w[i];
            offset[i] = static_cast<Offset>((pixel * p.source_pitch + (PACKED ? 0 : start())) / VEC_X);
        }
        from = reinterpret_cast<const char*>(source + block.group * p.depth +
                                             first_image * p.height * p.width * p.source_pitch);
    }

    __device__ __forceinline__ void copy(u32 tile, const Problem& p, const Position& at, bool readable) {
        const int h = at.tap_h * p.delta_h, w = at.tap_w * p.delta_w;
        const i64 next = ((i64(h) * p.width + w) * p.source_pitch + at.channel) * static_cast<int>(sizeof(T));
        from += next - place;
        place = next;
        const int to = Operand::offset(row(), start());
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool inside = readable && static_cast<u32>(row_h[i] + h) < static_cast<u32>(p.height) &&
                                static_cast<u32>(row_w[i] + w) < static_cast<u32>(p.width);
            const char* vector = from + i64(offset[i]) * (VEC_X * static_cast<int>(sizeof(T)));
            copy_values<VEC_X>(tile + Operand::moved(to, i * STEP, 0), vector, inside);
        }
    }
};

// The filter: TILE_N output channels x DEPTH. Contiguous along the depth going forward, along the channels going back.
struct Filter {
    static constexpr bool DEPTH_INNER = !BACKWARD;
    using Operand = Tile<TILE_N, DEPTH_INNER>;
    static constexpr int COLUMNS = (DEPTH_INNER ? DEPTH : TILE_N) / VEC_W;
    static constexpr int STEP = THREADS / COLUMNS;
    static constexpr int ROWS = (DEPTH_INNER ? TILE_N : DEPTH) / STEP;
    static_assert(BACKWARD || VEC_W == VEC_X, "forward, source and filter share their place in the depth");

    const char* from;  // of this thread's first row at the position last copied
    i64 place;         // of that position, in bytes
    i64 row_step;      // between this thread's rows, in bytes
    int rows;          // left from this thread's first; going back a column is read by all rows or by none

    static __device__ __forceinline__ int row() { return threadIdx.x / COLUMNS; }
    static __device__ __forceinline__ int start() { return threadIdx.x % COLUMNS * VEC_W; }

    __device__ __forceinline__ Filter(const T* filter, const Problem& p, int group, int first_column) : place(0) {
        const i64 pitch = i64(p.kernel_h * p.kernel_w) * (DEPTH_INNER ? p.depth : p.columns);
        const i64 first = DEPTH_INNER ? (i64(group) * p.columns + first_column + row()) * pitch + (PACKED ? 0 : start())
                                      : (i64(group) * p.depth + row()) * pitch + first_column + start();
        from = reinterpret_cast<const char*>(filter + first);
        row_step = STEP * pitch * static_cast<int>(sizeof(T));
        rows = DEPTH_INNER                             ? p.columns - first_column - row()
               : first_column + start() < p.columns ? p.depth - row()
                                                       : 0;
    }

    __device__ __forceinline__ void copy(u32 tile, const Problem& p, const Class& c, const Position& at,
                                         bool readable) {
        const int tap = (c.first_h + at.tap_h * p.tap_step_h) * p.kernel_w + c.first_w + at.tap_w * p.tap_step_w;
        const i64 next = DEPTH_INNER ? i64(tap) * p.depth + at.channel
                                     : (i64(at.channel) * (p.kernel_h * p.kernel_w) + tap) * p.columns;
        from += (next - place) * static_cast<int>(sizeof(T));
        place = next;
        const int to = DEPTH_INNER ? Operand::offset(row(), start()) : Operand::offset(start(), row());
        const int left = DEPTH_INNER ? (readable ? rows : 0) : rows - at.channel;
        const char* row_from = from;
#pragma unroll
        for (int i = 0; i < ROWS; ++i, row_from += row_step)
            copy_values<VEC_W>(tile + Operand::moved(to, i * STEP, 0), row_from, i * STEP < left);
    }
};

// Adds bias and `add` in float32, rounds once, writes whole vectors.
DEVICE void write_tile(const float* staged, const float* bias, const T* add, T* output, const Problem& p,
                       const Block& block) {
    constexpr int COLUMNS = TILE_N / VEC_Y;
    constexpr int STEP = THREADS / COLUMNS;
    const int local_column = threadIdx.x % COLUMNS * VEC_Y;
    if (block.first_column + local_column >= p.columns) return;
    const int column = block.group * p.columns + block.first_column + local_column;
    const int channels = p.groups * p.columns;
    const bool dense = p.class_step_h == 1 && p.class_step_w == 1;
    float shift[VEC_Y];
#pragma unroll
    for (int e = 0; e < VEC_Y; ++e) shift[e] = bias ? bias[column + e] : 0.0f;
#pragma unroll 4
    for (int row = threadIdx.x / COLUMNS; row < TILE_M; row += STEP) {
        if (block.first + row >= block.count) return;
        const i64 pixel = dense ? block.first + row : block.output_pixel(p, block.first + row);
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
#if __CUDA_ARCH__ >= 900
constexpr int MANY_ROWS = 9;
#else
constexpr int MANY_ROWS = 8;  // whose compiler keeps fewer values in uniform registers
#endif
constexpr bool HEAVY = TILE_M * TILE_N > 128 * 64 || (DTYPE == 0 && TF32 != 1) || Source::ROWS >= MANY_ROWS;
constexpr int RESIDENT = HEAVY ? 2 : 3;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
conv2d_kernel(const T* __restrict__ source, const T* __restrict__ filter, const float* __restrict__ bias,
              const T* __restrict__ add, T* __restrict__ output, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(128) unsigned char shared[];
    using Product = TileProduct<TILE_M, TILE_N, true, Filter::DEPTH_INNER>;
    constexpr int STAGE = Product::A::BYTES + Product::B::BYTES;

    const Block block(p);
    const Class& c = block.c;
    if (block.first >= block.count) return;  // the classes of a launch share the largest one's number of tiles

    const int wrap = channels_per_tap(p.depth);
    const int whole_taps = DEPTH / wrap, rest = DEPTH % wrap;
    const int taps = c.taps_h * c.taps_w;
    const int stages = taps == 0 ? 0 : static_cast<int>(ceil_div(i64(taps) * wrap, i64(DEPTH)));
    Source rows(source, p, block);
    Filter columns(filter, p, block.group, block.first_column);
    Position at(Source::start(), wrap, c.taps_w);

    const u32 tiles = shared_address(shared);
    const auto copy = [&](int stage) {
        const bool readable = at.inside(c, p.depth, Source::start());
        rows.copy(tiles + stage, p, at, readable);
        columns.copy(tiles + stage + Product::A::BYTES, p, c, at, readable);
        at.advance(whole_taps, rest, wrap, c);
        commit_copies();
    };

    Product product(shared);
    if (stages > 0)  // a class of a strided gradient may have no taps: its pixels are bias and addend alone
        for (int index = 0; index < STAGES - 1; ++index) copy(index * STAGE);
    int read = 0;
    for (int index = 0; index < stages; ++index) {
        await_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all, and the one before it is no longer read
        product.accumulate(read, [&] { copy(read == 0 ? (STAGES - 1) * STAGE : read - STAGE); });
        read = read == (STAGES - 1) * STAGE ? 0 : read + STAGE;
    }
    await_copies<0>();
    __syncthreads();

    float* staged = reinterpret_cast<float*>(shared);
    product.stage(staged);
    __syncthreads();
    write_tile(staged, bias, add, output, p, Block(p));
}
