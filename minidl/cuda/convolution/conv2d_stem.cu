// Convolution of few input channels (the first layer of a network), of 16-bit types and in TF32; sm_80 and newer.
//
//   y[n,p,q,k] = bias[k] + sum_{r,s,c} x[n, p*sh - ph + r, q*sw - pw + s, c] w[k,r,s,c]
//
// An implicit matrix product of rows (output pixels) x columns (output channels), as in conv2d.cu; but with so few
// channels a gather by taps would copy two to eight bytes at a time. Instead the image rows under a tile of output
// pixels lie in shared memory as they are (conv2d_stem.cuh), each pixel's windows are read from there straight into the
// fragments of the matrix units, and the filter stays in registers (RESIDENT) over all tiles of a block.
//
//   x         ((n*height + h)*width + w)*CHANNELS + c, dense                 T
//   filter    (K, KERNEL_H, KERNEL_W, CHANNELS) dense                        T
//   packed    the filter in the order of fragments, see Packed               words
//   bias      (K,) float32 or null
//   output    (images, P, Q, K) dense                                        T
//
// The depth runs over the filter's rows, each padded to whole groups of eight. Fragments are made of words, of 16-bit
// types aligned pairs of values. Where their windows start one value off, the filter rows are moved by one instead (the
// lead): a zero comes first. Where STRIDE_W * CHANNELS is odd, every other window does; even and odd pixels then go to
// different fragments, and each warp has fragments of one kind only (APART: with a filter of its own). What a word
// holds beyond a window is cut off, for it may be infinite.
//
// Columns are dealt out to fragments such that a thread's sums are 16 bytes of neighbouring channels, written at once.
// The threads of neighbouring pixels swap every other of these first, for stores of whole lines, or of half of one
// where a block has no more.
//
// On sm_90, of 16-bit types (WARPGROUP), the four warps multiply together: fragments of 64 pixels from registers,
// filled the same way (windows that start one value off are moved there), with a filter in shared memory. mma.sync has
// five eighths of its rate, and a filter in registers leaves room for two blocks a multiprocessor, whose loads,
// products and stores hardly overlap: 7x7 of three channels, 256x112x112x64 on an H200, take 213 us so, 191 together.
// (Bytes 116 us, products 80 at the full rate; what holds it back is not known. Products of a fragment while the sums
// of the one before are stored: ptxas then makes each wait for the last.) Rows of whole tiles: conv2d_stem_lines.cu.
//
// With STATISTICS, of bfloat16, each warp leaves sums and sums of squares of what it stores of a tile
// (conv2d_columns.cuh has why these are enough): partial (images, tiles below each other, segments, warps, 2, K) float.
// That takes 58 us more there, the merge included, where a pass of its own takes 104.
//
// Macros: those of conv2d_stem.cuh; TILE_P, the rows of a tile of output pixels; TILE_N, the columns of a block, 32 or
// 64; LEAD: 1 when windows start at odd values; RESIDENT: 1 when the filter stays in registers, else it lies in shared
// memory and FRAGMENTS fragments of pixels share each of its loads; BLOCKS per multiprocessor that the registers must
// leave room for; VEC_Y, channels per store; RELU: 1 when what is stored is max(y, 0), where NaN stays NaN.
// Grid: images, strips of tiles (one below the other), segments of columns of the image, and column tiles, the last
// fastest. While a tile is multiplied the next one's rows arrive.
// Dynamic shared memory: unless RESIDENT the packed filter of a block, TILE_N shifts, 2 * ROWS * LENGTH values, a word.
// FLOP: 2 * pixels * K * KERNEL_H * KERNEL_W * CHANNELS, and as much again for the padding as the groups say.
// Bytes: x * ROWS / (TILE_P * STRIDE_H), from the L2 cache mostly; y once.
// Reference: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014.
#include "conv2d_stem.cuh"
#if WARPGROUP
#include "hopper.cuh"
#include "wgmma.cuh"
#else
#define STATISTICS 0
#endif

