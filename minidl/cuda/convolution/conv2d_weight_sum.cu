// Adds up the partial sums that weight gradients on Hopper leave, in a fixed order, into the gradient.
//
//   partials   (parts of all tiles, tile_rows / 16, tile_columns / 8) patches                     float32
//   output     (K, R, S, C / groups) dense, set or added to                                       float32
// Tiles i, i + lots, i + 2 * lots and so on, `shared` of them, are lot i, whose steps, tile after tile, were divided among
// `parts` blocks; what a block has summed of a tile is a part, and those of a lot follow one another. A tile of which
// there is one part has been written already. A patch is 16 rows x 8 columns as a warp holds the sums of
// a product, four values of each lane: of two neighbouring columns in row g and `down` further, g by the quad of lanes.
// Columns of a tile are blocks of `span` channels; block b of tile n is the n * tile_step + b * block_step-th of the
// gradient, where `spans` blocks make a tap. What a tile has beyond the gradient's rows and columns is left out.
//
// Macros: SPLIT, VEC 4 (partial_sums.cuh); VEC_Y (1, 4), values per access to the gradient.
// Block: WIDTH x SPLIT threads. Grid: (tiles, values of a tile / (4 * WIDTH)).
// FLOP: 1 per partial. Bytes: partials once, which the L2 cache should still hold, and the gradient once.
#include "partial_sums.cuh"

struct Problem {
    int tiles_m, tiles_n, turn_m, turn_n;
    int steps, lots, shared, parts;
    int tile_rows, tile_columns;
    int rows, channels;  // of a group
    int span, spans, blocks;
    int tile_step, block_step;
    int down;
    int accumulate;
};

// Two neighbours of a row, or of both rows of a thread and its neighbour four of one.
DEVICE void put(float* to, i64 pitch, int left, const float (&sum)[VEC], bool accumulate) {
    if constexpr (VEC_Y == 4) {
        constexpr u32 LANES = WIDTH < 32 ? (1u << WIDTH % 32) - 1 : 0xffffffffu;
        const bool odd = threadIdx.x % 2;
        const float first = __shfl_xor_sync(LANES, odd ? sum[0] : sum[2], 1);
        const float second = __shfl_xor_sync(LANES, odd ? sum[1] : sum[3], 1);
        if (left <= odd) return;
        float4& there = *reinterpret_cast<float4*>(odd ? to + pitch - 2 : to);
        float4 four = odd ? make_float4(first, second, sum[2], sum[3]) : make_float4(sum[0], sum[1], first, second);
        if (accumulate) {
            const float4 before = there;
            four.x += before.x, four.y += before.y, four.z += before.z, four.w += before.w;
        }
        there = four;
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (left <= i) return;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& there = to[i * pitch + e];
                there = accumulate ? there + sum[2 * i + e] : sum[2 * i + e];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(SPLIT * WIDTH)
conv2d_weight_sum_kernel(const float* __restrict__ partials, float* __restrict__ output,
                         const __grid_constant__ Problem p) {
    const int item = blockIdx.y * WIDTH + threadIdx.x % WIDTH, size = p.tile_rows * p.tile_columns;
    const u32 tile = blockIdx.x;
    const int turn = tile / p.lots, lot = tile % p.lots;
    const i64 steps = i64(p.steps) * p.shared, begin = i64(turn) * p.steps;
    const int first = ((begin + 1) * p.parts - 1) / steps, last = ((begin + p.steps) * p.parts - 1) / steps;
    if (first == last) return;  // written already
    const bool inside = item * VEC < size;
    float sum[VEC];
    const i64 part = i64(lot) * (p.parts + p.shared - 1) + first + turn;
    if (!sum_up(partials + part * size + item * VEC, size, inside ? last - first + 1 : 0, sum)) return;
    const int lane = item % 32, line = p.tile_columns / 8, patch = item / 32;
    const int tile_m = tile / p.turn_m % p.tiles_m, tile_n = tile / p.turn_n % p.tiles_n;
    const int group = tile / (p.tiles_m * p.tiles_n);
    const int column = patch % line * 8 + lane % 4 * 2;
    const int block = tile_n * p.tile_step + column / p.span * p.block_step, tap = block / p.spans;
    const int channel = (block - tap * p.spans) * p.span + column % p.span;
    const int row = tile_m * p.tile_rows + patch / line * 16 + lane / 4 * (p.down == 1 ? 2 : 1);
    const int left = !inside || block >= p.blocks || channel >= p.channels || row >= p.rows ? 0
                     : row + p.down < p.rows                                                ? 2
                                                                                            : 1;
    const i64 pitch = i64(p.blocks / p.spans) * p.channels;
    put(output + (i64(group) * p.rows + row) * pitch + tap * p.channels + channel, p.down * pitch, left, sum,
        p.accumulate);
}
