// Weight gradient of a convolution as an implicit matrix product; sm_80 and newer.
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, c]
//
// Rows are the output channels of one group, columns the positions (r, s, c) of its filters, and the sum runs over the
// output pixels, in chunks: a chunk is summed in order by one block and leaves one float32 partial, and
// sum_partials_kernel (channel_sum.cu) adds the partials in order. Chunks depend on the problem alone, so the bits
// depend neither on the grid nor on the device.
//
//   dy        pixels * dy_pitch, channels group*rows + k                             T
//   x         ((n*height + h)*width + w)*x_pitch + group*channels + c                T
//   output    (chunks, groups*rows, columns) dense; with one chunk the gradient itself, set or added to   float32
//
// Macros: DTYPE, TF32, STAGES; TILE_M x TILE_N, the tile of rows x columns of one block; VEC_DY, VEC_X, VEC_Y: elements
// per access to dy, x and output, at most 16 bytes.
// Grid: one block per chunk, group, row tile and column tile, the last fastest, so that blocks which share pixels run
// together. Where a pixel's patch starts is the same for all columns: DEPTH threads find it one stage ahead and leave
// it in shared memory. Both operands lie with their pixels outermost; see tile.cuh.
// Dynamic shared memory: STAGES * DEPTH patches of 16 bytes, then tiles of
// max(STAGES * 128 * (TILE_M + TILE_N), 4 * TILE_M * TILE_N) bytes.
// FLOP: 2 * rows * columns * pixels per group.
// Bytes: dy and x once if the L2 cache keeps a chunk, and 4 * chunks * |dw| twice.
#include "tile.cuh"

struct Problem {
    i64 dy_pitch, x_pitch;
    i64 pixels, chunk;  // output pixels, and how many of them make a chunk
    int height, width;
    int out_height, out_width;
    int groups, rows, channels, columns;
    int kernel_w;
    int stride_h, stride_w;
    int padding_h, padding_w;
    int dilation_h, dilation_w;
    int tiles_m, tiles_n;
    int accumulate;
};

// Where the patch of an output pixel starts: its first source pixel, as an offset into x and as coordinates.
struct __align__(16) Patch {
    i64 offset;  // in bytes
    int h, w;
};

constexpr int OUTSIDE = -(1 << 30);  // a coordinate that no tap brings back into the image

// Patches of one stage: DEPTH threads, one pixel each. `rest` is the pixel's index counted from image `image`.
DEVICE void find_patch(Patch* patches, const Problem& p, i64 image, int rest, bool inside) {
    const int per_image = p.out_height * p.out_width;
    const int further = rest / per_image;
    rest -= further * per_image;
    const int y = rest / p.out_width, x = rest - y * p.out_width;
    const int h = y * p.stride_h - p.padding_h, w = x * p.stride_w - p.padding_w;
    Patch patch;
    patch.offset = (((image + further) * p.height + h) * p.width + w) * p.x_pitch * static_cast<int>(sizeof(T));
    patch.h = inside ? h : OUTSIDE;
    patch.w = w;
    patches[threadIdx.x % DEPTH] = patch;
}

// The gradient operand: DEPTH pixels x TILE_M output channels, neighbours in memory.
struct Gradient {
    using Operand = Tile<TILE_M, false>;
    static constexpr int COLUMNS = TILE_M / VEC_DY;
    static constexpr int STEP = THREADS / COLUMNS;
    static constexpr int ROWS = DEPTH / STEP;
    static_assert(ROWS * STEP == DEPTH, "the threads cover a stage in whole rows");

    const char* from;  // of this thread's first pixel in the next stage to be copied
    i64 row_step;      // between its pixels, in bytes
    bool readable;

    __device__ __forceinline__ Gradient(const T* dy, const Problem& p, i64 first_pixel, int group, int first_row) {
        const int row = first_row + threadIdx.x % COLUMNS * VEC_DY;
        from = reinterpret_cast<const char*>(dy + (first_pixel + threadIdx.x / COLUMNS) * p.dy_pitch +
                                             i64(group) * p.rows + row);
        row_step = STEP * p.dy_pitch * static_cast<int>(sizeof(T));
        readable = row < p.rows;
    }

    // `left`: pixels of the chunk from the first of this stage.
    __device__ __forceinline__ void copy(u32 tile, int left) {
        const int row = threadIdx.x / COLUMNS;
        const int to = Operand::offset(threadIdx.x % COLUMNS * VEC_DY, row);
        left = readable ? left - row : 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i, from += row_step)
            copy_values<VEC_DY>(tile + Operand::moved(to, i * STEP, 0), from, i * STEP < left);
    }
};

// The gathered operand: DEPTH pixels x TILE_N positions (r, s, c). A thread keeps one vector of positions.
struct Source {
    using Operand = Tile<TILE_N, false>;
    static constexpr int COLUMNS = TILE_N / VEC_X;
    static constexpr int STEP = THREADS / COLUMNS;
    static constexpr int ROWS = DEPTH / STEP;
    static_assert(ROWS * STEP == DEPTH, "the threads cover a stage in whole rows");

    const char* from;  // of this thread's position, relative to the start of a patch
    int h, w;

