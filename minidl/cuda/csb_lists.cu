// Lists of elements by output feature: what csb_rows.cu multiplies. Made anew for each product, in either direction, from
// the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into parts of 64 output features x 64 summed ones; a unit is 16 output
// features of a part, the share of one warp. A unit's list is a header of 16 u16, the byte behind each feature's last
// item counted from the list's beginning, then the items (x, value): `x` is the summed feature within the part times
// `scale`. Items of a feature lie in the order of the summed one and begin at a multiple of 16 bytes.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   slots     8 bytes each: the lists. That of a part begins where no other can reach: at the elements before it plus
//             PAD per part before it, rounded to 16 bytes, so that nothing need be counted beforehand
//   units     (4 * parts of output features, parts of summed ones): first slot and number of slots, 0 without an element
//
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same and the lists are the same on every run.
// Grid: parts. Bytes: 6 nnz (SIDE / 64)^2 read from L2, 8 (nnz + pads) written.
//
// Macros: SIDE (64, 128 or 256), TRANSPOSED.
#include "csb.cuh"

constexpr int THREADS = 128, PART = 64, UNIT = 16, UNITS = PART / UNIT;
constexpr int HEADER = 4;                       // slots of a header
constexpr int PAD = PART + UNITS * HEADER + 2;  // slots of a part besides its elements, at most; even
constexpr int SUB = SIDE / PART;

struct Problem {
    Matrix a;
    int parts_across;  // parts of stored columns
    int steps;         // parts of summed features
    int scale;
};

struct Shared {
    u32 mask[PART][2];   // by output feature, over the summed ones
    int begin[PART];     // slot of the feature's first item, from the part's first
    int unit[UNITS];     // slots of each unit
    int scratch[32];
};

// Elements of the part's block that belong to parts before it.
DEVICE int elements_before(const u16* __restrict__ indices, int begin, int end, int part, int* scratch) {
    if (SUB == 1) return 0;
    int before = 0;
    for (int e = begin + threadIdx.x; e < end; e += THREADS) {
        const int index = indices[e];
        before += (index >> 8) / PART * SUB + (index & 255) / PART < part;
    }
    return block_sum<THREADS>(before, scratch);
}

extern "C" __global__ void __launch_bounds__(THREADS)
csb_lists_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 uint2* __restrict__ slots, uint2* __restrict__ units, const __grid_constant__ Problem p) {
    __shared__ Shared s;
    const int down = blockIdx.x / p.parts_across, right = blockIdx.x % p.parts_across, thread = threadIdx.x;
    const int block = down / SUB * p.a.across + right / SUB, part = down % SUB * SUB + right % SUB;
    const int block_begin = indptr[block];
    const int before = elements_before(indices, block_begin, indptr[block + 1], part, s.scratch);
    const u32 first = ((u32(block_begin) + before + 1) & ~1u) + (u32(block) * SUB * SUB + part) * PAD;

    s.mask[thread / 2][thread % 2] = 0;
    __syncthreads();
    for_elements<THREADS, PART, PART>(indptr, indices, p.a, down * PART, right * PART, threadIdx.x, [&](int, int row, int column) {
        const int out = TRANSPOSED ? column : row, summed = TRANSPOSED ? row : column;
        atomicOr(&s.mask[out][summed / 32], 1u << summed % 32);
    });
    __syncthreads();
    int count = 0, sum = 0;
    if (thread < PART) {
        count = __popc(s.mask[thread][0]) + __popc(s.mask[thread][1]);
        sum = (count + 1) & ~1;
#pragma unroll
        for (int step = 1; step < UNIT; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, step, UNIT);
            if (thread % UNIT >= step) sum += other;
        }
        if (thread % UNIT == UNIT - 1) s.unit[thread / UNIT] = HEADER + sum;
    }
    __syncthreads();
    if (thread < PART) {
        int start = 0;
        for (int u = 0; u < thread / UNIT; ++u) start += s.unit[u];
        const int item = HEADER + sum - ((count + 1) & ~1);
        s.begin[thread] = start + item;
        reinterpret_cast<u16*>(slots + first + start)[thread % UNIT] = static_cast<u16>(8 * (item + count));
        if (thread % UNIT == 0) {
            const int size = s.unit[thread / UNIT], out = TRANSPOSED ? right : down, step = TRANSPOSED ? down : right;
            units[i64(out * UNITS + thread / UNIT) * p.steps + step] = make_uint2(first + start, size > HEADER ? size : 0);
        }
    }
    __syncthreads();
    for_elements<THREADS, PART, PART>(indptr, indices, p.a, down * PART, right * PART, threadIdx.x, [&](int e, int row, int column) {
        const int out = TRANSPOSED ? column : row, summed = TRANSPOSED ? row : column;
        const u32 low = s.mask[out][0], below = (1u << summed % 32) - 1;
        const int rank = summed < 32 ? __popc(low & below) : __popc(low) + __popc(s.mask[out][1] & below);
        slots[first + s.begin[out] + rank] = make_uint2(summed * p.scale, __float_as_uint(values[e]));
    });
}
