"""Measure the bytes of `Sequences.support` per sampled token, in memory and in a saved folder.

    python benches/support_size.py --out benches/results/support.json

The sizes of the sets are like those of prime-rl: 45 % have one id, the others are lognormal (kept_sets.py). Their ids
are drawn by the frequencies of real trajectories in Qwen's tokens, if ../shared/data has them, by a Zipf law, and with
equal probability, which needs the most bytes. Every answer follows a prompt of the same length, whose tokens take one
byte each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from kept_sets import kept_sets, sources, unigrams

from tracegrad import Sequences
from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.token_sets import TokenSets

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "quickstart"))
from page_table import put_table

COMMAND = "python benches/support_size.py --out benches/results/support.json"
ANSWER = 512
LIMIT, STRETCH = 24, 16


def measure(source: str, traces: int) -> dict:
    """Measure one source of frequencies."""
    random = np.random.default_rng(0)
    answers = kept_sets(traces * ANSWER, unigrams(source), random)
    lengths = np.diff(answers.offsets)
    # Each trace is a prompt and an answer of ANSWER tokens each.
    padded = np.concatenate([np.zeros((traces, ANSWER), np.int64), lengths.reshape(traces, ANSWER)], 1).ravel()
    rows = Ragged(np.concatenate([[0], np.cumsum(padded)]), answers.values)
    trainable = np.tile(np.arange(2 * ANSWER) >= ANSWER, traces)
    ids = np.zeros(len(trainable), np.int32)
    ids[trainable] = answers.values[answers.offsets[:-1]]
    logprobs = np.where(trainable, -1.0, np.nan)
    sequences = Sequences.from_arrays(ids, np.arange(traces + 1) * 2 * ANSWER, logprobs, trainable, support=rows)
    support = sequences.support
    assert support is not None
    terms = len(sequences.terms)
    own = np.zeros(len(answers.values), bool)
    own[answers.offsets[:-1]] = True
    others = Ragged(np.concatenate([[0], np.cumsum(lengths - 1)]), answers.values[~own])
    return {
        "frequencies": source,
        "sampled_tokens": terms,
        "prompt_tokens": sequences.tokens - terms,
        "sizes": {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p99": float(np.percentile(lengths, 99)),
            "singletons": float((lengths == 1).mean()),
        },
        "memory": (support.starts.nbytes + support.data.nbytes) / terms,
        "saved": (saved(sequences) - saved(replace(sequences, support=None))) / terms,
        "of_sets": TokenSets.from_rows(answers).data.nbytes / terms,
        "without_sampled_id": TokenSets.from_rows(others).data.nbytes / terms,
        "as_int32": 4 * float(lengths.mean()) + 8,
    }


def saved(sequences: Sequences) -> int:
    """Return the bytes of the folder that `save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        sequences.save(folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def table(rows: list[dict]) -> list[str]:
    """Return bytes a sampled token."""
    lines = [
        f"| ids by | size: mean, median, p99, singletons | memory (limit {LIMIT}, stretch {STRETCH}) | saved "
        "| the sets | sets without the sampled id | int32 and offsets |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        size = row["sizes"]
        about = f"{size['mean']:.1f}, {size['median']:.0f}, {size['p99']:.0f}, {size['singletons']:.0%}"
        keys = ("memory", "saved", "of_sets", "without_sampled_id", "as_int32")
        figures = " | ".join(f"{row[key]:.1f}" for key in keys)
        lines.append(f"| {row['frequencies']} | {about} | {figures} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--traces", type=int, default=200)
    options = parser.parse_args()
    rows = [measure(source, options.traces) for source in sources()]
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.write_text(json.dumps({**kept, "size": {"command": COMMAND, "rows": rows}}, indent=1) + "\n")
    lines = table(rows)
    print("\n".join(lines))
    if options.page is not None:
        put_table(options.page, "support-size", lines)


if __name__ == "__main__":
    main()
