"""Start or connect the vLLM servers of a run, and choose how weights reach them: a file, NCCL or a LoRA adapter."""

import importlib.util
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.online.options import IN_PROCESS, Online, Play
from tracegrad.trainer import Run
from tracegrad.trainer.lora import has_adapters
from tracegrad.weight_sync import File, Lora, Nccl

FOLDER = "weights"
NAME = "policy"


def sync_of(driven: Run, told: Online) -> Callable[[Any], Any]:
    """What makes, for the servers of a run, what pushes to them."""
    folder = driven.out / FOLDER
    if told.sync == "file":
        for left in (*folder.glob("weights-*.safetensors"), *folder.glob(".weights-*.safetensors.*")):
            left.unlink(missing_ok=True)  # of a run that was killed
        return lambda servers: File(servers, folder)
    if told.sync == "nccl":
        _check_device(driven)
        return Nccl
    if not has_adapters(driven.model):
        raise ArgumentError(
            "online.sync is 'lora', and the model has no adapters. There would be nothing to push. Set "
            "train.lora_rank, or use online.sync 'file'."
        )
    shutil.rmtree(folder, ignore_errors=True)  # what a run that was killed has left: it has other names
    config = driven.model.peft_config[driven.model.active_adapter].to_dict()
    # Other runs may ask the same servers, whose caches go by the adapters' names.
    name = f"{NAME}-{secrets.token_hex(4)}"
    return lambda servers: Lora(servers, folder, config=config, name=name, keep=adapters_kept(told))


def weights_of(driven: Run, told: Online) -> Mapping[str, Any]:
    """What is pushed, on the first rank; every rank calls this."""
    if told.sync == "lora":
        return driven.weights(adapters="alone")
    return driven.weights(device=None if told.sync == "nccl" else "cpu")


def adapters_kept(told: Online) -> int:
    """Adapters that servers are asked for at once: the newest, those that the lag allows, and one to be loaded."""
    return told.steps_ahead + 2


def before(driven: Run, told: Online) -> tuple[Path, Callable[[str], str]] | None:
    """The file that was pushed one version ago, and by which name it has a parameter; None where there is none."""
    version = driven.taken - 1
    if told.sync == "lora":
        found = list((driven.out / FOLDER).glob(f"{NAME}-*-v{version}/adapter_model.safetensors"))
        return (found[0], _of_adapter) if found else None
    path = driven.out / FOLDER / f"weights-{version:08d}.safetensors"
    return (path, of_whole) if path.is_file() else None


def _of_adapter(name: str) -> str:
    """As peft's files have it: without the name of the adapter."""
    parts = name.split(".")
    return ".".join(part for at, part in enumerate(parts) if at < 1 or not parts[at - 1].startswith("lora_"))


def of_whole(name: str) -> str:
    """As the model without adapters has it, into which they are merged."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _check_device(driven: Run) -> None:
    device = driven.target.device
    if device.type != "cuda":
        raise ArgumentError(
            f"online.sync is 'nccl', and the policy is trained on {device}. NCCL sends from one CUDA device to "
            "another, and no server would get anything. Use online.sync 'file'."
        )


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
    from tracegrad.rollout.client import Servers

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
    from tracegrad.rollout.token_client import FLAG
    from tracegrad.weight_sync import vllm_arguments

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
    from tracegrad.rollout.in_process import Engine, Inside
    from tracegrad.weight_sync import engine_arguments

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