    __device__ __forceinline__ Source(const T* x, const Problem& p, int group, int first_column) {
        const int column = first_column + threadIdx.x % COLUMNS * VEC_X;
        const int tap = column / p.channels, channel = column - tap * p.channels;
        const int tap_h = tap / p.kernel_w;
        h = column < p.columns ? tap_h * p.dilation_h : OUTSIDE;
        w = (tap - tap_h * p.kernel_w) * p.dilation_w;
        from = reinterpret_cast<const char*>(x + (i64(tap_h * p.dilation_h) * p.width + w) * p.x_pitch +
                                             i64(group) * p.channels + channel);
    }

    __device__ __forceinline__ void copy(u32 tile, const Problem& p, const Patch* patches) const {
        const int row = threadIdx.x / COLUMNS;
        const int to = Operand::offset(threadIdx.x % COLUMNS * VEC_X, row);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const Patch patch = patches[row + i * STEP];
            const bool inside = static_cast<u32>(patch.h + h) < static_cast<u32>(p.height) &&
                                static_cast<u32>(patch.w + w) < static_cast<u32>(p.width);
            copy_values<VEC_X>(tile + Operand::moved(to, i * STEP, 0), from + patch.offset, inside);
        }
    }
};

DEVICE void write_tile(const float* staged, float* output, const Problem& p, i64 chunk, int group, int first_row,
                       int first_column) {
    constexpr int COLUMNS = TILE_N / VEC_Y;
    constexpr int STEP = THREADS / COLUMNS;
    const int local_column = threadIdx.x % COLUMNS * VEC_Y;
    const int column = first_column + local_column;
    if (column >= p.columns) return;
    const i64 row_of_group = (chunk * p.groups + group) * p.rows;
#pragma unroll 4
    for (int row = threadIdx.x / COLUMNS; row < TILE_M; row += STEP) {
        if (first_row + row >= p.rows) return;
        float* to = output + (row_of_group + first_row + row) * p.columns + column;
        float value[VEC_Y];
        load<float, VEC_Y>(staged + row * TILE_N + staged_column(row, local_column), value);
        if (p.accumulate) {
            float other[VEC_Y];
            load<float, VEC_Y>(to, other);
#pragma unroll
            for (int e = 0; e < VEC_Y; ++e) value[e] += other[e];
        }
        store<float, VEC_Y>(to, value);
    }
}

// Blocks per multiprocessor that the registers must leave room for: the widest tile spends them on its accumulators,
// exact float32 on two levels of them.
constexpr int RESIDENT = TILE_M * TILE_N > 128 * 64 || (DTYPE == 0 && TF32 != 1) ? 2 : 3;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
conv2d_weight_kernel(const T* __restrict__ dy, const T* __restrict__ x, float* __restrict__ output,
                     const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(128) unsigned char shared[];
    Patch* const patches = reinterpret_cast<Patch*>(shared);  // of stage after stage, DEPTH each
    unsigned char* const tiles = shared + STAGES * DEPTH * sizeof(Patch);
    using Product = TileProduct<TILE_M, TILE_N, false, false>;
    constexpr int STAGE = Product::A::BYTES + Product::B::BYTES;

    u32 block = blockIdx.x;
    const int first_column = block % p.tiles_n * TILE_N;
    block /= p.tiles_n;
    const int first_row = block % p.tiles_m * TILE_M;
    block /= p.tiles_m;
    const int group = block % p.groups;
    const i64 chunk = block / p.groups;

    const i64 first_pixel = chunk * p.chunk;
    const int count = static_cast<int>(first_pixel + p.chunk < p.pixels ? p.chunk : p.pixels - first_pixel);
    const int stages = ceil_div(count, DEPTH);
    const int per_image = p.out_height * p.out_width;
    const i64 first_image = first_pixel / per_image;
    const int first_rest = static_cast<int>(first_pixel - first_image * per_image);

    Gradient gradient(dy, p, first_pixel, group, first_row);
    const Source source(x, p, group, first_column);

    // Stages are prepared and copied in order, so each keeps its own count and place.
    const auto prepare = [&](int index) {
        const int pixel = index * DEPTH + threadIdx.x % DEPTH;
        find_patch(patches + index % STAGES * DEPTH, p, first_image, first_rest + pixel, pixel < count);
    };
    const u32 shared_tiles = shared_address(tiles);
    int left = count, written = 0, read = 0;
    const auto copy = [&] {
        gradient.copy(shared_tiles + written * STAGE, left);
        source.copy(shared_tiles + written * STAGE + Product::A::BYTES, p, patches + written * DEPTH);
        left -= DEPTH;
        written = written == STAGES - 1 ? 0 : written + 1;
        commit_copies();
    };

    for (int index = threadIdx.x / DEPTH; index < STAGES; index += THREADS / DEPTH) prepare(index);
    __syncthreads();
    Product product(tiles);
    for (int index = 0; index < STAGES - 1; ++index) copy();
    for (int index = 0; index < stages; ++index) {
        await_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all, and the one before it is no longer read
        product.accumulate(read, copy);
        read = read == (STAGES - 1) * STAGE ? 0 : read + STAGE;
        // Work for one warp's worth of threads: they take turns, or the others would wait for the first.
        if (threadIdx.x / DEPTH == index % (THREADS / DEPTH)) prepare(index + STAGES);
    }
    await_copies<0>();
    __syncthreads();

    float* staged = reinterpret_cast<float*>(tiles);
    product.stage(staged);
    __syncthreads();
    write_tile(staged, output, p, chunk, group, first_row, first_column);
}
