// The float32 product of a sparse matrix and a dense one on CUDA cores, for sm_90: y = A x, + bias, ReLU. Every output
// is the sum over its elements in the order of the summed index, by fused multiply-adds: the bits are those of csb.cu.
//
// A block owns UNITS * 16 output features times SAMPLES = 32 * VEC samples. Four warps fetch, PART summed features at a
// time, its piece of x (asynchronous copies) and the units' lists (csb_lists.cu; bulk copies) into a ring of stages;
// lists that do not fit into a stage come in several, x with each. Each of UNITS warps multiplies its unit: a lane holds
// 16 x VEC sums in registers, reads items by broadcast and VEC values of x for each. Features first, x lies in planes of
// 32 samples, so that a summed feature's byte times 128 is where it begins, which one instruction adds to an address.
// With FEATURES_LAST x lies in shared memory as it does outside, rows of samples at a pitch of PART + 1 floats, where
// lanes a row apart meet no bank twice; so nothing is ever transposed.
//
// Tried and slower, on 2048 x 2048 x 4096 at 98 % where not said otherwise: rows of x by bulk copies, of which 512
// bytes take the engine some 70 cycles, and through registers; a third stage (no gain); x transposed on the way by
// copies of four bytes (1.2 times). x turned in registers, so that with FEATURES_LAST, too, a load brings 16 bytes of
// it (1.0 times; 1024 x 512 x 50176 1.07; at 95 % 0.93 to 1.04): multiplying alone took 89 us, not 95, but loads of
// four bytes get 2.8 TB/s out of L2, whether 16 or 32 KiB are under way, copies of four bytes 3.9, and those of 16,
// features first, 5.8; to prefetch into L2 cost 1.05 times. Not tried: loads of 16 bytes, turned four by four. Lanes in
// two or four groups, each with a unit of its own and as much fewer samples (1.3 and 1.7 times): a warp takes as long
// as its longest rows. 32 samples of up to 1408 summed features in shared memory, all output features in turn, four in
// lockstep, sorted by length (1.1 to 1.5 times, 256 x 2304 2.2): an item is then fetched for 32 samples, and 5 to 20 %
// of them were pads. An output feature of its own for each lane (1.8 times): elements cost no broadcast, but a block
// waits for its longest rows. Output features dealt one by one with FEATURES_LAST, and brought side by side through
// shared memory before they are written (1024 x 512 x 50176: 230 us instead of 206).
//
//   slots, units   csb_lists.cu                                              (8 bytes);  (unit, part)
//   order     csb_order.py, or null: output features by units                int32
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature        float32
//   y         dense in the same orientation;  bias (features) or null                             float32
//
// Grid: blocks that take tiles in turn, output features fastest. Dynamic shared memory: RowsTile.shared_bytes.
// FLOP: 2 nnz samples. Bytes: 8 nnz per sample tile, x once per tile of output features, y once. The bound is shared
// memory: 4 bytes of x and a share of the item per multiply-add, 0.22 of the float32 peak on sm_90.
// After T. Gale et al., "Sparse GPU kernels for deep learning", SC 2020, and A. Buluç et al., SPAA 2009.
//
// With CONV x is an image, the samples are the output pixels of a convolution (or of its data gradient), and a step is
// a part of the pixels that a tap meets (csb_window.cuh).
//
// Macros: UNITS (4, 8, 16), VEC (1 to 4), PART (64, 128: summed features at a time), STAGES,
// CAPACITY (slots of a stage), FEATURES_LAST, CONV (with FEATURES_LAST), VEC_X (floats per copy of x), VEC_Y (floats
// per store: VEC unless 3, with FEATURES_LAST 4, or 1), PHASE (0; to take times apart 1 multiplies nothing, 2 copies no
// x).
#include "csb_tensor.cuh"
#include "csb_window.cuh"

struct Problem {
    i64 x_pitch, samples;
    int features, depth;
    int units, steps;  // of the lists
    int tiles_down;    // tiles of output features
    int tiles;
    int relu;
#if CONV
    int parts;  // steps of a tap
    Window window;
#endif
};

