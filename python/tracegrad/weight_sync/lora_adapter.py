"""LoRA adapters to the servers: a name for each version, unloaded when nobody asks for it.

Nothing is paused: a request keeps the adapter that it named, and keys and values belong to that name. Called by
`online`; whole weights go by `file` or `nccl`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracegrad.errors import ArgumentError
from tracegrad.storage import files
from tracegrad.weight_sync.auth import refuse_open
from tracegrad.weight_sync.push import Pushed, Pusher, checked_version, do
from tracegrad.weight_sync.weights import write

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Lora:
    """Pushes an adapter under a name of its own, `NAME-vVERSION`, which every new request then gives as its model.

    Args:
        servers: started with the flags of `vllm_arguments("lora", versions=keep)`; `servers.model` follows the pushes.
        folder: where adapters go; servers must see it under the same path.
        config: what PEFT's adapter_config.json holds; needed where weights are given as tensors.
        name: what the names of the adapters begin with.
        keep: how many versions stay loaded at least. One that a request still names stays, and those after it.
        timeout_s: how long one request may take.
    """

    def __init__(
        self,
        servers: Servers,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        name: str = "policy",
        keep: int = 3,
        timeout_s: float = 120.0,
    ):
        if keep < 2:
            raise ArgumentError(f"keep is {keep}. Requests in flight name the adapter before. Keep at least 2.")
        self.servers, self.folder, self.config = servers, Path(folder).absolute(), config
        self.name, self.keep, self.timeout_s = name, keep, timeout_s
        self.loaded: list[tuple[str, Path]] = []
        self._pusher = Pusher(servers, self._steps, timeout_s)
        self._closed = False
        servers.admission = self._admit

    async def push(self, weights: Mapping[str, Any] | str | Path, version: int) -> Pushed:
        """Load an adapter into every server; new requests name it from then on.

        Args:
            weights: PEFT's name -> tensor; or the folder of a saved adapter.

        Raises: SyncError where no server took it; ArgumentError for an open server, or an adapter that is none.
        """
        name = f"{self.name}-v{checked_version(version)}"
        if not self._closed:
            await refuse_open(self.servers, "/v1/models")
            self._closed = True
        started = time.monotonic()
        if isinstance(weights, (str, Path)):
            path = Path(weights).absolute()
            if not (path / CONFIG).is_file():
                raise ArgumentError(
                    f"{path} holds no {CONFIG}. Servers would refuse it. Name the folder of an adapter."
                )
        else:
            path = self.folder / name
            await asyncio.to_thread(self._write, path, weights, version)
        self.loaded = [*(each for each in self.loaded if each[0] != name), (name, path)]
        pushed = await self._pusher.push(version, time.monotonic() - started)
        await self._forget()
        self.servers.model = name  # last, so that who counts versions sees name and version change together
        return pushed

    def _write(self, path: Path, weights: Mapping[str, Any], version: int) -> None:
        """The adapter's folder, whole or not at all."""
        if self.config is None:
            raise ArgumentError("Tensors of an adapter are nothing without its rank. Pass Lora PEFT's `config`.")
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            files.make_folder(beside)
            write(beside / WEIGHTS, weights, version)
            files.write(beside / CONFIG, json.dumps(dict(self.config), default=_plain))
            if path.exists():
                shutil.rmtree(path)
            os.replace(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    async def _steps(self, url: str, repeat: bool) -> float:
        """Load the newest adapter into one server; nothing is paused, so it takes no time from requests."""
        name, path = self.loaded[-1]
        if repeat:  # it may have been loaded by an answer that was lost
            await self._unload(url, name)
        await do(self.servers, url, "/v1/load_lora_adapter", _told(name, path), self.timeout_s)
        return 0.0

    async def _unload(self, url: str, name: str) -> None:
        await self.servers.ask(url, "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=self.timeout_s)

    async def _forget(self) -> None:
        """Unload all but the newest adapters and those still asked for, and remove the folders written for them."""
        asked = [index for index, (name, _) in enumerate(self.loaded) if name in self.servers.in_use]
        first = min([max(len(self.loaded) - self.keep, 0), *asked])
        old, self.loaded = self.loaded[:first], self.loaded[first:]
        await asyncio.gather(*(self._unload(url, name) for url in self.servers.urls for name, _ in old))
        for _, path in old:
            if path.parent == self.folder:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def _admit(self, url: str) -> bool:
        """Whether a server that is back has the newest adapter, now at the latest, and those still asked for."""
        for name, path in self.loaded[:-1]:
            await self.servers.ask(url, "/v1/load_lora_adapter", _told(name, path), timeout_s=self.timeout_s)
        return not self.loaded or await self._pusher.admit(url)


def _told(name: str, path: Path) -> dict[str, str]:
    return {"lora_name": name, "lora_path": str(path)}


def _plain(value: Any) -> Any:
    """PEFT's enums and sets as JSON has them."""
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
