// What the kernels of grouped convolutions share: which rows a block walks, and how they come into shared memory.
// An octet is a strip of eight base columns (strip.cuh) of an image, an item some octets for a run of base rows.
#pragma once
#include "common.cuh"
#include "mma.cuh"
#include "strip.cuh"

struct Items {
    i64 octets;             // of all images
    i64 count, share;       // items in all and of one block
    int strips, runs, run;  // octets across an image, runs of rows down it, base rows of a run
};

// Octet `index` of all.
struct Place {
    i64 image;
    int column;  // first base column

    __device__ __forceinline__ Place(i64 index, const Items& items) {
        image = index / items.strips;
        column = static_cast<int>(index - image * items.strips) * 8;
    }
};

// The items of a block one after the other, each step by step: AGES - 1 more than it has base rows.
struct ItemRows {
    i64 item, end;
    i64 block;       // of octets
    int base, last;  // base rows of the item
    int row;         // the step's: the first row that it adds to no more

    __device__ __forceinline__ ItemRows(i64 first, const Items& items, int height) : item(first) {
        end = first + items.share < items.count ? first + items.share : items.count;
        find(items, height);
    }

    __device__ __forceinline__ void find(const Items& items, int height) {
        block = item / items.runs;
        base = static_cast<int>(item - block * items.runs) * items.run;
        last = items.run < height - base ? base + items.run : height;
        row = base;
    }

    __device__ __forceinline__ bool done() const { return item >= end; }

    __device__ __forceinline__ void skip(const Items& items, int height) {
        ++item;
        find(items, height);
    }

    // One step further; whether another item begins.
    __device__ __forceinline__ bool advance(const Items& items, int height) {
        if (++row < last + AGES - 1) return false;
        skip(items, height);
        return true;
    }
};

template <int THREADS>
DEVICE void clear(unsigned char* shared, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += THREADS)
        reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
}

// ROWS rows of an image per step, PIXELS_ pixels for each of OCTETS_ octets, STEP from one base column to the next, and
// of each pixel UNITS_ units of CHANNELS, VEC at a time. In shared memory units are padded to chunks of eight channels,
// pixels lie an odd number of chunks apart, which keeps the loads of fragments off each other's banks, and those of
// one parity follow each other.
template <int OCTETS_, int UNITS_, int CHANNELS, int ROWS, int STEP, int PIXELS_, int VEC_>
struct RowCopies {
    static constexpr int CHUNKS = (CHANNELS + 7) / 8;
    static constexpr int PARITY = (PIXELS_ + STEP - 1) / STEP;  // pixels of one parity
    static constexpr int PIXEL = (UNITS_ * CHUNKS | 1) * 16, OCTET = STEP * PARITY * PIXEL;  // bytes
    static constexpr int BYTES = ROWS * OCTETS_ * OCTET;
    static constexpr int PER_UNIT = CHANNELS / VEC_, PER_PIXEL = UNITS_ * PER_UNIT;
    static constexpr int ALL = OCTETS_ * PIXELS_ * PER_PIXEL, COUNT = (ALL + THREADS - 1) / THREADS;

    const T* from[COUNT];  // in the first row of the image
    u32 inside;            // bit by bit: this thread's pixels and channels exist

    static __device__ __forceinline__ constexpr int place(int pixel) {
        return (pixel % STEP * PARITY + pixel / STEP) * PIXEL;
    }

    // first_column: of the image at base column 0; first_channel, channels: from the first one on, of all.
    __device__ __forceinline__ void start(const T* array, i64 pitch, const Items& items, i64 block, int height,
                                          int width, int first_column, int first_channel, int channels) {
        inside = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int index = threadIdx.x + i * THREADS;
            const int pixel = index / PER_PIXEL % PIXELS_, octet = index / PER_PIXEL / PIXELS_;
            const Place at(block * OCTETS_ + octet, items);
            const int channel = first_channel + index % PER_PIXEL * VEC_;
            const int column = at.column * STEP + first_column + pixel;
            const bool there = index < ALL && block * OCTETS_ + octet < items.octets && channel < channels &&
                               static_cast<u32>(column) < static_cast<u32>(width);
            inside |= u32(there) << i;
            from[i] = array + (at.image * height * width + column) * pitch + channel;
        }
    }

    // Those of rows from first to last only; zeros for the others.
    __device__ __forceinline__ void copy(u32 stage, int row, int first, int last, int width, i64 pitch) const {
#pragma unroll
        for (int in = 0; in < ROWS; ++in) {
            const bool there = row + in >= first && row + in < last;
            const i64 line = i64(row + in) * width * pitch;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int index = threadIdx.x + i * THREADS, vector = index % PER_PIXEL;
                const int pixel = index / PER_PIXEL % PIXELS_, octet = index / PER_PIXEL / PIXELS_;
                const int to = (in * OCTETS_ + octet) * OCTET + place(pixel) + vector / PER_UNIT * (CHUNKS * 16) +
                               vector % PER_UNIT * (VEC_ * 2);
                if (index < ALL) copy_async<2 * VEC_>(stage + to, from[i] + line, there && (inside >> i & 1));
            }
        }
    }
};
