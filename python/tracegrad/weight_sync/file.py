"""Sync all weights by a file, with vLLM's own weight-update protocol: pause, start, update, finish, resume.

The server side is `worker`. Works on CPU and GPU. Servers must see the folder under the same path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracegrad.errors import ArgumentError
from tracegrad.weight_sync.auth import check_protected
from tracegrad.weight_sync.push import SyncResult, SyncRunner, check_version, send_control_request
from tracegrad.weight_sync.weights import remove_old, write

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers


class File:
    """Weight sync with one safetensors file of all weights.

    A push pauses the server (`mode=keep`), empties its caches, loads the file and resumes: requests in flight survive
    and continue with the new weights. If an update fails, the server stays paused, because a server with half of the
    weights would crash at the next request. The update is sent once more; if it fails again, the server is evicted. A
    restarted server gets the weights before it gets requests.

    Args:
        servers: started with the flags of `vllm_arguments("file")`.
        folder: folder of the files. A folder in memory (/dev/shm) is fastest.
        timeout_s: time limit of each request of a weight sync.
        keep: number of files to keep.
        clear_cache: False keeps keys and values of the old weights in the cache, where requests would use them. Only
            for runs in which every request has the version as its `cache_salt`.

    ```python
    from tracegrad.rollout.client import Servers
    from tracegrad.weight_sync import File


    async def send(model, version):
        async with Servers(["http://127.0.0.1:8000"], model="policy") as servers:
            sync = File(servers, "/dev/shm/weights")
            result = await sync.push(model.state_dict(), version)
            print(result.updated, result.seconds)
    ```
    """

    def __init__(
        self, servers: Servers, folder: str | Path, *, timeout_s: float = 300.0, keep: int = 2, clear_cache: bool = True
    ):
        if keep < 1:
            raise ArgumentError(
                f"TG-SYNC-004: keep is {keep}. It must be at least 1: a restarted server needs the newest file."
            )
        self.servers = servers
        self.folder = Path(folder).absolute()
        self.timeout_s, self.keep = timeout_s, keep
        self.pause = "/pause?mode=keep" + ("" if clear_cache else "&clear_cache=false")
        self._newest: tuple[Path, int] | None = None
        self._written: list[Path] = []
        self._ready: set[str] = set()
        self._pusher = SyncRunner(servers, self._steps, timeout_s)
        self._is_protected = False
        servers.admission = self._admit

    async def push(self, weights: Mapping[str, Any] | str | Path, version: int) -> SyncResult:
        """Send weights to every server.

        Args:
            weights: name -> complete tensor, with the names of the checkpoint; or a safetensors file with them.
            version: version that servers report for tokens sampled with these weights.

        Raises:
            SyncError: if no server loaded them.
            ArgumentError: for an unprotected server, or invalid weights.
        """
        check_version(version)
        if not self._is_protected:
            await check_protected(self.servers, "/is_paused")
            self._is_protected = True
        started = time.monotonic()
        if isinstance(weights, (str, Path)):
            path = Path(weights).absolute()
            if not path.is_file():
                raise ArgumentError(
                    f"TG-SYNC-005: {path} is not a file, so the servers would keep their old weights. Pass a "
                    f"safetensors file."
                )
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"weights-{version:08d}.safetensors"
            await asyncio.to_thread(write, path, weights, version)
            self._written = [*(old for old in self._written if old != path), path]
        self._newest = path, version
        pushed = await self._pusher.push(version, time.monotonic() - started)
        self._written = remove_old(self._written, self.keep)
        return pushed

    async def _steps(self, url: str, repeat: bool) -> float:
        """Send the requests of one weight sync to one server; return the seconds from pause to resume."""
        assert self._newest is not None
        path, version = self._newest  # a later push may replace `_newest`
        if repeat or url not in self._ready:
            await self._do(url, "/init_weight_transfer_engine", {"init_info": {}})
            self._ready.add(url)
        started = time.monotonic()
        await self._do(url, self.pause, None)
        if repeat:
            # First close an update that was left open by a timeout or a killed trainer; there may be none.
            await self.servers.request(url, "/finish_weight_update", {}, timeout_s=self.timeout_s)
        await self._do(url, "/start_weight_update", None)
        update = {"path": str(path), "bytes": path.stat().st_size}
        await self._do(url, "/update_weights", {"update_info": update})
        await self._do(url, "/finish_weight_update", {"weight_version": str(version)})
        await self._do(url, "/resume", None)
        return time.monotonic() - started

    async def _do(self, url: str, path: str, body: Mapping[str, Any] | None) -> None:
        await send_control_request(self.servers, url, path, body, self.timeout_s)

    async def _admit(self, url: str) -> bool:
        """Return whether a server has the newest weights after an outage; send them if it has not."""
        if self._newest is None:
            return True
        version = str(self._newest[1])
        info = await self.servers.request(url, "/weight_info", timeout_s=self.timeout_s, method="GET")
        if info.ok and isinstance(info.body, dict) and info.body.get("weight_version") == version:
            return (await self.servers.request(url, "/resume", timeout_s=self.timeout_s)).ok
        self._ready.discard(url)
        return await self._pusher.admit(url)
