"""Sync LoRA adapters: each version gets its own name and is unloaded once no request uses it.

Servers are not paused. A request keeps the adapter that it named, and cached keys and values belong to that name.
`file` and `nccl` sync all weights.
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
from tracegrad.weight_sync.auth import check_protected
from tracegrad.weight_sync.push import SyncResult, SyncRunner, check_version, send_control_request
from tracegrad.weight_sync.weights import write

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Lora:
    """Weight sync with an adapter under a new name, `NAME-vVERSION`, which every new request then uses as its model.

    Args:
        servers: started with the flags of `vllm_arguments("lora", versions=keep)`; each sync updates `servers.model`.
        folder: folder of the adapters; servers must see it under the same path.
        config: contents of PEFT's adapter_config.json; required if weights are passed as tensors.
        name: prefix of the adapter names.
        keep: minimum number of versions that stay loaded. A version that a request still uses stays loaded, and all
            later ones.
        timeout_s: time limit of each request.

    ```python
    from tracegrad.rollout.client import Servers
    from tracegrad.weight_sync import Lora


    async def send(adapter_folder, version):
        async with Servers(["http://127.0.0.1:8000"], model="policy") as servers:
            sync = Lora(servers, "/dev/shm/adapters")
            result = await sync.push(adapter_folder, version)
            print(result.updated, servers.model)  # requests now use the adapter "policy-v<version>"
    ```
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
            raise ArgumentError(
                f"TG-SYNC-006: keep is {keep}. It must be at least 2: requests in flight use the previous adapter."
            )
        self.servers, self.folder, self.config = servers, Path(folder).absolute(), config
        self.name, self.keep, self.timeout_s = name, keep, timeout_s
        self.loaded: list[tuple[str, Path]] = []
        self._pusher = SyncRunner(servers, self._steps, timeout_s)
        self._is_protected = False
        servers.admission = self._admit

    async def push(self, weights: Mapping[str, Any] | str | Path, version: int) -> SyncResult:
        """Load an adapter into every server; new requests then use it.

        Args:
            weights: PEFT's name -> tensor; or the folder of a saved adapter.
            version: policy version of the adapter.

        Raises:
            SyncError: if no server loaded it.
            ArgumentError: for an unprotected server, or an invalid adapter.
        """
        name = f"{self.name}-v{check_version(version)}"
        if not self._is_protected:
            await check_protected(self.servers, "/v1/models")
            self._is_protected = True
        started = time.monotonic()
        if isinstance(weights, (str, Path)):
            path = Path(weights).absolute()
            if not (path / CONFIG).is_file():
                raise ArgumentError(
                    f"TG-SYNC-007: {path} has no {CONFIG}, so servers would reject it. Pass the folder of an adapter."
                )
        else:
            path = self.folder / name
            await asyncio.to_thread(self._write, path, weights, version)
        self.loaded = [*(adapter for adapter in self.loaded if adapter[0] != name), (name, path)]
        pushed = await self._pusher.push(version, time.monotonic() - started)
        await self._forget()
        self.servers.model = name  # last, so that readers of name and version see both change together
        return pushed

    def _write(self, path: Path, weights: Mapping[str, Any], version: int) -> None:
        """Write the folder of an adapter, completely or not at all."""
        if self.config is None:
            raise ArgumentError(
                "TG-SYNC-008: servers cannot load an adapter without its rank. Pass PEFT's `config` to Lora."
            )
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            files.make_folder(temporary)
            write(temporary / WEIGHTS, weights, version)
            files.write(temporary / CONFIG, json.dumps(dict(self.config), default=_to_json))
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    async def _steps(self, url: str, repeat: bool) -> float:
        """Load the newest adapter into one server. Return 0.0 seconds, since nothing is paused."""
        name, path = self.loaded[-1]
        if repeat:  # it may be loaded already if only the answer was lost
            await self._unload(url, name)
        await send_control_request(
            self.servers, url, "/v1/load_lora_adapter", _load_request(name, path), self.timeout_s
        )
        return 0.0

    async def _unload(self, url: str, name: str) -> None:
        await self.servers.request(url, "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=self.timeout_s)

    async def _forget(self) -> None:
        """Unload all adapters except the newest and those in use, and delete the folders written for them."""
        in_use = [index for index, (name, _) in enumerate(self.loaded) if name in self.servers.in_use]
        first = min([max(len(self.loaded) - self.keep, 0), *in_use])
        old, self.loaded = self.loaded[:first], self.loaded[first:]
        await asyncio.gather(*(self._unload(url, name) for url in self.servers.urls for name, _ in old))
        for _, path in old:
            if path.parent == self.folder:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def _admit(self, url: str) -> bool:
        """Return whether a server that is back has the newest adapter; load it, and those in use, if it has not."""
        for name, path in self.loaded[:-1]:
            await self.servers.request(
                url, "/v1/load_lora_adapter", _load_request(name, path), timeout_s=self.timeout_s
            )
        return not self.loaded or await self._pusher.admit(url)


def _load_request(name: str, path: Path) -> dict[str, str]:
    return {"lora_name": name, "lora_path": str(path)}


def _to_json(value: Any) -> Any:
    """Convert PEFT's enums and sets to JSON values."""
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
