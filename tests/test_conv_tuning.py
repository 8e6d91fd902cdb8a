"""Tuned kernels of convolutions: what a table may say, who listens to it, how it is measured and kept.

The clock is planted; on a GPU every candidate must give the bits of the definition.
"""

from __future__ import annotations

import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import minidl as m
from minidl import cli
from minidl.bench import conv_tuning, tuning
from minidl.cuda import capture
from minidl.cuda.convolution import (
    conv2d_halo,
    conv2d_hopper_tiles,
    conv2d_tuned,
    conv2d_weight_grid,
    conv2d_weight_tiles,
)
from minidl.cuda.convolution.conv2d_choice import options
from minidl.cuda.convolution.conv2d_family import Choice, Question, family, kernel
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_tuned import DTYPES, NOTHING, Table, choice_record, question_of, question_record
from minidl.cuda.device import BUILT_IN, current_device
from minidl.cuda.launch import dry_run
from minidl.precision import float32
from minidl.profile import tuned
from minidl.profile.inputs import placed
from minidl.profile.timing import Timing
from tests.reference import conv2d as reference
from tests.tolerance import draw_integers

H200 = BUILT_IN["H200"]
PASSES = ("forward", "backward_data", "backward_weight")

# x, filters (K, R, S), options where they are not the usual ones
SHAPES = [
    ((2, 9, 10, 64), (136, 3, 3), {"padding": (1, 1)}),
    ((40, 27, 27, 96), (192, 3, 3), {"padding": (1, 1)}),
    ((300, 14, 14, 264), (64, 1, 1), {}),
    ((5, 15, 14, 72), (64, 3, 3), {"stride": (2, 2), "padding": (1, 1)}),
    ((4, 21, 23, 3), (64, 7, 7), {"stride": (2, 2), "padding": (3, 3)}),
    ((2, 12, 11, 24), (40, 3, 3), {"padding": (2, 3), "dilation": (2, 3)}),
    ((3, 12, 12, 8), (16, 5, 5), {"padding": (2, 2)}),
    ((2, 9, 8, 64), (128, 3, 3), {"padding": (1, 1), "groups": 4}),
    ((2, 9, 8, 32), (32, 3, 3), {"padding": (1, 1), "groups": 32}),
    ((2, 9, 8, 37), (20, 3, 3), {"padding": (1, 1)}),
    ((7, 1, 1, 200), (72, 1, 1), {}),
    ((1, 270, 260, 33), (3, 1, 1), {}),
]
USUAL = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


