// A matrix in Compressed Sparse Blocks as a dense one, zeros included.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                     T
//   dense     row * columns + column                                   T
//
// A block makes a tile of 64 x 64 in shared memory and writes it. Grid: tiles of columns (fastest), of rows.
// Bytes: the matrix, (SIDE / 64)^2 times from L2, and the dense one written once.
//
// Macros: DTYPE, SIDE, VEC (elements per store).
#include "csb.cuh"

constexpr int TILE = 64, THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
csb_expand_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                  T* __restrict__ dense, const __grid_constant__ Matrix a, int tiles_across) {
    __shared__ __align__(16) T tile[TILE][TILE];
    const int row = blockIdx.x / tiles_across * TILE, column = blockIdx.x % tiles_across * TILE;
    for (int i = threadIdx.x; i < TILE * TILE * int(sizeof(T)) / 16; i += THREADS)
        reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    for_elements<THREADS, TILE, TILE>(indptr, indices, a, row, column, threadIdx.x,
                                      [&](int e, int r, int c) { tile[r][c] = values[e]; });
    __syncthreads();
    constexpr int ACROSS = TILE / VEC;
    const int c = threadIdx.x % ACROSS * VEC;
    if (column + c >= a.columns) return;
#pragma unroll
    for (int r = threadIdx.x / ACROSS; r < TILE; r += THREADS / ACROSS)
        if (row + r < a.rows) store_raw(dense + i64(row + r) * a.columns + column + c, load_raw<VEC>(&tile[r][c]));
}
