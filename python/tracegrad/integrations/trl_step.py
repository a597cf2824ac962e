"""What both roads in GRPOTrainer share: whole optimizer steps, the loss of a micro-batch, its metrics over ranks.

No road is here: `integrations.trl` plays recorded traces, `integrations.trl_live` what TRL generates.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracegrad.algebra import Objective
from tracegrad.correction import AllReduce
from tracegrad.errors import ArgumentError
from tracegrad.integrations.gives import Gives
from tracegrad.integrations.padded import as_trl
from tracegrad.objective import Terms

VERSIONS = "trl==1.16.0"
GIVES = Gives(
    frozenset({"old", "entropy", "turn", "step", "kept", "reductions", "advantages"}),
    "GRPOTrainer does not give it, and it would be made up.",
    "Take an objective without it, or our learner.",
    {
        "ref": "Pass GRPOConfig(beta=...) above 0, without PEFT where traces are recorded: the coefficient stays the "
        "objective's.",
        "rollout": "Generate with use_vllm=True, or take an objective on theta/old.",
        "proximal": "Take old in its place (DECOUPLED_PPO).",
        "group": "A group may stand on several ranks. Take an objective that looks at traces, or our learner.",
    },
)
"""What a GRPOTrainer always gives."""


def may_give(args: Any, *, rollout: bool, ref: bool) -> frozenset[str]:
    """What it gives in this run: recorded logprobs, a reference, and groups where there is one rank."""
    found = {"rollout": rollout, "ref": ref, "group": args.world_size == 1, "group_counts": args.world_size == 1}
    return frozenset(thing for thing, given in found.items() if given)


def check_steps(args: Any) -> None:
    """Refuses generations that end inside an optimizer step."""
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise ArgumentError(
            f"steps_per_generation is {args.steps_per_generation}, gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps}: optimizer steps would come in pieces, and denominators are of the "
            "whole. Make the first a multiple of the second."
        )


def loss_of(trainer: Any, objective: Objective, logprobs: Tensor, entropy: Tensor, aux: Any, terms: Terms) -> Tensor:
    """The loss of a micro-batch as GRPOTrainer takes it, and a line in its log; [m] tensors.

    Args:
        trainer: whose ranks' gradients are averaged, and whose router has a loss of its own.
        objective: evaluated.
        logprobs, entropy: of the policy being trained.
        aux: the router's loss, None without.
        terms: `old` None is the policy as it is.
    """
    terms = replace(terms, old=logprobs.detach()) if objective.needs.old and terms.old is None else terms
    found = objective(logprobs, entropy, terms)
    note(trainer, as_trl(objective, found.per_term, terms, entropy).all_reduce(reducer(trainer)).named())
    routing = 0.0 if aux is None else trainer.router_aux_loss_coef * aux / trainer.current_gradient_accumulation_steps
    return found.loss * trainer.accelerator.num_processes + routing


def note(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Into the trainer's own log of training."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)


def reducer(trainer: Any) -> Callable[[NDArray[np.float64], str], NDArray[np.float64]]:
    """Sums and maxima over the trainer's ranks."""

    def all_reduce(array: NDArray[np.float64], op: str) -> NDArray[np.float64]:
        ranks = trainer.accelerator.gather(torch.from_numpy(array)[None].to(trainer.accelerator.device))
        return (ranks.amax(0) if op == "max" else ranks.sum(0)).cpu().numpy()

    return all_reduce


def over_ranks(trainer: Any) -> AllReduce | None:
    """What `correct` takes: None on one rank, where groups count for themselves."""
    return reducer(trainer) if trainer.accelerator.num_processes > 1 else None
