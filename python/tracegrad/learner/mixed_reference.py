"""A reference model that follows the policy: every few optimizer steps its weights become a mixture of both.

Here are `is_mixed`, whether a run has one, and `mix`. Source: TR-DPO, arXiv 2404.09656; TRL's `sync_ref_model`.
"""

import torch
from torch import nn

from tracegrad.algebra import Objective
from tracegrad.config import Config
from tracegrad.learner.reward_kl import needs_of


def is_mixed(objective: Objective, config: Config) -> bool:
    """Return whether the reference of a run is a mixture of the policy and the reference before."""
    train = config.train
    return bool(needs_of(objective, config).ref and train.ref_every) and train.ref_mixup_alpha < 1


@torch.no_grad()
def mix(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Set each trained parameter of `reference` to alpha * policy + (1 - alpha) * reference, in place.

    Args:
        reference: of the architecture of `policy`, its parameters on the same devices and sharded alike.
        policy: the model that is trained; parameters that it does not train are passed over, as both have the same.
        alpha: share of the policy, above 0 and at most 1.

    >>> old, new = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = old.weight.data.fill_(1.0), new.weight.data.fill_(2.0)
    >>> mix(old, new, 0.75)
    >>> old.weight.item()
    1.75
    """
    for mixed, trained in zip(reference.parameters(), policy.parameters(), strict=True):
        if trained.requires_grad:
            mixed.mul_(1.0 - alpha).add_(trained, alpha=alpha)
