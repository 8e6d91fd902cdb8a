// The float32 product of a matrix of few elements and a dense one on CUDA cores, for sm_90: y = A x, + bias, ReLU. Each
// output is the sum over its elements in the order of the summed index, by fused multiply-adds: the bits of csb.cu.
//
// A thread block owns 32 samples and all output features. Warps that fetch keep a chunk of x in shared memory, CHUNK
// summed features as lines of 32 samples, 128 bytes. The others each take a quad (csb_quads.cu), four output features
// in lockstep, eight lanes and four samples a lane to each, and multiply the items of the whole chunk before they turn
// to the next. So a list is ten to fifty items long where csb_rows.cu has two or three, and nothing waits but for the
// next chunk; a line is read by its eight lanes without a conflict, whichever it is. Chunks after the first go on from the
// sums so far (partials, in L2): the order of a sum is that of its elements.
// Quads are drawn from a counter, so warps end together; a sum does not depend on who draws it. With two BUFFERS two
// tiles of samples take turns, chunk by chunk, and x arrives while another chunk is multiplied.
// 16-byte words of a line are swizzled by the number of the line over four: with FEATURES_LAST x is turned on its way,
// four summed features of a sample at a time, and the words of 32 lanes then meet no bank twice. Outputs are turned in
// shared memory, too: whoever ends the last quad of a band writes the band.
//
//   items, quads, order   csb_quads.cu (items in pairs of 16 bytes)
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature        float32
//   y         dense in the same orientation;  bias (features) or null                             float32
//   partials  (thread blocks, BUFFERS, bands * 64, 32), of more than one chunk                    float32
//
// Grid: blocks that take tiles of samples in turn. Dynamic shared memory: LinesTile.shared_bytes.
// FLOP: 2 nnz samples. Bytes: 8 nnz per tile, x once, y once. The bound is shared memory: 4 bytes of x and a share of
// the item per multiply-add, 4.5 cycles for four items of 32 samples.
// After T. Gale et al., "Sparse GPU kernels for deep learning", SC 2020, and A. Buluç et al., SPAA 2009.
//
// Macros: CHUNK (a multiple of 64), BUFFERS (1, 2), WARPS (that multiply), FEATURES_LAST, VEC_X (floats per load of x),
// VEC_Y (floats per store: 4 or 1).
#include "csb_tensor.cuh"

struct Problem {
    i64 x_pitch, samples;
    int features, depth;
    int bands, chunks, tiles;
    int relu;
};

constexpr int SAMPLES = 32, LINE = 4 * SAMPLES, QUADS = 16, BAND = 64;
constexpr int FETCHERS = 128, THREADS = 32 * WARPS + FETCHERS;
constexpr int BUFFER = LINE * (CHUNK + 1);  // and a line of zeros
constexpr int SLOTS = FEATURES_LAST ? 4 : 0, SLOT = BAND * LINE;  // bands on their way out
constexpr int PAIRS = 4;  // of items in flight

// Behind the buffers and slots.
struct Control {
    u64 full[BUFFERS], empty[BUFFERS];
    int drawn[BUFFERS];   // quads of the chunk in this buffer
    int ended[4];         // quads of the band in this slot
    int turn[4];          // which band a slot is for
};

DEVICE float4 load_four(u32 from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from));
    return v;
}

