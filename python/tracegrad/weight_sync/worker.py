"""Load weights on the server: vLLM's half of `file` and `nccl`.

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
    """The extension of vLLM's worker. Empty: what counts is that this module is imported where the engine is made."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing is agreed upon before the first update."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """A safetensors file, and how long it is where that is known."""

    path: str
    bytes: int | None = None


def tied_heads(model: torch.nn.Module) -> list[ParallelLMHead]:
    """Heads whose weight is an embedding's. A reload loads nothing into them, but what was packed from them is old."""
    modules = list(model.modules())
    embeddings = [m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    owned = {id(getattr(embedding, "weight", None)) for embedding in embeddings}
    return [m for m in modules if isinstance(m, ParallelLMHead) and id(m.weight) in owned]


class Reloading:
    """What both engines do around an update: what failed leaves nothing behind, and tied heads are packed again."""

    model: Any
    model_config: Any

    def start_weight_update(self) -> None:
        """Put the model's layers into the state that takes a checkpoint."""
        if not hasattr(self, "heads"):  # later the layers may be in that state already, where nothing is tied
            self.heads = tied_heads(self.model)
        initialize_layerwise_reload(self.model)

    def give_up(self) -> None:
        """Forget what was taken so far and put the old tensors back, so that the next update starts anew."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Finish the layers, pack tied heads again, and raise where the weights were not all there."""
        lacking = self._lacking()
        finalize_layerwise_reload(self.model, self.model_config)
        for head in self.heads:
            head.quant_method.process_weights_after_loading(head)
        if lacking:
            shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
            raise ValueError(f"the update held nothing, or only a part, for {shown}. Push the whole model")

    def _lacking(self) -> list[str]:
        """Layers for which something is missing. Quantised ones load what they like, embeddings are padded."""
        if self.model_config.quantization is not None:
            return []
        found = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            own = any(True for _ in layer.parameters(recurse=False))
            if not info.can_load() or not own or layer in self.heads or is_deferred_attention_layer(layer):
                continue
            padded = isinstance(layer, VocabParallelEmbedding)
            if info.load_numel <= 0 or (not padded and info.load_numel < (info.load_numel_total or 0)):
                found.append(name)
        return found


class FileEngine(Reloading, WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weights from a file that every worker can open."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to connect to."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load one file; the model is as before, and takes another update, where that fails."""
        try:
            size = os.path.getsize(update_info.path)
            if update_info.bytes is not None and size != update_info.bytes:
                raise ValueError(
                    f"{update_info.path} holds {size} bytes here and {update_info.bytes} where it was written. "
                    "A disk that is shared late shows old files: wait, or push by another folder"
                )
            self.model.load_weights(tensors(update_info.path))
        except BaseException:
            self.give_up()
            raise

    def shutdown(self) -> None:
        """Nothing is held."""


class NcclEngine(Reloading, NCCLWeightTransferEngine):
    """vLLM's own NCCL engine, and what `Reloading` adds."""

    def receive_weights(self, update_info: Any) -> None:
        """As vLLM's; the model takes another update where that fails."""
        try:
            super().receive_weights(update_info)
        except BaseException:
            self.give_up()
            raise


def tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            yield name, file.get_tensor(name)


for name, engine in {"tracegrad_file": FileEngine, "tracegrad_nccl": NcclEngine}.items():
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)
