"""Train online (`train`), and repeat a run from its folder (`replay`).

Roll out, score, check the servers' weights, update, sync: the steps of `train` in their order.
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
from tracegrad.data.codes import CUT, ENDINGS
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError
from tracegrad.metrics import loggers
from tracegrad.metrics.loggers import log_traces
from tracegrad.objective import Objective
from tracegrad.online import buffer
from tracegrad.online.buffer import Follower, Ledger, Place, Taken
from tracegrad.online.collector import Collector, Signal
from tracegrad.online.logprob_gap import Gap, Proof, own_terms
from tracegrad.online.options import Online, Play
from tracegrad.online.rank_sync import Bond, telling
from tracegrad.online.remote_collectors import Elsewhere, State
from tracegrad.online.rollout_metrics import beside, functions_of, tools_of
from tracegrad.online.rollout_workers import Contract, players_of
from tracegrad.online.run_info import Brief
from tracegrad.online.server_pool import Interrupted, Link
from tracegrad.online.servers import served, sync_of, weights_of
from tracegrad.online.weight_check import Check, Forks
from tracegrad.online.weight_sample import Canary
from tracegrad.packing import ModelShape, Step
from tracegrad.recipes.recipe import named
from tracegrad.report import write_card, write_report
from tracegrad.rollout.progress import Progress, left
from tracegrad.storage.remote import place_here
from tracegrad.storage.run_dir import Mirror
from tracegrad.trainer import Run, checkpoint
from tracegrad.trainer.api import objective_of
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.lora import Adapted, load_model
from tracegrad.trainer.result import TermRecord
from tracegrad.trainer.setup import bucket_of, check_media, check_vocabulary
from tracegrad.trainer.signals import Interrupt
from tracegrad.trainer.steps import Feed, NothingToLearn
from tracegrad.trainer.token_log_writer import Keeper
from tracegrad.trainer.verify_attention import describe_attention, settle_rows

POLL_S = 0.5
"""Until the folder is looked into again for what other processes have played."""

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
    online: Online | None = None,
    play: Play | None = None,
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
        model: folder of a causal language model with its tokenizer and chat template; or of LoRA adapters, which are
            trained further.
        tasks: a list, which comes again in another order, or what can be iterated once. A task is a text, a list of
            messages, or a dict with either as `prompt` and what reward functions take. None: processes of their own
            play into `out`, each by `collect`.
        rewards: functions in TRL's convention, `(prompts, completions, **columns) -> list`; they score whole groups.
        weights: of the reward functions.
        tools: functions that the policy may call, or a function from the task to functions.
        environment: a class of `rollout.Environment`, or one of TRL's environment_factory.
        agent: `async (task, policy) -> float | dict`, which plays and scores, by `policy.chat` or by a client of its
            own for `policy.base_url` and `policy.key`.
        objective: a preset or another value of `Objective`; default that of `config`.
        config: of training; `data.holdout`, `train.epochs` and value are of runs over a file and not read.
        online: what the trainer does.
        play: how a task is played.
        evaluation: tasks that are played before the first step and after the last, and not trained on.
        servers: URLs of vLLM servers, started with the flags of `weight_sync.vllm_arguments`; or "in-process" for
            `vllm.LLM` in this one; default: a server is started.
        key: token of the servers; one that is started asks for it too, or for one that is drawn for the run.
        python: interpreter of an environment that has vLLM, for the server that is started; default this one.
        engine: vLLM's engine arguments by name, for the server that is started.
        out: folder of the run, by its path.
        resume: go on with the run in `out`.
        sinks: where rows go beside metrics.jsonl; default a line each step, and the dashboards of `train.log_to`.
        say: takes the sentences that a user should read.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` holds a run and `resume` is False.
        SyncFault: if the servers do not sample from the policy that is trained.
        TracegradError: if a server, the folder or what plays fails for good.
    """
    told, play, out, model = online or Online(), play or Play(), place_here(out), Path(model)
    if tasks is None and told.sync == "lora":
        raise ArgumentError(
            "tasks is None and online.sync is 'lora'. An adapter could be unloaded while a collector elsewhere asks "
            "for it. Set online.sync to 'file', which merges adapters, or play the tasks here."
        )
    if tasks is None and not servers and key is None:
        raise ArgumentError(
            "tasks is None, and no server is named. One that is started asks for a token on every path, which "
            "collectors in other processes would not have. Pass key= (key_file) here and to them, or name servers."
        )
    contract = None
    if tasks is not None or len(evaluation):
        contract = Contract.of(agent=agent, environment=environment, tools=tools, rewards=rewards, weights=weights)
    config = _config(config or Config())
    if objective is None:
        objective = objective_of(config)
    elif objective_of(config) != objective:  # what is recorded is what is trained
        config = update(replace(config, objective=Config().objective), named(objective))
    tokenizer = Tokenizer.from_pretrained(model)
    ranks, mirror = Ranks.join(), Mirror(out)
    with ExitStack() as stack:
        with ranks.together():
            if ranks.first:
                stack.enter_context(mirror.locked())
        driven = Run(load_model(model), objective, config, out=mirror, tokenizer=model, ranks=ranks, steps=told.steps)
        _take_up(driven, resume)
        ledger = Ledger(out)
        player, evaluate = None, None
        with telling(ranks):
            if ranks.first:
                way, rank, below = sync_of(driven, told), config.train.lora_rank, model
                if (adapted := Adapted.read(model)) is not None:  # a server is started with whole weights
                    rank, below = adapted.rank, adapted.base
                pool, engine_told, ended = stack.enter_context(
                    served(below, servers, key, python, engine or {}, told, play, out, say, rank)
                )
                Brief(str(model), repr(objective), told, play, engine_told).write(out, config)
                link = Link(pool, way, driven.taken, ended=ended, say=say)
                state = State(driven.taken, driven.taken, len(ledger.steps))
                known = {"link": link, "state": state, "config": config, "tokenizer": tokenizer}
                known |= {"options": told, "play": play}
                player, evaluate = players_of(stack, contract, tasks, evaluation, out=out, **known)
                stack.enter_context(link)
        lines = _sinks(driven, told, sinks, say) if ranks.first else []
        for sink in lines:
            stack.callback(sink.close)
        proof = Proof(bf16=str(driven.precision) == "torch.bfloat16")
        more = {"evaluate": evaluate, "apart": tasks is None, "play": play, "first": model}
        loop = Loop(driven, tokenizer, told, ledger, player, lines, say, proof, **more)
        with Interrupt() as interrupt, driven.together(ends=True):
            stopped = loop.run(interrupt)
    return _finished(loop, model, stopped, interrupt)


