"""CPU seconds a step of our own work other than rollouts and training: prepare, sync and record.

    python benches/online/beside.py --vllm-python .venv-vllm/bin/python --out benches/results/online.json
    python benches/online/beside.py --vllm-python .venv-vllm/bin/python --asked --out benches/results/online.json

The clerk, 16 groups of 8 a step, played and trained alternately, by `tracegrad.online.train`. Counted are

- prepare: groups found and read in the folder, the ledger, align, advantages, pack, the proof;
- sync: weights written and sent to the server, the complete process from the end of the update to the resumed server;
- record: calls added to the session, their record made, group written.

Playing is the rest of the collector (HTTP, tools, asyncio), training `Trainer.step`. Without --vllm-python the server
is the tests' stand-in in a separate process: slower, but similar in the counted work. The first step is warm-up.

With --asked, trainer and server compute in bf16. Each step then requests the tokens of the weight-sync check from the
server, and measures them with this version and the one before. The CPU seconds of that in both processes are compared
with the CPU seconds of the step: first for the steps that try all causes of a mistake, whatever that costs
(`tracegrad.online.weight_check.PUSHES`), then for the others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import online
import tracegrad as tg
from tracegrad.online import OnlineConfig, RolloutConfig, buffer, training_loop, weight_check, weight_sample
from tracegrad.online.buffer import GroupReader, GroupWriter
from tracegrad.online.collector import GroupFilter
from tracegrad.rollout.session import Call, Session
from with_ours import started

COMMAND = "python benches/online/beside.py --vllm-python .venv-vllm/bin/python --out benches/results/online.json"
TRAJECTORIES = 128
OURS = ("prepare", "sync", "record")
MUST, TRIAL = 0.10, 0.15


class Meter:
    """CPU seconds by part; what runs within another part is subtracted."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.own: dict[str, float] = defaultdict(float)
        self._within = threading.local()

    def wrap(self, owner: Any, name: str, part: str, clock: Callable[[], float] = time.thread_time) -> None:
        """Has a function count as a part."""
        function = getattr(owner, name)

        def counted(*args: Any, **told: Any) -> Any:
            inner = getattr(self._within, "spent", 0.0)
            self._within.spent, began = 0.0, clock()
            try:
                return function(*args, **told)
            finally:
                seconds = clock() - began
                self.spent[part] += seconds - self._within.spent
                self.own[f"{part}: {name}"] += seconds - self._within.spent
                self._within.spent = inner + seconds

        setattr(owner, name, counted)

    def clear(self) -> None:
        """Begins again."""
        self.spent.clear()
        self.own.clear()


def metered() -> Meter:
    """A meter on all that is ours."""
    meter = Meter()
    for owner, name in ((Session, "open"), (Session, "record"), (Call, "close"), (GroupWriter, "write")):
        meter.wrap(owner, name, "record")
    meter.wrap(sys.modules["tracegrad.rollout.run_agent"], "conversation", "record")
    for name in ("check", "rewards_of_records"):
        meter.wrap(GroupFilter, name, "record")
    meter.wrap(GroupReader, "read_new", "prepare")
    meter.wrap(buffer.ConsumedGroups, "add", "prepare")
    meter.wrap(training_loop.TrainingLoop, "_groups", "prepare")
    # There are no rollouts during this time, so that threads of the core count as well.
    meter.wrap(training_loop, "align", "prepare", time.process_time)
    meter.wrap(training_loop.TrainingLoop, "_packed", "prepare", time.process_time)
    meter.wrap(training_loop.TrainingLoop, "_step", "prepare", time.process_time)
    meter.wrap(training_loop.Trainer, "step", "train", time.process_time)
    meter.wrap(training_loop.TrainingLoop, "_push", "sync", time.process_time)
    return meter


def _stand_in(pipe: Any) -> None:
    import torch

    from policy_server import PolicyServer

    torch.set_num_threads(1)
    with PolicyServer() as server:
        pipe.send(server.url)
        pipe.recv()


@contextmanager
def served(python: str | None, out: Path, dtype: str) -> Iterator[tuple[str, int | None]]:
    """URL and process of a server, of vLLM or simulated."""
    if python:
        with started(python, out, dtype=dtype) as server:
            yield server.url, server.process.pid
        return
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_stand_in, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv(), process.pid
    finally:
        ours.send("end")
        process.join(10)


