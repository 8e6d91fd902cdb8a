// The float32 product of a sparse matrix and a dense one on CUDA cores, for sm_90: y = A x, + bias, ReLU. Every output
// is the sum over its elements in the order of the summed index, by fused multiply-adds: the bits are those of csb.cu.
//
// A block owns WARPS units of 16 output features times SAMPLES = 32 * VEC samples. Four warps fetch, PART summed
// features at a time, its piece of x and the units' lists (csb_lists.cu; bulk copies) into a ring of stages. Each of
// WARPS warps multiplies its unit: a lane holds 16 x VEC sums in registers, reads items by broadcast and VEC values of x
// for each. In shared memory a row of x is a summed feature's samples, so that they are read as vectors. Features first
// it arrives by asynchronous copies; rows by bulk copies were slower: 512 bytes take the engine some 70 cycles. With
// FEATURES_LAST it is read in vectors and transposed on the way: 16 bytes of row r stand in place of those r / 4 % 8
// further (exclusive or), where eight quads of summed features of four samples meet no bank twice. Asynchronous copies of
// four bytes do the same where vectors do not fit; they are slower (2048 x 2048 x 4096 at 98 %: 140 us instead of 101).
// Lists that do not fit into a stage come in several, x with each.
//
// Lanes in groups, each with a unit of its own and fewer samples, so that x is read for up to 1024 output features,
// were slower by a quarter (two groups) to a half (four): a warp takes as long as its longest rows.
//
//   slots, lists, order   csb_lists.cu                                       (8 bytes);  (unit, 2, part);  (unit, run)
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature        float32
//   y         dense in the same orientation;  bias (features) or null                             float32
//
// Grid: blocks that take tiles in turn, output features fastest. Dynamic shared memory: STAGES * RowsTile.stage_bytes
// + 32 + 4 * SAMPLES.
// FLOP: 2 nnz samples. Bytes: 8 nnz per sample tile, x once per tile of output features, y once. The bound is shared
// memory: 4 bytes of x and a share of the item per multiply-add, 0.22 of the float32 peak on sm_90.
// After T. Gale et al., "Sparse GPU kernels for deep learning", SC 2020, and A. Buluç et al., SPAA 2009.
//
// With CONV x is an image, the samples are the output pixels of a convolution (or of its data gradient), and a step is
// a part of the pixels that a tap meets (csb_window.cuh).
//
// Macros: WARPS (4, 8, 16), VEC (1, 2, 4), PART (64, 128: summed features at a time), RUN (csb_lists.cu), FOURS (of
// items), STAGES, CAPACITY (slots of a stage), FEATURES_LAST, CONV (with FEATURES_LAST), VEC_X (floats per read of x;
// with FEATURES_LAST 4 or 1), VEC_Y (floats per store: VEC, with FEATURES_LAST 4, or 1), PHASE (0; to take times apart 1
// multiplies nothing, 2 copies no x).
#include "csb_tensor.cuh"
#include "csb_window.cuh"

struct Problem {
    i64 x_pitch, samples;
    int features, depth;
    int lists, steps;  // of each
    int tiles_down;    // tiles of output features
    int tiles;
    int relu;
#if CONV
    int parts;  // steps of a tap
    Window window;
#endif
};

constexpr int UNIT = 16;
constexpr int LIST = 8, LISTS = WARPS * UNIT / LIST;  // output features of a list
constexpr int HEADER = 2;                             // slots of a list before its items
constexpr int SAMPLES = 32 * VEC;
constexpr int FETCHERS = 128, THREADS = 32 * WARPS + FETCHERS;
constexpr int ROW = 4 * SAMPLES;  // bytes of a row of x in shared memory
constexpr int X_BYTES = PART * ROW;
constexpr int STAGE = X_BYTES + 8 * CAPACITY;
constexpr int NOTES = 4 * (LISTS + 4);  // bytes per stage: where each list lies, and whether the tile ends
constexpr u32 NONE = 0xffffffffu;

