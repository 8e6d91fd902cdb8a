"""Measures every kernel that could do a convolution, and keeps the fastest: what `minidl tune conv` does.

Each pass of each distinct convolution is a question (`conv2d_family.Question`). All its candidates run on the same
operands, which rotate past the cache, and must give the result of the kernel that is taken without tuning. A short race
picks a few, which then take turns with that one; it stays unless another is faster by more than `GAIN`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from minidl import cuda
from minidl.cuda import cast, conv2d, conv2d_backward_data, conv2d_backward_weight, empty
from minidl.cuda.ahead import Variant, kernels_of
from minidl.cuda.convolution.conv2d import STORAGE
from minidl.cuda.convolution.conv2d_choice import options
from minidl.cuda.convolution.conv2d_family import Choice, Question, kernel
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_tuned import asked, choice_record, question_of, question_record
from minidl.cuda.device import DeviceRecord, current_device, import_cupy
from minidl.cuda.launch import dry_run
from minidl.graph import Graph
from minidl.layer import Layer
from minidl.memory import record as walk
from minidl.precision import float32
from minidl.profile.inputs import noise, placed
from minidl.profile.timing import Budget, DeviceTimer, Timing, input_sets

WARM = Budget(samples=2, seconds=math.inf, sample_ms=8.0)  # busy for so long, the chip runs at the clock it can keep
QUICK = Budget(samples=3, seconds=math.inf, sample_ms=0.6)
CAREFUL = Budget(samples=2, seconds=math.inf, sample_ms=1.0)
FINALISTS, TURNS = 3, 5
GAIN = 0.02  # what is faster by less is as good
MOST_SETS = 8
# By how much results of two kernels may differ, of the largest value: they sum in another order, and round once.
AGREE = {"fp32": 2e-4, "tf32x3": 2e-4, "tf32": 2e-3, "bf16": 2.0**-7, "fp16": 2.0**-9}
CUT = 2.0**-23  # of a sum of float32, what matrix units cut off with each step of products that they add, at most

Row = dict[str, Any]
Draw = Callable[[Sequence[int], Any], Any]


def of_network(graph: Graph, batch: int, precision: str, device: DeviceRecord) -> Counter[Question]:
    """What a training step of a network asks, and how often, found by walking it on shapes; the graph is used up."""
    with asked() as heard:
        walk(graph, batch, precision=precision, device=device)
    return Counter(heard)


def of_layer(layer: Layer, shape: Sequence[int], precision: str, device: DeviceRecord) -> Counter[Question]:
    """What the passes of one layer ask on an input of this shape; the layer is used up."""
    with dry_run(device), asked() as heard:
        layer.to("cuda", precision)
        y = layer.forward(empty(shape, layer.precision.storage))
        layer.backward(empty(y.shape, y.dtype))
    return Counter(heard)


def variants(questions: Iterable[Question], device: DeviceRecord) -> list[Variant]:
    """Every kernel that candidates for these questions launch, as `minidl.cuda.nvrtc.compile_all` takes them."""

    def run_all() -> None:
        for question in questions:
            (call,) = _calls(question, empty, 1)
            for choice in options(question, device):
                with kernel(choice):
                    call()

    return kernels_of(run_all, device)


def _calls(question: Question, draw: Draw, sets: int) -> list[Callable[[], Any]]:
    """The question on so many sets of operands."""
    which, conv, code, tf32 = question
    storage = STORAGE[code]
    places = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups")} | {"tf32": tf32}
    w_shape = conv.out_channels, *conv.kernel, conv.channels // conv.groups
    if which == "backward_weight":

        def weight(dy: Any, x: Any, out: Any) -> Any:
            conv2d_backward_weight(dy, x, **places, out=out)
            return out

        shapes = conv.y_shape, conv.x_shape
        return [partial(weight, *(draw(s, storage) for s in shapes), empty(w_shape, float32)) for _ in range(sets)]
    # Filters of a fully connected layer are most of what is read, and come from memory in a network.
    ws = [draw(w_shape, storage) for _ in range(sets if _connected(conv) else 1)]
    ws = [ws[i % len(ws)] for i in range(sets)]
    if which == "forward":
        return [partial(conv2d, draw(conv.x_shape, storage), w, **places) for w in ws]
    return [partial(conv2d_backward_data, draw(conv.y_shape, storage), w, conv.x_shape, **places) for w in ws]


def _connected(conv: Convolution) -> bool:
    return conv.height * conv.width == 1


class DeviceContest:
    """Candidates for one question, ready to run on CuPy's current device, on random operands."""

    def __init__(self, question: Question):
        conv = question.conv
        itemsize = STORAGE[question.code].itemsize
        moved = itemsize * (math.prod(conv.x_shape) + math.prod(conv.y_shape))
        if _connected(conv):
            moved += itemsize * math.prod(conv.kernel) * conv.channels * conv.out_channels // conv.groups
        sets = min(MOST_SETS, input_sets(moved, current_device().l2_bytes))
        self._calls = _calls(question, _random, sets)
        self._timer = DeviceTimer()
        with kernel(options(question, current_device())[0]):
            self._expected = cast(self._calls[0](), float32)
        self._largest = float(abs(self._expected).max())

    def time(self, choice: Choice, budget: Budget) -> Timing:
        """Milliseconds of a call."""
        with kernel(choice):
            return self._timer.replayed(self._calls, budget)

    def error(self, choice: Choice) -> float:
        """How far its result is from that of the first candidate, of the largest value."""
        with kernel(choice):
            found = cast(self._calls[0](), float32)
        return float(import_cupy().abs(found - self._expected).max()) / self._largest


