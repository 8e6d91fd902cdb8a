// Where an optimizer's scalars lie; minidl/scalars.py has the same order.
#pragma once

// Of the control array. (MOMENTUM is a macro of variants.)
enum { LEARNING_RATE, MOMENTUM_FACTOR, LOSS_SCALE, NONFINITE, GOOD_STEPS, SKIPPED_STEPS, GROWTH_INTERVAL };

// Of the record of an adaptive optimizer.
enum { BETA1, BETA2, EPS, STEP, CORRECTION1, CORRECTION2, TRUST };
