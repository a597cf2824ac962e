"""Files of strangers: bombs, pipes, files that change while they are read, and text that steers a terminal."""

import contextlib
import gzip
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import unicodedata
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from peak import PEAK
from trace_lines import line, save
from tracegrad import errors
from tracegrad.alignment.align import align
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.cli import main
from tracegrad.config import Data
from tracegrad.data import read, stream
from tracegrad.data.arrow import from_arrow
from tracegrad.data.arrow_files import ParquetStream
from tracegrad.data.parquet_footer import row_groups
from tracegrad.data.trace import Traces, write
from tracegrad.errors import FormatError, ReadError, TracegradError, escape_terminal
from tracegrad.prepare import prepare

MIB = 1 << 20


def limited(code, *arguments, cpu=20):
    """What a process of its own prints that may use so many seconds of a processor."""
    head = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_CPU, ({cpu}, {cpu}))\n"
        "from tracegrad.data import read, stream\n"
        "from tracegrad.errors import TracegradError\n"
        "before = peak()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", PEAK + head + code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    return done.stdout.split()


def repeated(compress, head, part, times, tail):
    """A file of members or frames: the same part again and again costs its maker nothing."""
    return compress(head) + compress(part) * times + compress(tail)


def test_blanks_before_the_first_record_take_linear_time_and_no_memory(tmp_path):
    pack = zstandard.ZstdCompressor().compress
    paths = [
        save(tmp_path, repeated(pack, b"\n", blank * (8 * MIB), 25, b"\n" + line()), name)
        for name, blank in [("breaks.zst", b"\n"), ("spaces.zst", b" ")]
    ]
    code = "for path in sys.argv[1:]: print(len(read(path)))\nprint(peak() - before)"
    *counts, mib = limited(code, *paths)
    assert counts == ["1", "1"]
    assert float(mib) < 64
    with pytest.raises(FormatError, match=r"TG-READ-007.*:2: .*1000000"):
        read(paths[1], max_record_bytes=1_000_000)


def test_a_record_beyond_the_limit_takes_no_more_memory_than_the_limit(tmp_path):
    long, good = b"x" * (4 * MIB), line("b")
    event = b"data: " + b"x" * (MIB - 8) + b"\n\n"
    zstd = zstandard.ZstdCompressor().compress

    def members(data):
        return gzip.compress(data, 1)

    files = {
        "plain": (b'{"a": "' + long * 16 + b'"}\n' + good, 32),
        "lines.gz": (repeated(members, b'{"a": "', long, 40, b'"}\n' + good), 64),
        "array.zst": (repeated(zstd, b'[{"a": "', long, 40, b'"},' + good + b"]"), 64),
        "text.zst": (repeated(zstd, b'["', long, 40, b'",' + good + b"]"), 64),
        "events.zst": (repeated(zstd, b"data: x\n\n", event, 160, b"data: [DONE]\n" + good), 64),
    }
    code = (
        "path, limit = sys.argv[1], int(sys.argv[2])\n"
        "traces = read(path, on_error='skip', max_record_bytes=limit << 20)\n"
        "assert [t.id for t in traces] == ['b'], path\n"
        "assert traces.read_report.reasons == {'too_long': 1}, traces.read_report\n"
        "print(peak() - before - limit)"
    )
    # A process each: the allocator may keep what one read gave back until the next asks for it.
    each = {name: limited(code, save(tmp_path, data, name), limit) for name, (data, limit) in files.items()}
    beyond = {name: float(said[0]) for name, said in each.items()}
    assert max(beyond.values()) <= 64, beyond


def test_a_window_of_two_gigabytes_is_refused(tmp_path):
    # Magic, no content size, a window of 2^(10 + 21), and one last raw block.
    record = line()
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + (len(record) << 3 | 1).to_bytes(3, "little") + record
    path = save(tmp_path, frame, "window.zst")
    with pytest.raises(ReadError, match=r"TG-READ-010.*window\.zst: .*2\^31"):
        read(path)
    assert len(read(path, max_record_bytes=3 << 30)) == 1


