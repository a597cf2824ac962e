"""Inputs in parts: cut by what stands in them, and done by any number of processes to the same bytes."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracegrad as tg
from folder_bytes import contents
from tracegrad import prepare
from tracegrad.config import Data, FieldMap
from tracegrad.data.read_options import Options
from tracegrad.data.reader import open_part
from tracegrad.errors import ArgumentError, FormatError, ReadError, TracegradError
from tracegrad.prepare.part import Job
from tracegrad.prepare.workers import MAX_RETRIES, Workers
from tracegrad.storage import manifest

PART = 40_000


def lines_of(example, count):
    return [trace.record for trace in tg.read(example / "traces.jsonl.zst", limit=count)]


@pytest.fixture(scope="module")
def inputs(example, tmp_path_factory):
    """A file that is cut, with a bad line and without ids in it, and a compressed and an empty one behind it."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = lines_of(example, 72)
    unnamed = [json.dumps({**json.loads(line), "id": None}).encode() for line in lines[:48]]
    unnamed[20] = b'{"messages": 5}'
    (folder / "a.jsonl").write_bytes(b"\n".join(unnamed) + b"\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[48:]) + b"\n", mtime=0))
    (folder / "c.jsonl").write_bytes(b"")
    return [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")]


@pytest.fixture
def make(example, inputs):
    def made(out, source=inputs, data=Data(on_error="quarantine"), **more):  # noqa: B008 (frozen)
        told = {"shard_traces": 8, "part_bytes": PART, **more}
        return prepare.prepare(source, example / "model", data, out, **told)

    return made


# --- the same bytes ---


@pytest.mark.parametrize("several", [(2,), pytest.param((3, 4), marks=pytest.mark.nightly)])
def test_any_number_of_processes_writes_the_same_bytes(make, inputs, tmp_path, example, several):
    account = make(tmp_path / "one")
    wanted = contents(tmp_path / "one")
    assert account.parts == len([name for name in wanted if name.startswith("part-")]) > 5
    assert "a.jsonl.part-00002.quarantine.raw" in wanted  # the bad line, aside with the part that it is in
    for workers in several:
        again = make(tmp_path / str(workers), workers=workers)
        assert contents(tmp_path / str(workers)) == wanted
        assert again.lines() == account.lines()
    whole = tg.align(tg.read(inputs, on_error="skip"), tg.Tokenizer.from_pretrained(example / "model"))
    found = tg.Sequences.load(tmp_path / "one", verify=True)
    assert (found.ids.tolist(), found.trace_ids) == (whole.ids.tolist(), whole.trace_ids)
    assert found.trace_ids[30] == f"{inputs[0]}:32"  # of the whole file, whichever part it is in
    assert found.group_names == whole.group_names


def test_an_account_of_parts_is_that_of_the_whole_but_for_the_parts(make, inputs, tmp_path):
    parts = make(tmp_path / "parts", map=FieldMap(reward="reward"))
    whole = make(tmp_path / "whole", map=FieldMap(reward="reward"), part_bytes=1 << 30)
    assert (whole.parts, next(iter(manifest.read(tmp_path / "whole").shards))) == (1, "shard-00000")
    cut = {"parts", "groups_in_several_shards", "read"}
    assert {k: v for k, v in parts.as_dict().items() if k not in cut} == {
        k: v for k, v in whole.as_dict().items() if k not in cut
    }
    assert parts.read == whole.read
    assert [line for line in parts.lines() if not line.startswith(("parts ", "groups "))] == whole.lines()
    assert "         1 empty files are left out" in parts.lines()


def test_what_is_said_of_parts_is_what_is_said_of_the_whole(make, tmp_path):
    """Words as rewards, records that are converted, failed calls, groups by prompt, files without a call."""
    for name, at in (("a", 0), ("b", 30)):
        rows = [{"id": f"{name}{n}", "prompt": f"{n}?", "response": "4", "score": "pass"} for n in range(at, at + 30)]
        rows[7] |= {"response": None}
        rows[9] |= {"score": 0.25 + at}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "blank.jsonl").write_text("\n" * 700)
    names = [str(tmp_path / f"{name}.jsonl") for name in ("a", "blank", "b")]
    told = {"data": Data(on_error="skip", text_only=True), "map": FieldMap(reward="score", group="prompt")}
    parts = make(tmp_path / "parts", names, part_bytes=600, **told)
    whole = make(tmp_path / "whole", names, **told)
    assert (parts.parts > 5, whole.parts) == (True, 1)
    lines = [line for line in parts.lines() if not line.startswith("parts ")]
    assert lines == whole.lines()
    for wanted in (
        "2 calls failed",
        "1 files without a record",
        "convert  ",
        "'pass' is 1",
        "0.25 to 30.25",
        "58 groups",
    ):
        assert any(wanted in line for line in lines), (wanted, lines)


def test_a_bad_record_is_the_error_of_the_first_part_that_has_one(make, tmp_path, inputs):
    lines = Path(inputs[0]).read_bytes().split(b"\n")
    lines[44] = b"{"
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines))
    said = []
    for workers in (1, 2):
        with pytest.raises(FormatError, match=r"TG-FORMAT-037.*bad\.jsonl:21") as found:
            make(tmp_path / f"o{workers}", str(path), Data(), workers=workers)
        said.append((str(found.value), found.value.line))
        assert not (tmp_path / f"o{workers}" / "manifest.json").exists()
    assert said[0] == said[1]


