"""Train online (`train`), and repeat a run from its folder (`replay`).

A step of `train` rolls out groups, scores them, checks the servers' weights, updates the policy and syncs the weights.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad import metrics
from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Config, as_dict, update
from tracegrad.config import load as load_config
from tracegrad.data.codes import ENDINGS, TRUNCATED
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError
from tracegrad.metrics import loggers
from tracegrad.metrics.loggers import log_traces
from tracegrad.objective import Objective
from tracegrad.online import buffer
from tracegrad.online.buffer import ConsumedGroups, GroupLocation, GroupReader, StepGroups
from tracegrad.online.collector import Collector, GroupFilter
from tracegrad.online.logprob_gap import LogprobGap, WeightSyncBounds, own_terms
from tracegrad.online.options import OnlineConfig, RolloutConfig
from tracegrad.online.rank_sync import RankSync, propagate_error
from tracegrad.online.remote_collectors import RemoteCollectors, RunState
from tracegrad.online.rollout_metrics import add_logged_metrics, logged_metrics, tool_metrics
from tracegrad.online.rollout_workers import RolloutSpec, build_rollout_workers
from tracegrad.online.run_info import RunInfo
from tracegrad.online.server_pool import Interrupted, ServerPool
from tracegrad.online.servers import open_servers, weight_sync_backend, weights_of
from tracegrad.online.weight_check import UnreliablePrompts, WeightSyncCheck
from tracegrad.online.weight_sample import ProbeSampler
from tracegrad.packing import ModelShape, Step
from tracegrad.progress import ProgressPrinter, progress_line, time_left
from tracegrad.recipes.recipe import objective_options
from tracegrad.report import write_card, write_report
from tracegrad.storage.remote import require_local_path
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.trainer import Trainer, checkpoint
from tracegrad.trainer.api import describe_run, objective_of
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.lora import LoraFolder, load_model
from tracegrad.trainer.result import TokenRecord
from tracegrad.trainer.setup import check_media, check_vocabulary, row_padding
from tracegrad.trainer.signals import Interrupt
from tracegrad.trainer.steps import NothingToLearn, TrainingData
from tracegrad.trainer.token_log_writer import TokenLogWriter
from tracegrad.trainer.verify_attention import describe_attention, verify_rows

POLL_S = 0.5
"""Seconds between checks of the rollout folder for groups of other processes."""

SHOWN_OPTIONS = 12


def train(
    model: str | Path,
    tasks: Iterable[Any] | None,
    *,
    rewards: Any = None,
    reward_weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    objective: Objective | None = None,
    config: Config | None = None,
    online: OnlineConfig | None = None,
    rollout: RolloutConfig | None = None,
    eval_tasks: Sequence[Any] = (),
    servers: Sequence[str] | str = (),
    key: str | None = None,
    python: str | None = None,
    engine: Mapping[str, Any] | None = None,
    out: str | Path = "out/online",
    resume: bool = False,
    sinks: Sequence[metrics.Sink] | None = None,
    log: Callable[[str], None] = print,
) -> OnlineResult:
    """Train a model online: roll out, score, update and sync weights until the last step.

    Under torchrun, every rank must call this with the same arguments.

    Args:
        model: folder of a causal language model with its tokenizer and chat template, or of LoRA adapters, which are
            trained further.
        tasks: a list, which is repeated in a new order each time, or an iterable that is read once. A task is a text, a
            list of messages, or a dict with either as `prompt` and with the columns of the reward functions. None:
            other processes write rollouts to `out`, each with `collect`.
        rewards: functions in TRL's convention, `(prompts, completions, **columns) -> list`; they score complete groups.
        reward_weights: weights of the reward functions.
        tools: functions that the policy may call, or a function that returns them for a task.
        environment: a class of `rollout.Environment`, or one for TRL's environment_factory.
        agent: `async (task, policy) -> float | dict`, which does a rollout and scores it. It calls `policy.chat`, or
            uses its own client with `policy.base_url` and `policy.key`.
        objective: a preset or another `Objective`; default: the one of `config`.
        config: training options. `data.holdout`, `train.epochs` and the options of held-out estimates are only for
            training on files and are ignored.
        online: options of the online loop.
        rollout: rollout options.
        eval_tasks: tasks that are rolled out before the first step and after the last, and never trained on.
        servers: URLs of vLLM servers, started with the flags of `weight_sync.vllm_arguments`; or "in-process" for
            `vllm.LLM` in this process; default: start a server.
        key: token of the servers. A server that is started here requires it too; without `key` it requires a random
            token.
        python: interpreter of an environment with vLLM, for the server that is started; default: this one.
        engine: vLLM's engine arguments by name, for the server that is started.
        out: folder of the run.
        resume: continue the run in `out`.
        sinks: receive the rows in addition to metrics.jsonl; default: one printed line per step, and the dashboards of
            `train.report_to`.
        log: receives the log lines for the user.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` contains a run and `resume` is False.
        SyncFault: if the servers do not sample from the policy that is trained.
        TracegradError: if a server, the folder or the rollouts fail permanently.

    ```python
    import tracegrad as tg
    from tracegrad.online import OnlineConfig, RolloutConfig


    async def agent(task, policy):
        message = await policy.chat([{"role": "user", "content": task["prompt"]}])
        return float(message["content"].strip() == task["answer"])


    tasks = [{"prompt": "2+2?", "answer": "4"}, {"prompt": "3+4?", "answer": "7"}]
    result = tg.online.train(
        "model",
        tasks,
        agent=agent,
        objective=tg.presets.DAPO_DIRECT,
        online=OnlineConfig(steps=10),
        rollout=RolloutConfig(group_size=8, max_tokens=64),
        servers=["http://127.0.0.1:8000"],
        out="out/online",
    )
    print(result.checkpoint)
    ```
    """
    options, rollout, out, model = (
        online or OnlineConfig(),
        rollout or RolloutConfig(),
        require_local_path(out),
        Path(model),
    )
    if tasks is None and options.weight_sync == "lora":
        raise ArgumentError(
            "TG-ONLINE-040: tasks is None and online.weight_sync is 'lora'. A server could unload an adapter that a "
            "remote collector still uses. Set online.weight_sync to 'file', which merges adapters, or pass tasks here."
        )
    if tasks is None and not servers and key is None:
        raise ArgumentError(
            "TG-ONLINE-041: tasks is None, and neither servers nor key is set. A server started here would require a "
            "random token that the collectors do not have. Pass key= (key_file) here and to them, or pass servers."
        )
    rollout_spec = None
    if tasks is not None or len(eval_tasks):
        rollout_spec = RolloutSpec.of(
            agent=agent, environment=environment, tools=tools, rewards=rewards, weights=reward_weights
        )
    config = _config(config or Config())
    if objective is None:
        objective = objective_of(config)
    elif objective_of(config) != objective:  # record the objective that is trained
        config = update(replace(config, objective=Config().objective), objective_options(objective))
    tokenizer = Tokenizer.from_pretrained(model)
    ranks, run_dir = Ranks.join(), RunDirectory(out)
    with ExitStack() as stack:
        with ranks.fail_together():
            if ranks.first:
                stack.enter_context(run_dir.lock())
        trainer = Trainer(
            load_model(model), objective, config, out=run_dir, tokenizer=model, ranks=ranks, total_steps=options.steps
        )
        _restore_or_begin(trainer, resume)
        consumed = ConsumedGroups(out)
        rollout_worker, evaluate = None, None
        with propagate_error(ranks):
            if ranks.first:
                make_sync, rank, base = weight_sync_backend(trainer, options), config.train.lora_rank, model
                if (adapter := LoraFolder.read(model)) is not None:  # a server starts with the base model's weights
                    rank, base = adapter.rank, adapter.base
                pool, engine_arguments, ended_reason = stack.enter_context(
                    open_servers(base, servers, key, python, engine or {}, options, rollout, out, log, rank)
                )
                RunInfo(str(model), repr(objective), options, rollout, engine_arguments).write(out, config)
                server_pool = ServerPool(pool, make_sync, trainer.steps_done, end_reason=ended_reason, log=log)
                state = RunState(trainer.steps_done, trainer.steps_done, len(consumed.steps))
                rollout_worker, evaluate = build_rollout_workers(
                    stack,
                    rollout_spec,
                    tasks,
                    eval_tasks,
                    out=out,
                    server_pool=server_pool,
                    state=state,
                    config=config,
                    tokenizer=tokenizer,
                    options=options,
                    rollout=rollout,
                )
                stack.enter_context(server_pool)
        lines = _sinks(trainer, options, sinks, log) if ranks.first else []
        for sink in lines:
            stack.callback(sink.close)
        weight_bounds = WeightSyncBounds(bf16=str(trainer.precision) == "torch.bfloat16")
        loop = TrainingLoop(
            trainer,
            tokenizer,
            options,
            consumed,
            rollout_worker,
            lines,
            log,
            weight_bounds,
            evaluate=evaluate,
            has_remote_workers=tasks is None,
            rollout=rollout,
            initial_model=model,
        )
        if ranks.first:
            stack.enter_context(metrics.reported_stages(trainer.watch, log))
        with Interrupt() as interrupt, trainer.propagate_errors(final=True):
            stopped = loop.run(interrupt)
        run_dir.end(stopped)
    return _build_result(loop, model, stopped, interrupt)


def replay(
    run: str | Path,
    model: str | Path,
    *,
    objective: Objective | None = None,
    config: Config | None = None,
    out: str | Path,
    log: Callable[[str], None] = print,
) -> OnlineResult:
    """Repeat the steps of a run from its folder and its initial model, without servers or rollouts.

    On the same machine, the parameters equal those of the run bit for bit. Options that change the order of sums, such
    as `pack.share_prefixes`, change them by rounding; `weight_check/max` in the rows shows by how much.

    Args:
        run: folder of the run.
        model: initial model of the run.
        objective: default: the objective of the run. Needed if that has no name and cannot be written as text.
        config: default: the config of the run.
        out: folder for checkpoints and metrics; the folder of the run is not changed.
        log: receives the log lines for the user.

    Raises:
        ArgumentError: if `out` is the folder of the run or contains another run, or the run had another objective.
        ReadError: if the folder contains no run.
        FormatError: if the settings of the run cannot be read.

    ```python
    import tracegrad as tg


    def short(completions, **columns):
        return [float(len(text) < 3) for text in completions]


    tg.online.train("model", ["2+2?", "3+4?"], rewards=[short], out="out/online")
    result = tg.online.replay("out/online", "model", out="out/replay")  # no servers
    print(result.checkpoint)
    ```
    """
    run, out, model = Path(run), require_local_path(out), Path(model)
    if run.resolve() == out.resolve():
        raise ArgumentError(
            f"TG-ONLINE-042: {out} is the run's own folder, and the replay would overwrite it. Pass another out."
        )
    before, config_before = RunInfo.read(run), load_config(run / "config.toml")
    objective = objective_of(config_before) if objective is None else objective
    _check_objective(run, before.objective, repr(objective))
    config = _config(config or config_before)
    run_dir = RunDirectory(out)
    with run_dir.lock():
        trainer = Trainer(
            load_model(model), objective, config, out=run_dir, tokenizer=model, total_steps=before.online.steps
        )
        trainer.create_run_dir()
        consumed = ConsumedGroups(run)
        lines = [metrics.JsonLines(out / "metrics.jsonl")]
        options = OnlineConfig(steps=max(len(consumed.steps), 1))
        loop = TrainingLoop(
            trainer, Tokenizer.from_pretrained(model), options, consumed, None, lines, log, weight_check_bounds=None
        )
        loop.folder = run / buffer.ROLLOUT_FOLDER
        with Interrupt() as interrupt:
            stopped = loop.run(interrupt)
        run_dir.end(stopped)
        lines[0].close()
        return _build_result(loop, model, stopped, interrupt)


@dataclass
class TrainingLoop:
    """State of an online run between two steps.

    Args:
        trainer: trainer with the policy and its optimizer.
        tokenizer: tokenizer of the model.
        options: options of the run.
        consumed: log of the groups that each step consumed, in `steps.jsonl`.
        rollout_worker: source of rollouts; None on ranks other than the first, and in a replay.
        sinks: receive one row per step.
        log: receives the log lines for the user.
        weight_check_bounds: bounds of the weight-sync check, which can stop the run; None without servers.
        has_remote_workers: whether collectors in other processes do the rollouts, with the newest published version.
        rollout: rollout options of the run.
        initial_model: folder of the initial model, if servers start with that model.
    """

    trainer: Trainer
    tokenizer: Tokenizer
    options: OnlineConfig
    consumed: ConsumedGroups
    rollout_worker: Collector | RemoteCollectors | None
    sinks: Sequence[metrics.Sink]
    log: Callable[[str], None]
    weight_check_bounds: WeightSyncBounds | None = field(default_factory=WeightSyncBounds)
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluate: Callable[[int], dict[str, Any]] | None = None
    has_remote_workers: bool = False
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    initial_model: Path | None = None

    def __post_init__(self) -> None:
        self.folder = self.trainer.out / buffer.ROLLOUT_FOLDER
        self.group_reader = GroupReader(self.folder)
        self.queue: list[tuple[GroupLocation, Traces, bool]] = []
        self.ranks = self.trainer.ranks
        self.check = WeightSyncCheck(self.trainer, self.options, self.weight_check_bounds, first=self.initial_model)
        self._settled = False
        self._shown: tuple[Sequences, TokenRecord] | None = None
        self.token_logger = TokenLogWriter(
            self.trainer.out,
            self.trainer.config.token_log,
            self.trainer.objective,
            rank=self.ranks.rank,
            world=self.ranks.world,
            steps_done=self.trainer.steps_done,
        )
        self.group_filter = GroupFilter.of(self.trainer.config)

    def run(self, interrupt: Interrupt) -> str:
        """Train until the last step, a signal, or the end of the tasks; return "done", "signal" or "tasks"."""
        try:
            return self._run(interrupt)
        finally:
            self.token_logger.close()

    def _run(self, interrupt: Interrupt) -> str:
        self.rank_sync = RankSync.of(self.ranks, interrupt)
        if self.rollout_worker is not None:
            self.rollout_worker.server_pool.interrupted = lambda: interrupt.received is not None
        at = self._first_open_step()
        for entry in self.consumed.steps:
            self.group_reader.skip(entry.groups)
        # Remote collectors already have the versions of all these steps, so servers get no weights before the last of
        # them.
        self._replayed_steps = len(self.consumed.steps) if self.has_remote_workers else 0
        if at >= self._replayed_steps:
            self._start_rollouts(at)
        while at < self.options.steps:
            began = time.perf_counter()
            with self.rank_sync.propagate_error():
                groups = self._groups(at)
            if groups is None:
                self.rank_sync.publish_end()
                break
            try:
                self._step(*groups, waited=time.perf_counter() - began)
            except Interrupted:  # during the weight check, so no update was made
                break
            at += 1
            if at == self._replayed_steps:
                self._start_rollouts(at)
            elif at > self._replayed_steps:
                if self.rollout_worker is not None:
                    self.rollout_worker.set_steps_done(at)
                with self.rank_sync.propagate_error():
                    self._evaluate_if_due(at)
        self._save()
        if interrupt.received is not None:
            return "signal"
        return "done" if at >= self.options.steps else "tasks"

    def _start_rollouts(self, at: int) -> None:
        """Push the initial weights to the servers, then let groups start."""
        if self.weight_check_bounds is not None:
            self._push()
            self._check_server_answers()
            with self.rank_sync.propagate_error():
                self._evaluate_if_due(at)
        if self.rollout_worker is not None:
            self.rollout_worker.set_steps_done(len(self.consumed.steps))
            self.rollout_worker.start()

    def _check_server_answers(self) -> None:
        """Check the answers of the servers before the first rollout."""
        server_pool = None if self.rollout_worker is None else self.rollout_worker.server_pool
        probe_sampler = self.check.probe_sampler = ProbeSampler(self.trainer, server_pool, self.rollout, self.tokenizer)
        with self.rank_sync.propagate_error():
            for line in probe_sampler.inspect_servers():
                if self.ranks.first:
                    self.log(f"server   {line}")

    def _first_open_step(self) -> int:
        """Return the first logged step that the policy has not taken."""
        steps = self.consumed.steps
        return next((entry.step for entry in steps if entry.version >= self.trainer.steps_done), len(steps))

    def _groups(self, step: int) -> tuple[StepGroups, Traces] | None:
        """Return the groups of a step: its logged groups if the step is repeated, otherwise new rollouts."""
        if step < len(self.consumed.steps):
            entry = self.consumed.steps[step]
            return entry, Traces.concatenate(buffer.read(self.folder, place) for place in entry.trained)
        if self.rollout_worker is None:
            if self.ranks.is_single:
                return None
            entry = self.consumed.wait(step, self.rank_sync.should_stop)
            return None if entry is None else self._groups(entry.step)
        groups = self._wait_for_groups()
        if groups is None:
            return None
        zero_std = [index for index, (_, _, no_signal) in enumerate(groups) if no_signal]
        entry = self.consumed.add(self.trainer.steps_done, [place for place, _, _ in groups], zero_std)
        return entry, Traces.concatenate(traces for _, traces, no_signal in groups if not no_signal)

    def _wait_for_groups(self) -> list[tuple[GroupLocation, Traces, bool]] | None:
        """Wait for enough groups with differing rewards, or for the most groups that a step may consume."""
        assert self.rollout_worker is not None
        limit, progress = self.rollout_worker.staleness_limit, ProgressPrinter(self.log)
        while not self.rank_sync.should_stop():
            over = self.rollout_worker.is_finished
            new, no_signal = self.group_reader.read_new(), self.group_filter.has_no_signal
            if new and self.rollout_worker.fatal_error is not None:  # set before the last group was written
                raise self.rollout_worker.fatal_error
            self.queue += [
                (place, traces, no_signal(self.group_filter.rewards_of_traces(traces))) for place, traces in new
            ]
            useful = np.cumsum([not no_signal for _, _, no_signal in self.queue])
            enough = int(np.searchsorted(useful, limit.groups)) + 1
            if (len(useful) and useful[-1] >= limit.groups) or len(self.queue) >= limit.max_groups_per_step or over:
                chosen = self.queue[: min(enough, limit.max_groups_per_step)]
                self.queue = self.queue[len(chosen) :]
                return chosen or None
            count = int(useful[-1]) if len(useful) else 0
            progress.tick(
                lambda seconds, count=count: progress_line(
                    "waiting for rollouts",
                    [f"{count} of {limit.groups} groups with unequal rewards"],
                    seconds=seconds,
                    done=count,
                    total=limit.groups,
                )
            )
            self.rollout_worker.check()
            self.rollout_worker.wait(POLL_S)
        return None

    def _step(self, entry: StepGroups, traces: Traces, *, waited: float) -> None:
        began = time.perf_counter()
        version = self.trainer.steps_done
        columns = {"groups": len(entry.groups), "groups_zero_std": len(entry.zero_std)}
        # Align the rollouts of the step's groups.
        traces, sequences = self._align(traces)
        if not len(traces):
            self.log(f"step {entry.step + 1}: no update, since every group has equal rewards")
            return
        # Compute advantages and pack rows.
        try:
            step, rewards = self._packed(sequences)
        except NothingToLearn as reason:
            self.log(f"step {entry.step + 1}: no update: {reason}")
            return
        has_servers = self.weight_check_bounds is not None and entry.step >= self._replayed_steps
        if self.check.probe_sampler is not None and self.ranks.first:
            groups = dict(zip(traces.groups, range(len(traces)), strict=True))
            self.check.probe_sampler.prepare(traces[index].to_dict() for index in groups.values())
        # The check compares only tokens that the trained version sampled.
        own_tokens = own_terms(step, version)
        mixed = _mixed_version_traces(traces, sequences)
        mixed &= self.options.weight_sync != "lora"  # a LoRA call uses one adapter from start to end
        own_tokens &= ~mixed[step.trace]
        gap = LogprobGap(0)

        def check(logprobs: Any) -> None:
            nonlocal gap
            gap = self.check.gap(
                entry.step + 1, step, logprobs, own_tokens, UnreliablePrompts.of(step, sequences), sequences, mixed
            )

        # Run the forward and backward passes, then the weight check, then `optimizer.step()`.
        packed_at, wait_s = time.perf_counter(), self._wait_s
        result = self.trainer.step(step, version, rewards=rewards, endings=sequences.ending, check=check)
        self._shown = sequences, TokenRecord.of(self.trainer.steps_done, step, result)
        self.token_logger.step(self.trainer.steps_done, step, result, sequences, sets=self.options.steps - entry.step)
        trained_at, wait_s, unreachable_s = time.perf_counter(), self._wait_s - wait_s, self._unreachable_s
        # Send the new weights to the servers.
        sync_result = self._push() if has_servers else None
        unreachable_s = self._unreachable_s - unreachable_s
        # Write metrics and a checkpoint.
        report = sequences.alignment_report
        columns |= {
            "version": version,
            "branches_extra": sequences.branches - sequences.traces,
            "tokens_lost": report.recorded - report.exact,
            "time/prepare": packed_at - began,
            "time/rollout_wait": waited + wait_s + unreachable_s,
            "time/train": trained_at - packed_at - wait_s,
            "time/weight_sync": time.perf_counter() - trained_at - unreachable_s,
            "time/sync_pause": 0.0 if sync_result is None else sync_result.seconds,
            **gap.row(),
            **tool_metrics(traces),
        }
        self._log(entry.step + 1, columns, logged_metrics(traces))
        log_traces(self.sinks, (trace for trace in traces if trace.group == traces[0].group), entry.step + 1)
        every = self.trainer.config.checkpoint.every_steps
        if every and self.trainer.steps_done % every == 0:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint; on the first rank also update report.html."""
        self.trainer.save()
        if self.ranks.first and self._shown is not None:
            sequences, terms = self._shown
            rows, out = metrics.read_rows(self.trainer.out / "metrics.jsonl"), self.trainer.out
            model = {} if self.initial_model is None else {"model": self.initial_model}
            links = [name for name in ("config.toml", "run.json", "metrics.jsonl") if (out / name).is_file()]
            write_report(
                out / "report.html",
                rows=rows,
                sequences=sequences,
                tokenizer=self.tokenizer,
                terms=[terms],
                title=out.name,
                part=f"step {terms.step}",
                about=describe_run(self.trainer.config, self.trainer.objective, out.resolve(), **model),
                links=links,
            )

    def _align(self, traces: Traces) -> tuple[Traces, Sequences]:
        """Align traces; omit traces without sampled tokens, which failed before their first response."""
        sequences = align(traces, self.tokenizer, on_error="skip")
        sampled = {sequences.trace_ids[index] for index in np.unique(sequences.trace)}
        trained = [index for index, trace in enumerate(traces) if trace.id in sampled]
        if len(trained) == sequences.traces:
            return traces, sequences
        traces = traces[trained]
        return traces, align(traces, self.tokenizer)

    def _packed(self, sequences: Sequences) -> tuple[Step, Any]:
        """Return the step of this rank, packed from all groups, and the rewards of its traces."""
        config = self.trainer.config
        model = self.trainer.model
        options = config.filter
        # The tolerance chose the groups, as `drop_zero_std_groups` does for files.
        if options.zero_std_tolerance and self.group_filter.is_group_relative:
            config = replace(config, filter=replace(options, drop_zero_std_groups=True))
        # A call without an ending was abandoned by its client, which truncated it.
        if options.mask_truncated or options.zero_truncated:
            unknown_ending = sequences.ending == ENDINGS.index("unknown")
            sequences = replace(
                sequences, ending=np.where(unknown_ending, TRUNCATED, sequences.ending).astype(np.uint8)
            )
        data = TrainingData.of(
            sequences,
            self.trainer.objective,
            config,
            ranks=self.ranks.world,
            rank=self.ranks.rank,
            shape=ModelShape.try_of(model.config),
            bucket=row_padding(config),
        )
        if not self._settled:
            check_vocabulary(sequences, model)
            for sentence in [*data.notes, *check_media(sequences, model)]:
                self.log(f"note     {sentence}")
            longest = min(int(np.diff(sequences.cu_seqlens).max()), config.pack.tokens_per_row)
            reason = verify_rows(self.trainer.target, longest, share_prefixes=data.shares_prefixes)
            self._trees, self._settled = not reason, True
            share_prefixes = data.shares_prefixes and self._trees
            self.log(f"note     {describe_attention(self.trainer.target, share_prefixes=share_prefixes)}")
        [step] = replace(data, allow_prefix_sharing=self._trees).steps(0)
        return step, data.rewards

    @property
    def _wait_s(self) -> float:
        """Seconds spent waiting for servers, for checks and weight syncs."""
        return 0.0 if self.rollout_worker is None else self.rollout_worker.server_pool.wait_s

    @property
    def _unreachable_s(self) -> float:
        """The part of `_wait_s` in which no server could be reached."""
        return 0.0 if self.rollout_worker is None else self.rollout_worker.server_pool.unreachable_s

    def _push(self) -> Any:
        """Push the weights to the servers.

        Return the result; None on ranks without servers, or if a signal came while no server could be reached.
        """
        weights = weights_of(self.trainer, self.options)
        if self.rollout_worker is None:
            return None
        with self.rank_sync.propagate_error():
            try:
                result = self.rollout_worker.server_pool.sync_weights(weights, self.trainer.steps_done)
            except Interrupted:
                return None
        for line in result.lines():
            self.log(f"server   {line}")
        return result

    def _evaluate_if_due(self, at: int) -> None:
        """Run the evaluation if it is due: before the first step, after the last, and every `eval_every` steps."""
        every = self.options.eval_every
        if self.evaluate is not None and (at in (0, self.options.steps) or (every and at % every == 0)):
            began = time.perf_counter()
            try:
                results = self.evaluate(at)
            except Interrupted:
                self.log(f"evaluation after step {at}: skipped because of a signal")
                return
            row = metrics.finite({"step": at, **results, "seconds_evaluated": time.perf_counter() - began})
            self.rows.append(row)
            metrics.log_all(self.sinks, row)

    def _log(self, number: int, columns: dict[str, Any], logged: Mapping[str, float]) -> None:
        row = metrics.finite({**self.trainer.metrics(), **columns, "step": number})
        if self.rollout_worker is not None:
            counts = self.rollout_worker.counts
            row |= {"trajectories": counts.trajectories, "trajectories_failed": counts.failed}
            row |= {"trajectories_without_reward": counts.without_reward, "calls_retried": self.rollout_worker.retried}
        row = add_logged_metrics(row, metrics.finite(logged))
        self.rows.append(row)
        metrics.log_all(self.sinks, row)


def _mixed_version_traces(traces: Traces, sequences: Sequences) -> Any:
    """Return [R] bool: traces with a call in flight during a weight sync, so their tokens may be of two versions."""
    mixed = {trace.id: b'"received_version"' in trace.record for trace in traces}
    return np.array([mixed.get(trace_id, False) for trace_id in sequences.trace_ids], bool)


@dataclass(frozen=True)
class OnlineResult:
    """Result of `train` or `replay`.

    Args:
        steps: number of steps in `steps.jsonl`.
        stopped: "done", "signal", or "tasks" if the tasks ended first.
        checkpoint: folder of the last checkpoint.
        rows: metrics, one row per step and per evaluation.
        exit_code: 0, or 128 + signal number.

    ```python
    import tracegrad as tg


    def short(completions, **columns):
        return [float(len(text) < 3) for text in completions]


    result = tg.online.train("model", ["2+2?", "3+4?"], rewards=[short], out="out/online")
    print(result.stopped, result.steps, result.checkpoint)
    print([row["loss"] for row in result.rows if "loss" in row])
    ```
    """

    steps: int
    stopped: str
    checkpoint: Path
    rows: list[dict[str, Any]]
    exit_code: int = 0


def _build_result(loop: TrainingLoop, model: Path, stopped: str, interrupt: Interrupt) -> OnlineResult:
    trainer, last = loop.trainer, checkpoint.list_checkpoints(loop.trainer.out)[-1]
    if loop.ranks.first:
        groups = [len(step.trained) for step in loop.consumed.steps]
        data = [f"rollouts of the policy: {sum(groups):,} groups with unequal rewards in {len(groups):,} steps"]
        write_card(last, base=model, objective=trainer.objective, config=trainer.config, rows=loop.rows, data=data)
    return OnlineResult(len(loop.consumed.steps), stopped, last, loop.rows, interrupt.code(stopped))


def _check_objective(run: Path, before: str, now: str) -> None:
    """Raise an error if the objective differs from the run's, and name the options that differ.

    Args:
        before, now: `repr` of the two objectives.
    """
    if before == now:
        return
    old, new = _options(before), _options(now)
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    lines = [f"{name}: {old.get(name, 'none')}, now {new.get(name, 'none')}" for name in names[:SHOWN_OPTIONS]]
    more = f"; and {len(names) - SHOWN_OPTIONS} more" if len(names) > SHOWN_OPTIONS else ""
    raise ArgumentError(
        f"TG-ONLINE-043: {run}: the run had another objective: {'; '.join(lines)}{more}. The replay would compute "
        "other parameters. Omit objective, or pass the objective of the run."
    )


def _options(objective: str) -> dict[str, str]:
    """Return the fields of an objective by dotted name, from its `repr`; one that contains a function is one text.

    >>> _options("Objective(ratio=Ratio(num='theta'), weights=(Weight(), 2))")
    {'': 'Objective', 'ratio': 'Ratio', 'ratio.num': "'theta'", 'weights.0': 'Weight', 'weights.1': '2'}
    """
    fields = dict[str, str]()

    def add(node: ast.expr, at: str) -> None:
        inner = lambda name: f"{at}.{name}" if at else str(name)  # noqa: E731
        if isinstance(node, ast.Call):
            fields[at] = ast.unparse(node.func)
            for child in node.keywords:
                add(child.value, inner(child.arg))
        elif isinstance(node, ast.Tuple):
            for number, child in enumerate(node.elts):
                add(child, inner(number))
        else:
            fields[at] = ast.unparse(node)

    try:
        add(ast.parse(objective, mode="eval").body, "")
    except SyntaxError:
        return {"objective": objective}
    return fields


def _config(config: Config) -> Config:
    """Return the config for online training, or raise an error for options that only work with files.

    The holdout is 0, since evaluations have their own tasks. If all other traces of a group failed, the remaining trace
    gets advantage 0.
    """
    file_options = (
        (config.data.reward_weights, "data.reward_weights"),
        (config.train.iterations > 1, "train.iterations"),
    )
    for is_set, name in file_options:
        if is_set:
            raise ArgumentError(
                f"TG-ONLINE-044: {name} is for training on files and has no effect here. Remove it. To weight reward "
                "functions, use `reward_weights`."
            )
    if config.reward_kl.coef:
        raise ArgumentError(
            "TG-ONLINE-045: reward_kl.coef is only for training on files: online, advantages are computed before the "
            "logprobs that the penalty needs. Set objective.kl, or train on recorded trajectories."
        )
    config = replace(config, data=replace(config.data, holdout=0.0))
    if config.advantage.baseline == "none" or config.advantage.single_sample_group != "error":
        return config
    return replace(config, advantage=replace(config.advantage, single_sample_group="zero"))


def _restore_or_begin(trainer: Trainer, resume: bool) -> None:
    if resume:
        trainer.restore()
    elif (trainer.out / "steps.jsonl").exists():
        raise ArgumentError(
            f"TG-ONLINE-046: {trainer.out} already contains a run. Pass resume=True to continue it, or another out."
        )
    trainer.create_run_dir()


def _sinks(
    trainer: Trainer, options: OnlineConfig, sinks: Sequence[metrics.Sink] | None, log: Callable[[str], None]
) -> list[metrics.Sink]:
    lines = metrics.JsonLines(trainer.out / "metrics.jsonl", keep_to_step=trainer.steps_done or None)
    if sinks is not None:
        return [lines, *sinks]
    dashboards = loggers.open_sinks(trainer.config.train.report_to, trainer.out, as_dict(trainer.config))
    return [lines, *dashboards, LinePrinter(options.steps, log)]


class LinePrinter:
    """Prints one line per step and per evaluation."""

    def __init__(self, total: int, log: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self._print, self._clock = total, log, clock
        self._started_at, self._first_step = clock(), 0

    def log(self, row: metrics.Row) -> None:
        """Print a row."""
        if "eval_reward" in row:
            names = ("eval_reward", "eval_low", "eval_high")
            mean, low, high = (float("nan") if row[name] is None else row[name] for name in names)
            self._print(
                f"evaluation after step {row['step']}: {mean:.1%} [{low:.1%}, {high:.1%}] of {row['eval_tasks']}"
            )
            return
        parts = [f"step {row['step']}/{self.total}", f"reward {row.get('reward') or 0:.3f}"]
        parts += [f"{row['groups']} groups ({row['groups_zero_std']} zero-std)"]
        if row.get("weight_check/tokens"):
            parts.append(f"weights ok ({row['weight_check/max']:.1e})")
        parts.append(f"waited {row['time/rollout_wait']:.1f} s, trained {row['time/train']:.1f} s")
        self._first_step = self._first_step or row["step"]
        done, total = (step - self._first_step + 1 for step in (row["step"], self.total))
        parts.append(time_left(self._clock() - self._started_at, done, total))
        self._print("  ".join(filter(None, parts)))

    def close(self) -> None:
        """Do nothing: lines are not buffered."""
