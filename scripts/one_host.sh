#!/bin/bash
# Trains on all GPUs of this host, one rank each; without GPUs on RANKS ranks (default 2) of the CPU:
#
#     scripts/one_host.sh --model resnet50 --data folder --data-path /data/imagenet --precision bf16 --batch 1024
#
# Options are those of minidl train. The MPI is the one that mpi4py loads; without one the launcher says which wheel to
# install.
ranks=${RANKS:-$(nvidia-smi -L 2>/dev/null | grep -c ^GPU)}
[ "$ranks" -gt 0 ] || ranks=2
exec python -m minidl.launch -n "$ranks" -m minidl train "$@"