constexpr int UNIT = 16;  // output features of a warp
constexpr int HEADER = 10;  // slots
constexpr int SAMPLES = 32 * VEC;
constexpr int FETCHERS = 128, THREADS = 32 * UNITS + FETCHERS;
constexpr int PITCH = PART + 1;  // floats from sample to sample of x in shared memory, features last
constexpr int PLANE = PART * 128;  // bytes of 32 samples of x, features first
constexpr bool STRIDED = FEATURES_LAST || VEC % 2;  // a lane's samples are 32 apart, else neighbours
constexpr int JUMP = FEATURES_LAST ? 128 * PITCH : PLANE;  // bytes between them
constexpr int SCALE = FEATURES_LAST ? 4 : 128;  // bytes from one summed feature to the next
constexpr int X_BYTES = FEATURES_LAST ? SAMPLES * PITCH * 4 : VEC * PLANE;
constexpr int STAGE = X_BYTES + 8 * CAPACITY;
constexpr int NOTES = 4 * (UNITS + 4);  // bytes per stage: where each unit's list lies, and whether the tile ends
constexpr u32 NONE = 0xffffffffu;

// ---- what the fetching warps do

#if FEATURES_LAST
// A warp fetches whole rows of samples, 32 features a copy, so that an address serves several: what a fetching warp can
// do is bound by how fast it issues instructions. Samples beyond the last are others again, whose sums nobody writes.
// `pixels`: with CONV, where each sample of the tile finds the tap's pixel, or -1.
DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, i64 sample, int feature, const int* pixels) {
    constexpr int COPIES = PART / 32, STEP = FETCHERS / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - UNITS;
    bool inside[COPIES];
#pragma unroll
    for (int c = 0; c < COPIES; ++c) inside[c] = feature + lane + 32 * c < p.depth;
    to += 4 * (warp * PITCH + lane);
    x += feature + lane;
    const int left = (p.samples - sample < SAMPLES ? static_cast<int>(p.samples - sample) : SAMPLES) - warp;
    const float* from = x + (left > 0 ? sample + warp : sample) * p.x_pitch;
#pragma unroll 4
    for (int i = 0; i < SAMPLES / STEP; ++i) {
#if CONV
        const int pixel = pixels[warp + i * STEP];
        from = x + pixel * p.x_pitch;
#else
        constexpr int pixel = 0;
#endif
#pragma unroll
        for (int c = 0; c < COPIES; ++c) copy_async<4>(to + 128 * c, from + 32 * c, inside[c] && pixel >= 0);
        to += 4 * PITCH * STEP;
        if ((i + 1) * STEP < left) from += STEP * p.x_pitch;
    }
}
#else
DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, i64 sample, int feature, const int*) {
    constexpr int ACROSS = 32 / VEC_X, STEP = FETCHERS / ACROSS, COPIES = PART / STEP;
    constexpr int BATCH = COPIES < 8 ? COPIES : 8;  // copies whose bounds are known from one number
    const int thread = threadIdx.x - 32 * UNITS, column = thread % ACROSS * VEC_X, row = thread / ACROSS;
    const int left = p.depth - feature < PART ? p.depth - feature : PART;
    const i64 step = STEP * p.x_pitch;
    to += 128 * row + 4 * column;
    x += (feature + row) * p.x_pitch + sample + column;
#pragma unroll 1
    for (int plane = 0; plane < VEC; ++plane) {
        const float* from = x + 32 * plane;
        int there = (sample + column + 32 * plane < p.samples ? left : 0) - row;
#pragma unroll 1
        for (int i = 0; i < COPIES; i += BATCH) {
#pragma unroll
            for (int g = 0; g < BATCH; ++g) {
                copy_async<4 * VEC_X>(to + 128 * STEP * g, from, g * STEP < there);
                from += step;
            }
            to += 128 * STEP * BATCH;
            there -= STEP * BATCH;
        }
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
        warpgroup_sync(1);
        const int thread = threadIdx.x - 32 * UNITS;
        if (thread < SAMPLES)
            pixels[thread] = sample + thread < p.samples
                                 ? static_cast<int>(p.window.pixel(static_cast<u32>(sample + thread), tap)) : -1;
        warpgroup_sync(1);
    }
#endif

    // One part of one tile; `list`: this lane's unit. All fetching warps take the same decisions.
    __device__ __forceinline__ void part(const uint2* __restrict__ slots, uint2 list, const float* __restrict__ x,
                                         const Problem& p, i64 sample, int step) {
#if CONV
        const int tap = step / p.parts, feature = (step - tap * p.parts) * PART;
        if (feature == 0) find_pixels(p, sample, tap);
#else
        const int feature = step * PART;
#endif
        const int lane = threadIdx.x % 32;
        const bool leads = threadIdx.x / 32 == UNITS;
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
                if (lane < UNITS) store_word(note + 4 * lane, mine ? X_BYTES + 8 * (sum - size) : NONE);
                if (lane == 0) store_word(note + 4 * UNITS, step + 1 == p.steps && todo == 0);
                __syncwarp();
                if (lane == 0) barrier_expect(barrier, total);
                __syncwarp();
                if (mine) copy_bulk(stage + X_BYTES + 8 * (sum - size), slots + list.x, 8 * size, barrier);
            }
#if PHASE == 2
            barrier_arrive(barrier);
#else
            fetch_x(stage, x, p, sample, feature, pixels);
            barrier_arrive_copied(barrier);
#endif
            ring.advance();
        } while (todo);
    }

    static __device__ __forceinline__ void store_word(u32 address, u32 word) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
    }
};

