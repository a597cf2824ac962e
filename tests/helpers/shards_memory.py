"""A process of its own that trains from large shards, or plans and packs all their steps; prints how memory grew.

python tests/helpers/shards_memory.py FOLDER SHARDS train|pack|join
"""

import json
import sys
from pathlib import Path

import numpy as np

from tracegrad.alignment import store
from tracegrad.alignment.sequences import Sequences
from tracegrad.storage import manifest

TRACES, LENGTH, TERMS, GROUP, VOCABULARY = 800, 2000, 24, 8, 48


def made(folder: Path, count: int) -> int:
    """Shards of 37 MB each: traces of which the first tokens are trained and a long rest is not; their bytes in all."""
    size = 0
    for number in range(count):
        rng = np.random.default_rng(number)
        ids = rng.integers(0, VOCABULARY, TRACES * LENGTH).astype(np.int32)
        trainable = np.tile((np.arange(LENGTH) > 3) & (np.arange(LENGTH) < 4 + TERMS), TRACES)
        one = Sequences.from_arrays(
            ids,
            np.arange(TRACES + 1) * LENGTH,
            np.where(trainable, np.float32(-np.log(VOCABULARY)), np.float32(np.nan)),
            trainable,
            group=np.arange(TRACES) // GROUP,
            rewards=rng.integers(0, 2, TRACES).astype(np.float32),
        )
        groups = tuple(f"{number} {group}" for group in range(TRACES // GROUP))
        stored = one.stored()._replace(
            names={
                "reward_names": ("reward",),
                "trace_ids": tuple(f"{number} {row}" for row in range(TRACES)),
                "group_names": groups,
            }
        )
        place = folder / manifest.shard_name(number)
        place.mkdir(parents=True)
        store.write(place, stored)
        size += sum(path.stat().st_size for path in place.iterdir())
    manifest.seal(folder)
    return size


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    folder, count, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    size = made(folder / "data", count)
    from tracegrad import config
    from tracegrad.objective import presets
    from tracegrad.trainer import train
    from tracegrad.trainer.dataset import PreparedDataset
    from tracegrad.trainer.steps import TrainingData

    told = config.load(overrides=[("pack.tokens_per_row", 512), ("train.groups_per_step", 16), ("train.epochs", 2)])
    told = config.update(told, [("train.updates_per_old_logprobs", 2), ("token_log.max_mb", 4)])
    if what == "train":
        from tiny import sampled, tiny_model

        # What a first run takes for itself, whatever the data: kernels, threads, caches.
        quiet = {"objective": presets.DAPO, "sinks": (), "log": lambda _: None}
        train(sampled(tiny_model()), tiny_model(), out=folder / "first", config=told, **quiet)
    anon, resident, seen = status("RssAnon"), status("VmRSS"), []
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    if what == "join":
        found = Sequences.load(folder / "data")
        seen.append(status("RssAnon"))
        steps = found.traces
    elif what == "pack":
        feed = TrainingData.of(PreparedDataset.open(folder / "data", verify=True), presets.DAPO, told)
        seen += [status("RssAnon") for _ in feed.each_step(0)]
        steps = len(seen)
    else:
        sink = type("Seen", (), {"log": lambda self, row: seen.append(status("RssAnon")), "close": lambda self: None})
        opened = PreparedDataset.open(folder / "data", verify=True)
        steps = train(opened, tiny_model(), **{**quiet, "sinks": [sink()]}, out=folder / "out", config=told).step
    grown = {"anonymous": max(seen) - anon, "peak": status("VmHWM") - resident}
    print(json.dumps({"bytes": size, "steps": steps, **grown}))


if __name__ == "__main__":
    main()
