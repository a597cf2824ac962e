"""Prepared folders: shards by content, refusal of incomplete folders, resuming to the same bytes, and one writer."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracegrad as tg
from folder_bytes import contents
from tracegrad import prepare
from tracegrad.cli import main
from tracegrad.config import Data, FieldMap
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.prepare import MAX_SHARDS_PER_GROUP, shards_of
from tracegrad.prepare import run as run_of_parts
from tracegrad.prepare.output import LocalOutput
from tracegrad.storage import safetensors_file

HERE = Path(__file__).parents[1] / "helpers"
SOURCE = Path(tg.__file__).parents[1]


def run(*command, **more):
    told = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *map(str, command)], env=told, stderr=subprocess.PIPE, text=True, **more)


@pytest.fixture(scope="module")
def traces(example, tmp_path_factory):
    """24 traces in three groups."""
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    tg.write(tg.read(example / "traces.jsonl.zst", limit=24), path)
    return path


@pytest.fixture
def prepared(example, traces, tmp_path):
    """Return a function that prepares or resumes `tmp_path/o`."""

    def make(resume=False, source=traces, data=Data(), shard_traces=8):  # noqa: B008 (frozen)
        model = example / "model"
        return prepare.prepare(str(source), model, data, tmp_path / "o", shard_traces=shard_traces, resume=resume)

    return make


def test_a_trace_of_which_nothing_is_left_stands_between_those_that_are_trained(example, prepared, tmp_path):
    """Its prompt has an id outside the vocabulary. An earlier `prepare` refused all traces because of one."""
    ids = [[5, 6], [5, 99999], [5, 7], [99999]]
    records = [
        {"prompt_ids": prompt, "completion_ids": [8, 9], "logprobs": [-0.5, -0.25], "reward": row, "group": "a"}
        for row, prompt in enumerate(ids)
    ]
    source = tmp_path / "t.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepared(source=source)
    found = tg.PreparedDataset.open(tmp_path / "o").take(np.arange(4))
    assert found.trace.tolist() == [0, 1, 2, 3]
    assert np.diff(found.cu_seqlens).tolist() == [4, 0, 4, 0]
    told = tg.align(tg.read(source), tg.Tokenizer.from_pretrained(example / "model"))
    for s in (found, told):
        [step] = tg.pack(s, [1.0, 2.0, -1.0, 3.0], tokens_per_row=64)
        assert sorted(step.trace.tolist()) == [0, 0, 2, 2]
        assert step.batches[0].ids.tolist() == [5, 6, 8, 9, 5, 7, 8, 9]


def places_of(value, place=()):
    """Yield the paths of all values in a JSON value."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places_of(each, (*place, key))


