"""New weights reach the servers here: pushed, repaired or refused; what they answer afterwards is `online`'s to prove.

Imports no torch and no client: it is handed the servers (`rollout.server.Servers`) by who joins the two.
"""

from tracegrad.sync.arguments import engine_arguments, vllm_arguments
from tracegrad.sync.file import File
from tracegrad.sync.lora import Lora
from tracegrad.sync.nccl import Nccl
from tracegrad.sync.push import Evicted, Pushed, Sync, SyncError

__all__ = ["Evicted", "File", "Lora", "Nccl", "Pushed", "Sync", "SyncError", "engine_arguments", "vllm_arguments"]
