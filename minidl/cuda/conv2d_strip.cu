// Convolution without stride, forward and data gradient, on Hopper (sm_90a): conv2d_hopper.cu with the source pixels of a
// filter row loaded once for all of its taps and not once per tap. 16-bit types, one group.
//
//   forward (BACKWARD = 0):
//     y[n,p,q,k]  = bias[k] + add[n,p,q,k] + sum_{r,s,c} x[n, p - ph + r*dh, q - pw + s*dw, c] w[k,r,s,c]
//   data gradient (BACKWARD = 1):
//     dx[n,h,w,c] = bias[c] + add[n,h,w,c] + sum_{r,s,k} dy[n, h + ph - r*dh, w + pw - s*dw, k] w[k,r,s,c]
//
// One product of rows x columns (output channels), summed over depth in the order of conv2d_hopper.cu: chunks of 64 source
// channels, over the taps within a chunk. Rows are points: the output pixels of a line and `width` - `outputs` more, so
// many that behind a line of the source there is as much padding as before it, which then is the padding between two
// lines. So in shared memory tap b of a filter row is the same operand `delta_w` rows further: the swizzle goes by
// addresses, not by rows of an operand. A strip has the points of a tile and those that its taps reach beyond them.
//
// All arrays are seen through tensor maps (conv2d_strip.py makes them):
//   source       (C, W, H, N), im2col: TILE_M points x 64 channels; beyond: 8 points
//   filter       (C, taps, K), tiled: 64 channels x 1 x TILE_N filters; data gradient 64 x 1 x 64
//   add, below   (columns, W, H, N), im2col: 64 channels x 64 points
// but for the output, (N, H, W, columns) dense, which threads write.
// STATISTICS, MASKED: as in conv2d_hopper.cu. NORMALIZED, of a forward pass: the source is the input of a batch norm with a ReLU
// over it, and strips are normalised where they lie by three warps that are otherwise idle.
//
// Macros: DTYPE (1, 2), BACKWARD, STATISTICS, MASKED, NORMALIZED; TILE_M x TILE_N, the tile of points x columns; STRIPS and STAGES (of
// filters) of the pipeline; SLABS, output buffers per warpgroup.
// Grid, block: as in conv2d_hopper.cu.
// Dynamic shared memory: STRIPS * 128 * (TILE_M + 8) + STAGES * 128 * TILE_N + 2 * SLABS * 8192 + 1024 bytes.
// FLOP: 2 * points * columns * depth * taps. Bytes: source + filter + output (+ add), the source once per column tile and
// filter row as far as the L2 cache does not keep it.
#include "conv2d_output.cuh"
#if NORMALIZED
#include "conv2d_input.cuh"
#endif

constexpr int DEPTH = 64;  // values of a stage, 128 bytes per row
constexpr int WARPGROUPS = 2, THREADS = 128 * WARPGROUPS + 128;
constexpr int ROWS = TILE_M / WARPGROUPS;  // of a warpgroup
constexpr int BLOCKS = ROWS / 64;          // products along them
constexpr int STRIP_ROWS = TILE_M + 8, STRIP_BYTES = STRIP_ROWS * 128, STAGE_BYTES = TILE_N * 128;
constexpr int FILTER_BLOCK = 64 * 128;  // data gradient: bytes between blocks of 64 columns
constexpr int SLAB_ROWS = 64, SLAB_COLUMNS = DEPTH, SLAB_BYTES = SLAB_ROWS * 128;
constexpr int STORED = 16;  // rows of a slab that a warpgroup writes at a time

struct Maps {
    TensorMap filter, source, beyond, add;
#if MASKED
    TensorMap below[MASKED];  // x, and y if it is read
#endif
};

// Point (n, i, j), n * height * width + i * width + j, is output pixel (i, j) if j is less than `outputs`. Its tap (a, b)
// reads the source at (first_h + i + offset_h + a*delta_h, first_w + j + offset_w + b*delta_w).
struct Problem {
    int tiles, share, group, tiles_n;
    int rows;  // points of all images
    int height, width, outputs;
    int columns, depth;
    int taps_h, taps_w;
    int images, source_h, source_w;
    int first_h, first_w;
    int offset_h, offset_w;
    int delta_h, delta_w;
    int further_h, further_w;  // STORED points, as lines and points
    int added;  // whether there is an array to be added
};