def with_value(value, place, new):
    """Return a copy of a JSON value with one value replaced."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = with_value(value[place[0]], place[1:], new)
    return copy


def test_every_value_of_a_shards_names_that_is_of_another_kind_is_an_error(prepared, tmp_path):
    """With correct checksums in the manifest. A fuzzer found an AttributeError here."""
    prepared(shard_traces=100)
    shard = tmp_path / "o" / "shard-00000"
    told = json.loads((shard / "sequences.json").read_text())
    places = [place for place in places_of(told) if place != ("alignment_report", "server_profiles", "vllm")]
    assert len(places) > 8
    refused = 0
    for place in places:
        for new in (None, True, -1, 3, 1.5, "x", [], {}, [[]], [{}], {"a": []}, 1 << 70, "\ud800"):
            data = json.dumps(with_value(told, place, new)).encode()
            (shard / "sequences.json").write_bytes(data)
            for path in (shard / "manifest.json", tmp_path / "o" / "manifest.json"):
                manifest = json.loads(path.read_text())
                files = manifest["files"] if "files" in manifest else manifest["shards"]["shard-00000"]["files"]
                files["sequences.json"] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
                path.write_text(json.dumps(manifest))
            try:
                found = tg.Sequences.load(tmp_path / "o", verify=True)
                assert found.traces == 24
            except (FormatError, ReadError) as error:
                refused += str(shard) in str(error)
    assert refused > len(places) * 6


# --- boundaries of shards ---


def some(groups, sizes):
    records = [
        {"messages": [{"role": "user", "content": "x" * size}], **({} if group is None else {"group": group})}
        for group, size in zip(groups, sizes, strict=True)
    ]
    return tg.Traces.from_records(records)


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 900)), max_size=40), st.data())
def test_shards_are_cut_by_what_stands_in_the_traces_and_not_by_how_they_came(rows, data):
    whole = some([row[0] for row in rows], [row[1] for row in rows])
    places = sorted(data.draw(st.sets(st.integers(0, len(rows)), max_size=8)) | {0, len(rows)})
    pieces = [whole[start:stop] for start, stop in pairwise(places)]
    count, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3000))
    found = list(shards_of(pieces, count, size))
    again = list(shards_of([whole], count, size))
    assert [[t.record for t in part] for part in found] == [[t.record for t in part] for part in again]
    assert [t.record for part in found for t in part] == [t.record for t in whole]
    for part, after in pairwise(found):
        full = max(len(part) / count, sum(len(t.record) for t in part) / size)
        assert full >= 1
        parted = part[-1].group is not None and part[-1].group == after[0].group
        assert not parted or full >= MAX_SHARDS_PER_GROUP


def test_a_group_stays_in_one_shard_until_it_is_too_large():
    parts = shards_of([some(["a"] * 3 + ["b"] * 9 + [None] * 2, [1] * 14)], 2)
    # a: 3 traces. b: at most 4 times 2 in a shard; the ninth is in the next shard, with a trace without a group.
    assert [len(part) for part in parts] == [3, 8, 2, 1]


# --- complete or refused ---


def test_a_prepared_folder_says_what_is_in_it(prepared, tmp_path, traces, example):
    account = prepared()
    told = json.loads((tmp_path / "o" / "manifest.json").read_text())
    assert list(told["shards"]) == ["shard-00000", "shard-00001", "shard-00002"]
    assert told["counts"]["traces"] == 24 == account.traces
    assert told["counts"]["tokens"] == sum(shard["counts"]["tokens"] for shard in told["shards"].values())
    loaded = tg.Sequences.load(tmp_path / "o", verify=True)
    whole = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(example / "model"))
    assert (loaded.ids.tolist(), loaded.trace_ids) == (whole.ids.tolist(), whole.trace_ids)


def test_training_on_a_part_of_the_shards_is_refused_with_the_cure(prepared, tmp_path, example, capsys):
    prepared()
    train = ["train", str(tmp_path / "o"), "--model", str(example / "model"), "--out", str(tmp_path / "r"), "--dry-run"]
    file = tmp_path / "o" / "shard-00001" / "sequences.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    assert main(train) == 1
    assert "shard-00001/sequences.safetensors: the checksum differs" in capsys.readouterr().err
    (tmp_path / "o" / "shard-00001").rename(tmp_path / "gone")
    assert main(train) == 1
    assert "shard-00001 is missing" in capsys.readouterr().err
    (tmp_path / "gone").rename(tmp_path / "o" / "shard-00001")
    (tmp_path / "o" / "shard-00002").rename(tmp_path / "gone")  # the remaining numbers have no gap
    (tmp_path / "o" / "manifest.json").unlink()
    assert main(train) == 1
    assert "contains 2 shards and no manifest.json" in capsys.readouterr().err


# --- resume ---


def rewritten(shard):
    """Write other valid values of the same length."""
    arrays, metadata = safetensors_file.read(shard / "sequences.safetensors")
    safetensors_file.write(shard / "sequences.safetensors", {**arrays, "version": arrays["version"] + 1}, metadata)


def test_going_on_mends_what_is_missing_cut_or_changed_to_the_same_bytes(prepared, tmp_path):
    first = prepared()
    wanted = contents(tmp_path / "o")
    assert prepared(resume=True).as_dict() == first.as_dict()
    assert contents(tmp_path / "o") == wanted
    for spoil in (
        lambda o: (o / "manifest.json").unlink(),
        lambda o: (o / "shard-00001" / "sequences.json").unlink(),
        lambda o: (o / "shard-00000" / "sequences.json").write_bytes(b"{}"),
        lambda o: rewritten(o / "shard-00002"),
        lambda o: (o / "shard-00000").rename(o / ".tmp-shard-00007"),
        lambda o: (o / "manifest.json.123.tmp").write_bytes(b"half"),
    ):
        spoil(tmp_path / "o")
        assert prepared(resume=True).as_dict() == first.as_dict()
        assert contents(tmp_path / "o") == wanted


def test_whole_shards_are_kept_as_they_are(prepared, tmp_path):
    prepared()
    (tmp_path / "o" / "shard-00002" / "manifest.json").unlink()
    before = [(tmp_path / "o" / f"shard-0000{n}" / "sequences.json").stat().st_mtime_ns for n in range(3)]
    prepared(resume=True)
    after = [(tmp_path / "o" / f"shard-0000{n}" / "sequences.json").stat().st_mtime_ns for n in range(3)]
    assert (before[:2] == after[:2], before[2] == after[2]) == (True, False)


def test_going_on_with_other_traces_or_options_is_refused(prepared, tmp_path, traces):
    other = tmp_path / "t.jsonl"
    other.write_bytes(traces.read_bytes())
    prepared(source=other)
    for change, name in [
        ({"shard_traces": 9}, "shard_traces"),
        ({"data": Data(allow_unknown_ids=True)}, "data.allow_unknown_ids"),
    ]:
        with pytest.raises(ArgumentError, match=rf"TG-PREPARE-017.*{name}"):
            prepared(resume=True, **{"source": other, **change})
    with pytest.raises(ArgumentError, match="TG-PREPARE-017"):
        prepared(resume=True)
    other.write_bytes(other.read_bytes() + b"\n")
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-017.*source_bytes"):
        prepared(resume=True, source=other)
    (tmp_path / "o" / "prepare.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ArgumentError, match="TG-PREPARE-016"):
        prepared(resume=True, source=other)
    with pytest.raises(ArgumentError, match="TG-PREPARE-014"):
        prepared(source=other)


def test_another_tokenizer_is_noticed(example, traces, tmp_path):
    import shutil

    shutil.copytree(example / "model", tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    prepare.prepare(str(traces), tmp_path / "m", Data(), tmp_path / "o")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ArgumentError, match="TG-PREPARE-017"):
        prepare.prepare(str(traces), tmp_path / "m", Data(), tmp_path / "o", resume=True)


def test_standard_input_cannot_be_gone_on_with(example, tmp_path, monkeypatch):
    plan = run_of_parts._plan(["-"], example / "model", Data(), FieldMap(), 8)
    (tmp_path / "shard-00000").mkdir()
    with pytest.raises(ArgumentError, match="TG-PREPARE-015"):
        run_of_parts._begin(LocalOutput(tmp_path), plan, True)


# --- one writer ---


def test_a_second_prepare_is_refused_while_the_first_runs_and_not_when_it_was_killed(prepared, tmp_path, example):
    """The first process waits for traces from a pipe without a writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cli = ("-m", "tracegrad.cli", "prepare", pipe, "--model", example / "model", "--out", tmp_path / "o")
    first = run(*cli)
    try:
        while first.poll() is None and not (tmp_path / "o" / "prepare.json").exists():
            time.sleep(0.01)
        for resume in (False, True):
            with pytest.raises(ArgumentError, match="TG-STORE-011"):
                prepared(resume=resume)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert prepared().traces == 24  # the lock ended with the process


