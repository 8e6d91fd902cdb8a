// Lists of elements by output feature: what csb_rows.cu multiplies. Made anew for each product, in either direction,
// from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into parts of OUT output features x PART summed ones, of a convolution's
// filter (csb_window.cuh) tap by tap, so that no part has two; a unit is 16 output features, the share of one warp. As
// warps of a thread block wait for each other, csb_order_kernel first deals the OUT features among its units, RUN at a
// time, those with most elements first, in rounds, in which the unit that has least so far takes the most.
// What a broadcast costs is the registers that it fills, so a list holds no more than it must: the number of items of
// each feature in 16 bytes, the first four items' summed features (within the part, a byte each) of each in 64 bytes,
// then feature after feature, in the order of the summed one, values by fours, and behind each four, in 8 bytes, the summed
// features of the next. What a feature has begins at a multiple of 8 bytes.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   slots     8 bytes each: the lists, those of a part one after the other
//   units     (units, parts of summed ones): first slot, number of slots or 0 without an element
//   order     (units, 16 / RUN): the first of each RUN features; null with RUN 16, where features stay as they lie
//   used      slots taken so far: where a part's lists lie depends on the run, what is in them does not
//
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same and the lists are the same on every run.
// Grid: parts, those of summed features fastest; of csb_order_kernel, parts of output features. Bytes: 8 nnz read
// (SIDE / 64)^2 times from L2, 8 (nnz + pads) written.
// After R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969), for the dealing.
//
// Macros: SIDE, TRANSPOSED, OUT (64, 128, 256), RUN (4, 8, 16), PART (64, 128).
#include "csb.cuh"

constexpr int BAND = 64, SHARE = 128, THREADS = OUT / BAND * SHARE;  // threads that share a band of output features
constexpr int UNIT = 16, UNITS = OUT / UNIT, WORDS = PART / 32;
constexpr int HEADER = 10;  // slots of a list before its values
constexpr int RUNS = OUT / RUN, EACH = UNIT / RUN, COUNTERS = 1024;  // runs, and those of a unit

struct Problem {
    Matrix a;
    int steps;  // parts of summed features, over all taps
    int parts;  // of a tap
    int taps;
    int room;  // columns of a tap
};

// Elements of a feature, capped: the sum of sixteen and the number of a unit fit a word.
constexpr int MOST = 1 << 20;

struct Dealing {
    int count[OUT];
    int elements[RUNS], sorted[RUNS];
};

