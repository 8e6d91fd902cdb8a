"""Where an optimizer's scalars lie, which stay on the device: kernels read them, and a captured step may change them.

minidl/cuda/scalars.cuh has the same order.
"""

from __future__ import annotations

SIZE = 8  # of either array, float32

# Of the control array, see the operation `sgd_update`.
LR, MOMENTUM, LOSS_SCALE, NONFINITE, GOOD_STEPS, SKIPPED_STEPS, GROWTH_INTERVAL = range(7)

# Of the record of an adaptive optimizer, see `adam_advance`.
BETA1, BETA2, EPS, STEP, CORRECTION1, CORRECTION2, TRUST = range(7)
