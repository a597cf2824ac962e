"""Train on recorded traces with one call: read, align, train, and write the report.

`train` does what `tracegrad train` does on the command line. `train_aligned` is the second half of both, after
alignment. torch is imported when the run starts.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracegrad import prepare, recipes
from tracegrad._core import __version__
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Config, as_dict, load
from tracegrad.data import ProgressBar, provenance
from tracegrad.errors import ArgumentError, redact
from tracegrad.metrics import Sink, Stopwatch, reported_stages
from tracegrad.objective import Objective, override_all, presets
from tracegrad.prepare.summary import IngestSummary
from tracegrad.recipes.recipe import objective_options
from tracegrad.report import TraceCounts, write_card, write_report
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.trainer.dataset import PreparedDataset

if TYPE_CHECKING:
    from tracegrad.trainer.result import TokenRecord, TrainResult


def train(
    model: str | Path,
    traces: Any,
    *,
    out: str | Path = "out",
    recipe: str | recipes.Recipe | None = None,
    objective: str | Objective | None = None,
    options: Mapping[str, Any] | None = None,
    resume: bool = False,
    sinks: Sequence[Sink] | None = None,
    log: Callable[[str], None] = print,
) -> TrainResult:
    """Train a model on recorded traces; write metrics, checkpoints, summary.json and report.html into `out`.

    Under torchrun every rank makes the same call.

    Args:
        model: folder of a causal language model with its tokenizer and chat template.
        traces: what `tracegrad.read` accepts, such as files, its own result, or a list of dicts; one or several folders
            that `tracegrad prepare` wrote, of which only the next steps' traces are in memory; or `Sequences` or
            `PreparedDataset`.
        out: run directory, created if missing; or an fsspec address (extra `cloud`).
        recipe: the method of a paper: a recipe of `tracegrad.recipes`, or its name.
        objective: only the loss, a value or a name of `tracegrad.objective.presets`; default the recipe's, else DAPO.
        options: options by dotted name, as in a config file: `{"optimizer.lr": 1e-5, "train.groups_per_step": 16}`.
            They override the recipe.
        resume: continue the run in `out` with its options, if there is one.
        sinks: as for `trainer.train`.
        log: function that prints a line for the user.

    Returns:
        The result of `trainer.train`; `rows` are the rows of metrics.jsonl.

    Raises:
        ArgumentError: if options are incompatible, or `out` contains a run and `resume` is False.
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, by data.on_error.
        TracegradError: if the run fails.

    ```python
    import tracegrad as tg

    result = tg.train(
        "examples/quickstart/model",
        "examples/quickstart/traces.jsonl.zst",
        out="out/run",
        recipe="DAPO",
        options={"optimizer.lr": 1e-4, "train.groups_per_step": 32},
    )
    print(result.step, result.checkpoint, result.rows[-1]["loss"])
    ```
    """
    run_dir, model = RunDirectory(out), Path(model)
    with run_dir.lock() if is_first_rank() else nullcontext():
        if isinstance(recipe, str):
            recipe = recipes.find(recipe)
        config = _config(run_dir, recipe, objective, options or {}, resume)
        loss_objective = objective if isinstance(objective, Objective) else objective_of(config)
        watch = Stopwatch()
        if isinstance(traces, Sequences):
            data, account = traces, IngestSummary("<sequences>", reward=config.data.reward)
            account.add(traces)
        elif isinstance(traces, PreparedDataset):
            data, account = traces, _summarize_shards(traces, config, watch)
        else:
            data, account = load_traces(traces, model, config, run_dir.path, watch)
        for line in account.lines() if is_first_rank() else ():
            log(line)
        return train_aligned(
            data,
            account,
            model,
            loss_objective,
            config,
            out=run_dir,
            resume=resume,
            sinks=sinks,
            log=log,
            watch=watch,
            title=account.source,
            recipe=recipe,
        )


def is_first_rank() -> bool:
    """Return whether this process writes files and prints: by its process group, or by torchrun's RANK."""
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def resumed_config(out: RunDirectory, resume: bool) -> Config | None:
    """Load the config of the run in `out` if it is resumed; None if there is none."""
    path = out.path / "config.toml" if resume else None
    if path is not None and out.address and path.name in out.remote_files():
        out.download([path.name])
    return load(path) if path is not None and path.is_file() else None


