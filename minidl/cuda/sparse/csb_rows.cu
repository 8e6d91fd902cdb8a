// The float32 product of a sparse matrix and a dense one on CUDA cores, for sm_90: y = A x, + bias, ReLU. Every output
// is the sum over its elements in the order of the summed index, by fused multiply-adds: the bits are those of csb.cu.
//
// A block owns UNITS * 16 output features times SAMPLES = 32 * VEC samples. Four warps fetch, PART summed features at a
// time, its piece of x (asynchronous copies) and the units' lists (csb_lists.cu; bulk copies) into a ring of stages;
// lists that do not fit into a stage come in several, x with each. Each of UNITS warps multiplies its unit: a lane holds
// 16 x VEC sums in registers, reads items by broadcast and VEC values of x for each. There x lies in planes of 32
// samples, so that a summed feature's byte times 128 is where it begins, which one instruction adds to an address. With
// FEATURES_LAST, where rows of samples come, a fetching warp turns pieces of 32 samples by 32 features, four by four in
// registers, from where copies of 16 bytes brought them; AHEAD of its pieces are under way, also of the next stage. With
// ENGINE, features first, one warp fetches, and the copy engine brings the planes.
//
// Tried and slower, on 2048 x 2048 x 4096 at 98 % (the rest: docs/sparse.md): rows of x by bulk copies, of which 512
// bytes take the engine some 70 cycles; a third stage (no gain). With FEATURES_LAST: x read where it lies, a pitch of
// PART + 4 floats keeping lanes from meeting a bank (1.06 times, 1.02 to 1.16 over five shapes; at 80 and 90 % 1.00 to
// 1.05): that takes copies of four bytes, which get 3.9 TB/s out of L2, those of 16 get 5.8, and boxes of the engine that
// begin between multiples of 16 bytes ended in an illegal instruction; x through registers, by loads of four bytes.
// Words of lists handed around by redux instead of read by all lanes: the header's (1.05 times), all (1.2).
//
//   slots, units   csb_lists.cu                                              (8 bytes);  (unit, part)
//   order     csb_order.py, or null: output features by units                int32
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature        float32
//   y         dense in the same orientation;  bias (features) or null                             float32
//
// Grid: blocks that take tiles in turn, output features fastest. Dynamic shared memory: RowsTile.shared_bytes.
// FLOP: 2 nnz samples. Bytes: 8 nnz per sample tile, x once per tile of output features, y once. The bound is shared
// memory: 4 bytes of x and a share of the item per multiply-add, 0.22 of the float32 peak on sm_90.
// After T. Gale et al., "Sparse GPU kernels for deep learning", SC 2020, and A. Buluç et al., SPAA 2009.
//
// With CONV x is an image, the samples are the output pixels of a convolution (or of its data gradient), and a step is
// a part of the pixels that a tap meets (csb_window.cuh).
//
// Macros: UNITS (4, 8, 16), VEC (1 to 4), PART (64, 128: summed features at a time), STAGES,
// CAPACITY (slots of a stage), FEATURES_LAST, AHEAD (with it: pieces of x under way, a part of a warp's in a stage),
// CONV (with FEATURES_LAST), ENGINE (not with it), VEC_X (floats per copy of x), VEC_Y (floats per store: VEC unless 3,
// with FEATURES_LAST 4, or 1), PHASE (0; to take times apart 1 multiplies nothing, 2 copies no x).
#include "csb_rows_fetch.cuh"

// ---- what the multiplying warps do

// Loads in the order in which they are written: the compiler would wait for the first before it starts the others.
DEVICE u32 load_word(u32 from) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
    return word;
}

// VEC values of x of this lane's samples; `from`: the first.
DEVICE void load_x(float (&v)[VEC], u32 from) {
    if constexpr (APART == 1) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[j]) : "r"(from + j * PLANE));
    } else if constexpr (VEC == 2) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[VEC - 1]) : "r"(from));
    } else {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[VEC - 1])
                     : "r"(from));
    }
}

