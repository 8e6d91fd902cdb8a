// What parts of a batch norm's rows left, merged in a fixed order in double, and what follows from it for each channel.
//
// Layout as in batch_norm.cu. Blocks: merge_lanes.cuh. Of statistics a part leaves, by -DSUMS:
//   0: a chunk of rows its mean (chunks, C) double and M2 (chunks, C) float: batch_norm_stats_kernel
//   1: a patch of a convolution's output its sums and sums of squares (patches, 2, C) float: conv2d_hopper.cu,
//      conv2d_halo.cu, depthwise_strip.cu; of bfloat16, where they are exact enough (conv2d_columns.cuh)
// A result depends on the sizes alone, and the tile, not on which block computed which patch when.
//
// Cost: reads 8 bytes (1) or 12 (0) per part and channel: of a bf16 tensor in patches of 64 pixels 6 per cent of the
// bytes, of chunks below 5. What is small takes the time of one load, of the sums over a block, of the last threads'
// arithmetic, whose operands are therefore loaded first, and of the launch. Tried without gain, at 32 and 256 images of
// ResNet-50: parts that convolutions write to stay in the L2 cache (evict_last), and that leave it once they are read;
// nor parts of up to four tiles one below the other, added up before they are left, though of 256 images they are 303 MB
// rather than 602 (steps of 22.47 ms for 22.41, of 32 images 3.938 for 3.939, though these also had a pass less).
#include "merge_lanes.cuh"
#include "batch_norm_moments.cuh"

#if SUMS
typedef float First;  // sums and sums of squares
#else
typedef double First;  // means

struct Part {
    double mean;
    float squares;
};

DEVICE void await_here(Part& part) { await_here(part.mean), await_here(part.squares); }
#endif

// Mean and M2 of all rows, in the threads that have totals. chunk_rows: of every chunk but the last. Of `known`
// channels that stand before those of the parts they are in `before`, statistics of as many channels.
struct Merged {
    double mean, m2;

    __device__ __forceinline__ Merged(const First* __restrict__ first, const float* __restrict__ squares,
                                      const double* __restrict__ before, int known, const Count& count,
                                      int chunk_rows, int chunks, int channels) {
        const int own = channels - known, channel = read_channel() - known, mine = total_channel() - known;
        const bool there = 0 <= channel && channel < own, given = mine < 0;
        double known_mean = 0.0, known_m2 = 0.0;
        if (given) known_mean = before[1 + total_channel()], known_m2 = before[1 + known + total_channel()];
#if SUMS
        double total[2];
        sum_chunks<float2>(
            total, there, chunks, 2 * own,
            [&](i64 at) {
                const float* from = first + channel + at;
                return make_float2(from[0], from[own]);
            },
            [&](double(&v)[2], int, const float2& part) {
                v[0] += part.x;
                v[1] += part.y;
            });
        mean = total[0] * count.inverse;
        m2 = fma(-total[0], mean, total[1]);
        // Of values with eight bits, two that differ leave more than this; less is the rounding of the sums.
        if (m2 < total[1] * 0x1p-50) m2 = 0.0;
#else
        const double origin = there && chunks ? first[channel] : 0.0;  // deviations are from the first chunk's mean
        mean = 0 <= mine && mine < own && chunks ? first[mine] : 0.0;
        const int rows = int(count.rows);
        double total[3];  // sums of count * d, count * d^2, M2
        sum_chunks<Part>(
            total, there, chunks, own,
            [&](i64 at) {
                return Part{first[at + channel], squares[at + channel]};
            },
            [&](double(&v)[3], int chunk, const Part& part) {
                const double some = min(rows - chunk * chunk_rows, chunk_rows), d = part.mean - origin;
                v[0] += some * d;
                v[1] += some * d * d;
                v[2] += part.squares;
            });
        const double shift = total[0] * count.inverse;
        mean += shift;
        m2 = total[2] + (total[1] - total[0] * shift);
        if (m2 < 0.0) m2 = 0.0;
#endif
        if (given) mean = known_mean, m2 = known_m2;
    }

    // Into stats (1 + 2C,).
    __device__ __forceinline__ void leave(double* __restrict__ stats, int rows, int channel, int channels) const {
        if (channel == 0) stats[0] = rows;
        stats[1 + channel] = mean;
        stats[1 + channels + channel] = m2;
    }
};

// stats (1 + 2C,) double.
extern "C" __global__ void CLUSTERED __launch_bounds__(GROUP * LANES, RESIDENT)
batch_norm_merge_kernel(const First* __restrict__ first, const float* __restrict__ squares,
                        const double* __restrict__ before, double* __restrict__ stats, double inverse, int known,
                        int rows, int chunk_rows, int chunks, int channels) {
    begin_merge();
    const Merged found(first, squares, before, known, {double(rows), inverse}, chunk_rows, chunks, channels);
    if (has_total(channels)) found.leave(stats, rows, total_channel(), channels);
}

// What batch_norm_finalize_kernel makes of these statistics, for one rank; and they themselves, unless stats is null.
extern "C" __global__ void CLUSTERED __launch_bounds__(GROUP * LANES, RESIDENT)
batch_norm_moments_kernel(const First* __restrict__ first, const float* __restrict__ squares,
                          const double* __restrict__ before, double* __restrict__ stats, float* __restrict__ moments,
                          double* __restrict__ total, float* __restrict__ running_mean, float* __restrict__ running_var,
                          double eps, double momentum, double inverse, double unbiased, int known, int rows,
                          int chunk_rows, int chunks, int channels) {
    begin_merge();
    const int channel = total_channel();
    const bool mine = has_total(channels);
    const Running running(running_mean, running_var, momentum, mine ? channel : -1);
    const Count count = {double(rows), inverse, unbiased};
    const Merged found(first, squares, before, known, count, chunk_rows, chunks, channels);
    if (!mine) return;
    running.finalize(count, found.mean, found.m2, moments, eps, channel, channels);
    if (channel == 0) *total = rows;
    if (stats) found.leave(stats, rows, channel, channels);
}

// sums (2, C) double from partial (chunks, 2, C) float, sums of dy and of dy*(x - mean); also the local parameter
// gradients where their pointers are not null.
extern "C" __global__ void CLUSTERED __launch_bounds__(GROUP * LANES, RESIDENT)
batch_norm_backward_merge_kernel(const float* __restrict__ partial, const float* __restrict__ moments,
                                 double* __restrict__ sums, float* __restrict__ dgamma, float* __restrict__ dbeta,
                                 int accumulate, int chunks, int channels) {
    begin_merge();
    const int from_channel = read_channel(), channel = total_channel();
    const bool mine = has_total(channels);
    float rstd = mine ? moments[channels + channel] : 0.0f;
    const float old_beta = mine && accumulate && dbeta ? dbeta[channel] : 0.0f;
    const float old_gamma = mine && accumulate && dgamma ? dgamma[channel] : 0.0f;
    double total[2];
    sum_chunks<float2>(
        total, from_channel < channels, chunks, 2 * channels,
        [&](i64 at) {
            const float* from = partial + from_channel + at;
            return make_float2(from[0], from[channels]);
        },
        [&](double(&v)[2], int, const float2& part) {
            v[0] += part.x;
            v[1] += part.y;
        });
    if (!mine) return;
    await_here(rstd);
    total[1] *= rstd;
    sums[channel] = total[0];
    sums[channels + channel] = total[1];
    // Rounded first: a gradient that is added has the bits of one that stands alone.
    if (dbeta) dbeta[channel] = old_beta + float(total[0]);
    if (dgamma) dgamma[channel] = old_gamma + float(total[1]);
}