def load_traces(
    source: Any, model: Path, chosen: Config, out: Path, watch: Stopwatch
) -> tuple[Sequences | PreparedDataset, IngestSummary]:
    """Read and align sources that `tracegrad.read` accepts, or open prepared folders; also return the ingest summary.

    Only the first process writes quarantined records and shows progress.

    Raises:
        ArgumentError: if folders and files are mixed, or an alignment option is set for prepared folders.
    """
    names = prepare.names_of(source)
    folders = [name for name in names if prepare.is_prepared(name)]
    if folders and len(folders) < len(names):
        other = next(name for name in names if name not in folders)
        raise ArgumentError(
            f"TG-TRAIN-007: {folders[0]} is prepared and {other} is not. A run trains either on prepared folders or on "
            "files that it aligns itself. Prepare all of them."
        )
    if folders:
        for name in folders:
            prepare.check_prepared(name, chosen.data, chosen.map)
        with _reported(watch):
            with watch("read"):
                shards = PreparedDataset.open(folders, verify=True)
            return shards, _summarize_shards(shards, chosen, watch)
    data = (
        chosen.data
        if is_first_rank() or chosen.data.on_error != "quarantine"
        else replace(chosen.data, on_error="skip")
    )
    if not is_first_rank():
        return prepare.load(source, model, data, out, watch, map=chosen.map)
    with ProgressBar() as progress, reported_stages(watch, without=["read"]):
        return prepare.load(source, model, data, out, watch, map=chosen.map, progress=progress)


def _reported(watch: Stopwatch) -> AbstractContextManager[None]:
    """Report the stages of a stopwatch on the first rank."""
    return reported_stages(watch) if is_first_rank() else nullcontext()


def _summarize_shards(shards: PreparedDataset, chosen: Config, watch: Stopwatch) -> IngestSummary:
    """Add up the ingest summary of all shards, one at a time."""
    source_names = ", ".join(map(redact, shards.folders[:3])) + (
        f" and {others:,} more" if (others := len(shards.folders) - 3) > 0 else ""
    )
    account = IngestSummary(source_names, list(shards.folders), reward=chosen.data.reward)
    with watch("read"):
        for part in shards.parts():
            account.add(part)
    return account


def objective_of(chosen: Config) -> Objective:
    """Return the objective that the config names, with its overrides."""
    return override_all(presets.find(chosen.objective.preset), dict(chosen.objective.overrides))


def train_aligned(
    data: Sequences | PreparedDataset,
    account: IngestSummary,
    model: Path,
    objective: Objective,
    chosen: Config,
    *,
    out: RunDirectory,
    resume: bool,
    title: str,
    log: Callable[[str], None],
    watch: Stopwatch,
    sinks: Sequence[Sink] | None = None,
    recipe: recipes.Recipe | None = None,
) -> TrainResult:
    """Train on aligned tokens: load the model, train, and write summary.json and report.html with the given title."""
    try:
        with _reported(watch), watch("import"):
            from tracegrad import trainer
            from tracegrad.trainer.lora import load_model
    except ImportError as error:
        raise ArgumentError(
            f"TG-TRAIN-008: train needs {error.name}, which is not installed. Reading and aligning do not need it. "
            "Run: pip install 'tracegrad[train]'"
        ) from error
    with _reported(watch), watch("load"):
        loaded = load_model(model)
    if isinstance(data, PreparedDataset):
        data.model = model
    else:
        data = data.with_image_processor(model)
    result = trainer.train(
        data,
        loaded,
        objective=objective,
        config=chosen,
        log=log,
        out=out,
        tokenizer=model,
        resume=resume,
        sinks=sinks,
        recipe=recipe,
    )
    if is_first_rank():
        watch.seconds.update(result.seconds)
        origin = provenance.provenance(account.inputs, model)
        origin_lines = [f"recipe {recipe.source}", *recipe.import_notes] if recipe is not None else []
        provenance.write_header(out.path / "config.toml", origin, origin_lines)
        summary = {**_summary(chosen, account, result, watch.seconds), "provenance": origin}
        if recipe is not None:
            summary["recipe"] = {"source": recipe.source, "notes": recipe.import_notes}
        prepare.write_json(out.path / "summary.json", summary)
        with _reported(watch), watch("report"):
            tokenizer = Tokenizer.from_pretrained(model)
            sequences, terms = _select_shown(data, result.terms)
            write_card(
                result.checkpoint,
                base=model,
                objective=objective,
                config=chosen,
                rows=result.rows,
                data=account.lines(),
            )
            about = describe_run(
                chosen, objective, str(out) if out.address else out.path.resolve(), model=model, traces=account.source
            )
            if recipe is not None:
                notes = [("config of the recipe", note) for note in recipe.import_notes]
                about = [("recipe", recipe.source), *notes, *about]
            links = [name for name in ("config.toml", "metrics.jsonl", "summary.json") if (out.path / name).is_file()]
            write_report(
                out.path / "report.html",
                sequences=sequences,
                tokenizer=tokenizer,
                title=title,
                about=about,
                links=links,
                rows=result.rows,
                terms=terms,
                summary=summary,
                counts=_count_all(account),
                total_gradient=result.gradient_magnitude,
            )
        summary["seconds"]["report"] = round(watch.seconds["report"], 3)
        prepare.write_json(out.path / "summary.json", summary)
        out.sync()
        if out.address:
            card = result.checkpoint / "README.md"
            out.upload([card.relative_to(out.path).as_posix()])
    return result


