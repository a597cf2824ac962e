"""How often the interval of the off-policy estimate covers the true success, on simulated logs of the bundled model.

    python benches/off_policy_estimate.py --out benches/results/off_policy_estimate.json

The bundled model at temperature 1 is the policy that is recorded. The policies that are estimated are the same model at
lower temperatures, which are ever surer of the same answers, as a policy is that trains on its own successes.

- For each seed the recorded policy answers `--groups` fresh prompts eight times: a run of the bundled example
  holds out 16. `trainer.estimate` estimates the success of each policy, and whether the estimate is reliable.
- The truth is the success of `--episodes` episodes that the policy plays itself.

It prints how many estimates are reliable and how many of them have the truth in their interval, by policy and over all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from tracegrad import trainer

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import rollout  # noqa: E402
import task  # noqa: E402

GROUP_SIZE = 8
TEMPERATURES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Of the recorded policy, then of the estimated policies."""


@torch.no_grad()
def logprobs(model, turns: list[tuple[list[int], list[int]]], batch: int = 64) -> np.ndarray:
    """Return [policies, turns] the summed logprob of the sampled ids of each (prompt ids, sampled ids), nats."""
    out = np.zeros((len(TEMPERATURES), len(turns)))
    order = sorted(range(len(turns)), key=lambda place: sum(map(len, turns[place])))
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        rows = [turns[place][0] + turns[place][1] for place in part]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        kept = 1 + max(len(turns[place][1]) + width - len(row) for place, row in zip(part, rows, strict=True))
        logits = model(ids, attention_mask=mask, logits_to_keep=kept).logits[:, :-1].double()
        for policy, temperature in enumerate(TEMPERATURES):
            found = (logits / temperature).log_softmax(-1).gather(2, ids[:, 1 - kept :, None])[..., 0]
            for place, row, values in zip(part, rows, found, strict=True):
                end = len(row) - 1 - (width - kept)
                out[policy, place] = float(values[end - len(turns[place][1]) : end].sum())
    return out


def logged(tokenizer, episodes: list[rollout.Episode]) -> tuple[list[tuple[list[int], list[int]]], np.ndarray]:
    """Return the turns of the episodes as (prompt ids, sampled ids), and the episode of each."""
    turns, owner = [], []
    for number, episode in enumerate(episodes):
        ends = [place for place, message in enumerate(episode.messages) if message["role"] == "assistant"]
        for place, sampled in zip(ends, episode.turns, strict=True):
            text = rollout.render(tokenizer, episode.messages[:place])
            turns.append((tokenizer(text, add_special_tokens=False)["input_ids"], sampled.ids))
            owner.append(number)
    return turns, np.array(owner)


def main() -> None:
    """Write each estimate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    model, tokenizer = rollout.load(QUICKSTART / "model")
    count = options.seeds * options.groups
    prompts = [p for p in itertools.islice(task.prompts("traces", 1), count) for _ in range(GROUP_SIZE)]
    episodes = rollout.play(model, tokenizer, prompts, 0, batch=512)
    turns, owner = logged(tokenizer, episodes)
    by_turn = logprobs(model, turns)
    total = np.array([np.bincount(owner, each, len(episodes)) for each in by_turn], np.float32)
    rewards = np.array([episode.reward for episode in episodes], np.float32)
    group = np.repeat(np.arange(count), GROUP_SIZE)
    print(f"{len(episodes)} recorded episodes after {time.process_time() - began:.0f} s", flush=True)
    rows, fresh = [], list(itertools.islice(task.prompts("traces", 2), options.episodes))
    for policy, temperature in enumerate(TEMPERATURES[1:], start=1):
        played = rollout.play(model, tokenizer, fresh, 0, temperature, batch=512)
        truth = float(np.mean([episode.reward for episode in played]))
        for seed in range(options.seeds):
            own = slice(seed * options.groups * GROUP_SIZE, (seed + 1) * options.groups * GROUP_SIZE)
            given = total[policy, own], total[0, own], np.arange(own.stop - own.start), rewards[own], group[own]
            rows.append({"temperature": temperature, "truth": truth, "seed": seed, **trainer.estimate(*given).row()})
    told = {"command": f"python benches/off_policy_estimate.py --out {options.out}", "estimates": rows}
    options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{table(rows)}\n{time.process_time() - began:.0f} s of CPU time")


def table(rows: list[dict]) -> str:
    """Return how often the interval covers the truth, by policy and in total: of reliable and the other estimates."""
    lines = ["| temperature | truth | effective share | known | of these cover | the others | of these cover |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in [*dict.fromkeys(row["temperature"] for row in rows), "all"]:
        part = [row for row in rows if name in (row["temperature"], "all")]
        truth = f"{part[0]['truth']:.3f}" if name != "all" else ""
        share = np.mean([row["ope_ess_fraction"] for row in part])
        cells = []
        for known in (1, 0):
            those = [row for row in part if row["ope_reliable"] == known]
            hits = sum(row["ope_low"] <= row["truth"] <= row["ope_high"] for row in those)
            cells += [f"{len(those)}", f"{hits} ({hits / len(those):.0%})" if those else ""]
        lines.append(f"| {name} | {truth} | {share:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
