"""The rows that are measured on one GPU: each compared with its peer on the same tensors, with its limit and its goal.

A row is a function of a `Bench`; it yields records. Sizes shrink with `--tiny`, and nothing else does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import trl_arms
from arms import IMPLEMENTATIONS, OURS, PEERS, Problem, fused
from clock import Clock, skipped
from longest import longest_row
from models import (
    Place,
    Traces,
    adamw,
    gradient,
    largest_model,
    lognormal,
    model_of,
    passes,
    recorded_groups,
    row_tokens,
    shape_of,
    updates,
)
from tracegrad import model as policy
from tracegrad.model.lm_head import MAX_CHUNK_BYTES, Size
from tracegrad.packing import pack
from tracegrad.trainer.memory import compile_layers

Found = dict[str, dict[str, Any]]
BF16 = torch.bfloat16


@dataclass
class Bench:
    """Inputs of a row.

    Args:
        clock: medians of interleaved runs.
        place: device and sizes.
        budget_s: seconds a row may need if it searches.
    """

    clock: Clock
    place: Place
    budget_s: float = 540

    def record(
        self, what: str, unit: str, ours: Any, peer: Any, *, limit: Any, must: Any, better: str, **more: Any
    ) -> dict[str, Any]:
        """One row of the table.

        Args:
            what: is measured.
            unit: of ours, peer_rate, limit and must; `must` is a ratio if its unit says so.
            ours, peer: (name, value) of each arm; None if it did not run.
            better: "less" or "more".
        """
        mine, theirs = (None, None) if ours is None else ours, (None, None) if peer is None else peer
        (our_arm, our_rate), (peer_arm, peer_rate) = mine, theirs
        ratio = None
        if self.place.tiny:  # these are of the full sizes
            limit = must = None
        if our_rate and peer_rate:
            ratio = peer_rate / our_rate if better == "less" else our_rate / peer_rate
        told = {"what": what, "peer": peer_arm, "peer_rate": peer_rate, "ours": our_rate, "our_arm": our_arm}
        return {**told, "ratio": ratio, "limit": limit, "must": must, "unit": unit, **more}


def best(found: Found, names: Any, key: str, less: bool = True) -> tuple[str, float] | None:
    """The arm with the least or most of a figure, among those that ran."""
    ran = [(name, found[name][key]) for name in names if found.get(name, {}).get(key) is not None]
    return (min if less else max)(ran, key=lambda each: each[1]) if ran else None


# --- heads ---

ANY_LOSS = ["TRL chunked", "Liger NLL and entropy"]
"""The peers whose head returns logprobs and entropies with a gradient, so that they accept any loss as ours does."""


def head(bench: Bench, width: int, limit: float, must: float, generic: float | None) -> Iterator[dict[str, Any]]:
    """Forward and backward of every head on the same rows; errors against float32."""
    rows, width = (64, 32) if bench.place.tiny else (32768, width)
    problem = Problem.of(rows, width, bench.place.vocabulary, bench.place.device, False)
    arms = {**{f"tracegrad {name}": arm for name, arm in OURS.items()}, **PEERS}
    if bench.place.tiny:
        del arms["tracegrad one-pass, torch.compile"]  # a minute of compiling
    runs = {name: backward_of(arm, problem) for name, arm in arms.items()}
    found = bench.clock.compare({**runs, "three products": products(problem)})
    for name, told in found.items():
        if "ms" in told and name in runs:
            told |= errors(runs[name], problem)
    name_implementations(found, problem)
    what = f"head forward and backward, M={rows} H={width} V={len(problem.weight)}"
    peer = best(found, ANY_LOSS, "ms")
    own = [name for name in found if name.startswith("tracegrad one-pass")]
    told = {"limit": limit, "better": "less", "arms": found}
    yield bench.record(f"{what}: loss known to the head", "ms", best(found, own, "ms"), peer, must=must, **told)
    if generic is not None:
        mine = best(found, ["tracegrad generic"], "ms")
        yield bench.record(f"{what}: any loss", "ms", mine, peer, must=generic, **told)


def head_peaked(bench: Bench) -> Iterator[dict[str, Any]]:
    """The same where distributions are peaked, as in a trained model: what filters gradients gains there."""
    rows, width = (64, 32) if bench.place.tiny else (32768, 1024)
    problem = Problem.of(rows, width, bench.place.vocabulary, bench.place.device, True)
    arms = {"tracegrad one-pass": OURS["one-pass"], **PEERS}
    found = bench.clock.compare({name: backward_of(arm, problem) for name, arm in arms.items()})
    name_implementations(found, problem)
    mine, peer = best(found, ["tracegrad one-pass"], "ms"), best(found, ANY_LOSS, "ms")
    what = f"head forward and backward, M={rows} H={width}, peaked"
    yield bench.record(what, "ms", mine, peer, limit=38.7, must=None, better="less", arms=found)


def head_frozen(bench: Bench) -> Iterator[dict[str, Any]]:
    """A head without a gradient (LoRA), under any loss."""
    rows, width = (64, 32) if bench.place.tiny else (32768, 4096)
    problem = Problem.of(rows, width, bench.place.vocabulary, bench.place.device, False).frozen()
    arms = {"tracegrad": OURS["generic"], "TRL chunked": PEERS["TRL chunked"], "full logits": PEERS["full logits"]}
    found = bench.clock.compare({name: backward_of(arm, problem) for name, arm in arms.items()})
    mine, peer = best(found, ["tracegrad"], "ms"), best(found, ["TRL chunked"], "ms")
    what = f"frozen head forward and backward, M={rows} H={width}"
    yield bench.record(what, "ms", mine, peer, limit=103, must=115, better="less", arms=found)


def head_memory(bench: Bench) -> Iterator[dict[str, Any]]:
    """Peak beyond the inputs if the head has no gradient, so that it is the chunk and d_hidden."""
    rows, width = (64, 32) if bench.place.tiny else (32768, 4096)
    problem = Problem.of(rows, width, bench.place.vocabulary, bench.place.device, False).frozen()
    arms = {
        "tracegrad one-pass": lambda p: fused(p, plan="one-pass"),
        "tracegrad one-pass, 32 MiB": lambda p: fused(p, plan="one-pass", chunk_bytes=32 << 20),
        "TRL chunked": PEERS["TRL chunked"],
        "full logits": PEERS["full logits"],
    }
    found = bench.clock.compare({name: backward_of(arm, problem) for name, arm in arms.items()})
    for told in found.values():
        if told.get("peak_bytes") is not None:
            told["peak_gb"] = told["peak_bytes"] / 1e9
    peer = best(found, ["full logits"], "peak_gb")
    by_hidden = 2 * rows * width  # the gradient of the hidden states, bfloat16
    defaults = ("tracegrad one-pass", "default", MAX_CHUNK_BYTES, 4.7)
    for name, mode, chunk, must in (defaults, ("tracegrad one-pass, 32 MiB", "low memory", 32 << 20, 0.32)):
        told = {"limit": (chunk + by_hidden) / 1e9, "must": must, "better": "less", "arms": found}
        what = f"head extra memory without dW, M={rows} H={width}, {mode}"
        yield bench.record(what, "GB", best(found, [name], "peak_gb"), peer, **told)


def name_implementations(found: Found, problem: Problem) -> None:
    """Note which implementation ran, for the arms that choose between several."""
    for name, implementation in IMPLEMENTATIONS.items():
        if "ms" in found[name]:
            found[name]["implementation"] = implementation(problem)


def backward_of(arm: Callable[[Problem], torch.Tensor], problem: Problem) -> Callable[[], None]:
    def run() -> None:
        problem.hidden.grad = problem.weight.grad = None
        arm(problem).backward()

    return run


def products(problem: Problem) -> Callable[[], None]:
    """Logits, d_hidden and d_weight of chunks as the one pass has them, and nothing else."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    rows = Size(*hidden.shape, len(weight), row_bytes=2).chunk(MAX_CHUNK_BYTES)

    def run() -> None:
        for start in range(0, len(hidden), rows):
            chunk = hidden[start : start + rows]
            logits = chunk @ weight.T
            logits @ weight
            logits.T @ chunk

    return run


