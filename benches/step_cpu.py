"""Forward and backward of a GRPO step on CPU compared with the peers: TRL's loss path, Liger's fused loss, full logits.

    python benches/step_cpu.py --out benches/results/step_cpu.json  # `make bench-step`; --smoke checks that it runs

A Qwen3 with random weights in float32, prompts of P tokens in groups of G, completions of lognormal length; one group
is one forward and backward for everybody. Each arm runs in a separate process: its peak is the growth of the resident
set during the first pass, its rate the tokens of all traces (prompts counted for each) over the median pass after it.
The arms must agree on the gradient. The limit is the products of the shared layout at this machine's own rate.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
ARMS = ("tracegrad", "tracegrad, one tree", "tracegrad, no sharing", "trl", "liger", "full logits")
OURS = ARMS[0]
COMMAND = "python benches/step_cpu.py --out benches/results/step_cpu.json"


@dataclass(frozen=True)
class Shape:
    """Of the model and the data."""

    vocabulary: int = 32768
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    prompt: int = 1024
    group: int = 8
    groups: int = 2
    median: int = 192
    sigma: float = 0.8
    longest: int = 1024

    def lengths(self) -> np.ndarray:
        """[groups, group] completion lengths."""
        drawn = np.random.default_rng(0).lognormal(np.log(self.median), self.sigma, (self.groups, self.group))
        return np.clip(drawn, 8, self.longest).astype(int)


SMOKE = Shape(vocabulary=256, hidden=32, layers=2, prompt=48, group=4, median=12, longest=32)


@dataclass(frozen=True)
class Data:
    """Per group: prompt [P]; per trace: completion, old logprobs, advantage."""

    prompts: list[np.ndarray]
    completions: list[list[np.ndarray]]
    old: list[list[np.ndarray]]
    advantages: list[np.ndarray]

    @classmethod
    def of(cls, shape: Shape) -> Data:
        """Random ids; old logprobs close to logprobs of random weights, so that a part of the ratios is clipped."""
        random = np.random.default_rng(1)
        draw = lambda n: random.integers(0, shape.vocabulary, n)  # noqa: E731
        lengths = shape.lengths()
        near = -np.log(shape.vocabulary)
        return cls(
            prompts=[draw(shape.prompt) for _ in lengths],
            completions=[[draw(n) for n in row] for row in lengths],
            old=[[(near + random.normal(0, 0.2, n)).astype(np.float32) for n in row] for row in lengths],
            advantages=[random.normal(0, 1, shape.group).astype(np.float32) for _ in lengths],
        )

    @property
    def tokens(self) -> int:
        """Of all traces, each with its prompt."""
        return sum(len(p) + len(c) for p, group in zip(self.prompts, self.completions, strict=True) for c in group)


def model_of(shape: Shape) -> Any:
    """The same random weights in every process."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": 3 * shape.hidden}
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.heads // 2, "head_dim": 64}
    config = Qwen3Config(**sizes, **heads, num_hidden_layers=shape.layers, tie_word_embeddings=False)
    return Qwen3ForCausalLM(config).train()


# --- the arms: each returns a function of a group's number that runs forward and backward ---


def ours(model: Any, data: Data, share: bool, tree: bool) -> Callable[[int], None]:
    """One row per group: branches side by side, whose common prompt the CPU's forward computes once, or one tree."""
    from tracegrad import model as policy
    from tracegrad.alignment.sequences import Sequences
    from tracegrad.objective import Clip, Objective, Ratio
    from tracegrad.packing import pack
    from tracegrad.trainer.step import correct_step

    objective = Objective(Clip(), Ratio("theta", "old"))
    steps = []
    for prompt, completions, old, advantages in zip(
        data.prompts, data.completions, data.old, data.advantages, strict=True
    ):
        rows = [np.r_[prompt, completion] for completion in completions]
        cu = np.r_[0, np.cumsum([len(row) for row in rows])]
        trainable = np.concatenate([np.arange(len(row)) >= len(prompt) for row in rows])
        if not share:  # nothing in common to be found: the first token of each prompt differs
            for number, row in enumerate(rows):
                row[0] = number
        logprobs = np.full(cu[-1], np.nan, np.float32)
        logprobs[trainable] = np.concatenate(old)
        s = Sequences.from_arrays(np.concatenate(rows), cu, logprobs, trainable, group=np.zeros(len(rows), int))
        [step] = pack(s, advantages, tokens_per_row=int(cu[-1]), share_prefixes=tree)
        step = step.with_logprobs(old=step.rollout_logprobs)
        steps.append((step, correct_step(step, objective, "mask")))

    def run(number: int) -> None:
        step, corrected = steps[number]
        for batch in step.batches:
            moved = batch.to("cpu")
            policy.batch_loss(model, moved, step.terms(moved, corrected), objective).loss.backward()

    return run


