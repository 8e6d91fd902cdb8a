// Convolution without stride, forward and data gradient, on Hopper (sm_90a), for few output channels and wide images:
// like conv2d_hopper.cu, but the source pixels of a window of outputs, with the halo around them, are loaded once for
// all taps and not once per tap. One group; 16-bit types, or float32 whose operands the engine rounds to TF32.
//
//   forward (BACKWARD = 0):
//     y[n,p,q,k]  = bias[k] + add[n,p,q,k] + sum_{r,s,c} x[n, p - ph + r*dh, q - pw + s*dw, c] w[k,r,s,c]
//   data gradient (BACKWARD = 1):
//     dx[n,h,w,c] = bias[c] + add[n,h,w,c] + sum_{r,s,k} dy[n, h + ph - r*dh, w + pw - s*dw, k] w[k,r,s,c]
//
// One product of rows (output channels) x columns (the pixels of a window), summed over depth in the order of
// conv2d_hopper.cu: chunks of DEPTH source channels, over the taps within a chunk. A window is 8 pixels wide, WINDOW
// high. In shared memory a patch, the window and its halo of DEPTH channels, has rows of 128 bytes, one for each pixel;
// so the operand of a tap starts some rows further than the patch, and its groups of eight rows are one line of the
// patch apart: the swizzle goes by addresses, not by rows of an operand, and fits wherever one starts.
//
// All arrays are seen through tensor maps (conv2d_halo.py makes them):
//   source       (C, W, H, N), tiled: DEPTH channels x patch
//   filter       (C, taps, K), tiled: DEPTH channels x 1 x 64 filters; of a data gradient of float32 those that
//                conv2d_turn.cu has turned to (K, taps, C)
//   output, add, below  (channels, W, H, N), tiled: DEPTH channels x window; of signs (S, W, H, N) bytes: 16 x window
// With STATISTICS (bfloat16) sums and sums of squares of each window of the output go to partial (windows, 2, columns),
// from which batch_norm_merge.cu goes on. MASKED, RELU: as in conv2d_hopper.cu, with sums of windows. NORMALIZED, of a
// forward pass: the source is the input of a batch norm with a ReLU over it, and patches are normalised where they lie,
// once for all taps, by three warps that are otherwise idle.
//
// What is added to a window and what is read below it comes in patches, too. The output takes the place of the last
// patch of a tile and leaves from there while the next tile is under way, in one piece; in float32 in two
// (conv2d_halo_float.cuh).
//
// Macros: DTYPE (0 without STATISTICS, MASKED and NORMALIZED), BACKWARD, WINDOW, STATISTICS, MASKED, NORMALIZED, RELU;
// PATCHES and STAGES (of filters) of the pipeline; STEPS, products along the depth of a stage, fewer than four where
// the depth is less.
// Grid: as in conv2d_hopper.cu; a tile is 64 output channels of two windows.
// Block: two warpgroups multiply, one window each, with the same filters; one thread of a third keeps the pipeline
// filled, also across tiles.
// Dynamic shared memory: PATCHES * patch + STAGES * 8192 + 1024 bytes.
// FLOP: 2 * channels * pixels of whole windows * depth * taps. Bytes: source + filter + output (+ add), the source once
// per 64 output channels, with a third more (3x3) for the halo, as far as the L2 cache does not keep it.
#include "conv2d_columns.cuh"
#include "tickets.cuh"
#include "wgmma.cuh"
#if NORMALIZED
#include "conv2d_input.cuh"
#endif

constexpr int DEPTH = 128 / sizeof(T);  // values of a stage, 128 bytes per row
constexpr bool ACROSS = BACKWARD && sizeof(T) == 2;  // see conv2d_hopper.cu
constexpr int WARPGROUPS = 2;
constexpr int THREADS = 128 * WARPGROUPS + 128;  // a whole warpgroup of filling threads, to take registers from
using Registers = RegisterShares<128, NORMALIZED ? 88 : 40, 128 * WARPGROUPS, NORMALIZED ? 208 : 232>;
constexpr int WIDTH = 8;
constexpr int PIXELS = WIDTH * WINDOW;
constexpr int FILTERS = 64;
constexpr int WINDOWS = WARPGROUPS;  // of a tile
constexpr int STAGE_BYTES = FILTERS * 128;
static_assert(WINDOW % 2 == 0 && PATCHES == 2 * WINDOWS, "pairs of lines; one patch is filled beside the one in use");

