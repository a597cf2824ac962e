"""Run a vLLM server as a child process: start it, wait until it is healthy, keep its log, and stop it reliably."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, ServerError, escape_terminal
from tracegrad.progress import ProgressPrinter
from tracegrad.storage import files

GRACE_S = 15.0
WATCHDOG = Path(__file__).with_name("watchdog.py")
READ_BACK = 65_536


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return command-line flags for vLLM's engine arguments, by the names of its EngineArgs.

    >>> flags({"max_model_len": 1024, "enforce_eager": True, "seed": None})
    ['--max-model-len=1024', '--enforce-eager']
    >>> flags({"hf_overrides": {"rope_theta": 1e6}, "enable_prefix_caching": False})
    ['--hf-overrides={"rope_theta": 1000000.0}', '--no-enable-prefix-caching']
    """
    result = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            result.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, Mapping):
            result.append(f"{flag}={json.dumps(value)}")
        elif name == "device_ids":  # the only list that vLLM expects as one text
            result.append(f"{flag}={','.join(map(str, value))}")
        elif isinstance(value, (list, tuple, set, frozenset)):
            result += [flag, *map(str, value)]
        else:
            result.append(f"{flag}={value}")
    return result


class ServerProcess:
    """A vLLM server that runs as a child of this process.

    Args:
        python: interpreter of an environment that has vLLM.
        model: folder or name of the model.
        port: port on loopback; refused if it is in use. None selects a free one.
        name: model name in requests.
        arguments: further engine arguments of vLLM by name, see `flags`; or a list of flags.
        environment: variables in addition to those of this process.
        key: token that the server requires, passed in VLLM_API_KEY because command lines are public.
        log_path: file for its output.
    """

    def __init__(
        self,
        python: str,
        model: str | Path,
        port: int | None = None,
        *,
        name: str,
        arguments: Mapping[str, Any] | Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        key: str | None = None,
        log_path: str | Path,
    ):
        port = _free_port(port)
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = Path(log_path)
        extra_flags = flags(arguments) if isinstance(arguments, Mapping) else list(arguments)
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *extra_flags]
        watchdog = [sys.executable, str(WATCHDOG), str(os.getpid()), str(GRACE_S)]
        variables = {**os.environ, **(environment or {})}
        if key is not None:
            variables["VLLM_API_KEY"] = key
        with files.append(self.log_path) as output:
            self.process = subprocess.Popen(
                [*watchdog, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 600.0, log: Callable[[str], None] | None = None) -> str:
        """Return the URL once /health answers; until then, `log` receives a line every ten seconds.

        Raises:
            ServerError: if the server ends, or is not healthy within `timeout_s`; the message quotes its log.
        """
        deadline = time.monotonic() + timeout_s
        progress = ProgressPrinter(log or (lambda _: None))
        while time.monotonic() < deadline:
            progress.tick(
                lambda seconds: (
                    f"server   vLLM starts: {seconds:.0f} s, and is waited for {timeout_s - seconds:.0f} s more; "
                    f"its log ends: {escape_terminal(self._tail()[-1].strip())[:100]}"
                )
            )
            if (reason := self.ended()) is not None:
                raise ServerError(reason)
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return self.url
            time.sleep(0.5)
        raise ServerError(
            f"TG-ROLLOUT-023: vLLM was not healthy within {timeout_s:.0f} s. Its last output: {self.last_words()}. "
            f"Read {self.log_path}. If the machine is busy, raise the time limit."
        )

    def ended(self) -> str | None:
        """Return why the server cannot be used any more, with the end of its log; None while it runs."""
        if (status := self.process.poll()) is None:
            return None
        return (
            f"TG-ROLLOUT-054: vLLM at {self.url} ended with status {status}. Its last output: {self.last_words()}. "
            f"Read {self.log_path}."
        )

    def last_words(self) -> str:
        """Return the last line of the log that names an error, or its last line."""
        tail = self._tail()
        errors = [line for line in tail if "Error" in line or "error:" in line]
        return escape_terminal((errors or tail)[-1].strip())

    def _tail(self) -> list[str]:
        """Return the last lines of the log; "nothing" if it is empty."""
        with self.log_path.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - READ_BACK))
            tail = [line for line in lines.read().decode(errors="replace").splitlines() if line.strip()]
        return tail or ["nothing"]

    def stop(self) -> None:
        """Stop the server and all processes that it started; may be called again."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(GRACE_S + 30)


@contextlib.contextmanager
def launch(
    python: str,
    model: str | Path,
    port: int | None = None,
    *,
    timeout_s: float = 600.0,
    log: Callable[[str], None] | None = None,
    **options: Any,
) -> Iterator[ServerProcess]:
    """Start a vLLM server, yield it once it is healthy, and stop it at the end; arguments as for `ServerProcess`."""
    launched = ServerProcess(python, model, port, **options)
    try:
        launched.wait(timeout_s, log)
        yield launched
    finally:
        launched.stop()


def _free_port(port: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise ArgumentError(
                f"TG-ROLLOUT-024: port {port} of 127.0.0.1 is not free: {error}. The run would send requests to the "
                "process that listens there. Stop that process, or choose another port."
            ) from error
        return probe.getsockname()[1]
