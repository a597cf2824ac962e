"""Everything that can be named as input gives the same traces, located in its own files."""

import contextlib
import gzip
import io
import json
import sqlite3
import subprocess
import sys
import threading

import pytest

import tracegrad as tg
from tracegrad.data import Progress, ProgressBar
from tracegrad.errors import ArgumentError, FormatError, ReadError


def record(number: int, **more):
    said = [
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": str(number), "token_ids": [number]},
    ]
    return {"id": f"t{number}", "messages": said, "reward": number % 2, **more}


def written(path, numbers, **more):
    lines = "".join(json.dumps(record(number, **more)) + "\n" for number in numbers)
    data = lines.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def ids(traces):
    return [trace.id for trace in traces]


@pytest.fixture
def folder(tmp_path):
    here = tmp_path / "logs"
    (here / "day2").mkdir(parents=True)
    written(here / "a.jsonl", range(3))
    written(here / "b.jsonl.gz", range(3, 5))
    written(here / "day2" / "c.jsonl", range(5, 7))
    (here / "notes.md").write_text("nothing")
    (here / ".hidden.jsonl").write_text("{")
    (here / "a.jsonl.quarantine.jsonl").write_text("{")
    return here


def test_a_folder_a_pattern_and_several_names_are_read_in_order(folder):
    assert ids(tg.read(folder)) == [f"t{number}" for number in range(7)]
    assert ids(tg.read(str(folder / "*.jsonl*"))) == ["t0", "t1", "t2", "t3", "t4"]
    assert ids(tg.read(f"{folder}/**/c.jsonl")) == ["t5", "t6"]
    both = tg.read([folder / "day2" / "c.jsonl", folder / "a.jsonl"])
    assert ids(both) == ["t5", "t6", "t0", "t1", "t2"]
    assert both.read_report.records == 5
    assert both.read_report.formats["chat"][0] == 5
    assert both[3].location == (str(folder / "a.jsonl"), 2)


def test_a_bad_record_of_the_second_file_is_named_by_its_place(folder):
    (folder / "b2.jsonl").write_text('{"id": "x", "messages": 3}\n')
    with pytest.raises(FormatError, match=r"TG-FORMAT-037.*b2\.jsonl:1"):
        tg.read(folder)
    traces = tg.read(folder, on_error="quarantine", quarantine=folder / "bad")
    assert len(traces) == 7
    assert traces.read_report.bad == 1
    [entry] = [json.loads(line) for path in folder.glob("bad-*.quarantine.jsonl") for line in path.open()]
    assert (entry["file"], entry["line"]) == (str(folder / "b2.jsonl"), 1)


def test_the_limit_counts_over_files(folder):
    assert ids(tg.read(folder, limit=4)) == ["t0", "t1", "t2", "t3"]


def test_empty_files_among_others_are_left_out_and_alone_an_error(folder):
    (folder / "empty.jsonl").write_text("")
    stream = tg.stream(folder)
    assert sum(map(len, stream)) == 7
    assert "1 empty files are left out" in "\n".join(stream.lines())
    with pytest.raises(ReadError, match="TG-READ-005"):
        tg.read(folder / "empty.jsonl")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n \n", "1 files without a record of a call are left out"),
        ('{"span_id": "s", "trace_id": "t", "parent_id": null}\n', "1 records without a call add their values"),
    ],
)
def test_files_without_a_call_among_others_are_left_out_and_alone_an_error(folder, text, line):
    (folder / "a0.jsonl").write_text(text)
    stream = tg.stream(folder)
    assert sum(map(len, stream)) == 7
    assert line in "\n".join(stream.lines())
    with pytest.raises(ReadError, match=r"TG-READ-005|TG-DATA-045"):
        tg.read(folder / "a0.jsonl")
    assert len(tg.read(folder, map={"session": "id"})) == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [("nothing-*.jsonl", "TG-DATA-035"), ("gone.jsonl", r"TG-READ-011.*No.*such"), ("", r"TG-DATA-037.*md")],
)
def test_what_is_not_there_is_said(tmp_path, name, says):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(ReadError, match=says):
        tg.read(f"{tmp_path}/{name}")
    with pytest.raises(ReadError, match="TG-DATA-034"):
        tg.read([])
    with pytest.raises(ArgumentError, match="TG-DATA-032"):
        tg.read(["-", "a.jsonl"])


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.xlsx", "t.csv.gz", "t.pkl"])
def test_a_table_of_text_is_refused_with_the_line_that_converts_it(tmp_path, name):
    (tmp_path / name).write_text("prompt,answer,score\na,b,1\n")
    with pytest.raises(ReadError, match=r"TG-DATA-028.*orient='records.*lines=True"):
        tg.read(tmp_path / name)


