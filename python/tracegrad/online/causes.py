"""Sampling that the run did not ask for: a temperature, truncation, penalties; each fitted to what the servers said.

A server's processed logprob is that of the distribution it samples from. So the trainer's distribution, changed as the
sampling changes it, gives the logprobs that the server gave, for one value of the parameter. Called by `suspects`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tracegrad.batch import Batch
from tracegrad.kernels.head import logits_of
from tracegrad.learner import Run
from tracegrad.online.canary import Sample
from tracegrad.online.proof import Floats
from tracegrad.policy import head_of
from tracegrad.policy.forward import read_states

SENT = (
    "Let requests reach the servers as the run sends them, and start vLLM with --generation-config vllm, so that "
    "defaults of the model's folder do not apply."
)
TOKENS = 512
"""Tokens whose distributions are looked at, at most: [TOKENS, V] floats are held."""
_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Cause:
    """A mistake that would explain a gap.

    Args:
        words: what it is and how to cure it; known once `logprobs` was called.
        logprobs: gives the [M] logprobs that the servers would then have given. Every rank calls it.
    """

    words: str
    logprobs: Callable[[], Floats]


@dataclass(frozen=True)
class Distributions:
    """The trainer's logits at the tokens of a sample. M tokens, a vocabulary of V.

    Args:
        logits: [M, V] float64, before any temperature.
        target: [M], the tokens.
        inv_temperature: [M].
        rollout: [M], the servers' logprobs, nats.
        prompt, output: for each token, the ids before it: of the prompt, and sampled for the same answer.
    """

    logits: NDArray[np.float64]
    target: NDArray[np.int64]
    inv_temperature: NDArray[np.float64]
    rollout: NDArray[np.float64]
    prompt: list[NDArray[np.int64]]
    output: list[NDArray[np.int64]]
    ordered: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        scores = self.logits * self.inv_temperature[:, None]
        whole = np.exp(scores - scores.max(-1, keepdims=True))
        whole /= whole.sum(-1, keepdims=True)
        own = np.take_along_axis(whole, self.target[:, None], -1)
        kept = -np.sort(-whole, -1)
        object.__setattr__(self, "ordered", (kept, np.cumsum(kept, -1), (whole > own).sum(-1)))

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """[M] as they are asked for."""
        return _logprobs(self.logits, self.target, self.inv_temperature)

    def at(self, temperature: float) -> NDArray[np.float64]:
        """[M] logprobs at another temperature."""
        return _logprobs(self.logits, self.target, np.full(len(self.target), 1 / temperature))

    def kept(self, count: NDArray[np.int64]) -> NDArray[np.float64]:
        """[M] logprobs where the `count` likeliest tokens of each distribution are left; -inf for one that is not."""
        _, mass, rank = self.ordered
        inside = mass[np.arange(len(count)), np.clip(count, 1, mass.shape[1]) - 1]
        return np.where(rank < count, self.logprobs - np.log(inside), -np.inf)

    def top_k(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs under top_k."""
        return self.kept(np.full(len(self.target), int(value)))

    def top_p(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs under top_p: the fewest likeliest tokens that hold so much."""
        return self.kept(1 + (self.ordered[1][:, :-1] < value).sum(-1))

    def min_p(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs under min_p: tokens with at least this share of the likeliest one's probability."""
        kept = self.ordered[0]
        return self.kept((kept >= value * kept[:, :1]).sum(-1))

    def frequency_penalty(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs where each logit is lowered by this much for each time its token was sampled before."""
        return self._changed(lambda logit, times: logit - value * times, self.output)

    def presence_penalty(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs where the logit of each token that was sampled before is lowered by this much."""
        return self._changed(lambda logit, _: logit - value, self.output)

    def repetition_penalty(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs where the logit of each token before, of the prompt too, is divided by this, or multiplied."""
        seen = [np.concatenate(both) for both in zip(self.prompt, self.output, strict=True)]
        return self._changed(lambda logit, _: np.where(logit > 0, logit / value, logit * value), seen)

    def _changed(
        self, change: Callable[..., NDArray[np.float64]], seen: list[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        found = self.logits.copy()
        for row, before in zip(found, seen, strict=True):
            ids, times = np.unique(before, return_counts=True)
            row[ids] = change(row[ids], times)
        return _logprobs(found, self.target, self.inv_temperature)


def _logprobs(
    logits: NDArray[np.float64], target: NDArray[np.int64], inv_temperature: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[M] of the targets, by [M, V] logits and [M] inverse temperatures."""
    scores = logits * inv_temperature[:, None]
    scores -= scores.max(-1, keepdims=True)
    return np.take_along_axis(scores, target[:, None], -1)[:, 0] - np.log(np.exp(scores).sum(-1))


def sampling_causes(driven: Run, sample: Sample) -> Iterator[Cause]:
    """Yield a temperature, truncations and penalties, each with the value that fits best. Every rank calls this."""
    seen = distributions(driven, sample)
    few = len(seen.target)

    def miss(logprobs: NDArray[np.float64]) -> float:
        return float(np.minimum(np.abs(logprobs - seen.rollout), 5.0).mean())

    def whole(logprobs: NDArray[np.float64]) -> Floats:
        return np.r_[logprobs, np.full(len(sample.step) - few, np.nan)].astype(np.float32)

    heat = float(np.exp(_least(lambda log: miss(seen.at(np.exp(log))), np.log(np.geomspace(0.05, 5.0, 47)))))
    plain = " or that gives raw logprobs, without --logprobs-mode processed_logprobs" if abs(heat - 1) < 1e-3 else ""
    found = seen.at(heat)
    yield Cause(
        f"Their logprobs are those of temperature {heat:.3g}, which nobody told{plain}. Record the temperature with "
        f"each request. {SENT}",
        lambda: whole(found),
    )
    ways: list[tuple[str, Callable[[float], NDArray[np.float64]], NDArray[np.float64], bool]] = [
        ("top_k", seen.top_k, np.arange(1.0, min(seen.logits.shape[1], 201)), False),
        ("top_p", seen.top_p, np.r_[np.linspace(0.01, 0.99, 99), 0.995, 0.999], True),
        ("min_p", seen.min_p, np.r_[np.linspace(0.001, 0.009, 9), np.linspace(0.01, 1, 100)], True),
        ("frequency_penalty", seen.frequency_penalty, np.linspace(-2, 2, 41), True),
        ("presence_penalty", seen.presence_penalty, np.linspace(-2, 2, 41), True),
        ("repetition_penalty", seen.repetition_penalty, np.linspace(0.5, 2, 31), True),
    ]
    for name, give, grid, between in ways:
        value = _least(lambda at, give=give: miss(give(at)), grid, between)
        logprobs = give(value)
        yield Cause(
            f"They sample with {name} {value:.3g}, which the run did not ask for. {SENT}",
            lambda logprobs=logprobs: whole(logprobs),
        )


def _least(of: Callable[[float], float], grid: NDArray[np.float64], between: bool = True) -> float:
    """The place of the smallest value: on a grid, and between its neighbours by golden sections."""
    values = [of(float(each)) for each in grid]
    # Several may fit alike, as truncation moves in steps: the roundest is the likeliest to have been set.
    alike = np.flatnonzero(np.array(values) <= min(values) + 1e-9)
    at = min(alike, key=lambda each: len(f"{grid[each]:g}"))
    best, least = float(grid[at]), values[at]
    low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
    for _ in range(40 if between else 0):
        left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
        below, above = of(left), of(right)
        for place, value in ((left, below), (right, above)):
            if value < least - 1e-9:
                best, least = place, value
        low, high = (low, right) if below <= above else (left, high)
    return best


def distributions(driven: Run, sample: Sample) -> Distributions:
    """The trainer's distributions at the first `TOKENS` tokens of a sample. Every rank calls this."""
    parts, terms = [], []
    with torch.no_grad():
        for batch in sample.step.batches:
            logits = driven.target.policy(_logits, batch.to(driven.target.device), driven.precision)
            row = np.asarray(batch.row)
            parts.append(logits[row].astype(np.float64) if len(row) else np.zeros((0, logits.shape[-1])))
            terms.append(np.asarray(batch.term))
    driven.target.rest()
    order = np.argsort(np.concatenate(terms))[:TOKENS]
    logits = np.concatenate(parts)[order]
    prompt, output, target, warmth = [], [], [], []
    starts = np.cumsum([0, *(len(row.ids) for row in sample.rows)])
    for origin, trace in zip(sample.step.origin[:TOKENS], sample.step.trace[:TOKENS], strict=True):
        row, at = sample.rows[trace], int(origin - starts[trace])
        sampled = ~np.isnan(row.rollout[:at])
        begins = at if not at or not sampled[-1] else at - int(np.argmin(np.r_[sampled[::-1], False]))
        prompt.append(row.ids[:begins])
        output.append(row.ids[begins:at])
        target.append(row.ids[at])
        warmth.append(row.inv_temperature[at])
    return Distributions(
        logits,
        np.array(target),
        np.array(warmth, np.float64),
        sample.rollout[:TOKENS].astype(np.float64),
        prompt,
        output,
    )


def _logits(model: torch.nn.Module, batch: Batch, precision: torch.dtype) -> NDArray[np.float32]:
    """[U, V] of a batch, before any temperature."""
    head = head_of(model)
    low = precision != torch.float32
    with torch.autocast(batch.ids.device.type, precision, enabled=low):
        hidden = read_states(model, batch)
    cast = {
        name: None if each is None else each.to(hidden.dtype)
        for name, each in (("weight", head.weight), ("bias", head.bias))
    }
    return logits_of(hidden, head._replace(**cast)).cpu().numpy()
