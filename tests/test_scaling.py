"""A step on a cluster that is not there: by hand, beside the simulated communicator, beside what GPUs measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minidl import cli
from minidl.bench.simulate import measurements, node_counts
from minidl.dist import ipc
from minidl.dist.simulated import AlphaBeta, SimulatedCommunicator, VirtualClock
from minidl.messages.neighbourhood import TAIL_BYTES, cut
from minidl.model import Model
from minidl.models import resnet50
from minidl.profile import scaling
from minidl.profile.cluster import Cluster, sums_of
from minidl.profile.plots import save, simulated
from minidl.profile.results import load
from minidl.profile.runs import NotInFile, runs
from minidl.profile.scaling import (
    NO_INTERFERENCE,
    Interference,
    LayerTimes,
    StepTimes,
    fitted,
    simulate,
    tuned_interference,
)

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RESNET50, OTHERS = (RESULTS / "h200" / f"bench_model_bf16_{name}.json.gz" for name in ("resnet50", "others"))
SEVERAL = RESULTS / "h200-x2" / "bench_model_bf16.json.gz"
ALL_REDUCES = [RESULTS / f"h200-x{n}" / "bench_all_reduce.json" for n in (2, 4)]
LINKS = list(map(str, ALL_REDUCES))
SCALING = RESULTS / "h200-x4" / "bench_scaling.json"


def line(latency_ms, bytes_per_ms):
    """Two ranks of a host: each sends as much as the message holds."""
    return Cluster(2, tuple((n, latency_ms + n / bytes_per_ms) for n in (0.0, 1e9)), AlphaBeta(1e-3, 1e6))


def cases(file):
    return {one.case: one for one in runs(load(file), str(file))}


def drawn(rng, layers=20):
    times = (LayerTimes(f"layer{i}", *rng.random(2), int(rng.integers(0, 3) * 1000)) for i in range(layers))
    return StepTimes("net/b7", 7, 3.0, (*times, LayerTimes("first", 0.5, 0.0, 500)), 0.0)


def test_by_hand():
    step = StepTimes("net/b4", 4, 1.0, (LayerTimes("b", 1.0, 2.0, 1000), LayerTimes("a", 1.0, 0.0, 2000)), 0.3)
    found = simulate(step, line(1.0, 500.0), 1, 0, interference=NO_INTERFERENCE)
    b, a = found.messages
    assert (b.layers, b.ready, b.begin, b.end) == (("b",), 2.0, 2.0, 5.0)
    assert (a.layers, a.ready, a.begin, a.end) == (("a",), 5.0, 5.0, 10.0)
    assert b.waited == 0 and a.waited == pytest.approx(10.0 - 5.1) and found.slowed_ms == 0
    assert found.ms == pytest.approx(10.0 + 0.2) and found.alone_ms == step.ms == pytest.approx(5.3)
    assert found.images_per_s == pytest.approx(2 * 4 / 10.2e-3) and found.efficiency == pytest.approx(5.3 / 10.2)
    slowed = simulate(step, line(1.0, 500.0), 1, 0, interference=Interference(0.5, 0.5))
    # Of the 3 ms of compute after the first message, 1.5 pass beside it and take twice as long.
    assert slowed.messages[1].ready == pytest.approx(6.5)
    dear = simulate(step, line(1.0, 500.0), 1, 0, interference=Interference(0.0, 0.0, 0.25))
    assert dear.messages[1].ready == pytest.approx(5.25) and dear.slowed_ms == pytest.approx(0.5)
    whole = simulate(step, line(1.0, 500.0), 1, 1 << 40, interference=NO_INTERFERENCE)
    assert [m.layers for m in whole.messages] == [("b", "a")] and whole.ms == pytest.approx(5.0 + 7.0 + 0.3)


def test_messages_that_wait_by_hand():
    """b's for the norm, beside which it then is, and not beside 1 ms of products, which took 2."""
    layers = (
        LayerTimes("b", 1.0, 1.0, 1000, flop=10**9, bytes=1), LayerTimes("norm", 0.0, 4.0, 0, flop=1, bytes=10**6),
        LayerTimes("a", 1.0, 1.0, 1000, flop=10**9, bytes=1),
    )  # fmt: skip
    step = StepTimes("net/b32", 32, 1.0, layers, 0.0)
    options = {"interference": Interference(0.5, 0.0)}
    b, a = simulate(step, line(1.0, 1000.0), 1, 0, waits=True, **options).messages
    assert (b.ready, b.begin, b.end) == (2.0, 3.0, 5.0) and (a.ready, a.begin, a.end) == (8.0, 8.0, 10.0)
    soon, _ = simulate(step, line(1.0, 1000.0), 1, 0, **options).messages
    assert (soon.ready, soon.begin, soon.end) == (2.0, 2.0, 4.0)
    held, at_once = (simulate(step, line(1.0, 1000.0), 1, 0, waits=waits, **options) for waits in (True, False))
    assert held.slowed_ms == pytest.approx(1.0) and at_once.slowed_ms == pytest.approx(2.0)


