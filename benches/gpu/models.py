"""Models with random weights, traces of random tokens, and the passes of a step over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tracegrad import model as policy
from tracegrad.alignment.sequences import Sequences
from tracegrad.model.attention import enable_flex_attention
from tracegrad.objective import Clip, Objective, Ratio
from tracegrad.packing import ModelShape, Step, pack
from tracegrad.trainer.step import correct_step, optimizer_step

OBJECTIVE = Objective(Clip(), Ratio("theta", "rollout"))
VOCABULARY = 151936
MODELS = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
MIB_PER_TOKEN = {"Qwen3-0.6B": 2.19, "Qwen3-1.7B": 3.56, "Qwen3-4B": 5.85}
"""Memory that the layers keep for the backward pass of each token if nothing is recomputed, measured in bfloat16, the
first two under autocast, which keeps more. tests/project/test_benches_gpu.py measures it again."""
SPARE_BYTES = 8 << 30
"""Of a device's memory, for the head's chunk, the CUDA context and fragmentation."""
LONGEST_ROW = 16384
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Place:
    """Where rows run: the device, whether everything is tiny, and whether a CPU uses the code paths of a GPU."""

    device: str
    tiny: bool
    rehearsal: bool = False

    @property
    def cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.device.startswith("cuda")

    @property
    def as_cuda(self) -> bool:
        """Whether models attend in blocks and in bfloat16, as on a GPU."""
        return self.cuda or self.rehearsal

    @property
    def memory(self) -> int:
        """Bytes of the GPU; of one with 80 GiB where everything is tiny."""
        return torch.cuda.get_device_properties(0).total_memory if self.cuda else 80 << 30

    @property
    def vocabulary(self) -> int:
        """Of every model and head here."""
        return 512 if self.tiny else VOCABULARY


def model_of(name: str, place: Place, dtype: torch.dtype, attention: str | None = None) -> Any:
    """A Qwen3 of a size by its published configuration, with random weights, in training mode.

    Args:
        attention: transformers' name of one; None is ours.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**MODELS[name], "num_key_value_heads": 8, "head_dim": 128}
    if place.tiny:
        sizes = {**TINY, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, vocab_size=place.vocabulary, tie_word_embeddings=True)
    config._attn_implementation = attention or "sdpa"
    with torch.device(place.device):
        model = Qwen3ForCausalLM(config).to(dtype if place.as_cuda else torch.float32).train()
    if attention is None and place.as_cuda:
        enable_flex_attention(model)  # as the learner does: queries, keys and values in one dtype under autocast
    return model


def shape_of(name: str) -> ModelShape:
    """Return the sizes of a model of `MODELS`, for counts of FLOP and parameters."""
    sizes = MODELS[name]
    return ModelShape(
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        vocab=VOCABULARY,
    )


