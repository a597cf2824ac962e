"""Loads and encodes with files of strangers, each in a process of its own, and says what became of it.

Run with folders as arguments, each a model directory with text.txt: prints a line of JSON for each with the error's
class and words, or none, the CPU seconds and the peak memory. Not a test; called by test_tokenizer_hostile.
"""

import json
import os
import resource
import sys
from pathlib import Path

from tracegrad import _core
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.errors import TracegradError

CPU_S, SPACE = 60, 6 << 30


def run(folder: Path) -> dict[str, object]:
    try:
        ours = Tokenizer(_core.Tokenizer.from_dir(folder))
        text = (folder / "text.txt").read_text()
        ours.encode(text)
        ids, ends = ours.encode_with_ends(text)
        assert len(ids) == len(ends)
        ours.encode_batch([text, text])
        return {"error": None, "said": ""}
    except TracegradError as error:
        return {"error": type(error).__name__, "said": str(error)}


def main() -> None:
    for name in sys.argv[1:]:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
            os.write(write, json.dumps(run(Path(name))).encode()[:60_000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        _, status, used = os.wait4(child, 0)
        row = json.loads(said or b"{}") | {
            "folder": Path(name).name,
            "status": status,
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_mb": used.ru_maxrss / 1024,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
