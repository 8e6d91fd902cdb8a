// Comparisons of packed storage values, a register (one float32, two 16-bit values) at a time: what compilers make of
// comparing 16-bit values one by one costs more than the memory they come from.
#pragma once

constexpr int PER_WORD = 4 / int(sizeof(T));  // elements in one register

#if DTYPE == 0
constexpr u32 LOWEST = 0xff800000u, ONE_PER_LANE = 1u;

// The larger of each lane, NaN winning.
DEVICE u32 lane_max(u32 a, u32 b) {
    u32 y;
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 lane_add(u32 a, u32 b) { return __float_as_uint(__uint_as_float(a) + __uint_as_float(b)); }
// All bits of the lanes where a > b, or a == b.
DEVICE u32 lane_greater(u32 a, u32 b) { return __uint_as_float(a) > __uint_as_float(b) ? ~0u : 0u; }
DEVICE u32 lane_equal(u32 a, u32 b) { return __uint_as_float(a) == __uint_as_float(b) ? ~0u : 0u; }
#else
constexpr u32 ONE_PER_LANE = 0x00010001u;
#if DTYPE == 1
constexpr u32 LOWEST = 0xff80ff80u;
#define LANE_TYPE "bf16x2"
#else
constexpr u32 LOWEST = 0xfc00fc00u;
#define LANE_TYPE "f16x2"
#endif

DEVICE u32 lane_max(u32 a, u32 b) {
    u32 y;
    asm("max.NaN." LANE_TYPE " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// Rounded as the float32 sum would be: that has more than twice as many bits.
DEVICE u32 lane_add(u32 a, u32 b) {
    u32 y;
#if DTYPE == 1
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3f803f80u), "r"(b));
#else
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
#endif
    return y;
}
#if DTYPE == 2 || __CUDA_ARCH__ >= 900
DEVICE u32 lane_greater(u32 a, u32 b) {
    u32 mask;
    asm("set.gt.u32." LANE_TYPE " %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
}
DEVICE u32 lane_equal(u32 a, u32 b) {
    u32 mask;
    asm("set.eq.u32." LANE_TYPE " %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
}
#else
// Before Hopper bfloat16 has no packed comparison.
DEVICE float low_lane(u32 a) { return __uint_as_float(a << 16); }
DEVICE float high_lane(u32 a) { return __uint_as_float(a & 0xffff0000u); }
DEVICE u32 lane_greater(u32 a, u32 b) {
    return (low_lane(a) > low_lane(b) ? 0x0000ffffu : 0u) | (high_lane(a) > high_lane(b) ? 0xffff0000u : 0u);
}
DEVICE u32 lane_equal(u32 a, u32 b) {
    return (low_lane(a) == low_lane(b) ? 0x0000ffffu : 0u) | (high_lane(a) == high_lane(b) ? 0xffff0000u : 0u);
}
#endif
#endif

// All bits of the 16-bit halves that are equal, of whole numbers below 0x7c00: as half floats, which compare in pairs.
DEVICE u32 halves_equal(u32 a, u32 b) {
    u32 mask;
    asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
}

// `if_greater` in the lanes where a > b, `otherwise` elsewhere.
DEVICE u32 lane_select(u32 a, u32 b, u32 if_greater, u32 otherwise) {
    if (PER_WORD == 1) return __uint_as_float(a) > __uint_as_float(b) ? if_greater : otherwise;
    const u32 mask = lane_greater(a, b);
    return (if_greater & mask) | (otherwise & ~mask);
}

// `value` in every lane.
DEVICE u32 in_every_lane(T value) {
    Raw<T, PER_WORD> lanes;
#pragma unroll
    for (int i = 0; i < PER_WORD; ++i) lanes.items[i] = value;
    return lanes.pairs[0];
}
