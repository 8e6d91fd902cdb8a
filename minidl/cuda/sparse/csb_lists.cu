// Lists of elements by output feature: what csb_rows.cu multiplies. Made anew for each product, in either direction,
// from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into parts of OUT output features x PART summed ones, of a convolution's
// filter (csb_window.cuh) tap by tap, so that no part has two; a unit is 16 output features, the share of one warp. Which
// these are says an order that is kept with the pattern (csb_order.py); so a part's elements lie anywhere among the RANGE
// output features that were dealt together, and a thread block looks through all of them.
// What a broadcast costs is the registers that it fills, so a list holds no more than it must: the number of items of
// each feature in 16 bytes, the first four items' summed features (within the part, a byte each) of each in 64 bytes,
// then feature after feature, in the order of the summed one, values by fours, and behind each four, in 8 bytes, the
// summed features of the next. What a feature has begins at a multiple of 8 bytes.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   order     csb_order.py; null: features stay as they lie                              int32
//   slots     8 bytes each: the lists
//   units     (units, parts of summed ones): first slot, number of slots or 0 without an element
//
// Where lists lie follows from the block pointers: a value takes a slot at most, so the elements before a range and part
// tell where its lists may begin (blocks that have SHARED parts count as often), and within it all sizes are known.
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same and the lists are the same on every run. Places taken from a counter, which had to be
// cleared before, cost 2 us of 9.5 (2048 x 2048 at 98 %). On an H200 all this takes 6.6 to 8.8 us, latencies mostly: one
// after the other order, pointers, indices, and pointers, indices and values again.
// Grid: parts, those of summed features fastest. Bytes: 2 nnz min(features, RANGE) / OUT read from L2, 4 nnz more, and
// 8 (nnz + pads) written.
//
// Macros: SIDE, TRANSPOSED, OUT (64, 128, 256), PART (64, 128).
#include "csb.cuh"

constexpr int TILE = 64;  // a warp looks through tiles of so many rows and columns
constexpr int UNIT = 16, WORDS = PART / 32;
constexpr int HEADER = 10;                                // slots of a list before its values
constexpr int RANGE = 1024, UNITS = RANGE / UNIT;         // as many threads
constexpr int SHARED = SIDE > PART ? SIDE / PART : 1;     // parts of a block
constexpr int MOST = 256;                                 // to a multiple of so many features there is an order

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
    u32 mask[RANGE][WORDS];  // by place of the output feature, over the summed ones
    int begin[RANGE];        // slot of the feature's first value, from the first of all here
    int unit[UNITS];         // slots of each unit
    int start[UNITS];        // its first slot, likewise
    u32 first;               // of all here
    short place[RANGE];      // of an output feature
};

// Rows and columns of the matrix in which a range and a part lie.
struct Cell {
    int row, column, last_row, last_column;
};

// Slots before those of a cell, as far as one thread of many knows: their sum counts.
DEVICE u32 slots_before(const int* __restrict__ indptr, const Matrix& a, const Cell& cell, int thread) {
    const int top = cell.row / SIDE, left = cell.column / SIDE, right = ceil_div(cell.last_column, SIDE);
    const int sharing = (TRANSPOSED ? cell.row : cell.column) / PART % SHARED;
    u32 before = thread == 0 ? SHARED * indptr[i64(top) * a.across] : 0;
    for (int r = top + thread; r * SIDE < cell.last_row; r += RANGE) {
        const int* const line = indptr + i64(r) * a.across;
        before += SHARED * (line[left] - line[0]);
        if (sharing) before += sharing * (line[right] - line[left]);
    }
    return before;
}

