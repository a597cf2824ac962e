"""Processes that share a step, and what they find: run by test_ranks.py as a script, which forks them.

`python ranks.py OUT` writes JSON objects of what one process and two ranks do; each entry is a case by name and what
was measured of it. If OUT holds the file `every`, they do every case, and four ranks do them too. If OUT holds the
pipes `asked` and `answers`, three processes answer drawn cases, a line of JSON each.
"""

import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Lfm2Config, Lfm2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from tiny import VOCABULARY, sampled, tiny_model
from tracegrad import config
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.objective import (
    Aggregation,
    EntropyBonus,
    Penalty,
    Ratio,
    Reduce,
    Rejection,
    Truncate,
    Weight,
    presets,
    with_kl,
)
from tracegrad.packing import Step, pack
from tracegrad.trainer import train
from tracegrad.trainer.dataset import PreparedDataset
from tracegrad.trainer.distributed import (
    CallableModel,
    DistributedModel,
    Ranks,
    as_distributed_model,
    full_tensor,
    wrap,
)
from tracegrad.trainer.lora import with_adapters
from tracegrad.trainer.step import compute_logprobs, optimizer_step

_PER_TRACE = Reduce("trace", "mean")
_MISMATCH = Ratio("old", "rollout")
OBJECTIVES = {
    "token": presets.DAPO,
    "token, direct": presets.CISPO,
    "token, kept denominators": replace(presets.VERL_DEFAULT, rejections=(Rejection(_MISMATCH, low=0.8, high=1.25),)),
    "turn": replace(presets.DAPO, weights=(Weight(_MISMATCH, Aggregation("turn", "mean"), Truncate(0.0, 2.0)),)),
    "trace": presets.GSPO,
    "trace, geometric": presets.GMPO,
    "group denominators": replace(presets.GRPO, reduce=Reduce("prompt", "mean")),
    "batch budget": presets.M2PO,
    "batch normalised": presets.SLIME_MIS,
    "penalties and entropy": replace(
        with_kl(presets.DAPO, 0.1),
        penalties=(Penalty(Ratio("theta", "ref"), "k3", 0.3, masked=False, weighted=False, reduce=_PER_TRACE),),
        entropy=EntropyBonus(0.2, masked=False, reduce=Reduce("token")),
    ),
}
"""One objective of each class: they differ in what they sum, at which level, and in the denominators."""
FLOATS = ("token", "trace", "batch budget")
"""Objectives that are also computed in float32."""
QUICK = ("token", "trace", "group denominators", "batch budget")
"""Objectives of a quick run, in float64: one for each kind of sum."""


def hostile(
    seed: int, groups: int = 5, members: int = 3, longest: int = 30, missing: float = 0.1
) -> tuple[Sequences, np.ndarray]:
    """Traces in groups, and an advantage for each; by default three steps' worth.

    Two with an equal sampled beginning but their own advantages and logprobs, a forked one, a turn of one token,
    missing logprobs, an advantage of 0, lengths that differ tenfold; the last group is one trace, so that most ranks
    have none.

    Args:
        groups, members: how many, and how large all but the last.
        longest: tokens that a group's first trace samples of its own, at most.
        missing: share of logprobs.
    """
    random = np.random.default_rng(seed)
    branches: list[tuple[int, list[int], list[int]]] = []  # trace, ids, turn of each (-1: not trained)
    trace, group = 0, []
    for number in range(groups):
        prompt = random.integers(0, VOCABULARY, 5).tolist()
        shared = random.integers(0, VOCABULARY, 4).tolist()
        for member in range(1 if number == groups - 1 else members):
            own = random.integers(0, VOCABULARY, int(random.integers(1, 5 if member else longest))).tolist()
            if member < 2:
                branches.append((trace, prompt + shared + own, [-1] * 5 + [0] * (4 + len(own))))
            else:  # two turns, the second of one token, and a fork after the first
                branches.append((trace, [*prompt, *own, 3, 7], [-1] * 5 + [0] * len(own) + [-1, 1]))
                branches.append((trace, [*prompt, *own[:1], 9, 8, 2], [-1] * (6 + 1) + [2, 2]))
            group.append(number)
            trace += 1
    turn = np.array([turn for _, _, turns in branches for turn in turns], np.int32)
    trainable = turn >= 0
    logprobs = np.where(trainable, -random.exponential(1.5, len(turn)) - 1e-3, np.nan)
    logprobs[trainable & (random.random(len(turn)) < missing)] = np.nan
    advantages = random.normal(0, 1, trace).astype(np.float32)
    advantages[1:2] = 0
    ends = np.cumsum([0, *(len(ids) for _, ids, _ in branches)])
    flat = [token for _, ids, _ in branches for token in ids]
    told = {"trace": [row for row, _, _ in branches], "group": group, "turn": turn}
    return Sequences.from_arrays(flat, ends, logprobs, trainable, **told), advantages


