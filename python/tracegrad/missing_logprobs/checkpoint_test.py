"""Test whether a checkpoint wrote sampled tokens, by the calibration of its own predictions at these tokens.

If the checkpoint wrote them, each token is a draw from the distribution that the checkpoint predicts after the ids
before it. The test draws from these distributions many times, and compares the recorded tokens with the draws.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad.missing_logprobs.predictions import Predictions

DRAWS = 4999
"""Number of simulated files. The smallest p-value is 1 / (DRAWS + 1)."""
FALSE_REFUSALS = 0.01
"""Probability of refusing tokens that the checkpoint wrote."""
WEIGHTS = {
    "tokens too improbable": 0.15,
    "tokens too probable": 0.4,
    "most probable id": 0.3,
    "pairs of ids": 0.1,
    "rare ids": 0.05,
}
"""Weight of each statistic: the share of the error that it uses, about. Each other checkpoint has `_OTHER_WEIGHT`."""
_OTHER_WEIGHT = 0.15
_LEAST = 1e-9
"""Least probability of all ids that are not listed together, because sums of float32 end there."""
RARE = 1e-3
"""An id is rare if its probability is below this."""
MIN_VARIANCE, MAX_PAIRS = 0.4, 400
"""Pairs of (id before, id) are counted if the variance of their count is at least this; at most so many."""
MAX_GAP, MAX_GAP_SHARE = 0.5, 0.05
"""Recorded logprobs are another model's if this share of them is further than MAX_GAP nats from the predictions."""
MAX_OUTSIDE_SHARE = 0.005
"""Share of tokens outside the ids that their sampling options allow, beyond one token, that rounding may explain."""
POWER_TEMPERATURE = 1.5
"""The power is that of finding tokens sampled at this multiple of the temperature, or at its inverse."""
MIN_POWER = 0.9

Verdict = Literal["accepted", "refused", "undecided"]


@dataclass(frozen=True)
class CheckpointTest:
    """The result of `check_checkpoint`.

    Args:
        verdict: "accepted", "refused", or "undecided" if the tokens cannot show even a wrong temperature.
        reason: one sentence that explains it.
        tokens: number of tested tokens.
        p_value: probability that a file of this checkpoint looks at least as unlikely, over the simulated statistics.
        p_values: the p-value of each statistic.
        power: probability that the test would refuse these contexts, with tokens sampled at the less visible of 1.5
            times the temperature and its inverse.
        outside: tokens outside of the ids that their sampling options allow.
        recorded, differing: recorded logprobs that were compared, and those that differ by more than 0.5 nats.
        comparisons: for each other checkpoint, log of its likelihood over that of the tested one, in nats.

    >>> CheckpointTest("undecided", "there is no token to test", tokens=0, p_value=1.0).as_dict()["verdict"]
    'undecided'
    """

    verdict: Verdict
    reason: str
    tokens: int
    p_value: float
    p_values: Mapping[str, float] = field(default_factory=dict)
    power: float = 0.0
    outside: int = 0
    recorded: int = 0
    differing: int = 0
    comparisons: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a JSON-serializable dict."""
        return {**vars(self), "p_values": dict(self.p_values), "comparisons": dict(self.comparisons)}


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of a test, with what the checkpoint predicts at each.

    Args:
        predictions: of M tokens, at their sampling temperature and over the ids that their sampling options allow.
        previous: [M] the id before each token.
        recorded_logprobs: [M] float32, of the same distribution; NaN if none is recorded.
        outside: tokens, not among the M, that are outside of the ids that their sampling options allow.

    >>> top = np.log(np.array([[0.6, 0.4]], np.float32))
    >>> one = Predictions(top[:, 0], np.array([[7, 9]], np.int32), top, np.array([7], np.int32))
    >>> tokens = SampledTokens(one, np.array([5], np.int32), np.array([np.nan], np.float32))
    >>> check_checkpoint(tokens).tokens
    1
    """

    predictions: Predictions
    previous: NDArray[np.int32]
    recorded_logprobs: NDArray[np.float32]
    outside: int = 0


