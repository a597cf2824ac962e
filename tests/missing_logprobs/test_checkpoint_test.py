"""The test whether a checkpoint wrote tokens: p-values against exact enumerations, the error rate, each reason."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from tracegrad.missing_logprobs import SampledTokens, check_checkpoint
from tracegrad.missing_logprobs.checkpoint_test import DRAWS, MIN_VARIANCE, RARE, WEIGHTS
from tracegrad.missing_logprobs.predictions import Predictions

FAIR = (0.5, 0.5)


def tokens_of(probabilities, places, *, ids=None, previous=None, recorded=None, outside=0):
    """Make tokens [M] from rows of probabilities and the place of each sampled id; K stands for an id not listed."""
    p = np.array(probabilities)
    rows, listed = p.shape
    ids = np.tile(np.arange(listed), (rows, 1)) + 10 if ids is None else np.array(ids)
    with_other = np.concatenate([ids, np.full((rows, 1), 999)], 1)
    with np.errstate(divide="ignore"):
        top = np.log(p)
        logprobs = np.log(np.concatenate([p, 1 - p.sum(1, keepdims=True)], 1).clip(0))[np.arange(rows), places]
    predictions = Predictions(
        logprobs.astype(np.float32),
        ids.astype(np.int32),
        top.astype(np.float32),
        with_other[np.arange(rows), places].astype(np.int32),
    )
    # Ids before the tokens that all differ leave no pair to count.
    previous = np.arange(rows) if previous is None else np.broadcast_to(previous, rows)
    recorded = np.full(rows, np.nan) if recorded is None else recorded
    return SampledTokens(predictions, previous.astype(np.int32), np.asarray(recorded, np.float32), outside)


def monte_carlo(p):
    """Return the range of a p-value that is `p` exactly, from DRAWS files: four standard deviations."""
    p = min(p, 1.0)
    return pytest.approx((1 + DRAWS * p) / (1 + DRAWS), abs=4 * math.sqrt(p * (1 - p) / DRAWS) + 1e-12)


def leading(result, weights=WEIGHTS):
    """Return the statistic that decides: that of the smallest p-value over its weight."""
    return min(result.p_values, key=lambda name: result.p_values[name] / weights[name])


@pytest.mark.parametrize(
    ("most_probable", "at_least", "as_far"),
    # Of 10 fair tokens: P(count >= 10) = 1 / 1024; >= 7: (120 + 45 + 10 + 1) / 1024. Both sides: twice that.
    [(10, 1 / 1024, 2 / 1024), (7, 176 / 1024, 352 / 1024)],
)
def test_fair_tokens_are_counted_by_the_binomial(most_probable, at_least, as_far):
    places = [0] * most_probable + [1] * (10 - most_probable)
    result = check_checkpoint(tokens_of([FAIR] * 10, places, previous=5))
    assert result.p_values["most probable id"] == monte_carlo(at_least)
    # The pairs (5, 10) and (5, 11) have an expected count of 5 and a variance of 2.5 each.
    assert result.p_values["pairs of ids"] == monte_carlo(as_far)
    # All ids have the same logprob, which is its expectation, and none is rare.
    names = "tokens too improbable", "tokens too probable", "rare ids"
    assert [result.p_values[name] for name in names] == [1, 1, 1]


@pytest.mark.parametrize("most_probable", [3, 8, 12])
def test_the_scores_of_two_ids_are_counted_by_the_binomial(most_probable):
    # The sum of the logprobs is higher exactly if more of the 12 tokens are the id of probability 0.7.
    counts = [math.comb(12, count) * 0.7**count * 0.3 ** (12 - count) for count in range(13)]
    result = check_checkpoint(tokens_of([(0.7, 0.3)] * 12, [0] * most_probable + [1] * (12 - most_probable)))
    assert result.p_values["tokens too improbable"] == monte_carlo(sum(counts[: most_probable + 1]))
    assert result.p_values["tokens too probable"] == monte_carlo(sum(counts[most_probable:]))
    assert result.p_values["pairs of ids"] == 1  # each variance is 0.21, which is too small to count


ROWS = [(0.6, 0.3), (0.9, 0.02), (0.5, 0.45), (0.8, 0.1), (0.6, 0.3), (0.9, 0.0006)]
OTHER = [(0.2, 0.7), (0.5, 0.3), (0.6, 0.35), (0.4, 0.5), (0.1, 0.8), (0.3, 0.6)]


def exact(rows, other, places, pairs):
    """Return the exact p-value of each statistic, over all outcomes of the tokens (the last is any other id)."""
    full = [(*row, 1 - sum(row)) for row in rows]
    scores = []
    for row, (*_, rest) in zip(rows, full, strict=True):
        expected = sum(p * math.log(p) for p in row) + rest * math.log(min(row))
        scores.append([*(math.log(p) - expected for p in row), math.log(min(row)) - expected])
    gains = [
        [math.log(q / p) for p, q in zip((*row, 1 - sum(row)), (*its, 1 - sum(its)), strict=True)]
        for row, its in zip(rows, other, strict=True)
    ]
    variance, expected_count = Counter(), Counter()
    for row, cells in zip(rows, pairs, strict=True):
        for p, cell in zip(row, cells, strict=True):
            variance[cell] += p * (1 - p)
            expected_count[cell] += p
    counted = [cell for cell in variance if variance[cell] >= MIN_VARIANCE]

    def statistics(outcomes):
        score = sum(each[place] for each, place in zip(scores, outcomes, strict=True))
        counts = Counter(cells[place] for cells, place in zip(pairs, outcomes, strict=True) if place < 2)
        square = sum((counts[cell] - expected_count[cell]) ** 2 / variance[cell] for cell in counted)
        rare = sum((*row, min(row))[place] < RARE for row, place in zip(rows, outcomes, strict=True))
        gain = sum(each[place] for each, place in zip(gains, outcomes, strict=True))
        return np.array([-score, score, outcomes.count(0), square, rare, gain])

    own, p_values = statistics(places), np.zeros(6)
    for outcomes in itertools.product(range(3), repeat=len(rows)):
        chance = math.prod(row[place] for row, place in zip(full, outcomes, strict=True))
        p_values += chance * (statistics(outcomes) >= own - 1e-6)
    return dict(zip([*WEIGHTS, "other"], p_values, strict=True)), float(own[-1])


@pytest.mark.parametrize("places", [(0, 0, 0, 0, 0, 0), (1, 2, 0, 1, 1, 0), (2, 0, 1, 2, 0, 1), (0, 0, 1, 0, 1, 2)])
def test_all_p_values_are_those_of_all_outcomes(places):
    previous, ids = [7, 7, 7, 8, 8, 7], [(1, 2), (1, 2), (2, 1), (1, 2), (2, 1), (3, 1)]
    pairs = [[(before, id_) for id_ in row] for before, row in zip(previous, ids, strict=True)]
    tokens = tokens_of(ROWS, places, ids=ids, previous=previous)
    result = check_checkpoint(tokens, {"other": np.log(OTHER).astype(np.float32)})
    expected, gain = exact(ROWS, OTHER, places, pairs)
    assert result.p_values == {name: monte_carlo(p) for name, p in expected.items()}
    assert result.comparisons == {"other": pytest.approx(gain, rel=1e-4)}


def test_few_files_of_the_checkpoint_are_refused():
    rng = np.random.default_rng(5)
    p_values = []
    for seed in range(300):
        rows = rng.dirichlet([0.6] * 5, 8)
        rows = -np.sort(-rows, 1)
        places = [rng.choice(5, p=row) for row in rows]
        previous = rng.integers(0, 2, 8)
        other = np.log(rng.dirichlet([0.6] * 5, 8)[:, :4]).astype(np.float32)
        result = check_checkpoint(tokens_of(rows[:, :4], places, previous=previous), {"other": other}, seed=seed)
        assert (result.verdict == "refused") == (result.p_value <= 0.01)
        p_values.append(result.p_value)
    p_values = np.array(p_values)
    # More than 9 of 300 happen with probability 0.0008 at a rate of 1 %.
    assert np.count_nonzero(p_values <= 0.01) <= 9
    # The p-values are uniform, but for ties: 60 of 300 are expected, with a standard deviation of 7.
    assert 32 <= np.count_nonzero(p_values <= 0.2) <= 82


def draws(rng, rows, temperature):
    p = np.array(rows) ** (1 / temperature)
    return [rng.choice(len(row), p=row / row.sum()) for row in p]


def many(rng, count, listed=5):
    return -np.sort(-rng.dirichlet([1.0] * listed, count), 1)


@pytest.mark.parametrize(("temperature", "name"), [(2.0, "tokens too improbable"), (0.5, "tokens too probable")])
def test_another_temperature_is_refused(temperature, name):
    rng = np.random.default_rng(1)
    rows = many(rng, 500)
    result = check_checkpoint(tokens_of(rows, draws(rng, rows, temperature)))
    assert (result.verdict, leading(result), result.p_values[name]) == ("refused", name, 1 / (1 + DRAWS))
    assert result.p_value < 0.002
    own = check_checkpoint(tokens_of(rows, draws(rng, rows, 1.0)))
    assert (own.verdict, own.tokens, own.outside, own.recorded) == ("accepted", 500, 0, 0)
    assert own.power > 0.99


def test_too_often_the_most_probable_id_is_refused():
    # Both ids have probability 0.5, so that only the place in the list distinguishes them.
    result = check_checkpoint(tokens_of([FAIR] * 60, [0] * 60))
    assert (result.verdict, leading(result)) == ("refused", "most probable id")
    assert result.p_values == {**dict.fromkeys(WEIGHTS, 1.0), "most probable id": 1 / (1 + DRAWS)}


def test_an_id_that_follows_another_too_often_is_refused():
    # The id 3 is always drawn after 9; it is the first in every other list, so that the most probable ids are 30 of 60.
    tokens = tokens_of([FAIR] * 60, [0, 1] * 30, ids=[(3, 4), (4, 3)] * 30, previous=9)
    result = check_checkpoint(tokens)
    assert (result.verdict, leading(result)) == ("refused", "pairs of ids")
    assert result.p_values["most probable id"] == monte_carlo(0.5 + math.comb(60, 30) / 2**61)


def test_rare_ids_are_refused():
    # 4 of 200 tokens are the id of probability 0.0006: 0.12 are expected. Their scores, -7.4 each, are balanced by 200
    # tokens that are never the third id: log 0.45 - (0.9 log 0.45 + 0.1 log 0.1) = 0.15 each.
    rows = [(0.9994, 0.0006, 0.0)] * 200 + [(0.45, 0.45, 0.1)] * 200
    result = check_checkpoint(tokens_of(rows, [1] * 4 + [0] * 196 + [1] * 200))
    assert (result.verdict, leading(result)) == ("refused", "rare ids")
    assert result.p_values["tokens too improbable"] > 0.3
    assert result.p_values["tokens too probable"] > 0.3


def test_another_checkpoint_that_explains_better_is_refused():
    # The first id has probability 0.5 here and 0.6 there, and 70 of 100 tokens are it; each list ends with 0.05 there.
    other = np.log(np.tile([0.6, 0.35], (100, 1))).astype(np.float32)
    tokens = tokens_of([(0.5, 0.4)] * 100, [0] * 70 + [1] * 28 + [2] * 2)
    gain = 70 * math.log(0.6 / 0.5) + 28 * math.log(0.35 / 0.4) + 2 * math.log(0.05 / 0.1)
    result = check_checkpoint(tokens, {"runs/step-2": other, "runs/step-3": np.log([(0.5, 0.4)] * 100)})
    assert result.comparisons == {
        "runs/step-2": pytest.approx(gain, abs=1e-3),
        "runs/step-3": pytest.approx(0, abs=1e-3),
    }
    weights = {**WEIGHTS, "runs/step-2": 0.15, "runs/step-3": 0.15}
    assert (result.verdict, leading(result, weights)) == ("refused", "tokens too probable")
    # If only the other checkpoint can tell: both ids have probability 0.5 here, in either order.
    places, ids = [0, 1] * 50, [(3, 4), (4, 3)] * 50  # always the id 3
    other = np.log([(0.8, 0.2), (0.2, 0.8)] * 50).astype(np.float32)
    result = check_checkpoint(tokens_of([FAIR] * 100, places, ids=ids), {"runs/step-2": other})
    assert (result.verdict, result.p_values["runs/step-2"]) == ("refused", 1 / (1 + DRAWS))
    assert f"runs/step-2 explains them better, by {100 * math.log(1.6):.1f} nats" in result.reason
    # The same tokens without it.
    assert check_checkpoint(tokens_of([FAIR] * 100, places, ids=ids)).verdict != "refused"


@pytest.mark.parametrize(
    ("count", "outside", "refused"),
    # One token may be outside of any number, and 0.5 % of all: of 398 + 2, or 396 + 3, the limits are 2 and 1.995.
    [(8, 1, False), (8, 2, True), (398, 2, False), (396, 3, True)],
)
def test_tokens_that_the_sampling_options_exclude_are_refused(count, outside, refused):
    result = check_checkpoint(tokens_of([FAIR] * count, [0, 1] * (count // 2), outside=outside))
    assert (result.verdict == "refused", result.outside, result.tokens) == (refused, outside, count)
    assert result.p_value > 0.1


@pytest.mark.parametrize(("differing", "refused"), [(2, False), (3, True)])
def test_recorded_logprobs_that_differ_are_refused(differing, refused):
    # 40 of 80 tokens have one, of which at most 2 may be further than 0.5 nats away.
    recorded = np.full(80, np.nan)
    recorded[:40] = np.log(0.5) + 0.49
    recorded[:differing] = np.log(0.5) - 0.51
    result = check_checkpoint(tokens_of([FAIR] * 80, [0, 1] * 40, recorded=recorded))
    assert (result.verdict == "refused", result.recorded, result.differing) == (refused, 40, differing)
    assert result.p_value > 0.1


def test_too_few_or_too_certain_tokens_are_undecided():
    few = check_checkpoint(tokens_of([(0.7, 0.3)] * 4, [0, 0, 0, 1]))
    certain = check_checkpoint(tokens_of([(0.99999, 0.00001)] * 300, [0] * 300))
    for result in few, certain:
        assert result.verdict == "undecided"
        assert result.power < 0.1
        assert f"{result.tokens:,} such tokens" in result.reason


def test_no_token_is_undecided():
    nothing = SampledTokens(
        Predictions(*(np.empty(shape, np.float32) for shape in ((0,), (0, 2), (0, 2), (0,)))),
        np.empty(0, np.int32),
        np.empty(0, np.float32),
        outside=3,
    )
    result = check_checkpoint(nothing)
    assert (result.verdict, result.tokens, result.p_value, result.power, result.outside) == ("undecided", 0, 1, 0, 3)


@pytest.mark.parametrize("count", [20, 70])
def test_the_power_is_the_probability_of_a_refusal(count):
    # Of two ids the first has probability 0.7. All statistics depend on how often it is drawn, with the p-values
    # P(>= n) of a weight of 0.4 and P(<= n) of 0.15; the most probable id has a smaller weight than 0.4.
    def binomial(p):
        return np.array([math.comb(count, n) * p**n * (1 - p) ** (count - n) for n in range(count + 1)])

    chance = binomial(0.7)
    least = np.minimum(chance[::-1].cumsum()[::-1] / 0.4, chance.cumsum() / 0.15)
    size = np.array([chance[least <= limit * (1 + 1e-9)].sum() for limit in least])
    assert np.abs(size - 0.01).min() > 0.0005  # so that the simulation refuses the same counts
    powers = []
    for temperature in (1.5, 1 / 1.5):
        first, second = 0.7 ** (1 / temperature), 0.3 ** (1 / temperature)
        powers.append(binomial(first / (first + second))[size <= 0.01].sum())
    tokens = tokens_of([(0.7, 0.3)] * count, [0] * count)
    measured = np.mean([check_checkpoint(tokens, seed=seed).power for seed in range(8)])
    # Each is measured with 200 files.
    assert measured == pytest.approx(min(powers), abs=4 * math.sqrt(min(powers) * (1 - min(powers)) / 1600) + 0.005)


def test_the_power_grows_with_the_tokens():
    rng = np.random.default_rng(3)
    rows = many(rng, 640)
    powers = [check_checkpoint(tokens_of(rows[:count], draws(rng, rows[:count], 1.0))).power for count in (10, 60, 640)]
    assert powers == sorted(powers)
    assert powers[0] < 0.3
    assert powers[2] > 0.95


def test_the_result_depends_on_the_seed_alone():
    tokens = tokens_of([(0.7, 0.2)] * 20, [0, 1] * 10)
    first, second, third = (check_checkpoint(tokens, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first.p_values != third.p_values
    assert first.as_dict()["p_values"] == first.p_values