DEVICE void store_one(u32 to, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory"); }

// The steps of this thread block: step(tile, chunk, which of the tiles, whether the step before was of the same tile).
template <class Step>
DEVICE void for_steps(const Problem& p, Step step) {
    for (int first = blockIdx.x; first < p.tiles; first += BUFFERS * gridDim.x)
        for (int chunk = 0; chunk < p.chunks; ++chunk)
#pragma unroll 1
            for (int b = 0; b < BUFFERS; ++b) {
                const int tile = first + b * gridDim.x;
                if (tile < p.tiles) step(tile, chunk, b, chunk > 0 && first + gridDim.x >= p.tiles);
            }
}

// ---- what the fetching warps do

DEVICE u32 place_of(int line, int word) { return LINE * line + 16 * (word ^ (line / 4 % 8)); }

#if FEATURES_LAST
// Eight lanes read 128 bytes of a sample, and write four lines each.
DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, i64 sample, int first) {
    const int thread = threadIdx.x - 32 * WARPS, line = thread % 8 * 4, inside = thread / 8;  // 16 samples
    const i64 left = p.samples - sample;
    constexpr int ROUNDS = CHUNK / 32 * 2;
#pragma unroll 4
    for (int i = 0; i < ROUNDS; ++i) {
        const int at = line + i / 2 * 32, mine = inside + i % 2 * 16, feature = first + at;
        float v[4] = {};
        if (mine < left) {
            const float* const from = x + (sample + mine) * p.x_pitch + feature;
            if constexpr (VEC_X == 4) {
                if (feature < p.depth) load<float, 4>(from, v);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (feature + e < p.depth) v[e] = from[e];
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) store_one(to + place_of(at + e, mine / 4) + mine % 4 * 4, v[e]);
    }
}
#else
DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, i64 sample, int first) {
    constexpr int ACROSS = SAMPLES / VEC_X, STEP = FETCHERS / ACROSS;
    const int thread = threadIdx.x - 32 * WARPS, column = thread % ACROSS * VEC_X, row = thread / ACROSS;
    const bool inside = sample + column < p.samples;
    const float* from = x + (first + row) * p.x_pitch + sample + column;
#pragma unroll 8
    for (int i = 0; i < CHUNK / STEP; ++i) {
        const int line = row + i * STEP;
        copy_async<4 * VEC_X>(to + place_of(line, column / 4) + column % 4 * 4, from, inside && first + line < p.depth);
        from += STEP * p.x_pitch;
    }
}
#endif

// Asks for what comes next while it has no room in shared memory.
DEVICE void prefetch_x(const float* __restrict__ x, const Problem& p, i64 sample, int first) {
    const int thread = threadIdx.x - 32 * WARPS;
    for (int i = thread; i < CHUNK; i += FETCHERS) {
        const int line = FEATURES_LAST ? i / SAMPLES * 32 : i, row = FEATURES_LAST ? i % SAMPLES : 0;
        if (first + line < p.depth && sample + row < p.samples) {
            const float* const from = FEATURES_LAST ? x + (sample + row) * p.x_pitch + first + line
                                                    : x + (first + line) * p.x_pitch + sample;
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
        }
    }
}

// ---- what the multiplying warps do

// The next COUNT pairs of items of each feature.
template <int COUNT>
DEVICE void take(float (&sum)[4], const uint4 (&pairs)[PAIRS], u32 base, u32 part) {
    float4 values[2 * COUNT];
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
        values[2 * u] = load_four(base + (pairs[u].x ^ part));
        values[2 * u + 1] = load_four(base + (pairs[u].z ^ part));
    }
#pragma unroll
    for (int k = 0; k < 2 * COUNT; ++k) {
        const float weight = __uint_as_float(k % 2 ? pairs[k / 2].w : pairs[k / 2].y);
        sum[0] = fmaf(weight, values[k].x, sum[0]), sum[1] = fmaf(weight, values[k].y, sum[1]);
        sum[2] = fmaf(weight, values[k].z, sum[2]), sum[3] = fmaf(weight, values[k].w, sum[3]);
    }
}

DEVICE void fetch_items(uint4 (&pairs)[PAIRS], const uint4* __restrict__ from, int left) {
#pragma unroll
    for (int u = 0; u < PAIRS; ++u)
        if (u < left) pairs[u] = __ldg(from + 4 * u);
}

// A quad, as this lane sees it.
struct Quad {
    const uint4* items;  // the first pair of the lane's feature
    int pairs, feature;
    float sum[4];        // so far

