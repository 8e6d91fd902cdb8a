// What conv2d_hopper.cu reads of a batch norm and a ReLU below a data gradient, on its way through the pipeline's stages.
#pragma once

// Signs of a tile: 64 rows for each block of a warpgroup, from a multiple of 16 bytes on, as the engine wants them.
constexpr int SIGN_ROW = TILE_N > 128 ? 32 : SIGN_CHUNK, SIGN_BYTES = SLAB_ROWS * SIGN_ROW;
static_assert(TILE_N % 64 == 0 && TILE_N / 8 + TILE_N / 8 % 16 <= SIGN_ROW, "the signs of a tile are in its rows");

// One thread: fills stages with what the slabs of a tile need of x and y.
DEVICE void fill_below(const Layout& at, const Maps& maps, const Problem& p, Ring<STAGES>& ring, const Tile& tile) {
    if constexpr (SIGNED) {
        const u32 barrier = at.filled(ring.index);
        barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
        barrier_expect(barrier, WARPGROUPS * BLOCKS * SIGN_BYTES);
#pragma unroll
        for (int i = 0; i < WARPGROUPS * BLOCKS; ++i)
            Place{at, maps, p, i / BLOCKS}.load(maps.below[READ][tile.index], at.stage(ring.index) + i * SIGN_BYTES, barrier,
                                                tile, i % BLOCKS, first_signs(tile.column));
        ring.advance();
    }
    for (int s = 0; s < Place::COUNT; s += SLABS_AT_ONCE)
#pragma unroll
        for (int array = 0; array < READ; ++array) {
            const u32 barrier = at.filled(ring.index);
            barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
            barrier_expect(barrier, WARPGROUPS * SLABS_AT_ONCE * SLAB_BYTES);
#pragma unroll
            for (int i = 0; i < WARPGROUPS * SLABS_AT_ONCE; ++i) {
                const Place place{at, maps, p, i / SLABS_AT_ONCE};
                const int slab = s + i % SLABS_AT_ONCE;
                place.load(maps.below[array][tile.index], at.stage(ring.index) + i * SLAB_BYTES, barrier, tile, slab,
                           place.column(tile, slab));
            }
            ring.advance();
        }
}