// The next COUNT items of one output feature: values from `from` on, summed features in bytes of a word. All loads start
// before the first is waited for. A byte is picked, scaled and added to the address by one instruction.
template <int COUNT>
DEVICE void take(float (&sum)[VEC], u32 from, u32 indices, u32 x) {
    float weights[COUNT], values[COUNT][VEC];
#pragma unroll
    for (int k = 0; k + 1 < COUNT; k += 2)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(weights[k]), "=f"(weights[k + 1]) : "r"(from + 4 * k));
    if constexpr (COUNT % 2)
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(weights[COUNT - 1]) : "r"(from + 4 * COUNT - 4));
#pragma unroll
    for (int k = 0; k < COUNT; ++k) load_x(values[k], __dp4a(indices, 128u << 8 * k, x));
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] = fmaf(weights[k], values[k][v], sum[v]);
}

// Rows of a list are short where matrices are sparse, so the issue of instructions and the latency of loads are bounds of
// their own: items go by fours, and what is left together. Counts of four output features are read ahead; passing
// through a shuffle they are known to be the same for all lanes, so that branches need no barriers of convergence.
DEVICE void multiply(float (&sum)[UNIT][VEC], u32 list, u32 x) {
    u32 values = list + 8 * HEADER;
    const u32 header = load_word(list + 4 * (thread_again() % 32));  // a word for each lane
    const auto word = [&](int i) { return __shfl_sync(0xffffffffu, header, i); };
    u32 counts = word(0), first = word(4);  // of four output features; four summed features of one
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        u32 count = counts >> 8 * (i % 4) & 255, indices = first;
        if (i + 1 < UNIT) first = word(5 + i);
        if (i % 4 == 3 && i + 1 < UNIT) counts = word(i / 4 + 1);
#pragma unroll 1
        for (; count >= 4; count -= 4) {
            const u32 next = load_word(values + 16);
            take<4>(sum[i], values, indices, x);
            values += 24, indices = next;
        }
        if (count & 2) {
            if (count & 1) take<3>(sum[i], values, indices, x), values += 16;
            else take<2>(sum[i], values, indices, x), values += 8;
        } else if (count & 1) {
            take<1>(sum[i], values, indices, x), values += 8;
        }
    }
}

// The output features of a unit.
struct Features {
    const int* __restrict__ order;
    int first;

    __device__ __forceinline__ int operator[](int i) const { return order ? __ldg(order + first + i) : first + i; }
};

// Bias and ReLU.
DEVICE void finish(float (&sum)[UNIT][VEC], const float* __restrict__ bias, const Problem& p, const Features& features) {
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        const int feature = features[i];
        const float shift = bias && feature < p.features ? bias[feature] : 0.0f;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            if (bias) sum[i][v] += shift;
            if (p.relu) sum[i][v] = clamp_below(sum[i][v], 0.0f);
        }
    }
}

#if FEATURES_LAST
// Two lanes swap fours of values: the first gets the even ones of both, the other the odd ones.
DEVICE void swap_fours(float (&v)[UNIT]) {
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        if (i / 4 & 1) continue;
        const float taken = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 4], 1);
        if (odd) v[i] = taken;
        else v[i + 4] = taken;
    }
}
#else
// Neighbours at once. In assembly, since the compiler takes such stores apart, an instruction for each value, to save
// itself the moving of registers; each of these then writes a part of sixteen sectors.
DEVICE void store_row(float* to, const float (&v)[VEC]) {
    if constexpr (VEC == 4)
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[VEC - 1]) : "memory");
    else if constexpr (VEC == 2)
        asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v[0]), "f"(v[VEC - 1]) : "memory");
    else
        *to = v[0];
}
#endif

