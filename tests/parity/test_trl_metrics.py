"""TRL's metrics beside ours: `_compute_loss` as it is, and statements of the generation step."""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import peer_code
from metric_cases import KINDS, assert_every_bound_was_crossed, compare, drawn, evaluated, merged
from tracegrad import metrics
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError
from tracegrad.integrations import metrics as peers
from tracegrad.metrics import Rows
from tracegrad.objective import Aggregation, Clip, Objective, Ratio, Rejection, TopEntropy
from tracegrad.online.rollout_metrics import logged_metrics

MEAN = Aggregation("trace", "mean")


def reported(logprobs, inputs, entropy=None, **config):
    """What `_compute_loss` puts into the trainer's metrics."""
    trainer = peer_code.trl_trainer(**config)
    peer_code.trl_loss_of(trainer, logprobs, inputs, entropy)
    return {name: values[0] for name, values in trainer._metrics["train"].items()}


def given(data):
    return {
        "completion_mask": data.mask.int(),
        "advantages": data.advantages[:, 0],
        "old_per_token_logps": data.old,
        "ref_per_token_logps": data.ref,
    }


SAMPLER = {"off_policy_mask_threshold": 0.02}, (Rejection(Ratio("old", "theta"), "k1", MEAN, high=0.02, when="A<0"),)
ENTROPY = {"top_entropy_quantile": 0.4}, (TopEntropy(0.4, "microbatch"),)


