// The one loader of elements of a matrix in Compressed Sparse Blocks: whatever a kernel makes of them (lists, dense
// tiles, picks out of dense tiles), for the product, its transpose or the sampled product, it finds them here.
//
//   indptr    (block rows * across + 1), block-row-major               int32
//   indices   (nnz) row in block << 8 | column in block, row-major     u16
//
// Macro: SIDE, of a block.
#pragma once
#include "common.cuh"

struct Matrix {
    int rows, columns;
    int across;  // block columns
};

// The first position from `begin` whose row in its block is `row` or later.
DEVICE int lower_bound(const u16* __restrict__ indices, int begin, int end, int row) {
    while (begin < end) {
        const int middle = begin + (end - begin) / 2;
        if (indices[middle] >> 8 < row) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// Calls visit(element, row in tile, column in tile) for the elements in the ROWS x COLUMNS tile that begins at a row
// and a column of the matrix, multiples of 64 or of SIDE; `thread` of THREADS takes its share of them.
template <int THREADS, int ROWS, int COLUMNS, class Visit>
DEVICE void for_elements(const int* __restrict__ indptr, const u16* __restrict__ indices, const Matrix& a,
                         int first_row, int first_column, int thread, Visit visit) {
    const int last_row = first_row + ROWS < a.rows ? first_row + ROWS : a.rows;
    const int last_column = first_column + COLUMNS < a.columns ? first_column + COLUMNS : a.columns;
    for (int top = first_row / SIDE; top * SIDE < last_row; ++top)
        for (int left = first_column / SIDE; left * SIDE < last_column; ++left) {
            const i64 block = i64(top) * a.across + left;
            int begin = indptr[block], end = indptr[block + 1];
            if (SIDE > ROWS) {
                begin = lower_bound(indices, begin, end, first_row - top * SIDE);
                end = lower_bound(indices, begin, end, first_row - top * SIDE + ROWS);
            }
#pragma unroll 4
            for (int e = begin + thread; e < end; e += THREADS) {
                const int row = top * SIDE + (indices[e] >> 8) - first_row;
                const int column = left * SIDE + (indices[e] & 255) - first_column;
                if (SIDE <= COLUMNS || (0 <= column && column < COLUMNS)) visit(e, row, column);
            }
        }
}
