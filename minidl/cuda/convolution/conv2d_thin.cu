// Thin convolutions: 1x1, without stride or padding, between many channels and FEW, at most 16, of 16-bit types 48.
// Memory bounds them, so nothing but the rows' own bytes may cost time: each is read once, in whole sectors, straight
// into the fragments of mma.sync (16-bit types; a warp's products take a thirtieth of the time of its loads) or of
// float32 multiply-adds. Sectors are written whole, too: of one written in parts the device reads what was there.
//
//   narrow  out[r, f] = bias[f] + add[r, f] + sum_j source[r, j] w(f, j)    forward to few filters, data gradient of
//                                                                           few channels
//   widen   out[r, j] = bias[j] + add[r, j] + sum_f source[r, f] w(f, j)    forward of few channels, data gradient of
//                                                                           few filters
//
// Layout: source, add  rows * pitch + channel; out dense; w(f, j) = w[f * few_step + j * wide_step]; bias float32 or
// null; add null if there is none. With RELU, what is stored is max(y, 0); NaN stays NaN. With NORMALIZED (narrow,
// 16-bit types) the source is the input of a batch norm with a ReLU over it, whose output is multiplied.
//
// Four threads share a row and take 16 bytes each of it at a time, a chunk; a thread has EACH rows, eight apart, in
// flight: four, going wide two, for which three blocks or four fit on a multiprocessor (on an H200 16-96 at 112x112
// pixels 53.8 us, so 58.6; to few, 57.4 for 55.3). For lane = 4g + t these are the fragments of a product whose depth
// counts channels in another order than memory: words 0 and 1 of a thread are words t and t + 4 of one product, words 2
// and 3 those of the next, and the filters in shared memory are laid out alike. Going wide it is the columns whose
// order is chosen: those of four products that a thread holds are eight neighbours. In the same way a thread has RUN
// neighbours of the FEW. Rows of the few are gathered in shared memory, where a warp's lie as they will in memory.
//
// A block goes through `share` times ROWS rows: what a thread needs next is on its way while it multiplies and stores.
//
// Macros: DTYPE, TF32, FEW, RELU, NORMALIZED, NARROW; VEC_X, VEC_Y, VEC_ADD, elements per access of source,
// output and addend; on the side of the few those of what is read are divisors of RUN; BATCH, chunks of a row that are
// read together (narrow): two make whole cache lines; SEAMS (widen), whether rows may begin within a sector.
// Block: 8 warps of 8 * EACH rows each. Grid: rows / (ROWS * share). Dynamic shared memory: the filters, 64 bytes for
// each chunk and each of FEW (rounded up to eight for 16-bit types); narrow, 256 rows of the few, and with NORMALIZED 8
// bytes for each channel of the chunks. What was tried besides: docs/tuning.md.
// FLOP: 2 * rows * wide * FEW. Bytes: rows * (wide + FEW), and as many as there are of the addend.
#include "conv2d_thin.cuh"

constexpr int CHUNK = 4 * WIDTH;                 // channels
constexpr int SLOTS = UNITS ? 8 * OCTETS : FEW;  // of the few, as the filters are kept
constexpr int EACH = UNITS && !NARROW && FEW > 4 ? 2 : 4, WARP_ROWS = 8 * EACH, ROWS = 8 * WARP_ROWS;
constexpr int RUN = UNITS ? 2 * OCTETS : 2;  // of the few of a row, neighbours that a thread has: from RUN * t on

struct Problem {
    i64 rows, source_pitch, add_pitch;
    int wide, few_step, wide_step, share;
};

DEVICE T filter(const T* __restrict__ w, const Problem& p, int f, int j) {
    return f < FEW && j < p.wide ? operand(w[i64(f) * p.few_step + i64(j) * p.wide_step]) : from_float<T>(0.0f);
}

