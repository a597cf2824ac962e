"""The servers of a run: those that a user names, or one that is started here and stopped in the end."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.online.options import Online

NAME = "policy"


@contextmanager
def served(
    model: Path,
    urls: Sequence[str],
    key: str | None,
    python: str | None,
    engine: Mapping[str, Any],
    told: Online,
    out: Path,
    say: Callable[[str], None],
) -> Iterator[tuple[Callable[[], Any], Mapping[str, Any]]]:
    """What makes the pool of servers, and the engine arguments that they have as far as they are known here.

    Raises:
        ArgumentError: if none is named and none can be started.
        ServerError: if the one that is started does not become healthy.
    """
    from tracegrad.rollout.server import Servers

    if urls:
        if engine or python:
            raise ArgumentError("engine and python have no effect: servers are named. Leave them out.")
        yield (lambda: Servers(urls, model=NAME, key=key)), {}
        return
    from tracegrad.rollout.launch import launch
    from tracegrad.sync import vllm_arguments

    if python is None and importlib.util.find_spec("vllm") is None:
        raise ArgumentError(
            "no server is named, and vLLM is not installed here to start one. Nothing could be played. Pass servers=, "
            "or python=, the interpreter of an environment that has vLLM."
        )
    flags, environment = vllm_arguments(told.sync, beside=out / "package")
    heat = {} if told.temperature == 1.0 else {"logprobs_mode": "processed_logprobs"}
    arguments = {"generation_config": "vllm", **heat, **engine}
    from tracegrad.rollout.launch import flags as spelt

    out.mkdir(parents=True, exist_ok=True)
    say(f"server   vLLM is started; its log is {out / 'server.log'}")
    started = {"arguments": [*flags, *spelt(arguments)], "environment": environment, "log": out / "server.log"}
    with launch(python or sys.executable, model, name=NAME, **started) as server:
        yield (lambda: Servers([server.url], model=NAME)), arguments
