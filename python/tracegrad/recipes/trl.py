"""Import TRL's GRPOConfig as a recipe. TRL is not imported: the options are read by their names."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tracegrad.config import Advantage
from tracegrad.config.dotted_keys import split_list
from tracegrad.objective import (
    AdaptiveEntropy,
    Aggregation,
    Clip,
    EntropyBonus,
    Gamma,
    MaskOutside,
    Objective,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    Sigmoid,
    TopEntropy,
    Truncate,
    Weight,
    with_beta,
    with_kl,
)
from tracegrad.recipes.import_config import Peer, PeerConfig, UnsupportedOption, flat, read
from tracegrad.recipes.recipe import Options, Recipe

_OLD, _MISMATCH = Ratio("theta", "old"), Ratio("old", "rollout")
_MEAN, _PRODUCT = Aggregation("trace", "mean"), Aggregation("trace", "sum")
_INFINITY = float("inf")


def from_trl(config: Any, *, rollout_logprobs: bool = False) -> Recipe:
    """Convert a GRPOConfig, or a dict with its options, to a recipe. A printed recipe lists the effect of each option.

    Args:
        config: the config.
        rollout_logprobs: use the recorded logprobs as TRL uses those of vLLM, with the config's
            vllm_importance_sampling_* options, even if `use_vllm` is off. A GRPOConfig for recorded traces has it off.

    Raises:
        ArgumentError: for options without a counterpart, by name and with a fix.

    >>> print(from_trl({"loss_type": "cispo", "epsilon_high": 5.0}).objective.weights[0])
    clamp(w, 0, 5), w = theta/old
    >>> config = {"vllm_importance_sampling_mode": "token_truncate"}  # or a GRPOConfig
    >>> print(from_trl(config, rollout_logprobs=True).objective.weights[0])
    clamp(w, 0, 3), w = old/rollout
    """
    options = flat(config, max_depth=0)
    if rollout_logprobs:
        options["use_vllm"] = True
    if isinstance(options.get("lr_scheduler_kwargs"), Mapping):
        options["lr_scheduler_kwargs"] = json.dumps(dict(options["lr_scheduler_kwargs"]), sort_keys=True)
    if isinstance(options.get("reward_weights"), (list, tuple)):
        options["reward_weights"] = ",".join(str(weight) for weight in options["reward_weights"])
    former = {}
    if (ratio := options.pop("warmup_ratio", None)) and not options.get("warmup_steps"):
        options["warmup_steps"] = ratio  # the name of transformers before 5.0
        former["warmup_steps"] = "warmup_ratio"
    if options.get("scale_rewards") in (True, False):
        options["scale_rewards"] = "group" if options["scale_rewards"] else "none"
    cap = options.pop("vllm_importance_sampling_cap", None)
    if cap is not None:
        options["vllm_importance_sampling_clip_max"] = cap
        former["vllm_importance_sampling_clip_max"] = "vllm_importance_sampling_cap"
    recipe = read(TRL, options)
    effects = [(name.partition(" = "), effect) for name, effect in recipe.imported_options]
    renamed = tuple((f"{former.get(name, name)} = {value}", effect) for (name, _, value), effect in effects)
    return replace(recipe, imported_options=renamed)


def _build(o: PeerConfig) -> Recipe:
    level = o.lookup("importance_sampling_level", {"token": Aggregation(), "sequence": _MEAN})
    loss, weights, gates = o["loss_type"], [*_correction(o)], []
    low, high = o["epsilon"], o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    surrogate, ratio = Clip(low, high, delta=o["delta"], level=level), _OLD
    if loss == "cispo":
        surrogate, ratio = PolicyGradient(), None
        # TRL's epsilon_high is the bound itself here, not the distance from 1.
        weights.append(Weight(_OLD, level, Truncate(0.0, high, below_one=high < 1)))
    elif loss == "vespo":
        surrogate, ratio = PolicyGradient(), None
        if level != Aggregation() or any(weight.level != Aggregation() for weight in weights):
            o.refuse("loss_type", "with sequence ratios TRL rejects it or has no defined value", "use token levels")
        good, bad = (Gamma(o[f"vespo_k_{sign}"], o[f"vespo_lambda_{sign}"]) for sign in ("pos", "neg"))
        absorbs = bool(weights)
        weights.append(Weight(_OLD, _PRODUCT, good, when="A>=0", absorbs=absorbs))
        weights.append(Weight(_OLD, _PRODUCT, bad, when="A<0", absorbs=absorbs))
    elif loss == "sapo":
        surrogate = Sigmoid(o["sapo_temperature_pos"], o["sapo_temperature_neg"], level)
    if o["off_policy_mask_threshold"] is not None:
        sampler = "rollout" if o["use_vllm"] else "old"
        gates.append(Rejection(Ratio(sampler, "theta"), "k1", _MEAN, high=o["off_policy_mask_threshold"], when="A<0"))
    if o["top_entropy_quantile"] < 1:
        gates.append(TopEntropy(o["top_entropy_quantile"], "microbatch"))
    objective = Objective(surrogate, ratio, tuple(weights), tuple(gates), (), _reduce(o), entropy=_bonus(o))
    if o["beta"]:
        objective = (with_beta if o["use_bias_correction_kl"] else with_kl)(objective, o["beta"])
    scale = o.lookup("scale_rewards", {"group": "std", "batch": "batch_std", "none": "none"}, of_run=True)
    if scale == "batch_std":
        o.differs("scale of a batch")
    missing = "ratio_one" if objective.requirements.rollout else None
    if missing and (gates or any(weight.level == _PRODUCT for weight in weights)):
        o.differs("missing logprobs")
    several = (
        Advantage().multi_objective_aggregation
        if o["multi_objective_aggregation"] == "sum_then_normalize"
        else "normalize_then_sum"
    )
    if several == "normalize_then_sum":
        scale = "std"  # whatever scale_rewards says there
        if not o["reward_weights"]:
            o.refuse(
                "multi_objective_aggregation",
                "the number of rewards is unknown",
                "give reward_weights",
                of_run=True,
            )
    if scale is None:
        return Recipe(objective, None, missing, _options(o))
    advantage = Advantage(
        scale=scale,
        multi_objective_aggregation=several if o["reward_weights"] else Advantage().multi_objective_aggregation,
    )
    return Recipe(objective, advantage, missing, _options(o))


def _correction(o: PeerConfig) -> tuple[Weight, ...]:
    """Return the weight of old/rollout from vllm_importance_sampling_*, which TRL applies only with vLLM."""
    if not o["use_vllm"] or not o["vllm_importance_sampling_correction"]:
        return ()
    low, high = o["vllm_importance_sampling_clip_min"] or 0.0, o["vllm_importance_sampling_clip_max"]
    mode = "vllm_importance_sampling_mode"
    shapes = {
        "sequence_mask": MaskOutside,
        "sequence_truncate": Truncate,
        "token_mask": MaskOutside,
        "token_truncate": Truncate,
    }
    shape = o.lookup(mode, shapes)(low, _INFINITY if high is None else high)
    return (Weight(_MISMATCH, _PRODUCT if str(o[mode]).startswith("sequence") else Aggregation(), shape),)


def _reduce(o: PeerConfig) -> Reduce:
    of_traces, of_tokens = Reduce("trace", "mean"), Reduce("token")
    if o["loss_type"] == "bnpo":
        o.differs("mean of a micro-batch")
    return o.lookup(
        "loss_type",
        {
            "dapo": of_tokens,
            "grpo": of_traces,
            "bnpo": of_tokens,
            "dr_grpo": Reduce("trace", "sum", norm=float(o["max_completion_length"])),
            "luspo": Reduce("trace", "sum", norm=1.0),
            "cispo": of_tokens,
            "sapo": of_traces,
            "vespo": of_tokens,
        },
    )


def _bonus(o: PeerConfig) -> EntropyBonus | None:
    """Return the entropy bonus, only on the tokens of the entropy quantile if there is one."""
    adapt = None
    if o["use_adaptive_entropy"]:
        bounds = (o["entropy_coef_min"], o["entropy_coef_max"])
        adapt = AdaptiveEntropy(o["entropy_target"], o["entropy_coef_delta"], *bounds)
    if not o["entropy_coef"] and adapt is None:
        return None
    uses_quantile = o["top_entropy_quantile"] < 1
    if uses_quantile and o["off_policy_mask_threshold"] is not None:
        reason = "with off_policy_mask_threshold, the bonus here is over tokens that pass both, TRL's over the quantile"
        o.refuse("top_entropy_quantile", reason, "remove one of the three")
    if uses_quantile:
        o.differs("bonus of a quantile", share=o["top_entropy_quantile"])
    return EntropyBonus(o["entropy_coef"], masked=uses_quantile, reduce=Reduce("token"), adapt=adapt)


def _options(o: PeerConfig) -> Options:
    options: list[tuple[str, Any]] = [("filter.mask_truncated", True)] if o["mask_truncated_completions"] else []
    if o["reward_weights"]:
        options.append(("data.reward_weights", [float(weight) for weight in split_list(str(o["reward_weights"]))]))
    passes, updates = o["num_train_epochs"], _updates(o)
    options += [("train.epochs", max(1, int(passes))), ("train.updates_per_old_logprobs", updates)]
    if passes != int(passes) or passes < 1:
        o.refuse("num_train_epochs", "the number of epochs is an integer here", "train.epochs", of_run=True)
    if updates > 1 and o["loss_type"] in ("dapo", "cispo", "vespo"):
        o.differs("tokens of a step", steps=updates)
    if o["sync_ref_model"]:
        options.append(("train.ref_sync_steps", o["ref_model_sync_steps"]))
        options.append(("train.ref_mixup_alpha", float(o["ref_model_mixup_alpha"])))
    if o["max_steps"] > 0:
        options.append(("train.max_steps", o["max_steps"]))
    if o["num_iterations"] > 1:
        options.append(("train.iterations", o["num_iterations"]))
    options += [(f"optimizer.{name}", o[f"adam_{trl_name}"]) for name, trl_name in _ADAM.items()]
    options += [("optimizer.weight_decay", o["weight_decay"]), ("optimizer.grad_clip", o["max_grad_norm"])]
    return (*_schedule(o), *options)


def _schedule(o: PeerConfig) -> Options:
    """Return the learning rate and its schedule. A warm-up below 1 is a share of all steps, as in transformers."""
    options: list[tuple[str, Any]] = [("optimizer.lr", float(o["learning_rate"]))]
    options.append(("schedule.name", o.lookup("lr_scheduler_type", _SCHEDULES)))
    warmup = max(o["warmup_steps"], 0.0) if o["lr_scheduler_type"] != "constant" else 0.0
    if warmup:
        options.append(
            ("schedule.warmup_steps", int(warmup)) if warmup >= 1 else ("schedule.warmup_ratio", float(warmup))
        )
    if o["lr_scheduler_kwargs"] and o["lr_scheduler_type"] != "constant":
        options.append(("schedule.kwargs", o["lr_scheduler_kwargs"]))
    return tuple(options)


def _describe_batch(values: Mapping[str, Any]) -> str:
    """Return the number of completions and groups of an optimizer step; TRL's defaults are 8 and 8 generations."""
    completions = values.get("per_device_train_batch_size", 8) * values.get("gradient_accumulation_steps", 1)
    return f"{completions:,} completions on each device, {completions / values.get('num_generations', 8):g} groups"


