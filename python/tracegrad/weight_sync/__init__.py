"""Send new weights to vLLM servers: by a file, by NCCL, or as a LoRA adapter. Failures are retried or reported.

`online.weight_check` checks whether a server then samples from them. Imports neither torch nor an HTTP client.
"""

from tracegrad.weight_sync.file import File
from tracegrad.weight_sync.lora_adapter import Lora
from tracegrad.weight_sync.nccl import Nccl
from tracegrad.weight_sync.push import Eviction, Sync, SyncError, SyncResult
from tracegrad.weight_sync.vllm_args import engine_arguments, vllm_arguments

__all__ = ["Eviction", "File", "Lora", "Nccl", "Sync", "SyncError", "SyncResult", "engine_arguments", "vllm_arguments"]