def test_factors_by_hand():
    """They travel beside the input gradient; the weight gradient is that of all rows, and nothing waits at the end."""
    fc = LayerTimes("fc", 1.0, 2.0, 4 << 21, features=(2048, 1024))
    step = StepTimes("net/b4", 4, 1.0, (fc, LayerTimes("a", 1.0, 0.0, 0)), 0.3, itemsize=2, device="cuda")
    found = simulate(step, line(1.0, 500.0), 1, 0, interference=NO_INTERFERENCE)
    [message] = found.messages
    nbytes = 2 * 4 * 3072 * 2
    assert (message.nbytes, message.ready, message.begin) == (nbytes, 1.0, 1.0)
    assert message.end == pytest.approx(2.0 + nbytes / 2 / 500) and message.waited == pytest.approx(message.end - 3.0)
    assert found.ms == pytest.approx(message.end + 1.0 + 1.0 + 0.3)
    sums = simulate(step, line(1.0, 500.0), 1, 0, interference=NO_INTERFERENCE, factors=False)
    assert sums.messages[0].nbytes == 4 << 21 and sums.ms > 100 * found.ms
    many = simulate(step, line(1.0, 500.0), 64, 0, interference=NO_INTERFERENCE)
    assert many.messages[0].nbytes == 4 << 21, "the rows of 128 ranks are as many bytes as the gradient"
    on_cpu = simulate(replace(step, device="cpu"), line(1.0, 500.0), 1, 0, interference=NO_INTERFERENCE)
    assert on_cpu == sums


@pytest.mark.parametrize("group_bytes", [0, 1500, 4000, 1 << 40])
def test_it_is_the_schedule_of_the_simulated_communicator(group_bytes, rng):
    """Two programs with one clock each: that one runs an arena's calls, this one adds up times."""
    for _ in range(5):
        step = drawn(rng)
        clock = VirtualClock()
        comm = SimulatedCommunicator(2, AlphaBeta(latency=0.2, bandwidth=2000.0), clock=clock)
        works, nbytes, left = [], 0, step.nbytes
        clock.advance(step.forward_ms)
        for layer in step.layers:
            clock.advance(layer.weight_ms)
            nbytes, left = nbytes + layer.nbytes, left - layer.nbytes
            if layer.nbytes and (nbytes >= group_bytes or not left):
                works.append(comm.start_all_reduce(np.zeros(nbytes, "uint8")))
                nbytes = 0
            clock.advance(layer.data_ms)
        for work in works:
            work.wait()
        found = simulate(step, line(0.2, 2000.0), 1, group_bytes, interference=NO_INTERFERENCE)
        assert found.ms == pytest.approx(clock.now())
        assert [m.waited for m in found.messages] == pytest.approx([m.exposed for m in comm.messages])
        assert [m.end for m in found.messages] == pytest.approx([m.end for m in comm.messages])


def test_nothing_is_lost_where_messages_cost_nothing_and_more_hosts_lose_more(rng):
    step = drawn(rng)
    free = Cluster(2, ((0.0, 0.0), (1e9, 0.0)), AlphaBeta(0.0, float("inf")))
    assert simulate(step, free, 64, 0, interference=NO_INTERFERENCE).efficiency == pytest.approx(1.0)
    assert simulate(step, Cluster(1, (), AlphaBeta(1.0, 1.0)), 1, 0).efficiency == pytest.approx(1.0)
    cluster = line(0.1, 1e4)
    found = [scaling.best(step, cluster, 2**i) for i in range(8)]
    assert all(a.efficiency >= b.efficiency for a, b in zip(found, found[1:], strict=False))
    assert all(o.ms == pytest.approx(step.ms + o.exposed_ms) for o in found)
    for o in found:
        assert o.ms <= min(simulate(step, cluster, o.hosts, size).ms for size in scaling.GROUPS)
    half = simulate(step, cluster, 8, 0, message_share=0.5)
    assert half.ms < simulate(step, cluster, 8, 0).ms