// Counts the elements of the output features from `first` on; a warp takes blocks in turn, and each lane a few
// neighbours of their elements, so that lanes seldom meet one counter.
DEVICE void count_elements(int (&count)[OUT], const int* __restrict__ indptr, const u16* __restrict__ indices,
                           const Problem& p, int first) {
    const int lane = threadIdx.x % 32, features = TRANSPOSED ? p.room : p.a.rows;
    const int left = features - first < OUT ? features - first : OUT, inner = first % SIDE;
    const int bands = ceil_div(inner + left, SIDE);  // blocks that the features take
    const int others = TRANSPOSED ? ceil_div(p.a.rows, SIDE) * p.taps : p.a.across, blocks = bands * others;
    for (int round = threadIdx.x / 32; round < blocks; round += COUNTERS) {
        const int mine = round + COUNTERS / 32 * lane;
        int bounds[2] = {}, place = 0;
        if (mine < blocks) {
            const int band = mine % bands, other = mine / bands;
            const i64 block = TRANSPOSED
                ? i64(other / p.taps) * p.a.across + (other % p.taps * p.room + first) / SIDE + band
                : i64(first / SIDE + band) * p.a.across + other;
            bounds[0] = indptr[block], bounds[1] = indptr[block + 1], place = band * SIDE - inner;
        }
        for (int i = 0; i < 32 && round + COUNTERS / 32 * i < blocks; ++i) {
            const int begin = __shfl_sync(0xffffffffu, bounds[0], i), end = __shfl_sync(0xffffffffu, bounds[1], i);
            const int from = __shfl_sync(0xffffffffu, place, i), some = ceil_div(end - begin, 32);
            const int last = begin + (lane + 1) * some < end ? begin + (lane + 1) * some : end;
#pragma unroll 4
            for (int e = begin + lane * some; e < last; ++e) {
                const int out = (TRANSPOSED ? indices[e] & 255 : indices[e] >> 8) + from;
                if (0 <= out && out < OUT) atomicAdd(&count[out], 1);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(COUNTERS, 1)
csb_order_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, int* __restrict__ order,
                 u32* __restrict__ used, const __grid_constant__ Problem p) {
    await_predecessor();
    __shared__ Dealing s;
    const int thread = threadIdx.x, lane = thread % 32, first = blockIdx.x * OUT;
    if (blockIdx.x == 0 && thread == 0) *used = 0;
    if (thread < OUT) s.count[thread] = 0;
    __syncthreads();
    count_elements(s.count, indptr, indices, p, first);
    __syncthreads();
    if (thread < RUNS) {
        int elements = 0;
        for (int i = 0; i < RUN; ++i) elements += s.count[RUN * thread + i] < MOST ? s.count[RUN * thread + i] : MOST;
        s.elements[thread] = elements;
    }
    __syncthreads();
    if (thread < RUNS) {
        const int mine = s.elements[thread];
        int rank = 0;
#pragma unroll 8
        for (int i = 0; i < RUNS; ++i) rank += s.elements[i] > mine || (s.elements[i] == mine && i < thread);
        s.sorted[rank] = thread;
    }
    __syncthreads();
    if (thread >= 32) return;
    u32 load = 0;
#pragma unroll 1
    for (int taken = 0; taken < EACH; ++taken) {  // in a round each unit takes a run, the largest for who has least
        const u32 key = load * 32 + lane;
        int rank = 0;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) rank += __shfl_sync(0xffffffffu, key, i) < key;
        if (lane < UNITS) {
            const int run = s.sorted[taken * UNITS + rank];
            order[(blockIdx.x * UNITS + lane) * EACH + taken] = first + RUN * run;
            load += s.elements[run];
        }
    }
}

// Slots that `count` values take, with the summed features behind each four.
DEVICE int slots_of(int count) { return 3 * (count / 4) + (count % 4 + 1) / 2; }

struct Shared {
    u32 mask[OUT][WORDS];  // by place of the output feature, over the summed ones
    int begin[OUT];        // slot of the feature's first value, from the part's first
    int place[RUNS];       // of each run of features, in runs
    int header[OUT];       // first slot of the feature's unit, likewise
    int unit[UNITS];       // slots of each unit
    u32 first;             // slot of the part
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_lists_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 const int* __restrict__ order, uint2* __restrict__ slots, uint2* __restrict__ units,
                 u32* __restrict__ used, const __grid_constant__ Problem p) {
    await_predecessor();
    __shared__ Shared s;
    const int out_part = blockIdx.x / p.steps, step = blockIdx.x % p.steps, thread = threadIdx.x;
    const int tap = step / p.parts, summed_part = (step - tap * p.parts) * PART;
    const Matrix a = {p.a.rows, (tap + 1) * p.room, p.a.across};  // up to the tap's last column
    const auto for_part = [&](auto visit) {
        const int band = thread / SHARE * BAND, share = thread % SHARE, out = out_part * OUT + band;
        const auto at = [&](int o) { return RUN == UNIT ? band + o : s.place[(band + o) / RUN] * RUN + o % RUN; };
        if constexpr (TRANSPOSED)
            for_elements<SHARE, PART, BAND>(indptr, indices, a, summed_part, tap * p.room + out, share,
                                            [&](int e, int row, int column) { visit(e, at(column), row); });
        else
            for_elements<SHARE, BAND, PART>(indptr, indices, a, out, tap * p.room + summed_part, share,
                                            [&](int e, int row, int column) { visit(e, at(row), column); });
    };
    for (int i = thread; i < OUT * WORDS; i += THREADS) (&s.mask[0][0])[i] = 0;
    if (RUN < UNIT && thread < RUNS) s.place[order[out_part * RUNS + thread] / RUN - out_part * RUNS] = thread;
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
        s.begin[thread] = start + HEADER + sum - slots_of(count), s.header[thread] = start;
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
        u8* const indices = rank < 4 ? reinterpret_cast<u8*>(slots + s.first + s.header[place] + 2) + place % UNIT * 4
                                     : reinterpret_cast<u8*>(list - 1);
        indices[rank % 4] = static_cast<u8>(summed);
    });
}
