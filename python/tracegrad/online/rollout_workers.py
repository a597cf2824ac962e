"""Build the collectors of `train`, `collect` and `record` from their arguments.

Nothing here sends requests to servers or imports torch.
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
from tracegrad.online.buffer import GroupReader, GroupWriter, UnscoredGroups
from tracegrad.online.collector import Collector, GroupFilter, GroupLimit, StalenessLimit, Tasks, count_groups_on_disk
from tracegrad.online.options import OnlineConfig, RolloutConfig
from tracegrad.online.remote_collectors import RemoteCollectors, RunState
from tracegrad.online.rollout_metrics import add_logged_metrics, mean_of
from tracegrad.online.server_pool import ServerPool
from tracegrad.rewards import Rewards, columns_of, text_of
from tracegrad.rollout.run_agent import RolloutResult, as_json, one_turn, with_tools
from tracegrad.user_code import Failure

_PROMPTS = ("prompt", "messages")


class GroupScore:
    """Scores the trajectories of a group together.

    As in TRL, functions receive texts if a task is a text, and messages if it is messages. The keys of a dict task are
    columns. Failed trajectories are left out. A reward that the rollout itself returned is kept as the reward `own`;
    only the rewards of the functions are trained on. Values that functions log are stored in the `metadata` of the
    records: `log_extra` has one value per column, and `log_metric`, in the first record of a group, has values by name.

    Args:
        functions: `(prompts, completions, **columns) -> list[float | None]`.
        weights: weights of the functions, 1 by default.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self.rewards = Rewards(functions, weights)

    def prepare(self, played: Sequence[RolloutResult]) -> None:
        """Set `reward` to unknown until it is scored, and move a reward that the rollout returned to `own`."""
        for rollout in played:
            if rollout.error is None:
                own = {} if rollout.record.get("reward") is None else {"own": rollout.record["reward"]}
                rollout.record["rewards"] = {**(rollout.record.get("rewards") or {}), **own}
                rollout.record["reward"] = None

    async def __call__(self, played: Sequence[RolloutResult]) -> list[dict[str, Failure]]:
        """Set `reward`, the weighted sum, and `rewards`, one per function, in the records that did not fail.

        Returns:
            for each of `played`, the functions that failed and why; also stored in its record as
                `metadata.reward_failures`.
        """
        failures: list[dict[str, Failure]] = [{} for _ in played]
        rows = [row for row, rollout in enumerate(played) if rollout.error is None]
        if not rows:
            return failures
        tasks = [played[row].task for row in rows]
        prompts, completions = [played[row].prompt for row in rows], [played[row].completion for row in rows]
        if all(isinstance(_prompt(task), str) for task in tasks):
            prompts, completions = (
                list(map(_prompt, tasks)),
                [text_of(completion, "assistant") for completion in completions],
            )
        columns = columns_of(tasks, _PROMPTS) if all(isinstance(task, Mapping) for task in tasks) else {}
        scores = await self.rewards.score(prompts, completions, columns)
        if scores.metrics:
            _add_metadata(played[rows[0]].record, {"log_metric": scores.metrics})
        for index, row in enumerate(rows):
            record, total = played[row].record, float(scores.total[index])
            record["reward"] = None if math.isnan(total) else total
            record["rewards"] = {**(record.get("rewards") or {}), **scores.row(index)}
            if scores.extra:
                _add_metadata(
                    record, {"log_extra": {column: as_json(values[index]) for column, values in scores.extra.items()}}
                )
            failed_names = [
                name for name, failed in zip(scores.names, scores.failed[index].tolist(), strict=True) if failed
            ]
            failures[row] = {name: scores.failures[name] for name in failed_names}
            if failed_names:
                _add_metadata(
                    record, {"reward_failures": {name: str(failure) for name, failure in failures[row].items()}}
                )
        return failures

    def close(self) -> None:
        """Stop the processes of the functions."""
        self.rewards.close()


