#!/usr/bin/env bash
# seconds: 100
# The laws of convolution kernels whose tests were put together, and the reference table's own.
set -u
out=${OUT:-.}
timeout 98 python3 -m pytest -q -n 12 -m gpu -p no:cacheprovider tests/test_conv2d_small.py tests/test_conv2d_thin.py \
    tests/test_conv2d_grouped.py tests/test_depthwise.py tests/test_conv2d_divided.py tests/test_conv2d_tf32.py \
    > "$out/house_check.txt" 2>&1
echo "rc $?" >> "$out/house_check.txt"
grep -E "failed$|passed|rc " "$out/house_check.txt" | tail -40
