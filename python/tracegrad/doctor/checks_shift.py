"""Detect logprobs that belong to a neighbouring token, without the model.

There are three signs. `lag_test` compares logprobs with bigram counts of the same file. A list that starts with null
looks like prompt logprobs. top_logprobs may list a token's logprob for its neighbour. (`rescore` compares with the
model's own logprobs instead.)
"""

from collections.abc import Iterator

import numpy as np

from tracegrad.doctor.finding import Hits, Place, check
from tracegrad.doctor.rescore import LogprobComparison
from tracegrad.doctor.shift_test import LagTest, bigram_logprobs, lag_test
from tracegrad.doctor.stats import DatasetStats, Turn, TurnSample

TOKENS, TURNS = 200, 10  # least number of tokens, and of distinct turns and places, for a decision
LEAD, PLACE_LEAD = 4.0, 2.2  # least lead over lag 0, in standard errors over turns and over places
GAIN = 0.05  # least gain in rank correlation over lag 0
PARTS = 8  # parts of the file that are tested one by one


@check(
    "logprobs shifted by one token",
    wrong=0.0,
    impact="Every token gets the probability of its neighbour. All ratios are wrong, most of them by a large factor, "
    "and none is NaN.",
    fix="Pair logprobs[i] with the id it was returned with. Drop the leading null of prompt logprobs and echoes, and "
    "slice ids and logprobs together. tracegrad doctor --check-logprobs compares them with the model.",
    hides=("made_up_zeros",),
)
def shifted_logprobs(stats: DatasetStats) -> Hits:
    """Detect three signs of a shift. Logprobs follow bigram counts of the file better at a neighbouring token than in
    place. Lists start with null, like prompt logprobs. top_logprobs list a token's logprob for its neighbour.

    Threshold: for null, half of the turns, unless counts show that the other logprobs are in place. For top_logprobs,
    nine of ten tokens of a turn, in a sample of 64 traces. For counts, a lead of 4 standard errors over distinct turns,
    a lead of 2.2 over places between the same neighbours, and 0.05 of rank correlation, on at least 200 tokens of 10
    such turns and places. Counts are tested for the full file, each alignment level, first and later turns, and each
    eighth of the file. On the bundled example (66,911 tokens) the correlation is 0.58 in place, and 0.12 and 0.02 at
    the neighbours. Of 290 draws of 10 to 50 of its traces, none was reported as shifted. Shifted draws were detected in
    94 % (+1) and 77 % (-1) of draws of 10 traces (294 tokens), in 100 % and 99 % of draws of 20, and in all draws of
    50.
    """
    sample = stats.sample
    if (tops := stats.tops) and tops.lag:
        description = f"top_logprobs list the logprob for {_neighbour(tops.lag)}"
        return Hits(tops.count, tops.looked, tops.first, description)
    if stats.headless.count >= max(2, 0.5 * stats.turns) and not in_place(sample.turns):
        return Hits(
            stats.headless.count, stats.turns, stats.headless.first, "the list starts with null, like prompt logprobs"
        )
    for part, suffix in parts(sample):
        shift = find_shift(part)
        if shift is None:
            continue
        lag, test, first = shift
        description = (
            f"they follow {_neighbour(lag)}: rank correlation {test.correlation[lag]:.2f} there, "
            f"{test.correlation[0]:.2f} in place ({test.tokens:,} tokens{suffix})"
        )
        return Hits(len(part) * sample.stride, max(sample.count, 1), first, description)
    return Hits(0, sample.count)


def parts(sample: TurnSample) -> Iterator[tuple[list[Turn], str]]:
    """Yield the stats sample, then the parts that may have been recorded differently, each with a description.

    The parts are the alignment levels, first and later turns, and eighths of the file.
    """
    turns = sample.turns
    yield turns, ""
    for level in sorted({turn.alignment_level for turn in turns}):
        yield [turn for turn in turns if turn.alignment_level == level], f" at alignment level T{level}"
    yield [turn for turn in turns if turn.place.turn == 0], " of first turns"
    yield [turn for turn in turns if turn.place.turn], " of later turns"
    for part in range(PARTS):
        start, end = (len(turns) * bound // PARTS for bound in (part, part + 1))
        yield turns[start:end], f" in part {part + 1} of {PARTS} of the file"


def find_shift(turns: list[Turn]) -> tuple[int, LagTest, Place] | None:
    """Return the lag of these turns' logprobs, the test and the first place; None if the lag is 0 or unclear."""
    if len(turns) < TURNS:
        return None
    test = bigram_lag_test(turns)
    return None if (lag := leading_lag(test)) == 0 else (lag, test, turns[0].place)


def in_place(turns: list[Turn]) -> bool:
    """Return whether bigram counts show clearly that the logprobs belong to their own tokens."""
    if len(turns) < TURNS:
        return False
    return _is_in_place(bigram_lag_test(turns))


def _is_in_place(test: LagTest) -> bool:
    return test.tokens >= TOKENS and all(test.lead[lag] <= -LEAD for lag in (-1, 1))


def bigram_lag_test(turns: list[Turn]) -> LagTest:
    """Run the lag test of the turns' logprobs against bigram counts of the same turns."""
    before, ids = (np.concatenate([getattr(turn, name) for turn in turns]) for name in ("before", "ids"))
    logprobs = np.concatenate([turn.logprobs for turn in turns])
    cu = np.concatenate([[0], np.cumsum([len(turn.ids) for turn in turns])])
    return lag_test(logprobs, bigram_logprobs(before, ids), cu)


def model_shift_hits(comparison: LogprobComparison) -> Hits | None:
    """Test recorded logprobs against the model's.

    Return hits if they follow those of a neighbouring token, no hits if they are in place, and None if it is unclear.
    """
    test = comparison.lags()
    lag = leading_lag(test)
    if lag == 0:
        # The model outweighs counts, which a few answers of one shape can mislead.
        return Hits(0, test.turns) if _is_in_place(test) else None
    description = (
        f"they follow the model's logprob of {_neighbour(lag)}: rank correlation {test.correlation[lag]:.2f} there, "
        f"{test.correlation[0]:.2f} in place ({test.tokens:,} tokens rescored)"
    )
    return Hits(test.turns, test.turns, comparison.first[0], description)


def _neighbour(lag: int) -> str:
    return "the next token" if lag > 0 else "the token before"


def leading_lag(test: LagTest) -> int:
    """Return the lag that leads clearly, or 0 if there is none."""
    lag = test.best
    if lag == 0 or test.tokens < TOKENS or min(test.draws, test.places) < TURNS:
        return 0
    clear = test.lead[lag] >= LEAD and test.place_lead[lag] >= PLACE_LEAD
    return lag if clear and test.correlation[lag] - test.correlation[0] >= GAIN else 0
