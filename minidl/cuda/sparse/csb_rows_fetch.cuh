// What csb_rows.cu's fetching warps do; its header says what lies where, and names the macros.
#pragma once
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
constexpr int FETCHERS = ENGINE ? 32 : 128, THREADS = 32 * UNITS + FETCHERS;
constexpr int PLANE = PART * 128;  // bytes of a plane of x: 32 samples of each summed feature
constexpr int APART = VEC % 2 ? 1 : VEC;  // places in it from lane to lane; if 1 a lane reads a place of each plane
constexpr int X_BYTES = VEC * PLANE;
constexpr int STAGE = X_BYTES + 8 * CAPACITY;
constexpr int PIECE = 4096;  // bytes of x that a warp turns at a time, features last: 32 samples of 32 features
constexpr int ALL_PIECES = X_BYTES / PIECE, PIECES = (ALL_PIECES + 3) / 4;  // of a stage, and of a warp at most
constexpr int AWAITED = FEATURES_LAST ? FETCHERS / 32 * AHEAD * PIECE : 0;  // bytes of what is not turned yet
constexpr int NOTES = 4 * (UNITS + 4);  // bytes per stage: where each unit's list lies, and whether the tile ends
constexpr u32 NONE = 0xffffffffu;

// ---- what the fetching warps do

#if ENGINE
using Source = const TensorMap&;
#else
using Source = const float*;
#endif

// What a stage gets: so many times SAMPLES samples are before its own, and so many summed features.
struct Part {
    int group, tap, feature;

    __device__ __forceinline__ i64 sample() const { return i64(group) * SAMPLES; }
};

#if FEATURES_LAST
static_assert(PIECES % AHEAD == 0, "a piece finds the place of the one before it free");

// Starts the copy of piece `which` of a part: rows of 128 bytes, in which chunks of 16 change places, so that neither
// this nor what reads a chunk of every fourth row meets a bank twice. What is not there is zeros.
// `pixels`: with CONV, where each sample of the tile finds the tap's pixel, or -1.
DEVICE void start_piece(u32 to, int which, const float* __restrict__ x, const Problem& p, const Part& part,
                        const int* pixels) {
    constexpr int DOWN = 4 / APART;
    const int lane = thread_again() % 32, j = lane / 8;
    // Row 4 a + j is what lies at places 4 a + j of the plane, for which lanes look from 32 samples to the next 32.
    const int first = j % APART * 32 + j / APART + which / (PART / 32) * (32 / APART);
    const int feature = part.feature + which % (PART / 32) * 32 + lane % 8 * 4, left = p.depth - feature;
    const i64 samples = p.samples - part.sample();
    const int there = (samples < SAMPLES ? static_cast<int>(samples) : SAMPLES) - first;
    const float* from = x + feature;
    if (!CONV) from += (part.sample() + first) * p.x_pitch;
    to += lane * 16;
#pragma unroll 4
    for (int a = 0; a < 8; ++a) {
        bool inside = a * DOWN < there;
        const float* source = from;
        if (CONV) {
            const int pixel = pixels[first + a * DOWN];
            source += pixel * p.x_pitch, inside = pixel >= 0;
        }
#pragma unroll
        for (int f = 0; f < 4; f += VEC_X)
            copy_to_stage<4 * VEC_X>((to ^ 16 * a) + 512 * a + 4 * f, source + f, inside && f < left);
        if (!CONV) from += DOWN * p.x_pitch;
    }
}

