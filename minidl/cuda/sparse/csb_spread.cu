// A matrix in Compressed Sparse Blocks, or its transpose, as the dense tiles that csb_tensor.cu multiplies: a
// workspace, gone after the product.
//
//   indptr, indices   as in csb.cuh;  values (nnz)                                              float32
//   tiles     of each 128 output features x 32 summed ones heads and rests, as wgmma wants them in shared memory: rows
//             of 128 bytes, 16-byte chunks swizzled by row % 8, the summed features permuted as csb_tensor.cu says.
//             TF32: (tiles of output features, tiles of summed ones, heads or rests, 128, 32), float32 bits; bf16:
//             (..., 128, heads or rests, 32)
//
// A block makes 64 x 64 elements in shared memory and writes them. Grid: such parts, those that fill up the last tile
// of output features included. Bytes: 6 nnz (SIDE / 64)^2 read from L2, 8 M K (bf16: 4) written.
//
// Macros: SIDE, TRANSPOSED, DTYPE (0: TF32, 1: bf16).
#include "csb.cuh"
#include "mma.cuh"

constexpr int THREADS = 256, PART = 64;
constexpr int IMAGES = DTYPE ? 1 : 2;  // of 128 bytes a row

struct Problem {
    Matrix a;
    int parts_across;  // parts of stored columns
    int steps;         // tiles of summed features, two per part
};

extern "C" __global__ void __launch_bounds__(THREADS)
csb_spread_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const float* __restrict__ values,
                  uint4* __restrict__ tiles, const __grid_constant__ Problem p) {
    await_predecessor();
    // [tile of 32 summed features][image][output feature][128 bytes]
    __shared__ __align__(16) uint4 image[2][IMAGES][PART][8];
    uint4* const flat = &image[0][0][0][0];
    for (int i = threadIdx.x; i < 2 * IMAGES * PART * 8; i += THREADS) flat[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const int down = blockIdx.x / p.parts_across, right = blockIdx.x % p.parts_across;
    const auto put = [&](int e, int row, int column) {
        const int out = TRANSPOSED ? column : row, summed = TRANSPOSED ? row : column, k = summed % 32;
        const float value = values[e];
#if DTYPE
        const int chunk = k / 16 * 2 + k % 4 / 2, place = k % 16 / 4 * 2 + k % 2;
        const bf16 head = Rounding<bf16>::round(value), rest = Rounding<bf16>::round(value - to_float(head));
        reinterpret_cast<bf16*>(&image[summed / 32][0][out][chunk ^ out % 8])[place] = head;
        reinterpret_cast<bf16*>(&image[summed / 32][0][out][chunk + 4 ^ out % 8])[place] = rest;
#else
        const int chunk = 2 * (k / 16 * 2 + k % 4 / 2) + k % 2, word = k % 16 / 4;
        const u32 head = round_to_tf32(__float_as_uint(value));
        const u32 rest = round_to_tf32(__float_as_uint(value - __uint_as_float(head)));
        reinterpret_cast<u32*>(&image[summed / 32][0][out][chunk ^ out % 8])[word] = head;
        reinterpret_cast<u32*>(&image[summed / 32][1][out][chunk ^ out % 8])[word] = rest;
#endif
    };
    for_elements<THREADS, PART, PART>(indptr, indices, p.a, down * PART, right * PART, threadIdx.x, put);
    __syncthreads();
    const int out = TRANSPOSED ? right : down, step = 2 * (TRANSPOSED ? down : right);
    for (int i = threadIdx.x; i < 2 * IMAGES * PART * 8; i += THREADS) {
        const int tile = i / (IMAGES * PART * 8), which = i / (PART * 8) % IMAGES, chunk = i % (PART * 8);
        const i64 half = ((i64(out / 2) * p.steps + step + tile) * IMAGES + which) * 2 + out % 2;
        tiles[half * (PART * 8) + chunk] = flat[i];
    }
}
