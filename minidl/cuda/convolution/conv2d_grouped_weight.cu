// Weight gradient of a convolution in groups of few channels, 16-bit types, no dilation; sm_80 and newer.
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r, q*sw - pw + s, c], c of k's group
//
//   dy        ((n*base_h + p)*base_w + q)*dy_pitch + k         T
//   x         ((n*height + h)*width + w)*x_pitch + channel     T
//   output    (chunks, K, R, S, C/groups) float32 partials, added up in order by sum_partials_kernel (channel_sum.cu)
//
// Images are walked as in conv2d_grouped.cu, rows of both arrays going through shared memory; products of mma.sync have
// 16 outputs k as rows, 8 channels c as columns, and sum over 16 pixels, two octets of base columns. A set is a unit,
// or two units of eight outputs each, whose products with each other's channels are thrown away. A warp has 16 outputs
// of a set and WARP_CHUNKS chunks of eight channels, for all taps and all pixels of the block: AGES rows of dy stay in
// its registers, and each row of x that comes meets them all; outside of the images both are zeros. A block has SETS
// sets and takes the items of its chunk one after the other; chunks depend on the sizes alone.
//
// Macros: DTYPE (1, 2); those of strip.cuh but BACKWARD; GROUP_IN, GROUP_OUT, channels of a group of x and dy;
// BUNDLE, groups of a unit; SETS, WARP_CHUNKS as above; PAIRS of octets of an item; STAGES; VEC_X, VEC_Y, values per
// copy of x and dy.
// Grid: slabs of sets x chunks, slabs fastest. Dynamic shared memory: stages, and 32 bytes.
// FLOP: 2 * R * S * C/groups per value of dy, up to 16 / GROUP_IN times that on the units. Bytes: dy and x once, and
// 4 * chunks * |dw| twice.
#define BACKWARD 0
#include "common.cuh"

constexpr int IN = BUNDLE * GROUP_IN, OUT = BUNDLE * GROUP_OUT;  // channels of a unit
constexpr int CHUNKS = (IN + 7) / 8, BLOCKS = (OUT + 7) / 8;     // of eight
constexpr int SET_UNITS = BLOCKS == 1 ? 2 : 1;
constexpr int SET_TILES = (SET_UNITS * BLOCKS + 1) / 2, SET_CHUNKS = SET_UNITS * CHUNKS;  // 16 outputs, 8 channels
constexpr int SHARERS = SET_CHUNKS / WARP_CHUNKS;  // warps that share 16 outputs
static_assert(SET_CHUNKS % WARP_CHUNKS == 0, "equal shares");
constexpr int UNITS = SETS * SET_UNITS, OCTETS = 2 * PAIRS;  // of a block
constexpr int THREADS = 32 * SETS * SET_TILES * SHARERS;
#include "conv2d_grouped.cuh"

struct Problem {
    i64 dy_pitch, x_pitch;
    Items items;
    int channels, out_channels;  // of x and dy
    int slabs;
    Strips at;
};

constexpr int TAPS = KERNEL_H * KERNEL_W;
using Sources = RowCopies<OCTETS, UNITS, IN, STEP_H, STEP_W, 7 * STEP_W + SIGHT, VEC_X>;
using Gradients = RowCopies<OCTETS, UNITS, OUT, 1, 1, 8, VEC_Y>;
constexpr int STAGE_BYTES = Sources::BYTES + Gradients::BYTES;

// The sums of one product, as far as output and channel are of one group.
DEVICE void write_sums(const float (&sums)[4], float* output, const Problem& p, int first_unit, int tile, int chunk,
                       int tap) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int row = tile * 16 + e / 2 * 8 + lane / 4;
        const int unit = row / (BLOCKS * 8), o = row % (BLOCKS * 8);
        const int c = chunk % CHUNKS * 8 + lane % 4 * 2 + e % 2;
        const int k = (first_unit + unit) * OUT + o;
        if (unit == chunk / CHUNKS && o < OUT && c < IN && o / GROUP_OUT == c / GROUP_IN && k < p.out_channels)
            output[(i64(k) * TAPS + tap) * GROUP_IN + c % GROUP_IN] = sums[e];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
