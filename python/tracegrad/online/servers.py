"""Start or connect to the vLLM servers of a run, and choose its weight-sync backend: file, NCCL or LoRA adapter."""

import importlib.util
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.online.options import IN_PROCESS, OnlineConfig, RolloutConfig
from tracegrad.trainer import Trainer
from tracegrad.trainer.lora import has_adapters
from tracegrad.weight_sync import File, Lora, Nccl

FOLDER = "weights"
NAME = "policy"
MAX_LOGPROBS = 20
"""The number of `top_logprobs` that vLLM allows without --max-logprobs."""


def weight_sync_backend(trainer: Trainer, options: OnlineConfig) -> Callable[[Any], Any]:
    """Return a function that creates the weight-sync backend for the servers of a run."""
    folder = trainer.out / FOLDER
    if options.weight_sync == "file":
        for left in (*folder.glob("weights-*.safetensors"), *folder.glob(".weights-*.safetensors.*")):
            left.unlink(missing_ok=True)  # left by a killed run
        return lambda servers: File(servers, folder)
    if options.weight_sync == "nccl":
        _check_device(trainer)
        return Nccl
    if not has_adapters(trainer.model):
        raise ArgumentError(
            "TG-ONLINE-033: online.weight_sync is 'lora', but the model has no adapters. Set train.lora_rank, or set "
            "online.weight_sync to 'file'."
        )
    shutil.rmtree(folder, ignore_errors=True)  # files of a killed run have other names
    config = trainer.model.peft_config[trainer.model.active_adapter].to_dict()
    # Other runs may use the same servers, whose caches are keyed by adapter name.
    name = f"{NAME}-{secrets.token_hex(4)}"
    return lambda servers: Lora(servers, folder, config=config, name=name, keep=adapters_kept(options))


def weights_of(trainer: Trainer, options: OnlineConfig) -> Mapping[str, Any]:
    """Return the weights to push, complete on the first rank. Every rank must call this."""
    if options.weight_sync == "lora":
        return trainer.weights(adapters="alone")
    return trainer.weights(device=None if options.weight_sync == "nccl" else "cpu")


def adapters_kept(options: OnlineConfig) -> int:
    """Return how many adapters the servers need at once: the newest, those of `steps_ahead`, and one to load."""
    return options.steps_ahead + 2


def previous_weights_file(trainer: Trainer, options: OnlineConfig) -> tuple[Path, Callable[[str], str]] | None:
    """Return the file of the last weight sync and a map from parameter names to its names; None if it is gone."""
    version = trainer.steps_done - 1
    if options.weight_sync == "lora":
        paths = list((trainer.out / FOLDER).glob(f"{NAME}-*-v{version}/adapter_model.safetensors"))
        return (paths[0], _of_adapter) if paths else None
    path = trainer.out / FOLDER / f"weights-{version:08d}.safetensors"
    return (path, base_parameter_name) if path.is_file() else None


def _of_adapter(name: str) -> str:
    """Return the parameter name as in peft's files: without the name of the adapter."""
    parts = name.split(".")
    return ".".join(part for index, part in enumerate(parts) if index < 1 or not parts[index - 1].startswith("lora_"))


