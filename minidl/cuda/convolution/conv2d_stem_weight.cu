// Weight gradient of a convolution of few input channels, 16-bit storage types; sm_80 and newer.
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r, q*sw - pw + s, c]
//
// Rows of the product are output channels, columns the positions (r, s, c) of a filter, each filter row padded to whole
// groups of eight, and the sum runs over the output pixels. A block sums a chunk of strips in order and leaves a
// float32 partial; sum_partials_kernel (channel_sum.cu) adds the partials in order. What chunks and strips there are
// depends on the sizes alone.
//
//   dy        pixels * dy_pitch + k                                          T
//   x         ((n*height + h)*width + w)*CHANNELS + c, dense                 T
//   partials  (chunks, K, KERNEL_H, KERNEL_W, CHANNELS) dense                float32
//
// The matrix units take pixels in pairs: a word holds one position of two neighbouring pixels, which lie STEP values
// apart in a row of the image. So the image rows (stem.cuh) are first rewritten as words
// pairs[v] = (row[v], row[v + STEP]); from there any fragment of columns is read as it is, wherever a window starts.
// Sixteen pixels are taken in an order (see pixel_row) in which those reads meet no bank twice; the rows of dy are laid
// down in the same order.
//
// A block walks down strips of the output, TILE_Q columns wide, row by row. The pairs are a ring of image rows to which
// a step adds the NEW rows that it sees first; a strip begins with WARMUP steps that do only that. While a row of dy is
// multiplied, the pairs of the next step are made and the rows of later ones arrive.
//
// Macros: those of stem.cuh; TILE_M, the rows of a block, 32 or 64; COLUMNS, the fragments of eight columns of a warp;
// WARPS_N warps side by side along the columns, the others share the pixels; STAGES of rows under way;
// RAGGED: 1 when a strip may be narrower than TILE_Q: windows behind its end must not be multiplied even by zero, for
// they may be infinite; BLOCKS per multiprocessor that the registers must leave room for; VEC_DY: values per access.
// Grid: chunks, row tiles, column tiles, the last fastest.
// Dynamic shared memory: STAGES * (TILE_Q * TILE_M * 2 + ROWS_BYTES) + RING * LENGTH * 4 bytes, or if that is more
// what warps leave to each other at the end, WARPS_N * TILE_M * COLUMNS * 32 bytes.
// FLOP: 2 * pixels * K * KERNEL_H * KERNEL_W * CHANNELS, and as much again for the padding as the groups say.
// Bytes: dy once per column tile, x once per row and column tile and strip; 4 * chunks * |dw| twice.
// Reference: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014.
#include "stem.cuh"

struct Problem {
    i64 dy_pitch;
    int strips, chunk;   // in all, and in a chunk
    int height, values;  // of x: rows, values of a row
    int out_height, out_width, rows;
    int padding_h;
    int first, shift;    // first value of the leftmost strip's rows, and where the first window starts from there
    int strips_p, strip_rows, segments;  // strips of an image one below the other, their rows, and side by side
    int tiles_m, tiles_n;
};

constexpr int GROUPS_W = (WINDOW + GROUP - 1) / GROUP;
constexpr int GROUPS = KERNEL_H * GROUPS_W;  // fragments of columns in all
constexpr int LENGTH = row_length(GROUPS_W);
constexpr int FRAGMENTS = TILE_M / 16;
constexpr int WARPS_K = WARPS / WARPS_N;
constexpr int DEPTHS = TILE_Q / 16;  // products of 16 pixels in a row of a strip
constexpr int NEW = STRIDE_H < KERNEL_H ? STRIDE_H : KERNEL_H;
constexpr int WARMUP = (KERNEL_H - 1) / NEW;
constexpr int RING = KERNEL_H + NEW;
constexpr int ROW_BYTES = LENGTH * 4;  // of pairs
// New rows of a stage, and behind them what their last pairs reach, which is read and not used.
constexpr int ROWS_BYTES = NEW * LENGTH * 2 + ((STEP / 2 + 1) * 4 + 15) / 16 * 16;

// The four pairs of pixels that a quad reads start so many pixels apart.
constexpr int SPREAD = STEP == 6 ? 4 : 2;