def _add_metadata(record: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Add entries to the metadata of a record."""
    record["metadata"] = {**(record.get("metadata") or {}), **entries}


def _prompt(task: Any) -> Any:
    if isinstance(task, Mapping):
        return next((task[name] for name in _PROMPTS if task.get(name) is not None), None)
    return task


@dataclass(frozen=True)
class RolloutSpec:
    """How a task is rolled out and scored.

    Args:
        plays: agent, environment or function that does a rollout.
        rewards: functions that score complete groups afterwards; None if the rollout returns its own reward.
        weights: weights of the functions.
        by_address: whether the rollout may use its own client, which then gets a recording address.
    """

    plays: Any
    rewards: Any = None
    weights: Sequence[float] | None = None
    by_address: bool = False

    @classmethod
    def of(
        cls, *, agent: Any, environment: Any, tools: Any, rewards: Any, weights: Sequence[float] | None = None
    ) -> "RolloutSpec":
        """Create a contract from the arguments of `train`."""
        names = [name for name, value in (("agent", agent), ("environment", environment), ("tools", tools)) if value]
        if len(names) > 1:
            raise ArgumentError(
                f"TG-ONLINE-027: {names[0]} and {names[1]} are both given. Each says how a task is played. Pass one."
            )
        if agent is not None:
            return cls(agent, rewards, weights, by_address=True)
        if environment is not None:
            return cls(environment, rewards, weights)
        if not rewards:
            raise ArgumentError(
                "TG-ONLINE-028: neither an agent, an environment nor rewards are given. What is good would not be "
                "known. Give one of them."
            )
        return cls(with_tools(tools) if tools else one_turn(), rewards, weights)

    def collector(
        self,
        stack: ExitStack,
        tasks: Iterator[tuple[int, Any]],
        link: ServerPool,
        folder: Path | None,
        pace: GroupLimit,
        play: RolloutConfig,
        **more: Any,
    ) -> Collector:
        """Build the collector of this contract.

        Args:
            stack: closes the file and stops the processes of the reward functions. Enter the link after this call, so
                that rollouts end first.
            tasks, link, pace, play, more: fields of the `Collector`.
            folder: rollout folder; None for a collector that only evaluates.
        """
        writer = unscored = None
        if folder is not None:
            writer = GroupWriter(folder)
            stack.callback(_close_writer, writer)
        score = None
        if self.rewards is not None:
            score = GroupScore(self.rewards, self.weights)
            stack.callback(score.close)
            if folder is not None:
                unscored = UnscoredGroups(folder.parent)
                if kept := len(unscored.groups):
                    link.say(f"scoring  {kept:,} groups in {unscored.folder} were played before and not scored")
        more |= {"score": score, "unscored": unscored, "by_address": self.by_address}
        return Collector(self.plays, tasks, link, writer, pace, play, **more)


@dataclass(frozen=True)
class Evaluation:
    """Tasks that are rolled out but not trained on.

    Args:
        collector: does the rollouts, as in training.
        tasks: tasks of every evaluation.
        folder: folder of the rollouts of evaluations.
    """

    collector: Collector
    tasks: Sequence[Any]
    folder: Path

    def __call__(self, step: int) -> dict[str, Any]:
        """Run an evaluation and return its metrics: mean reward with a 95 % interval, and logged values."""
        rollouts = self.collector.evaluate(self.collector.contract, self.tasks, f"evaluation-{step}")
        records = [rollout.record for rollout in rollouts]
        with GroupWriter(self.folder) as writer:
            writer.write(records)
        rewards = self.collector.signal.of_records(records)
        rewards = rewards[~np.isnan(rewards)]
        mean = float(rewards.mean()) if len(rewards) else math.nan
        error = 1.96 * float(rewards.std(ddof=1)) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.nan
        row = {"eval_reward": mean, "eval_low": mean - error, "eval_high": mean + error, "eval_tasks": len(rewards)}
        logged = mean_of(record.get("metadata") or {} for record in records)
        return add_logged_metrics(row, {f"eval_{name}": value for name, value in logged.items()})


def build_rollout_workers(
    stack: ExitStack,
    contract: RolloutSpec | None,
    tasks: Iterable[Any] | None,
    evaluation: Sequence[Any],
    *,
    out: Path,
    link: ServerPool,
    state: RunState,
    config: Config,
    options: OnlineConfig,
    play: RolloutConfig,
    tokenizer: Tokenizer,
) -> tuple[Collector | RemoteCollectors, Evaluation | None]:
    """Build the source of rollouts and the evaluation of a trainer; enter the link after this call.

    Args:
        stack: closes them.
        contract: None if this process does no rollouts, not even for an evaluation.
        tasks: None if collectors in other processes do the rollouts.
        evaluation: tasks of the evaluation; empty for no evaluation.
        out: folder of the run.
        link: connection to the servers.
        state: state that is published to remote collectors.
        config, options, play: options of the run.
        tokenizer: tokenizer of the policy.
    """
    folder, signal, pace = out / buffer.ROLLOUT_FOLDER, GroupFilter.of(config), staleness_limit_of(config, options)
    collector, evaluate = None, None
    if contract is not None:
        done, counts = count_groups_on_disk(GroupReader(folder), signal)
        numbered = Tasks(iter(()) if tasks is None else tasks, config.train.seed).after(done)
        settings = {"signal": signal, "counts": counts, "taken": state.taken, "tokenizer": tokenizer}
        collector = contract.collector(stack, numbered, link, None if tasks is None else folder, pace, play, **settings)
        evaluate = Evaluation(collector, evaluation, out / "evaluation") if len(evaluation) else None
    if collector is not None and tasks is not None:
        return collector, evaluate
    folder.mkdir(parents=True, exist_ok=True)
    RunState.reopen(out)
    elsewhere = RemoteCollectors(link, pace, folder, play.patience, state)
    stack.callback(elsewhere.end)
    return elsewhere, evaluate


def staleness_limit_of(config: Config, options: OnlineConfig) -> StalenessLimit:
    """Return the limit on started groups of a run."""
    return StalenessLimit(config.pack.step_groups, options.steps_ahead, options.refill, options.steps)


def _close_writer(writer: GroupWriter) -> None:
    """Close a file, and delete it if no group was written."""
    writer.close()
    path = writer.folder / writer.name
    with suppress(OSError):
        if not path.stat().st_size:
            path.unlink()
