// The weight gradient of conv2d_stem_weight.cu where dy, which nobody else reads, is the input gradient of a batch norm
// whose ReLU was pooled, by windows of 3x3, two apart, with a padding of one: dy is made on its way into the products,
// to the bit as batch_norm_max_pool2d_backward (pool2d.cu) would write it. 16-bit storage types, sm_90a.
//
//   dz        (n, a, b, k), the gradient of what was pooled, masked       T
//   index     (n, a, b, k), where in its window each maximum was          u8
//   y         (pixels, K), the batch norm's input                         T
//   x, partials: as in conv2d_stem_weight.cu; so are tiles, chunks and the order of the sums
//
// A block has four warpgroups, alone on its multiprocessor. Of one, a thread has the copy engine bring rows of y and of
// windows, and three warps bring and rewrite the image; two make rows of dy, in turns, in the place of those of y; one
// multiplies (conv2d_stem_weight_lines.cuh). A row of pixels is under one row of windows, or, if its number is odd,
// under two: with a row of y come those rows of windows that the rows before were not under. Likewise an even pixel is
// in the middle column of one window, and the odd one behind it in the last of that and the first of the next. A thread
// makes eight channels of both at a time, two to a register: gradients that are not of a maximum here are masked. That
// takes 9 instructions for each value under one row, 15 under two, most of them at half rate.
//
// Of 256x112x112x64 in bfloat16 on an H200 the passes take 439 us (262 and 179), this 272 (bytes 153; when those who
// make dy did not wait for each other's windows yet). Without the products it is 215, without making 217, without both
// 176: all of it goes through shared memory. A third warpgroup that makes takes 3 us off, but registers lack. What was
// tried before: docs/tuning.md.
//
// Macros: those of conv2d_stem_weight.cu, with WARPGROUP; STAGES of rows of y.
// Dynamic shared memory: STAGES rows of y, the ring and its rows as there, SLOTS rows of windows, barriers.
#include "conv2d_stem_weight.cuh"
#include "conv2d_stem_weight_lines.cuh"
#include "affine.cuh"
#include "lanes.cuh"

struct Maps {
    TensorMap dz, index, y;
};

constexpr int FILL = 0, MULTIPLY = 1, MAKE = 2;  // roles of warpgroups
constexpr int MAKERS = 2, ALL_THREADS = (MAKE + MAKERS) * THREADS;
constexpr int EACH = 65536 / ALL_THREADS, FOR_FILL = 80, FOR_MULTIPLY = 208, FOR_MAKE = 112;
static_assert(FOR_FILL + FOR_MULTIPLY + MAKERS * FOR_MAKE <= (MAKE + MAKERS) * EACH, "no more registers than there are");
constexpr int WRITERS = THREADS - 32;   // of the warpgroup that fills the threads that rewrite the image
constexpr int BESIDE = TILE_Q / 2 + 1;  // windows that a row of a tile is under, side by side
constexpr int PLACES = (BESIDE * TILE_M * 2 + 1023) / 1024 * 1024;                  // bytes to the places of maxima
constexpr int WINDOWS_BYTES = PLACES + (BESIDE * TILE_M + 1023) / 1024 * 1024;      // of a row of windows
constexpr int SLOTS = STAGES / 2 + 3;   // of rows of windows: no more begin while a stage goes round, and one is kept
constexpr int AHEAD = 3;                // rows of the image under way
static_assert(TILE_M == 64 && STAGES >= MAKERS);

struct Layout {
    unsigned char* base;

