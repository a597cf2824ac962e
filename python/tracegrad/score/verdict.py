"""A judge's verdict: what it was shown, what it answered, what was read from that; and the scores of several together.

No model is asked here: from recorded verdicts the same scores come again. Made by `judge`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ANSWER_CHARACTERS = 65536
STARTS = 64
"""Brackets of an answer at which its verdict is looked for."""
_NAMED = re.compile(r"""["']scores?[\\"']*\s*:""")
"""What a verdict has and other words have not, also where it is escaped, cut, or no whole JSON."""


@dataclass(frozen=True)
class Verdict:
    """One vote on one group.

    Args:
        group: what was judged.
        vote: its number.
        count: trajectories of the group.
        shown: for each trajectory of the prompt in its order, which of the group are it; equal ones are shown once.
        prompt: the messages that the judge was asked with, the second try's included.
        answers: what it answered, each try.
        errors: what was wrong with each, "" where nothing was.
        scores: of the trajectories of the prompt, in its order; None where no try gave them.
        explanations: the same.
        model: as the server names it.
    """

    group: str
    vote: int
    count: int
    shown: list[list[int]]
    prompt: list[dict[str, Any]]
    answers: list[str]
    errors: list[str]
    scores: list[float] | None
    explanations: list[str] | None
    model: str | None = None

    def by_member(self) -> list[float | None]:
        """Return the score of each trajectory of the group; None where it has none, or the verdict is a broken one."""
        found: list[float | None] = [None] * self.count
        if self.scores is None:
            return found
        try:
            for members, score in zip(self.shown, self.scores, strict=True):
                for member in members:
                    found[range(self.count)[member]] = _score(score, str(member))
        except (Unusable, LookupError, TypeError, ValueError):
            return [None] * self.count
        return found

    def as_dict(self) -> dict[str, Any]:
        """For a file of JSON lines."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> "Verdict":
        """From what `as_dict` gave."""
        return cls(**told)


@dataclass(frozen=True)
class Judged:
    """What a judge says of a group.

    Args:
        scores: [n] float64 within [0, 1], the mean over votes; NaN where no vote counts.
        disagreement: [n] float64, the standard deviation over votes; NaN below two.
        verdicts: the votes.
    """

    scores: NDArray[np.float64]
    disagreement: NDArray[np.float64]
    verdicts: list[Verdict]

    @property
    def errors(self) -> list[str]:
        """What was wrong with the last answer of each vote that gave no score."""
        return [verdict.errors[-1] for verdict in self.verdicts if verdict.scores is None and verdict.errors]

    @classmethod
    def of(cls, verdicts: Sequence[Verdict], count: int) -> "Judged":
        """The scores of `count` trajectories by votes, as they were made or as they were recorded."""
        votes = np.full((len(verdicts), count), np.nan)
        for row, verdict in enumerate(verdicts):
            if verdict.count == count:
                votes[row] = np.array(verdict.by_member(), np.float64)
        known = ~np.isnan(votes)
        seen = known.sum(axis=0)
        mean = np.where(seen > 0, np.where(known, votes, 0.0).sum(axis=0) / np.maximum(seen, 1), np.nan)
        spread = np.where(known, votes - mean, 0.0)
        apart = np.where(seen > 1, np.sqrt((spread**2).sum(axis=0) / np.maximum(seen, 1)), np.nan)
        return cls(mean, apart, list(verdicts))


class Unusable(Exception):
    """An answer that gives no scores; its text says why, to the judge as well."""


def read(answer: Any, count: int, shown: str = "") -> tuple[list[float], list[str]]:
    """Scores and explanations of trajectories "1" to "count", in that order, from a judge's text.

    The verdict is the JSON with which the answer ends. A thought in `<think>` tags, other words before it, and a code
    fence around it are passed over. The judge quotes trajectories and drafts scores: a verdict with words after it, a
    second one, and one that is also in `shown` are no score.

    Args:
        answer: of the judge.
        count: trajectories that it was shown.
        shown: the prompt that they are part of, as JSON writes their texts.

    Raises:
        Unusable: no JSON at the end; a second verdict; an id that is missing, unknown or there twice; a score that is
            no number from 0 to 1.

    >>> read('{"scores": [{"id": "2", "score": 1}, {"id": "1", "score": 0.5, "explanation": "long"}]}', 2)
    ([0.5, 1.0], ['long', ''])
    """
    found: dict[str, tuple[float, str]] = {}
    for row in _rows(answer, shown):
        if not isinstance(row, dict):
            raise Unusable("an entry of `scores` is no object")
        name = row.get("id", row.get("trajectory_id"))
        name = str(name) if isinstance(name, str | int) and not isinstance(name, bool) else None
        if name is None or not (name.isdecimal() and name.isascii() and 1 <= int(name[:9]) <= count):
            raise Unusable(f"there is no trajectory {row.get('id', row.get('trajectory_id'))!r:.40}")
        if name in found:
            raise Unusable(f"trajectory {name} is scored twice")
        found[name] = (_score(row.get("score"), name), str(row.get("explanation") or "")[:ANSWER_CHARACTERS])
    if missing := [str(number) for number in range(1, count + 1) if str(number) not in found]:
        raise Unusable(f"trajectory {missing[0]} has no score")
    ordered = [found[str(number)] for number in range(1, count + 1)]
    return [score for score, _ in ordered], [words for _, words in ordered]


def _score(value: Any, name: str) -> float:
    # A whole number may have more digits than a float; nan and the infinities are what JSON calls no number.
    if not isinstance(value, int | float) or isinstance(value, bool) or value - value != 0:
        raise Unusable(f"the score of trajectory {name} is {value!r:.40}, which is no number")
    if not 0 <= value <= 1:
        raise Unusable(f"the score of trajectory {name} is {value!r:.40}, which is not from 0 to 1")
    return float(value)


def _rows(answer: Any, shown: str) -> list[Any]:
    """The list under `scores`, or the bare list, of the JSON with which a text ends."""
    if not isinstance(answer, str):
        raise Unusable("there is no text")
    text, dropped = answer.strip(), False
    if not text.startswith(("{", "[", "`")):
        thought, end, rest = text.partition("</think>")
        if not end and "<think>" in thought:
            raise Unusable("the thought does not end, so there is no verdict")
        text, dropped = (rest, True) if end else (text, False)
    text = text.strip().removesuffix("```").rstrip()
    if len(text) > ANSWER_CHARACTERS:
        raise Unusable(f"the answer has {len(text):,} characters. Of at most {ANSWER_CHARACTERS:,} it is read")
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    for start in [each.start() for each in re.finditer(r"[{\[]", text)][:STARTS]:
        try:
            told, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        rows = told.get("scores") if isinstance(told, dict) else told
        if stop < len(text) or not isinstance(rows, list) or not rows:
            continue
        if isinstance(told, dict) or isinstance(rows[0], dict):
            before = text[:start].rstrip().removesuffix("json").removesuffix("```").strip()
            if _NAMED.search(before):
                raise Unusable("there are scores before the last ones. Which ones count is not known")
            if (before or dropped) and _bare(text[start:]) in _bare(shown):
                raise Unusable("the scores at the end stand in a trajectory word for word")
            return rows
    raise Unusable(
        'there is no JSON of the form {"scores": [{"id": "1", "explanation": "...", "score": 0.5}]} at the end'
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are there once: of two `scores` the second would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Unusable("a key of the JSON is there twice, and which one counts is not known")
    return found


def _bare(text: str) -> str:
    """A text without white space and what escapes it in JSON, however often."""
    return re.sub(r"\\+[nrt]|[\\\s]", "", text)
