"""A policy and its optimizer, driven one step at a time: the inner half of the loop, which holds no data set.

Here is `Run`, which measures what a step lacks, corrects, updates, says what was seen and writes checkpoints. Steps are
its caller's: epochs over a file (`loop`), an online loop, or one of your own. No arithmetic of losses here.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tracegrad import _validation, metrics
from tracegrad.config import Config, as_dict, to_toml
from tracegrad.errors import ArgumentError, redacted
from tracegrad.objective import Objective
from tracegrad.objective.correction import Corrected, proximal_alpha
from tracegrad.packing import Step
from tracegrad.storage.run_dir import Mirror
from tracegrad.storage.safetensors_file import write_bytes
from tracegrad.trainer import checkpoint
from tracegrad.trainer.checkpoint import Away, Progress
from tracegrad.trainer.distributed import Ranks, said_together
from tracegrad.trainer.full_weights import Adapters, whole_weights
from tracegrad.trainer.lora import adapters_off, has_adapters
from tracegrad.trainer.optim import Control, check_rates, in_all
from tracegrad.trainer.result import TermRecord
from tracegrad.trainer.setup import (
    Optimizers,
    check_same,
    check_step,
    first_reference,
    is_mixed,
    mix,
    other_model,
    prepared,
)
from tracegrad.trainer.step import Floats, Idle, Outcome, detached, measure, optimizer_step
from tracegrad.trainer.step_metrics import checked_rewards, row_of


class Run:
    """A model that is trained by steps from anywhere; its parameters are changed in place.

    Over ranks every one of them makes the same calls in the same order, each with its own `Step` of the same plan.

    Args:
        model: a transformers causal LM, with peft's adapters or without; moved to the device, float32, dropout off.
        objective: a preset or another value of `Objective`.
        config: default `Config()`. What is of data (`data`, `advantage`, `reward_kl`, most of `pack`), epochs and value
            is for who makes the steps; `train.updates_per_old` is read here by objectives on the proximal alone.
        out: folder for config.toml and checkpoints, made with the first step or checkpoint: one that all ranks see, or
            an address of fsspec, for which each machine works in a folder of its own.
        tokenizer: folder whose tokenizer files go into each checkpoint.
        optimizer: over `model.parameters()`, or a function of groups of parameters that makes one; default AdamW as the
            config says. The schedule and clipping stay the config's.
        reference: a causal LM to measure the reference logprobs with, for objectives that take them; default the
            folder `train.ref_model`, or the model as it is given here (without its adapters, where it has any), which
            follows the policy if `train.ref_mixup_alpha` is below 1.
        keep_start: keep a frozen copy of the model as it is given here, where that is the reference and has no adapters
            to be measured without. False for steps that bring their reference logprobs.
        ranks: who shares each step; default the open process group, or the one that torchrun asks for.
        steps: optimizer steps in all, which a schedule that is not constant goes by; it may be set until the first one.

    Raises:
        ArgumentError: if objective, model and config do not fit together.

    Attributes:
        model, objective, config, out, ranks, steps: as given, the model with the adapters that the config asks for.
        away: the folder as its ranks share it; `out` is the one of this machine.
        taken: optimizer steps taken, those before a `restore` included.
        version: of the policy, as the last step was told; None where none was.
        num_tokens: of the prompts and completions of all steps, as the metric of that name counts them.
        watch: wall seconds by stage.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        config: Config | None = None,
        *,
        out: str | Path | Mirror,
        tokenizer: str | Path | None = None,
        optimizer: Optimizers | None = None,
        reference: Any = None,
        keep_start: bool = True,
        ranks: Ranks | None = None,
        steps: int | None = None,
    ) -> None:
        self.objective, self.config = objective, config or Config()
        self.tokenizer = Path(tokenizer) if tokenizer else None
        self.ranks, self.steps = ranks or Ranks.join(self.config.train.timeout), steps
        objective.check_missing(self.config.train.missing)
        reference = first_reference(reference, model, objective, self.config, keep_start=keep_start)
        self.model, self.policy = prepared(model, self.config, self.ranks, optimizer)
        self.target, self.precision, self.optimizer = self.policy.target, self.policy.precision, self.policy.optimizer
        self.reference = other_model(reference, objective, self.config, self.policy)
        self._mixed = self.reference.model if is_mixed(objective, self.config) and self.reference else None
        self.control, self.idle = Control(objective), Idle(self.target.device)
        self.watch = metrics.Stopwatch(self._at)
        self.taken, self.version, self.num_tokens = 0, None, 0
        self.away = Away.of(out, self.ranks)
        self.out = self.away.path
        self._proximal: int | None = None
        self._begun = False
        self._row: dict[str, Any] = {}

    def step(
        self,
        step: Step,
        version: int | None = None,
        *,
        rewards: NDArray[np.float32] | None = None,
        endings: NDArray[np.uint8] | None = None,
        check: Callable[[Floats], None] | None = None,
    ) -> Outcome:
        """Takes one optimizer step.

        `old` and `ref` are measured where the objective needs them and the step lacks them: `old` by the policy as it
        is, so that theta is old. For several updates on one `old` pass the steps through `ready` before the first.

        Args:
            step: from `pack`, of this rank.
            version: of the policy as it is before this step, by the count that the recorded versions go by: lags count
                from it. None where it is not known.
            rewards: [R], which `step.trace` counts into, for the row alone.
            endings: [R] uint8, `Sequences.ending`, likewise: how each trace ended.
            check: called with the [M] logprobs of the policy before the update, which what it raises prevents.

        Returns:
            what the step saw; its logprobs are those of the policy before the update.

        Raises:
            ArgumentError: for ids that the model has not, a term of a later version, or a reference that is not known.
            TracegradError: if the gradient is not finite, the parameters are then as they were; or for lost memory.
        """
        with self.together():
            self.begin()
            began = time.perf_counter()
            with self.watch("prepare"):
                rewards = self._checked(step, version, rewards)
            step = self.ready(step)
            with self.watch("prepare"):
                if step.alpha is None and self.objective.needs.proximal:
                    step = self._with_alpha(step, version)
                corrected = self.correct(step)
            told = {"version": version, "rewards": rewards, "endings": endings}
            return self.update(step, corrected, **told, began=began, check=check)

    def ready(self, step: Step) -> Step:
        """The step with the `old` and reference logprobs that the objective needs and it lacks, by the policy as it is.

        Raises:
            ArgumentError: if it lacks reference logprobs and nothing here can measure them.
        """
        needs = self.objective.needs
        if needs.old and step.old_logprobs is None:
            with self.watch("old"):
                step = step.with_logprobs(old=self.measure(step))
        if needs.ref and step.ref_logprobs is None:
            if self.reference is None and (self.config.train.ref_every or not has_adapters(self.model)):
                raise ArgumentError(
                    "the step has no ref_logprobs, and the reference cannot be measured: the policy was its own, and "
                    "has been trained since. Pass reference= or leave keep_start True, or measure them yourself: "
                    "step.with_logprobs(ref=run.measure(step)) before the policy moves on, as train.ref_every asks."
                )
            with self.watch("ref"):
                step = step.with_logprobs(ref=self.measure(step, of="reference"))
        return step

    def measure(self, step: Step, *, of: Literal["policy", "reference"] = "policy") -> Floats:
        """[M] logprobs of the step's terms, nats, without gradient; NaN for terms that no batch of this rank holds.

        Args:
            of: the policy as it is; or the reference, which is the policy itself where there is no other.
        """
        own = of == "reference" and self.reference is None and not self.config.train.ref_every
        model = self.reference if of == "reference" and self.reference is not None else self.target
        check_step(step, model.model)
        with adapters_off(self.model) if own else nullcontext():
            logprobs = step.with_logprobs(old=measure(model, step.batches, self.precision)).old_logprobs
        assert logprobs is not None
        return np.asarray(logprobs, np.float32)

    def correct(self, step: Step, *, beside: bool = False) -> Corrected:
        """All of a step that does not depend on the policy being trained.

        Args:
            beside: in a thread of its own, beside what this rank does else.
        """
        reduce = None if self.ranks.alone else partial(self.ranks.all_reduce, beside=beside)
        return detached(step, self.objective, self.config.train.missing, reduce)

    def update(
        self,
        step: Step,
        corrected: Corrected,
        *,
        version: int | None = None,
        newest: int | None = None,
        rewards: NDArray[np.float32] | None = None,
        endings: NDArray[np.uint8] | None = None,
        began: float | None = None,
        check: Callable[[Floats], None] | None = None,
    ) -> Outcome:
        """The second half of `step`, for a step that is ready and corrected.

        Args:
            newest: what the row's breakdown by lag counts from, where `version` is not known.
            began: `time.perf_counter()` from which the row's seconds count; default now.
            check: as for `step`.
        """
        began = time.perf_counter() if began is None else began
        lr = self.policy.set_rates(self.config, self.taken, self.steps)
        with self.watch("train"):
            outcome = optimizer_step(
                self.target,
                step,
                self.control.applied(),
                self.optimizer,
                grad_clip=self.config.optimizer.grad_clip,
                precision=self.precision,
                corrected=corrected,
                left_out=step.idle(self.objective.needs, corrected) if self.config.pack.skip_zero_weight else None,
                idle=self.idle,
                check=check,
            )
        seconds = time.perf_counter() - began
        bonus = {"entropy_coef": self.control.coef} if self.control.adapts else {}
        self.control.update(outcome.entropy, outcome.keep, self.ranks.all_reduce)
        self.taken, self.version = self.taken + 1, version
        if self._mixed is not None and self.taken % self.config.train.ref_every == 0:
            mix(self._mixed, self.model, self.config.train.ref_mixup_alpha)
        with self.watch("metrics"):
            told = {"version": version, "newest": newest, "rewards": rewards, "endings": endings}
            seen = row_of(step, outcome, self.objective, **told, ranks=self.ranks)
        if "num_tokens" in seen:
            self.num_tokens = seen["num_tokens"] = self.num_tokens + int(seen["num_tokens"])
        rate, idle = seen["tokens"] / seconds, self.idle.share()
        waited = {} if idle is None else {"device_idle": idle}
        self._row = {"step": self.taken, "lr": lr, **bonus, **seen, "seconds": seconds, "tokens_per_s": rate, **waited}
        return outcome

    def row(self) -> dict[str, Any]:
        """The metrics of the last step by the names of docs/metrics.md; empty before the first."""
        return dict(self._row)

    def weights(self, *, adapters: Adapters = "merged", device: Any = "cpu") -> dict[str, torch.Tensor]:
        """The parameters as they are, whole, by the names of the model's state dict; empty but on the first rank.

        What is whole and on the device already is no copy: the next step changes it.

        Args:
            adapters: of a model with adapters: "merged" into the weights of the model without them, by its names; or
                "alone", by the names of peft's files.
            device: where to; None leaves each where it is.

        Raises:
            ArgumentError: for "alone" of a model without adapters.
        """
        return whole_weights(self.model, self.ranks, adapters, device)

    def save(
        self,
        *,
        fingerprint: str = "",
        logprobs: Mapping[str, Floats] | None = None,
        terms: Sequence[TermRecord] = (),
        control: Mapping[str, float] | None = None,
    ) -> Path:
        """Writes a checkpoint of the state as it is, and says where; all but the newest `checkpoint.keep` go.

        Args:
            fingerprint, logprobs, control: of the data, where the run is one over a data set, as in `Progress`.
            terms: of this rank, for the report of the run that goes on from here.

        Raises:
            TracegradError: if it cannot be written whole; checkpoints written before stay as they are.
        """
        self.begin()
        proximal = {} if self._proximal is None else {"proximal": float(self._proximal)}
        counted = {"num_tokens": float(self.num_tokens)}
        adapts = {**self.control.state(), **proximal, **counted, **(control or {})}
        known = {"logprobs": logprobs or {}, "control": adapts, "seconds": self.watch.seconds}
        known["version"] = -1 if self.version is None else self.version
        progress = Progress(self.taken, fingerprint, self.told(), **known)
        with self.watch("checkpoint"):
            where = {"tokenizer": self.tokenizer, "keep": self.config.checkpoint.keep}
            how = {"reference": self._mixed, "terms": terms, "ranks": self.ranks, "away": self.away}
            return checkpoint.save(self.out, self.model, self.optimizer, progress, **where, **how)

    def restore(self, *, fingerprint: str = "") -> Progress | None:
        """Takes up the newest checkpoint in `out`: parameters, optimizer, controllers, counts and random states.

        Args:
            fingerprint: of the data, where the run is one over a data set.

        Returns:
            what it says of its run; None where there is none, and nothing was done.

        Raises:
            ReadError: if the checkpoint is damaged.
            ArgumentError: if it is of a run that was told otherwise.
        """
        if not (checkpoints := checkpoint.list_checkpoints(self.out)):
            return None
        self.away.bring(checkpoints[-1])
        before = checkpoint.read_progress(checkpoints[-1])
        check_same(checkpoints[-1], before, self.told(), fingerprint)
        check_rates(checkpoints[-1], self.config.schedule, self.steps, before.config.get("schedule.steps"), before.step)
        how = {"reference": self._mixed, "leads": self.away.leads}
        progress = checkpoint.restore(checkpoints[-1], self.model, self.optimizer, self.ranks, **how)
        self.taken, self.version = progress.step, None if progress.version < 0 else progress.version
        self.control.restore(progress.control)
        self._proximal = int(progress.control["proximal"]) if "proximal" in progress.control else None
        self.num_tokens = int(progress.control["num_tokens"])
        self.watch.seconds.update(progress.seconds)
        self._begin()
        return progress

    def begin(self) -> None:
        """Makes the folder and writes config.toml, once; `step`, `save` and `restore` call it.

        Raises:
            ArgumentError: if the folder holds a run that was not taken up, or the schedule asks for steps not told.
            TracegradError: if it cannot be written.
        """
        if not self._begun:
            in_all(self.config.schedule, self.steps)
            if checkpoints := checkpoint.list_checkpoints(self.out):
                raise ArgumentError(
                    f"{self.away} holds a run, its newest checkpoint is {checkpoints[-1].name}. A new run would "
                    "overwrite it. Go on with restore() before the first step, or give another out."
                )
            self._begin()

    def told(self) -> dict[str, Any]:
        """What a checkpoint keeps of the config and the objective, and a resumed run is compared by."""
        options = {k: v for k, v in as_dict(self.config).items() if not k.startswith("objective.")}
        ends = {} if (steps := in_all(self.config.schedule, self.steps)) is None else {"schedule.steps": steps}
        told = {**options, **ends, "objective": repr(self.objective)}
        return {name: redacted(value) if isinstance(value, str) else value for name, value in told.items()}

    @contextmanager
    def together(self, *, ends: bool = False) -> Iterator[None]:
        """Around work that ranks share: one without memory tells the others, and each error says which step was lost.

        Args:
            ends: no step follows an error, so that one which a rank meets alone is told too.

        Raises:
            TracegradError: for memory that this rank or another has not, for what another has told, or for ranks that
                have ended or did not come within `train.timeout`.
        """
        try:
            yield
        except Exception as error:
            if (said := said_together(error, self.taken + 1, self.config, self.ranks, ends)) is error:
                raise
            raise said from error

    def _at(self, stage: str) -> None:
        """Tells the other ranks where this one is."""
        self.ranks.at(f"step {self.taken + 1} ({stage})")

    def _begin(self) -> None:
        with checkpoint.writable(self.out):
            if self.away.leads:
                self.out.mkdir(parents=True, exist_ok=True)
                checkpoint.clear_staged(self.out)
            if self.ranks.first:
                self.away.clear()
                write_bytes(self.out / "config.toml", [redacted(to_toml(self.config)).encode()])
        self._begun = True

    def _checked(
        self, step: Step, version: int | None, rewards: NDArray[np.float32] | None
    ) -> NDArray[np.float32] | None:
        """The rewards; refuses what one rank alone may see, on all of them."""
        error = None
        try:
            check_step(step, self.model)
            step.lag(None if version is None else _validation.integer(version, "version", least=0))
            rewards = None if rewards is None else checked_rewards(rewards, step)
        except ArgumentError as raised:
            error = raised
        self.ranks.agree(error)
        return rewards

    def _with_alpha(self, step: Step, version: int | None) -> Step:
        """Where the proximal lies: the policy of the step at which `old` would have been measured last.

        Each update is one version more, also where the caller counts them later.
        """
        if version is None:
            raise ArgumentError(
                "the objective takes the log-linear proximal, which lies between two versions, and version is None. "
                "Where it lies is not known. Pass the version of the policy that is trained: step(step, version=...)."
            )
        since = self.taken % (self.config.train.updates_per_old or 1)
        if since == 0 or self._proximal is None:
            self._proximal = version
        recorded = version - np.maximum(step.lag(version), 0)
        return replace(step, alpha=proximal_alpha(recorded, self._proximal, self._proximal + since))