    __device__ __forceinline__ unsigned char* stage(int i) const { return base + i * Gradient::BYTES; }
    __device__ __forceinline__ unsigned char* windows(int i) const { return stage(STAGES) + i * WINDOWS_BYTES; }
    __device__ __forceinline__ unsigned char* ring() const { return windows(SLOTS); }
    __device__ __forceinline__ unsigned char* rows() const { return ring() + RING * ROW_BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const {
        return shared_address(rows() + AHEAD * ROWS_BYTES) + i * 8;
    }
    // Of a step: its row of y is there; it is one of dy; its rows of the image are rewritten; all is multiplied.
    __device__ __forceinline__ u32 come(int i) const { return barrier(i); }
    __device__ __forceinline__ u32 made(int i) const { return barrier(STAGES + i); }
    __device__ __forceinline__ u32 rewritten(int i) const { return barrier(2 * STAGES + i); }
    __device__ __forceinline__ u32 done(int i) const { return barrier(3 * STAGES + i); }
};

// What a thread makes: eight channels of two neighbouring pixels.
struct Lanes {
    u32 words[4];

    __device__ __forceinline__ Lanes() {}
    __device__ __forceinline__ explicit Lanes(const unsigned char* from) {
        const uint4 all = *reinterpret_cast<const uint4*>(from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    }
    __device__ __forceinline__ void store(unsigned char* to) const {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// What a row of windows has for an even pixel, in its middle column, and for the odd one behind, in its last, and in the
// first of the next window.
struct Shares {
    Lanes middle, last, first;

    // Of eight channels, a chunk, from `window` on; `taps`: the numbers of the taps of the line that the pixels
    // are in, in both halves.
    __device__ __forceinline__ Shares(const unsigned char* row, int window, int chunk, u32 taps) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const Lanes all(row + Gradient::offset(window + k, chunk * 8));
            const uint2 bytes =
                *reinterpret_cast<const uint2*>(row + PLACES + (window + k) * TILE_M + chunk * 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 place = __byte_perm(j < 2 ? bytes.x : bytes.y, 0, j % 2 ? 0x4342 : 0x4140);
                const u32 word = all.words[j];
                if (k == 0) {
                    middle.words[j] = word & halves_equal(place, taps + ONE_PER_LANE);
                    last.words[j] = word & halves_equal(place, taps + 2 * ONE_PER_LANE);
                } else {
                    first.words[j] = word & halves_equal(place, taps);
                }
            }
        }
    }
};

DEVICE Raw<T, 2> pair_of(u32 word) {
    Raw<T, 2> pair;
    pair.pairs[0] = word;
    return pair;
}

// The sum of four words, rounded once.
DEVICE u32 lane_sum(u32 a, u32 b, u32 c, u32 d) {
    float sum[2], more[2];
    unpack(pair_of(a), sum);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        unpack(pair_of(i == 0 ? b : i == 1 ? c : d), more);
        sum[0] += more[0], sum[1] += more[1];
    }
    return pack<T>(sum).pairs[0];
}

// One thread: brings the rows of y, and each row of windows with the first that is under it. What a step is under is
// noted: nothing, if it has no row; or whether it is two rows of windows, and their slots.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, const Place& place, int steps, u32* notes) {
    Cursor next(p, place.first_strip);
    Ring<STAGES> ring;
    int slot = 0;  // of the newest row of windows
    for (int step = 0; step < steps; ++step, next.advance(), ring.advance()) {
        const u32 barrier = at.come(ring.index);
        barrier_wait(at.done(ring.index), ring.parity ^ 1);
        if (!next.pixels()) {
            notes[ring.index] = 0;
            barrier_arrive(barrier);
            continue;
        }
        const bool begins = next.left == p.strip_rows, two = next.p % 2;
        const int last = (next.p + 1) / 2, first = begins ? next.p / 2 : two ? last : last + 1;
        const int newest = (slot + last - first + 1) % SLOTS;
        notes[ring.index] = 1 | int(two) << 1 | (newest + (two ? SLOTS - 1 : 0)) % SLOTS << 2 | newest << 8;
        barrier_expect(barrier, Gradient::BYTES + (last - first + 1) * (BESIDE * TILE_M * 3));
        load_box(shared_address(at.stage(ring.index)), maps.y, barrier, place.first_row, int(next.pixel()));
        for (int a = first; a <= last; ++a) {
            slot = (slot + 1) % SLOTS;
            const u32 to = shared_address(at.windows(slot));
            load_box(to, maps.dz, barrier, place.first_row, next.q / 2, a, next.image);
            load_box(to + PLACES, maps.index, barrier, place.first_row, next.q / 2, a, next.image);
        }
    }
}

