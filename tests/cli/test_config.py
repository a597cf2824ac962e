"""Options: defaults, then TOML, then dotted overrides; nothing unknown passes."""

import contextlib
import time
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad import config
from tracegrad.config.parse import field_docs
from tracegrad.errors import ArgumentError
from tracegrad.online import OnlineConfig, RolloutConfig


def test_the_core_has_at_most_fifty_fields_a_section_of_its_own_fifteen_and_each_has_a_docstring():
    """What is new goes into a section of its own, which does nothing where it is left out."""
    parts = {name: type(getattr(config.Config(), name)) for name in config.SECTIONS}
    assert sum(len(fields(part)) for name, part in parts.items() if name not in config.FEATURES) <= 50
    beside = {name: parts[name] for name in config.FEATURES} | {"online": OnlineConfig, "rollout": RolloutConfig}
    assert max(len(fields(part)) for part in beside.values()) <= 15
    parts |= beside
    names = [(part, f.name) for part in parts.values() for f in fields(part)]
    undocumented = [name for part, name in names if not field_docs(part).get(name, "").endswith(".")]
    assert undocumented == []


@pytest.mark.parametrize(
    ("name", "now"), [("optimizer.warmup_steps", "schedule.warmup_steps"), ("pack.leave_out", "pack.share_prefixes")]
)
def test_a_name_of_before_is_refused_with_the_one_it_has_now(name, now):
    with pytest.raises(ArgumentError, match=rf"TG-CONFIG-001.*{name}.*{now}"):
        config.load(overrides=[(name, "idle")])
    assert now in config.options()


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
            ("objective.weights.0.transform.high", "3"),
            ("train.report_to", "wandb, trackio"),
            ("data.reward", ['a "quoted" näme', "b,c"]),
            ("optimizer.lr", "3"),
        ]
    )
    (tmp_path / "config.toml").write_text(config.to_toml(told), encoding="utf-8")
    assert config.load(tmp_path / "config.toml") == told
    assert dict(told.objective.overrides) == {"surrogate.high": 0.28, "weights.0.transform.high": 3}
    assert told.train.report_to == ("wandb", "trackio")
    assert config.as_dict(told)["data.reward"] == ['a "quoted" näme', "b,c"]


@pytest.mark.parametrize("names", [[], ["a", "b"], ["a,b"], ["[a"], ["[1]"], [" a"], [""], ["é"]])
def test_a_list_is_read_back_from_its_text_on_the_command_line(names):
    assert config.load(overrides=[("data.reward", config.join_list(names))]).data.reward == tuple(names)


def test_another_preset_drops_the_overrides_of_the_one_before():
    before = config.load(overrides=[("objective", "DAPO"), ("objective.surrogate.high", 0.3)])
    assert config.load(overrides=[("objective", "GRPO")], start=before).objective == config.ObjectiveConfig("GRPO", ())
    assert config.load(overrides=[("objective", "DAPO")], start=before).objective == before.objective


def test_in_a_file_the_preset_may_stand_after_its_fields(tmp_path):
    (tmp_path / "run.toml").write_text('[objective]\nsurrogate.high = 0.3\npreset = "GRPO"\n')
    assert config.load(tmp_path / "run.toml").objective == config.ObjectiveConfig("GRPO", (("surrogate.high", 0.3),))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("optimizer.lrr", "1", r"TG-CONFIG-001.*optimizer\.lr"),
        ("epochs", "1", r"TG-CONFIG-001.*train\.epochs"),
        ("trian.seed", "1", r"TG-CONFIG-001.*train\.seed"),
        ("zzz", "1", r"TG-CONFIG-001.*data\.on_error"),
        ("optimizer.lr", "fast", "TG-CONFIG-003"),
        ("train.epochs", "1.5", "TG-CONFIG-003"),
        ("train.epochs", 2.0, "TG-CONFIG-003"),
        ("train.report_to", "wandb,mlflow", "TG-CONFIG-010"),
        ("data.on_error", "rais", r"TG-CONFIG-003.*raise.*skip.*quarantine"),
        ("data.reward", 3, "TG-CONFIG-003.*a list of strings"),
        ("data.reward", [3], "TG-CONFIG-003.*a list of strings"),
        ("data.reward", "[1", "TG-CONFIG-003.*a list of strings"),
        ("data.reward_weights", "1,much", "TG-CONFIG-003.*a list of finite numbers"),
        ("mixture.weights", [1, float("inf")], "TG-CONFIG-003.*a list of finite numbers"),
        ("data.reward.0", "a", "TG-CONFIG-001"),
        ("optimizer.lr", "0", r"TG-CONFIG-010.*0"),
        ("optimizer.beta2", "1", r"TG-CONFIG-010.*0.*1"),
        ("stop.min_ope_ess", "20", r"TG-CONFIG-010.*0.*1"),
        ("train.groups_per_step", "0", r"TG-CONFIG-010.*1"),
        ("checkpoint.keep", "0", r"TG-CONFIG-010.*1"),
    ],
)
def test_a_wrong_option_is_one_error_with_its_name_and_cure(name, value, said):
    with pytest.raises(ArgumentError, match=said) as raised:
        config.load(overrides=[(name, value)])
    assert name in str(raised.value)


