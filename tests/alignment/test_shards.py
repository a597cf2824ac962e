"""Files of arrays: what is written comes back, the safetensors package reads it, and hostile files are refused."""

import json
import os
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad.alignment.sequences import AlignmentReport, Sequences
from tracegrad.errors import ArgumentError, FormatError, ReadError, TracegradError
from tracegrad.storage import manifest, safetensors_file

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
    safetensors_file.write(tmp_path / "a.safetensors", ARRAYS, {"of": "tests"})
    arrays, metadata = safetensors_file.read(tmp_path / "a.safetensors")
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
    safetensors_file.write(tmp_path / "ours.safetensors", ARRAYS, {"of": "tests"})
    theirs = safetensors.load_file(tmp_path / "ours.safetensors")
    assert all(same(theirs[name], array) for name, array in ARRAYS.items())
    safetensors.save_file(dict(ARRAYS), tmp_path / "theirs.safetensors")
    ours, _ = safetensors_file.read(tmp_path / "theirs.safetensors")
    assert all(same(ours[name], array) for name, array in ARRAYS.items())


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "TG-STORE-033"),
        (b"[" * 100_000, "TG-STORE-033"),
        (b'{"a":{},"a":{}}', "TG-STORE-033"),
        ([1], "TG-STORE-033"),
        ({"a": 1}, r"TG-STORE-033.*data_offsets"),
        ({"a": entry(offsets=(0, -8))}, r"TG-STORE-033.*data_offsets"),
        ({"a": entry(offsets=(0, 8.0))}, r"TG-STORE-033.*data_offsets"),
        ({"a": entry(dtype="BF16")}, r"TG-STORE-033.*BF16"),
        ({"a": entry(dtype=["F32"])}, r"TG-STORE-033.*dtype"),
        ({"a": entry(shape=(-2,))}, r"TG-STORE-033.*shape"),
        ({"a": entry(shape=("2",))}, r"TG-STORE-033.*shape"),
        ({"a": entry(shape=(2**62, 2**62))}, r"TG-STORE-033.*shape"),
        ({"a": entry(shape=(1,) * 9)}, r"TG-STORE-033.*shape"),
        ({"a": entry(shape=(3,))}, r"TG-STORE-033.*8.*12"),
        ({"a": entry(offsets=(0, 4096), shape=(8, 8, 8, 2))}, r"TG-STORE-033.*4096.*8"),
        ({"a": entry(shape=(1,), offsets=(0, 4)), "b": entry(shape=(1,), offsets=(0, 4))}, r"TG-STORE-033.*0.*4"),
        ({"a": entry(shape=(1,), offsets=(4, 8))}, r"TG-STORE-033.*4.*0"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, r"TG-STORE-033.*4.*8"),
        ({"a": entry(), "__metadata__": {"x": 1}}, r"TG-STORE-033.*metadata"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, header, message):
    with pytest.raises(FormatError, match=message):
        safetensors_file.read(file(tmp_path / "x", header, b"\0" * 8))


@pytest.mark.parametrize("claim", [2**63, 2**40, 100])
def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path, claim):
    (tmp_path / "x").write_bytes(struct.pack("<Q", claim) + b"{}")
    with pytest.raises(FormatError, match=rf"TG-STORE-033.*{claim}"):
        safetensors_file.read(tmp_path / "x")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    safetensors_file.write(tmp_path / "a", ARRAYS)
    whole = (tmp_path / "a").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(FormatError):
            safetensors_file.read(tmp_path / "cut")


