"""Batches on their way to a device: the same numbers, ahead of time."""

from dataclasses import fields

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.packing import pack, prefetch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def batches():
    s = Sequences.from_arrays(np.arange(60), np.arange(0, 61, 6), np.full(60, -1.0), np.arange(60) % 6 > 2)
    return pack(s, np.ones(10), tokens_per_row=12)[0].batches


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_prefetched_batches_are_the_batches_in_order(device, ahead):
    found = list(prefetch(iter(batches()), device, ahead=ahead))
    assert len(found) == len(batches()) == 5
    for one, other in zip(found, batches(), strict=True):
        assert one.longest == 6
        for field in fields(other):
            if field.name in ("longest", "images", "support"):
                continue
            moved, given = getattr(one, field.name), getattr(other, field.name)
            if field.name == "term":
                assert isinstance(moved, np.ndarray)
            else:
                assert moved.device.type == device
                assert moved.dtype == (torch.float32 if given.dtype == np.float32 else torch.int64)
            assert moved.tolist() == given.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_the_support_of_a_batch_moves_with_it(device):
    rows = Ragged(np.array([0, 0, 2, 3]), np.array([6, 9, 7], np.int32))
    sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [np.nan, -1.0, -1.0], [False, True, True], support=rows)
    [batch] = pack(sequences, [1.0], tokens_per_row=3)[0].batches
    moved = batch.to(device).support
    assert (moved.ids.device.type, moved.ids.dtype, moved.row.dtype) == (device, torch.int64, torch.int64)
    assert (moved.ids.tolist(), moved.row.tolist(), moved.offsets.tolist()) == ([6, 9, 7], [0, 0, 1], [0, 2, 3])
    assert moved.tensors() == [moved.ids, moved.row]
    second = moved.at(slice(1, 2))
    assert (second.ids.tolist(), second.row.tolist(), second.offsets.tolist()) == ([7], [0], [0, 1])


def test_on_a_cpu_a_batch_is_moved_when_it_is_asked_for():
    taken = []

    def source():
        for n, batch in enumerate(batches()):
            taken.append(n)
            yield batch

    moved = prefetch(source(), "cpu")
    next(moved)
    assert taken == [0]


def test_a_moved_batch_is_not_copied_again():
    batch = batches()[0].to("cpu")
    assert batch.to("cpu").ids.data_ptr() == batch.ids.data_ptr()


def test_a_negative_number_ahead_is_refused():
    with pytest.raises(ArgumentError, match=r"TG-PACK-007.*-1"):
        prefetch([], "cpu", ahead=-1)
