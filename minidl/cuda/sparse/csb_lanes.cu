// The float32 product of a very sparse matrix and a dense one on CUDA cores, for sm_90: y = A x, + bias, ReLU. Every
// output is the sum over its elements in the order of the summed index, by fused multiply-adds: the bits of csb.cu.
//
// A block owns ROWS = WARPS / HALVES * SETS * 32 output features times 32 samples. Four warps fetch x, PART summed
// features at a time, into a ring of stages: a row of 128 bytes for each, in eight chunks. Each lane of the other warps
// multiplies output features of its own (one of each set), element by element, with the 32 values of x that the element
// meets, or with half of them where two warps share a set. In step t it reads chunk t ^ lane % 8, so that the eight lanes
// whose 16 bytes go through shared memory at a time always meet different banks, whichever rows they read. Elements come
// as streams (csb_streams.cu) through a ring for each warp; lanes without a further one pause. So no element costs a
// broadcast or a branch, of which csb_rows.cu, which reads an element for a whole warp, has more than multiplications.
// What is lost is what lanes wait for each other: at 98 % zeros, in parts of 512, eight lanes are busy for 70 to 97 % of
// their time. Items by loads into registers, two steps ahead, were three times slower: a warp with long rows waited for
// the L2 cache in each step.
// With FEATURES_LAST x is turned on its way, and y by way of a stage.
//
//   items, heads, order   csb_streams.cu                                     (8 bytes);  (tile, part, slot);  (tile, slot)
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature        float32
//   y         dense in the same orientation;  bias (features) or null                             float32
//
// Grid: blocks that take tiles in turn, output features fastest. Dynamic shared memory: STAGES * (128 * PART + 16) +
// WARPS * 4096.
// FLOP: 2 nnz samples. Bytes: 8 nnz per 32 samples from L2, x once per tile of output features, y once. The bound is
// shared memory: 4 bytes of x per multiply-add, 0.25 of the float32 peak on sm_90.
//
// Macros: WARPS (16), SETS (1, 2), HALVES (1, 2), PART (512), STAGES, FEATURES_LAST, VEC_X (1, 4: floats per copy of x), VEC_Y (1, 4:
// per store), PHASE (0; to take times apart 1 multiplies nothing, 2 copies no x).
#include "csb_tensor.cuh"

struct Problem {
    i64 x_pitch, samples;
    int features, depth;
    int parts;
    int tiles_down;  // tiles of output features
    int tiles;
    int relu;
};

constexpr int ROWS = WARPS / HALVES * SETS * 32, SAMPLES = 32, CHUNKS = 8 / HALVES;
constexpr int FETCHERS = 128, THREADS = 32 * WARPS + FETCHERS;
constexpr int STAGE = 128 * PART;
constexpr u32 ALL = 0xffffffffu, HELD = 512, AHEAD = 8;  // items of a warp's ring; steps that they come before
constexpr u32 BARRIERS = STAGES * STAGE, RINGS = BARRIERS + 16 * STAGES;

extern __shared__ __align__(1024) unsigned char stages[];

// ---- what the fetching warps do

#if FEATURES_LAST
// Four values of a sample, as many as there are.
DEVICE float4 load_four(const float* __restrict__ from, int left) {
    if constexpr (VEC_X == 4) {
        return left > 0 ? __ldg(reinterpret_cast<const float4*>(from)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    } else {
        return make_float4(left > 0 ? __ldg(from) : 0.0f, left > 1 ? __ldg(from + 1) : 0.0f,
                           left > 2 ? __ldg(from + 2) : 0.0f, left > 3 ? __ldg(from + 3) : 0.0f);
    }
}
#endif

// What lies at place t ^ lane % CHUNKS comes to place t.
template <int CHUNKS>
DEVICE void permute(float (&v)[CHUNKS][4]) {
#pragma unroll
    for (int bit = 1; bit < CHUNKS; bit *= 2) {
        const bool swap = threadIdx.x & bit;
#pragma unroll
        for (int t = 0; t < CHUNKS; ++t) {
            if (t & bit) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = v[t][i], high = v[t + bit][i];
                v[t][i] = swap ? high : low;
                v[t + bit][i] = swap ? low : high;
            }
        }
    }
}

DEVICE void fetch_x(int stage, const float* __restrict__ x, const Problem& p, i64 sample, int feature) {
    const u32 thread = threadIdx.x - 32 * WARPS;
    const int count = p.depth - feature < PART ? p.depth - feature : PART;
#if FEATURES_LAST
    // A warp takes 32 samples x 16 features at a time; a lane, fours of features of four samples eight apart. As lanes
    // of one sample store another of their four each, no two meet a bank.
    const u32 lane = threadIdx.x % 32;
    const int column = lane % 4 * 4, row = lane / 4;
    const int left = static_cast<int>(p.samples - sample < SAMPLES ? p.samples - sample : SAMPLES) - row;
#pragma unroll 2
    for (int first = static_cast<int>(thread / 32 * 16); first < count; first += FETCHERS / 2) {
        const float* from = x + (sample + row) * p.x_pitch + feature + first + column;
        float v[4][4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const float4 four = load_four(from, 8 * u < left ? count - first - column : 0);
            v[u][0] = four.x, v[u][1] = four.y, v[u][2] = four.z, v[u][3] = four.w;
            from += 8 * p.x_pitch;
        }
        permute(v);
        unsigned char* const to = stages + stage * STAGE + (first + column) * 128 + row * 4;
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) *reinterpret_cast<float*>(to + (t ^ lane % 4) * 32 + i * 128) = v[t][i];
    }
