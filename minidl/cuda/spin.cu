// Keeps one thread busy for a given time of the device's own clock, and does nothing else.
//
// A benchmark puts it before what it measures, so that the host has launched everything by the time the device gets
// there, and a test of a timer measures it, because its duration is known.
//
// grid 1, block 1. %globaltimer counts nanoseconds; it steps by up to about a microsecond, depending on the GPU.

#include "common.cuh"

extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
