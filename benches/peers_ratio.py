"""The ratio compared with peers: weights of old/rollout truncated at 2 and a geometric rejection, on one core.

    python benches/peers_ratio.py --out benches/results/ratio.json

The same padded float32 arrays for all, beyond the cache; the best of nine runs. The limit is a copy of the bytes that
ours reads and writes (13 a term). Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from tracegrad.objective import Aggregation, Ratio, Rejection, Truncate, Weight
from tracegrad.objective.correction import correct

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
MISMATCH = Ratio("old", "rollout")
TIS = Weight(MISMATCH, transform=Truncate(0.0, 2.0))
GEOMETRIC = Rejection(MISMATCH, level=Aggregation("trace", "mean"), low=1 / 1.02, high=1 / 0.98)
BYTES = 13


def best(run: Callable[[], object], times: int = 9) -> float:
    """Seconds of the fastest run."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def arrays(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    rollout = -random.exponential(0.5, (rows, width)).astype(np.float32) - 1e-3
    return np.minimum(rollout + random.normal(0, 0.02, rollout.shape).astype(np.float32), -1e-4), rollout


def in_numpy(old: np.ndarray, rollout: np.ndarray) -> object:
    log_ratio = np.clip(old - rollout, -20, 20)
    weight = np.minimum(np.exp(log_ratio), 2.0)
    mean = np.exp(log_ratio.mean(1, dtype=np.float64))
    return weight, np.broadcast_to(((mean >= 1 / 1.02) & (mean <= 1 / 0.98))[:, None], weight.shape).copy()


def in_torch(old: torch.Tensor, rollout: torch.Tensor) -> object:
    log_ratio = (old - rollout).clamp(-20, 20)
    mean = log_ratio.mean(1, dtype=torch.float64).exp()
    keep = ((mean >= 1 / 1.02) & (mean <= 1 / 0.98))[:, None].expand_as(old).clone()
    return log_ratio.exp().clamp(max=2.0), keep


def peers(old: np.ndarray, rollout: np.ndarray) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and a run of each peer that is here."""
    yield "numpy", lambda: in_numpy(old, rollout)
    there, here = torch.from_numpy(old), torch.from_numpy(rollout)
    yield "torch", lambda: in_torch(there, here)
    mask = torch.ones_like(there)
    with contextlib.suppress(ImportError):
        helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")

        def verl() -> object:
            log_ratio = there - here
            weights = helper.compute_rollout_correction_weights(log_ratio, mask, "token", 2.0)
            return weights, helper.compute_rollout_rejection_mask(log_ratio, mask, "seq_mean_k1", "0.98_1.02")

        yield "verl, with its metrics", verl
    with contextlib.suppress(ImportError):
        ratio = importlib.import_module("peer_code").trl_importance_ratio
        yield "TRL, weights alone", lambda: ratio(there, here, mask, "token_truncate", clip_max=2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    torch.set_num_threads(1)
    old, rollout = arrays(options.rows, options.width)
    flat = {"trace": np.repeat(np.arange(options.rows, dtype=np.int32), options.width)}
    source, target = np.ones(old.size * BYTES // 2, np.uint8), np.ones(old.size * BYTES // 2, np.uint8)
    limit = old.size / best(lambda: np.copyto(target, source))
    plans = {"weights and gate": (TIS, GEOMETRIC), "weights alone": (TIS, None)}
    rates = {}
    for name, (weight, gate) in plans.items():
        gates = [gate] if gate else []
        run = lambda weight=weight, gates=gates: correct(  # noqa: E731
            old.reshape(-1), rollout.reshape(-1), weights=[weight], rejections=gates, **flat
        )
        rates[name] = old.size / best(run)
    rows = []
    command = "RAYON_NUM_THREADS=1 python benches/peers_ratio.py --out benches/results/ratio.json"
    for peer, run in peers(old, rollout):
        stage = "weights alone" if "alone" in peer else "weights and gate"
        theirs, ours = old.size / best(run), rates[stage]
        row = {
            "stage": stage,
            "peer": peer,
            "peer_rate": theirs,
            "rate": ours,
            "unit": "terms/s",
            "ratio": ours / theirs,
        }
        rows.append({**row, "limit": limit, "cores": 1, "machine": platform.processor() or platform.machine()})
        print(f"{stage}: {peer} {theirs / 1e6:.0f} M/s, ours {ours / 1e6:.0f} M/s, {ours / theirs:.1f}x")
    print(f"limit {limit / 1e6:.0f} M/s")
    if options.out:
        options.out.write_text(json.dumps([{**row, "command": command} for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
