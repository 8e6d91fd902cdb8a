// The gradient of the input of a batch norm above a convolution, which makes it on its way (conv2d_both.cu,
// conv2d_join.cu): g*scale + (x*bend + offset) of g, that of its output, and x (affine.cuh).
#pragma once
#include "affine.cuh"
#include "channel_table.cuh"

// moments (2, C), gamma (C,) or null, sums (2, C) and count (1,) as of batch_norm.cu.
struct Above {
    const float *moments, *gamma;
    const double *sums, *count;
};

// A warpgroup: scale, bend and offset of all channels, the first three numbers of a table. (By reference, a parameter of
// the kernel stays one.)
template <int ALL>
DEVICE void put_factors(const ChannelTable<ALL>& to, const Above& above, const int& channels) {
    for (int c = threadIdx.x % 128; c < channels; c += 128) {
        float mean[1], scale[1], shift[1];
        load_affine(above.moments, above.gamma, nullptr, channels, c, mean, scale, shift);
        const InputGradient<true, 1> one(mean, scale, above.moments, above.sums, above.count, channels, c);
        to.store(0, c, one.scale[0]);
        to.store(1, c, one.bend[0]);
        to.store(2, c, one.offset[0]);
    }
}
