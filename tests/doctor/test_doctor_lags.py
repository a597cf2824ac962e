"""The lag test of the doctor: its numbers by hand, its reach on the bundled example."""

import numpy as np
import pytest

import tracegrad as tg
from spoil import EXAMPLE, MODEL
from tracegrad.doctor import bigram_logprobs, lag_test
from tracegrad.doctor.checks_shift import leading_lag
from tracegrad.errors import ArgumentError


def test_correlations_are_spearmans_on_the_tokens_that_every_lag_has():
    # Turn one: recorded 1 5 2 4, reference 5 2 4 1: tokens 1 and 2 have both neighbours. At lag 0 they are (5, 2) and
    # (2, 4): ranks run against one another, -1. At lag -1 reference is 5, 2: +1. At lag +1 it is 4, 1: +1.
    found = lag_test([1, 5, 2, 4], [5, 2, 4, 1], [0, 4])
    assert found.correlation == {-1: 1.0, 0: -1.0, 1: 1.0}
    assert (found.tokens, found.turns) == (2, 1)
    assert np.isnan(found.lead[1])


def test_ties_take_their_mean_rank():
    # Inner tokens are recorded 1, 1, 2 and reference 1, 2, 3: ranks 1.5, 1.5, 3 and 1, 2, 3, rho = sqrt(3)/2.
    found = lag_test([0, 1, 1, 2, 0], [9, 1, 2, 3, 9], [0, 5])
    assert found.correlation[0] == pytest.approx(3**0.5 / 2)


def test_nan_and_the_borders_of_turns_stand_outside():
    nan = float("nan")
    assert lag_test([1, 2, nan, 4, 5, 6], [1, 2, 3, 4, 5, nan], [0, 6]).tokens == 2  # tokens 1 and 3
    assert lag_test([1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 4]).tokens == 0
    empty = lag_test([], [], [0])
    assert (empty.best, empty.tokens, np.isnan(empty.correlation[0])) == (0, 0, True)


@pytest.mark.parametrize(
    "arguments", [([1.0], [1.0, 2.0], [0, 1]), ([1.0], [1.0], [0, 2]), ([1.0], [1.0], []), ([[1.0]], [[1.0]], [0, 1])]
)
def test_lengths_that_contradict_are_refused(arguments):
    with pytest.raises(ArgumentError, match="TG-DOCTOR-005"):
        lag_test(*arguments)
    with pytest.raises(ArgumentError, match="TG-DOCTOR-005"):
        lag_test([1.0], [1.0], [0, 1], lags=(1, 2))


def test_bigrams_leave_the_token_itself_out():
    # After 1: 2 three times, 3 once; T = 4, V = 2, m = 4. p(2) = (3 - 1/2) / 4, p(3) = (1 - 1/2) / 4.
    # 2: (3 - 1 + 4 * 0.625) / (4 - 1 + 4) = 4.5 / 7. 3: (1 - 1 + 4 * 0.125) / 7 = 0.5 / 7.
    found = bigram_logprobs([1, 1, 1, 1], [2, 2, 3, 2])
    np.testing.assert_allclose(np.exp(found), [4.5 / 7, 4.5 / 7, 0.5 / 7, 4.5 / 7])
    assert len(bigram_logprobs([], [])) == 0


@pytest.fixture(scope="module")
def turns():
    """(previous ids, ids, logprobs) of each turn of the example, by trace."""
    s = tg.align(tg.read(EXAMPLE / "traces.jsonl.zst"), tg.Tokenizer.from_pretrained(MODEL))
    at, owner = s.terms, np.repeat(s.trace, np.diff(s.cu_seqlens))[s.terms]
    turn = s.cu_turns[owner] + s.turn[at]
    cuts = np.flatnonzero(np.diff(turn)) + 1
    parts = zip(*(np.split(column, cuts) for column in (s.ids[at - 1], s.ids[at], s.rollout_logprobs[at])), strict=True)
    return list(parts), owner[np.concatenate([[0], cuts])]


def judged(turns, lag):
    """The lag that is found for these turns when every turn's list is moved by `lag`."""
    moved = [np.roll(logprobs, -lag) for _, _, logprobs in turns]
    reference = bigram_logprobs(*(np.concatenate([turn[column] for turn in turns]) for column in (0, 1)))
    cu = np.concatenate([[0], np.cumsum([len(turn[1]) for turn in turns])])
    return leading_lag(lag_test(np.concatenate(moved), reference, cu))


def rates(turns, traces, repeats, seed=0):
    """Share of draws of so many traces that are judged shifted: right files, and files moved by -1 and 1 as such."""
    parts, owner = turns
    rng = np.random.default_rng(seed)
    found = {-1: [], 0: [], 1: []}
    for _ in range(repeats):
        drawn = rng.choice(int(owner.max()) + 1, traces, replace=False)
        some = [parts[i] for i in np.flatnonzero(np.isin(owner, drawn))]
        for lag, row in found.items():
            row.append(judged(some, lag) == lag if lag else judged(some, 0) != 0)
    return {lag: float(np.mean(row)) for lag, row in found.items()}


def test_no_right_file_is_called_shifted_and_fifty_traces_are_enough_to_find_a_shift(turns):
    assert rates(turns, 10, 100)[0] == 0.0
    assert rates(turns, 50, 40) == {-1: 1.0, 0: 0.0, 1: 1.0}


def test_the_whole_example_is_right_and_found_shifted_either_way(turns):
    assert [judged(turns[0], lag) for lag in (-1, 0, 1)] == [-1, 0, 1]
