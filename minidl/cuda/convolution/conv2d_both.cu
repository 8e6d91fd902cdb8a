// Both gradients of a 1x1 convolution under a batch norm on Hopper (sm_90a), from one read of what its output's
// gradient is made of; 16-bit types, one group, no stride, no padding.
//
//   dy[p,k] = dz[p,k]*scale[k] + (y[p,k]*bend[k] + offset[k])     the gradient of the batch norm's input, rounded to T
//   dw[k,c] = sum_p dy[p,k] x[p,c]
//   dx[p,c] = sum_k dy[p,k] w[k,c]
//
// p is a pixel, dz the gradient of the batch norm's output, y its input (affine.cuh has the formula). By kernels of
// their own dy is written once and read twice, after dz and y were read: five passes over the convolution's output, of
// which two are left. dy has the bits that a pass of its own would write, and is never in memory.
//
// BELOW: x is the input of a batch norm with a ReLU over it. The convolution's input is made of it as it is read
// (conv2d_input.cuh), and the data gradient masked and summed for both as in conv2d_hopper.cu (MASKED 1 there).
//
// A block owns 64 columns c, all filters k and a chunk of the pixels, 64 at a time: their gradient dw stays in
// registers until its last tile, dx leaves with every tile. Blocks of the same pixels run side by side, so that dz and
// y come from memory once. Chunks depend on the sizes alone, so the bits depend neither on the grid nor on the device.
//
// The arrays are seen through tensor maps (conv2d_both.py makes them), boxes of 64 x 64 unless it says otherwise:
//   dz, y    (K, pixels)
//   w        (C, K): 64 x 128
//   x, dx    (C, pixels)
//   partials  (chunks, K, C) float32, for sum_partials_kernel
//   sums      with BELOW: (tiles, 2, C) float32, for batch_norm_merge.cu
// A stage is 128 filters of a tile: two boxes of dz, where dy takes their place, and two of y. dy lies there as rows of
// pixels: that is K-major for dx, where filters are summed, and MN-major for dw, where pixels are.
//
// Macros: DTYPE (1, 2); BELOW; DEEP, stages of a tile, K / 128; STAGES in shared memory.
// Grid: column tiles first, then chunks. Block: five warpgroups, each a role: one multiplies for dx and finishes it,
// with BELOW after it has made the convolution's input; two multiply for dw, each for half of the filters of a stage;
// one makes dy; and one thread of the last fills.
// Dynamic shared memory: `Layout::BYTES`.
// What bounds it: one column of up to 256 filters, memory (64-256 at 56x56 pixels, 256 images, BELOW: 253 us on an
// H200, 245 at the speed of a copy). With more filters or columns shared memory: of each stage products read 64 KiB,
// what is made passes 48 KiB in and out, what comes is 32 KiB; at 128 bytes a clock 1150 of the 1700 clocks that it
// takes (128-512 at 28x28: 181 us, BELOW 194; with nothing made 141 and 157; by three kernels 281 and 295). What was
// tried: docs/tuning.md.
// FLOP: 4 * K * C * pixels. Bytes: dz, y, x, dx once, where C is at most 64; dz and y from the L2 cache for further
// columns; 4 * chunks * |dw| twice.
#define MASKED BELOW
#define NORMALIZED BELOW
#define BACKWARD 1
#define STATISTICS 0
#include "conv2d_both_make.cuh"
#include "conv2d_input.cuh"
#include "wgmma.cuh"

constexpr int PIXELS = 64, COLUMNS = 64, FILTERS = 128;  // of a tile; filters of a stage
constexpr int BOX = PIXELS * 128, STAGE = 4 * BOX;       // bytes
constexpr int INPUTS = BELOW ? 2 * BOX : BOX;            // of a tile's input, and of what it is made of
constexpr int RINGS = 2;                                 // tiles whose input, or output, is in shared memory