// A warpgroup that makes dy: eight channels of every sixteenth pair of pixels.
struct Maker {
    const Layout& at;
    InputGradient<true, 1> of_input[8];

    // `own`: this thread's first channel, if it is there.
    __device__ __forceinline__ Maker(const Layout& at, const float* moments, const float* gamma, const double* sums,
                                     const double* count, int own, int channels)
        : at(at) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int c = own < channels ? own + i : 0;
            float mean[1], scale[1], shift[1];
            load_affine(moments, gamma, nullptr, channels, c, mean, scale, shift);
            of_input[i] = InputGradient<true, 1>(mean, scale, moments, sums, count, channels, c);
        }
    }

    // The row of a stage, in the place of that of y. `turn`: rows in which a warp has more to do than others take turns
    // with those in which it has less.
    __device__ __forceinline__ void operator()(int stage, u32 note, int turn) const {
        const int chunk = threadIdx.x % 8, first = (threadIdx.x % THREADS / 8) ^ (turn % 2 * 8);
        const unsigned char* const upper = at.windows(note >> 2 & 63);
        const unsigned char* const lower = at.windows(note >> 8);
        unsigned char* even = at.stage(stage) + Gradient::offset(2 * first, chunk * 8);
        unsigned char* odd = at.stage(stage) + Gradient::offset(2 * first + 1, chunk * 8);
        constexpr int STEP_BYTES = THREADS / 8 * 2 * Gradient::PITCH;
        static_assert(STEP_BYTES % (8 * Gradient::PITCH) == 0, "chunks are permuted alike");
        const bool two = note & 2;
#pragma unroll 1
        for (int pair = first; pair < TILE_Q / 2; pair += THREADS / 8, even += STEP_BYTES, odd += STEP_BYTES) {
            Lanes g[2];  // the sums, rounded as by the pass that this replaces
            if (two) {
                const Shares above(upper, pair, chunk, 6 * ONE_PER_LANE), below(lower, pair, chunk, 0);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    g[0].words[j] = lane_add(above.middle.words[j], below.middle.words[j]);
                    g[1].words[j] = lane_sum(above.last.words[j], above.first.words[j], below.last.words[j],
                                             below.first.words[j]);
                }
            } else {
                const Shares there(lower, pair, chunk, 3 * ONE_PER_LANE);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    g[0].words[j] = there.middle.words[j];
                    g[1].words[j] = lane_add(there.last.words[j], there.first.words[j]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned char* const place = i == 0 ? even : odd;
                Lanes values(place);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float gradient[2], v[2];
                    unpack(pair_of(g[i].words[j]), gradient);
                    unpack(pair_of(values.words[j]), v);
#pragma unroll
                    for (int e = 0; e < 2; ++e) gradient[e] = of_input[2 * j + e](0, gradient[e], v[e]);
                    values.words[j] = pack<T>(gradient).pairs[0];
                }
                values.store(place);
            }
        }
    }
};

// Threads that bring the rows of the image and rewrite them.
DEVICE void rewrite_rows(const Layout& at, const T* x, const Problem& p, const Place& place, int steps, int thread) {
    Cursor next(p, place.first_strip);
    const auto copy = [&](int step) {
        if (step < steps) {
            copy_rows<LENGTH, WRITERS>(shared_address(at.rows()) + step % AHEAD * ROWS_BYTES, x, next, thread);
            next.advance();
        }
        commit_copies();
    };
    for (int i = 0; i < AHEAD - 1; ++i) copy(i);
    int slot = KERNEL_H - NEW;  // of the ring, where the next new rows go
    Ring<STAGES> ring, last;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        await_copies<AHEAD - 2>();
        warpgroups_sync<WRITERS>(1);  // the rows are there for all, and those before are rewritten
        copy(step + AHEAD - 1);
        if (step > 1) {  // their place is free
            barrier_wait(at.done(last.index), last.parity);
            last.advance();
        }
        rewrite<WRITERS>(at.ring(), at.rows() + step % AHEAD * ROWS_BYTES, slot, p.shift, thread);
        slot = slot + NEW < RING ? slot + NEW : slot + NEW - RING;
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(at.rewritten(ring.index));
        ring.advance();
    }
    await_copies<0>();
}