def steps_of(seed: int, objective: Any, ranks: int, rank: int, *, masked: bool = False, **case: Any) -> list[Step]:
    """The steps of a rank, with old and reference logprobs that depend on the token alone.

    Where `masked`, old ones of all that the second of two ranks holds are far from the sampled ones: gates drop it.
    """
    told = {"tokens_per_row": 40, "groups_per_step": 2, "requirements": objective.requirements, "seed": None}
    told |= {name: case.pop(name) for name in ("tokens_per_row", "groups_per_step", "share_prefixes") if name in case}
    sequences, advantages = hostile(seed, **case)
    random = np.random.default_rng(seed + 100)
    base = np.nan_to_num(sequences.rollout_logprobs, nan=-1.0)
    old, ref = (np.minimum(base + random.normal(0, 0.3, len(base)), -1e-4).astype(np.float32) for _ in range(2))
    if masked:
        old[np.concatenate([step.origin for step in pack(sequences, advantages, ranks=2, rank=1, **told)])] = -40.0
    steps = pack(sequences, advantages, ranks=ranks, rank=rank, **told)
    return [step.with_logprobs(old=old[step.origin], ref=ref[step.origin]) for step in steps]


class Keep(torch.optim.SGD):
    """SGD that keeps the complete gradient of each update."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat([full_tensor(p.grad.detach()).flatten().double() for p in parameters]))
        super().step(closure)


def gradients(model: Any, seed: int, objective: Any, ranks: int, rank: int, **case: Any) -> Any:
    """Return the gradients, losses and token counts of consecutive steps. The model is restored."""
    target = model.model
    start = [parameter.detach().clone() for parameter in target.parameters()]
    optimizer = Keep(target.parameters())
    steps = steps_of(seed, objective, ranks, rank, **case)
    outcomes = [optimizer_step(model, step, objective, optimizer, grad_clip=1.0) for step in steps]
    with torch.no_grad():
        for parameter, before in zip(target.parameters(), start, strict=True):
            parameter.copy_(before)
    work = [len(step) for step in steps]
    gated = [1.0 - each.corrected.metrics["kept"] / each.corrected.metrics["terms"] for each in outcomes]
    kept = [int(each.keep.sum()) for each in outcomes]
    numbers = [(each.loss, each.grad_norm) for each in outcomes]
    return optimizer.seen, numbers, {"work": work, "kept": kept, "gated": max(gated)}


def law(ranks: int, rank: int, every: bool) -> Iterator[tuple[str, Any]]:
    """Compare the gradient of all ranks with that of one process, for all objectives or the quick ones."""
    floats = ((torch.float64, tuple(OBJECTIVES)), (torch.float32, FLOATS))
    for dtype, names in floats if every else ((torch.float64, QUICK),):
        seed = 0 if dtype == torch.float64 else 1
        alone = prepare_alone(tiny_model(4, attn_implementation="sdpa").to(dtype))
        wanted = {name: gradients(alone, seed, OBJECTIVES[name], 1, 0) for name in names if rank == 0}
        for mode in ("fsdp", "ddp"):
            shared = wrap(tiny_model(4, attn_implementation="sdpa").to(dtype), mode)
            for name in names:
                found, said, more = gradients(shared, seed, OBJECTIVES[name], ranks, rank)
                entry = differences(found, said, *wanted[name][:2]) if rank == 0 else {}
                yield f"{name} | {mode} | {str(dtype)[6:]}", {**entry, **more}


def differences(found: Any, said: Any, wanted: Any, told: Any) -> dict[str, Any]:
    """Return the relative differences of gradients and metrics from those of one process."""
    apart = [0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    numbers = np.abs(np.array(said) - np.array(told)) / np.abs(told).clip(1e-3)
    return {"apart": apart, "numbers": float(numbers.max())}


def prepare_alone(model: Any) -> Any:
    return DistributedModel(model, CallableModel(model), "none", Ranks())


def vector(model: Any) -> torch.Tensor:
    return torch.cat([full_tensor(p.detach()).flatten().double() for p in model.parameters()])


def told(**changes: Any) -> Any:
    base = {"optimizer.lr": 3e-3, "train.epochs": 2, "train.groups_per_step": 6, "pack.tokens_per_row": 64}
    return config.load(overrides=[*base.items(), *((k.replace("__", "."), v) for k, v in changes.items())])


class StopAfter:
    """A sink that asks this process to stop when a step's row arrives."""

    def log(self, row: Any) -> None:
        if row["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    def close(self) -> None:
        pass


def trained(out: Path, *, adapters: bool = False, **options: Any) -> tuple[Any, torch.Tensor]:
    """Train with a reference model, and return the final parameters."""
    model = tiny_model(0, attn_implementation="sdpa")
    model = with_adapters(model, 4) if adapters else model
    changes = options.pop("changes", {})
    objective = with_kl(presets.DAPO, 0.05)
    data = options.pop("data", None) or sampled(tiny_model())
    given = {"sinks": (), "log": lambda _: None, **options}
    done = train(data, model, objective=objective, out=out, config=told(**changes), **given)
    return done, vector(model)


RUNS = {
    "fsdp": {"parallel__mode": "fsdp"},
    "ddp": {"parallel__mode": "ddp"},
    "fsdp, low memory": {"parallel__mode": "fsdp", "train__memory_mode": "low"},
}
MIXED = {"train__ref_sync_steps": 2, "train__ref_mixup_alpha": 0.4}
CHARGED = {
    "reward_kl__coef": 0.5,
    "reward_kl__target_kl": 1e-4,
    "reward_kl__horizon": 50.0,
    "train__updates_per_old_logprobs": 2,
}


def runs(ranks: int, rank: int, out: Path, every: bool) -> Iterator[tuple[str, Any]]:
    """Compare runs with those of one process, which are in `out`; a quick run under FSDP is stopped."""
    if ranks == 4:
        if rank == 0:
            shutil.copytree(out / "stopped", out / "stopped, by four", symlinks=True)
        dist.barrier()
        done, found = trained(out / "stopped, by four", changes=RUNS["fsdp"], resume=True)
        yield "resumed from two ranks", {"apart": beside(found, out / "alone.pt"), "step": done.step}
        return
    for name, changes in RUNS.items() if every else ():
        done, found = trained(out / f"run {name}", changes=changes)
        yield name, {"rows": done.rows, "apart": beside(found, out / "alone.pt")}
    stopped, _ = trained(out / "stopped", changes=RUNS["fsdp"], sinks=[StopAfter()])
    yield "stopped", {"step": stopped.step, "code": stopped.exit_code}
    if not every:
        return
    done, found = trained(out / "from shards", data=PreparedDataset.open(out / "saved"), changes=RUNS["ddp"])
    yield "from shards", {"rows": done.rows, "apart": beside(found, out / "alone.pt")}
    done, found = trained(out / "half", changes=RUNS["fsdp"], resume=True)
    yield "resumed from one process", {"apart": beside(found, out / "alone.pt"), "step": done.step}
    done, found = trained(out / "adapters", adapters=True, changes=RUNS["fsdp"])
    yield "adapters", {"apart": beside(found, out / "adapters.pt")}
    done, found = trained(out / "charged", changes={**RUNS["fsdp"], **CHARGED})
    yield "charged", {"apart": beside(found, out / "charged.pt"), "said": charges(done.rows)}
    for mode in ("fsdp", "ddp"):
        trained(out / f"mixed, {mode}", changes={**RUNS[mode], **MIXED}, sinks=[StopAfter()])
        done, found = trained(out / f"mixed, {mode}", changes={**RUNS[mode], **MIXED}, resume=True)
        yield f"mixed reference, {mode}", {"apart": beside(found, out / "mixed.pt"), "step": done.step}
    yield from by_accelerate(ranks, rank)
    yield from in_bf16(ranks, rank)
    yield from by_another_reference(out)


def charges(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row["reward_kl"], row["reward_kl_coef"]] for row in rows if "reward_kl" in row]