def test_what_stands_behind_a_gzip_member_is_an_error_at_its_place(tmp_path):
    for behind in (b"garbage", b"\x00" * 512, gzip.compress(line("c"))[:-9]):
        path = save(tmp_path, gzip.compress(line() + b"\n" + line("b") + b"\n") + behind, "x.gz")
        with pytest.raises(ReadError, match=r"TG-READ-013.*x\.gz:3: "):
            read(path)
        traces = read(path, on_error="skip")
        assert [trace.id for trace in traces][:2] == ["a", "b"]
        assert traces.read_report.reasons == {"stream": 1}


def fed(path, data):
    def write():
        with open(path, "wb") as pipe:
            pipe.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_pipe_is_read_and_nothing_of_it_is_lost_on_the_way(tmp_path, example):
    write(read(example / "traces.jsonl.zst", limit=40), tmp_path / "some.jsonl.zst")
    data = (tmp_path / "some.jsonl.zst").read_bytes()
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for use in (
        lambda: len(read(path)),
        lambda: prepare(str(path), example / "model", Data(), tmp_path / "out").traces,
    ):
        thread = fed(path, data)
        assert use() == 40
        thread.join()


def test_what_is_no_file_is_named(tmp_path):
    bound = socket.socket(socket.AF_UNIX)
    with contextlib.chdir(tmp_path) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        bound.bind(str(tmp_path / "socket"))
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    said = {
        "socket": "TG-READ-011",
        "dangling": "TG-READ-011",
        "loop": "TG-READ-011",
        ".": r"TG-DATA-037.*dangling.*loop.*socket",
    }
    for name, what in said.items():
        with pytest.raises(ReadError, match=what):
            read(tmp_path / name)
    bound.close()
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(ReadError, match=rf"TG-READ-008.*{device}"):
            read(device)


def test_a_file_that_changes_while_it_is_read_is_read_as_far_as_it_goes(tmp_path):
    path = save(tmp_path, b"\n".join(line(str(i), x="y" * 2000) for i in range(2000)) + b"\n")
    size = path.stat().st_size
    traces = stream(path, batch=10, chunk_bytes=1000)
    assert len(next(traces)) == 10
    with open(path, "ab") as more:
        more.write(line("late") + b"\n")
    assert sum(map(len, traces)) == 1991
    for length in (0, size // 2):
        save(tmp_path, b"\n".join(line(str(i), x="y" * 2000) for i in range(2000)) + b"\n")
        traces = stream(path, batch=10, chunk_bytes=1000)
        assert len(next(traces)) == 10
        os.truncate(path, length)
        try:
            assert sum(map(len, traces)) < 1990
        except TracegradError as error:
            assert error.line is not None  # noqa: PT017, the record that was cut


def test_a_parquet_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    rows = [{"prompt_ids": [1], "completion_ids": list(range(300))} for _ in range(1500)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100, compression="none", use_dictionary=False)
    code = (
        "import os; from tracegrad.data.arrow_files import ParquetStream\n"
        "traces = ParquetStream(sys.argv[1], batch=100)\n"
        "print(len(next(traces)))\n"
        "os.truncate(sys.argv[1], 10_000)\n"
        "try: print(sum(map(len, traces)))\n"
        "except TracegradError as error: print(type(error).__name__)"
    )
    assert limited(code, path) == ["100", "ReadError"]


SAMPLE = json.dumps(
    {"id": 1, "epoch": 1, "input": "?", "output": {}, "scores": {}}
    | {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]}
).encode()