def test_a_wrong_option_in_a_file_names_the_file(tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nepocs = 3\n")
    with pytest.raises(ArgumentError, match=r"TG-CONFIG-001.*run\.toml.*train\.epocs.*train\.epochs"):
        config.load(tmp_path / "run.toml")


def test_a_file_that_is_no_toml_or_is_not_there_is_one_error(tmp_path):
    (tmp_path / "run.toml").write_text("[train\n")
    with pytest.raises(ArgumentError, match="TG-CONFIG-007"):
        config.load(tmp_path / "run.toml")
    with pytest.raises(ArgumentError, match="TG-CONFIG-006"):
        config.load(tmp_path / "gone.toml")


TOML_OF = {str: '"x"', int: "3", float: "0.5", bool: "true"}
OTHERS = ["1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[1]", "[[1]]", "[]", "{}", "{a = 1}", "nan", "-inf"]


@pytest.mark.parametrize("name", [*config.options(), "objective.surrogate.high"])
def test_a_value_of_a_wrong_type_is_one_error_for_every_option(tmp_path, name):
    section, _, key = name.partition(".")
    kind = config.options().get(name, (float,))[0]
    valid = {tuple[str, ...]: ['"x"', "[]"], tuple[float, ...]: ["[1]", "[]"]}.get(kind, [])
    kind = kind if kind in TOML_OF else str
    wrong = [text for other, text in TOML_OF.items() if other is not kind and (kind, other) != (float, int)]
    huge = ["0x" + "f" * 6000, "9" * 5000, "9" * 400, "9223372036854775808"]
    for text in [*OTHERS, *huge, *(wrong if section != "objective" else ["{a = []}"])]:
        (tmp_path / "run.toml").write_text(f"[{section}]\n{key} = {text}\n")
        if text in valid or (section == "objective" and text in ("nan", "-inf", "{a = 1}")):
            continue  # numbers, or fields, of which the objective knows more than the config
        with pytest.raises(ArgumentError, match=r"TG-CONFIG-0.*run\.toml: ") as raised:
            config.load(tmp_path / "run.toml")
        assert len(str(raised.value)) < 1400
        assert "not TOML" in str(raised.value) or section in str(raised.value)


HOSTILE = [
    b"a = " + b"[" * 60_000,
    b"a = " + b"[" * 900,
    b"a = " + b"{b = " * 900,
    b"[" + b"a." * 30_000 + b"a]",
    b"train." + b"a." * 30_000 + b"a = 1",
    b"objective." + b"a." * 30_000 + b"a = 1",
    (b"train." + b"a." * 990 + b"a = 1\n") * 30,
    b'"' + b"k" * 60_000 + b'" = 1',
    b"a" * 60_000 + b" = 1",
    b"[train]\nseed = 1\nseed = 2",
    b"[train]\n[train]",
    b"train = 3",
    b"[[train]]\nseed = 1",
    b"[trian]",
    b"[train.seed]",
    b"objective = 3",
    b"objective = [1]",
    b"a = 1\n\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf[train",
    b"data.reward = '\x1b[31m'",
    b'"\\u001b[31m\\u202e" = 1',
    b"x" * 100_000_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_is_one_short_error_in_bounded_time(tmp_path, text):
    (tmp_path / "run.toml").write_bytes(text)
    began = time.process_time()
    with pytest.raises(ArgumentError, match=r"TG-CONFIG-0.*run\.toml: ") as raised:
        config.load(tmp_path / "run.toml")
    assert time.process_time() - began < 5
    said = str(raised.value).replace(str(tmp_path), "")
    assert len(said) < 2000
    assert said.isprintable()


@given(st.binary(max_size=60))
def test_any_bytes_are_a_config_or_an_error_of_ours(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(b"[train]\n" + data)
    with contextlib.suppress(ArgumentError):
        config.load(path)


NAMES = st.text(max_size=12).filter(lambda name: name != "preset" and not name.startswith("preset."))


@given(
    st.text(max_size=20),
    st.text(min_size=1, max_size=20),
    NAMES,
    st.one_of(st.text(max_size=9), st.floats(), st.booleans()),
)
@settings(max_examples=40)
def test_whatever_text_is_told_is_read_back_from_what_a_run_writes(tmp_path_factory, reward, preset, name, value):
    path = tmp_path_factory.getbasetemp() / "config.toml"
    told = config.Config(data=config.Data(reward=(reward,)), objective=config.ObjectiveConfig(preset, ((name, value),)))
    path.write_text(config.to_toml(told), encoding="utf-8", newline="")
    again = config.load(path)
    assert again.data == told.data
    assert again.objective.preset == preset
    [(found, back)] = again.objective.overrides
    wanted = config.scalar(value)
    assert (found, repr(back)) == (name, repr(wanted))


def test_text_that_no_file_can_hold_is_refused():
    with pytest.raises(ArgumentError, match=r"TG-CONFIG-003.*UTF-8"):
        config.load(overrides=[("train.ref_model", "caf\udce9")])


def test_a_field_and_a_field_below_it_are_not_both_told():
    from tracegrad import objective
    from tracegrad.objective import presets

    with pytest.raises(ArgumentError, match="TG-CONFIG-002"):
        objective.override_all(presets.DAPO, {"surrogate": 3, "surrogate.high": 0.3})


def test_the_page_shows_the_table_of_options():
    page = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
    assert config.describe() in page.read_text(encoding="utf-8")
