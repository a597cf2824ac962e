"""Who plays: what `train`, `collect` and `record` are told of it, made into collectors of this process or elsewhere.

Nothing is asked of a server here, and no torch is needed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Config
from tracegrad.errors import ArgumentError
from tracegrad.online import buffer
from tracegrad.online.buffer import Follower, Unscored, Writer
from tracegrad.online.collector import Bound, Collector, Pace, Signal, Tasks, counted
from tracegrad.online.options import Online, Play
from tracegrad.online.remote_collectors import Elsewhere, State
from tracegrad.online.rollout_metrics import beside, mean_of
from tracegrad.online.server_pool import Link
from tracegrad.rewards import Rewards, columns_of, text_of
from tracegrad.rollout.run_agent import Played, as_json, one_turn, with_tools
from tracegrad.user_code import Failure

_PROMPTS = ("prompt", "messages")


class GroupScore:
    """Scores the trajectories of a group together; `close` ends the processes of the functions.

    As in TRL, a task that is a text gives them texts, one of messages gives them messages. Keys of a task that is a
    dict are columns. Trajectories that failed are left out. What a trajectory said of itself is kept as the reward
    `own`, beside those of the functions, which alone are trained on. What functions log is kept in the `metadata` of
    the records: `log_extra`, one value of each column, and in the first of a group `log_metric`, values by name.

    Args:
        functions: `(prompts, completions, **columns) -> list[float | None]`.
        weights: of the functions, 1 by default.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self.rewards = Rewards(functions, weights)

    def prepare(self, played: Sequence[Played]) -> None:
        """Makes `reward` unknown until it is scored, so that what a trajectory said of itself is not taken for it."""
        for each in played:
            if each.error is None:
                own = {} if each.record.get("reward") is None else {"own": each.record["reward"]}
                each.record["rewards"] = {**(each.record.get("rewards") or {}), **own}
                each.record["reward"] = None

    async def __call__(self, played: Sequence[Played]) -> list[dict[str, Failure]]:
        """Sets `reward`, their weighted sum, and `rewards`, each by its name, of the records that did not fail.

        Returns:
            for each of `played` the functions that failed, and why; in its record, `metadata.reward_failures` says so.
        """
        failures: list[dict[str, Failure]] = [{} for _ in played]
        rows = [row for row, each in enumerate(played) if each.error is None]
        if not rows:
            return failures
        tasks = [played[row].task for row in rows]
        prompts, completions = [played[row].prompt for row in rows], [played[row].completion for row in rows]
        if all(isinstance(_prompt(task), str) for task in tasks):
            prompts, completions = list(map(_prompt, tasks)), [text_of(each, "assistant") for each in completions]
        columns = columns_of(tasks, _PROMPTS) if all(isinstance(task, Mapping) for task in tasks) else {}
        found = await self.rewards.score(prompts, completions, columns)
        if found.metrics:
            _note(played[rows[0]].record, {"log_metric": found.metrics})
        for at, row in enumerate(rows):
            record, total = played[row].record, float(found.total[at])
            record["reward"] = None if math.isnan(total) else total
            record["rewards"] = {**(record.get("rewards") or {}), **found.row(at)}
            if found.extra:
                _note(record, {"log_extra": {column: as_json(said[at]) for column, said in found.extra.items()}})
            failed = [name for name, here in zip(found.names, found.failed[at].tolist(), strict=True) if here]
            failures[row] = {name: found.failures[name] for name in failed}
            if failed:
                _note(record, {"reward_failures": {name: str(each) for name, each in failures[row].items()}})
        return failures

    def close(self) -> None:
        """Ends the processes of the functions."""
        self.rewards.close()


def _note(record: dict[str, Any], about: Mapping[str, Any]) -> None:
    """Adds to the metadata of a record."""
    record["metadata"] = {**(record.get("metadata") or {}), **about}


def _prompt(task: Any) -> Any:
    if isinstance(task, Mapping):
        return next((task[name] for name in _PROMPTS if task.get(name) is not None), None)
    return task


