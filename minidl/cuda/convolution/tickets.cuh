// How the blocks of a launch share out its tiles: each takes the next one's number from a counter in global memory when it
// comes to it. Of tiles dealt out ahead those of a block that begins late are waited for: an all-reduce has 16 to 32
// multiprocessors for itself, and blocks whose place it holds begin when the others have ended, which takes the time
// of the kernel once more. Who computes a tile changes no bit.
//
// counter  {taken, left}, zero before and after each launch, and of this launch alone while it runs (tickets.py); null
//          where blocks have one tile, that of their number.
// One thread of a block takes numbers, each as it begins to fill the pipeline for the one before, and tells them to the
// readers in shared memory, beside the first buffer of a tile, whose barrier makes it known; -1 ends the row.
// A block leaves its multiprocessor to others after `share` tiles; but each of the last `group` blocks, as many as run
// at a time, goes on as long as there are tiles.
#pragma once
#include "hopper.cuh"

constexpr int TICKET_BYTES = 4;

DEVICE void write_ticket(u32 to, int tile) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(tile) : "memory"); }

DEVICE int read_ticket(u32 from) {
    int tile;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(tile) : "r"(from) : "memory");
    return __reduce_or_sync(0xffffffffu, tile);  // known to be the same in a warp
}

DEVICE int take_ticket(u32* counter) {
    int tile;
    asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;" : "=r"(tile) : "l"(counter) : "memory");
    return tile;
}

// The last block puts the counter back.
DEVICE void leave_tickets(u32* counter) {
    u32 left;
    asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], %2;"
                 : "=r"(left)
                 : "l"(counter + 1), "r"(gridDim.x - 1)
                 : "memory");
    if (left == gridDim.x - 1) asm volatile("st.global.relaxed.gpu.u32 [%0], %1;" ::"l"(counter), "r"(0) : "memory");
}

// One thread of a block: fill(tile) for each that it takes, and fill(-1).
template <class F>
DEVICE void deal(u32* counter, int tiles, int share, int group, F fill) {
    int rest = !counter ? 1 : blockIdx.x + group < gridDim.x ? share : tiles;
#if DEALT
    int tile = blockIdx.x;
#else
    int tile = counter ? take_ticket(counter) : blockIdx.x;
#endif
    for (int now = 0; now >= 0;) {
        now = tile < tiles ? tile : -1;
        if (now >= 0) tile = --rest > 0 ? take_ticket(counter) + (DEALT ? gridDim.x : 0) : tiles;
        fill(now);
    }
    if (counter) leave_tickets(counter);
}