struct Problem {
    int height, values;  // of x: rows, values of a row
    int out_height, out_width, columns;
    int padding_h;
    int first, shift;    // first value of the leftmost tile's rows, and where the first window starts from there
    int strips, strip_tiles, segments, tiles_n;
};

constexpr int WORD = 4 / sizeof(T);  // values of a word
constexpr bool SPLIT = WORD == 2 && STEP % 2 == 1;
constexpr bool APART = SPLIT && !WARPGROUP;
constexpr int KINDS = SPLIT ? 2 : 1;  // of fragments, by where their windows start
constexpr int GROUPS_W = (WINDOW + (APART || LEAD) + GROUP - 1) / GROUP;
constexpr int GROUPS = KERNEL_H * GROUPS_W;
constexpr int STEPS = (GROUPS + WORD - 1) / WORD;  // products of a group for each value of a word, the last maybe less
constexpr int COLUMNS = TILE_N / 8;      // fragments of columns
constexpr int LENGTH = row_length(GROUPS_W);
constexpr int ROWS = (TILE_P - 1) * STRIDE_H + KERNEL_H;
constexpr int ROW_PIXELS = 16 * KINDS;                 // between two fragments of a kind
constexpr int ROW_FRAGMENTS = TILE_Q / ROW_PIXELS;     // of a kind, in a row of a tile
constexpr int TILE_FRAGMENTS = TILE_P * ROW_FRAGMENTS;
constexpr int TEAM = WARPS / KINDS;                    // warps that share the fragments of a kind
constexpr int BELOW = 8 * KINDS * STEP * sizeof(T);    // bytes from a pixel to the one eight rows of the fragment below
static_assert(TILE_Q % ROW_PIXELS == 0, "a row of a tile is made of whole fragments");

#if WARPGROUP
// The filter as an operand of wgmma.cuh: for each column tile, blocks of eight groups of the depth, a row for each
// column.
constexpr int BLOCK_BYTES = TILE_N * 128;
struct Packed {
    static constexpr int TILE_WORDS = (GROUPS + 7) / 8 * BLOCK_BYTES / 4;
};
#else
// The filter as fragments of columns: for each column tile, kind and step of the depth, COLUMNS fragments b[2] of
// mma.cuh, two of them in a uint4 per lane.
struct Packed {
    static constexpr int STEP_VECTORS = COLUMNS / 2 * 32;
    static constexpr int KIND_VECTORS = STEPS * STEP_VECTORS;
    static constexpr int TILE_WORDS = KINDS * KIND_VECTORS * 4;
};
#endif

#if DTYPE
#include "conv2d_stem_half.cuh"
#else
#include "conv2d_stem_tf32.cuh"
#endif

// One word of the packed filter per thread.
extern "C" __global__ void conv2d_stem_pack_kernel(const T* __restrict__ filter, u32* __restrict__ packed, int columns,
                                                   int words) {
    await_predecessor();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= words) return;
#if WARPGROUP
    const int place = index % Packed::TILE_WORDS, column = place / 32 % TILE_N, lane = index % 4;
    const int group = place / (BLOCK_BYTES / 4) * 8 + (place / 4 % 8 ^ column % 8), step = group / 2, half = group % 2;
    const int kind = 0, channel = index / Packed::TILE_WORDS * TILE_N + channel_of(column / 8, column % 8);
#else
    const int half = index % 2, lane = index / 4 % 32;
    const int j = index / 128 % (COLUMNS / 2) * 2 + index / 2 % 2;
    const int step = index / (Packed::STEP_VECTORS * 4) % STEPS;
    const int kind = index / (Packed::KIND_VECTORS * 4) % KINDS;
    const int channel = index / Packed::TILE_WORDS * TILE_N + channel_of(j, lane / 4);
#endif
    const T* const of_channel = filter + channel * (KERNEL_H * WINDOW);
    packed[index] = channel < columns ? filter_word(of_channel, step, half, lane, APART ? kind : LEAD) : 0;
}