DEVICE void store_word(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// ---- what the fetching warps do

#if FEATURES_LAST
// x of a part on its way to shared memory, transposed: by fours of samples and quads of summed features, of which a
// thread reads the same of every four. BATCH reads are under way together, of two batches.
struct Columns {
    static constexpr int BATCH = 2, LINES = PART / 32, READS = SAMPLES / 16 * LINES;
    static_assert(READS % (2 * BATCH) == 0 && LINES % BATCH == 0, "whole batches of a sample");
    const float* __restrict__ x;
    const Problem& p;
    i64 sample;
    int feature;
    const int* pixels;  // with CONV, where each sample of the tile finds the tap's pixel, or -1

    static __device__ __forceinline__ int thread() { return threadIdx.x - 32 * WARPS; }
    static __device__ __forceinline__ int four(int read) { return thread() / 32 + FETCHERS / 32 * (read / LINES); }

    // Where the thread's part of a read begins in x, or null; of a sample, not of a line.
    __device__ __forceinline__ const float* find(int read) const {
        const int i = 4 * four(read) + thread() / 8 % 4;
#if CONV
        const i64 row = pixels[i];
        const bool there = row >= 0;
#else
        const i64 row = sample + i;
        const bool there = row < p.samples;
#endif
        const float* from = there ? x + row * p.x_pitch + feature + thread() % 8 * 4 : nullptr;
        asm volatile("" : "+l"(from));  // else the compiler keeps many of them, and spills them
        return from;
    }

    // Summed features from a line's on.
    __device__ __forceinline__ int left(int read) const {
        return p.depth - feature - thread() % 8 * 4 - read % LINES * 32;
    }

    static __device__ __forceinline__ u32 place(u32 stage, int read) {
        const int quad = thread() % 8, third = thread() / 8 % 4;
        return stage + (read % LINES * 32 + 4 * quad) * ROW + (four(read) ^ quad) * 16 + third * 4;
    }

    __device__ __forceinline__ void read(float4 (&to)[BATCH], int batch) const {
        const float* const from = find(batch * BATCH);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int read = batch * BATCH + i;
            const float* const at = from + read % LINES * 32;
            asm volatile(  // in this place: the compiler would start more reads than there are registers for
                "{\n .reg .pred there;\n setp.ne.b32 there, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n"
                " mov.b32 %2, 0;\n mov.b32 %3, 0;\n @there ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
                : "=&f"(to[i].x), "=&f"(to[i].y), "=&f"(to[i].z), "=&f"(to[i].w)
                : "l"(at), "r"(int(from && left(read) > 0)));
        }
    }

    static __device__ __forceinline__ void write(const float4 (&from)[BATCH], u32 stage, int batch) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const u32 to = place(stage, batch * BATCH + i);
            store_word(to, __float_as_uint(from[i].x));
            store_word(to + ROW, __float_as_uint(from[i].y));
            store_word(to + 2 * ROW, __float_as_uint(from[i].z));
            store_word(to + 3 * ROW, __float_as_uint(from[i].w));
        }
    }

    // Fills the stage; arrives at its barrier.
    __device__ __forceinline__ void fill(u32 stage, u32 barrier) const {
        if constexpr (VEC_X == 1) {
#pragma unroll 1
            for (int i = 0; i < READS; ++i) {
                const float* const from = find(i);
                const int some = from ? left(i) : 0;
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    copy_async<4>(place(stage, i) + e * ROW, from + i % LINES * 32 + e, e < some);
            }
            barrier_arrive_copied(barrier);
        } else {
            float4 values[2][BATCH];
#pragma unroll
            for (int b = 0; b < 2; ++b) read(values[b], b);
#pragma unroll 1
            for (int b = 0; b < READS / BATCH; b += 2) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    write(values[half], stage, b + half);
                    if (b + half + 2 < READS / BATCH) read(values[half], b + half + 2);
                }
            }
            barrier_arrive(barrier);
        }
    }
};
#else
DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, i64 sample, int feature) {
    constexpr int ACROSS = SAMPLES / VEC_X, STEP = FETCHERS / ACROSS;
    constexpr int GROUP = 8;  // copies whose bounds are known from one number
    const int thread = threadIdx.x - 32 * WARPS, column = thread % ACROSS * VEC_X, row = thread / ACROSS;
    const float* from = x + (feature + row) * p.x_pitch + sample + column;
    const i64 step = STEP * p.x_pitch;
    const int left = p.depth - feature;
    int there = (sample + column < p.samples ? (left < PART ? left : PART) : 0) - row;
    to += row * ROW + 4 * column;
    static_assert(PART / STEP % GROUP == 0 || PART / STEP < GROUP, "whole groups");
#pragma unroll 1
    for (int i = 0; i < PART / STEP; i += GROUP) {
#pragma unroll
        for (int g = 0; g < GROUP && g < PART / STEP; ++g) {
            copy_async<4 * VEC_X>(to + ROW * STEP * g, from, g * STEP < there);
            from += step;
        }
        to += ROW * STEP * GROUP;
        there -= GROUP * STEP;
    }
}
#endif

struct Fetch {
    u32 shared, notes, full, empty;
    int* pixels;
    Ring<STAGES> ring;

#if CONV
    // Finds the pixels of another tap or tile; the barrier keeps fetching warps from reading them too early or late.
    __device__ __forceinline__ void find_pixels(const Problem& p, i64 sample, int tap) {
        sync();
        for (int i = threadIdx.x - 32 * WARPS; i < SAMPLES; i += FETCHERS)
            pixels[i] = sample + i < p.samples
                            ? static_cast<int>(p.window.pixel(static_cast<u32>(sample + i), tap)) : -1;
        sync();
    }

