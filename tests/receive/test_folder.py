"""Spans become lines of whole traces: exactly once, whatever is killed, and with all spans that came later."""

import errno
import json
import os
import shutil
import sqlite3

import pytest

import tracegrad as tg
from otlp_spans import call, ids, lines, request, span
from tracegrad.errors import ArgumentError, FormatError, ReadError, TracegradError
from tracegrad.receive import folder as folders
from tracegrad.receive.folder import FolderFull, FolderLimits, Span, TraceFolder, split
from tracegrad.storage import files


def spans(*made, service="agent"):
    """The spans of a request as `TraceFolder.add` takes them."""
    entries = split(request(*made, service=service))
    return [Span(e[2]["traceId"], e[2]["spanId"], not e[2]["parentSpanId"], json.dumps(e).encode()) for e in entries]


class Crash(BaseException):
    """The process ends here."""


def test_a_trace_is_written_once_its_root_came_and_it_was_quiet_or_idle_for_too_long(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(folders.time, "monotonic", lambda: now[0])
    with TraceFolder(tmp_path / "o") as folder:
        folder.add(spans(call(1, 3, parent=2), call(2, 3, parent=2)))
        now[0] = 105.0
        folder.add(spans(span(1, 2, parent=1), service="tools"))
        folder.add(spans(span(1, 1)))
        now[0] = 114.9
        assert folder.write_whole(10.0, 60.0) == 0
        assert not lines(tmp_path / "o")
        now[0] = 115.0
        assert (folder.write_whole(10.0, 60.0), folder.open_traces) == (1, 1)
        assert list(lines(tmp_path / "o")) == [f"{1:032x}"]
        now[0] = 159.9
        assert folder.write_whole(10.0, 60.0) == 0
        now[0] = 160.0
        assert (folder.write_whole(10.0, 60.0), folder.open_traces) == (1, 0)
    record = json.loads((tmp_path / "o" / "traces-00001.jsonl").read_text().splitlines()[0])
    services = [each["resource"]["attributes"][0]["value"]["stringValue"] for each in record["resourceSpans"]]
    assert services == ["agent", "tools"]  # spans of one resource and scope are together, in the order they came
    assert [e["spanId"][-1] for e in record["resourceSpans"][0]["scopeSpans"][0]["spans"]] == ["3", "1"]
    traces = tg.read(tmp_path / "o")  # the hidden folder is not read
    assert [(trace.id, trace.messages[-1]["content"]) for trace in traces] == [(f"{n:032x}", "4") for n in (1, 2)]


def test_later_and_repeated_spans_are_joined_to_the_line_of_their_trace(tmp_path):
    out = tmp_path / "o"
    with TraceFolder(out) as folder:
        folder.add(spans(span(1, 1), call(2, 1), call(3, 1)))
        folder.add(spans(span(1, 1)))  # again, before it is written
        assert folder.write_whole(0, 0) == 3
        before = (out / "traces-00001.jsonl").read_bytes()
        others = before.splitlines()[1:]
        folder.add(spans(call(1, 2, parent=1), span(1, 1), span(3, 1)))
        assert folder.write_whole(0, 0) == 1
        after = (out / "traces-00001.jsonl").read_bytes()
        assert folder.counts == {"spans": 4, "traces": 3, "late": 1, "duplicates": 3}
    assert [after.find(line) for line in others] == [before.find(line) for line in others]  # they keep their places
    assert ids(out) == dict.fromkeys([(f"{t:032x}", f"{s:016x}") for t, s in ((1, 1), (1, 2), (2, 1), (3, 1))], 1)
    assert sorted(trace.id for trace in tg.read(out)) == [f"{n:032x}" for n in (1, 2, 3)]


def test_a_line_that_the_user_took_away_is_not_looked_for(tmp_path):
    out = tmp_path / "o"
    with TraceFolder(out) as folder:
        folder.add(spans(span(1, 1), span(2, 1)))
        folder.write_whole(0, 0)
        (out / "traces-00001.jsonl").write_text("")
        folder.add(spans(span(1, 2, parent=1)))
        folder.write_whole(0, 0)
        assert ids(out) == {(f"{1:032x}", f"{2:016x}"): 1}
        (out / "traces-00001.jsonl").unlink()
        folder.add(spans(span(2, 2, parent=1)))
        folder.write_whole(0, 0)
        assert ids(out) == {(f"{2:032x}", f"{2:016x}"): 1}
        (out / "traces-00001.jsonl").write_text("a last line without its end")
        folder.add(spans(span(3, 1)))
        folder.write_whole(0, 0)
    assert [line[:9] for line in (out / "traces-00001.jsonl").read_text().splitlines()] == ["a last li", '{"resourc']


def test_a_write_that_failed_is_repeated_and_counted_once(tmp_path, monkeypatch):
    out = tmp_path / "o"
    with TraceFolder(out) as folder:
        folder.add(spans(span(1, 1), span(2, 1)))
        folder.write_whole(0, 0)
        folder.add(spans(span(1, 2, parent=1), span(1, 1)))
        for place, error in (
            ((files, "create"), OSError(errno.ENOSPC, "No space left")),
            ((folder, "_transaction"), sqlite3.OperationalError("disk I/O error")),
            ((folder, "_place"), sqlite3.OperationalError("disk I/O error")),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(*place, lambda *_, error=error: (_ for _ in ()).throw(error))
                with pytest.raises(TracegradError, match=r"TG-RECEIVE-004: .*(No space left|disk I/O error)"):
                    folder.write_whole(0, 0)
        assert folder.write_whole(0, 0) == 1
        assert folder.counts == {"spans": 3, "traces": 2, "late": 1, "duplicates": 1}
        content = (out / "traces-00001.jsonl").read_text()
        (out / "traces-00001.jsonl").write_text(content.replace('{"resourceSpans', "!" * 15))
        folder.add(spans(span(2, 2)))
        with pytest.raises(TracegradError, match="TG-RECEIVE-004"):  # a damaged line is left as it is
            folder.write_whole(0, 0)


@pytest.mark.parametrize("place", ["draft", "names", "commit", "replace"])
def test_a_crash_anywhere_in_a_write_loses_and_doubles_nothing(tmp_path, monkeypatch, place):
    out = tmp_path / "o"
    with TraceFolder(out, FolderLimits(file_bytes=1)) as folder:
        folder.add(spans(span(1, 1), span(2, 1)))
        folder.write_whole(0, 0)  # a file for each trace
    limits = FolderLimits(file_bytes=len(spans(span(1, 2, parent=1))[0].data))  # two traces a write, in two files

    def crash(*_):
        raise Crash

    with TraceFolder(out, limits) as folder:
        folder.add(spans(span(1, 2, parent=1), span(3, 1)))
        with monkeypatch.context() as patch:
            if place == "draft":
                patch.setattr(os, "fsync", crash)
            elif place == "names":
                patch.setattr(folders, "flush", crash)
            elif place == "replace":
                patch.setattr(files, "replace", crash)
            else:
                patch.setattr(folder, "_transaction", crash)
            with pytest.raises(Crash):
                folder.write_whole(0, 0)
        assert list((out / folders.HIDDEN).glob("traces-*"))  # a draft is left
    with TraceFolder(out, limits) as folder:
        assert not list((out / folders.HIDDEN).glob("traces-*"))
        folder.add(spans(span(3, 1), span(1, 2, parent=1)))  # an exporter that got no answer sends them again
        folder.write_whole(0, 0)
        assert folder.open_traces == 0
    assert sorted(path.name for path in out.glob("traces-*")) == [f"traces-0000{n}.jsonl" for n in (1, 2, 3)]
    assert ids(out) == dict.fromkeys([(f"{t:032x}", f"{s:016x}") for t, s in ((1, 1), (1, 2), (2, 1), (3, 1))], 1)


def test_what_is_stored_is_open_again_after_a_restart(tmp_path):
    with TraceFolder(tmp_path / "o") as folder:
        folder.add(spans(span(1, 2, parent=1), span(2, 1)))
    with TraceFolder(tmp_path / "o") as folder:
        assert folder.open_traces == 2
        assert folder.write_whole(0.0, 60.0) == 1  # the root of the second is known
        folder.add(spans(span(1, 2, parent=1)))
        assert folder.write_whole(0.0, 0.0) == 1
    assert len(ids(tmp_path / "o")) == 2


def test_bounds(tmp_path, monkeypatch):
    size = len(spans(span(1, 1))[0].data)

    def full(limits, *made):
        with TraceFolder(tmp_path / "o", limits) as folder:
            folder.add(spans(*made[:-1]))
            with pytest.raises(FolderFull) as error:
                folder.add(spans(made[-1], made[0]))
            stored = folder._database.execute("SELECT count(*) FROM span").fetchone()[0]
        shutil.rmtree(tmp_path / "o")
        assert stored == len(made) - 1
        return str(error.value), error.value.retry_after_s

    three = [span(n, 1) for n in (1, 2, 3)]
    assert full(FolderLimits(open_traces=2), *three) == ("2 traces are open; the maximum is 2", 10)
    said, _ = full(FolderLimits(open_bytes=3 * size), *three)
    assert f"have {2 * size} bytes; the maximum is {3 * size}" in said
    usage = type("Usage", (), {"free": size * 4 - 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    said, after = full(FolderLimits(free_bytes=2 * size), span(1, 1))
    assert (f"{4 * size - 1:,} free bytes" in said, after) == (True, 30)
    usage.free = 1 << 40
    with TraceFolder(tmp_path / "o", FolderLimits(trace_bytes=2 * size)) as folder:
        assert folder.add(spans(*(span(1, n) for n in (1, 2, 3)), span(2, 1))) == 3  # all of the trace, none of others
        assert folder.add(spans(span(2, 2))) == 0
        assert folder.add(spans(span(2, 3))) == 1
        folder.write_whole(0, 0)
        assert folder.add(spans(span(2, 3), span(3, 1))) == 1  # written spans count
    shutil.rmtree(tmp_path / "o")
    with TraceFolder(tmp_path / "o") as folder:
        folder._database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(FolderFull) as error:
            folder.add([Span("4" * 32, "4" * 16, True, b"[{}, {}, {}]" + b" " * 1_000_000)])
        assert ("could not be written to disk" in str(error.value), folder.open_traces) == (True, 0)


def test_folders_of_others_and_of_other_versions_are_refused(tmp_path):
    out = tmp_path / "o"
    out.mkdir()
    (out / "traces-00001.jsonl").write_text("mine\n")
    with pytest.raises(ArgumentError, match=r"TG-RECEIVE-002: .*traces-00001.jsonl"), TraceFolder(out):
        pass
    (out / "traces-00001.jsonl").unlink()
    with TraceFolder(out), pytest.raises(ArgumentError, match="TG-STORE-011"), TraceFolder(out):
        pass
    (tmp_path / "target").write_text("mine")
    for ending in ("-wal", "-shm", "-journal"):  # SQLite would write through a link
        link = out / folders.HIDDEN / f"spans.sqlite{ending}"
        link.symlink_to(tmp_path / "target")
        with pytest.raises(ReadError, match="TG-STORE-004"), TraceFolder(out):
            pass
        link.unlink()
    (out / folders.HIDDEN).rename(tmp_path / "hidden")
    (out / folders.HIDDEN).symlink_to(tmp_path / "hidden")
    with pytest.raises(TracegradError, match=r"TG-RECEIVE-001: .*a symbolic link"), TraceFolder(out):
        pass
    (out / folders.HIDDEN).unlink()
    (tmp_path / "hidden").rename(out / folders.HIDDEN)
    with TraceFolder(out) as folder:
        folder.claim("receive")
        folder.claim("receive")
        with pytest.raises(ArgumentError, match=r"TG-RECEIVE-011: .*written by tracegrad receive"):
            folder.claim("pull")
    database = sqlite3.connect(out / folders.HIDDEN / "spans.sqlite")
    database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(FormatError, match=r"TG-RECEIVE-003: .*version 9"), TraceFolder(out):
        pass
    (out / folders.HIDDEN / "spans.sqlite").write_text("no database of SQLite, and longer than its first page" * 99)
    with pytest.raises(FormatError, match="TG-RECEIVE-003"), TraceFolder(out):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(TracegradError, match="TG-RECEIVE-001"), TraceFolder(tmp_path / "file" / "o"):
        pass
    with TraceFolder(tmp_path / "p") as folder:
        folder.add(spans(span(1, 1)))
        (tmp_path / "p" / "traces-00001.jsonl").mkdir()
        with pytest.raises(TracegradError):
            folder.write_whole(0, 0)
        (tmp_path / "p" / "traces-00001.jsonl").rmdir()
        assert folder.write_whole(0, 0) == 1
