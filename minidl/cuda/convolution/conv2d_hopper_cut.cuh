// How the blocks of a cluster share a tile of conv2d_hopper.cu whose depth is long and of whose kind there are few: each sums
// up a stretch of the channels, sends the others what it has of their columns, and finishes its own. A part of that file.
//
// What comes lies where the pipeline's stages were, a place for each rank, and is added up in the order of ranks: the same
// bits on every run, and with every tile that is cut into as many parts. Each thread sends to those with its number and
// reads what these have sent, so nobody waits for the other threads of a block but to know that stages are free.
#pragma once

#define CLUSTERED __cluster_dims__(CUT)

constexpr int QUADS = OWN / 8;              // of four sums, that a thread has of 64 rows of a block's columns
constexpr int ALL = 128 * WARPGROUPS;       // threads
constexpr int SENT = BLOCKS * QUADS * ALL * 16;  // bytes for one block
static_assert(CUT * SENT <= STAGES * STAGE_BYTES, "what comes lies in the stages");

using Whole = float[BLOCKS][OWN / 2];

enum Exchanged { FREE, COME, ADDED };  // stages of all blocks; what they sent here; that up, so that stages are free again

DEVICE void init_exchange(const Layout& at) {
    barrier_init(at.shared_out(FREE), CUT * 4 * WARPGROUPS);
    barrier_init(at.shared_out(COME), 1);
    barrier_init(at.shared_out(ADDED), 4 * WARPGROUPS);
    barrier_expect(at.shared_out(COME), (CUT - 1) * SENT);
}

// Of the thread that fills, before it uses stages again.
DEVICE void await_exchange(const Layout& at) { barrier_wait(at.shared_out(ADDED), 0); }

// A warpgroup: its rows of this block's columns, of what all have summed.
DEVICE void exchange(Whole& whole, const Sum& sum, const Layout& at) {
    const int rank = cluster_rank();
    const bool speaks = threadIdx.x % 32 == 0;
    const u32 space = at.stage(0) + threadIdx.x * 16;
    __syncwarp();
    if (speaks)
#pragma unroll
        for (int other = 0; other < CUT; ++other) barrier_arrive_in_block(in_block(at.shared_out(FREE), other));
    barrier_wait_for_cluster(at.shared_out(FREE), 0);
#pragma unroll
    for (int other = 0; other < CUT; ++other) {
        const u32 to = in_block(space + rank * SENT, other), come = in_block(at.shared_out(COME), other);
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < QUADS; ++j) {
                const float* const from = sum[i] + 4 * (other * QUADS + j);
                const float4 quad = make_float4(from[0], from[1], from[2], from[3]);
                const u32 place = (i * QUADS + j) * ALL * 16;
                if (other == rank)
                    store_shared(space + rank * SENT + place, quad);
                else
                    send_to_block(to + place, come, quad);
            }
    }
    barrier_wait_for_cluster(at.shared_out(COME), 0);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            float* const to = whole[i] + 4 * j;
#pragma unroll
            for (int other = 0; other < CUT; ++other) {
                const float4 quad = load_quad(space + other * SENT + (i * QUADS + j) * ALL * 16);
                if (other == 0)
                    to[0] = quad.x, to[1] = quad.y, to[2] = quad.z, to[3] = quad.w;
                else
                    to[0] += quad.x, to[1] += quad.y, to[2] += quad.z, to[3] += quad.w;
            }
        }
    fence_for_engine();
    __syncwarp();
    if (speaks) barrier_arrive(at.shared_out(ADDED));
}