def replay(
    run: str | Path,
    model: str | Path,
    *,
    objective: Objective | None = None,
    config: Config | None = None,
    out: str | Path,
    say: Callable[[str], None] = print,
) -> Finished:
    """Takes the steps of a run again, from its folder and the model that it began with: no server, nothing played.

    On the same machine the parameters are those of the run, bit for bit. Options that change the order of sums, such as
    `pack.share_prefixes`, change them by rounding; `sync_max` in the rows says by how much.

    Args:
        run: folder of the run.
        model: the one that it had.
        objective: default that of the run; needed for one that has no name and cannot be written as text.
        config: default that of the run.
        out: folder for checkpoints and metrics; the run's is not changed.

    Raises:
        ArgumentError: if `out` is the run's folder or holds another, or the run had another objective.
        ReadError: if the folder holds no run.
        FormatError: if it does not say what the run was told.
    """
    run, out, model = Path(run), place_here(out), Path(model)
    if run.resolve() == out.resolve():
        raise ArgumentError(f"{out} is the run's own folder. The replay would overwrite it. Give another out.")
    before, config_before = Brief.read(run), load_config(run / "config.toml")
    objective = objective_of(config_before) if objective is None else objective
    _check_objective(run, before.objective, repr(objective))
    config = _config(config or config_before)
    with Mirror(out).locked():
        driven = Run(load_model(model), objective, config, out=out, tokenizer=model, steps=before.online.steps)
        driven.begin()
        ledger = Ledger(run)
        lines = [metrics.JsonLines(out / "metrics.jsonl")]
        told = Online(steps=max(len(ledger.steps), 1))
        loop = Loop(driven, Tokenizer.from_pretrained(model), told, ledger, None, lines, say, proof=None)
        loop.folder = run / buffer.FOLDER
        with Interrupt() as interrupt:
            stopped = loop.run(interrupt)
        lines[0].close()
        return _finished(loop, model, stopped, interrupt)


