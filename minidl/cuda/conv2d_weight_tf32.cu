// Weight gradient of a convolution of float32 in TF32 on Hopper (sm_90a). wgmma takes TF32 operands from shared memory
// only with the summed dimension, here the pixels, innermost. x is brought into that form beforehand
// (conv2d_weight_planes.cu), dy goes through the registers of the threads that multiply.
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, c]
//
// The sum runs over the points of a grid of GRID_H x GRID_W per image, on which dy lies with zeros around it. The
// planes of x hold, for each parity of its coordinates, what the points of that grid see, with padding such that tap
// (r, s) of point u is point u + shift of one plane, whatever its row; see conv2d_weight_tf32.py.
//
// Rows are the filters k. Columns are blocks of 64: a tap and 64 channels of it. The points are summed in chunks, each in
// order by one block, which leaves a float32 partial; sum_partials_kernel (channel_sum.cu) adds them up in order. Chunks
// depend on the sizes alone.
//
// The arrays are seen through tensor maps, whose engine rounds to TF32, nearest:
//   dy      (K, Q, P, N): 32 points x 32 filters, an im2col walk over the grid
//   planes  (points, planes * C): 64 channels x 32 points
//   output  (partials, K, R, S, C) dense; with one partial the gradient itself, set or added to            float32
// A stage is 32 points: of each 32 filters 32 rows (points) of 128 bytes, then of each 64 channels 64 rows of 128 bytes.
//
// A warpgroup has 128 x 128 sums. A thread of lane 4 * g + t reads of points t and t + 4 the filters 4 * g to
// 4 * g + 3 of its warp's 32 at once: rows g and g + 8 of the warpgroup's first product are filters 4 * g and 4 * g + 1,
// those of its second 4 * g + 2 and 4 * g + 3.
//
// Macros: DTYPE 0; WARPGROUPS_M x WARPGROUPS_N that share a tile; STAGES; CLUSTER 1; VEC_Y (1, 2), values per access
// to the output.
// Grid: one block per column tile, row tile and partial, the first fastest. Block: the warpgroups that multiply, and one
// of which a warp copies, each lane one box of a stage. Dynamic shared memory: stages, and 1024.
// FLOP: 2 * K * R*S*C * points. Bytes: dy and the planes once if the L2 cache keeps what the tiles of a chunk share, and
// 4 * partials * |dw| twice.
#include "conv2d_weight_hopper.cuh"
#include "csb_tensor.cuh"

constexpr int POINTS = 32;  // of a stage
constexpr int WARPGROUPS = WARPGROUPS_M * WARPGROUPS_N, THREADS = 128 * (WARPGROUPS + 1);
constexpr int TILE_M = 128 * WARPGROUPS_M, TILE_N = 128 * WARPGROUPS_N;
constexpr int ROW_BOXES = TILE_M / 32, COLUMN_BOXES = TILE_N / 64;
constexpr int ROW_BYTES = 32 * POINTS * 4, COLUMN_BYTES = 64 * POINTS * 4;  // of a box
constexpr int STAGE_BYTES = ROW_BOXES * ROW_BYTES + COLUMN_BOXES * COLUMN_BYTES;

struct Maps {
    TensorMap dy, planes;
};

struct Problem {
    int steps, chunks;  // stages that make up the sum, and among how many blocks they are divided
    int rows, channels, columns;
    int spans, blocks;  // blocks of columns: of a tap, of all taps
    int kernel_w;
    int stride_h, stride_w;
    int dilation_h, dilation_w;
    int grid_h, grid_w, planes_w;
    int further_n, further_h, further_w;  // POINTS points, as images, rows and points
    int tiles_m, tiles_n;
    int accumulate;
};

// The tile of a block, and its share of the sum.
struct Work {
    int row, block;   // the first
    int first, last;  // steps
    int part;         // the partial sum that it leaves

    __device__ __forceinline__ explicit Work(const Problem& p) {
        u32 index = blockIdx.x;
        block = index % p.tiles_n * COLUMN_BOXES;
        index /= p.tiles_n;
        row = index % p.tiles_m * TILE_M;
        part = index / p.tiles_m;
        first = static_cast<int>(i64(p.steps) * part / p.chunks);
        last = static_cast<int>(i64(p.steps) * (part + 1) / p.chunks);
    }
};

// Shared memory: stages, barriers.
struct Layout {
    u32 base;

    __device__ __forceinline__ u32 rows(int i) const { return base + i * STAGE_BYTES; }
    __device__ __forceinline__ u32 columns(int i) const { return rows(i) + ROW_BOXES * ROW_BYTES; }
    __device__ __forceinline__ u32 filled(int i) const { return base + STAGES * STAGE_BYTES + 8 * i; }
    __device__ __forceinline__ u32 emptied(int i) const { return filled(STAGES + i); }
};

// Points of the grid, a stage at a time.
struct Place {
    int image, y, x;

    __device__ __forceinline__ Place(const Problem& p, int point) {
        const int line = point / p.grid_w;
        x = point - line * p.grid_w;
        image = line / p.grid_h;
        y = line - image * p.grid_h;
    }

