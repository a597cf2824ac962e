"""Run environments of the `verifiers` package as contracts, in their own process and interpreter.

verifiers pins dependency versions that conflict with others, so this process imports nothing from it.
`verifiers_worker` runs in its interpreter, and its agents send their calls to the recording proxy of the trajectory.
Its rewards are trained on.
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

from tracegrad.errors import ArgumentError, TracegradError, escape_terminal

WORKER = Path(__file__).with_name("verifiers_worker.py")
LONGEST_LINE = 16 << 20
DEFAULT_AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Default: a chat with the task's tools on this machine. Harnesses that run code of the model must be requested by
name."""


class VerifiersEnvironment:
    """Agent for an environment of verifiers, for `agent=` of `tg.online.train`.

    Args:
        env_id: id of its taskset: the module that contains it, as `verifiers` finds it.
        python: interpreter of an environment with `verifiers` (0.4, its v1) and the taskset.
        config: config of the environment with verifiers' own names, such as {"taskset": {"split": "train"}}.
        paths: folders where it looks for modules, in addition to installed ones.
        ready_s: time limit to start, in seconds.

    Raises:
        ArgumentError: if the interpreter cannot be run.

    ```python
    import tracegrad as tg

    environment = tg.rollout.verifiers("gsm8k", python=".venv-verifiers/bin/python")
    tg.online.train("model", environment.tasks(256), agent=environment, out="out/online")
    ```
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
        options = dict(config or {})
        self._config = {"agent": DEFAULT_AGENT, **options, "taskset": {**(options.get("taskset") or {}), "id": env_id}}
        self._python, self._ready_s, self.env_id = python, ready_s, env_id
        python_path = os.environ.get("PYTHONPATH")
        folders = [*(str(Path(path).resolve()) for path in paths), *([python_path] if python_path else [])]
        # Programs of the environment, such as uv, which verifiers calls, are in the interpreter's folder.
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PATH": path}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._until_end: AsyncGenerator[None, None] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the contract

    def tasks(self, count: int = 1024) -> list[dict[str, Any]]:
        """Return the first `count` tasks of the taskset, or fewer if it has fewer.

        Raises:
            ArgumentError: if the interpreter cannot be run or returns no tasks.
        """
        command = [self._python, "-P", str(WORKER), json.dumps(self._config), str(count)]
        try:
            result = subprocess.run(
                command, env=self._environment, capture_output=True, timeout=self._ready_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ArgumentError(
                f"TG-ROLLOUT-049: {self._python}: {error}. The tasks of {self.env_id} cannot be listed. Correct python."
            ) from error
        if result.returncode or not result.stdout:
            raise ArgumentError(
                f"TG-ROLLOUT-050: verifiers returned no tasks of {self.env_id}: {_tail(result.stderr)}. Check whether "
                f"{self._python} can import it."
            )
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        return [{"prompt": data.get("prompt", ""), "task": number, "data": data} for number, data in enumerate(lines)]

    async def __call__(self, task: Mapping[str, Any], policy: Any) -> float:
        """Roll out one of `tasks()` and return its reward.

        Raises:
            TracegradError: if the episode failed, or the process ended.
        """
        process = await self._process()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "task": task["task"], "base_url": policy.base_url, "key": policy.key}
        self._send(process, request)
        try:
            reply = await answer
        finally:
            del self._waiting[number]
            if answer.cancelled():
                self._send(process, {"cancel": number})
        if "error" in reply:
            raise TracegradError(f"TG-ROLLOUT-051: the episode of {self.env_id} failed: {reply['error']}")
        return float(reply["reward"])

    async def _process(self) -> asyncio.subprocess.Process:
        """Return the worker process, and start it on first use; it ends with the event loop that started it."""
        task, loop = self._starting, asyncio.get_running_loop()
        ended = task is None or task.get_loop() is not loop
        if task is None or ended or (task.done() and (task.exception() or task.result().returncode is not None)):
            task = self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(task)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            self._python,
            "-P",  # otherwise modules in the script's folder would shadow others of the same name
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
            raise TracegradError(
                f"TG-ROLLOUT-052: verifiers has not started {self.env_id} within {self._ready_s:g} s."
            ) from None
        if not ready:
            raise TracegradError(f"TG-ROLLOUT-053: verifiers cannot run {self.env_id}: {self._words()}.")
        self._reading = asyncio.ensure_future(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass replies to the waiting calls; if the process ends, all of them get an error."""
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line that is too long
            while line := await process.stdout.readline():
                reply = json.loads(line)
                if (waiting := self._waiting.get(reply.get("id"))) is not None and not waiting.done():
                    waiting.set_result(reply)
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
        return _tail(self._log.read())


async def _until_the_loop_ends(process: asyncio.subprocess.Process) -> AsyncGenerator[None, None]:
    """Kill the process when the loop closes: a loop first closes the async generators that were started in it."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(RuntimeError):  # `_read` may be reading to the end
            await process.stdout.read()
        await process.wait()
        process.stdin.close()
        with contextlib.suppress(OSError):  # the last data may be unread
            await process.stdin.wait_closed()


def _tail(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return escape_terminal((lines or ["it printed nothing"])[-1][:500])