def archive(tmp_path, name, names, *, shared=False, extra=b""):
    """A zip64 of members that all hold one sample, the same bytes of the file if they are shared."""
    checksum = zlib.crc32(SAMPLE)

    def local(name):
        sizes = (checksum, len(SAMPLE), len(SAMPLE), len(name), 0)
        return struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, *sizes) + name + SAMPLE

    def entry(name, at):
        sizes = (checksum, len(SAMPLE), len(SAMPLE), len(name), len(extra))
        return struct.pack("<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, at) + name + extra

    path, places, at = tmp_path / name, [], 0
    with open(path, "wb") as file:
        for number, each in enumerate(names):
            if not (shared and number):
                at = file.tell()
                file.write(local(each))
            places.append(at)
        start = file.tell()
        file.writelines(map(entry, names, places))
        end, count = file.tell(), len(names)
        file.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, end - start, start))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0))
    return path


def test_a_log_whose_list_of_members_does_not_fit_is_refused_before_it_is_read(tmp_path):
    paths = [
        archive(tmp_path, "many.eval", [b"samples/%d.json" % each for each in range(300_000)]),
        archive(tmp_path, "one.eval", [b"samples/a.json"] * 300_000, shared=True),
        archive(tmp_path, "other.eval", [b"x/%d" % each for each in range(340_000)], shared=True),
        archive(tmp_path, "long.eval", [b"samples/%d" % each + b"x" * 60_000 for each in range(300)], shared=True),
        archive(tmp_path, "extra.eval", [b"samples/%d" % each for each in range(300)], extra=b"\x99\x99\0\0" * 15_000),
    ]
    code = (
        "for path in sys.argv[1:]:\n"
        "    try: print(len(read(path)))\n"
        "    except TracegradError as error: print(str(error).split(': ')[2].replace(' ', '_'))\n"
        "print(peak() - before)"
    )
    *said, mib = limited(code, *paths)
    assert said == [
        "its_list_of_members_has_more_than_16,777,216_bytes._It_would_be_in_memory_completely._"
        "Write_the_samples_as_JSONL,_or_as_several_logs."
    ] * len(paths)
    assert float(mib) < 32


def test_members_of_one_name_are_one_sample_and_members_of_the_same_bytes_are_refused(tmp_path):
    assert len(read(archive(tmp_path, "zip64.eval", [b"samples/a/b/%d.json" % each for each in range(70)]))) == 70
    assert len(read(archive(tmp_path, "one.eval", [b"samples/a.json"] * 70, shared=True))) == 1
    with pytest.raises(ReadError, match=r"TG-DATA-018.*same\.eval.*samples/1\.json.*samples/2\.json"):
        read(archive(tmp_path, "same.eval", [b"samples/1.json", b"samples/2.json"], shared=True))
    code = "print(len(read(sys.argv[1])), peak() - before)"
    *count, mib = limited(code, archive(tmp_path, "most.eval", [b"samples/%d.json" % each for each in range(20_000)]))
    assert count == ["20000"]
    assert float(mib) < 200


def bomb(tmp_path, name, table, **options):
    path = tmp_path / name
    pq.write_table(table, path, **options)
    return path


def test_parquet_files_that_grow_beyond_measure_are_refused_before_they_are_read(tmp_path):
    zeros = pa.array(np.zeros(1 << 25, np.int64))
    lists = pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), zeros)
    paths = [
        bomb(tmp_path, "list.parquet", pa.table({"tokens": lists, "x": lists})),
        bomb(
            tmp_path,
            "nulls.parquet",
            pa.table({name: pa.nulls(1 << 23, pa.int64()) for name in "abcde"}),
            row_group_size=1 << 23,
        ),
    ]
    code = (
        "from tracegrad.data.arrow_files import ParquetStream\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(len(next(ParquetStream(path))))\n"
        "    except TracegradError as error: print(str(error).replace(' ', '_'))\n"
        "print(peak() - before)"
    )
    first, second, mib = limited(code, *paths)
    assert "bytes_and_would_be" in first
    assert "bytes_and_would_be" in second
    assert float(mib) < 200, "pyarrow itself has 100"


def zigzag(number, width=0):
    """A count as Thrift has it, padded to a width."""
    number, out = 2 * number, []
    while number or len(out) < max(width, 1):
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out[:-1], out[-1] & 127])


