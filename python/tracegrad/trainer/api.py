"""A run over recorded traces by one call: read, align, train, and the files that tell of it.

`train` is what `tracegrad train` does without a command line; `learn` is the half of both that begins where the tokens
are aligned. torch is imported when the run begins.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
from tracegrad.data import Bar, provenance
from tracegrad.errors import ArgumentError, redacted
from tracegrad.metrics import Sink, Stopwatch
from tracegrad.objective import Objective, override_all, presets
from tracegrad.prepare.summary import Account
from tracegrad.recipes.recipe import named
from tracegrad.report import Counts, write_card, write_report
from tracegrad.storage.run_dir import Mirror
from tracegrad.trainer.dataset import Shards

if TYPE_CHECKING:
    from tracegrad.trainer.result import TermRecord, Trained


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
    say: Callable[[str], None] = print,
) -> Trained:
    """Trains a model on recorded traces, and leaves metrics, checkpoints, summary.json and report.html in `out`.

    Under torchrun every rank calls this alike.

    Args:
        model: folder of a causal language model with its tokenizer and chat template.
        traces: what `tracegrad.read` takes as names, one or several; folders that `tracegrad prepare` wrote, one or
            several, of which no more is in memory than the steps ahead need; or `Sequences` or `Shards`.
        out: folder of the run, made if it is not there; or an address of fsspec (extra `cloud`).
        recipe: what a paper fixes: one of `tracegrad.recipes`, or its name.
        objective: the loss alone, a value or a name of `tracegrad.objective.presets`; default the recipe's, else DAPO.
        options: as in a config file, by dotted name: `{"optimizer.lr": 1e-5, "pack.step_groups": 16}`. They win over
            the recipe.
        resume: go on with the run in `out`, where there is one, under its options.
        sinks: as for `trainer.train`.
        say: takes the lines that a user should read.

    Returns:
        What `trainer.train` gives; `rows` are those of metrics.jsonl.

    Raises:
        ArgumentError: for options that do not fit together, or `out` holds a run and `resume` is False.
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, by data.on_error.
        TracegradError: if the run fails.
    """
    place, model = Mirror(out), Path(model)
    with place.locked() if first() else nullcontext():
        chosen = _config(place, recipe, objective, options or {}, resume)
        loss = objective if isinstance(objective, Objective) else objective_of(chosen)
        watch = Stopwatch()
        if isinstance(traces, Sequences):
            data, account = traces, Account("<sequences>", reward=chosen.data.reward)
            account.add(traces)
        elif isinstance(traces, Shards):
            data, account = traces, _counted(traces, chosen, watch)
        else:
            source = os.fspath(traces) if isinstance(traces, os.PathLike) else traces
            data, account = aligned(source, model, chosen, place.path, watch)
        for line in account.lines() if first() else ():
            say(line)
        run = {"out": place, "resume": resume, "sinks": sinks, "say": say, "watch": watch, "title": account.source}
        return learn(data, account, model, loss, chosen, **run)


def first() -> bool:
    """Whether this process is the one that speaks and writes: by its process group, or as torchrun numbers them."""
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def before(out: Mirror, resume: bool) -> Config | None:
    """What the run in `out` was told, where it is gone on with."""
    path = out.path / "config.toml" if resume else None
    if path is not None and out.address and path.name in out.names():
        out.bring([path.name])
    return load(path) if path is not None and path.is_file() else None


def aligned(
    source: prepare.Sources, model: Path, chosen: Config, out: Path, watch: Stopwatch
) -> tuple[Sequences | Shards, Account]:
    """What `prepare.load` gives, or prepared folders, opened; and how exactly all of it aligned.

    The first process alone writes bad records aside, and shows how far it is.

    Raises:
        ArgumentError: for folders among files, or an option of aligning where folders are given.
    """
    named = [source] if isinstance(source, str) else list(source)
    folders = [name for name in named if prepare.is_prepared(name)]
    if folders and len(folders) < len(named):
        other = next(name for name in named if name not in folders)
        raise ArgumentError(
            f"{folders[0]} is prepared and {other} is not. What is trained on at once is aligned at once, or in "
            "folders. Prepare all of them."
        )
    if folders:
        for name in folders:
            prepare.check_prepared(name, chosen.data, chosen.map)
        with watch("read"):
            shards = Shards.open(folders, verify=True)
        return shards, _counted(shards, chosen, watch)
    data = chosen.data if first() or chosen.data.on_error != "quarantine" else replace(chosen.data, on_error="skip")
    return prepare.load(source, model, data, out, watch, map=chosen.map, progress=Bar() if first() else None)


def _counted(shards: Shards, chosen: Config, watch: Stopwatch) -> Account:
    """The account of shards, one after the other."""
    said = ", ".join(map(redacted, shards.folders[:3])) + (
        f" and {more:,} more" if (more := len(shards.folders) - 3) > 0 else ""
    )
    account = Account(said, list(shards.folders), reward=chosen.data.reward)
    with watch("read"):
        for part in shards.parts():
            account.add(part)
    return account


def objective_of(chosen: Config) -> Objective:
    """The objective that a config names, with what it overrides of it."""
    return override_all(presets.find(chosen.objective.preset), dict(chosen.objective.overrides))


def learn(
    data: Sequences | Shards,
    account: Account,
    model: Path,
    objective: Objective,
    chosen: Config,
    *,
    out: Mirror,
    resume: bool,
    title: str,
    say: Callable[[str], None],
    watch: Stopwatch,
    sinks: Sequence[Sink] | None = None,
) -> Trained:
    """The run over aligned tokens: loads the model, trains, and writes summary.json and report.html under a title."""
    try:
        with watch("import"):
            from tracegrad import trainer
            from tracegrad.trainer.lora import load_model
    except ImportError as error:
        raise ArgumentError(
            f"train needs {error.name}, which is not installed. Reading and aligning work without it, training does "
            "not. pip install 'tracegrad[train]'"
        ) from error
    with watch("load"):
        loaded = load_model(model)
    if isinstance(data, Shards):
        data.model = model
    else:
        data = data.of_model(model)
    places = {"out": out, "tokenizer": model, "resume": resume, "sinks": sinks}
    done = trainer.train(data, loaded, objective=objective, config=chosen, say=say, **places)
    if first():
        watch.seconds.update(done.seconds)
        made_of = provenance.provenance(account.named, model)
        provenance.sign(out.path / "config.toml", made_of)
        summary = {**_summary(chosen, account, done, watch.seconds), "provenance": made_of}
        prepare.write_json(out.path / "summary.json", summary)
        with watch("report"):
            tokenizer = Tokenizer.from_pretrained(model)
            sequences, terms = _shown(data, done.terms)
            found = {"rows": done.rows, "terms": terms, "summary": summary}
            found |= {"counts": _counts(account), "pull": done.pull}
            about = {"base": model, "objective": objective, "config": chosen, "rows": done.rows}
            write_card(done.checkpoint, **about, data=account.lines())
            told = _told(chosen, objective, model, account.source, str(out) if out.address else str(out.path.resolve()))
            beside = [name for name in ("config.toml", "metrics.jsonl", "summary.json") if (out.path / name).is_file()]
            page = {"title": title, "about": told, "links": beside}
            write_report(out.path / "report.html", sequences=sequences, tokenizer=tokenizer, **page, **found)
        out.push()
        if out.address:
            card = done.checkpoint / "README.md"
            out.send([card.relative_to(out.path).as_posix()])
    return done


def _shown(data: Sequences | Shards, terms: list[TermRecord]) -> tuple[Sequences, list[TermRecord]]:
    """The traces that a report may show, and their terms by the numbers that they have there."""
    if isinstance(data, Sequences):
        return data, terms
    catalog = data.catalog
    rows = np.unique(np.concatenate([np.zeros(0, np.int64), *(record.trace for record in terms)])).astype(np.int64)
    rows = rows if len(rows) else np.zeros(1, np.int64)
    tokens = catalog.tokens[rows].astype(np.int64)
    moved = catalog.first_token[rows] - (np.cumsum(tokens) - tokens)
    here = [np.searchsorted(rows, record.trace) for record in terms]
    renumbered = [
        replace(record, origin=record.origin - moved[row], trace=row.astype(np.int32))
        for record, row in zip(terms, here, strict=True)
    ]
    return data.kept(rows), renumbered


def _counts(account: Account) -> Counts:
    """What the report says of all traces."""
    names = ("traces", "groups", "tokens", "terms", "tiers", "drift", "recorded", "exact")
    return Counts(**{name: getattr(account, name) for name in names})


def _config(
    out: Mirror,
    recipe: str | recipes.Recipe | None,
    objective: str | Objective | None,
    options: Mapping[str, Any],
    resume: bool,
) -> Config:
    """Defaults, or what the resumed run was told; then the recipe, the objective, and the options."""
    start = before(out, resume)
    overrides = [*options.items()]
    if isinstance(objective, Objective):
        overrides = [*named(objective), *overrides]
    elif objective is not None:
        overrides = [("objective", objective), *overrides]
    if recipe is None:
        return load(None, overrides, start=start)
    begins = recipes.find(recipe) if isinstance(recipe, str) else recipe
    return begins.settle(None, overrides, start=start)[0]


def _told(chosen: Config, objective: Objective, model: str | Path, source: str, out: str) -> list[tuple[str, object]]:
    """What the page says of a run: its loss, the options that are not the default's, versions and paths."""
    default, own = as_dict(Config()), as_dict(chosen)
    options = [(name, value) for name, value in own.items() if value != default.get(name)]
    return [
        ("loss", str(objective).replace("\n", "; ")),
        *((name, redacted(value)) for name, value in options),
        ("traces", source),
        ("model", str(model)),
        ("folder", out),
        ("tracegrad", __version__),
        *((name, version(name)) for name in ("torch", "transformers")),
        ("Python", platform.python_version()),
    ]


def _summary(chosen: Config, account: Account, done: Any, seconds: dict[str, float]) -> dict[str, Any]:
    kept = ("traces", "groups", "tokens", "terms", "pictures", "tiers", "drift", "recorded", "exact")
    value = next((row for row in reversed(done.rows) if "off_policy_value" in row), {})
    return {
        **{name: value for name, value in account.as_dict().items() if name in kept},
        "seed": chosen.train.seed,
        "steps": done.step,
        "steps_planned": done.total,
        "stopped": done.stopped,
        "off_policy_value": {name: value[name] for name in value if name.startswith("off_policy_value")},
        "seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "checkpoint": done.address or str(done.checkpoint),
        "device_idle": done.idle,
    }