def _updates(o: PeerConfig) -> int:
    """Return the number of optimizer steps between measurements of `old`."""
    steps = o["steps_per_generation"] or o["gradient_accumulation_steps"]
    if steps % o["gradient_accumulation_steps"] and o["gradient_accumulation_steps"] % steps:
        o.refuse("steps_per_generation", "old would change within an optimizer step", "use a multiple", of_run=True)
    return max(1, steps // o["gradient_accumulation_steps"])


_SCHEDULES = {"linear": "linear", "constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"} | {
    name: name
    for name in (
        *("cosine_with_restarts", "polynomial", "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
        "warmup_stable_decay",
    )
}
_ADAM = {"beta1": "beta1", "beta2": "beta2", "eps": "epsilon"}
_SAMPLING = "the traces are recorded; a run does not generate"
_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "epsilon": (0.2, 0.1),
    "epsilon_high": (None, 0.28),
    "delta": (None, 1.6),
    "beta": (0.0, 0.04),
    "use_bias_correction_kl": (True, False),
    "use_vllm": (False, True),
    "vllm_importance_sampling_correction": (True, False),
    "vllm_importance_sampling_mode": ("sequence_mask", "token_truncate", "token_mask", "sequence_truncate"),
    "vllm_importance_sampling_clip_max": (3.0, None, 2.0),
    "vllm_importance_sampling_clip_min": (None, 0.5),
    "off_policy_mask_threshold": (None, 0.05),
    "top_entropy_quantile": (1.0, 0.4, 0.0),
    "entropy_coef": (0.0, 0.05),
    "use_adaptive_entropy": (False, True),
    "entropy_coef_min": (0.0, 0.01),
    "entropy_coef_max": (1.0, 0.5),
    "entropy_coef_delta": (0.005, 0.01),
    "entropy_target": (0.2, 0.4),
    "sapo_temperature_pos": (1.0, 1.5),
    "sapo_temperature_neg": (1.05, 1.2),
    "vespo_k_pos": (2.0, 1.5),
    "vespo_lambda_pos": (3.0, 2.5),
    "vespo_k_neg": (3.0, 2.5),
    "vespo_lambda_neg": (2.0, 1.5),
    "max_completion_length": (512, 32),
    "scale_rewards": ("group", "batch", "none"),
    "reward_weights": (None, "2.0,0.5"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "mask_truncated_completions": (False, True),
    "sync_ref_model": (False, True),
    "ref_model_mixup_alpha": (0.6, 1.0),
    "ref_model_sync_steps": (512, 64),
    "num_iterations": (1, 2),
    "steps_per_generation": (None, 4),
    "gradient_accumulation_steps": (1,),
    "learning_rate": (1e-6, 2e-6),
    "lr_scheduler_type": tuple(_SCHEDULES),
    "lr_scheduler_kwargs": (None, '{"num_cycles": 2}'),
    "warmup_steps": (0.0, 10.0, 0.1),
    "max_steps": (-1, 100),
    "adam_beta1": (0.9, 0.8),
    "adam_beta2": (0.999, 0.99),
    "adam_epsilon": (1e-8, 1e-6),
    "weight_decay": (0.0, 0.01),
    "max_grad_norm": (1.0, 0.2),
    "num_train_epochs": (3.0, 1.0),
}

TRL = Peer(
    name="trl",
    version="1.16",
    options=_OPTIONS,
    build=_build,
    with_options={
        ("loss_type", "cispo"): {"epsilon_high": 5.0},
        "use_bias_correction_kl": {"beta": 0.04},
        **{
            f"vllm_importance_sampling_{name}": {"use_vllm": True}
            for name in ("correction", "mode", "clip_max", "clip_min")
        },
        **{
            f"entropy_{name}": {"use_adaptive_entropy": True}
            for name in ("coef_min", "coef_max", "coef_delta", "target")
        },
        **{f"sapo_temperature_{sign}": {"loss_type": "sapo"} for sign in ("pos", "neg")},
        **{f"vespo_{name}": {"loss_type": "vespo"} for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
        "max_completion_length": {"loss_type": "dr_grpo"},
        "multi_objective_aggregation": {"reward_weights": "2.0,0.5"},
        "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_restarts"},
        "sync_ref_model": {"beta": 0.04},
        "ref_model_mixup_alpha": {"sync_ref_model": True, "beta": 0.04},
        "ref_model_sync_steps": {"sync_ref_model": True, "beta": 0.04},
    },
    unsupported={
        "router_aux_loss_coef": UnsupportedOption(
            (None, 0.0), "a run has no loss of the router", "integrations.trl, which keeps TRL's loss"
        ),
        "label_smoothing_factor": UnsupportedOption((0.0,), "policy losses do not use it", "remove it"),
        "neftune_noise_alpha": UnsupportedOption((None,), "noise would make every ratio wrong", "remove it"),
        "optim": UnsupportedOption(
            ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_npu_fused"),
            "the optimizer is AdamW",
            "remove it, or pass your own optimizer to trainer.train",
            run_only=True,
        ),
        "adafactor": UnsupportedOption((False,), "the optimizer is AdamW", "remove it", run_only=True),
        "optim_args": UnsupportedOption((None,), "the optimizer is AdamW", "optimizer.*", run_only=True),
        "optim_target_modules": UnsupportedOption(
            (None,), "a run trains all weights", "train.lora_rank", run_only=True
        ),
        "use_rslora": UnsupportedOption((False,), "adapters are plain LoRA", "remove it", run_only=True),
        "use_dora": UnsupportedOption((False,), "adapters are plain LoRA", "remove it", run_only=True),
        "load_in_8bit": UnsupportedOption((False,), "weights are not quantised", "remove it", run_only=True),
        "load_in_4bit": UnsupportedOption((False,), "weights are not quantised", "remove it", run_only=True),
    },
    ignored=(
        "output_dir per_device_* disable_dropout num_generations* generation_* temperature "
        "repetition_penalty chat_template_kwargs cache_implementation vllm_[!i]* use_transformers_* "
        "transformers_continuous_* max_tool_calling_iterations average_tokens_across_devices bf16* fp16* tf32 "
        "activation_checkpointing* gradient_checkpointing* torch_* use_liger_kernel liger_kernel_config use_cache "
        "auto_find_batch_size logging_* log_* include_* disable_tqdm report_to run_name project trackio_* eval_* "
        "prediction_loss_only batch_eval_metrics save_* enable_jit_checkpoint push_to_hub hub_* load_best_model_at_end "
        "metric_for_best_model greater_is_better ignore_data_skip restore_callback_* full_determinism seed data_seed "
        "use_cpu accelerator_config parallelism_config dataloader_* remove_unused_columns label_names "
        "train_sampling_strategy length_column_name ddp_* fsdp* deepspeed debug skip_memory_metrics do_* "
        "resume_from_checkpoint local_rank model_* trust_remote_code cast_lm_head_to_fp32 ds3_gather_for_generation "
        "shuffle_dataset pad_to_multiple_of num_completions_to_print dtype attn_implementation use_peft lora_* bnb_* "
        "use_bnb_* dataset_* ignore_bias_buffers rewards reward_* tools "
        # Options of older versions of TRL and transformers.
        "max_prompt_length use_liger_loss wandb_log_unique_prompts overwrite_output_dir per_gpu_* no_cuda "
        "use_mps_device jit_mode_eval use_ipex half_precision_backend tpu_* past_index group_by_length "
        "use_legacy_prediction_loop evaluation_strategy _n_gpu mp_parameters torchdynamo ray_scope dispatch_batches "
        "split_batches push_to_hub_*"
    ),
    correction="use_vllm: true",
    differs={
        "bonus of a quantile": (
            "TRL divides the entropy bonus by the tokens of the quantile in a micro-batch, tracegrad by all tokens of "
            "the step: it is about {share:g} times TRL's"
        ),
        "mean of a micro-batch": (
            "TRL's mean is over each micro-batch, tracegrad's over the step; with one micro-batch they are equal"
        ),
        "tokens of a step": (
            "TRL divides by the mean number of tokens of the {steps} steps of a generation batch, tracegrad by the "
            "number of the step"
        ),
        "scale of a batch": (
            "TRL divides by the standard deviation of the rewards of one generation batch, tracegrad by the standard "
            "deviation of all traces"
        ),
        "missing logprobs": (
            "a token without a recorded logprob has weight 1 here and is not in the mean over its trace; in TRL it has "
            "the weight of its row, and counts as 0 in the mean"
        ),
    },
    warnings={"use_peft": ((False, None), "a run trains LoRA adapters only if train.lora_rank is set")},
    truncation={"top_p": ("top_p", (1.0, None)), "top_k": ("top_k", (0, None)), "min_p": ("min_p", (0.0, None))},
    instead={
        "model_name_or_path": "--model",
        "output_dir": "--out",
        "dataset_name": "the path of the traces",
        "resume_from_checkpoint": "--resume",
        "temperature": "the recorded temperature; online, rollout.temperature",
        "seed": "train.seed",
        "save_steps": "checkpoint.every_steps",
        "save_total_limit": "checkpoint.keep",
        "report_to": "train.report_to",
        "bf16": "train.dtype",
        "fp16": "train.dtype",
        "dtype": "train.dtype",
        "gradient_checkpointing": "train.memory_mode",
        "activation_checkpointing": "train.memory_mode",
        "torch_compile": "train.compile",
        "lora_r": "train.lora_rank",
        "fsdp": "parallel.mode",
        "deepspeed": "parallel.mode",
        "max_prompt_length": "the recorded prompts",
    },
    batch=("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"),
    describe_batch=_describe_batch,
    temperature="temperature",
)
