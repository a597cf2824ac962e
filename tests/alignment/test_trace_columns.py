"""One row a trace: what is counted, by hand and by a loop over tokens, and the file beside the tokens."""

import json
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.alignment import store
from tracegrad.alignment.mismatch import AlignmentReport
from tracegrad.alignment.sequences import Sequences
from tracegrad.data.codes import MEDIA
from tracegrad.errors import FormatError, ReadError
from tracegrad.storage import manifest, safetensors_file

NAN = float("nan")


def example():
    """Two branches of trace "é" of group g, one of "b", none of "c"; T6 after a term of T3."""
    one = Sequences.from_arrays(
        [7, 3, 9, 7, 4, 1],
        [0, 3, 5, 6],
        [NAN, -1, NAN, NAN, -2, NAN],
        [False, True, True, False, True, False],
        trace=[0, 0, 1],
        group=[0, 1],
        rewards=[[0.5, NAN], [1, 2]],
        reward_names=("a", "b"),
        turn=[-1, 0, 0, -1, 1, -1],
        version=[-1, 5, 6, -1, 4, -1],
        ending=[1, 2],
    )
    found = AlignmentReport(
        reason=np.array(MEDIA[:1], np.uint8),
        trace=np.array([1], np.int32),
        turn=np.array([0], np.int32),
        token=np.array([0], np.int32),
        count=np.array([1], np.int32),
        detail=("",),
        recorded=0,
        exact=0,
    )
    level = np.array([255, 0, 3, 255, 1, 6], np.uint8)
    return replace(one, alignment_level=level, alignment_report=found, trace_ids=("é", "b"), group_names=("g", "h"))


def test_a_trace_is_a_row():
    found = {name: array.tolist() for name, array in store.columns_of(example()).items()}
    words = np.frombuffer(blake2b("é".encode(), digest_size=16).digest(), "<u8").tolist()
    assert found.pop("trace")[0] == words
    assert found.pop("group")[1] == np.frombuffer(blake2b(b"h", digest_size=16).digest(), "<u8").tolist()
    assert str(found.pop("rewards")) == "[[0.5, nan], [1.0, 2.0]]"
    assert str(found.pop("temperature")) == "[nan, nan]"
    assert [found.pop("reshaped"), found.pop("replayed")] == [[0, 0]] * 2
    assert found == {
        "branches": [2, 1],
        "tokens": [5, 1],
        "longest": [3, 1],
        "terms": [3, 0],
        "known": [2, 0],
        "turns": [2, 0],
        "alignment_level": [3, 255],
        "foreign": [False, True],
        "version_min": [4, -1],
        "version_max": [6, -1],
        "logprob_kind": [2, 2],
        "ending": [1, 2],
        "max_id": [9, 1],
        "media": [False, True],
    }


def test_one_term_of_an_unknown_version_makes_the_lowest_unknown():
    found = store.columns_of(replace(example(), version=np.array([0, -1, 6, 0, 4, 0], np.int32)))
    assert (found["version_min"].tolist(), found["version_max"].tolist()) == ([-1, -1], [6, -1])


def test_a_trace_of_a_group_without_a_name_is_its_own_group():
    found = store.columns_of(replace(example(), group_names=()))
    assert np.array_equal(found["group"], found["trace"])
    found = store.columns_of(replace(example(), group_names=(), trace_ids=()))
    assert np.array_equal(found["group"], store.hashes(["0", "1"]))


tokens = st.lists(st.tuples(st.booleans(), st.sampled_from([0, 3, 6, 255]), st.integers(-1, 3)), max_size=4)