@pytest.mark.parametrize("delta", [None, 1.05, 1.3])  # below and above 1 + epsilon_high
@pytest.mark.parametrize("gated", [((), ()), SAMPLER, ENTROPY], ids=["no gate", "OPSM", "entropy"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "luspo", "dr_grpo"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_counts_as_clipped_is_what_its_mask_counts(close, fired, kind, loss, level, gated, delta):
    """Terms that a gate drops too, and nothing that delta alone bounds."""
    (options, gates), data = gated, drawn(kind)
    entropy = data.theta.abs()
    told = {"importance_sampling_level": level, "epsilon": 0.05, "epsilon_high": 0.2, "delta": delta}
    theirs = reported(data.theta, given(data), entropy, loss_type=loss, **told, **dict(options))
    clip = Clip(0.05, 0.2, delta=delta, level=MEAN if level == "sequence" else Aggregation())
    per_term = evaluated(Objective(clip, Ratio("theta", "old"), rejections=gates), data, entropy)
    ours = merged(
        data,
        lambda rows, part: peers.as_trl_loss(
            rows,
            loss_type=loss,
            ratio=part(per_term.ratio),
            epsilon=0.05,
            epsilon_high=0.2,
            delta=delta,
            advantages=part(data.advantages),
            sequence=level == "sequence",
            entropy=part(entropy),
        ),
    )
    compare(close, fired, "TRL", ours, theirs)
    if delta is None and level == "token":  # then the flags say the same
        flags = merged(
            data,
            lambda rows, part: peers.as_trl_loss(
                rows, clipped=part(per_term.clipped), advantages=part(data.advantages)
            ),
        )
        assert {name: ours[name] for name in flags} == pytest.approx(flags, nan_ok=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "luspo", "cispo"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss(close, fired, kind, loss, level, weighted):
    data = drawn(kind)
    entropy = data.theta.abs()
    theirs = reported(
        data.theta,
        given(data),
        entropy,
        loss_type=loss,
        importance_sampling_level=level,
        beta=0.1,
        epsilon=0.05,
        epsilon_high=1.1 if loss == "cispo" else 0.2,
        use_bias_correction_kl=weighted,
    )
    levels = Aggregation("trace", "mean") if level == "sequence" else Aggregation()
    clip = Clip(0.05, 0.1 if loss == "cispo" else 0.2, level=levels)  # cispo's epsilon_high is the cap itself
    per_term = evaluated(Objective(clip, Ratio("theta", "old")), data)
    ours = merged(
        data,
        lambda rows, part: peers.as_trl_loss(
            rows,
            loss_type=loss,
            ratio=part(per_term.ratio),
            epsilon=0.05,
            epsilon_high=1.1 if loss == "cispo" else 0.2,
            advantages=part(data.advantages),
            sequence=level == "sequence",
            theta=part(data.theta),
            ref=part(data.ref),
            kl_weight=part(per_term.ratio) if weighted else None,
            entropy=part(entropy),
        ),
    )
    compare(close, fired, "TRL", ours, theirs)


def test_vespo(close):
    data = drawn("random")
    phi = peer_code.GRPOTrainer.get_gamma_weights(
        data.advantages[:, :1],
        data.theta - data.old,
        data.mask.int(),
        None,
        k_pos=2.0,
        lambda_pos=3.0,
        k_neg=3.0,
        lambda_neg=2.0,
    )
    theirs = reported(data.theta, given(data), loss_type="vespo")
    ours = peers.as_trl_loss(Rows.padded(data.mask), phi=phi[:, 0].numpy()).values()
    close("TRL metrics", ours["vespo/phi_seq_mean"], theirs["vespo/phi_seq_mean"], 1e-6)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampling(close, fired, kind, mode, missing):
    data = drawn(kind)
    rollout = data.rollout.clone()
    if missing:
        rollout[0, 0], rollout[:, 5] = math.nan, math.nan
    mask = data.mask.int()
    ratio = peer_code.trl_importance_ratio(data.old, rollout, mask, mode, clip_min=0.5, clip_max=3.0)
    sequence = mode.startswith("sequence")
    scope = {
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            accelerator=SimpleNamespace(gather=lambda value: value.reshape(1)),
            _metrics={"train": defaultdict(list)},
        ),
        "mode": "train",
        "device": "cpu",
        "old_per_token_logps": data.old,
        "sampling_per_token_logps": rollout,
        "completion_mask": mask,
        "tool_mask": None,
        "sequence_level_is": sequence,
        "vllm_importance_sampling_ratio": ratio,
        "nanmin": peer_code.grpo_trainer.nanmin,
        "nanmax": peer_code.grpo_trainer.nanmax,
    }
    peer_code._run("if self.use_vllm and self.vllm_importance_sampling_correction:\n    delta =", scope)
    theirs = {name: values[0] for name, values in scope["self"]._metrics["train"].items()}
    weights = ratio[:, 0] if sequence else ratio
    cut = len(mask) // 2

    def measure(here):
        weight = weights[here] if sequence else weights[here][data.mask[here]]
        inside = data.mask[here]
        return peers.as_trl_sampling(data.old[here][inside], rollout[here][inside], weight)

    ours = (measure(slice(0, cut)) + measure(slice(cut, None))).values()
    compare(close, fired, "TRL", ours, theirs)


@pytest.mark.parametrize("loss", ["sapo", "vespo"])
def test_a_loss_without_a_clip_reports_none(loss):
    data = drawn("random")
    theirs = reported(data.theta, given(data), loss_type=loss)
    flat = data.mask.numpy()
    told = {"ratio": np.ones(flat.sum()), "advantages": np.ones(flat.sum())}
    assert not [name for name in theirs if "clip" in name]
    assert peers.as_trl_loss(Rows.padded(data.mask), loss_type=loss, **told).values() == {}


def test_what_trl_does_not_have_is_refused():
    rows, one = Rows.of([0]), [1.0]
    with pytest.raises(ArgumentError, match=r"TG-ARGS-011.*loss_type is 'ppo'.*'grpo'"):
        peers.as_trl_loss(rows, loss_type="ppo")
    with pytest.raises(ArgumentError, match="TG-INTEG-009"):
        peers.as_trl_loss(rows, ratio=one, clipped=[True], advantages=one)
    with pytest.raises(ArgumentError, match="TG-INTEG-009"):
        peers.as_trl_loss(rows, ratio=one)
    with pytest.raises(ArgumentError, match=r"TG-ARGS-011.*scale_rewards is 'groups'.*'batch'"):
        peers.as_trl_rewards([one], [0], names=["a"], scale_rewards="groups")
    with pytest.raises(ArgumentError, match=r"TG-ARGS-011.*'gdpo'"):
        peers.as_trl_rewards([one], [0], names=["a"], aggregation="gdpo")


AGGREGATIONS = ["sum_then_normalize", "normalize_then_sum"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", ["group", "none", "batch", True, False])
@pytest.mark.parametrize("kind", ["random", "flat groups", "unscorable", "all equal", "each group flat", "opposite"])
def test_rewards(close, fired, kind, scale, aggregation):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(24, 2, generator=generator)
    if kind == "flat groups":
        rewards[:8] = 0.25
    if kind == "unscorable":
        rewards[1], rewards[5, 0], rewards[8:12] = math.nan, math.nan, math.nan
    if kind == "all equal":
        rewards[:] = 0.5
    if kind == "each group flat":  # the sums differ between groups, the normalised rewards nowhere
        rewards[:] = torch.arange(6).repeat_interleave(4)[:, None]
    weights = torch.tensor([1.0, 0.5])
    if kind == "opposite":  # what one reward gives, the other takes
        rewards[:, 1], weights = -rewards[:, 0], torch.ones(2)
    scope = {
        "self": SimpleNamespace(
            multi_objective_aggregation=aggregation,
            reward_weights=weights,
            scale_rewards=peer_code.GRPOConfig(output_dir="unused", bf16=False, scale_rewards=scale).scale_rewards,
            reward_funcs=[None, None],
            reward_func_names=["first", "second"],
            _metrics={"train": defaultdict(list)},
        ),
        "mode": "train",
        "device": torch.device("cpu"),
        "rewards_per_func": rewards,
        "num_generations": 4,
        "unscorable_mask": rewards.isnan().all(1),
        "nanstd": peer_code.grpo_trainer.nanstd,
    }
    scope |= peer_code._run("if self.multi_objective_aggregation == 'sum_then_normalize':", scope)
    if aggregation == "normalize_then_sum":
        scope |= peer_code._run("rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func", scope)
        scope["rewards"][scope["unscorable_mask"]] = math.nan
    append = "self._metrics[mode]"
    for first in (
        "for i, reward_func_name in enumerate(self.reward_func_names):\n    mean_rewards",
        f"{append}['reward'].append",
        f"{append}['reward_std'].append",
        f"{append}['frac_reward_zero_std'].append",
    ):
        peer_code._run(first, scope)
    theirs = {name: values[0] for name, values in scope["self"]._metrics["train"].items()}
    group = np.repeat(np.arange(6), 4)
    told = {"names": ["first", "second"], "weights": weights, "scale_rewards": scale, "aggregation": aggregation}
    parts = (slice(0, 8), slice(8, None))
    a, b = (peers.as_trl_rewards(rewards[here], group[here], **told) for here in parts)
    compare(close, fired, "TRL", (a + b).values(), theirs, 2e-6)  # its rewards are float32


APPEND = "self._metrics[mode]"
LENGTHS = (
    "prompt_lengths = ",
    "if tool_mask is not None:\n    completion_lengths = ",
    "agg_prompt_lengths = ",
    "agg_completion_lengths = ",
    "total_prompt_tokens = ",
    "if mode == 'train':\n    self.state.num_input_tokens_seen",
    f"{APPEND}['num_tokens'] = ",
    *(f"{APPEND}['completions/{how}_length']" for how in ("mean", "min", "max")),
    "eos_and_pad = ",
    "is_truncated = ",
    "agg_is_truncated = ",
    f"{APPEND}['completions/clipped_ratio']",
    "term_completion_lengths = agg_completion_lengths[",
    "if len(term_completion_lengths) == 0:",
    *(f"{APPEND}['completions/{how}_terminated_length']" for how in ("mean", "min", "max")),
    "if self.tools:\n    agg_tool_call_count",
)
"""Statements of `_generate`, in their order."""


@pytest.mark.parametrize("kind", ["ended", "some cut", "all cut", "tools", "no calls"])
def test_completions_and_tools(close, fired, kind):
    generator = np.random.default_rng(3)
    stop, pad, before = 7, 0, 100
    prompts = [list(generator.integers(8, 40, size)) for size in (3, 3, 9, 9, 1, 1)]
    ids = [list(generator.integers(8, 40, size)) for size in (5, 1, 12, 4, 6, 30)]
    cut = np.array([kind == "all cut" or (kind == "some cut" and row % 2 == 1) for row in range(6)])
    ids = [row if here else [*row, stop] for row, here in zip(ids, cut, strict=True)]
    mask = [[int(place % 3 > 0) for place in range(len(row))] for row in ids] if kind == "tools" else None
    calls, failed = np.array([0, 2, 1, 0, 3, 0]), np.array([0, 1, 0, 0, 2, 0])
    if kind == "no calls":
        calls, failed = np.zeros(6, int), np.zeros(6, int)
    scope = {
        "self": SimpleNamespace(
            accelerator=SimpleNamespace(gather=lambda value: value),
            state=SimpleNamespace(num_input_tokens_seen=before),
            _metrics={"train": defaultdict(list)},
            eos_token_ids=[stop],
            _tokenizer=SimpleNamespace(pad_token_id=pad),
            tools=["price"] if kind in ("tools", "no calls") else [],
        ),
        "mode": "train",
        "device": "cpu",
        "prompt_ids": prompts,
        "completion_ids": ids,
        "tool_mask": mask,
        "tool_call_count": int(calls.sum()),
        "tool_failure_count": int(failed.sum()),
    }
    for first in LENGTHS:
        scope |= peer_code._run(first, scope, peer_code.GRPOTrainer._generate)
    theirs = {name: values[0] for name, values in scope["self"]._metrics["train"].items()}
    sampled = [len(row) for row in ids] if mask is None else [sum(row) for row in mask]

    def measure(here):
        found = metrics.completions([len(row) for row in prompts[here]], sampled[here], cut[here])
        return found | metrics.tools(calls[here], failed[here]) if kind in ("tools", "no calls") else found

    ours = (measure(slice(0, 2)) + measure(slice(2, None))).values()
    ours["num_tokens"] += before  # as a run adds up its steps
    compare(close, fired, "TRL", ours, theirs)


def test_what_reward_functions_log_is_averaged_as_it_is_there(close):
    """TRL calls a function once for all groups of a rank, a run once a group; both take the mean over calls."""
    said = {"accuracy": [0.25, 1.0, 0.5], "length": [3.0]}
    scope = {
        "self": SimpleNamespace(
            _pending_metrics={name: list(values) for name, values in said.items()},
            accelerator=SimpleNamespace(gather=lambda value: value),
            _metrics={"train": defaultdict(list)},
        ),
        "gather_object": lambda value: value,
        "mode": "train",
        "device": "cpu",
    }
    peer_code._run("for name in sorted(set(gather_object(list(self._pending_metrics)))):", scope)
    theirs = {name: values[0] for name, values in scope["self"]._metrics["train"].items()}
    groups = [{"accuracy": [0.25, 1.0], "length": [3.0]}, {"accuracy": [0.5]}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": messages, "metadata": {"log_metric": each}} for each in groups]
    ours = logged_metrics(Traces.from_records(records))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        close("TRL metrics", ours[name], value, 1e-6)


def test_every_bound_was_crossed_in_some_case(fired):
    assert_every_bound_was_crossed(fired("TRL metrics"))