// Where pixel i of sixteen stands in the depth: thread t of a quad has rows 2t, 2t + 1 and 2t + 8, 2t + 9.
DEVICE int pixel_row(int i) { return SPREAD == 2 ? i : (i / 2 % 2 * 8) + i / 4 * 2 + i % 2; }
constexpr int SECOND = SPREAD == 2 ? 8 : 2;  // pixels from a thread's first pair to its second

// The steps of a chunk, one after the other: WARMUP and strip_rows of each strip.
struct Cursor {
    const Problem& problem;
    int strip, image, p, q;  // the row of the output, and its first column
    int left;                // rows of the strip from here on

    __device__ __forceinline__ Cursor(const Problem& problem, int strip) : problem(problem), strip(strip) { enter(); }

    __device__ __forceinline__ void enter() {
        const int column = strip / problem.strips_p;
        p = (strip - column * problem.strips_p) * problem.strip_rows - WARMUP;
        image = column / problem.segments;
        q = (column - image * problem.segments) * TILE_Q;
        left = problem.strip_rows + WARMUP;
    }

    __device__ __forceinline__ void advance() {
        ++p;
        if (--left == 0) ++strip, enter();
    }

    // Pixels of this row that are to be summed.
    __device__ __forceinline__ int pixels() const {
        return left <= problem.strip_rows && p < problem.out_height ? min(TILE_Q, problem.out_width - q) : 0;
    }
};

// dy of one row: TILE_Q pixels of TILE_M channels, chunks of 16 bytes permuted as ldmatrix wants them.
struct Gradient {
    static constexpr int PITCH = TILE_M * 2;
    static constexpr int BYTES = TILE_Q * PITCH;

    static __device__ __forceinline__ int offset(int row, int channel) {
        const int twist = TILE_M == 64 ? row % 8 : row / 2 % 4;
        return row * PITCH + ((channel / 8 ^ twist) * 16) + channel % 8 * 2;
    }

    // `from`: the row's first pixel and this block's first channel.
    static __device__ __forceinline__ void copy(u32 to, const T* from, i64 pitch, int pixels, int channels) {
        constexpr int VECTORS = TILE_M / VEC_DY;
        constexpr int LANES = THREADS / VECTORS;  // pixels side by side
        const int channel = threadIdx.x % VECTORS * VEC_DY, first = threadIdx.x / VECTORS;
        if (channel >= channels) pixels = 0;
        from += first * pitch + channel;
#pragma unroll 8
        for (int i = first; i < TILE_Q; i += LANES, from += LANES * pitch)
            copy_vector<VEC_DY>(to + offset(i / 16 * 16 + pixel_row(i % 16), channel), from, i < pixels);
    }
};

