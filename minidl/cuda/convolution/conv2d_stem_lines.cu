// Convolution of few input channels of a 16-bit type (the first layer of a network) on sm_90a.
//
//   y[n,p,q,k] = bias[k] + sum_{r,s,c} x[n, p*sh - ph + r, q*sw - pw + s, c] w[k,r,s,c]
//
// wgmma multiplies 64 filters, from registers, by the windows of WIDTH neighbouring pixels, which it reads from lines in
// shared memory (stem_lines.cuh) where each pixel of the image lies once. A block walks down a strip of the output, TILE_Q
// columns wide, row by row; the lines are a ring to which a step adds the NEW rows that it sees first, and a strip begins with
// WARMUP steps that do only that. While a row is multiplied, the rows of the next step are rewritten and those of later ones
// arrive. Its sums are turned over on the way through shared memory.
//
//   x         ((n*height + h)*width + w)*CHANNELS + c, dense                 T
//   filter    (K, KERNEL_H, KERNEL_W, CHANNELS) dense                        T
//   packed    the filter as each lane has it: (column tiles, STEPS, warps, lanes) uint4, words as of hopper.cuh
//   bias      (K,) float32 or null
//   output    (images, P, Q, K) dense                                        T
//   partial   with STATISTICS, of bfloat16: (images, segments, P / PART rounded up, 2, K) float32, sums and sums of squares
//             of what is stored in PART rows (conv2d_columns.cuh has why these are enough)
//
// The depth of a product is two groups of a window, eight values each. Where a window ends within its last group, that is read
// from a second ring, in which what the window does not see is zero: in the image it may be infinite. Where a window has an
// odd number of groups, zeros stand in for the last.
//
// Macros: those of stem.cuh; WIDTH, 64 or 128, at least TILE_Q; BLOCKS per multiprocessor that the registers must leave room
// for; STAGES of rows under way; VEC_Y, channels per store; RELU: 1 when what is stored is max(y, 0), where NaN stays NaN.
// Grid: images, strips, segments of columns of the image, and column tiles, the last fastest.
// Dynamic shared memory: WIDTH * 128 + STAGES * ROWS_BYTES + (1 or 2) * RING * ROW_BYTES + (0 or 16) * WIDTH bytes.
// FLOP: 2 * pixels * K * KERNEL_H * KERNEL_W * CHANNELS, and as much again for the padding as the groups say.
// Bytes: x * (1 + WARMUP / rows of a strip) per column tile, y once.
// Reference: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014.
#include "stem.cuh"
#define BACKWARD 0
#define MASKED 0
#include "conv2d_columns.cuh"

constexpr int NEW = STRIDE_H < KERNEL_H ? STRIDE_H : KERNEL_H;
constexpr int WARMUP = (KERNEL_H - 1) / NEW;
constexpr int RING = KERNEL_H + NEW;
constexpr int WINDOWS = WIDTH;
#define AGAIN (KERNEL_W % STRIDE_W != 0)
#define CUT 1
#include "stem_lines.cuh"

struct Problem {
    int height, values;  // of x: rows, values of a row
    int out_height, out_width, columns;
    int padding_h;
    int first, shift;    // first value of the leftmost segment's rows, and where the first window starts from there
    int strips, strip_rows, segments, tiles_n;
};

constexpr int PAIRS = (ACROSS + 1) / 2;      // of groups, of a filter's row
constexpr int STEPS = KERNEL_H * PAIRS;      // products of the depth
constexpr int TILE_N = 64;                   // filters of a block
constexpr int PART = 256 / WIDTH;            // rows whose squares float32 adds up without loss
constexpr int SLAB_BYTES = WIDTH * 128;      // a row of the output