#else
    constexpr int ACROSS = SAMPLES / VEC_X, STEP = FETCHERS / ACROSS;
    const int column = static_cast<int>(thread % ACROSS) * VEC_X, row = static_cast<int>(thread / ACROSS);
    const bool inside = sample + column < p.samples;
    const float* from = x + (feature + row) * p.x_pitch + sample + column;
    u32 to = shared_address(stages) + stage * STAGE + row * 128 + column * 4;
#pragma unroll 8
    for (int i = row; i < count; i += STEP) {
        copy_async<4 * VEC_X>(to, from, inside);
        from += STEP * p.x_pitch, to += STEP * 128;
    }
#endif
}

// ---- what the multiplying warps do

// The elements of a warp's sets in a part, on their way through a ring of its own in shared memory, 32 at a time. A step
// takes 32 at most, so that what it takes was asked for AHEAD steps before.
struct Stream {
    const uint2* __restrict__ items;
    u32 ring;   // shared memory
    u32 first;  // item of the part
    u32 total;  // items of the part
    u32 put, got;

    __device__ __forceinline__ void fetch() {
        const u32 item = put + threadIdx.x % 32;
        if (put - got <= HELD - 32) {
            if (item < total)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(ring + item % HELD * 8),
                             "l"(items + (first + item))
                             : "memory");
            put += 32;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ __forceinline__ void begin(u32 from, u32 size) {
        first = from, total = size, put = got = 0;
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < AHEAD; ++i) fetch();
    }

    // The item of each lane that is `there`, `others` being the lanes that are.
    __device__ __forceinline__ uint2 take(u32 others) {
        fetch();
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD) : "memory");
        __syncwarp();
        u32 before;
        asm("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
        uint2 item;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(item.x), "=r"(item.y)
                     : "r"(ring + (got + __popc(others & before)) % HELD * 8)
                     : "memory");
        got += __popc(others);
        return item;
    }
};

// sum += weight times four chunks of a row of x.
template <int FIRST>
DEVICE void multiply_row(float (&sum)[CHUNKS][4], float weight, u32 row) {
    float v[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[t][0]), "=f"(v[t][1]), "=f"(v[t][2]), "=f"(v[t][3])
                     : "r"(row ^ 16 * (FIRST + t)));
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[FIRST + t][i] = fmaf(weight, v[t][i], sum[FIRST + t][i]);
}

// `count`: elements of this lane; `x`: where its first chunk of the stage's first row lies.
DEVICE void multiply(float (&sum)[CHUNKS][4], Stream& stream, u32 count, u32 x) {
    bool there = count > 0;
    u32 others = __ballot_sync(ALL, there);
    uint2 item = stream.take(others);
#pragma unroll 1
    for (u32 step = 1; others; ++step) {
        const bool now = there;
        const float weight = __uint_as_float(item.x);
        const u32 row = x + item.y;
        there = step < count;
        others = __ballot_sync(ALL, there);
        item = stream.take(others);
        if (now) {
            multiply_row<0>(sum, weight, row);
            if constexpr (CHUNKS == 8) multiply_row<4>(sum, weight, row);
        }
    }
}

// Bias and ReLU.
DEVICE void finish(float (&sum)[CHUNKS][4], const float* __restrict__ bias, const Problem& p, int feature) {
    const float shift = bias && feature < p.features ? bias[feature] : 0.0f;
#pragma unroll
    for (int t = 0; t < CHUNKS; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (bias) sum[t][i] += shift;
            if (p.relu) sum[t][i] = clamp_below(sum[t][i], 0.0f);
        }
}

#if FEATURES_LAST
// A barrier of the multiplying warps.
DEVICE void multipliers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