// Lays the filters out as products read them: 16 bytes at a time, whose places cost more than their values.
DEVICE void lay_out(uint4* filters, const T* __restrict__ w, const Problem& p, int chunks) {
#pragma unroll 2
    for (int i = threadIdx.x; i < chunks * SLOTS * 4; i += 256) {
        const int lane = i % 32, slot = i / 4 % SLOTS, first = i / (4 * SLOTS) * CHUNK;
        Vector v;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            int f = slot, j = first + i % 4 * WIDTH + e;
            if constexpr (UNITS && NARROW) {
                f = slot % 8 / 2 * RUN + slot / 8 * 2 + slot % 2;
            } else if constexpr (UNITS) {  // words are of one column of each of four products
                f = lane % 4 * RUN + slot / 8 * 2 + e % 2;
                j = first + lane / 8 * 8 + lane / 4 % 2 + e / 2 * 2;
            }
            v.items[e] = filter(w, p, f, j);
        }
        filters[i] = v.words[0];
    }
}

// Times that this block takes ROWS rows.
DEVICE int turns_of(const Problem& p) {
    const i64 left = ceil_div(p.rows, i64(ROWS)) - i64(blockIdx.x) * p.share;
    return left < p.share ? int(left) : p.share;
}

// ---------------------------------------------------------------------------------------------------------- narrow

#if NARROW
static_assert(UNITS || BATCH == 1, "float32 has no registers for more");
constexpr int RUNS = UNITS ? 1 : OCTETS;  // of a thread, eight of the few apart
constexpr int EVEN = (RUN | FEW) & -(RUN | FEW), PIECE = EVEN < WIDTH ? EVEN : WIDTH;  // of a run, in whole words

// A thread's part of BATCH chunks of its rows.
struct Part {
    Vector x[BATCH][EACH];

    __device__ __forceinline__ void read(const T* __restrict__ source, const Problem& p, i64 row, int channel) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i64 at = row + 8 * i < p.rows ? row + 8 * i : p.rows - 1;
#pragma unroll
            for (int c = 0; c < BATCH; ++c)
                x[c][i] = fetch<VEC_X>(source + at * p.source_pitch, channel + c * CHUNK, p.wide);
        }
    }

    // `affine`: of the thread's channels of the first chunk.
    __device__ __forceinline__ void normalize(const float2* affine) {
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
            float2 own[WIDTH];
#pragma unroll
            for (int e = 0; e < WIDTH; e += 2) {
                const float4 two = *reinterpret_cast<const float4*>(affine + c * CHUNK + e);
                own[e] = {two.x, two.y}, own[e + 1] = {two.z, two.w};
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) ::normalize(x[c][i], own);
        }
    }
};

// Sums of a thread: of 16-bit types complete, of its rows and its run of filters; else its share of all.
struct Sum {
#if DTYPE
    float parts[EACH / 2][OCTETS][4] = {};

    __device__ __forceinline__ void add(const Part& part, const uint4* filters) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < BATCH; ++c)
#pragma unroll
            for (int b = 0; b < OCTETS; ++b) {
                const uint4 w = filters[(c * OCTETS + b) * 32 + lane];
#pragma unroll
                for (int m = 0; m < EACH / 2; ++m) {
                    const Vector &x = part.x[c][2 * m], &y = part.x[c][2 * m + 1];
                    multiply_fragments(parts[m][b], {x.pairs[0], y.pairs[0], x.pairs[1], y.pairs[1]}, {w.x, w.y});
                    multiply_fragments(parts[m][b], {x.pairs[2], y.pairs[2], x.pairs[3], y.pairs[3]}, {w.z, w.w});
                }
            }
    }

    __device__ __forceinline__ void result(int i, int, float (&v)[RUN]) const {
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] = parts[i / 2][e / 2][i % 2 * 2 + e % 2];
    }
#else
    float parts[EACH][FEW] = {};

    __device__ __forceinline__ void add(const Part& part, const uint4* filters) {
        const float4* w = reinterpret_cast<const float4*>(filters) + threadIdx.x % 4;
        float x[EACH][WIDTH];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) x[i][e] = operand(part.x[0][i].items[e]);
