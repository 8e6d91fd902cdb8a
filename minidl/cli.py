"""The command line: ``minidl VERB``. A verb is a module with `add_arguments` and `run`, loaded when it is asked for.

Nothing that takes time is imported before `main` runs, so that Ctrl-C is answered in one line from the first moment.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import minidl
from minidl.launch import open_streams

VERBS = {
    "train": ("training", "train a network"),
    "predict": ("prediction", "classify images with a trained network, or evaluate it on a test set"),
    "prune": ("pruning", "prune a network while it trains"),
    "plan": ("bench.plan", "predict what training within a memory limit costs"),
    "bench": ("bench.command", "measure layers, networks and this machine"),
    "fuse": ("fusion.command", "show what batch-norm fusion saves, and tune it"),
    "plot": ("profile.plots", "plot what was measured"),
    "compare-backends": ("bench.compare_backends", "run a network on two devices and compare layer by layer"),
    "tune": ("bench.tuning", "measure the best settings for this machine, and keep them"),
    "warm": ("bench.warm", "compile a network's kernels ahead of time"),
    "simulate": ("bench.simulate", "predict the time of a step on many hosts from measured layers"),
    "doctor": (
        "bench.doctor",
        "list what this machine has and what is missing; under mpirun, also test the links between ranks",
    ),
}
_ALIASES = {"doctor": ["info"]}
_PICTURES = ("plot", "map")
_WRITTEN = ("json", "csv", "trace", *_PICTURES)  # options that name a file for what a verb finds
_UNREAD = 141  # the status that shells report after SIGPIPE
_INTERRUPTED = 130  # the status that shells report after Ctrl-C


class _Parser(argparse.ArgumentParser):
    """Tells what a mistyped choice was likely to be."""

    def error(self, message: str) -> NoReturn:
        if mistyped := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(mistyped[1], re.findall(r"[\w.-]+", mistyped[2]), n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """All verbs and the options of each, or of one ``only``."""
    from minidl.config import Help

    about = "Train convolutional networks on one GPU or many, and see how fast each layer runs."
    top = _Parser(prog="minidl", description=about)
    top.add_argument("--version", action="version", version=f"minidl {minidl.__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (module, about) in VERBS.items():
        aliases = _ALIASES.get(name, [])
        p = verbs.add_parser(name, help=about, formatter_class=Help, aliases=aliases)
        if only in (None, name, *aliases):
            verb = importlib.import_module(f"minidl.{module}")
            verb.add_arguments(p)
            p.set_defaults(run=verb.run)
    return top


def _verb(top: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of one verb's options."""
    (verbs,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return verbs.choices[name]


def _parsed(top: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; an option that a verb does not have is that verb's error, not the whole command's."""
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        verb = _verb(top, arguments.verb)
        if inner := getattr(arguments, "bench", None) or getattr(arguments, "what", None):
            verb = _verb(verb, inner)
        near = difflib.get_close_matches(unknown[0].partition("=")[0], verb._option_string_actions, n=1)
        verb.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near[0]}?' if near else ''}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Errors a user can mend are one line on stderr, and end all ranks."""
    argv = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    if getattr(sys.stdout, "errors", None) == "strict":  # names of files that are no text come out as they are
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        return _run(argv)
    except KeyboardInterrupt:  # while modules are imported: of one rank of several, too, as none knows the others yet
        print(f"minidl {' '.join(argv[:1])}".rstrip() + ": interrupted", file=sys.stderr, flush=True)
        sys.exit(_INTERRUPTED)


def _run(argv: list[str]) -> int:
    top = parser(only=argv[0] if argv else "")
    if argv in ([], ["bench"], ["tune"]):  # a further word has to come, one of these
        (_verb(top, argv[0]) if argv else top).print_help()
        return 2
    arguments = _parsed(top, argv)
    from minidl import dist
    from minidl.config import use_config, where
    from minidl.dist import abort

    try:
        if getattr(arguments, "config", None):
            use_config(_verb(top, arguments.verb), arguments.config)
            arguments = _parsed(top, argv)
        _require_places(arguments)
        status = arguments.run(arguments)
        sys.stdout.flush()
        dist.world().close()
        return status
    except BrokenPipeError:  # who reads, such as head, has seen enough; what is left must not fail at the very end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_UNREAD)
    except (ValueError, TypeError, ImportError, OSError, FloatingPointError) as error:
        missing = isinstance(error, FileNotFoundError) and error.filename is not None
        words = f"there is no file {error.filename}" if missing else error
        words = "; ".join([str(words), *getattr(error, "__notes__", [])]) + where(error)
        abort.tell(f"minidl {arguments.verb}: {words}")  # all ranks of the same: once
        abort.leave(2)
    except KeyboardInterrupt:
        _interrupted(arguments)


def _require_places(arguments: argparse.Namespace) -> None:
    """Refuse what no result can be written to, and two results for one file, before the work starts."""
    from minidl import checkpoint, checks

    taken: dict[str, str] = {}
    for name in _WRITTEN:
        if path := getattr(arguments, name, None):
            checkpoint.require_place("", f"--{name}", path)
            if name in _PICTURES:
                from minidl.profile.plots.style import require_picture

                require_picture(f"--{name}", path)
            other = taken.setdefault(os.path.realpath(path), name)
            if other != name:
                raise checks.bad_value("", f"--{name}", f"another file than --{other}", path)


def _interrupted(arguments: argparse.Namespace) -> NoReturn:
    """End all ranks with one line: after Ctrl-C they stand in different places, so none may wait for another."""
    from minidl import checkpoint, dist
    from minidl.dist import abort

    remedy = ""
    with contextlib.suppress(OSError, AttributeError):  # no checkpoint yet; a verb without output
        remedy = f"; --resume goes on from {checkpoint.latest(arguments.output)}"
    if dist.world().size > 1:
        abort.abort(f"interrupted{remedy}", code=_INTERRUPTED)
    step = f" in step {abort.context['step']}" if "step" in abort.context else ""
    print(f"minidl {arguments.verb}: interrupted{step}{remedy}", file=sys.stderr, flush=True)
    sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
