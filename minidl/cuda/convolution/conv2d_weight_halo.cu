// Weight gradient of a 3x3 convolution without stride on Hopper (sm_90a): conv2d_weight_hopper.cu with each pixel of x
// copied once for all nine taps instead of once per tap. 16-bit types.
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p - ph + r*dh, q - pw + s*dw, c]
//
// The sum runs over a grid of GRID_H x GRID_W points per image, in which both arrays lie with zeros around them: point
// (n, i, j) is output pixel (p, q) = (i, j) of dy and pixel (i - ph, j - pw) of x. GRID_W is so large that behind a row
// of x there is as much padding as before it, which then is the padding between two rows. So tap (r, s) of point u
// reads x at point u + r*dh*GRID_W + s*dw, whatever its row: one offset for all points. In shared memory points are
// rows of 128 bytes, and a tap is the same operand at another address. (wgmma swizzles by address, so it may start at
// any row, and its blocks of 64 columns may overlap: three taps of a filter row are one operand whose blocks are dw
// points apart.)
//
// A block has 64 filters x 9 taps x 64 channels; each of three warpgroups has the taps of one filter row. The points
// are summed in chunks, each in order by one block; the blocks of a cluster add theirs up into one float32 partial, and
// conv2d_weight_sum.cu adds the partials, both in order. Chunks depend on the sizes alone.
//
// The arrays are seen through tensor maps (conv2d_weight_hopper.py makes them), im2col walks over the grid's points:
//   dy      (K, Q, P, N): 64 points x 64 filters;   x  (C, W, H, N): 64 points x 64 channels
//   output  (K, 3, 3, C / groups) dense, the gradient, set or added to; or partials, those of a tile one after another,
//           (tiles, partials, patches.rows / 16, 9 * patches.columns / 8), for conv2d_weight_sum.cu            float32
//
// NORMALIZED: x is the input of a batch norm with a ReLU over it, and its stages are normalised where they lie, once
// for all taps, by three warps that are otherwise idle.
//
// Macros: DTYPE (1, 2); NORMALIZED; STAGES of dy; CLUSTER (1, 2), blocks that add up their chunks before they write a
// partial.
// Grid: one block per chunk of a partial, 64 channels, 64 filters, group and partial, the first fastest, so that blocks
// which share pixels run together.
// Block: three warpgroups that multiply, and one of which two lanes copy.
// Dynamic shared memory: STAGES stages of dy, a ring of `held` stages of x and a repetition of its first, so that 16
// points and their taps always follow each other, 8192 bytes each, later sums of 64 * 576; and 1024.
// FLOP: 2 * K * 9 * C * points / groups; points exceed pixels by the padding. Bytes: dy once per 64 channels and x once
// per 64 filters, of which the L2 cache serves all but the first; 4 * partials * |dw| twice.
#include "conv2d_weight_hopper.cuh"
#include "wgmma.cuh"
#if NORMALIZED
#include "conv2d_input.cuh"
#endif

constexpr int WARPGROUPS = 3, THREADS = 128 * (WARPGROUPS + 1);
using Registers = RegisterShares<128, NORMALIZED ? 104 : 32, 128 * WARPGROUPS, NORMALIZED ? 136 : 160>;
constexpr int POINTS = 64, STAGE_BYTES = POINTS * 128;

struct Maps {
    TensorMap dy, x;
};

struct Problem {
    int steps, chunks;  // stages that make up the sum, and among how many blocks they are divided
    int groups, rows, channels;  // of a group
    int images, height, width;  // of x
    int grid_h, grid_w;
    int padding_h, padding_w;
    int tap_h, tap_w;                     // points from tap to tap
    int ahead, held;                      // stages of x that one of dy reaches beyond its own; in the ring: STAGES more
    int further_n, further_h, further_w;  // POINTS points, as images, rows and points
    int tiles_m, tiles_n;
    Patches patches;
    int mode;
};

// The tile of a block, and its share of the sum.
struct Work {
    int group;
    int row, channel;  // the first of it
    int first, last;  // steps
    int part;         // the partial sum that its cluster leaves, among those of all tiles

    __device__ __forceinline__ explicit Work(const Problem& p) {
        u32 index = blockIdx.x / CLUSTER;
        channel = index % p.tiles_n * 64;
        index /= p.tiles_n;
        row = index % p.tiles_m * 64;
        index /= p.tiles_m;
        group = index % p.groups;
        const int share = index / p.groups, chunk = share * CLUSTER + blockIdx.x % CLUSTER;
        const int tile = (group * p.tiles_m + row / 64) * p.tiles_n + channel / 64;
        part = tile * (p.chunks / CLUSTER) + share;
        first = static_cast<int>(i64(p.steps) * chunk / p.chunks);
        last = static_cast<int>(i64(p.steps) * (chunk + 1) / p.chunks);
    }
};