struct Maps {
    TensorMap filter, source, output, add;
#if MASKED
    TensorMap below[READ + SIGNED];  // x, and y if it is read, or its signs; or y alone
#endif
};

// Output pixel (y, x), tap (a, b) is pixel (y + offset_h + a*delta_h, x + offset_w + b*delta_w) of the patch, whose
// first pixel is (first_h, first_w) from the window's. A patch has lines of `line` pixels and takes `patch` bytes.
struct Problem {
    int tiles, share, group, tiles_n;
    int windows, down, across;  // all of them; along the height and the width of an image
    int height, width;          // of an image
    int columns, depth;
    int taps_h, taps_w;
    int source_h, source_w;  // pixels of an image of the source
    int first_h, first_w;
    int offset_h, offset_w;
    int delta_h, delta_w;
    int line, patch;
    int added;        // whether there is an array to be added
    int stage_bytes;  // that are fetched for a stage
};

struct Window {
    int image, y, x;

    __device__ __forceinline__ Window(const Problem& p, int window) {
        const int line = window / p.across;
        x = (window - line * p.across) * WIDTH;
        image = line / p.down;
        y = (line - image * p.down) * WINDOW;
    }
};

struct Tile {
    int window, column;  // its first ones

    __device__ __forceinline__ Tile(const Problem& p, int tile) {
        const int m = tile / p.tiles_n;
        column = (tile - m * p.tiles_n) * FILTERS;
        window = m * WINDOWS;
    }

    // As the thread that fills tells of it.
    __device__ __forceinline__ explicit Tile(const Ticket& ticket) : window(ticket.first), column(ticket.second) {}
    __device__ __forceinline__ Ticket ticket() const { return {window, column}; }
};

// Shared memory: patches, stages of filters, barriers.
struct Layout {
    u32 base;
    int patch_bytes;

    __device__ __forceinline__ u32 patch(int i) const { return base + i * patch_bytes; }
    __device__ __forceinline__ u32 stage(int i) const { return patch(PATCHES) + i * STAGE_BYTES; }
    __device__ __forceinline__ u32 barriers() const { return stage(STAGES); }
    __device__ __forceinline__ u32 patch_filled(int i) const { return barriers() + 8 * i; }
    __device__ __forceinline__ u32 patch_emptied(int i) const { return barriers() + 8 * (PATCHES + i); }
    __device__ __forceinline__ u32 filled(int i) const { return barriers() + 8 * (2 * PATCHES + i); }
    __device__ __forceinline__ u32 emptied(int i) const { return barriers() + 8 * (2 * PATCHES + STAGES + i); }
    // When a patch is what a product wants.
    __device__ __forceinline__ u32 patch_ready(int i) const {
        return NORMALIZED ? emptied(STAGES) + 8 * i : patch_filled(i);
    }
    // The tile that begins with a patch.
    __device__ __forceinline__ u32 ticket(int i) const { return emptied(STAGES) + 8 * PATCHES + TICKET_BYTES * i; }
};

// One thread: fills patch after patch, and stage after stage.
struct Filling {
    const Layout& at;
    const Problem& p;
    Ring<PATCHES> patches;
    Ring<STAGES> ring;

    // The next patches, of a tile's windows, each from a pixel of its window on; `first`: of the tile.
    __device__ __forceinline__ void patch(const TensorMap& map, const Tile& tile, int channel, int y, int x, int bytes,
                                          bool first = false) {
#pragma unroll
        for (int j = 0; j < WINDOWS; ++j) {
            const Window window(p, tile.window + j);
            const u32 barrier = at.patch_filled(patches.index);
            barrier_wait(at.patch_emptied(patches.index), patches.parity ^ 1);
            if (first) write_ticket(at.ticket(patches.index), tile.ticket());
            barrier_expect(barrier, bytes);
            load_box(at.patch(patches.index), map, barrier, channel, window.x + x, window.y + y, window.image);
            patches.advance();
        }
    }

