"""Our traces as ART's trajectories, which ART's backends train from. Run against openpipe-art 0.5.18."""

from typing import Any

import numpy as np

from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations.art import VERSIONS
from tracegrad.sequence import Sequences
from tracegrad.trace import Trace, Traces


def to_groups(traces: Traces, sequences: Sequences) -> list[Any]:
    """Traces as `TrajectoryGroup`s; a generation whose tokens are all known is a Choice with its exact ids.

    They are spelt "token_id:N", which ART reads; it takes strings that its tokenizer does not know for EOS. Other
    generations become plain messages, which it does not train. A missing logprob is NaN: to ART a ratio of 1.

    Args:
        sequences: `align(traces, ...)`, none left out.
    """
    art = peer("art", VERSIONS, "Trajectory", "TrajectoryGroup", "trajectories.History", "types.Choice")
    if sequences.traces != len(traces):
        raise ArgumentError(
            f"{len(traces)} traces, {sequences.traces} of them aligned. Their tokens would be mixed up. Take out first "
            "those that could not be aligned (sequences.drift.errors)."
        )
    found: dict[str, list[Any]] = {}
    for row, trace in enumerate(traces):
        trajectory = _trajectory(art, trace, _choices(art, trace, row, sequences))
        found.setdefault(trace.group or trace.id, []).append(trajectory)
    return [art.TrajectoryGroup(trajectories) for trajectories in found.values()]


def _choices(art: Any, trace: Trace, row: int, s: Sequences) -> dict[int, Any]:
    """By message of the trace's pool."""
    here = slice(*s.cu_seqlens[np.searchsorted(s.trace, [row, row + 1])])
    found = {}
    for turn, one in enumerate(trace.generations):
        own = here.start + np.flatnonzero(s.trainable[here] & (s.turn[here] == turn))
        if len(own) == one.tokens > 0:
            pairs = zip(s.ids[own].tolist(), s.rollout_logprobs[own].tolist(), strict=True)
            tokens = [
                {"token": f"token_id:{known}", "logprob": logprob, "top_logprobs": []} for known, logprob in pairs
            ]
            choice = {"index": 0, "finish_reason": one.finish_reason or "stop", "logprobs": {"content": tokens}}
            found[one.message] = art.types.Choice.model_validate({**choice, "message": trace.pool[one.message]})
    return found


def _trajectory(art: Any, trace: Trace, choices: dict[int, Any]) -> Any:
    """The conversation as it ended; a generation that is no longer in it has a history of its own."""
    ended, histories = trace.core.conversation(trace.index), []
    for one in trace.generations:
        if one.message in choices and one.message not in ended:
            seen = [*(trace.pool[at] for at in one.context), choices[one.message]]
            histories.append(art.trajectories.History(messages_and_choices=seen, tools=trace.tools))
    messages = [choices.get(at, trace.pool[at]) for at in ended]
    rest = {"tools": trace.tools, "additional_histories": histories, "reward": trace.reward or 0.0}
    return art.Trajectory(messages_and_choices=messages, **rest)