def test_what_cannot_be_held_or_written_says_so(tmp_path):
    with pytest.raises(FormatError, match=r"TG-STORE-026.*x.*complex128"):
        safetensors_file.write(tmp_path / "a", {"x": np.zeros(1, complex)})
    with pytest.raises(ReadError, match="TG-STORE-027"):
        safetensors_file.write(tmp_path / "missing" / "a", ARRAYS)
    with pytest.raises(ReadError, match="TG-STORE-029"):
        safetensors_file.read(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


# --- Sequences ---


def example(groups=(0, 1, 1), names=("red", "blue")):
    found = AlignmentReport(
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
    return replace(s, alignment_report=found, trace_ids=("é", "b\n", "c"), group_names=names)


def check_same(a: Sequences, b: Sequences):
    for name in a.__dataclass_fields__:
        one, other = getattr(a, name), getattr(b, name)
        if isinstance(one, np.ndarray):
            assert same(one, other), name
        elif isinstance(one, tuple):
            assert one == other, name
    assert set(a.extras) == set(b.extras)
    assert all(same(array, b.extras[name]) for name, array in a.extras.items())
    assert a.alignment_report.table() == b.alignment_report.table()
    assert (a.alignment_report.detail, a.alignment_report.errors, a.alignment_report.rate) == (
        b.alignment_report.detail,
        b.alignment_report.errors,
        b.alignment_report.rate,
    )


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
    manifest.seal(tmp_path)
    both = Sequences.load(tmp_path)
    assert both.group.tolist() == [0, 1, 1, 1, 2, 2]
    assert both.group_names == ("red", "blue", "green")
    assert both.trace.tolist() == [0, 1, 1, 2, 3, 4, 4, 5]
    assert both.cu_seqlens.tolist() == [0, 3, 6, 7, 9, 12, 15, 16, 18]
    assert both.cu_turns.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert both.alignment_report.trace.tolist() == [1, 4]
    assert (both.alignment_report.recorded, both.alignment_report.exact, len(both.alignment_report.errors)) == (8, 6, 2)
    assert both.extras["experts"].shape == (18, 2, 2)


@pytest.mark.parametrize("names", [("a", "c"), ("a", "a")], ids=["later", "earlier"])
def test_shards_with_other_rewards_are_not_joined(tmp_path, names):
    example().save(tmp_path / "shard-00000")
    replace(example(), reward_names=names).save(tmp_path / "shard-00001")
    manifest.seal(tmp_path)
    with pytest.raises(FormatError, match="TG-ALIGN-024"):
        Sequences.load(tmp_path)


def test_a_folder_from_before_endings_were_kept_says_that_they_are_unknown(tmp_path):
    known = replace(example(), ending=np.array([0, 1, 2], np.uint8))
    known.save(tmp_path / "new")
    assert Sequences.load(tmp_path / "new").ending.tolist() == [0, 1, 2]
    arrays, _ = safetensors_file.read(tmp_path / "new" / "sequences.safetensors")
    table = json.loads((tmp_path / "new" / "sequences.json").read_bytes().decode("utf-8", "surrogatepass"))
    written_again(tmp_path / "new", {n: np.array(a) for n, a in arrays.items() if n != "ending"}, table)
    assert Sequences.load(tmp_path / "new").ending.tolist() == [0, 0, 0]


def test_loaded_sequences_are_packed_like_the_ones_in_memory(tmp_path):
    from tracegrad.packing import pack

    s = Sequences.from_arrays([5, 6, 7, 5, 8], [0, 3, 5], [-1] * 5, [False, True, True, False, True])
    s.save(tmp_path)
    [one], [other] = (pack(x, [1.0, -1.0], tokens_per_row=4) for x in (s, Sequences.load(tmp_path)))
    assert np.array_equal(one.origin, other.origin)
    assert np.array_equal(one.batches[0].ids, other.batches[0].ids)


def written_again(folder, arrays, table):
    """The folder of a saver without checks: its manifest says what is there."""
    (folder / "sequences.json").write_bytes(json.dumps(table).encode("utf-8", "surrogatepass"))
    safetensors_file.write(folder / "sequences.safetensors", arrays)
    files = {name: safetensors_file.measure(folder / name) for name in ("sequences.safetensors", "sequences.json")}
    manifest.write(folder, {"traces": 3, "branches": 4, "tokens": 9, "terms": 6}, files)


def flags(values):
    return np.array(values, np.uint8).view(bool)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("turn", np.zeros(3, np.int32)),
        ("turn", np.array([0] * 8 + [1], np.int32)),  # each trace has one generation
        ("turn", np.array([-2] + [0] * 8, np.int32)),
        ("ids", np.zeros(9, np.int64)),
        ("ending", np.full(3, 3, np.uint8)),
        ("ids", np.array([-1] + [0] * 8, np.int32)),
        ("ids", np.int32(3)),
        ("cu_seqlens", np.array([0, 3, 2, 7, 9])),
        ("cu_seqlens", np.array([0, 3, 6, 7, 8])),
        ("cu_seqlens", np.array([0, -(2**63), 2**63 - 1, 7, 9])),
        ("cu_turns", np.array([0, 2, 1, 3])),
        ("trace", np.array([0, 2, 1, 2], np.int32)),
        ("trace", np.array([0, 1, 2, 3], np.int32)),
        ("group", np.array([0, 1, 2], np.int32)),
        ("group", np.array([0, 1, -1], np.int32)),
        ("source", np.full(9, 3, np.uint8)),
        ("alignment_level", np.full(9, 8, np.uint8)),
        ("logprob_kind", np.full(3, 3, np.uint8)),
        ("trainable", flags([2] + [0] * 8)),
        ("rollout_logprobs", np.full(9, 0.5, np.float32)),
        ("rollout_logprobs", np.full(9, -np.inf, np.float32)),
        ("inv_temperature", np.full(9, np.nan, np.float32)),
        ("inv_temperature", np.zeros(9, np.float32)),
        ("rewards", np.full((3, 2), np.inf, np.float32)),
        ("rewards", np.zeros((3, 3), np.float32)),
        ("temperature", np.full(3, -np.inf, np.float32)),
        ("mismatches.reason", np.array([255], np.uint8)),
        ("mismatches.trace", np.array([3], np.int32)),
        ("mismatches.turn", np.array([-2], np.int32)),
        ("extra.experts", np.zeros((8, 2), np.uint8)),
        ("extra.flags", flags([0] * 8 + [255])),
    ],
)
def test_arrays_that_promise_what_they_do_not_hold_are_refused(tmp_path, name, value):
    example().save(tmp_path)
    table = json.loads((tmp_path / "sequences.json").read_bytes().decode("utf-8", "surrogatepass"))
    arrays, _ = safetensors_file.read(tmp_path / "sequences.safetensors")
    written_again(tmp_path, arrays, table)
    check_same(Sequences.load(tmp_path, verify=True), example())
    written_again(tmp_path, {**arrays, name: value}, table)
    with pytest.raises(FormatError, match=rf"TG-(ALIGN-029|STORE-033).*{name.partition('.')[2] or name}"):
        Sequences.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace_ids": ["a"]}, "TG-ALIGN-029.*trace_ids"),
        ({"trace_ids": "abc"}, "TG-ALIGN-022"),
        ({"trace_ids": [1, 2, 3]}, "TG-ALIGN-022"),
        ({"reward_names": ["a"]}, "TG-ALIGN-029.*reward_names"),
        ({"alignment_report": None}, "TG-ALIGN-022"),
        ({"trace_ids": ["a", "\ud800", "c"]}, r"TG-ALIGN-022.*utf-8.*codec.*can't.*encode"),
        ({"group_names": ["\udc00x"]}, r"TG-ALIGN-022.*utf-8.*codec.*can't.*encode"),
        (
            {"alignment_report": {"detail": ["x"], "reasons": ["\x1b[31m"], "errors": [], "recorded": 4, "exact": 3}},
            "TG-ALIGN-029",
        ),
        (
            {"alignment_report": {"detail": [], "reasons": [], "errors": [], "recorded": 1e999, "exact": 0}},
            "TG-ALIGN-022",
        ),
        (
            {"alignment_report": {"detail": ["x"], "reasons": [], "errors": [], "recorded": 4, "exact": 3}},
            r"TG-ALIGN-029.*mismatches\.reason",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, change, message):
    example().save(tmp_path)
    table = json.loads((tmp_path / "sequences.json").read_bytes().decode("utf-8", "surrogatepass"))
    written_again(tmp_path, safetensors_file.read(tmp_path / "sequences.safetensors")[0], {**table, **change})
    with pytest.raises(FormatError, match=message):
        Sequences.load(tmp_path)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    wrong = replace(example(), inv_temperature=np.full(9, np.nan, np.float32))
    with pytest.raises(ArgumentError, match=r"TG-ALIGN-018.*inv_temperature"):
        wrong.save(tmp_path)


