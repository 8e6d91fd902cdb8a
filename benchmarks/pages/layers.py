"""docs/layers.md and docs/layers/<network>.md: where the time of each network goes, layer by layer, over batch sizes
and ranks; of the files of `minidl bench model` and `minidl bench layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from minidl.profile import plots
from minidl.profile.blocks import Block, blocks, order, singles
from minidl.profile.plots.scaling import KINDS, curves
from minidl.profile.runs import Run, runs
from minidl.profile.tables import markdown
from minidl.profile.views import networks, view
from pages.files import NOTHING, results_of

NETWORKS = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "unet": "U-Net", "densenet121": "DenseNet-121"}
PAGE = "docs/layers/{}.md"
_PAUSE = timedelta(hours=3)  # between two campaigns of measuring
_ON_ONE_RANK = {"roofline": "roofline", "bars": "time by layer", "memory": "memory over a step"}
_ON_SEVERAL = {"communication": "communication roofline"}  # what each rank computes is that of one


@cache
def measured(results: Path) -> tuple[Run, ...]:
    """Every run of a network by us; of the same measurement twice the newest."""
    return _ordered({_key(run): run for run in _every(results)}.values())


@cache
def campaigns(results: Path) -> list[tuple[Run, ...]]:
    """Runs that may be compared over ranks: measured within some hours, for kernels become faster. The newest first,
    each with what it has of the networks that it measured on several ranks; those that a newer one has whole are out.
    """
    parts: list[list[Run]] = []
    for run in _every(results):
        if not parts or _date(run) - _date(parts[-1][-1]) > _PAUSE:
            parts.append([])
        parts[-1].append(run)
    found, known = [], set()
    for part in reversed(parts):
        several = {_key(run) for run in part if run.ranks > 1}
        if several - known:
            known |= several
            networks = {_network(run) for run in part if run.ranks > 1}
            found.append(_ordered({_key(run): run for run in part if _network(run) in networks}.values()))
    return found


@cache
def _every(results: Path) -> tuple[Run, ...]:
    """The newest last."""
    files = []
    for path in sorted([*results.glob("*/bench_layers*.json*"), *results.glob("*/bench_model*.json*")]):
        content = results_of(path)
        files.append((content["date"], path.relative_to(results).as_posix(), content))
    files.sort(key=lambda file: file[:2])
    found = (run for _, name, content in files for run in runs(content, name))
    return tuple(run for run in found if run.step is not None and run.rank_batch and run.arm == "minidl")


def _network(run: Run) -> tuple:
    return run.machine, run.network, run.dtype, run.model


def _key(run: Run) -> tuple:
    return run.machine, run.network, run.dtype, run.rank_batch, run.ranks, run.model


def _date(run: Run) -> datetime:
    return datetime.fromisoformat(run.content["date"])


def _ordered(found: Iterable[Run]) -> tuple[Run, ...]:
    names = list(NETWORKS)

    def place(run: Run) -> tuple:
        machine, network, *rest = _key(run)
        return machine, names.index(network) if network in names else len(names), network, *rest

    return tuple(sorted(found, key=place))


def of_networks(results: Path) -> dict[str, tuple[list[Run], list[list[Run]]]]:
    """The runs of each network on one rank, and those of each campaign over several."""
    found = {run.network: ([], []) for run in measured(results)}
    for run in measured(results):
        if run.ranks == 1:
            found[run.network][0].append(run)
    for campaign in campaigns(results):
        for network, (_, several) in found.items():
            if own := [run for run in campaign if run.network == network]:
                several.append(own)
    return found


def overview(results: Path) -> str:
    """The generated part of docs/layers.md: a line per network, batch, dtype and number of ranks."""
    if not measured(results):
        return NOTHING
    parts = []
    for machine in dict.fromkeys(run.machine for run in measured(results)):
        parts.append(f"### {machine}")
        alone = [run for run in measured(results) if run.machine == machine and run.ranks == 1]
        over = [[run for run in campaign if run.machine == machine] for campaign in campaigns(results)]
        for words, found in (("On one rank", alone), *(("Over ranks", found) for found in over)):
            if found:
                title, columns, cells = networks(found)
                told = f"{words}, {_when(found)}: {title}."
                parts += [" ".join([told, *_apart(found, "distributed.md")]), markdown(columns, cells)]
    links = [f"[{NETWORKS.get(name, name)}](layers/{name}.md)" for name in of_networks(results)]
    return "\n\n".join([*parts, f"Each layer of {', '.join(links)}."])


def sample(results: Path, network: str = "resnet50", dtype: str = "bf16", ranks: int = 2) -> str:
    """What the table of a network looks like: the longest layer of each type, those that send messages, the optimizer,
    the rest and the step. Of its largest batch, without fusion.
    """
    found = [run for run in _single(results, network) if (run.dtype, run.ranks, run.fusion) == (dtype, ranks, "none")]
    if not found:
        return NOTHING
    run = max(found, key=lambda run: run.rank_batch)
    known = {block.name: block for block in singles(run)}
    longest = {block.type: block.name for block in sorted(known.values(), key=lambda block: block.ms) if block.ms}
    _, columns, rows = view(run, "time")
    message = columns.index("all-reduce") - 2
    lines = []
    for name, kind, *cells in rows:
        sends = cells[message] not in ("", "-") and not cells[message].startswith("in ")
        if name != longest.get(kind) and not sends if kind else name.startswith("loss"):
            continue
        told = [_intensity(known[name], run), _roof(known[name], run)] if kind else ["", ""]
        lines.append([name, kind, *("" if cell == "-" else cell for cell in cells), *told])
    title = f"{NETWORKS.get(network, network)}, batch {run.rank_batch} on each of {ranks} {run.machine}, {dtype}"
    text = "the longest layer of each type, and those that send a message; milliseconds, without fusion."
    return f"{title}: {text}\n\n{markdown([*columns, 'FLOP/B', 'roof'], lines, words=(0, 1))}"


def _when(found: Sequence[Run]) -> str:
    """The days of the measurements and the commits that were measured."""
    days = sorted({run.content["date"][:10] for run in found})
    commits = dict.fromkeys(run.content["commit"][:7] for run in found if run.content.get("commit"))
    at = f" at commit{'s' * (len(commits) > 1)} {', '.join(commits)}" if commits else ""
    return f"measured {' to '.join(dict.fromkeys((days[0], days[-1])))}{at}"


def _apart(found: Sequence[Run], page: str) -> list[str]:
    """A sentence where ranks were measured at different commits: they then differ by more than their number."""
    if all(len({run.content.get("commit") for run in members}) == 1 for _, members in _groups(found, "ranks")):
        return []
    commits: dict[int, set[str]] = {}
    for run in found:
        commits.setdefault(run.ranks, set()).add((run.content.get("commit") or "")[:7])
    listed = "; ".join(f"{ranks}: {', '.join(sorted(some))}" for ranks, some in sorted(commits.items()))
    how = f"how steps scale stands in [distributed.md]({page}#how-steps-scale)"
    return [f"Numbers of ranks were measured at different commits ({listed}) and do not tell scaling; {how}."]


# -- the page of a network --------------------------------------------------------------------------------------------


def page(results: Path, network: str) -> str:
    """The whole page: pictures, every layer over batch sizes, blocks over ranks, and the commands that measured it."""
    alone, over = of_networks(results)[network]
    own = list(_of_the_files(results, network))
    parts = [
        f"# {NETWORKS.get(network, network)}, layer by layer",
        "Made by `python benchmarks/report.py` from the files named at the end; what the columns mean stands in "
        "[layers.md](../layers.md).",
        *(f"![{words}]({name}.png)" for name, words, _ in _of_the_network(alone, over)),
    ]
    for title, members in _over_batches(alone):
        parts += [f"## {title}", _every_layer(members)]
    for title, members in (found for several in over for found in _over_ranks(several)):
        told = f"{_when(members).capitalize()}."
        parts += [f"## {title}", " ".join([told, *_apart(members, "../distributed.md")]), _of_ranks(members)]
    if own:
        parts += ["## Rooflines, times and memory", *(f"![{words}]({name}.png)" for name, words, _ in own)]
    files = [*alone, *(run for several in over for run in several), *_single(results, network)]
    return "\n\n".join([*parts, "## Measured by", _commands(files)]) + "\n"


def _groups(found: Sequence[Run], what: str) -> Iterator[tuple[tuple, list[Run]]]:
    """Runs that differ in ``what`` alone, with what they share."""
    kinds: dict[tuple, list[Run]] = {}
    for run in found:
        fixed = run.ranks if what == "rank_batch" else run.rank_batch
        kinds.setdefault((run.machine, run.model, run.dtype, fixed), []).append(run)
    for shared in sorted(kinds):
        yield shared, sorted(kinds[shared], key=lambda run: getattr(run, what))


def _over_batches(found: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    for (machine, model, dtype, _), members in _groups(found, "rank_batch"):
        yield f"Every layer over batch sizes: {model}, {dtype}, {machine}", members


def _over_ranks(found: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Of each network, dtype and machine at the least batch that several ranks measured: there messages show most."""
    least = set()
    for (machine, model, dtype, batch), members in _groups(found, "ranks"):
        if len(members) > 1 and (machine, model, dtype) not in least:
            least.add((machine, model, dtype))
            yield f"Over ranks: {model}, batch {batch} on each, {dtype}, {machine}", members


