"""What tests share of test_model_code: MODEL."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

MODEL = ROOT / "examples" / "quickstart" / "model"
