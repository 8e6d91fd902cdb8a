// Shared by every kernel: storage types, vector accesses that convert to float, and reductions in a fixed order.
//
// By convention a variant is chosen by macros: DTYPE (0 float32, 1 bfloat16, 2 float16) names the storage type T, and
// VEC is the number of elements of T that one thread moves at a time (1, 2, 4 or 8; the launcher proves the alignment).
// No toolkit header is used: conversions are inline PTX, so that a variant compiles in a tenth of a second.

#ifndef DTYPE
#define DTYPE 0
#endif
#ifndef VEC
#define VEC 1
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#if DTYPE == 0
typedef float T;
#elif DTYPE == 1
typedef bf16 T;
#elif DTYPE == 2
typedef f16 T;
#else
#error "DTYPE must be 0 (float32), 1 (bfloat16) or 2 (float16)"
#endif

#define DEVICE static __device__ __forceinline__

// ---- the kernel before this one in the stream
//
// A kernel that calls await_predecessor() is launched while the one before it drains (programmatic dependent launch,
// sm_90 and newer; the launcher finds the wait in the machine code, so nothing else has to be said): it is on the
// multiprocessors as soon as the last block has ended, sets up what needs no global memory (barriers, shared memory,
// indices), and waits until all that came before has ended for good and its writes are seen. The rules:
// - Every thread calls it, on every path, before it reads or writes global memory: the kernel before may still write
//   what this one reads, and read what this one writes, also where an arena gave both the same place. Parameters are
//   not global memory, the fetch of a tensor map in them neither. Not on some path means not at all: a kernel without
//   the wait starts behind its predecessor, as ever; one that ended before its predecessor did would end the waits of
//   those behind it too early.
// - Copies, memsets, events and other streams before a kernel are waited for as a whole: only two kernels that follow
//   each other in one stream, or in a graph captured from it, overlap.
DEVICE void await_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in while this one still runs, behind its own wait: the launch, 1.1 us, is then over when this
// one ends. For merges of batch norms, which take little more than that. Others do not say it, neither when their
// blocks begin their work nor before they wait: blocks that only wait then take the places that become free first,
// several of them on one multiprocessor and none on others, where they stay when their work begins. On an H200 a
// ResNet-50 step of 32 images takes 1.6 % less with the wait alone, 1.1 % less again if merges and sums of weight
// gradients let the next one in (256 images: as much as before; sums: conv2d_weight_sum.cu tells what else that does),
// and 2.6 % more if all do; with batch norms' backward pass 256 images take 2 % more. Convolutions that merges follow,
// letting them in with their last tile: 1.3 % more, of 8 images 0.9 %.
DEVICE void let_next_in() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <class A, class B>
DEVICE A ceil_div(A a, B b) { return (a + b - 1) / b; }

// ---- conversions: exact to float, round to nearest even from float

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <class S> struct Rounding;
template <> struct Rounding<float> {
    DEVICE float round(float x) { return x; }
};
template <> struct Rounding<bf16> {
    DEVICE bf16 round(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    DEVICE u32 round_pair(float low, float high) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
};
template <> struct Rounding<f16> {
    DEVICE f16 round(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    DEVICE u32 round_pair(float low, float high) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
};

// from_float<T>(x): x rounded to the storage type.
template <class S>
DEVICE S from_float(float x) { return Rounding<S>::round(x); }

// ---- raw vectors: the bytes of N elements, moved in accesses of up to 16 bytes

template <int BYTES> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

// N elements of S as they lie in memory. Loading Raw first and converting later keeps several loads in flight.
template <class S, int N>
struct Raw {
    static constexpr int BYTES = N * int(sizeof(S));
    static constexpr int ACCESS = BYTES < 16 ? BYTES : 16;
    typedef typename Word<ACCESS>::type word;
    union {
        word words[BYTES / ACCESS];
        u32 pairs[(BYTES + 3) / 4];
        S items[N];
    };
    __device__ __forceinline__ Raw() {}
};

// p must be aligned to Raw<S, N>::ACCESS bytes.
template <int N, class S>
DEVICE Raw<S, N> load_raw(const S* __restrict__ p) {
    typedef Raw<S, N> R;
    R raw;
    const typename R::word* source = reinterpret_cast<const typename R::word*>(p);
#pragma unroll
    for (int i = 0; i < R::BYTES / R::ACCESS; ++i) raw.words[i] = source[i];
    return raw;
}

template <class Word>
DEVICE Word read_past_l1(const Word* p) { return *p; }
DEVICE uint2 read_past_l1(const uint2* p) {
    uint2 y;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "l"(p));
    return y;
}
DEVICE uint4 read_past_l1(const uint4* p) {
    uint4 y;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
        : "l"(p));
    return y;
}

