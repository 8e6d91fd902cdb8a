// Convolution in groups of few channels, forward and data gradient, 16-bit types, no dilation; sm_80 and newer.
// Products of 8 x 8 blocks along the diagonal of the filter matrix: a unit is one group, or as many narrow ones as
// eight channels hold, whose products with each other's channels are with zeros. Images are walked in the strips of
// strip.cuh, so that a row of the source is loaded once, and once per column of the filter into registers.
//
//   source    ((n*height + h)*width + w)*source_pitch + channel      T, forward: x; data gradient: dy
//   filter    (K, R, S, C/groups) dense                              T
//   bias      (out_channels,) float32 or null
//   add       output's shape, pixels add_pitch apart                 T or null
//   output    (images, out_height, out_width, out_channels) dense    T
//
// An octet is a strip of eight base columns of an image. A warp has two octets (the rows of mma.sync) and WARP_UNITS
// units, or WARP_BLOCKS blocks of eight outputs of one unit; the filters of these stay in its registers. A block has
// WARPS_M x WARPS_N warps and takes items one after the other: 2 * WARPS_M octets, for a run of base rows. Rows of the
// source go through STAGES stages of shared memory, pixels an odd number of 16 bytes apart, which keeps the loads of
// fragments off each other's banks; of a stride the pixels of one parity follow each other.
// Sums are taken in the order of rows, columns and channels, from the bias on; `add` comes last.
//
// Macros: DTYPE (1, 2); those of strip.cuh; GROUP_IN, GROUP_OUT, channels of a group of source and output; BUNDLE,
// groups of a unit; WARP_UNITS, WARP_BLOCKS, WARPS_M, WARPS_N, STAGES as above; VEC_X and VEC_Y (1, 2 or 8), values per
// access to source and output.
// Grid: slabs of units x blocks of items, slabs fastest. Dynamic shared memory: stages.
// FLOP: 2 * R * S * GROUP_IN per output value, up to 8 / GROUP_IN times that on the units. Bytes: source and output
// once.
#include "common.cuh"

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
#include "conv2d_grouped.cuh"

struct Problem {
    i64 source_pitch, add_pitch;
    Items items;
    int channels, out_channels;
    int slabs;
    Strips at;
};

constexpr int OCTETS = 2 * WARPS_M;
constexpr int IN = BUNDLE * GROUP_IN, OUT = BUNDLE * GROUP_OUT;  // channels of a unit
constexpr int CHUNKS = (IN + 7) / 8, BLOCKS = (OUT + 7) / 8;     // of eight
constexpr int SHARERS = BLOCKS / WARP_BLOCKS;                    // warps that share a unit
constexpr int UNITS = WARPS_N * WARP_UNITS / SHARERS;            // of a block
static_assert(BLOCKS % WARP_BLOCKS == 0 && WARPS_N * WARP_UNITS % SHARERS == 0, "whole units");
static_assert(SHARERS == 1 || WARP_UNITS == 1, "several units of a warp are whole ones");
constexpr int SUMS = WARP_UNITS * WARP_BLOCKS;  // blocks of outputs of a warp

constexpr int PIXELS = 7 * STEP_W + SIGHT;  // of a row of the source that an octet sees
using Rows = RowCopies<OCTETS, UNITS, IN, STEP_H, STEP_W, PIXELS, VEC_X>;

// The output of its unit that column `column` of block `j` of a warp's is: a thread's columns 2t and 2t + 1 of all of
// the warp's blocks of a unit lie side by side.
DEVICE int output_of(int first_block, int j, int column) {
    return first_block * 8 + column / 2 * (2 * WARP_BLOCKS) + j % WARP_BLOCKS * 2 + column % 2;
}

using Sums = float[SPREAD_H][SPREAD_W][SUMS][4];
using Weights = u32[KERNEL_H * KERNEL_W][SUMS][CHUNKS];

// The filters of this warp as fragments: channels 2t, 2t + 1 of each chunk, output g of each block.
DEVICE void load_weights(Weights& weights, const T* filter, const Problem& p, int first_unit, int first_block) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < SUMS; ++j) {
        const int unit = first_unit + j / WARP_BLOCKS, o = output_of(first_block, j, g);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int tap = 0; tap < KERNEL_H * KERNEL_W; ++tap) {
                u32 word = 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int c = chunk * 8 + 2 * t + half;
                    const bool there = c < IN && o < OUT && c / GROUP_IN == o / GROUP_OUT &&
                                       unit * IN + c < p.channels && unit * OUT + o < p.out_channels;
                    const i64 row = BACKWARD ? unit * IN + c : unit * OUT + o;
                    const i64 at = (row * (KERNEL_H * KERNEL_W) + tap) * (BACKWARD ? GROUP_OUT : GROUP_IN) +
                                   (BACKWARD ? o % GROUP_OUT : c % GROUP_IN);
                    if (there) word |= u32(filter[at].bits) << 16 * half;
                }
                weights[tap][j][chunk] = word;
            }
    }
}

