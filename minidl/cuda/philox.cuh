// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011): ten rounds turn a 128-bit counter and a 64-bit key into four independent 32-bit words. There is
// no state, so any thread, block or rank can produce the word that belongs to a position.
// About 20 wide multiplies and 20 three-way xors for four words; the round keys are the same for all threads.
#pragma once

struct PhiloxWords {
    unsigned int word[4];
};

__device__ __forceinline__ PhiloxWords philox4x32(unsigned int c0, unsigned int c1, unsigned int c2, unsigned int c3,
                                                  unsigned int key0, unsigned int key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long p0 = 0xD2511F53ull * c0;
        const unsigned long long p1 = 0xCD9E8D57ull * c2;
        const unsigned int next0 = static_cast<unsigned int>(p1 >> 32) ^ c1 ^ key0;
        const unsigned int next2 = static_cast<unsigned int>(p0 >> 32) ^ c3 ^ key1;
        c0 = next0;
        c1 = static_cast<unsigned int>(p1);
        c2 = next2;
        c3 = static_cast<unsigned int>(p0);
        // Weyl sequence: multiples of the golden ratio and of sqrt(3) - 1.
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}
