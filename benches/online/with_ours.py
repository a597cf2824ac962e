"""The clerk trained by `tracegrad.online.train` with vLLM on this CPU. An arm of `peer.py`.

With --vllm-python against a server, else with `vllm.LLM` in this process, which is then vLLM's interpreter. CPU seconds
are counted from the call of `train` on: the start of vLLM is not part of a run, and reported separately.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import online
import tracegrad as tg
from tracegrad.online import OnlineConfig, RolloutConfig
from tracegrad.rollout import in_process
from tracegrad.rollout.launch import flags, launch


def started(python: str, out: Path, **engine: Any) -> Any:
    """A vLLM server on the example's model, as `make online` starts one."""
    told, environment = tg.weight_sync.vllm_arguments("file", package_folder=out / "package")
    arguments = [*told, *flags({"generation_config": "vllm", **online.ENGINE, **engine})]
    environment |= online.ENVIRONMENT
    return launch(
        python, machine.MODEL, name="policy", arguments=arguments, environment=environment, log_path=out / "server.log"
    )


@dataclass(frozen=True)
class Player:
    """The rollouts: arguments of `train` that say so, and the server's process if there is one."""

    told: dict[str, Any]
    pid: int | None = None

    def seconds(self) -> float:
        """CPU seconds other than this process's own."""
        return machine.seconds_of(self.pid) if self.pid else 0.0


@contextmanager
def inside() -> Iterator[Player]:
    """`vllm.LLM` in this process, one engine for all runs."""
    os.environ.update(online.ENVIRONMENT)
    told = {"generation_config": "vllm", **online.ENGINE}
    made = in_process.Engine(machine.MODEL, {**tg.weight_sync.engine_arguments("file"), **told})
    close, made.close = made.close, lambda: None
    in_process.Engine = lambda *_: made
    yield Player({"servers": "in-process", "engine": told})
    close()


@contextmanager
def beside(python: str, out: Path) -> Iterator[Player]:
    """A server."""
    with started(python, out) as server:
        yield Player({"servers": [server.url]}, server.process.pid)


def main() -> None:
    """Trains, and writes CPU seconds and the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm-python", help="starts a server; default vLLM in this process")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1, help="as many runs against one vLLM, each from the beginning")
    parser.add_argument("--lr", type=float, default=4e-4)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    import torch

    torch.set_num_threads(1)
    began = time.process_time()
    with beside(options.vllm_python, options.out) if options.vllm_python else inside() as player:
        start = player.seconds() + (0.0 if player.pid else time.process_time() - began)
        for seed in range(options.seeds):
            out = options.out / f"{seed}"
            found = {**run(player, out, seed, options), "start_s": start}
            (out / "found.json").write_text(json.dumps(found))
            print(found, flush=True)
    if not options.vllm_python:
        sys.stdout.flush()
        os._exit(0)  # vLLM's threads may not end


def run(player: Player, out: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: CPU seconds of both processes, and the rewards of its steps."""
    config = tg.config.Config(
        train=tg.config.Train(seed=seed),
        optimizer=tg.config.Optimizer(lr=options.lr),
        advantage=tg.config.Advantage(scale="std"),
        pack=tg.config.Pack(tokens_per_row=2048, share_prefixes=True, skip_zero_weight=True),
    )
    how = OnlineConfig(steps=options.steps, steps_ahead=0, max_resample_factor=1)
    served, cpu, wall = player.seconds(), time.process_time(), time.perf_counter()
    finished = tg.online.train(
        machine.MODEL,
        online.tasks("traces", seed),
        environment=online.Shop,
        objective=tg.presets.DAPO_DIRECT,
        config=config,
        online=how,
        rollout=RolloutConfig(max_tokens=64, max_turns=4),
        out=out,
        **player.told,
    )
    return {
        "trainer_s": time.process_time() - cpu,
        "server_s": player.seconds() - served,
        "wall_s": time.perf_counter() - wall,
        "rewards": [row["reward"] for row in finished.rows],
        "checkpoint": str(finished.checkpoint),
    }


if __name__ == "__main__":
    main()