// d += a b: 16 pixels x one or two chunks, times that x a block of outputs. b: the chunks' words.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    CHUNKS % 2 ? multiply_halves(d, a, b) : multiply_fragments(d, a, b);
}

// Adds what one column of the filter sees of row `in` of a step. a: this warp's fragments, chunk by chunk.
template <int COUNT>
DEVICE void add_column(Sums (&sums)[AGES], const u32 (&a)[COUNT][4], const Weights& weights, int in, int sight) {
    constexpr int DEPTH = CHUNKS % 2 == 0 ? 2 : 1;  // chunks of one product
#pragma unroll
    for (int age = AGES - 1; age >= 0; --age)
#pragma unroll
        for (int out = 0; out < SPREAD_H; ++out)
#pragma unroll
            for (int u = 0; u < SPREAD_W; ++u) {
                const int r = tap_row(age, in, out), s = tap_column(sight, u);
                if (r >= KERNEL_H || s >= KERNEL_W) continue;
#pragma unroll
                for (int j = 0; j < SUMS; ++j)
#pragma unroll
                    for (int chunk = 0; chunk < CHUNKS; chunk += DEPTH) {
                        const int at = j / WARP_BLOCKS * CHUNKS + chunk;  // of the warp's chunks
                        const u32(&all)[4] = a[at / 2];
                        const u32(&b)[CHUNKS] = weights[r * KERNEL_W + s][j];
                        const u32 pixels[4] = {all[at % 2 * 2], all[at % 2 * 2 + 1], all[2], all[3]};
                        const u32 filter[2] = {b[chunk], b[chunk + DEPTH - 1]};
                        multiply(sums[age][out][u][j], pixels, filter);
                    }
            }
}

// words[q] of lane t, of four neighbouring lanes, to word t of lane q.
template <int COUNT>
DEVICE void turn(u32 (&words)[COUNT]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & bit)) {
                const bool upper = t & bit;
                const u32 got = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i | bit], bit);
                (upper ? words[i] : words[i | bit]) = got;
            }
}

// Two outputs of a thread: neighbouring channels of a pixel.
DEVICE void put_pair(T* to, float first, float second, int left) {
    if constexpr (VEC_Y > 1) {
        if (left > 0) *reinterpret_cast<u32*>(to) = Rounding<T>::round_pair(first, second);
    } else {
        if (left > 0) to[0] = from_float<T>(first);
        if (left > 1) to[1] = from_float<T>(second);
    }
}

// Whole vectors of outputs: those of one thread, or of one block of outputs that its four lanes bring together.
constexpr bool TURNED = VEC_Y == 8 && WARP_BLOCKS == 1 && SUMS % 4 == 0;
constexpr int WORDS = TURNED ? 4 : VEC_Y < 8 || WARP_BLOCKS % 2 ? 1 : WARP_BLOCKS % 4 ? 2 : 4;

