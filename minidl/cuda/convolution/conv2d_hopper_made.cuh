// How conv2d_hopper.cu has its source normalised beside the products (MADE): three warps of each block that are otherwise
// idle write the normalised source to an array `made`, in the order in which tiles read it, and the filling threads take
// their stages from there. Each value is made once, where every stage would have to be normalised for each tap and column
// tile anew; what it costs is that the source is written and read once more, mostly in the second-level cache.
//
// A step is what the tiles that run at a time, a wave, read of one chunk of channels: the pixels from where the last wave
// reached to where this one does. It is cut into `pieces` of PIECE pixels, and warps take pieces from a counter, step by
// step; another counter for each step tells how many are done. Who makes never waits, so whoever waits will be served by
// blocks that run, be they as few as may.
#pragma once

struct Making {
    int pitch;   // of the source
    int pieces;  // of a step, as many as the longest has
    int steps;
};

constexpr int PIECE = 64, FLIGHT = 8;  // pixels; of four of them at a time, loads on their way

// Pixels of the source, all images counted, that tiles of waves up to this one read.
DEVICE int reach(const Problem& p, int wave) {
    const Class& c = p.classes[0];
    const int tile = min((wave + 1) * p.group, p.tiles) - 1;
    const Pixel at(c, min((tile / p.tiles_n + 1) * TILE_M, c.rows) - 1);
    const int line = c.first_h + c.offset_h + at.y * p.step_h + (c.taps_h - 1) * p.delta_h;
    return (at.image * p.source_h + max(min(line, p.source_h - 1), -1) + 1) * p.source_w;
}

// counts: pieces taken, then pieces done of each step; zeros before.
DEVICE void make_all(const Problem& p, const Making& m, const Norm& norm, const T* __restrict__ raw, T* __restrict__ made,
                     u32* counts) {
    const int lane = threadIdx.x % 32, chunks = ceil_div(p.depth, DEPTH);
    Chunk chunk;
    for (;;) {
        int piece = 0;
        if (lane == 0) piece = atomicAdd(counts, 1);
        piece = __shfl_sync(0xffffffffu, piece, 0);
        const int step = piece / m.pieces;
        if (step >= m.steps) return;
        const int wave = step / chunks, channel = (step - wave * chunks) * DEPTH + lane % 8 * 8;
        const int begin = (wave ? reach(p, wave - 1) : 0) + (piece - step * m.pieces) * PIECE;
        const int end = channel < p.depth ? min(begin + PIECE, reach(p, wave)) : 0;
        chunk.load(norm, channel - lane % 8 * 8);
#pragma unroll 1
        for (int first = begin + lane / 8; first < end; first += 4 * FLIGHT) {
            uint4 values[FLIGHT];
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i)
                if (first + 4 * i < end)
                    values[i] = *reinterpret_cast<const uint4*>(raw + i64(first + 4 * i) * m.pitch + channel);
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i)
                if (first + 4 * i < end)
                    *reinterpret_cast<uint4*>(made + i64(first + 4 * i) * p.depth + channel) = chunk(values[i]);
        }
        fence_all_for_engine();
        __threadfence();
        __syncwarp();
        if (lane == 0) count_released(counts + 1 + step);
    }
}

// The filling thread: waits until steps up to this one are made; those before `known` are known to be.
DEVICE void await_made(const Making& m, u32* counts, int& known, int step) {
    if (known > step) return;
    for (; known <= step; ++known)
        while (load_acquired(counts + 1 + known) < u32(m.pieces)) __nanosleep(64);
    fence_all_for_engine();
}
