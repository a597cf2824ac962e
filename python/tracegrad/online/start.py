"""`train`: a policy, tasks and what is good, put together into a run; `replay`: the same run from its folder alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad import metrics, presets
from tracegrad.algebra import Objective
from tracegrad.config import Config, as_dict
from tracegrad.config import load as load_config
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.learner import Run, checkpoint
from tracegrad.learner.interrupt import Interrupt
from tracegrad.learner.model import load_model
from tracegrad.learner.ranks import Ranks
from tracegrad.online import frames
from tracegrad.online.apart import RUN
from tracegrad.online.bond import telling
from tracegrad.online.collector import Collector, contract_of, counted
from tracegrad.online.elsewhere import Elsewhere
from tracegrad.online.frames import Follower, Writer
from tracegrad.online.ledger import Ledger
from tracegrad.online.link import Link
from tracegrad.online.loop import Loop
from tracegrad.online.options import Online
from tracegrad.online.pace import Pace
from tracegrad.online.proof import Proof
from tracegrad.online.scoring import GroupScore
from tracegrad.online.serve import served
from tracegrad.online.signal import Signal
from tracegrad.online.state import State
from tracegrad.online.tasks import Tasks
from tracegrad.online.ways import sync_of
from tracegrad.shards import read_text, write_bytes
from tracegrad.tokenizer import Tokenizer


@dataclass(frozen=True)
class Finished:
    """What a run leaves for its caller.

    Args:
        steps: of the ledger.
        stopped: "done", "signal" or "tasks", where these ended first.
        checkpoint: folder of the last one.
        rows: of metrics, one for each step and each evaluation.
        exit_code: 0, or 128 + signal.
    """

    steps: int
    stopped: str
    checkpoint: Path
    rows: list[dict[str, Any]]
    exit_code: int = 0


def train(
    model: str | Path,
    tasks: Iterable[Any] | None,
    *,
    rewards: Any = None,
    weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    objective: Objective = presets.DAPO,
    config: Config | None = None,
    online: Online | None = None,
    evaluation: Sequence[Any] = (),
    servers: Sequence[str] | str = (),
    key: str | None = None,
    python: str | None = None,
    engine: Mapping[str, Any] | None = None,
    out: str | Path = "out/online",
    resume: bool = False,
    sinks: Sequence[metrics.Sink] | None = None,
    say: Callable[[str], None] = print,
) -> Finished:
    """Plays, scores, trains and pushes until the last step; under torchrun every rank calls this alike.

    Args:
        model: folder of a causal language model with its tokenizer and chat template.
        tasks: a list, which comes again in another order, or what can be iterated once. A task is a text, a list of
            messages, or a dict with either as `prompt` and what reward functions take. None: processes of their own
            play into `out`, each by `collect`.
        rewards: functions in TRL's convention, `(prompts, completions, **columns) -> list`; they score whole groups.
        weights: of the reward functions.
        tools: functions that the policy may call, or a function from the task to functions.
        environment: a class of `rollout.Environment`, or one of TRL's environment_factory.
        agent: `async (task, policy) -> float | dict`, which plays and scores, by `policy.chat` or by a client of its
            own for `policy.base_url` and `policy.key`.
        objective: a preset or another value of `Objective`.
        config: of training; `data.holdout`, `train.epochs` and value are of runs over a file and not read.
        online: of playing.
        evaluation: tasks that are played before the first step and after the last, and not trained on.
        servers: URLs of vLLM servers, started with the flags of `sync.vllm_arguments`; or "in-process" for `vllm.LLM`
            in this one; default: a server is started.
        key: token of the servers.
        python: interpreter of an environment that has vLLM, for the server that is started; default this one.
        engine: vLLM's engine arguments by name, for the server that is started.
        out: folder of the run.
        resume: go on with the run in `out`.
        sinks: where rows go beside metrics.jsonl; default a line each step.
        say: takes the sentences that a user should read.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` holds a run and `resume` is False.
        SyncFault: if the servers do not sample from the policy that is trained.
        TracegradError: if a server, the folder or what plays fails for good.
    """
    told, out, model = online or Online(), Path(out), Path(model)
    if tasks is None and told.sync == "lora":
        raise ArgumentError(
            "tasks is None and online.sync is 'lora'. An adapter could be unloaded while a collector elsewhere asks "
            "for it. Use sync='file', which merges adapters, or pass tasks."
        )
    config = _config(config or Config())
    tokenizer = Tokenizer.from_pretrained(model)
    ranks = Ranks.join()
    driven = Run(load_model(model), objective, config, out=out, tokenizer=model, ranks=ranks)
    _take_up(driven, resume)
    ledger = Ledger(out)
    with ExitStack() as stack:
        player, evaluate = None, None
        with telling(ranks):
            if ranks.first:
                way, rank = sync_of(driven, told), config.train.lora_rank
                pool, engine_told = stack.enter_context(
                    served(model, servers, key, python, engine or {}, told, out, say, rank)
                )
                write_bytes(out / RUN, [_manifest(model, objective, config, told, engine_told)])
                link = Link(pool, way, driven.taken)
                pace = Pace(config.pack.step_groups, told.max_lag, told.refill, told.steps)
                folder, signal, taken = out / frames.FOLDER, Signal.of(config), len(ledger.steps)
                here = None
                if tasks is not None or len(evaluation):
                    contract, scores = contract_of(agent, environment, tools, rewards)
                    score = GroupScore(rewards, weights) if scores else None
                    if score is not None:
                        stack.callback(score.close)
                    done, counts = counted(Follower(folder), signal)
                    numbered = Tasks(iter(()) if tasks is None else tasks, config.train.seed).after(done)
                    writer = None if tasks is None else stack.enter_context(Writer(folder))
                    plays = {"score": score, "signal": signal, "counts": counts, "taken": taken}
                    plays |= {"by_address": agent is not None, "tokenizer": tokenizer}
                    here = Collector(contract, numbered, link, writer, pace, told, **plays)
                    if len(evaluation):
                        evaluate = _evaluation(here, contract, evaluation, out, signal)
                if tasks is None:
                    folder.mkdir(parents=True, exist_ok=True)
                    told_first = State(driven.taken, driven.taken, taken)
                    player = Elsewhere(link, pace, folder, told.patience, told_first)
                    stack.callback(player.end)
                else:
                    player = here
                stack.enter_context(link)
        lines = _sinks(driven, told, sinks, say) if ranks.first else []
        for sink in lines:
            stack.callback(sink.close)
        proof = Proof(bf16=str(driven.precision) == "torch.bfloat16")
        loop = Loop(driven, tokenizer, told, ledger, player, lines, say, proof, evaluate=evaluate)
        with Interrupt() as interrupt, driven.together():
            stopped = loop.run(interrupt)
    code = (interrupt.exit_code or 0) if stopped == "signal" else 0
    return Finished(len(ledger.steps), stopped, checkpoint.list_checkpoints(out)[-1], loop.rows, code)


def replay(
    run: str | Path,
    model: str | Path,
    *,
    objective: Objective = presets.DAPO,
    config: Config | None = None,
    out: str | Path,
    say: Callable[[str], None] = print,
) -> Finished:
    """Takes the steps of a run again, from its folder and the model that it began with: no server, nothing played.

    On the same machine the parameters are those of the run, bit for bit. Options that change the order of sums, such as
    `pack.leave_out`, change them by rounding; `sync_max` in the rows says by how much.

    Args:
        run: folder of the run.
        model, objective: those that it had.
        config: default that of the run.
        out: folder for checkpoints and metrics; the run's is not changed.

    Raises:
        ArgumentError: if `out` is the run's folder or holds another, or the run had another objective.
        ReadError: if the folder holds no run.
    """
    run, out, model = Path(run), Path(out), Path(model)
    if run.resolve() == out.resolve():
        raise ArgumentError(f"{out} is the run's own folder. The replay would overwrite it. Give another out.")
    _check_objective(run, objective)
    config = _config(config or load_config(run / "config.toml"))
    driven = Run(load_model(model), objective, config, out=out, tokenizer=model)
    driven.begin()
    ledger = Ledger(run)
    lines = [metrics.JsonLines(out / "metrics.jsonl")]
    told = Online(steps=max(len(ledger.steps), 1))
    loop = Loop(driven, Tokenizer.from_pretrained(model), told, ledger, None, lines, say, proof=None)
    loop.folder = run / frames.FOLDER
    with Interrupt() as interrupt:
        stopped = loop.run(interrupt)
    lines[0].close()
    code = (interrupt.exit_code or 0) if stopped == "signal" else 0
    return Finished(len(ledger.steps), stopped, checkpoint.list_checkpoints(out)[-1], loop.rows, code)


def _check_objective(run: Path, objective: Objective) -> None:
    try:
        told = json.loads(read_text(run / RUN, 1 << 20))["objective"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReadError(
            f"{run / RUN}: does not say what the run was ({str(error)[:80]!r}). Its steps cannot be taken again. Copy "
            "the run again."
        ) from error
    if told != repr(objective):
        raise ArgumentError(
            f"{run}: the run had the objective {str(told)[:200]}, and the replay has {objective!r:.200}. Its "
            "parameters would be others. Give the objective of the run."
        )


def _config(config: Config) -> Config:
    """Nothing is held out, as evaluations have tasks of their own; a trace whose whole group failed beside it is 0."""
    config = replace(config, data=replace(config.data, holdout=0.0))
    if config.advantage.baseline == "none" or config.advantage.singleton != "refuse":
        return config
    return replace(config, advantage=replace(config.advantage, singleton="zero"))


def _take_up(driven: Run, resume: bool) -> None:
    if resume:
        driven.restore()
    elif (driven.out / "steps.jsonl").exists():
        raise ArgumentError(
            f"{driven.out} holds a run. A new one would be mixed with it. Go on with resume=True, or give another out."
        )
    driven.begin()


def _evaluation(
    collector: Collector, contract: Any, tasks: Sequence[Any], out: Path, signal: Signal
) -> Callable[[int], dict[str, Any]]:
    """What plays the tasks of an evaluation and says how it went."""

    def evaluate(step: int) -> dict[str, Any]:
        played = collector.evaluate(contract, tasks, f"evaluation-{step}")
        with Writer(out / "evaluation") as writer:
            writer.write([each.record for each in played])
        known = signal.of_records([each.record for each in played])
        known = known[~np.isnan(known)]
        mean = float(known.mean()) if len(known) else math.nan
        error = 1.96 * float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
        return {"eval_reward": mean, "eval_low": mean - error, "eval_high": mean + error, "eval_tasks": len(known)}

    return evaluate


def _manifest(model: Path, objective: Objective, config: Config, told: Online, engine: Mapping[str, Any]) -> bytes:
    known = {"model": str(model), "objective": repr(objective), "online": asdict(told), "engine": dict(engine)}
    return (json.dumps({**known, "config": as_dict(config)}, indent=1, default=str) + "\n").encode()


def _sinks(
    driven: Run, told: Online, sinks: Sequence[metrics.Sink] | None, say: Callable[[str], None]
) -> list[metrics.Sink]:
    lines = metrics.JsonLines(driven.out / "metrics.jsonl", keep_to_step=driven.taken or None)
    return [lines, *(sinks if sinks is not None else [Line(told.steps, say)])]


class Line:
    """One line for each step and each evaluation."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self.say = total, say

    def log(self, row: metrics.Row) -> None:
        """Says the row."""
        if "eval_reward" in row:
            told = ("eval_reward", "eval_low", "eval_high")
            mean, low, high = (float("nan") if row[name] is None else row[name] for name in told)
            self.say(f"evaluation after step {row['step']}: {mean:.1%} [{low:.1%}, {high:.1%}] of {row['eval_tasks']}")
            return
        parts = [f"step {row['step']}/{self.total}", f"reward {row.get('reward') or 0:.3f}"]
        parts += [f"{row['groups']} groups ({row['groups_dull']} dull)"]
        if row.get("sync_terms"):
            parts.append(f"sync within {row['sync_max']:.1e}")
        parts.append(f"waited {row['seconds_waited']:.1f} s, trained {row['seconds_trained']:.1f} s")
        self.say("  ".join(parts))

    def close(self) -> None:
        """Nothing is held back."""