DEVICE void write(float* __restrict__ y, const float (&sum)[UNIT][VEC], const Problem& p, i64 tile,
                  const Features& features) {
    const int lane = threadIdx.x % 32;
#if FEATURES_LAST
    const int own = VEC_Y == 4 ? lane / 2 * 2 : lane;
    const int left = p.samples - tile < SAMPLES ? static_cast<int>(p.samples - tile) : SAMPLES;
    y += (tile + own) * p.features;
    if constexpr (VEC_Y == 4) {
        // Two lanes write eight neighbours of a sample, then of the other's, a sector of memory each.
        const int lines[2] = {features[lane % 2 * 4], features[lane % 2 * 4 + 8]};
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            float v[UNIT];
#pragma unroll
            for (int i = 0; i < UNIT; ++i) v[i] = sum[i][j];
            swap_fours(v);
#pragma unroll
            for (int i = 0; i < UNIT; i += 4) {
                const int sample = 32 * j + i / 4 % 2, feature = lines[i / 8];
                if (own + sample < left && feature < p.features)
                    *reinterpret_cast<float4*>(y + i64(sample) * p.features + feature) =
                        make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
            }
            __syncwarp();  // else more is moved at a time than registers hold
        }
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const int feature = features[i];
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (32 * j < left - own && feature < p.features) y[i64(32 * j) * p.features + feature] = sum[i][j];
        }
    }
#else
    const i64 sample = tile + lane * APART;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        const int feature = features[i];
        if (feature >= p.features) continue;
        float* const to = y + feature * p.samples + sample;
        if constexpr (VEC_Y == VEC) {
            if (sample < p.samples) store_row(to, sum[i]);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const int further = APART == 1 ? 32 * j : j;
                if (sample + further < p.samples) to[further] = sum[i][j];
            }
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_rows_kernel(const uint2* __restrict__ slots, const uint2* __restrict__ units, const int* __restrict__ order,
#if ENGINE
                const __grid_constant__ TensorMap x,
#else
                const float* __restrict__ x,
#endif
                const float* __restrict__ bias, float* __restrict__ y, const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char stages[];
    const u32 shared = shared_address(stages), notes = shared + STAGES * STAGE + AWAITED + 32;
    const u32 full = notes + STAGES * NOTES, empty = full + 8 * STAGES;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, ENGINE ? 1 : FETCHERS + 1);
            barrier_init(empty + 8 * i, UNITS);
        }
        barrier_init_done();
    }
    await_predecessor();
    __syncthreads();
    if (warp >= UNITS) {
        Fetch fetch = {shared, notes, full, empty, reinterpret_cast<int*>(stages + (empty + 8 * STAGES - shared))};
        Part part = {static_cast<int>(blockIdx.x) / p.tiles_down, 0, 0};
#if FEATURES_LAST && PHASE != 2
#pragma unroll 1
        for (int i = 0; i < AHEAD; ++i) fetch.start(i, x, p, part);
#endif
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            const int unit = tile % p.tiles_down * UNITS + lane;
            const bool there = lane < UNITS && unit < p.units;
            for (int step = 0; step < p.steps; ++step) {
                const uint2 list = there ? units[i64(unit) * p.steps + step] : make_uint2(0, 0);
                Part further = {part.group, part.tap, part.feature + PART};
#if CONV
                if (further.feature == p.parts * PART) further.feature = 0, ++further.tap;
#endif
                const bool ends = step + 1 == p.steps;
                if (ends) further = {static_cast<int>(tile + gridDim.x) / p.tiles_down, 0, 0};
                fetch.part(slots, list, x, p, part, further, ends);
                part = further;
            }
        }
        await_copies<0>();
        return;
    }
    Ring<STAGES> ring;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        float sum[UNIT][VEC] = {};
        bool last;
        do {
            barrier_wait(full + 8 * ring.index, ring.parity);
            const u32 stage = shared + ring.index * STAGE;
            const u32 note = notes + ring.index * NOTES, list = load_word(note + 4 * warp);
            const u32 place = thread_again() % 32 * APART;
            if (PHASE != 1 && list != NONE) multiply(sum, stage + list, stage + place / 32 * PLANE + place % 32 * 4);
            last = load_word(note + 4 * UNITS);
            __syncwarp();
            if (thread_again() % 32 == 0) barrier_arrive(empty + 8 * ring.index);
            ring.advance();
        } while (!last);
        const int unit = tile % p.tiles_down * UNITS + warp;
        const Features features = {order, unit * UNIT};
        if (bias || p.relu) finish(sum, bias, p, features);
        write(y, sum, p, i64(tile / p.tiles_down) * SAMPLES, features);
    }
}