Cell = Callable[[Block, Run], str]


def _every_layer(members: Sequence[Run]) -> str:
    """Of each layer its share of the step and of its roof, a column for each batch size, and FLOP per byte at the least
    and the largest; energy where it was measured.
    """
    columns = [singles(run) for run in members]
    fused = any(run.fusion != "none" for run in members)  # kernels then do the work of several layers
    every, powered = range(len(members)), [i for i, some in enumerate(columns) if any(b.energy_mj for b in some)]
    kinds: list[tuple[str, Iterable[int], Cell]] = [
        ("share", every, _share),
        ("roof", [] if fused else every, _roof),
        ("FLOP/B", dict.fromkeys((0, len(members) - 1)), _intensity),
        ("mJ/image", powered, _energy),
    ]
    head, lines = _lines(columns, members, kinds, lambda run: f"b{run.rank_batch}")
    known = {block.name: block for column in reversed(columns) for block in column}
    for line in lines:
        block = known[line[0]]
        line[1:1] = [block.type or "", "×".join(map(str, block.shape[1:])) if block.shape else ""]
    return markdown(["layer", "type", "output", *head], lines, words=(0, 1))


def _of_ranks(members: Sequence[Run]) -> str:
    """Share of the step, how much of it is exposed communication, and FLOP per wire byte of each block."""
    several = [i for i, run in enumerate(members) if run.ranks > 1]
    kinds: list[tuple[str, Iterable[int], Cell]] = [
        ("share", range(len(members)), _share),
        ("exposed", several, _exposed),
        ("FLOP/wire B", several, _communication),
    ]
    columns = [blocks(run) for run in members]
    head, lines = _lines(columns, members, kinds, lambda run: f"{run.ranks} rank{'s' * (run.ranks > 1)}")
    return markdown(["layers", *head], lines)