_drawn = itertools.count()


def _random(shape: Sequence[int], dtype: Any) -> Any:
    """Normal values, other ones each time."""
    return noise(cuda, shape, dtype, next(_drawn), placed(cuda))


def race(
    choices: Sequence[Choice], time: Callable[[Choice, Budget], Timing]
) -> tuple[Choice, dict[Choice, float], float]:
    """(the fastest, milliseconds of each, spread of how much it gains). The first wins where it is about as fast."""
    default = choices[0]
    time(default, WARM)
    times = {choice: time(choice, QUICK).ms for choice in choices}
    ranked = sorted(choices, key=times.__getitem__)
    finalists = list(dict.fromkeys([default, *ranked[:FINALISTS]]))
    turns = []
    for turn in range(TURNS):
        order = finalists if turn % 2 == 0 else finalists[::-1]
        turns.append({choice: time(choice, CAREFUL).ms for choice in order})
    # Clocks drift by more than candidates differ: each is held against the default of its own turn.
    ratios = {choice: [turn[choice] / turn[default] for turn in turns] for choice in finalists}
    ratio = {choice: statistics.median(taken) for choice, taken in ratios.items()}
    best = min(finalists, key=ratio.__getitem__)
    if ratio[best] >= 1 - GAIN:
        best = default
    base = statistics.median(turn[default] for turn in turns)
    return best, times | {choice: base * ratio[choice] for choice in finalists}, Timing(tuple(ratios[best])).spread


def agreement(question: Question, choices: Sequence[Choice]) -> float:
    """By how much results of these kernels may differ, of the largest value.

    The sum of a weight gradient over millions of pixels loses more than the rounding of its parts: 4e-4 where 110,000
    are one sum (3x3 64-64 on 64 images of 224x224 pixels in bfloat16).
    """
    which, conv, code, tf32 = question
    if which != "backward_weight":
        return AGREE[question_record(question)["dtype"]]
    if not (code or tf32):
        return AGREE["fp32"]
    longest = max((math.prod(split[2:]) / math.prod(split[:2]) for *_, split in choices if split), default=0.0)
    steps = conv.pixels * min(longest, 1.0) / (16 if code else 8)
    return AGREE["tf32" if tf32 == 1 else "fp32"] + CUT * steps


def answer(question: Question, choices: Sequence[Choice], contest: DeviceContest) -> Row:
    """The row of a table: the question, the choice, and what all candidates took.

    Raises:
        RuntimeError: when a candidate gives another result, which is an error of its kernel.
    """
    record = question_record(question)
    bound = agreement(question, choices)
    for choice in choices[1:]:
        error = contest.error(choice)
        if not error <= bound:
            raise RuntimeError(f"{choice} is {error:.1e} off {choices[0]} at {record}: a kernel gives wrong results")
    best, times, spread = race(choices, contest.time)
    return record | {
        "choice": choice_record(best), "ms": times[best], "spread": spread, "default": choice_record(choices[0]),
        "default_ms": times[choices[0]], "candidates": {str(choice): ms for choice, ms in times.items()},
    }  # fmt: skip


def tune(
    questions: Iterable[Question],
    device: DeviceRecord,
    rows: list[Row],
    save: Callable[[list[Row]], None],
    *,
    contest: Callable[[Question], DeviceContest] = DeviceContest,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Answer what ``rows`` do not answer yet, and save after each answer, so that a run cut off can go on.

    Args:
        rows: of an earlier run.
        save: is given all rows so far.
        contest: makes the contest of a question.
        progress: told what was found, line by line.

    Returns:
        A row for each of ``questions`` that more than one kernel can answer.
    """
    known = {question_of(row): row for row in rows}
    choices = {question: options(question, device) for question in questions}
    open_ones = [question for question in choices if question not in known and len(choices[question]) > 1]
    for i, question in enumerate(open_ones):
        row = known[question] = answer(question, choices[question], contest(question))
        save(list(known.values()))
        progress(f"{i + 1} of {len(open_ones)}: {describe(row)}")
    return [known[question] for question in choices if question in known]


def describe(row: Row) -> str:
    """What was found, in one line."""
    text = f"{case(row)} {row['pass']}: {row['default_ms'] * 1e3:.1f} us by {spelt(row['default'])}"
    if row["choice"] == row["default"]:
        return f"{text}, none faster"
    return f"{text}, {row['ms'] * 1e3:.1f} us by {spelt(row['choice'])}"


def case(row: Row) -> str:
    """A row's convolution in short: ``8x27x27 96-192 3x3/2``; padding that keeps the size is not told."""
    (n, h, w, c), (k, r, s, _), stride, dilation = (row[key] for key in ("x", "w", "stride", "dilation"))
    pair = lambda values: "x".join(map(str, dict.fromkeys(values)))  # noqa: E731
    text = f"{n}x{h}x{w} {c}-{k} {r}x{s}"
    text += f"/{pair(stride)}" if max(stride) > 1 else ""
    text += f" dilated {pair(dilation)}" if max(dilation) > 1 else ""
    usual = [d * (size // 2) for d, size in zip(dilation, (r, s), strict=True)]
    text += f" padded {pair(row['padding'])}" if row["padding"] != usual else ""
    return text + (f" {row['groups']} groups" if row["groups"] > 1 else "")


def spelt(choice: Sequence[Any]) -> str:
    """A choice as it stands in a row, in words."""
    family, tile, split = choice
    return str(Choice(family, tile, tuple(split)))
