// Adds up the partial sums that weight gradients on Hopper leave, in a fixed order, into the gradient.
//
//   partials   (parts of all tiles, held_rows / 16, held_columns / 8) patches                     float32
//   output     (K, R, S, C / groups) dense, set or added to                                       float32
// Tiles i, i + lots, i + 2 * lots and so on, `shared` of them, are lot i, whose steps, tile after tile, were divided
// among `parts` blocks; what a block has summed of a tile is a part, and those of a lot follow one another. A tile of
// which there is one part has been written already. A patch is 16 rows x 8 columns as a warp holds the sums of a
// product (conv2d_weight_hopper.cuh). Columns of a tile are blocks of SPAN channels, of which `span` are held; block b
// of tile n is the n * tile_step + b * block_step-th of the gradient, where `spans` blocks make a tap. What a tile has
// beyond the gradient's rows and columns is left out.
//
// Macros: DTYPE, of the operands; LINES (1, 2, 4) of patches x WARPS (1, 2, 4) pairs of patches, the cell that a block
// adds up; SPLIT (1 to 32, a power of two) threads share a sum: thread j adds parts j, j + SPLIT, ... and then a tree
// adds theirs.
// Block: WARPS x SPLIT warps. Grid: cells (along columns, along rows, groups): a warp has few loads, and each division
// that it needs to find them is as much as several.
// Not let_next_in(): with it ten of ResNet-50's 23 weight gradients of 32 images, timed one behind another on an H200,
// took 6 to 28 % more, likely as blocks of the next one lie badly then.
// FLOP: 1 per partial. Bytes: partials once, which the L2 cache should still hold, and the gradient once.
#define CLUSTER 1
#include "conv2d_weight_hopper.cuh"

constexpr int SPAN = 128 / sizeof(T), DOWN = DTYPE ? 8 : 1;
constexpr int PATCH = 128;  // values of a patch

struct Problem {
    int tiles_m, tiles_n, turn_m, turn_n;
    int steps, lots, shared, parts;
    int tile_rows, held_rows, held_columns;  // of a tile, and of what is held of it
    int down;            // cells of a tile along rows
    int wide, span;      // blocks of columns of a tile, pairs of patches of each
    int rows, channels;  // of a group
    int columns, spans, blocks;  // of a group; blocks of them: of a tap, of all taps
    int tile_step, block_step;
    int accumulate;
};

DEVICE void add(float4& sum, const float4& value) {
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

using Sums = float4[LINES][2];

// The parts of this thread, of two patches in each line, DEEP of them in flight.
template <int DEEP>
DEVICE void sum_up(Sums& sums, const float* from, int count, int part_values, int line_values) {
#pragma unroll
    for (int i = 0; i < LINES; ++i) sums[i][0] = sums[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int begin = threadIdx.x / (32 * WARPS);
    from += i64(begin) * part_values;
    for (int first = begin; first < count; first += DEEP * SPLIT) {
        Raw<float, 4> raw[DEEP][LINES][2];
#pragma unroll
        for (int u = 0; u < DEEP; ++u, from += SPLIT * part_values) {
            asm volatile("" : "+l"(from));  // or each address is a product of its own
#pragma unroll
            for (int i = 0; i < LINES; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (first + u * SPLIT < count) raw[u][i][j] = load_once<4>(from + i * line_values + j * PATCH);
        }
#pragma unroll
        for (int u = 0; u < DEEP; ++u)
#pragma unroll
            for (int i = 0; i < LINES; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (first + u * SPLIT < count) {
                        const float* const v = raw[u][i][j].items;
                        add(sums[i][j], make_float4(v[0], v[1], v[2], v[3]));
                    }
    }
}

// Adds what the SPLIT threads of each sum have, in a tree; the first has the result.
DEVICE void join(Sums& sums) {
    __shared__ float4 scratch[SPLIT][2 * LINES][32 * WARPS];
    const int lane = threadIdx.x % (32 * WARPS), part = threadIdx.x / (32 * WARPS);
#pragma unroll
    for (int half = SPLIT / 2; half > 0; half /= 2) {
        if (part >= half && part < 2 * half)
#pragma unroll
            for (int i = 0; i < 2 * LINES; ++i) scratch[part][i][lane] = sums[i / 2][i % 2];
        __syncthreads();
        if (part < half)
#pragma unroll
            for (int i = 0; i < 2 * LINES; ++i) add(sums[i / 2][i % 2], scratch[part + half][i][lane]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * SPLIT)
conv2d_weight_sum_kernel(const float* __restrict__ partials, float* __restrict__ output,
                         const __grid_constant__ Problem p) {
    await_predecessor();
    // Pairs of patches along all tiles, blocks of columns, and cells along rows, as the gradient has them.
    const u32 pair = blockIdx.x * WARPS + threadIdx.x / 32 % WARPS, span = pair / p.span;
    const u32 tile_n = span / p.wide, tile_m = blockIdx.y / p.down, line = (blockIdx.y - tile_m * p.down) * LINES;
    const u32 tile = blockIdx.z * p.tiles_m * p.tiles_n + tile_m * p.turn_m + tile_n * p.turn_n;
    u32 lot = tile, turn = 0, first = 0, count = p.parts;
    if (p.shared > 1) {
        turn = tile / p.lots, lot = tile - turn * p.lots;
        const u32 steps = p.steps * p.shared, begin = turn * p.steps;
        first = ((begin + 1) * p.parts - 1) / steps;
        count = ((begin + p.steps) * p.parts - 1) / steps - first + 1;
        if (count == 1) return;  // written already
    }
    const int part_values = p.held_rows * p.held_columns, line_values = p.held_columns / 8 * PATCH;
    const i64 part = i64(lot) * (p.parts + p.shared - 1) + first + turn;
    const int place = (pair - tile_n * p.wide * p.span) * (2 * PATCH) + threadIdx.x % 32 * 4;
    Sums sums;
    const float* const from = partials + part * part_values + line * line_values + place;
    if (SPLIT > 8 || count <= 4 / LINES * SPLIT)
        sum_up<4 / LINES>(sums, from, count, part_values, line_values);
    else
        sum_up<8 / LINES>(sums, from, count, part_values, line_values);
    if constexpr (SPLIT > 1) {
        join(sums);
        if (threadIdx.x >= 32 * WARPS) return;
    }
    const int block = tile_n * p.tile_step + (span - tile_n * p.wide) * p.block_step, tap = block / p.spans;
    const int channel = (block - tap * p.spans) * SPAN + (pair - span * p.span) * 16 + thread_column();
    const Target at{tap * p.channels + channel, block < p.blocks ? p.channels - channel : 0};
    const int row = tile_m * p.tile_rows + line * 16 + threadIdx.x % 32 / 4 * (DOWN == 1 ? 2 : 1);
    float* const to = output + i64(blockIdx.z) * p.rows * p.columns;
#pragma unroll
    for (int i = 0; i < LINES; ++i)
        if (p.accumulate)
            put_patches<DOWN, ADD>(to, p.columns, row + 16 * i, p.rows, at, 0, sums[i][0], sums[i][1]);
        else
            put_patches<DOWN, SET>(to, p.columns, row + 16 * i, p.rows, at, 0, sums[i][0], sums[i][1]);
}
