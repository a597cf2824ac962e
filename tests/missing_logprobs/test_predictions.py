"""The ids that top_p, top_k and min_p keep, from a list of the most probable ones, against the whole vocabulary."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tracegrad.missing_logprobs.predictions import Predictions, Truncation, kept_counts, over_kept, over_listed
from truncated import log_softmax, truncated

OPTIONS = st.fixed_dictionaries(
    {
        "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.7, 0.9, 0.97, 0.9999]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 8, 9, 30]),
        "min_p": st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.2, 0.7]),
    }
)


def listed_of(scores, listed):
    """Return the most probable ids and their float32 logprobs, the most probable first."""
    logprobs = log_softmax(scores).astype(np.float32)
    ids = np.argsort(-scores, kind="stable")[:listed]
    return ids.astype(np.int32), logprobs[ids]


def truncation_of(rows):
    return Truncation(*(np.array([row[name] for row in rows]) for name in ("top_p", "top_k", "min_p")))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 2.0, 5.0]), st.sampled_from([3, 8, 20]), OPTIONS)
@example(0, 2.0, 8, {"top_p": 1.0, "top_k": 8, "min_p": 0.0})  # the whole list
@example(0, 2.0, 8, {"top_p": 1.0, "top_k": 9, "min_p": 0.0})
@example(0, 5.0, 8, {"top_p": 0.9, "top_k": 8, "min_p": 0.001})
def test_the_kept_ids_are_those_of_the_whole_vocabulary(seed, spread, listed, options):
    rng = np.random.default_rng(seed)
    scores = spread * rng.standard_normal(40)
    ids, top = listed_of(scores, listed)
    remaining = truncated(scores, **options)
    kept = int(np.isfinite(remaining).sum())
    [count] = kept_counts(top[None], truncation_of([options])).tolist()
    if options == {"top_p": 1.0, "top_k": 0, "min_p": 0.0}:
        assert count == -1
        return
    if count == -1:
        assert not_decided(top, options, kept)
        return
    assert count == kept
    assert set(ids[:count].tolist()) == set(np.flatnonzero(np.isfinite(remaining)).tolist())
    own = log_softmax(remaining)
    for sampled in (int(ids[0]), int(ids[count - 1]), int(ids[-1]), int(np.argmin(scores))):
        logprob = log_softmax(scores)[sampled].astype(np.float32)
        whole = Predictions(np.array([logprob]), ids[None], top[None], np.array([sampled], np.int32))
        over = over_kept(whole, np.array([count]))
        assert over.logprobs[0] == pytest.approx(own[sampled], abs=1e-5) or not np.isfinite(own[sampled])
        assert np.isnan(over.logprobs[0]) == ~np.isfinite(own[sampled])
        assert over.ids[0].tolist() == [*ids[:count].tolist(), *[-1] * (listed - count)]
        assert over.top_logprobs[0, :count] == pytest.approx(own[ids[:count]], abs=1e-5)
        assert (over.top_logprobs[0, count:] == -np.inf).all()


def not_decided(top, options, kept):
    """Return whether the list leaves open which ids are kept: there are more of them, or others may be among them."""
    top = top.astype(np.float64)
    few = top[-1] - 1e-9  # As probable as an id below the list can be.
    below = np.concatenate([top, [few], np.full(40, -50.0)])
    # A second id of the same probability below the list may change which are kept.
    twice = np.concatenate([top, [few, few], np.full(40, -50.0)])
    none = np.concatenate([top, np.full(40, -50.0)])
    counts = {int(np.isfinite(truncated(scores, **options)).sum()) for scores in (none, below, twice)}
    # The mass of which top_p keeps a part is unknown if min_p or top_k may keep ids below the list.
    is_mass_open = options["top_k"] > len(top) or (options["min_p"] > 0 and few >= np.log(options["min_p"]) + top[0])
    return kept > len(top) or len(counts) > 1 or (options["top_p"] < 1 and is_mass_open)


def test_lists_that_are_just_long_enough():
    # Probabilities 0.4, 0.3, 0.2 of a list, and 0.1 below it.
    top = np.log(np.array([0.4, 0.3, 0.2], np.float32))
    cases = [
        ((0.0, 0, 0.0), 1),  # the most probable id always stays
        ((0.69, 0, 0.0), 2),
        ((0.71, 0, 0.0), 3),
        ((0.89, 0, 0.0), 3),
        ((0.91, 0, 0.0), -1),  # the next id is kept too
        ((1.0, 3, 0.0), 3),
        ((1.0, 4, 0.0), -1),
        ((1.0, 0, 0.6), 2),  # of 0.4: 0.24
        ((1.0, 0, 0.4), 3),  # 0.16 is more than all others have together
        ((1.0, 0, 0.2), -1),  # 0.08 is below all listed ids, and perhaps below the next
        ((1.0, 3, 0.4), 3),
        ((0.5, 2, 0.0), 1),  # of 0.7: 0.35
        ((0.6, 2, 0.0), 2),  # of 0.7: 0.42
        ((0.6, 0, 0.6), 2),
        ((0.5, 0, 0.6), 1),
        ((0.5, 4, 0.0), -1),  # half of 0.9 to 1
        ((0.7, 3, 0.0), 2),  # of 0.9: 0.63
    ]
    truncation = Truncation(*(np.array(column) for column in zip(*(options for options, _ in cases), strict=True)))
    assert kept_counts(np.repeat(top[None], len(cases), 0), truncation).tolist() == [count for _, count in cases]
    assert truncation.is_active.all()
    assert not Truncation(np.ones(1), np.zeros(1, np.int64), np.zeros(1)).is_active.any()


def test_another_checkpoint_is_compared_over_the_same_ids():
    # Of a truncated token the listed ids share all probability, 0.2 + 0.3; of another it is what it was.
    top = np.log(np.array([[0.2, 0.3, 0.0], [0.2, 0.3, 0.1]]) + 1e-300).astype(np.float32)
    ids = np.array([[5, 6, -1], [5, 6, 7]], np.int32)
    predictions = Predictions(np.zeros(2, np.float32), ids, top, np.array([5, 5], np.int32))
    over = over_listed(predictions, np.array([2, -1]))
    assert np.exp(over.top_logprobs) == pytest.approx(np.array([[0.4, 0.6, 0.0], [0.2, 0.3, 0.1]]), abs=1e-6)
