// Convolution of few input channels (the first layer of a network), 16-bit storage types; sm_80 and newer.
//
//   y[n,p,q,k] = bias[k] + sum_{r,s,c} x[n, p*sh - ph + r, q*sw - pw + s, c] w[k,r,s,c]
//
// An implicit matrix product of rows (output pixels) x columns (output channels), as in conv2d.cu; but with so few
// channels a gather by taps would copy two to eight bytes at a time. Instead the image rows under a tile of output
// pixels lie in shared memory as they are (stem.cuh), each pixel's windows are read from there straight into the
// fragments of the matrix units, and the filter stays in registers (RESIDENT) over all tiles of a block.
//
//   x         ((n*height + h)*width + w)*CHANNELS + c, dense                 T
//   filter    (K, KERNEL_H, KERNEL_W, CHANNELS) dense                        T
//   packed    the filter in the order of fragments, see Packed               pairs of T
//   bias      (K,) float32 or null
//   output    (images, P, Q, K) dense                                        T
//
// The depth runs over the filter's rows, each padded to whole groups of eight. Fragments are made of aligned pairs of
// values. Where windows start one value off, the filter rows are moved by one instead (the lead): a zero comes first.
// Where STRIDE_W * CHANNELS is odd, every other window does; even and odd pixels then go to different fragments, and
// each warp has fragments of one kind only. What a pair holds beyond a window is cut off, for it may be infinite.
//
// Columns are dealt out to fragments such that a thread's sums are eight neighbouring channels, written at once. Where
// a block has 64, the threads of neighbouring pixels swap halves first, for stores of whole lines.
//
// Macros: those of stem.cuh; TILE_P, the rows of a tile of output pixels; TILE_N, the columns of a block, 32 or 64;
// LEAD: 1 when windows start at odd values; RESIDENT: 1 when the filter stays in registers, else it lies in shared
// memory and FRAGMENTS fragments of pixels share each of its loads; BLOCKS per multiprocessor that the registers must
// leave room for; VEC_Y, channels per store; RELU: 1 when what is stored is max(y, 0), where NaN stays NaN.
// Grid: images, strips of tiles (one below the other), segments of columns of the image, and column tiles, the last
// fastest. While a tile is multiplied the next one's rows arrive.
// Dynamic shared memory: 2 * ROWS * LENGTH * 2 bytes, and unless RESIDENT the packed filter of a block.
// FLOP: 2 * pixels * K * KERNEL_H * KERNEL_W * CHANNELS, and as much again for the padding as the groups say.
// Bytes: x * ROWS / (TILE_P * STRIDE_H), from the L2 cache mostly; y once.
// Reference: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014.
#include "stem.cuh"

struct Problem {
    int height, values;  // of x: rows, values of a row
    int out_height, out_width, columns;
    int padding_h;
    int first, shift;    // first value of the leftmost tile's rows, and where the first window starts from there
    int strips, strip_tiles, segments, tiles_n;
};

constexpr bool SPLIT = STEP % 2 == 1;
constexpr int KINDS = SPLIT ? 2 : 1;  // of fragments, by where their windows start
constexpr int GROUPS_W = (WINDOW + (SPLIT || LEAD) + GROUP - 1) / GROUP;
constexpr int GROUPS = KERNEL_H * GROUPS_W;
constexpr int STEPS = (GROUPS + 1) / 2;  // products of depth 16; the last may have depth 8
constexpr int COLUMNS = TILE_N / 8;      // fragments of columns
constexpr int LENGTH = row_length(GROUPS_W);
constexpr int ROWS = (TILE_P - 1) * STRIDE_H + KERNEL_H;
constexpr int ROW_PIXELS = 16 * KINDS;                 // between two fragments of a kind
constexpr int ROW_FRAGMENTS = TILE_Q / ROW_PIXELS;     // of a kind, in a row of a tile
constexpr int TILE_FRAGMENTS = TILE_P * ROW_FRAGMENTS;
constexpr int TEAM = WARPS / KINDS;                    // warps that share the fragments of a kind
static_assert(TILE_Q % ROW_PIXELS == 0, "a row of a tile is made of whole fragments");

// The filter as fragments of columns: for each column tile, kind and step of the depth, COLUMNS fragments b[2] of
// mma.cuh, two of them in a uint4 per lane.
struct Packed {
    static constexpr int STEP_VECTORS = COLUMNS / 2 * 32;
    static constexpr int KIND_VECTORS = STEPS * STEP_VECTORS;
    static constexpr int TILE_WORDS = KINDS * KIND_VECTORS * 4;

