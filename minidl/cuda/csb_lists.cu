// Lists of elements by output feature: what csb_rows.cu multiplies. Made anew for each product, in either direction,
// from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into parts of OUT output features x PART summed ones, of a convolution's
// filter (csb_window.cuh) tap by tap, so that no part has two; a unit is 16 output features of a part, the share of one
// warp. A unit's list is a header, the number of items of each feature in 16 bytes and 16 more, then the items (x,
// value): `x` is the summed feature within the part times `scale`. Items of a feature lie in the order of the summed
// one and begin at a multiple of 16 bytes.
//
// Pruned weights have rows many times as long as others, and a warp with long ones keeps all others waiting. BALANCED:
// csb_count_kernel counts them first, and the OUT features of a tile are dealt to its units by falling length, back and
// forth. After T. Gale et al. (SC 2020), who sort rows.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   counts    slots taken so far, 0 at first; with BALANCED then the elements of each output feature
//   order     (tiles, OUT) the feature, within its tile, at each place of a unit; units one after the other   u8
//   slots     8 bytes each: the lists, those of a part one after the other
//   units     (OUT / 16 * tiles, parts of summed ones): first slot, number of slots or 0 without an element
//
// Where a part's lists lie depends on the run, what is in them does not.
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same and the lists are the same on every run.
// Grids: csb_count_kernel eights of blocks of the matrix; csb_lists_kernel parts, those of summed features fastest.
// Bytes: 2 and then 6 nnz read (SIDE / 64)^2 times from L2, 8 (nnz + pads) written.
//
// Macros: SIDE, TRANSPOSED, OUT (64, 128, 256), and of csb_lists_kernel PART (64, 128) and BALANCED.
#include "csb.cuh"

constexpr int UNIT = 16, UNITS = OUT / UNIT;
constexpr int HEADER = 4;  // slots of a header

struct Problem {
    Matrix a;
    int steps;  // parts of summed features, over all taps
    int parts;  // of a tap
    int taps;
    int room;  // columns of a tap
    int scale;
};

#ifdef PART
constexpr int THREADS = 2 * OUT, BAND = 64, WORDS = PART / 32;

struct Shared {
    u32 mask[OUT][WORDS];  // by output feature, over the summed ones
    int items[OUT];        // by place
    int begin[OUT];        // slot of the feature's first item, from the part's first
    int unit[UNITS];       // slots of each unit
    u32 first;             // slot of the part
    u8 order[OUT], places[OUT];
    __align__(16) u32 keys[OUT];
};

// The order of a tile's features; two threads rank each. Keys: count, then those of lower number first, so that no two
// are the same.
DEVICE void deal(Shared& s, const u32* __restrict__ counts, int thread) {
    constexpr u32 MOST = 1 << 23;  // more are counted as many: a key has 32 bits
    if (thread < OUT) s.keys[thread] = min(counts[thread], MOST) * OUT + OUT - 1 - thread;
    __syncthreads();
    const int feature = thread / 2;
    const u32 key = s.keys[feature];
    int rank = 0;
#pragma unroll 4
    for (int i = thread % 2; i < OUT / 4; i += 2) {
        const uint4 four = reinterpret_cast<const uint4*>(s.keys)[i];
        rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
    }
    rank += __shfl_xor_sync(0xffffffffu, rank, 1);
    const int round = rank / UNITS, at = rank % UNITS, place = (round % 2 ? UNITS - 1 - at : at) * UNIT + round;
    s.order[place] = static_cast<u8>(feature);
    s.places[feature] = static_cast<u8>(place);
}