    // Patches that tell that there is no other tile.
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int j = 0; j < WINDOWS; ++j) {
            barrier_wait(at.patch_emptied(patches.index), patches.parity ^ 1);
            write_ticket(at.ticket(patches.index), {-1, 0});
            barrier_arrive(at.patch_filled(patches.index));
            patches.advance();
        }
    }

    // The filters of a chunk.
    __device__ __forceinline__ void taps(const TensorMap& map, const Tile& tile, int channel) {
#pragma unroll 1
        for (int tap = 0; tap < p.taps_h * p.taps_w; ++tap) {
            const u32 to = at.stage(ring.index), barrier = at.filled(ring.index);
            barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
            barrier_expect(barrier, p.stage_bytes);
            if constexpr (ACROSS)
                load_box(to, map, barrier, tile.column, tap, channel);
            else
                load_box(to, map, barrier, channel, tap, tile.column);
            ring.advance();
        }
    }

    // All that a tile needs.
    __device__ __forceinline__ void tile(const Maps& maps, int number) {
        if (number < 0) return end();
        const Tile tile(p, number);
        const int bytes = p.line * (WINDOW + (p.taps_h - 1) * abs(p.delta_h)) * 128;
        for (int channel = 0; channel < p.depth; channel += DEPTH) {
            patch(maps.source, tile, channel, p.first_h, p.first_w, bytes, channel == 0);
            taps(maps.filter, tile, channel);
        }
        if (p.added)
            for (int column = 0; column < FILTERS; column += DEPTH)
                patch(maps.add, tile, tile.column + column, 0, 0, PIXELS * 128);
#if MASKED
        if constexpr (SIGNED) patch(maps.below[READ], tile, first_signs(tile.column), 0, 0, PIXELS * SIGN_CHUNK);
#pragma unroll
        for (int array = READ - 1; array >= 0; --array)
            patch(maps.below[array], tile, tile.column, 0, 0, PIXELS * 128);
#endif
    }
};

constexpr int WARPS = NORMALIZED ? 3 : 0;  // that normalise

#if NORMALIZED
// A warp: normalises its part of patch after patch, the pixels that lie in the image; around it are zeros.
DEVICE void normalize_all(const Layout& at, const Problem& p, const Norm& norm, int warp) {
    const int lines = WINDOW + (p.taps_h - 1) * abs(p.delta_h), units = ceil_div(lines * p.line, UNIT);
    // In each unit a lane looks at one pixel, which then is so many lines and pixels further.
    const int begin = warp * UNIT + threadIdx.x % UNIT, begin_y = begin / p.line, begin_x = begin - begin_y * p.line;
    const int further_y = WARPS * UNIT / p.line, further_x = WARPS * UNIT - further_y * p.line;
    Ring<PATCHES> patches;
    Chunk chunk;
    int loaded = -1;
    for (;;) {
        barrier_wait(at.patch_filled(patches.index), patches.parity);
        const Ticket ticket = read_ticket(at.ticket(patches.index));
        if (ticket.first < 0) return;
        const Tile tile(ticket);
        for (int channel = 0; channel < p.depth; channel += DEPTH) {
            if (channel != loaded) chunk.load(norm, channel), loaded = channel;
            for (int j = 0; j < WINDOWS; ++j) {
                const Window window(p, tile.window + j);
                int y = begin_y, x = begin_x;
                barrier_wait(at.patch_filled(patches.index), patches.parity);
                normalize_rows<WARPS>(chunk, at.patch(patches.index), warp, units, [&](int) {
                    const bool inside = y < lines && u32(window.y + p.first_h + y) < u32(p.source_h) &&
                                        u32(window.x + p.first_w + x) < u32(p.source_w);
                    y += further_y, x += further_x;
                    if (x >= p.line) x -= p.line, ++y;
                    return __ballot_sync(0xffffffffu, inside);
                });
                fence_for_engine();
                __syncwarp();
                if (threadIdx.x % 32 == 0) barrier_arrive(at.patch_ready(patches.index));
                patches.advance();
            }
        }
    }
}
#endif

using Sum = float[PIXELS / 2];

// What a warpgroup reads, and where it stands.
struct Input {
    const Layout& at;
    const Problem& p;
    Ring<PATCHES> patches;
    Ring<STAGES> ring;
    u32 place = 0, left = 0;  // of the patch that was read last, and the barrier that gives it back; 0: none

    __device__ __forceinline__ Input(const Layout& at, const Problem& p, int warpgroup) : at(at), p(p) {
        patches.index = warpgroup;
    }

    __device__ __forceinline__ static bool speaks() { return threadIdx.x % 32 == 0; }

    // The next tile.
    __device__ __forceinline__ Ticket next() const {
        barrier_wait(at.patch_filled(patches.index), patches.parity);
        return read_ticket(at.ticket(patches.index));
    }