@dataclass(frozen=True)
class Contract:
    """What is played, and what is good.

    Args:
        plays: what plays a task.
        rewards: functions that score whole groups afterwards; None where what plays says itself what is good.
        weights: of the functions.
        by_address: whether what plays may have a client of its own, which is given an address that records.
    """

    plays: Any
    rewards: Any = None
    weights: Sequence[float] | None = None
    by_address: bool = False

    @classmethod
    def of(
        cls, *, agent: Any, environment: Any, tools: Any, rewards: Any, weights: Sequence[float] | None = None
    ) -> "Contract":
        """By the arguments of `train`."""
        given = [name for name, value in (("agent", agent), ("environment", environment), ("tools", tools)) if value]
        if len(given) > 1:
            raise ArgumentError(f"{given[0]} and {given[1]} are both given. Each says how a task is played. Pass one.")
        if agent is not None:
            return cls(agent, rewards, weights, by_address=True)
        if environment is not None:
            return cls(environment, rewards, weights)
        if not rewards:
            raise ArgumentError(
                "neither an agent, an environment nor rewards are given. What is good would not be known. Give one of "
                "them."
            )
        return cls(with_tools(tools) if tools else one_turn(), rewards, weights)

    def collector(
        self,
        stack: ExitStack,
        tasks: Iterator[tuple[int, Any]],
        link: Link,
        folder: Path | None,
        pace: Bound,
        play: Play,
        **more: Any,
    ) -> Collector:
        """What plays it.

        Args:
            stack: ends its file and the processes of its reward functions; the link is to be entered after this, so
                that nobody plays any more when they end.
            tasks, link, pace, play, more: of the `Collector`.
            folder: where groups go; None for what evaluates alone.
        """
        writer = unscored = None
        if folder is not None:
            writer = Writer(folder)
            stack.callback(_let_go, writer)
        score = None
        if self.rewards is not None:
            score = GroupScore(self.rewards, self.weights)
            stack.callback(score.close)
            if folder is not None:
                unscored = Unscored(folder.parent)
                if kept := len(unscored.groups):
                    link.say(f"scoring  {kept:,} groups in {unscored.folder} were played before and not scored")
        more |= {"score": score, "unscored": unscored, "by_address": self.by_address}
        return Collector(self.plays, tasks, link, writer, pace, play, **more)


@dataclass(frozen=True)
class Evaluation:
    """Tasks that are played and not trained on.

    Args:
        collector: plays them, as it plays others.
        tasks: of every evaluation.
        folder: where what they played goes.
    """

    collector: Collector
    tasks: Sequence[Any]
    folder: Path

    def __call__(self, step: int) -> dict[str, Any]:
        """Plays them, and says how it went: mean reward with its 95 % interval, and what functions logged."""
        played = self.collector.evaluate(self.collector.contract, self.tasks, f"evaluation-{step}")
        records = [each.record for each in played]
        with Writer(self.folder) as writer:
            writer.write(records)
        known = self.collector.signal.of_records(records)
        known = known[~np.isnan(known)]
        mean = float(known.mean()) if len(known) else math.nan
        error = 1.96 * float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
        row = {"eval_reward": mean, "eval_low": mean - error, "eval_high": mean + error, "eval_tasks": len(known)}
        logged = mean_of(record.get("metadata") or {} for record in records)
        return beside(row, {f"eval_{name}": value for name, value in logged.items()})


def players_of(
    stack: ExitStack,
    contract: Contract | None,
    tasks: Iterable[Any] | None,
    evaluation: Sequence[Any],
    *,
    out: Path,
    link: Link,
    state: State,
    config: Config,
    options: Online,
    play: Play,
    tokenizer: Tokenizer,
) -> tuple[Collector | Elsewhere, Evaluation | None]:
    """Who plays for a trainer, and what evaluates; the link is to be entered after this.

    Args:
        stack: ends them.
        contract: None where nothing is played in this process, not even an evaluation.
        tasks: None where collectors in other processes play them.
        evaluation: tasks of it; none for no evaluation.
        out: folder of the run.
        link: to the servers.
        state: where the run is.
        config, options, play: of the run.
        tokenizer: of the policy.
    """
    folder, signal, pace = out / buffer.FOLDER, Signal.of(config), pace_of(config, options)
    here, evaluate = None, None
    if contract is not None:
        done, counts = counted(Follower(folder), signal)
        numbered = Tasks(iter(()) if tasks is None else tasks, config.train.seed).after(done)
        known = {"signal": signal, "counts": counts, "taken": state.taken, "tokenizer": tokenizer}
        here = contract.collector(stack, numbered, link, None if tasks is None else folder, pace, play, **known)
        evaluate = Evaluation(here, evaluation, out / "evaluation") if len(evaluation) else None
    if here is not None and tasks is not None:
        return here, evaluate
    folder.mkdir(parents=True, exist_ok=True)
    State.reopen(out)
    elsewhere = Elsewhere(link, pace, folder, play.patience, state)
    stack.callback(elsewhere.end)
    return elsewhere, evaluate


def pace_of(config: Config, options: Online) -> Pace:
    """How many groups of a run may be begun."""
    return Pace(config.pack.step_groups, options.steps_ahead, options.refill, options.steps)


def _let_go(writer: Writer) -> None:
    """Closes a file; nothing is left of one in which no group came to stand."""
    writer.close()
    path = writer.folder / writer.name
    with suppress(OSError):
        if not path.stat().st_size:
            path.unlink()