conv2d_grouped_weight_kernel(const T* __restrict__ dy, const T* __restrict__ x, float* __restrict__ output,
                             const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 stages = shared_address(shared);
    const int slab = blockIdx.x % p.slabs;
    const i64 chunk = blockIdx.x / p.slabs;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int set = warp / (SET_TILES * SHARERS), tile = warp / SHARERS % SET_TILES;
    const int first_chunk = warp % SHARERS * WARP_CHUNKS;

    clear<THREADS>(shared, STAGES * STAGE_BYTES + 32);  // what no copy fills, and what lies behind the last unit
    __syncthreads();
    ItemRows ahead(chunk * p.items.share, p.items, p.at.base_h), here = ahead;
    Sources sources;
    Gradients gradients;
    const auto seek = [&] {
        sources.start(x, p.x_pitch, p.items, ahead.block, p.at.height, p.at.width, p.at.source_w, slab * UNITS * IN,
                      p.channels);
        gradients.start(dy, p.dy_pitch, p.items, ahead.block, p.at.base_h, p.at.base_w, 0, slab * UNITS * OUT,
                        p.out_channels);
    };
    const auto copy = [&](int stage) {
        if (!ahead.done()) {
            const u32 to = stages + stage * STAGE_BYTES;
            sources.copy(to, ahead.row * STEP_H + p.at.source_h, 0, p.at.height, p.at.width, p.x_pitch);
            gradients.copy(to + Sources::BYTES, ahead.row, 0, ahead.last, p.at.base_w, p.dy_pitch);
            if (ahead.advance(p.items, p.at.base_h) && !ahead.done()) seek();
        }
        commit_copies();
    };
    if (!ahead.done()) seek();
    for (int i = 0; i < STAGES - 1; ++i) copy(i);

    // Where this lane's row of the fragments starts: pixel lane % 8. Of dy, outputs 8 to 15 and the second octet; of x,
    // the second octet and the second of two chunks.
    const u32 of_dy = stages + Sources::BYTES + lane / 16 * Gradients::OCTET + lane % 8 * Gradients::PIXEL +
                      (set * SET_UNITS * BLOCKS + tile * 2 + lane / 8 % 2) * 16;
    const u32 of_x = stages + lane / 8 % 2 * Sources::OCTET + lane % 8 * Sources::PIXEL +
                     (set * SET_CHUNKS + first_chunk + (WARP_CHUNKS > 1 ? lane / 16 : 0)) * 16;
    float sums[TAPS][WARP_CHUNKS][4] = {};
    int read = 0, write = STAGES - 1;
    for (; !here.done(); here.skip(p.items, p.at.base_h)) {
        u32 rows[PAIRS][AGES][4] = {};  // of dy
#pragma unroll 1
        for (int row = here.base; row < here.last + AGES - 1; ++row) {
            await_copies<STAGES - 2>();
            __syncthreads();  // this step's rows are there for all, and those before are no longer read
            copy(write);
            write = write == STAGES - 1 ? 0 : write + 1;
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
                for (int age = AGES - 1; age > 0; --age)
#pragma unroll
                    for (int e = 0; e < 4; ++e) rows[pair][age][e] = rows[pair][age - 1][e];
                load_matrices_transposed(rows[pair][0], of_dy + read * STAGE_BYTES + pair * 2 * Gradients::OCTET);
#pragma unroll
                for (int in = 0; in < STEP_H; ++in)
#pragma unroll
                    for (int s = 0; s < KERNEL_W; ++s)
#pragma unroll
                        for (int j = 0; j < WARP_CHUNKS; j += 2) {
                            u32 b[4];
                            load_matrices_transposed(b, of_x + read * STAGE_BYTES +
                                                            (in * OCTETS + pair * 2) * Sources::OCTET +
                                                            Sources::place(s) + j * 16);
#pragma unroll
                            for (int age = 0; age < AGES; ++age) {
                                const int r = tap_row(age, in, 0);
                                if (r >= KERNEL_H) continue;
#pragma unroll
                                for (int i = 0; i < 2 && j + i < WARP_CHUNKS; ++i) {
                                    const u32 two[2] = {b[2 * i], b[2 * i + 1]};
                                    multiply_fragments(sums[r * KERNEL_W + s][j + i], rows[pair][age], two);
                                }
                            }
                        }
            }
            read = read == STAGES - 1 ? 0 : read + 1;
        }
    }
    await_copies<0>();
    output += chunk * p.out_channels * (TAPS * GROUP_IN);
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
        for (int j = 0; j < WARP_CHUNKS; ++j)
            write_sums(sums[tap][j], output, p, slab * UNITS + set * SET_UNITS, tile, first_chunk + j, tap);
}
