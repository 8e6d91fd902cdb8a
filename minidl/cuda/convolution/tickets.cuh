// How the blocks of a launch share out its tiles: each takes the next one's number from a counter in global memory when
// it comes to it. Tiles that are dealt out ahead have to wait for blocks that begin late: an all-reduce has
// multiprocessors for itself, blocks whose place it holds begin when the others have ended, and their share takes the
// time of the kernel once more (ResNet-50's outputs beside NCCL 6.30 ms, so 4.90; a block for each tile, which fills
// its pipeline anew, 6.08). Who computes a tile changes no bit.
//
// counter  {taken, left}, zero before and after each launch, and of this launch alone while it runs (tickets.py); null
//          where blocks have one tile, that of their number.
// One thread of a block takes numbers, each when the pipeline is filled for the tile before: what is filled by then
// hides the wait, and no block holds a second tile while another has none. It tells in shared memory where the tile
// lies, beside the first buffer of it, whose barrier makes that known; a buffer without a tile ends the row.
// A block leaves its multiprocessor to others after `share` tiles; but each of the last `group` blocks, as many as run
// at a time, goes on as long as there are tiles.
#pragma once
#include "hopper.cuh"

constexpr int TICKET_BYTES = 8;

// Where a tile lies, as its kernel has it; `first` is negative where there is none.
struct Ticket {
    int first, second;
};

DEVICE void write_ticket(u32 to, const Ticket& ticket) {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(to), "r"(ticket.first), "r"(ticket.second) : "memory");
}

DEVICE Ticket read_ticket(u32 from) {
    Ticket ticket;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(ticket.first), "=r"(ticket.second)
                 : "r"(from)
                 : "memory");
    // Known to be the same in a warp: then they are in the registers that a warp shares.
    return {int(__reduce_or_sync(0xffffffffu, ticket.first)), int(__reduce_or_sync(0xffffffffu, ticket.second))};
}

DEVICE int take_number(u32* counter) {
    int number;
    asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;" : "=r"(number) : "l"(counter) : "memory");
    return number;
}

// The last block puts the counter back.
DEVICE void leave(u32* counter) {
    u32 left;
    asm volatile("atom.global.acq_rel.gpu.inc.u32 %0, [%1], %2;"
                 : "=r"(left)
                 : "l"(counter + 1), "r"(gridDim.x - 1)
                 : "memory");
    if (left == gridDim.x - 1) counter[0] = 0;
}

// One thread of a block: fill(tile) for each that it takes, and fill(-1).
template <class F>
DEVICE void deal(u32* counter, int tiles, int share, int group, F fill) {
    int rest = !counter ? 1 : blockIdx.x + group < gridDim.x ? share : tiles;
    int next = counter ? take_number(counter) : blockIdx.x;
    for (int tile = 0; tile >= 0;) {
        tile = next < tiles ? next : -1;
        fill(tile);
        next = tile >= 0 && --rest > 0 ? take_number(counter) : tiles;
    }
    if (counter) leave(counter);
}
