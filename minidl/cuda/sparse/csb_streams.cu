// Elements by output feature, one feature a lane: what csb_lanes.cu multiplies. Made anew for each product, in either
// direction, from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into tiles of ROWS output features and parts of PART summed ones. As a
// warp takes as long as its longest feature, csb_place_kernel sorts the features of a tile by their number of elements
// and deals them, 32 at a time, among the warps, first to last and back again; a set's elements in a part are a stream:
// the first of each lane that has one, the second of each lane that has two, and so on, without gaps, each lane's in the
// order of the summed feature. The streams of a warp's sets follow each other.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   counts    (parts, tiles * ROWS): elements of a feature in a part, from csb_count_kernel        u16
//   order     (tiles, ROWS): the feature of each slot, set by set
//   heads     (tiles, parts, ROWS): first item of the slot's set, number of items of the slot
//   items     (nnz): value, summed feature within the part times 128 (a row of x in shared memory, in bytes)
//
// Elements are ranked by counting bits of a mask per feature (integer atomicOr, whose order does not matter), so both
// directions cost the same and the streams are the same on every run.
// Grid: tiles * parts * bands of BAND features, bands fastest. Bytes: 2 nnz read twice and 4 nnz once, 8 nnz written.
// After M. Kreutzer et al., "A unified sparse matrix data format for efficient general sparse matrix-vector
// multiplication on modern processors with wide SIMD units", SIAM J. Sci. Comput. 36 (2014), for the sorting.
//
// Macros: SIDE, TRANSPOSED, WARPS (8, 16; of two that share sets only one counts), SETS (1, 2), PART (512).
#include "csb.cuh"

struct Problem {
    Matrix a;
    int tiles, parts;
};

constexpr int ROWS = WARPS * SETS * 32, BAND = 64, BANDS = ROWS / BAND, WORDS = PART / 32;
constexpr int COUNTERS = 256, THREADS = ROWS > 512 ? 1024 : 512;
constexpr int LANES = 32;
constexpr u32 MOST = (1u << 22) - 1;  // elements of a feature that a sorted word has room for

DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// Calls visit(element, feature in band, summed feature in part) for the elements of a band in a part; some warps share a
// block, as many as there would be of the usual side.
template <int THREADS_HERE, class Visit>
DEVICE void for_band(const int* __restrict__ indptr, const u16* __restrict__ indices, const Matrix& a, int feature,
                     int summed, Visit visit) {
    constexpr int DOWN = TRANSPOSED ? PART : BAND, ACROSS = TRANSPOSED ? BAND : PART;
    const int row = TRANSPOSED ? summed : feature, column = TRANSPOSED ? feature : summed;
    const int top = row / SIDE, left = column / SIDE;
    const int tall = ceil_div(smaller(row + DOWN, a.rows), SIDE) - top;
    const int wide = ceil_div(smaller(column + ACROSS, a.columns), SIDE) - left;
    if (tall <= 0 || wide <= 0) return;
    constexpr int SHARE = THREADS_HERE / 256;
    const int share = threadIdx.x / LANES % SHARE * LANES + threadIdx.x % LANES;
    for (int b = threadIdx.x / LANES / SHARE; b < tall * wide; b += 256 / LANES) {
        const int down = top + b / wide, across = left + b % wide;
        const i64 block = i64(down) * a.across + across;
        const int begin = indptr[block], end = indptr[block + 1];
        const int first_row = down * SIDE - row, first_column = across * SIDE - column;
#pragma unroll 2
        for (int e = begin + share; e < end; e += SHARE * LANES) {
            const int r = first_row + (indices[e] >> 8), c = first_column + (indices[e] & 255);
            if (0 <= r && r < DOWN && 0 <= c && c < ACROSS) visit(e, TRANSPOSED ? c : r, TRANSPOSED ? r : c);
        }
    }
}

extern "C" __global__ void __launch_bounds__(COUNTERS)
csb_count_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, u16* __restrict__ counts,
                 const __grid_constant__ Problem p) {
    __shared__ int count[BAND];
    await_predecessor();
    const int thread = threadIdx.x, bands = p.tiles * BANDS, band = blockIdx.x % bands, part = blockIdx.x / bands;
    if (thread < BAND) count[thread] = 0;
    __syncthreads();
    for_band<COUNTERS>(indptr, indices, p.a, band * BAND, part * PART,
                       [&](int, int feature, int) { atomicAdd(&count[feature], 1); });
    __syncthreads();
    if (thread < BAND) counts[i64(part) * bands * BAND + band * BAND + thread] = static_cast<u16>(count[thread]);
}

struct Shared {
    u32 mask[BAND][WORDS];  // by feature of the band, over the summed ones
    u32 word[ROWS];         // while the features are sorted
    u16 own[ROWS];          // elements in the part, by feature
    u16 count[ROWS];        // likewise, by slot
    u16 slot[ROWS];         // of each feature
    u32 start[LANES];       // first item of each set
    u32 base;               // elements before the part
};