def test_what_runs_beside_a_message_decides_what_it_costs():
    """2 ms of products pass beside one of 3 ms, in as many as they lose of their speed; nothing else is slowed."""
    sent = LayerTimes("b", 1.0, 0.0, 1000)
    for flop, share in ((10**9, 0.25), (0, 0.5)):
        after = LayerTimes("a", 0.0, 2.0, 0, flop=flop, bytes=1)
        step = StepTimes("net/b4", 4, 1.0, (sent, after), 0.0)
        found = simulate(step, line(2.0, 1000.0), 1, 0, interference=Interference(0.25, 0.5))
        beside = min(2.0, 3.0 * (1 - share))
        assert found.slowed_ms == pytest.approx(beside / (1 - share) - beside)


def test_rounded_messages_cost_their_rounding():
    step = StepTimes("net/b4", 4, 1.0, (LayerTimes("a", 1.0, 0.0, 4_200_000),), 0.0)
    free = Cluster(2, ((0.0, 0.0), (1e9, 0.0)), AlphaBeta(0.0, float("inf")))
    found = simulate(step, free, 1, 0, interference=NO_INTERFERENCE, message_share=0.5)
    assert found.slowed_ms == pytest.approx(1.5e-3), "6 bytes of each float32 at 4.2 TB/s"
    assert simulate(step, Cluster(1, (), AlphaBeta(0.0, 1.0)), 1, 0, message_share=0.5).ms == step.ms


def test_messages_are_cut_as_a_model_cuts_them():
    model, free = Model(resnet50()), Cluster(2, ((0.0, 0.0), (1e9, 0.0)), AlphaBeta(0.0, float("inf")))
    layers = [LayerTimes(n.name, 0.1, 0.1, n.nbytes, n.flop, n.bytes) for n in model.neighbours()]
    step = StepTimes("resnet50/b32", 32, 5.0, tuple(layers), 0.1, itemsize=2)
    counts = set()
    for asked in (0, 1 << 20, 4 << 20, 25 << 20, 1 << 40):
        model.arena.connect(model.comm, asked)
        sent = [message.layers for message in simulate(step, free, 1, asked).messages]
        assert sent == [message.layers for message in model.arena.messages]
        counts.add(len(sent))
    assert len(counts) == 5


def test_layers_begin_messages_and_have_some_to_themselves():
    layers = [(name, 10) for name in "abcd"]
    assert cut(layers, 100) == [tuple("abcd")] and cut(layers, 20) == [("a", "b"), ("c", "d")]
    assert cut(layers, 100, begin={"b"}) == [("a",), ("b", "c", "d")]
    assert cut(layers, 20, apart={"b"}) == [("a",), ("b",), ("c", "d")]
    assert cut(layers, 100, apart={"a", "d"}) == [("a",), ("b", "c"), ("d",)]


def test_what_is_left_at_last_is_a_message_of_at_most_a_megabyte(rng):
    """Where there are several; none but the last but one is cut by it, and nothing where one holds all."""
    mib = 1 << 20
    assert cut([("a", 30 * mib), ("b", 9 * mib), ("c", mib), ("d", 10)], 25 * mib) == [("a",), ("b", "c"), ("d",)]
    assert cut([("a", 9 * mib), ("b", 10)], 25 * mib) == [("a", "b")] and cut([], 25 * mib) == []
    for _ in range(50):
        layers = [(str(i), int(nbytes)) for i, nbytes in enumerate(rng.integers(0, 9 * mib, rng.integers(1, 40)))]
        group = int(rng.integers(2 * mib, 30 * mib))
        found, sizes, plain = cut(layers, group), dict(layers), [()]
        for name in sizes:
            plain += [()] * (sum(map(sizes.get, plain[-1])) >= group)
            plain[-1] += (name,)
        assert [name for names in found for name in names] == [name for name, _ in layers]
        assert len(found) in (len(plain), len(plain) + 1) and found[: len(plain) - 1] == plain[:-1]
        if len(found) > len(plain):
            *_, before, last = found
            assert sum(map(sizes.get, last)) <= TAIL_BYTES < sum(map(sizes.get, (before[-1], *last)))


