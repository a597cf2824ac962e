"""Load a file with another trainer's config as a recipe: `trl:config.yaml`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracegrad.config import did_you_mean
from tracegrad.errors import ArgumentError
from tracegrad.recipes.art import ART, from_art
from tracegrad.recipes.recipe import Recipe
from tracegrad.recipes.skyrl import SKYRL, from_skyrl
from tracegrad.recipes.trl import TRL, from_trl
from tracegrad.recipes.verl import VERL, from_verl

_IMPORTERS = {"trl": from_trl, "verl": from_verl, "skyrl": from_skyrl, "art": from_art}
_MOST_BYTES = 1 << 18


def like(argument: str) -> Recipe:
    """Load the recipe of `peer:file`, a YAML or JSON file with the config of trl, verl, skyrl or art.

    Raises:
        ArgumentError: for another peer, a file that is not such a config, and options that the peer's import function
            rejects.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "grpo.json")
    ...     _ = path.write_text('{"loss_type": "cispo", "epsilon_high": 5.0}')
    ...     recipe = like(f"trl:{path}")
    >>> print(recipe.objective.weights[0])
    clamp(w, 0, 5), w = theta/old
    """
    peer, _, file = argument.partition(":")
    if peer not in _IMPORTERS or not file:
        raise ArgumentError(
            f"TG-RECIPE-002: --from-config {argument!r:.100} is not the name of a config. Write "
            f"{', '.join(f'{p}:FILE' for p in _IMPORTERS)}.{did_you_mean(peer, _IMPORTERS)}"
        )
    try:
        return replace(_IMPORTERS[peer](_read(Path(file))), source=argument)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from error


def describe_unused_logprobs(source: str) -> str:
    """Return the warning about recorded logprobs that a loss does not use, with the fix for the source of the loss.

    Args:
        source: `Recipe.source`; empty for an objective that was set directly.
    """
    peers = {peer.name: peer for peer in (TRL, VERL, SKYRL, ART)}
    peer = peers.get(source.partition(":")[0])
    reason = "the recorded logprobs are not used: the loss has no ratio to the policy that sampled the tokens."
    if peer is None:
        return f"{reason} DAPO, the default objective, has one."
    if source == TRL.name:
        return f"{reason} Call from_trl(config, rollout_logprobs=True)."
    return f"{reason} Set {peer.correction} in the config, or leave the config out for DAPO, the default."


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ArgumentError(f"TG-RECIPE-003: {reason}. Pass a YAML or JSON file.") from error
    if len(data) > _MOST_BYTES:
        raise ArgumentError(
            f"TG-RECIPE-004: the file has more than {_MOST_BYTES:,} bytes, too many for a config. Pass another file."
        )
    try:
        options = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"TG-RECIPE-005: the file cannot be parsed: {str(error)[:200]!r}. Correct it.") from error
    if not isinstance(options, dict):
        raise ArgumentError(
            f"TG-RECIPE-006: the file contains a {type(options).__name__} instead of named options. Pass another file."
        )
    return options


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ArgumentError(
            "TG-RECIPE-007: YAML needs pyyaml, which is not installed. Run pip install pyyaml, or pass JSON."
        ) from None

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("an alias, which lets a short file expand to a billion values; write out its value")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
