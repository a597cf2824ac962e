"""Prepared folders at addresses: written there and read from there, on a real S3 API on loopback."""

import json
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from buckets import served
from folder_bytes import contents
from tracegrad import prepare
from tracegrad.cli import main
from tracegrad.config import Data
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.metrics import Stopwatch
from tracegrad.prepare.output import RemoteOutput
from tracegrad.storage import download, manifest, remote

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def s3(example):
    """An S3 with two files of traces, one with a bad line."""
    lines = [trace.record for trace in tg.read(example / "traces.jsonl.zst", limit=32)]
    lines[3] = b"{"
    with served() as system:
        system.mkdir("data")
        system.pipe("data/in/a.jsonl", b"\n".join(lines[:16]) + b"\n")
        system.pipe("data/in/b.jsonl", b"\n".join(lines[16:]) + b"\n")
        yield system


def make(example, out, **more):
    told = {"shard_traces": 8, "part_bytes": 1000, **more}
    return prepare.prepare("s3://data/in", example / "model", Data(on_error="quarantine"), out, **told)


def there(s3, folder):
    s3.invalidate_cache()
    return {name.removeprefix(f"{folder}/"): s3.cat_file(name) for name in s3.find(folder)}


def test_a_folder_in_a_bucket_has_the_bytes_of_one_here(s3, example, tmp_path):
    make(example, tmp_path / "o")
    wanted = {name: text for name, text in contents(tmp_path / "o").items() if name != ".lock"}
    assert {"in.part-00000.quarantine.raw", "part-00001.json", "manifest.json"} < wanted.keys()
    make(example, "s3://data/one")
    assert there(s3, "data/one") == wanted
    assert manifest.read("s3://data/one") == manifest.read(tmp_path / "o")
    with pytest.raises(ArgumentError, match=r"TG-DATA-029.*s3://data/one"):
        tg.read("s3://data/one")


def test_a_folder_in_a_bucket_is_loaded_and_its_shards_one_by_one(s3, example, tmp_path):
    make(example, "s3://data/three")
    make(example, tmp_path / "o")
    wanted = tg.Sequences.load(tmp_path / "o")
    found = tg.Sequences.load("s3://data/three", verify=True)
    assert np.array_equal(found.ids, wanted.ids)
    told = prepare.load("s3://data/three", example / "model", Data(), tmp_path, Stopwatch())[0]
    assert told.trace_ids == wanted.trace_ids
    shard = download.fetch_folder("s3://data/three", "shard-00001-00000", into=tmp_path / "here")
    assert contents(shard) == contents(tmp_path / "o" / "shard-00001-00000")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["shard-00001-00000"]  # no other was brought
    before = (shard / "sequences.json").stat().st_mtime_ns
    text = (shard / "traces.safetensors").read_bytes()
    (shard / "traces.safetensors").write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    download.fetch_folder("s3://data/three", "shard-00001-00000", into=tmp_path / "here")
    assert contents(shard) == contents(tmp_path / "o" / "shard-00001-00000")
    assert (shard / "sequences.json").stat().st_mtime_ns == before  # what was right is not brought again
    with pytest.raises(ReadError, match=r"TG-STORE-001.*shard-00009"):
        download.fetch_folder("s3://data/three", "shard-00009")
    download.remove_download(shard)
    assert not shard.exists()


def test_a_shard_of_which_a_file_is_not_written_again_is_not_whole(s3, example, monkeypatch):
    make(example, "s3://data/ten")
    s3.rm_file("data/ten/shard-00001-00000/sequences.json")

    def broken(path, address):
        raise ReadError(f"TG-STORE-009: {address}: the line is cut")

    monkeypatch.setattr(remote, "upload", broken)
    with pytest.raises(ReadError, match="TG-STORE-009"):
        make(example, "s3://data/ten", resume=True)
    s3.invalidate_cache()
    assert not s3.exists("data/ten/manifest.json")
    assert not s3.exists("data/ten/shard-00001-00000/manifest.json")
    assert s3.exists("data/ten/shard-00000-00000/manifest.json")


def test_one_set_of_sequences_in_a_bucket_is_loaded(s3, example, tmp_path):
    make(example, tmp_path / "o", part_bytes=1 << 30)
    s3.put(f"{tmp_path}/o/shard-00000/", "data/single", recursive=True)
    assert tg.Sequences.load("s3://data/single").traces == tg.Sequences.load(tmp_path / "o" / "shard-00000").traces


