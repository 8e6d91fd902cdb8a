"""Laws of checkpoints: what comes back is what went in, bit for bit, or an error that says why not."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl import checkpoint
from minidl.precision import bfloat16

STATE = {"epoch": 3, "loader": {"seed": 2**63, "shuffle": True}, "losses": [0.1, 1e-300, float("inf")], "note": "ü\n"}


def example(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "layer1.0.conv1.weight": rng.standard_normal((4, 3, 3, 2)).astype(np.float32),
        "momentum": rng.standard_normal(1000).astype(np.float32),
        "step": np.array(seed, np.int64),
        "empty": np.zeros((0, 3), np.float16),
        "mask": np.array([True, False]),
    }


def assert_same_bits(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert actual[name].tobytes() == tensor.tobytes(), name


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# ---- round trip --------------------------------------------------------------------------------------------------


def test_round_trip(path):
    checkpoint.save(path, example(), STATE)
    tensors, state = checkpoint.load(path)
    assert_same_bits(tensors, example())
    assert state == STATE


@pytest.mark.parametrize("dtype", checkpoint._DTYPES)
def test_every_bit_pattern_survives(path, dtype):
    """All patterns of each 16-bit type, NaN payloads and signed zeros included, and 128 KiB of the others."""
    dtype = bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    words = np.arange(2**16, dtype=np.uint16)
    tensor = words % 2 == 1 if dtype.kind == "b" else np.random.default_rng(0).permutation(words).view(dtype)
    checkpoint.save(path, {"x": tensor}, {})
    assert_same_bits(checkpoint.load(path)[0], {"x": tensor})


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::-1],
        lambda x: x[:, 1::2],
        lambda x: x[1:2],
        lambda x: np.broadcast_to(x[0], x.shape),
        lambda x: np.asfortranarray(x),
        lambda x: x.astype(x.dtype.newbyteorder(">")),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_strides_and_byte_order_do_not_change_values(path, view, dtype):
    tensor = view(np.arange(35, dtype=dtype).reshape(5, 7))
    checkpoint.save(path, {"x": tensor}, {})
    np.testing.assert_array_equal(checkpoint.load(path)[0]["x"], tensor)


def test_transposed_bfloat16(path):
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4).astype(bfloat16).T
    checkpoint.save(path, {"x": tensor}, {})
    np.testing.assert_array_equal(checkpoint.load(path)[0]["x"], tensor)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(state=st.dictionaries(st.text(), json_values, max_size=4))
@settings(max_examples=30, deadline=None)
def test_any_json_state_survives(tmp_path_factory, state):
    path = tmp_path_factory.getbasetemp() / "state.safetensors"
    checkpoint.save(path, {}, state)
    assert checkpoint.load(path) == ({}, state)


def test_other_tools_can_read_the_tensors(path):
    checkpoint.save(path, example(), STATE)
    assert_same_bits(safetensors.numpy.load_file(path), example())


def test_loaded_tensors_are_writable_and_survive_the_file(path):
    checkpoint.save(path, example(), {})
    tensors, _ = checkpoint.load(path)
    checkpoint.save(path, example(1), {})
    path.unlink()
    assert_same_bits(tensors, example())
    tensors["momentum"][:] = 0


@pytest.mark.parametrize(
    "tensors, state, words",
    [
        ({"a": [1.0]}, {}, "tensor 'a' must be a NumPy array, got list"),
        ({"a": np.zeros(2, complex)}, {}, "tensor 'a'"),
        ({"a": np.array(["x"])}, {}, "tensor 'a'"),
        ({}, {"a": {"b": [1, (2, 3)]}}, r"state\['a'\]\['b'\]\[1\] must be .*, got tuple"),
        ({}, {"a": {1: 2}}, r"key 1 of state\['a'\]"),
        ({}, {"a": np.float32(1)}, r"state\['a'\] must be .*, got float32"),
    ],
)
def test_what_cannot_be_given_back_is_refused_before_anything_is_written(path, tensors, state, words):
    with pytest.raises(TypeError, match=words):
        checkpoint.save(path, tensors, state)
    assert not list(path.parent.iterdir())


# ---- damaged and foreign files -----------------------------------------------------------------------------------


def test_missing_file(path):
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        checkpoint.load(path)


def test_truncation_at_any_length_is_noticed(path):
    checkpoint.save(path, example(), STATE)
    whole = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="model.safetensors"):
            checkpoint.load(path)


def test_a_changed_byte_anywhere_is_noticed(path, rng):
    """Every byte of the header and some of the tensors, one at a time."""
    checkpoint.save(path, {name: tensor for name, tensor in example().items() if name != "momentum"}, STATE)
    whole = path.read_bytes()
    reference = checkpoint.load(path)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            tensors, state = checkpoint.load(path)
        except ValueError as error:
            assert "model.safetensors" in str(error)
            continue
        # The order of the header's entries or white space may change without changing what is said.
        assert_same_bits(tensors, reference[0])
        assert state == reference[1]


def test_changed_tensor_bytes_are_damage(path):
    checkpoint.save(path, example(), STATE)
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="damaged.*SHA-256"):
        checkpoint.load(path)


def test_foreign_file(path):
    for metadata in (None, {"format": "pt"}):
        safetensors.numpy.save_file(example(), path, metadata)
        with pytest.raises(ValueError, match="not a checkpoint of minidl"):
            checkpoint.load(path)
    path.write_bytes(np.random.default_rng(0).bytes(500))
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        checkpoint.load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(FileNotFoundError):
        checkpoint.load(path)


def test_newer_schema(path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SCHEMA", 2)
    checkpoint.save(path, example(), STATE)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="schema 2, this minidl reads up to 1"):
        checkpoint.load(path)


# ---- atomic writing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["serialize", "os.fsync", "os.replace"])
def test_a_failing_writer_leaves_the_earlier_checkpoint(path, monkeypatch, failing):
    checkpoint.save(path, example(), STATE)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"minidl.checkpoint.{failing}", fail)
    with pytest.raises(OSError):
        checkpoint.save(path, example(1), {})
    monkeypatch.undo()
    tensors, state = checkpoint.load(path)
    assert_same_bits(tensors, example())
    assert state == STATE and list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_earlier_checkpoint(path):
    """The system refuses to write on in the middle of the file."""
    checkpoint.save(path, example(), STATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="partial|large"):
            checkpoint.save(path, example(1), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same_bits(checkpoint.load(path)[0], example())
    assert list(path.parent.iterdir()) == [path]


WRITER = """
import sys, numpy as np
from minidl import checkpoint
print("ready", flush=True)
for seed in range(1, 10**9):
    checkpoint.save(sys.argv[1], {"x": np.full(2_000_000, seed, np.float32)}, {"seed": seed})
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.029, 0.047])
def test_a_killed_writer_leaves_a_complete_checkpoint(path, delay):
    """SIGKILL at an arbitrary moment of a process that does nothing but write."""
    checkpoint.save(path, {"x": np.zeros(5, np.float32)}, {"seed": 0})
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"ready\n"
        try:
            writer.wait(timeout=0.1 + delay)
        except subprocess.TimeoutExpired:
            os.kill(writer.pid, signal.SIGKILL)
    tensors, state = checkpoint.load(path)
    assert writer.returncode == -signal.SIGKILL
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f".{path.name}.partial"}
    assert (tensors["x"] == state["seed"]).all()
    checkpoint.save(path, example(), STATE)  # what the killed writer left behind is in nobody's way
    assert_same_bits(checkpoint.load(path)[0], example())