def replace_in_footer(path, old, new):
    """Replace a count of a Parquet file wherever its footer has it, by one that claims less."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert zigzag(old) in data[start:]
    path.write_bytes(data[:start] + data[start:].replace(zigzag(old), zigzag(new, len(zigzag(old)))))


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_page_larger_than_its_footer_says_is_refused_before_it_is_unpacked(tmp_path, dictionary):
    """pyarrow unpacks a page to what its own header says: 16 KB became 2.7 GB."""
    text = "x" * (258 * MIB)
    table = pa.table({"prompt": ["a"], "completion": ["b"], "note": [text]})
    path = bomb(tmp_path, "page.parquet", table, compression="zstd", use_dictionary=dictionary, write_statistics=False)
    group = pq.ParquetFile(path).metadata.row_group(0)
    replace_in_footer(path, group.column(2).total_uncompressed_size, 2000)
    if group.total_byte_size > 1 << 20:
        replace_in_footer(path, group.total_byte_size, 4000)
    assert pq.ParquetFile(path).metadata.row_group(0).column(2).total_uncompressed_size == 2000
    assert path.stat().st_size < 1 << 16
    code = (
        "from tracegrad.data.arrow_files import ParquetStream\n"
        "try: print(len(next(ParquetStream(sys.argv[1]))))\n"
        "except TracegradError as error: print(str(error).replace(' ', '_'))\n"
        "print(peak() - before)"
    )
    told, mib = limited(code, path)
    assert "bytes_and_would_be" in told
    assert float(mib) < 200, "pyarrow itself has 100"


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_pages_are_what_the_footer_says(tmp_path, version, compression):
    """Of files of pyarrow, with small pages, and headers of more than 512 bytes. Dictionaries have values too."""
    rows = [{"prompt": f"{at % 7}" * 900, "completion": str(at), "ids": [at] * (at % 5)} for at in range(3000)]
    options = {"data_page_size": 2000, "data_page_version": version, "compression": compression}
    path = bomb(tmp_path, "pages.parquet", pa.Table.from_pylist(rows), row_group_size=1000, **options)
    for told, seen in zip(row_groups(path), row_groups(path, pages=True), strict=True):
        assert (told.rows, told.file_bytes) == (seen.rows, seen.file_bytes)
        assert all(a <= b <= 2 * a for a, b in zip(told.values, seen.values, strict=True))
        assert seen.values[0] == told.values[0] + 7
        # What is before compression has the headers in the footer's count.
        assert told.uncompressed_bytes == seen.uncompressed_bytes
    assert sum(map(len, ParquetStream(path))) == len(rows)


def test_a_place_where_no_page_begins_is_an_error(tmp_path):
    path = bomb(tmp_path, "page.parquet", pa.table({"prompt": ["a" * 99], "completion": ["b"]}), use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 30 + data[34:])
    with pytest.raises(ReadError, match=r"TG-DATA-010.*page.*4"):
        list(ParquetStream(path))


@pytest.mark.parametrize("values", [1, 1000])
def test_a_column_of_pages_without_values_is_an_error(tmp_path, values):
    """A million headers in a small file would be read for nothing. Written by parquet.thrift."""
    empty = b"\x15\x00" * 3 + b"\x2c\x15\x00\x00\x00"  # a data page of 0 bytes and 0 values
    pages = empty * 3000
    column = b"\x56" + zigzag(values) + b"\x16" + zigzag(1) + b"\x16" + zigzag(len(pages)) + b"\x26" + zigzag(4)
    group = b"\x19\x1c\x3c" + column + b"\x00\x00\x26" + zigzag(1) + b"\x00"
    footer = b"\x49\x1c" + group + b"\x00"
    path = tmp_path / "pages.parquet"
    path.write_bytes(b"PAR1" + pages + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    [told] = row_groups(path)
    assert (told.rows, told.values, told.file_bytes, told.uncompressed_bytes) == (1, [values], [len(pages)], [1])
    with pytest.raises(ValueError, match="pages"):
        list(row_groups(path, pages=True))


def test_a_text_that_many_rows_share_is_held_once(tmp_path):
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2048, np.int32)), pa.array(["x" * MIB]))
    table = pa.table({"prompt": text, "completion": pa.array(["y"] * 2048)})
    path = bomb(tmp_path, "text.parquet", table)
    code = (
        "from tracegrad.data.arrow_files import ParquetStream\n"
        "print(len(next(ParquetStream(sys.argv[1], batch=128))), peak() - before)"
    )
    rows, mib = map(float, limited(code, path))
    # 128 records of 1 MiB each, their text in a message of each, and pyarrow.
    assert rows == 128
    assert mib < 600


def multiplied(name):
    """A column of few bytes whose rows have more than any memory, each by another way of Arrow's to share bytes."""
    zeros, text = np.zeros(1 << 20, np.int32), pa.array(["x" * (64 << 10)])
    whole = pa.array([0, len(zeros)], pa.int32())
    shared = pa.DictionaryArray.from_arrays(zeros.astype(np.int8), text)
    if name == "dictionary":
        return pa.ListArray.from_arrays(whole, shared)
    if name == "dictionaries":
        lists = pa.ListArray.from_arrays(whole, shared)
        return pa.ListArray.from_arrays(whole, pa.DictionaryArray.from_arrays(zeros.astype(np.int8), lists))
    if name == "structs":
        return pa.StructArray.from_arrays([pa.ListArray.from_arrays(whole, shared)] * 2, ["a", "b"])
    if name == "map":
        return pa.MapArray.from_arrays(whole, pa.array(["k"] * len(zeros)), shared)
    if name == "fixed":
        return pa.FixedSizeListArray.from_arrays(shared, len(zeros))
    if name == "runs":
        return pa.RunEndEncodedArray.from_arrays(pa.array([1 << 14], pa.int32()), text)
    if name == "union":
        return pa.UnionArray.from_dense(pa.array(zeros[: 1 << 14].astype(np.int8)), pa.array(zeros[: 1 << 14]), [text])
    if name == "list views":
        lists = text
        for _ in range(3):
            sizes = pa.array(np.full(300, len(lists), np.int32))
            lists = pa.ListViewArray.from_arrays(pa.array(zeros[:300]), sizes, lists)
        return lists
    views = np.array([[64 << 10, 0x78787878, 0, 0]] * (1 << 14), np.int32)
    return pa.Array.from_buffers(pa.string_view(), 1 << 14, [None, pa.py_buffer(views), text.buffers()[2]])


