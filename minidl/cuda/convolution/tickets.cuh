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

#ifndef TEAMS
#define TEAMS 8
#endif

DEVICE int add_to(u32* counter) {
    int before;
    asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// What a block knows of the tiles that are left.
struct Dealer {
    u32* counter;
    int tiles, group;
    int team;      // whose tiles it takes
    int all, own;  // of this turn, the numbers among all tiles and among those of the team

    __device__ __forceinline__ Dealer(u32* counter, int tiles, int group)
        : counter(counter), tiles(tiles), group(group), team(blockIdx.x % group * TEAMS / group), own(-1) {}

    // Begins to take a tile.
#if TEAMS == 0
    __device__ __forceinline__ void ask() { ++own; }
    __device__ __forceinline__ int take() { return own * group + blockIdx.x; }
#else
    __device__ __forceinline__ void ask() { all = add_to(counter), own = add_to(counter + 2 + team); }

    // The team's tile of a number; not less than `tiles` if there is none.
    __device__ __forceinline__ int tile_of(int number) const {
        const int first = ceil_div(team * group, TEAMS), size = ceil_div((team + 1) * group, TEAMS) - first;
        const int round = number / size;
        return round * group + first + number - round * size;
    }

    // The tile that was asked for: of another team where the own has none left.
    __device__ __forceinline__ int take() {
        int tile = tile_of(own);
        for (int i = 1; i < TEAMS && tile >= tiles && all < tiles; ++i) {
            team = team + 1 < TEAMS ? team + 1 : 0;
            tile = tile_of(add_to(counter + 2 + team));
        }
        return tile;
    }

#endif
    // The last block puts the counters back.
    __device__ __forceinline__ void leave() const {
        u32 left;
        asm volatile("atom.global.acq_rel.gpu.inc.u32 %0, [%1], %2;"
                     : "=r"(left)
                     : "l"(counter + 1), "r"(gridDim.x - 1)
                     : "memory");
        if (left != gridDim.x - 1) return;
        counter[0] = 0;
        for (int i = 0; i < TEAMS; ++i) counter[2 + i] = 0;
    }
};

// One thread of a block: fill(tile) for each that it takes, and fill(-1).
template <class F>
DEVICE void deal(u32* counter, int tiles, int share, int group, F fill) {
    Dealer dealer(counter, tiles, group);
    int rest = !counter ? 1 : blockIdx.x + group < gridDim.x ? share : tiles, tile = blockIdx.x;
    if (counter) dealer.ask(), tile = dealer.take();
    for (int now = 0; now >= 0;) {
        now = tile < tiles ? tile : -1;
        const bool more = now >= 0 && --rest > 0;
        if (more) dealer.ask();
        fill(now);
        tile = more ? dealer.take() : tiles;
    }
    if (counter) dealer.leave();
}
