// How two blocks, a cluster, share a tile of conv2d_hopper.cu whose depth is long and of whose kind there are few: each
// sums up half of the channels, sends the other what it has of its columns, and finishes its own. A part of that file.
//
// A thread sends to the one with its number and reads what that has sent, from a place of its own: nobody waits but for
// what comes. Of two numbers either order has the same sum: the same bits with every tile that is cut.
// Of ResNet-50 at 32 images on an H200 2048-512 at 7x7 pixels takes 10.5 us for 12.9, 3x3/2 512-512 at 14x14 17.0 for
// 23.9. Clusters that do not run all at a time take up to three times as long as whole tiles. Other ways to cut:
// docs/tuning.md.
#pragma once

constexpr int QUADS = OWN / 8;         // of four sums, that a thread has of 64 rows of a block's columns
constexpr int ALL = 128 * WARPGROUPS;  // threads
static_assert(CUT == 2 && BLOCKS * QUADS * ALL * 16 == SENT_BYTES, "a place for every sum");

using Whole = float[BLOCKS][OWN / 2];

DEVICE void init_exchange(const Layout& at) {
    barrier_init(at.come(), 1);
    barrier_expect(at.come(), SENT_BYTES);
}

// A warpgroup: its rows of this block's columns, of what both have summed.
DEVICE void exchange(Whole& whole, const Sum& sum, const Layout& at) {
    const int other = cluster_rank() ^ 1;
    const u32 place = at.sent() + threadIdx.x * 16, there = in_block(place, other), come = in_block(at.come(), other);
    const auto pick = [&](int rank, int i, int e) { return rank ? sum[i][OWN / 2 + e] : sum[i][e]; };
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int j = 0; j < QUADS; ++j)
            send_to_block(there + (i * QUADS + j) * ALL * 16, come,
                          make_float4(pick(other, i, 4 * j), pick(other, i, 4 * j + 1), pick(other, i, 4 * j + 2),
                                      pick(other, i, 4 * j + 3)));
    barrier_wait_for_cluster(at.come(), 0);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            const uint4 quad = load_shared(place + (i * QUADS + j) * ALL * 16);
            const u32 more[] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
            for (int e = 4 * j; e < 4 * j + 4; ++e) whole[i][e] = pick(other ^ 1, i, e) + __uint_as_float(more[e % 4]);
        }
}
