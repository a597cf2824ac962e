"""Whether a token's logprob is the one that its own `top_logprobs` give it, or a neighbour's.

Looks at the JSON of a few records: the reader keeps no alternatives.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

LARGEST = 4 << 20  # bytes of a record that is parsed again
CLOSE = 1e-4  # nats
LISTED = 8  # tokens of a turn that stand among their alternatives, from which they say something


def lag_of_tops(record: bytes) -> int:
    """The lag at which the logprobs of a record's turns equal those in their top_logprobs; 0 where that is in place.

    A turn counts with 8 tokens whose own text is among the alternatives: in place under half of them may agree, and at
    the lag nine in ten must.
    """
    if len(record) > LARGEST or b'"top_logprobs"' not in record:
        return 0
    try:
        turns = list(_turns(json.loads(record)))
    except (ValueError, RecursionError):
        return 0
    for logprobs, own in turns:
        agree = {lag: _agree(logprobs, own, lag) for lag in (-1, 0, 1)}
        lag = max(agree, key=agree.__getitem__)
        if np.sum(~np.isnan(own)) >= LISTED and agree[0] < 0.5 and agree[lag] >= 0.9:
            return lag
    return 0


def kept_mass(record: bytes, told: dict[str, Any]) -> tuple[float, float] | None:
    """Return the mean and the least kept mass S of a record's tokens under min_p, top_k and top_p.

    A token counts if its alternatives (top_logprobs) reach as far as the cut; None if no token does.

    Args:
        record: JSON whose logprobs are raw, of temperature 1.
        told: min_p, top_k and top_p, as far as they are on.
    """
    if len(record) > LARGEST or b'"top_logprobs"' not in record:
        return None
    try:
        found = [mass for listed in _listed(json.loads(record)) if (mass := _mass(listed, told)) is not None]
        return (float(np.mean(found)), float(np.min(found))) if found else None
    except (TypeError, ValueError, RecursionError):
        return None


def _listed(value: Any) -> Iterator[Any]:
    """The probabilities of each token's alternatives, the likeliest first."""
    if isinstance(value, dict):
        if isinstance(tops := value.get("top_logprobs"), list) and "logprob" in value:
            numbers = np.array([_number(each) for each in tops if isinstance(each, dict)], np.float64)
            yield -np.sort(-np.exp(numbers[numbers <= 0]))
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _listed(each)


def _mass(listed: Any, told: dict[str, Any]) -> float | None:
    """What min_p, then top_k, then top_p of the rest leave of a distribution whose likeliest tokens are listed."""
    if not len(listed):
        return None
    kept, whole = listed, False  # whole: every token that is left is listed
    if least := float(told.get("min_p", 0)):
        kept = listed[listed >= least * listed[0]]
        whole = len(kept) < len(listed)
    if (most := int(told.get("top_k", 0))) > 0 and len(kept) >= most:
        kept, whole = kept[:most], True
    if (share := float(told.get("top_p", 1))) < 1:
        total = np.cumsum(kept)
        enough = np.flatnonzero(total >= share * (total[-1] if whole else 1.0))
        if len(enough):
            return float(total[enough[0]])
    return float(kept.sum()) if whole else None


def _agree(logprobs: Any, own: Any, lag: int) -> float:
    """Share of tokens whose logprob is that of the token `lag` places on, as its alternatives give it."""
    inner = np.arange(1, len(own) - 1)
    inner = inner[~np.isnan(own[inner + lag]) & ~np.isnan(logprobs[inner])]
    return float(np.mean(np.abs(logprobs[inner] - own[inner + lag]) < CLOSE)) if len(inner) else 0.0


def _turns(value: Any) -> Iterator[tuple[Any, Any]]:
    """Listed logprobs, and those that the alternatives give the same tokens, of each token list in a JSON value."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _turns(each)
    elif isinstance(value, list) and value and all(isinstance(each, dict) and "logprob" in each for each in value):
        if "top_logprobs" in value[0]:
            yield np.array([_number(each) for each in value]), np.array([_among(each) for each in value])
    elif isinstance(value, list):
        for each in value:
            yield from _turns(each)


def _among(entry: dict[str, Any]) -> float:
    found = [each for each in entry.get("top_logprobs") or () if isinstance(each, dict)]
    same = [
        each for each in found if each.get("token") == entry.get("token") and each.get("bytes") == entry.get("bytes")
    ]
    return _number(same[0]) if same else float("nan")


def _number(entry: dict[str, Any]) -> float:
    value = entry.get("logprob")
    return float(value) if isinstance(value, int | float) else float("nan")
