"""Train a policy one optimizer step at a time, without a data set.

`Trainer` computes missing logprobs, corrects, updates, reports metrics and writes checkpoints. The caller provides the
steps: the offline loop (`loop`), the online loop, or your own loop. Losses are computed elsewhere.
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
from tracegrad.errors import ArgumentError, redact
from tracegrad.objective import Objective
from tracegrad.objective.correction import Correction, proximal_alpha
from tracegrad.packing import Step
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.storage.safetensors_file import write_bytes
from tracegrad.trainer import checkpoint
from tracegrad.trainer.checkpoint import Progress, SharedRunDir
from tracegrad.trainer.distributed import Ranks, propagate_error
from tracegrad.trainer.full_weights import Adapters, full_weights
from tracegrad.trainer.lora import adapters_off, has_adapters
from tracegrad.trainer.optim import EntropyController, check_rates, total_schedule_steps
from tracegrad.trainer.result import TokenRecord
from tracegrad.trainer.setup import (
    Optimizers,
    check_same,
    check_step,
    first_reference,
    is_mixed,
    other_model,
    prepare_policy,
    update_reference,
)
from tracegrad.trainer.step import DeviceIdleMeter, Floats, StepResult, compute_logprobs, correct_step, optimizer_step
from tracegrad.trainer.step_metrics import check_rewards, step_metrics


class Trainer:
    """Trains a model in place, on steps from any source.

    With several ranks, all make the same calls in the same order, each with its own `Step` of the same plan.

    Args:
        model: a transformers causal LM, with or without peft adapters. It is moved to the device, set to float32 and to
            eval mode (no dropout).
        objective: a preset or another value of `Objective`.
        config: default `Config()`. Options about data (`data`, `advantage`, `reward_kl`, most of `pack`), epochs and
            held-out evaluation are for the code that makes the steps. `train.updates_per_old_logprobs` is used here
            only for objectives with the log-linear proximal policy.
        out: run directory for config.toml and checkpoints, created with the first step or checkpoint. Either a path
            that all ranks see, or an fsspec address; then each machine works in its own local folder.
        tokenizer: folder whose tokenizer files are copied into each checkpoint.
        optimizer: an optimizer over `model.parameters()`, or a function that makes one from parameter groups. Default
            AdamW with the options of `config`. The schedule and clipping always follow `config`.
        reference: a causal LM for the reference logprobs, if the objective needs them. Default the folder
            `train.ref_model`, or the initial `model` (without its adapters, if it has any), which follows the policy if
            `train.ref_mixup_alpha` is below 1.
        keep_initial_reference: keep a frozen copy of the initial model if it is the reference and has no adapters to
            switch off. Set False if the steps come with reference logprobs.
        ranks: the ranks that share each step; default the open process group, or the one that torchrun configures.
        total_steps: total number of optimizer steps, for schedules that are not constant. It can be set until the first
            step.

    Raises:
        ArgumentError: if objective, model and config are incompatible.

    Attributes:
        model, objective, config, out, ranks, steps: the arguments; the model has the adapters that the config adds.
        run_dir: the run directory shared by the ranks; `out` is its folder on this machine.
        steps_done: number of optimizer steps done, including those before a `restore`.
        version: policy version passed to the last step; None if none was passed.
        num_tokens: prompt and completion tokens of all steps, as the metric of the same name counts them.
        watch: wall time by stage in seconds.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> from tracegrad.objective import PolicyGradient
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> with TemporaryDirectory() as folder:
    ...     trainer = Trainer(model, Objective(PolicyGradient()), out=folder)
    ...     round(trainer.step(step).loss, 4), trainer.steps_done  # -log(1 / 8)
    (2.0794, 1)
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        config: Config | None = None,
        *,
        out: str | Path | RunDirectory,
        tokenizer: str | Path | None = None,
        optimizer: Optimizers | None = None,
        reference: Any = None,
        keep_initial_reference: bool = True,
        ranks: Ranks | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.objective, self.config = objective, config or Config()
        self.tokenizer = Path(tokenizer) if tokenizer else None
        self.ranks, self.steps = ranks or Ranks.join(self.config.train.timeout_s), total_steps
        objective.check_missing(self.config.train.missing_logprobs)
        reference = first_reference(reference, model, objective, self.config, keep_start=keep_initial_reference)
        self.model, self.policy = prepare_policy(model, self.config, self.ranks, optimizer)
        self.target, self.precision, self.optimizer = self.policy.target, self.policy.precision, self.policy.optimizer
        self.reference = other_model(reference, self.config, self.policy)
        self._mixed_reference = self.reference.model if is_mixed(objective, self.config) and self.reference else None
        self.control, self.idle = EntropyController(objective), DeviceIdleMeter(self.target.device)
        self.watch = metrics.Stopwatch(self._report_stage)
        self.steps_done, self.version, self.num_tokens = 0, None, 0
        self.run_dir = SharedRunDir.of(out, self.ranks)
        self.out = self.run_dir.path
        self._proximal: int | None = None
        self._started = False
        self._row: dict[str, Any] = {}

    def step(
        self,
        step: Step,
        version: int | None = None,
        *,
        rewards: NDArray[np.float32] | None = None,
        endings: NDArray[np.uint8] | None = None,
        check: Callable[[Floats], None] | None = None,
    ) -> StepResult:
        """Do one optimizer step.

        `old` and `ref` logprobs are computed if the objective needs them and the step lacks them. `old` then comes from
        the current policy, so it equals theta. For several updates with one `old`, call `ready` on the steps before
        the first update.

        Args:
            step: this rank's step, from `pack`.
            version: version of the policy before this step, in the numbering of the recorded versions. Staleness is
                relative to it. None if unknown.
            rewards: [R] rewards, indexed by `step.trace`; used only for metrics.
            endings: [R] uint8, `Sequences.ending`, how each trace ended; used only for metrics.
            check: called before the update with the [M] logprobs of the policy. If it raises, there is no update.

        Returns:
            The result of the step. Its logprobs come from the policy before the update.

        Raises:
            ArgumentError: if the model does not have an id of the step, a token has a later version, or the reference
                is unknown.
            TracegradError: if the gradient is not finite (the parameters do not change), or memory runs out.
        """
        with self.propagate_errors():
            self.create_run_dir()
            start = time.perf_counter()
            with self.watch("prepare"):
                rewards = self._check_inputs(step, version, rewards)
            step = self.add_logprobs(step)
            with self.watch("prepare"):
                if step.alpha is None and self.objective.requirements.proximal:
                    step = self._with_alpha(step, version)
                corrected = self.correct(step)
            return self.update(
                step, corrected, version=version, rewards=rewards, endings=endings, start_time=start, check=check
            )

    def add_logprobs(self, step: Step) -> Step:
        """Add the `old` and reference logprobs that the objective needs and the step lacks, from the current policy.

        Raises:
            ArgumentError: if the step lacks reference logprobs and there is no reference to compute them.
        """
        needs = self.objective.requirements
        if needs.old and step.old_logprobs is None:
            with self.watch("old"):
                step = step.with_logprobs(old=self.compute_logprobs(step))
        if needs.ref and step.ref_logprobs is None:
            if self.reference is None and (self.config.train.ref_sync_steps or not has_adapters(self.model)):
                raise ArgumentError(
                    "TG-TRAIN-082: the step has no ref_logprobs, and no reference model can compute them: the "
                    "policy was the reference, and has been trained since. Pass reference=, or leave "
                    "keep_initial_reference True. With train.ref_sync_steps, compute them before the policy changes: "
                    "step.with_logprobs(ref=trainer.compute_logprobs(step, model='reference'))."
                )
            with self.watch("ref"):
                step = step.with_logprobs(ref=self.compute_logprobs(step, model="reference"))
        return step

    def compute_logprobs(self, step: Step, *, model: Literal["policy", "reference"] = "policy") -> Floats:
        """Compute [M] logprobs of the step's trained tokens in nats, without gradient.

        They are over the sampler's support and with its penalties. Those of the reference are over the whole vocabulary
        and without penalties if the objective has a `Penalty` with over="vocabulary". Tokens in no batch of this rank
        are NaN.

        Args:
            model: "policy" for the current policy. "reference" for the reference, or the policy (without its adapters)
                if there is no reference model.
        """
        batches = step.batches
        if model == "reference" and self.objective.requirements.ref_over == "vocabulary":
            batches = tuple(replace(batch, support=None) for batch in batches)
        is_policy = model == "reference" and self.reference is None and not self.config.train.ref_sync_steps
        placed = self.reference if model == "reference" and self.reference is not None else self.target
        check_step(step, placed.model)
        with adapters_off(self.model) if is_policy else nullcontext():
            logprobs = step.with_logprobs(old=compute_logprobs(placed, batches, self.precision)).old_logprobs
        assert logprobs is not None
        return np.asarray(logprobs, np.float32)

    def correct(self, step: Step, *, in_thread: bool = False) -> Correction:
        """Compute the parts of a step that do not depend on the trained policy: weights, masks and scales.

        Args:
            in_thread: set it in the background thread, which uses its own process group.
        """
        reduce = None if self.ranks.is_single else partial(self.ranks.all_reduce, in_thread=in_thread)
        return correct_step(step, self.objective, self.config.train.missing_logprobs, reduce)

    def update(
        self,
        step: Step,
        corrected: Correction,
        *,
        version: int | None = None,
        newest_version: int | None = None,
        rewards: NDArray[np.float32] | None = None,
        endings: NDArray[np.uint8] | None = None,
        start_time: float | None = None,
        check: Callable[[Floats], None] | None = None,
    ) -> StepResult:
        """Update the policy with a step that is ready and corrected: the second half of `step`.

        Args:
            step: a step with the logprobs that the objective needs, from `ready`.
            corrected: the result of `correct`.
            version: as for `step`.
            newest_version: reference version of the metrics by staleness, if `version` is None.
            rewards: as for `step`.
            endings: as for `step`.
            start_time: start of the step's wall time, from `time.perf_counter()`; default now.
            check: as for `step`.
        """
        start_time = time.perf_counter() if start_time is None else start_time
        lr = self.policy.set_rates(self.config, self.steps_done, self.steps)
        with self.watch("train"):
            outcome = optimizer_step(
                self.target,
                step,
                self.control.applied(),
                self.optimizer,
                grad_clip=self.config.optimizer.grad_clip,
                precision=self.precision,
                corrected=corrected,
                skip_tokens=step.tokens_without_gradient(self.objective.requirements, corrected)
                if self.config.pack.skip_zero_weight
                else None,
                idle=self.idle,
                check=check,
            )
        seconds = time.perf_counter() - start_time
        bonus = {"entropy_coef": self.control.coef} if self.control.adapts else {}
        self.control.update(outcome.entropy, outcome.keep, self.ranks.all_reduce)
        self.steps_done, self.version = self.steps_done + 1, version
        if self._mixed_reference is not None and self.steps_done % self.config.train.ref_sync_steps == 0:
            update_reference(self._mixed_reference, self.model, self.config.train.ref_mixup_alpha)
        with self.watch("metrics"):
            metrics_row = step_metrics(
                step,
                outcome,
                self.objective,
                version=version,
                newest=newest_version,
                rewards=rewards,
                endings=endings,
                ranks=self.ranks,
            )
        if "num_tokens" in metrics_row:
            self.num_tokens = metrics_row["num_tokens"] = self.num_tokens + int(metrics_row["num_tokens"])
        tokens_per_s, idle = metrics_row["tokens"] / seconds, self.idle.share()
        idle_metrics = {} if idle is None else {"device_idle": idle}
        self._row = {
            "step": self.steps_done,
            "lr": lr,
            **bonus,
            **metrics_row,
            "seconds": seconds,
            "tokens_per_s": tokens_per_s,
            **idle_metrics,
        }
        return outcome

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step by name; empty before the first step."""
        return dict(self._row)

    def weights(self, *, adapters: Adapters = "merged", device: Any = "cpu") -> dict[str, torch.Tensor]:
        """Gather the full parameters by their names in the state dict on the first rank; other ranks get {}.

        A tensor that is not sharded and already on the device is not copied: the next step changes it.

        Args:
            adapters: for a model with adapters, "merged" merges them into the weights, by the names of the base model.
                "alone" returns only the adapters, by the names in peft's files.
            device: target device; None keeps the device of each tensor.

        Raises:
            ArgumentError: for "alone" if the model has no adapters.
        """
        return full_weights(self.model, self.ranks, adapters, device)

    def save(
        self,
        *,
        fingerprint: str | None = None,
        logprobs: Mapping[str, Floats] | None = None,
        terms: Sequence[TokenRecord] = (),
        control: Mapping[str, float] | None = None,
    ) -> Path:
        """Write a checkpoint of the current state and return its path. Only the newest `checkpoint.keep` are kept.

        Args:
            fingerprint, logprobs, control: state of the data set, if the run has one, as in `Progress`.
            terms: this rank's records of trained tokens, for the report after a resume.

        Raises:
            TracegradError: if the checkpoint cannot be written completely; earlier checkpoints are unchanged.
        """
        self.create_run_dir()
        proximal = {} if self._proximal is None else {"proximal": float(self._proximal)}
        counts = {"num_tokens": float(self.num_tokens)}
        controls = {**self.control.state(), **proximal, **counts, **(control or {})}
        progress = Progress(
            self.steps_done,
            fingerprint,
            self.options(),
            logprobs=logprobs or {},
            control=controls,
            seconds=self.watch.seconds,
            version=-1 if self.version is None else self.version,
        )
        with self.watch("checkpoint"):
            return checkpoint.save(
                self.out,
                self.model,
                self.optimizer,
                progress,
                tokenizer=self.tokenizer,
                keep=self.config.checkpoint.keep,
                reference=self._mixed_reference,
                terms=terms,
                ranks=self.ranks,
                away=self.run_dir,
            )

    def restore(self, *, fingerprint: str | None = None) -> Progress | None:
        """Load the newest checkpoint in `out`: parameters, optimizer, controllers, counts and random states.

        Args:
            fingerprint: hash of the data, if the run has a data set.

        Returns:
            The progress of the saved run; None, without any change, if there is no checkpoint.

        Raises:
            ReadError: if the checkpoint is damaged.
            ArgumentError: if the saved run had other options.
        """
        if not (checkpoints := checkpoint.list_checkpoints(self.out)):
            return None
        self.run_dir.download(checkpoints[-1])
        saved = checkpoint.read_progress(checkpoints[-1])
        check_same(checkpoints[-1], saved, self.options(), fingerprint)
        check_rates(checkpoints[-1], self.config.schedule, self.steps, saved.config.get("schedule.steps"), saved.step)
        progress = checkpoint.restore(
            checkpoints[-1],
            self.model,
            self.optimizer,
            self.ranks,
            reference=self._mixed_reference,
            leads=self.run_dir.writes,
        )
        self.steps_done, self.version = progress.step, None if progress.version < 0 else progress.version
        self.control.restore(progress.control)
        self._proximal = int(progress.control["proximal"]) if "proximal" in progress.control else None
        self.num_tokens = int(progress.control["num_tokens"])
        for stage, seconds in progress.seconds.items():
            self.watch.seconds[stage] = self.watch.seconds.get(stage, 0.0) + seconds
        self._create_files()
        return progress

    def create_run_dir(self) -> None:
        """Create the folder and write config.toml, once. `step` and `save` call it.

        Raises:
            ArgumentError: if the folder contains a run that was not restored, or the schedule needs `steps`.
            TracegradError: if it cannot be written.
        """
        if not self._started:
            total_schedule_steps(self.config.schedule, self.steps)
            if checkpoints := checkpoint.list_checkpoints(self.out):
                raise ArgumentError(
                    f"TG-TRAIN-083: {self.run_dir} contains a run; its newest checkpoint is {checkpoints[-1].name}. A "
                    "new run would overwrite it. Call restore() before the first step, or pass another out."
                )
            self._create_files()

    def options(self) -> dict[str, Any]:
        """Return the options and the objective, as a checkpoint saves them and a resumed run compares them."""
        options = {k: v for k, v in as_dict(self.config).items() if not k.startswith("objective.")}
        schedule_steps = (
            {}
            if (steps := total_schedule_steps(self.config.schedule, self.steps)) is None
            else {"schedule.steps": steps}
        )
        values = {**options, **schedule_steps, "objective": repr(self.objective)}
        return {name: redact(value) if isinstance(value, str) else value for name, value in values.items()}

    @contextmanager
    def propagate_errors(self, *, final: bool = False) -> Iterator[None]:
        """Wrap work that ranks share, so that an error on one rank ends all. The error names the lost step.

        Args:
            final: no step follows an error, so an error that only this rank has is sent to the others too.

        Raises:
            TracegradError: if this or another rank runs out of memory, another rank sent an error, or ranks have ended
                or did not arrive within `train.timeout_s`.
        """
        try:
            yield
        except Exception as error:
            if (raised := propagate_error(error, self.steps_done + 1, self.config, self.ranks, final)) is error:
                raise
            raise raised from error

    def _report_stage(self, stage: str) -> None:
        """Publish the stage of this rank, for error messages of the other ranks."""
        self.ranks.set_stage(f"step {self.steps_done + 1} ({stage})")

    def _create_files(self) -> None:
        with checkpoint.writable(self.out):
            if self.run_dir.writes:
                self.out.mkdir(parents=True, exist_ok=True)
                checkpoint.clear_staged(self.out)
            if self.ranks.first:
                self.run_dir.clear()
                write_bytes(self.out / "config.toml", [redact(to_toml(self.config)).encode()])
                self.run_dir.mirror.begin()
        self._started = True

    def _check_inputs(
        self, step: Step, version: int | None, rewards: NDArray[np.float32] | None
    ) -> NDArray[np.float32] | None:
        """Validate the inputs and return the rewards; an error on one rank is raised on all."""
        error = None
        try:
            check_step(step, self.model)
            step.staleness(None if version is None else _validation.integer(version, "version", least=0))
            rewards = None if rewards is None else check_rewards(rewards, step)
        except ArgumentError as refusal:
            error = refusal
        self.ranks.raise_on_all(error)
        return rewards

    def _with_alpha(self, step: Step, version: int | None) -> Step:
        """Add the position of the proximal policy: the policy at the last step where `old` would have been recomputed.

        Each update counts as one version, even if the caller increments versions later.
        """
        if version is None:
            raise ArgumentError(
                "TG-TRAIN-084: the objective uses the log-linear proximal policy, which interpolates between two "
                "versions, but version is None. Pass the version of the policy that you train: "
                "step(step, version=...)."
            )
        updates_done = self.steps_done % (self.config.train.updates_per_old_logprobs or 1)
        if updates_done == 0 or self._proximal is None:
            self._proximal = version
        recorded = version - np.maximum(step.staleness(version), 0)
        return replace(step, alpha=proximal_alpha(recorded, self._proximal, self._proximal + updates_done))
