// How conv2d_hopper.cu and conv2d_strip.cu finish the sums of a tile, slab by slab; a part of them, which knows their
// structures.
#pragma once
#include "conv2d_output.cuh"

#if MASKED
// One thread: fills stages with what the slabs of a tile need of x and y.
DEVICE void fill_below(const Layout& at, const Maps& maps, const Problem& p, Ring<STAGES>& ring, const Tile& tile) {
    for (int s = 0; s < Place::COUNT; s += SLABS_AT_ONCE)
#pragma unroll
        for (int array = 0; array < MASKED; ++array) {
            const u32 barrier = at.filled(ring.index);
            barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
            barrier_expect(barrier, WARPGROUPS * SLABS_AT_ONCE * SLAB_BYTES);
#pragma unroll
            for (int i = 0; i < WARPGROUPS * SLABS_AT_ONCE; ++i) {
                const Place place{at, maps, p, i / SLABS_AT_ONCE};
                place.load(place.below(tile, array), at.stage(ring.index) + i * SLAB_BYTES, barrier, tile,
                           s + i % SLABS_AT_ONCE);
            }
            ring.advance();
        }
}

// Steps of 16 rows that are worked on side by side, as registers allow.
constexpr int AT_ONCE = THREADS > 288 ? 2 : 1;

// Masks slab s in its buffer and adds to the sums of its columns. `ring` stands at the stage of x.
DEVICE void mask_slab(Masking& masking, u32 slab, const Layout& at, Ring<STAGES>& ring, int s, int warpgroup) {
    Ring<STAGES> other = ring;
    if (MASKED == 2) other.advance();
    if (s % SLABS_AT_ONCE == 0) {
        barrier_wait(at.filled(ring.index), ring.parity);
        if (MASKED == 2) barrier_wait(at.filled(other.index), other.parity);
    }
    const u32 from = (warpgroup * SLABS_AT_ONCE + s % SLABS_AT_ONCE) * SLAB_BYTES + columns_across();
    const u32 x = at.stage(ring.index) + from, y = at.stage(other.index) + from;
    slab += columns_across();
#pragma unroll AT_ONCE
    for (int k = 0; k < SLAB_BYTES; k += 16 * 128)
        masking.take(slab + k, x + k, y + k, [](int) { return true; });
    if ((s + 1) % SLABS_AT_ONCE == 0) {
        if (thread_again() % 32 == 0) {
            barrier_arrive(at.emptied(ring.index));
            if (MASKED == 2) barrier_arrive(at.emptied(other.index));
        }
        ring.advance(MASKED);
    }
}
#endif

DEVICE void write(Output<Place>& output, const Tile& tile, const Sum& sum, const float* bias, float* partial,
                  const Below& below, Ring<STAGES>& ring) {
    const Place& place = output.place;
    constexpr int LAST = BLOCKS - 1;  // of the slabs of one range of columns
    constexpr int TAKEN = 2;  // times 16 rows at once
    float found[Place::COUNT / BLOCKS];
    Tally tally;
#if MASKED
    Masking masking;
#endif
#pragma unroll
    for (int s = 0; s < Place::COUNT; ++s) {
#if MASKED
        if (s % BLOCKS == 0) masking = Masking(below, place.column(tile, s), place.p.columns);
#endif
        const u32 slab = output.open(tile, s);
        put_slab(slab, sum[s % BLOCKS], s / BLOCKS * SLAB_COLUMNS, bias, tile.column, place.p.columns, output.added(),
                 Kept(place, tile, s));
#if MASKED
        output.share();
        mask_slab(masking, slab, place.at, ring, s, output.warpgroup);
        if (s % BLOCKS == LAST) found[s / BLOCKS] = masking.result();
#endif
        output.close(tile, s);
        if constexpr (STATISTICS) {
            const int rows = counted_rows(place, tile, s);
            if (s % BLOCKS == 0) tally.start();
            tally.take<SLAB_ROWS, TAKEN>(slab, rows >= SLAB_ROWS, [&](int i) { return i < rows; });
            if (s % BLOCKS == LAST) found[s / BLOCKS] = tally.result();
        }
    }
    if constexpr (STATISTICS || MASKED) {
        float* const to = partial + i64(tile.number * WARPGROUPS + output.warpgroup) * 2 * place.p.columns;
#pragma unroll
        for (int s = 0; s < Place::COUNT; s += BLOCKS)
            ColumnShare().write(to, found[s / BLOCKS], place.column(tile, s), place.p.columns);
    }
}
