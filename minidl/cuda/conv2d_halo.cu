// Convolution without stride, forward and data gradient, on Hopper (sm_90a), for few output channels and wide images: like
// conv2d_hopper.cu, but the source pixels of a window of outputs, with the halo around them, are loaded once for all taps
// and not once per tap. 16-bit types, one group.
//
//   forward (BACKWARD = 0):
//     y[n,p,q,k]  = bias[k] + add[n,p,q,k] + sum_{r,s,c} x[n, p - ph + r*dh, q - pw + s*dw, c] w[k,r,s,c]
//   data gradient (BACKWARD = 1):
//     dx[n,h,w,c] = bias[c] + add[n,h,w,c] + sum_{r,s,k} dy[n, h + ph - r*dh, w + pw - s*dw, k] w[k,r,s,c]
//
// One product of rows (output channels) x columns (the pixels of a window), summed over depth in the order of
// conv2d_hopper.cu: chunks of 64 source channels, over the taps within a chunk. A window is 8 pixels wide, WINDOW high.
// In shared memory a patch, the window and its halo of 64 channels, has rows of 128 bytes, one for each pixel; so the
// operand of a tap starts some rows further than the patch, and its groups of eight rows are one line of the patch
// apart: the swizzle goes by addresses, not by rows of an operand, and fits wherever one starts.
//
// All arrays are seen through tensor maps (conv2d_halo.py makes them):
//   source       (C, W, H, N), tiled: 64 channels x patch
//   filter       (C, taps, K), tiled: 64 channels x 1 x 64 filters
//   output, add  (channels, W, H, N), tiled: 64 channels x 8 x 4 pixels
//   below        (channels, W, H, N), tiled: 64 channels x window
// With STATISTICS (bfloat16) sums and sums of squares of each window of the output go to partial (windows, 2, columns),
// from which conv2d_statistics.cu goes on. MASKED, RELU: as in conv2d_hopper.cu, with sums of windows. NORMALIZED, of a forward
// pass: the source is the input of a batch norm with a ReLU over it, and patches are normalised where they lie, once for
// all taps, by three warps that are otherwise idle.
//
// Macros: DTYPE (1, 2), BACKWARD, WINDOW, STATISTICS, MASKED, NORMALIZED, RELU; PATCHES and STAGES (of filters) of the pipeline; SLABS,
// output buffers per warpgroup.
// Grid: as in conv2d_hopper.cu; a tile is 64 output channels of two windows.
// Block: two warpgroups multiply, one window each, with the same filters; one thread of a third keeps the pipeline
// filled, also across tiles.
// Dynamic shared memory: PATCHES * patch + STAGES * 8192 + 2 * SLABS * 4096 + 1024 bytes.
// FLOP: 2 * channels * pixels of whole windows * depth * taps. Bytes: source + filter + output (+ add), the source once
// per 64 output channels, with a third more (3x3) for the halo, as far as the L2 cache does not keep it.
#include "conv2d_output.cuh"
#if NORMALIZED
#include "conv2d_input.cuh"
#endif

constexpr int DEPTH = 64;  // values of a stage, 128 bytes per row
constexpr int WARPGROUPS = 2;
constexpr int THREADS = 128 * WARPGROUPS + 128;  // a whole warpgroup of filling threads, to take registers from
constexpr int WIDTH = 8;
constexpr int PIXELS = WIDTH * WINDOW;
constexpr int FILTERS = 64;
constexpr int WINDOWS = WARPGROUPS;  // of a tile
constexpr int STAGE_BYTES = FILTERS * 128;
constexpr int SLAB_LINES = 4, SLAB_PIXELS = WIDTH * SLAB_LINES, SLAB_BYTES = SLAB_PIXELS * 128;
static_assert(WINDOW % SLAB_LINES == 0 && PATCHES % WINDOWS == 0, "whole slabs, whole tiles");

struct Maps {
    TensorMap filter, source, output, add;
#if MASKED
    TensorMap below[READ];  // x, and y if it is read; or y alone
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
    int added;  // whether there is an array to be added
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
};

