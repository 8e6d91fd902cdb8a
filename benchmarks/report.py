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

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import fusion, layers, memory, ranks, sparse, speed, tuning
from pages.files import RESULTS, ROOT, everywhere, load

from minidl.profile.plots import save


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
    "README.md": {"sample": lambda: layers.sample(RESULTS), "speed": speed.headline},
    "docs/speed.md": {"results": speed.results, "commands": speed.commands},
    "docs/distributed.md": {
        "all-reduces": lambda: ranks.all_reduces(load("cpu", "bench_all_reduce")),
        "sums of GPUs": lambda: ranks.sums_of_gpus(everywhere("bench_all_reduce")),
        "scaling": lambda: ranks.scaling(everywhere("bench_scaling")),
        "ways": lambda: ranks.ways(everywhere("bench_scaling")),
        "shared layers": lambda: ranks.shared_layers(everywhere("bench_parallel")),
    },
    "docs/fusion.md": {
        "fused steps": lambda: fusion.fused_steps(everywhere("bench_fusion")),
        "fused sites": lambda: fusion.fused_sites(everywhere("bench_fusion")),
        "fused pairs": lambda: fusion.fused_pairs(everywhere("bench_fusion")),
        "fused convolutions": lambda: fusion.fused_convolutions(everywhere("bench_fusion")),
    },
    "docs/fusion_sites.md": {"each site": lambda: fusion.each_site(everywhere("bench_fusion"))},
    "docs/memory.md": {
        "pinning": lambda: memory.pinning(load("cpu", "bench_pinning")),
        "predicted": lambda: memory.predicted_steps(load("cpu", "bench_pinning")),
        "limited-steps": lambda: memory.limited_steps(load("h200", "bench_memory_step")),
        "held-gradients": lambda: memory.held_gradients(everywhere("bench_memory_step")),
    },
    "docs/sparse.md": {
        "products": sparse.sparse,
        "GPU products": lambda: sparse.sparse("h200"),
        "pruned networks": sparse.pruned,
        "compressed files": sparse.compressed,
        "shrunk networks": lambda: sparse.shrunk(everywhere("bench_shrink")),
    },
    "docs/tuning.md": {"choices": lambda: tuning.choices(load("h200", "bench_conv_choice"))},
    "docs/layers.md": {"networks": lambda: layers.overview(RESULTS)},
}


def pages() -> dict[Path, str]:
    """Every page as the files of results have it."""
    made = {}
    for name, parts in PARTS.items():
        text = (ROOT / name).read_text()
        for mark, make in parts.items():
            text = between(text, mark, make())
        made[ROOT / name] = text
    for network in layers.of_networks(RESULTS):
        made[ROOT / layers.PAGE.format(network)] = layers.page(RESULTS, network)
    return made


def draw() -> None:
    """All pictures; those that no page shows any more go."""
    folder = (ROOT / layers.PAGE).parent
    made = set()
    for name, _, figure in layers.pictures(RESULTS):
        save(figure(), folder / f"{name}.png")
        made.add(f"{name}.png")
    for name, figure in fusion.fusion_maps(everywhere("bench_fusion")).items():
        save(figure(), ROOT / "docs" / "images" / f"{name}.png")
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
