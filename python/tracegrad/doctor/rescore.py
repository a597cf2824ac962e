"""Recorded logprobs beside the model's own, on a sample of traces. The one room of the doctor that needs torch."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tracegrad.alignment import align
from tracegrad.batch import pack
from tracegrad.doctor.finding import Hits, Place, check
from tracegrad.doctor.lags import LagTest, lag_test
from tracegrad.doctor.look import Array
from tracegrad.errors import ArgumentError
from tracegrad.recipes import Advice, for_data
from tracegrad.sequence import Sequences
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Traces

APART = 0.5  # nats between recorded and recomputed
ROW = 8192  # tokens of a packed row, or the longest trace


@dataclass(frozen=True)
class Rescored:
    """Recorded and recomputed logprobs of the same trained tokens.

    Args:
        recorded, recomputed: [M] nats.
        cu_turns: [N+1] offsets of the turns.
        first: where each turn stands, N places.
        advice: the recipe for these traces, by what was measured.
    """

    recorded: Array
    recomputed: Array
    cu_turns: Array
    first: list[Place]
    advice: Advice

    def lags(self) -> LagTest:
        """Recorded beside recomputed, at lags -1, 0 and 1."""
        return lag_test(self.recorded, self.recomputed, self.cu_turns)


@check(
    "logprobs that this model does not give",
    "tokens",
    note=0.01,
    costs=0.05,
    wrong=0.5,
    hurts="Where recorded and recomputed logprobs differ before the first step, the ratio starts far from 1: terms are "
    "clipped or masked for a difference that no training made.",
    cure="Give --model the weights that sampled. If it has them, look at temperature, template and precision.",
)
def other_model(found: Rescored) -> Hits:
    """Sees recorded logprobs more than 0.5 nats from those of the model in --model; only with --rescore.

    Threshold: a note from 1 % of tokens, as engines in bf16 differ on a few; it costs from 5 %, where the policy has
    moved on; wrong from half, where it is another model.
    """
    apart = np.flatnonzero(np.abs(found.recorded - found.recomputed) > APART)
    if not len(apart):
        return Hits(0, len(found.recorded))
    at = int(apart[0])
    turn = int(np.searchsorted(found.cu_turns, at, side="right")) - 1
    place = replace(found.first[turn], token=at - int(found.cu_turns[turn]))
    said = f"recorded {found.recorded[at]:.3f}, the model gives {found.recomputed[at]:.3f}"
    return Hits(len(apart), len(found.recorded), place, said)


def rescore(traces: Traces, model: Path, tokenizer: Tokenizer, logprob_kind: str | None = None) -> Rescored | None:
    """The model's logprobs of the sampled tokens of these traces; None where none is trained.

    Where none has a recorded logprob there is nothing to compare, and the advice alone is given.
    """
    sequences = align(traces, tokenizer, logprob_kind=logprob_kind, on_error="skip")
    if not len(sequences.terms):
        return None
    terms = sequences.terms[~np.isnan(sequences.rollout_logprobs[sequences.terms])]
    if not len(terms):
        return Rescored(np.zeros(0), np.zeros(0), np.zeros(1, np.int64), [], for_data(sequences))
    recomputed = _recomputed(sequences, model)
    advice, recomputed = for_data(sequences, recomputed), recomputed[terms]
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))[terms]
    turn = sequences.cu_turns[owner] + sequences.turn[terms]
    start = np.flatnonzero(np.concatenate([[True], turn[1:] != turn[:-1]]))
    located = {trace.id: at for at, trace in enumerate(traces)}
    first = [
        Place.of(traces, located[name], int(sequences.turn[terms[at]]))
        for at in start
        for name in [sequences.trace_ids[owner[at]]]
    ]
    cu = np.concatenate([start, [len(terms)]])
    return Rescored(sequences.rollout_logprobs[terms].astype(np.float64), recomputed, cu, first, advice)


def _recomputed(sequences: Sequences, model: Path) -> Array:
    """[T] nats, NaN where nothing is trained."""
    try:
        import torch

        from tracegrad.learner.adapted import load_model
        from tracegrad.policy import logprobs
    except ImportError as error:
        raise ArgumentError(
            f"--rescore needs {error.name}, which is not installed. The other checks work without it. "
            "pip install 'tracegrad[train]', or leave --rescore out."
        ) from error
    out = np.full(sequences.tokens, np.nan)
    longest = int(np.diff(sequences.cu_seqlens).max())
    policy = load_model(model)
    with torch.no_grad():
        for step in pack(sequences, np.zeros(sequences.traces), token_budget=max(ROW, longest), per="trace"):
            for batch in step.batches:
                out[step.origin[batch.term]] = logprobs(policy, batch.to("cpu")).double().numpy()
    return out
