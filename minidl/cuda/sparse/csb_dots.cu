// The sampled product of a layer's backward pass in float32, element by element, for sm_90: strict float32 where most
// of a dense tile (csb_sampled.cu) would be thrown away.
//
//   out[e] = sum over samples of dy[row of e, sample] * x[column of e, sample],   for the elements e of a pattern
//
// A block owns the elements of a region of ROWS x COLUMNS of the matrix and a chunk of samples. It lists them once, row
// after row, and deals them evenly to 16 warps, up to 64 each (more take further passes over the samples). Then four
// warps fetch SAMPLES = 32 * VEC samples at a time of the region's rows of dy and columns of x (asynchronous copies)
// into a ring of stages, and lane l of the others multiplies samples l, l + 32, ... for each element of its warp: sums
// stay in registers, dy too while the row is the same. At the end the lanes' sums are added in a fixed tree. Each chunk
// leaves one partial per element; sum_partials_kernel (channel_sum.cu) adds them in order.
//
//   indptr, indices   as in csb.cuh
//   dy, x     feature * pitch + sample, or with FEATURES_LAST sample * pitch + feature         float32
//   output    (chunks, nnz) dense; with one chunk the gradient itself, set or added to         float32
//
// Grid: regions of columns (fastest), of rows, chunks. Dynamic shared memory: DotsTile.shared_bytes.
// FLOP: 2 nnz samples. Bytes: (ROWS + COLUMNS) * 4 * samples per region, from L2. The bound is shared memory: 4 bytes of
// x, a share of dy and of the item per multiply-add, a tenth to a fifth of the float32 peak on sm_90.
//
// Macros: SIDE, TALL and WIDE (ROWS and COLUMNS: 64, 128, 256), VEC (samples of a lane), STAGES, FEATURES_LAST, VEC_DY,
// VEC_X (floats per copy: 4 or 1, features last 1).
#include "csb_tensor.cuh"
#include "csb.cuh"

struct Problem {
    i64 dy_pitch, x_pitch;
    i64 samples, nnz;
    Matrix a;
    int tiles_m, tiles_n;  // regions down and across
    int steps, chunks;     // stages that make up the sum, and among how many blocks they are divided
    int accumulate;
};

constexpr int WARPS = 16, ITEMS = 64, CAPACITY = WARPS * ITEMS;
constexpr int FETCHERS = 128, MULTIPLIERS = 32 * WARPS, THREADS = MULTIPLIERS + FETCHERS;
using Registers = RegisterShares<FETCHERS, 56, MULTIPLIERS, 104>;
constexpr int ROWS = TALL, COLUMNS = WIDE, SAMPLES = 32 * VEC, WORDS = COLUMNS / 32;
constexpr u32 FRESH = 1;  // of an item: its row is another than that of the item before

// Where a feature of a sample lies in an operand's part of a stage, in floats: lanes a sample apart meet no bank twice.
template <int EXTENT>
struct Layout {
    static constexpr int FEATURE = FEATURES_LAST ? 1 : SAMPLES, SAMPLE = FEATURES_LAST ? EXTENT + 1 : 1;
    static constexpr int BYTES = 4 * (FEATURES_LAST ? SAMPLES * (EXTENT + 1) : EXTENT * SAMPLES);
};
using Left = Layout<ROWS>;
using Right = Layout<COLUMNS>;
constexpr int STAGE = Left::BYTES + Right::BYTES;
static_assert(4 * SAMPLES * 256 <= 65536, "an item holds where a feature lies in 16 bits");

struct Shared {
    u64 full[STAGES], empty[STAGES];
    u32 items[CAPACITY];    // row << 16 | column | FRESH, both as bytes from the first in their part of a stage
    int elements[CAPACITY];
    u32 mask[ROWS][WORDS];  // the pattern
    int begin[ROWS];        // number of the row's first item
    int sums[ROWS / 32];
    int found;
};

// ---- what the fetching warps do

