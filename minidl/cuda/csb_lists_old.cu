// Lists of elements by output feature: what csb_rows.cu multiplies. Made anew for each product, in either direction,
// from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into parts of 64 output features x PART summed ones, of a convolution's
// filter (csb_window.cuh) tap by tap, so that no part has two; a unit is 16 output features of a part, the share of one
// warp. A unit's list is a header, the number of items of each feature in 16 bytes and 16 more, then the items (x,
// value): `x` is the summed feature within the part times `scale`. Items of a feature lie in the order of the summed
// one and begin at a multiple of 16 bytes.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   slots     8 bytes each: the lists, those of a part one after the other
//   units     (4 * parts of output features, parts of summed ones): first slot, number of slots or 0 without an element
//   used      slots taken so far, 0 at first: where a part's lists lie depends on the run, what is in them does not
//
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same and the lists are the same on every run.
// Grid: parts, those of summed features fastest. Bytes: 6 nnz read (SIDE / 64)^2 times from L2, 8 (nnz + pads) written.
//
// Macros: SIDE, TRANSPOSED, PART (64, 128).
#include "csb.cuh"

constexpr int THREADS = 128, OUT = 64, UNIT = 16, UNITS = OUT / UNIT, WORDS = PART / 32;
constexpr int HEADER = 4;  // slots of a header

struct Problem {
    Matrix a;
    int steps;  // parts of summed features, over all taps
    int parts;  // of a tap
    int room;   // columns of a tap
    int scale;
};

struct Shared {
    u32 mask[OUT][WORDS];  // by output feature, over the summed ones
    int begin[OUT];        // slot of the feature's first item, from the part's first
    int unit[UNITS];        // slots of each unit
    u32 first;              // slot of the part
};

extern "C" __global__ void __launch_bounds__(THREADS)
csb_lists_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 uint2* __restrict__ slots, uint2* __restrict__ units, u32* __restrict__ used,
                 const __grid_constant__ Problem p) {
    __shared__ Shared s;
    const int out_part = blockIdx.x / p.steps, step = blockIdx.x % p.steps, thread = threadIdx.x;
    const int tap = step / p.parts, summed_part = (step - tap * p.parts) * PART;
    const Matrix a = {p.a.rows, (tap + 1) * p.room, p.a.across};  // up to the tap's last column
    const auto for_part = [&](auto visit) {
        if constexpr (TRANSPOSED)
            for_elements<THREADS, PART, OUT>(indptr, indices, a, summed_part, tap * p.room + out_part * OUT, thread,
                                             [&](int e, int row, int column) { visit(e, column, row); });
        else
            for_elements<THREADS, OUT, PART>(indptr, indices, a, out_part * OUT, tap * p.room + summed_part, thread,
                                             visit);
    };
    for (int i = thread; i < OUT * WORDS; i += THREADS) (&s.mask[0][0])[i] = 0;
    __syncthreads();
    for_part([&](int, int out, int summed) { atomicOr(&s.mask[out][summed / 32], 1u << summed % 32); });
    __syncthreads();
    int count = 0, sum = 0;
    if (thread < OUT) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[thread][w]);
        sum = (count + 1) & ~1;
#pragma unroll
        for (int further = 1; further < UNIT; further *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, further, UNIT);
            if (thread % UNIT >= further) sum += other;
        }
        if (thread % UNIT == UNIT - 1) s.unit[thread / UNIT] = sum > 0 ? HEADER + sum : 0;
    }
    __syncthreads();
    if (thread == 0) s.first = atomicAdd(used, s.unit[0] + s.unit[1] + s.unit[2] + s.unit[3]);
    __syncthreads();
    if (thread < OUT) {
        const int unit = thread / UNIT, size = s.unit[unit];
        int start = 0;
        for (int u = 0; u < unit; ++u) start += s.unit[u];
        const int item = HEADER + sum - ((count + 1) & ~1);
        s.begin[thread] = start + item;
        if (size) reinterpret_cast<u8*>(slots + s.first + start)[thread % UNIT] = static_cast<u8>(count);
        if (thread % UNIT == 0)
            units[i64(out_part * UNITS + unit) * p.steps + step] = make_uint2(s.first + start, size);
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