// One lane's words of a step of the filter per thread.
extern "C" __global__ void conv2d_stem_lines_pack_kernel(const T* __restrict__ filter, uint4* __restrict__ packed, int columns,
                                                         int vectors) {
    await_predecessor();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= vectors) return;
    const int lane = index % 32, warp = index / 32 % WARPS, step = index / THREADS % STEPS, tile = index / THREADS / STEPS;
    u32 word[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int channel = tile * TILE_N + warp * 16 + i / 2 % 2 * 8 + lane / 4;
        const int value = lane % 4 * 2 + i % 2, group = step % PAIRS * 2 + i / 4;
        const int s = group * STRIDE_W + value / WIDE, c = value % WIDE;
        if (channel < columns && s < KERNEL_W && c < CHANNELS)
            word[i / 2] |= u32(filter[(channel * KERNEL_H + step / PAIRS) * WINDOW + s * CHANNELS + c].bits) << (i % 2 * 16);
    }
    packed[index] = make_uint4(word[0], word[1], word[2], word[3]);
}

// The operand of WIDTH windows for hopper.cuh: K-major and not swizzled, the second group of the depth `further` bytes behind
// the first, the next eight windows 128.
DEVICE u64 windows_at(u32 address, u32 further) {
    return u64((address & 0x3ffff) >> 4 | (further >> 4) << 16) | u64(128 >> 4) << 32;
}

// Of pair `k` of groups, in the line at `row` bytes: of the last group what a window sees, behind it zeros.
DEVICE u64 pair_at(u32 ring, int row, int k) {
    constexpr int ZEROS = (AGAIN ? 2 : 1) * RING_BYTES;
    const int first = row + 2 * k * 16 + (AGAIN && 2 * k == ACROSS - 1 ? RING_BYTES : 0);
    const int second = 2 * k + 1 == ACROSS ? ZEROS : row + (2 * k + 1) * 16 + (AGAIN && 2 * k + 2 == ACROSS ? RING_BYTES : 0);
    return windows_at(ring + first, second - first);
}

typedef Raw<T, 8> Chunk;  // channels of 16 bytes

DEVICE void read_chunk(Chunk& chunk, u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.pairs[0]), "=r"(chunk.pairs[1]), "=r"(chunk.pairs[2]), "=r"(chunk.pairs[3])
                 : "r"(from)
                 : "memory");
}

