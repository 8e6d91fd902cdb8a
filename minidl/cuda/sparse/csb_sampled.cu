// The sampled product of a layer's backward pass, deterministic; sm_80 and newer.
//
//   out[e] = sum over samples of dy[row of e, sample] * x[column of e, sample],   for the elements e of a pattern
//
// A thread block multiplies a dense tile of rows x columns over a chunk of samples, like the weight gradient of a
// convolution (conv2d_weight.cu), but leaves it in shared memory and writes only the elements of the pattern that lie
// in it. Those of a block of A are neighbours in `out`, so no dense gradient ever reaches memory. A tile without an
// element is skipped. Each chunk of samples leaves one float32 partial per element; sum_partials_kernel
// (channel_sum.cu) adds them in order. Chunks depend on the problem alone, so the bits depend neither on the grid nor
// on the device.
//
//   indptr, indices   as in csb.cu
//   dy, x     feature * pitch + sample, or with FEATURES_LAST sample * pitch + feature         T
//   output    (chunks, nnz) dense; with one chunk the gradient itself, set or added to         float32
//
// Macros: DTYPE, STAGES, SIDE, FEATURES_LAST; VEC_DY, VEC_X: elements per access, at most 16 bytes.
// Grid: tiles of TILE x TILE, of columns (fastest), of rows, chunks. Dynamic shared memory: STAGES * 128 * 2 * TILE
// bytes, at least 4 * TILE * TILE.
// FLOP: 2 * rows * columns * samples of the tiles that hold elements: dense work, on tensor cores for 16-bit types.
// Bytes: dy once per column tile, x once per row tile (from L2), indices, 4 * chunks * nnz twice.
#define TF32 0  // float32 is multiplied as it is
#include "tile.cuh"
#include "csb.cuh"

constexpr int TILE = 64;

struct Problem {
    i64 dy_pitch, x_pitch;
    i64 samples, chunk;
    i64 nnz;
    Matrix a;
    int tiles_m, tiles_n;
    int accumulate;
};

// One operand: EXTENT features by DEPTH samples of each stage.
template <int EXTENT, int VECTOR>
struct Feed {
    using Operand = Tile<EXTENT, !FEATURES_LAST>;
    static constexpr int COLUMNS = (FEATURES_LAST ? EXTENT : DEPTH) / VECTOR;
    static constexpr int STEP = THREADS / COLUMNS;
    static constexpr int ROWS = (FEATURES_LAST ? DEPTH : EXTENT) / STEP;
    static_assert(ROWS * STEP == (FEATURES_LAST ? DEPTH : EXTENT), "the threads cover a stage in whole rows");

    const char* from;  // of this thread's first vector in the next stage
    i64 row_step, stage_step;
    int left;  // features from this thread's first one

    __device__ __forceinline__ Feed(const T* data, i64 pitch, i64 first_sample, int first_feature, int features) {
        const int column = threadIdx.x % COLUMNS * VECTOR, row = threadIdx.x / COLUMNS;
        const int feature = first_feature + (FEATURES_LAST ? column : row);
        const i64 sample = first_sample + (FEATURES_LAST ? row : column);
        const i64 size = sizeof(T);
        from = reinterpret_cast<const char*>(data) +
               (FEATURES_LAST ? sample * pitch + feature : feature * pitch + sample) * size;
        row_step = STEP * pitch * size;
        stage_step = DEPTH * (FEATURES_LAST ? pitch : 1) * size;
        left = features - feature;
    }

    // `samples`: of the chunk from the first of this stage.
    __device__ __forceinline__ void copy(u32 tile, int samples) {
        const int column = threadIdx.x % COLUMNS * VECTOR, row = threadIdx.x / COLUMNS;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool valid = FEATURES_LAST ? left > 0 && row + i * STEP < samples
                                             : i * STEP < left && column < samples;
            const int to = FEATURES_LAST ? Operand::offset(column, row + i * STEP)
                                         : Operand::offset(row + i * STEP, column);
            copy_values<VECTOR>(tile + to, from + i * row_step, valid);
        }
        from += stage_step;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
csb_sampled_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ dy,
                   const T* __restrict__ x, float* __restrict__ output, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(128) unsigned char tiles[];
    using Product = TileProduct<TILE, TILE, !FEATURES_LAST, !FEATURES_LAST>;
    constexpr int STAGE = Product::A::BYTES + Product::B::BYTES;
    u32 block = blockIdx.x;
    const int first_column = block % p.tiles_n * TILE;
    block /= p.tiles_n;
    const int first_row = block % p.tiles_m * TILE;
    const i64 chunk = block / p.tiles_m, first_sample = chunk * p.chunk;

    int found = 0;
    const auto for_tile = [&](auto visit) {
        for_elements<THREADS, TILE, TILE>(indptr, indices, p.a, first_row, first_column, threadIdx.x, visit);
    };
    for_tile([&](int, int, int) { found = 1; });
    if (!__syncthreads_or(found)) return;

    const int count = static_cast<int>(first_sample + p.chunk < p.samples ? p.chunk : p.samples - first_sample);
    const int stages = ceil_div(count, DEPTH);
    Feed<TILE, VEC_DY> left(dy, p.dy_pitch, first_sample, first_row, p.a.rows);
    Feed<TILE, VEC_X> right(x, p.x_pitch, first_sample, first_column, p.a.columns);
    const u32 shared_tiles = shared_address(tiles);
    int remaining = count, written = 0, read = 0;
    const auto copy = [&] {
        left.copy(shared_tiles + written * STAGE, remaining);
        right.copy(shared_tiles + written * STAGE + Product::A::BYTES, remaining);
        remaining -= DEPTH;
        written = written == STAGES - 1 ? 0 : written + 1;
        commit_copies();
    };
    Product product(tiles);
    for (int index = 0; index < STAGES - 1; ++index) copy();
    for (int index = 0; index < stages; ++index) {
        await_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all, and the one before it is no longer read
        product.accumulate(read, copy);
        read = read == (STAGES - 1) * STAGE ? 0 : read + STAGE;
    }
    await_copies<0>();
    __syncthreads();

    float* const staged = reinterpret_cast<float*>(tiles);
    product.stage(staged);
    __syncthreads();
    float* const out = output + chunk * p.nnz;
    for_tile([&](int e, int row, int column) {
        const float value = staged[row * TILE + staged_column(row, column)];
        out[e] = p.accumulate ? out[e] + value : value;
    });
}