extern "C" __global__ void __launch_bounds__(THREADS)
csb_lists_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 u32* __restrict__ counts, u8* __restrict__ order, uint2* __restrict__ slots,
                 uint2* __restrict__ units, const __grid_constant__ Problem p) {
    __shared__ Shared s;
    const int tile = blockIdx.x / p.steps, step = blockIdx.x % p.steps, thread = threadIdx.x;
    const int tap = step / p.parts, summed_part = (step - tap * p.parts) * PART;
    const Matrix a = {p.a.rows, (tap + 1) * p.room, p.a.across};  // up to the tap's last column
    const auto for_part = [&](auto visit) {  // each band by threads of its own
        constexpr int EACH = THREADS * BAND / OUT;
        const int band = thread / EACH * BAND, of_band = thread % EACH, out = tile * OUT + band;
        if constexpr (TRANSPOSED)
            for_elements<EACH, PART, BAND>(indptr, indices, a, summed_part, tap * p.room + out, of_band,
                                           [&](int e, int row, int column) { visit(e, band + column, row); });
        else
            for_elements<EACH, BAND, PART>(indptr, indices, a, out, tap * p.room + summed_part, of_band,
                                           [&](int e, int row, int column) { visit(e, band + row, column); });
    };
    for (int i = thread; i < OUT * WORDS; i += THREADS) (&s.mask[0][0])[i] = 0;
#if BALANCED
    deal(s, counts + 1 + tile * OUT, thread);
#else
    if (thread < OUT) s.order[thread] = s.places[thread] = static_cast<u8>(thread);
#endif
    __syncthreads();
    if (step == 0 && thread < OUT) order[tile * OUT + thread] = s.order[thread];
    for_part([&](int, int out, int summed) { atomicOr(&s.mask[out][summed / 32], 1u << summed % 32); });
    __syncthreads();
    if (thread < OUT) {
        int count = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[thread][w]);
        s.items[s.places[thread]] = count;
    }
    __syncthreads();
    int count = 0, sum = 0;
    if (thread < OUT) {
        count = s.items[thread];
        sum = (count + 1) & ~1;
#pragma unroll
        for (int further = 1; further < UNIT; further *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, further, UNIT);
            if (thread % UNIT >= further) sum += other;
        }
        if (thread % UNIT == UNIT - 1) s.unit[thread / UNIT] = sum > 0 ? HEADER + sum : 0;
    }
    __syncthreads();
    if (thread == 0) {
        int total = 0;
        for (int u = 0; u < UNITS; ++u) total += s.unit[u];
        s.first = atomicAdd(counts, total);
    }
    __syncthreads();
    if (thread < OUT) {
        const int unit = thread / UNIT, size = s.unit[unit];
        int start = 0;
        for (int u = 0; u < unit; ++u) start += s.unit[u];
        s.begin[s.order[thread]] = start + HEADER + sum - ((count + 1) & ~1);
        if (size) reinterpret_cast<u8*>(slots + s.first + start)[thread % UNIT] = static_cast<u8>(count);
        if (thread % UNIT == 0) units[i64(tile * UNITS + unit) * p.steps + step] = make_uint2(s.first + start, size);
    }
    __syncthreads();
    for_part([&](int e, int out, int summed) {
        int rank = __popc(s.mask[out][summed / 32] & ((1u << summed % 32) - 1));
#pragma unroll
        for (int w = 0; w < WORDS - 1; ++w)
            if (w < summed / 32) rank += __popc(s.mask[out][w]);
        slots[s.first + s.begin[out] + rank] = make_uint2(summed * p.scale, __float_as_uint(values[e]));
    });
}

#else
constexpr int WARPS = 8, THREADS = 32 * WARPS;

// A warp counts the elements of one block of the matrix.
extern "C" __global__ void __launch_bounds__(THREADS)
csb_count_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, u32* __restrict__ counts,
                 const __grid_constant__ Problem p) {
    __shared__ int shared[WARPS][SIDE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int across = p.a.across, block = blockIdx.x * WARPS + warp;
    if (block >= (p.a.rows + SIDE - 1) / SIDE * across) return;
    int* const of_block = shared[warp];
    for (int i = lane; i < SIDE; i += 32) of_block[i] = 0;
    __syncwarp();
    const int begin = indptr[block], end = indptr[block + 1];
#pragma unroll 4
    for (int e = begin + lane; e < end; e += 32) {
        const u32 index = indices[e];
        if (TRANSPOSED) {
            atomicAdd(of_block + (index & 255), 1);
        } else {  // rows lie one after the other: where they begin and end is enough
            if (e == begin || indices[e - 1] >> 8 != index >> 8) atomicSub(of_block + (index >> 8), e);
            if (e + 1 == end || indices[e + 1] >> 8 != index >> 8) atomicAdd(of_block + (index >> 8), e + 1);
        }
    }
    __syncwarp();
    const int top = block / across * SIDE, left = block % across * SIDE;
    u32* const of_features = counts + 1 + (TRANSPOSED ? left % p.room : top);
    for (int i = lane; i < SIDE; i += 32)
        if (of_block[i]) atomicAdd(of_features + i, static_cast<u32>(of_block[i]));
}
#endif
