"""The README.md of a checkpoint: what it tells, and that no text of strangers becomes its head or its markup."""

import pytest

import tracegrad as tg
from tracegrad.config import Config, Data, Train
from tracegrad.errors import TracegradError
from tracegrad.report import write_card

EVIL = "x\n~~~~~~~~\n---\nlicense: mit\n---\n# hello \x1b[2J"


def card(folder, **told):
    about = {"base": "org/name", "objective": tg.presets.GRPO, "config": Config(), "rows": [], "data": []}
    write_card(folder, **{**about, **told})
    return (folder / "README.md").read_text()


def test_the_head_names_the_library_and_a_model_of_a_hub(tmp_path):
    assert card(tmp_path).split("---")[1].splitlines() == [
        "",
        'library_name: "transformers"',
        'base_model: "org/name"',
        "tags: [tracegrad, reinforcement-learning, text-generation]",
    ]
    (tmp_path / "adapter_config.json").write_text("{}")
    told = card(tmp_path, base=tmp_path)
    assert 'library_name: "peft"' in told
    assert "base_model" not in told
    assert str(tmp_path) not in told


def test_the_card_tells_whether_logprobs_were_recorded(tmp_path):
    def first(coverages):
        rows = [{"step": 1, "loss": 0.5, "rollout_logprob_coverage": coverage} for coverage in coverages]
        return next(line for line in card(tmp_path, rows=rows).splitlines() if line.startswith("Trained by"))

    assert first([]).endswith("from recorded trajectories.")
    assert first([0.0, 0.0]).endswith("from recorded trajectories as text, without their logprobs.")
    assert first([0.0, 0.5]).endswith("from recorded trajectories and their logprobs.")


def test_options_and_figures_are_those_of_the_run(tmp_path):
    rows = [
        {"step": 0, "eval_reward": 0.25, "eval_low": 0.2, "eval_high": 0.3},
        {"step": 1, "loss": 0.5, "tokens_trained": 1000},
        {"step": 2, "loss": 0.5, "tokens_trained": 500, "ope": 0.5, "ope_reliable": 0},
        {"step": 2, "eval_reward": 0.75, "eval_low": 0.7, "eval_high": 0.8},
    ]
    told = card(tmp_path, config=Config(train=Train(seed=7)), rows=rows, data=["3 traces"])
    assert "train.seed = 7" in told
    assert "train.epochs" not in told
    assert [
        line.split("  ")[-1].strip() for line in told.splitlines() if line.startswith(("steps", "trained tokens"))
    ] == [
        "2",
        "1,500",
    ]
    assert "evaluation, step 0 0.250 (0.200 to 0.300)" in told
    assert "evaluation, step 2 0.750 (0.700 to 0.800)" in told
    assert "ope, step 2     unknown\n" in told
    assert "3 traces" in told


def test_what_strangers_wrote_stays_in_its_block(tmp_path):
    told = card(tmp_path, base=EVIL, config=Config(data=Data(reward=(EVIL,))), data=EVIL.split("\n"))
    assert "\x1b" not in told
    lines = told.splitlines()
    assert lines.count("---") == 2 + 2  # the head's, and two that stand in the block of the data
    blocks = [at for at, line in enumerate(lines) if line == "~~~~~~~~"]
    assert len(blocks) == 10
    inside = {at for start, end in zip(blocks[::2], blocks[1::2], strict=True) for at in range(start, end)}
    assert lines[2].startswith('base_model: "x\\\\n~~')  # one line
    assert all(at in inside for at, line in enumerate(lines) if (at > 2 and "hello" in line) or line == "license: mit")


def test_a_card_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(TracegradError, match="TG-REPORT-001"):
        card(tmp_path / "gone")
