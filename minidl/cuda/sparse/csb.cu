// Products of a matrix in Compressed Sparse Blocks with a dense one, from one copy of it in both directions.
//
//   csb_matmul_kernel    y = A x or A^T x, + bias, ReLU: every output is the sum over its elements in the order of the
//                        summed index, by fused multiply-adds in float32. The CPU table sums in the same order.
//   csb_expand_kernel    dense[i, j] = value, at the pattern        csb_pick_kernel    value = dense[i, j]
//
//   indptr    (block rows * across + 1), block-row-major               int32
//   indices   (nnz) row in block << 8 | column in block, row-major     u16
//   values    (nnz)                                                    T
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature      T
//   y         dense in the same orientation;  bias (features) or null                           T;  float32
//   dense     row * row_step + column * column_step                    T
//
// csb_matmul_kernel. A block of 256 threads owns ROWS output features (a slice of a block row, transposed of a block
// column) times 32 * VEC samples, and walks the blocks that feed them; nothing is shared between thread blocks, so
// there are no atomics on results and no partial sums. For each block of A it groups up to PIECE elements by output
// feature in shared memory: a bit mask per feature over the summed index (integer atomicOr, whose order does not
// matter), prefix sums of the counts, and each element's rank by counting bits. That is the same work in both
// directions, so the transposed product costs what the forward one does. Then a warp takes EACH features one by one; a
// lane holds VEC samples of them in registers, reads an element by broadcast and VEC values of x. These come through L1
// where samples lie side by side; with FEATURES_LAST the block's part of x is turned in shared memory first.
// Grid: output slices (fastest), sample tiles.
// FLOP: 2 * nnz * samples. Bytes: A once per sample tile, x once per output slice (from L2), y once. The bound is
// 4 bytes of x from L1 or shared memory per multiply-add: a quarter of the float32 peak on sm_90.
// After T. Gale et al., "Sparse GPU kernels for deep learning", SC 2020, and A. Buluç et al., SPAA 2009.
//
// With CONV the samples are the output pixels of a convolution (transposed: of its data gradient), the summed features
// the pixels that its taps meet, tap by tap (csb_window.cuh): x is an image, of which each block's part is gathered
// while it is turned. Block columns belong to one tap each.
//
// Macros: DTYPE, SIDE; for the product ROWS, VEC, FEATURES_LAST, TRANSPOSED, CONV (with FEATURES_LAST), VEC_X (features
// per access to x, with FEATURES_LAST) and VEC_Y (features per access to y, likewise).
#include "csb_window.cuh"

#ifdef ROWS
struct Problem {
    i64 x_pitch, samples;
    int features;  // outputs
    int depth;     // summed features
    int across;    // block columns of A
    int slices;    // output slices
    int relu;
#if CONV
    int steps;   // blocks that are summed, over all taps
    int blocks;  // block columns of a tap
    Window window;
#endif
};

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int EACH = ROWS / WARPS;               // output features of a warp
constexpr int SAMPLES = 32 * VEC;                // of a thread block
constexpr int WORDS = (SIDE + 31) / 32;
constexpr int PIECE = 2048;                      // elements in shared memory at a time
constexpr int PITCH = SAMPLES + 4;               // of the turned x, floats: keeps vectors aligned
constexpr int UNROLL = 4;                        // elements in flight
constexpr int SLICES = (SIDE + ROWS - 1) / ROWS; // of a block

struct Shared {
    uint2 items[PIECE + UNROLL];  // (where the feature's values of x begin, value), grouped by output feature
    u32 mask[ROWS * WORDS];
    int warps[WARPS];
    int first[ROWS + 1];          // where the items of each output feature begin
};

DEVICE int out_of(u32 index) { return TRANSPOSED ? index & 255 : index >> 8; }
DEVICE int summed_of(u32 index) { return TRANSPOSED ? index >> 8 : index & 255; }