def _lines(
    columns: Sequence[Sequence[Block]], members: Sequence[Run], kinds: Iterable[tuple[str, Iterable[int], Cell]],
    words: Callable[[Run], str],
) -> tuple[list[str], list[list[str]]]:  # fmt: skip
    """(heads, a line for each name that any run has): of each kind a cell for some of the runs."""
    shown = [(name, i, tell) for name, some, tell in kinds for i in some]
    found = [{block.name: block for block in column} for column in columns]
    head = [f"{name}, {words(members[i])}" for name, i, _ in shown]
    return head, [
        [name, *(tell(found[i][name], members[i]) if name in found[i] else "" for _, i, tell in shown)]
        for name in order(columns)
    ]


def _share(block: Block, run: Run) -> str:
    return f"{block.ms / run.total_ms:.1%}"


def _roof(block: Block, run: Run) -> str:
    return "" if block.roof is None else f"{block.roof:.0%}"


def _exposed(block: Block, run: Run) -> str:
    ms = block.parts.get("communication", 0.0)
    return f"{ms / run.total_ms:.1%}" if ms else ""


def _intensity(block: Block, run: Run) -> str:
    return f"{block.intensity:.1f}" if block.flop else ""


def _energy(block: Block, run: Run) -> str:
    return f"{block.energy_mj / run.rank_batch:.2f}" if block.energy_mj else ""