    static __device__ __forceinline__ void sync() { asm volatile("bar.sync 1, %0;" ::"n"(FETCHERS) : "memory"); }
#endif

    // One part of one tile; `list`: this lane's. All fetching warps take the same decisions.
    __device__ __forceinline__ void part(const uint2* __restrict__ slots, uint2 list, const float* __restrict__ x,
                                         const Problem& p, i64 sample, int step) {
#if CONV
        const int tap = step / p.parts, feature = (step - tap * p.parts) * PART;
        if (feature == 0) find_pixels(p, sample, tap);
#else
        const int feature = step * PART;
#endif
        const int lane = threadIdx.x % 32;
        const bool leads = threadIdx.x / 32 == WARPS;
        u32 todo = __ballot_sync(0xffffffffu, list.y > 0);
        do {
            const u32 size = todo >> lane & 1 ? list.y : 0;
            u32 sum = size;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += other;
            }
            const u32 taken = todo & __ballot_sync(0xffffffffu, sum <= CAPACITY);
            todo &= ~taken;
            const u32 stage = shared + ring.index * STAGE, barrier = full + 8 * ring.index;
            barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
            if (leads) {
                const bool mine = taken >> lane & 1;
                const u32 total = 8 * __reduce_max_sync(0xffffffffu, mine ? sum : 0);
                const u32 note = notes + ring.index * NOTES;
                if (lane < LISTS) store_word(note + 4 * lane, mine ? X_BYTES + 8 * (sum - size) : NONE);
                if (lane == 0) store_word(note + 4 * LISTS, step + 1 == p.steps && todo == 0);
                __syncwarp();
                if (lane == 0) barrier_expect(barrier, total);
                __syncwarp();
                if (mine) copy_bulk(stage + X_BYTES + 8 * (sum - size), slots + list.x, 8 * size, barrier);
            }
#if PHASE == 2
            barrier_arrive(barrier);
#elif FEATURES_LAST
            Columns{x, p, sample, feature, pixels}.fill(stage, barrier);
#else
            fetch_x(stage, x, p, sample, feature);
            barrier_arrive_copied(barrier);
#endif
            ring.advance();
        } while (todo);
    }
};

// ---- what the multiplying warps do

// Loads in the order in which they are written: the compiler would wait for one before it starts the next.
DEVICE void load_pair(uint4& pair, u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pair.x), "=r"(pair.y), "=r"(pair.z), "=r"(pair.w) : "r"(from));
}

// VEC values of x of a lane's samples, which lie `lane` bytes into the row at `offset`.
DEVICE void load_x(float (&v)[VEC], u32 x, u32 offset, u32 lane) {
    const u32 from = x + (FEATURES_LAST ? offset ^ lane : offset + lane);
    if constexpr (VEC == 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[VEC - 1]) : "r"(from));
    else if constexpr (VEC == 2)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[VEC - 1]) : "r"(from));
    else
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0]) : "r"(from));
}

// The next COUNT items of one output feature.
template <int COUNT>
DEVICE void take(float (&sum)[VEC], u32 items, u32 x, u32 lane) {
    uint4 pairs[(COUNT + 1) / 2];
    float values[COUNT][VEC];
#pragma unroll
    for (int k = 0; k < COUNT; k += 2) load_pair(pairs[k / 2], items + 8 * k);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) load_x(values[k], x, k % 2 ? pairs[k / 2].z : pairs[k / 2].x, lane);
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            sum[v] = fmaf(__uint_as_float(k % 2 ? pairs[k / 2].w : pairs[k / 2].y), values[k][v], sum[v]);
}

// Rows of a list are short where matrices are sparse, and the issue of instructions is a bound of its own: items go by
// fours (unless rows are shorter), by twos, then one, so that nothing is counted, moved or tested for a single item.
template <int FIRST>
DEVICE void multiply(float (&sum)[UNIT][VEC], u32 list, u32 x, u32 lane) {
    u32 items = list + 8 * HEADER;
    u32 counts = 0;  // of two output features
#pragma unroll
    for (int i = 0; i < LIST; ++i) {
        if (i % 2 == 0) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(counts) : "r"(list + 2 * i));
        u32 count = i % 2 ? counts >> 16 : counts & 0xffff;
#if FOURS
#pragma unroll 1
        for (; count >= 4; count -= 4, items += 32) take<4>(sum[FIRST + i], items, x, lane);
        if (count & 2) take<2>(sum[FIRST + i], items, x, lane), items += 16;
#else
#pragma unroll 1
        for (; count >= 2; count -= 2, items += 16) take<2>(sum[FIRST + i], items, x, lane);
#endif
        if (count & 1) take<1>(sum[FIRST + i], items, x, lane), items += 16;
    }
}