#if !WARPGROUP
// The filter's fragments of one step.
struct Step {
    u32 b[COLUMNS][2];

    __device__ __forceinline__ void load(const uint4* from) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 2) {
            const uint4 v = from[j * 16];
            b[j][0] = v.x, b[j][1] = v.y, b[j + 1][0] = v.z, b[j + 1][1] = v.w;
        }
    }
};
#endif

#include "store_whole.cuh"

constexpr int PART = 4 * WORD;  // values of 16 bytes

// `bias`: the block's channels', or null.
DEVICE void add_bias(const float* bias, int j, float& low, float& high) {
    if (!bias) return;
    const float* shift = bias + channel_of(j, threadIdx.x % 4 * 2);
    low += shift[0], high += shift[1];
}

// One row of the output from this block's first channel.
struct OutputRow {
    T* to;
    int pixels, pitch, columns;  // columns: from the block's first to the last

    // Row `half` of this thread's sums, the pixel q: PART channels of each 4 * PART.
    __device__ __forceinline__ void write(const float (&sum)[COLUMNS][4], int half, int q, const float* bias) const {
        constexpr int PARTS = TILE_N / (4 * PART), TOGETHER = PARTS % 2 ? 1 : 2;
        const int first = threadIdx.x % 4 * PART;
#pragma unroll
        for (int k = 0; k < PARTS; k += TOGETHER) {
            u32 part[TOGETHER][4];
#pragma unroll
            for (int i = 0; i < TOGETHER * PART / 2; ++i) {
                const int j = k * PART / 2 + i;
                float low = sum[j][2 * half], high = sum[j][2 * half + 1];
                add_bias(bias, j, low, high);
                if constexpr (RELU) low = clamp_below(low, 0.0f), high = clamp_below(high, 0.0f);
                put_pair(part[2 * i / PART], j, low, high);
            }
            if constexpr (VEC_Y == PART && TOGETHER == 2) {
                // Neighbouring pixels' threads swap a part, so that a store of the warp is made of whole lines.
                const bool odd = threadIdx.x / 4 % 2;
                u32 even_pixel[4], odd_pixel[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 other = __shfl_xor_sync(0xffffffffu, odd ? part[0][i] : part[1][i], 4);
                    even_pixel[i] = odd ? other : part[0][i];
                    odd_pixel[i] = odd ? part[1][i] : other;
                }
                const int pixel = odd ? q - KINDS : q, channel = first + (k + odd) * 4 * PART;
                if (channel >= columns) continue;
                if (pixel < pixels) store_whole(to + i64(pixel) * pitch + channel, even_pixel);
                if (pixel + KINDS < pixels) store_whole(to + i64(pixel + KINDS) * pitch + channel, odd_pixel);
            } else if (q < pixels) {
                T* pixel = to + i64(q) * pitch + first;
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
                    write_part(pixel + (k + i) * 4 * PART, part[i], columns - first - (k + i) * 4 * PART);
            }
        }
    }

    // The channels of a part, of which the first `left` exist.
    static __device__ __forceinline__ void write_part(T* to, const u32 (&part)[4], int left) {
        if constexpr (VEC_Y == PART) {
            if (left > 0) store_whole(to, part);
        } else {
            Raw<T, PART> all;
#pragma unroll
            for (int i = 0; i < 4; ++i) all.pairs[i] = part[i];
#pragma unroll
            for (int e = 0; e < PART; e += VEC_Y) {
                Raw<T, VEC_Y> piece;
#pragma unroll
                for (int i = 0; i < VEC_Y; ++i) piece.items[i] = all.items[e + i];
                if (e < left) store_raw(to + e, piece);
            }
        }
    }
};