MULTIPLIED = ["dictionary", "dictionaries", "structs", "map", "fixed", "runs", "union", "list views", "text views"]


SLOW = ("union", "text views")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in SLOW else name for name in MULTIPLIED]
)
@pytest.mark.first_cases(2)
def test_columns_whose_values_multiply_are_refused_before_they_are_written_out(tmp_path, name):
    if name in ("runs", "list views", "text views") and not hasattr(pa, "ListViewArray"):
        pytest.skip("this pyarrow has no such type")
    column = multiplied(name)
    table = pa.table({"prompt": column, "completion": column})
    path = tmp_path / "rows.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    code = (
        "import pyarrow.parquet, pyarrow.compute\n"
        "before = peak()\n"
        "try: print(sum(map(len, stream(sys.argv[1]))))\n"
        "except TracegradError as error: print(str(error).replace(' ', '_'))\n"
        "print(peak() - before)"
    )
    said, mib = limited(code, path, cpu=60)
    assert re.search(r"rows\.arrow:\d+:.*(become.*bytes|its_records_have_more)", said), said
    # No batch of the last three alone grows too far, so that some are read, of 128 MiB of text each.
    is_read = name in ("runs", "union", "text views")
    assert float(mib) < (1200 if is_read else 400)
    if not is_read:
        with pytest.raises(FormatError, match=r"TG-DATA-003.*<table>:1"):
            from_arrow(table)