// Turns a piece into a stage's planes, four samples by four features at a time.
DEVICE void turn_piece(u32 stage, int which, u32 from) {
    const int lane = thread_again() % 32, a = lane % 8, chunk = lane / 8;
    from += 512 * a + 16 * (chunk ^ a);
    const u32 to = stage + which / (PART / 32) * PLANE + which % (PART / 32) * 4096 + 512 * chunk + 16 * a;
    float v[2][4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[half][j][0]), "=f"(v[half][j][1]), "=f"(v[half][j][2]), "=f"(v[half][j][3])
                         : "r"((from ^ 64 * half) + 128 * j) : "memory");
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int f = 0; f < 4; ++f)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                         ::"r"(to + 2048 * half + 128 * f), "f"(v[half][0][f]), "f"(v[half][1][f]),
                         "f"(v[half][2][f]), "f"(v[half][3][f]) : "memory");
}
#elif !ENGINE
DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, const Part& part) {
    constexpr int ACROSS = 32 / VEC_X, STEP = FETCHERS / ACROSS, COPIES = PART / STEP;
    constexpr int BATCH = COPIES < 8 ? COPIES : 8;  // copies whose bounds are known from one number
    const int thread = threadIdx.x - 32 * UNITS, column = thread % ACROSS * VEC_X, row = thread / ACROSS;
    const int left = p.depth - part.feature < PART ? p.depth - part.feature : PART;
    const i64 step = STEP * p.x_pitch;
    to += 128 * row + 4 * column;
    x += (part.feature + row) * p.x_pitch + part.sample() + column;
#pragma unroll 1
    for (int plane = 0; plane < VEC; ++plane) {
        const float* from = x + 32 * plane;
        int there = (part.sample() + column + 32 * plane < p.samples ? left : 0) - row;
#pragma unroll 1
        for (int i = 0; i < COPIES; i += BATCH) {
#pragma unroll
            for (int g = 0; g < BATCH; ++g) {
                copy_to_stage<4 * VEC_X>(to + 128 * STEP * g, from, g * STEP < there);
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
    __device__ __forceinline__ void find_pixels(const Problem& p, const Part& part) {
        if (part.feature) return;
        warpgroup_sync(1);
        const int thread = threadIdx.x - 32 * UNITS;
        if (thread < SAMPLES)
            pixels[thread] = part.sample() + thread < p.samples
                                 ? static_cast<int>(p.window.pixel(static_cast<u32>(part.sample() + thread), part.tap))
                                 : -1;
        warpgroup_sync(1);
    }
#else
    __device__ __forceinline__ void find_pixels(const Problem&, const Part&) {}
#endif

#if FEATURES_LAST
    // Where this warp's i-th piece waits for its turn.
    __device__ __forceinline__ u32 place(int i) const {
        return shared + STAGES * STAGE + (thread_again() / 32 * AHEAD + i % AHEAD) * PIECE;
    }

    __device__ __forceinline__ void start(int i, const float* __restrict__ x, const Problem& p, const Part& part) {
        if (i == 0) find_pixels(p, part);
        const int which = thread_again() / 32 + 4 * i;
        if (which < ALL_PIECES) start_piece(place(i), which, x, p, part, pixels);
        commit_copies();
    }

    // Turns a part, whose first pieces are under way, into a stage, and starts the first of the next.
    __device__ __forceinline__ void turn(u32 stage, const float* __restrict__ x, const Problem& p, Part part,
                                         const Part next) {
#pragma unroll 1
        for (int i = 0; i < PIECES; ++i) {
            await_copies<AHEAD - 1>();
            __syncwarp();
            const int which = thread_again() / 32 + 4 * i;
            if (which < ALL_PIECES) turn_piece(stage, which, place(i));
            __syncwarp();
            if (i + AHEAD == PIECES) part = next;
            start(i + AHEAD < PIECES ? i + AHEAD : i + AHEAD - PIECES, x, p, part);
        }
    }
#endif

    // One part of one tile; `list`: this lane's unit; `ends`: it is the tile's last. All fetching warps take the same
    // decisions.
    __device__ __forceinline__ void part(const uint2* __restrict__ slots, uint2 list, Source x,
                                         const Problem& p, const Part& part, const Part& next, bool ends) {
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
                if (lane == 0) store_word(note + 4 * UNITS, ends && todo == 0);
                __syncwarp();
                if (lane == 0) barrier_expect(barrier, total + (ENGINE && PHASE != 2 ? X_BYTES : 0));
                __syncwarp();
                if (mine) copy_bulk(stage + X_BYTES + 8 * (sum - size), slots + list.x, 8 * size, barrier);
#if ENGINE && PHASE != 2
                const int sample = static_cast<int>(part.sample()) + 32 * lane;
                if (lane < VEC) load_box(stage + lane * PLANE, x, barrier, sample, part.feature);
#endif
            }
#if ENGINE
#elif PHASE == 2
            barrier_arrive(barrier);
#elif FEATURES_LAST
            Part further = part;
            if (todo == 0) further = next;
            turn(stage, x, p, part, further);
            barrier_arrive(barrier);
#else
            fetch_x(stage, x, p, part);
            arrive_with_copies(barrier);
#endif
            ring.advance();
        } while (todo);
    }

    static __device__ __forceinline__ void store_word(u32 address, u32 word) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
    }
};