@dataclass
class Loop:
    """A run between two steps.

    Args:
        driven: the policy and its optimizer.
        tokenizer: of the model.
        options: of the run.
        ledger: which groups each step took.
        player: what plays; None on ranks that follow, and in a replay.
        sinks: take a row each step.
        say: takes the sentences that a user should read.
        proof: what stops the run; None where there are no servers to be wrong.
        apart: others play, in processes that go by the newest version that they were told.
        play: of the run.
        first: folder of the model that the run began with, where that is the one that servers start with.
    """

    driven: Run
    tokenizer: Tokenizer
    options: Online
    ledger: Ledger
    player: Collector | Elsewhere | None
    sinks: Sequence[metrics.Sink]
    say: Callable[[str], None]
    proof: Proof | None = field(default_factory=Proof)
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluate: Callable[[int], dict[str, Any]] | None = None
    apart: bool = False
    play: Play = field(default_factory=Play)
    first: Path | None = None

    def __post_init__(self) -> None:
        self.folder = self.driven.out / buffer.FOLDER
        self.follower = Follower(self.folder)
        self.queue: list[tuple[Place, Traces, bool]] = []
        self.ranks = self.driven.ranks
        self.check = Check(self.driven, self.options, self.proof, first=self.first)
        self._settled = False
        self._shown: tuple[Sequences, TermRecord] | None = None
        told = {"rank": self.ranks.rank, "world": self.ranks.world, "taken": self.driven.taken}
        self.keeper = Keeper(self.driven.out, self.driven.config.terms, self.driven.objective, **told)
        self.signal = Signal.of(self.driven.config)

    def run(self, interrupt: Interrupt) -> str:
        """Steps until the last, a signal, or the end of the tasks; "done", "signal" or "tasks"."""
        try:
            return self._run(interrupt)
        finally:
            self.keeper.close()

    def _run(self, interrupt: Interrupt) -> str:
        self.bond = Bond.of(self.ranks, interrupt)
        if self.player is not None:
            self.player.link.interrupted = lambda: interrupt.received is not None
        at = self._beginning()
        for taken in self.ledger.steps:
            self.follower.skip(taken.groups)
        # What plays elsewhere knows the versions of all these steps: servers are given none before the last of them.
        self._again = len(self.ledger.steps) if self.apart else 0
        if at >= self._again:
            self._begin(at)
        while at < self.options.steps:
            began = time.perf_counter()
            with self.bond.first():
                found = self._groups(at)
            if found is None:
                self.bond.end()
                break
            try:
                self._step(*found, waited=time.perf_counter() - began)
            except Interrupted:  # while the weights in the servers were checked: no update was taken
                break
            at += 1
            if at == self._again:
                self._begin(at)
            elif at > self._again:
                if self.player is not None:
                    self.player.step_taken(at)
                with self.bond.first():
                    self._evaluated(at)
        self._save()
        if interrupt.received is not None:
            return "signal"
        return "done" if at >= self.options.steps else "tasks"

    def _begin(self, at: int) -> None:
        """Gives the servers the weights that they are to have first, and lets groups begin."""
        if self.proof is not None:
            self._push()
            self._look()
            with self.bond.first():
                self._evaluated(at)
        if self.player is not None:
            self.player.step_taken(len(self.ledger.steps))
            self.player.begin()

    def _look(self) -> None:
        """Looks at what the servers answer before anything is played."""
        link = None if self.player is None else self.player.link
        canary = self.check.canary = Canary(self.driven, link, self.play, self.tokenizer)
        with self.bond.first():
            for line in canary.look():
                if self.ranks.first:
                    self.say(f"server   {line}")

    def _beginning(self) -> int:
        """The first step of the ledger that the policy has not taken."""
        steps = self.ledger.steps
        return next((each.step for each in steps if each.version >= self.driven.taken), len(steps))

    def _groups(self, step: int) -> tuple[Taken, Traces] | None:
        """The groups of a step: by the ledger where they were chosen before, else what has been played."""
        if step < len(self.ledger.steps):
            taken = self.ledger.steps[step]
            return taken, Traces.concatenate(buffer.read(self.folder, place) for place in taken.trained)
        if self.player is None:
            if self.ranks.alone:
                return None
            taken = self.ledger.wait(step, self.bond.over)
            return None if taken is None else self._groups(taken.step)
        chosen = self._chosen()
        if chosen is None:
            return None
        dull = [index for index, (_, _, teaches_nothing) in enumerate(chosen) if teaches_nothing]
        taken = self.ledger.add(self.driven.taken, [place for place, _, _ in chosen], dull)
        return taken, Traces.concatenate(traces for _, traces, teaches_nothing in chosen if not teaches_nothing)

    def _chosen(self) -> list[tuple[Place, Traces, bool]] | None:
        """Waits for enough groups whose rewards differ, or as many as a step may have."""
        assert self.player is not None
        pace, progress = self.player.pace, Progress(self.say)
        while not self.bond.over():
            over = self.player.over
            new, dull = self.follower.look(), self.signal.is_dull
            if new and self.player.failing is not None:  # known before the last of them was there
                raise self.player.failing
            self.queue += [(place, traces, dull(self.signal.of_traces(traces))) for place, traces in new]
            sharp = np.cumsum([not teaches_nothing for _, _, teaches_nothing in self.queue])
            enough = int(np.searchsorted(sharp, pace.groups)) + 1
            if (len(sharp) and sharp[-1] >= pace.groups) or len(self.queue) >= pace.most or over:
                chosen = self.queue[: min(enough, pace.most)]
                self.queue = self.queue[len(chosen) :]
                return chosen or None
            here = int(sharp[-1]) if len(sharp) else 0
            progress.tick(
                lambda seconds, here=here: (
                    f"playing  {here} of {pace.groups} groups whose rewards differ, {seconds:.0f} s; "
                    + left(seconds, here, pace.groups)
                )
            )
            self.player.check()
            self.player.wait(POLL_S)
        return None

    def _step(self, taken: Taken, traces: Traces, *, waited: float) -> None:
        began = time.perf_counter()
        version = self.driven.taken
        about = {"groups": len(taken.groups), "groups_dull": len(taken.dull)}
        # Align the rollouts of the groups that this step takes.
        traces, sequences = self._aligned(traces)
        if not len(traces):
            self.say(f"step {taken.step + 1}: no group had unlike rewards; there is nothing to learn, and no update.")
            return
        # Advantages, and packed rows.
        try:
            step, rewards = self._packed(sequences)
        except NothingToLearn as nothing:
            self.say(f"step {taken.step + 1}: no update; {nothing}")
            return
        served = self.proof is not None and taken.step >= self._again
        if self.check.canary is not None and self.ranks.first:
            groups = dict(zip(traces.groups, range(len(traces)), strict=True))
            self.check.canary.prepare(traces[index].to_dict() for index in groups.values())
        # The tokens by which the servers' weights are checked: those that the version to be trained sampled.
        here = own_terms(step, version)
        mixed = _mixed(traces, sequences)
        mixed &= self.options.sync != "lora"  # a call keeps the adapter that it began with
        here &= ~mixed[step.trace]
        gap = Gap(0)

        def check(logprobs: Any) -> None:
            nonlocal gap
            gap = self.check.gap(taken.step + 1, step, logprobs, here, Forks.of(step, sequences), sequences, mixed)

        # Forward and backward passes, the check of the servers' weights, then `optimizer.step()`.
        prepared, asked = time.perf_counter(), self._asked_s
        outcome = self.driven.step(step, version, rewards=rewards, endings=sequences.ending, check=check)
        self._shown = sequences, TermRecord.of(self.driven.taken, step, outcome)
        self.keeper.step(self.driven.taken, step, outcome, sequences, sets=self.options.steps - taken.step)
        trained, asked, gone = time.perf_counter(), self._asked_s - asked, self._gone_s
        # Send the new weights to the servers.
        pushed = self._push() if served else None
        gone = self._gone_s - gone
        # Metrics and checkpoint.
        drift = sequences.drift
        about |= {
            "version": version,
            "forks": sequences.branches - sequences.traces,
            "tokens_lost": drift.recorded - drift.exact,
            "seconds_prepared": prepared - began,
            "seconds_waited": waited + asked + gone,
            "seconds_trained": trained - prepared - asked,
            "seconds_pushed": time.perf_counter() - trained - gone,
            "sync_pause": 0.0 if pushed is None else pushed.seconds,
            **gap.row(),
            **tools_of(traces),
        }
        self._log(taken.step + 1, about, functions_of(traces))
        log_traces(self.sinks, (trace for trace in traces if trace.group == traces[0].group), taken.step + 1)
        every = self.driven.config.checkpoint.every
        if every and self.driven.taken % every == 0:
            self._save()

    def _save(self) -> None:
        """A checkpoint, and on the first rank the page of the run so far."""
        self.driven.save()
        if self.ranks.first and self._shown is not None:
            sequences, terms = self._shown
            rows, out = metrics.read_rows(self.driven.out / "metrics.jsonl"), self.driven.out
            told = {"rows": rows, "sequences": sequences, "tokenizer": self.tokenizer, "terms": [terms]}
            write_report(out / "report.html", **told, title=f"{out.name}, the tokens of step {terms.step}")

    def _aligned(self, traces: Traces) -> tuple[Traces, Sequences]:
        """The traces in which anything was sampled: what failed before its first answer holds nothing to train on."""
        sequences = align(traces, self.tokenizer, on_error="skip")
        there = {sequences.trace_ids[index] for index in np.unique(sequences.trace)}
        kept = [index for index, trace in enumerate(traces) if trace.id in there]
        if len(kept) == sequences.traces:
            return traces, sequences
        traces = traces[kept]
        return traces, align(traces, self.tokenizer)

    def _packed(self, sequences: Sequences) -> tuple[Step, Any]:
        """One step of all groups, of this rank, with the rewards of its traces."""
        config = self.driven.config
        model = self.driven.model
        cut = {"shape": ModelShape.known(model.config), "bucket": bucket_of(config)}
        told = config.filter
        if told.tolerance and self.signal.compared:  # groups were chosen by it, as from a file with even_groups
            config = replace(config, filter=replace(told, even_groups=True))
        if told.truncated or told.zero_truncated:  # a call that its client left says no end, and was cut off by that
            unsaid = sequences.ending == ENDINGS.index("unknown")
            sequences = replace(sequences, ending=np.where(unsaid, CUT, sequences.ending).astype(np.uint8))
        feed = Feed.of(sequences, self.driven.objective, config, ranks=self.ranks.world, rank=self.ranks.rank, **cut)
        if not self._settled:
            check_vocabulary(sequences, model)
            for sentence in [*feed.notes, *check_media(sequences, model)]:
                self.say(f"note     {sentence}")
            longest = min(int(np.diff(sequences.cu_seqlens).max()), config.pack.token_budget)
            why = settle_rows(self.driven.target, longest, trees=feed.shares)
            self._trees, self._settled = not why, True
            self.say(f"note     {describe_attention(self.driven.target, trees=feed.shares and self._trees)}")
        [step] = replace(feed, trees=self._trees).steps(0)
        return step, feed.rewards

    @property
    def _asked_s(self) -> float:
        """Seconds in which servers were waited for, to check or to push."""
        return 0.0 if self.player is None else self.player.link.asked_s

    @property
    def _gone_s(self) -> float:
        """Those of them in which no server could be asked."""
        return 0.0 if self.player is None else self.player.link.gone_s

    def _push(self) -> Any:
        """What came of a push; None on ranks without servers, and where a signal came while none could be asked."""
        weights = weights_of(self.driven, self.options)
        if self.player is None:
            return None
        with self.bond.first():
            try:
                pushed = self.player.link.push(weights, self.driven.taken)
            except Interrupted:
                return None
        for line in pushed.lines():
            self.say(f"server   {line}")
        return pushed

    def _evaluated(self, at: int) -> None:
        """Evaluates before the first step, after the last, and at the cadence between."""
        every = self.options.eval_every
        if self.evaluate is not None and (at in (0, self.options.steps) or (every and at % every == 0)):
            began = time.perf_counter()
            try:
                found = self.evaluate(at)
            except Interrupted:
                self.say(f"evaluation after step {at}: left out, as a signal came")
                return
            row = metrics.finite({"step": at, **found, "seconds_evaluated": time.perf_counter() - began})
            self.rows.append(row)
            metrics.log_all(self.sinks, row)

    def _log(self, number: int, about: dict[str, Any], said: Mapping[str, float]) -> None:
        row = metrics.finite({**self.driven.row(), **about, "step": number})
        if self.player is not None:
            counts = self.player.counts
            row |= {"trajectories": counts.trajectories, "trajectories_failed": counts.failed}
            row |= {"trajectories_without_reward": counts.without_reward, "calls_retried": self.player.retried}
        row = beside(row, metrics.finite(said))
        self.rows.append(row)
        metrics.log_all(self.sinks, row)


