// conv2d_hopper.cu for few rows, whose time is that of fetching filters: the blocks of a cluster share the depth of a
// tile, so that all multiprocessors fetch, and add up their sums through shared memory, in order. Of a stage only the
// rows that there are come: zeros for others cost the engine more than rows would.
#pragma once

// A warpgroup's share of what the blocks of a cluster have summed, added up in the order of their ranks and written.
DEVICE void combine(const Sum& sum, u32 space, const Tile& tile, const Problem& p, const float* bias, const T* add,
                    int add_pitch, T* out, int warpgroup) {
    constexpr int QUADS = TILE_N / 8, SHARE = BLOCKS * QUADS / DIVIDED, ALL = 128 * WARPGROUPS;
    constexpr int AT_ONCE = 8 / DIVIDED;  // of its quads, whose parts are on their way together
    static_assert(SHARE * DIVIDED == BLOCKS * QUADS && SHARE % AT_ONCE == 0, "equal shares");
    static_assert(ALL * BLOCKS * QUADS * 16 <= STAGES * STAGE_BYTES, "room for the sums");
    const int lane = threadIdx.x % 32, rows = p.classes[0].rows;
    space += threadIdx.x * 16;
    warpgroups_sync<ALL>(1);  // the stages are no longer read
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int j = 0; j < QUADS; ++j)
            store_shared(space + (i * QUADS + j) * ALL * 16,
                         make_float4(sum[i][4 * j], sum[i][4 * j + 1], sum[i][4 * j + 2], sum[i][4 * j + 3]));
    cluster_sync();
    const int first = cluster_rank() * SHARE;
#pragma unroll 1
    for (int begin = 0; begin < SHARE; begin += AT_ONCE) {
        float4 part[AT_ONCE][DIVIDED];
        int rows_of[AT_ONCE], columns_of[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int share = first + begin + i;
            rows_of[i] = tile.row + warpgroup * ROWS + share / QUADS * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
            columns_of[i] = tile.column + share % QUADS * 8 + lane % 4 * 2;
            if (rows_of[i] >= rows || columns_of[i] >= p.columns) continue;
#pragma unroll
            for (int rank = 0; rank < DIVIDED; ++rank)
                part[i][rank] = load_from_block(space + share * ALL * 16, rank);
        }
        if (begin + AT_ONCE == SHARE) {
            __syncwarp();
            cluster_arrive();
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = rows_of[i], column = columns_of[i];
            if (column >= p.columns) continue;
            float total[2][2] = {};
#pragma unroll
            for (int rank = 0; rank < DIVIDED; ++rank) {
                total[0][0] += part[i][rank].x, total[0][1] += part[i][rank].y;
                total[1][0] += part[i][rank].z, total[1][1] += part[i][rank].w;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int here = row + 8 * half;
                float(&y)[2] = total[half];
                if (here >= rows) break;
                if (bias) y[0] += bias[column], y[1] += bias[column + 1];
                if (add) {
                    float more[2];
                    load(add + i64(here) * add_pitch + column, more);
                    y[0] += more[0], y[1] += more[1];
                }
                if constexpr (RELU) y[0] = clamp_below(y[0], 0.0f), y[1] = clamp_below(y[1], 0.0f);
                store(out + i64(here) * p.columns + column, y);
            }
        }
    }
    __syncwarp();
    cluster_wait();  // others may still be reading
}

// add  r * add_pitch + c, or null; out (rows, columns) dense. Grid: DIVIDED blocks for each tile.
extern "C" __global__ void __cluster_dims__(DIVIDED) __launch_bounds__(THREADS, RESIDENT)
conv2d_divided_kernel(const __grid_constant__ Maps maps, const float* __restrict__ bias, const T* __restrict__ add,
                      T* __restrict__ out, int add_pitch, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) init_barriers(at);
    if (threadIdx.x == THREADS - 1) prefetch_map(maps.source[0]), prefetch_map(maps.filter);
    await_predecessor();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        if constexpr (SHIFT) Registers::give();
        if (threadIdx.x == 128 * WARPGROUPS) {
            Ring<STAGES> ring;
            fill(at, maps, p, ring, blockIdx.x);
        }
    } else {
        if constexpr (SHIFT) Registers::take();
        const Tile tile(p, blockIdx.x);
        Ring<STAGES> ring;
        Sum sum;
        accumulate(sum, at, ring, ceil_div(tile.end - tile.begin, DEPTH), tile.ends(p), warpgroup);
        combine(sum, at.base, tile, p, bias, add, add_pitch, out, warpgroup);
    }
}