// The roles, by warpgroup.
constexpr int DATA = 0, WEIGHT = 1, MAKE = 3, FILL = 4, THREADS = 5 * 128;
constexpr int EACH = 65536 / THREADS / 8 * 8;  // registers of a thread at first
constexpr int FOR_WEIGHT = DEEP < 3 ? 104 : DEEP == 3 ? 128 : 160, FOR_FILL = 24;
constexpr int FOR_DATA = DEEP < 3 ? 128 : DEEP == 3 ? 80 : 72, FOR_MAKE = DEEP < 3 ? 112 : DEEP == 3 ? 120 : 64;
static_assert(2 * FOR_WEIGHT + FOR_DATA + FOR_MAKE + FOR_FILL <= 5 * EACH, "no more registers than there are");

struct Maps {
    TensorMap dz, y, w, x, dx;
};

struct Problem {
    int pixels, tiles;      // tiles of the pixels
    int channels, columns;  // of the convolution's input: all of them, tiles of them
    int filters, chunks;
};

// A block's columns, and its tiles of pixels.
struct Part {
    int column, chunk, first, last;

    __device__ __forceinline__ explicit Part(const Problem& p) {
        chunk = blockIdx.x / p.columns;
        column = (blockIdx.x - chunk * p.columns) * COLUMNS;
        const int each = p.tiles / p.chunks, rest = p.tiles - each * p.chunks;
        first = each * chunk + min(chunk, rest);
        last = first + each + (chunk < rest);
    }
};

struct Layout {
    static constexpr int FILTER_BYTES = DEEP * FILTERS * 128, FACTOR_BYTES = 3 * DEEP * FILTERS * 4;
    static constexpr int INPUT = FILTER_BYTES + STAGES * STAGE, OUTPUT = INPUT + RINGS * INPUTS;
    static constexpr int FACTORS = OUTPUT + RINGS * BOX, BARRIERS = FACTORS + FACTOR_BYTES;
    static constexpr int BYTES = BARRIERS + 8 * (3 * STAGES + 3 * RINGS + 1);
    u32 base;

    __device__ __forceinline__ u32 filters() const { return base; }
    __device__ __forceinline__ u32 stage(int i) const { return base + FILTER_BYTES + i * STAGE; }
    // The convolution's input, and behind it with BELOW what it is made of.
    __device__ __forceinline__ u32 input(int i) const { return base + INPUT + i * INPUTS; }
    __device__ __forceinline__ u32 source(int i) const { return input(i) + INPUTS - BOX; }
    __device__ __forceinline__ u32 output(int i) const { return base + OUTPUT + i * BOX; }
    // scale, bend and offset of the filters.
    __device__ __forceinline__ ChannelTable<DEEP * FILTERS> factors() const { return {base + FACTORS}; }

    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS + 8 * i; }
    // Of a stage: it has come; dy is there; all have done with it. Of a tile's input likewise.
    __device__ __forceinline__ u32 come(int i) const { return barrier(i); }
    __device__ __forceinline__ u32 made(int i) const { return barrier(STAGES + i); }
    __device__ __forceinline__ u32 done(int i) const { return barrier(2 * STAGES + i); }
    __device__ __forceinline__ u32 input_come(int i) const { return barrier(3 * STAGES + i); }
    __device__ __forceinline__ u32 input_made(int i) const { return barrier(3 * STAGES + (BELOW ? RINGS : 0) + i); }
    __device__ __forceinline__ u32 input_done(int i) const { return barrier(3 * STAGES + 2 * RINGS + i); }
    __device__ __forceinline__ u32 filters_come() const { return barrier(3 * STAGES + 3 * RINGS); }
};

DEVICE void init_barriers(const Layout& at) {
    for (int i = 0; i < STAGES; ++i)
        barrier_init(at.come(i), 1), barrier_init(at.made(i), 4), barrier_init(at.done(i), 12);  // warps of three roles
    for (int i = 0; i < RINGS; ++i) {
        barrier_init(at.input_come(i), 1);
        if (BELOW) barrier_init(at.input_made(i), 4);
        barrier_init(at.input_done(i), BELOW ? 12 : 8);
    }
    barrier_init(at.filters_come(), 1);
    barrier_init_done();
}

// One thread: fills stage after stage.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, const Part& part) {
    barrier_expect(at.filters_come(), Layout::FILTER_BYTES);
