// Convolution of few input channels by lines: what conv2d_stem.cu does, where wgmma reads windows from shared memory.
// 16-bit storage types, sm_90a.
//
//   y[n,p,q,k] = bias[k] + sum_{r,s,c} x[n, p*sh - ph + r, q*sw - pw + s, c] w[k,r,s,c]
//
//   x         ((n*height + h)*width + w)*CHANNELS + c, dense                 T
//   w         (K, KERNEL_H, KERNEL_W, CHANNELS) dense                        T
//   bias      (K,) float32 or null
//   output    (images, P, Q, K) dense, Q whole tiles                         T
//   partial   sums and sums of squares of what is stored, (parts, 2, K), or null    float32
//
// Rows of the product are filters, which stay in registers, columns the pixels of a row of a tile, whose windows are read
// from lines (conv2d_stem_lines.cuh). The depth of a product is two groups of a window. Where the window ends within a
// group, its last group comes from a second line, of such groups with zeros behind the window, and where there is no
// second group, zeros are read: an image may have an infinite value there, which zero times would not be zero.
//
// A block walks down a strip of the output, TILE_Q columns wide, row by row. Two warpgroups bring rows of the image and
// rewrite them; two multiply and store, in turns, each while the other's products run. Statistics cost little: a thread
// has all its sums of two filters. A part is of at most 256 values of a channel, which float32 adds up without loss
// (conv2d_columns.cuh has why these are enough).
//
// 7x7 of three channels, 256x112x112x64, on an H200: 166 us, with statistics 175, where conv2d_stem.cu takes 190 and 235 and
// cuDNN 1773 (32 images: 25.6, 26.2; 33, 40; 223). Products alone take 97, y and x 116. With one warpgroup that rewrites
// it took 204: those that multiply waited for lines.
//
// Macros: those of conv2d_stem.cuh; RELU: 1 when what is stored is max(y, 0), where NaN stays NaN; STATISTICS.
// Grid: images, strips, segments of columns, tiles of 64 filters, the last fastest.
// Dynamic shared memory: see Layout.
// FLOP: 2 * pixels * K * KERNEL_H * 16 * PRODUCTS. Bytes: x * (strip_rows + WARMUP) / strip_rows once per tile of
// filters, from the L2 cache mostly; y once.
#include "conv2d_stem.cuh"
#include "conv2d_stem_lines.cuh"

struct Maps {
    TensorMap y;
};

struct Problem {
    int height, values;  // of x: rows, values of a row
    int out_height, out_width, columns;
    int padding_h;
    int first, shift;    // first value of the leftmost tile's rows, and where the first window starts from there
    int strips, strip_rows, segments, tiles_n;
};

constexpr int GROUPS = 2, MAKERS = 2 * THREADS;  // warpgroups that multiply; threads that rewrite
constexpr int ALL_THREADS = MAKERS + GROUPS * THREADS;
using Registers = RegisterShares<MAKERS, 56, GROUPS * THREADS, 200>;
constexpr int TILE_N = 64;
constexpr int PRODUCTS = (ACROSS + 1) / 2;                  // of a row of the filter
constexpr int REST = KERNEL_W - (ACROSS - 1) * STRIDE_W;    // pixels of a window's last group
constexpr int TAILS = REST < STRIDE_W, ZEROS = ACROSS % 2;  // lines of last groups; a line of zeros
constexpr int UNDER_WAY = 4;                                // rows of pixels whose lines are there
constexpr int RING = KERNEL_H + (UNDER_WAY - 1) * NEW;      // lines
constexpr int LINE_BYTES = LINE * 16;
constexpr int AHEAD = 3;                                    // rows of the image under way
constexpr int OUTPUT_BYTES = TILE_Q * TILE_N * 2, OUTPUTS = 2;  // of a warpgroup
constexpr int ROWS_OF_PART = 256 / TILE_Q;
static_assert(TILE_Q % 16 == 0 && ROWS_OF_PART > 0);

struct Layout {
    unsigned char* base;

    __device__ __forceinline__ unsigned char* output(int group, int i) const {
        return base + (group * OUTPUTS + i) * OUTPUT_BYTES;
    }
    __device__ __forceinline__ unsigned char* lines() const { return output(GROUPS, 0); }
    __device__ __forceinline__ unsigned char* tails() const { return lines() + RING * LINE_BYTES; }
    __device__ __forceinline__ unsigned char* zeros() const { return tails() + TAILS * RING * LINE_BYTES; }
    __device__ __forceinline__ unsigned char* rows() const { return zeros() + ZEROS * TILE_Q * 16; }
    __device__ __forceinline__ u32 barrier(int i) const { return shared_address(rows() + AHEAD * ROWS_BYTES) + i * 8; }
    // Of a row of pixels: its lines are there; its products are done.
    __device__ __forceinline__ u32 there(int row) const { return barrier(row % UNDER_WAY); }
    __device__ __forceinline__ u32 done(int row) const { return barrier(UNDER_WAY + row % UNDER_WAY); }
};

// Of how many rounds of the barriers of a row there is the last, as a parity.
DEVICE u32 round_of(int row) { return row / UNDER_WAY % 2; }

