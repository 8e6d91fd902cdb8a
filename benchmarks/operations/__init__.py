"""The rows of bench_ops.py, by subject: what runs, the bytes it has to move, and PyTorch's way to do it."""