    __device__ __forceinline__ void find(int quad, int quads, const uint4* __restrict__ all,
                                         const uint2* __restrict__ lists, const int* __restrict__ order,
                                         const float* sums) {
        const int lane = threadIdx.x % 32;
        items = all, pairs = 0, feature = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
        if (quad >= quads) return;
        const uint2 list = __ldg(lists + quad);
        items += list.x / 2 + lane / 8, pairs = static_cast<int>(list.y);
        feature = __ldg(order + 4 * quad + lane / 8);
        if (sums) load<float, 4>(sums + i64(feature) * SAMPLES + lane % 8 * 4, sum);
    }
};

DEVICE int draw(int* counter) {
    int mine = 0;
    if (threadIdx.x % 32 == 0) mine = atomicAdd(counter, 1);
    return __shfl_sync(0xffffffffu, mine, 0);
}

DEVICE void finish(float (&sum)[4], const float* __restrict__ bias, const Problem& p, int feature) {
    const float shift = bias && feature < p.features ? bias[feature] : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (bias) sum[i] += shift;
        if (p.relu) sum[i] = clamp_below(sum[i], 0.0f);
    }
}

#if FEATURES_LAST
DEVICE float load_one(u32 from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from));
    return v;
}

// A band of 64 features of this tile.
DEVICE void write_band(float* __restrict__ y, u32 slot, const Problem& p, i64 sample, int band) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
        const int word = i / 2, four = i % 2 * 8 + lane % 8, feature = band * BAND + 4 * four;
        const i64 row = sample + 4 * word + lane / 8;
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = load_one(slot + place_of(4 * four + e, word) + lane / 8 * 4);
        if (row >= p.samples) continue;
        float* const to = y + row * p.features + feature;
        if constexpr (VEC_Y == 4) {
            if (feature < p.features) store<float, 4>(to, v);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (feature + e < p.features) to[e] = v[e];
        }
    }
}