// What a block computes.
struct Place {
    int first_filter, first_p, first_q, rows;
    i64 image;
    int strip;  // among all

    __device__ __forceinline__ explicit Place(const Problem& p) {
        u32 block = blockIdx.x;
        first_filter = block % p.tiles_n * TILE_N;
        block /= p.tiles_n;
        strip = block;
        first_q = block % p.segments * TILE_Q;
        block /= p.segments;
        first_p = block % p.strips * p.strip_rows;
        image = block / p.strips;
        rows = min(p.strip_rows, p.out_height - first_p);
    }
};

// The threads that bring rows of the image and rewrite them as lines, each the same groups of every row.
DEVICE void make_lines(const Layout& at, const T* x, const Problem& p, const Place& place) {
    constexpr int EACH = (NEW * LINE + MAKERS - 1) / MAKERS;
    const int thread = threadIdx.x, steps = WARMUP + place.rows;
    const Image image{p.height, p.values};
    const T* const from = x + place.image * p.height * p.values;
    const int first_row = (place.first_p - WARMUP) * STRIDE_H - p.padding_h + KERNEL_H - NEW;
    const auto copy = [&](int step, int slot) {
        if (step < steps)
            image.copy<NEW, LENGTH, MAKERS>(shared_address(at.rows()) + slot * ROWS_BYTES, from,
                                            first_row + step * STRIDE_H, place.first_q * STEP + p.first, thread);
        commit_copies();
    };
    for (int i = 0; i < AHEAD - 1; ++i) copy(i, i);
    if constexpr (ZEROS) {
        if (thread < TILE_Q) reinterpret_cast<uint4*>(at.zeros())[thread] = make_uint4(0, 0, 0, 0);
    }
    int slot = KERNEL_H - NEW, come = 0;  // of the ring, where the next new rows go; of the rows under way
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        await_copies<AHEAD - 2>();
        warpgroups_sync<MAKERS>(1);  // the rows are there for all, and those before are rewritten
        copy(step + AHEAD - 1, come == 0 ? AHEAD - 1 : come - 1);
        const int row = step - WARMUP;
        if (row >= UNDER_WAY) barrier_wait(at.done(row), round_of(row) ^ 1);  // their place is free
        const u16* const rows = reinterpret_cast<const u16*>(at.rows() + come * ROWS_BYTES) + p.shift;
#pragma unroll
        for (int u = 0; u < EACH; ++u) {
            const int i = thread + u * MAKERS;
            if (i >= NEW * LINE) break;
            const int down = i / LINE, group = i % LINE, place = slot + down < RING ? slot + down : slot + down - RING;
            const u16* const values = rows + down * LENGTH + group * STEP;
            const int to = place * LINE_BYTES + group * 16;
            *reinterpret_cast<uint4*>(at.lines() + to) = line_group(values);
            if constexpr (TAILS) *reinterpret_cast<uint4*>(at.tails() + to) = line_group<REST>(values);
        }
        slot = slot + NEW < RING ? slot + NEW : slot + NEW - RING;
        come = come + 1 < AHEAD ? come + 1 : 0;
        fence_for_engine();
        __syncwarp();
        if (row >= 0 && thread % 32 == 0) barrier_arrive(at.there(row));
    }
    await_copies<0>();
}

// Sums and sums of squares, of what is stored, of two filters.
struct Tally {
    float v[2][2] = {};

    __device__ __forceinline__ void take(u32 pair, int i) {
        const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
        v[0][i] += low, v[0][i] += high;
        v[1][i] = fmaf(low, low, v[1][i]), v[1][i] = fmaf(high, high, v[1][i]);
    }

    // To (2, K); `filter`: the first of the two, which are eight apart. Begins anew.
    __device__ __forceinline__ void leave(float* to, int filter, int columns) {
        const int lane = threadIdx.x % 4;
        float own = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float& sum = v[k / 2][k % 2];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane == k) own = sum;
            sum = 0.0f;
        }
        filter += lane % 2 * 8;
        if (filter < columns) to[lane / 2 * columns + filter] = own;
    }
};

// A warpgroup that multiplies every other row.
struct Multiplier {
    const Layout& at;
    const int group, filter, columns;  // this thread's first filter, the other is eight further; all filters
    const u32 lines, zeros;            // addresses / 16
    u32 words[KERNEL_H][PRODUCTS][4];
    float shift[2];

    __device__ __forceinline__ Multiplier(const Layout& at, const Problem& p, const Place& place, const T* w,
                                          const float* bias)
        : at(at), group(__shfl_sync(0xffffffffu, (threadIdx.x - MAKERS) / THREADS, 0)),  // the same in a warp
          filter(place.first_filter + threadIdx.x % THREADS / 32 * 16 + threadIdx.x % 32 / 4), columns(p.columns),
          lines(shared_address(at.lines()) >> 4), zeros(shared_address(at.zeros()) >> 4) {
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r)
#pragma unroll
            for (int s = 0; s < PRODUCTS; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int own = filter + i % 2 * 8, value = s * 16 + i / 2 * 8 + threadIdx.x % 4 * 2;
                    u32 word = 0;
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int pixel = (value + e) / WIDE, channel = (value + e) % WIDE;
                        if (own < columns && pixel < KERNEL_W && channel < CHANNELS)
                            word |= u32(w[(i64(own) * KERNEL_H + r) * WINDOW + pixel * CHANNELS + channel].bits) << 16 * e;
                    }
                    words[r][s][i] = word;
                }
