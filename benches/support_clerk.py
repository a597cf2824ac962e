"""Train on traces sampled with top_p: with the kept ids and without them, compared with traces sampled without top_p.

    python benches/support_clerk.py --out benches/results/support.json --page docs/explanation/benchmarks.md

The policy of examples/quickstart plays prompts of the split `traces` and records each call as vLLM's
/inference/v1/generate does, with processed logprobs. It is trained on them by -A theta/rollout without a clip, so that
each pass needs the recorded logprobs, or by --objective DAPO. The arms:

- `replayed`: top_p, with the ids that it keeps in the record (`sampling_mask`);
- `vocabulary`: the same records without these ids, accepted by data.accept_truncated_sampling;
- `untruncated`: top_p 1, the same prompts and seeds.

After each pass the policy is tested on fresh prompts, sampled with top_p and without. A run that is in the file is not
run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import tracegrad as tg
from tracegrad import trainer
from tracegrad.config import load
from tracegrad.objective import Importance, Objective, Ratio
from tracegrad.recipes.recommendation import measure
from tracegrad.trainer.checkpoint import list_checkpoints
from tracegrad.trainer.step import compute_logprobs

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import rollout  # noqa: E402
import task  # noqa: E402
from page_table import put_table  # noqa: E402

SAMPLES = 8
COMMAND = "python benches/support_clerk.py --out benches/results/support.json"
OBJECTIVES = {"unclipped": Objective(Importance(), Ratio("theta", "rollout")), "DAPO": tg.presets.DAPO}


@dataclass(frozen=True)
class Arm:
    """How traces are recorded.

    Args:
        label: in the table.
        truncated: whether they are sampled with top_p.
        lists_ids: whether the record lists the kept ids.
    """

    label: str
    truncated: bool
    lists_ids: bool


ARMS = {
    "replayed": Arm("top_p {}, kept ids replayed", truncated=True, lists_ids=True),
    "vocabulary": Arm("top_p {}, over the whole vocabulary", truncated=True, lists_ids=False),
    "untruncated": Arm("top_p 1", truncated=False, lists_ids=False),
}


def record(arm: Arm, top_p: float, groups: int, seed: int, path: Path) -> tg.Sequences:
    """Sample answers to `groups` prompts, SAMPLES times each, write the records to `path`, and align them."""
    model, tokenizer = rollout.load(QUICKSTART / "model")
    prompts = [p for p in itertools.islice(task.prompts("traces", 1000 + seed), groups) for _ in range(SAMPLES)]
    top_p = top_p if arm.truncated else 1.0
    episodes = rollout.play(model, tokenizer, prompts, seed, top_p=top_p)
    lines = [record_of(tokenizer, episode, number, top_p, arm.lists_ids) for number, episode in enumerate(episodes)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tg.align(tg.read(path), tg.Tokenizer.from_pretrained(QUICKSTART / "model"))


def record_of(tokenizer, episode: rollout.Episode, number: int, top_p: float, lists_ids: bool) -> dict:
    """Return an episode as calls of vLLM's /inference/v1/generate."""
    calls, turns = [], iter(episode.turns)
    for place, message in enumerate(episode.messages):
        if message["role"] != "assistant":
            continue
        turn = next(turns)
        prompt = tokenizer(rollout.render(tokenizer, episode.messages[:place]), add_special_tokens=False)["input_ids"]
        entries = [
            {"token_id": token, "logprob": logprob} for token, logprob in zip(turn.ids, turn.logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": turn.ids, "logprobs": {"content": entries}}
        choice["finish_reason"] = "stop" if turn.ended else "length"
        if lists_ids:
            choice["sampling_mask"] = turn.kept
        request = {"token_ids": prompt, "sampling_params": {"temperature": 1.0, "top_p": top_p}}
        calls.append({"request": request, "response": {"request_id": f"{number}-{place}", "choices": [choice]}})
    group, sample = divmod(number, SAMPLES)
    record = {"id": f"{group}-{sample}", "group": group, "reward": episode.reward, "logprob_kind": "processed"}
    return {**record, "calls": calls}


def mismatch(sequences: tg.Sequences) -> dict[str, float]:
    """Compare the recorded logprobs with those of the policy that sampled them, as the first step does.

    Returns:
        of r = old/rollout: `kl`, KL(rollout || old) by token; `distance`, the mean of |log r| by token; `trace`, the
        mean of |sum of log r| by trace; `ratio_mean`, the mean of r by token.
    """
    model, _ = rollout.load(QUICKSTART / "model")
    [step] = tg.pack(sequences, np.zeros(sequences.traces, np.float32), tokens_per_row=8192)
    old = step.with_logprobs(old=compute_logprobs(model, step.batches)).old_logprobs.astype(np.float64)
    log_ratio = old - step.rollout_logprobs
    by_trace = np.bincount(step.trace, weights=log_ratio)
    all_old = np.full(sequences.tokens, np.nan)
    all_old[step.origin] = old
    return {
        "kl": measure(sequences, all_old).kl,
        "distance": float(np.abs(log_ratio).mean()),
        "trace": float(np.abs(by_trace).mean()),
        "ratio_mean": float(np.exp(log_ratio).mean()),
    }


def run(name: str, seed: int, options: argparse.Namespace) -> dict:
    """Record, train and test one arm."""
    arm, began = ARMS[name], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sequences = record(arm, options.top_p, options.groups, seed, Path(folder, "traces.jsonl"))
        terms = sequences.terms
        lengths = np.zeros(len(terms)) if sequences.support is None else np.diff(sequences.support.rows(terms).offsets)
        row = {
            "arm": name,
            "seed": seed,
            "recorded": float(sequences.reward.mean()),
            "tokens": len(terms),
            "kept_mean": float(lengths.mean()),
            "mismatch": mismatch(sequences),
        }
        changes = [("train.seed", seed), ("train.epochs", options.passes), ("checkpoint.keep", options.passes)]
        changes += [("train.groups_per_step", options.groups_per_step), ("data.holdout", 0.0)]
        changes += [("data.accept_truncated_sampling", name == "vocabulary")]
        model, _ = rollout.load(QUICKSTART / "model")
        trainer.train(
            sequences,
            model,
            objective=OBJECTIVES[options.objective],
            config=load(QUICKSTART / "run.toml", changes),
            out=Path(folder, "run"),
            tokenizer=QUICKSTART / "model",
            sinks=(),
            log=lambda _: None,
        )
        row["seconds"] = round(time.perf_counter() - began)
        places = list_checkpoints(Path(folder, "run"))
        for key, top_p in (("after", 1.0), ("after_top_p", options.top_p)):
            row[key] = [success(place, seed, top_p, options) for place in places]
    return row


def success(model: Path, seed: int, top_p: float, options: argparse.Namespace) -> float:
    """Success on fresh prompts at temperature 1."""
    return rollout.success(*rollout.load(model), options.prompts, seed, top_p=top_p)[0]


def interval(rates: list[float], prompts: int) -> str:
    """Return mean, 95 % interval over all prompts (Wilson) and each seed, in percent."""
    low, high = rollout.wilson(sum(rates) * prompts, len(rates) * prompts)
    seeds = ", ".join(f"{100 * rate:.0f}" for rate in rates)
    return f"{100 * np.mean(rates):.1f} [{100 * low:.1f}, {100 * high:.1f}] ({seeds})"


def table(data: dict) -> list[str]:
    """Return the lines of the table."""
    settings, prompts, top_p = data["settings"], data["settings"]["prompts"], data["settings"]["top_p"]
    passes = settings["passes"]
    tests = [(key, label) for key, label in (("after", "1"), ("after_top_p", f"{top_p:g}"))]
    heads = [f"tested at top_p {label}: after pass {n + 1}" for _, label in tests for n in range(passes)]
    heads = ["traces", r"\|log old/rollout\| of a token", "of a trace", *heads]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    before = [interval(data["before"][key], prompts) for key, _ in tests]
    lines.append("| before training | | | " + " | ".join(each + " |" * (passes - 1) for each in before) + " |")
    for name, arm in ARMS.items():
        rows = [row for row in data["runs"] if row["arm"] == name]
        if not rows:
            continue
        distance, by_trace = (np.mean([row["mismatch"][key] for row in rows]) for key in ("distance", "trace"))
        cells = [interval([row[key][n] for row in rows], prompts) for key, _ in tests for n in range(passes)]
        lines.append(f"| {arm.label.format(top_p)} | {distance:.1e} | {by_trace:.1e} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--objective", choices=OBJECTIVES, default="unclipped")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--top-p", type=float, default=0.8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    key = "clerk" if options.objective == "unclipped" else f"clerk {options.objective}"
    names = ("objective", "seeds", "groups", "groups_per_step", "passes", "prompts", "top_p")
    settings = {name: getattr(options, name) for name in names}
    changed = [name for name in names if settings[name] != parser.get_default(name)]
    flags = "".join(f" --{name.replace('_', '-')} {settings[name]}" for name in changed)
    everything = json.loads(options.out.read_text()) if options.out.exists() else {}
    data = everything.get(key) or {"command": COMMAND + flags, "settings": settings, "runs": []}
    if data["settings"] != settings:
        parser.error(f"{options.out} has runs with {data['settings']}. Write to another file.")

    def save() -> None:
        kept = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**kept, key: data}, indent=1) + "\n")

    for seed, name in itertools.product(range(options.seeds), ARMS):
        if not any((row["arm"], row["seed"]) == (name, seed) for row in data["runs"]):
            data["runs"].append(run(name, seed, options))
            print(json.dumps(data["runs"][-1]), flush=True)
            save()
    if "before" not in data:
        start = QUICKSTART / "model"
        for kind, top_p in (("after", 1.0), ("after_top_p", options.top_p)):
            rates = [success(start, seed, top_p, options) for seed in range(options.seeds)]
            data.setdefault("before", {})[kind] = rates
        save()
    lines = table(data)
    print("\n".join(lines))
    if options.page is not None:
        put_table(options.page, "support" if key == "clerk" else f"support-{options.objective}", lines)


if __name__ == "__main__":
    main()
