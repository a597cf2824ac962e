"""What tests share of test_pictures_recorded: GOLDEN."""

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "pictures.jsonl.zst"