def row_tokens(name: str, memory: int, bytes_per_parameter: int) -> int:
    """Return how many tokens a row of a model may have on a device of `memory` bytes: a multiple of 2048.

    Args:
        bytes_per_parameter: of weights, gradients and the optimizer's state together.
    """
    shape = shape_of(name)
    parameters = shape.token_flop / 6 + shape.vocab * shape.hidden
    free = memory - SPARE_BYTES - bytes_per_parameter * parameters
    tokens = min(LONGEST_ROW, int(free / (MIB_PER_TOKEN[name] * 2**20)) // 2048 * 2048)
    if tokens <= 0:
        raise ValueError(
            f"{name} with {bytes_per_parameter} bytes a parameter leaves no memory for a row of 2048 tokens on a "
            f"device of {memory / 2**30:.0f} GiB. Run this row on a device with more memory."
        )
    return tokens


def largest_model(memory: int, bytes_per_parameter: int) -> str:
    """Return the largest model whose longest row fits on a device; the smallest one if none does."""
    by_size = sorted(MODELS, key=lambda name: -MIB_PER_TOKEN[name])
    return next((n for n in by_size[:-1] if row_tokens(n, memory, bytes_per_parameter) == LONGEST_ROW), by_size[-1])


@dataclass(frozen=True)
class Traces:
    """Groups of one prompt and several completions each.

    Args:
        prompts: [P] ids of each group.
        completions: ids of each trace, by group.
        rollout: logprobs of these, close to logprobs of random weights, so that a part of the ratios is clipped.
        advantages: of each trace, by group.
    """

    prompts: list[np.ndarray]
    completions: list[list[np.ndarray]]
    rollout: list[list[np.ndarray]]
    advantages: np.ndarray

    @classmethod
    def of(cls, prompt: int, lengths: np.ndarray, vocabulary: int) -> Traces:
        """Of [groups, G] completion lengths."""
        random = np.random.default_rng(0)
        near = -np.log(vocabulary)
        return cls(
            prompts=[random.integers(0, vocabulary, prompt) for _ in lengths],
            completions=[[random.integers(0, vocabulary, n) for n in row] for row in lengths],
            rollout=[[(near + random.normal(0, 0.2, n)).astype(np.float32) for n in row] for row in lengths],
            advantages=random.normal(0, 1, lengths.shape).astype(np.float32),
        )

    @property
    def tokens(self) -> int:
        """Of all traces, each with its prompt."""
        return sum(len(p) + len(c) for p, group in zip(self.prompts, self.completions, strict=True) for c in group)

    def sequences(self) -> Sequences:
        """As `pack` needs them."""
        rows = [np.r_[p, c] for p, group in zip(self.prompts, self.completions, strict=True) for c in group]
        flat = [logp for group in self.rollout for logp in group]
        each = zip(rows, flat, strict=True)
        trainable = np.concatenate([np.arange(len(row)) >= len(row) - len(logp) for row, logp in each])
        logprobs = np.full(len(trainable), np.nan, np.float32)
        logprobs[trainable] = np.concatenate(flat)
        cu = np.r_[0, np.cumsum([len(row) for row in rows])]
        group = np.repeat(np.arange(len(self.prompts)), self.advantages.shape[1])
        return Sequences.from_arrays(np.concatenate(rows), cu, logprobs, trainable, group=group)

    def step(self, budget: int, share: bool, pad: int = 128, shape: ModelShape | None = None) -> Step:
        """All of them as one optimizer step; `shape` is of the model, for the FLOP ratio of sharing."""
        told = {
            "tokens_per_row": budget,
            "share_prefixes": share,
            "requirements": OBJECTIVE.requirements,
            "pad_to_multiple_of": pad,
        }
        [step] = pack(self.sequences(), self.advantages.reshape(-1), shape=shape, **told)
        return step


def lognormal(groups: int, size: int, median: int, longest: int) -> np.ndarray:
    """[groups, G] completion lengths as rollouts have them."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.8, (groups, size))
    return drawn.clip(4, longest).astype(int)


def recorded_groups(place: Place, bytes_per_parameter: int) -> tuple[Traces, int]:
    """Return four groups of eight traces of lognormal lengths for Qwen3-0.6B, and the token budget of their rows."""
    if place.tiny:
        return Traces.of(24, lognormal(2, 8, 12, 96), place.vocabulary), 128
    budget = row_tokens("Qwen3-0.6B", place.memory, bytes_per_parameter)
    part = budget // 16
    return Traces.of(part, lognormal(4, 8, part, 8 * part), place.vocabulary), budget


def passes(model: Any, step: Step, place: Place) -> Callable[[], None]:
    """Forward and backward of a step whose batches are on the device already."""
    corrected = correct_step(step, OBJECTIVE, "mask")
    moved = [batch.to(place.device) for batch in step.batches]
    given = [step.terms(batch, corrected) for batch in moved]

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for batch, terms in zip(moved, given, strict=True):
            policy.batch_loss(model, batch, terms, OBJECTIVE).loss.backward()

    return run


def updates(model: Any, step: Step, precision: torch.dtype, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """A complete optimizer step by the learner: correction, rows sent, forward, backward, clip, update, metrics."""
    return lambda: optimizer_step(model, step, OBJECTIVE, optimizer, grad_clip=1.0, precision=precision)


def adamw(model: Any, place: Place) -> torch.optim.AdamW:
    """Over trained parameters; one kernel if the device has it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0, fused=place.cuda)


def gradient(model: Any) -> torch.Tensor:
    """Gradients of the last pass, as one vector on the CPU."""
    return torch.cat([p.grad.detach().float().flatten().cpu() for p in model.parameters() if p.grad is not None])


def tree_of_trl(packed: dict[str, torch.Tensor], device: str) -> Any:
    """The layout of one of TRL's trie rows as a `Batch`, whose masks are ours: the same tokens attend to each other."""
    from tracegrad.packing import Batch

    ends = packed["tree_cu_seqlens_q"].tolist()
    paths = packed["tree_cu_seqlens_k"].tolist()
    tree_end = torch.zeros(ends[-1], dtype=torch.long)
    for segment, end in enumerate(ends[1:]):  # in pre-order, so the last segment below a token is the last to reach it
        tree_end[packed["tree_kv_index"][paths[segment] : paths[segment + 1]]] = end
    none = torch.zeros(0, dtype=torch.long)
    batch = Batch(packed["input_ids"], packed["position_ids"], tree_end, none, none, none.float(), none, none.numpy())
    return replace(batch.to(device), term=np.zeros(0, np.int32))
