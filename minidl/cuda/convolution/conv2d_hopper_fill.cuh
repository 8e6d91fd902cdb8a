// How stages of conv2d_hopper.cu are filled: a part of that file, included where its names are known.
#pragma once

// One thread: fills stage after stage of a tile, of which there is one if only to tell its number; -1 ends the row.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, Ring<STAGES>& ring, int number) {
    const Tile tile(p, number);
    const Class& c = p.classes[tile.index];
    const TensorMap& source = maps.source[tile.index];
    const Pixel start(c, tile.row);
    const int h = c.first_h + start.y * p.step_h, w = c.first_w + start.x * p.step_w;
    barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
    write_ticket(at.ticket(ring.index), number < 0 ? Ticket{-1, 0} : tile.ticket());
    if (number < 0 || (SPREAD && c.taps_h * c.taps_w == 0)) barrier_arrive(at.filled(ring.index)), ring.advance();
    if (number < 0) return;
    for (int channel = tile.begin; channel < tile.end; channel += DEPTH)
        for (int a = 0; a < c.taps_h; ++a)
#pragma unroll 1
            for (int b = 0; b < c.taps_w; ++b) {
                const u32 to = at.stage(ring.index), barrier = at.filled(ring.index);
                const int first = TAIL ? min(channel, p.depth - DEPTH) : channel, from = tile.source + first;
                barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
                barrier_expect(barrier, p.stage_bytes);
                if constexpr (FLAT)
                    load_box(to, source, barrier, from, tile.row);
                else
                    load_pixels(to, source, barrier, from, w, h, start.image, c.offset_w + b * p.delta_w,
                                c.offset_h + a * p.delta_h);
                const int tap = c.tap + a * p.tap_step_h + b * p.tap_step_w;
                if constexpr (GROUPED == 2) {
                    load_box(to + A_BYTES, maps.filter, barrier, tap * 32, 0, tile.column);
                } else if constexpr (ACROSS) {
                    const int column = GROUPED ? tile.column % p.group_columns : tile.column;
#pragma unroll
                    for (int j = 0; j < TILE_N; j += 64)
                        if (j < p.columns)
                            load_box(to + A_BYTES + j / 64 * FILTER_BLOCK, maps.filter, barrier, column + j, tap, from);
                } else {
                    load_box(to + A_BYTES, maps.filter, barrier, first, tap, tile.column);
                }
                ring.advance();
            }
#if MASKED
    if (p.added || c.taps_h * c.taps_w) fill_below(at, maps, p, ring, tile.own());
#endif
}