def test_planted_interference_is_found(rng):
    planted, cluster = Interference(0.3, 0.1, 0.006), line(0.01, 2e5)
    chosen = []
    for _ in range(2):
        layers = tuple(
            LayerTimes(f"l{i}", *rng.random(2) / 20, 1000, int(rng.integers(2)) * 10**9, 1) for i in range(15)
        )
        step = StepTimes("net/b7", 7, 1.0, layers, 0.01)
        for size in (0, 8000):
            added = simulate(step, cluster, 1, size, interference=planted).ms - step.ms
            chosen.append((step, cluster, size, 1.0, added))
    assert fitted(chosen) == planted


def test_interference_is_read_off_what_tune_comm_measured():
    planted, mib = Interference(0.5, 0.2, 0.004), 1 << 20
    sizes = [mib << i for i in range(7)]
    alone = {size: 0.006 + size / 3e8 for size in sizes}
    cluster = Cluster(2, tuple(alone.items()), AlphaBeta(0.0, 1.0))
    record = {"ranks": 2, "beside": {}}
    for kind, flop in (("products", 1 << 40), ("memory", 0)):
        layers = tuple(LayerTimes(f"l{i}", 0.1, 0.0, mib, flop, 1) for i in range(64))
        step = StepTimes(kind, 1, 0.0, layers, 0.0)
        groups = []
        for size in sizes:
            ms = simulate(step, cluster, 1, size, interference=planted).ms
            exchange = alone[size] * 64 * mib / size
            groups.append({"bytes": size, "step_ms": ms, "exposed_ms": ms - step.ms, "alone_ms": exchange})
        record["beside"][kind] = groups
    assert tuned_interference(record) == planted and str(planted) == "0.5,0.2,4"


def test_the_recorded_steps_of_two_and_four_gpus_are_met_within_five_per_cent():
    known = cases(RESNET50) | cases(OTHERS)
    links = [sums_of(load(path), str(path)) for path in ALL_REDUCES]
    files = sorted(file for n in (2, 4) for file in (RESULTS / f"h200-x{n}").glob("bench_scaling*.json"))
    found = [case for file in files for case in measurements(known, str(file), links)]
    assert {case.cluster.ranks_per_host for case in found} == {2, 4}
    assert {case.step.case for case in found} >= {
        "resnet50/224x224/b64", "resnet50/224x224/b256", "vgg16/224x224/b64", "unet/256x256/b32"
    }  # fmt: skip

    def worst(interference):
        return max(abs(case.simulated(interference).ms / case.ms - 1) for case in found)

    assert worst(scaling.INTERFERENCE) < 0.05
    assert worst(NO_INTERFERENCE) > 0.05, "without interference of messages with compute it would not be met"
    for case in found:
        messages = case.simulated(scaling.INTERFERENCE).messages
        assert len(messages) == case.messages, "as many as the runtime sent"
        assert sum(bool(message.before) for message in messages) == case.waiting


def test_all_reduces_of_each_engine_are_those_of_the_way_it_takes():
    content = load(ALL_REDUCES[0])
    sums = sums_of(content, "all-reduces")
    assert sums.ranks == 2 and list(sums.engines) == ["links", "nccl"]
    assert sums.points() == sums.points("links")
    took = {(row["bytes"], row["arm"]): row["ms"] for row in content["rows"]}
    for nbytes, ms in sums.points("links"):  # of two ranks each sends what it holds
        arm = ipc.ROUTES["links"].way(nbytes, 2)
        assert ms == took[nbytes, "two-shot-16" if arm == "two-shot" else arm]
    assert (
        dict(sums.points("nccl"))[4 << 20] == next(r for r in content["rows"] if r["bytes"] == 4 << 20)["peers"]["nccl"]
    )
    with pytest.raises(ValueError, match="unknown engine of measured all-reduces 'ncl'; did you mean 'nccl'"):
        sums.points("ncl")
    on_cpus = sums_of(load(RESULTS / "cpu" / "bench_all_reduce_4.json"), "cpu")
    assert on_cpus.ranks == 4 and list(on_cpus.engines) == ["shm", "mpi"]


def test_what_cannot_be_simulated_is_refused():
    several = runs(load(SEVERAL), "h200-x2")[0]
    with pytest.raises(NotInFile, match="measured on 2 ranks; layers alone are needed"):
        scaling.measured(several)
    with pytest.raises(NotInFile, match="no all-reduces in it"):
        sums_of(load(RESNET50), "h200")
    with pytest.raises(ValueError, match="memory must be a number from 0 to below 1"):
        Interference(0.5, 1.0)