DEVICE void put_words(T* to, const u32 (&words)[WORDS]) {
    if constexpr (WORDS == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (WORDS == 2) {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
}

// Where the outputs of one pixel of a thread lie.
struct Pixel {
    i64 image;
    int base_h, base_w, out, u;  // base position, and which of its outputs
    int h, w;                    // of the output's image
    bool there;                  // inside of it

    __device__ __forceinline__ i64 index(const Strips& at) const {
        return (image * at.out_height + h) * at.out_width + w;
    }
};

// One output by its own group's channels alone.
DEVICE float sum_again(const T* source, const T* filter, const Pixel& pixel, int channel, float sum, const Problem& p) {
    const int group = channel / GROUP_OUT;
    const T* const image = source + pixel.image * p.at.height * p.at.width * p.source_pitch + group * GROUP_IN;
    for (int i = 0; i < (BACKWARD ? AGES : KERNEL_H); ++i)
        for (int j = 0; j < SIGHT; ++j) {
            const int h = pixel.base_h * STEP_H + p.at.source_h + i, w = pixel.base_w * STEP_W + p.at.source_w + j;
            const int r = BACKWARD ? tap_row(i, 0, pixel.out) : i, s = tap_column(j, pixel.u);
            if (h < 0 || h >= p.at.height || w < 0 || w >= p.at.width || r >= KERNEL_H || s >= KERNEL_W) continue;
            const T* const from = image + (i64(h) * p.at.width + w) * p.source_pitch;
            const int tap = r * KERNEL_W + s;
            for (int c = 0; c < GROUP_IN; ++c) {
                const i64 row = BACKWARD ? group * GROUP_IN + c : channel;
                const i64 at = (row * (KERNEL_H * KERNEL_W) + tap) * (BACKWARD ? GROUP_OUT : GROUP_IN) +
                               (BACKWARD ? channel % GROUP_OUT : c);
                sum = fmaf(to_float(from[c]), to_float(filter[at]), sum);
            }
        }
    return sum;
}

struct Arrays {
    const T *source, *filter;
    const float* bias;
    const T* add;
    T* output;
};

// Of one pixel this thread's outputs, the first two or last two of every four sums.
DEVICE void write_pixel(const float (&sums)[SUMS][4], int half, const Pixel& pixel, const Arrays& arrays,
                        const Problem& p, int first_unit, int first_block) {
    const int t = threadIdx.x % 4;
    const i64 index = pixel.index(p.at);
    T* const to = arrays.output + index * p.out_channels;
    u32 words[SUMS / WORDS][WORDS], doubtful = 0;
    const auto channel_of = [&](int j, int e) {
        return (first_unit + j / WARP_BLOCKS) * OUT + output_of(first_block, j, 2 * t + e);
    };
#pragma unroll
    for (int j = 0; j < SUMS; ++j) {
        const int o = output_of(first_block, j, 2 * t), channel = channel_of(j, 0);
        const int left = OUT - o < p.out_channels - channel ? OUT - o : p.out_channels - channel;
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            pair[e] = sums[j][2 * half + e];
            if (pixel.there && e < left) {
                if (BUNDLE > 1 && !(fabsf(pair[e]) < __int_as_float(0x7f800000))) doubtful |= 1u << (2 * j + e);
                if (arrays.add) pair[e] += to_float(arrays.add[index * p.add_pitch + channel + e]);
            }
        }
        if (WORDS > 1) words[j / WORDS][j % WORDS] = Rounding<T>::round_pair(pair[0], pair[1]);
        if (WORDS == 1 && pixel.there) put_pair(to + channel, pair[0], pair[1], left);
    }
#pragma unroll
    for (int j = 0; j < SUMS && WORDS > 1; j += WORDS) {
        if constexpr (TURNED) turn(words[j / WORDS]);
        const int first = TURNED ? j + t : j;  // the block of outputs whose are this lane's first
        const int o = TURNED ? first_block * 8 : output_of(first_block, first, 2 * t);
        const int channel = (first_unit + first / WARP_BLOCKS) * OUT + o;
        if (pixel.there && channel < p.out_channels) put_words(to + channel, words[j / WORDS]);
    }
    // A zero times another group's NaN or infinity is NaN: such outputs are written again by those that see their own.
    if (BUNDLE > 1 && __any_sync(0xffffffffu, doubtful)) {
        __syncwarp();
#pragma unroll 1
        for (; doubtful; doubtful &= doubtful - 1) {
            const int bit = __ffs(doubtful) - 1, channel = channel_of(bit / 2, bit % 2);
            const float start = arrays.bias ? arrays.bias[channel] : 0.0f;
            float sum = sum_again(arrays.source, arrays.filter, pixel, channel, start, p);
            if (arrays.add) sum += to_float(arrays.add[index * p.add_pitch + channel]);
            to[channel] = from_float<T>(sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
conv2d_grouped_kernel(const T* __restrict__ source, const T* __restrict__ filter, const float* __restrict__ bias,
                      const T* __restrict__ add, T* __restrict__ output, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 stages = shared_address(shared);
    const int slab = blockIdx.x % p.slabs;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int octets = warp % WARPS_M * 2, part = warp / WARPS_M;
    const int unit = part / SHARERS * WARP_UNITS, first_block = part % SHARERS * WARP_BLOCKS;  // unit: of this block
    const int first_unit = slab * UNITS + unit;

    if constexpr (IN % 8 != 0) {  // what no copy fills
        clear<THREADS>(shared, STAGES * Rows::BYTES);
        __syncthreads();
    }
    const i64 first = i64(blockIdx.x / p.slabs) * p.items.share;
    ItemRows ahead(first, p.items, p.at.base_h), here = ahead;
    Rows rows;
    const auto seek = [&] {
        rows.start(source, p.source_pitch, p.items, ahead.block, p.at.height, p.at.width, p.at.source_w,
                   slab * UNITS * IN, p.channels);
    };
    const auto copy = [&](int stage) {
        if (!ahead.done()) {
            rows.copy(stages + stage * Rows::BYTES, ahead.row * STEP_H + p.at.source_h, 0, p.at.height, p.at.width,
                      p.source_pitch);
            if (ahead.advance(p.items, p.at.base_h) && !ahead.done()) seek();
        }
        commit_copies();
    };
    if (!ahead.done()) seek();
    for (int i = 0; i < STAGES - 1; ++i) copy(i);

    Weights weights;
    load_weights(weights, filter, p, first_unit, first_block);
    float shift[SUMS][2];
#pragma unroll
    for (int j = 0; j < SUMS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int o = output_of(first_block, j, lane % 4 * 2 + e);
            const int channel = (first_unit + j / WARP_BLOCKS) * OUT + o;
            shift[j][e] = bias && o < OUT && channel < p.out_channels ? bias[channel] : 0.0f;
        }
    // Where this lane's row of the fragments starts: pixel lane % 8 of the first or second octet; chunks 0 or 1.
    constexpr int WARP_CHUNKS = WARP_UNITS * CHUNKS, PAIRS = (WARP_CHUNKS + 1) / 2;
    const u32 fragments = stages + (octets + lane / 8 % 2) * Rows::OCTET + lane % 8 * Rows::PIXEL + unit * CHUNKS * 16;

    int read = 0, write = STAGES - 1;
    while (!here.done()) {
        const int base = here.base, last = here.last;
        const i64 octet = here.block * OCTETS + octets;
        const Place places[2] = {Place(octet, p.items), Place(octet + 1, p.items)};
        Sums sums[AGES];
#pragma unroll 1
        for (int row = base - (AGES - 1); row < last; ++row) {
#pragma unroll
            for (int age = AGES - 1; age >= 0; --age)
#pragma unroll
                for (int out = 0; out < SPREAD_H; ++out)
#pragma unroll
                    for (int u = 0; u < SPREAD_W; ++u)
#pragma unroll
                        for (int j = 0; j < SUMS; ++j)
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                sums[age][out][u][j][e] = age ? sums[age ? age - 1 : 0][out][u][j][e] : shift[j][e % 2];
            await_copies<STAGES - 2>();
            __syncthreads();  // this step's rows are there for all, and those before are no longer read
            copy(write);
            write = write == STAGES - 1 ? 0 : write + 1;
#pragma unroll
            for (int in = 0; in < STEP_H; ++in)
#pragma unroll
                for (int sight = 0; sight < SIGHT; ++sight) {
                    u32 a[PAIRS][4];
#pragma unroll
                    for (int j = 0; j < PAIRS; ++j) {
                        const int second = 2 * j + 1 < WARP_CHUNKS ? lane / 16 : 0;
                        load_matrices(a[j], fragments + read * Rows::BYTES + in * OCTETS * Rows::OCTET +
                                                Rows::place(sight) + (2 * j + second) * 16);
                    }
                    add_column(sums, a, weights, in, sight);
                }
            read = read == STAGES - 1 ? 0 : read + 1;
            if (row < base) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int out = 0; out < SPREAD_H; ++out)
#pragma unroll
                    for (int u = 0; u < SPREAD_W; ++u) {
                        const int column = places[half].column + lane / 4;
                        Pixel pixel{places[half].image, row, column, out, u, row * SPREAD_H + p.at.output_h + out,
                                    column * SPREAD_W + p.at.output_w + u};
                        pixel.there = octet + half < p.items.octets &&
                                      static_cast<u32>(pixel.h) < static_cast<u32>(p.at.out_height) &&
                                      static_cast<u32>(pixel.w) < static_cast<u32>(p.at.out_width);
                        write_pixel(sums[AGES - 1][out][u], half, pixel, {source, filter, bias, add, output}, p,
                                    first_unit, first_block);
                    }
        }
        here.skip(p.items, p.at.base_h);
    }
    await_copies<0>();
}
