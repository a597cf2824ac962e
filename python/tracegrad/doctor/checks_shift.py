"""Logprobs that stand beside a neighbour of their token, found without the model.

Three signs: `lag_test` against bigram counts of the file itself; lists that begin with null, as prompt logprobs do; and
top_logprobs that give a token its neighbour's number. `rescore` compares with the model's own logprobs.
"""

from collections.abc import Iterator

import numpy as np

from tracegrad.doctor.finding import Hits, Place, check
from tracegrad.doctor.rescore import Rescored
from tracegrad.doctor.shift_test import LagTest, bigram_logprobs, lag_test
from tracegrad.doctor.stats import Sample, Turn, Whole

TOKENS, TURNS = 200, 10  # fewer tell nothing, nor do fewer that differ
LEAD, PLACE_LEAD = 4.0, 2.2  # standard errors
GAIN = 0.05  # of correlation
PARTS = 8  # of the file, tested one by one


@check(
    "logprobs shifted by one token",
    wrong=0.0,
    hurts="Every token is given its neighbour's probability: all ratios are wrong, most of them wildly, none is NaN.",
    cure="Pair logprobs[i] with the id it was returned with: drop the leading null of prompt logprobs and echoes, cut "
    "ids and logprobs by one slice. tracegrad doctor --rescore checks it against the model.",
    hides=("made_up_zeros",),
)
def shifted_logprobs(whole: Whole) -> Hits:
    """Sees logprobs that follow bigram counts of the file better one token away than where they stand; lists that begin
    with null, as those of prompts do; top_logprobs that give a token the number listed beside its neighbour.

    Threshold: a null at the head of half of the turns, unless counts say that the rest stands in place; for
    top_logprobs, nine of ten tokens of a turn in a sample of 64 traces; for counts, a lead of 4 standard errors over
    turns that differ, 2.2 over places between the same neighbours, and 0.05 of rank correlation, on at least 200 tokens
    of 10 such turns and places, for the whole file, for each tier, first and later turns, and each eighth of the file.
    On the bundled example (66,911 tokens) the correlation is 0.58 in place and 0.12 and 0.02 beside it. Of 290 draws of
    10 to 50 of its traces none was called shifted; shifted ones were found in 94 % (+1) and 77 % (-1) of draws of
    10 traces (294 tokens), 100 % and 99 % of 20, and all of 50.
    """
    told = whole.sample
    if (moved := whole.tops) and moved.lag:
        said = f"top_logprobs give {_side(moved.lag)} the number that is listed"
        return Hits(moved.count, moved.looked, moved.first, said)
    if whole.headless.count >= max(2, 0.5 * whole.turns) and not in_place(told.turns):
        return Hits(
            whole.headless.count, whole.turns, whole.headless.first, "the list begins with null, as a prompt's does"
        )
    for part, words in parts(told):
        found = judge(part)
        if found is None:
            continue
        lag, test, first = found
        said = (
            f"they follow {_side(lag)}: rank correlation {test.correlation[lag]:.2f} there, "
            f"{test.correlation[0]:.2f} in place ({test.tokens:,} tokens{words})"
        )
        return Hits(len(part) * told.stride, max(told.count, 1), first, said)
    return Hits(0, told.count)


def parts(sample: Sample) -> Iterator[tuple[list[Turn], str]]:
    """The whole sample, then the parts that may come from a recorder of their own, with words for them."""
    turns = sample.turns
    yield turns, ""
    for tier in sorted({turn.tier for turn in turns}):
        yield [turn for turn in turns if turn.tier == tier], f" of tier T{tier}"
    yield [turn for turn in turns if turn.place.turn == 0], " of first turns"
    yield [turn for turn in turns if turn.place.turn], " of later turns"
    for part in range(PARTS):
        start, end = (len(turns) * bound // PARTS for bound in (part, part + 1))
        yield turns[start:end], f" in part {part + 1} of {PARTS} of the file"


def judge(turns: list[Turn]) -> tuple[int, LagTest, Place] | None:
    """The lag that these turns' logprobs stand at, with the test and the first turn; None where it is 0 or unclear."""
    if len(turns) < TURNS:
        return None
    test = tested(turns)
    return None if (lag := shifted_to(test)) == 0 else (lag, test, turns[0].place)


def in_place(turns: list[Turn]) -> bool:
    """Whether counts say clearly that the logprobs stand beside their own tokens."""
    if len(turns) < TURNS:
        return False
    return _beside_own(tested(turns))


def _beside_own(test: LagTest) -> bool:
    return test.tokens >= TOKENS and all(test.lead[lag] <= -LEAD for lag in (-1, 1))


def tested(turns: list[Turn]) -> LagTest:
    """Recorded logprobs of these turns beside bigram counts of the same turns."""
    before, ids = (np.concatenate([getattr(turn, name) for turn in turns]) for name in ("before", "ids"))
    logprobs = np.concatenate([turn.logprobs for turn in turns])
    cu = np.concatenate([[0], np.cumsum([len(turn.ids) for turn in turns])])
    return lag_test(logprobs, bigram_logprobs(before, ids), cu)


def against_model(found: Rescored) -> Hits | None:
    """Hits where recorded logprobs follow those of the model one token away, none where they stand in place; None where
    it is unclear."""
    test = found.lags()
    lag = shifted_to(test)
    if lag == 0:
        # What the model says outweighs counts, which few answers of one shape may mislead.
        return Hits(0, test.turns) if _beside_own(test) else None
    said = (
        f"they follow the model's logprob of {_side(lag)}: rank correlation {test.correlation[lag]:.2f} there, "
        f"{test.correlation[0]:.2f} in place ({test.tokens:,} tokens rescored)"
    )
    return Hits(test.turns, test.turns, found.first[0], said)


def _side(lag: int) -> str:
    return "the next token" if lag > 0 else "the token before"


def shifted_to(test: LagTest) -> int:
    """The lag that leads clearly; 0 where none does."""
    lag = test.best
    if lag == 0 or test.tokens < TOKENS or min(test.draws, test.places) < TURNS:
        return 0
    clear = test.lead[lag] >= LEAD and test.place_lead[lag] >= PLACE_LEAD
    return lag if clear and test.correlation[lag] - test.correlation[0] >= GAIN else 0
