"""README.md of a checkpoint: a model card with the run's loss, its options, what it was trained on, and its figures.

The head is what model hubs read. The rest is text for people; what strangers wrote stands in blocks that no markup
leaves.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracegrad._core import __version__
from tracegrad.config import Config, as_dict
from tracegrad.errors import TracegradError, redacted, shown
from tracegrad.metrics import off_policy_value_of
from tracegrad.storage import files

NAME = "README.md"
_BLOCK = "~~~~~~~~"
_SPELT = {"off_policy_value": "value", "eval": "evaluation"}


def write_card(
    checkpoint: Path,
    *,
    base: str | Path,
    objective: object,
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    data: Sequence[str],
) -> None:
    """Writes the card into a checkpoint, whose checksums leave it out.

    Args:
        checkpoint: folder that transformers loads.
        base: model that the run began with.
        objective: its text is the loss.
        config: options of the run; those that are not the default's are told.
        rows: of metrics.jsonl.
        data: lines on what was trained on.

    Raises:
        TracegradError: if it cannot be written.
    """
    default = as_dict(Config())
    options = [f"{name} = {value!r}" for name, value in as_dict(config).items() if value != default.get(name)]
    head = {"library_name": "peft" if (checkpoint / "adapter_config.json").exists() else "transformers"}
    if not Path(base).exists():  # a name on a hub; that of a folder here would lead nowhere
        head["base_model"] = str(base)
    lines = [
        "---",
        *(f"{key}: {json.dumps(shown(redacted(value)))}" for key, value in head.items()),
        "tags: [tracegrad, reinforcement-learning, text-generation]",
        "---",
        "",
        "# A policy trained by tracegrad",
        "",
        f"Trained by tracegrad {__version__} from recorded trajectories and their logprobs.",
        *_section("Begun with", [Path(redacted(base)).name]),
        *_section("Loss", str(objective).split("\n")),
        *_section("Options other than the default", options or ["none"]),
        *_section("Data", data),
        *_section("Figures", figures(rows)),
    ]
    try:
        files.write(checkpoint / NAME, "\n".join(lines) + "\n")
    except OSError as error:
        raise TracegradError(
            f"{checkpoint / NAME}: {error.strerror}. The model has no card. Free space there."
        ) from error


def figures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came of a run: steps, terms, the value or the evaluations, and how far the policy has moved.

    >>> before = {"step": 0, "off_policy_value": 0.4, "off_policy_value_low": 0.3, "off_policy_value_high": 0.5}
    >>> figures([{**before, "off_policy_value_known": 1}, {"step": 1, "loss": 0.1, "terms": 9}])
    ['steps           1', 'terms           9', 'value, step 0   0.400 (0.300 to 0.500)']
    """
    steps = [row for row in rows if row.get("loss") is not None]
    found = [("steps", f"{len(steps)}"), ("terms", f"{sum(row.get('terms') or 0 for row in steps):,}")]
    for kind, name in (("off_policy_value", "off_policy_value"), ("eval", "eval_reward")):
        told = [row for row in rows if row.get(name) is not None]
        for row in [*told[:1], *told[1:][-1:]]:
            span = [row.get(f"{kind}_{end}") for end in ("low", "high")]
            between = "" if None in span else f" ({span[0]:.3f} to {span[1]:.3f})"
            known = kind != "off_policy_value" or off_policy_value_of(row) is not None
            found.append((f"{_SPELT[kind]}, step {row['step']}", f"{row[name]:.3f}{between}" if known else "not known"))
    return [f"{name:<15} {value}" for name, value in found]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", _BLOCK, *(shown(redacted(line)).replace("~~~", "~ ~ ~") for line in lines), _BLOCK]