#pragma unroll
    for (int i = 0; i < DEEP; ++i)
        load_box(at.filters() + i * FILTERS * 128, maps.w, at.filters_come(), part.column, i * FILTERS);
    Ring<STAGES> ring;
    Ring<RINGS> inputs;
    for (int tile = part.first; tile < part.last; ++tile) {
        const int row = tile * PIXELS;
        barrier_wait(at.input_done(inputs.index), inputs.parity ^ 1);
        barrier_expect(at.input_come(inputs.index), BOX);
        load_box(at.source(inputs.index), maps.x, at.input_come(inputs.index), part.column, row);
        inputs.advance();
#pragma unroll 1
        for (int i = 0; i < DEEP; ++i) {
            const u32 to = at.stage(ring.index), barrier = at.come(ring.index);
            barrier_wait(at.done(ring.index), ring.parity ^ 1);
            barrier_expect(barrier, STAGE);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                load_box(to + j * BOX, maps.dz, barrier, i * FILTERS + j * 64, row);
                load_box(to + (2 + j) * BOX, maps.y, barrier, i * FILTERS + j * 64, row);
            }
            ring.advance();
        }
    }
}

// The warpgroup that makes dy, in the place of dz.
DEVICE void make(const Layout& at, const Above& above, const Problem& p, const Part& part) {
    put_factors(at.factors(), above, p.filters);
    warpgroup_sync(1 + MAKE);
    const Made<FILTERS / 8> made(thread_again());
    Ring<STAGES> ring;
    for (int tile = part.first; tile < part.last; ++tile) {
#pragma unroll 1
        for (int i = 0; i < DEEP; ++i) {
            const Factors factors(at.factors(), i * FILTERS + made.vector * 8);
            barrier_wait(at.come(ring.index), ring.parity);
            made.make(at.stage(ring.index), factors, p.pixels - tile * PIXELS);
            fence_for_engine();
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(at.made(ring.index));
            ring.advance();
        }
    }
}

