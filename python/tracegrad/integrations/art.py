"""ART's trajectories as our traces, its metrics of our arrays, RULER without logprobs. Run against openpipe-art 0.5.18.

A `Choice` is sampled, and so is here an assistant dict with "logprobs", as ART's pull request 467 wanted. Back again:
`integrations.art_groups`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tracegrad.integrations import peer
from tracegrad.metrics.groups import Rows
from tracegrad.metrics.peers import as_art
from tracegrad.sequence import Sequences
from tracegrad.trace import Traces, strip_logprobs

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
