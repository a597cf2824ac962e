"""Results do not depend on the number of threads."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
CHILD = """
import dataclasses, hashlib, sys
import numpy as np
import tracegrad as tg

def add(value):
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            add(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            add(each)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    else:
        digest.update(repr(value).encode())

digest = hashlib.sha256()
traces = tg.read(sys.argv[1] + "/traces.jsonl.zst")
example = tg.align(traces, tg.Tokenizer.from_pretrained(sys.argv[1] + "/model"))
for name in ("ids", "source", "trainable", "rollout_logprobs", "alignment_level", "turn", "cu_seqlens"):
    add(getattr(example, name))
random = np.random.default_rng(0)  # many short branches of few ids, so that prefixes are common
ids, starts = random.integers(0, 3, 36_000), np.arange(0, 36_001, 9)
trainable = np.tile(np.arange(9) > 2, 4000)
logprobs = np.where(trainable, -1.0, np.nan)
short = tg.Sequences.from_arrays(ids, starts, logprobs, trainable, inv_temperature=random.integers(1, 3, 36_000))
for sequences in (example, short):
    advantages = random.standard_normal(sequences.traces)
    for share in (False, True):
        for groups in (None, 100):
            options = {"share_prefixes": share, "groups_per_step": groups, "ranks": 2, "pad_to_multiple_of": 8}
            add(tg.pack(sequences, advantages, tokens_per_row=1024, **options))
print(digest.hexdigest())
"""


def test_reading_aligning_and_packing_are_equal_for_any_number_of_threads():
    def digest(threads):
        own = {**os.environ, "RAYON_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", CHILD, str(EXAMPLE)]
        return subprocess.run(command, env=own, check=True, capture_output=True, text=True, timeout=120).stdout

    assert digest(1) == digest(2) == digest(5)