// Shared memory: the ring of x with its repetition, stages of dy, barriers.
struct Layout {
    u32 x, dy;

    __device__ __forceinline__ u32 filled(int i) const { return dy + STAGES * STAGE_BYTES + 8 * i; }
    __device__ __forceinline__ u32 emptied(int i) const { return filled(STAGES + i); }
    // When a stage is what a product wants.
    __device__ __forceinline__ u32 ready(int i) const { return NORMALIZED ? filled(2 * STAGES + i) : filled(i); }
    // When the stages of x that the first step reaches beyond its own are.
    __device__ __forceinline__ u32 begun() const { return filled(3 * STAGES); }
};

// Two lanes: the first copies dy, the second x, `ahead` stages further.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, const Work& work) {
    const bool of_x = threadIdx.x % 32 == 1;
    // What is read of the next group is not written.
    const int channel = work.group * p.channels + work.channel, row = work.group * p.rows + work.row;
    Pixel point(work.first * POINTS, p.grid_h, p.grid_w);
    Ring<STAGES> ring;
    int slot = 0, announced = 0;
    const auto copy_x = [&](u32 barrier) {
        const int h = point.y - p.padding_h, w = point.x - p.padding_w;
        announced += slot == 0 ? 2 * STAGE_BYTES : STAGE_BYTES;
        load_pixels(at.x + slot * STAGE_BYTES, maps.x, barrier, channel, w, h, point.image, 0, 0);
        if (slot == 0) load_pixels(at.x + p.held * STAGE_BYTES, maps.x, barrier, channel, w, h, point.image, 0, 0);
        if (++slot == p.held) slot = 0;
        point.advance(p, p.grid_h, p.grid_w);
    };
    if (of_x)
        for (int i = 0; i < p.ahead; ++i) copy_x(at.filled(0));
    for (int step = work.first; step < work.last; ++step) {
        const u32 barrier = at.filled(ring.index);
        barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
        if (of_x) {
            copy_x(barrier);
            barrier_expect(barrier, announced);
            announced = 0;
        } else {
            barrier_expect(barrier, STAGE_BYTES);
            const u32 to = at.dy + ring.index * STAGE_BYTES;
            load_pixels(to, maps.dy, barrier, row, point.x, point.y, point.image, 0, 0);
            point.advance(p, p.grid_h, p.grid_w);
        }
        ring.advance();
    }
}

constexpr int WARPS = 3;                                            // that normalise, if any
constexpr int EMPTYING = 4 * WARPGROUPS + (NORMALIZED ? WARPS : 0);  // warps that are done with a stage

#if NORMALIZED

// A warp: normalises every third stage of x, the points that lie in an image; around it are zeros.
DEVICE void normalize_all(const Layout& at, const Problem& p, const Work& work, const Norm& norm, int warp) {
    const int lane = threadIdx.x % 32, steps = work.last - work.first;
    Pixel lower(work.first * POINTS + lane, p.grid_h, p.grid_w);
    Pixel upper(work.first * POINTS + 32 + lane, p.grid_h, p.grid_w);
    const auto inside = [&](const Pixel& point) {
        return __ballot_sync(0xffffffffu, point.image < p.images && u32(point.y - p.padding_h) < u32(p.height) &&
                                              u32(point.x - p.padding_w) < u32(p.width));
    };
    Chunk chunk;
    chunk.load(norm, work.channel);
    Ring<STAGES> ring;
    int slot = 0, turn = warp;
    for (int stage = 0; stage < steps + p.ahead; ++stage) {
        // Each step in its turn, also those of others, and none is filled again before: a barrier tells a phase only
        // from the next.
        barrier_wait(at.filled(ring.index), ring.parity);
        __syncwarp();
        if (lane == 0 && stage >= p.ahead) barrier_arrive(at.emptied(ring.index));
        if (turn-- == 0) {
            turn = WARPS - 1;
            const u64 bits = inside(lower) | u64(inside(upper)) << 32;
            const auto of = [bits](int unit) { return u32(bits >> unit * UNIT); };
            normalize_rows<1>(chunk, at.x + slot * STAGE_BYTES, 0, POINTS / UNIT, of);
            if (slot == 0) normalize_rows<1>(chunk, at.x + p.held * STAGE_BYTES, 0, POINTS / UNIT, of);
            fence_for_engine();
            __syncwarp();
            if (lane == 0) barrier_arrive(stage < p.ahead ? at.begun() : at.ready(ring.index));
        }
        if (++slot == p.held) slot = 0;
        lower.advance(p, p.grid_h, p.grid_w);
        upper.advance(p, p.grid_h, p.grid_w);
        if (stage >= p.ahead) ring.advance();
    }
}
#endif