def check_checkpoint(
    tokens: SampledTokens, others: Mapping[str, NDArray[np.float32]] | None = None, *, seed: int = 0
) -> CheckpointTest:
    """Test whether a checkpoint wrote these tokens.

    Five sums over the tokens are compared with the same sums of `DRAWS` simulated files: the logprob of the token above
    and below its expectation (the score test of the temperature), how often the token is the most probable id, the
    chi-square of the counts of pairs of adjacent ids, and how often the token is rare. Each other checkpoint adds the
    log of its likelihood over that of the tested one, the most powerful statistic if it wrote the tokens
    (Neyman and Pearson). The smallest weighted p-value is compared with that of the simulated files. A file that the
    checkpoint wrote is refused with probability `FALSE_REFUSALS`, whatever the model and the number of tokens.

    Args:
        tokens: the tokens and predictions.
        others: by the name of another checkpoint, its logprobs [M, K] of the listed ids, -inf where there are fewer.
        seed: of the simulation.

    >>> half = np.log(np.full((400, 2), 0.5, np.float32))
    >>> alternating = np.tile(np.array([3, 4], np.int32), 200)
    >>> fair = Predictions(half[:, 0], np.tile(np.array([[3, 4]], np.int32), (400, 1)), half, alternating)
    >>> check_checkpoint(SampledTokens(fair, np.zeros(400, np.int32), np.full(400, np.nan, np.float32))).verdict
    'undecided'
    """
    predictions, count = tokens.predictions, len(tokens.predictions)
    differing, compared = _differing(tokens)
    told: dict[str, Any] = {
        "tokens": count,
        "outside": tokens.outside,
        "recorded": compared,
        "differing": differing,
    }
    if not count:
        return CheckpointTest("undecided", "there is no token to test", p_value=1.0, **told)
    simulation = _Simulation(predictions, tokens.previous, others or {}, seed)
    statistics = simulation.statistics(simulation.recorded[None], simulation.drawn())
    p_value, p_values, least = _combined(statistics, simulation.weights)
    told |= {"p_value": p_value, "p_values": p_values, "power": simulation.power(statistics, least)}
    told |= {"comparisons": {name: float(statistics[name][0]) for name in others or {}}}
    if tokens.outside > max(1, MAX_OUTSIDE_SHARE * (count + tokens.outside)):
        return CheckpointTest(
            "refused",
            f"{tokens.outside:,} of {count + tokens.outside:,} tokens are not among the ids that the recorded sampling "
            "options allow under this checkpoint",
            **told,
        )
    if compared and differing > MAX_GAP_SHARE * compared:
        return CheckpointTest(
            "refused",
            f"{differing:,} of {compared:,} recorded logprobs differ from the checkpoint's by more than {MAX_GAP} nats",
            **told,
        )
    if p_value <= FALSE_REFUSALS:
        worst = min(p_values, key=lambda name: p_values[name] / simulation.weights[name])
        meaning = _MEANING.get(worst) or f"{worst} explains them better, by {told['comparisons'][worst]:.1f} nats"
        return CheckpointTest("refused", f"the tokens are not draws from its predictions: {meaning}", **told)
    if told["power"] < MIN_POWER:
        return CheckpointTest(
            "undecided",
            f"{count:,} such tokens show too little: 1.5 times the temperature would be found with "
            f"probability {told['power']:.0%}",
            **told,
        )
    return CheckpointTest("accepted", f"{count:,} tokens look like draws from its predictions", **told)


_MEANING = {
    "tokens too improbable": "their probabilities are too low (another checkpoint or template, a higher temperature)",
    "tokens too probable": "their probabilities are too high (a lower temperature, greedy text, a later checkpoint)",
    "most probable id": "they are the most probable id too often (a lower temperature, or a later checkpoint)",
    "pairs of ids": "some ids follow others too often or too rarely (another checkpoint)",
    "rare ids": "too many have a probability below 0.001 (another checkpoint or template)",
}


def _differing(tokens: SampledTokens) -> tuple[int, int]:
    """Return how many recorded logprobs differ from the predictions, and how many there are."""
    gap = np.abs(tokens.recorded_logprobs - tokens.predictions.logprobs)
    return int(np.count_nonzero(gap > MAX_GAP)), int(np.count_nonzero(~np.isnan(gap)))


def _combined(
    statistics: Mapping[str, NDArray[np.float64]], weights: Mapping[str, float]
) -> tuple[float, dict[str, float], NDArray[np.float64]]:
    """Combine statistics [1 + DRAWS], of which the first is the recorded file's and larger is less likely.

    Returns:
        the p-value of the smallest weighted p-value; the p-value of each; and the smallest weighted p-value of each
        simulated file [DRAWS].
    """
    ranks = {name: _p_values(values, values) for name, values in statistics.items()}
    least = np.min([ranks[name] / weights[name] for name in ranks], axis=0)
    p_value = float(_p_values(-least[:1], -least)[0])
    return p_value, {name: float(values[0]) for name, values in ranks.items()}, least[1:]