def by_accelerate(ranks: int, rank: int) -> Iterator[tuple[str, Any]]:
    """A policy that accelerate wrapped by its own means, whose gradients are means."""
    from accelerate import Accelerator

    wanted, _, _ = gradients(prepare_alone(tiny_model(4).double()), 0, presets.DAPO, 1, 0)
    policy = Accelerator(cpu=True).prepare(CallableModel(tiny_model(4).double()))
    found, _, _ = gradients(as_distributed_model(policy), 0, presets.DAPO, ranks, rank)
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    yield "accelerate", {"apart": max(apart), "wrapper": type(policy).__name__}


def in_bf16(ranks: int, rank: int) -> Iterator[tuple[str, Any]]:
    """FSDP that gathers and computes in bfloat16 over float32 parameters, beside float32 in one process."""
    wanted, said, _ = gradients(prepare_alone(tiny_model(4, attn_implementation="sdpa")), 1, presets.DAPO, 1, 0)
    model = tiny_model(4, attn_implementation="sdpa")
    shared = wrap(model, "fsdp", precision=torch.bfloat16)
    optimizer = Keep(model.parameters())
    steps = steps_of(1, presets.DAPO, ranks, rank)
    outcomes = [optimizer_step(shared, step, presets.DAPO, optimizer, precision=torch.bfloat16) for step in steps[:1]]
    [gradient] = optimizer.seen
    moved = vector(model)
    yield (
        "bf16",
        {
            "cosine": float(gradient @ wanted[0] / gradient.norm() / wanted[0].norm()),
            "exact": bool(torch.equal(gradient, wanted[0])),
            "loss": abs(outcomes[0].loss - said[0][0]),
            "dtypes": sorted({str(t.dtype)[6:] for p in model.parameters() for t in (p, p.grad)}),
            "finer": float((moved != moved.bfloat16().double()).double().mean()),
        },
    )