// One word a thread, the largest first.
DEVICE u32 sorted(u32 word, u32* scratch) {
    const int thread = threadIdx.x;
    for (int size = 2; size <= ROWS; size *= 2)
        for (int apart = size / 2; apart > 0; apart /= 2) {
            u32 other;
            if (apart < LANES) {
                other = __shfl_xor_sync(0xffffffffu, word, apart);
            } else {
                if (thread < ROWS) scratch[thread] = word;
                __syncthreads();
                other = thread < ROWS ? scratch[thread ^ apart] : 0;
                __syncthreads();
            }
            const bool larger = ((thread & apart) == 0) == ((thread & size) == 0);
            word = (word > other) == larger ? word : other;
        }
    return word;
}

// Elements before a part of a tile: those of earlier tiles and, in this one, of earlier parts.
DEVICE int elements_before(const int* __restrict__ indptr, const Matrix& a, int feature, int summed) {
    const int down = ceil_div(a.rows, SIDE), first = smaller(feature / SIDE, TRANSPOSED ? a.across : down);
    const int last = smaller(ceil_div(feature + ROWS, SIDE), TRANSPOSED ? a.across : down), inner = summed / SIDE;
    int sum = 0;
    if (TRANSPOSED) {
        for (int r = threadIdx.x; r < down; r += THREADS) {
            const int* const row = indptr + i64(r) * a.across;
            sum += row[first] - row[0];
            if (r < inner) sum += row[last] - row[first];
        }
    } else {
        for (int r = first + threadIdx.x; r < last; r += THREADS) {
            const int* const row = indptr + i64(r) * a.across;
            sum += row[inner] - row[0];
        }
        if (threadIdx.x == 0) sum += indptr[i64(first) * a.across];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
csb_place_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 const u16* __restrict__ counts, int* __restrict__ order, uint2* __restrict__ heads,
                 uint2* __restrict__ items, const __grid_constant__ Problem p) {
    __shared__ Shared s;
    await_predecessor();
    const int thread = threadIdx.x, lane = thread % LANES, band = blockIdx.x % BANDS;
    const int tile = blockIdx.x / BANDS / p.parts, part = blockIdx.x / BANDS % p.parts;
    for (int i = thread; i < BAND * WORDS; i += THREADS) (&s.mask[0][0])[i] = 0;
    if (thread == 0) s.base = 0;
    u32 word = 0;
    if (thread < ROWS) {
        const u16* const from = counts + i64(tile) * ROWS + thread;
        u32 total = 0;
        for (int i = 0; i < p.parts; ++i) {
            const u16 some = from[i64(i) * p.tiles * ROWS];
            if (i == part) s.own[thread] = some;
            total += some;
        }
        word = (total < MOST ? total : MOST) << 10 | (1023 - thread);
    }
    word = sorted(word, s.word);  // its barriers are those of what was cleared, too, with at least 64 features
    const int feature = 1023 - (word & 1023);
    int slot = 0;
    if (thread < ROWS) {
        const int set = thread / LANES, round = set / WARPS, place = set % WARPS;
        const int warp = round % 2 ? WARPS - 1 - place : place;
        slot = (warp * SETS + round) * LANES + lane;
        s.slot[feature] = slot, s.count[slot] = s.own[feature];
        if (band == 0 && part == 0) order[tile * ROWS + slot] = tile * ROWS + feature;
    }
    for_band<THREADS>(indptr, indices, p.a, tile * ROWS + band * BAND, part * PART,
                      [&](int, int f, int summed) { atomicOr(&s.mask[f][summed / 32], 1u << summed % 32); });
    const int before = elements_before(indptr, p.a, tile * ROWS, part * PART);
    const int sum = warp_sum(before);
    if (lane == 0 && sum) atomicAdd(&s.base, sum);
    __syncthreads();
    if (thread < ROWS) {
        const u32 all = __reduce_add_sync(0xffffffffu, s.count[thread]);
        if (lane == 0) s.start[thread / LANES] = all;
    }
    __syncthreads();
    if (thread < LANES) {
        const u32 size = thread < ROWS / LANES ? s.start[thread] : 0;
        u32 end = size;
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            const u32 other = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += other;
        }
        s.start[thread] = s.base + end - size;
    }
    __syncthreads();
    if (band == 0 && thread < ROWS)
        heads[(i64(tile) * p.parts + part) * ROWS + thread] = make_uint2(s.start[thread / LANES], s.count[thread]);
    for_band<THREADS>(indptr, indices, p.a, tile * ROWS + band * BAND, part * PART, [&](int e, int f, int summed) {
        u32 rank = __popc(s.mask[f][summed / 32] & ((1u << summed % 32) - 1));
#pragma unroll
        for (int w = 0; w < WORDS - 1; ++w)
            if (w < summed / 32) rank += __popc(s.mask[f][w]);
        const int own = s.slot[band * BAND + f], set = own / LANES;
        u32 place = s.start[set];
#pragma unroll 8
        for (int i = 0; i < LANES; ++i) {
            const int other = (i + set) % LANES;  // sets begin at different banks
            const u32 count = s.count[set * LANES + other];
            place += (count < rank ? count : rank) + (other < own % LANES && count > rank);
        }
        items[place] = make_uint2(__float_as_uint(values[e]), summed * 128);
    });
}
