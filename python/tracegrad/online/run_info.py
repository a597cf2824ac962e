"""What a run was told, in its run.json: written by the trainer, read by collectors, replays and runs that go on.

The config of training is beside it in config.toml; here it is written for whoever looks.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracegrad.config import Config, as_dict
from tracegrad.errors import FormatError
from tracegrad.online.options import Online, Play
from tracegrad.storage.manifest import text
from tracegrad.storage.safetensors_file import read_text, write_bytes

NAME = "run.json"
MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class Brief:
    """What a run was told.

    Args:
        model: folder of the model that it began with.
        objective: its `repr`.
        online, play: its options.
        engine: vLLM's engine arguments, as far as the trainer knows them.
    """

    model: str
    objective: str
    online: Online
    play: Play
    engine: Mapping[str, Any] = field(default_factory=dict)

    def write(self, out: Path, config: Config) -> None:
        """Replaces what the folder of the run says."""
        known = {"model": self.model, "objective": self.objective, "online": asdict(self.online)}
        known |= {"play": asdict(self.play), "engine": dict(self.engine), "config": as_dict(config)}
        write_bytes(out / NAME, [(json.dumps(known, indent=1, default=str) + "\n").encode()])

    @classmethod
    def read(cls, out: Path) -> "Brief":
        """What the folder of a run says."""
        held = read_text(out / NAME, MOST_BYTES)
        try:
            told = json.loads(held)
            online, play = Online(**told["online"]), Play(**told["play"])
            return cls(text(told["model"]), text(told["objective"]), online, play, dict(told["engine"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"{out / NAME}: not what a trainer writes ({str(error)[:80]!r}). What the run was told is not known. "
                "Copy it again, or start the trainer again, which writes it anew."
            ) from error
