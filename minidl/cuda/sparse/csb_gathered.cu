// The float32 product of a sparse matrix and a dense one by three TF32 products of what is not empty, for sm_90: y = A x,
// + bias, ReLU. A unit is 8 output features; of a part of the summed ones those in which it has an element are gathered,
// by eights, into dense tiles (csb_tiles.cu). Fragments of x are read where it lies, a value for each lane: x is
// multiplied as it comes, rows of samples or of features, with nothing turned, copied or expanded on its way.
//
// Each value is split into a head of TF32 and a rest; head * head + head * rest + rest * head are summed in float32, in
// the order of the tiles. Padding and zeros of a tile are multiplied: an infinity or NaN in x reaches outputs of its
// sample that have no element for it. Error: of a product at most 2^-19 is left out; the unit cuts each of the sums that
// it adds up at 2^-23 of the total.
//
// A block owns UNITS * 16 output features times SAMPLES = 32 * VEC samples. Four warps fetch, PART summed features at a
// time, its piece of x and the units' tiles into a ring of stages; tiles that do not fit into a stage come in several, x
// with each. Each of UNITS warps multiplies two units. x lies as lines of 128 bytes, chunks of 16 swizzled, so that
// lanes which read summed features of four different remainders by 4 never meet a bank; tiles are put in such an order.
//
//   tiles, groups  csb_tiles.cu
//   order     csb_order.py, or null: output features by units                int32
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature        float32
//   y         dense in the same orientation;  bias (features) or null                             float32
//
// Grid: blocks that take tiles in turn, output features fastest. Dynamic shared memory: csb_gathered.py.
// FLOP: 6 * 64 * eights * samples. Bytes: 264 an eight per sample tile, x once per tile of output features, y once.
//
// Macros: UNITS (4, 8, 16), VEC (1 to 4), STAGES, CAPACITY (bytes of tiles in a stage), FEATURES_LAST, VEC_X (floats per
// copy of x), VEC_Y (floats per store: with FEATURES_LAST 2, else 4, or 1).
#include "csb_tensor.cuh"

struct Problem {
    i64 x_pitch, samples;
    int features, depth;
    int steps;       // parts of summed features
    int tiles_down;  // tiles of output features
    int tiles;
    int relu;
};

constexpr int UNIT = 8, PART = 128;
constexpr int TILE = 4 * UNIT * UNIT, AREA = PART / 8 * (TILE + 8);  // bytes: of an eight, and the room of a unit's
constexpr int SAMPLES = 32 * VEC;
constexpr int FETCHERS = 128, THREADS = 32 * UNITS + FETCHERS;
constexpr int LINES = FEATURES_LAST ? SAMPLES : PART, PLANE = LINES * 128, PLANES = FEATURES_LAST ? PART / 32 : VEC;
constexpr int X_BYTES = PLANE * PLANES, STAGE = X_BYTES + CAPACITY;
constexpr int NOTES = 4 * (2 * UNITS + 4);  // bytes per stage: each unit's tiles, and whether the block's tile ends

// Chunk c of a line lies at place c ^ this.
DEVICE int swizzle(int line) { return FEATURES_LAST ? line % 8 : line % 4 * 2; }

// Bytes of the numbers of summed features, before the tiles.
DEVICE u32 columns_bytes(u32 fours) { return ((fours + 1) / 2 * 8 + 15) & ~15u; }

// ---- what the fetching warps do

DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, i64 sample, int feature) {
    constexpr int ACROSS = 32 / VEC_X, STEP = FETCHERS / ACROSS;
    const int thread = threadIdx.x - 32 * UNITS, column = thread % ACROSS * VEC_X, line = thread / ACROSS;
    const i64 first = FEATURES_LAST ? sample : feature, begin = FEATURES_LAST ? feature : sample;
    const i64 left = (FEATURES_LAST ? p.samples : p.depth) - first;
    const i64 room = (FEATURES_LAST ? p.depth : p.samples) - begin - column;
    const int there = (left < LINES ? static_cast<int>(left) : LINES) - line;
    const i64 step = STEP * p.x_pitch;
    const float* const start = x + (first + line) * p.x_pitch + begin + column;
#pragma unroll 1
    for (int plane = 0; plane < PLANES; ++plane) {
        const int rows = 32 * plane < room ? there : 0;
        const float* from = start + 32 * plane;
#pragma unroll 8
        for (int i = 0; i < LINES; i += STEP) {
            const int place = (line + i) * 128 + ((column / 4 ^ swizzle(line + i)) << 4) + column % 4 * 4;
            copy_async<4 * VEC_X>(to + plane * PLANE + place, from, i < rows);
            from += step;
        }
    }
}

struct Fetch {
    u32 shared, notes, full, empty;
    Ring<STAGES> ring;

