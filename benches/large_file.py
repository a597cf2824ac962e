"""A file of any size streams in bounded memory: GB/s and peak memory while 10 GB pass through `stream`, or `align` too.

    python benches/large_file.py --gigabytes 10
    python benches/large_file.py --gigabytes 1 --align

The bundled example, again and again, through a pipe into a separate process, whose resident memory is the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart"
READER = """
import resource, sys
from tracegrad.data import stream
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.alignment.align import align
tokenizer = Tokenizer.from_pretrained(sys.argv[1]) if len(sys.argv) > 1 else None
traces = stream("-")
tokens = 0
for part in traces:
    tokens += align(part, tokenizer).tokens if tokenizer else 0
report = traces.read_report
print(report.traces, report.tokens, report.bytes, tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def lines() -> bytes:
    """The example's records as JSONL."""
    from tracegrad.data import read

    return b"".join(trace.record + b"\n" for trace in read(EXAMPLE / "traces.jsonl.zst"))


def feed(pipe: IO[bytes], block: bytes, times: int) -> None:
    """Writes the block again and again, then closes."""
    with pipe:
        for _ in range(times):
            pipe.write(block)


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--align", action="store_true", help="align each batch as well")
    told = parser.parse_args()
    block = lines()
    times = max(1, round(told.gigabytes * 1e9 / len(block)))
    command = [sys.executable, "-c", READER, *([str(EXAMPLE / "model")] if told.align else [])]
    began = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        writer = threading.Thread(target=feed, args=(process.stdin, block, times))
        writer.start()
        said = process.stdout.read()
        writer.join()
    seconds = time.perf_counter() - began
    traces, sampled, size, tokens, peak = map(int, said.split())
    found = {
        "gigabytes": size / 1e9,
        "traces": traces,
        "sampled_tokens": sampled,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "gigabytes_per_second": round(size / 1e9 / seconds, 3),
        "peak_bytes": peak * 1024,
        "cores": os.cpu_count(),
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