// ---- what the multiplying warps do

// Loads in the order in which they are written: the compiler would wait for the first before it starts the others.
DEVICE u32 load_word(u32 from) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
    return word;
}

// VEC values of x of this lane's samples; `from`: the first.
DEVICE void load_x(float (&v)[VEC], u32 from) {
    if constexpr (STRIDED) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[j]) : "r"(from + j * JUMP));
    } else if constexpr (VEC == 2) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[VEC - 1]) : "r"(from));
    } else {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[VEC - 1])
                     : "r"(from));
    }
}

// The next COUNT items of one output feature: values from `from` on, summed features in bytes of a word. All loads start
// before the first is waited for. A byte is picked, scaled and added to the address by one instruction.
template <int COUNT>
DEVICE void take(float (&sum)[VEC], u32 from, u32 indices, u32 x) {
    float weights[COUNT], values[COUNT][VEC];
#pragma unroll
    for (int k = 0; k + 1 < COUNT; k += 2)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(weights[k]), "=f"(weights[k + 1]) : "r"(from + 4 * k));
    if constexpr (COUNT % 2)
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(weights[COUNT - 1]) : "r"(from + 4 * COUNT - 4));
#pragma unroll
    for (int k = 0; k < COUNT; ++k) load_x(values[k], __dp4a(indices, static_cast<u32>(SCALE) << 8 * k, x));
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] = fmaf(weights[k], values[k][v], sum[v]);
}

// Rows of a list are short where matrices are sparse, so the issue of instructions and the latency of loads are bounds of
// their own: items go by fours, and what is left together. Counts of four output features are read ahead; passing
// through a shuffle they are known to be the same for all lanes, so that branches need no barriers of convergence.
DEVICE void multiply(float (&sum)[UNIT][VEC], u32 list, u32 x) {
    u32 values = list + 8 * HEADER;
    u32 first = load_word(list + 16);  // four summed features of an output feature
    u32 counts = __shfl_sync(0xffffffffu, load_word(list), 0), further = 0;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        u32 count = counts >> 8 * (i % 4) & 255, indices = first;
        if (i + 1 < UNIT) first = load_word(list + 20 + 4 * i);
        if (i % 4 == 1 && i + 3 < UNIT) further = load_word(list + i + 3);
        if (i % 4 == 2) further = __shfl_sync(0xffffffffu, further, 0);
        if (i % 4 == 3) counts = further;
#pragma unroll 1
        for (; count >= 4; count -= 4) {
            const u32 next = load_word(values + 16);
            take<4>(sum[i], values, indices, x);
            values += 24, indices = next;
        }
        if (count & 2) {
            if (count & 1) take<3>(sum[i], values, indices, x), values += 16;
            else take<2>(sum[i], values, indices, x), values += 8;
        } else if (count & 1) {
            take<1>(sum[i], values, indices, x), values += 8;
        }
    }
}