using Sum = float[1][96];  // 64 filters x three taps of 64 channels

// A warpgroup: sums up its filter row.
DEVICE void accumulate(Sum& sum, const Layout& at, const Problem& p, int steps, int filter_row) {
    const bool speaks = threadIdx.x % 32 == 0;
    const u64 origin = operand(at.x, p.tap_w * 128);
    const int points = p.held * POINTS;
    int point = filter_row * p.tap_h;  // in the ring
    Ring<STAGES> ring;
    u32 before = 0;
    if constexpr (NORMALIZED) barrier_wait(at.begun(), 0);
    for (int step = 0; step < steps; ++step) {
        barrier_wait(at.ready(ring.index), ring.parity);
        const u64 a = operand(at.dy + ring.index * STAGE_BYTES, STAGE_BYTES);
        product_fence();
#pragma unroll
        for (int k = 0; k < POINTS / 16; ++k) {
            multiply<true, true>(sum[0], a + operand_step(k * 2048), origin + point * operand_step(128), step + k);
            point += 16;
            if (point >= points) point -= points;
        }
        commit_products();
        await_products<1>();  // those of the step before are done with their stage
        if (speaks && step > 0) barrier_arrive(before);
        before = at.emptied(ring.index);
        ring.advance();
    }
    await_products<0>();
    settle(sum[0]);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
conv2d_weight_halo_kernel(const __grid_constant__ Maps maps, float* __restrict__ output,
                          float* __restrict__ partials, const float* __restrict__ moments,
                          const float* __restrict__ gamma, const float* __restrict__ beta,
                          const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const Layout at{base, base + (p.held + 1) * STAGE_BYTES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(at.filled(i), 2), barrier_init(at.emptied(i), EMPTYING);
#if NORMALIZED
        for (int i = 0; i < STAGES; ++i) barrier_init(at.ready(i), 1);
        barrier_init(at.begun(), p.ahead);
#endif
        barrier_init_done();
    }
    if (threadIdx.x == THREADS - 1) prefetch_map(maps.dy), prefetch_map(maps.x);
    const Work work(p);
    __syncthreads();
    await_predecessor();

    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same in a warp
    // The two roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (warp >= 4 * WARPGROUPS) {
        Registers::give();
        if (threadIdx.x - 128 * WARPGROUPS < 2) fill(at, maps, p, work);
#if NORMALIZED
        if (warp > 4 * WARPGROUPS)
            normalize_all(at, p, work, {moments, gamma, beta, p.channels}, warp - 4 * WARPGROUPS - 1);
#endif
    } else {
        Registers::take();
        const int filter_row = warp / 4;
        Sum sum;
        accumulate(sum, at, p, work.last - work.first, filter_row);
        const int columns = 9 * p.channels, row = work.row + warp % 4 * 16 + threadIdx.x % 32 / 4;
        const int channel = work.channel + thread_column();
        const auto find = [&](int tap) { return Target{tap * p.channels + channel, p.channels - channel}; };
        if (p.chunks > CLUSTER) {
            const int line = 9 * 16 * p.patches.columns;  // values of a line of patches
            partials += (i64(work.part) * (p.patches.rows / 16) + warp % 4) * line + filter_row * (line / 3) +
                        threadIdx.x % 32 * 4;
            finish<128 * WARPGROUPS, 64, 8, 8, PART>(sum, base, partials, row - work.row, p.rows, 0, line, p.patches,
                                                     find);
        } else {
            output += i64(work.group) * p.rows * columns + filter_row * 3 * p.channels;
            p.mode == ADD
                ? finish<128 * WARPGROUPS, 64, 8, 8, ADD>(sum, base, output, row, p.rows, 0, columns, p.patches, find)
                : finish<128 * WARPGROUPS, 64, 8, 8, SET>(sum, base, output, row, p.rows, 0, columns, p.patches, find);
        }
    }
}
