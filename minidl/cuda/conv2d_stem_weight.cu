// Weight gradient of a convolution of few input channels, 16-bit storage types; sm_80 and newer.
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r, q*sw - pw + s, c]
//
// Rows of the product are output channels, columns the positions (r, s, c) of a filter, each filter row padded to whole
// groups of eight, and the sum runs over the output pixels. A block sums a chunk of tiles in order and leaves a float32
// partial; sum_partials_kernel (channel_sum.cu) adds the partials in order. What chunks and tiles there are depends on
// the sizes alone.
//
//   dy        pixels * dy_pitch + k                                          T
//   x         ((n*height + h)*width + w)*CHANNELS + c, dense                 T
//   partials  (chunks, K, KERNEL_H, KERNEL_W, CHANNELS) dense                float32
//
// The matrix units take pixels in pairs: a word holds one position of two neighbouring pixels, which lie STEP values
// apart in a row of the image. So of every tile the image rows (stem.cuh) are first rewritten as words
// pairs[v] = (row[v], row[v + STEP]); from there any fragment of columns is read as it is, wherever a window starts.
// Sixteen pixels are taken in an order (see pixel_row) in which those reads meet no bank twice; the rows of dy are laid
// down in the same order.
//
// Macros: those of stem.cuh; TILE_M, the rows of a block, 32 or 64; COLUMNS, the fragments of eight columns of a warp;
// WARPS_N warps side by side along the columns, the others share the pixels; STAGES of dy, one row of a tile each;
// RAGGED: 1 when a tile may have fewer pixels in a row than TILE_Q, whose windows must not be multiplied even by zero,
// for they may be infinite; BLOCKS per multiprocessor that the registers must leave room for; VEC_DY: values per access.
// Grid: chunks, row tiles, column tiles, the last fastest.
// Dynamic shared memory: ROWS * LENGTH * 6 + STAGES * TILE_Q * TILE_M * 2 bytes, or the sums of the warps that share
// columns: (4 / WARPS_N > 1) * WARPS_N * TILE_M * COLUMNS * 32 bytes.
// FLOP: 2 * pixels * K * KERNEL_H * KERNEL_W * CHANNELS, and as much again for the padding as the groups say.
// Bytes: dy once per column tile, x * ROWS / (TILE_P * STRIDE_H), from the L2 cache mostly; 4 * chunks * |dw| twice.
// Reference: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014.
#include "stem.cuh"

struct Problem {
    i64 dy_pitch;
    i64 tiles, chunk;    // in all, and in a chunk
    int height, values;  // of x: rows, values of a row
    int out_height, out_width, rows;
    int padding_h;
    int first, shift;    // first value of the leftmost tile's rows, and where the first window starts from there
    int tiles_p, segments;
    int tiles_m, tiles_n;
};

constexpr int GROUPS_W = (WINDOW + GROUP - 1) / GROUP;
constexpr int GROUPS = KERNEL_H * GROUPS_W;  // fragments of columns in all
constexpr int LENGTH = row_length(GROUPS_W);
constexpr int FRAGMENTS = TILE_M / 16;
constexpr int WARPS_K = WARPS / WARPS_N;
constexpr int DEPTHS = TILE_Q / 16;  // products of 16 pixels in a row of a tile

// The four pairs of pixels that a quad reads start so many pixels apart.
constexpr int SPREAD = STEP == 6 ? 4 : 2;

// Where pixel i of sixteen stands in the depth: thread t of a quad has rows 2t, 2t + 1 and 2t + 8, 2t + 9.
DEVICE int pixel_row(int i) { return SPREAD == 2 ? i : (i / 2 % 2 * 8) + i / 4 * 2 + i % 2; }
constexpr int SECOND = SPREAD == 2 ? 8 : 2;  // pixels from a thread's first pair to its second

// A tile of the output, one of a chunk.
struct Place {
    i64 image;
    int p, q;  // its first pixel

    __device__ __forceinline__ Place(const Problem& problem, i64 tile) {
        const i64 column = tile / problem.tiles_p;
        p = static_cast<int>(tile - column * problem.tiles_p) * TILE_P;
        image = column / problem.segments;
        q = static_cast<int>(column - image * problem.segments) * TILE_Q;
    }
};