// Rewrites NEW rows of LENGTH values as pairs, from row `slot` of the ring on. What lies behind a last window is never
// read.
DEVICE void make_pairs(unsigned char* pairs, const u32* rows, int slot) {
    constexpr int WORDS = LENGTH / 2;
#pragma unroll 4
    for (int i = threadIdx.x; i < NEW * WORDS; i += THREADS) {
        const int row = i / WORDS, place = slot + row < RING ? slot + row : slot + row - RING;
        uint2* const to = reinterpret_cast<uint2*>(pairs + place * ROW_BYTES) + i % WORDS;
        const u32 here = rows[i], there = rows[i + STEP / 2];
        if (STEP % 2 == 0) {
            *to = make_uint2(__byte_perm(here, there, 0x5410), __byte_perm(here, there, 0x7632));
        } else {
            const u32 further = rows[i + STEP / 2 + 1];
            *to = make_uint2(__byte_perm(here, there, 0x7610), __byte_perm(here, further, 0x5432));
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
    // `column`: of this warp's fragments, in bytes from there; `left`: pixels from this thread's first to the end.
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
    await_predecessor();
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ int counts[STAGES];
    unsigned char* const stages = shared;  // first, for their chunks are permuted by address
    unsigned char* const rows = stages + STAGES * Gradient::BYTES;
    unsigned char* const pairs = rows + STAGES * ROWS_BYTES;
    const int lane = threadIdx.x % 32, warp_n = threadIdx.x / 32 % WARPS_N, warp_k = threadIdx.x / 32 / WARPS_N;

    u32 block = blockIdx.x;
    const int first_fragment = (block % p.tiles_n * WARPS_N + warp_n) * COLUMNS;
    block /= p.tiles_n;
    const int first_row = block % p.tiles_m * TILE_M;
    const int chunk = block / p.tiles_m;
    const int first_strip = chunk * p.chunk;
    const int steps = min(p.chunk, p.strips - first_strip) * (p.strip_rows + WARMUP);

    // The rows of x travel one step ahead of dy: their pairs are made while the step before is multiplied.
    Cursor next(p, first_strip);
    const Image image{p.height, p.values};
    const auto copy_rows = [&](int stage) {
        image.copy<NEW, LENGTH>(shared_address(rows) + stage * ROWS_BYTES, x + i64(next.image) * p.height * p.values,
                                next.p * STRIDE_H - p.padding_h + KERNEL_H - NEW, next.q * STEP + p.first);
    };
    int copied = 0;
    const auto copy = [&] {
        const int stage = copied % STAGES;
        const int pixels = next.pixels();
        if (threadIdx.x == 0) counts[stage] = pixels;
        if (pixels) {
            const i64 pixel = (i64(next.image) * p.out_height + next.p) * p.out_width + next.q;
            Gradient::copy(shared_address(stages) + stage * Gradient::BYTES, dy + pixel * p.dy_pitch + first_row,
                           p.dy_pitch, pixels, p.rows - first_row);
        }
        if (++copied < steps) {
            next.advance();
            copy_rows(copied % STAGES);
        }
        commit_copies();
    };

    int column[COLUMNS];  // this warp's fragments in the ring, in bytes
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const int fragment = min(first_fragment + j, GROUPS - 1);  // what is there in excess is summed and not written
        column[j] = fragment / GROUPS_W * ROW_BYTES + fragment % GROUPS_W * (GROUP * 4);
    }
    const unsigned char* const windows = pairs + (p.shift + lane % 4 * (SPREAD * STEP) + lane / 4) * 4;
    const u32 gradients = shared_address(stages) + Gradient::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);

    copy_rows(0);
    commit_copies();
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy();
        else commit_copies();
    }
    await_copies<STAGES - 1>();
    __syncthreads();
    int slot = KERNEL_H - NEW;  // of the ring, where the next new rows go
    make_pairs(pairs, reinterpret_cast<const u32*>(rows), slot);

    Product product;
    int stage = 0, first_warp = 0;
    for (int step = 0; step < steps; ++step) {
        await_copies<STAGES - 2>();
        __syncthreads();  // this step's dy and the next one's rows are there for all, its pairs are made
        const int pixels = counts[stage];
        if (copied < steps) copy();
        else commit_copies();
        slot = slot + NEW < RING ? slot + NEW : slot + NEW - RING;
        const int next_stage = stage + 1 < STAGES ? stage + 1 : 0;
        if (step + 1 < steps) make_pairs(pairs, reinterpret_cast<const u32*>(rows + next_stage * ROWS_BYTES), slot);
        if (pixels) {
            // The warps take turns over all rows of a chunk.
            const int first = (warp_k + WARPS_K - first_warp) % WARPS_K;
            first_warp = (first_warp + DEPTHS) % WARPS_K;
            for (int i = first; i < DEPTHS; i += WARPS_K)
                product.add(gradients + stage * Gradient::BYTES + i * 16 * Gradient::PITCH,
                            windows + i * (16 * STEP * 4), column, pixels - i * 16 - lane % 4 * SPREAD);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            column[j] += NEW * ROW_BYTES;
            if (column[j] >= RING * ROW_BYTES) column[j] -= RING * ROW_BYTES;
        }
        stage = next_stage;
    }
    await_copies<0>();
    product.gather(reinterpret_cast<float4*>(shared), warp_n, warp_k);
    if (warp_k == 0)
        product.write(partials + (i64(chunk) * p.rows + first_row) * (KERNEL_H * WINDOW), p.rows - first_row,
                      first_fragment);
}
