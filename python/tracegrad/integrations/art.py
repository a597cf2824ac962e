"""Convert between ART's trajectories and traces, compute ART's metrics, and run RULER without logprobs.

Tested with openpipe-art 0.5.18.
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
    """Convert the trajectories of `TrajectoryGroup`s to traces. Each additional history becomes a branch.

    Raises:
        FormatError: for a trajectory that cannot be read, for example if its Choices were converted to JSON and back.
    """
    rows = [
        (f"{g}.{t}", str(g), trajectory)
        for g, group in enumerate(groups)
        for t, trajectory in enumerate(group.trajectories)
    ]
    return Traces.from_records(_record(*row) for row in rows)


def metrics(sequences: Sequences, logprobs: ArrayLike, advantages: ArrayLike, **options: Any) -> dict[str, float]:
    """Compute ART's metrics, and the three of its pull request 467.

    Args:
        sequences: aligned traces with M trained tokens.
        logprobs: [M] of the policy being trained, nats.
        advantages: [M].
        options: of `as_art`.
    """
    trace = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    rows = Rows.of(trace[sequences.terms], positions=sequences.tokens)
    return as_art(
        logprobs, sequences.rollout_logprobs[sequences.terms], rows, advantages=advantages, **options
    ).values()


async def ruler_score_group(group: Any, *arguments: Any, **options: Any) -> Any:
    """Call ART's `ruler_score_group` with a judge that does not see logprobs. The returned messages still have them."""
    score = peer("art.rewards.ruler", VERSIONS, "ruler_score_group").ruler_score_group
    copies = [
        trajectory.model_copy(
            update={"messages_and_choices": [*map(_without_logprobs, trajectory.messages_and_choices)]}
        )
        for trajectory in group
    ]
    scored = await score(type(group)(copies), *arguments, **options)
    for scored_trajectory, original in zip(scored or (), group, strict=False):
        scored_trajectory.messages_and_choices = original.messages_and_choices.copy()
    return scored


def _without_logprobs(entry: Any) -> Any:
    return strip_logprobs(entry) if isinstance(entry, dict) else entry  # ART leaves them out of a Choice's message


def _is_sampled(entry: Any) -> bool:
    return not isinstance(entry, dict) or (entry.get("role") == "assistant" and entry.get("logprobs") is not None)


def _record(name: str, group: str, trajectory: Any) -> dict[str, Any]:
    record = {
        "id": name,
        "group": group,
        "reward": trajectory.reward,
        "metadata": trajectory.metadata,
        "tools": trajectory.tools,
    }
    if trajectory.initial_policy_version == trajectory.final_policy_version is not None:
        record["policy_version"] = trajectory.final_policy_version
    if trajectory.additional_histories:
        return record | {
            "calls": [call for history in (trajectory, *trajectory.additional_histories) for call in _calls(history)]
        }
    return record | {
        "messages": [e if _is_sampled(e) else {**e, "sampled": False} for e in trajectory.messages_and_choices]
    }


def _calls(history: Any) -> Iterator[dict[str, Any]]:
    messages = [
        e if isinstance(e, dict) else e.message.model_dump(exclude_none=True) for e in history.messages_and_choices
    ]
    for index, entry in enumerate(history.messages_and_choices):
        if _is_sampled(entry):
            choice = (
                {"message": _without_logprobs(entry), "logprobs": entry["logprobs"]}
                if isinstance(entry, dict)
                else entry
            )
            request = {"messages": [*map(_without_logprobs, messages[:index])], "tools": history.tools}
            yield {"request": request, "response": {"choices": [choice]}}


def to_groups(traces: Traces, sequences: Sequences) -> list[Any]:
    """Convert traces to `TrajectoryGroup`s.

    A generation whose ids are all known becomes a Choice with its exact ids, written as "token_id:N". ART treats other
    strings that its tokenizer does not know as EOS. Other generations become plain messages, which ART does not train.
    A missing logprob is NaN, which ART treats as a ratio of 1.

    Args:
        traces: the traces.
        sequences: `align(traces, ...)`, with no trace left out.

    Raises:
        ArgumentError: if a trace was left out, or if tokens have a support: ART computes logprobs over the whole
            vocabulary, so each ratio would be the mass that the sampler kept.
    """
    art = peer("art", VERSIONS, "Trajectory", "TrajectoryGroup", "trajectories.History", "types.Choice")
    if sequences.traces != len(traces):
        raise ArgumentError(
            f"TG-INTEG-006: {len(traces)} traces, but only {sequences.traces} aligned ones, so rows would not match. "
            "First remove the traces that could not be aligned (sequences.alignment_report.errors)."
        )
    if sequences.support is not None:
        raise ArgumentError(
            "TG-INTEG-031: tokens were sampled with top_p, top_k or min_p, and their recorded logprobs are over the "
            "ids that these kept. ART computes those of the policy over the whole vocabulary, so each ratio would be "
            "the kept mass. Train with tracegrad.train or integrations.trl.FromTraces. If ART is not to train on them, "
            "pass dataclasses.replace(sequences, support=None)."
        )
    trajectories_of_group: dict[str, list[Any]] = {}
    for row, trace in enumerate(traces):
        trajectory = _trajectory(art, trace, _choices(art, trace, row, sequences))
        trajectories_of_group.setdefault(trace.group or trace.id, []).append(trajectory)
    return [art.TrajectoryGroup(trajectories) for trajectories in trajectories_of_group.values()]


def _choices(art: Any, trace: Trace, row: int, s: Sequences) -> dict[int, Any]:
    """Return the Choices of a trace by the index of their message in the trace's pool."""
    tokens_of_trace = slice(*s.cu_seqlens[np.searchsorted(s.trace, [row, row + 1])])
    choices = {}
    for turn, generation in enumerate(trace.generations):
        positions = tokens_of_trace.start + np.flatnonzero(
            s.trainable[tokens_of_trace] & (s.turn[tokens_of_trace] == turn)
        )
        if len(positions) == generation.tokens > 0:
            pairs = zip(s.ids[positions].tolist(), s.rollout_logprobs[positions].tolist(), strict=True)
            tokens = [{"token": f"token_id:{id_}", "logprob": logprob, "top_logprobs": []} for id_, logprob in pairs]
            choice = {"index": 0, "finish_reason": generation.finish_reason or "stop", "logprobs": {"content": tokens}}
            choices[generation.message] = art.types.Choice.model_validate(
                {**choice, "message": trace.pool[generation.message]}
            )
    return choices


def _trajectory(art: Any, trace: Trace, choices: dict[int, Any]) -> Any:
    """Return a trajectory of the final conversation. A generation that is not in it gets an additional history."""
    final, histories = trace.core.conversation(trace.index), []
    for generation in trace.generations:
        if generation.message in choices and generation.message not in final:
            history = [*(trace.pool[index] for index in generation.context), choices[generation.message]]
            histories.append(art.trajectories.History(messages_and_choices=history, tools=trace.tools))
    messages = [choices.get(index, trace.pool[index]) for index in final]
    return art.Trajectory(
        messages_and_choices=messages, tools=trace.tools, additional_histories=histories, reward=trace.reward or 0.0
    )