struct Tile {
    int number, row, column;

    __device__ __forceinline__ Tile(const Problem& p, int tile) {
        number = tile / p.tiles_n;
        column = (tile - number * p.tiles_n) * TILE_N;
        row = number * TILE_M;
    }
};

struct Point {
    int image, y, x;

    __device__ __forceinline__ Point(const Problem& p, int point) {
        const int line = point / p.width;
        x = point - line * p.width;
        image = line / p.height;
        y = line - image * p.height;
    }
};

// Shared memory: strips, stages of filters, slabs of output per warpgroup, barriers.
struct Layout {
    u32 base;

    __device__ __forceinline__ u32 strip(int i) const { return base + i * STRIP_BYTES; }
    __device__ __forceinline__ u32 stage(int i) const { return strip(STRIPS) + i * STAGE_BYTES; }
    __device__ __forceinline__ u32 slab(int warpgroup, int i) const {
        return stage(STAGES) + (warpgroup * SLABS + i) * SLAB_BYTES;
    }
    __device__ __forceinline__ u32 barriers() const { return slab(WARPGROUPS, 0); }
    __device__ __forceinline__ u32 strip_filled(int i) const { return barriers() + 8 * i; }
    __device__ __forceinline__ u32 strip_emptied(int i) const { return strip_filled(STRIPS + i); }
    __device__ __forceinline__ u32 filled(int i) const { return strip_emptied(STRIPS + i); }
    __device__ __forceinline__ u32 emptied(int i) const { return filled(STAGES + i); }
    __device__ __forceinline__ u32 added(int warpgroup, int i) const {
        return emptied(STAGES + warpgroup * SLABS + i);
    }
    // When a strip is what a product wants.
    __device__ __forceinline__ u32 strip_ready(int i) const {
        return NORMALIZED ? added(WARPGROUPS, 0) + 8 * i : strip_filled(i);
    }
};

// Where a warpgroup's slabs lie.
struct Place {
    static constexpr int COUNT = BLOCKS * TILE_N / SLAB_COLUMNS, BYTES = SLAB_BYTES;
    static constexpr bool DIRECT = true;

    const Layout& at;
    const Maps& maps;
    const Problem& p;
    int warpgroup;
    T* output;

    __device__ __forceinline__ u32 buffer(int i) const { return at.slab(warpgroup, i); }
    __device__ __forceinline__ u32 filled(int i) const { return at.added(warpgroup, i); }
    __device__ __forceinline__ int row(const Tile& tile, int s) const {
        return tile.row + warpgroup * ROWS + s % BLOCKS * 64;
    }
    __device__ __forceinline__ int column(const Tile& tile, int s) const { return tile.column + s / BLOCKS * SLAB_COLUMNS; }

    __device__ __forceinline__ void load(u32 to, u32 barrier, const Tile& tile, int s) const {
        load(maps.add, to, barrier, tile, s);
    }

#if MASKED
    __device__ __forceinline__ const TensorMap& below(const Tile&, int array) const { return maps.below[array]; }
#endif

    __device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 barrier, const Tile& tile, int s) const {
        const Point from(p, row(tile, s));
        load_pixels(to, map, barrier, column(tile, s), from.x, from.y, from.image, 0, 0);
    }

    // The engine would write beside an image too.
    __device__ __forceinline__ void store(const Tile& tile, int s, u32 from) const {
        const u32 thread = thread_again(), chunk = thread % 8, first = thread / 8;
        const int to = column(tile, s) + chunk * 8;
        if (to >= p.columns) return;
        int line = (row(tile, s) + first) / p.width, x = row(tile, s) + first - line * p.width;
#pragma unroll
        for (int i = 0; i < SLAB_ROWS; i += STORED) {
            if (line < p.images * p.height && x < p.outputs) {
                const uint4 value = load_shared(from + (i + first) * 128 + (chunk ^ first % 8) * 16);
                *reinterpret_cast<uint4*>(output + (i64(line) * p.outputs + x) * p.columns + to) = value;
            }
            line += p.further_h, x += p.further_w;
            if (x >= p.width) x -= p.width, ++line;
        }
    }
};

// Whether a thread's rows of a slab are output pixels: for sums over the slab, others are zero.
struct Kept {
    bool rows[2] = {true, true};

