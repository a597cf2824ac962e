"""Sync all weights from GPU to GPUs, with vLLM's own NCCL engine on both sides.

Written against the classes of vLLM 0.32 and not run on a GPU yet: the handshake is tested against them, the broadcast
is vLLM's. The trainer's interpreter must have vLLM. Servers need the flags of `vllm_arguments("nccl")`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracegrad.errors import ArgumentError
from tracegrad.weight_sync.auth import check_protected
from tracegrad.weight_sync.push import (
    Eviction,
    RequestRefused,
    SyncError,
    SyncResult,
    check_version,
    send_control_request,
)
from tracegrad.weight_sync.weights import deduplicate

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers


@dataclass(frozen=True)
class Meta:
    """A tensor as vLLM's engine announces it."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class Source:
    """Weights of the current sync, in the form that vLLM's engine reads: first metadata, then one tensor at a time."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}

    def metadata(self) -> list[Meta]:
        """Return name, dtype and shape of the tensors, in the order of iteration."""
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.weights.items())


class Client:
    """Client that vLLM's engine uses from its own threads; each request is sent to all servers.

    `worlds` is the number of ranks of each server; the ranks of a server follow those of the previous one.
    """

    def __init__(self, servers: Servers, loop: asyncio.AbstractEventLoop, worlds: Mapping[str, int], timeout_s: float):
        self.servers, self.loop, self.worlds, self.timeout_s = servers, loop, worlds, timeout_s
        self.version = ""
        self.refused: dict[str, RequestRefused] = {}

    def _all(self, path: str, body: Callable[[str], Mapping[str, Any] | None]) -> None:
        async def send(url: str) -> None:
            try:
                await send_control_request(self.servers, url, path, body(url), self.timeout_s)
            except RequestRefused as error:
                self.refused[url] = error
                raise

        async def send_all() -> None:
            # Wait for all answers, so that every server that refused is known.
            for error in await asyncio.gather(*map(send, self.worlds), return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error

        coroutine: Coroutine[Any, Any, None] = send_all()
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell each server how to join the group, and its ranks."""
        offsets, offset = {}, int(init_info["rank_offset"])
        for url, world in self.worlds.items():
            offsets[url] = offset
            offset += world
        self._all("/init_weight_transfer_engine", lambda url: {"init_info": {**init_info, "rank_offset": offsets[url]}})

    def start_weight_update(self) -> None:
        """Prepare the models for new weights."""
        self._all("/start_weight_update", lambda url: None)

    def update_weights(self, update_info: Any) -> None:
        """Announce the broadcast; servers answer once they have the weights."""
        self._all("/update_weights", lambda url: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update and set the version, which vLLM's engine does not pass on."""
        self._all("/finish_weight_update", lambda url: {"weight_version": weight_version or self.version})


class Nccl:
    """Weight sync by NCCL; the calling process is rank 0 of a group with all ranks of all servers.

    One failing server breaks the group for all. A failed sync therefore evicts the servers that refused, creates a
    new group of the others, and is sent once more to them. All of them stay paused until then.

    Args:
        servers: servers, each with its own GPU.
        address, port: address of the group: one of this machine that every server can reach.
        timeout_s: time limit of each request, and of a complete broadcast.
        packed: option of vLLM's NCCL engine.

    ```python
    from tracegrad.rollout.client import Servers
    from tracegrad.weight_sync import Nccl


    async def send(model, version):
        async with Servers(["http://10.0.0.4:8000"], model="policy") as servers:
            sync = Nccl(servers, address="10.0.0.3", port=29577)
            result = await sync.push(model.state_dict(), version)  # tensors on this machine's GPU
            print(result.updated, result.seconds)
    ```
    """

    def __init__(
        self,
        servers: Servers,
        *,
        address: str = "127.0.0.1",
        port: int = 29_577,
        timeout_s: float = 300.0,
        packed: bool = True,
    ):
        self.servers, self.address, self.port, self.timeout_s, self.packed = servers, address, port, timeout_s, packed
        self.source = Source()
        self.client: Client | None = None
        self.engine: Any = None
        self._groups = 0

    async def push(self, weights: Mapping[str, Any] | str | Path, version: int) -> SyncResult:
        """Broadcast weights to every server; as `File.push`, but only for tensors on this process's device."""
        check_version(version)
        if isinstance(weights, (str, Path)):
            raise ArgumentError(
                f"TG-SYNC-009: {weights} is a path; NCCL sends tensors. Pass the model's weights, or use "
                f"weight_sync.File."
            )
        if self._groups == 0:
            await check_protected(self.servers, "/is_paused")
        self.source.weights = deduplicate(weights)
        if cpu_tensor_name := next((name for name, tensor in self.source.weights.items() if not tensor.is_cuda), None):
            raise ArgumentError(
                f"TG-SYNC-010: {cpu_tensor_name} is not on a GPU, but NCCL sends only from GPUs. Use weight_sync.File "
                f"instead."
            )
        started = time.monotonic()
        evicted: list[Eviction] = []
        error = await self._once(version, evicted)
        repeated = int(error is not None)
        if error is not None and self.servers.urls:
            error = await self._once(version, evicted)
        if error is not None:
            raise SyncError(
                f"TG-SYNC-011: version {version} reached no server by NCCL: {type(error).__name__}: {error}. The "
                "servers stay paused. Read their logs, restart them and resume the run."
            ) from error
        seconds = time.monotonic() - started
        return SyncResult(version, seconds, 0.0, tuple(self.servers.urls), tuple(evicted), repeated=repeated)

    async def _once(self, version: int, evicted: list[Eviction]) -> Exception | None:
        """Send to all servers once. On failure, evict the servers that refused, end the group and return the error."""
        try:
            await self._send(str(version))
        except Exception as error:
            evicted += self._evict(version)
            await self._end_group()
            return error
        return None

    async def _send(self, version: str) -> None:
        urls = list(self.servers.urls)
        await asyncio.gather(
            *(send_control_request(self.servers, url, "/pause?mode=keep", None, self.timeout_s) for url in urls)
        )
        if self.engine is None:
            self.engine = await self._join(urls)
        if self.client is not None:
            self.client.version = version
        # If a rank never joins, vLLM's thread stays blocked in NCCL; it is abandoned after the timeout.
        await asyncio.wait_for(asyncio.to_thread(self.engine.send_weights), self.timeout_s)
        await asyncio.gather(
            *(send_control_request(self.servers, url, "/resume", None, self.timeout_s) for url in urls)
        )

    async def _join(self, urls: list[str]) -> Any:
        """Return vLLM's engine in a group of this process and all workers."""
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise ArgumentError(
                "TG-SYNC-012: weight_sync.Nccl needs vLLM in the trainer's environment. Install vllm here, or use "
                "weight_sync.File."
            ) from error
        worlds = {}
        for url in urls:
            answer = await self.servers.request(url, "/get_world_size", method="GET", timeout_s=self.timeout_s)
            if not answer.ok:
                raise RequestRefused("/get_world_size", answer)
            worlds[url] = int(answer.body["world_size"])
        self.client = Client(self.servers, asyncio.get_running_loop(), worlds, self.timeout_s)
        info = NCCLTrainerInitInfo(
            master_address=self.address,
            # A broken group may still occupy its port.
            master_port=self.port + self._groups,
            world_size=1 + sum(worlds.values()),
            packed=self.packed,
            rank=0,
        )
        self._groups += 1
        join = asyncio.to_thread(
            WeightTransferTrainerFactory.trainer_init, info, client=self.client, source=self.source
        )
        return await asyncio.wait_for(join, self.timeout_s)

    def _evict(self, version: int) -> list[Eviction]:
        refused = {} if self.client is None else self.client.refused
        evictions = [
            Eviction(url, f"version {version} did not reach it by NCCL: {error}") for url, error in refused.items()
        ]
        for eviction in evictions:
            self.servers.evict(eviction.url, eviction.why)
        return evictions

    async def _end_group(self) -> None:
        """Leave the group; the remaining servers leave it too and close their open update."""
        engine, self.engine = self.engine, None
        if engine is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.to_thread(engine.shutdown), 10.0)
        for url in self.servers.urls:
            for path in ("/finish_weight_update", "/shutdown_weight_transfer_engine"):
                await self.servers.request(url, path, timeout_s=self.timeout_s)
