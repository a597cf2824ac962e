"""Machines that share no folder, and what they find: run by test_nodes.py as a script, which forks them.

`python nodes.py OUT [CASE ...]` writes one JSON object; each entry is a case by name and what was measured of it. A
machine is a process with a temporary folder of its own; between them is the bucket that AWS_ENDPOINT_URL names.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from ranks import forked, joined, told, vector
from tiny import sampled, tiny_model
from tracegrad.objective import presets, with_kl
from tracegrad.storage import remote
from tracegrad.trainer import train
from tracegrad.trainer import trainer as run_module
from tracegrad.trainer.lora import with_adapters

BUCKET = "s3://runs"
QUICK: dict[str, Any] = {
    "checkpoint__every_steps": 1,
    "train__epochs": 1,
    "parallel__mode": "fsdp",
    "train__timeout_s": 60.0,
}


def trained(name: str, **changes: Any) -> Any:
    """A run at an address of the bucket, from its newest checkpoint where there is one, and its parameters."""
    adapters = changes.pop("adapters", False)
    model = tiny_model(0, attn_implementation="sdpa")
    model = with_adapters(model, 4) if adapters else model
    given = {"objective": with_kl(presets.DAPO, 0.05), "out": f"{BUCKET}/{name}", "resume": True}
    done = train(sampled(tiny_model()), model, config=told(**{**QUICK, **changes}), sinks=(), log=print, **given)
    return done, vector(model)


class Once:
    """A function of a module that does something else the n-th time, on one rank."""

    def __init__(self, module: Any, name: str, number: int, instead: Callable[[], None]) -> None:
        self.real, self.number, self.instead, self.count = getattr(module, name), number, instead, 0
        setattr(module, name, self)

    def __call__(self, *given: Any, **how: Any) -> Any:
        self.count += 1
        if self.count == self.number:
            self.instead()
        return self.real(*given, **how)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("of somebody's own")


STEP, SEND = (run_module, "optimizer_step"), (remote, "upload")
FAULTS: dict[str, tuple[int, Any, int, Callable[[], None]]] = {
    "killed in a step": (1, STEP, 3, die),
    "killed while sending": (1, SEND, 6, die),
    "first killed while sending": (0, SEND, 24, die),
    "hangs": (1, STEP, 2, lambda: time.sleep(600)),
    "raises": (1, STEP, 2, fail),
    "cannot send": (1, SEND, 6, fail),
}
"""Which rank meets what, at which call."""


def machine(port: int, ranks: int, rank: int, out: Path, name: str, fault: str, changes: dict[str, Any]) -> None:
    """One process with folders of its own: a whole run, or what it says as it ends."""
    joined(port, ranks, rank)
    os.environ["GROUP_RANK"] = str(rank)
    here = out / f"machine-{rank}"
    here.mkdir(exist_ok=True)
    tempfile.tempdir = str(here)
    if fault and FAULTS[fault][0] == rank:
        Once(*FAULTS[fault][1], *FAULTS[fault][2:])
    try:
        done, found = trained(name, **changes)
    except Exception as error:
        said = {"said": f"{type(error).__name__}: {error}"}
    else:
        said = {"step": done.step, "address": done.address, "rows": [row["step"] for row in done.rows]}
        torch.save(found, out / f"{name}-{rank}.pt")
    (out / f"{name}-{rank}.json").write_text(json.dumps(said))
    if dist.is_initialized():
        dist.destroy_process_group()


class Group:
    """Machines at work on a run.

    Args:
        out: where each leaves what it has said.
        name: of the run.
        fault: of `FAULTS`, that one of them meets.
        changes: options.
    """

    def __init__(self, out: Path, name: str, fault: str = "", ranks: int = 2, **changes: Any) -> None:
        self.out, self.name, self.hangs = out, name, fault == "hangs"
        for path in out.glob(f"{name}-?.json"):
            path.unlink()
        self.children = forked(ranks, machine, out, name, fault, changes)

    def end(self) -> list[dict[str, Any]]:
        """What each machine has said; how it ended, where it said nothing. One that hangs is killed after the first."""
        found = []
        for rank, child in enumerate(self.children):
            if self.hangs and rank == 1:
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            told = self.out / f"{self.name}-{rank}.json"
            found.append({"code": code, **(json.loads(told.read_text()) if told.exists() else {})})
        return found


def equal(out: Path, one: str, other: str) -> bool:
    return bool(torch.equal(torch.load(out / f"{one}-0.pt"), torch.load(out / f"{other}-0.pt")))


def both(out: Path, fault: str, name: str, **changes: Any) -> dict[str, Any]:
    """A run that a fault ends, and the one that goes on with it."""
    return {"first": Group(out, name, fault, **changes).end(), "again": Group(out, name, **changes).end()}


def main(out: Path, cases: list[str]) -> int:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (once, before the fork)

    torch.set_num_threads(1)
    names = {case: case.replace(" ", "-") for case in cases}
    hung = Group(out, "hangs", "hangs", train__timeout_s=4.0)
    whole = Group(out, "whole")
    found: dict[str, Any] = {case: both(out, case, names[case]) for case in cases if case != "hangs"}
    found |= {"whole": whole.end(), "hangs": {"first": hung.end()}}
    for case in cases:
        found[case]["same"] = case == "hangs" or equal(out, names[case], "whole")
    if len(cases) == len(FAULTS):
        for name, changes in {"ddp": {"parallel__mode": "ddp"}, "adapters": {"adapters": True}}.items():
            wanted = Group(out, name, **changes).end()
            killed = both(out, "killed in a step", f"{name}-killed", **changes)
            found[name] = {"whole": wanted, **killed, "same": equal(out, name, f"{name}-killed")}
    (out / "nodes.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
