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
from tracegrad.recipes.recipe import objective_options
from tracegrad.report import write_card, write_report
from tracegrad.rollout.progress import Progress, format_time_left
from tracegrad.storage.remote import require_local_path
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.trainer import Trainer, checkpoint
from tracegrad.trainer.api import objective_of
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
    weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    objective: Objective | None = None,
    config: Config | None = None,
    online: OnlineConfig | None = None,
    play: RolloutConfig | None = None,
    evaluation: Sequence[Any] = (),
    servers: Sequence[str] | str = (),
    key: str | None = None,
    python: str | None = None,
    engine: Mapping[str, Any] | None = None,
    out: str | Path = "out/online",
    resume: bool = False,
    sinks: Sequence[metrics.Sink] | None = None,
    say: Callable[[str], None] = print,
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
        weights: weights of the reward functions.
        tools: functions that the policy may call, or a function that returns them for a task.
        environment: a class of `rollout.Environment`, or one for TRL's environment_factory.
        agent: `async (task, policy) -> float | dict`, which does a rollout and scores it. It calls `policy.chat`, or
            uses its own client with `policy.base_url` and `policy.key`.
        objective: a preset or another `Objective`; default: the one of `config`.
        config: training options. `data.holdout`, `train.epochs` and the options of held-out estimates are only for
            training on files and are ignored.
        online: options of the online loop.
        play: rollout options.
        evaluation: tasks that are rolled out before the first step and after the last, and never trained on.
        servers: URLs of vLLM servers, started with the flags of `weight_sync.vllm_arguments`; or "in-process" for
            `vllm.LLM` in this process; default: start a server.
        key: token of the servers. A server that is started here requires it too; without `key` it requires a random
            token.
        python: interpreter of an environment with vLLM, for the server that is started; default: this one.
        engine: vLLM's engine arguments by name, for the server that is started.
        out: folder of the run.
        resume: continue the run in `out`.
        sinks: receive the rows in addition to metrics.jsonl; default: one printed line per step, and the dashboards of
            `train.log_to`.
        say: receives the log lines for the user.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` contains a run and `resume` is False.
        SyncFault: if the servers do not sample from the policy that is trained.
        TracegradError: if a server, the folder or the rollouts fail permanently.
    """
    options, play, out, model = online or OnlineConfig(), play or RolloutConfig(), require_local_path(out), Path(model)
    if tasks is None and options.sync == "lora":
        raise ArgumentError(
            "TG-ONLINE-040: tasks is None and online.sync is 'lora'. An adapter could be unloaded while a collector "
            "elsewhere asks for it. Set online.sync to 'file', which merges adapters, or play the tasks here."
        )
    if tasks is None and not servers and key is None:
        raise ArgumentError(
            "TG-ONLINE-041: tasks is None, and no server is named. One that is started asks for a token on every "
            "path, which collectors in other processes would not have. Pass key= (key_file) here and to them, or name "
            "servers."
        )
    contract = None
    if tasks is not None or len(evaluation):
        contract = RolloutSpec.of(agent=agent, environment=environment, tools=tools, rewards=rewards, weights=weights)
    config = _config(config or Config())
    if objective is None:
        objective = objective_of(config)
    elif objective_of(config) != objective:  # record the objective that is trained
        config = update(replace(config, objective=Config().objective), objective_options(objective))
    tokenizer = Tokenizer.from_pretrained(model)
    ranks, mirror = Ranks.join(), RunDirectory(out)
    with ExitStack() as stack:
        with ranks.together():
            if ranks.first:
                stack.enter_context(mirror.locked())
        driven = Trainer(
            load_model(model), objective, config, out=mirror, tokenizer=model, ranks=ranks, steps=options.steps
        )
        _restore_or_begin(driven, resume)
        ledger = ConsumedGroups(out)
        player, evaluate = None, None
        with propagate_error(ranks):
            if ranks.first:
                make_sync, rank, base = weight_sync_backend(driven, options), config.train.lora_rank, model
                if (adapted := LoraFolder.read(model)) is not None:  # a server starts with the base model's weights
                    rank, base = adapted.rank, adapted.base
                pool, engine_arguments, ended_reason = stack.enter_context(
                    open_servers(base, servers, key, python, engine or {}, options, play, out, say, rank)
                )
                RunInfo(str(model), repr(objective), options, play, engine_arguments).write(out, config)
                link = ServerPool(pool, make_sync, driven.taken, ended=ended_reason, say=say)
                state = RunState(driven.taken, driven.taken, len(ledger.steps))
                settings = {"link": link, "state": state, "config": config, "tokenizer": tokenizer}
                settings |= {"options": options, "play": play}
                player, evaluate = build_rollout_workers(stack, contract, tasks, evaluation, out=out, **settings)
                stack.enter_context(link)
        lines = _sinks(driven, options, sinks, say) if ranks.first else []
        for sink in lines:
            stack.callback(sink.close)
        proof = WeightSyncBounds(bf16=str(driven.precision) == "torch.bfloat16")
        loop_options = {"evaluate": evaluate, "apart": tasks is None, "play": play, "first": model}
        loop = TrainingLoop(driven, tokenizer, options, ledger, player, lines, say, proof, **loop_options)
        with Interrupt() as interrupt, driven.together(ends=True):
            stopped = loop.run(interrupt)
    return _build_result(loop, model, stopped, interrupt)


def replay(
    run: str | Path,
    model: str | Path,
    *,
    objective: Objective | None = None,
    config: Config | None = None,
    out: str | Path,
    say: Callable[[str], None] = print,
) -> OnlineResult:
    """Repeat the steps of a run from its folder and its initial model, without servers or rollouts.

    On the same machine, the parameters equal those of the run bit for bit. Options that change the order of sums, such
    as `pack.share_prefixes`, change them by rounding; `sync_max` in the rows shows by how much.

    Args:
        run: folder of the run.
        model: initial model of the run.
        objective: default: the objective of the run. Needed if that has no name and cannot be written as text.
        config: default: the config of the run.
        out: folder for checkpoints and metrics; the folder of the run is not changed.
        say: receives the log lines for the user.

    Raises:
        ArgumentError: if `out` is the folder of the run or contains another run, or the run had another objective.
        ReadError: if the folder contains no run.
        FormatError: if the settings of the run cannot be read.
    """
    run, out, model = Path(run), require_local_path(out), Path(model)
    if run.resolve() == out.resolve():
        raise ArgumentError(
            f"TG-ONLINE-042: {out} is the run's own folder. The replay would overwrite it. Give another out."
        )
    before, config_before = RunInfo.read(run), load_config(run / "config.toml")
    objective = objective_of(config_before) if objective is None else objective
    _check_objective(run, before.objective, repr(objective))
    config = _config(config or config_before)
    with RunDirectory(out).locked():
        driven = Trainer(load_model(model), objective, config, out=out, tokenizer=model, steps=before.online.steps)
        driven.begin()
        ledger = ConsumedGroups(run)
        lines = [metrics.JsonLines(out / "metrics.jsonl")]
        options = OnlineConfig(steps=max(len(ledger.steps), 1))
        loop = TrainingLoop(driven, Tokenizer.from_pretrained(model), options, ledger, None, lines, say, proof=None)
        loop.folder = run / buffer.ROLLOUT_FOLDER
        with Interrupt() as interrupt:
            stopped = loop.run(interrupt)
        lines[0].close()
        return _build_result(loop, model, stopped, interrupt)


@dataclass
class TrainingLoop:
    """State of an online run between two steps.

    Args:
        driven: trainer with the policy and its optimizer.
        tokenizer: tokenizer of the model.
        options: options of the run.
        ledger: log of the groups that each step consumed.
        player: source of rollouts; None on ranks other than the first, and in a replay.
        sinks: receive one row per step.
        say: receives the log lines for the user.
        proof: bounds of the weight-sync check, which can stop the run; None without servers.
        apart: whether collectors in other processes do the rollouts; they use the newest version that was published.
        play: rollout options of the run.
        first: folder of the initial model, if servers start with that model.
    """

    driven: Trainer
    tokenizer: Tokenizer
    options: OnlineConfig
    ledger: ConsumedGroups
    player: Collector | RemoteCollectors | None
    sinks: Sequence[metrics.Sink]
    say: Callable[[str], None]
    proof: WeightSyncBounds | None = field(default_factory=WeightSyncBounds)
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluate: Callable[[int], dict[str, Any]] | None = None
    apart: bool = False
    play: RolloutConfig = field(default_factory=RolloutConfig)
    first: Path | None = None

    def __post_init__(self) -> None:
        self.folder = self.driven.out / buffer.ROLLOUT_FOLDER
        self.follower = GroupReader(self.folder)
        self.queue: list[tuple[GroupLocation, Traces, bool]] = []
        self.ranks = self.driven.ranks
        self.check = WeightSyncCheck(self.driven, self.options, self.proof, first=self.first)
        self._settled = False
        self._shown: tuple[Sequences, TokenRecord] | None = None
        settings = {"rank": self.ranks.rank, "world": self.ranks.world, "taken": self.driven.taken}
        self.keeper = TokenLogWriter(self.driven.out, self.driven.config.terms, self.driven.objective, **settings)
        self.signal = GroupFilter.of(self.driven.config)

    def run(self, interrupt: Interrupt) -> str:
        """Take steps until the last step, a signal, or the end of the tasks; return "done", "signal" or "tasks"."""
        try:
            return self._run(interrupt)
        finally:
            self.keeper.close()

    def _run(self, interrupt: Interrupt) -> str:
        self.bond = RankSync.of(self.ranks, interrupt)
        if self.player is not None:
            self.player.link.interrupted = lambda: interrupt.received is not None
        at = self._first_open_step()
        for entry in self.ledger.steps:
            self.follower.skip(entry.groups)
        # Remote collectors already have the versions of all these steps, so servers get no weights before the last of
        # them.
        self._replayed_steps = len(self.ledger.steps) if self.apart else 0
        if at >= self._replayed_steps:
            self._start_rollouts(at)
        while at < self.options.steps:
            began = time.perf_counter()
            with self.bond.first():
                groups = self._groups(at)
            if groups is None:
                self.bond.end()
                break
            try:
                self._step(*groups, waited=time.perf_counter() - began)
            except Interrupted:  # during the weight check, so no update was made
                break
            at += 1
            if at == self._replayed_steps:
                self._start_rollouts(at)
            elif at > self._replayed_steps:
                if self.player is not None:
                    self.player.step_taken(at)
                with self.bond.first():
                    self._evaluate_if_due(at)
        self._save()
        if interrupt.received is not None:
            return "signal"
        return "done" if at >= self.options.steps else "tasks"

    def _start_rollouts(self, at: int) -> None:
        """Push the initial weights to the servers, then let groups start."""
        if self.proof is not None:
            self._push()
            self._check_server_answers()
            with self.bond.first():
                self._evaluate_if_due(at)
        if self.player is not None:
            self.player.step_taken(len(self.ledger.steps))
            self.player.begin()

    def _check_server_answers(self) -> None:
        """Check the answers of the servers before the first rollout."""
        link = None if self.player is None else self.player.link
        canary = self.check.canary = ProbeSampler(self.driven, link, self.play, self.tokenizer)
        with self.bond.first():
            for line in canary.look():
                if self.ranks.first:
                    self.say(f"server   {line}")

    def _first_open_step(self) -> int:
        """Return the first step of the ledger that the policy has not taken."""
        steps = self.ledger.steps
        return next((entry.step for entry in steps if entry.version >= self.driven.taken), len(steps))

    def _groups(self, step: int) -> tuple[StepGroups, Traces] | None:
        """Return the groups of a step: those in the ledger if the step was taken before, otherwise new rollouts."""
        if step < len(self.ledger.steps):
            entry = self.ledger.steps[step]
            return entry, Traces.concatenate(buffer.read(self.folder, place) for place in entry.trained)
        if self.player is None:
            if self.ranks.alone:
                return None
            entry = self.ledger.wait(step, self.bond.over)
            return None if entry is None else self._groups(entry.step)
        groups = self._wait_for_groups()
        if groups is None:
            return None
        dull = [index for index, (_, _, is_dull) in enumerate(groups) if is_dull]
        entry = self.ledger.add(self.driven.taken, [place for place, _, _ in groups], dull)
        return entry, Traces.concatenate(traces for _, traces, is_dull in groups if not is_dull)

    def _wait_for_groups(self) -> list[tuple[GroupLocation, Traces, bool]] | None:
        """Wait for enough groups with differing rewards, or for the most groups that a step may consume."""
        assert self.player is not None
        pace, progress = self.player.pace, Progress(self.say)
        while not self.bond.over():
            over = self.player.over
            new, is_dull = self.follower.look(), self.signal.is_dull
            if new and self.player.failing is not None:  # set before the last group was written
                raise self.player.failing
            self.queue += [(place, traces, is_dull(self.signal.of_traces(traces))) for place, traces in new]
            useful = np.cumsum([not no_signal for _, _, no_signal in self.queue])
            enough = int(np.searchsorted(useful, pace.groups)) + 1
            if (len(useful) and useful[-1] >= pace.groups) or len(self.queue) >= pace.most or over:
                chosen = self.queue[: min(enough, pace.most)]
                self.queue = self.queue[len(chosen) :]
                return chosen or None
            count = int(useful[-1]) if len(useful) else 0
            progress.tick(
                lambda seconds, count=count: (
                    f"playing  {count} of {pace.groups} groups whose rewards differ, {seconds:.0f} s; "
                    + format_time_left(seconds, count, pace.groups)
                )
            )
            self.player.check()
            self.player.wait(POLL_S)
        return None

    def _step(self, entry: StepGroups, traces: Traces, *, waited: float) -> None:
        began = time.perf_counter()
        version = self.driven.taken
        columns = {"groups": len(entry.groups), "groups_dull": len(entry.dull)}
        # Align the rollouts of the step's groups.
        traces, sequences = self._align(traces)
        if not len(traces):
            self.say(f"step {entry.step + 1}: no group had unlike rewards; there is nothing to learn, and no update.")
            return
        # Compute advantages and pack rows.
        try:
            step, rewards = self._packed(sequences)
        except NothingToLearn as reason:
            self.say(f"step {entry.step + 1}: no update; {reason}")
            return
        has_servers = self.proof is not None and entry.step >= self._replayed_steps
        if self.check.canary is not None and self.ranks.first:
            groups = dict(zip(traces.groups, range(len(traces)), strict=True))
            self.check.canary.prepare(traces[index].to_dict() for index in groups.values())
        # The check compares only tokens that the trained version sampled.
        own_tokens = own_terms(step, version)
        mixed = _mixed_version_traces(traces, sequences)
        mixed &= self.options.sync != "lora"  # a LoRA call uses one adapter from start to end
        own_tokens &= ~mixed[step.trace]
        gap = LogprobGap(0)

        def check(logprobs: Any) -> None:
            nonlocal gap
            gap = self.check.gap(
                entry.step + 1, step, logprobs, own_tokens, UnreliablePrompts.of(step, sequences), sequences, mixed
            )

        # Run the forward and backward passes, then the weight check, then `optimizer.step()`.
        packed_at, wait_s = time.perf_counter(), self._wait_s
        outcome = self.driven.step(step, version, rewards=rewards, endings=sequences.ending, check=check)
        self._shown = sequences, TokenRecord.of(self.driven.taken, step, outcome)
        self.keeper.step(self.driven.taken, step, outcome, sequences, sets=self.options.steps - entry.step)
        trained_at, wait_s, unreachable_s = time.perf_counter(), self._wait_s - wait_s, self._unreachable_s
        # Send the new weights to the servers.
        sync_result = self._push() if has_servers else None
        unreachable_s = self._unreachable_s - unreachable_s
        # Write metrics and a checkpoint.
        drift = sequences.drift
        columns |= {
            "version": version,
            "forks": sequences.branches - sequences.traces,
            "tokens_lost": drift.recorded - drift.exact,
            "seconds_prepared": packed_at - began,
            "seconds_waited": waited + wait_s + unreachable_s,
            "seconds_trained": trained_at - packed_at - wait_s,
            "seconds_pushed": time.perf_counter() - trained_at - unreachable_s,
            "sync_pause": 0.0 if sync_result is None else sync_result.seconds,
            **gap.row(),
            **tool_metrics(traces),
        }
        self._log(entry.step + 1, columns, logged_metrics(traces))
        log_traces(self.sinks, (trace for trace in traces if trace.group == traces[0].group), entry.step + 1)
        every = self.driven.config.checkpoint.every
        if every and self.driven.taken % every == 0:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint; on the first rank also update report.html."""
        self.driven.save()
        if self.ranks.first and self._shown is not None:
            sequences, terms = self._shown
            rows, out = metrics.read_rows(self.driven.out / "metrics.jsonl"), self.driven.out
            contents = {"rows": rows, "sequences": sequences, "tokenizer": self.tokenizer, "terms": [terms]}
            write_report(out / "report.html", **contents, title=f"{out.name}, the tokens of step {terms.step}")

    def _align(self, traces: Traces) -> tuple[Traces, Sequences]:
        """Align traces and leave out those without sampled tokens, which failed before their first answer."""
        sequences = align(traces, self.tokenizer, on_error="skip")
        sampled = {sequences.trace_ids[index] for index in np.unique(sequences.trace)}
        kept = [index for index, trace in enumerate(traces) if trace.id in sampled]
        if len(kept) == sequences.traces:
            return traces, sequences
        traces = traces[kept]
        return traces, align(traces, self.tokenizer)

    def _packed(self, sequences: Sequences) -> tuple[Step, Any]:
        """Return the step of this rank, packed from all groups, and the rewards of its traces."""
        config = self.driven.config
        model = self.driven.model
        packing = {"shape": ModelShape.known(model.config), "bucket": row_padding(config)}
        options = config.filter
        # The tolerance chose the groups, as `even_groups` does for files.
        if options.tolerance and self.signal.compared:
            config = replace(config, filter=replace(options, even_groups=True))
        # A call without an ending was abandoned by its client, which truncated it.
        if options.truncated or options.zero_truncated:
            unknown_ending = sequences.ending == ENDINGS.index("unknown")
            sequences = replace(
                sequences, ending=np.where(unknown_ending, TRUNCATED, sequences.ending).astype(np.uint8)
            )
        feed = TrainingData.of(
            sequences, self.driven.objective, config, ranks=self.ranks.world, rank=self.ranks.rank, **packing
        )
        if not self._settled:
            check_vocabulary(sequences, model)
            for sentence in [*feed.notes, *check_media(sequences, model)]:
                self.say(f"note     {sentence}")
            longest = min(int(np.diff(sequences.cu_seqlens).max()), config.pack.token_budget)
            reason = verify_rows(self.driven.target, longest, trees=feed.shares)
            self._trees, self._settled = not reason, True
            self.say(f"note     {describe_attention(self.driven.target, trees=feed.shares and self._trees)}")
        [step] = replace(feed, trees=self._trees).steps(0)
        return step, feed.rewards

    @property
    def _wait_s(self) -> float:
        """Seconds spent waiting for servers, for checks and weight syncs."""
        return 0.0 if self.player is None else self.player.link.asked_s

    @property
    def _unreachable_s(self) -> float:
        """The part of `_wait_s` in which no server could be reached."""
        return 0.0 if self.player is None else self.player.link.gone_s

    def _push(self) -> Any:
        """Push the weights to the servers.

        Return the result; None on ranks without servers, or if a signal came while no server could be reached.
        """
        weights = weights_of(self.driven, self.options)
        if self.player is None:
            return None
        with self.bond.first():
            try:
                result = self.player.link.push(weights, self.driven.taken)
            except Interrupted:
                return None
        for line in result.lines():
            self.say(f"server   {line}")
        return result

    def _evaluate_if_due(self, at: int) -> None:
        """Run the evaluation if it is due: before the first step, after the last, and every `eval_every` steps."""
        every = self.options.eval_every
        if self.evaluate is not None and (at in (0, self.options.steps) or (every and at % every == 0)):
            began = time.perf_counter()
            try:
                results = self.evaluate(at)
            except Interrupted:
                self.say(f"evaluation after step {at}: left out, as a signal came")
                return
            row = metrics.finite({"step": at, **results, "seconds_evaluated": time.perf_counter() - began})
            self.rows.append(row)
            metrics.log_all(self.sinks, row)

    def _log(self, number: int, columns: dict[str, Any], logged: Mapping[str, float]) -> None:
        row = metrics.finite({**self.driven.row(), **columns, "step": number})
        if self.player is not None:
            counts = self.player.counts
            row |= {"trajectories": counts.trajectories, "trajectories_failed": counts.failed}
            row |= {"trajectories_without_reward": counts.without_reward, "calls_retried": self.player.retried}
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
        steps: number of steps in the ledger.
        stopped: "done", "signal", or "tasks" if the tasks ended first.
        checkpoint: folder of the last checkpoint.
        rows: metrics, one row per step and per evaluation.
        exit_code: 0, or 128 + signal number.
    """

    steps: int
    stopped: str
    checkpoint: Path
    rows: list[dict[str, Any]]
    exit_code: int = 0


def _build_result(loop: TrainingLoop, model: Path, stopped: str, interrupt: Interrupt) -> OnlineResult:
    driven, last = loop.driven, checkpoint.list_checkpoints(loop.driven.out)[-1]
    if loop.ranks.first:
        groups = [len(step.trained) for step in loop.ledger.steps]
        data = [f"played by the policy itself: {sum(groups):,} groups with unlike rewards in {len(groups):,} steps"]
        card = {"base": model, "objective": driven.objective, "config": driven.config, "rows": loop.rows}
        write_card(last, **card, data=data)
    return OnlineResult(len(loop.ledger.steps), stopped, last, loop.rows, interrupt.code(stopped))


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
        f"TG-ONLINE-043: {run}: the run had another objective: {'; '.join(lines)}{more}. The replay's parameters would "
        "be others. Leave --objective out, or give that of the run."
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

    Nothing is held out, since evaluations have their own tasks. A trace whose whole group otherwise failed gets
    advantage 0.
    """
    file_options = (
        (config.data.reward_weights, "data.reward_weights"),
        (config.train.iterations > 1, "train.iterations"),
    )
    for is_set, name in file_options:
        if is_set:
            raise ArgumentError(
                f"TG-ONLINE-044: {name} is of training from a file, and would do nothing here. Leave it out; `weights` "
                "is what reward functions are weighed by."
            )
    if config.reward_kl.coef:
        raise ArgumentError(
            "TG-ONLINE-045: reward_kl.coef is of training from a file. A step that is played is compared before "
            "anything of it is measured, and nothing would be charged. Take objective.kl, or train on what was "
            "recorded."
        )
    config = replace(config, data=replace(config.data, holdout=0.0))
    if config.advantage.baseline == "none" or config.advantage.singleton != "refuse":
        return config
    return replace(config, advantage=replace(config.advantage, singleton="zero"))


def _restore_or_begin(driven: Trainer, resume: bool) -> None:
    if resume:
        driven.restore()
    elif (driven.out / "steps.jsonl").exists():
        raise ArgumentError(
            f"TG-ONLINE-046: {driven.out} holds a run. A new one would be mixed with it. Go on with "
            f"resume=True, or give another out."
        )
    driven.begin()


def _sinks(
    driven: Trainer, options: OnlineConfig, sinks: Sequence[metrics.Sink] | None, say: Callable[[str], None]
) -> list[metrics.Sink]:
    lines = metrics.JsonLines(driven.out / "metrics.jsonl", keep_to_step=driven.taken or None)
    if sinks is not None:
        return [lines, *sinks]
    dashboards = loggers.open_sinks(driven.config.train.log_to, driven.out, as_dict(driven.config))
    return [lines, *dashboards, LinePrinter(options.steps, say)]


class LinePrinter:
    """Prints one line per step and per evaluation."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self.say = total, say

    def log(self, row: metrics.Row) -> None:
        """Print a row."""
        if "eval_reward" in row:
            names = ("eval_reward", "eval_low", "eval_high")
            mean, low, high = (float("nan") if row[name] is None else row[name] for name in names)
            self.say(f"evaluation after step {row['step']}: {mean:.1%} [{low:.1%}, {high:.1%}] of {row['eval_tasks']}")
            return
        parts = [f"step {row['step']}/{self.total}", f"reward {row.get('reward') or 0:.3f}"]
        parts += [f"{row['groups']} groups ({row['groups_dull']} dull)"]
        if row.get("sync_terms"):
            parts.append(f"sync within {row['sync_max']:.1e}")
        parts.append(f"waited {row['seconds_waited']:.1f} s, trained {row['seconds_trained']:.1f} s")
        self.say("  ".join(parts))

    def close(self) -> None:
        """Do nothing: lines are not buffered."""