// dy of one row of a tile: TILE_Q pixels of TILE_M channels, chunks of 16 bytes permuted as ldmatrix wants them.
struct Gradient {
    static constexpr int PITCH = TILE_M * 2;
    static constexpr int BYTES = TILE_Q * PITCH;

    static __device__ __forceinline__ int offset(int row, int channel) {
        const int twist = TILE_M == 64 ? row % 8 : row / 2 % 4;
        return row * PITCH + ((channel / 8 ^ twist) * 16) + channel % 8 * 2;
    }

    static __device__ __forceinline__ void copy(u32 to, const T* dy, const Problem& p, const Place& at, int row,
                                                int first_row) {
        constexpr int VECTORS = TILE_M / VEC_DY;
        const int channel = threadIdx.x % VECTORS * VEC_DY;
        const bool readable = first_row + channel < p.rows && at.p + row < p.out_height;
        const T* from = dy + ((at.image * p.out_height + at.p + row) * p.out_width + at.q) * p.dy_pitch + first_row;
#pragma unroll 4
        for (int i = threadIdx.x / VECTORS; i < TILE_Q; i += THREADS / VECTORS)
            copy_vector<VEC_DY>(to + offset(i / 16 * 16 + pixel_row(i % 16), channel), from + i * p.dy_pitch + channel,
                                readable && at.q + i < p.out_width);
    }
};

// Rewrites ROWS rows of LENGTH values as pairs. What lies behind the last window is never read.
DEVICE void make_pairs(uint2* pairs, const u32* rows) {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * LENGTH / 2; i += THREADS) {
        const u32 here = rows[i], there = rows[i + STEP / 2];
        if (STEP % 2 == 0) {
            pairs[i] = make_uint2(__byte_perm(here, there, 0x5410), __byte_perm(here, there, 0x7632));
        } else {
            const u32 further = rows[i + STEP / 2 + 1];
            pairs[i] = make_uint2(__byte_perm(here, there, 0x7610), __byte_perm(here, further, 0x5432));
        }
    }
}

struct Product {
    float sum[FRAGMENTS][COLUMNS][4];

    __device__ __forceinline__ Product() {
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;
    }

    // Sixteen pixels. `gradient`: of this thread's first row of dy; `windows`: this thread's pair of the first window;
    // `column`: of this warp's fragments, in bytes from there; `left`: pixels from this thread's first to the row's end.
    __device__ __forceinline__ void add(u32 gradient, const unsigned char* windows, const int (&column)[COLUMNS],
                                        int left) {
        u32 a[FRAGMENTS][4];
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i) load_matrices_transposed(a[i], gradient ^ (i * 32));
        u32 first = 0xffffffffu, second = 0xffffffffu;
        if (RAGGED) first = keep(left), second = keep(left - SECOND);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const unsigned char* pair = windows + column[j];
            const u32 b[2] = {*reinterpret_cast<const u32*>(pair) & first,
                              *reinterpret_cast<const u32*>(pair + SECOND * STEP * 4) & second};
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) multiply_add<false>(sum[i][j], a[i], b);
        }
    }

    // Of a pair, as many as there are left.
    static __device__ __forceinline__ u32 keep(int left) { return left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u; }

    // Adds the sums of the warps that share this one's columns, in order; they end up in the first of them.
    __device__ __forceinline__ void gather(float4* scratch, int warp_n, int warp_k) {
        const int lane = threadIdx.x % 32;
        for (int k = 1; k < WARPS_K; ++k) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    float4& there = scratch[((warp_n * FRAGMENTS + i) * COLUMNS + j) * 32 + lane];
                    if (warp_k == k) there = make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]);
                }
            __syncthreads();
            if (warp_k != 0) continue;
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const float4 other = scratch[((warp_n * FRAGMENTS + i) * COLUMNS + j) * 32 + lane];
                    sum[i][j][0] += other.x, sum[i][j][1] += other.y, sum[i][j][2] += other.z, sum[i][j][3] += other.w;
                }
        }
    }

    // `to`: the first of `rows` filters of a partial; `first`: this warp's first fragment of columns.
    __device__ __forceinline__ void write(float* to, int rows, int first) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int tap_row = (first + j) / GROUPS_W, group = (first + j) % GROUPS_W;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int value = group * GROUP + lane % 4 * 2 + e;
                if (first + j >= GROUPS || value >= WINDOW) continue;
