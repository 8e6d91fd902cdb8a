// Lists of elements by output feature: what csb_rows.cu multiplies. Made anew for each product, in either direction,
// from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into parts of OUT output features x PART summed ones, of a convolution's
// filter (csb_window.cuh) tap by tap, so that no part has two; a unit is 16 output features of a part, the share of one
// warp. A unit's list is a header, the number of items of each feature in 16 bytes and 16 more, then the items (x,
// value): `x` is the summed feature within the part times `scale`. Items of a feature lie in the order of the summed
// one and begin at a multiple of 16 bytes.
//
// Pruned weights have rows many times as long as others, and a warp with long ones would keep all others waiting. So
// csb_order_kernel first deals the OUT features of a tile to its units, the longest first, each to the unit that has
// least so far: after T. Gale et al. (SC 2020), who sort rows.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   order     (tiles, OUT) the feature, within its tile, at each place of a unit; units one after the other   u8
//   places    (tiles, OUT) the place of each feature                                                         u8
//   slots     8 bytes each: the lists, those of a part one after the other
//   units     (OUT / 16 * tiles, parts of summed ones): first slot, number of slots or 0 without an element
//   used      slots taken so far, 0 at first: where a part's lists lie depends on the run, what is in them does not
//
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same and the lists are the same on every run.
// Grids: csb_order_kernel tiles; csb_lists_kernel parts, those of summed features fastest. Bytes: 2 and then 6 nnz read
// (SIDE / 64)^2 times from L2, 8 (nnz + pads) written.
//
// Macros: SIDE, TRANSPOSED, OUT (64, 128, 256), PART (64, 128; of csb_lists_kernel).
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
};

extern "C" __global__ void __launch_bounds__(THREADS)
csb_lists_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 const u8* __restrict__ order, const u8* __restrict__ places, uint2* __restrict__ slots,
                 uint2* __restrict__ units, u32* __restrict__ used, const __grid_constant__ Problem p) {
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
    __syncthreads();
    for_part([&](int, int out, int summed) { atomicOr(&s.mask[out][summed / 32], 1u << summed % 32); });
    __syncthreads();
    if (thread < OUT) {
        int count = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[thread][w]);
        s.items[places[tile * OUT + thread]] = count;
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
        s.first = atomicAdd(used, total);
    }
    __syncthreads();
    if (thread < OUT) {
        const int unit = thread / UNIT, size = s.unit[unit];
        int start = 0;
        for (int u = 0; u < unit; ++u) start += s.unit[u];
        s.begin[order[tile * OUT + thread]] = start + HEADER + sum - ((count + 1) & ~1);
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
constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int BLOCKS = (OUT + SIDE - 1) / SIDE;  // of the matrix, across a tile
constexpr int MOST = 1 << 23;                    // more are counted as many: a key has 32 bits

// Counts the elements of one block of the matrix, `first`: the output feature that `counts` begins with.
DEVICE void count_block(int* counts, const u16* __restrict__ indices, int begin, int end, int first) {
    for (int e = begin + threadIdx.x % 32; e < end; e += 32) {
        const u32 index = indices[e];
        const int out = static_cast<int>(TRANSPOSED ? index & 255 : index >> 8) - first;
        if (out < 0 || out >= OUT) continue;
        if (TRANSPOSED) {
            atomicAdd(counts + out, 1);
        } else {  // rows lie one after the other: where they begin and end is enough
            if (e == begin || indices[e - 1] >> 8 != index >> 8) atomicSub(counts + out, e);
            if (e + 1 == end || indices[e + 1] >> 8 != index >> 8) atomicAdd(counts + out, e + 1);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
csb_order_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, u8* __restrict__ order,
                 u8* __restrict__ places, const __grid_constant__ Problem p) {
    __shared__ int counts[OUT];
    __shared__ __align__(16) u32 keys[OUT];  // count, then those of lower number first: no two are the same
    __shared__ u32 sorted[OUT];
    const int thread = threadIdx.x, lane = thread % 32, first = blockIdx.x * OUT;
    if (thread < OUT) counts[thread] = 0;
    __syncthreads();
    const int down = (p.a.rows + SIDE - 1) / SIDE;
    const int blocks = TRANSPOSED ? down * p.taps * BLOCKS : p.a.across * BLOCKS;
    for (int base = thread / 32; base < blocks; base += 32 * WARPS) {
        // Each lane finds one block, then all lanes count one after the other.
        const int i = base + lane * WARPS;
        int begin = 0, end = 0, from = 0;
        if (i < blocks) {
            const int tap = i / BLOCKS % p.taps;
            const int top = TRANSPOSED ? i / (p.taps * BLOCKS) : first / SIDE + i / p.a.across;
            const int left = TRANSPOSED ? (tap * p.room + first) / SIDE + i % BLOCKS : i % p.a.across;
            if (top < down && left < p.a.across && (!TRANSPOSED || left * SIDE < (tap + 1) * p.room)) {
                begin = indptr[i64(top) * p.a.across + left], end = indptr[i64(top) * p.a.across + left + 1];
                from = first - (TRANSPOSED ? left * SIDE - tap * p.room : top * SIDE);
            }
        }
        for (u32 found = __ballot_sync(0xffffffffu, begin < end); found; found &= found - 1) {
            const int one = __ffs(found) - 1;
            count_block(counts, indices, __shfl_sync(0xffffffffu, begin, one), __shfl_sync(0xffffffffu, end, one),
                        __shfl_sync(0xffffffffu, from, one));
        }
    }
    __syncthreads();
    if (thread < OUT) keys[thread] = static_cast<u32>(min(counts[thread], MOST)) * OUT + OUT - 1 - thread;
    __syncthreads();
    if (thread < 4 * OUT) {  // four threads rank a feature
        const u32 key = keys[thread / 4];
        int rank = 0;
        for (int i = thread % 4; i < OUT / 4; i += 4) {
            const uint4 four = reinterpret_cast<const uint4*>(keys)[i];
            rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
        }
        rank += __shfl_xor_sync(0xffffffffu, rank, 1);
        rank += __shfl_xor_sync(0xffffffffu, rank, 2);
        sorted[rank] = key;
    }
    __syncthreads();
    if (thread >= 32) return;
    u32 load = 0;
    for (int i = 0; i < UNIT; ++i) {  // lanes are units
        int rank = 0;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const u32 other = __shfl_sync(0xffffffffu, load, u);
            rank += other < load || (other == load && u < lane);
        }
        if (lane < UNITS) {
            const u32 key = sorted[i * UNITS + rank], feature = OUT - 1 - key % OUT, place = lane * UNIT + i;
            load += key / OUT;
            order[first + place] = static_cast<u8>(feature);
            places[first + feature] = static_cast<u8>(place);
        }
    }
}
#endif