def test_traces_that_cannot_be_aligned_are_put_aside_with_their_part(make, tmp_path, example):
    lines = [json.loads(line) for line in lines_of(example, 24)]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    lines[20] = {"id": "no", "messages": said, "template_kwargs": {"messages": "hidden by the template's own"}}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    account = make(tmp_path / "o", str(path))
    [aside] = (tmp_path / "o").glob("unaligned-*")
    assert re.fullmatch(r"unaligned-0000[1-9]-0000\d\.jsonl", aside.name)
    assert [json.loads(line)["id"] for line in aside.read_text().splitlines()] == ["no"]
    assert len(account.errors) == 1


@pytest.mark.nightly
def test_standard_input_is_read_here_also_where_ray_is_asked_for(example, tmp_path):
    pytest.importorskip("ray")
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = ["prepare", "-", "--model", str(example / "model"), "--out", str(tmp_path / "o"), "--ray", "--workers", "2"]
    text = b"\n".join(lines_of(example, 4))
    done = subprocess.run([sys.executable, "-m", "tracegrad.cli", *told], input=text, env=own, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"4 traces" in done.stdout


def test_files_without_a_record_are_an_error_where_all_are(make, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n" * 50)
    both = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    with pytest.raises(ReadError, match=r"TG-READ-005.*a\.jsonl: "):
        make(tmp_path / "o", both, part_bytes=60)


# --- where a file is cut ---


def groups(parts):
    return [
        [group for traces in open_part(list(part.places), FieldMap(), Options()) for group in traces.groups]
        for part in parts
    ]


def record(number, group, size=0):
    said = [{"role": "user", "content": "x" * size}, {"role": "assistant", "content": "a"}]
    return json.dumps({"id": str(number), "messages": said, **({} if group is None else {"group": group})})


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 400)), min_size=1, max_size=30), st.data())
def test_pieces_are_all_of_a_file_and_begin_where_the_group_changes(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("cut") / "t.jsonl"
    ends = [data.draw(st.sampled_from(["\n", "\r\n", "\n\n"])) for _ in rows]
    path.write_text("".join(record(at, *row) + end for (at, row), end in zip(enumerate(rows), ends, strict=True)))
    size = data.draw(st.integers(100, 3000))
    parts, _ = prepare.split_inputs(path, size)
    found = [
        trace for part in parts for traces in open_part(list(part.places), FieldMap(), Options()) for trace in traces
    ]
    whole = tg.read(path)
    assert [(each.id, each.location) for each in found] == [(each.id, each.location) for each in whole]
    by_part = groups(parts)
    assert all(by_part)
    starts = [0]
    for (at, row), end in zip(enumerate(rows), ends, strict=True):
        starts.append(starts[-1] + len(record(at, *row) + end))
    for part, before in zip(parts[1:], by_part, strict=False):
        start = part.places[0].start
        first = starts.index(start)
        run = next((at for at in range(first, len(rows)) if rows[at][0] != before[-1]), len(rows))
        # Cut at the change, or within a group that does not end within a part's size behind the place to cut.
        to_cut = start // size * size
        goes_on = starts[run] >= min(to_cut + size, starts[-1]) and not any(to_cut <= each < start for each in starts)
        assert before[-1] is None or run == first or goes_on


def test_a_group_is_in_two_parts_only_where_it_is_longer_than_one(make, tmp_path, example):
    lines = lines_of(example, 24)  # three groups of eight
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    most = max(sum(len(line) + 1 for line in lines[at : at + 8]) for at in (0, 8, 16))
    short, _ = prepare.split_inputs(path, most)
    assert [sorted(set(each)) for each in groups(short)] == [["g0000", "g0001"], ["g0002"]]
    account = make(tmp_path / "o", str(path), part_bytes=most // 4)
    assert account.cut_groups > 0
    assert account.groups == 3
    said = json.loads((tmp_path / "o" / "alignment_report.json").read_text())
    assert said["groups_in_several_shards"] == account.cut_groups
    assert f"groups   {account.cut_groups} of 3 have traces in several shards" in "\n".join(account.lines())
    assert len(tg.Sequences.load(tmp_path / "o").group_names) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_groups_that_stand_in_several_files_are_counted_said_and_one_again(make, tmp_path, example, workers):
    lines = [json.loads(line) for line in lines_of(example, 24)]  # three groups of eight
    names = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    for number, name in enumerate(names):  # g0000 is in a and b, g0001 in all three, g0002 in c alone
        has = [[lines[:4], lines[8:10]], [lines[4:8], lines[10:12]], [lines[12:16], lines[16:]]][number]
        Path(name).write_text("".join(json.dumps(line) + "\n" for part in has for line in part))
    account = make(tmp_path / "o", names, shard_traces=64, part_bytes=1000, workers=workers)
    assert account.parts > 3
    folders = [tg.Sequences.load(tmp_path / "o" / name) for name in manifest.read(tmp_path / "o").shards]
    stands = {name: sum(name in each.group_names for each in folders) for name in ("g0000", "g0001", "g0002")}
    cut = sum(count > 1 for count in stands.values())
    assert stands["g0000"] > 1 < stands["g0001"]
    assert (account.cut_groups, account.groups) == (cut, 3)
    assert f"groups   {cut} of 3 have traces in several shards" in str(account.lines())
    whole = tg.PreparedDataset.open(tmp_path / "o")
    assert sorted(np.bincount(whole.catalog.group).tolist()) == [8, 8, 8]
    memory = tg.align(tg.read(names), tg.Tokenizer.from_pretrained(example / "model"))
    assert np.array_equal(whole.catalog.group, np.unique(memory.group, return_index=True)[1].argsort()[memory.group])


def events(number):
    chunk = {"id": f"c{number}", "object": "chat.completion.chunk", "choices": [{"delta": {"content": "a"}}]}
    return chunk


@pytest.mark.parametrize(
    "text",
    [
        gzip.compress((record(0, None, 99) + "\n").encode() * 40),
        json.dumps([json.loads(record(at, None, 99)) for at in range(40)]).encode(),
        "\n".join(json.dumps(json.loads(record(at, None, 99)), indent=1) for at in range(40)).encode(),
        (json.dumps(events(0)) + "\n").encode() * 60,  # chunks of one answer
        "".join(f"data: {json.dumps(events(0))}\n\n" for _ in range(60)).encode() + b"data: [DONE]\n",
    ],
)
def test_what_has_no_place_to_be_cut_is_one_part(tmp_path, text):
    path = tmp_path / "t.jsonl"
    path.write_bytes(text)
    parts, why = prepare.split_inputs(path, 300)
    assert [len(part.places) for part in parts] == [1]
    assert (parts[0].is_only, why) == (True, None)


def test_a_stream_of_events_between_records_is_not_cut(tmp_path):
    path = tmp_path / "t.jsonl"
    stream = "".join(f"data: {json.dumps(events(at))}\n\n" for at in [0] * 20) + "data: [DONE]\n"
    path.write_text("".join(record(at, None, 50) + "\n" + stream for at in range(4)))
    parts, _ = prepare.split_inputs(path, 1000)
    assert len(parts) == 4
    assert all(path.read_bytes()[part.places[0].start :].startswith(b'{"id"') for part in parts)


def test_a_mark_of_byte_order_does_not_keep_a_file_whole(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(record(at, None, 50) + "\n" for at in range(9)), encoding="utf-8-sig")
    parts, _ = prepare.split_inputs(path, 400)
    assert len(parts) > 2
    assert [group for part in groups(parts) for group in part] == [None] * 9


def test_what_is_joined_over_the_input_is_one_part_and_said(make, tmp_path, inputs):
    parts, why = prepare.split_inputs(inputs, PART, FieldMap(session="id"))
    assert (len(parts), why) == (1, "--map.session joins records of all inputs")
    assert prepare.split_inputs(inputs[2], PART, FieldMap(session="id"))[1] is None  # nothing could be cut
    os.mkfifo(tmp_path / "pipe")
    [part], why = prepare.split_inputs([*inputs, str(tmp_path / "pipe")], PART)
    assert why == "a pipe can be read only once"
    assert "part-00000" in str(part)
    account = make(tmp_path / "o", inputs[:1], map=FieldMap(session="id"))
    assert "parts    1: --map.session joins records of all inputs" in account.lines()


def test_whole_files_are_put_together_until_a_part_is_full(tmp_path):
    for name, size in zip("abcd", (400, 500, 2000, 100), strict=True):
        (tmp_path / f"{name}.json").write_text("[" + record(0, None, size) + "]")
    (tmp_path / "e.json").write_bytes(b"")
    parts, _ = prepare.split_inputs([str(tmp_path / f"{name}.json") for name in "abced"], 1300)
    assert [[place.path[-6] for place in part.places] for part in parts] == [["a", "b"], ["c", "e"], ["d"]]
    assert [part.index for part in parts] == [0, 1, 2]


# --- lost, stopped, gone on with ---


@pytest.fixture
def job(example, tmp_path):
    (tmp_path / "o").mkdir()
    return Job("t", str(example / "model"), str(tmp_path / "o"), Data(on_error="skip"), FieldMap(), 8)


def test_a_part_whose_process_was_killed_is_done_again(make, inputs, job, tmp_path, monkeypatch):
    make(tmp_path / "one", data=Data(on_error="skip"))
    parts, _ = prepare.split_inputs(inputs, PART)
    killed = []
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)

    def say(part, taken, records):
        if not killed:
            killed.append(part.index)
            told = Path(f"/proc/{pool.pid_of(part)}/environ").read_bytes().split(b"\0")
            assert f"RAYON_NUM_THREADS={max((os.cpu_count() or 1) // 2, 1)}".encode() in told
            os.kill(pool.pid_of(part), signal.SIGKILL)

    with Workers(job, 2, log=say) as pool:
        records = {record["part"]: record for record in pool.records(parts)}
    assert sorted(records) == list(range(len(parts)))
    shards = {name: text for name, text in contents(tmp_path / "one").items() if name.startswith(("shard-", "part-"))}
    assert contents(tmp_path / "o") == shards


@pytest.mark.nightly
def test_a_part_whose_processes_are_all_killed_is_named(inputs, job):
    parts, _ = prepare.split_inputs(inputs, PART)
    killed = []

    def say(part, taken, records):
        if part.index == 1:
            killed.append(pool.pid_of(part))
            os.kill(killed[-1], signal.SIGKILL)

    with Workers(job, 2, log=say) as pool, pytest.raises(TracegradError, match=r"TG-PREPARE-020: part-00001 .*9, 3 "):
        list(pool.records(parts))
    assert len(set(killed)) == MAX_RETRIES + 1


def test_all_processes_end_with_the_one_that_asks(inputs, job):
    parts, _ = prepare.split_inputs(inputs, PART)

    def say(part, taken, records):
        handles = Path(f"/proc/{pool.pid_of(part)}/fd")
        held.append(any(handle.resolve().name == ".lock" for handle in handles.iterdir()))  # one may close meanwhile
        raise KeyboardInterrupt

    held = []
    with manifest.lock(Path(job.out)) as lock, pytest.raises(KeyboardInterrupt), Workers(job, 2, lock, say) as pool:
        list(pool.records(parts))
    assert held == [True]
    assert [worker.process.poll() for worker in pool._all] == [-signal.SIGKILL] * 2


def test_a_process_that_nobody_asks_any_more_ends_and_holds_the_lock_so_long(job, inputs, tmp_path):
    ours, theirs = Pipe()
    code = "import sys; from tracegrad.prepare.workers import main; main(int(sys.argv[1]))"
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with manifest.lock(tmp_path) as lock:
        told = {"env": own, "pass_fds": (theirs.fileno(), lock)}
        process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], **told)
    theirs.close()
    ours.send(job)
    ours.send(prepare.split_inputs(inputs, PART)[0][1])
    assert ours.recv()[0] == "begun"
    process.send_signal(signal.SIGINT)  # as a terminal sends it to all of them: it is for the one that asks
    while (said := ours.recv())[0] == "far":
        pass
    assert said[0] == "done"
    with pytest.raises(ArgumentError, match="TG-STORE-011"), manifest.lock(tmp_path):
        pass
    ours.close()
    assert process.wait() == 1
    with manifest.lock(tmp_path):
        pass


