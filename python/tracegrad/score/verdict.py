"""A judge's verdict: what it was shown, what it answered, what was read from that; and the scores of several together.

No model is asked here: from recorded verdicts the same scores come again. Made by `judge`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ANSWER_CHARACTERS = 65536


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
        """The score of each trajectory of the group; None where it has none."""
        found: list[float | None] = [None] * self.count
        for members, score in zip(self.shown, self.scores or (), strict=self.scores is not None):
            for member in members:
                found[member] = score
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

    @classmethod
    def of(cls, verdicts: Sequence[Verdict], count: int) -> "Judged":
        """The scores of `count` trajectories by votes, as they were made or as they were recorded."""
        votes = np.array([verdict.by_member() for verdict in verdicts], np.float64).reshape(len(verdicts), count)
        known = ~np.isnan(votes)
        seen = known.sum(axis=0)
        mean = np.where(seen > 0, np.where(known, votes, 0.0).sum(axis=0) / np.maximum(seen, 1), np.nan)
        spread = np.where(known, votes - mean, 0.0)
        apart = np.where(seen > 1, np.sqrt((spread**2).sum(axis=0) / np.maximum(seen, 1)), np.nan)
        return cls(mean, apart, list(verdicts))


class Unusable(Exception):
    """An answer that gives no scores; its text says why, to the judge as well."""


def read(answer: Any, count: int) -> tuple[list[float], list[str]]:
    """Scores and explanations of trajectories "1" to "count", in that order, from a judge's text.

    Raises:
        Unusable: no JSON; an id that is missing, unknown or there twice; a score that is no number from 0 to 1.

    >>> read('{"scores": [{"id": "2", "score": 1}, {"id": "1", "score": 0.5, "explanation": "long"}]}', 2)
    ([0.5, 1.0], ['long', ''])
    """
    rows = _rows(answer)
    found: dict[str, tuple[float, str]] = {}
    for row in rows:
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
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Unusable(f"the score of trajectory {name} is {value!r:.40}, which is no number")
    if not 0 <= value <= 1:
        raise Unusable(f"the score of trajectory {name} is {value!r:.40}, which is not from 0 to 1")
    return float(value)


def _rows(answer: Any) -> list[Any]:
    """The list under `scores`, or the bare list, of the JSON in a text; words around it are passed over."""
    if not isinstance(answer, str):
        raise Unusable("there is no text")
    text = answer[:ANSWER_CHARACTERS]
    decoder = json.JSONDecoder()
    for start in [position for position, letter in enumerate(text) if letter in "{["][:64]:
        try:
            told, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        rows = told.get("scores") if isinstance(told, dict) else told
        if isinstance(rows, list) and rows and (isinstance(told, dict) or isinstance(rows[0], dict)):
            return rows
    raise Unusable('there is no JSON of the form {"scores": [{"id": "1", "explanation": "...", "score": 0.5}]}')
