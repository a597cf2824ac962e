"""A step that is packed alone, of its own traces, is the step of packing all: field by field, on every rank."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from single_steps import assert_same, traces
from tracegrad.errors import ArgumentError
from tracegrad.objective import presets
from tracegrad.packing import measure, pack, steps_of
from tracegrad.trainer.dataset import InMemoryDataset, select

GLOBAL = {"origin": "first_token", "branch": "first_branch"}


@settings(max_examples=120)
@given(traces(), st.data())
def test_a_step_packed_alone_is_that_of_packing_all(found, data):
    draw = data.draw
    whole_traces = draw(st.booleans())
    objective = presets.GSPO if whole_traces else presets.DAPO
    ranks = draw(st.sampled_from([1, 2, 4]))
    how = {
        "tokens_per_row": draw(st.sampled_from([12, 16, 40])),
        "ranks": ranks,
        "rank": draw(st.integers(0, ranks - 1)),
        "requirements": objective.requirements,
        "too_long": draw(st.sampled_from(["drop"] if whole_traces else ["drop", "truncate"])),
        "share_prefixes": draw(st.booleans()),
        "skip_zero_advantage": draw(st.booleans()) and not objective.requirements.zero_advantage_reason,
        "pad_to_multiple_of": draw(st.sampled_from([1, 8])),
    }
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    advantages = rng.choice([0.0, 0.0, 1.0, -1.0], found.traces)
    counted = rng.random(found.traces) < draw(st.sampled_from([0.0, 0.5]))
    owner = np.repeat(found.trace, np.diff(found.cu_seqlens))
    found = replace(found, trainable=found.trainable & ~counted[owner])
    groups_per_step, seed = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([None, 5]))
    measured = {name: how[name] for name in ("tokens_per_row", "share_prefixes", "too_long")}
    terms = measure(found, whole_traces=whole_traces, **measured)
    if not ((terms > 0) | counted).any():
        with pytest.raises(ArgumentError, match="TG-PACK-008"):
            pack(
                found, advantages, per="trace", count_always=counted, groups_per_step=groups_per_step, seed=seed, **how
            )
        return
    every = pack(
        found, advantages, per="trace", count_always=counted, groups_per_step=groups_per_step, seed=seed, **how
    )
    step = steps_of(found.group, (terms > 0) | counted, groups_per_step, seed)
    assert int(step.max()) + 1 == len(every)
    catalog = InMemoryDataset(found).catalog
    for number, wanted in enumerate(every):
        rows = np.flatnonzero((step == number) | ((step < 0) & (number == 0)))
        own = select(found, rows)
        [alone] = pack(own, advantages[rows], per="trace", count_always=counted[rows], **how)
        moved = {name: np.asarray(getattr(alone, name), np.int64) for name in ("trace", *GLOBAL)}
        for name, first in GLOBAL.items():
            here = InMemoryDataset(own).catalog
            moved[name] += (getattr(catalog, first)[rows] - getattr(here, first)[:-1])[moved["trace"]]
        moved["trace"] = rows[moved["trace"]]
        moved = {name: column.astype(getattr(wanted, name).dtype) for name, column in moved.items()}
        assert_same(replace(alone, **moved), wanted)
