"""One run against a vLLM server with a fault, and what the check said of it; for a test and for the table in docs."""

import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

import online
import tracegrad as tg
from fault_proxy import FAULTS, FaultProxy
from policy_server import MODEL, PolicyServer
from tracegrad.online import OnlineConfig, RolloutConfig


@dataclass(frozen=True)
class Seen:
    """What a run said: `named` if it is the fault, `said` the words, `step` at which it ended, 0 before the first."""

    named: bool
    said: str
    step: int
    steps: int


def played(url, fault, out, *, dtype="float32", seed=0, steps=4):
    """A run of at most some steps of four groups of four, with a fault between it and vLLM, or none."""
    out.mkdir(parents=True, exist_ok=True)
    lines, words = [], ""
    config = tg.config.Config(
        optimizer=tg.config.Optimizer(lr=4e-4),
        train=tg.config.Train(groups_per_step=4, seed=seed, dtype="bf16" if dtype == "bfloat16" else "float32"),
    )
    with ExitStack() as stack:
        alone = dtype == "bfloat16" and "bf16"
        other = None
        if fault == "half of the requests to a server without pushes":
            other = stack.enter_context(PolicyServer(alone or None)).url
        proxy = stack.enter_context(FaultProxy(url, fault, out, other))
        servers = [proxy.url]
        if fault == "one of two servers missed a push":
            servers.append(stack.enter_context(PolicyServer("deaf")).url)
        if fault == "another tokenizer":
            servers = [stack.enter_context(PolicyServer("tokenizer")).url]
        try:
            rows = tg.online.train(
                MODEL,
                online.tasks("traces", seed),
                environment=online.Shop,
                objective=tg.presets.DAPO_DIRECT,
                config=config,
                online=OnlineConfig(steps=1 if fault == "another chat template" else steps, steps_ahead=0),
                rollout=RolloutConfig(group_size=4, max_tokens=64, max_turns=4),
                servers=servers,
                out=out / "run",
                sinks=(),
                log=lines.append,
            ).rows
        except tg.TracegradError as error:
            words, rows = str(error), []
    said = words or "\n".join(lines)
    step = int(found[1]) if (found := re.match(r"step (\d+):", words)) else 0
    return Seen(fault is not None and bool(re.search(FAULTS[fault], said)), said, step, len(rows))