    __device__ __forceinline__ Kept(const Place& place, const Tile& tile, int s) {
        if constexpr (STATISTICS || MASKED)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 thread = thread_again();
                const int row = place.row(tile, s) + thread / 32 * 16 + thread % 32 / 4 + i * 8;
                rows[i] = row < place.p.rows && row % place.p.width < place.p.outputs;
            }
    }
    __device__ __forceinline__ bool operator()(int i) const { return rows[i]; }
};

DEVICE int counted_rows(const Place&, const Tile&, int) { return SLAB_ROWS; }

// Slabs of a warpgroup whose x, or y, fill a stage when there is a ReLU below.
constexpr int SLABS_AT_ONCE = STAGE_BYTES / WARPGROUPS / SLAB_BYTES;
using Sum = float[BLOCKS][TILE_N / 2];
#include "conv2d_slabs.cuh"

// Where the strip that is copied next belongs.
struct Next {
    const Problem& p;
    int tile, last;
    int channel = 0, a = 0;

    __device__ __forceinline__ bool exists() const { return tile < last; }
    __device__ __forceinline__ void advance() {
        if (++a < p.taps_h) return;
        a = 0, channel += DEPTH;
        if (channel < p.depth) return;
        channel = 0, tile += p.group;
    }
};

// One thread: fills strip after strip, one ahead of the filters, and stage after stage.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, int first, int last) {
    Ring<STRIPS> strips;
    Ring<STAGES> ring;
    Next next{p, first, last};
    const auto fill_strip = [&] {
        if (!next.exists()) return;
        const u32 barrier = at.strip_filled(strips.index);
        barrier_wait(at.strip_emptied(strips.index), strips.parity ^ 1);
        barrier_expect(barrier, STRIP_BYTES);
        const int row = Tile(p, next.tile).row, offset = p.offset_h + next.a * p.delta_h;
        const Point here(p, row), beyond(p, row + TILE_M);
        const u32 to = at.strip(strips.index);
        load_pixels(to, maps.source, barrier, next.channel, p.first_w + here.x, p.first_h + here.y, here.image, 0, offset);
        load_pixels(to + TILE_M * 128, maps.beyond, barrier, next.channel, p.first_w + beyond.x, p.first_h + beyond.y,
                    beyond.image, 0, offset);
        strips.advance();
        next.advance();
    };
    fill_strip();
    for (int i = first; i < last; i += p.group) {
        const Tile tile(p, i);
        for (int channel = 0; channel < p.depth; channel += DEPTH)
            for (int tap = 0; tap < p.taps_h * p.taps_w; ++tap) {
                if (tap % p.taps_w == 0) fill_strip();
                const u32 to = at.stage(ring.index), barrier = at.filled(ring.index);
                barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
                barrier_expect(barrier, STAGE_BYTES);
                if constexpr (BACKWARD) {
#pragma unroll
                    for (int j = 0; j < TILE_N; j += 64)
                        load_box(to + j / 64 * FILTER_BLOCK, maps.filter, barrier, tile.column + j, tap, channel);
                } else {
                    load_box(to, maps.filter, barrier, channel, tap, tile.column);
                }
                ring.advance();
            }
#if MASKED
        fill_below(at, maps, p, ring, tile);
#endif
    }
}

#if NORMALIZED
constexpr int WARPS = 3;  // that normalise

// Points, as images, lines and points of a line; `step` further at a time.
struct Steps {
    Point at, step;

    __device__ __forceinline__ Steps(const Problem& p, int step) : at(p, 0), step(p, step) {}
    __device__ __forceinline__ void advance(const Problem& p) {
        at.x += step.x, at.y += step.y, at.image += step.image;
        if (at.x >= p.width) at.x -= p.width, ++at.y;
        if (at.y >= p.height) at.y -= p.height, ++at.image;
    }
};

