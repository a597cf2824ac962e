"""Everything that is measured on one GPU: heads beside the peers' heads, whole models, shared prefixes, masks.

    python benches/gpu/run.py --out benches/results/        # one H200: about 20 minutes
    python benches/gpu/run.py --smoke --out out/gpu/        # tiny sizes on CPU: sees that all of it runs

Random weights and random hidden states; medians of 10 runs after 3, interleaved. Writes gpu_head.json, gpu_model.json
and gpu_mask.json, and prints a table. What cannot run is a row with the reason in "skipped", never a missing one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from arms import OURS, PEERS, Problem
from clock import Clock

from tracegrad import policy
from tracegrad.algebra import Clip, Objective, Ratio
from tracegrad.batch import Batch, Step, pack
from tracegrad.errors import TracegradError
from tracegrad.learner.step import detached
from tracegrad.sequence import Sequences

OBJECTIVE = Objective(Clip(), Ratio("theta", "old"))
HEADS = [(8192, 1024), (32768, 1024), (32768, 4096), (131072, 1024)]
VOCABULARY = 151936
MODELS = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
Rows = list[dict[str, Any]]


def told(name: str, found: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A row, printed."""
    row = {"name": name, **more, **found}
    rate = f"{row['ms']:10.2f} ms" if "ms" in row else f"skipped: {row['skipped']}"
    peak = f"{row['peak_bytes'] / 2**30:8.2f} GiB" if row.get("peak_bytes") else ""
    print(f"{name:64} {rate} {peak}", flush=True)
    return row


# --- heads ---


def heads(clock: Clock, smoke: bool) -> Iterator[dict[str, Any]]:
    """Forward and backward of every head at every size, flat and peaked; the products alone as the limit."""
    sizes = [(64, 32)] if smoke else HEADS
    vocabulary = 512 if smoke else VOCABULARY
    for rows, width in sizes:
        for peaked in (False, True) if (rows, width) == sizes[-2 if len(sizes) > 1 else 0] else (False,):
            problem = Problem.of(rows, width, vocabulary, clock.device, peaked)
            yield from one_head(clock, problem, f"N={rows} H={width} V={vocabulary}{' peaked' if peaked else ''}")


def one_head(clock: Clock, problem: Problem, size: str) -> Iterator[dict[str, Any]]:
    arms = {**{f"tracegrad {name}": arm for name, arm in OURS.items()}, **PEERS}
    runs = {name: backward_of(arm, problem) for name, (arm, _) in arms.items()}
    frozen = Problem(problem.hidden, problem.weight.detach(), problem.target, problem.old, problem.advantages)
    runs["tracegrad frozen head"] = backward_of(OURS["generic"][0], frozen)
    runs["TRL chunked, frozen head"] = backward_of(PEERS["TRL chunked"][0], frozen)
    runs["three products (limit)"] = products(problem)
    work = 2 * problem.hidden.shape[0] * problem.hidden.shape[1] * len(problem.weight)
    for name, found in clock.compare(runs).items():
        useful = work * (2 if "frozen" in name else 3)
        rate = {"tflops": useful / found["ms"] / 1e9} if "ms" in found else {}
        yield told(f"head {size}: {name}", {**found, **rate, **errors(name, problem, arms)})


def backward_of(arm: Callable[[Problem], torch.Tensor], problem: Problem) -> Callable[[], None]:
    def run() -> None:
        problem.hidden.grad = problem.weight.grad = None
        arm(problem).backward()

    return run