# --- manifests ---


@pytest.mark.parametrize("name", ["manifest.json", "sequences.json", "sequences.safetensors"])
def test_a_folder_without_one_of_its_files_is_refused_with_the_cure(tmp_path, name):
    example().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ReadError, match=f"TG-STORE-0(29|36).*{name}"):
        Sequences.load(tmp_path)
    with pytest.raises(ReadError, match="TG-STORE-037"):
        Sequences.load(tmp_path / "elsewhere")


def test_a_changed_byte_is_found_by_its_checksum_and_a_cut_by_its_length(tmp_path):
    example().save(tmp_path)
    arrays, _ = safetensors_file.read(tmp_path / "sequences.safetensors")
    safetensors_file.write(
        tmp_path / "sequences.safetensors", {**arrays, "version": arrays["version"] + 1}, {"format": "x" * 21}
    )
    Sequences.load(tmp_path)  # a value that may be
    with pytest.raises(FormatError, match="TG-STORE-009"):
        Sequences.load(tmp_path, verify=True)
    with open(tmp_path / "sequences.safetensors", "ab") as more:
        more.write(b"0")
    with pytest.raises(FormatError, match="TG-STORE-008"):
        Sequences.load(tmp_path)


def two_shards(folder):
    for name in ("shard-00000", "shard-00001"):
        example().save(folder / name)
    manifest.seal(folder)
    return json.loads((folder / "manifest.json").read_text())