def sizes(x, filters, given):
    where = USUAL | given
    pairs = [where[name] for name in ("stride", "padding", "dilation")]
    return convolution("test", x, (*filters, x[3] // where["groups"]), *pairs, where["groups"])


QUESTIONS = [Question(which, sizes(*shape), *DTYPES[dtype]) for shape in SHAPES for which in PASSES for dtype in DTYPES]


def launches(question, choice=None, device=H200):
    """What the operation launches, in a dry run."""
    from minidl.cuda.array import empty

    with dry_run(device) as log:
        (call,) = conv_tuning._calls(question, empty, 1)
        if choice is None:
            call()
        else:
            with kernel(choice):
                call()
    return log.launches


def record_of(*rows):
    head = {"schema": 1, "gpu": H200.name, "driver": 13000, "nvrtc": [13, 0], "kernels": "0"}
    return head | {"rows": [question_record(question) | {"choice": choice_record(choice)} for question, choice in rows]}


@pytest.fixture(autouse=True)
def no_table(monkeypatch):
    monkeypatch.delenv("MINIDL_TUNED", raising=False)
    conv2d_tuned.install(NOTHING)
    yield
    conv2d_tuned.install(None)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An H200 that is not there, and an empty cache."""
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "cache"))
    head = {key: value for key, value in record_of().items() if key != "rows"}
    monkeypatch.setattr(conv2d_tuned, "identity", lambda: head)
    monkeypatch.setattr(tuning, "identity", lambda: head)
    for module in (conv2d_tuned, tuning):
        monkeypatch.setattr(module, "current_device", lambda: H200)
    return head


# ---------------------------------------------------------------------------------------------------------- candidates


def test_tiles_have_names_of_their_own():
    tiles = conv2d_hopper_tiles
    gathered = *tiles.TILES, tiles.SMALL, *tiles.SWAPPED, tiles.PAIRED, tiles.ROOMY, *conv2d_halo.HALO_TILES
    gathering = [tile.name for tile in gathered]
    weight = [tile.name for tile in (*conv2d_weight_tiles.TILES, conv2d_weight_grid.HALO)]
    assert len(set(gathering)) == len(gathering) and len(set(weight)) == len(weight)


@pytest.mark.parametrize("name", ["A100", "H200"])
def test_the_first_candidate_is_what_runs_untuned_and_all_are_different(name):
    device = BUILT_IN[name]
    for question in QUESTIONS:
        choices = options(question, device)
        assert launches(question, choices[0], device) == launches(question, None, device), question
        found = [tuple(launches(question, choice, device)) for choice in choices]
        assert len(set(choices)) == len(choices) == len(set(found)), question


def test_hopper_has_many_candidates_and_other_devices_have_some():
    families = {choice.family for question in QUESTIONS for choice in options(question, H200)}
    assert families == {"hopper", "generic", "grouped", "small", "stem", "thin"}
    usual = Question("forward", sizes(*SHAPES[1]), *DTYPES["bf16"])
    assert len(options(usual, H200)) > 10 and len(options(usual, BUILT_IN["A100"])) == 4


def test_a_kernel_that_cannot_do_it_leaves_the_choice_as_it_was():
    question = Question("forward", sizes(*SHAPES[3]), *DTYPES["bf16"])  # a stride: no halo
    plain = launches(question)
    for choice in (
        Choice("hopper", "halo28", (1,)), Choice("hopper", "9x9x9", (1,)), Choice("hopper", "128x64x4*2", (1, 1)),
        Choice("stem"), Choice("nonsense"),
    ):  # fmt: skip
        assert launches(question, choice) == plain, choice
    weight = question._replace(which="backward_weight")
    for choice in (Choice("hopper", "halo", (1, 1)), Choice("hopper", "128x64x4*2", (1, 3)), Choice("hopper", "halo")):
        assert launches(weight, choice) == launches(weight), choice


def test_a_forced_family_is_stronger_than_a_tuned_kernel():
    question = Question("forward", sizes(*SHAPES[0]), *DTYPES["bf16"])
    conv2d_tuned.install(Table(H200.name, {question: Choice("hopper", "256x128x4", (1,))}))
    assert dict(launches(question)[0].defines)["TILE_M"] == 256
    with family("generic"):
        assert launches(question)[0].stem == "conv2d"


# -------------------------------------------------------------------------------------------------------------- tables


def test_a_table_says_again_what_it_was_told():
    rows = [(question, choice) for question in QUESTIONS for choice in options(question, H200)[-1:]]
    table = Table.of(json.loads(json.dumps(record_of(*rows))))
    assert table.choices == dict(rows) and table.gpu == H200.name


def test_what_is_tuned_runs_on_the_gpu_it_was_tuned_for_and_nowhere_else():
    question = Question("forward", sizes(*SHAPES[1]), *DTYPES["bf16"])
    for choice in options(question, H200):
        conv2d_tuned.install(Table(H200.name, {question: choice}))
        assert launches(question) == launches(question, choice)
        assert launches(question, None, BUILT_IN["H100"]) == launches(question, options(question, BUILT_IN["H100"])[0])
    other = question._replace(code=2)
    assert launches(other) == launches(other, options(other, H200)[0]), "another dtype is another question"


def test_tables_that_choose_alike_have_one_digest():
    first, second = QUESTIONS[0], QUESTIONS[5]
    one, two = (Choice("hopper", "128x64x4*2", (share,)) for share in (1, 2))
    tables = [Table(H200.name, choices) for choices in ({first: one, second: two}, {second: two, first: one})]
    assert tables[0].digest == tables[1].digest != Table(H200.name, {first: two, second: two}).digest
    assert NOTHING.digest == "none"


def kept_at(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return path


def test_the_kept_table_is_read_unless_it_is_damaged_or_anothers(machine, monkeypatch):
    question, choice = QUESTIONS[0], Choice("generic", "64x64")
    path = conv2d_tuned.table_path()
    assert conv2d_tuned.load() is NOTHING
    kept_at(path, record_of((question, choice)))
    assert conv2d_tuned.load().choices == {question: choice}
    monkeypatch.setenv("MINIDL_TUNED", "0")
    assert conv2d_tuned.load() is NOTHING
    monkeypatch.delenv("MINIDL_TUNED")
    row = record_of((question, choice))["rows"][0]
    for damaged in (
        "{", "[]", '{"rows": 3}', record_of((question, choice)) | {"kernels": "1"},
        record_of() | {"rows": [row | {"choice": ["hopper", "128x64x4*2", [0]]}]}, record_of() | {"rows": [{}]},
        record_of() | {"rows": [row | {"pass": "sideways"}]},
    ):  # fmt: skip
        kept_at(path, damaged)
        assert conv2d_tuned.load() is NOTHING


def test_a_named_table_must_be_this_machines(machine, monkeypatch, tmp_path):
    path = kept_at(tmp_path / "table.json", record_of((QUESTIONS[0], Choice("generic", "64x64"))))
    monkeypatch.setenv("MINIDL_TUNED", str(path))
    assert len(conv2d_tuned.load().choices) == 1
    kept_at(path, record_of() | {"driver": 12000})
    with pytest.raises(ValueError, match="MINIDL_TUNED: file must be 0, or a table .*its driver is 12000, this mach"):
        conv2d_tuned.load()
    monkeypatch.setenv("MINIDL_TUNED", str(tmp_path / "nowhere.json"))
    with pytest.raises(ValueError, match="nowhere.json"):
        conv2d_tuned.load()


def test_the_kernels_text_is_part_of_the_key(monkeypatch):
    conv2d_tuned._kernels.cache_clear()
    before = conv2d_tuned._kernels()
    genuine = conv2d_tuned.nvrtc.source_of
    monkeypatch.setattr(conv2d_tuned.nvrtc, "source_of", lambda stem: genuine(stem) + "//" * (stem == "conv2d_halo"))
    conv2d_tuned._kernels.cache_clear()
    assert conv2d_tuned._kernels() != before
    conv2d_tuned._kernels.cache_clear()


def test_every_kernel_of_a_convolution_is_in_the_key():
    stems = {launch.stem for question in QUESTIONS for c in options(question, H200) for launch in launches(question, c)}
    assert {stem for stem in stems if stem.startswith("conv2d")} == set(conv2d_tuned.STEMS)


class Rank:
    """One of two; rank 0's words are given."""

    size = 2

    def __init__(self, rank, first=None):
        self.rank, self.first = rank, first

    def share(self, value, name=""):
        return [value if self.rank == 0 else self.first, value]


def test_all_ranks_take_the_table_of_rank_0(monkeypatch):
    cuda = SimpleNamespace(name="cuda")
    record = record_of((QUESTIONS[0], Choice("generic", "64x64")))
    own = Table.of(record_of((QUESTIONS[0], Choice("generic", "128x64"))))
    conv2d_tuned.install(own)
    assert tuned.settle(cuda, Rank(1, (record, None))) == Table.of(record).digest
    assert conv2d_tuned.current().choices[QUESTIONS[0]].tile == "64x64"
    conv2d_tuned.install(own)
    assert tuned.settle(cuda, Rank(1, ({}, None))) == "none" and conv2d_tuned.current() is NOTHING
    conv2d_tuned.install(own)
    assert tuned.settle(cuda, Rank(0)) == own.digest and conv2d_tuned.current() is own
    assert tuned.settle(SimpleNamespace(name="cpu"), Rank(0)) == "none"
    for rank in (Rank(0), Rank(1, (None, (ValueError, "no table")))):
        monkeypatch.setattr(conv2d_tuned, "current", lambda: (_ for _ in ()).throw(ValueError("no table")))
        with pytest.raises(ValueError, match="no table"):
            tuned.settle(cuda, rank)


def test_a_models_plan_tells_of_the_table(monkeypatch):
    seen = []
    monkeypatch.setattr("minidl.model.require_same", lambda comm, what, entries: seen.extend(entries))
    m.Model(m.models.lenet())
    assert "tuned kernels none" in seen


# ----------------------------------------------------------------------------------------------------------- the clock


class Clock:
    """A contest with planted milliseconds by name; others take 5."""

    def __init__(self, ms=None, errors=None):
        self.ms, self.errors, self.runs = ms or {}, errors or {}, []

    def time(self, choice, budget):
        self.runs.append((str(choice), budget))
        ms = self.ms.get(str(choice), 5.0)
        return Timing((ms() if callable(ms) else ms,) * budget.samples)

    def error(self, choice):
        return self.errors.get(str(choice), 0.0)


A, B, C, D, E = (Choice("hopper", name, (1,)) for name in "ABCDE")


def test_the_fastest_of_the_finalists_wins():
    clock = Clock({"hopper A 1": 6.0, "hopper B 1": 1.0, "hopper C 1": 2.0, "hopper D 1": 4.0})
    best, times, spread = conv_tuning.race([A, B, C, D, E], clock.time)
    assert best == B and times[A] == 6.0 and times[E] == 5.0 and spread == 0.0
    finals = [name for name, budget in clock.runs if budget == conv_tuning.CAREFUL]
    assert finals[:4] == ["hopper A 1", "hopper B 1", "hopper C 1", "hopper D 1"], "the default is always among them"
    assert finals[4:8] == finals[3::-1] and len(finals) == 4 * conv_tuning.TURNS, "they take turns, forth and back"


def test_what_is_hardly_faster_changes_nothing():
    assert conv_tuning.race([A, B], Clock({"hopper A 1": 1.0, "hopper B 1": 0.981}).time)[0] == A
    assert conv_tuning.race([A, B], Clock({"hopper A 1": 1.0, "hopper B 1": 0.979}).time)[0] == B


def test_a_clock_that_drifts_favours_nobody():
    """The chip slows down from run to run; B is in truth 5 % faster, C 5 % slower."""
    runs = iter(range(10**6))

    def slowing(ms):
        return lambda: ms * (1 + 0.01 * next(runs))

    clock = Clock({"hopper A 1": slowing(1.0), "hopper B 1": slowing(0.95), "hopper C 1": slowing(1.05)})
    assert conv_tuning.race([A, C, B], clock.time)[0] == B
    same = Clock({f"hopper {name} 1": slowing(1.0) for name in "ABC"})
    assert conv_tuning.race([A, B, C], same.time)[0] == A


def test_one_lucky_sample_wins_no_final():
    lucky = iter([0.5])
    clock = Clock({"hopper A 1": 1.0, "hopper B 1": lambda: next(lucky, 2.0)})
    assert conv_tuning.race([A, B], clock.time)[0] == A


def test_a_kernel_with_another_result_is_an_error():
    question = Question("forward", sizes(*SHAPES[0]), *DTYPES["bf16"])
    for error in (0.5, float("nan")):
        with pytest.raises(RuntimeError, match=r"hopper B 1 is .* off hopper A 1 at .*wrong results"):
            conv_tuning.answer(question, [A, B], Clock(errors={"hopper B 1": error}))


def test_a_run_goes_on_where_the_last_one_ended():
    wanted, saved, asked = [q for q in QUESTIONS if len(options(q, H200)) > 1][:4], [], []

    class Interrupted(Clock):
        def time(self, choice, budget):
            if len(saved) == 2:
                raise KeyboardInterrupt
            return super().time(choice, budget)

    def contest(kind):
        return lambda question: asked.append(question) or kind()

    with pytest.raises(KeyboardInterrupt):
        conv_tuning.tune(wanted, H200, [], lambda rows: saved.append(list(rows)), contest=contest(Interrupted))
    assert [len(rows) for rows in saved] == [1, 2] and asked == wanted[:3]
    asked.clear()
    rows = conv_tuning.tune(wanted, H200, saved[-1], saved.append, contest=contest(Clock))
    assert asked == wanted[2:] and [question_of(row) for row in rows] == wanted


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(machine, monkeypatch):
    """``minidl tune conv`` on a machine without a GPU, by the planted clock."""
    compiled = []
    monkeypatch.setattr(tuning, "_require_gpu", lambda: None)
    monkeypatch.setattr(tuning.nvrtc, "compile_all", lambda kernels, arch: compiled.extend(kernels))
    clock = Clock({"generic 64x64": 1.0, "stem": 0.5})
    monkeypatch.setattr(
        conv_tuning.tune, "__kwdefaults__", conv_tuning.tune.__kwdefaults__ | {"contest": lambda q: clock}
    )

    def run(*words):
        return cli.main(["tune", "conv", "--model", "resnet20", "--batch", "2", *words])

    return SimpleNamespace(run=run, compiled=compiled, clock=clock)


def test_the_command_measures_keeps_and_tells(command, capsys):
    assert command.run() == 0
    out = capsys.readouterr()
    assert command.compiled and "1 of " in out.err and "what tuning gains, most first" in out.out
    assert "400.0%" in out.out and "all together: " in out.out and f"kept in {conv2d_tuned.table_path()}" in out.out
    table = conv2d_tuned.load()
    assert {choice.family for choice in table.choices.values()} == {"generic", "stem"}
    assert len(table.choices) > 20
    command.clock.runs.clear()
    assert command.run() == 0 and not command.clock.runs, "nothing is measured twice"
    words = ["--layer", "Conv2d(64, 96, 3)", "--input", "4x27x27x64"]
    assert command.run(*words) == 0 and command.run("--remeasure") == 0 and command.clock.runs
    assert len(conv2d_tuned.load().choices) == len(table.choices) + 3, "what others asked stays"


def test_layers_are_tuned_with_their_inputs(command, capsys):
    words = ["--layer", "Conv2d(64, 96, 3, padding=1)", "--input", "4x27x27x64", "--precision", "bf16", "fp16"]
    assert command.run(*words) == 0
    assert capsys.readouterr().out.count("4x27x27 64-96 3x3 ") == 6
    with pytest.raises(SystemExit):
        command.run(*words, "--input", "4x27x27x64")
    assert "tune conv: --input must be once for each --layer, got 2" in capsys.readouterr().err


def test_ranks_that_would_disturb_each_other_are_refused(command, monkeypatch, capsys):
    monkeypatch.setattr(tuning.dist, "launched_size", lambda: 4)
    with pytest.raises(SystemExit):
        command.run()
    assert "tune conv: ranks must be 1, got 4; start it without a launcher" in capsys.readouterr().err


def test_a_named_file_of_something_else_is_not_overwritten(command, tmp_path, capsys):
    path = kept_at(tmp_path / "notes.json", "[1, 2]")
    with pytest.raises(SystemExit):
        command.run("--output", str(path))
    assert "--output must be a new file, or a table of this machine" in capsys.readouterr().err
    assert path.read_text() == "[1, 2]"
    assert command.run("--output", str(tmp_path / "new.json")) == 0 and (tmp_path / "new.json").exists()


# ------------------------------------------------------------------------------------------------------------ on a GPU


def outcome(ops, question, hosts):
    """The result on the host."""
    which, conv, _, tf32 = question
    names = ("stride", "padding", "dilation", "groups")
    places = {name: getattr(conv, name) for name in names} | {"tf32": tf32}
    x, w, dy = map(ops.from_host, hosts)
    if which == "forward":
        return ops.to_host(ops.conv2d(x, w, **places))
    if which == "backward_data":
        return ops.to_host(ops.conv2d_backward_data(dy, w, conv.x_shape, **places))
    out = ops.from_host(np.full(w.shape, np.nan, np.float32))
    ops.conv2d_backward_weight(dy, x, **places, out=out)
    return ops.to_host(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[3:], ids=str)
def test_every_candidate_gives_the_bits_of_the_definition(cuda_ops, shape, dtype, rng):
    """On whole numbers, which every order of summing sums exactly."""
    from minidl.cuda.convolution.conv2d import STORAGE

    conv, device = sizes(*shape), current_device()
    storage = STORAGE[DTYPES[dtype][0]]
    w_shape = conv.out_channels, *conv.kernel, conv.channels // conv.groups
    hosts = [draw_integers(rng, one, storage) for one in (conv.x_shape, w_shape, conv.y_shape)]
    where = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups")}
    x, w, dy = (host.astype(np.float64) for host in hosts)
    expected = {
        "forward": reference.conv2d(x, w, **where),
        "backward_data": reference.conv2d_backward_data(dy, w, conv.x_shape, **where),
        "backward_weight": reference.conv2d_backward_weight(dy, x, w_shape, **where),
    }
    for which in PASSES:
        question = Question(which, conv, *DTYPES[dtype])
        wanted = expected[which].astype(float32 if which == "backward_weight" else storage)
        for choice in options(question, device):
            with kernel(choice):
                found = outcome(cuda_ops, question, hosts)
            np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32), f"{choice} {question}")