#if BELOW
// The warpgroup that makes the data gradient: the convolution's input, of which a thread has the same eight channels of
// every sixteenth row.
DEVICE void make_input(const Layout& at, const Ring<RINGS>& inputs, const Chunk& chunk) {
    const u32 thread = thread_again(), row = thread / 8, place = row * 128 + (thread % 8 ^ row % 8) * 16;
    barrier_wait(at.input_come(inputs.index), inputs.parity);
    uint4 values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = load_shared(at.source(inputs.index) + place + i * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        store_shared(at.input(inputs.index) + place + i * 16 * 128, chunk(values[i]), 1);
    fence_for_engine();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(at.input_made(inputs.index));
}
#endif

// The end of a stage's products. Matrix units have time to spare: sooner than they need the next ones, memory needs the
// place of these.
DEVICE void give_back(u32 done) {
    commit_products();
    await_products<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(done);
}

// A warpgroup: sums dw up, of the `half`-th 64 filters of each stage.
DEVICE void sum_weight(const Layout& at, const Problem& p, const Part& part, int half, float* partials) {
    float sum[DEEP][COLUMNS / 2];
    const bool speaks = threadIdx.x % 32 == 0;
    Ring<STAGES> ring;
    Ring<RINGS> inputs;
    for (int tile = part.first; tile < part.last; ++tile) {
        const bool begun = tile > part.first;
        barrier_wait(at.input_made(inputs.index), inputs.parity);
        const u64 b = operand(at.input(inputs.index));
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            barrier_wait(at.made(ring.index), ring.parity);
            const u64 a = operand(at.stage(ring.index) + half * BOX);
            product_fence();
#pragma unroll
            for (int k = 0; k < PIXELS / 16; ++k)
                multiply<true, true>(sum[i], a + operand_step(k * 2048), b + operand_step(k * 2048), begun || k);
            give_back(at.done(ring.index));
            ring.advance();
        }
        if (speaks) barrier_arrive(at.input_done(inputs.index));
        inputs.advance();
    }
#pragma unroll
    for (int i = 0; i < DEEP; ++i) settle(sum[i]);
    const u32 thread = thread_again(), lane = thread % 32;
    const int column = part.column + lane % 4 * 2;
    float* const to = partials + (i64(part.chunk) * p.filters + half * 64 + thread / 32 * 16 + lane / 4) * p.channels;
#pragma unroll
    for (int i = 0; i < DEEP; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
            if (column + 8 * j < p.channels)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    *reinterpret_cast<float2*>(to + i64(i * FILTERS + 8 * e) * p.channels + column + 8 * j) =
                        make_float2(sum[i][4 * j + 2 * e], sum[i][4 * j + 2 * e + 1]);
}

// A warpgroup: dx, tile after tile.
DEVICE void make_data(const Layout& at, const Maps& maps, const Problem& p, const Part& part, const Norm& norm,
                      float* sums) {
    Ring<STAGES> ring;
    Ring<RINGS> tiles;
#if BELOW
    Masking masking({norm.moments, norm.gamma, norm.beta}, part.column, p.channels);
    Chunk chunk;
    chunk.load(norm, part.column);
#endif
    const u64 filters = operand(at.filters());
    barrier_wait(at.filters_come(), 0);
    for (int tile = part.first; tile < part.last; ++tile, tiles.advance()) {
#if BELOW
        make_input(at, tiles, chunk);
#endif
        float sum[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            barrier_wait(at.made(ring.index), ring.parity);
            const u64 a = operand(at.stage(ring.index));
            product_fence();
#pragma unroll
            for (int k = 0; k < FILTERS / 16; ++k)
                multiply<true>(sum, a + operand_step(k / 4 * BOX + k % 4 * 32),
                               filters + operand_step((i * FILTERS + k * 16) * 128), i + k);
            give_back(at.done(ring.index));
            ring.advance();
        }
        settle(sum);

        const u32 to = at.output(tiles.index);
        if (threadIdx.x == 0) await_stores_read<RINGS - 1>();
        warpgroup_sync(1 + DATA);
        put_square(sum, to);
#if BELOW
        warpgroup_sync(1 + DATA);
#pragma unroll
        for (int j = 0; j < 2; ++j) masking.sum[j] = masking.product[j] = 0.0f;
#pragma unroll 1
        for (int k = 0; k < PIXELS; k += 16)
            masking.take<128>(to + columns_across() + k * 128, at.source(tiles.index) + columns_across() + k * 128, 0);
        if (threadIdx.x % 32 == 0) barrier_arrive(at.input_done(tiles.index));  // the mask has been read, too
        ColumnShare().write(sums + i64(tile) * 2 * p.channels, masking.result(), part.column, p.channels);
#endif
        fence_for_engine();
        warpgroup_sync(1 + DATA);
        if (threadIdx.x == 0) {
            store_box(maps.dx, to, part.column, tile * PIXELS);
            commit_stores();
        }
    }
    if (threadIdx.x == 0) await_stores_read<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_both_kernel(const __grid_constant__ Maps maps, float* __restrict__ partials, float* __restrict__ sums,
                   const float* __restrict__ moments, const float* __restrict__ gamma,
                   const double* __restrict__ dy_sums, const double* __restrict__ count,
                   const float* __restrict__ below_moments, const float* __restrict__ below_gamma,
                   const float* __restrict__ below_beta, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) init_barriers(at);
    if (threadIdx.x == THREADS - 1)
        prefetch_map(maps.dz), prefetch_map(maps.y), prefetch_map(maps.w), prefetch_map(maps.x), prefetch_map(maps.dx);
    __syncthreads();
    await_predecessor();
    const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be the same in a warp
    // The roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (role == FILL) {
        set_registers<EACH, FOR_FILL>();
        if (threadIdx.x == FILL * 128) fill(at, maps, p, Part(p));
    } else if (role == MAKE) {
        set_registers<EACH, FOR_MAKE>();
        make(at, {moments, gamma, dy_sums, count}, p, Part(p));
    } else if (role == DATA) {
        set_registers<EACH, FOR_DATA>();
        make_data(at, maps, p, Part(p), {below_moments, below_gamma, below_beta, p.channels}, sums);
    } else {
        set_registers<EACH, FOR_WEIGHT>();
        sum_weight(at, p, Part(p), role - WEIGHT, partials);
    }
}