// One operand of a stage: EXTENT features, of which `left` exist, of SAMPLES samples, of which `there` do.
template <int EXTENT, int VECTOR>
DEVICE void fetch(u32 to, const float* __restrict__ from, i64 pitch, int left, int there) {
    using Place = Layout<EXTENT>;
    constexpr int ACROSS = (FEATURES_LAST ? EXTENT : SAMPLES) / VECTOR, DOWN = FEATURES_LAST ? SAMPLES : EXTENT;
    constexpr int GROUP = FETCHERS < ACROSS ? ACROSS / FETCHERS : 1;  // columns of a thread
    constexpr int STEP = FETCHERS < ACROSS ? 1 : FETCHERS / ACROSS;
    const int thread = threadIdx.x - MULTIPLIERS, row = thread / ACROSS;
    const int rows = FEATURES_LAST ? there : left, columns = FEATURES_LAST ? left : there;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        const int column = (thread % ACROSS + g * FETCHERS) * VECTOR;
        const float* source = from + row * pitch + column;
        u32 place = to + 4 * (FEATURES_LAST ? row * Place::SAMPLE + column : row * Place::FEATURE + column);
#pragma unroll 8
        for (int i = row; i < DOWN; i += STEP) {
            const bool valid = i < rows && column < columns;
            copy_to_stage<4 * VECTOR>(place, valid ? source : from, valid);
            source += STEP * pitch;
            place += 4 * STEP * (FEATURES_LAST ? Place::SAMPLE : Place::FEATURE);
        }
    }
}

struct Region {
    int row, column;  // the first
};

DEVICE void fetch_stage(u32 stage, const float* __restrict__ dy, const float* __restrict__ x, const Problem& p,
                        const Region& region, int step) {
    const i64 sample = i64(step) * SAMPLES, left = p.samples - sample;
    const int there = static_cast<int>(left < SAMPLES ? left : SAMPLES);
    const auto first = [&](const float* from, i64 pitch, int feature) {
        return FEATURES_LAST ? from + sample * pitch + feature : from + feature * pitch + sample;
    };
    fetch<ROWS, VEC_DY>(stage, first(dy, p.dy_pitch, region.row), p.dy_pitch, p.a.rows - region.row, there);
    fetch<COLUMNS, VEC_X>(stage + Left::BYTES, first(x, p.x_pitch, region.column), p.x_pitch,
                          p.a.columns - region.column, there);
}

// ---- what the multiplying warps do

DEVICE float at(const unsigned char* from, int i) { return reinterpret_cast<const float*>(from)[i]; }

// `each`: items of a warp, a multiple of four.
DEVICE void multiply(float (&sum)[ITEMS], const u32* items, int each, const unsigned char* stage) {
    const int lane = threadIdx.x % 32;
    const unsigned char* const left = stage + 4 * lane * Left::SAMPLE;
    const unsigned char* const right = stage + Left::BYTES + 4 * lane * Right::SAMPLE;
    float d[VEC] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; i += 4) {
        if (i >= each) break;
        const uint4 four = *reinterpret_cast<const uint4*>(items + i);
        const u32 item[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (item[k] & FRESH) {
#pragma unroll
                for (int v = 0; v < VEC; ++v) d[v] = at(left + (item[k] >> 16), 32 * v * Left::SAMPLE);
            }
            const unsigned char* const from = right + (item[k] & 0xfffc);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[i + k] = fmaf(d[v], at(from, 32 * v * Right::SAMPLE), sum[i + k]);
        }
    }
}

// Adds up 32 sums over the lanes; lane i returns the i-th.
template <int HALF = 16>
DEVICE float add_lanes(float* sum) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float given = upper ? sum[i] : sum[i + HALF], kept = upper ? sum[i + HALF] : sum[i];
        sum[i] = kept + __shfl_xor_sync(0xffffffffu, given, HALF);
    }
    if constexpr (HALF > 1) return add_lanes<HALF / 2>(sum);
    else return sum[0];
}

// ---- the list

struct Elements {
    const int* __restrict__ indptr;
    const u16* __restrict__ indices;
    Matrix a;
    Region region;

    // Multiplying threads only; each band of rows by threads of its own.
    template <class Visit>
    __device__ __forceinline__ void visit(Visit call) const {
        constexpr int BAND = 64, EACH = MULTIPLIERS * BAND / ROWS;
        if (threadIdx.x >= MULTIPLIERS) return;
        const int band = threadIdx.x / EACH * BAND;
        for_elements<EACH, BAND, COLUMNS>(indptr, indices, a, region.row + band, region.column, threadIdx.x % EACH,
                                          [&](int e, int row, int column) { call(e, band + row, column); });
    }
};