#if WARPGROUP
// Sums of a fragment of each warp, at `window`, over the whole depth; as many steps at once as registers hold.
DEVICE void multiply_together(float (&sum)[COLUMNS][4], const unsigned char* window, const Mask& mask, u32 lead,
                              u64 filter) {
    constexpr int AT_ONCE = STEPS <= 12 ? STEPS : 8;
    float (&d)[COLUMNS * 4] = reinterpret_cast<float (&)[COLUMNS * 4]>(sum);
#pragma unroll
    for (int begin = 0; begin < STEPS; begin += AT_ONCE) {
        u32 a[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (begin + i < STEPS) gather(a[i], window, mask, begin + i, lead);
        product_fence();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int s = begin + i;
            if (s < STEPS) multiply(d, a[i], filter + operand_step(s / 4 * BLOCK_BYTES + s % 4 * 32), s);
        }
        commit_products();
        await_products<0>();
    }
    settle(d);
}
#endif

// A thread's sums and sums of squares of what a warp stores of a tile; up to 256 values of a channel, which float32
// adds up without loss.
struct Tally {
    static constexpr int HALF = COLUMNS * 2;  // channels of a thread
    float v[2 * HALF] = {};

    // A pixel's row of sums, as `OutputRow::write` rounds them.
    __device__ __forceinline__ void take(const float (&sum)[COLUMNS][4], int half, const float* bias) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            u32 word[4];
            float low = sum[j][2 * half], high = sum[j][2 * half + 1];
            add_bias(bias, j, low, high);
            put_pair(word, j, low, high);
            const float first = __uint_as_float(word[j % 4] << 16), second = __uint_as_float(word[j % 4] & 0xffff0000u);
            v[2 * j] += first, v[2 * j + 1] += second;
            v[HALF + 2 * j] = fmaf(first, first, v[HALF + 2 * j]);
            v[HALF + 2 * j + 1] = fmaf(second, second, v[HALF + 2 * j + 1]);
        }
    }

    // Adds up over the lanes of the same channels, each of which keeps a half of what is left; to (2, K). Begins anew.
    __device__ __forceinline__ void leave(float* to, int first_column, int columns) {
        const u32 lane = threadIdx.x % 32;
        int left = HALF;
#pragma unroll
        for (int offset = 16; offset >= 4; offset /= 2, left /= 2) {
            const bool upper = lane & offset;
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                if (i >= left) break;
                const float kept = upper ? v[left + i] : v[i], given = upper ? v[i] : v[left + i];
                v[i] = kept + __shfl_xor_sync(0xffffffffu, given, offset);
            }
        }
        constexpr int OWN = HALF / 4;  // channels that are left, neighbours
        const int j = lane / 4 % 4 * (OWN / 2), channel = first_column + channel_of(j, lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (channel + i < columns) to[lane / 16 * columns + channel + i] = v[i];
#pragma unroll
        for (float& value : v) value = 0.0f;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv2d_stem_kernel(const T* __restrict__ x, const uint4* __restrict__ packed, const float* __restrict__ bias,
                   T* __restrict__ output, float* __restrict__ partial, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(1024) unsigned char base[];
    constexpr int BUFFER = ROWS * LENGTH * sizeof(T), FILTER = RESIDENT ? 0 : Packed::TILE_WORDS * 4;
    float* const shifts = reinterpret_cast<float*>(base + FILTER);
    unsigned char* const shared = base + FILTER + TILE_N * 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    u32 block = blockIdx.x;
    const int first_column = block % p.tiles_n * TILE_N;
    const u32 column_tile = block % p.tiles_n;
    block /= p.tiles_n;
    const int first_q = block % p.segments * TILE_Q;
    block /= p.segments;
    const int first_p = block % p.strips * p.strip_tiles * TILE_P;
    const i64 image = block / p.strips;
    const int tiles = min(p.strip_tiles, (p.out_height - first_p + TILE_P - 1) / TILE_P);

    const Image rows{p.height, p.values};
    const T* from = x + image * p.height * p.values;
    const auto copy = [&](int tile) {
        rows.copy<ROWS, LENGTH>(shared_address(shared) + tile % 2 * BUFFER, from,
                          (first_p + tile * TILE_P) * STRIDE_H - p.padding_h, first_q * STEP + p.first);
        commit_copies();
    };

    packed += column_tile * (Packed::TILE_WORDS / 4);
    uint4* const filter = reinterpret_cast<uint4*>(base);
    if (!RESIDENT) {
        for (int i = threadIdx.x; i < Packed::TILE_WORDS / 4; i += THREADS)
            copy_async<16>(shared_address(filter + i), packed + i, true);
    }
    copy(0);
    if (threadIdx.x < TILE_N && bias) {
        const int column = first_column + threadIdx.x;
        shifts[threadIdx.x] = column < p.columns ? bias[column] : 0.0f;
    }

    const int kind = SPLIT ? warp % 2 : 0;
    const int shift = p.shift + kind * STEP, lead = shift % WORD;
    const Mask mask(WARPGROUP ? LEAD : lead);
    const int start = (shift - lead + lane / 4 * (KINDS * STEP) + lane % 4 * WORD) * int(sizeof(T));  // bytes
#if !WARPGROUP
    const int kind_vectors = (SPLIT ? lead : 0) * Packed::KIND_VECTORS + lane;

    Step held[RESIDENT ? STEPS : 1];
    if (RESIDENT) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) held[s].load(packed + kind_vectors + s * Packed::STEP_VECTORS);
    }
