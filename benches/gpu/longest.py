"""The longest trajectory that trains before a device's memory ends: LoRA adapters on Qwen3-4B, ours and TRL's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import trl_arms
from clock import Clock, skipped
from models import OBJECTIVE, Place, Traces, adamw, model_of
from tracegrad.trainer.distributed import wrap
from tracegrad.trainer.lora import with_adapters
from tracegrad.trainer.memory import Memory, recompute_layers
from tracegrad.trainer.step import optimizer_step

Step = Callable[[int], None]
_TINY_MEMORY = 32 << 20  # replaces a device's on a CPU


def longest_row(bench: Any) -> Iterator[dict[str, Any]]:
    """Double until memory or time ends, then extrapolate the peaks to the device's memory."""
    place: Place = bench.place
    found = {}
    for name, make in (("tracegrad", ours), ("TRL GRPOTrainer", trl)):
        try:
            step = make(place)
            # At tiny sizes there is nothing to find in more time.
            found[name] = search(step, bench.clock, place, 20 if place.tiny else bench.budget_s / 2)
        except Exception as error:
            found[name] = skipped(error)
        bench.clock.report(found)
        step = None
        if place.cuda:
            torch.cuda.empty_cache()
    mine, peer = ((name, each.get("tokens")) if each.get("tokens") else None for name, each in found.items())
    what = "longest trajectory, Qwen3-4B LoRA rank 16, layers recomputed"
    told = {"limit": None, "must": "2x", "better": "more", "arms": found}
    yield bench.record(what, "tokens", mine, peer, **told)


def search(step: Step, clock: Clock, place: Place, budget_s: float) -> dict[str, Any]:
    """Peaks of a step at doubling lengths, and the length at which they reach the device's memory."""
    memory = torch.cuda.get_device_properties(0).total_memory if place.cuda else _TINY_MEMORY
    length, began = (4096 if place.cuda else 64), time.perf_counter()
    step(length)  # creates the optimizer's state, and compiles
    seen: list[tuple[int, int]] = []
    ended = "time"
    while True:
        start = time.perf_counter()
        try:
            held = torch.cuda.memory_allocated() if place.cuda else 0
            peak = clock.peak(partial(step, length)) + held
        except torch.OutOfMemoryError:
            ended = "memory"
            break
        if peak > memory:
            ended = "memory"
            break
        seen.append((length, peak))
        now = time.perf_counter()
        if now - began + 5 * (now - start) > budget_s:
            break
        length *= 2
    tokens = seen[-1][0] if seen else None
    if len(seen) > 1:
        (short, less), (long, more) = seen[-2:]
        tokens = max(long, int(long + (memory - more) * (long - short) / (more - less)) // 128 * 128)
    return {"tokens": tokens, "peaks": seen, "ended_by": ended, "memory": memory}


def one_trace(length: int, place: Place) -> Traces:
    """A quarter of it prompt."""
    return Traces.of(length // 4, np.array([[length - length // 4]]), place.vocabulary)


def ours(place: Place) -> Step:
    """The learner's step with `train.memory_mode` low."""
    model = with_adapters(model_of("Qwen3-4B", place, torch.bfloat16), 16).eval()
    memory = Memory.of("low")
    recompute_layers(model)
    target = wrap(model, "none", memory=memory)
    optimizer = adamw(model, place)

    def run(length: int) -> None:
        step = one_trace(length, place).step(length, False)
        optimizer_step(target, step, OBJECTIVE, optimizer, grad_clip=1.0)

    return run


def trl(place: Place) -> Step:
    """GRPOTrainer's loss on one trajectory, gradient checkpointing on, and its optimizer step."""
    from peft import LoraConfig

    model = model_of("Qwen3-4B", place, torch.bfloat16, "sdpa")
    pair = Traces.of(4, np.full((1, 2), 8), place.vocabulary)  # the trainer needs groups of two or more
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl_arms.trainer_of(model, pair, place, 1, 1, lora, gradient_checkpointing=True)
    adapted = trainer.model.train()
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = adamw(adapted, place)
    trainer.current_gradient_accumulation_steps = 1

    def run(length: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        trainer._compute_loss(adapted, trl_arms.tensors(one_trace(length, place), place.device)).backward()
        optimizer.step()

    return run