// The output features of a unit.
struct Features {
    const int* __restrict__ order;
    int first;

    __device__ __forceinline__ int operator[](int i) const { return order ? __ldg(order + first + i) : first + i; }
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
#else
// Neighbours at once. In assembly, since the compiler takes such stores apart, an instruction for each value, to save
// itself the moving of registers; each of these then writes a part of sixteen sectors.
DEVICE void store_row(float* to, const float (&v)[VEC]) {
    if constexpr (VEC == 4)
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[VEC - 1]) : "memory");
    else if constexpr (VEC == 2)
        asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v[0]), "f"(v[VEC - 1]) : "memory");
    else
        *to = v[0];
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
                const i64 sample = tile + 32 * j + lane / 4 * 4 + i;
                if (sample < p.samples && first < p.features)
                    *reinterpret_cast<float4*>(y + sample * p.features + first) =
                        make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
            }
        } else {
            const i64 sample = tile + 32 * j + lane;
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                const int feature = features[i];
                if (sample < p.samples && feature < p.features) y[sample * p.features + feature] = v[i];
            }
        }
    }
#else
    const i64 sample = tile + lane * (STRIDED ? 1 : VEC);
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        const int feature = features[i];
        if (feature >= p.features) continue;
        float* const to = y + feature * p.samples + sample;
        if constexpr (VEC_Y == VEC) {
            if (sample < p.samples) store_row(to, sum[i]);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const int further = STRIDED ? 32 * j : j;
                if (sample + further < p.samples) to[further] = sum[i][j];
            }
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_rows_kernel(const uint2* __restrict__ slots, const uint2* __restrict__ units, const int* __restrict__ order,
                const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y,
                const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char stages[];
    const u32 shared = shared_address(stages), notes = shared + STAGES * STAGE + 32, full = notes + STAGES * NOTES;
    const u32 empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, FETCHERS + 1), barrier_init(empty + 8 * i, UNITS);
        barrier_init_done();
    }
    await_predecessor();
    __syncthreads();
    if (warp >= UNITS) {
        if constexpr (UNITS == 16) give_registers<56>();
        Fetch fetch = {shared, notes, full, empty, reinterpret_cast<int*>(stages + (empty + 8 * STAGES - shared))};
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            const int unit = tile % p.tiles_down * UNITS + lane;
            const i64 sample = i64(tile / p.tiles_down) * SAMPLES;
            const bool there = lane < UNITS && unit < p.units;
            const uint2* const lists = units + i64(unit) * p.steps;
            uint2 next = there ? lists[0] : make_uint2(0, 0);
            for (int step = 0; step < p.steps; ++step) {
                const uint2 list = next;
                if (there && step + 1 < p.steps) next = lists[step + 1];
                fetch.part(slots, list, x, p, sample, step);
            }
        }
        return;
    }
    if constexpr (UNITS == 16) take_registers<104>();
    constexpr int APART = STRIDED ? 1 : VEC;  // samples from lane to lane
    const u32 mine = FEATURES_LAST ? 4 * PITCH * lane : lane * APART / 32 * PLANE + lane * APART % 32 * 4;
    Ring<STAGES> ring;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        float sum[UNIT][VEC] = {};
        bool last;
        do {
            barrier_wait(full + 8 * ring.index, ring.parity);
            const u32 stage = shared + ring.index * STAGE;
            const u32* const note = reinterpret_cast<const u32*>(stages + STAGES * STAGE + 32 + ring.index * NOTES);
            const u32 list = note[warp];
            last = note[UNITS];
            if (PHASE != 1 && list != NONE) multiply(sum, stage + list, stage + mine);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * ring.index);
            ring.advance();
        } while (!last);
        const int unit = tile % p.tiles_down * UNITS + warp;
        const Features features = {order, unit * UNIT};
        if (bias || p.relu) finish(sum, bias, p, features);
        write(y, sum, p, i64(tile / p.tiles_down) * SAMPLES, features);
    }
}
