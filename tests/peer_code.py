"""TRL's own code, run beside ours: its `_compute_loss`, and statements of its generation step that have no function.

Nothing is transcribed: statements are taken out of the installed source by their first line and executed.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.experimental.a2po import A2POTrainer
from trl.trainer import grpo_trainer


def trl_loss(logprobs: torch.Tensor, inputs: dict[str, Any], **config: Any) -> torch.Tensor:
    """GRPOTrainer._compute_loss on given logprobs [B, T], without a model."""
    trainer = object.__new__(GRPOTrainer)
    args = GRPOConfig(output_dir="unused", use_bias_correction_kl=False, bf16=False, report_to=[])
    defaults = dict(vars(args), **config)
    for name in ("loss_type", "beta", "top_entropy_quantile", "importance_sampling_level", "off_policy_mask_threshold"):
        setattr(trainer, name, defaults[name])
    trainer.args = args
    trainer.epsilon_low = defaults["epsilon"]
    trainer.epsilon_high = defaults["epsilon_high"] or defaults["epsilon"]
    trainer.max_completion_length = defaults["max_completion_length"]
    trainer.use_vllm = "importance_sampling_ratio" in inputs
    trainer.vllm_importance_sampling_correction = True
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = args.steps_per_generation = 1
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value, sync_gradients=True
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    ids = torch.zeros(logprobs.shape, dtype=torch.long)
    given = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, **inputs}
    given["num_items_in_batch"] = inputs["completion_mask"].sum()
    return trainer._compute_loss(None, given)


def trl_importance_ratio(old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, mode: str, **bounds: float):
    """The ratio that TRL's generation step stores, [B, T] or [B, 1]."""
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=bounds.get("clip_min"),
        vllm_importance_sampling_clip_max=bounds.get("clip_max"),
    )
    given = {
        "self": trainer,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "completion_mask": mask,
        "tool_mask": None,
    }
    return _run("if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask =", given)[
        "vllm_importance_sampling_ratio"
    ]


def trl_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    scale_rewards: str,
    aggregation: str = "sum_then_normalize",
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The advantages of TRL's generation step, [R], of rewards [R] or [R, K]; groups stand side by side."""
    table = rewards.reshape(len(rewards), -1)
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        reward_weights=torch.ones(table.shape[1]) if weights is None else weights,
        scale_rewards=scale_rewards,
        reward_funcs=[None] * table.shape[1],
    )
    given = {
        "self": trainer,
        "rewards_per_func": table,
        "num_generations": num_generations,
        "unscorable_mask": table.isnan().all(dim=1),
        "device": "cpu",
    }
    found = _run("if self.multi_objective_aggregation == 'sum_then_normalize':", given)
    return _run("advantages = torch.nan_to_num(advantages", {"advantages": found["advantages"]})["advantages"]


def trl_rloo(rewards: torch.Tensor, num_generations: int, normalize: bool) -> torch.Tensor:
    """The advantages of RLOOTrainer's generation step, [R]."""
    step = RLOOTrainer._generate_and_score_completions
    scope = {"rewards": rewards, "num_generations": num_generations}
    scope["self"] = SimpleNamespace(normalize_advantages=normalize)
    for first in (
        "grouped_rewards =",
        "scorable_counts =",
        "grouped_sum =",
        "if num_generations > 1:\n    baselines",
        "if self.normalize_advantages:",
        "advantages = torch.nan_to_num(advantages",
    ):
        scope |= _run(first, scope, step)
    return scope["advantages"]


def trl_optimal_value(rewards: torch.Tensor, beta1: float) -> torch.Tensor:
    """A2POTrainer's V* of each row of rewards [G, n]."""
    step = A2POTrainer._estimate_optimal_values
    return _run("v_star = ", {"rewards": rewards, "beta1": beta1, "n": rewards.shape[1]}, step)["v_star"]


def _run(
    first: str, given: dict[str, Any], function: Callable[..., Any] = GRPOTrainer._generate_and_score_completions
) -> dict[str, Any]:
    """Executes the one statement of a function, by default the generation step, that starts with `first`."""
    source = textwrap.dedent(inspect.getsource(function))
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and ast.unparse(node).startswith(first)
    ]
    assert len(found) == 1, f"{len(found)} statements of this TRL start with {first!r}"
    scope = {"torch": torch, "math": math, "nanstd": grpo_trainer.nanstd, **given}
    exec(compile(ast.Module(found, []), "<trl>", "exec"), scope)
    return scope
