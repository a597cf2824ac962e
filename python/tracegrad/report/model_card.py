"""Write the model card (README.md) of a checkpoint: the loss, options, data and results of its run.

Model hubs read the head. The rest is text for people. Third-party text is inside code blocks that it cannot close.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracegrad._core import __version__
from tracegrad.config import Config, as_dict
from tracegrad.errors import TracegradError, escape_terminal, redact
from tracegrad.metrics import off_policy_estimate
from tracegrad.storage import files

NAME = "README.md"
_BLOCK = "~~~~~~~~"


def write_card(
    checkpoint: Path,
    *,
    base: str | Path,
    objective: object,
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    data: Sequence[str],
) -> None:
    """Write the model card into a checkpoint. The checkpoint's checksums do not include it.

    Args:
        checkpoint: folder that transformers loads.
        base: model that the run started from.
        objective: the loss, printed with `str`.
        config: options of the run. Only those that differ from the defaults are listed.
        rows: rows of metrics.jsonl.
        data: lines about the training data.

    Raises:
        TracegradError: if it cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> from tracegrad.config import Optimizer
    >>> from tracegrad.objective import presets
    >>> config, rows = Config(optimizer=Optimizer(lr=1e-5)), [{"step": 1, "loss": 0.5}]
    >>> with TemporaryDirectory() as folder:
    ...     write_card(Path(folder), base="model", objective=presets.GRPO, config=config, rows=rows, data=["2 traces"])
    ...     "optimizer.lr = 1e-05" in Path(folder, "README.md").read_text()
    True
    """
    default = as_dict(Config())
    options = [f"{name} = {value!r}" for name, value in as_dict(config).items() if value != default.get(name)]
    head = {"library_name": "peft" if (checkpoint / "adapter_config.json").exists() else "transformers"}
    if not Path(base).exists():  # Only a hub name is useful to others, not a local path.
        head["base_model"] = str(base)
    lines = [
        "---",
        *(f"{key}: {json.dumps(escape_terminal(redact(value)))}" for key, value in head.items()),
        "tags: [tracegrad, reinforcement-learning, text-generation]",
        "---",
        "",
        "# A policy trained by tracegrad",
        "",
        f"Trained by tracegrad {__version__} from recorded trajectories{_logprobs(rows)}.",
        *_section("Base model", ["/".join(Path(redact(base)).parts[-2:])]),
        *_section("Loss", str(objective).split("\n")),
        *_section("Options other than the default", options or ["none"]),
        *_section("Data", data),
        *_section("Results", results(rows)),
    ]
    try:
        files.write(checkpoint / NAME, "\n".join(lines) + "\n")
    except OSError as error:
        raise TracegradError(
            f"TG-REPORT-001: {checkpoint / NAME}: {error.strerror}. The model has no card. Free space there."
        ) from error


def _logprobs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how much of the recorded logprobs the steps have, as the end of a sentence; "" if it is unknown."""
    coverages = [row["rollout_logprob_coverage"] for row in rows if row.get("rollout_logprob_coverage") is not None]
    if not coverages:
        return ""
    return " and their logprobs" if any(coverages) else " as text, without their logprobs"


def results(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines with the results of a run: steps, trained tokens, off-policy estimate (ope), and evaluations.

    >>> before = {"step": 0, "ope": 0.4, "ope_low": 0.3, "ope_high": 0.5}
    >>> results([{**before, "ope_reliable": 1}, {"step": 1, "loss": 0.1, "tokens_trained": 9}])
    ['steps           1', 'trained tokens  9', 'ope, step 0     0.400 (0.300 to 0.500)']
    """
    steps = [row for row in rows if row.get("loss") is not None]
    facts = [
        ("steps", f"{len(steps)}"),
        ("trained tokens", f"{sum(row.get('tokens_trained') or 0 for row in steps):,}"),
    ]
    for kind, name, label in (("ope", "ope", "ope"), ("eval", "eval_reward", "evaluation")):
        measured = [row for row in rows if row.get(name) is not None]
        for row in [*measured[:1], *measured[1:][-1:]]:
            span = [row.get(f"{kind}_{end}") for end in ("low", "high")]
            between = "" if None in span else f" ({span[0]:.3f} to {span[1]:.3f})"
            is_reliable = kind != "ope" or off_policy_estimate(row) is not None
            facts.append((f"{label}, step {row['step']}", f"{row[name]:.3f}{between}" if is_reliable else "unknown"))
    return [f"{name:<15} {value}" for name, value in facts]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [
        "",
        f"## {title}",
        "",
        _BLOCK,
        *(escape_terminal(redact(line)).replace("~~~", "~ ~ ~") for line in lines),
        _BLOCK,
    ]