    // One part of one tile; `fours` of this lane's unit; `ends`: it is the tile's last. All fetching warps take
    // the same decisions.
    __device__ __forceinline__ void part(const unsigned char* __restrict__ tiles, u32 fours, i64 unit,
                                         const float* __restrict__ x, const Problem& p, i64 sample, int step, bool ends) {
        const int lane = threadIdx.x % 32;
        u32 todo = __ballot_sync(0xffffffffu, fours > 0);
        do {
            const u32 size = todo >> lane & 1 ? columns_bytes(fours) + (fours + 1) / 2 * TILE : 0;
            u32 sum = size;
#pragma unroll
            for (int further = 1; further < 32; further *= 2) {
                const u32 other = __shfl_up_sync(0xffffffffu, sum, further);
                if (lane >= further) sum += other;
            }
            const u32 taken = todo & __ballot_sync(0xffffffffu, sum <= CAPACITY);
            todo &= ~taken;
            const u32 stage = shared + ring.index * STAGE, barrier = full + 8 * ring.index;
            barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
            if (threadIdx.x / 32 == UNITS) {
                const bool mine = taken >> lane & 1;
                const u32 total = __reduce_max_sync(0xffffffffu, mine ? sum : 0);
                const u32 note = notes + ring.index * NOTES;
                if (lane < 2 * UNITS) store_word(note + 4 * lane, mine ? (X_BYTES + sum - size) << 8 | fours : 0);
                if (lane == 0) store_word(note + 8 * UNITS, ends && todo == 0);
                __syncwarp();
                if (lane == 0) barrier_expect(barrier, total);
                __syncwarp();
                if (mine)
                    copy_bulk(stage + X_BYTES + sum - size, tiles + (unit * p.steps + step) * AREA, size, barrier);
            }
            fetch_x(stage, x, p, sample, step * PART);
            arrive_with_copies(barrier);
            ring.advance();
        } while (todo);
    }

    static __device__ __forceinline__ void store_word(u32 address, u32 word) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
    }
};

// ---- what the multiplying warps do

DEVICE u32 load_word(u32 from) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
    return word;
}

DEVICE u32 load_byte(u32 from) {
    u32 byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from));
    return byte;
}

// Two TF32 values of each float: cut, the other cut by the unit, or, where it costs little, rounded.
template <bool ROUNDED>
DEVICE void split(u32& head, u32& rest, float value) {
    head = __float_as_uint(value) + (ROUNDED ? 0x1000 : 0) & 0xffffe000;
    rest = __float_as_uint(value - __uint_as_float(head)) + (ROUNDED ? 0x1000 : 0);
}

// d += a b: 16 samples x DEPTH summed features times as many x 8 output features.
template <int DEPTH>
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (DEPTH == 8)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// Fragments of 32 samples, those of plane or lines `v`: two of 16 for the instruction. Lane 4 g + t has summed feature t
// of each four, whose line or column begins at `from`. Features last: samples g, g + 8, then g + 16 and g + 24; first:
// 4 g to 4 g + 3.
template <int DEPTH>
DEVICE void load_x(float (&values)[2][4], const u32 (&from)[2], int v) {
#pragma unroll
    for (int k = 0; k < DEPTH / 4; ++k) {
#if FEATURES_LAST
#pragma unroll
        for (int s = 0; s < 4; ++s)
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(values[s / 2][s % 2 + 2 * k]) : "r"(from[k] + (32 * v + 8 * s) * 128));
#else
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(values[0][2 * k]), "=f"(values[0][2 * k + 1]), "=f"(values[1][2 * k]),
                       "=f"(values[1][2 * k + 1])
                     : "r"(from[k] + v * PLANE));
#endif
    }
}

// Where this lane's samples of a summed feature begin.
DEVICE u32 place_of(u32 x, u32 feature) {
    const u32 g = thread_again() % 32 / 4;
    if (FEATURES_LAST) return x + feature / 32 * PLANE + g * 128 + (feature % 32 * 4 ^ g << 4);
    return x + feature * 128 + (feature % 4 * 32 ^ g << 4);
}

// A tile, of eight summed features or of four: numbers of its summed features and weights.
template <int DEPTH>
DEVICE void multiply_tile(float (&sum)[2 * VEC][4], u32 numbers, u32 tile, u32 x) {
    u32 from[2] = {place_of(x, load_byte(numbers)), 0};
    if (DEPTH == 8) from[1] = place_of(x, load_byte(numbers + 4));
    float weights[2];
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(weights[0]), "=f"(weights[1]) : "r"(tile));
    u32 head[2], rest[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) split<true>(head[k], rest[k], weights[k]);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        float values[2][4] = {};
        load_x<DEPTH>(values, from, v);
        u32 heads[2][4], rests[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) split<false>(heads[i / 4][i % 4], rests[i / 4][i % 4], values[i / 4][i % 4]);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_add<DEPTH>(sum[2 * v + i], rests[i], head);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_add<DEPTH>(sum[2 * v + i], heads[i], rest);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_add<DEPTH>(sum[2 * v + i], heads[i], head);
    }
}

