"""What every communicator must obey, whatever its engine and number of ranks; each law runs on all ranks at once.

A law calls its collectives first and asserts afterwards, so a rank where it fails does not leave the others waiting.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minidl.dist import Communicator, Work, require_same, require_same_arrays
from minidl.dist.communicator import place
from minidl.precision import bfloat16

SHAPES = [(), (1,), (0,), (7,), (3, 0, 5), (5, 13, 3), (70001,)]
SUMMED = ["float32", "float64", "int64", "int32"]
MOVED = [*SUMMED, "float16", "uint8", "bool"]


class CommunicatorLaws:
    """Subclasses set ``comm`` and the operation table ``ops`` whose arrays it sends."""

    comm: Communicator
    ops: ModuleType

    def make(self, shape: tuple[int, ...], dtype: Any, rank: int | None = None) -> np.ndarray:
        """The array of a rank (default: this one) on the host: small integers, so that every sum is exact."""
        rank = self.comm.rank if rank is None else rank
        values = np.random.default_rng(rank + 1).integers(0, 50, shape)
        return np.asarray(values).astype(dtype)

    def every(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The arrays of all ranks, (size, *shape)."""
        return np.stack([self.make(shape, dtype, rank) for rank in range(self.comm.size)])

    def send(self, host: np.ndarray) -> Any:
        return self.ops.from_host(host)

    def test_is_a_communicator(self):
        assert isinstance(self.comm, Communicator)
        assert 0 <= self.comm.rank < self.comm.size
        assert 0 <= self.comm.local_rank < self.comm.local_size <= self.comm.size

    def test_share_is_in_rank_order(self):
        assert self.comm.share({"rank": self.comm.rank}) == [{"rank": rank} for rank in range(self.comm.size)]

    @pytest.mark.parametrize("dtype", SUMMED)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_all_reduce_is_the_sum(self, shape, dtype):
        array = self.send(self.make(shape, dtype))
        self.comm.all_reduce(array)
        assert array.shape == shape and array.dtype == dtype
        np.testing.assert_array_equal(self.ops.to_host(array), self.every(shape, dtype).sum(0))

    @pytest.mark.parametrize("dtype", SUMMED)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_started_all_reduce_is_the_sum(self, shape, dtype):
        array = self.send(self.make(shape, dtype))
        work = self.comm.start_all_reduce(array)
        assert isinstance(work, Work)
        work.wait()
        work.wait()
        np.testing.assert_array_equal(self.ops.to_host(array), self.every(shape, dtype).sum(0))

    def test_sums_have_the_same_bits_on_every_rank(self):
        host = np.random.default_rng(self.comm.rank).standard_normal(10007).astype("float32")
        array = self.send(host)
        self.comm.all_reduce(array)
        total = self.ops.to_host(array)
        for other, start in zip(self.comm.share(total.tobytes()), self.comm.share(host), strict=True):
            assert other == total.tobytes()
            assert start.shape == total.shape
        assert np.abs(total - np.sum(self.comm.share(host), axis=0, dtype="float64")).max() < 1e-5

    @pytest.mark.parametrize("dtype", [*MOVED, bfloat16], ids=str)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_all_gather_is_in_rank_order(self, shape, dtype):
        out = self.comm.all_gather(self.send(self.make(shape, dtype)))
        assert isinstance(out, self.ops.Array)
        assert out.shape == (self.comm.size, *shape) and out.dtype == dtype
        np.testing.assert_array_equal(self.ops.to_host(out), self.every(shape, dtype))

    @pytest.mark.parametrize("dtype", [*MOVED, bfloat16], ids=str)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_broadcast_from_every_root(self, shape, dtype):
        for root in range(self.comm.size):
            array = self.send(self.make(shape, dtype))
            self.comm.broadcast(array, root)
            np.testing.assert_array_equal(self.ops.to_host(array), self.make(shape, dtype, root))

    def test_messages_may_be_awaited_in_any_order(self):
        arrays = [self.send(self.make((1 + 997 * (i % 5),), "float32") + np.float32(i)) for i in range(60)]
        works = [self.comm.start_all_reduce(array) for array in arrays]
        for i in np.random.default_rng(self.comm.rank).permutation(60):  # another order on every rank
            works[i].wait()
            expected = self.every((1 + 997 * (i % 5),), "float32").sum(0) + np.float32(i * self.comm.size)
            np.testing.assert_array_equal(self.ops.to_host(arrays[i]), expected)

    def test_messages_run_beside_other_collectives(self):
        started, works = [], []
        for i in range(30):
            started.append(self.send(self.make((40009,), "float32") * np.float32(i)))
            works.append(self.comm.start_all_reduce(started[-1]))
            inline = self.send(self.make((17,), "float64") + i)
            self.comm.all_reduce(inline)
            gathered = self.comm.all_gather(inline)
            total = self.every((17,), "float64").sum(0) + i * self.comm.size
            np.testing.assert_array_equal(self.ops.to_host(gathered), np.stack([total] * self.comm.size))
        for i, (array, work) in enumerate(zip(started, works, strict=True)):
            work.wait()
            np.testing.assert_array_equal(self.ops.to_host(array), self.every((40009,), "float32").sum(0) * i)

    def test_a_message_sees_what_was_enqueued_before_it(self):
        array = self.send(np.zeros(100003, "float32"))
        for value in range(20):
            self.ops.copy_into(array, self.send(np.full(100003, value, "float32")))
            self.comm.start_all_reduce(array).wait()
            np.testing.assert_array_equal(self.ops.to_host(array), np.float32(value * self.comm.size))

    @pytest.mark.parametrize("dtype", ["float32", "uint8", bfloat16], ids=str)
    @pytest.mark.parametrize("shape", [(1,), (3, 5), (70001,)])
    def test_exchanges_go_where_they_should(self, shape, dtype):
        """Each rank sends to all others what tells both of them; again with neighbours only, the last with nobody."""
        rank, size = self.comm.rank, self.comm.size
        for others in [
            set(range(size)) - {rank},
            {rank - 1, rank + 1} & set(range(size - 1)) if rank < size - 1 else (),
        ]:
            sends = {other: self.send(self.make(shape, dtype, 1 + rank * size + other)) for other in others}
            receives = {other: self.send(np.zeros(shape, dtype)) for other in others}
            self.comm.start_exchange(sends, receives, "halo").wait()
            for other, got in receives.items():
                np.testing.assert_array_equal(self.ops.to_host(got), self.make(shape, dtype, 1 + other * size + rank))

    @pytest.mark.parametrize("dtype", [*SUMMED, bfloat16], ids=str)
    @pytest.mark.parametrize("size", [0, 1, 7, 64, 70002])
    def test_sums_in_parts_given_to_all_are_the_sum(self, size, dtype):
        """Equal parts, nearly equal ones, and all of it on the last rank."""
        ranks, rank = self.comm.size, self.comm.rank
        for cuts in [[size * r // ranks for r in range(ranks + 1)], [*[0] * ranks, size]]:
            array, own = self.send(self.make((size,), dtype)), slice(cuts[rank], cuts[rank + 1])
            self.comm.start_reduce_scatter(array, cuts, name="conv1").wait()
            expected = self.every((size,), "float64").sum(0)
            np.testing.assert_array_equal(self.ops.to_host(array)[own].astype("float64"), expected[own])
            work = self.comm.start_all_gather(array, cuts)
            work.wait()
            work.wait()
            np.testing.assert_array_equal(self.ops.to_host(array).astype("float64"), expected)

    def test_refuses_cuts_that_give_no_parts(self):
        array, ranks = self.send(self.make((10,), "float32")), self.comm.size
        for call in (self.comm.start_reduce_scatter, self.comm.start_all_gather):
            for cuts in ([0] * ranks, [0] * ranks + [9], [1] + [10] * ranks, [0, 10, *[5] * (ranks - 1), 10]):
                with pytest.raises(ValueError, match=r"cuts must be \d+ ascending places of a one-dimensional array"):
                    call(array, cuts)

    def test_an_exchange_sees_what_was_enqueued_before_it_and_runs_beside_other_calls(self):
        rank, size = self.comm.rank, self.comm.size
        partners = {rank ^ 1} & set(range(size))
        given, got = (self.send(np.zeros(10007, "float32")) for _ in range(2))
        for value in range(10):
            self.ops.copy_into(given, self.send(np.full(10007, 10 * rank + value, "float32")))
            work = self.comm.start_exchange(dict.fromkeys(partners, given), dict.fromkeys(partners, got))
            total = self.send(np.full(7, value, "float32"))
            self.comm.all_reduce(total)
            work.wait()
            np.testing.assert_array_equal(self.ops.to_host(total), np.float32(value * size))
            expected = 10 * (rank ^ 1) + value if partners else 0
            np.testing.assert_array_equal(self.ops.to_host(got), np.float32(expected))

    def test_groups_are_communicators_of_their_own(self):
        """Even ranks and odd ranks: other sums, other sizes, all collectives; neighbours in the group exchange."""
        rank, size = self.comm.rank, self.comm.size
        group = self.comm.split(rank % 2)
        members = list(range(rank % 2, size, 2))
        assert (group.rank, group.size) == (members.index(rank), len(members))
        assert 0 <= group.local_rank < group.local_size <= group.size and isinstance(group, Communicator)
        shape = (1000 + 10 * (rank % 2),)  # sizes of different groups need not agree
        total, started = (self.send(self.make(shape, "float32")) for _ in range(2))
        group.all_reduce(total)
        work = group.start_all_reduce(started, name="conv1")
        gathered = group.all_gather(self.send(self.make(shape, "uint8")))
        given = self.send(self.make(shape, "int64"))
        group.broadcast(given, group.size - 1)
        next_one = {(group.rank + 1) % group.size} - {group.rank}
        before = {(group.rank - 1) % group.size} - {group.rank}
        got = self.send(np.zeros(1, "float32"))
        halo = group.start_exchange(
            {other: self.send(np.full(1, rank, "float32")) for other in next_one}, {other: got for other in before}
        )
        arena = place(group, self.send(self.make((1000 + 80000 * (rank % 2),), "float32")))  # more memory than another
        group.all_reduce(arena)
        rounded = self.send(self.make(shape, bfloat16))
        group.all_reduce(rounded)
        told = group.share(rank)
        group.barrier()
        work.wait()
        halo.wait()
        expected = sum(self.make(shape, "float32", member) for member in members)
        np.testing.assert_array_equal(self.ops.to_host(total), expected)
        np.testing.assert_array_equal(self.ops.to_host(started), expected)
        np.testing.assert_array_equal(self.ops.to_host(rounded).astype("float32"), expected)
        expected = sum(self.make(arena.shape, "float32", member) for member in members)
        np.testing.assert_array_equal(self.ops.to_host(arena), expected)
        np.testing.assert_array_equal(
            self.ops.to_host(gathered), np.stack([self.make(shape, "uint8", member) for member in members])
        )
        np.testing.assert_array_equal(self.ops.to_host(given), self.make(shape, "int64", members[-1]))
        np.testing.assert_array_equal(self.ops.to_host(got), [members[group.rank - 1] if before else 0])
        assert told == members
        group.close()
        group.close()

    def test_groups_that_nobody_closes_end_with_the_others(self):
        group = self.comm.split(0)
        assert (group.rank, group.size) == (self.comm.rank, self.comm.size)
        group.start_all_reduce(self.send(self.make((301,), "float32")))

    def test_barrier_waits_for_all(self):
        for _ in range(3):
            self.comm.barrier()

    def test_views_of_an_arena_leave_their_neighbours_alone(self):
        arena = self.send(self.make((1000,), "float32"))
        self.comm.start_all_reduce(arena[128:512]).wait()
        expected = self.make((1000,), "float32")
        expected[128:512] = self.every((1000,), "float32").sum(0)[128:512]
        np.testing.assert_array_equal(self.ops.to_host(arena), expected)

    @pytest.mark.parametrize("dtype", SUMMED)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_placed_arrays_are_the_same_but_for_their_place(self, shape, dtype):
        array = place(self.comm, self.send(self.make(shape, dtype)))
        assert isinstance(array, self.ops.Array) and array.shape == shape and array.dtype == dtype
        np.testing.assert_array_equal(self.ops.to_host(array), self.make(shape, dtype))
        self.comm.start_all_reduce(array).wait()
        np.testing.assert_array_equal(self.ops.to_host(array), self.every(shape, dtype).sum(0))

    def test_slices_of_a_placed_arena_leave_their_neighbours_alone(self):
        arena, expected = place(self.comm, self.send(self.make((9000,), "float32"))), self.make((9000,), "float32")
        cuts = [0, 1, 64, 1000, 1001, 5000, 9000]
        works = [self.comm.start_all_reduce(arena[i:j]) for i, j in zip(cuts[1:-2], cuts[2:-1], strict=True)]
        for work in works:
            work.wait()
        expected[1:5000] = self.every((9000,), "float32").sum(0)[1:5000]
        np.testing.assert_array_equal(self.ops.to_host(arena), expected)

    def test_ranks_may_send_from_different_places(self):
        arena = place(self.comm, self.send(self.make((9000,), "float32")))
        for size in (9, 900):
            mine = [arena[:size], arena[size : 2 * size], self.send(self.ops.to_host(arena[:size]).copy())][
                self.comm.rank % 3
            ]
            expected = np.sum(self.comm.share(self.ops.to_host(mine).copy()), axis=0)
            self.comm.all_reduce(mine)
            np.testing.assert_array_equal(self.ops.to_host(mine), expected)

    @pytest.mark.parametrize("call", ["all_reduce", "start_all_reduce", "broadcast", "all_gather"])
    def test_refuses_what_it_cannot_send(self, call):
        with pytest.raises(ValueError, match=f"{call}: array must be dense"):
            getattr(self.comm, call)(self.send(self.make((4, 6), "float32"))[:, ::2])
        with pytest.raises(TypeError, match=f"{call}: array must be a NumPy or CuPy array, got list"):
            getattr(self.comm, call)([1.0, 2.0])
        with pytest.raises(TypeError, match=f"{call}: array must be"):
            getattr(self.comm, call)(np.float32(3))

    def test_refuses_exchanges_that_cannot_be(self):
        array = self.send(self.make((4, 6), "float32"))
        for other in (self.comm.rank, -1, self.comm.size):
            with pytest.raises(ValueError, match="start_exchange: sends must be by ranks from 0 to"):
                self.comm.start_exchange({other: array}, {})
            with pytest.raises(ValueError, match="start_exchange: receives must be by ranks from 0 to"):
                self.comm.start_exchange({}, {other: array})
        if self.comm.size > 1:
            with pytest.raises(ValueError, match="start_exchange: array must be dense"):
                self.comm.start_exchange({(self.comm.rank + 1) % self.comm.size: array[:, ::2]}, {})

    @pytest.mark.parametrize("dtype", ["float16", bfloat16], ids=str)
    def test_half_precision_is_summed_or_refused(self, dtype):
        array = self.send(self.make((301,), dtype))
        try:
            self.comm.all_reduce(array)
        except TypeError as error:
            assert (
                dtype == "float16"
                and self.comm.name in ("mpi", "shm", "staged", "cuda-mpi")
                and "all_reduce: array must be one of float32" in str(error)
            )
            return
        self.comm.start_all_reduce(half := self.send(self.make((302,), dtype))).wait()
        for found in (array, half):  # small integers are exact in both types
            expected = self.every(found.shape, "float32").sum(0)
            np.testing.assert_array_equal(self.ops.to_host(found).astype("float32"), expected)

    @pytest.mark.parametrize("size", [1, 5, 4099, 300007])
    def test_rounded_sums_keep_their_bound(self, size):
        """u (sum |g| + |sum g|) (1 + u) for values rounded on the way in and out; a rounding more for several hosts."""
        exact = np.random.default_rng(self.comm.rank).standard_normal(size).astype("float32")
        array = self.send(exact.astype(bfloat16))
        self.comm.all_reduce(array)
        found = self.ops.to_host(array).astype("float64")
        parts, hosts = np.stack(self.comm.share(exact)).astype("float64"), self.comm.size // self.comm.local_size
        roundings = self.comm.size if self.comm.name == "nccl" else min(hosts, 2)  # of sums, partial ones first
        u, absolute = 2.0**-8, np.abs(parts).sum(0)
        later = (roundings - 1) * absolute
        assert (np.abs(found - parts.sum(0)) <= u * (absolute + later + np.abs(parts.sum(0))) * (1 + 2 * u)).all()
        assert len(set(self.comm.share(self.ops.to_host(array).tobytes()))) == 1

    def test_refuses_a_root_that_is_no_rank(self):
        for root in (-1, self.comm.size):
            with pytest.raises(ValueError, match="root must be a rank from 0"):
                self.comm.broadcast(self.send(self.make((2,), "float32")), root)

    def test_equal_plans_and_weights_pass(self):
        require_same(self.comm, "plan", ["conv1.weight (64, 3, 7, 7)", "conv1.bias (64,)"])
        require_same_arrays(self.comm, "weights", {"a": self.send(np.arange(6.0)), "empty": self.send(np.zeros(0))})
        require_same(self.comm, "nothing", [])


def tried(comm, ops) -> tuple[dict[str, str], int]:
    """The laws that do not hold of ``comm``, with the first traceback of any rank, and how many cases were tried.

    All ranks try the same case at a time. Where one fails, the others are told, and all stay in step.
    """
    laws, failures, count = CommunicatorLaws(), {}, 0
    laws.comm, laws.ops = comm, ops
    for name in sorted(name for name in dir(laws) if name.startswith("test_")):
        for case in _cases(getattr(laws, name)):
            count += 1
            failure = None
            try:
                getattr(laws, name)(**case)
            except Exception:
                failure = traceback.format_exc()
            found = [text for text in comm.share(failure) if text is not None]
            if found:
                failures[f"{name} {case}"] = found[0]
    return failures, count


def _cases(law) -> Iterator[dict]:
    """The keyword arguments of every case that pytest would make of a parametrised function."""
    marks = [mark.args[:2] for mark in getattr(law, "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(values for _, values in marks)):
        yield dict(zip((name for name, _ in marks), values, strict=True))