def _mixed(traces: Traces, sequences: Sequences) -> Any:
    """[R] bool: traces with a call that was under way while weights changed, whose tokens are of two versions."""
    told = {trace.id: b'"received_version"' in trace.record for trace in traces}
    return np.array([told.get(name, False) for name in sequences.trace_ids], bool)


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


def _finished(loop: Loop, model: Path, stopped: str, interrupt: Interrupt) -> Finished:
    driven, last = loop.driven, checkpoint.list_checkpoints(loop.driven.out)[-1]
    if loop.ranks.first:
        groups = [len(step.trained) for step in loop.ledger.steps]
        data = [f"played by the policy itself: {sum(groups):,} groups with unlike rewards in {len(groups):,} steps"]
        about = {"base": model, "objective": driven.objective, "config": driven.config, "rows": loop.rows}
        write_card(last, **about, data=data)
    return Finished(len(loop.ledger.steps), stopped, last, loop.rows, interrupt.code(stopped))


def _check_objective(run: Path, before: str, now: str) -> None:
    """Refuse another objective than the run's, by the options that differ.

    Args:
        before, now: `repr` of the two objectives.
    """
    if before == now:
        return
    old, new = _options(before), _options(now)
    differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    said = [f"{name}: {old.get(name, 'none')}, now {new.get(name, 'none')}" for name in differ[:SHOWN_OPTIONS]]
    more = f"; and {len(differ) - SHOWN_OPTIONS} more" if len(differ) > SHOWN_OPTIONS else ""
    raise ArgumentError(
        f"{run}: the run had another objective: {'; '.join(said)}{more}. The replay's parameters would be others. "
        "Leave --objective out, or give that of the run."
    )