def products(problem: Problem) -> Callable[[], None]:
    """Logits, d_hidden and d_weight of chunks as the one pass has them, and nothing else."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    rows = max(1, (1 << 30) // (2 * len(weight)))

    def run() -> None:
        for start in range(0, len(hidden), rows):
            chunk = hidden[start : start + rows]
            logits = chunk @ weight.T
            logits @ weight
            logits.T @ chunk

    return run


def errors(name: str, problem: Problem, arms: dict[str, Any]) -> dict[str, Any]:
    """Against the same bfloat16 inputs in float32 logits, chunk by chunk: relative errors of both gradients."""
    if name not in arms or len(problem.old) > 40_000:
        return {}
    try:
        backward_of(arms[name][0], problem)()
    except (ImportError, RuntimeError, TypeError, ValueError, AssertionError):
        return {}  # its row says why
    found = [problem.hidden.grad, problem.weight.grad]
    exact = Problem(
        problem.hidden.detach().float().requires_grad_(),
        problem.weight.detach().float().requires_grad_(),
        problem.target,
        problem.old,
        problem.advantages,
    )
    backward_of(OURS["generic"][0], exact)()
    theirs = [exact.hidden.grad, exact.weight.grad]
    names = ("d_hidden_error", "d_weight_error")
    gaps = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, theirs, strict=True)]
    return dict(zip(names, gaps, strict=True))


# --- whole models ---


def model_of(name: str, clock: Clock, smoke: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**MODELS[name], "vocab_size": VOCABULARY, "num_key_value_heads": 8, "head_dim": 128}
    if smoke:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"vocab_size": 128, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, tie_word_embeddings=True)
    config._attn_implementation = "flex_attention" if clock.cuda else "sdpa"
    dtype = torch.bfloat16 if clock.cuda else torch.float32
    with torch.device(clock.device):
        return Qwen3ForCausalLM(config).to(dtype).train()


def groups_of(prompt: int, group: int, lengths: np.ndarray, vocabulary: int) -> Sequences:
    """Traces that share a prompt within their group."""
    random = np.random.default_rng(0)
    rows, number = [], []
    for start in range(0, len(lengths), group):
        shared = random.integers(0, vocabulary, prompt)
        for length in lengths[start : start + group]:
            rows.append(np.r_[shared, random.integers(0, vocabulary, length)])
            number.append(start // group)
    cu = np.r_[0, np.cumsum([len(row) for row in rows])]
    trainable = np.concatenate([np.arange(len(row)) >= prompt for row in rows])
    logprobs = np.where(trainable, -8.0, np.nan).astype(np.float32)
    return Sequences.from_arrays(np.concatenate(rows), cu, logprobs, trainable, group=np.array(number))


def models(clock: Clock, smoke: bool) -> Iterator[dict[str, Any]]:
    """Packs of 16k tokens, and prefixes of 4k shared by 8, over packs that share nothing."""
    vocabulary = 128 if smoke else VOCABULARY
    budget, unit = (256, 8) if smoke else (16384, 1024)
    drawn = np.random.default_rng(0).lognormal(np.log(unit), 0.8, 16).clip(4, 8 * unit).astype(int)
    cases = {
        f"rows of {budget}, prompts of {unit // 4}, lognormal": (unit // 4, 4, drawn),
        f"P={4 * unit} R={unit} G=8": (4 * unit, 8, np.full(8, unit)),
    }
    for name in MODELS:
        model = model_of(name, clock, smoke)
        for case, (prompt, group, lengths) in cases.items():
            s = groups_of(prompt, group, lengths, vocabulary)
            for share in (False, True):
                wide = max(budget, int(np.diff(s.cu_seqlens).max())) if not share else s.tokens
                yield whole(clock, model, s, wide, share, f"{name} {case}{', shared' if share else ''}")
        del model


def whole(clock: Clock, model: Any, s: Sequences, budget: int, share: bool, name: str) -> dict[str, Any]:
    """Forward and backward of one step; tokens/s of the traces as they are, and the share of time the device idles."""
    try:
        [step] = pack(s, np.ones(s.traces), token_budget=budget, share_prefixes=share, pad_to_multiple_of=128)
    except TracegradError as error:
        return told(name, {"skipped": f"{type(error).__name__}: {error}"})
    step = step.with_logprobs(old=step.rollout_logprobs)
    corrected = detached(step, OBJECTIVE, "mask")
    moved = [batch.to(clock.device) for batch in step.batches]
    terms = [step.terms(batch, corrected) for batch in moved]

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for batch, given in zip(moved, terms, strict=True):
            policy.batch_loss(model, batch, given, OBJECTIVE).loss.backward()

    found = clock.compare({name: run})[name]
    if "ms" in found:
        found |= {"tokens_per_s": 1000 * s.tokens / found["ms"], "idle_share": idle_share(clock, run)}
    return told(name, found, packed_tokens=sum(len(batch.ids) for batch in moved), tokens=s.tokens)


def idle_share(clock: Clock, run: Callable[[], None]) -> float | None:
    """Of the wall time of one step, the part in which no kernel ran; None off CUDA."""
    if not clock.cuda:
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        wall = clock.ms(run)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / 1000 / wall


# --- masks ---


def mask_builds(clock: Clock, smoke: bool) -> Iterator[dict[str, Any]]:
    """The block mask of a full row on the device, and the tree or pack that it is built from on the CPU."""
    total = 512 if smoke else 32768
    s = groups_of(total // 4, 6, np.full(6, total // 8), 100)

    def packs(share: bool) -> list[Step]:
        return pack(s, np.ones(s.traces), token_budget=s.tokens, share_prefixes=share, pad_to_multiple_of=128)

    for share in (False, True):
        label = f"{total} tokens{', shared' if share else ''}"
        try:
            batch: Batch = packs(share)[0].batches[0].to(clock.device)
        except TracegradError as error:
            yield told(f"pack and BlockMask, {label}", {"skipped": f"{type(error).__name__}: {error}"})
            continue
        host = Clock("cpu", clock.warm, clock.repeat)
        yield told(f"pack, {label}", host.compare({"pack": lambda share=share: packs(share)})["pack"])
        arms = {"ours": lambda batch=batch: policy.block_mask(batch), "create_block_mask": mask_by_torch(batch)}
        for name, found in clock.compare(arms).items():
            yield told(f"BlockMask by {name}, {label}", found)


def mask_by_torch(batch: Batch) -> Callable[[], Any]:
    """torch's own, which evaluates the mask at every pair."""
    from torch.nn.attention.flex_attention import create_block_mask

    end, total = batch.tree_end, len(batch.ids)

    def seen(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < end[key])

    return lambda: create_block_mask(seen, None, None, total, total, device=str(batch.ids.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("head", "model", "mask"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on CPU")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here. --smoke runs tiny sizes on CPU.")
    clock = Clock("cpu", 1, 2) if options.smoke else Clock("cuda")
    device = "cpu" if options.smoke else torch.cuda.get_device_name()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {"head": heads, "model": models, "mask": mask_builds}
    for name, part in parts.items():
        if options.only in (None, name):
            rows: Rows = [{**row, "device": device, "torch": torch.__version__} for row in part(clock, options.smoke)]
            (options.out / f"gpu_{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
