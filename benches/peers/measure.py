"""One measurement in a separate process: `python benches/peers/measure.py TASK FILE --cores 1`, one JSON object.

`run.py` starts it. Tasks are the functions of `ours` and `parts`, and trl, art and skyrl: peers' complete pipelines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
from pathlib import Path
from typing import Any

ROADS = ("trl", "art", "skyrl")
PARTS = ("orjson", "jinja2", "tokenizers")


def main() -> None:
    """Pins this process before anything is imported, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("file", help="a file of the workload, or the name of a model")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cores", type=int, default=0, help="0: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-per-row", type=int, default=32768)
    told = parser.parse_args()
    pin(told.cores)
    print(json.dumps(measure(told.task, told.file, told.folder, told.rounds, told.tokens_per_row)))


def measure(task: str, file: str, folder: Path, rounds: int, tokens_per_row: int) -> dict[str, Any]:
    """What one task finds, in this process."""
    if task in ROADS:
        return road(task, folder, file, rounds, tokens_per_row)
    module = importlib.import_module("parts" if task in PARTS else "ours")
    more = [tokens_per_row] if task == "chat" else []
    return getattr(module, task)(folder, file, rounds, *more)


def road(name: str, folder: Path, file: str, rounds: int, tokens_per_row: int) -> dict[str, Any]:
    """A peer's complete pipeline, timed; then its tensors compared with ours, row by row."""
    from timing import fastest

    module = importlib.import_module(f"with_{name}")
    path, model = folder / file, folder.parent / "qwen"
    peer = module.Road(model)
    took = fastest(lambda: peer.run(path, tokens_per_row), rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tensors, refused = took.result
    import rows
    import tracegrad as tg

    sequences = tg.align(tg.read(path), tg.Tokenizer.from_pretrained(model))
    advantages = tg.advantage.group_mean(sequences.reward, sequences.group)
    steps = tg.pack(sequences, advantages, tokens_per_row=tokens_per_row, share_prefixes=True)
    same = rows.compare(rows.ours(sequences, steps), peer.rows(tensors))
    version = importlib.import_module("importlib.metadata").version(module.VERSION)
    counts = {"tokens": sequences.tokens, "sampled": len(sequences.terms), "traces": sequences.traces}
    told = {"version": version, "refused": refused, **same, "peak_bytes": peak}
    return {"seconds": took.seconds, "cpu_s": took.cpu_s, **counts, **told, "bytes": path.stat().st_size}


def pin(cores: int) -> None:
    """To this number of cores, and as many threads for everybody's pools."""
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    threads = str(cores or len(os.sched_getaffinity(0)))
    for name in ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads != "1" else "false"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


if __name__ == "__main__":
    main()