#pragma unroll
        for (int f = 0; f < FEW; ++f) {
            const float4 filter = w[f * 4];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                float& sum = parts[i][f];
                sum = fmaf(x[i][0], filter.x, sum), sum = fmaf(x[i][1], filter.y, sum);
                sum = fmaf(x[i][2], filter.z, sum), sum = fmaf(x[i][3], filter.w, sum);
            }
        }
    }

    // Adds up what the four threads of a row have; each gets two of eight filters.
    __device__ __forceinline__ void result(int i, int b, float (&v)[RUN]) const {
        const bool second = threadIdx.x & 2, odd = threadIdx.x & 1;
        float four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            four[e] = 0.0f;
            if (8 * b + e >= FEW) continue;
            const float low = parts[i][8 * b + e], high = 8 * b + e + 4 < FEW ? parts[i][(8 * b + e + 4) % FEW] : 0.0f;
            four[e] = (second ? high : low) + __shfl_xor_sync(0xffffffffu, second ? low : high, 2);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            v[e] = 0.0f;
            if (8 * b + e < FEW)
                v[e] = (odd ? four[e + 2] : four[e]) + __shfl_xor_sync(0xffffffffu, odd ? four[e] : four[e + 2], 1);
        }
    }
#endif
};

extern "C" __global__ void __launch_bounds__(256, VEC_X == WIDTH && BATCH == 1 && FEW <= (UNITS ? 32 : 4) ? 3 : 2)
conv2d_thin_narrow_kernel(const T* __restrict__ source, const T* __restrict__ w, const float* __restrict__ bias,
                          const T* __restrict__ add, T* __restrict__ out, const float* __restrict__ moments,
                          const float* __restrict__ gamma, const float* __restrict__ beta, const Problem p) {
    await_predecessor();
    extern __shared__ uint4 filters[];
    const int t = threadIdx.x % 4;
    i64 row = i64(blockIdx.x) * p.share * ROWS + threadIdx.x / 32 * WARP_ROWS + threadIdx.x % 32 / 4;
    Part next;
    next.read(source, p, row, t * WIDTH);
    const int chunks = ceil_div(p.wide, BATCH * CHUNK) * BATCH;
    T* lines = reinterpret_cast<T*>(filters + chunks * SLOTS * 4) + threadIdx.x / 32 * WARP_ROWS * FEW;
    lay_out(filters, w, p, chunks);
#if NORMALIZED
    float2* const affine = reinterpret_cast<float2*>(filters + chunks * SLOTS * 4 + ROWS * FEW / WIDTH);
    for (int i = threadIdx.x; i < chunks * CHUNK; i += 256) affine[i] = affine_of(moments, gamma, beta, i, p.wide);
#endif
    __syncthreads();
    const int turns = turns_of(p);
    for (int turn = 0; turn < turns; ++turn, row += ROWS) {
        Sum sum;
        for (int c = 0; c < chunks; c += BATCH) {
            Part part = next;
            if (c + BATCH < chunks)
                next.read(source, p, row, (c + BATCH) * CHUNK + t * WIDTH);
            else if (turn + 1 < turns)
                next.read(source, p, row + ROWS, t * WIDTH);
#if NORMALIZED
            part.normalize(affine + c * CHUNK + t * WIDTH);
#endif
            sum.add(part, filters + c * SLOTS * 4);
        }
        __syncwarp();  // the lines of the turn before have been read
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int f = 8 * run + RUN * t;
            float shift[RUN];
#pragma unroll
            for (int e = 0; e < RUN; ++e) shift[e] = bias && f + e < FEW ? bias[f + e] : 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                float v[RUN];
                sum.result(i, run, v);
                const i64 at = row + 8 * i;
#pragma unroll
                for (int e = 0; e < RUN; ++e) v[e] += shift[e];
                if (add && at < p.rows) {
#pragma unroll
                    for (int e = 0; e < RUN; e += VEC_ADD)
                        if (f + e < FEW) {
                            float more[VEC_ADD];
                            load(add + at * p.add_pitch + f + e, more);
#pragma unroll
                            for (int k = 0; k < VEC_ADD; ++k) v[e + k] += more[k];
                        }
                }
#pragma unroll
                for (int e = 0; e < RUN; e += PIECE) {
                    float part[PIECE];
#pragma unroll
                    for (int k = 0; k < PIECE; ++k) part[k] = RELU ? clamp_below(v[e + k], 0.0f) : v[e + k];
                    if (f + e < FEW) store(lines + (threadIdx.x % 32 / 4 + 8 * i) * FEW + f + e, part);
                }
            }
        }
        __syncwarp();
        const i64 first = row - threadIdx.x % 32 / 4;
        const int count = int(p.rows - first < WARP_ROWS ? p.rows - first : WARP_ROWS) * FEW;
        for (int i = threadIdx.x % 32 * VEC_Y; i < count; i += 32 * VEC_Y) {
            if (i + VEC_Y <= count)
                store_raw(out + first * FEW + i, load_raw<VEC_Y>(lines + i));
            else
                for (int k = i; k < count; ++k) out[first * FEW + k] = lines[k];
        }
    }
}
#else
// ----------------------------------------------------------------------------------------------------------- widen

