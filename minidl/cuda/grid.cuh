// The work split of kernels over images and samples: work is `rows` rows of `items` items (an item is what one thread
// handles at a time, a row is an image row, a strip of them, or a sample). A block is blockDim.x neighbouring items by
// blockDim.y rows, and blocks are numbered along a row first, so that neighbours in memory run at the same time. The
// Python twin that sizes the grid is row_grid in grid.py. One division per block; none per item.
#pragma once

struct Place {
    int row, item;
    bool inside;
};

// A thread's first item; the others of EACH lie blockDim.x apart, and those up to `items` are inside.
template <int EACH = 1>
DEVICE Place place(int rows, int items) {
    const u32 tiles = ceil_div(u32(items), EACH * blockDim.x);
    const u32 group = blockIdx.x / tiles;
    const u32 row = group * blockDim.y + threadIdx.y;
    const u32 item = (blockIdx.x - group * tiles) * (EACH * blockDim.x) + threadIdx.x;
    return {int(row), int(item), row < u32(rows) && item < u32(items)};
}
