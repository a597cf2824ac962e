"""Compare `tracegrad train --dry-run` with a real run on CPU: steps, tokens, peak memory, time of a step.

    python benches/forecast.py     # --tiny checks that it runs

A Qwen3 with random weights and 24 traces of random tokens in four groups over one prompt each, under each setting of
`train.memory_mode`. The peak is counted: what torch allocates during the run, over the parameters. The time is
the median step after the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from clock import Allocated
from tracegrad import config
from tracegrad.alignment.sequences import Sequences
from tracegrad.objective import presets
from tracegrad.trainer import train
from tracegrad.trainer.resource_estimate import estimate_resources
from tracegrad.trainer.steps import TrainingData

HEADER = (
    "| `train.memory_mode` | steps, tokens | peak, predicted | counted | ratio | a step, at least | taken | ratio |"
)


def model_of(tiny: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    if tiny:
        sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": sizes["hidden_size"] // 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False))


def traces_of(vocabulary: int, unit: int) -> Sequences:
    """Four groups of six over prompts of `unit` tokens, completions up to three times that."""
    random = np.random.default_rng(0)
    draw = lambda tokens: random.integers(0, vocabulary, tokens)  # noqa: E731
    prompts = [draw(unit) for _ in range(4)]
    rows = [np.r_[prompts[n // 6], draw(random.integers(unit, 3 * unit))] for n in range(24)]
    cu = np.r_[0, np.cumsum([len(row) for row in rows])]
    trainable = np.concatenate([np.arange(len(row)) >= unit for row in rows])
    logprobs = np.where(trainable, -np.log(vocabulary), np.nan).astype(np.float32)
    rewards = random.random(24).astype(np.float32)
    return Sequences.from_arrays(
        np.concatenate(rows), cu, logprobs, trainable, group=np.repeat(np.arange(4), 6), rewards=rewards
    )


def compared(setting: str, tiny: bool, dtype: str = "fp32") -> dict[str, Any]:
    """One run, predicted and measured."""
    unit = 16 if tiny else 96
    changes = {
        "train.memory_mode": setting,
        "train.groups_per_step": 2,
        "pack.tokens_per_row": 16 * unit,
        "data.holdout": 0,
    }
    changes |= {"train.epochs": 2, "train.device": "cpu", "train.dtype": dtype}
    told = config.load(overrides=[*changes.items()])
    model, objective = model_of(tiny), presets.DAPO_DIRECT
    traces = traces_of(model.config.vocab_size, unit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        feed = TrainingData.of(traces, objective, told)
        predicted = estimate_resources(folder / "model", told, feed, 1)
        planned = [sum(len(batch.ids) for batch in step.batches) for step in feed.steps(feed.plan(1).shuffle_seed(0))]
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        given = {"objective": objective, "config": told, "sinks": (), "log": lambda _: None}
        timed = train(traces, model, out=folder / "timed", **given).rows[1:]
        again = model_of(tiny)
        with Allocated() as counted:
            train(traces, again, out=folder / "counted", **given)
    return {
        "setting": setting,
        "planned": planned,
        "taken": [int(row["tokens"]) for row in timed[: len(planned)]],
        "bytes": predicted.state_bytes + predicted.row_bytes,
        "peak": parameters + counted.peak,
        "least": predicted.flops / predicted.rate,
        "seconds": statistics.median(row["seconds"] for row in timed[1:]),
    }


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    exact = f"{len(found['planned'])}, {sum(found['planned']):,}, as run"
    if found["planned"] != found["taken"]:
        exact = f"{found['planned']}, run {found['taken']}"
    mib = [f"{found[name] / 2**20:,.0f} MiB" for name in ("bytes", "peak")]
    ratios = found["bytes"] / found["peak"], found["seconds"] / found["least"]
    times = [f"{found[name]:.2f} s" for name in ("least", "seconds")]
    cells = [f"`{found['setting']}`", exact, *mib, f"{ratios[0]:.2f}", *times, f"{ratios[1]:.1f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = [HEADER, "|---" * 8 + "|", *(line(compared(each, options.tiny)) for each in ("speed", "balanced", "low"))]
    print("\n".join(table))


if __name__ == "__main__":
    main()