    // Waits for the next patch.
    __device__ __forceinline__ void take(u32 barrier) {
        barrier_wait(barrier, patches.parity);
        place = at.patch(patches.index), left = at.patch_emptied(patches.index);
        patches.advance(WINDOWS);
    }

    // Waits for the next patch, which is none of the source.
    __device__ __forceinline__ void take() { take(at.patch_filled(patches.index)); }

    // The product of one tap, whose pixels start at `pixels`.
    __device__ __forceinline__ void multiply_tap(Sum& sum, u32 pixels, int keep) const {
        const u64 a = operand(at.stage(ring.index));
        const u64 b = operand(pixels, 16, p.line * 128);
        product_fence();
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            multiply<false, ACROSS>(sum, a + operand_step(k * (ACROSS ? 16 * 128 : 32)), b + operand_step(k * 32),
                                    keep + k);
        commit_products();
    }

    // Sums up a tile.
    __device__ __forceinline__ void accumulate(Sum& sum) {
        u32 before = 0;
        for (int channel = 0; channel < p.depth; channel += DEPTH) {
            const u32 done = left;
            take(at.patch_ready(patches.index));
            for (int a = 0; a < p.taps_h; ++a)
                for (int b = 0; b < p.taps_w; ++b) {
                    const int pixel = (p.offset_h + a * p.delta_h) * p.line + p.offset_w + b * p.delta_w;
                    barrier_wait(at.filled(ring.index), ring.parity);
                    multiply_tap(sum, place + pixel * 128, channel + a + b);
                    await_products<1>();  // those of the tap before are done with their stage and their patch
                    if (speaks() && channel + a + b > 0) barrier_arrive(before);
                    if (speaks() && a + b == 0 && done) {
                        await_stores_read<0>();  // where it is the tile before that left from there
                        barrier_arrive(done);
                    }
                    before = at.emptied(ring.index);
                    ring.advance();
                }
        }
        await_products<0>();
        if (speaks()) barrier_arrive(before);
        settle(sum);
    }
};

// How much of a window is in the image.
struct Inside {
    int lines, width;

    __device__ __forceinline__ Inside(const Problem& p, int number) {
        const Window window(p, number);
        lines = number < p.windows ? min(p.height - window.y, WINDOW) : 0;
        width = min(p.width - window.x, WIDTH);
    }
    __device__ __forceinline__ bool whole() const { return lines == WINDOW && width == WIDTH; }
    // Of two lines of pixels from `line` on.
    __device__ __forceinline__ bool operator()(int line, int pixel) const {
        return pixel % WIDTH < width && line + pixel / WIDTH < lines;
    }
};

DEVICE void add_bias(Sum& sum, const float* bias, int column, int columns) {
    const u32 thread = thread_again();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int channel = column + int(thread / 32 * 16 + 8 * i + thread % 32 / 4);
        const float shift = channel < columns ? bias[channel] : 0.0f;
#pragma unroll
        for (int line = 0; line < WINDOW; ++line) sum[4 * line + 2 * i] += shift, sum[4 * line + 2 * i + 1] += shift;
    }
}

#if DTYPE
// Words across of two lines: of sums from `line` on; d[4 * line + 2 * i + e] is channel lane / 4 of eight i, pixel
// lane % 4 * 2 + e.
DEVICE void round_lines(u32 (&words)[4], const Sum& sum, int line) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int from = 4 * (line + i % 2) + i / 2 * 2;
        float v[2] = {sum[from], sum[from + 1]};
        if constexpr (RELU) v[0] = clamp_below(v[0], 0.0f), v[1] = clamp_below(v[1], 0.0f);
        words[i] = Rounding<T>::round_pair(v[0], v[1]);
    }
}

DEVICE void add_lines(Sum& sum, u32 from) {
#pragma unroll
    for (int line = 0; line < WINDOW; line += 2) {
        u32 words[4];
        load_matrices<true>(words, from + line * (WIDTH * 128));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int to = 4 * (line + i % 2) + i / 2 * 2;
            float other[2];
            unpack_word(words[i], other);
            sum[to] += other[0], sum[to + 1] += other[1];
        }
    }
}

