"""Rows of unlike length: cut, taken by a step's origin, kept on disk, joined over shards."""

import numpy as np
import pytest

from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.storage import manifest

NAN = float("nan")


def sequences(extras):
    return Sequences.from_arrays(
        [5, 6, 7], [0, 3], [NAN, -0.5, -0.1], [False, True, True], rewards=[1.0], extras=extras
    )


def masks(values):
    """Rows of 0, 2 and 1 values."""
    return Ragged(np.array([0, 0, 2, 3]), np.array(values, np.int32))


def test_rows_are_kept_on_disk_and_taken_by_origin(tmp_path):
    sequences({"masks": masks([5, 9, 6])}).save(tmp_path / "s")
    found = Sequences.load(tmp_path / "s").extras["masks"]
    assert isinstance(found, Ragged)
    assert [row.tolist() for row in found] == [[], [5, 9], [6]]
    assert found.take([2, 1]).values.tolist() == [6, 5, 9]


def test_a_shard_without_the_rows_has_empty_ones_and_without_the_column_minus_one(tmp_path):
    column = np.arange(6, dtype=np.int32).reshape(3, 2)
    sequences({"masks": masks([5, 9, 6]), "routed_experts": column}).save(tmp_path / "shard-00000")
    sequences({}).save(tmp_path / "shard-00001")
    manifest.seal(tmp_path)
    both = Sequences.load(tmp_path)
    assert [row.tolist() for row in both.extras["masks"]] == [[], [5, 9], [6], [], [], []]
    assert both.extras["routed_experts"].tolist() == [*column.tolist(), *[[-1, -1]] * 3]


def test_offsets_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="TG-ALIGN-007"):
        Ragged(np.array([0, 2]), np.array([1, 2, 3]))