def test_folders_are_created_and_permissions_are_the_usual_ones(tmp_path):
    path = tmp_path / "a" / "b" / "c.safetensors"
    checkpoint.save(path, {}, {})
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert checkpoint.load(path) == ({}, {})


# ---- folders of checkpoints --------------------------------------------------------------------------------------


def test_latest_is_the_highest_step_whatever_else_lies_there(tmp_path):
    for empty in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint in {empty}"):
            checkpoint.latest(empty)
    for step in (9, 10, 2_000_000_000, 100):
        checkpoint.save(checkpoint.step_path(tmp_path, step), {}, {"step": step})
    for name in ("best.safetensors", "checkpoint-x.safetensors", ".checkpoint-3000000000.safetensors.partial"):
        (tmp_path / name).touch()
    assert checkpoint.load(checkpoint.latest(tmp_path))[1] == {"step": 2_000_000_000}


def test_prune_keeps_the_newest(tmp_path):
    for step in (9, 10, 11, 100):
        checkpoint.save(checkpoint.step_path(tmp_path, step), {}, {})
    (tmp_path / "best.safetensors").touch()
    (tmp_path / ".checkpoint-00000012.safetensors.partial").touch()
    removed = checkpoint.prune(tmp_path, 2)
    assert removed == [checkpoint.step_path(tmp_path, step) for step in (9, 10)]
    left = [tmp_path / "best.safetensors", *(checkpoint.step_path(tmp_path, step) for step in (11, 100))]
    assert sorted(tmp_path.iterdir()) == left
    assert checkpoint.prune(tmp_path, 5) == []
    with pytest.raises(ValueError, match="keep"):
        checkpoint.prune(tmp_path, 0)


