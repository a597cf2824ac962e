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

    def prepare(self, rollouts: Sequence[RolloutResult]) -> None:
        """Set `reward` to unknown until it is scored, and move a reward that the rollout returned to `own`."""
        for rollout in rollouts:
            if rollout.error is None:
                own = {} if rollout.record.get("reward") is None else {"own": rollout.record["reward"]}
                rollout.record["rewards"] = {**(rollout.record.get("rewards") or {}), **own}
                rollout.record["reward"] = None

    async def __call__(self, rollouts: Sequence[RolloutResult]) -> list[dict[str, Failure]]:
        """Set `reward`, the weighted sum, and `rewards`, one per function, in the records that did not fail.

        Returns:
            for each of `rollouts`, the functions that failed and why; also stored in its record as
                `metadata.reward_failures`.
        """
        failures: list[dict[str, Failure]] = [{} for _ in rollouts]
        rows = [row for row, rollout in enumerate(rollouts) if rollout.error is None]
        if not rows:
            return failures
        tasks = [rollouts[row].task for row in rows]
        prompts, completions = [rollouts[row].prompt for row in rows], [rollouts[row].completion for row in rows]
        if all(isinstance(_prompt(task), str) for task in tasks):
            prompts, completions = (
                list(map(_prompt, tasks)),
                [text_of(completion, "assistant") for completion in completions],
            )
        columns = columns_of(tasks, _PROMPTS) if all(isinstance(task, Mapping) for task in tasks) else {}
        scores = await self.rewards.score(prompts, completions, columns)
        if scores.metrics:
            _add_metadata(rollouts[rows[0]].record, {"log_metric": scores.metrics})
        for index, row in enumerate(rows):
            record, total = rollouts[row].record, float(scores.total[index])
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
        agent: agent, environment or function that does a rollout.
        rewards: functions that score complete groups afterwards; None if the rollout returns its own reward.
        weights: weights of the functions.
        by_address: whether the rollout may use its own client, which then gets a recording address.
    """

    agent: Any
    rewards: Any = None
    weights: Sequence[float] | None = None
    by_address: bool = False

    @classmethod
    def of(
        cls, *, agent: Any, environment: Any, tools: Any, rewards: Any, weights: Sequence[float] | None = None
    ) -> "RolloutSpec":
        """Create a specification from the arguments of `train`."""
        names = [name for name, value in (("agent", agent), ("environment", environment), ("tools", tools)) if value]
        if len(names) > 1:
            raise ArgumentError(
                f"TG-ONLINE-027: {names[0]} and {names[1]} are both set. Each defines the rollout of a task. Pass one."
            )
        if agent is not None:
            return cls(agent, rewards, weights, by_address=True)
        if environment is not None:
            return cls(environment, rewards, weights)
        if not rewards:
            raise ArgumentError(
                "TG-ONLINE-028: agent, environment and rewards are all missing, so trajectories would have no reward. "
                "Pass one of them."
            )
        return cls(with_tools(tools) if tools else one_turn(), rewards, weights)

    def collector(
        self,
        stack: ExitStack,
        tasks: Iterator[tuple[int, Any]],
        server_pool: ServerPool,
        folder: Path | None,
        staleness_limit: GroupLimit,
        rollout: RolloutConfig,
        **more: Any,
    ) -> Collector:
        """Build the collector for this specification.

        Args:
            stack: closes the file and stops the processes of the reward functions. Enter `server_pool` after this
                call, so that rollouts end first.
            tasks, server_pool, staleness_limit, rollout, more: fields of the `Collector`.
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
                if stored := len(unscored.groups):
                    server_pool.log(f"scoring  {stored:,} groups in {unscored.folder} that were not scored yet")
        more |= {"score": score, "unscored": unscored, "by_address": self.by_address}
        return Collector(self.agent, tasks, server_pool, writer, staleness_limit, rollout, **more)


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
        rollouts = self.collector.evaluate(self.collector.agent, self.tasks, f"evaluation-{step}")
        records = [rollout.record for rollout in rollouts]
        with GroupWriter(self.folder) as writer:
            writer.write(records)
        rewards = self.collector.group_filter.rewards_of_records(records)
        rewards = rewards[~np.isnan(rewards)]
        mean = float(rewards.mean()) if len(rewards) else math.nan
        error = 1.96 * float(rewards.std(ddof=1)) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.nan
        row = {"eval_reward": mean, "eval_low": mean - error, "eval_high": mean + error, "eval_tasks": len(rewards)}
        logged = mean_of(record.get("metadata") or {} for record in records)
        return add_logged_metrics(row, {f"eval_{name}": value for name, value in logged.items()})


def build_rollout_workers(
    stack: ExitStack,
    rollout_spec: RolloutSpec | None,
    tasks: Iterable[Any] | None,
    evaluation: Sequence[Any],
    *,
    out: Path,
    server_pool: ServerPool,
    state: RunState,
    config: Config,
    options: OnlineConfig,
    rollout: RolloutConfig,
    tokenizer: Tokenizer,
) -> tuple[Collector | RemoteCollectors, Evaluation | None]:
    """Build the source of rollouts and the evaluation of a trainer; enter `server_pool` after this call.

    Args:
        stack: closes them.
        rollout_spec: None if this process does no rollouts, not even for an evaluation.
        tasks: None if collectors in other processes do the rollouts.
        evaluation: tasks of the evaluation; empty for no evaluation.
        out: folder of the run.
        server_pool: connection to the servers.
        state: state that is published to remote collectors.
        config, options, rollout: options of the run.
        tokenizer: tokenizer of the policy.
    """
    folder, group_filter, staleness_limit = (
        out / buffer.ROLLOUT_FOLDER,
        GroupFilter.of(config),
        staleness_limit_of(config, options),
    )
    collector, evaluate = None, None
    if rollout_spec is not None:
        done, counts = count_groups_on_disk(GroupReader(folder), group_filter)
        numbered = Tasks(iter(()) if tasks is None else tasks, config.train.seed).after(done)
        collector = rollout_spec.collector(
            stack,
            numbered,
            server_pool,
            None if tasks is None else folder,
            staleness_limit,
            rollout,
            group_filter=group_filter,
            counts=counts,
            steps_done=state.steps_done,
            tokenizer=tokenizer,
        )
        evaluate = Evaluation(collector, evaluation, out / "evaluation") if len(evaluation) else None
    if collector is not None and tasks is not None:
        return collector, evaluate
    folder.mkdir(parents=True, exist_ok=True)
    RunState.reopen(out)
    remote = RemoteCollectors(server_pool, staleness_limit, folder, rollout.stall_timeout_s, state)
    stack.callback(remote.end)
    return remote, evaluate


def staleness_limit_of(config: Config, options: OnlineConfig) -> StalenessLimit:
    """Return the limit on started groups of a run."""
    return StalenessLimit(config.train.groups_per_step, options.steps_ahead, options.max_resample_factor, options.steps)


def _close_writer(writer: GroupWriter) -> None:
    """Close a file, and delete it if no group was written."""
    writer.close()
    path = writer.folder / writer.name
    with suppress(OSError):
        if not path.stat().st_size:
            path.unlink()
