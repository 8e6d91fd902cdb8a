// Lists of elements by output feature: what csb_rows.cu multiplies. Made anew for each product, in either direction,
// from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into parts of OUT output features x PART summed ones, of a convolution's
// filter (csb_window.cuh) tap by tap, so that no part has two; a unit is 16 output features, the share of one warp. Which
// these are says an order that is kept with the pattern (csb_order.py); a part then looks for its elements among all
// RANGE features that were dealt together.
// What a broadcast costs is the registers that it fills, so a list holds no more than it must: the number of items of
// each feature in 16 bytes, the first four items' summed features (within the part, a byte each) of each in 64 bytes,
// then feature after feature, in the order of the summed one, values by fours, and behind each four, in 8 bytes, the summed
// features of the next. What a feature has begins at a multiple of 8 bytes.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   slots     8 bytes each: the lists, those of a part one after the other
//   units     (units, parts of summed ones): first slot, number of slots or 0 without an element
//   order     csb_order.py; null: features stay as they lie                              u32
//   used      slots taken so far: where a part's lists lie depends on the run, what is in them does not
//
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same and the lists are the same on every run.
// Grid: parts, those of summed features fastest. Bytes: 2 nnz min(features, RANGE) / OUT read from L2, 4 nnz more, and
// 8 (nnz + pads) written.
//
// Macros: SIDE, TRANSPOSED, OUT (64, 128, 256), PART (64, 128).
#include "csb.cuh"

constexpr int THREADS = 1024, TILE = 64;  // a warp looks through tiles of so many rows and columns
constexpr int UNIT = 16, UNITS = OUT / UNIT, WORDS = PART / 32;
constexpr int HEADER = 10;  // slots of a list before its values
constexpr int RANGE = 1024, GROUP = 64;

struct Problem {
    Matrix a;
    int features;  // of the output
    int steps;     // parts of summed features, over all taps
    int parts;     // of a tap
    int room;      // columns of a tap
};

// Slots that `count` values take, with the summed features behind each four.
DEVICE int slots_of(int count) { return 3 * (count / 4) + (count % 4 + 1) / 2; }

struct Shared {
    u32 mask[OUT][WORDS];  // by place of the output feature, over the summed ones
    int begin[OUT];        // slot of the feature's first value, from the part's first
    int unit[UNITS];       // slots of each unit
    int start[UNITS];      // its first slot, from the part's first
    u32 first;             // slot of the part
    short place[RANGE];    // of a feature in this part, or -1
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_lists_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 const u32* __restrict__ order, uint2* __restrict__ slots, uint2* __restrict__ units,
                 u32* __restrict__ used, const __grid_constant__ Problem p) {
    await_predecessor();
    __shared__ Shared s;
    const int out_part = blockIdx.x / p.steps, step = blockIdx.x % p.steps, thread = threadIdx.x;
    const int tap = step / p.parts, summed_part = (step - tap * p.parts) * PART;
    const Matrix a = {p.a.rows, (tap + 1) * p.room, p.a.across};  // up to the tap's last column
    const int range = order ? RANGE : OUT, first = out_part * OUT / range * range;
    const int extent = p.features - first < range ? p.features - first : range;
    const auto for_part = [&](auto visit) {
        constexpr int ACROSS = PART / TILE;
        for (int tile = thread / 32; tile < ceil_div(extent, TILE) * ACROSS; tile += THREADS / 32) {
            const int out = tile / ACROSS * TILE, summed = tile % ACROSS * TILE;
            const auto look = [&](int e, int o, int k) {
                const int place = s.place[out + o];
                if (place >= 0) visit(e, place, summed + k);
            };
            if constexpr (TRANSPOSED)
                for_elements<32, TILE, TILE>(indptr, indices, a, summed_part + summed, tap * p.room + first + out,
                                             thread % 32, [&](int e, int row, int column) { look(e, column, row); });
            else
                for_elements<32, TILE, TILE>(indptr, indices, a, first + out, tap * p.room + summed_part + summed,
                                             thread % 32, look);
        }
    };
    for (int i = thread; i < OUT * WORDS; i += THREADS) (&s.mask[0][0])[i] = 0;
    for (int i = thread; i < RANGE; i += THREADS) s.place[i] = -1;
    __syncthreads();
    if (thread < OUT) {
        const int slot = out_part * OUT + thread, feature = (order ? order[slot] / GROUP : slot) - first;
        if (feature < extent) s.place[feature] = static_cast<short>(thread);
    }
    __syncthreads();
    for_part([&](int, int place, int summed) { atomicOr(&s.mask[place][summed / 32], 1u << summed % 32); });
    __syncthreads();
    int count = 0, sum = 0;
    if (thread < OUT) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[thread][w]);
        sum = slots_of(count);
#pragma unroll
        for (int further = 1; further < UNIT; further *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, further, UNIT);
            if (thread % UNIT >= further) sum += other;
        }
        if (thread % UNIT == UNIT - 1) s.unit[thread / UNIT] = sum > 0 ? (HEADER + sum + 1) & ~1 : 0;
    }
    __syncthreads();
    if (thread < 32) {
        const int size = thread < UNITS ? s.unit[thread] : 0;
        int end = size;
#pragma unroll
        for (int further = 1; further < UNITS; further *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, further);
            if (thread >= further) end += other;
        }
        if (thread < UNITS) s.start[thread] = end - size;
        if (thread == UNITS - 1) s.first = atomicAdd(used, end);
    }
    __syncthreads();
    if (thread < OUT) {
        const int unit = thread / UNIT, size = s.unit[unit], start = s.start[unit];
        s.begin[thread] = start + HEADER + sum - slots_of(count);
        if (size) reinterpret_cast<u8*>(slots + s.first + start)[thread % UNIT] = static_cast<u8>(count);
        if (thread % UNIT == 0)
            units[i64(out_part * UNITS + unit) * p.steps + step] = make_uint2(s.first + start, size);
    }
    __syncthreads();
    for_part([&](int e, int place, int summed) {
        int rank = __popc(s.mask[place][summed / 32] & ((1u << summed % 32) - 1));
#pragma unroll
        for (int w = 0; w < WORDS - 1; ++w)
            if (w < summed / 32) rank += __popc(s.mask[place][w]);
        uint2* const list = slots + s.first + s.begin[place] + rank / 4 * 3;
        reinterpret_cast<float*>(list)[rank % 4] = values[e];
        const int unit = place / UNIT;
        u8* const indices = rank < 4 ? reinterpret_cast<u8*>(slots + s.first + s.start[unit] + 2) + place % UNIT * 4
                                     : reinterpret_cast<u8*>(list - 1);
        indices[rank % 4] = static_cast<u8>(summed);
    });
}