def test_a_database_is_refused_with_its_tables_and_the_line_that_converts_one(tmp_path):
    path = tmp_path / "desk's.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        for name in ("sessions", *(f"part{number:02d}" for number in range(13))):
            database.execute(f"CREATE TABLE {name} (id TEXT, messages TEXT)")
        database.execute("INSERT INTO sessions VALUES ('a', ?)", [json.dumps([record(0)])])
        database.commit()
    with pytest.raises(ReadError, match=r"TG-DATA-048.*desk's\.db.*part00, part01.*part11 and 2 others") as refused:
        tg.read(path)
    command = str(refused.value).partition("the result: ")[2].replace("TABLE", "sessions")
    command = command.replace("python -c", f"{sys.executable} -c").replace("> traces.jsonl", "")
    [line] = subprocess.run(command, shell=True, capture_output=True, check=True, text=True).stdout.splitlines()
    assert json.loads(line) == {"id": "a", "messages": json.dumps([record(0)])}
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\0" + bytes(4))
    with pytest.raises(ReadError, match=r"TG-DATA-048.*none can be listed"):
        tg.read(tmp_path / "broken.db")


def test_a_table_under_another_name_is_told_by_its_first_line(tmp_path):
    (tmp_path / "t.jsonl").write_text("prompt,answer,score\na,b,1\n")
    with pytest.raises(ReadError, match=r"TG-DATA-023.*t\.jsonl:1.*prompt,answer,score.*pd\.read_csv"):
        tg.read(tmp_path / "t.jsonl")


def test_tables_datasets_and_records_are_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    rows = [record(number) for number in range(3)]
    table = pa.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "t.arrow", compression="uncompressed")
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    wanted = ["t0", "t1", "t2"]
    for source in (tmp_path / "t.parquet", tmp_path / "t.arrow", tmp_path / "s.arrow", table, rows, iter(rows)):
        traces = tg.read(source)
        assert ids(traces) == wanted, source
        assert traces[2].generations[0].token_ids.tolist() == [2]
        assert ids(tg.read(table, limit=2)) == wanted[:2]
    assert len(tg.read(tmp_path)) == 9
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert ids(tg.read(dataset)) == ids(tg.read(tmp_path / "saved")) == wanted


def test_a_pipe_is_read_while_it_is_written(tmp_path):
    """The first trace comes before the second line is written."""
    import os

    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = threading.Event()

    def write():
        with open(path, "w") as pipe:
            pipe.write(json.dumps(record(0)) + "\n")
            pipe.flush()
            held.wait(20)
            pipe.write(json.dumps(record(1)) + "\n")

    writer = threading.Thread(target=write)
    writer.start()
    stream = tg.stream(path, batch=1)
    assert ids(next(stream)) == ["t0"]
    held.set()
    assert [ids(part) for part in stream] == [["t1"]]
    writer.join()


def test_progress_counts_the_bytes_of_the_files(folder):
    said: list[Progress] = []
    stream = tg.stream(folder, progress=said.append)
    list(stream)
    total = sum(
        path.stat().st_size for path in (folder / "a.jsonl", folder / "b.jsonl.gz", folder / "day2" / "c.jsonl")
    )
    assert said[-1].done
    assert said[-1].total_bytes == total
    assert said[-1].bytes_read == total
    assert said[-1].records == 7
    assert [each.bytes_read for each in said] == sorted(each.bytes_read for each in said)


def test_a_bar_is_one_line_on_a_terminal_and_plain_lines_elsewhere():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now = [0.0]
    for stream, ends in ((Terminal(), "\r"), (io.StringIO(), "\n")):
        bar = ProgressBar(stream, clock=lambda: now[0])
        for second in range(1, 36):
            now[0] += 1
            bar(Progress(second * 10**6, 10**8, second, float(second)))
        now[0] += 5
        bar.repeat()  # nothing was read for five seconds
        bar(Progress(10**8, 10**8, 100, 40.0, done=True))
        lines = [line.rstrip() for line in stream.getvalue().replace("\r", "\n").split("\n") if line.strip()]
        if ends == "\n":  # after 10, 20, 30 and 40 seconds; 35 % in 40 s leave 65 / 35 * 40 = 74 s
            assert lines == [
                "reading  10 %  10 records  10.0 MB  90 s left",
                "reading  20 %  20 records  20.0 MB  80 s left",
                "reading  30 %  30 records  30.0 MB  70 s left",
                "reading  35 %  35 records  35.0 MB  74 s left",
            ]
        else:
            assert (len(lines), lines[0]) == (36, "reading  1 %  1 records  1.0 MB  99 s left")
            assert stream.getvalue().endswith(" " * 20 + "\r")  # erased


def test_a_file_in_a_known_form_does_not_pass_through_python(folder, monkeypatch):
    monkeypatch.setattr("tracegrad.data.reader.InputStream._made", None)
    assert len(tg.read(folder)) == 7


def test_hidden_files_of_a_folder_are_counted_and_named(tmp_path):
    for name in (".aider.llm.history", ".b.jsonl"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".lock").touch()
    with pytest.raises(
        tg.TracegradError, match=r"TG-DATA-037.*2 hidden files, which are.*\(\.aider\.llm\.history, \.b\."
    ):
        tg.read(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    stream = tg.stream(tmp_path)
    assert sum(map(len, stream)) == 1
    assert (
        "2 hidden files are left out (.aider.llm.history, .b.jsonl): name those that you want to read"
        in stream.lines()[0]
    )