// A warp: normalises its part of strip after strip, the points that lie in an image; around it are zeros.
DEVICE void normalize_all(const Layout& at, const Problem& p, const Norm& norm, int first, int last, int warp) {
    Ring<STRIPS> strips;
    Steps walk(p, WARPS * UNIT);
    Chunk chunk;
    for (int i = first; i < last; i += p.group) {
        // In each unit a lane looks at one point.
        const Point begin(p, Tile(p, i).row + warp * UNIT + threadIdx.x % UNIT);
        for (int channel = 0; channel < p.depth; channel += DEPTH) {
            chunk.load(norm, channel);
            for (int a = 0; a < p.taps_h; ++a) {
                const int h = p.first_h + p.offset_h + a * p.delta_h;
                walk.at = begin;
                barrier_wait(at.strip_filled(strips.index), strips.parity);
                normalize_rows<WARPS>(chunk, at.strip(strips.index), warp, ceil_div(STRIP_ROWS, UNIT), [&](int unit) {
                    const bool inside = unit * UNIT + threadIdx.x % UNIT < STRIP_ROWS && walk.at.image < p.images && u32(walk.at.y + h) < u32(p.source_h) &&
                                        u32(walk.at.x + p.first_w) < u32(p.source_w);
                    walk.advance(p);
                    return __ballot_sync(0xffffffffu, inside);
                });
                fence_for_engine();
                __syncwarp();
                if (threadIdx.x % 32 == 0) barrier_arrive(at.strip_ready(strips.index));
                strips.advance();
            }
        }
    }
}
#endif

// What a warpgroup reads, and where it stands.
struct Input {
    const Layout& at;
    const Problem& p;
    int warpgroup;
    Ring<STRIPS> strips;
    Ring<STAGES> ring;

    // The products of one tap, whose points start at `points`.
    __device__ __forceinline__ void multiply_tap(Sum& sum, u32 points, int keep) const {
        const u64 a = operand(points), b = operand(at.stage(ring.index), BACKWARD ? FILTER_BLOCK : 16);
        product_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k)
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i)
                multiply<BACKWARD>(sum[i], a + operand_step(i * 64 * 128 + k * 32),
                                   b + operand_step(k * (BACKWARD ? 16 * 128 : 32)), keep + k);
        commit_products();
    }

    // Sums up a tile.
    __device__ __forceinline__ void accumulate(Sum& sum) {
        const bool speaks = threadIdx.x % 32 == 0;
        u32 stage_before = 0, strip_before = 0;
        for (int channel = 0; channel < p.depth; channel += DEPTH)
            for (int a = 0; a < p.taps_h; ++a) {
                barrier_wait(at.strip_ready(strips.index), strips.parity);
                for (int b = 0; b < p.taps_w; ++b) {
                    const int row = warpgroup * ROWS + p.offset_w + b * p.delta_w;
                    barrier_wait(at.filled(ring.index), ring.parity);
                    multiply_tap(sum, at.strip(strips.index) + row * 128, channel + a + b);
                    await_products<1>();  // those of the tap before are done with their stage and their strip
                    if (speaks && channel + a + b > 0) barrier_arrive(stage_before);
                    if (speaks && channel + a > 0 && b == 0) barrier_arrive(strip_before);
                    stage_before = at.emptied(ring.index);
                    ring.advance();
                }
                strip_before = at.strip_emptied(strips.index);
                strips.advance();
            }
        await_products<0>();
        if (speaks) barrier_arrive(stage_before), barrier_arrive(strip_before);
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) settle(sum[i]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_strip_kernel(const __grid_constant__ Maps maps, T* __restrict__ output, const float* __restrict__ bias, float* __restrict__ partial,
                    const float* __restrict__ moments, const float* __restrict__ gamma, const float* __restrict__ beta,
                    const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STRIPS; ++i)
            barrier_init(at.strip_filled(i), 1), barrier_init(at.strip_emptied(i), 4 * WARPGROUPS);
        for (int i = 0; i < STAGES; ++i) barrier_init(at.filled(i), 1), barrier_init(at.emptied(i), 4 * WARPGROUPS);
        for (int i = 0; i < WARPGROUPS * SLABS; ++i) barrier_init(at.added(0, i), 1);
#if NORMALIZED
        for (int i = 0; i < STRIPS; ++i) barrier_init(at.strip_ready(i), WARPS);
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
        Input input{at, p, warpgroup};
        Output<Place> out{{at, maps, p, warpgroup, output}, warpgroup};
        for (int i = first; i < last; i += p.group) {
            const Tile tile(p, i);
            Sum sum;
            out.prepare(tile);
            input.accumulate(sum);
            write(out, tile, sum, bias, partial, {moments, gamma, beta}, input.ring);
        }
        out.drain();
    }
}
