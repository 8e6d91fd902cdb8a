// What conv2d_hopper.cu reads of a batch norm and a ReLU below a data gradient, on its way through the pipeline's stages.
#pragma once

// Signs of a tile: rows of SIGN_ROW bytes, 64 of them for each block of a warpgroup.
constexpr int SIGN_ROW = 16, SIGN_BYTES = SLAB_ROWS * SIGN_ROW;
static_assert(!SIGNED || (FLAT && TILE_N == 8 * SIGN_ROW), "rows of signs that the engine can move");

// One thread: fills stages with what the slabs of a tile need of x and y.
DEVICE void fill_below(const Layout& at, const Maps& maps, const Problem& p, Ring<STAGES>& ring, const Tile& tile) {
    if constexpr (SIGNED) {
        const u32 barrier = at.filled(ring.index);
        barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
        barrier_expect(barrier, WARPGROUPS * BLOCKS * SIGN_BYTES);
#pragma unroll
        for (int i = 0; i < WARPGROUPS * BLOCKS; ++i)
            load_box(at.stage(ring.index) + i * SIGN_BYTES, maps.below[READ][0], barrier, tile.column / 8,
                     Place{at, maps, p, i / BLOCKS}.row(tile, i % BLOCKS));
        ring.advance();
    }
    for (int s = 0; s < Place::COUNT; s += SLABS_AT_ONCE)
#pragma unroll
        for (int array = 0; array < READ; ++array) {
            const u32 barrier = at.filled(ring.index);
            barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
            barrier_expect(barrier, WARPGROUPS * SLABS_AT_ONCE * SLAB_BYTES);
#pragma unroll
            for (int i = 0; i < WARPGROUPS * SLABS_AT_ONCE; ++i)
                Place{at, maps, p, i / SLABS_AT_ONCE}.load(maps.below[array][tile.index],
                                                           at.stage(ring.index) + i * SLAB_BYTES, barrier, tile,
                                                           s + i % SLABS_AT_ONCE);
            ring.advance();
        }
}