def test_a_stopped_run_into_a_bucket_goes_on_and_does_only_what_is_missing(s3, example):
    first = make(example, "s3://data/four")
    wanted = there(s3, "data/four")
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-014.*s3://data/four"):
        make(example, "s3://data/four")
    s3.rm_file("data/four/manifest.json")
    s3.rm_file("data/four/shard-00001-00000/sequences.json")
    kept = s3.info("data/four/shard-00000-00000/sequences.json")["LastModified"]
    with pytest.raises(ReadError, match=r"TG-STORE-035.*3.*manifest\.json"):
        tg.Sequences.load("s3://data/four")
    assert make(example, "s3://data/four", resume=True).as_dict() == first.as_dict()
    assert there(s3, "data/four") == wanted
    assert s3.info("data/four/shard-00000-00000/sequences.json")["LastModified"] == kept
    s3.rm_file("data/four/shard-00001-00001/manifest.json")
    make(example, "s3://data/four", resume=True)
    assert there(s3, "data/four") == wanted
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-017.*s3://data/four/prepare\.json.*shard_traces"):
        make(example, "s3://data/four", resume=True, shard_traces=9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s3, at: s3.pipe(f"{at}/shard-00000-00000/sequences.json", b"{}"), r"TG-STORE-008.*2"),
        (lambda s3, at: s3.rm_file(f"{at}/shard-00000-00000/sequences.json"), r"TG-STORE-007.*sequences\.json"),
        (lambda s3, at: s3.pipe(f"{at}/shard-00007-00000/x.json", b""), "TG-STORE-016"),
        (lambda s3, at: s3.pipe(f"{at}/manifest.json", b"{"), "TG-STORE-034"),
        (
            lambda s3, at: s3.pipe(
                f"{at}/manifest.json",
                s3.cat_file(f"{at}/manifest.json").replace(b"shard-00001-00000", b"shard-00001-00009"),
            ),
            r"TG-STORE-013.*shard-00001-00000",
        ),
    ],
)
@pytest.mark.first_cases(2)
def test_a_folder_that_was_changed_in_its_bucket_is_refused(s3, example, tmp_path, change, message, request):
    at = f"data/five/{request.node.callspec.indices['change']}"
    make(example, f"s3://{at}")
    change(s3, at)
    with pytest.raises((FormatError, ReadError), match=message):
        manifest.read(f"s3://{at}")


def test_bytes_that_are_not_those_of_the_manifest_are_not_taken(s3, example, tmp_path):
    make(example, "s3://data/six")
    path = "data/six/shard-00000-00000/traces.safetensors"
    text = s3.cat_file(path)
    s3.pipe(path, text[:-1] + bytes([text[-1] ^ 1]))
    with pytest.raises(FormatError, match="TG-STORE-003"):
        download.fetch_folder("s3://data/six", into=tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_command_takes_addresses(s3, example, tmp_path, capsys):
    out = ["--model", str(example / "model"), "--out", "s3://data/seven", "--part-bytes", "1000"]
    assert main(["prepare", "s3://data/in", *out, "--on-error", "skip"]) == 0
    said = capsys.readouterr().out
    assert (
        "written  s3://data/seven/shard-*, s3://data/seven/alignment_report.json, s3://data/seven/manifest.json" in said
    )
    for flag in ("--workers", "--part-bytes", "--shard-traces"):
        assert main(["prepare", "s3://data/in", *out, flag, "0"]) == 1
        assert f"{flag} is 0" in capsys.readouterr().err


@pytest.mark.nightly
def test_several_processes_write_into_a_bucket(s3, example):
    make(example, "s3://data/two")
    make(example, "s3://data/both/", workers=2)
    assert there(s3, "data/both") == there(s3, "data/two")


@pytest.mark.nightly
def test_a_run_trains_on_a_folder_in_a_bucket(s3, example, tmp_path, capsys):
    make(example, "s3://data/nine")
    train = ["train", "s3://data/nine", "--model", str(example / "model"), "--out", str(tmp_path / "r"), "--dry-run"]
    assert main(train) == 0, capsys.readouterr()


def test_a_shard_is_written_to_an_address(s3, example):
    some = tg.read("s3://data/in", on_error="skip")
    prepare.shard(some, example / "model", out="s3://data/eight/shard-00000")
    assert manifest.read("s3://data/eight/shard-00000").counts["traces"] == 31


def test_what_is_in_the_memory_of_one_process_is_written_by_it_alone(example, tmp_path):
    traces = tmp_path / "t.jsonl"
    tg.write(tg.read(example / "traces.jsonl.zst", limit=4), traces)
    told = (str(traces), example / "model", Data(), "memory://out")
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-012.*memory://out"):
        prepare.prepare(*told, workers=2)
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-012.*memory://out"):
        prepare.prepare(*told, ray_address="")
    assert prepare.prepare(*told).traces == tg.Sequences.load("memory://out").traces == 4


def test_a_path_may_be_written_as_an_address_of_this_machine(example, tmp_path):
    traces = tmp_path / "t.jsonl"
    tg.write(tg.read(example / "traces.jsonl.zst", limit=4), traces)
    prepare.prepare(str(traces), example / "model", Data(), f"file://{tmp_path}/o")
    assert tg.Sequences.load(f"file://{tmp_path}/o").traces == 4
    assert (tmp_path / "o" / ".lock").exists()
    assert prepare.is_prepared(f"file://{tmp_path}/o")


def test_addresses_that_cannot_be_asked_hold_nothing_prepared(s3):
    assert not prepare.is_prepared("nosuch://a/b")
    assert not prepare.is_prepared("s3://data/in")
    assert not prepare.is_prepared("s3://data/*")
    assert not RemoteOutput("s3://data/none").names()
    with pytest.raises(ReadError, match=r"TG-STORE-037.*s3://data/none"):
        manifest.read("s3://data/none")
    with pytest.raises(FormatError, match=r"TG-STORE-021.*3"):
        remote.read("s3://data/in/a.jsonl", 3)
    remote.remove("s3://data/none/file")
    assert json.loads(json.dumps(sorted(remote.sizes("s3://data/in")))) == ["a.jsonl", "b.jsonl"]
    assert remote.path_of(Path("x")) == Path("x")