#pragma unroll
                for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = 16 * i + 8 * half + lane / 4;
                        if (row < rows) to[(row * KERNEL_H + tap_row) * WINDOW + value] = sum[i][j][2 * half + e];
                    }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv2d_stem_weight_kernel(const T* __restrict__ dy, const T* __restrict__ x, float* __restrict__ partials,
                          const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* const stages = shared;  // first, for their chunks are permuted by address
    unsigned char* const rows = stages + STAGES * Gradient::BYTES;
    unsigned char* const pairs = rows + ROWS * LENGTH * 2;
    const int lane = threadIdx.x % 32, warp_n = threadIdx.x / 32 % WARPS_N, warp_k = threadIdx.x / 32 / WARPS_N;

    u32 block = blockIdx.x;
    const int first_fragment = (block % p.tiles_n * WARPS_N + warp_n) * COLUMNS;
    block /= p.tiles_n;
    const int first_row = block % p.tiles_m * TILE_M;
    const i64 chunk = block / p.tiles_m;
    const i64 first_tile = chunk * p.chunk;
    const int tiles = static_cast<int>(min(p.chunk, p.tiles - first_tile));

    const Image image{p.height, p.values};
    const auto copy_rows = [&](int tile) {
        const Place at(p, first_tile + tile);
        image.copy<LENGTH>(shared_address(rows), x + at.image * p.height * p.values, at.p * STRIDE_H - p.padding_h,
                           at.q * STEP + p.first);
    };
    const auto copy_gradient = [&](int step) {
        const Place at(p, first_tile + step / TILE_P);
        Gradient::copy(shared_address(stages) + step % STAGES * Gradient::BYTES, dy, p, at, step % TILE_P, first_row);
    };

    int column[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const int fragment = min(first_fragment + j, GROUPS - 1);  // what is there in excess is summed and not written
        column[j] = (fragment / GROUPS_W * LENGTH + fragment % GROUPS_W * GROUP) * 4;
    }
    const int window = (p.shift + lane % 4 * (SPREAD * STEP) + lane / 4) * 4;
    const int gradient = Gradient::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);

    const int steps = tiles * TILE_P;
    copy_rows(0);
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy_gradient(step);
        commit_copies();
    }
    Product product;
    for (int step = 0; step < steps; ++step) {
        const int row = step % TILE_P;
        await_copies<STAGES - 2>();
        __syncthreads();  // this row is there for all, and the one before it is no longer read
        if (row == 0) {
            make_pairs(reinterpret_cast<uint2*>(pairs), reinterpret_cast<const u32*>(rows));
            __syncthreads();
            if (step + TILE_P < steps) copy_rows(step / TILE_P + 1);
        }
        if (step + STAGES - 1 < steps) copy_gradient(step + STAGES - 1);
        commit_copies();
        const Place at(p, first_tile + step / TILE_P);
        if (at.p + row >= p.out_height) continue;  // nor may these be multiplied by zeros
        const u32 stage = shared_address(stages) + step % STAGES * Gradient::BYTES + gradient;
        const unsigned char* windows = pairs + row * (STRIDE_H * LENGTH * 4) + window;
        // The warps take turns over all rows of a chunk.
        for (int i = (warp_k + WARPS_K - step * DEPTHS % WARPS_K) % WARPS_K; i < DEPTHS; i += WARPS_K)
            product.add(stage + i * 16 * Gradient::PITCH, windows + i * (16 * STEP * 4), column,
                        p.out_width - at.q - i * 16 - lane % 4 * SPREAD);
    }
    await_copies<0>();
    product.gather(reinterpret_cast<float4*>(shared), warp_n, warp_k);
    if (warp_k == 0)
        product.write(partials + (chunk * p.rows + first_row) * (KERNEL_H * WINDOW), p.rows - first_row, first_fragment);
}
