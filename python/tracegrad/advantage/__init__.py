"""Compute advantages: how a reward compares with others. Arrays in, arrays out.

The input is rewards and group ids. Rewards of turns or tokens also need the lengths of traces. The output is float32
advantages per trace [R] or per token [M], computed in float64. Groups are defined by id and may differ in size. NaN is
an unknown reward: it is outside every baseline, and its advantage is 0. The package needs only numpy, no tokens and no
model.

    GRPO, Dr. GRPO          group_mean(rewards, groups, scale="std", ddof=1) and without scale
    RLOO, OPO, GPG          rloo, opo, gpg
    max-RL, pass@k          max_rl, pass_at_k
    OAPL, A*-PO             a_star
    several rewards         group_mean(weighted_sum(table, weights), groups)
    GDPO                    whiten(normalize_then_sum(table, groups, ...), ...)
    REINFORCE++             reinforce_plus_plus, reinforce_plus_plus_baseline
    long answers            group_mean(rewards + overlong(lengths, ...), groups)
    ReMax, GAE              remax, gae
    ART                     divide_by_mean_abs(group_mean(...)[trace], weights=...)
    KL in the reward        group_mean(kl_in_reward(rewards, old, ref, ...).rewards, groups), AdaptiveKl
    optimal token baseline  optimal_token_baseline
    rewards of turns        turns_to_terms(turn_returns(...), ...) or returns(at_turn_ends(...), ...)

    >>> from tracegrad.advantage import group_mean
    >>> rewards, groups = [1.0, 0.0, 0.5], ["a", "a", "b"]
    >>> # "zero" is a value of `Singleton`.
    >>> group_mean(rewards, groups, single_sample_group="zero").tolist()
    [0.5, -0.5, 0.0]
    >>> # "std" is a value of `Scale`.
    >>> group_mean(rewards, groups, scale="std", eps=0.0, ddof=0, single_sample_group="zero").tolist()
    [1.0, -1.0, 0.0]
"""

from tracegrad.advantage.kl import AdaptiveKl, PenalisedRewards, kl_in_reward
from tracegrad.advantage.multi_reward import normalize_then_sum, overlong, weighted_sum
from tracegrad.advantage.outcome import (
    EpsIn,
    GroupCounts,
    NonzeroOf,
    Scale,
    Singleton,
    a_star,
    batch_mean,
    divide_by_mean_abs,
    gpg,
    group_counts,
    group_mean,
    max_rl,
    opo,
    pass_at_k,
    rloo,
    whiten,
)
from tracegrad.advantage.token import (
    Gae,
    Tail,
    at_turn_ends,
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    returns,
    turn_returns,
    turns_to_terms,
)

__all__ = [
    "AdaptiveKl",
    "EpsIn",
    "Gae",
    "GroupCounts",
    "NonzeroOf",
    "PenalisedRewards",
    "Scale",
    "Singleton",
    "Tail",
    "a_star",
    "at_turn_ends",
    "batch_mean",
    "divide_by_mean_abs",
    "gae",
    "gpg",
    "group_counts",
    "group_mean",
    "kl_in_reward",
    "max_rl",
    "normalize_then_sum",
    "opo",
    "optimal_token_baseline",
    "overlong",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "returns",
    "rloo",
    "turn_returns",
    "turns_to_terms",
    "weighted_sum",
    "whiten",
]
