"""The distributed runtime without MPI: one rank alone, what ranks compare, how a failure is worded, who gets a core."""

from __future__ import annotations

import importlib
import pickle
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minidl import backend, launch
from minidl.dist import (
    SOLO,
    init,
    launched_size,
    mpiexec,
    require_same,
    require_same_arrays,
    world,
)
from minidl.dist.agree import on_rank_0, rank_list, together
from minidl.dist.doctor import facts
from minidl.dist.nccl import refuse_shared_devices
from minidl.dist.threads import Host, available_cores, cap_threads, count_sharing, this_host
from minidl.precision import bfloat16
from tests.dist.laws import CommunicatorLaws

world_module = importlib.import_module("minidl.dist.world")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """As if no launcher had started the tests, and nobody had called init."""
    for variable in world_module._SIZE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(world_module, "_world", SOLO)
    monkeypatch.setattr(world_module, "_device", None)


class TestSolo(CommunicatorLaws):
    """One rank obeys the same laws as many."""

    comm = SOLO

    @pytest.fixture(autouse=True)
    def table(self, ops):
        self.ops = ops


def test_without_a_launcher_there_is_one_rank_and_no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert world() is SOLO and launched_size() == 1
    assert init() is SOLO and init("cpu") is SOLO and init("cpu") is SOLO and init("auto") is SOLO
    assert init("cuda") is SOLO, "nothing was joined, so one rank alone may change its mind"