def test_of_two_that_start_together_one_writes_and_one_is_refused(tmp_path, traces, example):
    cli = ("-m", "tracegrad.cli", "prepare", traces, "--model", example / "model", "--out", tmp_path / "o")
    both = [run(*cli, "--shard-traces", "8", stdout=subprocess.DEVNULL) for _ in range(2)]
    said = [each.communicate()[1] for each in both]
    assert sorted(each.returncode for each in both) == [0, 1], said
    assert "another process is writing there" in "".join(said) or "contains shards" in "".join(said)
    assert tg.Sequences.load(tmp_path / "o", verify=True).traces == 24


# --- killed ---


def killed(traces, out, *numbers, kind="prepare"):
    out.mkdir(exist_ok=True)
    (out / "t.jsonl").write_bytes(traces.read_bytes())
    done = run(HERE / "faults.py", kind, out, *numbers)
    said = done.communicate()[1]
    assert done.returncode == 0, said[-4000:]
    found = json.loads((out / "found.json").read_text())
    bad = [each for each in found["found"] if each["code"] != 9 or each["loads_broken"] or not each["same"]]
    assert not bad, (bad[:5], said[-2000:])
    return found


def test_a_prepare_that_is_killed_is_refused_and_gone_on_with_to_the_same_bytes(traces, tmp_path):
    found = killed(traces, tmp_path, 3, 11, 22, 37, 52, 70)
    assert len(found["found"]) == 6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["prepare", "parts"])
def test_a_prepare_may_be_killed_at_any_operation_on_a_file(traces, tmp_path, kind):
    found = killed(traces, tmp_path, kind=kind)
    assert len(found["found"]) == found["operations"] > 60


@pytest.mark.parametrize(
    "changed",
    [
        {"tally": {"../x": 1}},
        {"tally": {"empty": "x"}},
        {"tally": {"mapper": {"seen": 5}}},
        {"tally": {"sessions": 5}},
        {"account": {}},
        {"account": 5},
        {"shards": [1]},
    ],
    ids=str,
)
def test_a_record_of_a_part_that_was_changed_is_made_anew(prepared, tmp_path, changed):
    prepared()
    [path] = (tmp_path / "o").glob("part-*.json")
    before = path.read_bytes()
    path.write_text(json.dumps({**json.loads(before), **changed}))
    prepared(resume=True)
    assert path.read_bytes() == before