def saved(folder, table, state=None, name="data-00000-of-00001.arrow"):
    """A folder as `datasets` saves it: a stream, and which files it has."""
    folder.mkdir()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": name}]} if state is None else state
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_without_datasets(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "completion": ["c", "d"]})
    folder = saved(
        tmp_path / "saved", table, {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.bin"}]}, "a.bin"
    )
    (folder / "b.arrow").write_bytes((folder / "a.bin").read_bytes())
    (folder / "other.arrow").write_bytes(b"none of it")
    found, modules = limited("print(sum(map(len, stream(sys.argv[1]))), 'datasets' in sys.modules)", folder)
    assert (found, modules) == ("4", "False")


@pytest.mark.parametrize("name", ["data.arrow", "data.bin"])
def test_a_saved_dataset_that_unpacks_beyond_measure_is_refused_before_it_is_unpacked(tmp_path, name):
    """Whatever its files are called: those that are named are read."""
    text = pa.table({"prompt": pa.array(["x" * (258 * MIB)])})
    folder = saved(tmp_path / "saved", text, name=name)
    assert (folder / name).stat().st_size < 1 << 17
    code = (
        "before = peak()\n"
        "try: print(sum(map(len, stream(sys.argv[1]))))\n"
        "except TracegradError as error: print(str(error).replace(' ', '_'))\n"
        "print(peak() - before)"
    )
    told, mib = limited(code, folder)
    assert "bytes_and_would_be" in told
    assert float(mib) < 200


def test_a_saved_dataset_whose_state_is_strange_is_an_error(tmp_path):
    table = pa.table({"prompt": ["a"], "completion": ["b"]})
    saved(tmp_path / "elsewhere", table)
    strange = [
        [],
        {},
        {"_data_files": None},
        {"_data_files": ["a"]},
        {"_data_files": [{}]},
        {"_data_files": [{"filename": 3}]},
        {"_data_files": [{"filename": "a\0b"}]},
        {"_data_files": [{"filename": ""}]},
        {"_data_files": [{"filename": ".."}]},
        {"_data_files": [{"filename": "../elsewhere/data-00000-of-00001.arrow"}]},
        {"_data_files": [{"filename": str(tmp_path / "elsewhere" / "data-00000-of-00001.arrow")}]},
        {"_data_files": [{"filename": "missing.arrow"}]},
        {"_data_files": [{"filename": "pipe"}]},
        {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]},
    ]
    for number, state in enumerate(strange):
        folder = saved(tmp_path / f"{number}", table, state)
        os.mkfifo(folder / "pipe")
        with pytest.raises((FormatError, ReadError)) as caught:
            read(folder)
        assert str(folder) in str(caught.value), state


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_batches_that_unpack_beyond_measure_are_refused_before_they_are_unpacked(tmp_path, new):
    zeros = pa.array(np.zeros(33 * MIB, np.int64))
    lists = pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), zeros)
    text = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["x" * (300 * MIB)]))
    tables = {
        "values": pa.table({"prompt_ids": lists}),
        "dictionary": pa.table({"prompt": text}),
        "nulls": pa.table({"prompt": pa.nulls(1 << 26)}),
    }
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    for name, table in tables.items():
        path = tmp_path / f"{name}.arrow"
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as out:
            out.write_table(table)
    code = (
        "import pyarrow.parquet\n"
        "before = peak()\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(len(read(path)))\n"
        "    except TracegradError as error: print(str(error).split(': ')[2].replace(' ', '_'))\n"
        "print(peak() - before)"
    )
    *said, mib = limited(code, *(tmp_path / f"{name}.arrow" for name in tables))
    assert all("bytes_and_would_be" in each for each in said), said
    assert float(mib) < 64
    good = pa.table({"prompt": ["a", "b"], "completion": pa.array(["c", "d"]).dictionary_encode()})
    path = tmp_path / "good.arrow"
    with pa.OSFile(str(path), "wb") as file, new(file, good.schema, options=options) as out:
        for _ in range(3):
            out.write_table(good)
    assert len(read(path)) == 6
    data = path.read_bytes()
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place] + b"\xff\xff\xff\x7f" + data[place + 4 :])
        with contextlib.suppress(TracegradError):
            read(path)