def _select_shown(data: Sequences | PreparedDataset, terms: list[TokenRecord]) -> tuple[Sequences, list[TokenRecord]]:
    """Return the traces that a report may show, and their records renumbered to them."""
    if isinstance(data, Sequences):
        return data, terms
    catalog = data.catalog
    rows = np.unique(np.concatenate([np.zeros(0, np.int64), *(record.trace for record in terms)])).astype(np.int64)
    rows = rows if len(rows) else np.zeros(1, np.int64)
    tokens = catalog.tokens[rows].astype(np.int64)
    shifts = catalog.first_token[rows] - (np.cumsum(tokens) - tokens)
    new_rows = [np.searchsorted(rows, record.trace) for record in terms]
    renumbered = [
        replace(record, origin=record.origin - shifts[row], trace=row.astype(np.int32))
        for record, row in zip(terms, new_rows, strict=True)
    ]
    return data.take_with_details(rows), renumbered


def _count_all(account: IngestSummary) -> TraceCounts:
    """Return the counts of all traces for the report."""
    counts = {name: getattr(account, name) for name in ("traces", "groups", "tokens", "terms", "recorded", "exact")}
    return TraceCounts(levels=account.levels, mismatches=account.alignment_report, **counts)


def _config(
    out: RunDirectory,
    recipe: recipes.Recipe | None,
    objective: str | Objective | None,
    options: Mapping[str, Any],
    resume: bool,
) -> Config:
    """Combine the options: the defaults or the resumed run's, then the recipe, the objective, and `options`."""
    start = resumed_config(out, resume)
    overrides = [*options.items()]
    if isinstance(objective, Objective):
        overrides = [*objective_options(objective), *overrides]
    elif objective is not None:
        overrides = [("objective", objective), *overrides]
    if recipe is None:
        return load(None, overrides, start=start)
    return recipe.resolve(None, overrides, start=start)[0]


def changed_options(chosen: Config) -> list[tuple[str, str]]:
    """Return names and values of the options that differ from the defaults, without secrets."""
    default, values = as_dict(Config()), as_dict(chosen)
    return [(name, redact(value)) for name, value in values.items() if value != default.get(name)]


def describe_run(
    chosen: Config, objective: Objective, out: str | Path, **inputs: str | Path
) -> list[tuple[str, object]]:
    """Describe a run for its report: loss, options other than the defaults, inputs, run directory, versions."""
    return [
        ("loss", str(objective).replace("\n", "; ")),
        *changed_options(chosen),
        *((name, str(value)) for name, value in inputs.items()),
        ("run directory", str(out)),
        ("tracegrad", __version__),
        *((name, version(name)) for name in ("torch", "transformers")),
        ("Python", platform.python_version()),
    ]


def _summary(chosen: Config, account: IngestSummary, result: Any, seconds: dict[str, float]) -> dict[str, Any]:
    summary_names = (
        "traces",
        "groups",
        "tokens",
        "terms",
        "pictures",
        "levels",
        "alignment_report",
        "recorded",
        "exact",
    )
    last_estimate = next((row for row in reversed(result.rows) if "ope" in row), {})
    return {
        **{name: value for name, value in account.as_dict().items() if name in summary_names},
        **result.counts,
        "trained": result.trained,
        "seed": chosen.train.seed,
        "steps": result.step,
        "steps_planned": result.total,
        "stopped": result.stopped,
        "ope": {name: last_estimate[name] for name in last_estimate if name.startswith("ope")},
        "seconds": {name: round(duration, 3) for name, duration in seconds.items()},
        "checkpoint": result.address or str(result.checkpoint),
        "device_idle": result.device_idle_share,
    }