@pytest.mark.parametrize("variable", world_module._SIZE_VARIABLES)
def test_a_launcher_without_mpi4py_is_an_error_and_not_many_solos(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    assert init() is SOLO
    monkeypatch.setenv(variable, "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"one of 4 ranks.*minidl\[mpi\]"):
        init("cpu")
    assert world() is SOLO


def test_init_refuses_other_devices():
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        init("gpu")


class FakeCommunicator:
    """One of several ranks, whose partners hold given values: `share` answers from a script."""

    def __init__(self, *rounds):
        self.rounds, self.rank = list(rounds), 0

    def share(self, value, name=""):
        answer = [value, *self.rounds.pop(0)]
        return answer


def digest_of(entries):
    seen = []

    class Ear:
        def share(self, value, name=""):
            seen.append(value)
            return [value]

    require_same(Ear(), "", entries)
    return seen[0]


def test_equal_entries_cost_one_exchange():
    entries = ["a", "b"]
    comm = FakeCommunicator([digest_of(entries)] * 2)
    require_same(comm, "plan", entries)
    assert comm.rounds == []


@pytest.mark.parametrize(
    "mine, theirs, message",
    [
        (["a", "b"], ["a", "c"], "first in entry 1: on ranks 0, 2: b; on rank 1: c"),
        (["a"], ["a", "c"], "first in entry 1: on ranks 0, 2: no such entry; on rank 1: c"),
        ([], ["a"], "first in entry 0: on ranks 0, 2: no such entry; on rank 1: a"),
        (["a\nb"], ["a", "b"], "first in entry 0: on ranks 0, 2: a\nb; on rank 1: a"),
    ],
)
def test_the_first_differing_entry_is_named_with_its_ranks(mine, theirs, message):
    comm = FakeCommunicator([digest_of(theirs), digest_of(mine)], [theirs, mine])
    with pytest.raises(ValueError, match="^ranks differ in plan, ") as error:
        require_same(comm, "plan", mine)
    assert str(error.value).endswith(message)


def test_of_long_entries_the_part_that_differs_is_told():
    long = "train_loader seed 0, samples {}, shuffle True, " + ", ".join(f"scale {i}" for i in range(20))
    mine, theirs = [long.format(16)], [long.format(17)]
    comm = FakeCommunicator([digest_of(theirs), digest_of(mine)], [theirs, mine])
    with pytest.raises(ValueError) as error:
        require_same(comm, "plan", mine, "make them equal")
    held = "on ranks 0, 2: train_loader ... samples 16 ...; on rank 1: train_loader ... samples 17 ..."
    assert str(error.value) == f"ranks differ in plan, first in entry 0: {held}; make them equal"
    ends = ["first " + 50 * "same, " + end for end in ("a", "a, b", "c")]
    for other in ends[1:]:
        comm = FakeCommunicator([digest_of([other]), digest_of([ends[0]])], [[other], [ends[0]]])
        with pytest.raises(ValueError, match=f"on rank 1: first ... {other.rpartition('same, ')[2]}$"):
            require_same(comm, "plan", [ends[0]])


@pytest.mark.parametrize(
    "other",
    [np.array([1.0, 2.0]), np.array([[1, 2]], "float32"), np.array([1, np.nextafter(np.float32(2), 3)], "float32")],
)
def test_arrays_are_compared_by_dtype_shape_and_bits(other, cpu_ops):
    def prints(array):
        heard = []

        class Ear(FakeCommunicator):
            def share(self, value, name=""):
                heard.append(value)
                return [value, b""] if isinstance(value, bytes) else [value, []]

        with pytest.raises(ValueError):
            require_same_arrays(Ear(), "", {"same": np.zeros(3, bfloat16), "w": array})
        return heard

    mine = np.array([1, 2], "float32")
    digest, entries = prints(other)
    with pytest.raises(ValueError, match="ranks differ in weights, first in entry 1: on rank 0: w float32"):
        pairs = [("same", np.zeros(3, bfloat16)), ("w", mine)]
        require_same_arrays(FakeCommunicator([digest], [entries]), "weights", pairs)
    again, same = prints(mine.copy())
    require_same_arrays(FakeCommunicator([again]), "weights", {"same": np.zeros(3, bfloat16), "w": mine})


def test_a_failure_elsewhere_is_raised_here_and_results_come_in_rank_order():
    assert together(FakeCommunicator([(1, None), (2, None)]), "counting", lambda: 0) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="^loading failed: on ranks 1-2: ImportError: none$"):
        together(FakeCommunicator([(None, "ImportError: none")] * 2), "loading", lambda: 0)
    with pytest.raises(RuntimeError, match="^dividing failed: on rank 0: ZeroDivisionError: ") as error:
        together(FakeCommunicator([(1, None)]), "dividing", lambda: 1 // 0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_what_rank_0_finds_or_raises_is_everybodys():
    first, second = (FakeCommunicator(*[[(None, None)]] * 2) for _ in range(2))
    first.size = second.size = 2
    second.rank, second.share = 1, lambda own, name="": [told, own]
    assert on_rank_0(SOLO, lambda: 3) == on_rank_0(first, lambda: 3) == 3
    told = 3, None
    assert on_rank_0(second, lambda: 1 // 0) == 3, "the others do not ask"
    with pytest.raises(OSError, match="^no such file$") as error:
        on_rank_0(first, lambda: (_ for _ in ()).throw(FileNotFoundError("no such file")))
    assert isinstance(error.value.__cause__, FileNotFoundError)
    told = None, (OSError, "no such file")
    with pytest.raises(OSError, match="^no such file$"):
        on_rank_0(second, lambda: 3)


def test_ranks_in_short():
    assert rank_list([]) == "" and rank_list([3]) == "3"
    assert rank_list([5, 0, 2, 1, 7, 8]) == "0-2, 5, 7-8"


def test_two_ranks_on_one_gpu_are_named():
    a, b, namesake = Host("a", "1"), Host("b", "2"), Host("a", "3")
    refuse_shared_devices([(a, "0:1"), (a, "0:2"), (b, "0:1"), (b, "0:2"), (namesake, "0:1")])
    with pytest.raises(RuntimeError, match="ranks 1, 3 share GPU 0:2 of a;"):
        refuse_shared_devices([(a, "0:1"), (a, "0:2"), (b, "0:1"), (a, "0:2")])


def test_hosts_of_one_name_are_told_apart_by_when_they_were_booted(monkeypatch):
    here = this_host()
    assert here == this_host() and str(here) == socket.gethostname()
    assert pickle.loads(pickle.dumps(here)) == here
    monkeypatch.setattr(Path, "read_text", lambda path: "another\n" if path.name == "boot_id" else "")
    there = this_host()
    assert there != here and there.name == here.name
    assert count_sharing([(here, frozenset([0])), (there, frozenset([0]))], 0) == 1


@pytest.mark.parametrize(
    ("hosts", "asked", "taken"),
    [
        ([2], "auto", "shm"),
        ([2, 2], "auto", "shm"),
        ([1, 1], "auto", "mpi"),  # nobody to share memory with
        ([2, 1], "auto", "mpi"),
        ([2, 2], "mpi", "mpi"),
        ([2, 1], "shm", "shm"),
    ],
)
def test_cpu_ranks_share_memory_where_every_host_has_as_many(hosts, asked, taken, monkeypatch):
    monkeypatch.setattr(world_module, "ShmCommunicator", lambda comm: "shm")
    comm = SimpleNamespace(local_size=hosts[0], share=lambda mine: [size for size in hosts for _ in range(size)])
    assert world_module._on_host(comm, asked) == ("shm" if taken == "shm" else comm)


def test_ranks_share_only_the_cores_they_have_in_common():
    every, one, two = frozenset(range(8)), frozenset([0, 1]), frozenset([2, 3])
    assert [count_sharing([("a", every)] * 4, rank) for rank in range(4)] == [4] * 4
    assert count_sharing([("a", one), ("a", two), ("a", one), ("b", one)], 0) == 2
    assert count_sharing([("a", one), ("a", two), ("a", every)], 1) == 2


def test_threads_are_capped_and_a_users_number_wins(monkeypatch):
    from threadpoolctl import threadpool_info, threadpool_limits

    backend.get_ops("cpu")
    with threadpool_limits(None):  # puts back what was there
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        assert cap_threads(1000) == 5
        monkeypatch.setenv("OMP_NUM_THREADS", " 4,2")  # of nested loops, too
        assert cap_threads(1000) == 4
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.setenv(variable, "")  # so that it is put back, too
            monkeypatch.delenv(variable)
        assert cap_threads(1000) == 1
        assert {pool["num_threads"] for pool in threadpool_info()} == {1}
    monkeypatch.delenv("OMP_NUM_THREADS")
    with threadpool_limits(None):
        assert cap_threads(1) == len(available_cores())


@pytest.mark.parametrize(
    "told, family",
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to ...", "Open MPI"),
        ("mpirun (Open MPI) 4.1.6", "Open MPI"),
        ("HYDRA build details:\n    Version:      5.0.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "Intel MPI"),
        ("something else", "unknown"),
    ],
)
def test_the_launcher_gets_the_flags_of_its_family(told, family, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "mpiexec"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = mpiexec.find()
    assert found.path == str(program) and found.family == family
    command = found.command(1000, ["python", "train.py", "--lr", "0.1"])
    assert command[0] == str(program) and command[-6:] == ["-n", "1000", "python", "train.py", "--lr", "0.1"]
    assert ("--oversubscribe" in command) == ("--bind-to" in command) == (family == "Open MPI")
    assert "--oversubscribe" not in found.command(1, ["python"])


def test_launching_without_mpi_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.main(["-n", "2", "train.py"]) == 2
    assert "minidl[mpi-wheel]" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        launch.main(["-n", "0", "train.py"])
    assert stop.value.code == 2


def test_launch_replaces_itself_by_mpiexec(monkeypatch, tmp_path):
    ran = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(mpiexec, "find", lambda: mpiexec.Launcher("/usr/bin/mpiexec", "MPICH", "5"))
    monkeypatch.setattr(launch.os, "execv", lambda path, command: ran.append(command))
    launch.main(["-n", "2", "train.py", "-n", "5", "--lr=1"])
    launch.main(["-n", "3", "-m", "package.train", "-m"])
    (tmp_path / "minidl").mkdir()  # as in a clone of the repository
    launch.main(["-n", "2", "minidl", "train", "--lr=1"])
    start = "/usr/bin/mpiexec", "-n"
    assert ran[0] == [*start, "2", sys.executable, "train.py", "-n", "5", "--lr=1"]
    assert ran[1] == [*start, "3", sys.executable, "-m", "package.train", "-m"]
    assert ran[2] == [*start, "2", sys.executable, "-m", "minidl", "train", "--lr=1"]


def test_facts_never_raise_and_every_failure_has_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    report = {fact.name: fact for fact in facts()}
    assert len(report) == len(facts())
    assert report["Python"].ok and report["NumPy"].ok and report["cores"].ok
    assert not report["thread pools"].ok and report["thread pools"].remedy
    assert all(fact.value for fact in report.values())
    assert all(fact.remedy for fact in report.values() if not fact.ok)


@pytest.mark.parametrize("capturing", [False, True])
def test_nccl_communicators_that_a_graph_holds_are_left_to_the_process(capturing, monkeypatch):
    """Destroying them under a live CUDA graph crashes; fakes stand for NCCL and for CUDA."""

    from minidl.dist import nccl

    calls = []

    class Engine:
        def destroy(self):
            calls.append("destroy")

        def allReduce(self, *arguments):
            calls.append("all_reduce")

    class Device:
        def __init__(self, index):
            pass

        def synchronize(self):
            calls.append("synchronize")

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    class Array(np.ndarray):
        data = SimpleNamespace(ptr=0)

    comm = nccl.NCCLCommunicator.__new__(nccl.NCCLCommunicator)
    comm._nccl = SimpleNamespace(NCCL_FLOAT32=7, NCCL_SUM=0)
    comm._ops, comm._device, comm.closed, comm._captured = SimpleNamespace(Array=np.ndarray), 0, False, False
    comm._control = SimpleNamespace(
        depart=lambda: calls.append("depart"), close=lambda: calls.append("close"), enter=lambda *call: call
    )
    comm._health, comm._groups, comm.links = threading.Lock(), [], None
    followed = []
    comm._followed = {nccl._INLINE: SimpleNamespace(add=lambda call, done: followed.append(call))}
    comm._inline, comm._messages = Engine(), Engine()
    comm._cuda = SimpleNamespace(
        Device=Device,
        Event=lambda disable_timing: SimpleNamespace(record=lambda stream: None),
        get_current_stream=lambda: SimpleNamespace(ptr=0),
        runtime=SimpleNamespace(streamIsCapturing=lambda stream: capturing),
    )
    comm.all_reduce(np.zeros(3, np.float32).view(Array))
    comm.close()
    comm.close()
    destroyed = [] if capturing else ["destroy", "destroy"]
    assert calls == ["all_reduce", "depart", "synchronize", *destroyed, "close"]
    assert len(followed) == (not capturing), "an event that was recorded in a capture may not be asked"


def test_exchanges_with_itself_or_with_nobody_are_refused():
    with pytest.raises(ValueError, match="start_exchange: sends must be by ranks from 0 to 0, without this one"):
        SOLO.start_exchange({0: np.zeros(3)}, {})
    SOLO.start_exchange({}, {}).wait()
    assert SOLO.split(3) is SOLO
