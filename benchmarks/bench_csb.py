"""Products with pruned weights in Compressed Sparse Blocks on the CPU, beside SciPy's CSR and dense NumPy, float32.

    python benchmarks/bench_csb.py [--only TEXT] [--sparsity 0.9 ...] [--rounds N] [--json PATH]
    python benchmarks/bench_csb.py --device cuda [--dtype fp32 bf16] ...    # beside cuBLAS and cuSPARSE: csb_cuda.py

Passes are those of a layer: forward (A X), backward_data (A^T dY), backward_weight (dY X^T at the pattern only), each
with features first and with features last. Peers get the same operands; rows with features last also have the sparse
peers' times with operands features first ("-first"). SciPy multiplies with CSR, for backward_data that of a transpose
*stored beside it*, whose upkeep in training is not counted. Where PyTorch is installed its CSR products, MKL's, take
part with the same matrices. Neither has a sampled product, so the dense one is the peer. Weights are pruned
by magnitude, rows and columns differing in scale as in trained layers. Ways take turns, and each row gives the least of
its rounds: other work of the machine can only add to it. Results are compared with the peers' first. Losing rows are
printed first.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl.cpu import _csb
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, HostTimer
from minidl.sparse import CSBMatrix

# (M, K, N): a linear layer, convolutions of ResNet-50 as matrices, a Transformer's, and few samples.
SHAPES = {
    "square": (2048, 2048, 256),
    "resnet50/layer1.conv2": (64, 576, 3136),
    "resnet50/layer3.conv2": (256, 2304, 784),
    "resnet50/layer3.conv3": (1024, 256, 784),
    "resnet50/layer4.conv1": (512, 2048, 392),
    "transformer/ffn1": (2048, 512, 512),
    "transformer/ffn2": (512, 2048, 512),
    "skinny": (2048, 2048, 8),
    "vector": (2048, 2048, 1),
}
SPARSITIES = (0.7, 0.8, 0.9, 0.95, 0.98)

FIRST, LAST = "features-first", "features-last"  # arms: operands of either orientation

Ways = dict[Any, Callable[[], Any]]


def pruned(rng: np.random.Generator, rows: int, columns: int, sparsity: float) -> np.ndarray:
    """A weight whose smallest elements are zero; rows and columns vary in scale as in trained layers."""
    scale = np.exp(0.25 * rng.standard_normal((rows, 1)) + 0.35 * rng.standard_normal(columns))
    weight = (scale * rng.standard_normal((rows, columns))).astype(np.float32)
    dropped = np.argsort(np.abs(weight), axis=None, kind="stable")[: round(sparsity * weight.size)]
    weight.reshape(-1)[dropped] = 0
    return weight


def passes(weight: np.ndarray, samples: int, rng: np.random.Generator) -> Iterator[tuple[str, Ways, Ways]]:
    """(pass, ours, peers) by arm, peers by arm and name; of each the result is features first, or the values at the
    pattern.
    """
    from scipy import sparse  # here: without it, --help still helps

    a = CSBMatrix.from_dense(weight)
    transpose = np.ascontiguousarray(weight.T)
    x, dy = (rng.standard_normal((n, samples), dtype=np.float32) for n in weight.shape[::-1])
    x_last, dy_last = (np.ascontiguousarray(v.T) for v in (x, dy))
    for name, ours, dense, first, last in (
        ("forward", a, weight, x, x_last),
        ("backward_data", a.T, transpose, dy, dy_last),
    ):
        ways = {FIRST: partial(ours.matmul, first), LAST: lambda a=ours, x=last: a.matmul(x, features_last=True).T}
        peers = {}
        for arm, operand in ((FIRST, first), (LAST, last.T)):
            csr = sparse.csr_array(dense)
            peers[arm, "scipy-csr"] = partial(operator.matmul, csr, operand)
            if (call := mkl(csr, operand)) is not None:
                peers[arm, "mkl-csr"] = call
            peers[arm, "numpy-dense"] = partial(operator.matmul, dense, operand)
        yield name, ways, peers
    row, column = a.pattern.coordinates()
    yield (
        "backward_weight",
        {FIRST: partial(a.sampled, dy, x), LAST: partial(a.sampled, dy_last, x_last, features_last=True)},
        {
            (FIRST, "numpy-dense"): lambda: (dy @ x.T)[row, column],
            (LAST, "numpy-dense"): lambda: (dy_last.T @ x_last)[row, column],
        },
    )
    assert a.nbytes == 6 * a.nnz + a.pattern.indptr.nbytes


def mkl(csr: Any, x: np.ndarray) -> Callable[[], Any] | None:
    """PyTorch's product with the same CSR matrix; None without PyTorch or its MKL."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.backends.mkl.is_available():
        return None
    torch.set_num_threads(_csb.max_threads())
    with warnings.catch_warnings():  # "in beta state"
        warnings.simplefilter("ignore")
        parts = (torch.from_numpy(part) for part in (csr.indptr, csr.indices, csr.data))
        matrix, operand = torch.sparse_csr_tensor(*parts, size=csr.shape), torch.from_numpy(x)
    return lambda: torch.mm(matrix, operand).numpy()


