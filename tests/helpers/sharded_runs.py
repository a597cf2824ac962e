"""Write prepared folders and check runs that train from them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import tracegrad as tg
from tiny import sampled, tiny_model
from tracegrad.objective import presets
from tracegrad.storage import manifest
from tracegrad.trainer.dataset import PreparedDataset, select
from tracegrad.trainer.steps import TrainingData
from training_runs import told


def prepared(found, folder, cuts):
    """The traces as `prepare` would write them, in shards that end where they are told; groups by their names."""
    for number, (first, last) in enumerate(pairwise([0, *cuts, found.traces])):
        rows = np.arange(first, last)
        part = select(found, rows)
        codes, group = np.unique(part.group, return_inverse=True)
        names = tuple(f"group {code}" for code in codes)
        (folder / manifest.shard_name(number)).mkdir(parents=True)
        replace(part, group=group.astype(np.int32), group_names=names).save(folder / manifest.shard_name(number))
    manifest.seal(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return spoken(tmp_path_factory.mktemp("shards"))


def spoken(place):
    """Five shards; a group stands in two of them, and every seventh term has no logprob."""
    found = sampled(tiny_model())
    logprobs = found.rollout_logprobs.copy()
    logprobs[found.terms[::7]] = np.nan
    version = np.where(found.trainable, np.arange(found.tokens) % 5, -1).astype(np.int32)
    return prepared(replace(found, rollout_logprobs=logprobs, version=version), place / "prepared", [10, 37, 38, 80])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return halves(tmp_path_factory.mktemp("two"), tg.Sequences.load(spoken(tmp_path_factory.mktemp("one"))))


def halves(place, sequences):
    """Two folders of 12 groups of 4 each, by other names."""
    for number, name in enumerate("ab"):
        rows = np.flatnonzero(sequences.group // 12 == number)
        prepared(select(sequences, rows), place / name, [20])
    return [place / "a", place / "b"]


def weights(place):
    """A row of tests/trainer/test_every_option.py."""
    check_shares_of_inputs(halves(place, sampled(tiny_model())))


def check_shares_of_inputs(two):
    opened = PreparedDataset.open(two)
    feed = TrainingData.of(
        opened, presets.DR_GRPO, told(mixture__weights="3, 1", data__holdout=0, train__groups_per_step=5)
    )
    seen = []
    for seed in range(30):
        cut = feed.assign_steps(seed)
        groups = [np.unique(opened.catalog.group[cut.of(step)]) for step in range(len(cut))]
        assert [len(each) for each in groups] == [5, 5, 5, 1]  # 12 of the first, 12 / 3 of the second
        taken = np.concatenate(groups)
        assert np.count_nonzero(taken < 12) == 12
        seen.append(frozenset(taken[taken >= 12].tolist()))
        assert np.array_equal(cut.rows, feed.assign_steps(seed).rows)
    assert len(set(seen)) > 20
    assert set().union(*seen) == set(range(12, 24))
    assert len(np.unique(opened.catalog.group[feed.assign_steps(0, all_groups=True).rows])) == 24
    few = TrainingData.of(opened, presets.DR_GRPO, told(mixture__weights="0.001,5", data__holdout=0))
    assert np.count_nonzero(np.unique(opened.catalog.group[few.assign_steps(0).rows]) < 12) == 1  # at least one
