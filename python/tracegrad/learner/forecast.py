"""What a run would need before a weight is read: peak memory and the time of a step, from the model's config alone.

The model is built on the meta device and run there: what its layers save for the backward pass and the operations they
take are counted, not guessed. What is assumed is in `Forecast`. Called by `--dry-run`.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tracegrad.config import Config
from tracegrad.errors import ReadError
from tracegrad.learner.adapted import Adapted
from tracegrad.learner.feed import Feed
from tracegrad.learner.memory import Memory, layers_of
from tracegrad.learner.model import first_line
from tracegrad.learner.setup import precision_of

_SAMPLE = 64  # tokens run on the meta device; what is saved and computed beside attention grows with their number


@dataclass(frozen=True)
class Forecast:
    """Of one rank. Attention is taken as computed without a score matrix in memory.

    Args:
        parameters, trained: of the whole model.
        state_bytes: float32 parameters, their gradient and AdamW's two moments, as this rank holds them.
        row_bytes: activations kept for one row of the token budget, and the logits' chunk.
        flops: of the longest step on this rank: forward and backward, recomputation included, attention aside.
        rate: FLOP/s of a matrix product, measured here.
        ranks: how many share a step.
    """

    parameters: int
    trained: int
    state_bytes: float
    row_bytes: float
    flops: float
    rate: float
    ranks: int

    def lines(self) -> list[str]:
        """For a terminal."""
        total = self.state_bytes + self.row_bytes
        return [
            f"model    {self.parameters:,} parameters, {self.trained:,} of them trained, from config.json alone",
            f"memory   {_size(total)} a rank at most: {_size(self.state_bytes)} for parameters, gradient and AdamW, "
            f"{_size(self.row_bytes)} for the activations of one row",
            f"time     {self.flops / self.rate:.3g} s a step at least: {self.flops / 1e12:.3g} TFLOP a rank, attention "
            f"aside, at the {self.rate / 1e12:.3g} TFLOP/s of a matrix product measured here",
        ]


def forecast(model: Path, config: Config, feed: Feed, ranks: int) -> Forecast:
    """Predicts a run."""
    empty = _empty(model)
    cuda = torch.cuda.is_available() if config.train.device == "auto" else config.train.device.startswith("cuda")
    low = precision_of(config, "cuda" if cuda else "cpu") == torch.bfloat16
    memory = Memory.of(config.train.memory)
    mode = config.parallel.mode if config.parallel.mode != "auto" else "fsdp" if cuda else "ddp"
    shards = ranks if ranks > 1 and mode == "fsdp" else 1
    adapted = Adapted.read(model)
    rank = config.train.lora_rank or (0 if adapted is None else adapted.rank)
    parameters = sum(p.numel() for p in empty.parameters())
    trained = parameters if not rank else _adapter_parameters(empty, rank)
    saved, flops = _counted(empty.to(torch.bfloat16 if low else torch.float32))
    layers, hidden = len(layers_of(empty)), int(empty.config.get_text_config().hidden_size)
    inputs = layers * hidden * (2 if low else 4)
    kept = inputs + saved / layers if memory.recompute else saved
    longest = widest = scored = 0
    for step in feed.each_step(0):
        rows = [len(batch.ids) for batch in step.batches]
        longest, widest = max(longest, sum(rows)), max(widest, *rows)
        scored = max(scored, *(len(batch.read) for batch in step.batches))
    passes = (3 if not rank else 2) + int(memory.recompute)
    logits = _logits_bytes(int(empty.config.get_text_config().vocab_size), scored, memory, cuda, low)
    gathered = 0.0 if shards == 1 else (2 if low else 4) * parameters / (layers if memory.reshard else 1)
    return Forecast(
        parameters=parameters,
        trained=trained,
        state_bytes=(4.0 * parameters + 12.0 * trained) / shards + gathered,
        row_bytes=kept * widest + logits,
        flops=passes * flops * longest,
        rate=_matrix_rate(torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if low else torch.float32),
        ranks=ranks,
    )


def _logits_bytes(vocabulary: int, scored: int, memory: Memory, cuda: bool, low: bool) -> int:
    """Tables of one chunk of the head's rows: as many as fit the chunk, at most all that are scored."""
    row = vocabulary * ((2 if low else 4) if cuda else 8)  # one table in the logits' dtype, or two of float32
    chunk = memory.chunk_bytes or ((1 << 30) if cuda else max(4 << 20, 64 * row))
    return min(scored * row, max(chunk, row))


def _empty(model: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ReadError(
            f"{model}: no causal language model can be built from its config.json: {first_line(error)}. Memory and "
            "time cannot be told. Give --model a folder of save_pretrained."
        ) from error


def _counted(model: Any) -> tuple[float, float]:
    """Bytes saved for the backward pass, and operations of the forward pass with its head, per token."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage.nbytes()
            held.append(tensor)
        return tensor

    held: list[Tensor] = []
    ids = torch.zeros(1, _SAMPLE, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, _SAMPLE, _SAMPLE, dtype=torch.bool, device="meta")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    masks = mask if len(kinds) < 2 else dict.fromkeys(kinds, mask)
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.get_decoder()(input_ids=ids, attention_mask=masks, use_cache=False)
    head = 2 * model.get_output_embeddings().weight.numel()
    return sum(seen.values()) / _SAMPLE, counter.get_total_flops() / _SAMPLE + head


def _adapter_parameters(model: nn.Module, rank: int) -> int:
    """Of LoRA on every linear layer of the decoder."""
    linear = [m for layer in layers_of(model) for m in layer.modules() if isinstance(m, nn.Linear)]
    return sum(rank * (m.in_features + m.out_features) for m in linear)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square product, the best of a few."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.ones(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 2.0 * size**3 / float(np.min(times))


def _size(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