def check(way: str, got: np.ndarray, others: list[np.ndarray]) -> None:
    """Ours against the rivals' results, which share no code with it."""
    for other in others:
        worst = np.abs(got - other).max(initial=0) / max(float(np.abs(other).max(initial=0)), 1e-30)
        if not worst < 1e-5:
            sys.exit(f"bench_csb: {way} is off by {worst:.1e} of the largest element")


def measure(case: str, weight: np.ndarray, samples: int, sparsity: float, rounds: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(1)
    for name, ours, peers in passes(weight, samples, rng):
        rivals = [call() for call in peers.values()]
        for way, call in ours.items():
            check(f"{case} {name} {way}", call(), rivals)
        ways, budget = ours | peers, Budget(rounds, seconds=math.inf, sample_ms=0.0)
        times = dict(zip(ways, HostTimer().in_turns([[call] for call in ways.values()], budget), strict=True))
        least = {way: timing.min_ms for way, timing in times.items()}
        for arm in ours:
            same = {peer: least[way, peer] for way, peer in peers if way == arm}
            first = {f"{peer}-first": least[way, peer] for way, peer in peers if way != arm == LAST and "csr" in peer}
            yield {
                "case": f"{case}/{100 * sparsity:g}%", "pass": name, "dtype": "fp32", "arm": arm, "ms": least[arm],
                "spread": times[arm].ms / least[arm] - 1, "floor_ms": None, "peers": same | first,
                "sparsity": sparsity, "shape": [*weight.shape, samples], "rounds": rounds,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), nargs="+", default=("fp32", "bf16"), help="on a GPU")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sparsity", type=float, nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--short", action="store_true", help="on a GPU: the first shapes only, in a minute")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: a row's spread is taken between quartiles")
    rows = _on_gpu(args) if args.device == "cuda" else _on_cpu(args)
    for row in rows:
        row["ratio_to_best_peer"] = min(row["peers"].values()) / row["ms"]
    if args.json:
        threads = None if args.device == "cuda" else os.environ.get("OMP_NUM_THREADS", "all")
        statistic = "median of replayed graphs" if args.device == "cuda" else "least of interleaved rounds"
        write(args.json, result("bench_csb", rows, threads=threads, statistic=statistic))
    cells = [
        [row["case"], row["pass"], row["dtype"], row["arm"], f"{row['ms']:.4g}", f"{row['ratio_to_best_peer']:.2f}",
         "  ".join(f"{name} {ms:.4g}" for name, ms in row["peers"].items())]
        for row in sorted(rows, key=lambda row: row["ratio_to_best_peer"])
    ]  # fmt: skip
    head = ["case", "pass", "dtype", "operands", "ms", "x best peer", "peers, ms"]
    show(f"Compressed Sparse Blocks on {args.device}", head, cells)


def _on_cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    if importlib.util.find_spec("scipy") is None:
        sys.exit("bench_csb: SciPy is the peer of these products; install it with: pip install 'minidl[data]'")
    rows: list[dict[str, Any]] = []
    for case, (m, k, n) in SHAPES.items():
        for sparsity in (args.sparsity or SPARSITIES) if args.only in case else ():
            weight = pruned(np.random.default_rng(0), m, k, sparsity)
            rows += measure(case, weight, n, sparsity, args.rounds)
    return rows


def _on_gpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import csb_cuda

    rows: list[dict[str, Any]] = []
    wanted = args.only, args.sparsity or csb_cuda.SPARSITIES, args.rounds, args.dtype, args.short
    try:
        for row in csb_cuda.measure(*wanted):
            rows.append(row)
    except KeyboardInterrupt:
        print(f"bench_csb: stopped after {len(rows)} rows", file=sys.stderr)
    return rows


if __name__ == "__main__":
    main()