// A thread's few of its rows: of 16-bit types its run; else all.
struct Few {
#if DTYPE
    u32 parts[EACH][OCTETS];

    __device__ __forceinline__ void read(int i, const T* __restrict__ row) {
        constexpr int PIECE = VEC_X < 2 ? 2 : VEC_X;
        const int f = threadIdx.x % 4 * RUN;
#pragma unroll
        for (int e = 0; e < RUN; e += PIECE) {
            Raw<T, PIECE> piece;
#pragma unroll
            for (int k = 0; k < PIECE / 2; ++k) piece.pairs[k] = 0;
            if constexpr (VEC_X > 1) {
                if (f + e < FEW) piece = load_raw<PIECE>(row + f + e);
            } else {
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (f + e + k < FEW) piece.items[k] = row[f + e + k];
            }
#pragma unroll
            for (int k = 0; k < PIECE / 2; ++k) parts[i][e / 2 + k] = piece.pairs[k];
        }
    }
#else
    float parts[EACH][FEW];

    __device__ __forceinline__ void read(int i, const T* __restrict__ row) {
        fetch_few<VEC_X>(row, parts[i]);
#pragma unroll
        for (int f = 0; f < FEW; ++f) parts[i][f] = operand(parts[i][f]);
    }
#endif

    __device__ __forceinline__ void read(const T* __restrict__ source, const Problem& p, i64 row) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            read(i, source + (row + 8 * i < p.rows ? row + 8 * i : p.rows - 1) * p.source_pitch);
    }
};

// A thread's WIDTH neighbours of each of its rows; `filters` of their chunk.
DEVICE void widen(const Few& few, const uint4* filters, float (&y)[EACH][WIDTH]) {
#if DTYPE
    u32 w[OCTETS][4];
#pragma unroll
    for (int b = 0; b < OCTETS; ++b) {
        const uint4 four = filters[b * 32 + threadIdx.x % 32];
        w[b][0] = four.x, w[b][1] = four.y, w[b][2] = four.z, w[b][3] = four.w;
    }
#pragma unroll
    for (int m = 0; m < EACH; m += 2)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float c[4] = {};
#pragma unroll
            for (int b = 0; b < OCTETS; b += 2) {
                const u32(&upper)[OCTETS] = few.parts[m], (&lower)[OCTETS] = few.parts[m + 1];
                if (b + 1 < OCTETS)
                    multiply_fragments(c, {upper[b], lower[b], upper[(b + 1) % OCTETS], lower[(b + 1) % OCTETS]},
                                   {w[b][j], w[(b + 1) % OCTETS][j]});
                else
                    multiply_halves(c, {upper[b], lower[b]}, {w[b][j]});
            }
            y[m][2 * j] = c[0], y[m][2 * j + 1] = c[1], y[m + 1][2 * j] = c[2], y[m + 1][2 * j + 1] = c[3];
        }