extern "C" __global__ void __launch_bounds__(RANGE, 1)
csb_lists_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 const int* __restrict__ order, uint2* __restrict__ slots, uint2* __restrict__ units,
                 const __grid_constant__ Problem p) {
    await_predecessor();
    __shared__ Shared s;
    const int step = blockIdx.x % p.steps, mine = blockIdx.x / p.steps * OUT, thread = threadIdx.x;
    const int tap = step / p.parts, part = step - tap * p.parts, range = mine / RANGE, first = range * RANGE;
    const Matrix a = {p.a.rows, (tap + 1) * p.room, p.a.across};  // up to the tap's last column
    const int extent = p.features - first < RANGE ? p.features - first : RANGE;
    const auto for_range = [&](auto visit) {
        constexpr int ACROSS = PART / TILE;
        for (int tile = thread / 32; tile < ceil_div(extent, TILE) * ACROSS; tile += RANGE / 32) {
            const int out = tile / ACROSS * TILE, summed = tile % ACROSS * TILE, lane = thread % 32;
            const auto see = [&](int e, int o, int k) { visit(e, s.place[out + o], summed + k); };
            if constexpr (TRANSPOSED)
                for_elements<32, TILE, TILE>(indptr, indices, a, part * PART + summed, tap * p.room + first + out, lane,
                                             [&](int e, int row, int column) { see(e, column, row); });
            else
                for_elements<32, TILE, TILE>(indptr, indices, a, first + out, tap * p.room + part * PART + summed, lane,
                                             see);
        }
    };
    for (int i = thread; i < RANGE * WORDS; i += RANGE) (&s.mask[0][0])[i] = 0;
    if (thread == 0) s.first = 0;
    const int slot = first + thread;
    if (slot < ceil_div(p.features, MOST) * MOST) {
        const int feature = (order ? order[slot] : slot) - first;
        s.place[feature] = static_cast<short>(thread);
    }
    __syncthreads();
    for_range([&](int, int place, int summed) { atomicOr(&s.mask[place][summed / 32], 1u << summed % 32); });
    if (thread < RANGE / SIDE || thread < PART / SIDE || thread == 0) {
        Cell cell;
        u32 before;  // cells
        if constexpr (TRANSPOSED) {
            const int end = (tap + 1) * p.room, right = tap * p.room + first + RANGE, taps = p.steps / p.parts;
            cell = {part * PART, tap * p.room + first, (part + 1) * PART, right < end ? right : end};
            before = ((part / SHARED * taps + tap) * ceil_div(p.features, RANGE) + range) * SHARED + part % SHARED;
        } else {
            cell = {first, tap * p.room + part * PART, first + RANGE, tap * p.room + (part + 1) * PART};
            before = range * p.steps + step;
        }
        cell.last_row = cell.last_row < a.rows ? cell.last_row : a.rows;
        cell.last_column = cell.last_column < a.columns ? cell.last_column : a.columns;
        atomicAdd(&s.first, slots_before(indptr, a, cell, thread) + (thread == 0 ? before * UNITS * (HEADER + 2) : 0));
    }
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[thread][w]);
    int sum = slots_of(count);
#pragma unroll
    for (int further = 1; further < UNIT; further *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, further, UNIT);
        if (thread % UNIT >= further) sum += other;
    }
    if (thread % UNIT == UNIT - 1) s.unit[thread / UNIT] = sum > 0 ? (HEADER + sum + 1) & ~1 : 0;
    __syncthreads();
    if (thread < 32) {
        const int size[2] = {s.unit[2 * thread], s.unit[2 * thread + 1]};
        int end = size[0] + size[1];
#pragma unroll
        for (int further = 1; further < 32; further *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, further);
            if (thread >= further) end += other;
        }
        s.start[2 * thread] = end - size[1] - size[0], s.start[2 * thread + 1] = end - size[1];
    }
    __syncthreads();
    const u32 begin = (s.first + 1) & ~1u;  // aligned to 16 bytes
    const int start = s.start[thread / UNIT], size = s.unit[thread / UNIT];
    s.begin[thread] = start + HEADER + sum - slots_of(count);
    if (first + thread >= mine && first + thread < mine + OUT) {
        if (size) reinterpret_cast<u8*>(slots + begin + start)[thread % UNIT] = static_cast<u8>(count);
        if (thread % UNIT == 0) units[i64((first + thread) / UNIT) * p.steps + step] = make_uint2(begin + start, size);
    }
    __syncthreads();
    for_range([&](int e, int place, int summed) {
        if (first + place < mine || first + place >= mine + OUT) return;
        int rank = __popc(s.mask[place][summed / 32] & ((1u << summed % 32) - 1));
#pragma unroll
        for (int w = 0; w < WORDS - 1; ++w)
            if (w < summed / 32) rank += __popc(s.mask[place][w]);
        uint2* const list = slots + begin + s.begin[place] + rank / 4 * 3;
        reinterpret_cast<float*>(list)[rank % 4] = values[e];
        const int unit = place / UNIT;
        u8* const indices = rank < 4 ? reinterpret_cast<u8*>(slots + begin + s.start[unit] + 2) + place % UNIT * 4
                                     : reinterpret_cast<u8*>(list - 1);
        indices[rank % 4] = static_cast<u8>(summed);
    });
}