#pragma unroll
        for (int i = 0; i < 2; ++i) shift[i] = bias && filter + i * 8 < columns ? bias[filter + i * 8] : 0.0f;
    }

    // Two groups of all windows over a line, for wgmma.cuh: K-major and not swizzled. In units of 16 bytes.
    __device__ __forceinline__ u64 windows(int line, int s) const {
        constexpr int TO_TAILS = TAILS * RING * LINE;
        const u32 low = lines + line * LINE + 2 * s + (2 * s + 1 < ACROSS ? 0 : TO_TAILS);
        const u32 apart = 2 * s + 1 < ACROSS ? 1 + (2 * s + 2 == ACROSS ? TO_TAILS : 0) : zeros - low;
        return u64(low | apart << 16) | u64(128 >> 4) << 32;
    }

    __device__ __forceinline__ void multiply_row(float (&sum)[TILE_Q / 2], int row) const {
        barrier_wait(at.there(row), round_of(row));
        const int start = (row + WARMUP) * NEW % RING;  // line under the filter's first row
        product_fence();
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
            const int line = start + r < RING ? start + r : start + r - RING;
#pragma unroll
            for (int s = 0; s < PRODUCTS; ++s) multiply(sum, words[r][s], windows(line, s), r + s > 0);
        }
        commit_products();
        await_products<0>();
        settle(sum);
        if (threadIdx.x % 32 == 0) barrier_arrive(at.done(row));
    }

    // Rounds and stores a row, 128 bytes for each pixel, swizzled.
    __device__ __forceinline__ void put(const float (&sum)[TILE_Q / 2], u32 to, Tally& tally) const {
        const int lane = threadIdx.x % 32, chunk = threadIdx.x % THREADS / 32 * 2 + lane / 8 % 2;
        const u32 place = to + (lane / 16 * 8 + lane % 8) * 128 + (chunk ^ lane % 8) * 16;
#pragma unroll
        for (int j = 0; j < TILE_Q / 8; j += 2) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const two = sum + 4 * (j + i / 2) + 2 * (i % 2);
                float low = two[0] + shift[i % 2], high = two[1] + shift[i % 2];
                if constexpr (RELU) low = clamp_below(low, 0.0f), high = clamp_below(high, 0.0f);
                pairs[i] = Rounding<T>::round_pair(low, high);
                if constexpr (STATISTICS) tally.take(pairs[i], i % 2);
            }
            store_matrices<true>(place + j * 1024, pairs);
        }
    }
};

DEVICE void multiply_rows(const Layout& at, const Maps& maps, const T* w, const float* bias, float* partial,
                          const Problem& p, const Place& place) {
    const Multiplier multiplier(at, p, place, w, bias);
    const int group = multiplier.group, parts = ceil_div(ceil_div(p.strip_rows, GROUPS), ROWS_OF_PART);
    const bool stores = threadIdx.x % THREADS == 0;
    Tally tally;
    int row = group, output = 0;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
#pragma unroll 1
        for (int i = 0; i < ROWS_OF_PART && row < place.rows; ++i, row += GROUPS, output = (output + 1) % OUTPUTS) {
            float sum[TILE_Q / 2];
            multiplier.multiply_row(sum, row);
            if (stores) await_stores_read<OUTPUTS - 1>();
            warpgroup_sync(2 + group);  // a place for it is free
            const u32 to = shared_address(at.output(group, output));
            multiplier.put(sum, to, tally);
            fence_for_engine();
            warpgroup_sync(2 + group);
            if (stores) {
                const i64 pixel = (place.image * p.out_height + place.first_p + row) * p.out_width + place.first_q;
                store_box(maps.y, to, place.first_filter, int(pixel));
                commit_stores();
            }
        }
        if constexpr (STATISTICS)
            tally.leave(partial + ((i64(place.strip) * GROUPS + group) * parts + part) * 2 * p.columns,
                        multiplier.filter, p.columns);
    }
    if (stores) await_stores_read<0>();
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
conv2d_stem_lines_kernel(const __grid_constant__ Maps maps, const T* __restrict__ x, const T* __restrict__ w,
                         const float* __restrict__ bias, float* __restrict__ partial,
                         const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared};
    if (threadIdx.x < UNDER_WAY) {
        barrier_init(at.there(threadIdx.x), MAKERS / 32);
        barrier_init(at.done(threadIdx.x), WARPS);
        barrier_init_done();
    }
    if (threadIdx.x == ALL_THREADS - 1) prefetch_map(maps.y);
    __syncthreads();
    await_predecessor();
    const Place place(p);
    if (threadIdx.x < MAKERS) {
        Registers::give();
        make_lines(at, x, p, place);
    } else {
        Registers::take();
        multiply_rows(at, maps, w, bias, partial, p, place);
    }
}
