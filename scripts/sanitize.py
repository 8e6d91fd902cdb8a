#!/usr/bin/env python3
"""Laws of the GPU kernels under compute-sanitizer: a few cases of each, taken in turn by several processes.

    python scripts/sanitize.py                                               # memcheck, then racecheck
    python scripts/sanitize.py --tool racecheck --cases 3 tests/test_depthwise.py
    python scripts/sanitize.py --jobs 16 -k "not csb"

memcheck finds accesses outside of arrays, racecheck accesses to shared memory that no barrier orders. Both slow kernels
down many times, so of each law ``--cases`` are taken, evenly from all of them, and no law that is there for large
arrays; of some laws also cases for the sake of kernels that no other starts. Processes are dealt among the GPUs of
CUDA_VISIBLE_DEVICES. What a process says is in build/sanitize/TOOL/I.txt. Told are kernels that no case started, and
where time ends it all, what was running and how many cases were not reached.
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
    "test_compile::test_labels_are_counted", "test_compile::test_a_few_numbers_are_assigned",
)  # fmt: skip
TOOLS = ("memcheck", "racecheck")
FOUND = 9  # the exit status of a process in which memcheck found something
# Places of accesses whose races are none, with the reason; a report is left out where all of its accesses are in such
# places. In the kernels of Hopper (conv2d_hopper, conv2d_halo, their weight gradients, csb_sampled_hopper) stages are
# filled by the copy engine and handed on by barriers in shared memory: racecheck does not see the engine arrive.
KNOWN = {
    r" in hopper\.cuh:": "the loads and stores of those stages, and none of another kernel, are functions of this file",
    r" in csb_tensor\.cuh:": "copies that cp.async.mbarrier.arrive completes, which it does not see either",
    r" in csb_rows\.cu:": "reads of what those copies brought, and of notes that a stage's barriers hand on with it",
    r" at (turn_piece|Fetch::store_word)\(.* in csb_rows_fetch\.cuh:": "writes of the same, before the barrier",
    r" at (at|fragments)\(.* in csb_(dots|tensor)\.cu:": "likewise",
    r" in tickets\.cuh:": "the thread that fills a stage tells whose it is before it arrives at the stage's barrier",
    r" in conv2d_stem_pooled\.cu:": "where a warp hands on what it made one lane arrives, behind __syncwarp; it finds "
    "nothing where every lane does",
    r" at load_matrices_transposed\(.* in mma\.cuh:": "reads of what that kernel's warps hand on",
    r" at list\(.* in csb_dots\.cu:": "lists compare the upper halves of words whose lowest bit is being set",
}
MARK = "========= "  # how the tool begins its lines
KERNEL = re.compile(r"__global__(?:\s|void|CLUSTERED|__\w+__\((?:[^()]|\([^()]*\))*\))+(\w+)\(")
# How a process begins lines of its own: how many cases there are, a kernel's first start, the seconds of a case.
CASES, STARTED, TOOK = "cases: ", "started: ", "took: "
ALONE = {"all_reduce", "ceiling", "spin"}  # files whose kernels need several GPUs, or write nothing that could be wrong
# Cases that are taken as well: no other starts adaptive_avg_pool2d_merge, blend, csb_skinny and its fold,
# depthwise_weight, direct.
ALSO = (
    r"test_pool2d_ops.*of_a_large_image", r"::test_blend_.*-64\b",
    r"::test_both_kernels_of_few_samples.*shape2.*bf16-A\b",
    r"::test_whole_numbers_give_the_bits_of_the_definition.*11x11", r"::test_textbook_kernels_equal.*direct",
    r"::test_a_join_leaves_the_signs.*bf16-shape9-dense",
)  # fmt: skip
SMALL = "of_a_large_image or not large and not to_the_31 and not at_size and not every_16_bit"


class Few:
    """A pytest plugin: a few cases of each law, each of them by whichever process comes to it first.

    Processes begin at different places; who makes the file of a case in the folder ``claims`` has it.
    """

    def __init__(self, cases: int, claims: Path, begin: float = 0.0):
        self.cases, self.claims, self.begin = cases, claims, begin

    @pytest.hookimpl(trylast=True)  # after the marks and words have chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        laws = defaultdict(list)
        for item in items:
            laws[item.nodeid.partition("[")[0]].append(item)
        some = [item for name, cases in laws.items() for item in self._some(name, cases)]
        first = int(self.begin * len(some))
        items[:] = some[first:] + some[:first]
        print(f"\n{CASES}{len(items)}", flush=True)

    def _some(self, name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
        """Evenly, from a place on that differs from law to law: not everywhere the first type and family."""
        first, count = zlib.crc32(name.encode()), len(cases)
        wanted = min(self.cases, count)
        places = {(first + i * count // wanted) % count for i in range(wanted)}
        for words in ALSO:
            places |= set([i for i, case in enumerate(cases) if re.search(words, case.nodeid)][:1])
        return [cases[place] for place in sorted(places)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mine = filter(self._claimed, session.items)
        item = next(mine, None)
        while item is not None:  # what fixtures stay set up depends on which case is next in this process
            following = next(mine, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    def _claimed(self, item: pytest.Item) -> bool:
        try:
            (self.claims / f"{zlib.crc32(item.nodeid.encode()):08x}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            print(f"\n{TOOK}{report.duration:.1f} {report.nodeid}", flush=True)


def work(a: argparse.Namespace) -> int:
    """Of one process, under the tool."""
    sys.path.insert(0, str(ROOT))
    from minidl.cuda.device import active_dry_run
    from minidl.cuda.launch import observed

    index, jobs, claims = a.share.split("/", 2)
    words = f"({SMALL}) and ({a.words})" if a.words else SMALL
    options = ["-m", "gpu and not alone and not multi_gpu", "-k", words, "-vs", "-p", "no:cacheprovider", "--tb=short"]
    started = set()

    @contextmanager
    def note(stem: str, name: str, defines: Mapping[str, int | str]) -> Iterator[None]:
        if active_dry_run() is None and name not in started:
            started.add(name)
            print(f"\n{STARTED}{name}", flush=True)
        yield

    with observed(note):
        return pytest.main([*options, *a.laws], plugins=[Few(a.cases, Path(claims), int(index) / int(jobs))])


def kernels() -> set[str]:
    """Names of all kernels that laws on one GPU could start."""
    files = [path for path in (ROOT / "minidl" / "cuda").rglob("*.cu*") if path.stem not in ALONE]
    return {name for path in files for name in KERNEL.findall(path.read_text())}


def run(tool: str, a: argparse.Namespace) -> bool:
    """All processes of a tool; True when all came to their end and nothing was found."""
    folder = ROOT / "build" / "sanitize" / tool
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "claims").mkdir(parents=True)
    started, processes = time.perf_counter(), {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    for index in range(a.jobs):
        command = ["compute-sanitizer", "--tool", tool]
        command += ["--error-exitcode", str(FOUND)] if tool == "memcheck" else []
        command += [sys.executable, __file__, "--share", f"{index}/{a.jobs}/{folder / 'claims'}"]
        command += ["--cases", str(a.cases), "-k", a.words, *a.laws]
        log = folder / f"{index}.txt"
        mine = {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]} if devices[0] else {}
        with log.open("w") as file:
            processes[log] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True, env=os.environ | mine
            )
    codes = {log: _end(process, started + a.seconds) for log, process in processes.items()}
    texts = {log: log.read_text() for log in processes}
    passed = sum(text.count("PASSED") for text in texts.values())
    none = "" if passed else " (no law ran: is there a GPU?)"
    print(f"{tool}: {passed} cases of laws passed{none}, {time.perf_counter() - started:.0f} s", flush=True)
    said = [line for text in texts.values() for line in text.splitlines()]
    left = sorted(kernels() - {line.removeprefix(STARTED) for line in said if line.startswith(STARTED)})
    print(f"{tool}: not started, {len(left)} of {len(kernels())} kernels:", *left, flush=True)
    cases = max((int(line.removeprefix(CASES)) for line in said if line.startswith(CASES)), default=0)
    missed = max(0, cases - len(list((folder / "claims").iterdir())))
    if missed:
        print(f"{tool}: {missed} of {cases} cases were not reached", flush=True)
    times = [line.removeprefix(TOOK) for line in said if line.startswith(TOOK)]
    times.sort(key=lambda time: -float(time.partition(" ")[0]))
    print(f"{tool}: the longest, in seconds:", *times[:5], sep="\n  ", flush=True)
    clean = passed > 0 and not missed
    for log, text in texts.items():
        told = races(text) if tool == "racecheck" else [line for line in text.splitlines() if line.startswith(MARK)]
        told += [line for line in text.splitlines() if "FAILED" in line or line.startswith("ERROR tests")]
        if codes[log] in (0, pytest.ExitCode.NO_TESTS_COLLECTED) and (tool == "memcheck" or not told):
            continue
        ended = f"exit status {codes[log]}"
        if codes[log] is None:
            running = [line for line in text.splitlines() if "::" in line and not line.startswith(TOOK)]
            ended = f"not done after {a.seconds:.0f} s, in {running[-1] if running else 'no case'}"
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
    a.laws = a.laws or [
        str(path) + law.removeprefix(name) for law in LAWS for name in [law.partition("::")[0]]
        for path in sorted((ROOT / "tests").glob(f"{name}.py"))
    ]  # fmt: skip
    if a.share:
        sys.exit(work(a))
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    sys.exit(not all([run(tool, a) for tool in a.tool]))


if __name__ == "__main__":
    main()
