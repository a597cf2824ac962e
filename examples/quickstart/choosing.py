"""Which preset for which recording: the same task recorded in seven ways, trained by several presets, over seeds.

    python examples/quickstart/choosing.py --out benches/results/choosing.json --page docs/explanation/benchmarks.md

Each recording is played afresh by the bundled model (or a changed copy of it) and is what
docs/explanation/benchmarks.md calls a situation. A run that is in the file already is not run again. Called by `make
docs`; about a minute a run.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollout
import task
import tracegrad as tg
from page_table import put_table
from tracegrad.config import Config, load
from tracegrad.objective import Objective
from tracegrad.trainer.step import compute_logprobs

HERE = Path(__file__).parent
SAMPLES = 8
UNCORRECTED = replace(tg.presets.DAPO, weights=())


@dataclass(frozen=True)
class Situation:
    """How traces were recorded, and the objectives that are tried on them.

    Args:
        name: as docs/explanation/benchmarks.md has it.
        tries: presets by name.
        temperature: of the sampling.
        kind: "processed" or "raw" logprobs.
        bits: the weights of the recording policy are rounded to this number of bits; 0 leaves them.
        stale: optimizer steps that the trained policy is ahead of the recording one.
        missing: share of logprobs lost.
        policy: for lost logprobs.
    """

    name: str
    tries: dict[str, Objective]
    temperature: float = 1.0
    kind: str = "processed"
    bits: int = 0
    stale: int = 0
    missing: float = 0.0
    policy: str = "mask"


def _presets(*names: str) -> dict[str, Objective]:
    return {name: getattr(tg.presets, name) for name in names}


UNWEIGHTED = {"DAPO without its weight": UNCORRECTED}
SITUATIONS = (
    Situation("on-policy, several epochs", _presets("DAPO", "DAPO_DIRECT", "CISPO", "TOPR")),
    Situation("temperature 1.3, processed logprobs", _presets("DAPO"), temperature=1.3),
    Situation("temperature 1.3, raw logprobs", _presets("DAPO"), temperature=1.3, kind="raw"),
    Situation("quantised to 4 bits", {**_presets("DAPO", "ICEPOP"), **UNWEIGHTED}, bits=4),
    Situation("1 policy version stale", _presets("DAPO"), stale=1),
    Situation("4 policy versions stale", _presets("DAPO"), stale=4),
    Situation("16 policy versions stale", {**_presets("DAPO", "DAPO_DIRECT"), **UNWEIGHTED}, stale=16),
    Situation("half of the logprobs missing, masked", _presets("DAPO"), missing=0.5),
    Situation("half of the logprobs missing, ratio_one", _presets("DAPO"), missing=0.5, policy="ratio_one"),
    Situation("no logprobs", _presets("WEIGHTED_SFT", "TOPR_POSITIVE"), missing=1.0),
)


def quantised(model: torch.nn.Module, bits: int) -> torch.nn.Module:
    """A copy whose matrices are rounded, row by row, to `bits` signed bits."""
    other, most = copy.deepcopy(model), 2 ** (bits - 1) - 1
    for weight in (p.data for p in other.parameters() if p.ndim == 2):
        step = weight.abs().amax(1, keepdim=True) / most
        weight.copy_((weight / step).round() * step)
    return other


def record(model: torch.nn.Module, tokenizer, here: Situation, groups: int, seed: int, path: Path) -> tg.Sequences:
    """Sample answers to `groups` prompts SAMPLES times each, with the logprob of every sampled token by `model`."""
    prompts = list(itertools.islice(task.prompts("traces", 1000 + seed), groups))
    played = rollout.play(model, tokenizer, [p for p in prompts for _ in range(SAMPLES)], seed, here.temperature)
    with path.open("w") as file:
        for number, episode in enumerate(played):
            file.write(json.dumps(_native(episode, number // SAMPLES, here)) + "\n")
    sequences = tg.align(tg.read(path), tg.Tokenizer.from_pretrained(HERE / "model"))
    [step] = tg.pack(sequences, np.zeros(sequences.traces, np.float32), tokens_per_row=8192)
    found = step.with_logprobs(old=compute_logprobs(model, step.batches)).old_logprobs
    lost = np.random.default_rng(seed).random(len(found)) < here.missing
    logprobs = sequences.rollout_logprobs.copy()
    logprobs[step.origin] = np.where(lost, np.nan, found)
    return replace(sequences, rollout_logprobs=logprobs)


def _native(episode: rollout.Episode, group: int, here: Situation) -> dict:
    turns = iter(episode.turns)
    messages = [
        {**message, "generation": {"token_ids": next(turns).ids}} if message["role"] == "assistant" else message
        for message in episode.messages
    ]
    told = {"temperature": here.temperature, "logprob_kind": here.kind, "tools": list(task.TOOLS)}
    return {"format": "tracegrad/1", "group": group, "reward": episode.reward, "messages": messages, **told}


def configure(options: argparse.Namespace, seed: int, policy: str = "mask", epochs: int | None = None) -> Config:
    """The demo's options with smaller steps, without held-out traces."""
    changes = [("train.seed", seed), ("train.epochs", epochs or options.epochs), ("train.groups_per_step", 4)]
    changes += [("data.holdout", 0.0), ("train.missing_logprobs", policy)]
    return load(options.config, changes)


