"""Give the model folder whose code must never run."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

MODEL = ROOT / "examples" / "quickstart" / "model"
