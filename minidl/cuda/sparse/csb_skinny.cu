// The product of a sparse matrix and a few samples in 16-bit types: "load sparse, compute dense", sm_80 and newer. As
// many bytes of the matrix are read as it has, a fraction of the dense one's, and that is what such a product costs.
//
// A warp owns a block row of 64 output features (transposed: a block column) and a slice of the blocks along the summed
// features. It fetches a block's elements into registers while the block before is multiplied, scatters them into a
// dense 64 x 64 tile of its own in shared memory, multiplies the tile with x from registers (mma.sync, float32 sums),
// and clears it again. No warp waits for another before the end, when WARPS_K slices are added in shared memory, pairs
// first; more slices than that are left as float32 partials, which csb_skinny_fold_kernel adds in order. Slices depend
// on the sizes alone, so the bits do not depend on the device.
//
// Structural zeros are multiplied: an infinity or NaN in x reaches every output of its sample.
//
// The summed features of a tile are permuted so that a lane's fragments of x are whole 16-byte words: bits h t t s b c
// of a feature's number become h s b t t c, see the fragments of mma.cuh.
//
//   indptr, indices   as in csb.cuh, of side 64;  values (nnz)               T
//   x         sample * x_pitch + feature, rows aligned to 16 bytes           T
//   y         sample * features + feature;  bias (features) or null          T;  float32
//   partials  (slices, samples, features)                                    float32
//
// Grid: block rows (fastest), slices, tiles of SAMPLES samples.
// Bytes: 4 nnz, x once per block row (from L2), y; FLOP 2 M K samples on tensor cores. On an H200 8192 x 8192 at 90 % and
// 64 samples took 41 us: 134 MB of x from L2 (24 us) and 14 us of mma.sync, of which little hides; Hopper has a kernel of
// its own (csb_skinny_hopper.cu). Tried there, with differences mostly below 6 %, some up to a quarter slower: x of the
// next block fetched ahead with all block bounds known from the start; two warps that share a block, half of the samples
// each; thread blocks of two or four block rows, whose warps find x in L1.
// After H. Xia et al., "Flash-LLM", VLDB 2024.
//
// Macros: DTYPE (1, 2), TRANSPOSED, SAMPLES (16, 32, 64), WARPS_K (a power of two).
#include "common.cuh"
#include "mma.cuh"

struct Problem {
    i64 x_pitch;
    int samples, features, depth;
    int steps;   // blocks along the summed features
    int across;  // block columns of the stored matrix
    int slices;
    int relu;
};

constexpr int SIDE = 64, THREADS = 32 * WARPS_K;
constexpr int PITCH = 144;                  // bytes from row to row of a tile: eight rows meet different banks
constexpr int TILE = SIDE * PITCH;
constexpr int ROUNDS = 4, CHUNK = 32 * 4 * ROUNDS;  // elements that a warp holds in registers
constexpr int COLUMNS = SAMPLES / 8;        // fragments of x
constexpr bool REMEMBER = SAMPLES == 16;    // whether there are registers to remember where the elements went
constexpr bool AHEAD = SAMPLES == 64;       // x of the next block is fetched early: few warps hide its way
constexpr int SUM_PITCH = SAMPLES + 4;      // floats

// Elements of a block on their way: four neighbouring ones a round.
struct Elements {
    uint2 indices[ROUNDS], values[ROUNDS];