def test_small_dictionaries_views_and_runs_are_read_as_they_are():
    prompts = pa.array(["a", "b"])
    columns = [pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1], pa.int32()), prompts)]
    if hasattr(pa, "ListViewArray"):
        columns += [
            columns[0].cast(pa.string()).cast(pa.string_view()),
            pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3, 4], pa.int32()), pa.array(["a", "b", "a", "b"])),
        ]
    for column in columns:
        traces = from_arrow(pa.table({"prompt": column, "completion": ["x"] * 4}))
        assert [json.loads(trace.record)["prompt"] for trace in traces] == ["a", "b", "a", "b"]


def test_a_footer_that_claims_rows_without_values_is_refused(tmp_path):
    path = bomb(tmp_path, "rows.parquet", pa.table({"prompt": ["a"], "completion": ["b"]}))
    data = path.read_bytes()
    # thrift: num_rows of file and row group is a zigzag varint, 1 is 0x02; claim 2^40 rows in each place it may stand.
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    varint = b"\x80\x80\x80\x80\x80\x80\x01"[:6] + b"\x01"
    claimed = 0
    for at in range(start, len(data) - 8):
        if data[at] != 2:
            continue
        footer = data[start:at] + varint + data[at + 1 : -8]
        path.write_bytes(data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
        try:
            found = sum(map(len, ParquetStream(path)))
            assert found <= 1
        except TracegradError as error:
            claimed += "claims" in str(error)
    assert claimed >= 1


def test_arrow_tables_that_lie_or_nest_without_end_are_refused():
    kind = pa.int64()
    for _ in range(500):
        kind = pa.list_(kind)
    with pytest.raises(FormatError, match=r"TG-DATA-006.*100"):
        from_arrow(pa.table({"a": pa.nulls(1, kind)}))
    offsets = pa.array([0, 1 << 30, 1], pa.int32()).buffers()[1]
    lying = pa.Array.from_buffers(pa.list_(pa.int64()), 2, [None, offsets], children=[pa.array([1])])
    with pytest.raises(FormatError, match="TG-DATA-007"):
        from_arrow(pa.table({"prompt_ids": lying, "completion_ids": lying}))
    with pytest.raises(FormatError, match="TG-DATA-005"):
        from_arrow(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))
    far = pa.array([1 << 62], pa.timestamp("s"))
    with pytest.raises(FormatError, match="TG-DATA-004"):
        from_arrow(pa.table({"a": far}))


@pytest.mark.parametrize("depth", [200, 100_000])
def test_nesting_is_bounded_for_objects_of_python_too(depth):
    nested = []
    for _ in range(depth):
        nested = [nested]
    record = {"messages": [{"role": "user", "content": "?"}], "metadata": nested}
    with pytest.raises(FormatError, match=r"TG-(FORMAT-030|DATA-041).*<records>:1.*128"):
        Traces.from_records([record])
    while nested:  # Freed level by level.
        nested = nested.pop()


STEERING = "".join(
    map(chr, [*range(32), *range(127, 160), 0x61C, 0xFEFF, *range(0x200B, 0x2010), *range(0x2028, 0x202F)])
)
STEERING += "".join(map(chr, range(0x2066, 0x206A)))
hostile = st.text(st.one_of(st.sampled_from(STEERING), st.characters()), max_size=12)


