"""The example for other people's trainers runs as it stands, and its loss is the loss of our own road."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tracegrad as tg
from truncated import restricted

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACES = 16


@pytest.fixture(scope="module")
def trained(example):
    sys.path.insert(0, str(EXAMPLES))
    import in_your_trainer

    traces, model = str(example / "traces.jsonl.zst"), str(example / "model")
    rows = tg.align(tg.read(traces)[:TRACES], tg.Tokenizer.from_pretrained(model)).branches
    return in_your_trainer.train(traces, model, steps=2, rows_per_step=rows)


def test_it_is_at_most_60_lines_and_takes_no_learner_of_ours():
    source = (EXAMPLES / "in_your_trainer.py").read_text()
    assert len(source.splitlines()) <= 60
    assert "learner" not in source
    assert "tg.pack" not in source


def packed_loss(data, advantages, folder):
    """The first loss of DAPO on packed rows."""
    objective = tg.presets.DAPO
    (step,) = tg.pack(data, advantages, tokens_per_row=4096, requirements=objective.requirements)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        old = np.concatenate([tg.model.logprobs(model, batch).numpy() for batch in step.batches])
    order = np.concatenate([batch.term for batch in step.batches])
    step = step.with_logprobs(old=old[np.argsort(order)])
    fixed = tg.correct(
        step.old_logprobs, step.rollout_logprobs, trace=step.trace,
        weights=objective.weights, reduce=objective.reduce, totals=step.totals,
    )  # fmt: skip
    return sum(
        objective(tg.model.logprobs(model, batch), None, step.terms(batch, fixed)).loss.item() for batch in step.batches
    )


def test_its_first_loss_is_that_of_packed_rows(trained, example):
    tokenizer = tg.Tokenizer.from_pretrained(example / "model")
    whole = tg.align(tg.read(example / "traces.jsonl.zst"), tokenizer)
    some = tg.align(tg.read(example / "traces.jsonl.zst")[:TRACES], tokenizer)
    advantages = tg.advantage.group_mean(whole.reward, whole.group)[:TRACES]
    _, losses = trained
    assert losses[0] == pytest.approx(packed_loss(some, advantages, example / "model"), rel=1e-4, abs=1e-6)


def test_tokens_drawn_from_a_part_of_the_vocabulary_are_compared_over_it(example, monkeypatch):
    import in_your_trainer

    traces, model = str(example / "traces.jsonl.zst"), str(example / "model")
    plain = tg.align(tg.read(traces)[:TRACES], tg.Tokenizer.from_pretrained(model))
    advantages = tg.advantage.group_mean(plain.reward, plain.group)
    data = restricted(plain, vocabulary=600)
    monkeypatch.setattr(tg, "align", lambda *_: data)
    _, [loss] = in_your_trainer.train(traces, model, steps=1, rows_per_step=data.branches)
    assert loss == pytest.approx(packed_loss(data, advantages, model), rel=1e-4, abs=1e-6)
    assert loss != pytest.approx(packed_loss(plain, advantages, model), rel=1e-2, abs=1e-4)


def test_it_changes_the_model(trained, example):
    model, losses = trained
    start = AutoModelForCausalLM.from_pretrained(example / "model", dtype=torch.float32)
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-5
    assert all(np.isfinite(losses))
