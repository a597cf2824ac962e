"""Addresses: a real S3 API on loopback, with its own errors."""

import gzip
import json

import pytest

import tracegrad as tg
from buckets import served
from tracegrad.errors import ArgumentError, ReadError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


def line(number):
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(number)}]
    return json.dumps({"id": f"t{number}", "messages": said, "meta": {"r": number}}) + "\n"


@pytest.fixture(scope="module")
def bucket():
    """A bucket with a folder of three files, one of them in gzip and one in Parquet; its address."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    with served() as system:
        system.mkdir("logs")
        many = "".join(map(line, range(3000)))
        system.pipe("logs/day/a.jsonl", many.encode())
        system.pipe("logs/day/b.jsonl.gz", gzip.compress("".join(map(line, range(3000, 3002))).encode()))
        system.pipe("logs/day/notes.md", b"x")
        sink = pa.BufferOutputStream()
        pyarrow.parquet.write_table(pa.Table.from_pylist([json.loads(line(3002))]), sink)
        system.pipe("logs/day/c.parquet", sink.getvalue().to_pybytes())
        yield "s3://logs"


def test_a_folder_a_pattern_and_a_file_of_a_bucket_are_read(bucket):
    said = []
    traces = tg.read(f"{bucket}/day", map={"reward": "meta.r"}, progress=said.append)
    assert [trace.id for trace in traces] == [f"t{number}" for number in range(3003)]
    assert traces[3001].location == (f"{bucket}/day/b.jsonl.gz", 2)
    assert traces[3002].reward == 3002
    assert said[-1].total_bytes > 100_000
    assert said[-1].bytes_read == said[-1].total_bytes
    assert len(tg.read(f"{bucket}/day/*.gz")) == 2
    assert len(tg.read([f"{bucket}/day/a.jsonl", f"{bucket}/day/b.jsonl.gz"])) == 3002
    assert len(tg.read(f"{bucket}/day/a.jsonl", limit=5)) == 5


def test_what_is_not_there_is_said_by_its_address(bucket):
    with pytest.raises(ReadError, match=r"TG-STORE-020.*s3://logs/gone\.jsonl.*FileNotFoundError.*logs/gone\.jsonl"):
        tg.read(f"{bucket}/gone.jsonl")
    with pytest.raises(ReadError, match="TG-DATA-030"):
        tg.read(f"{bucket}/gone-*.jsonl")
    with pytest.raises((ReadError, ArgumentError), match=r"TG-STORE-020.*nosuch"):
        tg.read("nosuch://a/b.jsonl")


def breaks_off(monkeypatch):
    """Files in memory end with an error behind their first block; returns the sizes that were asked for since."""
    from fsspec.implementations.memory import MemoryFile

    from tracegrad.data import sources

    blocks, real = [], MemoryFile.read

    def read(self, size=-1):
        blocks.append(size)
        if blocks.count(sources.BLOCK) > 1:
            raise OSError("cut")
        return real(self, size)

    monkeypatch.setattr(MemoryFile, "read", read)
    return blocks


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_address_that_breaks_off_in_the_middle_is_an_error(monkeypatch, on_error):
    import fsspec

    fsspec.filesystem("memory").pipe("/t.jsonl", "".join(map(line, range(30000))).encode())
    assert len(tg.read("memory://t.jsonl")) == 30000
    breaks_off(monkeypatch)
    with pytest.raises(ReadError, match=r"TG-STORE-020.*memory:///t\.jsonl.*OSError.*cut"):
        tg.read("memory://t.jsonl", on_error=on_error)


def test_bad_records_do_not_count_towards_the_limit_of_an_address_that_breaks_off(monkeypatch):
    import fsspec

    from tracegrad.data import sources

    bad = '{"none": "of ours"}' + " " * (len(line(10_000)) - 20) + "\n"
    fsspec.filesystem("memory").pipe("/mixed.jsonl", "".join(bad + line(n) for n in range(30000)).encode())
    blocks = breaks_off(monkeypatch)
    records = sources.BLOCK // len(line(10_000))  # that came before it broke off; every other one is bad
    with pytest.raises(ReadError, match=r"TG-STORE-020.*OSError.*cut"):
        tg.read("memory://mixed.jsonl", on_error="skip", limit=records * 3 // 4)
    blocks.clear()
    assert len(tg.read("memory://mixed.jsonl", on_error="skip", limit=records // 4)) == records // 4


def test_an_address_that_breaks_off_is_an_error(bucket, monkeypatch):
    import s3fs

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", lambda *_: (_ for _ in ()).throw(OSError("cut")))
    with pytest.raises(ReadError, match=r"TG-STORE-020.*s3://logs/day/a\.jsonl"):
        tg.read(f"{bucket}/day/a.jsonl")
