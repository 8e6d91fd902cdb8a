"""Start a script as several MPI ranks of this host: ``python -m minidl.launch -n 4 script.py args...``.

A thin wrapper around ``mpiexec``, with the flags that each MPI needs to start on a laptop, in a container or as root.
On a cluster use its own launcher (``srun``, ``mpirun --hostfile``); minidl does not care who started it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

_ABOUT = "Start a script as several MPI ranks of this host."


def open_streams() -> None:
    """Let streams that were closed by whoever started this lead nowhere.

    The next file opened would otherwise take the number of one, and hold what libraries print; MPICH's launcher fails.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the ``mpiexec`` of the command line; return 2 where there is none.

    The process is replaced, so the exit status, signals and the terminal are those of ``mpiexec`` itself.
    """
    open_streams()
    try:
        return _start(_parser().parse_args(arguments))
    except KeyboardInterrupt:
        print("minidl.launch: interrupted", file=sys.stderr)
        return 130  # as shells report Ctrl-C


def _start(options: argparse.Namespace) -> int:
    from minidl.dist import mpiexec  # not before Ctrl-C is caught: this takes half a second
    from minidl.progress import TERMINAL

    try:
        launcher = mpiexec.find()
        program = [sys.executable, *_what_runs(options), *options.arguments]
        command = launcher.command(options.ranks, program, elastic=options.elastic)
    except (ImportError, OSError, ValueError) as error:
        print(f"minidl.launch: {error}", file=sys.stderr)
        return 2
    print(f"minidl.launch: {options.ranks} ranks by {launcher.family} ({launcher.path})", file=sys.stderr, flush=True)
    if sys.stdout.isatty():  # mpiexec puts a pipe between the ranks and the terminal
        os.environ[TERMINAL] = str(shutil.get_terminal_size().columns)
    os.execv(command[0], command)


def _what_runs(options: argparse.Namespace) -> list[str]:
    """Python's arguments for a module, a script, or the command ``minidl``."""
    if options.module or (options.script == "minidl" and not os.path.isfile("minidl")):
        return ["-m", options.script]
    if not os.path.isfile(options.script):  # else each rank would say so in Python's words
        raise FileNotFoundError(f"there is no script {options.script}; -m runs a module")
    return [options.script]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minidl.launch", description=_ABOUT)
    parser.add_argument("-n", "--ranks", type=_rank_count, required=True, help="number of processes")
    parser.add_argument("-m", "--module", action="store_true", help="run a module, like python -m")
    parser.add_argument("--elastic", action="store_true", help="the others go on when a rank is lost (experimental)")
    parser.add_argument("script", help="Python script (or module) to run, or minidl")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _rank_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
