"""How each generation was sampled, and the reason if its logprobs cannot be measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.data.sampling import MIN_TEMPERATURE, REPLAYED, is_on
from tracegrad.data.trace import Generation, Trace
from tracegrad.missing_logprobs.predictions import Truncation

REASONS = (
    "the sampling temperature is unknown: pass --temperature",
    "greedy text (temperature 0): it has no probability of sampling",
    "penalties, biases or other sampling options",
    "raw logprobs of a part of the tokens, at a temperature that is not 1 or with top_p, top_k or min_p",
    "another policy version",
    "text that the template writes (a tool call or reasoning): the sampled text is not recorded",
    "text in which U+FFFD replaces lost bytes",
    "text with other likely segmentations",
    "ids that top_p, top_k or min_p keep are not among the most probable ids that were listed",
    "sampled ids that the recorded top_p, top_k or min_p exclude under this model",
    "tokens whose logprobs the server does not report: those of a temperature that is not 1",
)
"""Why tokens stay without a logprob."""
(UNKNOWN_TEMPERATURE, GREEDY, OTHER_OPTIONS, RAW_PART, OTHER_VERSION, RENDERED, LOSSY, SEGMENTATION, NOT_LISTED) = (
    range(9)
)
EXCLUDED, NOT_REPORTED = 9, 10
_FILLABLE = -1
_RENDERED_FIELDS = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")


@dataclass(frozen=True)
class SamplingOverrides:
    """Sampling options that the user states, in place of those of the records; None for those of the records."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class GenerationTable:
    """A table with one row per generation of sequences: G generations.

    Args:
        generations: the recorded ones; None for those that the traces do not have.
        temperature: [G] float64, NaN if unknown.
        truncation: of G generations.
        reason: [G] int8, index into `REASONS`, or -1 if its logprobs can be measured.
    """

    generations: Sequence[Generation | None]
    temperature: NDArray[np.float64]
    truncation: Truncation
    reason: NDArray[np.int8]

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        trace_of: Callable[[int], Trace],
        overrides: SamplingOverrides,
        policy_version: int | None,
        vocabulary: int,
    ) -> "GenerationTable":
        """Read the sampling options of each generation.

        Args:
            sequences: R aligned traces.
            trace_of: returns the trace of a row.
            overrides: what the user states.
            policy_version: the only version whose tokens are measured; None for all.
            vocabulary: number of ids of the model; a `top_k` from it on has no effect.
        """
        generations: list[Generation | None] = [None] * int(sequences.cu_turns[-1])
        count = len(generations)
        temperature, reason = np.full(count, np.nan), np.full(count, _FILLABLE, np.int8)
        top_p, top_k, min_p = np.ones(count), np.zeros(count, np.int64), np.zeros(count)
        for row in range(sequences.traces):
            trace, first = trace_of(row), int(sequences.cu_turns[row])
            for number, generation in enumerate(trace.generations[: int(sequences.cu_turns[row + 1]) - first]):
                at = first + number
                generations[at] = generation
                temperature[at] = _number(overrides.temperature, generation.temperature, math.nan)
                top_p[at] = _number(overrides.top_p, generation.top_p, 1.0)
                largest = max(_number(overrides.top_k, _option(generation, "top_k"), 0), 0)
                top_k[at] = 0 if largest >= vocabulary else int(largest) if math.isfinite(largest) else -1
                min_p[at] = _number(overrides.min_p, _option(generation, "min_p"), 0.0)
                raw_is_sampled = temperature[at] == 1 and top_p[at] >= 1 and top_k[at] == 0 and min_p[at] == 0
                reason[at] = _reason(generation, trace.pool, temperature[at], raw_is_sampled)
                if reason[at] == _FILLABLE and not (top_p[at] > 0 and top_k[at] >= 0 and 0 <= min_p[at] <= 1):
                    reason[at] = OTHER_OPTIONS
                if policy_version is not None and generation.policy_version != policy_version:
                    reason[at] = OTHER_VERSION
        return cls(generations, temperature, Truncation(top_p, top_k, min_p), reason)


def _number(stated: float | None, recorded: float | None, default: float) -> float:
    value = recorded if stated is None else stated
    return default if value is None else float(value)


def _option(generation: Generation, name: str) -> float | None:
    """Return the value of an option; NaN if it is not a number that a sampler takes, None if it is not recorded."""
    value = generation.sampling.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
    return float(value) if is_number else math.nan


def has_raw_part(generation: Generation) -> bool:
    """Return whether logprobs are recorded, and are not known to be those of the sampled distribution."""
    has_part = generation.logprobs is not None and not np.isnan(generation.logprobs).all()
    return has_part and generation.logprob_kind != "processed"


def _reason(generation: Generation, pool: Sequence[Mapping[str, Any]], temperature: float, raw_is_sampled: bool) -> int:
    if math.isnan(temperature):
        return UNKNOWN_TEMPERATURE
    if temperature < MIN_TEMPERATURE:
        return GREEDY
    if any(is_on(name, value) for name, value in generation.sampling.items() if name not in REPLAYED):
        return OTHER_OPTIONS
    if has_raw_part(generation) and not raw_is_sampled:
        return RAW_PART
    if generation.token_ids is not None or generation.has_bytes or generation.has_texts:
        return _FILLABLE
    message = pool[generation.message] if generation.message < len(pool) else {}
    if generation.text is None and any(message.get(field) for field in _RENDERED_FIELDS):
        return RENDERED
    return (
        LOSSY if "\ufffd" in str(message.get("content") if generation.text is None else generation.text) else _FILLABLE
    )