#else
#pragma unroll
    for (int f = 0; f < FEW; ++f) {
        const float4 w = reinterpret_cast<const float4*>(filters)[f * 4 + threadIdx.x % 4];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float x = few.parts[i][f];
            y[i][0] = fmaf(x, w.x, f ? y[i][0] : 0.0f), y[i][1] = fmaf(x, w.y, f ? y[i][1] : 0.0f);
            y[i][2] = fmaf(x, w.z, f ? y[i][2] : 0.0f), y[i][3] = fmaf(x, w.w, f ? y[i][3] : 0.0f);
        }
    }
#endif
}

// Whether a thread's part of a row begins a sector of memory that the first thread of the next chunk ends: written
// apart, each half would have the sector read before.
DEVICE bool waits(const T* to) { return threadIdx.x % 4 == 3 && (u64(to) & 16) == 0; }

constexpr bool LEAN = UNITS && FEW <= 4 && VEC_Y == WIDTH && VEC_ADD == WIDTH && !SEAMS;

extern "C" __global__ void __launch_bounds__(256, LEAN || EACH == 2 ? 3 : 2)
conv2d_thin_widen_kernel(const T* __restrict__ source, const T* __restrict__ w, const float* __restrict__ bias,
                         const T* __restrict__ add, T* __restrict__ out, const Problem p) {
    await_predecessor();
    extern __shared__ uint4 filters[];
    const int t = threadIdx.x % 4, chunks = ceil_div(p.wide, CHUNK);
    i64 row = i64(blockIdx.x) * p.share * ROWS + threadIdx.x / 32 * WARP_ROWS + threadIdx.x % 32 / 4;
    Few next;
    next.read(source, p, row);
    lay_out(filters, w, p, chunks);
    __syncthreads();
    const int turns = turns_of(p);
    for (int turn = 0; turn < turns; ++turn, row += ROWS) {
        // There are no registers to have floats of two turns.
        if (!UNITS && turn > 0) next.read(source, p, row);
        const Few few = next;
        if (UNITS && turn + 1 < turns) next.read(source, p, row + ROWS);
        i64 at[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) at[i] = row + 8 * i < p.rows ? row + 8 * i : p.rows - 1;
        Vector held[EACH];
        for (int c = 0; c < chunks; ++c) {
            const int channel = c * CHUNK + t * WIDTH;
            Vector added[EACH];
            if (add)
#pragma unroll
                for (int i = 0; i < EACH; ++i) added[i] = fetch<VEC_ADD>(add + at[i] * p.add_pitch, channel, p.wide);
            float y[EACH][WIDTH], shift[WIDTH];
            widen(few, filters + c * SLOTS * 4, y);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) shift[e] = bias && channel + e < p.wide ? bias[channel + e] : 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (add) {
                    float more[WIDTH];
                    unpack(added[i], more);
#pragma unroll
                    for (int e = 0; e < WIDTH; ++e) y[i][e] += shift[e] + more[e];
                } else {
#pragma unroll
                    for (int e = 0; e < WIDTH; ++e) y[i][e] += shift[e];
                }
                if (row + 8 * i >= p.rows) continue;
                T* to = out + at[i] * p.wide + channel;
                if constexpr (RELU)
#pragma unroll
                    for (int e = 0; e < WIDTH; ++e) y[i][e] = clamp_below(y[i][e], 0.0f);
                if constexpr (SEAMS) {
                    Vector now = pack<T>(y[i]);
                    if (waits(to)) {
                        const Vector before = held[i];
                        held[i] = now, now = before;
                        if (c > 0) store_raw(to - CHUNK, now);
                    } else if (channel < p.wide) {
                        store_raw(to, now);
                    }
                    continue;
                }
#pragma unroll
                for (int e = 0; e < WIDTH; e += VEC_Y) {
                    float part[VEC_Y];
#pragma unroll
                    for (int k = 0; k < VEC_Y; ++k) part[k] = y[i][e + k];
                    if (channel + e < p.wide) store(to + e, part);
                }
            }
        }
        if constexpr (SEAMS) {
            const int channel = (chunks - 1) * CHUNK + t * WIDTH;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                T* to = out + at[i] * p.wide + channel;
                if (row + 8 * i < p.rows && channel < p.wide && waits(to)) store_raw(to, held[i]);
            }
        }
    }
}
#endif
