"""How often the interval of the off-policy estimate covers the true success, on simulated logs of the bundled model.

    python benches/off_policy_estimate.py --out benches/results/off_policy_estimate.json

The bundled model is trained on the bundled traces, and checkpoints of one run are policies ever further from the one
that was recorded. For each of them:

- the truth is the success of `--episodes` sampled episodes of the policy;
- for each seed the bundled model plays `--groups` fresh prompts eight times, and `learner.estimate` says from its
  logprobs and those of the checkpoint what the success of the checkpoint is, and whether that is known.

It prints how many of the estimates are known, how many of these cover the truth, and what the others would have said.
The seeds play other episodes of the same prompts' distribution, so the estimates of one policy are independent.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import tracegrad as tg
from tracegrad import learner, presets
from tracegrad.config import load
from tracegrad.learner.checkpoint import list_checkpoints

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import rollout  # noqa: E402
import task  # noqa: E402

GROUP_SIZE = 8


def train(folder: Path, epochs: int, every: int) -> list[Path]:
    """Train the bundled model on the bundled traces, and return its checkpoints in order of their steps."""
    model, _ = rollout.load(QUICKSTART / "model")
    changes = [("train.epochs", epochs), ("checkpoint.every", every), ("checkpoint.keep", 1000), ("terms.keep", "none")]
    config = load(QUICKSTART / "run.toml", changes)
    sequences = tg.align(tg.read(QUICKSTART / "traces.jsonl.zst"), tg.Tokenizer.from_pretrained(QUICKSTART / "model"))
    learner.train(sequences, model, objective=presets.DAPO, config=config, out=folder, sinks=(), say=lambda _: None)
    return list_checkpoints(folder)


@torch.no_grad()
def logprobs(model, turns: list[tuple[list[int], list[int]]], batch: int = 64) -> np.ndarray:
    """Return the summed logprob of the sampled ids of each (prompt ids, sampled ids), float64 nats."""
    out = np.zeros(len(turns))
    order = sorted(range(len(turns)), key=lambda place: sum(map(len, turns[place])))
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        rows = [turns[place][0] + turns[place][1] for place in part]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        logits = model(ids, attention_mask=mask).logits[:, :-1].double()
        found = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        for place, row, values in zip(part, rows, found, strict=True):
            out[place] = float(values[len(turns[place][0]) - 1 : len(row) - 1].sum())
    return out


def logged(tokenizer, episodes: list[rollout.Episode]) -> tuple[list[tuple[list[int], list[int]]], np.ndarray]:
    """Return the turns of the episodes as (prompt ids, sampled ids), and the episode of each."""
    turns, owner = [], []
    for number, episode in enumerate(episodes):
        ends = [place for place, message in enumerate(episode.messages) if message["role"] == "assistant"]
        for place, sampled in zip(ends, episode.turns, strict=True):
            text = rollout.render(tokenizer, episode.messages[:place])
            turns.append((tokenizer(text, add_special_tokens=False)["input_ids"], sampled))
            owner.append(number)
    return turns, np.array(owner)


def main() -> None:
    """Write each estimate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    model, tokenizer = rollout.load(QUICKSTART / "model")
    group = np.repeat(np.arange(options.groups), GROUP_SIZE)
    logs = []
    for seed in range(options.seeds):
        prompts = list(itertools.islice(task.prompts("traces", 1000 + seed), options.groups))
        episodes = rollout.play(model, tokenizer, [p for p in prompts for _ in range(GROUP_SIZE)], seed)
        turns, owner = logged(tokenizer, episodes)
        rewards = np.array([episode.reward for episode in episodes], np.float32)
        logs.append((turns, owner, rewards, logprobs(model, turns)))
    print(f"{options.seeds} logs after {time.process_time() - began:.0f} s", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place in train(Path(folder), options.epochs, options.every):
            policy, _ = rollout.load(place)
            prompts = list(itertools.islice(task.prompts("traces", 0), options.episodes))
            truth = float(np.mean([each.reward for each in rollout.play(policy, tokenizer, prompts, 0)]))
            for seed, (turns, owner, rewards, rollout_logprobs) in enumerate(logs):
                given = logprobs(policy, turns), rollout_logprobs
                found = learner.estimate(*(each.astype(np.float32) for each in given), owner, rewards, group)
                ratios = np.bincount(owner, given[0] - given[1], len(rewards))
                row = {"checkpoint": place.name, "truth": truth, "seed": seed, **found.row()}
                rows.append(row)
                if options.out.suffix == ".npz":
                    row |= {"ratios": ratios.tolist(), "rewards": rewards.tolist()}
            print(f"{table(rows)}\n{time.process_time() - began:.0f} s", flush=True)
            told = {"command": "python benches/off_policy_estimate.py --out " + str(options.out), "estimates": rows}
            options.out.write_text(json.dumps(told, indent=1) + "\n")


def table(rows: list[dict]) -> str:
    """Return how often the interval covers the truth, by policy and over all: of the known estimates, of the others."""
    lines = ["| policy | truth | effective share | known | of these cover | the others | of these cover |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in [*dict.fromkeys(row["checkpoint"] for row in rows), "all"]:
        part = [row for row in rows if name in (row["checkpoint"], "all")]
        truth = f"{part[0]['truth']:.3f}" if name != "all" else ""
        share = np.mean([row["off_policy_value_ess_fraction"] for row in part])
        cells = []
        for known in (1, 0):
            those = [row for row in part if row["off_policy_value_known"] == known]
            hits = sum(row["off_policy_value_low"] <= row["truth"] <= row["off_policy_value_high"] for row in those)
            cells += [f"{len(those)}", f"{hits} ({hits / len(those):.0%})" if those else ""]
        lines.append(f"| {name} | {truth} | {share:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