DEVICE void multiply(float (&sum)[2 * VEC][4], u32 list, u32 fours, u32 x) {
    const u32 lane = thread_again() % 32;
    u32 numbers = list + lane % 4, tile = list + columns_bytes(fours) + 8 * lane;
#pragma unroll 1
    for (; fours > 1; fours -= 2, numbers += 8, tile += TILE) multiply_tile<8>(sum, numbers, tile, x);
    if (TAILS && fours) multiply_tile<4>(sum, numbers, tile, x);
}

// Bias, ReLU, and the store of a unit's sums; `first`: its first place in the order.
DEVICE void write(float* __restrict__ y, float (&sum)[2 * VEC][4], const float* __restrict__ bias, const Problem& p,
                  const int* __restrict__ order, int first, i64 tile) {
    const int lane = thread_again() % 32, g = lane / 4, t = lane % 4;
    int feature[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        feature[e] = order ? __ldg(order + first + 2 * t + e) : first + 2 * t + e;
        const float shift = bias && feature[e] < p.features ? bias[feature[e]] : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * VEC; ++i)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                float& value = sum[i][2 * s + e];
                if (bias) value += shift;
                if (p.relu) value = clamp_below(value, 0.0f);
            }
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
#if FEATURES_LAST
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const i64 sample = tile + 32 * v + 8 * s + g;
            if (sample >= p.samples) continue;
            const float(&values)[4] = sum[2 * v + s / 2];
            float* const to = y + sample * p.features;
            if (VEC_Y == 2) {
                if (feature[0] < p.features)
                    asm volatile("st.global.v2.f32 [%0], {%1, %2};"
                                 ::"l"(to + feature[0]), "f"(values[s % 2 * 2]), "f"(values[s % 2 * 2 + 1]) : "memory");
            } else {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (feature[e] < p.features) to[feature[e]] = values[s % 2 * 2 + e];
            }
        }
#else
        const i64 sample = tile + 32 * v + 4 * g;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (feature[e] >= p.features) continue;
            float* const to = y + feature[e] * p.samples + sample;
            const float values[4] = {sum[2 * v][e], sum[2 * v][2 + e], sum[2 * v + 1][e], sum[2 * v + 1][2 + e]};
            if (VEC_Y == 4) {
                if (sample < p.samples)
                    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                                 ::"l"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]) : "memory");
            } else {
#pragma unroll
                for (int s = 0; s < 4; ++s)
                    if (sample + s < p.samples) to[s] = values[s];
            }
        }
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_gathered_kernel(const unsigned char* __restrict__ tiles, const int* __restrict__ fours,
                    const int* __restrict__ order, const float* __restrict__ x, const float* __restrict__ bias,
                    float* __restrict__ y, const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char stages[];
    const u32 shared = shared_address(stages), notes = shared + STAGES * STAGE;
    const u32 full = notes + STAGES * NOTES, empty = full + 8 * STAGES;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, FETCHERS + 1);
            barrier_init(empty + 8 * i, UNITS);
        }
        barrier_init_done();
    }
    await_predecessor();
    __syncthreads();
    if (warp >= UNITS) {
        Fetch fetch = {shared, notes, full, empty};
        const auto count_of = [&](int tile, int step) {
            const i64 unit = tile % p.tiles_down * (2 * UNITS) + lane;
            return lane < 2 * UNITS && tile < p.tiles ? fours[unit * p.steps + step] : 0;
        };
        u32 count = count_of(blockIdx.x, 0);
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            const i64 unit = tile % p.tiles_down * (2 * UNITS) + lane, sample = i64(tile / p.tiles_down) * SAMPLES;
            for (int step = 0; step < p.steps; ++step) {
                const bool ends = step + 1 == p.steps;
                const u32 next = ends ? count_of(tile + gridDim.x, 0) : count_of(tile, step + 1);
                fetch.part(tiles, count, unit, x, p, sample, step, ends);
                count = next;
            }
        }
        await_copies<0>();
        return;
    }
    Ring<STAGES> ring;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        float sum[2][2 * VEC][4] = {};
        bool last;
        do {
            barrier_wait(full + 8 * ring.index, ring.parity);
            const u32 stage = shared + ring.index * STAGE, note = notes + ring.index * NOTES;
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const u32 list = load_word(note + 8 * warp + 4 * u);
                multiply(sum[u], stage + (list >> 8), list & 255, stage);
            }
            last = load_word(note + 8 * UNITS);
            __syncwarp();
            if (thread_again() % 32 == 0) barrier_arrive(empty + 8 * ring.index);
            ring.advance();
        } while (!last);
#pragma unroll
        for (int u = 0; u < 2; ++u)
            write(y, sum[u], bias, p, order, ((tile % p.tiles_down * UNITS + warp) * 2 + u) * UNIT,
                  i64(tile / p.tiles_down) * SAMPLES);
    }
}
