// A store of 16 bytes in one instruction. Left to itself, the compiler cuts some of them into words, to save itself the
// moving of registers; each of these then writes a part of as many sectors (csb_tensor.cu, 2048x2048 with 16,384
// samples in bf16x3: 630 us so, 587 whole; of few such stores beside much reading nothing is gained: max_tiles.cu).
#pragma once
#include "common.cuh"

DEVICE void store_whole(void* to, const u32 (&words)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}