def _communication(block: Block, run: Run) -> str:
    return f"{block.communication_intensity:,.0f}" if block.communication_intensity else ""


def _commands(found: Sequence[Run]) -> str:
    """File and command of each, in the order of the tables."""
    files = {run.file: run for run in found}
    lines = []
    for name, run in files.items():
        start = f"mpirun -n {run.ranks} " if run.ranks > 1 else ""
        folder = "benchmarks/results"
        lines.append(f"- `{folder}/{name}`, commit {run.content['commit']}: `{start}{run.content['command']}`")
    return "\n".join(lines)


# -- pictures ---------------------------------------------------------------------------------------------------------

Picture = tuple[str, str, object]  # its file's name without ending, what it is in words, a function that draws it


def pictures(results: Path) -> Iterator[Picture]:
    """Every picture of the pages."""
    for network, (alone, over) in of_networks(results).items():
        yield from _of_the_network(alone, over)
        yield from _of_the_files(results, network)


def _of_the_network(alone: Sequence[Run], over: Sequence[Sequence[Run]]) -> Iterator[Picture]:
    """Shares of the step, of each layer over batches and ranks, and scaling by the newest campaign that has it,
    at one commit."""
    for way in dict.fromkeys(map(_way, [*alone, *(run for several in over for run in several)])):
        own, *others = ([run for run in found if _way(run) == way] for found in (alone, *over))
        ranks = next((found for found in others if any(run.ranks > 1 for run in found)), [])
        start = f"{(own or ranks)[0].network}-{way.replace(', fusion ', '-')}"
        if own:
            yield f"{start}-share", f"Share of the step by type of layer, {way}", lambda r=own: plots.share(r)
        for what, groups in (("batches", _over_batches(own)), ("ranks", _over_ranks(ranks))):
            members = next((members for _, members in groups), None)
            if members is not None:
                text = f"Share and intensity of each layer over {what}, {way}"
                yield f"{start}-over-{what}", text, lambda r=members: plots.layers(r)
        commits = dict.fromkeys(run.content.get("commit") for run in ranks)
        alike = [[run for run in ranks if run.content.get("commit") == commit] for commit in commits]
        for kind in KINDS:
            if members := next((some for some in alike if _from_the_fewest(some, ranks, kind)), None):
                text = f"Throughput over ranks, {kind} scaling, {way}"
                yield f"{start}-{kind}", text, lambda r=members, k=kind: plots.scaling(r, [k])


def _from_the_fewest(some: Sequence[Run], found: Sequence[Run], kind: str) -> bool:
    """Whether some of the runs make a curve from the fewest ranks of all: another would hide what the first cost."""
    fewest = min(run.ranks for run in found)
    return any(curve.ranks[0] == fewest for curve in curves(some, [kind]))


def _way(run: Run) -> str:
    """Which runs stand in one picture: ``bf16``, ``bf16, fusion auto``."""
    return run.dtype if run.fusion == "none" else f"{run.dtype}, fusion {run.fusion}"


def _single(results: Path, network: str) -> list[Run]:
    """The runs whose files hold one network alone, with its memory and every pass by itself."""
    files = {_key(run): run for run in _every(results) if "points" not in run.content and run.network == network}
    return sorted(files.values(), key=lambda run: (run.ranks, run.dtype, run.fusion != "none", run.rank_batch))


def _of_the_files(results: Path, network: str) -> Iterator[Picture]:
    """What each file of one network allows by itself; of the same measurement twice the newest."""
    for run in _single(results, network):
        fusion = "" if run.fusion == "none" else f"-{run.fusion}"
        for kind, words in (_ON_SEVERAL if run.ranks > 1 else _ON_ONE_RANK).items():
            name = f"{network}-{run.dtype}{fusion}-b{run.rank_batch}-{run.ranks}ranks-{kind}"
            yield name, f"{run.name}: {words}", lambda k=kind, r=run: getattr(plots, k)(r)
