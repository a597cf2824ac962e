"""The columns of all traces: groups by their keys, hashes, and some traces taken out of many."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from single_steps import traces
from tracegrad.alignment.sequences import Sequences
from tracegrad.trainer.dataset import (
    PER_TOKEN,
    PER_TRACE,
    InMemoryDataset,
    TraceTable,
    as_dataset,
    number_groups,
    select,
)
from tracegrad.trainer.token_log import subset


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30))
def test_groups_are_numbered_as_they_first_appear(keys):
    wanted = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    table = np.array(keys, np.uint64).reshape(-1, 2)
    found = number_groups(table)
    assert found.tolist() == [wanted[key] for key in keys]
    assert found.dtype == np.int32


@given(traces(), st.data())
def test_some_traces_are_those_of_a_loop_over_them(found, data):
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, found.traces - 1), min_size=1))))
    ours, (theirs, places) = select(found, rows), subset(found, rows)
    for name in (*PER_TOKEN, *PER_TRACE[1:], "cu_seqlens", "trace", "cu_turns", "turn_rewards", "trace_ids"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert np.array_equal(ours.group, found.group[rows])
    assert np.array_equal(ours.ids, found.ids[places])
    catalog = InMemoryDataset(found).catalog
    starts = [catalog.first_token[row] + np.arange(catalog.tokens[row]) for row in rows]
    assert np.array_equal(np.concatenate(starts), places)
    assert catalog.all_terms == len(found.terms) == catalog.first_term[-1]
    assert catalog.first_branch[-1] == found.branches


def test_all_traces_of_sequences_are_these():
    one = Sequences.from_arrays([5, 6, 7], [0, 2, 3], [-1.0] * 3, [False, True, False])
    source = as_dataset(one)
    assert source.take(np.arange(2)) is one
    assert as_dataset(source) is source
    assert source.inputs == 1
    assert source.in_memory


def test_a_hash_is_another_where_any_column_is():
    one = InMemoryDataset(Sequences.from_arrays([5, 6, 7], [0, 2, 3], [-1.0] * 3, [False, True, False])).catalog
    columns = [name for name, value in vars(one).items() if isinstance(value, np.ndarray)]
    assert len(columns) == 20
    seen = {one.hash, replace(one, reward_names=("other",)).hash}
    for name in columns:
        column = getattr(one, name).copy()
        column.reshape(-1)[-1] = column.reshape(-1)[-1] == 0
        seen.add(replace(one, **{name: column}).hash)
    assert len(seen) == 2 + len(columns)
    assert replace(one).hash == one.hash
    assert isinstance(one, TraceTable)


def test_room_for_the_logprobs_of_every_term_is_taken_or_refused(tmp_path):
    pytest.importorskip("torch")
    from tracegrad.errors import TracegradError
    from tracegrad.trainer.loop import allocate_logprobs

    for folder in (None, tmp_path / "new"):
        values = allocate_logprobs(3_000_000, folder)
        assert np.isnan(values).all()
        values[2_999_999] = 1
        assert values[2_999_999] == 1
    assert not list((tmp_path / "new").iterdir())
    assert isinstance(values, np.memmap)
    assert allocate_logprobs(0, tmp_path).shape == (0,)
    (tmp_path / "file").write_text("")
    with pytest.raises(TracegradError, match="TG-TRAIN-038"):
        allocate_logprobs(5, tmp_path / "file")


def test_room_for_logprobs_is_taken_before_it_is_used_on_systems_without_posix_fallocate(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from tracegrad.trainer.loop import allocate_logprobs

    monkeypatch.delattr("os.posix_fallocate", raising=False)
    values = allocate_logprobs(3_000_000, tmp_path / "new")
    assert np.isnan(values).all()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_full_disk_is_an_error_before_the_first_logprob(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from tracegrad.errors import TracegradError
    from tracegrad.trainer import loop

    def full(path):
        path.touch()
        return open("/dev/full", "r+b", buffering=0)

    monkeypatch.setattr(loop.files, "create", full)
    with pytest.raises(TracegradError, match=r"TG-TRAIN-038.*No.*left.*5"):
        loop.allocate_logprobs(5, tmp_path)
