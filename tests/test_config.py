"""Options: defaults, then TOML, then dotted overrides; nothing unknown passes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tracegrad import config
from tracegrad.config.reading import field_docs
from tracegrad.errors import ArgumentError


def test_there_are_at_most_forty_fields_and_each_has_a_docstring():
    parts = [type(getattr(config.Config(), name)) for name in config.SECTIONS]
    names = [(part, f.name) for part in parts for f in fields(part)]
    assert len(names) <= 40
    undocumented = [name for part, name in names if not field_docs(part).get(name, "").endswith(".")]
    assert undocumented == []


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        config.Config().train.epochs = 3  # pyright: ignore


def test_overrides_go_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[optimizer]\nlr = 2e-4\nbeta2 = 0.95\n[train]\nepochs = 4\n[objective]\npreset = "GRPO"\n')
    told = config.load(file, [("train.epochs", "6"), ("optimizer.lr", "1e-3")])
    assert (told.optimizer.lr, told.optimizer.beta2, told.optimizer.beta1) == (1e-3, 0.95, 0.9)
    assert (told.train.epochs, told.objective.preset) == (6, "GRPO")


def test_what_is_written_is_read_back_equal(tmp_path):
    told = config.load(
        overrides=[
            ("objective", "my.module:MINE"),
            ("objective.surrogate.high", "0.28"),
            ("objective.weights.0.shape.high", "3"),
            ("train.tensorboard", "true"),
            ("data.reward", 'a "quoted" näme'),
            ("optimizer.lr", "3"),
        ]
    )
    (tmp_path / "config.toml").write_text(config.to_toml(told), encoding="utf-8")
    assert config.load(tmp_path / "config.toml") == told
    assert dict(told.objective.overrides) == {"surrogate.high": 0.28, "weights.0.shape.high": 3}


def test_another_preset_drops_the_overrides_of_the_one_before():
    before = config.load(overrides=[("objective", "DAPO"), ("objective.surrogate.high", 0.3)])
    assert config.load(overrides=[("objective", "GRPO")], start=before).objective == config.Choice("GRPO", ())
    assert config.load(overrides=[("objective", "DAPO")], start=before).objective == before.objective


def test_in_a_file_the_preset_may_stand_after_its_fields(tmp_path):
    (tmp_path / "run.toml").write_text('[objective]\nsurrogate.high = 0.3\npreset = "GRPO"\n')
    assert config.load(tmp_path / "run.toml").objective == config.Choice("GRPO", (("surrogate.high", 0.3),))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("optimizer.lrr", "1", "Did you mean optimizer.lr?"),
        ("epochs", "1", "Did you mean train.epochs?"),
        ("trian.seed", "1", "Did you mean train.seed?"),
        ("zzz", "1", "Known: data.on_error"),
        ("optimizer.lr", "fast", "must be a number"),
        ("train.epochs", "1.5", "must be a whole number"),
        ("train.epochs", 2.0, "must be a whole number"),
        ("train.tensorboard", "1", "must be true or false"),
        ("data.on_error", "rais", "must be one of raise, skip, quarantine"),
        ("data.reward", 3, "must be a string"),
        ("optimizer.lr", "0", "must be above 0"),
        ("optimizer.beta2", "1", r"must be in \[0, 1\)"),
        ("train.stop_below_ess", "20", r"must be in \[0, 1\)"),
        ("pack.step_groups", "0", "at least 1"),
        ("checkpoint.keep", "0", "at least 1"),
    ],
)
def test_a_wrong_option_is_one_error_with_its_name_and_cure(name, value, said):
    with pytest.raises(ArgumentError, match=said) as raised:
        config.load(overrides=[(name, value)])
    assert name in str(raised.value)


def test_a_wrong_option_in_a_file_names_the_file(tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nepocs = 3\n")
    with pytest.raises(ArgumentError, match=r"run.toml: train.epocs is no option.*train.epochs"):
        config.load(tmp_path / "run.toml")


def test_a_file_that_is_no_toml_or_is_not_there_is_one_error(tmp_path):
    (tmp_path / "run.toml").write_text("[train\n")
    with pytest.raises(ArgumentError, match="not TOML"):
        config.load(tmp_path / "run.toml")
    with pytest.raises(ArgumentError, match="No such file"):
        config.load(tmp_path / "gone.toml")


def test_the_page_shows_the_table_of_options():
    page = Path(__file__).parents[1] / "docs" / "configuration.md"
    assert config.describe() in page.read_text(encoding="utf-8")
