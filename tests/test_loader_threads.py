"""Laws of the loader's threads: bounded, in order, ended with their loop; copies run beside the step before."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from dataclasses import replace

import numpy as np
import pytest

from minidl import cpu
from minidl.data import ArrayDataset, Loader
from minidl.precision import bfloat16, float16, float32
from tests.test_data import AUGMENT, assert_same_batches, epoch_of, numbered


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("minidl-loader")]


class Counting:
    """Counts its items and, from item ``fail`` on, raises."""

    def __init__(self, count: int, fail: int | None = None, delay: float = 0.0):
        self.count, self.fail, self.delay, self.fetched = count, fail, delay, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.fetched += 1
        time.sleep(self.delay)
        if self.fail is not None and index >= self.fail:
            raise OSError(f"cannot decode image {index}")
        return np.full((2, 2, 1), index, np.float32), index


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("transfer", [None, np.copy])
def test_an_exception_arrives_in_order_with_its_traceback(workers, transfer):
    loader = Loader(Counting(20, fail=13), 4, shuffle=False, workers=workers, transfer=transfer)
    seen = []
    with pytest.raises(OSError, match="cannot decode image 13") as caught:
        for batch in loader:
            seen.append(batch.first_sample)
    assert seen == [0, 4, 8]
    assert any(frame.name == "__getitem__" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert caught.value.__notes__ == ["Loader: it was item 13 of the data set"]
    assert not loader_threads()


@pytest.mark.parametrize("item", [None, (np.zeros((2, 2, 1), np.float32),), {"image": 1, "label": 2}])
def test_a_later_item_that_is_no_pair_is_named(item):
    items = [(np.zeros((2, 2, 1), np.float32), 0)] * 3 + [item]
    with pytest.raises(TypeError, match=r"Loader: dataset\[3\] must be a pair \(image, label\), got "):
        list(Loader(items, 2, shuffle=False))


def test_prefetching_is_bounded():
    source = Counting(1000)
    iteration = iter(Loader(source, 10, shuffle=False, workers=1, prefetch=3))
    next(iteration)
    time.sleep(0.2)
    assert source.fetched <= 1 + 10 * (1 + 3)  # the first item is looked at once more by the constructor
    iteration.close()


def test_leaving_a_loop_ends_its_threads():
    for batch in Loader(Counting(1000, delay=0.001), 10, workers=2, prefetch=4):
        assert loader_threads() and len(batch.images) == 10
        break
    gc.collect()
    assert not loader_threads()


def test_one_iteration_at_a_time():
    loader = Loader(numbered(24), 5)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(RuntimeError, match="newer"):
        next(older)


def test_transfer_is_called_in_the_iterating_thread_images_first():
    calls = []

    def transfer(array):
        calls.append((threading.current_thread(), array.dtype))
        return array + array.dtype.type(1)

    plain = epoch_of(Loader(numbered(24), 5))
    moved = epoch_of(Loader(numbered(24), 5, transfer=transfer))
    for before, after in zip(plain, moved, strict=True):
        np.testing.assert_array_equal(after.images, before.images + 1)
        np.testing.assert_array_equal(after.labels, before.labels + 1)
    assert calls == [(threading.current_thread(), dtype) for _ in plain for dtype in (np.float32, np.int32)]


def test_transfer_runs_at_most_one_batch_ahead():
    moved = []
    loader = Loader(numbered(40), 4, shuffle=False, transfer=lambda array: moved.append(array) or array)
    ahead = []
    for handed_out, _ in enumerate(loader, 1):
        ahead.append(len(moved) // 2 - handed_out)
        time.sleep(0.01)
    assert set(ahead) == {0, 1} and ahead[-1] == 0


class Copying:
    """A transfer whose arrays hold their values only after `wait`, and that keeps a log."""

    def __init__(self):
        self.log, self.pending = [], []

    def start(self, array):
        self.log.append("start")
        self.pending.append((out := np.zeros_like(array), array))
        return out

    def wait(self):
        if self.pending:
            self.log.append("wait")
        while self.pending:
            out, array = self.pending.pop()
            out[...] = array

    def __call__(self, array):
        out = self.start(array)
        self.wait()
        return out


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transfer_with_start_and_wait_runs_beside_the_step(workers):
    expected = epoch_of(Loader(numbered(24), 5, workers=workers))
    transfer, found, ahead = Copying(), [], []
    for batch in Loader(numbered(24), 5, workers=workers, transfer=transfer):
        found.append(replace(batch, images=batch.images.copy(), labels=batch.labels.copy()))
        ahead.append(len(transfer.pending))  # images and labels that the step does not wait for
        time.sleep(0.01)
    assert_same_batches(found, expected)
    assert set(ahead) == ({0} if workers == 0 else {0, 2}) and not transfer.pending
    assert transfer.log == (["start", "start", "wait"] * len(expected))


def test_a_loop_left_early_waits_for_what_it_started():
    transfer = Copying()
    batches = iter(Loader(numbered(24), 5, workers=2, transfer=transfer))
    next(batches)
    time.sleep(0.05)
    next(batches)
    assert transfer.pending
    batches.close()
    assert not transfer.pending


@pytest.mark.parametrize("transfer", [None, np.copy, Copying()], ids=["none", "copy", "beside"])
@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=str)
def test_images_normalised_after_their_transfer_have_the_bits_of_the_workers(dtype, transfer):
    images = np.random.default_rng(3).integers(0, 256, (20, 5, 4, 3)).astype(np.uint8)
    options = {"mean": (0.2, 0.4, 0.6), "std": (0.3, 0.2, 0.1), "dtype": dtype, "augment": AUGMENT}
    dataset = ArrayDataset(images, np.arange(20), 20)
    expected = epoch_of(Loader(dataset, 6, **options))
    seen = []

    def normalise(images, scale, shift, dtype):
        seen.append(images.dtype)
        return cpu.normalise(images, scale, shift, dtype)

    assert_same_batches(epoch_of(Loader(dataset, 6, transfer=transfer, normalise=normalise, **options)), expected)
    assert seen == [np.uint8] * 4
