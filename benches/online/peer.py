"""The clerk by ours and by TRL's GRPOTrainer: CPU seconds of all processes, and success on prompts that are new.

    python benches/online/peer.py --vllm-python .venv-vllm/bin/python --seeds 3 --out benches/results/online.json

Same model, prompts (16 a step, 8 samples each), reward, objective (DAPO's clip, one mean over all terms), optimizer and
number of updates; each arm in a separate process, trainers of one thread. Ours leaves out what changes no gradient
(`pack.skip_zero_weight`, which TRL has not), and plays by vLLM in two ways: in the trainer's process (`servers=
"in-process"`, run by vLLM's interpreter), and by a server, which computes in its engine's process. TRL generates by
transformers, in its own process: its path by a vLLM server pushes weights only by NCCL and raises NotImplementedError
for a trainer that is not on CUDA (`VLLMClient.init_communicator`). CPU seconds are user and system, from the call of
`train` to its return; models and vLLM are loaded before (`start_s`). Success is one sample of 512 prompts at
temperature 1, played by transformers for all.
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
import zstandard
from transformers import AutoModelForCausalLM

import machine
import rollout
import tracegrad as tg

HERE = Path(__file__).parent
COMMAND = (
    "python benches/online/peer.py --vllm-python .venv-vllm/bin/python --seeds 3 --out benches/results/online.json"
)


NAMES = {
    "in process": "the clerk trained online, vLLM in process, CPU seconds",
    "server": "the clerk trained online, CPU seconds of all processes",
}


def arm(script: str, *arguments: object, python: str = sys.executable, **more: str) -> None:
    """Runs an arm to its end."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **more}
    subprocess.run([python, HERE / script, *map(str, arguments)], check=True, env=told)


def inside(python: str, work: Path, *told: object) -> None:
    """The arm with vLLM in process: vLLM's interpreter gets this package and what writes frames, and nothing else."""
    packages = work / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    for module in (tg, zstandard):
        found = Path(module.__file__ or "").parent
        (packages / found.name).unlink(missing_ok=True)
        (packages / found.name).symlink_to(found, target_is_directory=True)
    arm("with_ours.py", "--out", work / "in process", *told, python=python, PYTHONPATH=str(packages))


def success(model: Path, prompts: int) -> float:
    """The share of fresh prompts that are answered rightly."""
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
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
    told = ("--seeds", options.seeds, "--steps", options.steps)
    if not (work / "in process").exists():
        inside(options.vllm_python, work, *told)
    if not (work / "server").exists():
        arm("with_ours.py", "--out", work / "server", *told, "--vllm-python", options.vllm_python)
    for seed in range(options.seeds):
        if not (work / f"trl-{seed}").exists():
            arm("with_trl.py", "--out", work / f"trl-{seed}", "--seed", seed, "--steps", options.steps)
    before = success(machine.MODEL, options.prompts)
    runs: dict[str, list[dict]] = {"in process": [], "server": [], "trl": []}
    for seed in range(options.seeds):
        for name in runs:
            folder = work / f"trl-{seed}" if name == "trl" else work / name / str(seed)
            found = json.loads((folder / "found.json").read_text())
            found["cpu_s"] = found["trainer_s"] + found["server_s"]
            found["success"] = success(Path(found.pop("checkpoint", folder / "model")), options.prompts)
            runs[name].append(found)
            print(
                f"{name}, seed {seed}: {found['cpu_s']:.1f} s of CPU ({found['server_s']:.1f} of them the server's), "
                f"{found['wall_s']:.1f} s, success {before:.1%} -> {found['success']:.1%}"
            )
    rows = [row_of(name, before, runs, options) for name in NAMES]
    for name, row in zip(NAMES, rows, strict=True):
        print(f"ratio of CPU seconds, {name}: {row['ratio']:.2f}")
    machine.keep(options.out, rows)


def row_of(name: str, before: float, runs: dict[str, list[dict]], options: argparse.Namespace) -> dict:
    """A row of the results."""
    ours, theirs = (statistics.median(run["cpu_s"] for run in runs[arm]) for arm in (name, "trl"))
    kept = ("cpu_s", "server_s", "wall_s", "success", "start_s")
    return machine.row(
        NAMES[name],
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
        runs={arm: [{key: run[key] for key in kept if key in run} for run in runs[arm]] for arm in (name, "trl")},
    )


if __name__ == "__main__":
    main()