def times(folder):
    return {name: (folder / name).stat().st_mtime_ns for name in contents(folder) if "/" in name}


def test_going_on_does_only_what_is_missing(make, tmp_path):
    first = make(tmp_path / "o")
    wanted, before = contents(tmp_path / "o"), times(tmp_path / "o")
    assert make(tmp_path / "o", resume=True).as_dict() == first.as_dict()
    assert (contents(tmp_path / "o"), times(tmp_path / "o")) == (wanted, before)
    (tmp_path / "o" / "part-00001.json").unlink()
    (tmp_path / "o" / "shard-00003-00000" / "traces.safetensors").unlink()
    (tmp_path / "o" / "part-00004.json").write_bytes(wanted["part-00005.json"])
    (tmp_path / "o" / "part-00002.json").write_text('{"format": "tracegrad-part/1", "part": 2, "shards": {}}')
    make(tmp_path / "o", resume=True)
    assert contents(tmp_path / "o") == wanted
    anew = {name.split("/")[0] for name, time in times(tmp_path / "o").items() if time != before[name]}
    assert anew == {"shard-00003-00000"}  # the shards of parts 1 and 2 are whole
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-017.*part_bytes"):
        make(tmp_path / "o", resume=True, part_bytes=PART + 1)
    with pytest.raises(ArgumentError, match="TG-PREPARE-014"):
        make(tmp_path / "o")


