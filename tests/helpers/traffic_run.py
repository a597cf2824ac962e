"""What ranks say to one another and hold, beside what is forecast: run by test_traffic.py as a script that forks them.

`python traffic_run.py OUT` writes one JSON list; each entry is a run: its forecast, and what was counted of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
sys.path.insert(0, str(Path(__file__).parent))
from forecast import traces_of

from clock import Allocated
from ranks import code_of, forked, joined
from tracegrad import config
from tracegrad.objective import presets, with_kl
from tracegrad.packing import ModelShape
from tracegrad.trainer import train
from tracegrad.trainer import trainer as run_module
from tracegrad.trainer.resource_estimate import estimate_resources
from tracegrad.trainer.steps import TrainingData

VOCABULARY, UNIT = 4096, 16
OBJECTIVE = with_kl(presets.DAPO, 0.05)
RUNS = [(1, "none", memory, 0) for memory in ("speed", "balanced", "low")]
RUNS += [(ranks, "fsdp", memory, 0) for ranks in (2, 4) for memory in ("speed", "balanced", "low")]
RUNS += [(2, "ddp", "speed", 0), (4, "ddp", "speed", 0)]
RUNS += [(2, "ddp", "speed", 4), (2, "fsdp", "speed", 4), (4, "fsdp", "low", 4)]
"""Ranks, parallel.mode, train.memory_mode, train.lora_rank."""


def model_of() -> Any:
    """Shapes that do not divide by four, and a gradient of several of DDP's buckets."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 66, "intermediate_size": 90, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False))


class Said(TorchDispatchMode):
    """Counts collective calls of this thread, and the bytes of the largest tensor of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("c10d::"):
            sizes = [t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.calls.setdefault(func.name().removeprefix("c10d::").strip("_"), []).append(max(sizes, default=0))
        return func(*args, **(kwargs or {}))


def counted(name: str, into: list[Any], batches: int) -> None:
    """Has a function of the run counted, each call with its rows."""
    real = getattr(run_module, name)

    def call(*given: Any, **how: Any) -> Any:
        with Said() as said:
            out = real(*given, **how)
        rows = given[batches]
        into.append({"rows": len(getattr(rows, "batches", rows)), **said.calls})
        return out

    setattr(run_module, name, call)


def rank_main(port: int, ranks: int, rank: int, out: Path, mode: str, memory: str, adapters: int) -> None:
    if ranks > 1:
        joined(port, ranks, rank)
    changes = {
        "train.memory_mode": memory,
        "train.groups_per_step": 2,
        "pack.tokens_per_row": 8 * UNIT,
        "data.holdout": 0,
    }
    changes |= {"parallel.mode": mode, "train.lora_rank": adapters, "train.device": "cpu"}
    told = config.load(overrides=[*changes.items()])
    traces, model = traces_of(VOCABULARY, UNIT), model_of()
    steps: list[Any] = []
    measured: list[Any] = []
    counted("optimizer_step", steps, 1)
    counted("measure", measured, 1)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    given = {"objective": OBJECTIVE, "config": told, "sinks": (), "log": lambda _: None}
    with Allocated() as held:
        train(traces, model, out=out / f"{ranks} {mode} {memory} {adapters}", **given)
    if rank == 0:
        feed = TrainingData.of(traces, OBJECTIVE, told, ranks=ranks, shape=ModelShape.try_of(model.config))
        said = estimate_resources(out / "model", told, feed, ranks).as_dict()
        found = {"steps": steps, "measured": measured, "peak": held.peak, "parameters": parameters}
        case = {"ranks": ranks, "mode": mode, "memory": memory, "adapters": adapters}
        with (out / "found.jsonl").open("a") as file:
            file.write(json.dumps({**case, "forecast": said, **found}) + "\n")
    if ranks > 1:
        dist.destroy_process_group()


def main(out: Path) -> int:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (once, before the fork)

    torch.set_num_threads(1)
    model_of().save_pretrained(out / "model")
    for ranks, *case in RUNS:
        if code := code_of(forked(ranks, rank_main, out, *case)):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