class Watch:
    """A sink that starts to count after the first steps: the collector's thread, the process and the server.

    Args:
        meter: of the parts.
        pid: of the server.
        skipped: steps that are not counted; `first` keeps their CPU seconds a step of each part and of all.
    """

    def __init__(self, meter: Meter, pid: int | None, skipped: int = 1) -> None:
        self.meter, self.pid, self.skipped, self.steps = meter, pid, skipped, 0
        self.began = self.start = (0.0, 0.0, 0.0)
        self.first: dict[str, float] = {}

    def log(self, row: dict[str, Any]) -> None:
        """A step is done."""
        self.steps += 1
        if self.steps == 1:
            self.meter.clear()
            self.start = self.began = self.clocks()
        if self.steps == self.skipped > 1:
            self.began = self.clocks()
            spent = {**self.meter.spent, "all": sum(self.began[1:]) - sum(self.start[1:])}
            self.first = {part: seconds / (self.steps - 1) for part, seconds in spent.items()}
            self.meter.clear()

    def clocks(self) -> tuple[float, float, float]:
        """CPU seconds of the collector's thread, of the process, and of the server."""
        [thread] = [each for each in threading.enumerate() if each.name == "tracegrad-servers"]
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)), time.process_time(), self.served()

    def served(self) -> float:
        """CPU seconds of the server."""
        return machine.seconds_of(self.pid) if self.pid else 0.0

    def all(self) -> float:
        """CPU seconds of both processes."""
        return time.process_time() + self.served()

    def close(self) -> None:
        """Before the collector ends."""
        self.ended = self.clocks()


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--vllm-python")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--asked", action="store_true", help="measure what asking the server for checked tokens costs")
    parser.add_argument("--profile", action="store_true", help="print what the time goes to, by function")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    meter = metered()
    config = tg.config.Config(
        optimizer=tg.config.Optimizer(lr=4e-4), train=tg.config.Train(dtype="bf16" if options.asked else "float32")
    )
    with (
        tempfile.TemporaryDirectory() as name,
        served(options.vllm_python, Path(name), "bfloat16" if options.asked else "float32") as (url, pid),
    ):
        watch = Watch(meter, pid, weight_check.PUSHES + 1 if options.asked else 1)
        if options.asked:
            meter.wrap(weight_check.WeightSyncCheck, "gap", "check: compare", watch.all)
            meter.wrap(weight_check.WeightSyncCheck, "_search", "check: try all causes", watch.all)
            meter.wrap(weight_sample.ProbeSampler, "ask", "check: ask and measure", watch.all)
            meter.wrap(weight_check, "previous_logprobs", "check: measure with the version before", watch.all)
        tg.online.train(
            machine.MODEL,
            online.tasks("traces", 0),
            environment=online.Shop,
            objective=tg.presets.DAPO_DIRECT,
            config=config,
            online=OnlineConfig(steps=options.steps, steps_ahead=0, max_resample_factor=1),
            rollout=RolloutConfig(max_tokens=64, max_turns=4),
            servers=[url],
            out=Path(name) / "run",
            sinks=[watch],
        )
    steps = watch.steps - watch.skipped
    parts = {part: meter.spent[part] / steps for part in (*OURS, "train")}
    thread, process, server = ((after - before) / steps for before, after in zip(watch.began, watch.ended, strict=True))
    if options.asked:
        later = {**{part: seconds / steps for part, seconds in meter.spent.items()}, "all": process + server}
        for name, spent in (("first steps", watch.first), ("later steps", later)):
            checks = {part: seconds for part, seconds in spent.items() if part.startswith("check")}
            asked, whole = sum(checks.values()), spent["all"]
            print(f"{name}: check {asked:.4f} of {whole:.3f} CPU s a step: {asked / whole:.2%}", checks)
            told = {"rate": asked, "of": whole, "share": asked / whole, "parts": checks}
            told["steps"] = steps if spent is later else watch.skipped - 1
            unit = f"CPU s a step of {TRAJECTORIES} trajectories, trainer and server"
            row = machine.row(f"check of the weights, asked, {name}", f"{COMMAND} --asked", unit=unit, **told)
            machine.keep(options.out, [row])
        return
    total = sum(parts[part] for part in OURS)
    for part in OURS:
        print(f"{part:8} {parts[part]:.4f} CPU s a step of {TRAJECTORIES}")
    print(f"ours     {total:.4f}, must {MUST}; beside it train {parts['train']:.3f}, the process {process:.3f}")
    print(f"         the collector's thread {thread:.3f}, what it records among that")
    if options.profile:
        for what, seconds in sorted(meter.own.items(), key=lambda each: -each[1]):
            print(f"  {1000 * seconds / steps:8.2f} ms  {what}")
    told = {"peer": "the trial of 200 lines", "peer_rate": TRIAL, "rate": total, "ratio": TRIAL / total, "must": MUST}
    beside = {"parts": parts, "collector_thread": thread, "process": process, "steps": steps}
    unit = f"CPU s a step of {TRAJECTORIES} trajectories"
    beside["server"] = "vLLM" if options.vllm_python else "stand-in"
    machine.keep(options.out, [machine.row("prepare, sync and record", COMMAND, unit=unit, **told, **beside)])


if __name__ == "__main__":
    main()