    __device__ __forceinline__ void fetch(const u16* __restrict__ from, const T* __restrict__ values_from, int first,
                                          int end) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int e = first + 4 * (32 * r + lane);
            if (e < end) {
                indices[r] = __ldg(reinterpret_cast<const uint2*>(from + e));
                values[r] = __ldg(reinterpret_cast<const uint2*>(values_from + e));
            }
        }
    }

    // Two elements: their places in a tile, packed.
    static __device__ __forceinline__ u32 places(u32 pair) {
        const u32 high = pair >> 8 & 0x00ff00ff, low = pair & 0x00ff00ff;
        const u32 out = TRANSPOSED ? low : high, k = TRANSPOSED ? high : low;
        return out * PITCH + 2 * ((k & 0x00210021) | (k & 0x00060006) << 2 | (k >> 2 & 0x00060006));
    }

    static __device__ __forceinline__ void put(u32 address, u32 value) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(value)) : "memory");
    }

    __device__ __forceinline__ void scatter(u32 tile, int first, int begin, int end) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int e = first + 4 * (32 * r + lane);
            const u32 low = places(indices[r].x), high = places(indices[r].y);
            if (e >= begin && e < end) put(tile + (low & 0xffff), values[r].x);
            if (e + 1 >= begin && e + 1 < end) put(tile + (low >> 16), values[r].x >> 16);
            if (e + 2 >= begin && e + 2 < end) put(tile + (high & 0xffff), values[r].y);
            if (e + 3 >= begin && e + 3 < end) put(tile + (high >> 16), values[r].y >> 16);
        }
    }
};

// Where the elements of a block went, to clear those places only.
template <bool KEPT>
struct Places {
    u32 pairs[KEPT ? 2 * ROUNDS : 1];

    __device__ __forceinline__ explicit Places(const Elements& from) {
        if constexpr (KEPT) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                pairs[2 * r] = Elements::places(from.indices[r].x);
                pairs[2 * r + 1] = Elements::places(from.indices[r].y);
            }
        }
    }

    // Elements before the block's first share its words: their places are cleared, too, and hold nothing.
    __device__ __forceinline__ void clear(u32 tile, int first, int end) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < 2 * ROUNDS; ++i) {
                const int e = first + 4 * (32 * (i / 2) + threadIdx.x % 32) + i % 2 * 2;
                if (e < end) Elements::put(tile + (pairs[i] & 0xffff), 0);
                if (e + 1 < end) Elements::put(tile + (pairs[i] >> 16), 0);
            }
        }
    }
};

// x of half a block, 32 summed features: a lane's eight of each fragment's sample.
DEVICE void fetch_x(uint4 (&words)[COLUMNS], const T* __restrict__ x, const Problem& p, int first_sample, int feature) {
    const int lane = threadIdx.x % 32;
    feature += lane % 4 * 8;
    const int sample = first_sample + lane / 4, left = feature < p.depth ? p.samples - sample : 0;
    const T* from = x + sample * p.x_pitch + feature;
    asm volatile("" : "+l"(from));  // else the compiler keeps all addresses, and spills them
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        words[j] = 8 * j < left ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
        from += 8 * p.x_pitch;
    }
}

// sum += tile x, over half a block.
DEVICE void multiply(float (&sum)[4][COLUMNS][4], u32 rows, const uint4 (&words)[COLUMNS], int half) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 a[4];
            load_matrices(a, rows + 16 * PITCH * i + 32 * (2 * half + s));
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const u32 b[2] = {s ? words[j].z : words[j].x, s ? words[j].w : words[j].y};
                multiply_fragments(sum[i][j], a, b);
            }
        }
}

// Adds the sums of WARPS_K slices in shared memory, [output feature][sample]: pairs first.
DEVICE void join(float (&sum)[4][COLUMNS][4], float* scratch) {
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32;
#pragma unroll
    for (int half = WARPS_K / 2; half > 0; half /= 2) {
        float* const place = scratch + slice % half * SIDE * SUM_PITCH;
        const auto at = [&](int i, int j, int e) {  // of two neighbouring sums
            return reinterpret_cast<float2*>(place + (16 * i + 4 * e + lane / 4) * SUM_PITCH + 8 * j + lane % 4 * 2);
        };
        __syncthreads();
        if (slice >= half && slice < 2 * half) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int e = 0; e < 4; e += 2) *at(i, j, e) = make_float2(sum[i][j][e], sum[i][j][e + 1]);
        }
        __syncthreads();
        if (slice < half) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int e = 0; e < 4; e += 2) {
                        const float2 given = *at(i, j, e);
                        sum[i][j][e] += given.x, sum[i][j][e + 1] += given.y;
                    }
        }
    }
}