    // Channel of a tile that is column n of fragment j: thread t of a quad has columns 2t and 2t + 1 of each.
    static __device__ __forceinline__ int channel(int j, int n) { return j / 4 * 32 + n / 2 * 8 + j % 4 * 2 + n % 2; }
};

// One word of the packed filter per thread.
extern "C" __global__ void conv2d_stem_pack_kernel(const T* __restrict__ filter, u32* __restrict__ packed, int columns,
                                                   int words) {
    await_predecessor();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= words) return;
    const int half = index % 2, lane = index / 4 % 32;
    const int j = index / 128 % (COLUMNS / 2) * 2 + index / 2 % 2;
    const int step = index / (Packed::STEP_VECTORS * 4) % STEPS;
    const int kind = index / (Packed::KIND_VECTORS * 4) % KINDS;
    const int channel = index / Packed::TILE_WORDS * TILE_N + Packed::channel(j, lane / 4);
    const int group = 2 * step + half, row = group / GROUPS_W;
    const int lead = SPLIT ? kind : LEAD;
    u32 word = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int value = group % GROUPS_W * GROUP + lane % 4 * 2 + e - lead;
        if (channel < columns && row < KERNEL_H && value >= 0 && value < WINDOW)
            word |= u32(filter[(channel * KERNEL_H + row) * WINDOW + value].bits) << (16 * e);
    }
    packed[index] = word;
}

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

// What of this thread's pair in the first and last group of a window belongs to it.
struct Mask {
    u32 first, last;

    static __device__ __forceinline__ u32 of(int group, int lead) {
        const int value = group * GROUP + threadIdx.x % 4 * 2 - lead;
        const auto inside = [](int v) { return v >= 0 && v < WINDOW; };
        return (inside(value) ? 0xffffu : 0u) | (inside(value + 1) ? 0xffff0000u : 0u);
    }

    __device__ __forceinline__ explicit Mask(int lead) : first(of(0, lead)), last(of(GROUPS_W - 1, lead)) {}

    __device__ __forceinline__ u32 cut(u32 pair, int group) const {
        constexpr bool WHOLE = !SPLIT && !LEAD;
        if (group % GROUPS_W == GROUPS_W - 1 && !(WHOLE && WINDOW % GROUP == 0)) return pair & last;
        if (group % GROUPS_W == 0 && !WHOLE) return pair & first;
        return pair;
    }
};

// A fragment of 16 pixels times one step of the filter. `window`: this thread's pair in the first pixel's first group.
DEVICE void multiply(float (&sum)[COLUMNS][4], const unsigned char* window, const Mask& mask, const Step& filter,
                     int step) {
    constexpr int HALF = 8 * KINDS * STEP * 2;  // bytes from a pixel to the one eight rows of the fragment below
    u32 a[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int group = 2 * step + half;
        if (group >= GROUPS) continue;
        const unsigned char* pair = window + group / GROUPS_W * (LENGTH * 2) + group % GROUPS_W * (GROUP * 2);
        a[2 * half] = mask.cut(*reinterpret_cast<const u32*>(pair), group);
        a[2 * half + 1] = mask.cut(*reinterpret_cast<const u32*>(pair + HALF), group);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        if (2 * step + 1 < GROUPS)
            multiply_add<false>(sum[j], a, filter.b[j]);
        else
            multiply_add<true>(sum[j], a, filter.b[j]);
    }
}