// By way of a stage that nobody reads any more, as many samples at a time as it holds. `turn`: chunk t ^ turn of its
// features is what a lane has at place t.
DEVICE void write(float* __restrict__ y, float (&sum)[SETS][CHUNKS][4], const Problem& p, i64 sample, int first,
                  const int (&feature)[SETS], int turn, int stage) {
    constexpr int ROUNDS = ROWS * SAMPLES * 4 > STAGE ? 2 : 1, HELD_SAMPLES = SAMPLES / ROUNDS, COLUMNS = ROWS / VEC_Y;
    static_assert(ROUNDS == 1 || CHUNKS == 8, "whole rounds");
    float* const held = reinterpret_cast<float*>(stages + stage * STAGE);
    const int chunk = turn / CHUNKS * CHUNKS;
#pragma unroll
    for (int set = 0; set < SETS; ++set) permute(sum[set]);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        multipliers_sync();
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int t = round * 4; t < (ROUNDS == 1 ? CHUNKS : round * 4 + 4); ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    held[(4 * (chunk + t - 4 * round) + i) * ROWS + feature[set] - first] = sum[set][t][i];
        multipliers_sync();
        for (int i = threadIdx.x; i < HELD_SAMPLES * COLUMNS; i += 32 * WARPS) {
            const int column = i % COLUMNS * VEC_Y;
            const i64 to = sample + round * HELD_SAMPLES + i / COLUMNS;
            if (to >= p.samples || first + column >= p.features) continue;
            store_raw(y + to * p.features + first + column, load_raw<VEC_Y>(held + i / COLUMNS * ROWS + column));
        }
    }
}
#else
// CHUNKS lanes exchange chunks, so that each writes a piece of every one of their rows.
DEVICE void write(float* __restrict__ y, float (&sum)[SETS][CHUNKS][4], const Problem& p, i64 sample,
                  const int (&feature)[SETS], int turn) {
    sample += turn * 4;
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int t = 1; t < CHUNKS; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[set][t][i] = __shfl_xor_sync(ALL, sum[set][t][i], t);
        permute(sum[set]);
#pragma unroll
        for (int t = 0; t < CHUNKS; ++t) {
            const int row = __shfl_sync(ALL, feature[set], threadIdx.x % 32 / CHUNKS * CHUNKS + t);
            if (row >= p.features) continue;
            float* const to = y + row * p.samples + sample;
            if constexpr (VEC_Y == 4) {
                if (sample < p.samples) store<float, 4>(to, sum[set][t]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (sample + i < p.samples) to[i] = sum[set][t][i];
            }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_lanes_kernel(const uint2* __restrict__ items, const uint2* __restrict__ heads, const int* __restrict__ order,
                 const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y,
                 const __grid_constant__ Problem p) {
    const u32 full = shared_address(stages) + BARRIERS, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, FETCHERS), barrier_init(empty + 8 * i, WARPS);
        barrier_init_done();
    }
    await_predecessor();
    __syncthreads();
    Ring<STAGES> ring;
    if (warp >= WARPS) {
        if constexpr (WARPS == 16) give_registers<64>();
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x)
            for (int part = 0; part < p.parts; ++part) {
                barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
#if PHASE == 2
                barrier_arrive(full + 8 * ring.index);
#else
                fetch_x(ring.index, x, p, i64(tile / p.tiles_down) * SAMPLES, part * PART);
                if constexpr (FEATURES_LAST) barrier_arrive(full + 8 * ring.index);
                else barrier_arrive_copied(full + 8 * ring.index);
#endif
                ring.advance();
            }
        return;
    }
    if constexpr (WARPS == 16) take_registers<104>();
    const int turn = lane % 8 ^ warp % HALVES * CHUNKS;
    u32 own = shared_address(stages) + turn * 16;
    asm volatile("" : "+r"(own));  // else the compiler finds it anew for each element
    Stream stream;
    stream.items = items, stream.ring = shared_address(stages) + RINGS + warp * HELD * 8;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int slot = warp / HALVES * SETS * 32 + lane;
        u32 head_at = tile % p.tiles_down * p.parts * ROWS + slot;
        uint2 head[SETS];
#pragma unroll
        for (int set = 0; set < SETS; ++set) head[set] = __ldg(heads + (head_at + 32 * set));
        float sum[SETS][CHUNKS][4] = {};
        for (int part = 0; part < p.parts; ++part) {
            u32 count[SETS], total = 0;
#pragma unroll
            for (int set = 0; set < SETS; ++set) count[set] = head[set].y, total += head[set].y;
            stream.begin(head[0].x, __reduce_add_sync(ALL, total));  // a warp's sets follow each other
            head_at += ROWS;
            if (part + 1 < p.parts) {
#pragma unroll
                for (int set = 0; set < SETS; ++set) head[set] = __ldg(heads + (head_at + 32 * set));
            }
            barrier_wait(full + 8 * ring.index, ring.parity);
#pragma unroll
            for (int set = 0; set < SETS; ++set)
                if constexpr (PHASE != 1) multiply(sum[set], stream, count[set], own + ring.index * STAGE);
            if (FEATURES_LAST && part + 1 == p.parts) break;
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * ring.index);
            ring.advance();
        }
        const int first = tile % p.tiles_down * ROWS;
        int feature[SETS];
#pragma unroll
        for (int set = 0; set < SETS; ++set) feature[set] = __ldg(order + first + slot + 32 * set);
#pragma unroll
        for (int set = 0; set < SETS; ++set)
            if (bias || p.relu) finish(sum[set], bias, p, feature[set]);
        const i64 sample = i64(tile / p.tiles_down) * SAMPLES;
#if FEATURES_LAST
        write(y, sum, p, sample, first, feature, turn, ring.index);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * ring.index);
        ring.advance();
#else
        write(y, sum, p, sample, feature, turn);
#endif
    }
}
