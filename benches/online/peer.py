"""The clerk by ours and by TRL's GRPOTrainer: CPU seconds of all processes, and success on prompts never seen.

    python benches/online/peer.py --vllm-python .venv-vllm/bin/python --seeds 3 --out benches/results/online.json

Same model, prompts (16 a step, 8 samples each), reward, objective (DAPO's clip, one mean over all terms), optimizer and
number of updates; each arm in a process of its own, trainers of one thread. Ours plays against vLLM, which computes in
its engine's process: with a worker process, its default on CPU, the engine waits in a busy loop, and the server takes
1.8 times the CPU seconds. TRL generates by transformers: its road by a vLLM server pushes weights by NCCL alone and
raises NotImplementedError for a trainer that is not on CUDA (`VLLMClient.init_communicator`). CPU seconds are user and
system, from the call of `train` to its return. Success is one sample of 512 prompts at temperature 1, played by
transformers for both.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import machine
import rollout

HERE = Path(__file__).parent
COMMAND = (
    "python benches/online/peer.py --vllm-python .venv-vllm/bin/python --seeds 3 --out benches/results/online.json"
)


def arm(script: str, *arguments: object) -> None:
    """Runs an arm to its end."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    subprocess.run([sys.executable, HERE / script, *map(str, arguments)], check=True, env=told)


def success(model: Path, prompts: int) -> float:
    """The share of fresh prompts that are answered rightly."""
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return rollout.success(trained, rollout.load(machine.MODEL)[1], prompts, seed=100)[0]


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--work", type=Path, help="folder of the runs; those that are in it are not made again")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp())
    if not (work / "ours").exists():
        told = ("--alone", "--seeds", options.seeds, "--steps", options.steps, "--vllm-python", options.vllm_python)
        arm("with_ours.py", "--out", work / "ours", *told)
    for seed in range(options.seeds):
        if not (work / f"trl-{seed}").exists():
            arm("with_trl.py", "--out", work / f"trl-{seed}", "--seed", seed, "--steps", options.steps)
    before = success(machine.MODEL, options.prompts)
    runs = {"ours": [], "trl": []}
    for seed in range(options.seeds):
        for name, folder in (("ours", work / "ours" / str(seed)), ("trl", work / f"trl-{seed}")):
            found = json.loads((folder / "found.json").read_text())
            found["cpu_s"] = found["trainer_s"] + found["server_s"]
            found["success"] = success(Path(found.pop("checkpoint", folder / "model")), options.prompts)
            runs[name].append(found)
            print(
                f"{name}, seed {seed}: {found['cpu_s']:.1f} s of CPU ({found['server_s']:.1f} of them the server's), "
                f"{found['wall_s']:.1f} s, success {before:.1%} -> {found['success']:.1%}"
            )
    rows = [row_of(before, runs, options)]
    print(f"ratio of CPU seconds: {rows[0]['ratio']:.2f}")
    machine.keep(options.out, rows)


def row_of(before: float, runs: dict[str, list[dict]], options: argparse.Namespace) -> dict:
    """The row of the results."""
    ours, theirs = (statistics.median(run["cpu_s"] for run in runs[name]) for name in ("ours", "trl"))
    kept = ("cpu_s", "server_s", "wall_s", "success")
    return machine.row(
        "the clerk trained online, CPU seconds of all processes",
        COMMAND,
        peer=f"trl {importlib.metadata.version('trl')}, GRPOTrainer, transformers' generation",
        peer_rate=theirs,
        rate=ours,
        unit="CPU s a run, median",
        ratio=theirs / ours,
        must=3.0,
        steps=options.steps,
        success_before=before,
        prompts=options.prompts,
        runs={name: [{key: run[key] for key in kept} for run in each] for name, each in runs.items()},
    )


if __name__ == "__main__":
    main()