def _options(objective: str) -> dict[str, str]:
    """The fields of an objective by their dotted names, from its `repr`; one with a function in it is one text.

    >>> _options("Objective(ratio=Ratio(num='theta'), weights=(Weight(), 2))")
    {'': 'Objective', 'ratio': 'Ratio', 'ratio.num': "'theta'", 'weights.0': 'Weight', 'weights.1': '2'}
    """
    found = dict[str, str]()

    def add(node: ast.expr, at: str) -> None:
        inner = lambda name: f"{at}.{name}" if at else str(name)  # noqa: E731
        if isinstance(node, ast.Call):
            found[at] = ast.unparse(node.func)
            for each in node.keywords:
                add(each.value, inner(each.arg))
        elif isinstance(node, ast.Tuple):
            for number, each in enumerate(node.elts):
                add(each, inner(number))
        else:
            found[at] = ast.unparse(node)

    try:
        add(ast.parse(objective, mode="eval").body, "")
    except SyntaxError:
        return {"objective": objective}
    return found


def _config(config: Config) -> Config:
    """Nothing is held out, as evaluations have tasks of their own; a trace whose whole group failed beside it is 0."""
    told = (config.data.reward_weights, "data.reward_weights"), (config.train.iterations > 1, "train.iterations")
    for is_told, name in told:
        if is_told:
            raise ArgumentError(
                f"{name} is of training from a file, and would do nothing here. Leave it out; `weights` is what "
                "reward functions are weighed by."
            )
    if config.reward_kl.coef:
        raise ArgumentError(
            "reward_kl.coef is of training from a file. A step that is played is compared before anything of it is "
            "measured, and nothing would be charged. Take objective.kl, or train on what was recorded."
        )
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


def _sinks(
    driven: Run, told: Online, sinks: Sequence[metrics.Sink] | None, say: Callable[[str], None]
) -> list[metrics.Sink]:
    lines = metrics.JsonLines(driven.out / "metrics.jsonl", keep_to_step=driven.taken or None)
    if sinks is not None:
        return [lines, *sinks]
    chosen = loggers.opened(driven.config.train.log_to, driven.out, as_dict(driven.config))
    return [lines, *chosen, Line(told.steps, say)]


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
