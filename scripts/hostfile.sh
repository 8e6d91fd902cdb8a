#!/bin/bash
# Trains on the hosts of a file, a line each, as many ranks on each as it has GPUs:
#
#     scripts/hostfile.sh hosts 4 --model resnet50 --data folder --data-path /data/imagenet --precision bf16 --batch 2048
#
# The first argument is the file, the second the number of ranks on each host; the others are options of minidl train.
# The hosts have this folder, Python and MPI in the same places and let each other in by ssh. `minidl doctor` in the place
# of `minidl train` (COMMAND=doctor) looks at the ranks, the clocks and the sums between them first.
hosts=${1:?the file of hosts} each=${2:?ranks on each host}
shift 2
ranks=$((each * $(grep -cv '^[[:space:]]*\(#\|$\)' "$hosts")))
case $(mpiexec --version 2>&1) in
*"Open MPI"* | *OpenRTE* | *prte*)
    # Unbound: minidl shares the cores out itself. What decides about a run goes along.
    placed=(--hostfile "$hosts" --map-by "ppr:$each:node" --bind-to none)
    [ "$EUID" = 0 ] && placed+=(--allow-run-as-root) # in containers
    for name in ${!MINIDL_*} ${!NCCL_*} PYTHONPATH; do [ -n "${!name}" ] && placed+=(-x "$name"); done
    ;;
*) placed=(-f "$hosts" -ppn "$each") ;;
esac
exec mpiexec "${placed[@]}" -n "$ranks" python -m minidl "${COMMAND:-train}" "$@"