// load_raw for kernels that only read one large array: some 3 % faster there (on an H200), and slower where as much is
// written.
template <int N, class S>
DEVICE Raw<S, N> load_once(const S* __restrict__ p) {
    typedef Raw<S, N> R;
    R raw;
    const typename R::word* source = reinterpret_cast<const typename R::word*>(p);
#pragma unroll
    for (int i = 0; i < R::BYTES / R::ACCESS; ++i) raw.words[i] = read_past_l1(source + i);
    return raw;
}

template <int N, class S>
DEVICE void store_raw(S* __restrict__ p, const Raw<S, N>& raw) {
    typedef Raw<S, N> R;
    typename R::word* target = reinterpret_cast<typename R::word*>(p);
#pragma unroll
    for (int i = 0; i < R::BYTES / R::ACCESS; ++i) target[i] = raw.words[i];
}

template <int N>
DEVICE void unpack(const Raw<float, N>& raw, float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = raw.items[i];
}

template <int N>
DEVICE void unpack(const Raw<bf16, N>& raw, float (&v)[N]) {
    if constexpr (N == 1) {
        v[0] = to_float(raw.items[0]);
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            v[2 * i] = __uint_as_float(raw.pairs[i] << 16);
            v[2 * i + 1] = __uint_as_float(raw.pairs[i] & 0xffff0000u);
        }
    }
}

template <int N>
DEVICE void unpack(const Raw<f16, N>& raw, float (&v)[N]) {
    if constexpr (N == 1) {
        v[0] = to_float(raw.items[0]);
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i)
            asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
                : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
                : "r"(raw.pairs[i]));
    }
}

template <class S, int N>
DEVICE Raw<S, N> pack(const float (&v)[N]) {
    Raw<S, N> raw;
    if constexpr (sizeof(S) == 4 || N == 1) {
#pragma unroll
        for (int i = 0; i < N; ++i) raw.items[i] = from_float<S>(v[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) raw.pairs[i] = Rounding<S>::round_pair(v[2 * i], v[2 * i + 1]);
    }
    return raw;
}

// load(p, v) / store(p, v): N elements of storage type S at p, as floats. Same alignment rule as load_raw.
template <class S, int N>
DEVICE void load(const S* __restrict__ p, float (&v)[N]) { unpack(load_raw<N>(p), v); }

template <class S, int N>
DEVICE void store(S* __restrict__ p, const float (&v)[N]) { store_raw(p, pack<S>(v)); }

// Larger of a and 0, or of a and any other bound; NaN stays NaN.
DEVICE float clamp_below(float a, float bound) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(bound));
    return y;
}

// ---- reductions in a fixed order: the same bits on every run and every device

// Sum over the lanes of a warp, in every lane. X: float, double or an integer type.
template <class X>
DEVICE X warp_sum(X x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Sum over a one-dimensional block of THREADS (a multiple of 32, at most 1024) threads, in every thread.
// Ends with a barrier only before its scratch is read: call __syncthreads() between two calls that share `scratch` (32
// X).
template <int THREADS, class X>
DEVICE X block_sum(X x, X* scratch) {
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "a block is made of whole warps");
    x = warp_sum(x);
    if (THREADS == 32) return x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < THREADS / 32 ? scratch[lane] : X(0));
}