@given(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=4))
def test_the_columns_are_those_of_a_loop_over_tokens(traces):
    branches = [branch for trace in traces for branch in trace]
    flat = [token for branch in branches for token in branch]
    one = Sequences.from_arrays(
        np.arange(len(flat)),
        np.cumsum([0, *map(len, branches)]),
        [-1.0 if version else NAN for _, _, version in flat],
        np.array([keep for keep, _, _ in flat], bool),
        trace=[at for at, trace in enumerate(traces) for _ in trace],
        version=np.array([version for _, _, version in flat], np.int32),
    )
    one = replace(one, alignment_level=np.array([level for _, level, _ in flat], np.uint8))
    found = store.columns_of(one)
    assert {name: array.dtype for name, array in found.items()} == store.TRACE_COLUMNS
    at = 0
    for row, trace in enumerate(traces):
        own = [token for branch in trace for token in branch]
        terms = [token for token in own if token[0]]
        at += len(own)
        assert {
            name: found[name][row]
            for name in found
            if found[name].ndim == 1 and name not in ("temperature", "reshaped", "replayed")
        } == {
            "branches": len(trace),
            "tokens": len(own),
            "longest": max(map(len, trace)),
            "terms": len(terms),
            "known": sum(version != 0 for _, _, version in terms),
            "turns": int(bool(terms)),
            "alignment_level": max((level for _, level, _ in terms if level != 255), default=255),
            "foreign": any(level == 6 for _, level, _ in own),
            "version_min": min((version for _, _, version in terms), default=-1),
            "version_max": max((version for _, _, version in terms), default=-1),
            "logprob_kind": 2,
            "ending": 0,
            "max_id": at - 1 if own else -1,
            "media": False,
        }


def test_no_traces_are_no_rows(tmp_path):
    [column] = {len(array) for array in store.columns_of(none()).values()}
    assert column == 0
    none().save(tmp_path)
    assert store.read_trace_columns(tmp_path)[0]["rewards"].shape == (0, 1)


def none():
    """What is left where no trace could be aligned."""
    one = Sequences.from_arrays([], [0, 0], [], [])
    gone = {
        name: getattr(one, name)[:0]
        for name in ("trace", "group", "rewards", "logprob_kind", "temperature", "reshaped", "replayed")
    }
    gone |= {"ending": one.ending[:0], "cu_seqlens": one.cu_seqlens[:1], "cu_turns": one.cu_turns[:1]}
    return replace(one, **gone, trace_ids=(), group_names=())


def test_a_saved_folder_has_the_columns_beside_the_tokens(tmp_path):
    example().save(tmp_path)
    found, names = store.read_trace_columns(tmp_path)
    assert names == ("a", "b")
    assert "traces.safetensors" in manifest.read(tmp_path).files
    for name, array in store.columns_of(example()).items():
        assert np.array_equal(found[name], array, equal_nan=array.dtype.kind == "f"), name
    (tmp_path / "traces.safetensors").unlink()
    with pytest.raises(ReadError, match=r"TG-STORE-029.*traces\.safetensors"):
        Sequences.load(tmp_path)


def test_a_folder_from_before_there_were_columns_still_loads(tmp_path):
    example().save(tmp_path)
    told = json.loads((tmp_path / "manifest.json").read_text())
    del told["files"]["traces.safetensors"]
    (tmp_path / "manifest.json").write_text(json.dumps(told))
    (tmp_path / "traces.safetensors").unlink()
    assert Sequences.load(tmp_path, verify=True).trace_ids == ("é", "b")
    with pytest.raises(ReadError, match=r"TG-STORE-029.*traces\.safetensors"):
        store.read_trace_columns(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, told: (arrays, {**told, "format": "x"}),
        lambda arrays, told: (arrays, {"format": told["format"]}),
        lambda arrays, told: (arrays, {**told, "reward_names": "{"}),
        lambda arrays, told: (arrays, {**told, "reward_names": "[" * 100_000}),
        lambda arrays, told: (arrays, {**told, "reward_names": '["a"]'}),
        lambda arrays, told: (arrays, {**told, "reward_names": "[1, 2]"}),
        lambda arrays, told: ({**arrays, "terms": arrays["terms"][:1]}, told),
        lambda arrays, told: ({**arrays, "terms": arrays["terms"].astype(np.int64)}, told),
        lambda arrays, told: ({**arrays, "more": arrays["terms"]}, told),
        lambda arrays, told: ({"terms": arrays["terms"]}, told),
        lambda arrays, told: ({}, told),
    ],
)
def test_a_file_that_is_not_of_columns_is_refused(tmp_path, change):
    example().save(tmp_path)
    arrays, told = safetensors_file.read(tmp_path / "traces.safetensors")
    safetensors_file.write(tmp_path / "traces.safetensors", *change(arrays, told))
    with pytest.raises(FormatError, match="TG-ALIGN-016"):
        store.read_trace_columns(tmp_path)