// Shared memory: patches, stages of filters, slabs of output per warpgroup, barriers.
struct Layout {
    u32 base;
    int patch_bytes;

    __device__ __forceinline__ u32 patch(int i) const { return base + i * patch_bytes; }
    __device__ __forceinline__ u32 stage(int i) const { return patch(PATCHES) + i * STAGE_BYTES; }
    __device__ __forceinline__ u32 slab(int warpgroup, int i) const {
        return stage(STAGES) + (warpgroup * SLABS + i) * SLAB_BYTES;
    }
    __device__ __forceinline__ u32 barriers() const { return slab(WARPGROUPS, 0); }
    __device__ __forceinline__ u32 patch_filled(int i) const { return barriers() + 8 * i; }
    __device__ __forceinline__ u32 patch_emptied(int i) const { return barriers() + 8 * (PATCHES + i); }
    __device__ __forceinline__ u32 filled(int i) const { return barriers() + 8 * (2 * PATCHES + i); }
    __device__ __forceinline__ u32 emptied(int i) const { return barriers() + 8 * (2 * PATCHES + STAGES + i); }
    __device__ __forceinline__ u32 added(int warpgroup, int i) const {
        return barriers() + 8 * (2 * (PATCHES + STAGES) + warpgroup * SLABS + i);
    }
    // When a patch is what a product wants.
    __device__ __forceinline__ u32 patch_ready(int i) const {
        return NORMALIZED ? added(WARPGROUPS, 0) + 8 * i : patch_filled(i);
    }
};

// One thread: fills patch after patch, and stage after stage.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, int first, int last) {
    Ring<PATCHES> patches;
    Ring<STAGES> ring;
    const int bytes = p.line * (WINDOW + (p.taps_h - 1) * abs(p.delta_h)) * 128;
    for (int i = first; i < last; i += p.group) {
        const Tile tile(p, i);
        for (int channel = 0; channel < p.depth; channel += DEPTH) {
#pragma unroll
            for (int j = 0; j < WINDOWS; ++j) {
                const Window window(p, tile.window + j);
                const u32 barrier = at.patch_filled(patches.index);
                barrier_wait(at.patch_emptied(patches.index), patches.parity ^ 1);
                barrier_expect(barrier, bytes);
                load_box(at.patch(patches.index), maps.source, barrier, channel, window.x + p.first_w,
                         window.y + p.first_h, window.image);
                patches.advance();
            }
            for (int tap = 0; tap < p.taps_h * p.taps_w; ++tap) {
                const u32 to = at.stage(ring.index), barrier = at.filled(ring.index);
                barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
                barrier_expect(barrier, STAGE_BYTES);
                if constexpr (BACKWARD)
                    load_box(to, maps.filter, barrier, tile.column, tap, channel);
                else
                    load_box(to, maps.filter, barrier, channel, tap, tile.column);
                ring.advance();
            }
        }
#if MASKED
#pragma unroll
        for (int array = 0; array < READ; ++array)
#pragma unroll
            for (int j = 0; j < WINDOWS; ++j) {
                const Window window(p, tile.window + j);
                const u32 barrier = at.patch_filled(patches.index);
                barrier_wait(at.patch_emptied(patches.index), patches.parity ^ 1);
                barrier_expect(barrier, PIXELS * 128);
                load_box(at.patch(patches.index), maps.below[array], barrier, tile.column, window.x, window.y,
                         window.image);
                patches.advance();
            }
#endif
    }
}

#if NORMALIZED
constexpr int WARPS = 3;  // that normalise

