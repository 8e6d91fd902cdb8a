// How the float32 results of a window leave in conv2d_halo.cu, a part of it: a patch holds DEPTH = 32 channels of a
// window, so the halves of a tile's channels, each of two warps, leave one after the other from the place of the last
// patch. The first half is read by the engine while the other warpgroup multiplies.
#pragma once

constexpr int HALVES = FILTERS / DEPTH;

// Of a lane's results on a line of a patch: where sum[4 * line + 2 * i + e] is, channel lane / 4 of eight i of the
// warp's 16, pixel lane % 4 * 2 + e. A warp meets each bank once.
struct Spot {
    u32 to[2][2];

    __device__ __forceinline__ Spot(u32 patch) {
        const u32 thread = thread_again(), lane = thread % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 pixel = lane % 4 * 2 + e, chunk = thread / 32 % 2 * 4 + i * 2 + lane / 16;
                to[i][e] = patch + pixel * 128 + (chunk ^ pixel) * 16 + lane / 4 % 4 * 4;
            }
    }
};

DEVICE void add_lines(Sum& sum, const Spot& spot) {
#pragma unroll
    for (int line = 0; line < WINDOW; ++line)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float other;
            const u32 from = spot.to[i / 2][i % 2] + line * (WIDTH * 128);
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(from) : "memory");
            sum[4 * line + i] += other;
        }
}

DEVICE void write_lines(const Sum& sum, const Spot& spot) {
#pragma unroll
    for (int line = 0; line < WINDOW; ++line)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = RELU ? clamp_below(sum[4 * line + i], 0.0f) : sum[4 * line + i];
            const u32 to = spot.to[i / 2][i % 2] + line * (WIDTH * 128);
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
        }
}

// A warpgroup: what is done to its window of a tile between sums and store.
DEVICE void write(Input& input, const Maps& maps, const Tile& tile, Sum& sum, const float* bias, float*, const Below&,
                  int warpgroup) {
    const Problem& p = input.p;
    const int number = tile.window + warpgroup, own = thread_again() / 64;
    if (bias) add_bias(sum, bias, tile.column, p.columns);
    if (p.added) {
#pragma unroll 1
        for (int half = 0; half < HALVES; ++half) {
            if (input.speaks()) barrier_arrive(input.left);
            input.take();
            if (half == own) add_lines(sum, Spot(input.place));
            __syncwarp();  // all lanes have read what the next arrival gives back
        }
    }
    const Spot spot(input.place);
    warpgroup_sync(1 + warpgroup);  // all four warps are done with the pixels
#pragma unroll 1
    for (int half = 0; half < HALVES; ++half) {
        if (half == own) write_lines(sum, spot);
        fence_for_engine();
        warpgroup_sync(1 + warpgroup);
        const int column = tile.column + half * DEPTH;
        if (threadIdx.x % 128 == 0 && number < p.windows && column < p.columns) {
            const Window to(p, number);
            store_box(maps.output, input.place, column, to.x, to.y, to.image);
            commit_stores();
        }
        if (half < HALVES - 1) {
            if (threadIdx.x % 128 == 0) await_stores_read<0>();
            warpgroup_sync(1 + warpgroup);
        }
    }
}