def test_the_device_finds_a_winner_that_is_a_candidate(cuda_ops):
    question = Question("forward", sizes(*SHAPES[2]), *DTYPES["bf16"])
    choices = options(question, current_device())
    row = conv_tuning.answer(question, choices, conv_tuning.DeviceContest(question))
    assert row["choice"] in [choice_record(choice) for choice in choices]
    assert 0 < row["ms"] <= 1.01 * row["default_ms"] and set(row["candidates"]) == set(map(str, choices))


def test_a_contest_that_is_over_holds_no_memory(cuda_ops, monkeypatch):
    """Not even for Python's cycle collector: it does not know how much of the device its garbage holds."""
    import cupy

    class Watched(cupy.cuda.Memory):
        pass

    def make(size):
        made.append(Watched(size))
        return cupy.cuda.MemoryPointer(made[-1], 0)

    made: list[Watched] = []
    question = Question("forward", sizes(*SHAPES[2]), *DTYPES["bf16"])
    monkeypatch.setattr(capture, "_never_taken_back", make)
    placed(cuda_ops)  # stays
    pool = cupy.cuda.MemoryPool(make)
    with capture.steady(), cupy.cuda.using_allocator(pool.malloc):
        contest = conv_tuning.DeviceContest(question)
        operands = len(made)
        for choice in options(question, current_device())[:3]:
            contest.time(choice, conv_tuning.QUICK)
        seen = [weakref.ref(memory) for memory in made]
        assert len(seen) > operands > 0
        made.clear()
        assert not any(memory() for memory in seen[operands:]), "of graphs"
        del contest
    pool.free_all_blocks()
    assert not any(memory() for memory in seen)


def test_long_sums_may_differ_by_what_matrix_units_cut_off():
    """4.3e-4 was measured between 29 and 132 sums of 3.2 million pixels; sums of some thousand agree as they did."""

    def bound(x, filters, dtype):
        question = Question("backward_weight", sizes(x, filters, {"padding": (1, 1)}), *DTYPES[dtype])
        return conv_tuning.agreement(question, options(question, H200))

    for dtype in ("bf16", "tf32x3"):
        assert 4.3e-4 < bound((64, 224, 224, 64), (64, 3, 3), dtype) < 2.5e-3
        assert 2e-4 < bound((8, 14, 14, 256), (256, 3, 3), dtype) < 2.5e-4
    assert bound((64, 224, 224, 64), (64, 3, 3), "fp32") == 2e-4, "which rounds each sum to the nearest"