// The warpgroup that multiplies.
DEVICE void multiply_rows(const Layout& at, float* partials, const Problem& p, const Place& place, int steps,
                          const u32* notes) {
    Product product(at.base, at.ring(), p.shift, place.columns);
    Ring<STAGES> ring;
    int step = 0, before = 0;
    // A step, whose products go on while the next one's row is waited for and loaded.
    const auto turn = [&](Product::Row& row, Product::Row& last) {
        barrier_wait(at.rewritten(ring.index), ring.parity);
        barrier_wait(at.made(ring.index), ring.parity);
        if (notes[ring.index]) product.start(row, ring.index);
        else commit_products();
        await_products<1>();
        last.settle();
        if (step > 0 && threadIdx.x % 32 == 0) barrier_arrive(at.done(before));
        before = ring.index;
        ring.advance();
        product.advance();
        ++step;
    };
    Product::Row even, odd;
#pragma unroll 1
    while (step < steps) {
        turn(even, odd);
        if (step < steps) turn(odd, even);
    }
    await_products<0>();
    even.settle(), odd.settle();
    product.settle_sums();
    product.leave(at.base, place.in(partials, p), p.rows - place.first_row, place.columns);
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
conv2d_stem_pooled_kernel(const __grid_constant__ Maps maps, const float* __restrict__ moments,
                          const float* __restrict__ gamma, const double* __restrict__ sums,
                          const double* __restrict__ count, const T* __restrict__ x, float* __restrict__ partials,
                          const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u32 notes[STAGES];
    const Layout at{shared};
    if (threadIdx.x < STAGES) {
        barrier_init(at.come(threadIdx.x), 1);
        barrier_init(at.made(threadIdx.x), WARPS);
        barrier_init(at.rewritten(threadIdx.x), WRITERS / 32);
        barrier_init(at.done(threadIdx.x), WARPS);
        barrier_init_done();
    }
    if (threadIdx.x == ALL_THREADS - 1) prefetch_map(maps.dz), prefetch_map(maps.index), prefetch_map(maps.y);
    __syncthreads();
    await_predecessor();
    const Place place(p);
    const int steps = min(p.chunk, p.strips - place.first_strip) * (p.strip_rows + WARMUP);
    const int role = __shfl_sync(0xffffffffu, threadIdx.x / THREADS, 0);  // known to be the same in a warp
    // The roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (role == FILL) {
        set_registers<EACH, FOR_FILL>();
        if (threadIdx.x == 0) fill(at, maps, p, place, steps, notes);
        if (threadIdx.x >= 32) rewrite_rows(at, x, p, place, steps, threadIdx.x - 32);
    } else if (role == MULTIPLY) {
        set_registers<EACH, FOR_MULTIPLY>();
        multiply_rows(at, partials, p, place, steps, notes);
    } else {
        set_registers<EACH, FOR_MAKE>();
        const Maker make(at, moments, gamma, sums, count, place.first_row + threadIdx.x % 8 * 8, p.rows);
        Ring<STAGES> ring;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.advance()) {
            barrier_wait(at.come(ring.index), ring.parity);  // others' too, whose windows may be needed
            if (step % MAKERS != role - MAKE) continue;
            const u32 note = __reduce_or_sync(0xffffffffu, notes[ring.index]);  // known to be the same in a warp
            if (note) {
                make(ring.index, note, step / MAKERS);
                fence_for_engine();  // which writes there next
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(at.made(ring.index));
        }
    }
}
