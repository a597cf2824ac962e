"""Records of an uncompressed file are left in it: read again on demand, and never other bytes than those first read."""

import copy
import gzip
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad.data import read
from tracegrad.data.trace import Traces, write
from tracegrad.errors import ReadError

LONG = 64 << 10
"""A file of so many bytes is not kept in memory."""
FEW_FILES = 64
"""So many files stay open."""


def line(name, size=LONG // 4):
    messages = [{"role": "user", "content": "é" * (size // 2)}, {"role": "assistant", "content": "4"}]
    return json.dumps({"id": name, "messages": messages, "reward": 1}, ensure_ascii=False).encode()


def lines(count=6, size=LONG // 4):
    return [line(f"t{number}", size) for number in range(count)]


def records(traces):
    return [trace.record for trace in traces]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"\n".join(lines()) + b"\n")
    return path


def overwrite(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.skipif(sys.platform != "linux", reason="a process says there what memory it has")
def test_the_bytes_of_records_are_not_in_memory(tmp_path):
    path = tmp_path / "big.jsonl"
    filler = json.dumps({"messages": [{"role": "user", "content": "?"}], "unread": "x" * (1 << 20)}).encode()
    path.write_bytes(b"\n".join([filler] * 32))
    code = """if True:
        import sys, tracegrad as tg
        def resident():
            words = open("/proc/self/status").read().split()
            return int(words[words.index("VmRSS:") + 1]) << 10
        tg.read(sys.argv[2])
        before = resident()
        traces = tg.read(sys.argv[1])
        assert len(traces) == 32 and len(traces[5].record) > 1 << 20
        print(resident() - before)
    """
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"\n".join([filler] * 8))
    alone = {**os.environ, "RAYON_NUM_THREADS": "1"}  # on several threads a chunk or two of blocks are held meanwhile
    command = [sys.executable, "-c", code, path, few]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 12 << 20, "of 32 MiB"


def test_a_file_without_a_name_and_one_that_another_took_the_name_of_are_read_on(path, tmp_path):
    wanted = lines()
    traces = read(path)
    (tmp_path / "other").write_bytes(b"{}" * LONG)
    os.replace(tmp_path / "other", path)
    assert records(traces) == wanted
    path.unlink()
    assert records(traces) == wanted
    write(traces, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == b"\n".join(wanted) + b"\n"


def test_traces_are_written_over_the_file_they_came_from(path):
    traces = read(path)
    write(traces[1:], path)
    assert records(traces) == lines()
    assert path.read_bytes() == b"\n".join(lines()[1:]) + b"\n"


def test_another_byte_is_an_error_with_its_place_and_the_other_records_stand(path, tmp_path):
    wanted = lines()
    traces = read(path)
    begin = len(wanted[0]) + 1
    overwrite(path, begin + 2000, b"e")
    with pytest.raises(ReadError, match=r"TG-CORE-002.*runs\.jsonl:2 trace 't1': "):
        _ = traces[1].record
    assert records(traces[2:]) == wanted[2:]
    assert traces[1].messages[1]["content"] == "4", "what was decoded is in memory"
    for spoilt in (
        lambda: write(traces, tmp_path / "out.jsonl"),
        lambda: pickle.dumps(traces),
        lambda: traces == traces[:],
        lambda: hash(traces[1]),
        lambda: traces[1].to_dict(),
    ):
        with pytest.raises(ReadError, match="TG-CORE-002"):
            spoilt()
    assert not (tmp_path / "out.jsonl").exists()
    overwrite(path, begin + 2000, wanted[1][2000:2001])
    assert records(traces) == wanted


def test_bytes_that_moved_are_an_error(path):
    traces = read(path)
    with path.open("r+b") as file:
        whole = file.read()
        file.seek(0)
        file.write(b"\n" + whole)
    with pytest.raises(ReadError, match="TG-CORE-002"):
        _ = traces[0].record


def test_a_file_that_was_cut_is_an_error(path):
    traces = read(path)
    os.truncate(path, len(lines()[0]) + 10)
    assert traces[0].record == lines()[0]
    for trace in traces[1:]:
        with pytest.raises(ReadError, match=r"TG-CORE-002.*trace"):
            _ = trace.record
    with path.open("ab") as file:
        file.write(b"\0" * 10 * LONG)
    with pytest.raises(ReadError, match="TG-CORE-002"):
        _ = traces[1].record


def test_a_file_that_grows_is_the_same_file(path):
    traces = read(path)
    with path.open("ab") as file:
        file.write(line("more"))
    assert records(traces) == lines()


def test_copies_and_pickles_have_the_bytes(path):
    traces = read(path)
    told, copied, part = pickle.dumps(traces), copy.deepcopy(traces), traces[2:4] + traces[:1]
    path.unlink()
    assert records(part) == [lines()[at] for at in (2, 3, 0)]
    assert records(copied) == records(traces[:]) == lines()
    del traces, copied, part
    assert records(pickle.loads(told)) == lines()


def test_threads_read_the_same_file(path):
    traces = read(path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: traces[at % 6].record, range(600)))
    assert found == [lines()[at % 6] for at in range(600)]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_what_was_compressed_is_kept(path, pack):
    path.write_bytes(pack(path.read_bytes()))
    traces = read(path)
    path.write_bytes(b"")
    assert records(traces) == lines()


def test_what_came_from_a_pipe_is_kept(path):
    code = "import tracegrad as tg; print(*map(len, (trace.record for trace in tg.read('-'))))"
    with path.open("rb") as file:
        piped = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        done = subprocess.run([sys.executable, "-c", code], stdin=piped.stdout, capture_output=True, check=True)
        piped.wait()
    assert done.stdout.split() == [str(len(each)).encode() for each in lines()]


def test_a_small_file_is_kept(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_bytes(line("a", 100))
    traces = read(path)
    path.write_bytes(b"")
    assert records(traces) == [line("a", 100)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="a process says there which files it has open")
def test_of_many_files_a_few_stay_open_and_the_others_are_opened_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{number:03}.jsonl" for number in range(FEW_FILES + 20)]
    for name in names:
        Path(name).write_bytes(line(name, LONG))

    def opened():
        found = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        return sum(name.endswith(".jsonl") for name in found)

    before = opened()
    traces = Traces.concatenate([read(name) for name in names])
    assert opened() - before <= FEW_FILES
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert records(traces) == [line(name, LONG) for name in names]
    last = tmp_path / names[-1]
    last.write_bytes(line(names[-1], LONG).replace("é".encode(), "è".encode(), 1))
    with pytest.raises(ReadError, match=r"TG-CORE-002.*083\.jsonl:1.*trace.*083\.jsonl"):
        _ = traces[-1].record
    last.unlink()
    with pytest.raises(ReadError, match=r"TG-CORE-002.*083\.jsonl:1.*trace.*083\.jsonl"):
        _ = traces[-1].record
    os.mkfifo(last)
    with pytest.raises(ReadError, match="TG-CORE-002"):
        _ = traces[-1].record
    del traces
    assert opened() == before


PIECES = st.sampled_from(
    [
        *(line("r", size) for size in (10, 300, 70_000, 300_000)),
        b'{"messages": 5}',
        b'{"messages": [{"role": "user", "content": "]}\\",[{ \\u00e9"}]}',
    ]
)
BETWEEN = st.sampled_from([b"\n", b"\r\n", b"\n \n", b",\n"])
STREAM = b'data: {"choices":[{"delta":{"content":"4"},"finish_reason":"stop"}]}\n\ndata: [DONE]'


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(PIECES, BETWEEN), min_size=1, max_size=12),
    st.sampled_from(["lines", "array", "pretty", "events"]),
    st.booleans(),
    st.sampled_from([1000, 100_000, 1 << 30]),
    st.sampled_from([1, 5000, 8 << 20]),
)
def test_what_is_left_on_disk_is_what_is_kept_of_a_compressed_file(
    tmp_path_factory, parts, layout, marked, most, chunk
):
    path = tmp_path_factory.mktemp("left") / "a.jsonl"
    if layout == "array":
        text = b" [ " + b" ,\n ".join(each for each, _ in parts) + b"\n]\n"
    elif layout == "pretty":
        text = b"\n".join(json.dumps(json.loads(each), indent=1, ensure_ascii=False).encode() for each, _ in parts)
    else:
        text = b"".join(each + gap for each, gap in parts)
    if layout == "events":
        text = text.rstrip(b",\n") + b"\n" + STREAM + b"\n" + text
    text = (b"\xef\xbb\xbf\n " if marked else b"") + text + b"\n" * LONG
    path.write_bytes(text)
    path.with_suffix(".gz").write_bytes(gzip.compress(text, 1))
    found = []
    for name in (path, path.with_suffix(".gz")):
        try:
            traces = read(name, on_error="skip", max_record_bytes=most, chunk_bytes=chunk)
        except ReadError as error:
            found.append(str(error).replace(".gz", ".jsonl"))
            continue
        found.append([(trace.location[1], trace.record) for trace in traces])
    assert found[0] == found[1]