    __device__ __forceinline__ void advance(const Problem& p) {
        x += p.further_w;
        y += p.further_h;
        image += p.further_n;
        if (x >= p.grid_w) x -= p.grid_w, ++y;
        if (y >= p.grid_h) y -= p.grid_h, ++image;
    }
};

// A warp: fills stage after stage; lane i has the i-th box of each.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, const Work& work) {
    const int lane = threadIdx.x % 32, column = lane - ROW_BOXES;
    const bool of_dy = lane < ROW_BOXES, busy = lane < ROW_BOXES + COLUMN_BOXES;
    // A block of columns behind the last repeats it; nobody writes it.
    const int block = work.block + column < p.blocks ? work.block + column : p.blocks - 1;
    const int tap = block / p.spans, tap_h = tap / p.kernel_w * p.dilation_h, tap_w = tap % p.kernel_w * p.dilation_w;
    const int plane = tap_h % p.stride_h * p.planes_w + tap_w % p.stride_w;
    const int channel = plane * p.channels + (block - tap * p.spans) * 64;
    const int shift = tap_h / p.stride_h * p.grid_w + tap_w / p.stride_w;
    Place place(p, work.first * POINTS);
    Ring<STAGES> ring;
    for (int step = work.first; step < work.last; ++step) {
        const u32 barrier = at.filled(ring.index);
        barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
        if (lane == 0) barrier_expect(barrier, STAGE_BYTES);
        __syncwarp();
        if (of_dy)
            load_pixels(at.rows(ring.index) + lane * ROW_BYTES, maps.dy, barrier, work.row + lane * 32, place.x, place.y,
                        place.image, 0, 0);
        else if (busy)
            load_box(at.columns(ring.index) + column * COLUMN_BYTES, maps.planes, barrier, step * POINTS + shift, channel);
        place.advance(p);
        ring.advance();
    }
}

using Fragments = u32[2][2][4];  // of two products along the points, of two along the rows

// 16 points of a stage from `point` on. box: of this warp's filters.
DEVICE void load_rows(Fragments& a, u32 box, int point) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 near[4], far[4];  // odd lanes read the further point first: else two lanes would meet in a bank
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = point + 8 * k + t + 4 * ((t + i) % 2);
            u32(&words)[4] = i ? far : near;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                         : "r"(box + row * 128 + ((g ^ row % 8) << 4))
                         : "memory");
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                a[k][m][e] = t % 2 ? far[2 * m + e] : near[2 * m + e];
                a[k][m][2 + e] = t % 2 ? near[2 * m + e] : far[2 * m + e];
            }
    }
}

using Sum = float[2][64];

DEVICE void multiply(Sum& sum, const Fragments& a, u64 columns, bool first) {
    product_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_tf32(sum[m], a[k][m], columns + operand_step(32) * k, !(first && k == 0));
    commit_products();
}

// A warpgroup: sums up its part of the tile. box, column: the first of its rows and columns.
DEVICE void accumulate(Sum& sum, const Layout& at, int steps, int box, int column) {
    const bool speaks = threadIdx.x % 32 == 0;
    Fragments first, second;
    Ring<STAGES> ring;
    u32 before = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(at.filled(ring.index), ring.parity);
        const u32 rows = at.rows(ring.index) + box * ROW_BYTES;
        const u64 columns = operand(at.columns(ring.index) + column * COLUMN_BYTES);
        load_rows(first, rows, 0);
        multiply(sum, first, columns, step == 0);
        await_products<1>();  // those of the step before are done with their stage
        if (speaks && step > 0) barrier_arrive(before);
        load_rows(second, rows, 16);
        multiply(sum, second, columns + operand_step(64), false);
        await_products<1>();  // those of this step's first half, whose fragments the next step's replace
        before = at.emptied(ring.index);
        ring.advance();
    }
    await_products<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) settle(sum[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_weight_tf32_kernel(const __grid_constant__ Maps maps, float* __restrict__ output,
                          const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(at.filled(i), 1), barrier_init(at.emptied(i), 4 * WARPGROUPS);
        barrier_init_done();
    }
    __syncthreads();

    const Work work(p);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same in a warp
    // The two roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (warp >= 4 * WARPGROUPS) {
        give_registers<40>();
        if (warp == 4 * WARPGROUPS) fill(at, maps, p, work);
    } else {
        take_registers<232>();
        const int m = warp / 4 % WARPGROUPS_M, n = warp / 4 / WARPGROUPS_M, lane = threadIdx.x % 32;
        Sum sum;
        accumulate(sum, at, work.last - work.first, m * 4 + warp % 4, n * 2);
        output += i64(work.part) * p.rows * p.columns;
        const int row = work.row + m * 128 + warp % 4 * 32 + lane / 4 * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const int block = work.block + n * 2 + j / 8, tap = block / p.spans;
                const int channel = (block - tap * p.spans) * 64 + j % 8 * 8 + lane % 4 * 2;
                if (block >= p.blocks || channel >= p.channels) continue;
                float* const to = output + i64(row + 2 * i) * p.columns + tap * p.channels + channel;
                if (row + 2 * i < p.rows) put(to, sum[i][4 * j], sum[i][4 * j + 1], p.accumulate);
                if (row + 2 * i + 1 < p.rows) put(to + p.columns, sum[i][4 * j + 2], sum[i][4 * j + 3], p.accumulate);
            }
    }
}
