"""The servers of a run: those that a user names, or one that is started here and stopped in the end."""

import importlib.util
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.online.options import IN_PROCESS, Online, Play
from tracegrad.online.ways import NAME, adapters_kept


@contextmanager
def served(
    model: Path,
    urls: Sequence[str] | str,
    key: str | None,
    python: str | None,
    engine: Mapping[str, Any],
    told: Online,
    play: Play,
    out: Path,
    say: Callable[[str], None],
    rank: int = 0,
) -> Iterator[tuple[Callable[[], Any], Mapping[str, Any], Callable[[], str | None]]]:
    """What makes the pool of servers, their engine arguments as far as they are known, and why they have ended if so.

    Args:
        key: token of the servers; one that is started here asks for it, or for one that is drawn and never written.
        rank: of the adapters that are trained, for a server that is given them.
    """
    from tracegrad.rollout.server import Servers

    for name, instead in (("api_key", "Pass key (key_file)"), ("hf_token", "Set HF_TOKEN in the environment")):
        if isinstance(engine.get(name), (str, list, tuple)):
            raise ArgumentError(f"engine.{name} would stand in command lines and in run.json. {instead}.")
    # Processed logprobs are of the temperature of each request, as the trainer's are.
    arguments = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs", **engine}
    adapters: dict[str, Any] = {"versions": adapters_kept(told), "rank": rank} if told.sync == "lora" else {}
    if urls == IN_PROCESS or list(urls) == [IN_PROCESS]:
        with _inside(model, arguments, adapters, python, told) as made:
            yield made, arguments, _unknown
        return
    if urls:
        if engine or python:
            raise ArgumentError("engine and python have no effect: servers are named. Leave them out.")
        yield (lambda: Servers(urls, model="", key=key)), {}, _unknown
        return
    from tracegrad.rollout.launch import flags as spelt
    from tracegrad.rollout.launch import launch
    from tracegrad.rollout.tokens import FLAG
    from tracegrad.sync import vllm_arguments

    if python is None and importlib.util.find_spec("vllm") is None:
        raise ArgumentError(
            "no server is named, and vLLM is not installed here to start one. Nothing could be played. Pass servers=, "
            "or python=, the interpreter of an environment that has vLLM."
        )
    key = key or secrets.token_urlsafe(32)  # other users of this machine reach its loopback too
    flags, environment = vllm_arguments(told.sync, beside=out / "package", guard=True, **adapters)
    flags += [FLAG] if play.ids == "tokens" else []
    out.mkdir(parents=True, exist_ok=True)
    say(f"server   vLLM is started; its log is {out / 'server.log'}")
    started = {"arguments": [*flags, *spelt(arguments)], "environment": environment, "log": out / "server.log"}
    with launch(python or sys.executable, model, name=NAME, key=key, say=say, **started) as server:
        yield (lambda: Servers([server.url], model=NAME, key=key)), arguments, server.ended


def _unknown() -> None:
    """Why servers that others have started cannot come back: nobody knows."""


@contextmanager
def _inside(
    model: Path, arguments: Mapping[str, Any], adapters: Mapping[str, Any], python: str | None, told: Online
) -> Iterator[Callable[[], Any]]:
    """vLLM in this process, behind the type of servers."""
    from tracegrad.rollout.engine import Engine
    from tracegrad.rollout.inside import Inside
    from tracegrad.sync import engine_arguments

    if python is not None:
        raise ArgumentError(f"python has no effect: vLLM runs in this process, servers={IN_PROCESS!r}. Leave it out.")
    if told.sync == "nccl":
        raise ArgumentError(
            f"online.sync is 'nccl', and servers={IN_PROCESS!r}. NCCL has no two ranks on one device. Use 'file'."
        )
    engine = Engine(model, {**engine_arguments(told.sync, **adapters), **arguments})
    try:
        yield lambda: Inside(engine, model=NAME)
    finally:
        engine.close()