# ---- matching ----------------------------------------------------------------------------------------------------


def test_set_aside_moves_the_later_checkpoints_and_nothing_else(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(checkpoint.step_path(tmp_path, step), example(step), STATE)
    (tmp_path / "metrics.csv").write_text("first")
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.set_aside(tmp_path, 3) is None and not (tmp_path / checkpoint.PREVIOUS).exists()
    previous = checkpoint.set_aside(tmp_path, 1, ["metrics.csv", "absent.csv"])
    assert previous == tmp_path / checkpoint.PREVIOUS
    assert sorted(path.name for path in previous.iterdir()) == [
        "checkpoint-00000002.safetensors", "checkpoint-00000003.safetensors", "metrics.csv",
    ]  # fmt: skip
    assert checkpoint.latest(tmp_path) == checkpoint.step_path(tmp_path, 1)
    assert_same_bits(checkpoint.load(checkpoint.latest(previous))[0], example(3))
    assert (tmp_path / "metrics.csv").read_text() == "first" and (tmp_path / "notes.txt").exists()
    (tmp_path / "metrics.csv").unlink()
    checkpoint.set_aside(tmp_path, 0, ["metrics.csv"])
    assert [path.name for path in previous.iterdir()] == ["checkpoint-00000001.safetensors"]
    assert checkpoint.set_aside(tmp_path / "nowhere", 0) is None
    with pytest.raises(FileNotFoundError, match=f"no checkpoint in {tmp_path}; {previous} has those of a run before"):
        checkpoint.latest(tmp_path)


def test_a_link_stays_one_and_what_is_no_file_is_written_to(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    checkpoint.write_whole(tmp_path / "link", b"one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "file").read_bytes() == b"one"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    checkpoint.write_whole(tmp_path / "pipe", b"two")
    assert os.read(reader, 9) == b"two" and not (tmp_path / "pipe").is_file()
    os.close(reader)
    out = "from minidl import checkpoint; checkpoint.write_whole('/dev/stdout', b'three')"
    assert subprocess.run([sys.executable, "-c", out], stdout=subprocess.PIPE, check=True).stdout == b"three"


def test_match_accepts_arrays_and_pairs():
    found = example()
    checkpoint.match(found, found)
    checkpoint.match({name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}, found)


def test_match_lists_everything_at_once():
    expected = {"a": ((2,), np.float32), "b": ((3, 1), bfloat16), "c": ((), np.int64), "same": ((1,), np.float32)}
    found = {
        "b": np.zeros((1, 3), bfloat16),
        "c": np.zeros((), np.int32),
        "d": np.zeros(1),
        "same": np.zeros(1, np.float32),
    }
    with pytest.raises(ValueError) as caught:
        checkpoint.match(expected, found, "run/checkpoint-7.safetensors")
    assert str(caught.value) == (
        "run/checkpoint-7.safetensors does not fit: 1 missing: a; 1 unexpected: d; 2 different: "
        "b (expected bfloat16 (3, 1), got bfloat16 (1, 3)), c (expected int64 (), got int32 ())"
    )


def test_names_that_are_no_strings_are_refused():
    with pytest.raises(TypeError, match="^state: name 3 must be a string, got int$"):
        checkpoint.match(example(), example() | {3: np.zeros(1)}, "state")


def test_match_shortens_long_lists():
    with pytest.raises(ValueError, match=r"20 missing: n0, .*n7 and 12 more$"):
        checkpoint.match({f"n{i}": ((1,), np.float32) for i in range(20)}, {})


def test_state_is_plain_json_in_the_metadata(path):
    checkpoint.save(path, {}, {"epoch": 1})
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata["state"]) == {"epoch": 1} and metadata["schema"] == "1"
