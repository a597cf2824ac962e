"""Traces that share prefixes in every way there is, tiny models, and the gradient of a step: what laws are held on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tiny import VOCABULARY
from tracegrad import model as policy
from tracegrad.alignment.sequences import Sequences
from tracegrad.objective import Objective
from tracegrad.packing import Batch, Step
from tracegrad.trainer.step import correct_step

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Sequences with an advantage per trace and the old and reference logprobs of every token."""

    sequences: Sequences
    advantages: np.ndarray
    old: np.ndarray
    ref: np.ndarray

    def ready(self, step: Step) -> Step:
        ready = step.with_logprobs(old=self.old[step.origin], ref=self.ref[step.origin])
        return replace(ready, alpha=np.full(len(step), 0.5, np.float32))


def forked(seed: int = 0, more: int = 3, stem: int = 12) -> Case:
    """Groups of traces over one system prompt, always with

    - two traces that sampled the same three tokens and then differ, and a third equal to the first, with different
      advantages and logprobs; a fourth like the first at another temperature;
    - a trace that forks: its second branch holds the first turn, of one token, again and not trainable;
    - logprobs that are NaN, a trace with advantage 0;
    and `more` random ones that leave the others' path anywhere.
    """
    rng = np.random.default_rng(seed)
    draw = lambda count: rng.integers(1, VOCABULARY, count).tolist()  # noqa: E731
    system, first, second = draw(stem), draw(4), draw(5)
    a, b, c, d, e = draw(5)
    given, sampled = False, True
    prompt = [(token, given) for token in system + first]
    other = [(token, given) for token in system + second]
    branches: list[tuple[int, list[tuple[int, bool]]]] = [
        (0, prompt + [(x, sampled) for x in (a, b, c, d)]),
        (0, prompt + [(x, sampled) for x in (a, b, c, e, e)]),
        (0, prompt + [(x, sampled) for x in (a, b, c, d)]),
        (0, prompt + [(x, sampled) for x in (a, b, c, d)]),
        (1, other + [(a, sampled)] + [(x, given) for x in (b, c)] + [(x, sampled) for x in (d, e, a)]),
        (1, other + [(a, given)] + [(x, given) for x in (b, d)] + [(x, sampled) for x in (e, b)]),
        (1, other + [(x, sampled) for x in (a, b)]),
    ]
    trace = [0, 1, 2, 3, 4, 4, 5]
    for _ in range(more):
        group, path = branches[int(rng.integers(len(branches)))]
        cut = int(rng.integers(1, len(path)))
        tail = [(token, bool(rng.random() < 0.7)) for token in draw(int(rng.integers(1, 6)))]
        branches.append((group, path[:cut] + tail))
        trace.append(trace[-1] + 1)
    return _case(rng, branches, np.array(trace))


def _case(rng: np.random.Generator, branches: list, trace: np.ndarray) -> Case:
    tokens = [token for _, path in branches for token in path]
    cu = np.r_[0, np.cumsum([len(path) for _, path in branches])]
    trainable = np.array([flag for _, flag in tokens])
    logprobs = np.where(trainable, rng.uniform(-3.0, -0.1, len(tokens)), NAN)
    logprobs[np.flatnonzero(trainable)[[1, -1]]] = NAN
    heat = np.ones(len(tokens))
    heat[cu[3] : cu[4]] = 0.5
    first = np.unique(trace, return_index=True)[1]
    starts = np.repeat(cu[:-1], np.diff(cu))
    turn = np.where(trainable, (np.arange(len(tokens)) - starts > 18).astype(int), -1)
    advantages = rng.normal(size=trace[-1] + 1)
    advantages[2] = 0.0
    s = Sequences.from_arrays(
        np.array([token for token, _ in tokens]),
        cu,
        logprobs,
        trainable,
        trace=trace,
        turn=turn,
        group=np.array([group for group, _ in branches])[first],
        inv_temperature=heat,
    )
    near = np.nan_to_num(logprobs, nan=-1.0)
    noise = rng.normal(0, 0.1, (2, len(tokens)))
    return Case(s, advantages, np.minimum(near + noise[0], -1e-3), np.minimum(near + noise[1], -1e-3))


def gradient(model: torch.nn.Module, case: Case, steps: Iterable[Step], objective: Objective, skip: bool = False):
    """The gradient of the steps as one vector. With `skip` head rows that cannot matter are left out."""
    model.zero_grad()
    for step in map(case.ready, steps):
        corrected = correct_step(step, objective, "mask")
        idle = step.tokens_without_gradient(objective.requirements, corrected)
        for batch in step.batches:
            batch = batch.drop_tokens(idle[batch.term]) if skip else batch
            logp, entropy = policy.logprobs_and_entropy(model, batch)
            objective(logp, entropy, step.terms(batch.to("cpu"), corrected)).loss.backward()
    return vector(model)


def padded_gradient(model: torch.nn.Module, case: Case, step: Step, objective: Objective):
    """The same of a step that holds all traces, by one padded batch of all branches and the model's own logits."""
    model.zero_grad()
    step, s = case.ready(step), case.sequences
    lengths = np.diff(s.cu_seqlens)
    ids, mask = torch.zeros(2, len(lengths), int(lengths.max()), dtype=torch.long)
    for n, length in enumerate(lengths):
        ids[n, :length] = torch.from_numpy(s.ids[s.cu_seqlens[n] : s.cu_seqlens[n + 1]])
        mask[n, :length] = 1
    owner = np.repeat(np.arange(len(lengths)), lengths)[step.origin]
    place = step.origin - s.cu_seqlens[owner]
    logits = model(input_ids=ids, attention_mask=mask).logits
    scores = logits[owner, place - 1] * torch.from_numpy(s.inv_temperature[step.origin])[:, None]
    logs = scores.log_softmax(-1)
    logp = logs.gather(1, torch.from_numpy(s.ids[step.origin]).long()[:, None]).squeeze(1)
    none = np.zeros(0, np.int32)
    whole = Batch(none, none, none, none, none, none, none, np.arange(len(step), dtype=np.int32))
    terms = step.terms(whole, correct_step(step, objective, "mask"))
    objective(logp, -(logs.exp() * logs).sum(-1), terms).loss.backward()
    return vector(model)


def vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, and 0 where both are 0: a clip may cut every term of a drawn case."""
    return 0.0 if torch.equal(a, b) else ((a - b).norm() / b.norm()).item()
