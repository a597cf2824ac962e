"""Environments of verifiers as contracts: played in a process of their own, by an interpreter of their own.

verifiers pins what others need otherwise, so that nothing of it is imported here: `verifiers_worker` is started, and
its agents talk to the proxy of the trajectory, which records them. Its rewards are what is trained on.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, TracegradError, shown

WORKER = Path(__file__).with_name("verifiers_worker.py")
LONGEST_LINE = 16 << 20
SAFE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""A chat with the task's tools, on this machine; harnesses that run what a model writes must be named."""


class Verifiers:
    """The contract of one of verifiers' environments, for `agent=` of `tg.online.train`.

    Args:
        env_id: of its taskset: the module that holds it, as `verifiers` finds it.
        python: the interpreter of an environment where `verifiers` (0.4, its v1) and the taskset are installed.
        config: of the environment, by verifiers' own names, such as {"taskset": {"split": "train"}}.
        paths: folders where it looks for modules beside those that are installed.
        ready_s: how long it may take to start.

    Raises:
        ArgumentError: if the interpreter cannot be run.
    """

    def __init__(
        self,
        env_id: str,
        *,
        python: str,
        config: Mapping[str, Any] | None = None,
        paths: Sequence[str | Path] = (),
        ready_s: float = 300.0,
    ) -> None:
        told = dict(config or {})
        self._config = {"agent": SAFE, **told, "taskset": {**(told.get("taskset") or {}), "id": env_id}}
        self._python, self._ready_s, self.env_id = python, ready_s, env_id
        before = os.environ.get("PYTHONPATH")
        found = [*(str(Path(path).resolve()) for path in paths), *([before] if before else [])]
        # The interpreter's own programs stand beside it; uv, which verifiers calls, is one.
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found), "PATH": path}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._until_end: AsyncGenerator[None, None] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the contract

    def tasks(self, count: int = 1024) -> list[dict[str, Any]]:
        """The first tasks of the taskset, at most so many."""
        command = [self._python, "-P", str(WORKER), json.dumps(self._config), str(count)]
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, timeout=self._ready_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ArgumentError(
                f"{self._python}: {error}. No task of {self.env_id} is known. Correct python."
            ) from error
        if done.returncode or not done.stdout:
            raise ArgumentError(
                f"verifiers gives no tasks of {self.env_id}: {_last(done.stderr)}. Nothing could be played. Look "
                f"whether {self._python} can import it."
            )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return [{"prompt": each.get("prompt", ""), "task": number, "data": each} for number, each in enumerate(lines)]

    async def __call__(self, task: Mapping[str, Any], policy: Any) -> float:
        """Plays one of `tasks()`, and gives its reward.

        Raises:
            TracegradError: if the episode failed, or the process ended.
        """
        process = await self._process()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "task": task["task"], "base_url": policy.base_url, "key": policy.key}
        self._send(process, request)
        try:
            found = await answer
        finally:
            del self._waiting[number]
            if answer.cancelled():
                self._send(process, {"cancel": number})
        if "error" in found:
            raise TracegradError(f"the episode of {self.env_id} failed: {found['error']}")
        return float(found["reward"])

    async def _process(self) -> asyncio.subprocess.Process:
        """The process, started by whoever needs it first; it ends with the loop of whoever that was."""
        task, loop = self._starting, asyncio.get_running_loop()
        ended = task is None or task.get_loop() is not loop
        if task is None or ended or (task.done() and (task.exception() or task.result().returncode is not None)):
            task = self._starting = asyncio.ensure_future(self._started())
        return await asyncio.shield(task)

    async def _started(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            self._python,
            "-P",  # or the modules beside the script would hide those of their names
            str(WORKER),
            json.dumps(self._config),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment,
            limit=LONGEST_LINE,
        )
        assert process.stdout is not None
        self._until_end = _until_the_loop_ends(process)
        await anext(self._until_end)
        try:
            ready = await asyncio.wait_for(process.stdout.readline(), self._ready_s)
        except asyncio.TimeoutError:
            process.kill()
            raise TracegradError(f"verifiers has not started {self.env_id} within {self._ready_s:g} s.") from None
        if not ready:
            raise TracegradError(f"verifiers cannot play {self.env_id}: {self._words()}.")
        self._reading = asyncio.ensure_future(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hands answers to those who wait; where the process ends, all are told."""
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line without end
            while line := await process.stdout.readline():
                told = json.loads(line)
                if (waiting := self._waiting.get(told.get("id"))) is not None and not waiting.done():
                    waiting.set_result(told)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": f"the process of verifiers ended: {self._words()}"})

    def _send(self, process: asyncio.subprocess.Process, value: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        if process.returncode is None:
            process.stdin.write(json.dumps(value).encode() + b"\n")

    def _words(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - 65_536))
        return _last(self._log.read())


async def _until_the_loop_ends(process: asyncio.subprocess.Process) -> AsyncGenerator[None, None]:
    """Ends the process: a loop closes the generators that were begun in it before it is closed itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(RuntimeError):  # `_read` reads to the end
            await process.stdout.read()
        await process.wait()
        process.stdin.close()
        with contextlib.suppress(OSError):  # nobody has read the last of it
            await process.stdin.wait_closed()


def _last(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return shown((lines or ["it said nothing"])[-1][:500])
