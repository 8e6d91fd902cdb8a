#!/usr/bin/env python3
"""Laws of the GPU kernels under compute-sanitizer: a few cases of each, dealt among several processes.

    python scripts/sanitize.py                                               # memcheck, then racecheck
    python scripts/sanitize.py --tool racecheck --cases 3 tests/test_depthwise.py
    python scripts/sanitize.py --jobs 16 -k "not csb"

memcheck finds accesses outside of arrays, racecheck accesses to shared memory that no barrier orders. Both slow kernels
down many times, so of each law ``--cases`` are taken, evenly from all of them, and no law that is there for large
arrays. What a process says is in build/sanitize/TOOL-I.txt. Kernels that no case started are named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAWS = (
    "test_conv2d_*", "test_cuda_conv2d", "test_depthwise", "test_*_ops", "test_csb_conv2d", "test_csb_routes",
)  # fmt: skip
TOOLS = ("memcheck", "racecheck")
FOUND = 9  # the exit status of a process in which memcheck found something
# Places of accesses whose races are none, with the reason; a report is left out where all of its accesses are in such
# places. In the kernels of Hopper (conv2d_hopper, conv2d_halo, their weight gradients, csb_sampled_hopper) stages are
# filled by the copy engine and handed on by barriers in shared memory: racecheck does not see the engine arrive.
KNOWN = {
    r" in hopper\.cuh:": "the loads and stores of those stages, and none of another kernel, are functions of this file",
    r" in csb_tensor\.cuh:": "copies that cp.async.mbarrier.arrive completes, which it does not see either",
    r" in csb_rows\.cu:": "reads of what those copies brought",
    r" at list\(.* in csb_dots\.cu:": "lists compare the upper halves of words whose lowest bit is being set",
}
MARK = "========= "  # how the tool begins its lines
KERNEL = re.compile(r"__global__(?:\s|void|CLUSTERED|__\w+__\((?:[^()]|\([^()]*\))*\))+(\w+)\(")
STARTED = "kernels started: "  # how a process ends
ALONE = {"all_reduce", "ceiling", "spin"}  # files whose kernels need several GPUs, or write nothing that could be wrong
SMALL = "not large and not to_the_31 and not at_size and not every_16_bit"


class Few:
    """A pytest plugin: a few cases of each law, and of the laws this process' share."""

    def __init__(self, cases: int, index: int, jobs: int):
        self.cases, self.index, self.jobs = cases, index, jobs

    @pytest.hookimpl(trylast=True)  # after the marks and words have chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        laws = defaultdict(list)
        for item in items:
            laws[item.nodeid.partition("[")[0]].append(item)
        mine = list(laws.items())[self.index :: self.jobs]
        items[:] = [item for name, cases in mine for item in self._some(name, cases)]

    def _some(self, name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
        """Evenly, from a place on that differs from law to law: not everywhere the first type and family."""
        first, count = zlib.crc32(name.encode()), len(cases)
        wanted = min(self.cases, count)
        places = {(first + i * count // wanted) % count for i in range(wanted)}
        return [cases[place] for place in sorted(places)]


def work(a: argparse.Namespace) -> int:
    """Of one process, under the tool."""
    sys.path.insert(0, str(ROOT))
    from minidl.cuda.device import active_dry_run
    from minidl.cuda.launch import observed

    index, jobs = map(int, a.share.split("/"))
    words = f"({SMALL}) and ({a.words})" if a.words else SMALL
    options = ["-m", "gpu and not alone and not multi_gpu", "-k", words, "-v", "-p", "no:cacheprovider", "--tb=short"]
    started = set()

    @contextmanager
    def note(stem: str, name: str, defines: Mapping[str, int | str]) -> Iterator[None]:
        if active_dry_run() is None:
            started.add(name)
        yield

    with observed(note):
        code = pytest.main([*options, *a.laws], plugins=[Few(a.cases, index, jobs)])
    print(STARTED, *sorted(started))
    return code


def kernels() -> set[str]:
    """Names of all kernels that laws on one GPU could start."""
    files = [path for path in (ROOT / "minidl" / "cuda").rglob("*.cu*") if path.stem not in ALONE]
    return {name for path in files for name in KERNEL.findall(path.read_text())}


def run(tool: str, a: argparse.Namespace) -> bool:
    """All processes of a tool; True when all came to their end and nothing was found."""
    folder = ROOT / "build" / "sanitize"
    folder.mkdir(parents=True, exist_ok=True)
    started, processes = time.perf_counter(), {}
    for index in range(a.jobs):
        command = ["compute-sanitizer", "--tool", tool]
        command += ["--error-exitcode", str(FOUND)] if tool == "memcheck" else []
        command += [sys.executable, __file__]
        command += ["--share", f"{index}/{a.jobs}", "--cases", str(a.cases), "-k", a.words, *a.laws]
        log = folder / f"{tool}-{index}.txt"
        with log.open("w") as file:
            processes[log] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )
    codes = {log: _end(process, started + a.seconds) for log, process in processes.items()}
    texts = {log: log.read_text() for log in processes}
    passed = sum(text.count(" PASSED ") for text in texts.values())
    none = "" if passed else " (no law ran: is there a GPU?)"
    print(f"{tool}: {passed} cases of laws passed{none}, {time.perf_counter() - started:.0f} s", flush=True)
    seen = {name for text in texts.values() for line in text.splitlines() if line.startswith(STARTED)
            for name in line.removeprefix(STARTED).split()}  # fmt: skip
    left = sorted(kernels() - seen)
    print(f"{tool}: not started, {len(left)} of {len(kernels())} kernels:", *left, flush=True)
    clean = passed > 0
    for log, text in texts.items():
        told = races(text) if tool == "racecheck" else [line for line in text.splitlines() if line.startswith(MARK)]
        told += [line for line in text.splitlines() if " FAILED " in line]
        if codes[log] in (0, pytest.ExitCode.NO_TESTS_COLLECTED) and (tool == "memcheck" or not told):
            continue
        ended = f"exit status {codes[log]}" if codes[log] is not None else f"not done after {a.seconds:.0f} s"
        print(f"{log.relative_to(ROOT)}, {ended}:", *told[:20], sep="\n  ", flush=True)
        clean = False
    return clean


def races(text: str) -> list[str]:
    """Errors that racecheck reported, a line each, but for those whose every access is `KNOWN`."""
    found = []
    for report in re.split(f"{MARK}(?=Error|Warning)", text)[1:]:
        first, *rest = report.splitlines()
        lines = [first, *(line.removeprefix(MARK).strip() for line in rest if line.startswith(f"{MARK}    and "))]
        if first.startswith("Error") and not all(any(re.search(place, line) for place in KNOWN) for line in lines):
            found.append(" ".join(lines))
    return found


def _end(process: subprocess.Popen, latest: float) -> int | None:
    """Its exit status; None when it took too long, and was ended together with what it had started."""
    try:
        return process.wait(max(0.0, latest - time.perf_counter()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("laws", nargs="*", help="files of tests (default: those of the operations)")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--cases", type=int, default=1, help="of each law (default 1)")
    parser.add_argument("--jobs", type=int, default=6, help="processes side by side (default 6)")
    parser.add_argument(
        "-k", dest="words", default="", metavar="WORDS", help="laws of these words, as pytest takes them"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for each tool (default 600)")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.laws = a.laws or [str(path) for law in LAWS for path in sorted((ROOT / "tests").glob(f"{law}.py"))]
    if a.share:
        sys.exit(work(a))
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    sys.exit(not all([run(tool, a) for tool in a.tool]))


if __name__ == "__main__":
    main()