def test_what_is_being_done_again_is_not_whole_meanwhile(make, tmp_path, inputs):
    path = tmp_path / "t.jsonl"
    lines = Path(inputs[0]).read_bytes().split(b"\n")
    lines[20] = lines[21]
    path.write_bytes(b"\n".join(lines))
    make(tmp_path / "o", str(path), Data())
    time = path.stat().st_mtime_ns
    lines[0] = b'{"a"'.ljust(len(lines[0]))
    path.write_bytes(b"\n".join(lines))
    os.utime(path, ns=(time, time))  # as a disk changes a file
    (tmp_path / "o" / "part-00000.json").unlink()
    with pytest.raises(FormatError, match=r"TG-FORMAT-033.*t\.jsonl:1"):
        make(tmp_path / "o", str(path), Data(), resume=True)
    with pytest.raises(ReadError, match=r"TG-STORE-035.*manifest\.json"):
        tg.Sequences.load(tmp_path / "o")


def test_the_parts_behind_one_with_an_error_are_left(make, tmp_path, inputs):
    lines = Path(inputs[0]).read_bytes().split(b"\n")
    lines[0] = b'{"a"'
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(FormatError, match=r"TG-FORMAT-033.*bad\.jsonl:1"):
        make(tmp_path / "o", str(path), Data(), part_bytes=PART // 8, workers=2)
    parts, _ = prepare.split_inputs(str(path), PART // 8)
    assert len(list((tmp_path / "o").glob("part-*.json"))) < len(parts) - 2


def test_numbers_of_processes_and_parts_are_at_least_one(make, tmp_path):
    for name in ("workers", "part_bytes", "shard_traces"):
        with pytest.raises(ArgumentError, match=rf"TG-ARGS-005.*{name}"):
            make(tmp_path / "o", **{name: 0})


def test_how_far_all_parts_are_is_said_as_one(make, tmp_path):
    said = []
    make(tmp_path / "o", progress=said.append)
    assert [each.done for each in said] == [False] * (len(said) - 1) + [True]
    assert said[-1].bytes_read == said[-1].total_bytes > 0
    assert said[-1].records == 72
    assert all(each.bytes_read <= after.bytes_read for each, after in pairwise(said))


# --- manifests of parts ---


def test_shards_of_parts_are_in_order_without_a_gap(make, tmp_path):
    make(tmp_path / "o")
    names = list(manifest.read(tmp_path / "o").shards)
    assert names[:3] == ["shard-00000-00000", "shard-00000-00001", "shard-00001-00000"]
    sealed = (tmp_path / "o" / "manifest.json").read_bytes()
    manifest.seal(tmp_path / "o")
    assert (tmp_path / "o" / "manifest.json").read_bytes() == sealed
    (tmp_path / "o" / names[2]).rename(tmp_path / "o" / "shard-00001-00001")
    with pytest.raises(FormatError, match=r"TG-STORE-013.*shard-00001-00000"):
        manifest.seal(tmp_path / "o")
    with pytest.raises(ReadError, match=r"TG-STORE-015.*shard-00001-00000"):
        manifest.read(tmp_path / "o")


@pytest.mark.parametrize("name", ["shard-" + "x" * 300, "shard-" + "0" * 300, "a\0b"])
def test_a_shard_by_a_name_that_no_file_can_have_is_refused(make, tmp_path, name):
    make(tmp_path / "o")
    path = tmp_path / "o" / "manifest.json"
    written = json.loads(path.read_text())
    shards = written["shards"]
    first = next(iter(shards))
    written["shards"] = {name if each == first else each: entry for each, entry in shards.items()}
    path.write_text(json.dumps(written))
    with pytest.raises(FormatError):
        manifest.read(tmp_path / "o")


# --- for other engines ---


def test_a_shard_is_a_function_of_its_records(example, inputs, tmp_path):
    model = example / "model"
    parts, _ = prepare.split_inputs(inputs, PART)
    for index, part in enumerate(parts):
        prepare.shard(part, model, data=Data(on_error="skip"), out=tmp_path / "o" / f"shard-{index:05d}")
    manifest.seal(tmp_path / "o")
    whole = tg.align(tg.read(inputs, on_error="skip"), tg.Tokenizer.from_pretrained(model))
    assert tg.Sequences.load(tmp_path / "o", verify=True).ids.tolist() == whole.ids.tolist()
    some = tg.read(inputs[1])
    by_name = prepare.shard(inputs[1], str(model))
    assert prepare.shard(some, tg.Tokenizer.from_pretrained(model)).ids.tolist() == by_name.ids.tolist()
    dicts = [trace.to_dict() for trace in some]
    assert prepare.shard(dicts, model, map=FieldMap(id="id")).trace_ids == by_name.trace_ids


def test_records_without_an_id_are_not_written_as_a_shard(example, tmp_path):
    said = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]}]
    assert prepare.shard(said, example / "model", data=Data(text_only=True)).traces == 1
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-004.*<records>:1"):
        prepare.shard(said, example / "model", data=Data(text_only=True), out=tmp_path / "shard-00000")
    with pytest.raises(ArgumentError, match="TG-PREPARE-003"):
        prepare.shard(said, example / "model", data=Data(on_error="quarantine"))