def test_a_shard_that_is_missing_or_too_many_is_refused(tmp_path):
    two_shards(tmp_path)
    (tmp_path / "shard-00001").rename(tmp_path / "shard-00002")
    with pytest.raises(ReadError, match=r"TG-STORE-015.*shard-00001"):
        Sequences.load(tmp_path)
    with pytest.raises(FormatError, match=r"TG-STORE-013.*shard-00001"):
        manifest.seal(tmp_path)
    (tmp_path / "shard-00002").rename(tmp_path / "shard-00001")
    example().save(tmp_path / "shard-00002")
    with pytest.raises(FormatError, match=r"TG-STORE-016.*shard-00002"):
        Sequences.load(tmp_path)


HOSTILE = [
    b"",
    b"[]",
    b"null",
    b"[" * 100_000,
    b'{"format":' * 100_000,
    b'{"format": "tracegrad-folder/2"}',
    b'{"format": "tracegrad-folder/2"}',
    b"\xff\xfe",
    b"9" * 10_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_manifest_is_refused(tmp_path, text):
    example().save(tmp_path)
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(FormatError, match="TG-STORE-034"):
        Sequences.load(tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("shards",), {}),
        (("shards",), []),
        (("files",), {"../../etc/passwd": {"bytes": 1, "crc32": "00000000"}}),
        (("shards", "shard-00000", "files"), {"/etc/passwd": {"bytes": 1, "crc32": "00000000"}}),
        (("shards", "shard-00000", "files"), {"sequences.json": {"bytes": 1, "crc32": "00000000"}}),
        (("shards", "shard-00000", "files", "sequences.json"), 5),
        (("shards", "shard-00000", "files", "sequences.json", "bytes"), -1),
        (("shards", "shard-00000", "files", "sequences.json", "bytes"), 2**64),
        (("shards", "shard-00000", "files", "sequences.json", "bytes"), True),
        (("shards", "shard-00000", "files", "sequences.json", "crc32"), "0x000000"),
        (("shards", "shard-00000", "counts", "tokens"), 8),
        (("shards", "shard-00000", "counts", "tokens"), float("nan")),
        (("shards", "shard-00000", "shards"), {}),
        (("shards", "../shard-00000"), {}),
        (("counts",), "many"),
    ],
)
def test_a_crafted_manifest_is_refused(tmp_path, place, value):
    told = two_shards(tmp_path)
    node = told
    for name in place[:-1]:
        node = node[name]
    node[place[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(told))
    with pytest.raises((FormatError, ReadError)):
        Sequences.load(tmp_path)


@pytest.mark.parametrize("name", ["../out.json", "/etc/passwd", "a/b.json", "out.json.", ".", "OUT.json"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused_before_it_is_looked_at(tmp_path, name):
    example().save(tmp_path / "s")
    (tmp_path / "out.json").write_bytes(b"{}")
    told = json.loads((tmp_path / "s" / "manifest.json").read_text())
    told["files"][name] = {"bytes": 2, "crc32": "a505df1b"}
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(FormatError, match="TG-STORE-034"):
        Sequences.load(tmp_path / "s")


def test_links_pipes_and_folders_are_not_followed(tmp_path):
    two_shards(tmp_path / "a")
    two_shards(tmp_path / "b")
    for name in ("shard-00000", "manifest.json", "shard-00001/sequences.safetensors", "shard-00001/sequences.json"):
        there = tmp_path / "a" / name
        there.rename(tmp_path / "aside")
        there.symlink_to(tmp_path / "b" / name)
        with pytest.raises(ReadError, match=r"TG-STORE-0(14|28).*cp -"):
            Sequences.load(tmp_path / "a")
        there.unlink()
        (tmp_path / "aside").rename(there)
    file = tmp_path / "a" / "shard-00000" / "sequences.json"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ReadError, match="TG-STORE-030"):
        Sequences.load(tmp_path / "a")
    file.unlink()
    file.mkdir()
    with pytest.raises(ReadError, match="TG-STORE-030"):
        Sequences.load(tmp_path / "a")


def test_two_savers_into_one_folder_are_kept_apart(tmp_path):
    example().save(tmp_path)
    with manifest.lock(tmp_path), pytest.raises(ArgumentError, match="TG-STORE-011"):
        example().save(tmp_path)
    example().save(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    example().save(folder)
    return folder


@given(data=st.data())
@settings(max_examples=150)
def test_a_folder_in_which_any_bytes_were_changed_is_refused_or_the_same(saved, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shard")
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["manifest.json", "sequences.json", "sequences.safetensors"]))
    whole = bytearray((folder / name).read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.binary(min_size=1, max_size=9))
    whole[at : at + len(new)] = new
    (folder / name).write_bytes(whole)
    try:
        Sequences.load(folder)  # whatever is wrong is an error of ours
        found = Sequences.load(folder, verify=True)
    except TracegradError:
        return
    check_same(found, example())
