// Programmatic dependent launch: in a CUDA graph (graph.py) a kernel that calls `wait_for_inputs` before it touches
// memory is put on the multiprocessors as the blocks of the kernel before it end, and waits there until that is done.
// Elsewhere, and before Hopper, the call does nothing.
//
// Every thread of every kernel of a file that includes this calls it, first thing, before any return: then a kernel that
// is over says that all kernels before it are.
#pragma once

DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