def trained(model, sequences: tg.Sequences, objective: Objective, config: Config) -> torch.nn.Module:
    """`model` after training on the sequences; changed in place."""
    with tempfile.TemporaryDirectory() as folder:
        tg.trainer.train(sequences, model, objective=objective, out=folder, config=config, sinks=(), log=_nothing)
    return model.eval()


def _nothing(_: str) -> None:
    pass


def jobs(seeds: int) -> Iterator[tuple[int, Situation]]:
    """All situations on the first seed, then on the next."""
    return itertools.product(range(seeds), SITUATIONS)


def made(here: Situation, seed: int, options: argparse.Namespace) -> tuple[torch.nn.Module, Any, tg.Sequences]:
    """The policy to train, its tokenizer, and the recording."""
    model, tokenizer = rollout.load(options.model)
    recorder = quantised(model, here.bits) if here.bits else model
    with tempfile.TemporaryDirectory() as folder:
        sequences = record(recorder, tokenizer, here, options.groups, seed, Path(folder, "traces.jsonl"))
        if here.stale:
            ahead = record(model, tokenizer, SITUATIONS[0], 4 * here.stale, 500 + seed, Path(folder, "ahead.jsonl"))
            model = trained(model, ahead, tg.presets.DAPO, configure(options, seed, epochs=1))
    return model, tokenizer, sequences


def look(here: Situation, seed: int, options: argparse.Namespace) -> dict:
    """What `recipes.for_data` measures on a recording, and recommends."""
    model, _, sequences = made(here, seed, options)
    [step] = tg.pack(sequences, np.zeros(sequences.traces, np.float32), tokens_per_row=8192)
    old = np.full(sequences.tokens, np.nan)
    old[step.origin] = step.with_logprobs(old=compute_logprobs(model, step.batches)).old_logprobs
    found = tg.recipes.for_data(sequences, old)
    advice = found.name + (f", missing {found.recipe.missing_logprobs}" if found.recipe.missing_logprobs else "")
    return {"situation": here.name, "seed": seed, "advice": advice, **asdict(found.measured)}


def seen(rows: list[dict]) -> str:
    """Return the table of measurements on each recording."""
    lines = ["| recording | missing | KL(rollout&#124;&#124;old) | outside [0.5, 2] | ESS | recommended |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        figures = "| not known " * 3
        if row["kl"] is not None:
            figures = f"| {round(row['kl'], 4) + 0.0:.4f} | {row['outside']:.2%} | {row['ess']:.3f} "
        lines.append(f"| {row['situation']} | {row['missing']:.0%} {figures}| {row['advice']} |")
    return "\n".join(lines)


def run(here: Situation, seed: int, options: argparse.Namespace, done: set[str], say: Callable[[dict], None]) -> None:
    """Records one situation and trains every preset on it that is not done."""
    tries = {name: each for name, each in here.tries.items() if key(here, name, seed) not in done}
    if not tries:
        return
    model, tokenizer, sequences = made(here, seed, options)
    before = rollout.success(model, tokenizer, options.prompts, seed)[0]
    for name, objective in tries.items():
        began = time.perf_counter()
        policy = here.policy if objective.requirements.rollout else "mask"
        after = trained(copy.deepcopy(model), sequences, objective, configure(options, seed, policy))
        success = rollout.success(after, tokenizer, options.prompts, seed)[0]
        reward = float(sequences.reward.mean())
        told = {"situation": here.name, "preset": name, "seed": seed, "recorded": reward, "before": before}
        say({**told, "after": success, "seconds": round(time.perf_counter() - began)})


def key(here: Situation, name: str, seed: int) -> str:
    """Return the key of a run."""
    return f"{here.name}/{name}/{seed}"


def percent(rows: list[dict], situation: str, preset: str) -> str:
    """Success in percent, mean and each seed; before training if the preset is "before"."""
    column = "after"
    if preset == "before":
        column, preset = "before", next((row["preset"] for row in rows if row["situation"] == situation), "")
    here = [row for row in rows if (row["situation"], row["preset"]) == (situation, preset)]
    found = [100 * row[column] for row in sorted(here, key=lambda row: row["seed"])]
    return f"{np.mean(found):.1f} ({', '.join(f'{value:.0f}' for value in found)})" if found else "not run"


def table(rows: list[dict]) -> list[str]:
    """Return the lines of the table."""
    lines = ["| situation | before | preset | after |", "|---|---|---|---|"]
    for here in SITUATIONS:
        before = percent(rows, here.name, "before")
        lines += [f"| {here.name} | {before} | {name} | {percent(rows, here.name, name)} |" for name in here.tries]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=512)
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows, looks = kept.get("runs", []), kept.get("measured", [])
    done = {f"{row['situation']}/{row['preset']}/{row['seed']}" for row in rows}
    told = {name: getattr(options, name) for name in ("groups", "epochs", "prompts")}

    def say(row: dict, among: list[dict] = rows) -> None:
        among.append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps({"settings": told, "runs": rows, "measured": looks}, indent=1) + "\n")

    for here in SITUATIONS:
        if here.name not in {row["situation"] for row in looks}:
            say(look(here, 0, options), looks)
    for seed, here in jobs(options.seeds):
        run(here, seed, options, done, say)
    if options.page is not None:
        put_table(options.page, "choosing", table(rows))
        put_table(options.page, "recommended", seen(looks).splitlines())


if __name__ == "__main__":
    main()