// Numbers the rows' items; all threads. Returns how many there are.
DEVICE int number(Shared& s, const Elements& elements) {
    const int thread = threadIdx.x, lane = thread % 32;
    for (int i = thread; i < ROWS * WORDS; i += THREADS) (&s.mask[0][0])[i] = 0;
    __syncthreads();
    elements.visit([&](int, int row, int column) { atomicOr(&s.mask[row][column / 32], 1u << column % 32); });
    __syncthreads();
    int count = 0, sum = 0;
    if (thread < ROWS) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[thread][w]);
        sum = count;
#pragma unroll
        for (int further = 1; further < 32; further *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, further);
            if (lane >= further) sum += other;
        }
        if (lane == 31) s.sums[thread / 32] = sum;
    }
    __syncthreads();
    if (thread < ROWS) {
        int before = 0;
        for (int w = 0; w < thread / 32; ++w) before += s.sums[w];
        s.begin[thread] = before + sum - count;
        if (thread == ROWS - 1) s.found = before + sum;
    }
    __syncthreads();
    return s.found;
}

// Of a pass: how many items, and how many for each warp, a multiple of four.
struct Pass {
    int count, each;
    __device__ __forceinline__ explicit Pass(int left)
        : count(left < CAPACITY ? left : CAPACITY), each((count + 4 * WARPS - 1) / (4 * WARPS) * 4) {}
};

// Lists the items from number `base`; all threads.
DEVICE void list(Shared& s, const Elements& elements, int base, const Pass& pass) {
    elements.visit([&](int e, int row, int column) {
        int rank = s.begin[row] + __popc(s.mask[row][column / 32] & ((1u << column % 32) - 1)) - base;
#pragma unroll
        for (int w = 0; w < WORDS - 1; ++w)
            if (w < column / 32) rank += __popc(s.mask[row][w]);
        if (0 <= rank && rank < pass.count) {
            s.items[rank] = 4u * (static_cast<u32>(row * Left::FEATURE) << 16 | column * Right::FEATURE);
            s.elements[rank] = e;
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) {
        if (i >= pass.count) s.items[i] = 0;
        else if (i % pass.each == 0 || s.items[i] >> 16 != s.items[i - 1] >> 16) s.items[i] |= FRESH;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_dots_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ dy,
                const float* __restrict__ x, float* __restrict__ output, const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char stages[];
    Shared& s = *reinterpret_cast<Shared*>(stages + STAGES * STAGE);
    const u32 shared = shared_address(stages), full = shared_address(s.full), empty = shared_address(s.empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, FETCHERS), barrier_init(empty + 8 * i, WARPS);
        barrier_init_done();
    }
    await_predecessor();
    u32 block = blockIdx.x;
    const int column = block % p.tiles_n * COLUMNS;
    block /= p.tiles_n;
    const int chunk = block / p.tiles_m;
    const Region region = {static_cast<int>(block % p.tiles_m) * ROWS, column};
    const int first = static_cast<int>(i64(p.steps) * chunk / p.chunks);
    const int last = static_cast<int>(i64(p.steps) * (chunk + 1) / p.chunks);
    const Elements elements = {indptr, indices, p.a, region};
    const int found = number(s, elements), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring<STAGES> ring;
    if (warp >= WARPS) {
        Registers::give();
        for (int base = 0; base < found; base += CAPACITY) {
            const Pass pass(found - base);
            list(s, elements, base, pass);
            for (int step = first; step < last; ++step) {
                barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
                fetch_stage(shared + ring.index * STAGE, dy, x, p, region, step);
                arrive_with_copies(full + 8 * ring.index);
                ring.advance();
            }
            __syncthreads();
        }
        return;
    }
    Registers::take();
    for (int base = 0; base < found; base += CAPACITY) {
        const Pass pass(found - base);
        list(s, elements, base, pass);
        float sum[ITEMS] = {};
        for (int step = first; step < last; ++step) {
            barrier_wait(full + 8 * ring.index, ring.parity);
            multiply(sum, s.items + warp * pass.each, pass.each, stages + ring.index * STAGE);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * ring.index);
            ring.advance();
        }
        float* const out = output + chunk * p.nnz;
#pragma unroll
        for (int h = 0; h < ITEMS; h += 32) {
            const float value = add_lanes(sum + h);
            const int mine = h + lane, item = warp * pass.each + mine;
            if (mine < pass.each && item < pass.count) {
                const int e = s.elements[item];
                out[e] = p.accumulate ? out[e] + value : value;
            }
        }
        __syncthreads();  // the list is no longer read
    }
}
