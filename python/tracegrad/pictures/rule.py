"""How one model writes pictures in ids: provisional."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rule:
    """Provisional."""

    pad: int
    frames: tuple[int, ...]
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Provisional."""
        return json.dumps([self.pad, self.options], sort_keys=True)

    @classmethod
    def of(cls, folder: Path) -> "Rule | None":
        """Provisional."""
        if not (folder / "preprocessor_config.json").is_file():
            return None
        config = json.loads((folder / "config.json").read_text())
        pad = config.get("image_token_id", config.get("image_token_index"))
        frames = [config[name] for name in ("vision_start_token_id", "vision_end_token_id") if name in config]
        options = json.loads((folder / "preprocessor_config.json").read_text())
        return cls(pad, tuple(frames), folder, options)

    def expansions(self, widths: NDArray[np.integer], heights: NDArray[np.integer]) -> dict[tuple[int, int], list[int]]:
        """Provisional."""
        from transformers import AutoImageProcessor

        processor: Any = AutoImageProcessor.from_pretrained(self.folder)
        sizes = set(zip(widths.tolist(), heights.tolist(), strict=True))
        merge = self.options["merge_size"] ** 2
        return {(w, h): [self.pad] * (processor.get_number_of_image_patches(h, w, {}) // merge) for w, h in sizes}

    def as_dict(self) -> dict[str, Any]:
        """Provisional."""
        return {"pad": self.pad, "frames": list(self.frames), "options": self.options}

    @classmethod
    def of_dict(cls, told: dict[str, Any]) -> "Rule":
        """Provisional."""
        return cls(told["pad"], tuple(told["frames"]), Path(), told["options"])
