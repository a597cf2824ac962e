"""Logprobs of exactly 0 that no model gave: a token of probability 1 leaves no room for another, and has others near 1.

`Zeros.add` takes one batch; memory is a few numbers, and the last answers to the last prompts.
"""

from dataclasses import dataclass, field

import numpy as np

from tracegrad.doctor.finding import Hits, Place
from tracegrad.doctor.look import Array, Look

GREEDY = 0.01  # temperature below which tokens are not drawn
PLAIN = 0.7  # temperature from which few tokens are certain
NEAR = 0.01  # nats: probabilities from 0.99 to 1, which a model gives more often than exactly 1
MORE = 10  # zeros for each logprob that near: real data had up to 2
ROUNDED = 1e-4  # a file whose logprobs are all multiples of it has zeros by rounding
PROMPTS = 256  # whose last answers are kept
APART, SHARE_APART = 3, 0.1  # contradictions, and their share of the places at which answers part
STOPS, SHARE_STOPS, SHARE_OTHERS = 8, 0.5, 0.02
TOKENS, ZEROS, SHARE = 64, 20, 0.03


@dataclass
class Count:
    """Logprobs of one kind of token: how many, exactly 0, and near 0; where the first zero stands."""

    tokens: int = 0
    zeros: int = 0
    near: int = 0
    first: Place | None = None

    def add(self, look: Look, at: Array, logprobs: Array) -> None:
        """Adds tokens `at` of the own ones of a batch, with their logprobs."""
        zero = logprobs == 0
        self.tokens += len(at)
        self.zeros += int(zero.sum())
        self.near += int(np.sum((logprobs < 0) & (logprobs > -NEAR)))
        if self.first is None and zero.any():
            self.first = look.at(int(look.own_generation[at[zero.argmax()]]))

    @property
    def share(self) -> float:
        """Zeros among the tokens."""
        return self.zeros / max(self.tokens, 1)

    @property
    def is_bare(self) -> bool:
        """Whether exact zeros stand without the logprobs near 0 that a model gives beside them."""
        return self.zeros > MORE * self.near


@dataclass
class Zeros:
    """Zeros of a file.

    Args:
        parted, contradicted: places at which two answers to one prompt part, and those where a token that was drawn
            has a logprob of exactly 0.
        stops, others: stop tokens and other tokens, where the temperature is known not to be low.
        unsaid_stops, unsaid: the same where no temperature is recorded.
        exact: whether a logprob is no multiple of 0.0001.
    """

    parted: int = 0
    contradicted: int = 0
    first: Place | None = None
    found: str = ""
    stops: Count = field(default_factory=Count)
    others: Count = field(default_factory=Count)
    unsaid_stops: Count = field(default_factory=Count)
    unsaid: Count = field(default_factory=Count)
    exact: bool = False
    nonzero: bool = False
    answers: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def add(self, look: Look) -> None:
        """Counts one batch."""
        own, generation = look.own, look.own_generation
        logprobs = look.sequences.rollout_logprobs[own].astype(np.float64)
        heat = look["temperature"][generation]
        known = ~np.isnan(logprobs)
        values = logprobs[known & (logprobs != 0)] / ROUNDED
        self.nonzero |= len(values) > 0
        self.exact |= bool(np.any(np.abs(values - np.round(values)) > 0.01))
        last = np.diff(generation, append=-1) != 0
        stop = last & look.vocabulary.is_special(look.sequences.ids[own])
        # What a grammar forces has probability 1.
        forced = look.finish == "tool_calls"
        forced[[g for g, asked in look.mismatch.items() if asked.keys() - {"temperature", "top_p"}]] = True
        known &= ~forced[generation]
        for usable, stops, others in (
            (known & (heat >= PLAIN), self.stops, self.others),
            (known & np.isnan(heat), self.unsaid_stops, self.unsaid),
        ):
            stops.add(look, at := np.flatnonzero(usable & stop), logprobs[at])
            others.add(look, at := np.flatnonzero(usable & ~stop), logprobs[at])
        self._compare(look, logprobs)

    def _compare(self, look: Look, logprobs: Array) -> None:
        sequences, own = look.sequences, look.own
        cu = np.searchsorted(look.own_generation, np.arange(look.generations + 1))
        for g in np.flatnonzero((np.diff(cu) > 0) & ~(look["temperature"] < GREEDY)):
            span = slice(cu[g], cu[g + 1])
            start = int(own[span.start])
            ids, said = sequences.ids[own[span]], logprobs[span]
            prompt = hash(sequences.ids[sequences.cu_seqlens[look.branch[start]] : start].tobytes())
            before = self.answers.pop(prompt, None)
            self.answers[prompt] = ids, said
            if len(self.answers) > PROMPTS:
                self.answers.pop(next(iter(self.answers)))
            if before is None:
                continue
            both = min(len(ids), len(before[0]))
            parts = np.flatnonzero(ids[:both] != before[0][:both])
            if not len(parts) or np.isnan(said[at := int(parts[0])]) or np.isnan(before[1][at]):
                continue
            self.parted += 1
            if said[at] == 0 or before[1][at] == 0:
                self.contradicted += 1
                if self.first is None:
                    self.first = look.at(int(g), at)
                    self.found = "another answer to the prompt goes on with another token, and one of the two has 0"

    def hits(self, turns: int) -> Hits:
        """Hits where the zeros cannot be a model's; `turns` are those of the file."""
        if self.contradicted >= APART and self.contradicted >= SHARE_APART * self.parted:
            said = f"{self.found} ({self.contradicted:,} of {self.parted:,} such places)"
            return Hits(self.contradicted, self.parted, self.first, said)
        if self.nonzero and not self.exact:
            return Hits(0, turns)
        for stops, others in ((self.stops, self.others), (self.unsaid_stops, self.unsaid)):
            alone = others.share <= SHARE_OTHERS or (stops is self.stops and others.is_bare)
            if stops.tokens >= STOPS and stops.share >= SHARE_STOPS and stops.is_bare and alone:
                said = f"{stops.zeros:,} of {stops.tokens:,} stop tokens have 0, {others.share:.1%} of the others"
                return Hits(stops.zeros, stops.tokens, stops.first, said)
        found = self.others
        if found.tokens >= TOKENS and found.zeros >= ZEROS and found.share >= SHARE and found.is_bare:
            said = f"{found.zeros:,} of {found.tokens:,} tokens have 0, and {found.near:,} a probability from 0.99 to 1"
            return Hits(found.zeros, found.tokens, found.first, said)
        return Hits(0, turns)