def padded(data: Data, number: int) -> dict[str, torch.Tensor]:
    """A group in TRL's form."""
    completions = data.completions[number]
    width = max(map(len, completions))
    ids, mask = torch.zeros(2, len(completions), width, dtype=torch.long)
    old = torch.zeros(len(completions), width)
    for row, completion in enumerate(completions):
        ids[row, : len(completion)] = torch.from_numpy(completion)
        mask[row, : len(completion)] = 1
        old[row, : len(completion)] = torch.from_numpy(data.old[number][row])
    prompt = torch.from_numpy(data.prompts[number]).expand(len(completions), -1)
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.from_numpy(data.advantages[number]),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }


def trl(model: Any, data: Data) -> Callable[[int], None]:
    """GRPOTrainer's own forward and `_compute_loss`, with its fused head, loss_type "dapo"."""
    from trl.trainer.utils import add_fused_lm_head

    from peer_code import trl_trainer

    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    trainer = trl_trainer(loss_type="dapo", beta=0.0)
    trainer.model, trainer.use_vllm = model, False
    trainer.accelerator.autocast, trainer.accelerator.is_main_process = nullcontext, False
    given = [padded(data, number) for number in range(len(data.prompts))]
    return lambda number: trainer._compute_loss(model, given[number]).backward()


def full_logits(model: Any, data: Data) -> Callable[[int], None]:
    """Logits of the completions, log_softmax and entropy by torch, then TRL's `_compute_loss`."""
    from peer_code import trl_loss_of, trl_trainer

    trainer = trl_trainer(loss_type="dapo", beta=0.0)
    given = [padded(data, number) for number in range(len(data.prompts))]

    def run(number: int) -> None:
        inputs = given[number]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        out = model(input_ids=ids, attention_mask=mask, logits_to_keep=width + 1, use_cache=False)
        log_p = out.logits[:, :-1].float().log_softmax(-1)
        logp = log_p.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        rest = {name: value for name, value in inputs.items() if name not in ("prompt_ids", "prompt_mask")}
        trl_loss_of(trainer, logp, rest, entropy).backward()

    return run


