// How conv2d_join.cu makes z, and its signs, of what a stage has: one warpgroup.
#pragma once

// A batch norm of the channels: moments (2, C); gamma, beta (C,) or null.
struct Affine {
    const float *moments, *gamma, *beta;
};

// A thread of the warpgroup that makes: what it needs of eight neighbouring channels.
struct Factors {
    static constexpr int ALL = DEEP * CHANNELS;
    float v[TABLES][8];

    // The warpgroup: works all of them out.
    DEVICE void prepare(const Layout& at, const Above& above) {
        put_factors(at.factors(), above, ALL);
        warpgroup_sync(1 + MAKE);
    }
    DEVICE void prepare(const Layout& at, const Affine& main, const Affine& other) {
        for (int c = threadIdx.x % 128; c < ALL; c += 128) {
            float mean[1], scale[1], shift[1];
            load_affine(main.moments, main.gamma, main.beta, ALL, c, mean, scale, shift);
            at.factors().store(0, c, scale[0]);
            float sum = shift[0];
            if constexpr (TWO) {
                load_affine(other.moments, other.gamma, other.beta, ALL, c, mean, scale, shift);
                at.factors().store(2, c, scale[0]);
                sum += shift[0];
            }
            at.factors().store(1, c, sum);
        }
        warpgroup_sync(1 + MAKE);
    }

    __device__ __forceinline__ Factors(const Layout& at, int channel) {
#pragma unroll
        for (int i = 0; i < TABLES; ++i) at.factors().load(v[i], i, channel);
    }

    // Of one value each, of the i-th channel.
    __device__ __forceinline__ float one(float x, float add, int i) const {
        if constexpr (BACKWARD) return fmaf(x, v[0][i], fmaf(add, v[1][i], v[2][i]));
        const float sum = fmaf(x, v[0][i], v[1][i]);
        return clamp_below(TWO ? fmaf(add, v[TABLES - 1][i], sum) : sum + add, 0.0f);
    }

    // Of two values each, the channels i and i + 1; adds bits i and i + 1 of their signs.
    __device__ __forceinline__ u32 pair(u32 x, u32 add, int i, u32& signs) const {
        float z[2], other[2];
        unpack_word(x, z), unpack_word(add, other);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            z[e] = one(z[e], other[e], i + e);
            if constexpr (!BACKWARD) signs |= z[e] > RoundsToZero<T>::most ? 1u << (i + e) : 0u;
        }
        return Rounding<T>::round_pair(z[0], z[1]);
    }
    __device__ __forceinline__ uint4 operator()(uint4 x, uint4 add, u32& signs) const {
        return make_uint4(pair(x.x, add.x, 0, signs), pair(x.y, add.y, 2, signs), pair(x.z, add.z, 4, signs),
                          pair(x.w, add.w, 6, signs));
    }
};

// Writes the signs of eight channels, of four neighbouring lanes a word.
DEVICE void put_signs(u32 to, u32 vector, u32 signs) {
    signs <<= 8 * (vector % 4);
    signs |= __shfl_xor_sync(0xffffffffu, signs, 1);
    signs |= __shfl_xor_sync(0xffffffffu, signs, 2);
    if (vector % 4 == 0) store_shared(to, __uint_as_float(signs));
}

// The warpgroup that makes z, in the place of x, and its signs. A thread has the same eight channels of every sixteenth
// row of a stage.
DEVICE void make(const Layout& at, const Problem& p) {
    constexpr int ROWS = 4, AHEAD = 2;  // of a thread, of a group; so many are asked for before they are needed
    const u32 thread = thread_again(), lane = thread % 32, vector = thread % 8, row = thread / 8;
    const u32 from = row * 128 + (vector ^ row % 8) * 16, signs_from = row * SIGN_ROW + vector / 4 * 4;
    Ring<STAGES> ring;
    Ring<STRIPS> strips;
    for (;;) {
        barrier_wait(at.come(ring.index), ring.parity);
        const Ticket tile = tile_at(at, ring);
        if (tile.first < 0) break;
#pragma unroll 1
        for (int i = 0; i < DEEP; ++i) {
            const Factors factors(at, i * CHANNELS + vector * 8);
            const u32 x = at.stage(ring.index) + from, add = x + BOX;
            const u32 signs_to = at.strip(strips.index) + signs_from + i % STRIP * (CHANNELS / 8);
            if (!BACKWARD && i % STRIP == 0) barrier_wait(at.stored(strips.index), strips.parity ^ 1);
            if (i) barrier_wait(at.come(ring.index), ring.parity);
            uint4 values[AHEAD], others[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                values[j] = load_shared(x + j * 16 * 128);
                others[j] = load_shared(add + j * 16 * 128);
            }
#pragma unroll
            for (int j = 0; j < CONSUMERS * ROWS; ++j) {
                if (j == ROWS && tile.second == 1) break;
                u32 signs = 0;
                const uint4 z = factors(values[j % AHEAD], others[j % AHEAD], signs);
                if (j + AHEAD < CONSUMERS * ROWS) {  // of one group, what it does without
                    values[j % AHEAD] = load_shared(x + (j + AHEAD) * 16 * 128);
                    others[j % AHEAD] = load_shared(add + (j + AHEAD) * 16 * 128);
                }
                store_shared(x + j * 16 * 128, z, 1);
                if constexpr (!BACKWARD) put_signs(signs_to + j * 16 * SIGN_ROW, vector, signs);
            }
            if (const int left = p.pixels - tile.first * 64; MASKED && left < PIXELS) {
#pragma unroll
                for (int j = 0; j < CONSUMERS * ROWS; ++j)  // behind the last pixel nothing is to be summed
                    store_shared(x + j * 16 * 128, make_uint4(0, 0, 0, 0), int(row) + j * 16 >= left);
            }
            fence_for_engine();
            __syncwarp();
            if (lane == 0) barrier_arrive(at.made(ring.index));
            ring.advance();
            if (i % STRIP == STRIP - 1 || i == DEEP - 1) strips.advance();
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(at.made(ring.index));  // the others see the end, too
}
