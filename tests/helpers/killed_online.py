"""Runs of the online loop whose processes are killed and started again: run by test_online_kills.py as a script.

`python killed_online.py OUT PLAN` forks a server, a trainer and the plan's collectors, kills as many of each as the
plan says at moments drawn by its seed, lets the run end, and replays it. OUT/killed.json says what was killed when.
"""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
import torch

import tracegrad as tg
from collect_run import questions
from online_runs import CONFIG, split
from policy_server import MODEL, PolicyServer
from stand_in import free_port
from tracegrad.online.buffer import ConsumedGroups, GroupReader
from tracegrad.online.server_pool import ServerPool

GROUPS = CONFIG.train.groups_per_step
BOOT_S = 1.5
"""Less than any real server takes, and long enough for its clients to see that it is gone."""
SLOWEST_S = 120.0
"""Until a run that takes no step is called stuck."""


class Killed:
    """A run and its processes.

    Args:
        out: of the run.
        plan: {"steps", "collectors", "kills": {"trainer", "collector", "server"}, "seed"}; without collectors the
            trainer plays itself. Tasks are just enough for the steps.
    """

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self.out, self.plan, self.draw = out, plan, random.Random(plan["seed"])
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.begun = out / "begun"
        self.living: dict[str, int] = {}
        self.lives = 0

    def server(self) -> None:
        time.sleep(BOOT_S)
        with PolicyServer(port=self.port):
            signal.pause()

    def trainer(self) -> None:
        config = tg.config.update(CONFIG, [("checkpoint.every_steps", 2)])
        steps = self.plan["steps"]
        options = split(steps=steps, steps_ahead=1, max_tokens=6)
        told = {"objective": tg.presets.DAPO_DIRECT, "config": config, "servers": [self.url], "out": self.out / "run"}
        opened = ServerPool.__enter__

        def opens(link: ServerPool) -> ServerPool:
            """From here on a server that is gone is waited for."""
            found = opened(link)
            self.begun.with_suffix(f".{os.getpid()}").touch()
            return found

        ServerPool.__enter__ = opens
        apart = bool(self.plan["collectors"])
        how = {} if apart else {"agent": self.answers}
        tasks = None if apart else iter(questions(count=steps * GROUPS))
        tg.online.train(MODEL, tasks, **how, **options, resume=self.lives > 0, sinks=(), **told)

    def collector(self, mine: int) -> None:
        tasks = iter(questions(count=self.plan["steps"] * GROUPS))
        share = (mine, self.plan["collectors"])
        tg.online.collect(self.out / "run", tasks, agent=self.answers, share=share, wait_s=600)

    async def answers(self, task: Any, policy: Any) -> float:
        """Plays; the last steps wait until all are killed who are to be, so that the run is not over before."""
        while self.taken() >= self.plan["steps"] - 2 and not (self.out / "all-killed").exists():
            await asyncio.sleep(0.05)
        message = await policy.chat(task["prompt"])
        return -float(len(message["content"] or "")) / 10

    def replay(self) -> None:
        told = {"objective": tg.presets.DAPO_DIRECT, "config": CONFIG, "out": self.out / "again"}
        tg.online.replay(self.out / "run", MODEL, **told)

    def begin(self, name: str) -> None:
        """Starts a process; `name` is that of a method, with the number of a collector."""
        role, _, number = name.partition(" ")
        while role == "trainer" and not self.serves():
            time.sleep(0.05)  # one that begins without any server says so and ends
        if (process := os.fork()) == 0:
            try:
                getattr(self, role)(*map(int, number.split()))
                os._exit(0)
            except BaseException as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        self.living[name] = process
        self.lives += role == "trainer"

    def serves(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def kill(self, name: str) -> dict[str, Any]:
        """Ends a process by SIGKILL, and says in what it was."""
        process = self.living.pop(name)
        os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        run = self.out / "run"
        cut = GroupReader(run / "played")
        cut.read_new()
        sizes = {path.name: path.stat().st_size for path in (run / "played").glob("*.zst")}
        return {
            "what": name,
            "code": code,
            "steps": self.taken(),
            "inside_a_group": any(size > cut._ends.get(file, 0) for file, size in sizes.items()),
            "inside_a_checkpoint": any((run / "checkpoints").glob(".tmp-*")),
        }

    def taken(self) -> int:
        return len(ConsumedGroups(self.out / "run").steps)

    def look(self) -> None:
        """Stops where a process ended by itself that nobody killed, and wrongly."""
        for name, process in list(self.living.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self.living[name]
                code = os.waitstatus_to_exitcode(status)
                if code:
                    raise SystemExit(f"{name} ended with {code}, and nobody had killed it")

    def until(self, steps: int) -> None:
        """Waits until so many steps are chosen."""
        before, since = -1, time.monotonic()
        while (taken := self.taken()) < steps:
            self.look()
            if taken > before:
                before, since = taken, time.monotonic()
            if time.monotonic() > since + SLOWEST_S:
                raise SystemExit(f"no step in {SLOWEST_S:.0f} s, after {taken}")
            time.sleep(0.01)

    def run(self) -> list[dict[str, Any]]:
        names = ["trainer", *(f"collector {mine}" for mine in range(self.plan["collectors"]))]
        for name in ["server", *names]:
            self.begin(name)
        victims = [role for role, count in self.plan["kills"].items() for _ in range(count)]
        self.draw.shuffle(victims)
        found = []
        for role in victims:
            more = self.draw.choice([0, 0, 1, 1, 2])
            self.until(min(self.taken() + more, self.plan["steps"] - 3))
            while role == "server" and not self.begun.with_suffix(f".{self.living['trainer']}").exists():
                self.look()
                time.sleep(0.01)
            time.sleep(self.draw.uniform(0, 0.6 if more else 1.2))
            self.look()
            name = self.draw.choice([name for name in self.living if name.partition(" ")[0] == role])
            found.append(self.kill(name))
            self.begin(name)
        (self.out / "all-killed").touch()
        self.until(self.plan["steps"])
        deadline = time.monotonic() + SLOWEST_S
        while set(self.living) != {"server"} and time.monotonic() < deadline:
            self.look()
            time.sleep(0.02)
        if set(self.living) != {"server"}:
            raise SystemExit(f"the run has ended, and these have not: {self.living}")
        self.kill("server")
        self.begin("replay")
        os.waitpid(self.living.pop("replay"), 0)
        return found


def main(out: Path, plan: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, killed = time.perf_counter(), Killed(out, plan)
    try:
        found = killed.run()
    finally:
        for process in killed.living.values():
            os.kill(process, signal.SIGKILL)
    told = {"seconds": time.perf_counter() - began, "kills": found}
    (out / "killed.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
