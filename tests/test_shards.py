"""Files of arrays: what is written comes back, the safetensors package reads it, and hostile files are refused."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from tracegrad import shards
from tracegrad.errors import FormatError, ReadError
from tracegrad.sequence import Drift, Sequences

ARRAYS = {
    "flags": np.array([True, False, True]),
    "scores": np.array([[1.5, np.nan]], np.float32),
    "places": np.arange(5, dtype=np.int64),
    "empty": np.zeros((0, 3), np.int32),
    "codes": np.array([7, 255], np.uint8),
}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def file(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_arrays_come_back_memory_mapped_and_aligned(tmp_path):
    shards.write(tmp_path / "a.safetensors", ARRAYS, {"of": "tests"})
    arrays, metadata = shards.read(tmp_path / "a.safetensors")
    assert metadata == {"of": "tests"}
    assert set(arrays) == set(ARRAYS)
    for name, array in arrays.items():
        assert same(array, ARRAYS[name])
        assert array.ctypes.data % array.dtype.itemsize == 0
    assert isinstance(arrays["places"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        arrays["places"][0] = 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_safetensors_package_reads_and_writes_the_same_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    shards.write(tmp_path / "ours.safetensors", ARRAYS, {"of": "tests"})
    theirs = safetensors.load_file(tmp_path / "ours.safetensors")
    assert all(same(theirs[name], array) for name, array in ARRAYS.items())
    safetensors.save_file(dict(ARRAYS), tmp_path / "theirs.safetensors")
    ours, _ = shards.read(tmp_path / "theirs.safetensors")
    assert all(same(ours[name], array) for name, array in ARRAYS.items())


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":{},"a":{}}', "stands twice"),
        ([1], "not a table"),
        ({"a": 1}, "no valid data_offsets"),
        ({"a": entry(offsets=(0, -8))}, "no valid data_offsets"),
        ({"a": entry(offsets=(0, 8.0))}, "no valid data_offsets"),
        ({"a": entry(dtype="BF16")}, "dtype 'BF16'"),
        ({"a": entry(dtype=["F32"])}, "dtype"),
        ({"a": entry(shape=(-2,))}, "shape"),
        ({"a": entry(shape=("2",))}, "shape"),
        ({"a": entry(shape=(2**62, 2**62))}, "shape"),
        ({"a": entry(shape=(1,) * 9)}, "shape"),
        ({"a": entry(shape=(3,))}, "8 bytes, but its shape and dtype need 12"),
        ({"a": entry(offsets=(0, 4096), shape=(8, 8, 8, 2))}, "end at byte 4096 of 8"),
        (
            {"a": entry(shape=(1,), offsets=(0, 4)), "b": entry(shape=(1,), offsets=(0, 4))},
            "begins at byte 0 and not at 4",
        ),
        ({"a": entry(shape=(1,), offsets=(4, 8))}, "begins at byte 4 and not at 0"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "end at byte 4 of 8"),
        ({"a": entry(), "__metadata__": {"x": 1}}, "metadata"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, header, message):
    with pytest.raises(FormatError, match=message):
        shards.read(file(tmp_path / "x", header, b"\0" * 8))


@pytest.mark.parametrize("claim", [2**63, 2**40, 100])
def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path, claim):
    (tmp_path / "x").write_bytes(struct.pack("<Q", claim) + b"{}")
    with pytest.raises(FormatError, match=f"claims {claim} bytes"):
        shards.read(tmp_path / "x")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    shards.write(tmp_path / "a", ARRAYS)
    whole = (tmp_path / "a").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(FormatError):
            shards.read(tmp_path / "cut")


def test_what_cannot_be_held_or_written_says_so(tmp_path):
    with pytest.raises(FormatError, match="array 'x' has dtype complex128"):
        shards.write(tmp_path / "a", {"x": np.zeros(1, complex)})
    with pytest.raises(ReadError, match="cannot be written"):
        shards.write(tmp_path / "missing" / "a", ARRAYS)
    with pytest.raises(ReadError, match="cannot be read"):
        shards.read(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


# --- Sequences ---


def example(groups=(0, 1, 1), names=("red", "blue")):
    found = Drift(
        reason=np.array([2], np.uint8),
        trace=np.array([1], np.int32),
        turn=np.array([0], np.int32),
        token=np.array([4], np.int32),
        count=np.array([1], np.int32),
        detail=("'é\ud800' -> \x00",),
        recorded=4,
        exact=3,
        errors=("trace 'x': lost",),
    )
    s = Sequences.from_arrays(
        np.arange(9),
        [0, 3, 6, 7, 9],
        [np.nan, -1, -2] * 3,
        [False, True, True] * 3,
        trace=[0, 1, 1, 2],
        group=groups,
        rewards=[[0.5, 1], [np.nan, 2], [3, 4]],
        reward_names=("a", "b"),
        extras={"experts": np.arange(36, dtype=np.uint8).reshape(9, 2, 2)},
    )
    return replace(s, drift=found, trace_ids=("é", "b\n", "c"), group_names=names)


def check_same(a: Sequences, b: Sequences):
    for name in a.__dataclass_fields__:
        one, other = getattr(a, name), getattr(b, name)
        if isinstance(one, np.ndarray):
            assert same(one, other), name
        elif isinstance(one, tuple):
            assert one == other, name
    assert set(a.extras) == set(b.extras)
    assert all(same(array, b.extras[name]) for name, array in a.extras.items())
    assert a.drift.table() == b.drift.table()
    assert (a.drift.detail, a.drift.errors, a.drift.rate) == (b.drift.detail, b.drift.errors, b.drift.rate)


def test_sequences_come_back_as_they_were_saved(tmp_path):
    example().save(tmp_path / "one")
    back = Sequences.load(tmp_path / "one")
    check_same(back, example())
    assert isinstance(back.ids, np.memmap)
    example(names=("x", "y")).save(tmp_path / "one")  # over itself
    assert Sequences.load(tmp_path / "one").group_names == ("x", "y")


def test_shards_are_joined_and_groups_of_one_name_are_one(tmp_path):
    example().save(tmp_path / "shard-00000")
    example(names=("blue", "green")).save(tmp_path / "shard-00001")
    both = Sequences.load(tmp_path)
    assert both.group.tolist() == [0, 1, 1, 1, 2, 2]
    assert both.group_names == ("red", "blue", "green")
    assert both.trace.tolist() == [0, 1, 1, 2, 3, 4, 4, 5]
    assert both.cu_seqlens.tolist() == [0, 3, 6, 7, 9, 12, 15, 16, 18]
    assert both.cu_turns.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert both.drift.trace.tolist() == [1, 4]
    assert (both.drift.recorded, both.drift.exact, len(both.drift.errors)) == (8, 6, 2)
    assert both.extras["experts"].shape == (18, 2, 2)


def test_loaded_sequences_are_packed_like_the_ones_in_memory(tmp_path):
    from tracegrad.batch import pack

    s = Sequences.from_arrays([5, 6, 7, 5, 8], [0, 3, 5], [-1] * 5, [False, True, True, False, True])
    s.save(tmp_path)
    [one], [other] = (pack(x, [1.0, -1.0], token_budget=4) for x in (s, Sequences.load(tmp_path)))
    assert np.array_equal(one.origin, other.origin)
    assert np.array_equal(one.batches[0].ids, other.batches[0].ids)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(ReadError, match="nor shards"):
        Sequences.load(tmp_path)
    example().save(tmp_path)
    table = json.loads((tmp_path / "sequences.json").read_text("utf-8", "surrogatepass"))
    for change, message in [
        ({"trace_ids": ["a"]}, "trace_ids"),
        ({"reward_names": ["a"]}, "reward_names"),
        ({"drift": None}, "what `save` writes"),
    ]:
        (tmp_path / "sequences.json").write_text(json.dumps({**table, **change}))
        with pytest.raises(FormatError, match=message):
            Sequences.load(tmp_path)
    arrays, _ = shards.read(tmp_path / "sequences.safetensors")
    (tmp_path / "sequences.json").write_text(json.dumps(table))
    for change, message in [
        ({"turn": np.zeros(3, np.int32)}, "turn"),
        ({"ids": arrays["ids"].astype(np.int64)}, "ids"),
        ({"cu_seqlens": np.array([0, 3, 2, 7, 9])}, "cu_seqlens"),
        ({"trace": np.array([0, 2, 1, 2], np.int32)}, "trace"),
    ]:
        shards.write(tmp_path / "sequences.safetensors", {**arrays, **change})
        with pytest.raises(FormatError, match=message):
            Sequences.load(tmp_path)
