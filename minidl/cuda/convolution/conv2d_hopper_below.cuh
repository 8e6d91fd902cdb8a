// What conv2d_hopper.cu reads of a batch norm and a ReLU below a data gradient, on its way through the pipeline's
// stages, and what it does with it.
#pragma once

// Slabs of a warpgroup whose x, or y, fill a stage.
constexpr int SLABS_AT_ONCE = Place::COUNT < 2 || 2 * WARPGROUPS * SLAB_BYTES > STAGE_BYTES ? 1 : 2;

// Signs of a tile: 64 rows for each block of a warpgroup, from a multiple of 16 bytes on, as the engine wants them.
constexpr int SIGN_ROW = OWN > 128 ? 32 : SIGN_CHUNK, SIGN_BYTES = SLAB_ROWS * SIGN_ROW;
static_assert(WARPGROUPS * SLABS_AT_ONCE * SLAB_BYTES <= STAGE_BYTES && WARPGROUPS * BLOCKS * SIGN_BYTES <= STAGE_BYTES,
              "what comes fits into stages");
static_assert(!SIGNED || READ * ((Place::COUNT + SLABS_AT_ONCE - 1) / SLABS_AT_ONCE) < STAGES,
              "signs keep their stage until the last slab");
static_assert(OWN % 64 == 0 && OWN / 8 + OWN / 8 % 16 <= SIGN_ROW, "the signs of a tile are in its rows");

// One thread: fills stages with what the slabs of a tile need of x and y.
DEVICE void fill_below(const Layout& at, const Maps& maps, const Problem& p, Ring<STAGES>& ring, const Tile& tile) {
    if constexpr (SIGNED) {
        const u32 barrier = at.filled(ring.index);
        barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
        barrier_expect(barrier, WARPGROUPS * BLOCKS * SIGN_BYTES);
#pragma unroll
        for (int i = 0; i < WARPGROUPS * BLOCKS; ++i)
            Place{at, maps, p, i / BLOCKS}.load(maps.below[READ][tile.index], at.stage(ring.index) + i * SIGN_BYTES,
                                                barrier, tile, i % BLOCKS, first_signs(tile.column));
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

// Steps of 16 rows that are worked on side by side, as registers allow.
constexpr int AT_ONCE = RESIDENT == 1 ? 2 : 1;

// Masks slab s in its buffer and adds to the sums of its columns. `ring` stands at the stage of x, behind which is that
// of y or of another batch norm's x, `signs` at theirs.
DEVICE void mask_slab(Masking& masking, u32 slab, const Place& place, const Tile& tile, Ring<STAGES>& ring,
                      const Ring<STAGES>& signs, int s, const Below& below) {
    const Layout& at = place.at;
    const int warpgroup = place.warpgroup;
    Ring<STAGES> other = ring;
    if (READ == 2) other.advance();
    if (SIGNED && s == 0) barrier_wait(at.filled(signs.index), signs.parity);
    if (s % SLABS_AT_ONCE == 0) {
        barrier_wait(at.filled(ring.index), ring.parity);
        if (READ == 2) barrier_wait(at.filled(other.index), other.parity);
    }
    const u32 from = (warpgroup * SLABS_AT_ONCE + s % SLABS_AT_ONCE) * SLAB_BYTES + columns_across();
    const u32 x = at.stage(ring.index) + from;
    const u32 second = at.stage(other.index) + from;
    u32 y = second;
    constexpr int STEP = SIGNED ? SIGN_ROW : 128;
    if constexpr (SIGNED)
        y = at.stage(signs.index) + (warpgroup * BLOCKS + s % BLOCKS) * SIGN_BYTES + signs_within(tile.column) +
            (SWAPPED ? warpgroup : s / BLOCKS) * (SLAB_COLUMNS / 8) + Masking::signs_across<SIGN_ROW>();
    slab += columns_across();
#pragma unroll AT_ONCE
    for (int k = 0; k < SLAB_BYTES; k += 16 * 128)
        masking.take<SIGN_ROW>(slab + k, x + k, y + k / (128 / STEP));
    if constexpr (PAIR)
        masking.take_other<SLAB_BYTES, AT_ONCE>(slab, second, below, place.column(tile, s), place.p.columns);
    if ((s + 1) % SLABS_AT_ONCE == 0 || s == Place::COUNT - 1) {
        if (thread_again() % 32 == 0) {
            barrier_arrive(at.emptied(ring.index));
            if (READ == 2) barrier_arrive(at.emptied(other.index));
        }
        ring.advance(READ);
    }
    if (SIGNED && s == Place::COUNT - 1 && thread_again() % 32 == 0) barrier_arrive(at.emptied(signs.index));
}