def errors(run: Callable[[], None], problem: Problem) -> dict[str, float]:
    """Of both gradients, relative to gradients of the same bfloat16 inputs in float32."""
    run()
    found = [problem.hidden.grad, problem.weight.grad]
    hidden, weight = (x.detach().float().requires_grad_() for x in (problem.hidden, problem.weight))
    exact = Problem(hidden, weight, problem.target, problem.old, problem.advantages)
    backward_of(OURS["generic"], exact)()
    gaps = [float((a.float() - b.grad).norm() / b.grad.norm()) for a, b in zip(found, (hidden, weight), strict=True)]
    return dict(zip(("d_hidden_error", "d_weight_error"), gaps, strict=True))


# --- complete models ---


def tokens_per_second(bench: Bench, name: str, limit: float, must: float, peer: float, dtype: torch.dtype) -> Iterator:
    """Optimizer steps of the learner over full rows without shared prefixes, eager and compiled layer by layer."""
    place, precision = bench.place, torch.float32
    budget, median = 128, 24
    if not place.tiny:  # weights, gradients and two moments, all of them in `dtype`
        budget = row_tokens(name, place.memory, 16 if dtype == torch.float32 else 8)
        median = budget // 8
    if dtype == torch.float32 and place.as_cuda:
        precision = BF16
    model = model_of(name, place, dtype)
    traces = Traces.of(median // 4, lognormal(4, 4, median, 4 * median), place.vocabulary)
    step = traces.step(budget, False, pad=budget)
    optimizer = adamw(model, place)
    found = bench.clock.compare({"tracegrad": updates(model, step, precision, optimizer)})
    if not place.tiny:
        compile_layers(model)
        found |= bench.clock.compare({"tracegrad, compiled": updates(model, step, precision, optimizer)})
    for told in found.values():
        if "ms" in told:
            told["tokens_per_s"] = 1000 * traces.tokens / told["ms"]
    mine = best(found, found, "tokens_per_s", less=False)
    theirs = None if place.tiny else ("prime-rl's published figure, H100", peer)
    more = {"arms": found, "fill": traces.tokens / (budget * len(step.batches)), "dtype": str(dtype)[6:]}
    what = f"{name}, all of it trained, rows of {budget}"
    yield bench.record(what, "tokens/s", mine, theirs, limit=limit, must=must, better="more", **more)


def trainer(bench: Bench) -> Iterator[dict[str, Any]]:
    """GRPOTrainer.train() compared with pack, correction and optimizer step: equal traces, weights, loss and AdamW."""
    place = bench.place
    traces, budget = recorded_groups(place, 16)
    repeat = bench.clock.warm + bench.clock.repeat
    found: Found = {}
    for checkpointing in (False,) if place.tiny else (False, True):
        arm = "TRL GRPOTrainer" + (", checkpointing (its default)" if checkpointing else "")
        try:
            model = model_of("Qwen3-0.6B", place, torch.float32, "sdpa")
            peer = trl_arms.trainer_of(model, traces, place, 2, repeat, gradient_checkpointing=checkpointing)
            taken, norms = trl_arms.train_ms(peer, place)
            found[arm] = {"ms": float(np.median(taken[bench.clock.warm :])), "grad_norm": norms[0]}
        except Exception as error:
            found[arm] = skipped(error)
        bench.clock.report(found)
        peer = model = None
        _empty(place)
    model = model_of("Qwen3-0.6B", place, torch.float32)
    optimizer, precision = adamw(model, place), BF16 if place.as_cuda else torch.float32
    norms = []

    def ours() -> None:
        norms.append(updates(model, traces.step(budget, True), precision, optimizer)().grad_norm)

    arms = ["tracegrad"]
    found |= bench.clock.compare({"tracegrad": ours})
    found["tracegrad"]["grad_norm"] = norms[0] if norms else None
    if not place.tiny:
        compile_layers(model)
        arms.append("tracegrad, compiled")
        found |= bench.clock.compare({"tracegrad, compiled": ours})
    for told in found.values():
        if "ms" in told:
            told["tokens_per_s"] = 1000 * traces.tokens / told["ms"]
    mine = best(found, arms, "tokens_per_s", less=False)
    theirs = best(found, [name for name in found if "TRL" in name], "tokens_per_s", less=False)
    what = f"GRPO step as a whole, Qwen3-0.6B, lognormal lengths, P={len(traces.prompts[0])} G=8"
    told = {"limit": None, "must": "3x", "better": "more", "arms": found}
    yield bench.record(what, "tokens/s", mine, theirs, **told)


def async_trie(bench: Bench) -> Iterator[dict[str, Any]]:
    """The same traces in TRL's tries and in ours, forward and backward, under the same attention kernel."""
    place = bench.place
    traces, budget = recorded_groups(place, 8)  # two models in bfloat16
    kernel = "flex" if place.as_cuda else "sdpa"
    model = model_of("Qwen3-0.6B", place, BF16)
    step = traces.step(budget, True)
    runs = {"tracegrad": passes(model, step, place)}
    theirs = model_of("Qwen3-0.6B", place, BF16)
    runs[f"TRL tries, {kernel}"] = trl_arms.async_passes(theirs, traces, budget, place, kernel)
    found = bench.clock.compare(runs)
    gap = float((gradient(theirs) - gradient(model)).norm() / gradient(model).norm())
    if place.cuda:
        with trl_arms.varlen_for_the_hub() as name:
            theirs = model_of("Qwen3-0.6B", place, BF16, name)
            runs = {"TRL tries, varlen": trl_arms.async_passes(theirs, traces, budget, place, "varlen")}
            found |= bench.clock.compare(runs)
    else:
        found["TRL tries, varlen"] = {"skipped": "flash attention runs on CUDA alone"}
    for told in found.values():
        if "ms" in told:
            told["tokens_per_s"] = 1000 * traces.tokens / told["ms"]
    mine = best(found, ["tracegrad"], "tokens_per_s", less=False)
    peer = best(found, [f"TRL tries, {kernel}"], "tokens_per_s", less=False)
    lengths = f"lognormal lengths, P={len(traces.prompts[0])} G=8"
    what = f"packed tries, same attention kernel ({kernel}), Qwen3-0.6B, {lengths}"
    told = {"limit": None, "must": "1.15x", "better": "more", "arms": found, "gradient_gap": gap}
    yield bench.record(what, "tokens/s", mine, peer, **told)


def shared(bench: Bench) -> Iterator[dict[str, Any]]:
    """A group of eight over its prompt, shared and not, by the same passes."""
    place = bench.place
    name = largest_model(place.memory, 4)  # weights and gradients in bfloat16
    prompt, length, budget = 64, 16, 128
    if not place.tiny:
        budget = row_tokens(name, place.memory, 4)
        prompt, length = budget // 4, budget // 16
    traces = Traces.of(prompt, np.full((1, 8), length), place.vocabulary)
    model = model_of(name, place, BF16)
    together, apart = traces.step(8 * budget, True, shape=shape_of(name)), traces.step(budget, False)
    assert len(together.batches) == 1
    runs = {"tracegrad, shared": passes(model, together, place), "tracegrad, own packs": passes(model, apart, place)}
    found = bench.clock.compare(runs)
    for told in found.values():
        if "ms" in told:
            told["tokens_per_s"] = 1000 * traces.tokens / told["ms"]
    mine, peer = (best(found, [name], "tokens_per_s", less=False) for name in runs)
    what = f"shared prefix, {name}, P={prompt} R={length} G=8"
    ratio = together.sharing.flop_ratio
    told = {"limit": f"{ratio:.2f}x", "must": f"{0.85 * ratio:.2f}x", "better": "more", "arms": found}
    yield bench.record(what, "tokens/s", mine, peer, **told)


# --- masks ---


def block_masks(bench: Bench) -> Iterator[dict[str, Any]]:
    """The tree of a row of 32k tokens and its BlockMask; and reads from the device during passes with them."""
    place = bench.place
    prompt, length = (256, 32) if place.tiny else (4096, 3584)
    short, total = max(8, length // 32), prompt + 8 * length
    for label, head_tokens, size, count in (
        ("one trace", 1, total - 1, 1),
        ("eight over a prompt", prompt, length, 8),
        ("many short ones", 1, short, total // (short + 1)),
    ):
        traces = Traces.of(head_tokens, np.full((1, count), size), place.vocabulary)
        s = traces.sequences()
        step = traces.step(s.tokens, count == 8)
        [batch] = (batch.to(place.device) for batch in step.batches)
        share = {"tokens_per_row": s.tokens, "share_prefixes": count == 8, "pad_to_multiple_of": 128}
        host = Clock("cpu", bench.clock.warm, bench.clock.repeat)
        found = host.compare({"tree": lambda s=s, share=share: pack(s, np.ones(s.traces), **share)})
        arms = {"ours": lambda batch=batch: policy.block_mask(batch)}
        if place.cuda or place.tiny:  # a billion pairs take a CPU too long
            arms["create_block_mask"] = mask_by_torch(batch)
        found |= bench.clock.compare(arms)
        both = None
        if "ms" in found["ours"] and "ms" in found["tree"]:
            both = ("tracegrad, tree and mask", found["ours"]["ms"] + found["tree"]["ms"])
        peer = best(found, ["create_block_mask"], "ms")
        more = {"arms": found, "reads_from_the_device": reads(bench)} if count == 8 else {"arms": found}
        what = f"tree and BlockMask of {len(batch.ids)} tokens, {label}"
        yield bench.record(what, "ms", both, peer, limit=None, must=2, better="less", **more)


def mask_by_torch(batch: Any) -> Callable[[], Any]:
    """torch's own, which evaluates the mask at every pair."""
    from torch.nn.attention.flex_attention import create_block_mask

    end, total = batch.tree_end, len(batch.ids)

    def seen(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < end[key])

    return lambda: create_block_mask(seen, None, None, total, total, device=str(batch.ids.device))


def reads(bench: Bench) -> int | None:
    """How often the host waited for the device during forward and backward of a shared row; None off CUDA."""
    if not bench.place.cuda:
        return None
    traces = Traces.of(1024, np.full((1, 8), 256), bench.place.vocabulary)
    run = passes(model_of("Qwen3-0.6B", bench.place, BF16), traces.step(16384, True), bench.place)
    run()
    return waited(run)


def waited(run: Callable[[], Any]) -> int:
    """How often the host waited for the device, as torch warns of it on CUDA."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in told)  # the mode itself prints a warning


def _empty(place: Place) -> None:
    if place.cuda:
        torch.cuda.empty_cache()


ROWS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "head": lambda bench: head(bench, 4096, 155, 172, 230),
    "head-narrow": lambda bench: head(bench, 1024, 38.7, 48, None),
    "head-peaked": head_peaked,
    "head-frozen": head_frozen,
    "head-memory": head_memory,
    "small": lambda bench: tokens_per_second(bench, "Qwen3-0.6B", 180_000, 36_000, 11_900, torch.float32),
    "full": lambda bench: tokens_per_second(bench, "Qwen3-4B", 19_200, 10_200, 6_230, BF16),
    "trainer": trainer,
    "async": async_trie,
    "shared": shared,
    "longest": longest_row,
    "mask": block_masks,
}
"""By name, as `--rows` needs them."""
