"""What the doctor finds between ranks: clocks that differ, ports that do not answer, wrong sums; and a real run."""

from __future__ import annotations

import argparse
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from minidl.bench import doctor
from minidl.dist import SOLO
from minidl.profile.cluster import sums_of
from minidl.profile.results import load
from tests.dist import job
from tests.threads import on_threads


def test_clocks_that_are_ahead_are_found(monkeypatch):
    ahead = [0.0, 2.5, -40.0]
    own = threading.local()
    true = doctor.time.time

    def program(comm):
        own.offset = ahead[comm.rank]
        return doctor.clock_offsets(comm)

    monkeypatch.setattr(doctor.time, "time", lambda: true() + own.offset)
    for found in on_threads(3, program):
        np.testing.assert_allclose(found, ahead, atol=0.2)


def test_a_rank_that_cannot_reach_the_first_is_named(monkeypatch):
    assert on_threads(3, doctor.unreachable) == [[]] * 3
    monkeypatch.setattr(doctor, "_SECONDS", 0.5)
    for found in on_threads(3, lambda comm: doctor.unreachable(comm, "nobody.invalid")):
        assert [rank for rank, _ in found] == [1, 2] and "nobody.invalid, port " in found[0][1]


@pytest.mark.parametrize("wrong", ["all_reduce", "start_all_reduce"])
def test_wrong_sums_are_noticed(wrong, monkeypatch):
    assert doctor.sums_are_right(SOLO, "cpu", (1, 1000))
    honest = getattr(type(SOLO), wrong)

    def spoilt(self, array, *rest):
        if array.size == 1000:
            array[-1] += 1
        return honest(self, array, *rest)

    monkeypatch.setattr(type(SOLO), wrong, spoilt)
    assert doctor.sums_are_right(SOLO, "cpu", (1,))
    assert not doctor.sums_are_right(SOLO, "cpu", (1, 1000))


def doctor_on(monkeypatch, launched, rank, problems, *options):
    """Its status on one of so many ranks, where so much is wrong with the hosts."""
    comm = SimpleNamespace(rank=rank, size=launched, name="played", barrier=lambda: None)
    monkeypatch.setattr(doctor.dist, "launched_size", lambda: launched)
    monkeypatch.setattr(doctor, "join", lambda device: comm)
    monkeypatch.setattr(doctor, "_show_facts", lambda: print("facts"))
    for part, told in (("_ranks", []), ("_hosts", problems), ("_sums", [])):
        monkeypatch.setattr(doctor, part, lambda *_, told=told: told)
    monkeypatch.setattr(doctor, "sweep", lambda *_: {"engine": "played"})
    monkeypatch.setattr(doctor, "_show_sweep", lambda found: print("swept", found["engine"]))
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(["--device", "cpu", *options]))


@pytest.mark.parametrize("problems", [[], ["a clock"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_speaks_and_all_end_with_the_same_status(rank, problems, tmp_path, capsys, monkeypatch):
    path = tmp_path / "links.json"
    assert doctor_on(monkeypatch, 2, rank, problems, "--json", str(path)) == len(problems)
    verdict = [f"-- {text}" for text in problems] or ["all is well between the ranks"]
    assert capsys.readouterr().out.splitlines() == (["facts", *verdict, "swept played"] if rank == 0 else [])
    assert path.exists() == (rank == 0)
    if rank == 0:
        assert load(path)["ceilings"] == {"all_reduce": {"engine": "played"}}


def test_on_one_rank_it_shows_the_machine_and_has_nothing_to_keep(capsys, monkeypatch):
    assert doctor_on(monkeypatch, 1, 0, ["never asked"]) == 0
    assert capsys.readouterr().out == "facts\n"
    with pytest.raises(ValueError, match="--json must be left out on one rank"):
        doctor_on(monkeypatch, 1, 0, [], "--json", "links.json")
    assert not capsys.readouterr().out


@pytest.mark.mpi
def test_it_looks_at_ranks_and_keeps_what_the_simulator_reads(tmp_path):
    path = tmp_path / "links.json"
    program = "from minidl.profile import all_reduce as a; a.SIZES, a.SAMPLES = a.SIZES[:3], 2; import sys; "
    program += f"from minidl.cli import main; sys.exit(main(['doctor', '--device', 'cpu', '--json', {str(path)!r}]))"
    done = job.run_program(["-c", program], 2, tmp_path)
    assert done.status == 0, done.output
    assert "2 ranks joined by shm" in done.output and "all is well between the ranks" in done.output
    found = sums_of(load(path), str(path))
    assert found.ranks == 2 and list(found.engines) == ["shm"]
    assert len(found.points()) == 3 and all(ms > 0 for _, ms in found.points())
