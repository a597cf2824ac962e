"""Check that the optional packages of a command are installed, before it reads any input.

The base install has numpy alone. `EXTRAS` lists what each extra of pyproject.toml adds, and `_requirements` names the
extras that a command needs because of its verb, flags, options and inputs.
"""

import argparse
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tracegrad import prepare
from tracegrad.config.dotted_keys import split_list
from tracegrad.data import stream
from tracegrad.data.sources import expand, suffix
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.images import Images
from tracegrad.online.options import IN_PROCESS
from tracegrad.storage.remote import is_address

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("torch", "transformers", "safetensors", "tqdm"),
    "online": ("aiohttp", "starlette", "uvicorn", "h11", "zstandard", "orjson"),
    "view": ("starlette", "uvicorn"),
    "receive": ("opentelemetry.proto", "google.rpc", "uvicorn", "h11"),
    "phoenix": ("phoenix.client",),
    "mlflow": ("mlflow",),
    "lora": ("peft",),
    "images": ("PIL", "torchvision"),
    "arrow": ("pyarrow",),
    "cloud": ("fsspec",),
    "ray": ("ray", "pyarrow"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
"""Packages by the extra that installs them, by the names under which they are imported. `online` and `lora` also
install `train`."""
VERB_EXTRAS = {
    "train": ("train",),
    "fill": ("train",),
    "merge": ("train", "lora"),
    "online": ("train", "online"),
    "replay": ("train", "online"),
    "record": ("online",),
    "proxy": ("online",),
    "receive": ("receive",),
    "view": ("view",),
}
"""Extras that a verb always needs."""
_FILE_SYSTEMS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}
_PROJECTS = {"yaml": "pyyaml"}
_ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
_INSPECTED_TRACES = 64  # A trace after these may also contain the first image, which is then reported while reading.


@dataclass(frozen=True)
class Requirement:
    """Packages that a command needs.

    Args:
        subject: the verb, flag, option or input that needs them.
        extra: the extra that installs them; empty for a package without one.
        packages: the names under which they are imported.
    """

    subject: str
    extra: str
    packages: tuple[str, ...]

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if not is_installed(name)]

    def check(self) -> None:
        """Raise if a package is missing.

        Raises:
            ArgumentError: if so, with the command that installs it.
        """
        if names := self.missing():
            install = (
                f"'tracegrad[{self.extra}]'" if self.extra else " ".join(_PROJECTS.get(name, name) for name in names)
            )
            listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            raise ArgumentError(
                f"TG-CLI-011: {self.subject} needs {listed}, which {'is' if len(names) == 1 else 'are'} not "
                f"installed. No input was read. Run pip install {install}."
            )


def check(options: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Raise if a package that a command needs is not installed. No input is read for it.

    Args:
        options: the parsed flags.
        values: options by dotted name, as given on the command line, or all of a run.

    Raises:
        ArgumentError: with the missing packages and the command that installs them.
    """
    for requirement in _requirements(options, values):
        requirement.check()


def check_images(names: list[str], model: Path) -> None:
    """Raise if training on images lacks a package: the model has a vision encoder, and a trace has an image.

    The first traces are read, and only if such a package is missing.

    Raises:
        ArgumentError: as for `check`.
    """
    requirement = Requirement("training on images", "images", EXTRAS["images"])
    if "-" in names or not requirement.missing() or not _has_vision_encoder(model):
        return
    try:
        if any(map(prepare.is_prepared, names)):
            local = [Path(name) for name in names if not is_address(name)]
            if not any(next(folder.rglob("media.bin"), None) for folder in local):  # the images of a prepared folder
                return
        else:
            batches = islice(stream(names, limit=_INSPECTED_TRACES, on_error="skip"), _INSPECTED_TRACES)
            if not any(len(Images.of_records(traces.core)) for traces in batches):
                return
    except TracegradError:  # Training reports it.
        return
    requirement.check()


def is_installed(name: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _requirements(options: argparse.Namespace, values: Mapping[str, Any]) -> Iterator[Requirement]:
    """Yield what a command needs."""
    verb = options.parser.prog.rpartition(" ")[2]
    does_not_train = verb == "train" and (options.print_config or options.dry_run)
    extras = VERB_EXTRAS.get(verb, ())
    if verb == "online" and options.collect is not None:
        extras = ("online",)
    if verb == "view" and options.export is not None:
        extras = ()
    if verb == "pull":
        extras = (options.store,)
    if extras and not does_not_train:
        packages = dict.fromkeys(name for extra in extras for name in EXTRAS[extra])
        yield Requirement(verb, extras[-1], tuple(packages))
    if verb == "train" and options.print_config:
        return
    yield from _flag_requirements(options)
    if not does_not_train:
        yield from _option_requirements(values)
    if "servers" in values and not options.dry_run:
        servers = list(values["servers"])
        if servers == [IN_PROCESS] or not (servers or values.get("python")):
            yield Requirement('servers = ["in-process"]' if servers else "a run without --server", "", ("vllm",))
    names = [*(getattr(options, "traces", None) or ()), *(getattr(options, "paths", None) or ())]
    names += getattr(options, "held_out", None) or []
    out = getattr(options, "out", None)
    addresses = [name for name in (*names, getattr(out, "address", None) or out) if is_address(str(name or ""))]
    for address in map(str, addresses):
        scheme = address.partition(":")[0]
        package = _FILE_SYSTEMS.get(scheme)
        yield Requirement(f"{scheme}://", "cloud", (*EXTRAS["cloud"], *filter(None, [package])))
    yield from _input_requirements(names)


def _flag_requirements(options: argparse.Namespace) -> Iterator[Requirement]:
    """Yield what flags need, other than those that set options."""
    if getattr(options, "check_logprobs", 0):
        yield Requirement("--check-logprobs", "train", EXTRAS["train"])
    if getattr(options, "ray", None) is not None:
        yield Requirement("--ray", "ray", EXTRAS["ray"])
    if getattr(options, "judge", None):
        yield Requirement("--judge", "online", ("aiohttp", "orjson"))
    peer_config = str(getattr(options, "from_config", None) or "")
    if peer_config.lower().endswith((".yaml", ".yml")):
        yield Requirement(f"--from-config {peer_config}", "", ("yaml",))


def _option_requirements(values: Mapping[str, Any]) -> Iterator[Requirement]:
    """Yield what options of training need."""
    dashboards = values.get("train.report_to") or ()
    for name in split_list(dashboards) if isinstance(dashboards, str) else dashboards:
        if name in EXTRAS:
            yield Requirement(f"train.report_to {name}", name, EXTRAS[name])
    if str(values.get("train.lora_rank", "0")) not in ("0", "none"):
        yield Requirement("train.lora_rank", "lora", EXTRAS["lora"])


def _input_requirements(names: Iterable[str]) -> Iterator[Requirement]:
    """Yield pyarrow for inputs in Parquet or Arrow. Files are looked at only if it is missing."""
    if is_installed("pyarrow"):
        return
    for name in names:
        if table := name if suffix(name) in _ARROW_SUFFIXES else _first_table(name):
            yield Requirement(table, "arrow", EXTRAS["arrow"])


def _first_table(name: str) -> str | None:
    """Return the first Parquet or Arrow file that an input names, or None."""
    try:
        if name == "-" or is_address(name) or prepare.is_prepared(name):
            return None
        return next((place.path for place in expand([name]) if place.kind in ("parquet", "arrow", "saved")), None)
    except TracegradError:  # The verb reports it.
        return None


def _has_vision_encoder(model: Path) -> bool:
    try:
        return "vision_config" in json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