def test_numbers_of_hosts():
    assert node_counts("1..128") == [1, 2, 4, 8, 16, 32, 64, 128]
    assert node_counts("3..20") == [3, 6, 12, 20] and node_counts("5..5") == [5] and node_counts("1,3") == [1, 3]
    for wrong in ("", "0..4", "4..1", "1..", "two", "1,-2"):
        with pytest.raises(ValueError, match=r"^--nodes must be 1\.\.128 or 1,2,3"):
            node_counts(wrong)


def test_the_command_shows_writes_and_compares(tmp_path, capsys):
    links = ["--links", *LINKS]
    options = ["--case", "resnet50/224x224/b64", *links, "--nodes", "1..4"]
    path = tmp_path / "out.json"
    assert cli.main(["simulate", str(RESNET50), *options, "--network", "20,0.3", "--json", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"wrote {path}" in told
    assert "simulated: resnet50/224x224/b64" in told and "below 90% from 16 ranks: the update waits" in told
    rows = load(path)["rows"]
    assert {row["nodes"] for row in rows} == {1, 2, 4} and len(rows) == 3 * len(scaling.GROUPS)
    assert all(sum(m["waited"] for m in row["messages"]) == pytest.approx(row["waited_ms"], rel=1e-5) for row in rows)
    assert all(0 < row["efficiency"] <= 1 and row["ranks"] == 8 * row["nodes"] for row in rows)
    checked = ["--check", str(SCALING), *links]
    assert cli.main(["simulate", str(RESNET50), *checked, "--interference", "0.5,0.2,10"]) == 0
    told = capsys.readouterr().out
    assert "links" in told and "added ms, measured" in told and "worst error of a step" in told
    with pytest.raises(SystemExit):
        cli.main(["simulate", str(RESNET50), "--check", str(SEVERAL)])
    assert "no steps with messages and without in one run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--case", "resnet50"], "--case must be one of the networks of"),
        (
            ["--case", "vgg16/224x224/b16"],
            "within a host, got None; give --links FILE (minidl doctor --json FILE under",
        ),
        (["--case", "vgg16/224x224/b16", "--link", "7"], "--link must be microseconds and GB/s"),
        (["--case", "vgg16/224x224/b16", "--link", "7,300", "--network", "x"], "--network must be numbers"),
        (
            ["--case", "vgg16/224x224/b16", "--links", LINKS[0], "--engine", "x"],
            "unknown engine of measured",
        ),
        (["--case", "vgg16/224x224/b16", "--link", "7,300", "--interference", "1"], "products must be a number from 0"),
        (["--case", "vgg16/224x224/b16", "--fit"], "--fit must be left out without --check"),
        (["--check", str(SCALING), "--json", "o.json"], "--json must be left out with --check, got 'o.json'"),
        (["--check", str(SCALING), "--ranks-per-node", "4"], "--ranks-per-node must be left out with --check"),
    ],
)
def test_mistaken_options_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(["simulate", str(OTHERS), *words])
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_picture_is_drawn(tmp_path, rng):
    pytest.importorskip("matplotlib")
    step, cluster = drawn(rng), line(0.1, 1e4)
    outcomes = [
        sorted((simulate(step, cluster, n, size) for size in scaling.GROUPS), key=lambda o: o.ms) for n in (1, 2)
    ]
    save(simulated(step, outcomes), tmp_path / "simulated.svg")
    text = (tmp_path / "simulated.svg").read_text()
    assert "net/b7 on a cluster" in text and "a message per layer" in text


def test_sizes_that_are_one_message_are_one_curve_and_what_is_not_drawn_is_counted(rng):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    step, cluster = drawn(rng), line(0.1, 1e4)

    def curves(sizes):
        found = [sorted((simulate(step, cluster, n, size) for size in sizes), key=lambda o: o.ms) for n in (1, 2)]
        figure = simulated(step, found)
        words = [text.get_text() for text in figure.findobj(Text)]
        (told,) = (text for text in words if text.startswith("One rank alone"))
        marked = [curve for curve in figure.axes[0].lines if curve.get_marker() == "o"]
        return [text for text in words if "message" in text and "beside" not in text], told, len(marked)

    keys, told, marked = curves([0, 1 << 38, 1 << 39, scaling.ALL])
    assert {key for key in keys if not key.startswith("waited")} - {told} == {"a message per layer", "one message"}
    assert marked == 2 and "Not drawn" not in told
    _, told, marked = curves(range(1, 10))
    assert marked == 7 and told.endswith("Not drawn: 2 slower sizes.")