// The output features of a unit.
struct Features {
    const int* __restrict__ runs;  // the first of each RUN
    int first;                     // with RUN 16

    __device__ __forceinline__ int operator[](int i) const {
        return RUN == UNIT ? first + i : __ldg(runs + i / RUN) + i % RUN;
    }
};

// Bias and ReLU.
DEVICE void finish(float (&sum)[UNIT][VEC], const float* __restrict__ bias, const Problem& p, const Features& features) {
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        const int feature = features[i];
        const float shift = bias && feature < p.features ? bias[feature] : 0.0f;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            if (bias) sum[i][v] += shift;
            if (p.relu) sum[i][v] = clamp_below(sum[i][v], 0.0f);
        }
    }
}

#if FEATURES_LAST
// Four lanes swap fours of values: lane i gets the i-th four of each.
DEVICE void swap_fours(float (&v)[UNIT]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            if (i / 4 & bit) continue;
            const float given = upper ? v[i] : v[i + 4 * bit];
            const float taken = __shfl_xor_sync(0xffffffffu, given, bit);
            if (upper) v[i] = taken;
            else v[i + 4 * bit] = taken;
        }
    }
}

#endif

DEVICE void write(float* __restrict__ y, const float (&sum)[UNIT][VEC], const Problem& p, i64 tile,
                  const Features& features) {
    const int lane = threadIdx.x % 32;
#if FEATURES_LAST
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        float v[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) v[i] = sum[i][j];
        if constexpr (VEC_Y == 4) {
            swap_fours(v);
            const int first = features[lane % 4 * 4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i64 sample = tile + (lane / 4 * 4 + i) * VEC + j;
                if (sample < p.samples && first < p.features)
                    *reinterpret_cast<float4*>(y + sample * p.features + first) =
                        make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
            }
        } else {
            const i64 sample = tile + lane * VEC + j;
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                const int feature = features[i];
                if (sample < p.samples && feature < p.features) y[sample * p.features + feature] = v[i];
            }
        }
    }
#else
    const i64 sample = tile + lane * VEC;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        const int feature = features[i];
        if (feature >= p.features) continue;
        float* to = y + feature * p.samples + sample;
        asm volatile("" : "+l"(to));  // else the compiler keeps all addresses, and spills them
        if constexpr (VEC_Y == VEC) {
            if (sample < p.samples) store<float, VEC>(to, sum[i]);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (sample + j < p.samples) to[j] = sum[i][j];
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_rows_kernel(const uint2* __restrict__ slots, const uint2* __restrict__ lists, const int* __restrict__ order,
                const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y,
                const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char stages[];
    const u32 shared = shared_address(stages), notes = shared + STAGES * STAGE + 32, full = notes + STAGES * NOTES;
    const u32 empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, FETCHERS + 1), barrier_init(empty + 8 * i, WARPS);
        barrier_init_done();
    }
    __syncthreads();
    if (warp >= WARPS) {
        if constexpr (WARPS == 16) give_registers<64>();
        Fetch fetch = {shared, notes, full, empty, reinterpret_cast<int*>(stages + (empty + 8 * STAGES - shared))};
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            const int number = tile % p.tiles_down * LISTS + lane;
            const i64 sample = i64(tile / p.tiles_down) * SAMPLES;
            const bool there = lane < LISTS && number < p.lists;
            const uint2* const from = lists + i64(number) * p.steps;
            uint2 next = there ? from[0] : make_uint2(0, 0);
            for (int step = 0; step < p.steps; ++step) {
                const uint2 list = next;
                if (there && step + 1 < p.steps) next = from[step + 1];
                fetch.part(slots, list, x, p, sample, step);
            }
        }
        return;
    }
    if constexpr (WARPS == 16) take_registers<104>();
    Ring<STAGES> ring;
    const u32 lane_bytes = lane * VEC * 4;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        float sum[UNIT][VEC] = {};
        bool last;
        do {
            barrier_wait(full + 8 * ring.index, ring.parity);
            const u32 stage = shared + ring.index * STAGE;
            const u32* const note = reinterpret_cast<const u32*>(stages + STAGES * STAGE + 32 + ring.index * NOTES);
            const uint2 list = *reinterpret_cast<const uint2*>(note + 2 * warp);
            last = note[LISTS];
            if (PHASE != 1 && list.x != NONE) multiply<0>(sum, stage + list.x, stage, lane_bytes);
            if (PHASE != 1 && list.y != NONE) multiply<LIST>(sum, stage + list.y, stage, lane_bytes);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * ring.index);
            ring.advance();
        } while (!last);
        const int unit = tile % p.tiles_down * WARPS + warp;
        const Features features = {order + unit * (UNIT / RUN), unit * UNIT};
        if (bias || p.relu) finish(sum, bias, p, features);
        write(y, sum, p, i64(tile / p.tiles_down) * SAMPLES, features);
    }
}
