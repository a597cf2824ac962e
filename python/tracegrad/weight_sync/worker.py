"""Load weights on the server: the vLLM side of `file` and `nccl`.

`--worker-extension-cls tracegrad.weight_sync.worker.Worker` makes vLLM load it.

Runs in vLLM's interpreter and imports nothing of the trainer. Written against vLLM 0.32.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


class Worker:
    """Extension of vLLM's worker. It is empty: it makes vLLM import this module where the engine is created."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Initial settings of the transfer; there are none."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Path of a safetensors file, and its size in bytes if known."""

    path: str
    bytes: int | None = None


def tied_heads(model: torch.nn.Module) -> list[ParallelLMHead]:
    """Return the heads whose weight is an embedding's.

    A reload loads nothing into them, but tensors that were packed from their weight are out of date.
    """
    modules = list(model.modules())
    embeddings = [
        module
        for module in modules
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    owned = {id(getattr(embedding, "weight", None)) for embedding in embeddings}
    return [module for module in modules if isinstance(module, ParallelLMHead) and id(module.weight) in owned]


class Reloading:
    """Update steps of both engines: a failed update leaves no trace, and tied heads are packed again."""

    model: Any
    model_config: Any

    def start_weight_update(self) -> None:
        """Prepare the model's layers to load a checkpoint."""
        # Layers that are already prepared no longer show which heads are tied.
        if not hasattr(self, "heads"):
            self.heads = tied_heads(self.model)
        initialize_layerwise_reload(self.model)

    def abort_update(self) -> None:
        """Discard the tensors loaded so far and restore the old ones, so that the next update can start over."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Finish the layers, pack tied heads again, and raise ValueError if weights are missing."""
        missing = self._incomplete_layers()
        finalize_layerwise_reload(self.model, self.model_config)
        for head in self.heads:
            head.quant_method.process_weights_after_loading(head)
        if missing:
            names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise ValueError(f"the update had no or incomplete weights for {names}. Send the complete model")

    def _incomplete_layers(self) -> list[str]:
        """Return the names of layers with missing weights.

        Quantised layers load any number of values, so they are not checked. Embeddings are padded, so they may get
        fewer.
        """
        if self.model_config.quantization is not None:
            return []
        names = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            has_parameters = any(True for _ in layer.parameters(recurse=False))
            if not info.can_load() or not has_parameters or layer in self.heads or is_deferred_attention_layer(layer):
                continue
            is_padded = isinstance(layer, VocabParallelEmbedding)
            if info.load_numel <= 0 or (not is_padded and info.load_numel < (info.load_numel_total or 0)):
                names.append(name)
        return names


class FileEngine(Reloading, WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weights from a file that every worker can open."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing: there is no connection."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load one file; if that fails, the model is unchanged and accepts another update.

        Raises:
            ValueError: if the file has another size than when it was written.
        """
        try:
            size = os.path.getsize(update_info.path)
            if update_info.bytes is not None and size != update_info.bytes:
                raise ValueError(
                    f"{update_info.path} has {size} bytes here and {update_info.bytes} on the trainer's machine. A "
                    "shared disk may show new files late: wait, or use another folder"
                )
            self.model.load_weights(tensors(update_info.path))
        except BaseException:
            self.abort_update()
            raise

    def shutdown(self) -> None:
        """Do nothing: there are no resources to release."""


class NcclEngine(Reloading, NCCLWeightTransferEngine):
    """vLLM's own NCCL engine with the steps of `Reloading`."""

    def receive_weights(self, update_info: Any) -> None:
        """Receive weights as vLLM does; if that fails, the model accepts another update."""
        try:
            super().receive_weights(update_info)
        except BaseException:
            self.abort_update()
            raise


def tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            yield name, file.get_tensor(name)


for name, engine in {"tracegrad_file": FileEngine, "tracegrad_nccl": NcclEngine}.items():
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)
