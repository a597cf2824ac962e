"""`tracegrad prepare` on one process and on several: GB/s, cores, memory of a process, and what 100 GB would take.

    python benches/prepare_workers.py --gigabytes 1 --workers 1 2

Input: one file of lines, the bundled example again and again under ids and groups of its own, until it has the size.
Each arm is a separate process, which reads, aligns and writes shards next to the input. It is compared with the least
work that any path needs in Python: orjson parses the records and transformers renders and tokenizes each conversation,
over `--least-megabytes` of the same file; it keeps no logprob, checks nothing and writes nothing. Figures for 100 GB
are computed from the rates, not measured. Memory is the peak of resident bytes, mapped pages of files among them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tracegrad as tg

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart"
MODEL = EXAMPLE / "model"


def write(path: Path, size: int) -> int:
    """A file of about this many bytes; returns its number of records."""
    records = [json.loads(trace.record) for trace in tg.read(EXAMPLE / "traces.jsonl.zst")]
    named = [{**each, "id": f"@round-{each['id']}", "group": f"@round-{each['group']}"} for each in records]
    lines = [json.dumps(each, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" for each in named]
    count = rounds = done = 0
    with path.open("wb") as file:
        while done < size:
            for line in lines:
                done += file.write(line.replace(b'"@round-', f'"{rounds}-'.encode()))
                count += 1
                if done >= size:
                    break
            rounds += 1
    return count


def ours(path: Path, out: Path, workers: int, part: int) -> dict[str, Any]:
    """One arm, in this process and those that it starts."""
    from tracegrad.config import Data
    from tracegrad.prepare import prepare

    began = time.perf_counter()
    account = prepare(str(path), MODEL, Data(), out, workers=workers, part_bytes=part)
    return {"seconds": time.perf_counter() - began, "tokens": account.tokens, "parts": account.parts, **_used()}


def least(path: Path, size: int) -> dict[str, Any]:
    """orjson and transformers."""
    import orjson
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    done = tokens = 0
    before, began = _used()["cpu_s"], time.perf_counter()
    with path.open("rb") as file:
        for line in file:
            record = orjson.loads(line)
            done += len(line)
            tokens += len(tokenizer.apply_chat_template(**_talk(record), return_dict=False))
            if done >= size:
                break
    spent = time.perf_counter() - began
    return {"seconds": spent, "bytes": done, "tokens": tokens, "cpu_s": _used()["cpu_s"] - before}


def _talk(record: dict[str, Any]) -> dict[str, Any]:
    """The conversation of a record as it ended."""
    if "messages" in record:
        return {"conversation": [_plain(each) for each in record["messages"]], "tools": record.get("tools")}
    last = record["calls"][-1]
    answer = last["response"]["choices"][0]["message"]
    return {
        "conversation": [_plain(each) for each in (*last["request"]["messages"], answer)],
        "tools": last["request"].get("tools"),
    }


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: message[key] for key in ("role", "content", "tool_call_id") if message.get(key) is not None}
    calls = [{**each, "function": dict(each["function"])} for each in message.get("tool_calls") or ()]
    for each in calls:
        if isinstance(each["function"].get("arguments"), str):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    return {"content": "", **kept, **({"tool_calls": calls} if calls else {})}


def _used() -> dict[str, Any]:
    own, below = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = own.ru_utime + own.ru_stime + below.ru_utime + below.ru_stime
    return {"cpu_s": cpu, "own_mb": own.ru_maxrss / 1024, "worker_mb": below.ru_maxrss / 1024}


def apart(*told: object) -> dict[str, Any]:
    """Output of an arm, run as a separate process."""
    command = [sys.executable, __file__, "--arm", *map(str, told)]
    own = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=own)
    return json.loads(done.stdout.splitlines()[-1])


def main(told: argparse.Namespace) -> None:
    size = int(told.gigabytes * 1e9)
    rows: list[dict[str, Any]] = []

    def keep(**row: Any) -> None:
        rows.append({key: round(each, 4) if isinstance(each, float) else each for key, each in row.items()})
        if told.out:
            Path(told.out).write_text(json.dumps(rows, indent=1) + "\n")

    with tempfile.TemporaryDirectory(dir=told.folder) as folder:
        path = Path(folder) / "traces.jsonl"
        count = write(path, size)
        size = path.stat().st_size
        keep(arm="input", bytes=size, records=count, cores=os.cpu_count(), part_bytes=told.part_bytes)
        print(
            f"input    {size / 1e9:.2f} GB, {count:,} records; {os.cpu_count()} cores; parts of {told.part_bytes:,} B",
            flush=True,
        )
        load = os.getloadavg()[0]
        found = apart("least", path, int(told.least_megabytes * 1e6))
        rate = found["bytes"] / 1e9 / found["seconds"]
        keep(arm="least", load=load, gb_per_s=rate, **found)
        print(
            f"least    orjson + transformers, 1 process: {rate:.4f} GB/s over {found['bytes'] / 1e6:.0f} MB, "
            f"{found['tokens'] / found['seconds']:,.0f} tokens/s, {found['cpu_s'] / found['seconds']:.2f} cores; load "
            f"before {load:.1f} (computed: 100 GB in {100 / rate / 60:.0f} min)",
            flush=True,
        )
        for workers in told.workers:
            out = Path(folder) / f"out{workers}"
            load = os.getloadavg()[0]
            found = apart("ours", path, out, workers, told.part_bytes)
            rate, cores = size / 1e9 / found["seconds"], found["cpu_s"] / found["seconds"]
            tokens = found["tokens"] / found["seconds"]
            memory = found["worker_mb"] if workers > 1 else found["own_mb"]
            kept = sum(each.stat().st_size for each in out.rglob("*") if each.is_file())
            shutil.rmtree(out)
            keep(arm="ours", workers=workers, load=load, gb_per_s=rate, shards_bytes=kept, **found)
            print(
                f"workers  {workers}: {found['seconds']:.1f} s, {rate:.3f} GB/s, {tokens:,.0f} tokens/s, {cores:.2f} "
                f"cores, {memory:,.0f} MB in the largest process, {kept / 1e9:.2f} GB of shards in {found['parts']} "
                f"parts; load before {load:.1f} (computed: 100 GB in {100 / rate / 60:.1f} min)",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--part-bytes", type=int, default=256 << 20)
    parser.add_argument("--least-megabytes", type=float, default=20.0)
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    parser.add_argument("--folder", help="where input and shards stand meanwhile (default: the system's)")
    parser.add_argument("--arm", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm is None:
        main(given)
    elif given.arm[0] == "ours":
        print(json.dumps(ours(Path(given.arm[1]), Path(given.arm[2]), int(given.arm[3]), int(given.arm[4]))))
    else:
        print(json.dumps(least(Path(given.arm[1]), int(given.arm[2]))))
