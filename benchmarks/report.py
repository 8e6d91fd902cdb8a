"""The tables and pictures of README.md and docs/ that are made from benchmarks/results/<machine>/*.json, .json.gz.

python benchmarks/report.py             rewrite the tables
python benchmarks/report.py --pictures  draw the pictures anew, too
python benchmarks/report.py --check     exit 1 when a page does not show what the files say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import kernel_tables
import layer_pages
import memory_tables
import rank_tables
import sparse_tables
import speed_tables
from result_files import RESULTS, ROOT, everywhere

from minidl.bench import command
from minidl.profile.plots import save
from minidl.profile.tables import markdown


def options() -> str:
    """Every option of ``minidl bench``, verb by verb, from its own parser."""
    return "\n\n".join(f"### minidl bench {verb}\n\n{_options(command.parser_of(verb))}" for verb in command.VERBS)


def _options(parser: argparse.ArgumentParser) -> str:
    lines = []
    for action in parser._actions:  # argparse has no public list of options
        if action.dest != "help":
            shown = action.metavar or ("" if action.nargs == 0 else "|".join(map(str, action.choices or [])) or "VALUE")
            name = " ".join([*action.option_strings[-1:], shown + " ..." * (action.nargs == "+")]).strip()
            lines.append([f"`{name}`".replace("|", "\\|"), action.help or "", _default(action)])
    return markdown(["option", "", "default"], lines, words=range(3))


def _default(action: argparse.Action) -> str:
    value = action.default
    if value in (None, False, []) or not action.option_strings:
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, list) else value}`"


def between(page: str, name: str, text: str) -> str:
    """``page`` with what stands between the marks of ``name`` replaced.

    Raises:
        ValueError: when it has no such marks.
    """
    begin, end = f"<!-- {name}: made by benchmarks/report.py -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"a page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"speed": speed_tables.headline},
    "docs/benchmarks.md": {"options": options},
    "docs/speed.md": {"results": speed_tables.results, "commands": speed_tables.commands},
    "docs/distributed.md": {
        "all-reduces": rank_tables.all_reduces,
        "sums of GPUs": lambda: rank_tables.sums_of_gpus(everywhere("bench_all_reduce")),
        "scaling": lambda: rank_tables.scaling(everywhere("bench_scaling")),
        "shared layers": rank_tables.shared_layers,
    },
    "docs/fusion.md": {
        "fused steps": kernel_tables.fused_steps,
        "fused pairs": kernel_tables.fused_pairs,
        "fused convolutions": kernel_tables.fused_convolutions,
    },
    "docs/memory.md": {
        "pinning": memory_tables.pinning,
        "predicted": memory_tables.predicted_steps,
        "limited-steps": memory_tables.limited_steps,
    },
    "docs/sparse.md": {
        "products": sparse_tables.sparse,
        "GPU products": lambda: sparse_tables.sparse("h200"),
        "pruned networks": sparse_tables.pruned,
        "compressed files": sparse_tables.compressed,
        "shrunk networks": sparse_tables.shrunk,
    },
    "docs/tuning.md": {"choices": kernel_tables.choices},
    "docs/layers.md": {"networks": lambda: layer_pages.overview(RESULTS)},
}


def pages() -> dict[Path, str]:
    """Every page as the files of results have it."""
    made = {}
    for name, parts in PARTS.items():
        text = (ROOT / name).read_text()
        for mark, make in parts.items():
            text = between(text, mark, make())
        made[ROOT / name] = text
    for network in layer_pages.of_networks(RESULTS):
        made[ROOT / layer_pages.PAGE.format(network)] = layer_pages.page(RESULTS, network)
    return made


def draw() -> None:
    """All pictures; those that no page shows any more go."""
    folder = (ROOT / layer_pages.PAGE).parent
    made = set()
    for name, _, figure in layer_pages.pictures(RESULTS):
        save(figure(), folder / f"{name}.png")
        made.add(f"{name}.png")
    for path in folder.glob("*.png"):
        if path.name not in made:
            path.unlink()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--check", action="store_true", help="only compare")
    p.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    a = p.parse_args()
    differ = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    if a.check:
        for path in differ:
            print(f"{path.relative_to(ROOT)} differs: run python benchmarks/report.py")
        return int(bool(differ))
    for path, text in differ.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if a.pictures:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
