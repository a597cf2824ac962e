"""Bad input: every bad record, stream and disk is one clear error, or the documented policy."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import zstandard

from peak import PEAK
from trace_lines import line, save
from tracegrad.data import read, stream
from tracegrad.data.trace import Traces, write
from tracegrad.errors import ArgumentError, FormatError, ReadError

BAD = {
    "not_json": (b"hello", "not JSON"),
    "cut": (b'{"id": "a", "messages": [', "trace 'a': not JSON: the record ends too early"),
    "number": (b"5", "the record is a number, not an object"),
    "not_utf8": (b'{"messages": "\xff"}', "invalid UTF-8 at byte 14"),
    "lone_surrogate": (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "a lone surrogate escape"),
    "too_deep": (b'{"messages": ' + b"[" * 5000, "nested deeper than 128 levels"),
    "unknown_form": (b'{"prompt": 1}', "a record with the keys prompt"),
    "messages": (b'{"id": "a17", "messages": {}}', "trace 'a17': `messages` is an object, not a list"),
    "logprob": (
        b'{"messages": [{"role": "assistant", "logprobs": {"content": [{"logprob": "-1"}]}}]}',
        'messages[0].logprobs.content[0].logprob: invalid type: string "-1", expected a logprob',
    ),
    "negative id": (b'{"messages": [{"role": "assistant", "token_ids": [-1]}]}', "token id -1 is negative"),
    "fraction": (b'{"messages": [{"role": "assistant", "token_ids": [0.5]}]}', "token id 0.5 is not an integer"),
    "large id": (b'{"messages": [{"role": "assistant", "token_ids": [2147483648]}]}', "is beyond 2147483647"),
    "reward": (b'{"messages": [{"role": "user"}], "reward": Infinity}', "`reward` is inf, not a finite float32"),
    "choices": (b'{"choices": [{"finish_reason": "stop"}]}', "a choice has no `message`"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_raises_with_place_and_cure(tmp_path, name):
    data, what = BAD[name]
    path = save(tmp_path, line() + b"\n\n" + data + b"\n" + line("b"))
    with pytest.raises(FormatError) as caught:
        read(path)
    error = str(caught.value)
    assert error.startswith(f"{caught.value.code}: {path}:3")
    assert what in error
    assert error.count(". ") >= 2, "what, why and cure"
    assert (caught.value.file, caught.value.line) == (str(path), 3)


def test_bad_records_are_skipped_and_counted(tmp_path):
    path = save(tmp_path, b"\n".join([line("first"), *(data for data, _ in BAD.values()), line("last")]))
    traces = read(path, on_error="skip")
    assert [trace.id for trace in traces] == ["first", "last"]
    report = traces.read_report
    assert (report.records, report.traces, report.bad) == (len(BAD) + 2, 2, len(BAD))
    assert sum(report.reasons.values()) == len(BAD)
    assert report.reasons["not_json"] == 2
    assert report.reasons["id_out_of_range"] == 3
    assert len(report.errors) == 5


def test_quarantine_keeps_every_byte_and_says_why(tmp_path):
    path = save(tmp_path, b"\n".join([line("first"), *(data for data, _ in BAD.values()), line("last")]))
    traces = read(path, on_error="quarantine", quarantine=tmp_path / "bad")
    assert len(traces) == 2
    raw = (tmp_path / "bad.quarantine.raw").read_bytes()
    assert raw == b"".join(data + b"\n" for data, _ in BAD.values())
    entries = [json.loads(text) for text in (tmp_path / "bad.quarantine.jsonl").read_text().splitlines()]
    for number, (entry, (data, what)) in enumerate(zip(entries, BAD.values(), strict=True), 2):
        assert (entry["file"], entry["line"]) == (str(path), number)
        assert raw[entry["offset"] : entry["offset"] + entry["length"]] == data
        assert what in entry["error"]
    assert path.exists()
    read(save(tmp_path, b"5\n" + line(), "x.jsonl"), on_error="quarantine")
    assert (tmp_path / "x.jsonl.quarantine.raw").read_bytes() == b"5\n"


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_truncated_stream_says_where_it_broke(tmp_path, compress):
    rng = np.random.default_rng(0)
    whole = compress(b"\n".join(line(f"t{i}", x=rng.bytes(200).hex()) for i in range(3000)))
    path = save(tmp_path, whole[: len(whole) // 2])
    with pytest.raises(ReadError, match="TG-READ-013") as caught:
        read(path)
    for policy in ("skip", "quarantine"):
        traces = read(path, on_error=policy)
        assert 500 < len(traces) < 2500
        assert traces.read_report.reasons == {"stream": 1}
        assert caught.value.line == len(traces) + 1
    assert (tmp_path / "runs.jsonl.quarantine.raw").read_bytes()[:8] in line(f"t{len(traces)}") + b"\n"


@pytest.mark.parametrize("data", [b"", b"\n \r\n", b"[]", gzip.compress(b"", mtime=0)])
def test_an_empty_file_says_so_under_every_policy(tmp_path, data):
    path = save(tmp_path, data)
    for policy in ("raise", "skip", "quarantine"):
        with pytest.raises(ReadError, match="TG-READ-005"):
            read(path, on_error=policy)


def test_a_record_beyond_the_limit_is_refused(tmp_path):
    long = line("long", x="y" * 600_000)
    path = save(tmp_path, line() + b"\n" + long + b"\n" + line("b"))
    assert len(read(path)) == 3
    with pytest.raises(FormatError, match=r"TG-READ-007.*runs\.jsonl:2: .*500000"):
        read(path, max_record_bytes=500_000)
    traces = read(path, max_record_bytes=500_000, on_error="quarantine")
    assert [trace.id for trace in traces] == ["a", "b"]
    assert (tmp_path / "runs.jsonl.quarantine.raw").read_bytes() == long + b"\n"


def test_a_file_streams_in_bounded_memory(tmp_path):
    code = PEAK + (
        "import sys; from tracegrad.data import stream\n"
        "before = peak()\n"
        "count = sum(len(part) for part in stream(sys.argv[1], batch=64, chunk_bytes=1 << 20))\n"
        "print(count, int(peak() - before))"
    )
    path = save(tmp_path, zstandard.ZstdCompressor().compress((line("a", x="y" * 20_000) + b"\n") * 5_000))
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=True, text=True)
    count, mebibytes = map(int, result.stdout.split())
    assert count == 5_000
    assert mebibytes < 60, "100 MB of records must not be held"


def test_a_limit_stops_before_a_later_bad_record(tmp_path):
    path = save(tmp_path, line() + b"\n" + line("b") + b"\nhello")
    assert len(read(path, limit=2)) == 2
    assert len(read(path, limit=0)) == 0


def test_a_full_disk_is_one_clear_error_and_leaves_no_half_file(tmp_path):
    code = (
        "import resource, sys; from tracegrad.data.trace import Traces, write\n"
        "traces = Traces.from_records([{'messages': [{'role': 'user', 'content': 'x' * 100_000}]}])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: write(traces, sys.argv[1])\n"
        "except ValueError as error: print(type(error).__name__, error)"
    )
    path = save(tmp_path, b"earlier")
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=True, text=True)
    assert result.stdout.startswith(f"ReadError TG-READ-015: {path}: cannot be written: ")
    assert "Free space" in result.stdout
    assert os.listdir(tmp_path) == ["runs.jsonl"]
    assert path.read_bytes() == b"earlier"
    with pytest.raises(ReadError, match=r"TG-READ-015.*/dev/full"):
        write(Traces.from_records([json.loads(line())]), "/dev/full")


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
    path = save(tmp_path, line() + b"\nhello")
    target = save(tmp_path, b"earlier", "out.jsonl")
    with pytest.raises(FormatError):
        write(stream(path, batch=1), target)
    assert target.read_bytes() == b"earlier"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "runs.jsonl"]
    with pytest.raises(ReadError, match="TG-READ-015"):
        write(read(path, on_error="skip"), tmp_path / "none" / "a.jsonl")


def test_arguments_that_contradict_are_refused(tmp_path):
    path = save(tmp_path, line())
    for arguments in ({"on_error": "ignore"}, {"quarantine": "x"}, {"limit": -1}, {"max_record_bytes": 0}):
        with pytest.raises(ArgumentError):
            read(path, **arguments)
    with pytest.raises(ArgumentError, match="TG-DATA-027"):
        read("-", on_error="quarantine")
    with pytest.raises(ArgumentError):
        stream(path, batch=0)