#endif

    Tally tally;
    for (int tile = 0; tile < tiles; ++tile) {
        await_copies<0>();
#if WARPGROUP
        if (tile == 0) fence_for_engine();  // the filter
#endif
        __syncthreads();  // this tile is there for all, and the one before it is no longer read
        if (tile + 1 < tiles) copy(tile + 1);
        const unsigned char* window = shared + tile % 2 * BUFFER + start;
        const int tile_p = first_p + tile * TILE_P;
        for (int first = 0; first < TILE_FRAGMENTS; first += TEAM * FRAGMENTS) {
            const int fragment = first + warp / KINDS;
            // All warps multiply, or none: those of fragments that do not exist take the last.
            const int known = WARPGROUP ? first : fragment;
            if (known >= TILE_FRAGMENTS || tile_p + known / ROW_FRAGMENTS >= p.out_height) break;
            const unsigned char* at[FRAGMENTS];
            float sum[FRAGMENTS][COLUMNS][4] = {};
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const int index = min(fragment + i * TEAM, TILE_FRAGMENTS - 1);
                at[i] = window + (index / ROW_FRAGMENTS * (STRIDE_H * LENGTH) +
                                  index % ROW_FRAGMENTS * (ROW_PIXELS * STEP)) * int(sizeof(T));
            }
#if WARPGROUP
            multiply_together(sum[0], at[0], mask, lead, operand(shared_address(base)));
#else
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                if (!RESIDENT) held[0].load(filter + kind_vectors + s * Packed::STEP_VECTORS);
#pragma unroll
                for (int i = 0; i < FRAGMENTS; ++i) multiply(sum[i], at[i], mask, held[RESIDENT ? s : 0].b, s);
            }
#endif
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const int index = fragment + i * TEAM;
                const int row = tile_p + index / ROW_FRAGMENTS;
                if (index >= TILE_FRAGMENTS || row >= p.out_height) break;
                const OutputRow to{
                    output + (image * p.out_height + row) * p.out_width * p.columns + first_column, p.out_width,
                    p.columns, p.columns - first_column};
                const int q = first_q + index % ROW_FRAGMENTS * ROW_PIXELS + lane / 4 * KINDS + kind;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int pixel = q + half * 8 * KINDS;
                    to.write(sum[i], half, pixel, bias ? shifts : nullptr);
                    if (STATISTICS && pixel < p.out_width) tally.take(sum[i], half, bias ? shifts : nullptr);
                }
            }
        }
        if constexpr (STATISTICS) {
            const i64 row = image * ceil_div(p.out_height, TILE_P) + tile_p / TILE_P;
            const i64 part = (row * p.segments + first_q / TILE_Q) * WARPS + warp;
            tally.leave(partial + part * 2 * p.columns, first_column, p.columns);
        }
    }
}
