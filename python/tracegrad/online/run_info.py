"""Store the settings of a run in its run.json, for collectors, replays and resumed runs.

The training config is in config.toml next to it. The copy of it in run.json is for people who read the file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracegrad.config import Config, as_dict
from tracegrad.errors import FormatError
from tracegrad.online.options import OnlineConfig, RolloutConfig
from tracegrad.storage.manifest import text
from tracegrad.storage.safetensors_file import read_text, write_bytes

NAME = "run.json"
MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class RunInfo:
    """Settings of a run.

    Args:
        model: folder of the initial model.
        objective: `repr` of the objective.
        online, rollout: options of the run.
        engine: vLLM's engine arguments, as far as the trainer has them.
    """

    model: str
    objective: str
    online: OnlineConfig
    rollout: RolloutConfig
    engine: Mapping[str, Any] = field(default_factory=dict)

    def write(self, out: Path, config: Config) -> None:
        """Write run.json in the folder of the run, replacing an existing one."""
        record = {"model": self.model, "objective": self.objective, "online": asdict(self.online)}
        record |= {"rollout": asdict(self.rollout), "engine": dict(self.engine), "config": as_dict(config)}
        write_bytes(out / NAME, [(json.dumps(record, indent=1, default=str) + "\n").encode()])

    @classmethod
    def read(cls, out: Path) -> "RunInfo":
        """Read run.json from the folder of a run.

        Raises:
            FormatError: if the file is not valid.
        """
        content = read_text(out / NAME, MOST_BYTES)
        try:
            record = json.loads(content)
            online, rollout = OnlineConfig(**record["online"]), RolloutConfig(**record["rollout"])
            return cls(text(record["model"]), text(record["objective"]), online, rollout, dict(record["engine"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"TG-ONLINE-029: {out / NAME}: not the settings of a run ({str(error)[:80]!r}). Copy the file again, "
                "or restart the trainer to write it again."
            ) from error
