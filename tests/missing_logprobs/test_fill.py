"""`fill` with the bundled model: the logprobs are those that the sampler recorded, and nothing else changes."""

import copy
import hashlib
import json
import os
import pickle
import signal
import socket
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rollout
import tracegrad as tg
from logs_without_logprobs import (
    entries_of,
    other_weights,
    records_of,
    sampled_log,
    text_only,
    without_logprobs,
    write_records,
)
from tracegrad.cli import main
from tracegrad.data.codes import FILLED
from tracegrad.data.sampling import options_on
from tracegrad.errors import ArgumentError, FormatError
from tracegrad.missing_logprobs import CheckpointRefused, fill, fill_file, model_scorer
from tracegrad.missing_logprobs.generations import REASONS

TEMPERATURE, GREEDY, OPTIONS, RAW_PART, VERSION, RENDERED, LOSSY, SEGMENTATION, NOT_LISTED, EXCLUDED, _ = REASONS


@pytest.fixture(scope="module")
def model(example):
    return example / "model"


@pytest.fixture(scope="module", autouse=True)
def loads_once():
    """Load each model, and verify its forward modes, once. tests/cli/test_fill_command.py loads as a command does."""
    kept, load_model = {}, model_scorer.load_model

    def load(folder):
        key = (folder, *(file.stat().st_mtime_ns for file in sorted(folder.iterdir())))
        if key not in kept:
            kept[key] = load_model(folder)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_scorer, "load_model", load)
        yield


@pytest.fixture(scope="module")
def loaded(model):
    return rollout.load(model)


@pytest.fixture(scope="module")
def tokenizer(model):
    return tg.Tokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def records(example):
    return records_of(example, 32)


@pytest.fixture(scope="module")
def filled(records, model, tmp_path_factory):
    """(input, output, report) of a log whose ids are recorded, and none of whose logprobs is."""
    folder = tmp_path_factory.mktemp("filled")
    source = write_records(folder / "in.jsonl", map(without_logprobs, records))
    return source, folder / "out.jsonl", fill(source, model, out=folder / "out.jsonl")


def logprobs_of(sequences):
    return sequences.rollout_logprobs[sequences.trainable]


def calls_of(path):
    """Return what was filled, by record and generation."""
    return [json.loads(line).get("tracegrad_filled", {}).get("calls", []) for line in path.read_text().splitlines()]


def lines_of(path):
    return path.read_bytes().splitlines()


def test_the_filled_logprobs_are_those_that_were_recorded(records, filled, tokenizer):
    _, out, report = filled
    recorded = tg.align(tg.Traces.from_records(records), tokenizer)
    measured = tg.align(tg.read(out), tokenizer)
    assert {each["metadata"]["shape"] for each in records} == {"token_ids", "token_id_strings", "strings", "messages"}
    assert measured.ids.tolist() == recorded.ids.tolist()
    assert np.isfinite(logprobs_of(recorded)).all()
    np.testing.assert_allclose(logprobs_of(measured), logprobs_of(recorded), atol=5e-5)
    assert (measured.alignment_level[measured.trainable] == FILLED).all()
    tokens = int(recorded.trainable.sum())
    assert (report.conversations, report.tokens, report.recorded, report.filled) == (32, tokens, 0, tokens)
    assert (report.unknown, report.skipped) == ({}, 0)
    assert report.filled_conversations == sum(map(bool, calls_of(filled[1]))) == 31
    assert report.unfilled == {"no sampled token that training can use": 1}
    assert (report.test.verdict, report.test.tokens, report.test.recorded) == ("accepted", tokens, 0)
    assert json.loads(json.dumps(report.as_dict()))["test"]["verdict"] == "accepted"