// This quad's sums go to the slot of its band, which is the `number`-th.
DEVICE void hand_in(float* __restrict__ y, const float (&sum)[4], Control& control, u32 slots, const Problem& p,
                    i64 sample, int feature, int number, int band) {
    const int lane = threadIdx.x % 32, slot = number % SLOTS, inside = feature % BAND;
    const u32 place = slots + slot * SLOT, turn = shared_address(&control.turn[slot]);
    int now;
    do asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(now) : "r"(turn) : "memory");
    while (now != number);
    store_shared(place + place_of(inside, lane % 8), make_float4(sum[0], sum[1], sum[2], sum[3]));
    __threadfence_block();
    __syncwarp();
    if (draw(&control.ended[slot]) != QUADS - 1) return;
    __threadfence_block();
    write_band(y, place, p, sample, band);
    __syncwarp();
    if (lane == 0) {
        control.ended[slot] = 0;
        asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(turn), "r"(number + SLOTS) : "memory");
    }
}
#else
DEVICE void hand_in(float* __restrict__ y, const float (&sum)[4], const Problem& p, i64 sample, int feature) {
    sample += threadIdx.x % 8 * 4;
    if (feature >= p.features) return;
    float* const to = y + feature * p.samples + sample;
    if constexpr (VEC_Y == 4) {
        if (sample < p.samples) store<float, 4>(to, sum);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (sample + e < p.samples) to[e] = sum[e];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_lines_kernel(const uint4* __restrict__ items, const uint2* __restrict__ quads, const int* __restrict__ order,
                 const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y, float* partials,
                 const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 lines = shared_address(shared);
    Control& control = *reinterpret_cast<Control*>(shared + BUFFERS * BUFFER + SLOTS * SLOT);
    const u32 full = shared_address(control.full), empty = shared_address(control.empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < BUFFERS; ++i) {
            barrier_init(full + 8 * i, FETCHERS + 1), barrier_init(empty + 8 * i, WARPS);
            control.drawn[i] = 0;
        }
        for (int i = 0; i < 4; ++i) control.ended[i] = 0, control.turn[i] = i;
        barrier_init_done();
    }
    if (threadIdx.x < 32 * BUFFERS)
        store_one(lines + threadIdx.x / 32 * BUFFER + LINE * CHUNK + threadIdx.x % 32 * 4, 0.0f);
    __syncthreads();
    Ring<BUFFERS> ring;
    if (threadIdx.x >= 32 * WARPS) {
        for_steps(p, [&](int tile, int chunk, int, bool) {
            if constexpr (BUFFERS == 1) {
                if (chunk > 0 || tile != blockIdx.x) prefetch_x(x, p, i64(tile) * SAMPLES, chunk * CHUNK);
            }
            barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
            if (threadIdx.x == 32 * WARPS) {
                control.drawn[ring.index] = 0;
                barrier_arrive(full + 8 * ring.index);
            }
            fetch_x(lines + ring.index * BUFFER, x, p, i64(tile) * SAMPLES, chunk * CHUNK);
            if constexpr (FEATURES_LAST) barrier_arrive(full + 8 * ring.index);
            else barrier_arrive_copied(full + 8 * ring.index);
            ring.advance();
        });
        return;
    }
    const int count = p.bands * QUADS;
    const u32 part = threadIdx.x % 8 * 16;
    Ring<BUFFERS> before;
    int done = 0;  // tiles
    for_steps(p, [&](int tile, int chunk, int b, bool follows) {
        barrier_wait(full + 8 * ring.index, ring.parity);
        // Else another warp may still be at the sums so far. Where tiles take turns the buffer's barrier sees to that.
        if (BUFFERS == 2 && follows) barrier_wait(empty + 8 * before.index, before.parity);
        const uint2* const lists = quads + i64(chunk) * count;
        const int* const features = order + i64(chunk) * count * 4;
        float* const sums = partials + i64(blockIdx.x * BUFFERS + b) * p.bands * (BAND * SAMPLES);
        const float* const so_far = chunk ? sums : nullptr;
        const i64 sample = i64(tile) * SAMPLES;
        const bool last = chunk + 1 == p.chunks;
        const u32 base = lines + ring.index * BUFFER;
        int* const counter = &control.drawn[ring.index];
        Quad now, next;
        uint4 pairs[PAIRS];
        int quad = draw(counter);
        now.find(quad, count, items, lists, features, so_far);
        fetch_items(pairs, now.items, now.pairs);
        while (quad < count) {
            const int following = draw(counter);
            next.find(following, count, items, lists, features, so_far);
            do {
                uint4 held[PAIRS];
#pragma unroll
                for (int u = 0; u < PAIRS; ++u) held[u] = pairs[u];
                const int left = now.pairs;
                now.pairs -= PAIRS, now.items += 4 * PAIRS;
                const bool more = now.pairs > 0;
                fetch_items(pairs, more ? now.items : next.items, more ? now.pairs : next.pairs);
                if (left >= 4) take<4>(now.sum, held, base, part);
                else if (left == 3) take<3>(now.sum, held, base, part);
                else if (left == 2) take<2>(now.sum, held, base, part);
                else if (left == 1) take<1>(now.sum, held, base, part);
            } while (now.pairs > 0);
            if (!last) {
                store<float, 4>(sums + i64(now.feature) * SAMPLES + part / 4, now.sum);
            } else {
                finish(now.sum, bias, p, now.feature);
#if FEATURES_LAST
                const int band = quad / QUADS, number = done * p.bands + band;
                hand_in(y, now.sum, control, lines + BUFFERS * BUFFER, p, sample, now.feature, number, band);
#else
                hand_in(y, now.sum, p, sample, now.feature);
#endif
            }
            quad = following, now = next;
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * ring.index);
        before = ring;
        ring.advance();
        done += last;
    });
}