def by_another_reference(out: Path) -> Iterator[tuple[str, Any]]:
    """A reference model from a folder, sharded like the policy."""
    changes = {**RUNS["fsdp"], "train__ref_model": str(out / "reference")}
    _, found = trained(out / "referred", changes=changes)
    yield "reference", {"apart": beside(found, out / "referred.pt")}


def beside(found: torch.Tensor, path: Path) -> float:
    wanted = torch.load(path)
    return float((found - wanted).norm() / wanted.norm())


def alone_main(out: Path) -> None:
    """Train in one process, and write half of a run that other processes resume."""
    sampled(tiny_model()).save(out / "saved")
    done, found = trained(out / "alone")
    torch.save(found, out / "alone.pt")
    (out / "alone.json").write_text(json.dumps({"rows": done.rows}))
    if not (out / "every").exists():
        return
    trained(out / "half", sinks=[StopAfter()])
    _, found = trained(out / "adapters alone", adapters=True)
    torch.save(found, out / "adapters.pt")
    done, found = trained(out / "charged alone", changes=CHARGED)
    torch.save(found, out / "charged.pt")
    (out / "charged.json").write_text(json.dumps(charges(done.rows)))
    done, found = trained(out / "mixed alone", changes=MIXED)
    assert done.step > 4
    torch.save(found, out / "mixed.pt")
    tiny_model(7).save_pretrained(out / "reference")
    _, found = trained(out / "referred alone", changes={"train__ref_model": str(out / "reference")})
    torch.save(found, out / "referred.pt")
    _, given = trained(out / "referred, given", reference=tiny_model(7))
    (out / "given.json").write_text(json.dumps(bool(torch.equal(found, given))))


def after_main(out: Path) -> None:
    """Resume in one process a run that two ranks had stopped."""
    done, found = trained(out / "stopped", resume=True)
    (out / "after.json").write_text(json.dumps({"apart": beside(found, out / "alone.pt"), "step": done.step}))


