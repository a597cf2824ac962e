"""TRL's own code, run beside ours: its `_compute_loss`, and statements of its generation step that have no function.

Nothing is transcribed: statements are taken out of the installed source by their first line and executed.
"""

import ast
import copy
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.experimental.a2po import A2POTrainer
from trl.trainer import grpo_trainer


@cache
def _trl_args(config: type[GRPOConfig]) -> GRPOConfig:
    return config(output_dir="unused", bf16=False, report_to=[])


def trl_trainer(kind: type[GRPOTrainer] = GRPOTrainer, arguments: type[GRPOConfig] = GRPOConfig, **config: Any) -> Any:
    """A trainer without a model, with what `_compute_loss` reads set from GRPOConfig's defaults and `config`.

    `accumulation` is the number of micro-batches of an optimizer step.
    """
    trainer = object.__new__(kind)
    accumulation = config.pop("accumulation", 1)
    trainer.args = args = copy.copy(_trl_args(arguments))
    args.steps_per_generation = accumulation
    for name, value in config.items():
        assert hasattr(args, name), f"this TRL has no option {name!r}"
        setattr(args, name, value)
    for name in ("loss_type", "beta", "top_entropy_quantile", "importance_sampling_level", "off_policy_mask_threshold"):
        setattr(trainer, name, getattr(args, name))
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.max_completion_length = args.max_completion_length
    trainer.entropy_coef, trainer.use_adaptive_entropy = args.entropy_coef, args.use_adaptive_entropy
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0.0 or trainer.use_adaptive_entropy
    trainer._last_world_entropy, trainer._entropy_window_stats = math.inf, None
    trainer.vllm_importance_sampling_correction = True
    trainer.aux_loss_enabled = False
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        pad_across_processes=lambda value, **_: value,
        reduce=lambda value, reduction: value,
        sync_gradients=True,
    )
    return trainer


def trl_loss_of(
    trainer: Any, logprobs: torch.Tensor, inputs: dict[str, Any], entropy: torch.Tensor | None = None
) -> torch.Tensor:
    """The trainer's `_compute_loss` on given logprobs and entropies [B, T]."""
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
    trainer.use_vllm = "importance_sampling_ratio" in inputs
    ids = torch.zeros(logprobs.shape, dtype=torch.long)
    given = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, **inputs}
    given.setdefault("num_items_in_batch", (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum())
    return trainer._compute_loss(None, given)


def trl_loss(
    logprobs: torch.Tensor, inputs: dict[str, Any], entropy: torch.Tensor | None = None, **config: Any
) -> torch.Tensor:
    """GRPOTrainer._compute_loss on given logprobs [B, T], without a model; `config` as in GRPOConfig."""
    return trl_loss_of(trl_trainer(**config), logprobs, inputs, entropy)


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


def trl_mask_truncated(
    ids: list[list[int]], completion: torch.Tensor, tools: torch.Tensor, stop: tuple[int, ...], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What TRL's generation step leaves of a completion mask and a tool mask under `mask_truncated_completions`."""
    tokenizer = SimpleNamespace(pad_token_id=pad)
    given = {
        "self": SimpleNamespace(mask_truncated_completions=True, eos_token_ids=stop, _tokenizer=tokenizer),
        "completion_ids_list": ids,
        "completion_mask": completion,
        "tool_mask": tools,
        "device": "cpu",
    }
    scope = _run("if self.mask_truncated_completions:", given)
    return scope["completion_mask"], scope["tool_mask"]


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


@cache
def _statement(first: str, function: Callable[..., Any]) -> CodeType:
    """The one statement of a function that starts with `first`, compiled."""
    source = textwrap.dedent(inspect.getsource(function))
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and ast.unparse(node).startswith(first)
    ]
    assert len(found) == 1, f"{len(found)} statements of this TRL start with {first!r}"
    return compile(ast.Module(found, []), "<trl>", "exec")


def _run(
    first: str, given: dict[str, Any], function: Callable[..., Any] = GRPOTrainer._generate_and_score_completions
) -> dict[str, Any]:
    """Executes the one statement of a function, by default the generation step, that starts with `first`."""
    scope = {"torch": torch, "math": math, "nanstd": grpo_trainer.nanstd, **given}
    exec(_statement(first, function), scope)
    return scope
