"""examples/images: what was recorded is what the model says, and it learns from pixels alone."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tracegrad as tg
from tracegrad.model import logprobs
from tracegrad.trainer.load_model import load_full_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "images"


def test_the_recording_has_the_logprobs_of_its_model():
    """All 1,024 answers of the server, float32 on both sides."""
    sequences = tg.align(tg.read(EXAMPLE / "traces.jsonl.zst"), tg.Tokenizer.from_pretrained(EXAMPLE / "model"))
    assert sequences.traces == 1024
    assert len(sequences.images.pictures) == 128
    assert sequences.alignment_report.rate == 0
    assert sequences.trainable.sum() == (sequences.source == 2).sum() == 2071
    [step] = tg.pack(sequences, np.ones(1024), tokens_per_row=4096, share_prefixes=True)
    model = load_full_model(EXAMPLE / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    with torch.no_grad():
        gaps = [np.abs(logprobs(model, b).numpy() - step.rollout_logprobs[b.term]).max() for b in step.batches]
    assert max(gaps) < 1e-5


@pytest.mark.nightly
def test_it_learns_from_pixels_and_not_from_shuffled_ones(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import demo

    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    assert demo.main() == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    before, after, other = (found[name] for name in ("before", "seed0", "shuffled"))
    assert after["success"] > before["success"] + 0.15
    assert after["ci95"][0] > before["ci95"][1]
    assert other["success"] < before["success"] + 0.15