def rank_main(port: int, ranks: int, rank: int, out: Path) -> None:
    """Run all cases in one process of a group; the first process writes the results."""
    joined(port, ranks, rank)
    every = (out / "every").exists()
    found = {**dict(law(ranks, rank, every)), **dict(runs(ranks, rank, out, every))}
    work = [None] * ranks
    dist.all_gather_object(work, {name: entry["work"] for name, entry in found.items() if "work" in entry})
    for name in work[0] or {}:
        found[name]["work"] = [each[name] for each in work]
    if ranks == 2:
        case = {"objective": "token, kept denominators", "dtype": "float64", "seed": 0, "missing": 0.0, "masked": True}
        found |= {f"masked, {mode}": drawn(ranks, rank, mode=mode, **case) for mode in ("fsdp", "ddp")}
    if rank == 0:
        (out / f"ranks-{ranks}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def drawn_main(port: int, ranks: int, rank: int, asked: Path, answers: Path) -> None:
    """Run cases, each a line of JSON, in one process of a group until there are no more; the first one answers."""
    joined(port, ranks, rank)
    cases = asked.open() if rank == 0 else None
    told = answers.open("w") if rank == 0 else None
    while True:
        line = [cases.readline() if cases else ""]
        dist.broadcast_object_list(line)
        if not line[0]:
            break
        case = json.loads(line[0])
        found = drawn(ranks, rank, **case)
        if told:
            told.write(json.dumps(found) + "\n")
            told.flush()
    dist.destroy_process_group()


def drawn(ranks: int, rank: int, objective: str, mode: str, dtype: str, seed: int, **case: Any) -> dict[str, Any]:
    """Return how far the gradient of a case is from that of one process, and the token counts of each rank."""
    kind = getattr(torch, dtype)
    shared = wrap(tiny_model(4, attn_implementation="sdpa").to(kind), mode)
    found, said, more = gradients(shared, seed, OBJECTIVES[objective], ranks, rank, **case)
    by_rank = [None] * ranks
    dist.all_gather_object(by_rank, more)
    if rank > 0:
        return {}
    alone = prepare_alone(tiny_model(4, attn_implementation="sdpa").to(kind))
    wanted, told, _ = gradients(alone, seed, OBJECTIVES[objective], 1, 0, **case)
    return {**differences(found, said, wanted, told), "by_rank": by_rank}


class Failing:
    """Rank 1 meets an error at the second step."""

    def __init__(self, rank: int, error: Exception) -> None:
        self.rank, self.error, self.steps = rank, error, 0

    def __call__(self, *given: Any, **how: Any) -> Any:
        self.steps += 1
        if self.rank == 1 and self.steps == 2:
            raise self.error
        return optimizer_step(*given, **how)


def failing_main(port: int, ranks: int, rank: int, out: Path) -> None:
    """Write the errors of a rank for a plain model, traces that differ, a hybrid model and too little memory."""
    from torch.distributed.tensor import DTensor

    import tracegrad.trainer.trainer as run

    joined(port, ranks, rank)
    [step, *_] = steps_of(0, presets.DAPO, ranks, rank)
    found: dict[str, Any] = {}
    try:
        optimizer_step(tiny_model(), step, presets.DAPO, Keep(tiny_model().parameters()))
    except ArgumentError as error:
        found["bare"] = str(error)
    try:
        trained(out / "other", data=sampled(tiny_model(), seed=rank), changes=RUNS["ddp"])
    except ArgumentError as error:
        found["other"] = str(error)
    frozen = wrap(tiny_model(4, attn_implementation="sdpa").requires_grad_(False), "fsdp")
    compute_logprobs(frozen, step.batches)
    found["sharded"] = all(isinstance(each, DTensor) for each in frozen.model.parameters())
    hybrid = Lfm2ForCausalLM(Lfm2Config(**HYBRID))
    try:
        compute_logprobs(wrap(hybrid, "fsdp"), step.batches)
    except ArgumentError as error:
        found["hybrid"] = str(error)
    run.optimizer_step = Failing(rank, torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 1"))
    try:
        trained(out / "lost", changes=RUNS["fsdp"])
    except TracegradError as error:
        found["lost"] = str(error)
    (out / f"failing-{rank}.json").write_text(json.dumps(found))


def raising_main(port: int, ranks: int, rank: int, out: Path) -> None:
    """Write the error message of a rank if only the second meets an error that is not ours."""
    import tracegrad.trainer.trainer as run

    joined(port, ranks, rank)
    run.optimizer_step = Failing(rank, ZeroDivisionError("of somebody's own"))
    try:
        trained(out / "raised", changes=RUNS["fsdp"])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    (out / f"raising-{rank}.json").write_text(json.dumps({"said": said}))


HYBRID = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}


def joined(port: int, ranks: int, rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), RANK=str(rank))
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


CRASHED = 139
"""What `main` returns where a process ended by a segmentation fault."""


def code_of(children: list[int]) -> int:
    """Wait for processes. Return 0 if all succeeded."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return CRASHED if -signal.SIGSEGV in codes else int(any(codes))


def forked(ranks: int, main: Callable[..., None], *arguments: Any) -> list[int]:
    """Return the process ids of forks of this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 0
            try:
                main(port, ranks, rank, *arguments)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return children


def drawn_children(out: Path) -> list[int]:
    return forked(3, drawn_main, out / "asked", out / "answers")


def main(out: Path) -> int:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (once, before the fork)

    torch.set_num_threads(1)
    if (out / "asked").exists():  # a pipe of drawn cases
        return code_of(drawn_children(out))
    for children in (
        lambda: forked(1, lambda *_: alone_main(out)),
        lambda: forked(2, rank_main, out),
        lambda: forked(4, rank_main, out) if (out / "every").exists() else [],
        lambda: forked(1, lambda *_: after_main(out)),
        lambda: [child for each in (failing_main, raising_main) for child in forked(2, each, out)],
    ):
        if code := code_of(children()):
            return code
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(Path(sys.argv[1])))
