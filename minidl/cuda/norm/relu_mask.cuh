// Which outputs of a ReLU over a batch norm were positive, recomputed from the batch norm's input.
#pragma once
#include "common.cuh"

// The forward pass rounds (x - mean)*rstd*gamma + beta to T: half of the smallest number of T rounds to zero, what is
// larger does not.
template <class S> struct RoundsToZero;
template <> struct RoundsToZero<float> { static constexpr float most = 0.0f; };
template <> struct RoundsToZero<bf16> { static constexpr float most = 0x1p-134f; };
template <> struct RoundsToZero<f16> { static constexpr float most = 0x1p-25f; };

// centred: x - mean; scale: rstd*gamma; shift: beta.
DEVICE bool was_positive(float centred, float scale, float shift) {
    return fmaf(centred, scale, shift) > RoundsToZero<T>::most;
}