// first[r] = the sum of the bits of the masks of the features before r. Ends without a barrier.
DEVICE void find_starts(Shared& s) {
    const int row = threadIdx.x, lane = row % 32;
    int count = 0;
    if (row < ROWS) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[row * WORDS + w]);
    }
    int sum = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) s.warps[row / 32] = sum;
    __syncthreads();
    for (int w = 0; w < row / 32; ++w) sum += s.warps[w];
    if (row < ROWS) {
        s.first[row + 1] = sum;
        if (row == 0) s.first[0] = 0;
    }
}

// Groups `count` elements by output feature of this slice; `scale`: from one summed feature of x to the next.
DEVICE void group(Shared& s, const u16* __restrict__ indices, const T* __restrict__ values, int count, int slice,
                  u32 scale) {
    for (int i = threadIdx.x; i < ROWS * WORDS; i += THREADS) s.mask[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (int e = threadIdx.x; e < count; e += THREADS) {
        const u32 index = indices[e], row = out_of(index) - slice, summed = summed_of(index);
        if (row < ROWS) atomicOr(&s.mask[row * WORDS + summed / 32], 1u << summed % 32);
    }
    __syncthreads();
    find_starts(s);
    __syncthreads();
#pragma unroll 4
    for (int e = threadIdx.x; e < count; e += THREADS) {
        const u32 index = indices[e], row = out_of(index) - slice, summed = summed_of(index);
        if (row >= ROWS) continue;
        int rank = s.first[row];
#pragma unroll
        for (u32 w = 0; w < WORDS; ++w) {
            const u32 word = s.mask[row * WORDS + w];
            rank += w < summed / 32 ? __popc(word) : w == summed / 32 ? __popc(word & ((1u << summed % 32) - 1)) : 0;
        }
        s.items[rank] = make_uint2(summed * scale, __float_as_uint(to_float(values[e])));
    }
}

// sum[i] += value * x over the items of this warp's features; `x` is this lane's first sample of summed feature 0.
template <class X>
DEVICE void multiply(const Shared& s, const X* __restrict__ x, float (&sum)[EACH][VEC]) {
    const int row = threadIdx.x / 32 * EACH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int end = s.first[row + i + 1];
#pragma unroll 1
        for (int k = s.first[row + i]; k < end; k += UNROLL) {
            float values[UNROLL][VEC];
            u32 weights[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const uint2 item = s.items[k + u];
                weights[u] = item.y;
                if (k + u < end) load<X, VEC>(x + item.x, values[u]);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (k + u >= end) break;
#pragma unroll
                for (int v = 0; v < VEC; ++v) sum[i][v] = fmaf(__uint_as_float(weights[u]), values[u][v], sum[i][v]);
            }
        }
    }
}

#if FEATURES_LAST
// turned[feature][sample] = x[sample][feature] for up to SIDE features; zeros behind the last sample and where a tap
// meets no pixel.
DEVICE void turn(float* turned, const T* __restrict__ x, const Problem& p, i64 sample, int features, int tap) {
    const int lane = threadIdx.x % 32;
    const T* from[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        i64 row = sample + 32 * v + lane;
        if (row >= p.samples) row = -1;
#if CONV
        else row = p.window.pixel(static_cast<u32>(row), tap);
#endif
        from[v] = row < 0 ? nullptr : x + row * p.x_pitch;
    }
    for (int f = threadIdx.x / 32 * VEC_X; f < features; f += WARPS * VEC_X) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            float values[VEC_X] = {};
            if (from[v]) load<T, VEC_X>(from[v] + f, values);
#pragma unroll
            for (int e = 0; e < VEC_X; ++e) turned[(f + e) * PITCH + 32 * v + lane] = values[e];
        }
    }
}
#endif

