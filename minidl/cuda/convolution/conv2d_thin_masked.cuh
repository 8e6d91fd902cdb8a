// The masked kernel of conv2d_thin.cu: a data gradient of few filters, and on the way what the ReLU and the batch norm
// below do with it.
#pragma once

static_assert(UNITS && VEC_ADD == WIDTH, "rows of whole vectors of 16-bit types");
constexpr int WARPS = ROWS / WARP_ROWS;

// What a thread needs for its rows of a turn.
struct Turn {
    Few few;
    Vector x[EACH];

    __device__ __forceinline__ void read(const T* __restrict__ source, const T* __restrict__ input, const Problem& p,
                                         i64 row, int channel) {
        few.read(source, p, row);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i64 at = row + 8 * i < p.rows ? row + 8 * i : p.rows - 1;
            x[i] = fetch<WIDTH>(input + at * p.add_pitch, channel, p.wide);
        }
    }
};

// A block goes through its rows once for each chunk of channels, whose sums its threads keep.
extern "C" __global__ void __launch_bounds__(256, 2)
conv2d_thin_masked_kernel(const T* __restrict__ source, const T* __restrict__ w, const T* __restrict__ x,
                          const float* __restrict__ moments, const float* __restrict__ gamma,
                          const float* __restrict__ beta, T* __restrict__ out, float* __restrict__ partial,
                          const Problem p) {
    await_predecessor();
    extern __shared__ uint4 filters[];
    __shared__ float left[2][WARPS][CHUNK];
    const int t = threadIdx.x % 4, chunks = ceil_div(p.wide, CHUNK), turns = turns_of(p);
    const i64 first = i64(blockIdx.x) * p.share * ROWS + threadIdx.x / 32 * WARP_ROWS + threadIdx.x % 32 / 4;
    lay_out(filters, w, p, chunks);
    __syncthreads();
    for (int c = 0; c < chunks; ++c) {
        const int channel = c * CHUNK + t * WIDTH;
        float mean[WIDTH], sum[2][WIDTH];
        float2 affine[WIDTH];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            mean[e] = channel < p.wide ? moments[channel + e] : 0.0f;
            affine[e] = affine_of(moments, gamma, beta, channel + e, p.wide);
            sum[0][e] = sum[1][e] = 0.0f;
        }
        i64 row = first;
        Turn next;
        next.read(source, x, p, row, channel);
        for (int turn = 0; turn < turns; ++turn, row += ROWS) {
            const Turn now = next;
            if (turn + 1 < turns) next.read(source, x, p, row + ROWS, channel);
            float y[EACH][WIDTH];
            widen(now.few, filters + c * SLOTS * 4, y);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (row + 8 * i >= p.rows || channel >= p.wide) continue;
                float g[WIDTH], input[WIDTH];
                unpack(pack<T>(y[i]), g);
                unpack(now.x[i], input);
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    if (!was_positive(input[e], mean[e], affine[e].x, affine[e].y)) g[e] = 0.0f;
                    sum[0][e] += g[e];
                    sum[1][e] = fmaf(g[e], input[e] - mean[e], sum[1][e]);
                }
                store_raw(out + (row + 8 * i) * p.wide + channel, pack<T>(g));
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                float v = sum[k][e];
#pragma unroll
                for (int offset = 4; offset < 32; offset *= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
                if (threadIdx.x % 32 < 4) left[k][threadIdx.x / 32][t * WIDTH + e] = v;
            }
        __syncthreads();
        if (threadIdx.x < 2 * CHUNK && c * CHUNK + threadIdx.x % CHUNK < p.wide) {
            const int k = threadIdx.x / CHUNK, j = threadIdx.x % CHUNK;
            float total = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) total += left[k][warp][j];
            partial[(i64(blockIdx.x) * 2 + k) * p.wide + c * CHUNK + j] = total;
        }
        __syncthreads();
    }
}
