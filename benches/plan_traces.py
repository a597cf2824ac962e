"""The cost to plan an epoch of millions of traces from their columns only: seconds, memory, and the plan's hash.

    python benches/plan_traces.py [--traces 10000000] [--ranks 2]

Shards of 4,096 traces are made up with their columns and without tokens. Each rank is a separate process, which opens
them, compares rewards, cuts the steps of an epoch, and prints the cost.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tracegrad.alignment import store
from tracegrad.storage import manifest, safetensors_file

SHARD = 4096
GROUP = 8


def made(folder: Path, traces: int) -> None:
    """Shards of traces of lognormal lengths in groups of eight."""
    rng = np.random.default_rng(0)
    for number in range(-(-traces // SHARD)):
        rows = np.arange(number * SHARD, min((number + 1) * SHARD, traces))
        count = len(rows)
        terms = np.minimum(rng.lognormal(6, 1, count) + 1, 30_000).astype(np.int32)
        group = (rows // GROUP).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        columns = {name: np.zeros(count, kind) for name, kind in store.TRACE_COLUMNS.items()}
        columns |= {"group": np.stack([group, ~group], 1), "trace": np.stack([rows, rows], 1).astype(np.uint64)}
        columns |= {"terms": terms, "known": terms, "tokens": terms + 300, "longest": terms + 300}
        columns |= {"branches": np.ones(count, np.int32), "turns": np.ones(count, np.int32)}
        columns |= {"rewards": rng.integers(0, 2, (count, 1)).astype(np.float32)}
        columns |= {"logprob_kind": np.full(count, 2, np.uint8), "ending": np.ones(count, np.uint8)}
        place = folder / manifest.shard_name(number)
        place.mkdir(parents=True)
        told = {"format": store.FORMAT, "reward_names": '["reward"]'}
        written = safetensors_file.write(place / store.NAME, columns, told)
        totals = {name: int(columns[name].sum(dtype=np.int64)) for name in ("branches", "tokens", "terms")}
        manifest.write(place, {"traces": count, **totals}, {store.NAME: written})
    manifest.seal(folder)


def planned(folder: str, ranks: int, rank: int) -> None:
    """One rank: opens, compares, cuts."""
    began = time.perf_counter()
    from tracegrad import config
    from tracegrad.objective import presets
    from tracegrad.trainer.dataset import PreparedDataset
    from tracegrad.trainer.steps import TrainingData

    imported, before = time.perf_counter(), _status("VmRSS")
    opened = PreparedDataset.open(folder)
    columns = time.perf_counter()
    told = config.load(overrides=[("pack.tokens_per_row", 32_768), ("train.groups_per_step", 64)])
    feed = TrainingData.of(opened, presets.DAPO, told, ranks=ranks, rank=rank)
    compared = time.perf_counter()
    cut = feed.assign_steps(feed.plan(1).shuffle_seed(0))
    done = time.perf_counter()
    found = {
        "traces": opened.traces,
        "steps": len(cut),
        "seconds": {
            "columns": round(columns - imported, 2),
            "advantages": round(compared - columns, 2),
            "steps": round(done - compared, 2),
            "in all": round(done - imported, 2),
            "imports": round(imported - began, 2),
        },
        "gb": {"before": round(before / 1e9, 2), "peak": round(_status("VmHWM") / 1e9, 2)},
        "hash": feed.plan_hash(cut),
    }
    print(json.dumps(found))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Makes the shards, and plans as every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--as-rank", nargs=2, metavar=("FOLDER", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        planned(options.as_rank[0], options.ranks, int(options.as_rank[1]))
        return
    with tempfile.TemporaryDirectory() as place:
        made(Path(place) / "shards", options.traces)
        hashes = set()
        for rank in range(options.ranks):
            told = ["--ranks", str(options.ranks), "--as-rank", f"{place}/shards", str(rank)]
            found = json.loads(
                subprocess.run([sys.executable, __file__, *told], capture_output=True, check=True).stdout
            )
            print(f"rank {rank}: {json.dumps(found)}")
            hashes.add(found["hash"])
        print("the same plan on every rank" if len(hashes) == 1 else "PLANS DIFFER")


if __name__ == "__main__":
    main()