def _p_values(values: NDArray[np.float64], among: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each value the share of the values `among` that are at least as large; at least that of one."""
    ordered = np.sort(among)
    above = len(ordered) - np.searchsorted(ordered, values - 1e-9 * np.maximum(np.abs(values), 1))
    return np.maximum(above, 1) / len(ordered)


class _Simulation:
    """Files of the same contexts, drawn from predictions.

    An outcome of a token is the place of its id among the predicted ids, or their number K for any other id.

    Args:
        predictions: M tokens with K predicted ids each.
        previous: [M] the id before each token.
        others: logprobs [M, K] of the listed ids under other checkpoints, by name.
        seed: of the draws.
    """

    def __init__(
        self,
        predictions: Predictions,
        previous: NDArray[np.int32],
        others: Mapping[str, NDArray[np.float32]],
        seed: int,
    ) -> None:
        self.logprobs = predictions.top_logprobs.astype(np.float64)
        self.probabilities = np.exp(self.logprobs)
        self.rest = np.maximum(1 - self.probabilities.sum(1), 0)
        # Outside of the list the logprob counts as the least in it, so that its expectation is known.
        least = np.min(np.where(np.isfinite(self.logprobs), self.logprobs, np.inf), 1)
        self.scores = np.concatenate([np.where(np.isfinite(self.logprobs), self.logprobs, -1e3), least[:, None]], 1)
        everything = np.concatenate([self.probabilities, self.rest[:, None]], 1)
        self.scores = self.scores - (everything * self.scores).sum(1, keepdims=True)
        self.is_rare = np.concatenate([self.logprobs < np.log(RARE), (least < np.log(RARE))[:, None]], 1)
        self.recorded = predictions.places()
        self.cells, self.expected, self.variance = self._pairs(predictions.ids, previous)
        self.random = np.random.default_rng(seed)
        self.gains = {name: self._gain(logprobs.astype(np.float64)) for name, logprobs in others.items()}
        self.weights = {**WEIGHTS, **dict.fromkeys(others, _OTHER_WEIGHT)}

    def _gain(self, other: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [M, K + 1]: log of the probability of each outcome under another checkpoint, over that here."""
        rest = np.maximum(1 - np.exp(other).sum(1), 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            listed = np.where(np.isfinite(self.logprobs), other - self.logprobs, 0.0)
            outside = np.log(np.maximum(rest, _LEAST) / np.maximum(self.rest, _LEAST))
        return np.concatenate([listed, outside[:, None]], 1)

    def _pairs(
        self, ids: NDArray[np.int32], previous: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Return the cell of each outcome [M, K + 1], -1 for none; expectation and variance of each cell's count."""
        p = self.probabilities
        keys = (previous.astype(np.int64)[:, None] << 32) + ids
        unique, cell = np.unique(keys, return_inverse=True)
        cell = cell.reshape(keys.shape)
        variance = np.bincount(cell.ravel(), (p * (1 - p)).ravel(), len(unique))
        chosen = np.flatnonzero(variance >= MIN_VARIANCE)
        chosen = chosen[np.argsort(-variance[chosen], kind="stable")[:MAX_PAIRS]]
        number = np.full(len(unique), -1)
        number[chosen] = np.arange(len(chosen))
        expected = np.bincount(cell.ravel(), p.ravel(), len(unique))
        cells = np.concatenate([number[cell], np.full((len(ids), 1), -1)], 1)
        return cells, np.asarray(expected[chosen], np.float64), np.asarray(variance[chosen], np.float64)

    def drawn(self, temperature: float = 1.0, draws: int = DRAWS) -> NDArray[np.int16]:
        """Draw outcomes [draws, M] at a multiple of the temperature. The ids outside of the list stay one outcome."""
        p = np.concatenate([self.probabilities, self.rest[:, None]], 1) ** (1 / temperature)
        cumulative = np.cumsum(p, 1)
        cumulative /= cumulative[:, -1:]
        out = np.empty((draws, len(p)), np.int16)
        for token, edges in enumerate(cumulative):
            out[:, token] = np.searchsorted(edges[:-1], self.random.random(draws), side="right")
        return out

    def statistics(self, *parts: NDArray[np.integer]) -> dict[str, NDArray[np.float64]]:
        """Return the statistics of files with these outcomes [F, M] each, one after the other."""
        files = sum(len(part) for part in parts)
        score, top, rare = np.zeros(files), np.zeros(files), np.zeros(files)
        gains = {name: np.zeros(files) for name in self.gains}
        counts = np.zeros((files, len(self.expected) + 1))
        every = np.arange(files)
        for token in range(len(self.scores)):
            outcome = np.concatenate([part[:, token] for part in parts])
            score += self.scores[token][outcome]
            top += (outcome == 0) - self.probabilities[token, 0]
            rare += self.is_rare[token][outcome]
            counts[every, self.cells[token][outcome]] += 1  # The last column counts the outcomes without a cell.
            for name, gain in gains.items():
                gain += self.gains[name][token][outcome]
        pairs = ((counts[:, :-1] - self.expected) ** 2 / self.variance).sum(1)
        return {**dict(zip(WEIGHTS, (-score, score, top, pairs, rare), strict=True)), **gains}

    def power(self, null: Mapping[str, NDArray[np.float64]], null_least: NDArray[np.float64]) -> float:
        """Return the probability of a refusal of files at a wrong temperature, the less visible of two.

        Args:
            null: the statistics of the recorded file and of the simulated ones.
            null_least: the smallest weighted p-value of each simulated file.
        """
        shares = []
        for temperature in (POWER_TEMPERATURE, 1 / POWER_TEMPERATURE):
            files = self.statistics(self.drawn(temperature, 200))
            least = np.min([_p_values(files[name], null[name]) / self.weights[name] for name in files], axis=0)
            shares.append(float(np.mean(_p_values(-least, -null_least) <= FALSE_REFUSALS)))
        return min(shares)
