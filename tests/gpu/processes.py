"""What the processes of test_gpu_processes.py run: steps on shared ranks beside the same steps of this process alone.

python processes.py OUT cuda|cpu gloo|nccl RANKS ddp|fsdp
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import forked
from rehearsal import flex_attention_on_the_cpu, fused_attention_alone
from tiny import tiny_model
from tracegrad.model.attention import enable_flex_attention
from tracegrad.objective import presets
from tracegrad.packing import Step, pack
from tracegrad.trainer import distributed
from tracegrad.trainer.distributed import CallableModel, DistributedModel, Ranks, full_tensor
from tracegrad.trainer.step import optimizer_step


def model_of() -> Any:
    model = tiny_model(4, head_dim=16, hidden_size=32)
    enable_flex_attention(model)
    return model


def steps_of(ranks: int, rank: int) -> list[Step]:
    case = forked.forked(more=24, stem=24)
    told = {
        "tokens_per_row": 256,
        "groups_per_step": 1,
        "requirements": presets.DAPO.requirements,
        "pad_to_multiple_of": 256,
    }
    return [case.ready(s) for s in pack(case.sequences, case.advantages, ranks=ranks, rank=rank, **told)]


class Kept(torch.optim.SGD):
    """SGD that keeps the whole gradient of every step."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat([full_tensor(p.grad.detach()).flatten().double().cpu() for p in parameters]))
        super().step(closure)


def trained(
    target: DistributedModel, ranks: int, rank: int
) -> tuple[list[torch.Tensor], torch.Tensor, list[float], int]:
    """Gradient of each step, the parameters after them, the norms, and the terms of this rank."""
    optimizer, steps = Kept(target.model), steps_of(ranks, rank)
    norms = [optimizer_step(target, s, presets.DAPO, optimizer, grad_clip=1.0).grad_norm for s in steps]
    after = torch.cat([full_tensor(p.detach()).flatten().double().cpu() for p in target.model.parameters()])
    return optimizer.seen, after, norms, sum(map(len, steps))


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def run(rank: int, out: str, kind: str, backend: str, ranks: int, mode: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    alone, alone_after, alone_norms, terms = trained(
        DistributedModel(m := model_of().to(device), CallableModel(m), "none", Ranks()), 1, 0
    )
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    target = wrapped(model_of(), mode, device)
    seen, after, norms, mine = trained(target, ranks, rank)
    assert ranks == 1 or 0 < mine < terms, "the ranks do not share the step"
    if rank == 0:
        told = {
            "gradient_apart": max(map(apart, seen, alone)),
            "parameters_apart": apart(after, alone_after),
            "norms": norms,
            "norms_alone": alone_norms,
            "terms": terms,
            "device": str(target.device),
        }
        (Path(out) / "found.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def wrapped(model: Any, mode: str, device: torch.device) -> DistributedModel:
    """As `prepare` wraps it; it refuses a mode on one rank, whose wrapper is what one rank over NCCL is to try."""
    ranks = Ranks.of_open_group()
    if not ranks.is_single:
        return distributed.wrap(model, mode, ranks=ranks, device=device)  # type: ignore[arg-type]
    if mode == "fsdp":
        policy = distributed._fsdp(model, ranks, device, torch.float32, distributed.SPEED)
        return DistributedModel(model, policy, "fsdp", ranks)
    within = [device.index] if device.type == "cuda" else None
    policy = torch.nn.parallel.DistributedDataParallel(CallableModel(model.to(device)), device_ids=within)
    policy.register_comm_hook(None, distributed._sum_gradients)
    return DistributedModel(model, policy, "ddp", ranks)


def main() -> None:
    out, kind, backend, ranks, mode = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = (out, kind, backend, int(ranks), mode, port)
    torch.multiprocessing.start_processes(entered, told, nprocs=int(ranks), start_method="spawn")


def entered(rank: int, *told: Any) -> None:
    """One rank; unfused attention is an error on a device, and the rehearsal compiles without kernels."""
    with fused_attention_alone() if told[1] == "cuda" else flex_attention_on_the_cpu():
        run(rank, *told)


if __name__ == "__main__":
    main()
