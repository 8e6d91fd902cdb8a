// Lists of elements by four output features: what csb_lines.cu multiplies. Made anew for each product, in either
// direction, from the one copy of the matrix; a workspace, gone after the product.
//
// The matrix (transposed: its transpose) is cut into bands of 64 output features and chunks of CHUNK summed ones. The
// features of a band are sorted by their number of elements within the chunk, and each four neighbours are a quad, that
// one warp multiplies in lockstep: its list is as long as the longest of the four, which sorting keeps near the others.
// A list is pairs of items, [pair][feature of the quad][2], 64 bytes a pair; an item is
// (where x lies, value) as csb_lines.cu has it in shared memory, items of a feature in the order of the summed index.
// Pads multiply the line of zeros behind a chunk by -0, which changes no sum, whatever it is.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   items     8 bytes each: the lists, those of a band and chunk one after the other
//   quads     (chunks, bands, 16): first item, number of pairs
//   order     (chunks, bands, 16, 4): output features
//   used      items taken so far: where lists lie depends on the run, what is in them does not
//
// Elements are ranked by counting bits of a mask per output feature (integer atomicOr, whose order does not matter), so
// both directions cost the same. Grid: bands, chunks fastest. Bytes: 6 nnz read, twice, mostly from caches; 8 (nnz +
// pads) written.
//
// Macros: SIDE, TRANSPOSED, CHUNK (a multiple of 64).
#include "csb.cuh"

constexpr int BAND = 64, QUADS = BAND / 4, WORDS = CHUNK / 32;
constexpr int THREADS = 1024, SHARE = 64;  // threads; those that share a tile of 64 summed features

struct Problem {
    Matrix a;
    int chunks;
};

struct Shared {
    u32 mask[BAND][WORDS];
    u16 before[BAND][WORDS];  // elements in earlier words
    int count[BAND], place[BAND], sorted[BAND];
    u32 first[QUADS];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_quads_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 uint2* __restrict__ items, uint2* __restrict__ quads, int* __restrict__ order, u32* __restrict__ used,
                 const __grid_constant__ Problem p) {
    __shared__ Shared s;
    const int thread = threadIdx.x, lane = thread % 32;
    const int chunk = blockIdx.x % p.chunks, band = blockIdx.x / p.chunks, bands = gridDim.x / p.chunks;
    const auto for_band = [&](auto visit) {
        for (int t = thread / SHARE; t < CHUNK / 64; t += THREADS / SHARE) {
            const int out = band * BAND, summed = chunk * CHUNK + 64 * t;
            for_elements<SHARE, 64, 64>(indptr, indices, p.a, TRANSPOSED ? summed : out, TRANSPOSED ? out : summed,
                                        thread % SHARE, [&](int e, int row, int column) {
                visit(e, TRANSPOSED ? column : row, 64 * t + (TRANSPOSED ? row : column));
            });
        }
    };
    for (int i = thread; i < BAND * WORDS; i += THREADS) (&s.mask[0][0])[i] = 0;
    __syncthreads();
    for_band([&](int, int out, int summed) { atomicOr(&s.mask[out][summed / 32], 1u << summed % 32); });
    __syncthreads();
    for (int out = thread / 32; out < BAND; out += THREADS / 32) {
        int total = 0;
        for (int w = lane; w - lane < WORDS; w += 32) {
            const int mine = w < WORDS ? __popc(s.mask[out][w]) : 0;
            int sum = mine;
#pragma unroll
            for (int further = 1; further < 32; further *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, further);
                if (lane >= further) sum += other;
            }
            if (w < WORDS) s.before[out][w] = static_cast<u16>(total + sum - mine);
            total += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0) s.count[out] = total;
    }
    __syncthreads();
    const int out = thread / QUADS, share = thread % QUADS, count = s.count[out];
    int place = 0;  // of an output feature, those with most elements first
#pragma unroll
    for (int i = 0; i < BAND / QUADS; ++i) {
        const int rival = QUADS * i + share;
        place += s.count[rival] > count || (s.count[rival] == count && rival < out);
    }
#pragma unroll
    for (int further = 1; further < QUADS; further *= 2) place += __shfl_xor_sync(0xffffffffu, place, further);
    const i64 group = i64(chunk) * bands + band;
    if (share == 0) {
        s.place[out] = place, s.sorted[place] = count;
        order[group * BAND + place] = band * BAND + out;
    }
    __syncthreads();
    if (thread < 32) {
        const int pairs = lane < QUADS ? (s.sorted[4 * lane] + 1) / 2 : 0;
        int sum = pairs;
#pragma unroll
        for (int further = 1; further < QUADS; further *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, further);
            if (lane >= further) sum += other;
        }
        u32 first = 0;
        if (lane == QUADS - 1) first = atomicAdd(used, 8 * sum);
        first = __shfl_sync(0xffffffffu, first, QUADS - 1) + 8 * (sum - pairs);
        if (lane < QUADS) {
            s.first[lane] = first;
            quads[group * QUADS + lane] = make_uint2(first, pairs);
        }
    }
    __syncthreads();
    const auto item = [&](int place, int rank) -> uint2& {
        return items[s.first[place / 4] + 8 * (rank / 2) + 2 * (place % 4) + rank % 2];
    };
    for_band([&](int e, int out, int summed) {
        const u32 word = s.mask[out][summed / 32];
        const int rank = s.before[out][summed / 32] + __popc(word & ((1u << summed % 32) - 1));
        item(s.place[out], rank) = make_uint2(128 * summed + 16 * (summed / 4 % 8), __float_as_uint(values[e]));
    });
    const int end = (s.sorted[place / 4 * 4] + 1) / 2 * 2;
    for (int rank = count + share; rank < end; rank += QUADS) item(place, rank) = make_uint2(128 * CHUNK, 0x80000000u);
}
