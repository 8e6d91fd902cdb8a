"""Products with matrices in Compressed Sparse Blocks."""
