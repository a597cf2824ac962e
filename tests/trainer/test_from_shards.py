"""Training from shards that are mapped when they are needed is training from memory, bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tracegrad as tg
from sharded_runs import check_shares_of_inputs, folder, halves, prepared, spoken, two, weights  # noqa: F401
from single_steps import assert_same as assert_same_step
from tiny import sampled, tiny_model
from tracegrad import objective as algebra
from tracegrad.alignment import store
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.objective import presets
from tracegrad.packing import pack
from tracegrad.storage import manifest, safetensors_file
from tracegrad.trainer import steps, token_log_writer
from tracegrad.trainer.dataset import PreparedDataset, select
from tracegrad.trainer.steps import TrainingData
from training_runs import SignalAfter, assert_same, run, told, without_times

CASES = {
    "several epochs": ({}, presets.DAPO),
    "a reference": ({"train__updates_per_old_logprobs": 3}, algebra.with_kl(presets.GRPO, 0.05)),
    "whole traces, shared": ({"pack__share_prefixes": True, "train__epochs": 1}, presets.GSPO),
    "nothing without advantage": (
        {"pack__skip_zero_weight": True, "filter__drop_zero_std_groups": True},
        presets.DR_GRPO,
    ),
    "what is too long": ({"pack__tokens_per_row": 9, "pack__too_long": "drop"}, presets.DAPO),
    "filters": (
        {"filter__max_staleness": 4, "filter__max_reward": 0.9, "filter__min_reward": 0.1, "train__epochs": 1},
        presets.DAPO,
    ),
    "cut": ({"pack__tokens_per_row": 9, "pack__too_long": "truncate", "train__epochs": 1}, presets.DAPO),
    "kl in the reward": ({"reward_kl__coef": 0.1, "reward_kl__target_kl": 1e-3}, presets.DAPO),
    "a proximal between": ({"train__epochs": 1}, presets.A3PO),
}


QUICK = ("several epochs", "a reference", "what is too long")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in CASES]
)
@pytest.mark.first_cases(1)
def test_parameters_and_rows_are_those_of_training_from_memory(folder, tmp_path, name):
    changes, objective = CASES[name]
    changes = {"data__holdout": 0.25, **changes}
    held, inside = run(tg.Sequences.load(folder), tmp_path / "memory", objective=objective, **changes)
    found, parameters = run(PreparedDataset.open(folder), tmp_path / "shards", objective=objective, **changes)
    assert_same(parameters, inside)
    assert without_times(found.rows) == without_times(held.rows)
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / where / "terms").glob("step-*")}
        for where in ("shards", "memory")
    )
    assert ours == theirs
    assert len(ours) == found.step
    assert not list((tmp_path / "shards").glob(".logprobs*"))


def test_groups_of_which_every_one_stands_in_both_shards_are_trained_as_in_memory(tmp_path):
    found = sampled(tiny_model())
    apart = np.r_[0 : found.traces : 2, 1 : found.traces : 2]  # as two files have them that samples were dealt to
    both = select(found, apart)
    place = prepared(both, tmp_path / "prepared", [found.traces // 2])
    opened = PreparedDataset.open(place)
    first, last = opened.catalog.group[: found.traces // 2], opened.catalog.group[found.traces // 2 :]
    assert set(first.tolist()) == set(last.tolist())
    changes = {"data__holdout": 0.25, "train__epochs": 1}
    held, inside = run(both, tmp_path / "memory", **changes)
    ours, parameters = run(opened, tmp_path / "shards", **changes)
    assert_same(parameters, inside)
    assert without_times(ours.rows) == without_times(held.rows)


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_run_from_shards_resumes_to_the_same_parameters(folder, tmp_path, stop, monkeypatch):
    monkeypatch.setattr(
        token_log_writer, "MAX_REPORT_TRACES", 1
    )  # the gradient magnitude of the others is in the checkpoint
    changes = {
        "data__holdout": 0.25,
        "train__updates_per_old_logprobs": 3,
        "stop__ope_falls": True,
        "optimizer__lr": 1e-3,
    }
    objective = algebra.with_kl(presets.GRPO, 0.05)
    whole, parameters = run(tg.Sequences.load(folder), tmp_path / "whole", objective=objective, **changes)
    told_so = {"objective": objective, **changes}
    cut, _ = run(PreparedDataset.open(folder), tmp_path / "cut", sinks=[SignalAfter(stop)], **told_so)
    assert (cut.stopped, cut.step) == ("signal", stop)
    again, resumed = run(PreparedDataset.open(folder), tmp_path / "cut", tiny_model(9), resume=True, **told_so)
    assert again.step == whole.step
    assert_same(parameters, resumed)
    assert again.gradient_magnitude == pytest.approx(whole.gradient_magnitude, rel=1e-6) != 0
    other = [{k: v for k, v in row.items() if "value" not in k and "logprob_" not in k} for row in again.rows]
    mine = [{k: v for k, v in row.items() if "value" not in k and "logprob_" not in k} for row in whole.rows]
    assert without_times(other) == without_times(mine)


def test_held_out_traces_are_measured_in_pieces_and_value_is_the_same(folder, tmp_path, monkeypatch):
    changes = {"data__holdout": 0.5, "train__epochs": 1}
    whole, _ = run(tg.Sequences.load(folder), tmp_path / "whole", **changes)
    monkeypatch.setattr(steps, "TOKENS_AT_ONCE", 100)
    feed = TrainingData.of(PreparedDataset.open(folder), presets.DAPO, told(**changes))
    pieces = feed.held_pieces()
    assert len(pieces) > 3
    assert max(int(feed.catalog.tokens[rows].sum()) for rows in pieces) <= 100 + feed.catalog.tokens.max()
    assert np.array_equal(np.concatenate(pieces), np.flatnonzero(feed.held_out))
    found, _ = run(PreparedDataset.open(folder), tmp_path / "pieces", **changes)
    other, _ = run(tg.Sequences.load(folder), tmp_path / "memory", **changes)
    assert without_times(found.rows) == without_times(other.rows)
    for one, another in zip(whole.rows, found.rows, strict=True):
        for name in (name for name in one if name.startswith("ope")):
            assert another[name] == pytest.approx(one[name], rel=1e-5), name


def test_a_step_takes_from_shards_what_it_takes_from_memory(folder):
    memory, found = (
        TrainingData.of(tg.Sequences.load(folder), presets.DAPO, told()),
        TrainingData.of(PreparedDataset.open(folder), presets.DAPO, told()),
    )
    rows = memory.assign_steps(3).of(1)
    assert np.array_equal(rows, found.assign_steps(3).of(1))
    ours, theirs = found.source.take(rows), memory.source.take(rows)
    for name in (
        "ids",
        "trainable",
        "rollout_logprobs",
        "turn",
        "cu_seqlens",
        "trace",
        "group",
        "trace_ids",
        "cu_turns",
    ):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


def test_the_report_keeps_the_traces_that_it_would_show(folder, tmp_path, monkeypatch):
    from tracegrad.report.token_map import PerToken, select_examples

    monkeypatch.setattr(token_log_writer, "MAX_REPORT_TRACES", 3)
    sequences = tg.Sequences.load(folder)
    held, _ = run(sequences, tmp_path / "memory")
    found, _ = run(PreparedDataset.open(folder), tmp_path / "shards")
    wanted = select_examples(sequences, PerToken.of(sequences.tokens, held.terms), 3)
    ours = select_examples(sequences, PerToken.of(sequences.tokens, found.terms), 3)
    assert [trace for trace, _ in ours] == [trace for trace, _ in wanted]
    assert len({trace for record in found.terms for trace in record.trace.tolist()}) <= 4 * 3
    magnitude = sum(float(np.abs(each.gradient).sum()) for each in held.terms)
    assert found.gradient_magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize(
    "how",
    [
        {"pack__too_long": "drop", "pack__tokens_per_row": 8},
        {"pack__too_long": "truncate", "pack__tokens_per_row": 8, "pack__share_prefixes": True},
        {"filter__mask_truncated": True, "pack__skip_zero_weight": True},
    ],
)
def test_the_steps_of_a_feed_are_those_of_packing_all_at_once(how):
    found = sampled(tiny_model())
    found = replace(found, ending=np.where(np.arange(found.traces) % 8 < 5, 2, 1).astype(np.uint8))
    chosen = told(data__holdout=0.25, **{"train__groups_per_step": 3, **how})
    feed = TrainingData.of(found, presets.DR_GRPO, chosen)
    owner = np.repeat(found.trace, np.diff(found.cu_seqlens))
    wanted = pack(
        replace(found, trainable=found.trainable & feed.trained[owner]),
        feed.advantages,
        per="trace",
        tokens_per_row=chosen.pack.tokens_per_row,
        groups_per_step=3,
        requirements=presets.DR_GRPO.requirements,
        too_long=chosen.pack.too_long,
        share_prefixes=chosen.pack.share_prefixes,
        skip_zero_advantage=chosen.pack.skip_zero_weight,
        count_always=feed.masked,
        seed=5,
    )
    assert len(wanted) >= 3
    for one, other in zip(feed.steps(5), wanted, strict=True):
        assert_same_step(one, other)
    lost = [step.too_long.tokens for step in wanted]
    assert any(lost) == ("pack__too_long" in how)
    gone = np.bincount(found.group[feed.trained], feed._laid_out[feed.trained], minlength=24) == 0
    gone &= np.bincount(found.group[feed.trained], minlength=24) > 0
    assert gone.any() == (how.get("pack__too_long") == "drop")  # a group of which nothing is left, counted first


def test_what_is_too_long_is_refused_in_the_words_of_packing_all_at_once(monkeypatch):
    found = sampled(tiny_model())
    with pytest.raises(ArgumentError) as wanted:
        pack(found, np.ones(found.traces), per="trace", tokens_per_row=9)
    monkeypatch.setattr(steps, "TOKENS_AT_ONCE", 60)
    with pytest.raises(ArgumentError) as raised:
        TrainingData.of(found, presets.DAPO, told(data__holdout=0, pack__tokens_per_row=9)).assign_steps(0)
    assert str(raised.value) == str(wanted.value)


# --- what is refused ---


def test_columns_that_are_not_of_the_tokens_are_refused(folder, tmp_path):
    sequences = tg.Sequences.load(folder)
    other = prepared(sequences, tmp_path / "other", [20])
    place = other / "shard-00001"
    columns, told_ = safetensors_file.read(place / store.NAME)
    columns["longest"] = columns["longest"] + 1
    written = safetensors_file.write(place / store.NAME, columns, told_)
    said = json.loads((place / "manifest.json").read_text())
    said["files"][store.NAME] = {"bytes": written.bytes, "crc32": f"{written.crc32:08x}"}
    (place / "manifest.json").write_text(json.dumps(said))
    (other / "manifest.json").unlink()
    manifest.seal(other)
    opened = PreparedDataset.open(other, verify=True)
    with pytest.raises(FormatError, match=r"TG-TRAIN-017.*traces\.safetensors"):
        opened.take(np.array([25]))
    columns["terms"] = columns["terms"] + 1
    safetensors_file.write(place / store.NAME, columns, told_)
    with pytest.raises(FormatError, match="TG-TRAIN-020"):
        PreparedDataset.open(other)


def test_folders_that_are_none_or_given_twice_are_refused(folder, tmp_path):
    with pytest.raises(ArgumentError, match="TG-TRAIN-016"):
        PreparedDataset.open([folder, folder])
    with pytest.raises(ArgumentError, match="TG-TRAIN-016"):
        PreparedDataset.open([])
    with pytest.raises(ReadError, match="TG-STORE-037"):
        PreparedDataset.open(tmp_path)
    (tmp_path / "empty").mkdir()
    manifest.seal(tmp_path / "empty")
    with pytest.raises(ReadError, match="TG-TRAIN-018"):
        PreparedDataset.open(tmp_path / "empty")
    changed = prepared(tg.Sequences.load(folder), tmp_path / "changed", [])
    data = bytearray((changed / "shard-00000" / "sequences.safetensors").read_bytes())
    data[-1] ^= 1
    (changed / "shard-00000" / "sequences.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match="TG-STORE-009"):
        PreparedDataset.open(changed, verify=True)


def test_ids_of_another_tokenizer_are_refused_by_the_columns(folder, tmp_path):
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-062.*0.*47.*20"):
        run(PreparedDataset.open(folder), tmp_path, tiny_model(vocab_size=20))


def test_a_folder_of_before_there_were_columns_is_trained_from_as_well(folder, tmp_path):
    old = prepared(tg.Sequences.load(folder), tmp_path / "old", [30])
    for place in sorted(old.glob("shard-*")):
        said = json.loads((place / "manifest.json").read_text())
        del said["files"][store.NAME]
        (place / "manifest.json").write_text(json.dumps(said))
        (place / store.NAME).unlink()
    (old / "manifest.json").unlink()
    manifest.seal(old)
    assert PreparedDataset.open(old).catalog.hash == PreparedDataset.open(folder).catalog.hash


# --- several inputs ---


def test_several_folders_are_trained_from_as_one(two, folder, tmp_path):
    changes = {"data__holdout": 0.25, "train__epochs": 1}
    opened = PreparedDataset.open(two)
    assert (opened.traces, opened.inputs, len(opened.shards)) == (96, 2, 4)
    assert opened.catalog.source.tolist() == [0] * 48 + [1] * 48
    assert "2 folders" in repr(opened)
    found, parameters = run(opened, tmp_path / "two", **changes)
    whole, inside = run(PreparedDataset.open(folder), tmp_path / "one", **changes)
    assert_same(parameters, inside)
    assert without_times(found.rows) == without_times(whole.rows)


def test_a_weight_is_the_share_of_an_inputs_groups_that_an_epoch_takes(two):
    check_shares_of_inputs(two)


def test_a_reference_is_measured_of_every_group_that_an_epoch_may_take(two, tmp_path):
    changes = {"mixture__weights": "2,1", "data__holdout": 0, "train__epochs": 3}
    done, _ = run(PreparedDataset.open(two), tmp_path, objective=algebra.with_kl(presets.GRPO, 0.05), **changes)
    assert done.step == done.total == 3 * 3
    assert all(np.isfinite(row["kl_ref"]) for row in done.rows[1:])


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("1", r"TG-TRAIN-073.*2"),
        ("1,2,3", "TG-TRAIN-073"),
        ("1,0", "TG-TRAIN-073"),
        ("1,-1", "TG-TRAIN-073"),
        ("1,inf", "TG-CONFIG-003"),
        ("1,much", "TG-CONFIG-003"),
    ],
)
def test_weights_that_are_none_are_refused(two, weights, said):
    with pytest.raises(ArgumentError, match=said):
        TrainingData.of(PreparedDataset.open(two), presets.DR_GRPO, told(mixture__weights=weights))


def test_weights_without_effect_or_that_cut_a_group_are_refused(two, folder):
    with pytest.raises(ArgumentError, match="TG-TRAIN-072"):
        TrainingData.of(PreparedDataset.open(folder), presets.DR_GRPO, told(mixture__weights="1"))
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-074.*0"):
        TrainingData.of(PreparedDataset.open([two[0], folder]), presets.DR_GRPO, told(mixture__weights="1,2"))
    equal = TrainingData.of(
        PreparedDataset.open([two[0], folder]), presets.DR_GRPO, told(mixture__weights="2,2", data__holdout=0)
    )
    assert len(equal.assign_steps(0).rows) == 48 + 96
