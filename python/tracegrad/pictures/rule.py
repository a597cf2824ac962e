"""How one model writes pictures in ids: which id stands for them, and how many of it for a picture of a size.

Here is `Rule`. transformers' own image processor answers, from the sizes alone; nothing is decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import ArgumentError, ReadError
from tracegrad.pictures.processor import Processor
from tracegrad.plain_files import read_json

_FILE, _WHOLE = "preprocessor_config.json", "processor_config.json"


@dataclass(frozen=True)
class Rule:
    """How one model writes pictures.

    Args:
        pad: the id that is repeated, once for each feature.
        frames: ids that templates write around pictures.
        options: of the image processor, as preprocessor_config.json or processor_config.json has them.
        folder: of the model; None where it is not known on this machine.
    """

    pad: int
    frames: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of(cls, folder: Path) -> Rule | None:
        """What the folder of a model says; None where it has no image processor.

        Raises:
            ReadError: if its files are no JSON objects.
        """
        if (folder / _FILE).is_file():
            options = _read(folder / _FILE)
        elif (folder / _WHOLE).is_file():  # as transformers 5 saves it
            options = _read(folder / _WHOLE).get("image_processor")
        else:
            options = None
        if not isinstance(options, dict) or not (folder / "config.json").is_file():
            return None
        config = _read(folder / "config.json")
        pad = next((config[name] for name in ("image_token_id", "image_token_index") if name in config), None)
        if type(pad) is not int:
            return None
        names = ("vision_start_token_id", "vision_end_token_id", "boi_token_index", "eoi_token_index")
        frames = tuple(config[name] for name in names if type(config.get(name)) is int)
        return cls(pad, frames, options, folder)

    @property
    def digest(self) -> str:
        """The same for the same ids and options."""
        return hashlib.sha256(json.dumps([self.pad, self.options], sort_keys=True).encode()).hexdigest()

    def difference(self, other: Rule) -> str:
        """In what another is not the same: the first few options by name."""
        names = {name for name in {*self.options, *other.options} if self.options.get(name) != other.options.get(name)}
        found = [
            f"{name} ({self.options.get(name)!r:.40} and {other.options.get(name)!r:.40})" for name in sorted(names)
        ]
        return ", ".join(found[:3]) or f"the id of pictures ({self.pad} and {other.pad})"

    @property
    def processor(self) -> Processor:
        """The image processor of the folder; one for a folder, so that what it made is made once.

        Raises:
            ArgumentError: if it is not known which folder that is.
        """
        if self.folder is None:
            raise ArgumentError(
                "it is not known which image processor makes these pictures ready. The tower takes what it makes. Pass "
                "sequences.of_model(folder)."
            )
        return _processor(self.folder)

    def expansions(self, widths: NDArray[np.integer], heights: NDArray[np.integer]) -> dict[tuple[int, int], list[int]]:
        """The ids that stand for a picture of each (width, height), in place of what the template writes for one.

        Sizes that the processor refuses, such as a ratio of sides, are left out.

        Raises:
            ReadError: if the folder's processor cannot be made, or does not expand what the template writes.
        """
        sizes = sorted(set(zip(widths.tolist(), heights.tolist(), strict=True)))
        found = {size: self._expansion(*size) for size in sizes}
        return {size: ids for size, ids in found.items() if ids is not None}

    def _expansion(self, width: int, height: int) -> list[int] | None:
        try:
            count = self.processor.features(width, height)
            return self.processor.written(width, height) if count is None else [self.pad] * count
        except ValueError:
            return None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"pad": self.pad, "frames": list(self.frames), "options": dict(self.options)}

    @classmethod
    def of_dict(cls, told: Mapping[str, Any]) -> Rule:
        """What `as_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: if it is something else.
        """
        pad, frames, options = told["pad"], tuple(told["frames"]), told["options"]
        if (
            any(type(each) is not int or not 0 <= each < 1 << 31 for each in (pad, *frames))
            or type(options) is not dict
        ):
            raise ValueError("ids of pictures are none")
        return cls(pad, frames, options)


@lru_cache(maxsize=4)
def _processor(folder: Path) -> Processor:
    return Processor(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ReadError(f"{path}: {error}. How the model writes pictures is not known without it.") from error
    if not isinstance(found, dict):
        raise ReadError(f"{path}: no JSON object. How the model writes pictures is not known without it.")
    return found