// A warp: normalises its part of patch after patch, the pixels that lie in the image; around it are zeros.
DEVICE void normalize_all(const Layout& at, const Problem& p, const Norm& norm, int first, int last, int warp) {
    const int lines = WINDOW + (p.taps_h - 1) * abs(p.delta_h), units = ceil_div(lines * p.line, UNIT);
    // In each unit a lane looks at one pixel, which then is so many lines and pixels further.
    const int begin = warp * UNIT + threadIdx.x % UNIT, begin_y = begin / p.line, begin_x = begin - begin_y * p.line;
    const int further_y = WARPS * UNIT / p.line, further_x = WARPS * UNIT - further_y * p.line;
    Ring<PATCHES> patches;
    Chunk chunk;
    int loaded = -1;
    for (int i = first; i < last; i += p.group) {
        const Tile tile(p, i);
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

    __device__ __forceinline__ Input(const Layout& at, const Problem& p, int warpgroup) : at(at), p(p) {
        patches.index = warpgroup;
    }

    // The product of one tap, whose pixels start at `pixels`.
    __device__ __forceinline__ void multiply_tap(Sum& sum, u32 pixels, int keep) const {
        const u64 a = operand(at.stage(ring.index));
        const u64 b = operand(pixels, 16, p.line * 128);
        product_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k)
            multiply<false, BACKWARD>(sum, a + operand_step(k * (BACKWARD ? 16 * 128 : 32)), b + operand_step(k * 32),
                                      keep + k);
        commit_products();
    }

    // Sums up a tile.
    __device__ __forceinline__ void accumulate(Sum& sum) {
        const bool speaks = threadIdx.x % 32 == 0;
        u32 stage_before = 0, patch_before = 0;
        for (int channel = 0; channel < p.depth; channel += DEPTH) {
            barrier_wait(at.patch_ready(patches.index), patches.parity);
            for (int a = 0; a < p.taps_h; ++a)
                for (int b = 0; b < p.taps_w; ++b) {
                    const int pixel = (p.offset_h + a * p.delta_h) * p.line + p.offset_w + b * p.delta_w;
                    barrier_wait(at.filled(ring.index), ring.parity);
                    multiply_tap(sum, at.patch(patches.index) + pixel * 128, channel + a + b);
                    await_products<1>();  // those of the tap before are done with their stage and their patch
                    if (speaks && channel + a + b > 0) barrier_arrive(stage_before);
                    if (speaks && channel > 0 && a + b == 0) barrier_arrive(patch_before);
                    stage_before = at.emptied(ring.index);
                    ring.advance();
                }
            patch_before = at.patch_emptied(patches.index);
            patches.advance(WINDOWS);
        }
        await_products<0>();
        if (speaks) barrier_arrive(stage_before), barrier_arrive(patch_before);
        settle(sum);
    }
};

// Where a warpgroup's slabs of 32 pixels x 64 channels lie.
struct Place {
    static constexpr int COUNT = WINDOW / SLAB_LINES, BYTES = SLAB_BYTES;

    const Layout& at;
    const Maps& maps;
    const Problem& p;
    int warpgroup;

    __device__ __forceinline__ u32 buffer(int i) const { return at.slab(warpgroup, i); }
    __device__ __forceinline__ u32 filled(int i) const { return at.added(warpgroup, i); }

    __device__ __forceinline__ void load(u32 to, u32 barrier, const Tile& tile, int s) const {
        const Window from(p, tile.window + warpgroup);
        load_box(to, maps.add, barrier, tile.column, from.x, from.y + s * SLAB_LINES, from.image);
    }

    __device__ __forceinline__ void store(const Tile& tile, int s, u32 from) const {
        if (tile.window + warpgroup >= p.windows) return;
        const Window to(p, tile.window + warpgroup);
        store_box(maps.output, from, tile.column, to.x, to.y + s * SLAB_LINES, to.image);
    }
};

DEVICE void write(Output<Place>& output, const Tile& tile, const Sum& sum, const float* bias, float* partial,
                  const Below& below, Ring<PATCHES>& patches) {
    // Lane i holds the address of row i % 8, a pixel, of matrix i / 8: lower and upper 8 channels, then the next line.
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int offset = (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
    float shift[2] = {0, 0};
    if (bias) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int channel = tile.column + 16 * warp + 8 * i + lane / 4;
            if (channel < output.place.p.columns) shift[i] = bias[channel];
        }
    }
    const Problem& p = output.place.p;
    const int number = tile.window + output.warpgroup;
    const Window window(p, number);
    const int lines = number < p.windows ? min(p.height - window.y, WINDOW) : 0, width = min(p.width - window.x, WIDTH);
    Tally tally;
#if MASKED
    Masking masking(below, tile.column, p.columns);
    u32 from[READ], emptied[READ];