def test_the_records_are_copied_byte_for_byte(filled, model):
    source, out, report = filled
    weights = hashlib.blake2b(digest_size=16)
    weights.update(b"model.safetensors")
    weights.update((model / "model.safetensors").read_bytes())
    recorded = tg.align(tg.read(source), tg.Tokenizer.from_pretrained(model))
    trained = np.add.reduceat(recorded.trainable, recorded.cu_seqlens[:-1])
    has_tokens = np.bincount(recorded.trace, trained, recorded.traces) > 0
    assert has_tokens.sum() > 25
    for before, after, is_filled in zip(lines_of(source), lines_of(out), has_tokens, strict=True):
        if not is_filled:
            assert after == before
            continue
        assert after.startswith(before[:-1] + b',"tracegrad_filled":{')
        provenance = json.loads(after)["tracegrad_filled"]
        del provenance["calls"]
        assert provenance == report.provenance
    assert report.provenance["model"] == weights.hexdigest()
    assert report.provenance["dtype"] == "float32"
    assert report.provenance["engine"].startswith("tracegrad ")
    assert sorted(path.name for path in out.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_recorded_logprobs_are_kept_and_compared(records, model, tokenizer, tmp_path):
    some = copy.deepcopy(records[:12])
    for record in some:
        for entry in entries_of(record)[::3]:
            entry["logprob"] = None
    source = write_records(tmp_path / "in.jsonl", some)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    whole = tg.align(tg.Traces.from_records(records[:12]), tokenizer)
    assert (report.recorded + report.filled, report.tokens) == (report.tokens, whole.trainable.sum())
    assert (report.test.recorded, report.test.differing) == (report.recorded, 0)
    before = tg.align(tg.read(source), tokenizer)
    after = tg.align(tg.read(tmp_path / "out.jsonl"), tokenizer)
    known = ~np.isnan(before.rollout_logprobs)
    assert after.rollout_logprobs[known].tolist() == before.rollout_logprobs[known].tolist()
    assert (after.alignment_level[known] < FILLED).all()
    measured = after.trainable & ~known
    assert measured.sum() == report.filled > 80
    assert (after.alignment_level[measured] == FILLED).all()
    assert after.trainable.tolist() == whole.trainable.tolist()
    np.testing.assert_allclose(logprobs_of(after), logprobs_of(whole), atol=5e-5)


def test_a_log_with_all_logprobs_is_copied(records, model, tmp_path):
    source = write_records(tmp_path / "in.jsonl", records[:4])
    report = fill(source, model, out=tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == source.read_bytes()
    assert (report.test, report.filled, report.recorded) == (None, 0, report.tokens)
    assert (report.filled_conversations, report.unfilled) == (0, {"all tokens have a recorded logprob": 4})
    fill(source, model, out=tmp_path / "out.jsonl.zst")
    assert [trace.record for trace in tg.read(tmp_path / "out.jsonl.zst")] == lines_of(source)


def test_text_gets_logprobs_except_for_what_is_not_the_sampled_text(records, model, tokenizer, tmp_path):
    source = write_records(tmp_path / "in.jsonl", map(text_only, records))
    options = {"accept_undecided": True}
    report = fill(source, model, out=tmp_path / "out.jsonl", **options)
    after = tg.align(tg.read(tmp_path / "out.jsonl"), tokenizer)
    whole = tg.align(tg.Traces.from_records(records), tokenizer)
    text = tg.align(tg.read(source), tokenizer, text_only=True)
    trace_of = np.repeat(text.trace, np.diff(text.cu_seqlens))
    by_reason = {RENDERED: 0, LOSSY: 0}
    compared = calls = 0
    for row, trace in enumerate(tg.read(source)):
        for number, generation in enumerate(trace.generations):
            message = trace.pool[generation.message]
            tokens = np.flatnonzero((trace_of == row) & (text.turn == number) & text.trainable)
            name = RENDERED if message.get("tool_calls") else LOSSY if "\ufffd" in message["content"] else None
            if name:
                by_reason[name] += len(tokens)
                calls += name == RENDERED
                assert np.isnan(after.rollout_logprobs[tokens]).all()
                continue
            if np.isnan(after.rollout_logprobs[tokens]).any():
                assert np.isnan(after.rollout_logprobs[tokens]).all()  # of a text all or none
                continue
            its = np.flatnonzero((np.repeat(whole.trace, np.diff(whole.cu_seqlens)) == row) & (whole.turn == number))
            if text.ids[tokens].tolist() == whole.ids[its].tolist():
                # The prompts are the same only if no earlier turn was rendered to other ids.
                if number == 0:
                    recorded = whole.rollout_logprobs[its]
                    np.testing.assert_allclose(after.rollout_logprobs[tokens], recorded, atol=5e-5)
                    compared += len(its)
                assert (after.alignment_level[tokens] == FILLED).all()
    assert compared > 200
    assert {name: report.unknown.get(name, 0) for name in by_reason} == by_reason
    assert by_reason[RENDERED] > 0
    # The test of the checkpoint uses at most the first token of a call, and the beginnings of the texts.
    assert report.filled < report.test.tokens <= report.filled + report.unknown[SEGMENTATION] + calls
    assert report.filled == np.isfinite(logprobs_of(after)).sum()
    assert report.filled + sum(report.unknown.values()) == report.tokens
    # Only texts without any other segmentation are measured with 0 nats, and all with no limit.
    none = fill(source, model, out=tmp_path / "none.jsonl", max_text_uncertainty=0.0, **options)
    every = fill(source, model, out=tmp_path / "every.jsonl", max_text_uncertainty=float("inf"), **options)
    assert none.filled < report.filled <= every.filled
    assert SEGMENTATION not in every.unknown
    assert none.unknown[SEGMENTATION] == every.filled - none.filled


def test_lost_bytes_are_left_out(records, model, tmp_path):
    [record] = [text_only(each) for each in records if each["id"] == "g0000-3"]
    answer = record["messages"][-1]
    assert answer["role"] == "assistant"
    answer["content"] = answer["content"][:6] + "\ufffd" + answer["content"][7:]
    source = write_records(tmp_path / "in.jsonl", [record])
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert report.unknown == {LOSSY: report.tokens}
    assert lines_of(tmp_path / "out.jsonl") == lines_of(source)


@pytest.mark.parametrize(
    ("recorded", "override", "reason"),
    [
        ({"temperature": None}, {"temperature": 0.5}, None),
        ({"temperature": 0.0}, {}, GREEDY),
        ({"temperature": 0.5}, {}, None),
        ({"temperature": 1.0}, {"temperature": 0.5}, None),
        ({"temperature": 0.5, "repetition_penalty": 1.2}, {}, OPTIONS),
        ({"temperature": 0.5, "repetition_penalty": 1.0, "top_k": -1}, {}, None),
        ({"temperature": 0.5, "logit_bias": {"7": 1}}, {}, OPTIONS),
    ],
    ids=str,
)
def test_the_temperature_is_that_of_the_sampler(loaded, model, tokenizer, tmp_path, recorded, override, reason):
    records, turns = sampled_log(loaded, 6, temperature=0.5, recorded=recorded)
    source = write_records(tmp_path / "in.jsonl", records)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True, **override)
    tokens = sum(len(turn.ids) for turn in turns)
    if reason:
        assert report.unknown == {reason: tokens}
        assert (report.filled, report.test) == (0, None)
        return
    assert (report.filled, report.unknown) == (tokens, {})
    calls = [call for [call] in calls_of(tmp_path / "out.jsonl")]
    assert [call["ids"] for call in calls] == [turn.ids for turn in turns]
    assert {(call["kind"], call["temperature"]) for call in calls} == {("processed", 0.5)}
    values = [value for call in calls for value in call["logprobs"]]
    np.testing.assert_allclose(values, [value for turn in turns for value in turn.logprobs], atol=5e-5)
    aligned = tg.align(tg.read(tmp_path / "out.jsonl"), tokenizer)
    np.testing.assert_allclose(logprobs_of(aligned), values, atol=1e-6)
    assert (aligned.inv_temperature[aligned.trainable] == 2).all()
    # The same by a forward pass of transformers alone.
    text = rollout.render(loaded[1], records[0]["calls"][0]["request"]["messages"])
    prompt = loaded[1](text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = loaded[0](torch.tensor([prompt + turns[0].ids])).logits[0, len(prompt) - 1 : -1]
    own = (logits / 0.5).log_softmax(-1)[range(len(turns[0].ids)), turns[0].ids]
    np.testing.assert_allclose(calls[0]["logprobs"], own.numpy(), atol=5e-5)


def test_messages_without_a_temperature_need_one(records, filled, model, tmp_path):
    some = [without_logprobs(each) for each in records if each["metadata"]["shape"] == "messages"][:2]
    for record in some:
        del record["temperature"]
    source = write_records(tmp_path / "in.jsonl", some)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert report.unknown == {TEMPERATURE: sum(len(entries_of(record)) for record in some)}
    report = fill(source, model, out=tmp_path / "out.jsonl", temperature=1.0, accept_undecided=True)
    assert (report.filled, report.unknown) == (report.tokens, {})


@pytest.mark.parametrize("override", [{}, {"top_p": 0.9}], ids=str)
def test_truncated_sampling_has_the_logprobs_over_the_kept_ids(loaded, model, tokenizer, tmp_path, override):
    records, turns = sampled_log(loaded, 12, temperature=1.5, top_p=0.9, recorded={"top_p": 1.0} if override else None)
    source = write_records(tmp_path / "in.jsonl", records)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True, **override)
    # Of 256 listed ids it is not known whether top_p keeps more.
    is_listed = [[len(ids) <= 256 for ids in turn.kept] for turn in turns]
    left_out = sum(row.count(False) for row in is_listed)
    assert 0 < left_out < 100
    assert (report.filled, report.unknown) == (report.tokens - left_out, {NOT_LISTED: left_out})
    assert report.test.outside == 0
    calls = [call for [call] in calls_of(tmp_path / "out.jsonl")]
    expected = []
    for call, turn, listed in zip(calls, turns, is_listed, strict=True):
        kept = [sorted(ids) if it else None for ids, it in zip(turn.kept, listed, strict=True)]
        assert [ids and sorted(ids) for ids in call["kept"]] == kept
        expected += [value if it else np.nan for value, it in zip(turn.logprobs, listed, strict=True)]
    np.testing.assert_allclose(
        [np.nan if v is None else v for call in calls for v in call["logprobs"]], expected, atol=5e-5
    )
    aligned = tg.align(tg.read(tmp_path / "out.jsonl"), tokenizer)
    np.testing.assert_allclose(logprobs_of(aligned), expected, atol=5e-5)
    assert aligned.support is not None
    if not override:
        assert options_on(int(aligned.replayed[0])) == ("top_p",)
    assert not aligned.reshaped.any()


def test_ids_outside_of_the_recorded_truncation_are_refused(loaded, model, tmp_path):
    # top_k 1 keeps the most probable id alone, and the tokens were sampled from all.
    records, _ = sampled_log(loaded, 12, temperature=1.5, recorded={"top_k": 1})
    source = write_records(tmp_path / "in.jsonl", records)
    with pytest.raises(CheckpointRefused, match="TG-FILL-004") as refused:
        fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert refused.value.test.verdict == "refused"
    assert refused.value.test.outside > 5
    assert not (tmp_path / "out.jsonl").exists()


def test_ids_that_are_not_listed_are_left_out(loaded, model, tmp_path):
    # top_k 300 of 640 ids keeps more than the 256 that are listed.
    records, turns = sampled_log(loaded, 2, recorded={"top_k": 300})
    source = write_records(tmp_path / "in.jsonl", records)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert report.unknown == {NOT_LISTED: sum(len(turn.ids) for turn in turns)}
    assert lines_of(tmp_path / "out.jsonl") == lines_of(source)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_raw_logprobs_of_a_part_are_not_mixed_with_others(loaded, model, tmp_path, options):
    records, turns = sampled_log(loaded, 2, **options)
    for record, turn in zip(records, turns, strict=True):
        [choice] = record["calls"][0]["response"]["choices"]
        content = [{"token": "", "logprob": None if at else -0.25} for at in range(len(turn.ids))]
        choice["logprobs"] = {"content": content}
        record["logprob_kind"] = "raw"
    source = write_records(tmp_path / "in.jsonl", records)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert report.unknown == {RAW_PART: sum(len(turn.ids) - 1 for turn in turns)}
    assert (report.recorded, report.filled) == (2, 0)


def test_only_one_policy_version_is_measured(records, model, tmp_path):
    some = [{**without_logprobs(record), "policy_version": number % 2} for number, record in enumerate(records[:6])]
    source = write_records(tmp_path / "in.jsonl", some)
    report = fill(source, model, out=tmp_path / "out.jsonl", policy_version=1, accept_undecided=True)
    assert [bool(calls) for calls in calls_of(tmp_path / "out.jsonl")] == [False, True] * 3
    assert report.unknown == {VERSION: sum(len(entries_of(record)) for record in some[::2])}
    assert (report.filled_conversations, report.unfilled) == (3, {"no missing logprob can be measured": 3})


def test_conversations_with_equal_ids_and_those_that_cannot_be_aligned(records, filled, model, tmp_path):
    some = [{**without_logprobs(record), "id": "one"} for record in records[2:7]]
    for number in (0, 1):
        some[number]["template_kwargs"] = {"messages": "of the caller"}
    source = write_records(tmp_path / "in.jsonl", some)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert (report.skipped, report.filled_conversations, report.conversations) == (2, 2, 5)
    assert report.unfilled == {"no sampled token that training can use": 1}
    expected = calls_of(filled[1])[2:7]
    expected[0] = expected[1] = []
    for calls, its in zip(calls_of(tmp_path / "out.jsonl"), expected, strict=True):
        assert [call["ids"] for call in calls] == [call["ids"] for call in its]
        for call, other in zip(calls, its, strict=True):
            np.testing.assert_allclose(call["logprobs"], other["logprobs"], atol=5e-6)


def test_a_filled_file_is_filled_again_with_the_same_values(filled, model, tmp_path):
    some = tmp_path / "some.jsonl"
    some.write_bytes(b"\n".join(lines_of(filled[1])[:6]) + b"\n")
    report = fill(some, model, out=tmp_path / "again.jsonl", accept_undecided=True)
    assert (report.recorded, report.filled) == (0, report.tokens)
    for once, again in zip(calls_of(some), calls_of(tmp_path / "again.jsonl"), strict=True):
        assert [call["ids"] for call in once] == [call["ids"] for call in again]
        for call, other in zip(once, again, strict=True):
            np.testing.assert_allclose(call["logprobs"], other["logprobs"], atol=5e-6)
    assert [line.count(b'"tracegrad_filled":') for line in lines_of(tmp_path / "again.jsonl")] == [1] * 6


def interrupted(monkeypatch, source, model, out, **options):
    """Fill in batches of 3 with a scorer that fails at the second one, and return what it was asked to fill."""
    from tracegrad.missing_logprobs.model_scorer import ModelScorer

    monkeypatch.setattr(fill_file, "_BATCH", 3)
    asked, fails = [], [True]
    predict = ModelScorer.predict

    def counted(self, sequences, tokens, listed, at=None):
        if listed == 0:  # the test of the checkpoint needs a list
            if len(asked) == 1 and fails and fails.pop():
                raise OSError(5, "the disk is gone")
            asked.append(sequences.trace_ids)
        return predict(self, sequences, tokens, listed, at)

    monkeypatch.setattr(ModelScorer, "predict", counted)
    with pytest.raises(OSError, match="Errno 5"):
        fill(source, model, out=out, accept_undecided=True, **options)
    return asked


def test_an_interrupted_run_continues_after_the_last_batch(records, model, tmp_path, monkeypatch):
    source = write_records(tmp_path / "in.jsonl", map(without_logprobs, records[:8]))
    out = tmp_path / "out.jsonl"
    asked = interrupted(monkeypatch, source, model, out)
    # The unfinished files are not read as part of a folder of logs.
    assert [trace.id for trace in tg.read(tmp_path)] == [record["id"] for record in records[:8]]
    names = [record["id"] for record in records[:8]]
    assert asked == [tuple(names[:3])]
    assert not out.exists()
    # What was written after the last entry of the state is written again.
    with (tmp_path / "out.jsonl.partial").open("ab") as file:
        file.write(b'{"half": ')
    asked.append(None)
    report = fill(source, model, out=out, accept_undecided=True)
    assert asked == [tuple(names[:3]), None, tuple(names[3:6]), tuple(names[6:])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    whole = fill(source, model, out=tmp_path / "whole.jsonl", accept_undecided=True)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert {**report.as_dict(), "seconds": 0} == {**whole.as_dict(), "seconds": 0}
    assert report.filled == report.tokens > 0


@pytest.mark.parametrize("changed", ["temperature", "weights", "input"])
def test_other_settings_start_anew(records, model, tmp_path, monkeypatch, changed):
    source = write_records(tmp_path / "in.jsonl", map(without_logprobs, records[:6]))
    out, options = tmp_path / "out.jsonl", {}
    asked = interrupted(monkeypatch, source, model, out)
    if changed == "temperature":
        options["temperature"] = 1.02
    elif changed == "weights":
        model = other_weights(model, tmp_path / "model", 1.01)
    else:
        write_records(source, map(without_logprobs, reversed(records[:6])))
    asked.append(None)
    fill(source, model, out=out, accept_undecided=True, **options)
    assert [names and len(names) for names in asked] == [3, None, 3, 3]
    assert [json.loads(line)["id"] for line in lines_of(out)] == [trace.id for trace in tg.read(source)]


def test_another_checkpoint_is_refused(filled, model, tmp_path):
    source = filled[0]
    other = other_weights(model, tmp_path / "model", 1.5)
    with pytest.raises(CheckpointRefused, match="TG-FILL-004") as refused:
        fill(source, other, out=tmp_path / "out.jsonl", accept_undecided=True)
    test = refused.value.test
    assert (test.verdict, test.tokens) == ("refused", filled[2].tokens)
    assert test.p_values["tokens too improbable"] < 0.001  # its logits are 1.5 times as large
    assert list(tmp_path.iterdir()) == [other]
    assert pickle.loads(pickle.dumps(refused.value)).test == test
    # Its weights have another hash, and their logprobs are their own.
    report = fill(source, other, out=tmp_path / "out.jsonl", temperature=1.5)
    assert report.provenance["model"] != filled[2].provenance["model"]
    first, own = calls_of(tmp_path / "out.jsonl")[0][0], calls_of(filled[1])[0][0]
    np.testing.assert_allclose(first["logprobs"], own["logprobs"], atol=1e-4)  # z * 1.5 / 1.5
    assert first["temperature"] == 1.5


def test_another_temperature_is_refused(loaded, model, tmp_path):
    records, _ = sampled_log(loaded, 48, temperature=0.5, recorded={"temperature": 1.0})
    source = write_records(tmp_path / "in.jsonl", records)
    with pytest.raises(CheckpointRefused, match="TG-FILL-004") as refused:
        fill(source, model, out=tmp_path / "out.jsonl")
    assert refused.value.test.p_values["tokens too probable"] < 0.001


def test_too_few_tokens_are_undecided(records, model, tmp_path):
    source = write_records(tmp_path / "in.jsonl", [without_logprobs(records[0])])
    with pytest.raises(CheckpointRefused, match="TG-FILL-005") as refused:
        fill(source, model, out=tmp_path / "out.jsonl")
    assert refused.value.test.verdict == "undecided"
    assert list(tmp_path.iterdir()) == [source]
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert report.test == refused.value.test


def test_other_checkpoints_are_compared(records, filled, model, tmp_path):
    other = other_weights(model, tmp_path / "other", 1.1)
    # The tokens' logprobs there: a fill with these weights.
    some = write_records(tmp_path / "in.jsonl", map(without_logprobs, records[:12]))
    here = fill(some, model, out=tmp_path / "a.jsonl", compare_with=[other], accept_undecided=True)
    fill(some, other, out=tmp_path / "b.jsonl", compare_with=[], accept_undecided=True)
    own, its = (
        sum(sum(call["logprobs"]) for calls in calls_of(tmp_path / name) for call in calls)
        for name in ("a.jsonl", "b.jsonl")
    )
    assert list(here.test.comparisons) == [str(other)]
    # An id that is not among the 20 listed ones counts with all such ids together, of which there are few.
    assert here.test.comparisons[str(other)] == pytest.approx(its - own, abs=0.5)
    assert here.test.verdict != "refused"


def test_the_other_checkpoints_of_a_run_are_compared(tmp_path):
    for step in (1, 2, 3, 4, 5, 6, 7, 8):
        resume = tmp_path / "run" / "checkpoints" / f"step-{step:08}" / "resume"
        resume.mkdir(parents=True)
        if step != 8:  # an incomplete one
            (resume / "progress.json").write_text("{}")
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    names = [path.name for path in fill_file.other_checkpoints(folder)]
    # Of 1, 2, 3, 5, 6, 7 the places 0, 1.67, 3.33 and 5.
    assert names == [f"step-{step:08}" for step in (1, 3, 5, 7)]
    assert fill_file.other_checkpoints(tmp_path / "run") == []
    alone = tmp_path / "alone" / "checkpoints" / "step-00000001"
    alone.mkdir(parents=True)
    assert fill_file.other_checkpoints(alone) == []


def test_images_are_measured(example, tmp_path):
    folder = example.parent / "images"
    traces = tg.read(folder / "traces.jsonl.zst", limit=6)
    records = [without_logprobs(json.loads(trace.record)) for trace in traces]
    source = write_records(tmp_path / "in.jsonl", records)
    report = fill(source, folder / "model", out=tmp_path / "out.jsonl", accept_undecided=True)
    tokenizer = tg.Tokenizer.from_pretrained(folder / "model")
    recorded, measured = tg.align(traces, tokenizer), tg.align(tg.read(tmp_path / "out.jsonl"), tokenizer)
    np.testing.assert_allclose(logprobs_of(measured), logprobs_of(recorded), atol=5e-5)
    assert report.filled == report.tokens == len(logprobs_of(recorded)) > 0


def test_invalid_arguments_and_records(model, tmp_path):
    source = write_records(tmp_path / "in.jsonl", [])
    for name, value in {"temperature": 0.0, "top_p": 1.5, "top_k": -2, "min_p": float("nan")}.items():
        with pytest.raises(ArgumentError, match=f"TG-FILL-002: {name}"):
            fill(source, model, out=tmp_path / "out.jsonl", **{name: value})
    for nats in (-1.0, float("nan")):
        with pytest.raises(ArgumentError, match="TG-FILL-003"):
            fill(source, model, out=tmp_path / "out.jsonl", max_text_uncertainty=nats)
    source.write_text('["?", "4"]\n')
    with pytest.raises(FormatError):
        fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True, temperature=1.0)


def forked(words, rank, said):
    """Run a command in a child of this process as one of two ranks, and return its process id. It prints to files."""
    if child := os.fork():
        return child
    code = 70
    try:
        signal.alarm(300)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        sys.stdout, sys.stderr = said.open("w"), said.with_suffix(".err").open("w")
        code = main(words)
        sys.stdout.flush()
    finally:
        os._exit(code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks
def test_two_processes_write_the_same_file(records, model, tmp_path, monkeypatch):
    some = write_records(tmp_path / "in.jsonl", map(without_logprobs, records[:4]))
    fill(some, model, out=tmp_path / "one.jsonl", accept_undecided=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["fill", some, "--model", model, "--out", tmp_path / "two.jsonl", "--accept-undecided", "--json"]
    words += ["--compare-with", model]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    outputs = [tmp_path.with_name(f"{tmp_path.name}-{rank}") for rank in range(2)]
    children = [forked([str(word) for word in words], rank, said) for rank, said in enumerate(outputs)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = [path.read_text() for path in outputs]
    assert codes == [0, 0], (said, [path.with_suffix(".err").read_text() for path in outputs])
    one, two = calls_of(tmp_path / "one.jsonl"), calls_of(tmp_path / "two.jsonl")
    assert [[call["ids"] for call in calls] for calls in one] == [[call["ids"] for call in calls] for calls in two]
    for calls, others in zip(one, two, strict=True):
        for call, other in zip(calls, others, strict=True):
            np.testing.assert_allclose(call["logprobs"], other["logprobs"], atol=5e-6)
    assert said[1] == ""
    report = json.loads(said[0])  # one object, of the first rank
    assert report["filled"] == report["tokens"] == sum(len(entries_of(record)) for record in records[:4])
    assert report["test"]["comparisons"] == {str(model): pytest.approx(0, abs=1e-3)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "one.jsonl", "two.jsonl"]


def test_copies_of_a_conversation_are_no_further_evidence(records, model, tmp_path):
    once = write_records(tmp_path / "once.jsonl", map(without_logprobs, records[:6]))
    copies = write_records(tmp_path / "copies.jsonl", map(without_logprobs, records[:6] * 3))
    reports = [fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True) for source in (once, copies)]
    assert reports[1].test.tokens == reports[0].test.tokens == reports[0].tokens > 0
    assert reports[1].filled == 3 * reports[0].filled


def test_the_test_uses_a_bounded_number_of_tokens(records, model, tmp_path, monkeypatch):
    monkeypatch.setattr(fill_file, "TEST_TOKENS", 50)
    source = write_records(tmp_path / "in.jsonl", map(without_logprobs, records[:8]))
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert report.test.tokens == 50 < report.filled == report.tokens


@pytest.mark.parametrize("option", [{"top_k": True}, {"top_k": "many"}, {"min_p": 5}, {"min_p": "0.1"}])
def test_options_that_no_sampler_takes_leave_tokens_without_a_logprob(records, model, tmp_path, option):
    bare = [{**without_logprobs(record), **option} for record in records[:2]]
    for record in bare:
        for call in record.get("calls", []):
            call["request"] |= option
    source = write_records(tmp_path / "in.jsonl", bare)
    report = fill(source, model, out=tmp_path / "out.jsonl", accept_undecided=True)
    assert (report.filled, set(report.unknown)) == (0, {OPTIONS})


def test_a_partial_file_that_is_shorter_than_its_state_starts_anew(records, model, tmp_path, monkeypatch):
    source = write_records(tmp_path / "in.jsonl", map(without_logprobs, records[:8]))
    out = tmp_path / "out.jsonl"
    interrupted(monkeypatch, source, model, out)
    os.truncate(tmp_path / "out.jsonl.partial", 5)
    report = fill(source, model, out=out, accept_undecided=True)
    assert report.filled == report.tokens
    assert len(tg.read(out)) == 8


def test_sources_models_and_comparisons_that_cannot_be_used(records, model, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(ArgumentError, match="TG-FILL-009"):
        fill(iter(records[:1]), model, out=out)
    with pytest.raises(ArgumentError, match="TG-FILL-011"):
        fill(records[:1], model, out=out, compare_with=[model] * 33)
    without_weights = tmp_path / "model"
    without_weights.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (without_weights / name).write_bytes((model / name).read_bytes())
    with pytest.raises(ArgumentError, match="TG-FILL-010"):
        fill(records[:1], without_weights, out=out)
    assert not out.exists()