DEVICE float finish(float value, const float* __restrict__ bias, int feature, int relu) {
    if (bias) value += bias[feature];
    return relu ? clamp_below(value, 0.0f) : value;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_skinny_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                  const T* __restrict__ x, const float* __restrict__ bias, T* __restrict__ y,
                  float* __restrict__ partials, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x, first_sample = blockIdx.z * SAMPLES;
    const int slice = blockIdx.y * WARPS_K + warp, slices = p.slices * WARPS_K;
    const int first_step = static_cast<int>(i64(slice) * p.steps / slices);
    const int end_step = static_cast<int>(i64(slice + 1) * p.steps / slices);

    unsigned char* const tile = shared + warp * TILE;
    const u32 tile_address = shared_address(tile), rows = tile_address + lane % 16 * PITCH + lane / 16 * 16;
    const auto clear = [&] {
#pragma unroll
        for (int i = 0; i < TILE / 512; ++i) reinterpret_cast<uint4*>(tile)[lane + 32 * i] = make_uint4(0, 0, 0, 0);
    };
    const auto block_of = [&](int step) {
        return TRANSPOSED ? step * p.across + row : row * p.across + step;  // of fewer than 2^31
    };
    clear();
    float sum[4][COLUMNS][4] = {};
    Elements next;
    int begin = 0, end = 0;
    if (first_step < end_step) begin = indptr[block_of(first_step)], end = indptr[block_of(first_step) + 1];
    next.fetch(indices, values, begin & ~3, end);
    uint4 words[COLUMNS];  // x of half a block
    if (AHEAD) fetch_x(words, x, p, first_sample, first_step * SIDE);
    for (int step = first_step; step < end_step; ++step) {
        int next_begin = 0, next_end = 0;
        if (step + 1 < end_step) next_begin = indptr[block_of(step + 1)], next_end = indptr[block_of(step + 1) + 1];
        if (!AHEAD) fetch_x(words, x, p, first_sample, step * SIDE);
        __syncwarp();  // the tile is clear
        const bool once = REMEMBER && end - (begin & ~3) <= CHUNK;
        int first = begin & ~3;
        for (; first + CHUNK < end; first += CHUNK) {
            next.scatter(tile_address, first, begin, end);
            next.fetch(indices, values, first + CHUNK, end);
        }
        next.scatter(tile_address, first, begin, end);
        Places<REMEMBER> places(next);
        next.fetch(indices, values, next_begin & ~3, next_end);
        __syncwarp();
        if (begin < end) multiply(sum, rows, words, 0);
        fetch_x(words, x, p, first_sample, step * SIDE + 32);
        if (begin < end) multiply(sum, rows, words, 1);
        if (AHEAD) fetch_x(words, x, p, first_sample, (step + 1) * SIDE);
        __syncwarp();
        if (once) places.clear(tile_address, begin & ~3, end);
        else clear();
        begin = next_begin, end = next_end;
    }
    join(sum, reinterpret_cast<float*>(shared));
    if (warp) return;
    const int feature = row * SIDE + lane / 4;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int sample = first_sample + 8 * j + lane % 4 * 2 + e;
            if (sample >= p.samples) continue;
            i64 place = i64(sample) * p.features + feature;
            asm volatile("" : "+l"(place));  // else the compiler keeps all places, and spills them
#pragma unroll
            for (int i = 0; i < SIDE / 8; ++i) {
                if (feature + 8 * i >= p.features) break;
                const float value = sum[i / 2][j][i % 2 * 2 + e];
                if (p.slices == 1) y[place + 8 * i] = from_float<T>(finish(value, bias, feature + 8 * i, p.relu));
                else partials[blockIdx.y * i64(p.samples) * p.features + place + 8 * i] = value;
            }
        }
}

// y = the partials added in order, + bias, ReLU, rounded once.
extern "C" __global__ void __launch_bounds__(256)
csb_skinny_fold_kernel(const float* __restrict__ partials, const float* __restrict__ bias, T* __restrict__ y,
                       int slices, int samples, int features, int relu) {
    await_predecessor();
    const i64 size = i64(samples) * features, i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= size) return;
    float sum = 0.0f;
    for (int s = 0; s < slices; ++s) sum += partials[s * size + i];
    y[i] = from_float<T>(finish(sum, bias, static_cast<int>(i % features), relu));
}