#pragma unroll
    for (int array = 0; array < READ; ++array) {
        barrier_wait(output.place.at.patch_filled(patches.index), patches.parity);
        from[array] = output.place.at.patch(patches.index) + columns_across();
        emptied[array] = output.place.at.patch_emptied(patches.index);
        patches.advance(WINDOWS);
    }
#endif
#pragma unroll
    for (int s = 0; s < Place::COUNT; ++s) {
        const u32 slab = output.open(tile, s);
#pragma unroll
        for (int j = 0; j < SLAB_LINES; j += 2) {
            float d[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) d[e] = sum[(s * SLAB_LINES + j) * 4 + e] + shift[e / 2 % 2];
            finish<true>(d, slab + j * WIDTH * 128 + offset, output.added());
        }
#if MASKED
        output.share();
#pragma unroll
        for (int k = 0; k < SLAB_PIXELS; k += 16) {
            const int place = s * SLAB_BYTES + k * 128;
            masking.take(slab + columns_across() + k * 128, from[0] + place, from[READ - 1] + place, [&](int i) {
                return (k + i) % WIDTH < width && s * SLAB_LINES + (k + i) / WIDTH < lines;
            });
        }
#endif
        output.close(tile, s);
        if constexpr (STATISTICS) {
            const bool whole = width == WIDTH && (s + 1) * SLAB_LINES <= lines;
            if (s == 0) tally.start();
            tally.take<SLAB_PIXELS, 2>(slab, whole, [&](int i) {
                return i % WIDTH < width && s * SLAB_LINES + i / WIDTH < lines;
            });
        }
    }
#if MASKED
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int array = 0; array < READ; ++array) barrier_arrive(emptied[array]);
    const float found = masking.result();
#else
    const float found = STATISTICS ? tally.result() : 0.0f;
#endif
    if ((STATISTICS || SUMS) && lines > 0)
        ColumnShare().write(partial + i64(number) * 2 * p.columns, found, tile.column, p.columns);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_halo_kernel(const __grid_constant__ Maps maps, const float* __restrict__ bias, float* __restrict__ partial,
                   const float* __restrict__ moments, const float* __restrict__ gamma,
                   const float* __restrict__ beta, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared), p.patch};
    if (threadIdx.x == 0) {
        for (int i = 0; i < PATCHES; ++i)
            barrier_init(at.patch_filled(i), 1), barrier_init(at.patch_emptied(i), 4);
        for (int i = 0; i < STAGES; ++i) barrier_init(at.filled(i), 1), barrier_init(at.emptied(i), 4 * WARPGROUPS);
        for (int i = 0; i < WARPGROUPS * SLABS; ++i) barrier_init(at.added(0, i), 1);
#if NORMALIZED
        for (int i = 0; i < PATCHES; ++i) barrier_init(at.patch_ready(i), WARPS);
#endif
        barrier_init_done();
    }
    __syncthreads();

    const int group = blockIdx.x / p.group, turn = p.group * p.share;
    const int first = group * turn + blockIdx.x % p.group, last = min((group + 1) * turn, p.tiles);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be the same in a warp
    // The two roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (warpgroup == WARPGROUPS) {
        give_registers<NORMALIZED ? 88 : 40>();
        if (threadIdx.x == 128 * WARPGROUPS) fill(at, maps, p, first, last);
#if NORMALIZED
        if (threadIdx.x >= 128 * WARPGROUPS + 32)
            normalize_all(at, p, {moments, gamma, beta, p.depth}, first, last, threadIdx.x / 32 - 4 * WARPGROUPS - 1);
#endif
    } else {
        take_registers<NORMALIZED ? 208 : 232>();
        Input input(at, p, warpgroup);
        Output<Place> output{{at, maps, p, warpgroup}, warpgroup};
        for (int i = first; i < last; i += p.group) {
            const Tile tile(p, i);
            Sum sum;
            output.prepare(tile);
            input.accumulate(sum);
            write(output, tile, sum, bias, partial, {moments, gamma, beta}, input.patches);
        }
        output.drain();
    }
}