def liger(model: Any, data: Data) -> Callable[[int], None]:
    """LigerFusedLinearGRPOLoss on the padded hidden states, loss_type "dapo", run eagerly."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=False)
    given = [padded(data, number) for number in range(len(data.prompts))]

    def run(number: int) -> None:
        inputs = given[number]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        scored = hidden[:, inputs["prompt_ids"].shape[1] - 1 : -1]
        found = loss(
            scored,
            model.lm_head.weight,
            inputs["completion_ids"],
            inputs["completion_mask"],
            inputs["advantages"],
            old_per_token_logps=inputs["old_per_token_logps"],
            num_items_in_batch=inputs["num_items_in_batch"],
        )
        found[0].backward()

    return run


def runner(arm: str, model: Any, data: Data) -> Callable[[int], None]:
    """The forward and backward of an arm."""
    if arm.startswith(OURS):
        return ours(model, data, share="no sharing" not in arm, tree="tree" in arm)
    return {"trl": trl, "liger": liger, "full logits": full_logits}[arm](model, data)


# --- measuring ---


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])


def measure(arm: str, shape: Shape, repeat: int, gradient: Path) -> dict[str, float]:
    """Peak of the first pass over all groups and seconds of the median one after it; writes the gradient."""
    model, data = model_of(shape), Data.of(shape)
    run = runner(arm, model, data)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    for number in range(shape.groups):
        run(number)
    peak = resident("VmHWM") - before
    torch.save([p.grad for p in model.parameters()], gradient)
    seconds = []
    for _ in range(repeat):
        model.zero_grad()
        began = time.perf_counter()
        for number in range(shape.groups):
            run(number)
        seconds.append(time.perf_counter() - began)
    return {"rate": data.tokens / statistics.median(seconds), "peak_bytes": peak}


def limit(shape: Shape, threads: int) -> float:
    """Tokens/s if only the products of the shared layout ran, at the best rate of a 1024^3 product here."""
    torch.set_num_threads(threads)
    a = torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    lengths = shape.lengths()
    scored, tokens = int(lengths.sum()), int(lengths.sum()) + shape.groups * shape.prompt
    attention = 2 * shape.hidden * 64 * shape.heads + shape.hidden * 64 * shape.heads  # q and o, k and v at half
    layer = attention + 9 * shape.hidden**2
    flops = 6 * tokens * shape.layers * layer + 6 * scored * shape.hidden * shape.vocabulary
    return Data.of(shape).tokens / (flops * best / 2**31)


def run_arms(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Each arm in a process; one that cannot run here is reported with its last line."""
    found = {}
    for arm in ARMS:
        out = folder / "arm.json"
        told = [sys.executable, __file__, "--arm", arm, "--out", str(out), "--repeat", str(options.repeat)]
        told += ["--threads", str(options.threads), *(["--smoke"] if options.smoke else [])]
        done = subprocess.run(told, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{arm}: cannot run here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
            continue
        found[arm] = json.loads(out.read_text())
        rate, peak = found[arm]["rate"], found[arm]["peak_bytes"] / 2**20
        print(f"{arm}: {rate:,.0f} tokens/s, {peak:,.0f} MiB", flush=True)
    return found


def check_gradients(found: dict[str, Any], folder: Path) -> None:
    """Exits unless every arm took the same step."""
    read = lambda arm: torch.cat([g.flatten() for g in torch.load(folder / f"{arm}.pt")])  # noqa: E731
    theirs = read("full logits")
    for arm in found:
        gap = float((read(arm) - theirs).norm() / theirs.norm())
        print(f"{arm}: gradient {gap:.1e} from that of full logits")
        if gap > 1e-4 and arm != "tracegrad, no sharing":  # there the first token differs on purpose
            sys.exit(f"{arm} does not compute the same gradient")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, to see that every arm runs")
    options = parser.parse_args()
    shape = SMOKE if options.smoke else Shape()
    torch.set_num_threads(options.threads)
    if options.arm:
        gradient = options.out.parent / f"{options.arm}.pt"
        options.out.write_text(json.dumps(measure(options.arm, shape, options.repeat, gradient)))
        return
    with tempfile.TemporaryDirectory() as name:
        found = run_arms(options, Path(name))
        check_gradients(found, Path(name))
    top = limit(shape, options.threads)
    mine = found[OURS]
    rows = [row_of(arm, found[arm], mine, top, options.threads, shape) for arm in ARMS[1:] if arm in found]
    for row in rows:
        print(f"{row['peer']}: {row['ratio']:.2f}x its tokens/s, {row['peak_ratio']:.2f} of its peak")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def row_of(arm: str, theirs: dict, mine: dict, top: float, threads: int, shape: Shape) -> dict[str, Any]:
    """A row of the results."""
    versions = {"trl": "trl", "liger": "liger-kernel"}
    peer = f"{arm} {importlib.metadata.version(versions[arm])}" if arm in versions else arm
    return {
        "name": "forward and backward of a GRPO step, lognormal lengths",
        "peer": peer,
        "peer_rate": theirs["rate"],
        "rate": mine["rate"],
        "unit": "tokens/s of all traces, prompts counted for each",
        "ratio": mine["rate"] / theirs["rate"],
        "peak_bytes": mine["peak_bytes"],
        "peer_peak_bytes": theirs["peak_bytes"],
        "peak_ratio": mine["peak_bytes"] / theirs["peak_bytes"],
        "limit": top,
        "cores": threads,
        "machine": platform.processor() or platform.machine(),
        "shape": asdict(shape),
        "torch": torch.__version__,
        "command": COMMAND,
    }


if __name__ == "__main__":
    main()