// A warpgroup: what is done to its window of a tile between sums and store.
DEVICE void write(Input& input, const Maps& maps, const Tile& tile, Sum& sum, const float* bias, float* partial,
                  const Below& below, int warpgroup) {
    const Problem& p = input.p;
    const int number = tile.window + warpgroup;
    const u32 across = columns_across();
    if (bias) add_bias(sum, bias, tile.column, p.columns);
    if (p.added || MASKED) {
        if (input.speaks()) barrier_arrive(input.left);
        input.left = 0;
    }
    if (p.added) {
        input.take();
        add_lines(sum, input.place + across);
        if (MASKED && input.speaks()) barrier_arrive(input.left);
    }
    const Inside inside(p, number);
    const bool whole = inside.whole();
    Tally tally;
    tally.start();
#if MASKED
    Masking masking(below, tile.column, p.columns);
    u32 outputs_at = 0, outputs_left = 0;
    if (MASKED == 2 || SIGNED) {
        input.take();
        outputs_at = input.place + (SIGNED ? signs_within(tile.column) + Masking::signs_across<SIGN_CHUNK>() : across);
        outputs_left = input.left;
    }
    input.take();
#else
    warpgroup_sync(1 + warpgroup);  // all four warps are done with the pixels
#endif
    const u32 place = input.place + across;
#pragma unroll
    for (int line = 0; line < WINDOW; line += 2) {
        const u32 at = line * (WIDTH * 128);
        u32 words[4];
        round_lines(words, sum, line);
        if ((STATISTICS || MASKED) && !whole) keep_inside(words, [&](int i) { return inside(line, i); });
#if MASKED
        u32 inputs[4], outputs[4];
        load_matrices<true>(inputs, place + at);
        if (MASKED == 2) load_matrices<true>(outputs, outputs_at + at);
        if (SIGNED) Masking::load_signs<SIGN_CHUNK>(outputs, outputs_at + line * (WIDTH * SIGN_CHUNK));
        masking.mask(words, inputs, outputs);
#endif
        if constexpr (STATISTICS) tally.add(words);
        store_matrices<true>(place + at, words);
    }
#if MASKED
    if ((MASKED == 2 || SIGNED) && input.speaks()) barrier_arrive(outputs_left);
    const float found = masking.result();
#else
    const float found = STATISTICS ? tally.result() : 0.0f;
#endif
    fence_for_engine();
    warpgroup_sync(1 + warpgroup);
    if (threadIdx.x % 128 == 0 && number < p.windows) {
        const Window to(p, number);
        store_box(maps.output, input.place, tile.column, to.x, to.y, to.image);
        commit_stores();
    }
    if (SUMS && inside.lines > 0)
        ColumnShare().write(partial + i64(number) * SUMS * p.columns, found, tile.column, p.columns);
}
#else
#include "conv2d_halo_float.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_halo_kernel(const __grid_constant__ Maps maps, const float* __restrict__ bias, float* __restrict__ partial,
                   const float* __restrict__ moments, const float* __restrict__ gamma,
                   const float* __restrict__ beta, const __grid_constant__ Problem p, u32* counter) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared), p.patch};
    if (threadIdx.x == 0) {
        for (int i = 0; i < PATCHES; ++i)
            barrier_init(at.patch_filled(i), 1), barrier_init(at.patch_emptied(i), 4);
        for (int i = 0; i < STAGES; ++i) barrier_init(at.filled(i), 1), barrier_init(at.emptied(i), 4 * WARPGROUPS);
#if NORMALIZED
        for (int i = 0; i < PATCHES; ++i) barrier_init(at.patch_ready(i), WARPS);
#endif
        barrier_init_done();
    }
    if (threadIdx.x == THREADS - 1) prefetch_map(maps.source), prefetch_map(maps.filter);
    await_predecessor();
    __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be the same in a warp
    // The two roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (warpgroup == WARPGROUPS) {
        Registers::give();
        if (threadIdx.x == 128 * WARPGROUPS) {
            Filling filling{at, p};
            deal(counter, p.tiles, p.share, p.group, [&](int number) { filling.tile(maps, number); });
        }
#if NORMALIZED
        if (threadIdx.x >= 128 * WARPGROUPS + 32)
            normalize_all(at, p, {moments, gamma, beta, p.depth}, threadIdx.x / 32 - 4 * WARPGROUPS - 1);
#endif
    } else {
        Registers::take();
        Input input(at, p, warpgroup);
        for (;;) {
            const Ticket ticket = input.next();
            if (ticket.first < 0) break;
            const Tile tile(ticket);
            Sum sum;
            input.accumulate(sum);
            write(input, maps, tile, sum, bias, partial, {moments, gamma, beta}, warpgroup);
        }
        await_stores_read<0>();  // before the block ends
    }
}
