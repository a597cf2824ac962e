"""Two processes that drive one `Trainer`, and what they find: run by test_run_ranks.py as a script, which forks them.

`python ranks_run.py OUT` writes one JSON object; each entry is a case by name and what was measured of it.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from ranks import forked, joined, told
from tiny import sampled, tiny_model
from tracegrad import advantage
from tracegrad.alignment.sequences import Sequences
from tracegrad.objective import presets, with_kl
from tracegrad.packing import Step, pack
from tracegrad.trainer import Trainer
from tracegrad.trainer.distributed import Ranks, full_tensor

OBJECTIVE = with_kl(presets.DAPO, 0.05)
MODES = {"fsdp": {"parallel__mode": "fsdp"}, "ddp": {"parallel__mode": "ddp"}}


def traces() -> Sequences:
    """All sampled by version 3."""
    found = sampled(tiny_model())
    return replace(found, version=np.where(found.trainable, 3, -1).astype(np.int32))


def steps(found: Sequences, ranks: Ranks) -> list[Step]:
    given = {
        "tokens_per_row": 64,
        "groups_per_step": 6,
        "requirements": OBJECTIVE.requirements,
        "ranks": ranks.world,
        "rank": ranks.rank,
    }
    return pack(found, advantage.group_mean(found.reward, found.group), per="trace", **given)


def driven(out: Path, *, upto: int = 3, resume: bool = False, **changes: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    """Three optimizer steps of a loop of one's own, at versions 4, 5 and 6."""
    run = Trainer(tiny_model(0, attn_implementation="sdpa"), OBJECTIVE, told(**changes), out=out)
    if resume:
        run.restore()
    found, rows = traces(), []
    for step in steps(found, run.ranks)[run.steps_done : upto]:
        run.step(step, version=4 + run.steps_done, rewards=found.reward, endings=found.ending)
        rows.append(run.metrics())
    return run, rows


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference; -1 where names are not the same."""
    if found.keys() != wanted.keys():
        return -1.0
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def cases(ranks: int, rank: int, out: Path) -> Iterator[tuple[str, Any]]:
    for name, changes in MODES.items():
        for adapters in (0, 2):
            run, rows = driven(out / f"{name} {adapters}", **changes, train__lora_rank=adapters)
            merged = run.weights()
            entry: dict[str, Any] = {"rows": rows, "names": len(merged)}
            alone = {n: full_tensor(p.detach()) for n, p in run.model.named_parameters() if p.requires_grad}
            given = run.weights(adapters="alone") if adapters else {n: p for n, p in merged.items() if n in alone}
            if rank == 0:
                here = {n.replace(".default.", "."): p for n, p in alone.items()}
                entry |= {"exact": apart(given, here), "apart": apart(merged, torch.load(out / f"{adapters}.pt"))}
            yield f"{name}, {adapters}", entry
            if (name, adapters) == ("fsdp", 0):
                uncut = merged
    cut, _ = driven(out / "cut", upto=2, **MODES["fsdp"])
    cut.save()
    again, _ = driven(out / "cut", resume=True, **MODES["fsdp"])
    weights = again.weights()
    yield "restored", {"apart": apart(weights, uncut) if rank == 0 else None, "step": again.steps_done}
    [step, *_] = steps(traces(), again.ranks)
    newer = replace(step, version=step.version + 9 * rank)  # on the second rank alone
    try:
        again.step(newer, version=6)
    except Exception as error:
        yield "refused", {"said": f"{type(error).__name__}: {error}", "step": again.steps_done}


def alone_main(out: Path) -> None:
    for adapters in (0, 2):
        run, rows = driven(out / f"alone {adapters}", train__lora_rank=adapters)
        torch.save(run.weights(), out / f"{adapters}.pt")
        (out / f"alone-{adapters}.json").write_text(json.dumps(rows))


def rank_main(port: int, ranks: int, rank: int, out: Path) -> None:
    joined(port, ranks, rank)
    (out / f"rank-{rank}.json").write_text(json.dumps(dict(cases(ranks, rank, out))))
    dist.destroy_process_group()


def main(out: Path) -> int:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (once, before the fork)

    torch.set_num_threads(1)
    for children in (lambda: forked(1, lambda *_: alone_main(out)), lambda: forked(2, rank_main, out)):
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children()]
        if any(codes):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