def steers(text):
    """What Unicode says of it: controls, formats, breaks of lines and paragraphs."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs") or c in STEERING]


def test_the_core_and_python_escape_the_same_characters():
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    with pytest.raises(FormatError) as caught:
        Traces.from_records([{"id": everything, "messages": 5}])
    assert f"trace '{escape_terminal(everything)}'" in Exception.__str__(caught.value)
    assert caught.value.trace == everything
    assert escape_terminal(everything).isprintable() or not steers(escape_terminal(everything))


@given(hostile, st.sampled_from([getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]))
def test_no_error_shows_what_steers_a_terminal(text, kind):
    assert not steers(str(kind(f"a {text} b")))
    assert str(kind(escape_terminal(text))) == escape_terminal(text), "once is enough"


@settings(max_examples=60)
@given(hostile, hostile, st.integers(0, 6))
def test_no_message_about_a_record_shows_what_steers_a_terminal(text, other, place):
    bad = [
        {"id": text, "messages": [{"role": "user"}], "reward": other},
        {"id": text, "messages": {text: other}},
        {text or "x": other},
        {"id": text, "format": "tracegrad/" + other},
        {"id": text, "messages": [{"role": "assistant", "content": other, "logprobs": {text: other}}]},
        {"id": text, "response": f"data: {text}\n\n{other}"},
        {"prompt_ids": [1], "completion_ids": [2], "reward": {text: 1e39}},
    ][place]
    with contextlib.suppress(FormatError):
        Traces.from_records([bad])
        return
    with pytest.raises(FormatError) as caught:
        Traces.from_records([bad])
    assert not steers(str(caught.value))


def test_the_command_line_shows_strangers_text_as_escapes(example, tmp_path, capsys):
    evil = "\x1b]0;owned\x07\u202e\u2066\x9b2J\u2028\ufeff"
    folder = tmp_path / evil
    folder.mkdir()
    good = {"id": evil, "group": evil, "model": evil, "messages": [{"role": "user", "content": evil}]}
    said = {"role": evil, "content": evil}
    records = [good, {**good, "messages": [said]}, {"id": evil, "messages": 5}, {evil: 1}]
    path = folder / f"{evil}.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    model = str(example / "model")
    for arguments in (
        ["prepare", str(path), "--model", model, "--out", str(folder / "a")],
        ["prepare", str(path), "--model", model, "--out", str(folder / "b"), "--on-error", "skip"],
        ["prepare", str(path), "--model", model, "--out", str(folder / "c"), "--on-error", "quarantine"],
        ["doctor", str(path), "--model", model],
        ["prepare", str(folder / "none"), "--model", model, "--out", str(folder / "d")],
        ["train", str(path), "--model", model, "--out", str(folder / "e"), f"--{evil}.x", "1"],
    ):
        with contextlib.suppress(SystemExit):
            main(arguments)
        captured = capsys.readouterr()
        assert captured.out or captured.err
        assert not steers((captured.out + captured.err).replace("\n", "")), arguments
        assert "\x1b" not in captured.out + captured.err


def test_a_bad_trace_among_others_of_its_id_is_the_one_written_aside(example, tmp_path):
    good = line("same")
    # A variable that the template's own `messages` would be hidden by is refused when the trace is aligned.
    bad = line("same", template_kwargs={"messages": "of the caller"})
    path = save(tmp_path, b"\n".join([bad, good, bad, good]))
    traces = read(path)
    aligned = align(traces, Tokenizer.from_pretrained(example / "model"), on_error="skip")
    assert aligned.alignment_report.left_out == (0, 2)
    assert len(aligned.alignment_report.errors) == 2
    prepare(str(path), example / "model", Data(on_error="quarantine"), tmp_path / "out")
    assert (tmp_path / "out" / "unaligned-00000.jsonl").read_bytes() == (bad + b"\n") * 2


def test_a_trace_without_a_group_stands_alone_whatever_its_id(example):
    said = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]}
    heads = [
        {"id": "a"},
        {"id": "a"},
        {"id": "b", "group": "a"},
        {"id": "c", "group": "a"},
        {"id": "d"},
        {"group": "\x1fa"},
    ]
    traces = Traces.from_records([{**said, **head} for head in heads])
    aligned = align(traces, Tokenizer.from_pretrained(example / "model"), text_only=True)
    assert aligned.group.tolist() == [0, 1, 2, 2, 3, 4]
    assert aligned.group_names == ("a (<records>:1)", "a (<records>:2)", "a", "d (<records>:5)", "\x1fa")
