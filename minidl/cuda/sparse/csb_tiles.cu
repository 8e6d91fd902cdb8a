// What csb_gathered.cu multiplies: of each unit, 8 output features, and part, PART summed ones, those summed features in
// which the unit has an element, by eights, and the dense tiles that they make. A workspace, made anew for each product,
// in either direction, from the one copy of the matrix. Which output features are a unit says an order (csb_order.py).
//
// Gathered features are sorted by their remainder by 4, then by number, and cut into four runs: lanes t of a quarter
// read run t, an eight takes two of each. So four lanes that read x at once have four remainders, unless one remainder
// has more features than a run.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                       float32
//   order     csb_order.py; null: features stay as they lie                              int32
//   groups    (units, parts): eights                                                     int32
//   tiles     (units, parts) areas of PART / 8 * 264 bytes: 8 bytes an eight, its summed features within the part,
//             rounded up to 16 in all; then 64 floats an eight, element (summed feature i, output feature n) at
//             8 n + 2 (i % 4) + i / 4
//
// Grid: parts, those of summed features fastest. Bytes: 2 nnz min(features, RANGE) / OUT read from L2, 4 nnz more, and 264
// an eight written. Macros: SIDE, TRANSPOSED, OUT (64, 128, 256).
#include "csb.cuh"

constexpr int TILE = 64;  // a warp looks through tiles of so many rows and columns
constexpr int UNIT = 8, PART = 128, WORDS = PART / 32, MOST_GROUPS = PART / 8, UNITS = OUT / UNIT;
constexpr int AREA = MOST_GROUPS * (8 + 4 * UNIT * 8);
constexpr int RANGE = 1024;  // output features that are dealt together, and threads
constexpr int MOST = 256;    // to a multiple of so many features there is an order

struct Problem {
    Matrix a;
    int features;  // of the output
    int steps;     // parts of summed features
};

struct Shared {
    u32 mask[UNITS][WORDS];
    u8 position[UNITS][PART];  // of a summed feature among the gathered: 8 times its eight + its place there
    short place[RANGE];        // of an output feature
};

extern "C" __global__ void __launch_bounds__(RANGE, 1)
csb_tiles_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                 const int* __restrict__ order, u8* __restrict__ tiles, int* __restrict__ fours,
                 const __grid_constant__ Problem p) {
    await_predecessor();
    __shared__ Shared s;
    const int step = blockIdx.x % p.steps, mine = blockIdx.x / p.steps * OUT, thread = threadIdx.x;
    const int first = mine / RANGE * RANGE, extent = p.features - first < RANGE ? p.features - first : RANGE;
    const auto for_mine = [&](auto visit) {
        constexpr int ACROSS = PART / TILE;
        for (int tile = thread / 32; tile < ceil_div(extent, TILE) * ACROSS; tile += RANGE / 32) {
            const int out = tile / ACROSS * TILE, summed = tile % ACROSS * TILE, lane = thread % 32;
            const auto see = [&](int e, int o, int k) {
                const int place = first + s.place[out + o] - mine;
                if (place >= 0 && place < OUT) visit(e, place, summed + k);
            };
            if constexpr (TRANSPOSED)
                for_elements<32, TILE, TILE>(indptr, indices, p.a, step * PART + summed, first + out, lane,
                                             [&](int e, int row, int column) { see(e, column, row); });
            else
                for_elements<32, TILE, TILE>(indptr, indices, p.a, first + out, step * PART + summed, lane, see);
        }
    };
    for (int i = thread; i < UNITS * WORDS; i += RANGE) (&s.mask[0][0])[i] = 0;
    const int slot = first + thread;
    if (slot < ceil_div(p.features, MOST) * MOST)
        s.place[(order ? order[slot] : slot) - first] = static_cast<short>(thread);
    __syncthreads();
    for_mine([&](int, int place, int summed) { atomicOr(&s.mask[place / UNIT][summed / 32], 1u << summed % 32); });
    __syncthreads();
    const auto area_of = [&](int unit) { return tiles + (i64(mine / UNIT + unit) * p.steps + step) * AREA; };
    for (int i = thread; i < UNITS * PART; i += RANGE) {
        const int unit = i / PART, k = i % PART;
        const u32* const mask = s.mask[unit];
        int count = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(mask[w]);
        const int run = TAILS ? ceil_div(count, 4) : 2 * ceil_div(count, 8);
        if (k == 0) fours[i64(mine / UNIT + unit) * p.steps + step] = run;
        u8* const columns = area_of(unit);
        const auto put = [&](int rank, int column) {
            const int four = rank % run, position = four / 2 * 8 + four % 2 * 4 + rank / run;
            columns[position] = static_cast<u8>(column);
            return position;
        };
        if (mask[k / 32] >> k % 32 & 1) {
            const u32 same = 0x11111111u << k % 4, lower = 0x11111111u * ((1u << k % 4) - 1);
            int rank = 0;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                const u32 before = w < k / 32 ? same : w == k / 32 ? same & ((1u << k % 32) - 1) : 0;
                rank += __popc(mask[w] & (lower | before));
            }
            s.position[unit][k] = static_cast<u8>(put(rank, k));
            // What fills up the last run is read at the same time, from the same place, and multiplied by zeros.
            const int apart = count < run ? count : run;
            for (int r = rank + apart; r < 4 * run; r += apart)
                if (r >= count) put(r, k);
        }
    }
    for (int i = thread; i < UNITS * MOST_GROUPS * 16; i += RANGE) {
        const int unit = i / (MOST_GROUPS * 16), chunk = i % (MOST_GROUPS * 16);
        int count = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[unit][w]);
        const int eights = ceil_div(count, 8);
        if (chunk < eights * 16)
            reinterpret_cast<float4*>(area_of(unit) + (8 * eights + 15 & ~15))[chunk] = make_float4(0, 0, 0, 0);
    }
    __syncthreads();
    for_mine([&](int e, int place, int summed) {
        const int unit = place / UNIT, position = s.position[unit][summed], i = position % 8;
        int count = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += __popc(s.mask[unit][w]);
        float* const tile = reinterpret_cast<float*>(area_of(unit) + (8 * ceil_div(count, 8) + 15 & ~15));
        tile[position / 8 * 64 + place % UNIT * 8 + i % 4 * 2 + i / 4] = values[e];
    });
}