// ---- the elementwise mapping (planned by rows.py)

// A pass over up to four arrays of one shape, seen as rows of vectors of VEC elements.
struct Walk {
    i64 size;      // elements in all
    int rows;      // full rows of `columns` vectors; below 2^30, so that rows and steps add up in an int
    int columns;   // vectors per row
    int last;      // vectors in one more, shorter row (only of dense arrays, whose rows are arbitrary)
    int pitch[4];  // elements from row to row, one per array
};

// Elements from the start of an array to its row.
DEVICE i64 row_offset(int row, int pitch) { return i64(row) * pitch; }

// One thread's share of a walk. Thread x of column tile blockIdx.y owns one vector of channels, so parameters of its
// channels stay in registers. The rows of a block, `unroll` groups of blockDim.y, lie together: what is in flight at
// any time is one stretch of memory.
struct Share {
    int row, rows;     // first row, end of rows
    int step, stride;  // from row to row within a group of `unroll`, and from group to group
    int channel;       // first channel of this thread's vector

    __device__ __forceinline__ Share() {}
    __device__ __forceinline__ Share(const Walk& walk, int unroll) {
        const int column = blockIdx.y * blockDim.x + threadIdx.x, group = unroll * blockDim.y;
        channel = column * VEC;
        row = blockIdx.x * group + threadIdx.y;
        rows = column < walk.columns ? walk.rows + (column < walk.last) : 0;
        step = blockDim.y;
        stride = gridDim.x * group;
    }
};

// The size % VEC elements behind the last vector of dense arrays: the index of this thread's one, or -1.
DEVICE i64 tail_element(const Walk& walk) {
    const i64 i = (walk.size & ~i64(VEC - 1)) + threadIdx.x;
    return (blockIdx.x | blockIdx.y | threadIdx.y) == 0 && i < walk.size ? i : -1;
}

// Walks the rows of a share from `first` on in groups: first all loads of a group, then all stores, so that DEPTH loads
// are in flight. load(u, row) and store(u, row) are called for rows that exist.
template <int DEPTH, class Load, class Store>
DEVICE void for_rows(const Share& at, int first, Load load, Store store) {
    for (int row = first; row < at.rows; row += at.stride) {
        if (row + (DEPTH - 1) * at.step < at.rows) {
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) load(u, row + u * at.step);
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) store(u, row + u * at.step);
        } else {
#pragma unroll
            for (int u = 0; u < DEPTH; ++u)
                if (row + u * at.step < at.rows) load(u, row + u * at.step);
#pragma unroll
            for (int u = 0; u < DEPTH; ++u)
                if (row + u * at.step < at.rows) store(u, row + u * at.step);
        }
    }
}

template <int DEPTH, class Load, class Store>
DEVICE void for_rows(const Share& at, Load load, Store store) {
    for_rows<DEPTH>(at, at.row, load, store);
}

// The same for a share of some rows, where prepare() waits for loads of its own, of parameters: with EARLY those of the
// first group are under way before, in registers that prepare() then lacks.
template <int DEPTH, bool EARLY, class Load, class Prepare, class Store>
DEVICE void for_rows_prepared(const Share& at, Load load, Prepare prepare, Store store) {
    if constexpr (!EARLY) {
        prepare();
        return for_rows<DEPTH>(at, load, store);
    }
    // In place of rows that do not exist the last one is read: branches would hold up the loads behind them.
    if (at.row < at.rows)
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) load(u, min(at.row + u * at.step, at.rows - 1));
    prepare();
#pragma unroll
    for (int u = 0; u < DEPTH; ++u)
        if (at.row + u * at.step < at.rows) store(u, at.row + u * at.step);
    for_rows<DEPTH>(at, at.row + at.stride, load, store);
}
