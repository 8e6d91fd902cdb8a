// How two blocks, a cluster, share a tile of conv2d_hopper.cu whose depth is long and of whose kind there are few: each
// sums up half of the channels, sends the other what it has of its columns, and finishes its own. A part of that file.
//
// A thread sends to the one with its number and reads what that has sent, from a place of its own: nobody waits but for
// what comes. Of two numbers either order has the same sum: the same bits with every tile that is cut.
// Of ResNet-50 at 32 images on an H200 2048-512 at 7x7 pixels takes 10.5 us for 12.9, 3x3/2 512-512 at 14x14 17.0 for
// 23.9. Tried before, with sums that came where the stages were, once both blocks were done with them (11.2 and 18.1
// us): four blocks with tiles of 128x256 (15.5 and 21.2), three of 128x192 (15.0 and 21.6), two with 256 rows or
// columns (17.2 and 28.8), two of 128x128 on each multiprocessor (12.8 and 20.7). Clusters that do not run all at a
// time take up to three times as long as whole tiles. Of 512-2048 at 7x7 pixels, data gradient, 10.0 us, the exchange
// takes 1.2; cuDNN, 8.0 us, cuts nothing there: 112 tiles of 64x112, in clusters of eight.
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
