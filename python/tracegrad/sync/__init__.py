"""New weights reach the servers here: pushed, repaired or refused; what they answer afterwards is `online`'s to prove.

In come trained parameters and the servers (`rollout.server.Servers`, handed in by who joins the two); out go servers
of a new version, or which were left out and why. What they answer afterwards is `online`'s to prove. Imports no torch
and no client. Its files, each using those before it alone: `arguments`, `worker` (what vLLM loads); `push` (what all
ways share), `guard`, `weights`; `file`, `lora`, `nccl` (three ways); `canary`.
"""

from tracegrad.sync.arguments import engine_arguments, vllm_arguments
from tracegrad.sync.file import File
from tracegrad.sync.lora import Lora
from tracegrad.sync.nccl import Nccl
from tracegrad.sync.push import Evicted, Pushed, Sync, SyncError

__all__ = ["Evicted", "File", "Lora", "Nccl", "Pushed", "Sync", "SyncError", "engine_arguments", "vllm_arguments"]