DEVICE float finish(float value, const float* bias, int feature, const Problem& p) {
    if (bias) value += bias[feature];
    return p.relu ? clamp_below(value, 0.0f) : value;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
csb_matmul_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                  const T* __restrict__ x, const float* __restrict__ bias, T* __restrict__ y,
                  const __grid_constant__ Problem p) {
    await_predecessor();
    __shared__ Shared s;
    const int lane = threadIdx.x % 32;
    const int out_block = blockIdx.x % p.slices / SLICES, slice = blockIdx.x % p.slices % SLICES * ROWS;
    const i64 tile = i64(blockIdx.x / p.slices) * SAMPLES, sample = tile + lane * VEC;
#if FEATURES_LAST
    extern __shared__ __align__(16) float turned[];
    const u32 scale = PITCH;
#else
    const u32 scale = static_cast<u32>(p.x_pitch);
    // Lanes behind the last sample read the first ones, and store nothing.
    const T* const column = x + (sample < p.samples ? sample : 0);
#endif
    float sum[EACH][VEC] = {};
#if CONV
    const int steps = p.steps, room = p.window.room;  // blocks of a tap
#else
    const int steps = ceil_div(p.depth, SIDE), room = steps;
#endif
    for (int step = 0; step < steps; ++step) {
        const int tap = CONV ? step / room : 0, part = step - tap * room;
#if CONV
        const i64 block = TRANSPOSED ? i64(part) * p.across + tap * p.blocks + out_block
                                     : i64(out_block) * p.across + step;
#else
        const i64 block = TRANSPOSED ? i64(step) * p.across + out_block : i64(out_block) * p.across + step;
#endif
        const int begin = indptr[block], end = indptr[block + 1];
        for (int piece = begin; piece < end; piece += PIECE) {
            __syncthreads();  // the items before these, and the x before this, are used up
#if FEATURES_LAST
            const int rest = p.depth - part * SIDE;
            if (piece == begin) turn(turned, x + part * SIDE, p, tile, rest < SIDE ? rest : SIDE, tap);
#endif
            group(s, indices + piece, values + piece, end - piece < PIECE ? end - piece : PIECE, slice, scale);
            __syncthreads();
#if FEATURES_LAST
            multiply(s, turned + lane * VEC, sum);
#else
            multiply(s, column + i64(step) * SIDE * p.x_pitch, sum);
#endif
        }
    }
    const int local = slice + threadIdx.x / 32 * EACH, feature = out_block * SIDE + local;
    const int left = (SIDE - local < p.features - feature ? SIDE - local : p.features - feature);  // of this warp's
#if FEATURES_LAST
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        if (sample + v >= p.samples) return;
        T* to = y + (sample + v) * p.features + feature;
#pragma unroll
        for (int i = 0; i < EACH; i += VEC_Y) {
            if (i >= left) break;
            float out[VEC_Y];
#pragma unroll
            for (int e = 0; e < VEC_Y; ++e) out[e] = finish(sum[i + e][v], bias, feature + i + e, p);
            store<T, VEC_Y>(to + i, out);
        }
    }
#else
    if (sample >= p.samples) return;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (i >= left) break;
        float out[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) out[v] = finish(sum[i][v], bias, feature + i, p);
        store<T, VEC>(y + i64(feature + i) * p.samples + sample, out);
    }
#endif
}

#else

// One thread block per block of A.
struct Place {
    int begin, end;
    i64 row_step, column_step, start;  // start: of the block's first element in the dense matrix

    __device__ __forceinline__ Place(const int* __restrict__ indptr, i64 row_step, i64 column_step, int across)
        : row_step(row_step), column_step(column_step) {
        begin = indptr[blockIdx.x], end = indptr[blockIdx.x + 1];
        start = blockIdx.x / across * SIDE * row_step + blockIdx.x % across * SIDE * column_step;
    }
    __device__ __forceinline__ i64 of(u32 index) const {
        return start + (index >> 8) * row_step + (index & 255) * column_step;
    }
};

extern "C" __global__ void __launch_bounds__(256)
csb_expand_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                  T* __restrict__ dense, i64 row_step, i64 column_step, int across) {
    await_predecessor();
    const Place place(indptr, row_step, column_step, across);
    for (int e = place.begin + threadIdx.x; e < place.end; e += 256) dense[place.of(indices[e])] = values[e];
}

extern "C" __global__ void __launch_bounds__(256)
csb_pick_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ dense,
                T* __restrict__ values, i64 row_step, i64 column_step, int across) {
    await_predecessor();
    const Place place(indptr, row_step, column_step, across);
    for (int e = place.begin + threadIdx.x; e < place.end; e += 256) values[e] = dense[place.of(indices[e])];
}
#endif
