// Columns and products of conv2d_stem_weight.cu for mma.sync.
//
// The matrix units take pixels in pairs: a word holds one position of two neighbouring pixels, which lie STEP values
// apart in a row of the image. So the image rows (conv2d_stem.cuh) are first rewritten as words
// pairs[v] = (row[v], row[v + STEP]); from there any fragment of columns is read as it is, wherever a window starts.
// Sixteen pixels are taken in an order (see pixel_row) in which those reads meet no bank twice; the rows of dy are laid
// down in the same order.
#pragma once

constexpr int GROUPS_W = (WINDOW + GROUP - 1) / GROUP;
constexpr int GROUPS = KERNEL_H * GROUPS_W;  // fragments of columns in all
constexpr int LENGTH = row_length(GROUPS_W);
constexpr int FRAGMENTS = TILE_M / 16;
constexpr int WARPS_K = WARPS / WARPS_N;
constexpr int ROW_BYTES = LENGTH * 4;
// New rows of a stage, and behind them what their last pairs reach, which is read and not used.
constexpr int ROWS_BYTES = NEW * LENGTH * 2 + ((STEP / 2 + 1) * 4 + 15) / 16 * 16;

// The four pairs of pixels that a quad reads start so many pixels apart.
constexpr int SPREAD = STEP == 6 ? 4 : 2;

// Where pixel i of sixteen stands in the depth: thread t of a quad has rows 2t, 2t + 1 and 2t + 8, 2t + 9.
DEVICE int pixel_row(int i) { return SPREAD == 2 ? i : (i / 2 % 2 * 8) + i / 4 * 2 + i % 2; }
constexpr int SECOND = SPREAD == 2 ? 8 : 2;  // pixels from a thread's first pair to its second

// Rewrites NEW rows of LENGTH values as pairs, from row `slot` of the ring on. What lies behind a last window is never
// read.
DEVICE void rewrite(unsigned char* ring, const unsigned char* from, int slot, int) {
    constexpr int WORDS = LENGTH / 2;
    const u32* const rows = reinterpret_cast<const u32*>(from);
#pragma unroll 4
    for (int i = threadIdx.x; i < NEW * WORDS; i += THREADS) {
        const int row = i / WORDS, place = slot + row < RING ? slot + row : slot + row - RING;
        uint2* const to = reinterpret_cast<uint2*>(ring + place * ROW_BYTES) + i % WORDS;
        const u32 here = rows[i], there = rows[i + STEP / 2];
        if (STEP % 2 == 0) {
            *to = make_uint2(__byte_perm(here, there, 0x5410), __byte_perm(here, there, 0x7632));
        } else {
            const u32 further = rows[i + STEP / 2 + 1];
            *to = make_uint2(__byte_perm(here, there, 0x7610), __byte_perm(here, further, 0x5432));
        }
    }
}

// Of a warp, along the columns, and among those that share them.
DEVICE int warp_n() { return threadIdx.x / 32 % WARPS_N; }
DEVICE int warp_k() { return threadIdx.x / 32 / WARPS_N; }

// TILE_M rows by this warp's fragments of columns; the warps that share them take turns over the pixels.
struct Product {
    float sum[FRAGMENTS][COLUMNS][4];
    int column[COLUMNS];           // this warp's fragments in the ring, in bytes
    const unsigned char* windows;  // this thread's pair of the first window
    u32 gradients;                 // of this thread's first row of dy
    int first_warp = 0;

    // `columns`: the block's column tile.
    __device__ __forceinline__ Product(unsigned char* stages, unsigned char* ring, int shift, u32 columns) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int fragment = min(first_fragment(columns) + j, GROUPS - 1);  // in excess it is summed and not written
            column[j] = fragment / GROUPS_W * ROW_BYTES + fragment % GROUPS_W * (GROUP * 4);
        }
        windows = ring + (shift + lane % 4 * (SPREAD * STEP) + lane / 4) * 4;
        gradients = shared_address(stages) + Gradient::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;
    }

    static __device__ __forceinline__ int first_fragment(u32 columns) { return (columns * WARPS_N + warp_n()) * COLUMNS; }

    // A row of dy, of which `pixels` are there, after `meanwhile` is done. The warps take turns over all rows of a chunk.
    template <class Work>
    __device__ __forceinline__ void take(int stage, int pixels, Work meanwhile) {
        meanwhile();
        if (!pixels) return;
        const int first = (warp_k() + WARPS_K - first_warp) % WARPS_K;
        first_warp = (first_warp + DEPTHS) % WARPS_K;
        for (int i = first; i < DEPTHS; i += WARPS_K)
            add(gradients + stage * Gradient::BYTES + i * 16 * Gradient::PITCH, windows + i * (16 * STEP * 4),
                pixels - i * 16 - int(threadIdx.x % 4) * SPREAD);
    }

    // Sixteen pixels, whose windows begin at `windows`; `left`: pixels from this thread's first to the end.
    __device__ __forceinline__ void add(u32 gradient, const unsigned char* windows, int left) {
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
            for (int i = 0; i < FRAGMENTS; ++i) multiply_fragments(sum[i][j], a[i], b);
        }
    }

    // Of a pair, as many as there are left.
    static __device__ __forceinline__ u32 keep(int left) { return left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u; }

    // The ring moves on by a step.
    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int& at : column) {
            at += NEW * ROW_BYTES;
            if (at >= RING * ROW_BYTES) at -= RING * ROW_BYTES;
        }
    }

    // `to`: the first of `rows` filters of a partial.
    __device__ __forceinline__ void leave(unsigned char* scratch, float* to, int rows, u32 columns) {
        gather(reinterpret_cast<float4*>(scratch));
        if (warp_k() == 0) write(to, rows, first_fragment(columns));
    }

    // Adds the sums of the warps that share this one's columns, in order; they end up in the first of them.
    __device__ __forceinline__ void gather(float4* scratch) {
        const int lane = threadIdx.x % 32;
        for (int k = 1; k < WARPS_K; ++k) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    float4& there = scratch[((warp_n() * FRAGMENTS + i) * COLUMNS + j) * 32 + lane];
                    if (warp_k() == k) there = make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]);
                }
            __syncthreads();
            if (warp_k() != 0) continue;
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const float4 other = scratch[((warp_n() * FRAGMENTS + i) * COLUMNS + j) * 32 + lane];
                    sum[i][j][0] += other.x, sum[i][j][1] += other.y, sum[i][j][2] += other.z, sum[i][j][3] += other.w;
                }
        }
    }

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