DEVICE void store_vector(T* to, const u32 (&v)[4]) {
    // Left to itself, the compiler cuts some of these stores into words.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// One row of the output from this block's first channel.
struct OutputRow {
    T* to;
    int pixels, pitch, columns;  // columns: from the block's first to the last

    // Row `half` of this thread's sums, the pixel q: eight channels of each 32. `bias`: the block's channels', or null.
    __device__ __forceinline__ void write(const float (&sum)[COLUMNS][4], int half, int q, const float* bias) const {
        constexpr int PARTS = COLUMNS / 4;
        const int first = threadIdx.x % 4 * 8;
        u32 part[PARTS][4];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            float low = sum[j][2 * half], high = sum[j][2 * half + 1];
            if (bias) {
                const float* shift = bias + first + j / 4 * 32 + j % 4 * 2;
                low += shift[0], high += shift[1];
            }
            if constexpr (RELU) low = clamp_below(low, 0.0f), high = clamp_below(high, 0.0f);
            part[j / 4][j % 4] = Rounding<T>::round_pair(low, high);
        }
        if constexpr (VEC_Y == 8 && PARTS == 2) {
            // Neighbouring pixels' threads swap a part, so that a store of the warp is made of whole lines.
            const bool odd = threadIdx.x / 4 % 2;
            u32 even_pixel[4], odd_pixel[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 other = __shfl_xor_sync(0xffffffffu, odd ? part[0][i] : part[1][i], 4);
                even_pixel[i] = odd ? other : part[0][i];
                odd_pixel[i] = odd ? part[1][i] : other;
            }
            const int pixel = odd ? q - KINDS : q, channel = first + (odd ? 32 : 0);
            if (channel >= columns) return;
            if (pixel < pixels) store_vector(to + i64(pixel) * pitch + channel, even_pixel);
            if (pixel + KINDS < pixels) store_vector(to + i64(pixel + KINDS) * pitch + channel, odd_pixel);
        } else if (q < pixels) {
            T* pixel = to + i64(q) * pitch + first;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) write_part(pixel + i * 32, part[i], columns - first - i * 32);
        }
    }

    // Eight channels, of which the first `left` exist.
    static __device__ __forceinline__ void write_part(T* to, const u32 (&part)[4], int left) {
        if constexpr (VEC_Y == 8) {
            if (left > 0) store_vector(to, part);
        } else {
            Raw<T, 8> all;
#pragma unroll
            for (int i = 0; i < 4; ++i) all.pairs[i] = part[i];
#pragma unroll
            for (int e = 0; e < 8; e += VEC_Y) {
                Raw<T, VEC_Y> piece;
#pragma unroll
                for (int i = 0; i < VEC_Y; ++i) piece.items[i] = all.items[e + i];
                if (e < left) store_raw(to + e, piece);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv2d_stem_kernel(const T* __restrict__ x, const uint4* __restrict__ packed, const float* __restrict__ bias,
                   T* __restrict__ output, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ __align__(16) float shifts[TILE_N];
    constexpr int BUFFER = ROWS * LENGTH * 2;
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
    uint4* const filter = reinterpret_cast<uint4*>(shared + 2 * BUFFER);
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
    const int shift = p.shift + kind * STEP, lead = shift % 2;
    const Mask mask(lead);
    const int start = (shift - lead + lane / 4 * (KINDS * STEP) + lane % 4 * 2) * 2;  // bytes
    const int kind_vectors = (SPLIT ? lead : 0) * Packed::KIND_VECTORS + lane;

    Step held[RESIDENT ? STEPS : 1];
    if (RESIDENT) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) held[s].load(packed + kind_vectors + s * Packed::STEP_VECTORS);
    }

    for (int tile = 0; tile < tiles; ++tile) {
        await_copies<0>();
        __syncthreads();  // this tile is there for all, and the one before it is no longer read
        if (tile + 1 < tiles) copy(tile + 1);
        const unsigned char* window = shared + tile % 2 * BUFFER + start;
        const int tile_p = first_p + tile * TILE_P;
        for (int fragment = warp / KINDS; fragment < TILE_FRAGMENTS; fragment += TEAM * FRAGMENTS) {
            if (tile_p + fragment / ROW_FRAGMENTS >= p.out_height) break;
            const unsigned char* at[FRAGMENTS];
            float sum[FRAGMENTS][COLUMNS][4] = {};
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const int index = min(fragment + i * TEAM, TILE_FRAGMENTS - 1);
                at[i] = window + index / ROW_FRAGMENTS * (STRIDE_H * LENGTH * 2) +
                        index % ROW_FRAGMENTS * (ROW_PIXELS * STEP * 2);
            }
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                if (!RESIDENT) held[0].load(filter + kind_vectors + s * Packed::STEP_VECTORS);
#pragma unroll
                for (int i = 0; i < FRAGMENTS; ++i) multiply(sum[i], at[i], mask, held[RESIDENT ? s : 0], s);
            }
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
                for (int half = 0; half < 2; ++half)
                    to.write(sum[i], half, q + half * 8 * KINDS, bias ? shifts : nullptr);
            }
        }
    }
}
