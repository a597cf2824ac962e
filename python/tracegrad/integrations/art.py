"""Convert between ART's trajectories and traces, give its metrics, and run RULER without logprobs.

Run against openpipe-art 0.5.18.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tracegrad.alignment.sequences import Sequences
from tracegrad.data.trace import Trace, Traces, strip_logprobs
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations.metrics import as_art
from tracegrad.metrics.aggregate import Rows

VERSIONS = "openpipe-art==0.5.18"


def to_traces(groups: Iterable[Any]) -> Traces:
    """The trajectories of `TrajectoryGroup`s as traces, a group each; additional_histories are branches of theirs.

    Raises:
        FormatError: for a trajectory that cannot be read, such as one whose Choices went through JSON and back.
    """
    rows = [(f"{g}.{t}", str(g), one) for g, group in enumerate(groups) for t, one in enumerate(group.trajectories)]
    return Traces.from_records(_record(*row) for row in rows)


def metrics(sequences: Sequences, logprobs: ArrayLike, advantages: ArrayLike, **options: Any) -> dict[str, float]:
    """The three metrics of pull request 467 and ART's own, of [M] logprobs being trained; options of `as_art`."""
    trace = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    rows = Rows.of(trace[sequences.terms], positions=sequences.tokens)
    return as_art(logprobs, sequences.rollout_logprobs[sequences.terms], rows, advantages=advantages, **options).named()


async def ruler_score_group(group: Any, *arguments: Any, **options: Any) -> Any:
    """ART's `ruler_score_group` with a judge that sees no logprobs; the messages it returns still have them."""
    score = peer("art.rewards.ruler", VERSIONS, "ruler_score_group").ruler_score_group
    bare = [one.model_copy(update={"messages_and_choices": [*map(_bare, one.messages_and_choices)]}) for one in group]
    scored = await score(type(group)(bare), *arguments, **options)
    for judged, given in zip(scored or (), group, strict=False):
        judged.messages_and_choices = given.messages_and_choices.copy()
    return scored


def _bare(entry: Any) -> Any:
    return strip_logprobs(entry) if isinstance(entry, dict) else entry  # ART leaves them out of a Choice's message


def _sampled(entry: Any) -> bool:
    return not isinstance(entry, dict) or (entry.get("role") == "assistant" and entry.get("logprobs") is not None)


def _record(name: str, group: str, one: Any) -> dict[str, Any]:
    record = {"id": name, "group": group, "reward": one.reward, "metadata": one.metadata, "tools": one.tools}
    if one.initial_policy_version == one.final_policy_version is not None:
        record["policy_version"] = one.final_policy_version
    if one.additional_histories:
        return record | {"calls": [call for each in (one, *one.additional_histories) for call in _calls(each)]}
    return record | {"messages": [e if _sampled(e) else {**e, "sampled": False} for e in one.messages_and_choices]}


def _calls(history: Any) -> Iterator[dict[str, Any]]:
    said = [e if isinstance(e, dict) else e.message.model_dump(exclude_none=True) for e in history.messages_and_choices]
    for at, entry in enumerate(history.messages_and_choices):
        if _sampled(entry):
            choice = {"message": _bare(entry), "logprobs": entry["logprobs"]} if isinstance(entry, dict) else entry
            request = {"messages": [*map(_bare, said[:at])], "tools": history.tools}
            yield {"request": request, "response": {"choices": [choice]}}


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