// Those channels of which the first `left` exist.
DEVICE void write_chunk(T* to, const Chunk& chunk, int left) {
#pragma unroll
    for (int e = 0; e < 8; e += VEC_Y) {
        Raw<T, VEC_Y> piece;
#pragma unroll
        for (int i = 0; i < VEC_Y; ++i) piece.items[i] = chunk.items[e + i];
        if (e < left) store_raw(to + e, piece);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv2d_stem_lines_kernel(const T* __restrict__ x, const uint4* __restrict__ packed, const float* __restrict__ bias,
                         T* __restrict__ output, float* __restrict__ partial, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(1024) unsigned char slab[];
    unsigned char* const rows = slab + SLAB_BYTES;
    unsigned char* const ring = rows + STAGES * ROWS_BYTES;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    u32 block = blockIdx.x;
    const u32 column_tile = block % p.tiles_n;
    const int first_column = column_tile * TILE_N;
    block /= p.tiles_n;
    const int segment = block % p.segments, first_q = segment * TILE_Q;
    block /= p.segments;
    const int first_p = block % p.strips * p.strip_rows;
    const i64 image = block / p.strips;
    const int steps = WARMUP + min(p.strip_rows, p.out_height - first_p);
    const int pixels = min(TILE_Q, p.out_width - first_q);

    const Image from{p.height, p.values};
    const auto copy = [&](int step) {
        if (step < steps)
            from.copy<NEW, LENGTH>(shared_address(rows) + step % STAGES * ROWS_BYTES, x + image * p.height * p.values,
                                   (first_p - WARMUP + step) * STRIDE_H - p.padding_h + KERNEL_H - NEW,
                                   first_q * STEP + p.first);
        commit_copies();
    };
    for (int step = 0; step < STAGES; ++step) copy(step);

    u32 filter[STEPS][4];
    packed += column_tile * STEPS * THREADS + threadIdx.x;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const uint4 v = packed[s * THREADS];
        filter[s][0] = v.x, filter[s][1] = v.y, filter[s][2] = v.z, filter[s][3] = v.w;
    }
    float shifts[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = first_column + warp * 16 + i * 8 + lane / 4;
        if (bias && column < p.columns) shifts[i] = bias[column];
    }
    if (ACROSS % 2 && threadIdx.x < WIDTH)
        reinterpret_cast<uint4*>(ring + (AGAIN ? 2 : 1) * RING_BYTES)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    await_copies<STAGES - 1>();
    __syncthreads();
    int slot = KERNEL_H - NEW, first = 0;  // of the ring: where the next new rows go; the row under the filter's first
    rewrite(ring, rows, slot, p.shift);

    // This thread's chunk of a pixel, and of every 16th behind it: where it lies and where it goes.
    const int pixel = threadIdx.x / 8, channel = first_column + threadIdx.x % 8 * 8, left = p.columns - channel;
    const u32 chunks = shared_address(slab) + pixel * 128 + (threadIdx.x % 8 ^ pixel % 8) * 16;
    T* to = output + ((image * p.out_height + first_p) * p.out_width + first_q + pixel) * p.columns + channel;

    Tally tally;
    tally.start();
    for (int step = 0; step < steps; ++step) {
        await_copies<STAGES - 2>();
        __syncthreads();  // the next step's rows are there for all, this one's are rewritten, the slab is no longer read
        slot = slot + NEW < RING ? slot + NEW : slot + NEW - RING;
        const auto prepare = [&] {
            copy(step + STAGES);
            if (step + 1 < steps) rewrite(ring, rows + (step + 1) % STAGES * ROWS_BYTES, slot, p.shift);
        };
        if (step < WARMUP) {
            prepare();
        } else {
            float sum[WIDTH / 2];
            product_fence();
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int row = first + s / PAIRS < RING ? first + s / PAIRS : first + s / PAIRS - RING;
                multiply<false>(sum, filter[s], pair_at(shared_address(ring), row * ROW_BYTES, s % PAIRS), s);
            }
            commit_products();
            prepare();
            await_products<0>();
            settle(sum);
            const u32 across = shared_address(slab) + columns_across();
#pragma unroll
            for (int k = 0; k < TILE_Q; k += 16) {
                if (first_column + int(warp) * 16 >= p.columns) break;
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* const at = sum + (k / 8 + i % 2) * 4 + i / 2 * 2;
                    float low = at[0] + shifts[i / 2], high = at[1] + shifts[i / 2];
                    if constexpr (RELU) low = clamp_below(low, 0.0f), high = clamp_below(high, 0.0f);
                    words[i] = Rounding<T>::round_pair(low, high);
                }
                store_matrices<true>(across + k * 128, words);
                if constexpr (STATISTICS) {
                    if (pixels < TILE_Q) keep_inside(words, [&](int i) { return k + i < pixels; });
                    tally.add(words);
                }
            }
            __syncthreads();
            constexpr int APART = THREADS / 8;  // pixels from one chunk of a thread to its next
            Chunk chunk[TILE_Q / APART];
#pragma unroll
            for (int i = 0; i < TILE_Q / APART; ++i) read_chunk(chunk[i], chunks + i * (APART * 128));
#pragma unroll
            for (int i = 0; i < TILE_Q / APART; ++i)
                if (i * APART + pixel < pixels) write_chunk(to + i * APART * p.columns, chunk[i], left);
            to += p.out_width * p.columns;
            const int row = first_p + step - WARMUP;
            if constexpr (STATISTICS) {
                if ((row + 1) % PART == 0 || step + 1 == steps) {
                    const i64 part = (image * p.segments + segment) * ((p.out_height + PART - 1) / PART) + row / PART;
                    ColumnShare().write(partial + part * SUMS * p.columns, tally.result(), first_column, p.columns);
                    tally.start();
                }
            }
        }
        first = first + NEW < RING ? first + NEW : first + NEW - RING;
    }
}