def base_parameter_name(name: str) -> str:
    """Return the parameter name as in the model without adapters, into which they are merged."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _check_device(trainer: Trainer) -> None:
    device = trainer.target.device
    if device.type != "cuda":
        raise ArgumentError(
            f"TG-ONLINE-034: online.weight_sync is 'nccl', but the policy is trained on {device}. NCCL sends only from "
            "one CUDA device to another. Set online.weight_sync to 'file'."
        )


@contextmanager
def open_servers(
    model: Path,
    urls: Sequence[str] | str,
    key: str | None,
    python: str | None,
    engine: Mapping[str, Any],
    options: OnlineConfig,
    rollout: RolloutConfig,
    out: Path,
    log: Callable[[str], None],
    rank: int = 0,
) -> Iterator[tuple[Callable[[], Any], Mapping[str, Any], Callable[[], str | None]]]:
    """Open the servers of a run.

    Args:
        key: token of the servers. A server started here requires it; without `key` it requires a random one that is
            never written to disk.
        rank: rank of the trained adapters, for a server that loads them.

    Yields:
        a function that creates the pool of servers, their engine arguments as far as known, and a function that returns
            why they have ended, or None.
    """
    from tracegrad.rollout.client import Servers

    for name, instead in (("api_key", "Pass key (key_file)"), ("hf_token", "Set HF_TOKEN in the environment")):
        if isinstance(engine.get(name), (str, list, tuple)):
            raise ArgumentError(
                f"TG-ONLINE-035: engine.{name} would be visible in command lines and in run.json. {instead}."
            )
    # Processed logprobs include the temperature of each request, as the trainer's do.
    defaults: dict[str, Any] = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
    if rollout.top_logprobs > MAX_LOGPROBS:
        defaults["max_logprobs"] = rollout.top_logprobs
    arguments = {**defaults, **engine}
    adapters: dict[str, Any] = (
        {"versions": adapters_kept(options), "rank": rank} if options.weight_sync == "lora" else {}
    )
    if urls == IN_PROCESS or list(urls) == [IN_PROCESS]:
        with _in_process(model, arguments, adapters, python, options) as make_servers:
            yield make_servers, arguments, _no_reason
        return
    if urls:
        if engine or python:
            raise ArgumentError("TG-ONLINE-036: engine and python have no effect if you pass servers. Remove them.")
        yield (lambda: Servers(urls, model="", key=key)), {}, _no_reason
        return
    from tracegrad.rollout.launch import flags as to_flags
    from tracegrad.rollout.launch import launch
    from tracegrad.rollout.token_client import FLAG
    from tracegrad.weight_sync import vllm_arguments

    if python is None and importlib.util.find_spec("vllm") is None:
        raise ArgumentError(
            "TG-ONLINE-037: no server is set, and vLLM is not installed here to start one. Pass servers=, or pass "
            "python=, the interpreter of an environment with vLLM."
        )
    key = key or secrets.token_urlsafe(32)  # other users of this machine can reach its loopback too
    flags, environment = vllm_arguments(
        options.weight_sync, package_folder=out / "package", require_key=True, **adapters
    )
    flags += [FLAG] if rollout.input == "token_ids" else []
    out.mkdir(parents=True, exist_ok=True)
    log(f"server   starting vLLM; its log is {out / 'server.log'}")
    with launch(
        python or sys.executable,
        model,
        name=NAME,
        key=key,
        log=log,
        arguments=[*flags, *to_flags(arguments)],
        environment=environment,
        log_path=out / "server.log",
    ) as server:
        yield (lambda: Servers([server.url], model=NAME, key=key)), arguments, server.ended


def _no_reason() -> None:
    """Return None: the state of servers that were started elsewhere is unknown."""


@contextmanager
def _in_process(
    model: Path, arguments: Mapping[str, Any], adapters: Mapping[str, Any], python: str | None, options: OnlineConfig
) -> Iterator[Callable[[], Any]]:
    """Run vLLM in this process, with the interface of a pool of servers."""
    from tracegrad.rollout.in_process import Engine, InProcessServers
    from tracegrad.weight_sync import engine_arguments

    if python is not None:
        raise ArgumentError(
            f"TG-ONLINE-038: python has no effect if vLLM runs in this process, servers={IN_PROCESS!r}. Remove it."
        )
    if options.weight_sync == "nccl":
        raise ArgumentError(
            f"TG-ONLINE-039: online.weight_sync is 'nccl', and servers={IN_PROCESS!r}. NCCL cannot have two ranks on "
            f"one device. Use 'file'."
        )
    engine = Engine(model, {**engine_arguments(options.weight_sync, **adapters), **arguments})
    try:
        yield lambda: InProcessServers(engine, model=NAME)
    finally:
        engine.close()
