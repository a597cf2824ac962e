"""The clerk trained by `tracegrad.online.train` against a vLLM server on this CPU. An arm of `peer.py`.

CPU seconds of the server are counted from the first push on: its start is no part of a run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import machine
import online
import tracegrad as tg
from tracegrad.online import Online
from tracegrad.rollout.launch import flags, launch


def started(python: str, out: Path, alone: bool = False) -> Any:
    """A vLLM server on the example's model, as `online.train` starts one.

    Args:
        alone: the engine computes in its own process, and does not wait in a busy loop for a worker.
    """
    told, environment = tg.sync.vllm_arguments("file", beside=out / "package")
    more = {"distributed_executor_backend": "uni"} if alone else {}
    arguments = [*told, *flags({"generation_config": "vllm", **online.ENGINE, **more})]
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if alone else {}
    return launch(
        python, machine.MODEL, name="policy", arguments=arguments, environment=environment, log=out / "server.log"
    )


def main() -> None:
    """Trains, and writes CPU seconds and the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1, help="as many runs against one server, each from the beginning")
    parser.add_argument("--alone", action="store_true", help="vLLM without a worker process")
    parser.add_argument("--lr", type=float, default=4e-4)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    import torch

    torch.set_num_threads(1)
    with started(options.vllm_python, options.out, options.alone) as server:
        for seed in range(options.seeds):
            out = options.out / f"{seed}"
            found = run(server, out, seed, options)
            (out / "found.json").write_text(json.dumps(found))
            print(found, flush=True)


def run(server: Any, out: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: CPU seconds of both processes, and the rewards of its steps."""
    config = tg.config.Config(
        train=tg.config.Train(seed=seed),
        optimizer=tg.config.Optimizer(lr=options.lr),
        advantage=tg.config.Advantage(scale="std"),
    )
    play = Online(steps=options.steps, max_lag=0, refill=1, max_tokens=64, turns=4)
    served, cpu, wall = machine.seconds_of(server.process.pid), time.process_time(), time.perf_counter()
    finished = tg.online.train(
        machine.MODEL,
        online.tasks("traces", seed),
        environment=online.Shop,
        objective=tg.presets.DAPO_DIRECT,
        config=config,
        online=play,
        servers=[server.url],
        out=out,
    )
    return {
        "trainer_s": time.process_time() - cpu,
        "server_s": machine.seconds_of(server.process.pid) - served,
        "wall_s": time.perf_counter() - wall,
        "rewards": [row["reward"] for row in finished.rows],
        "checkpoint": str(finished.checkpoint),
    }


if __name__ == "__main__":
    main()
