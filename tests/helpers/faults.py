"""Processes that end at their n-th operation on files, for every n: run as a script by the tests, which fork nothing.

`python faults.py prepare|parts|train OUT [N ...]` kills at each of these operations (all without any), goes on with
`resume`, and writes to OUT/found.json which came to what an undisturbed run comes to.
"""

import builtins
import functools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
EVENTS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink"}
KILLED = 9


class Counter:
    """Counts what is done to files below `folder`, and ends the process inside operation `last`."""

    def __init__(self, folder: Path, last: int | None) -> None:
        self.folder, self.last, self.count = str(folder), last, 0
        sys.addaudithook(self.heard)
        fsync = os.fsync
        os.fsync = lambda handle: (self.step(), fsync(handle))[1]
        opened = builtins.open
        builtins.open = lambda *given, **more: self.watched(opened(*given, **more))  # type: ignore[assignment]

    def step(self) -> None:
        self.count += 1
        if self.count == self.last:
            os._exit(KILLED)

    def heard(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in EVENTS or writes) and str(given[0]).startswith(self.folder):
            self.step()

    def watched(self, file: Any) -> Any:
        """A file whose first write may end halfway."""
        if str(file.name).startswith(self.folder) and file.mode == "wb":
            whole, first = file.write, [True]

            def write(data: Any) -> int:
                if first and self.count + 1 == self.last:
                    whole(bytes(data)[: len(data) // 2])
                    file.flush()
                if first:
                    first.clear()
                    self.step()
                return whole(data)

            file = _Writing(file, write)
        return file


class _Writing:
    def __init__(self, file: Any, write: Any) -> None:
        self.file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "_Writing":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def forked(work: Any, folder: Path, last: int | None) -> tuple[int, int]:
    """Exit code of a child that does the work, and how many operations it has counted."""
    seen, told = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            counter = Counter(folder, last)
            work()
            os.write(told, str(counter.count).encode())
            os._exit(0)
        except BaseException as error:
            print(f"operation {last}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    os.close(told)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with os.fdopen(seen) as said:
        return code, int(said.read() or 0)


def prepares(out: Path, **cut: int) -> tuple[Any, Any, Any]:
    """Preparing 24 traces in three shards; what is refused before it is whole; the bytes it comes to."""
    from tracegrad import prepare
    from tracegrad.alignment.sequences import Sequences
    from tracegrad.config import Data
    from tracegrad.errors import ReadError

    example = Path(__file__).parents[2] / "examples" / "quickstart"

    def run(here: Path, resume: bool) -> None:
        told = {"shard_traces": 8, "resume": resume, **cut}
        prepare.prepare(str(out / "t.jsonl"), example / "model", Data(), here, **told)

    def broken(here: Path) -> bool:
        """Whether it loads as if it were whole and is not."""
        try:
            return Sequences.load(here, verify=True).traces != 24
        except ReadError:
            return False

    def bytes_of(here: Path) -> Any:
        return {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()}

    return run, broken, bytes_of


def trains(out: Path) -> tuple[Any, Any, Any]:
    """A short run with a checkpoint after every step, as `killed.py` has it."""
    import torch

    import killed
    from tiny import sampled, tiny_model
    from tracegrad.alignment.sequences import Sequences

    torch.set_num_threads(1)
    if os.fork() == 0:  # this process runs no model: what it forks must find torch as it was imported
        sampled(tiny_model(), groups=6, size=2).save(out / "traces")
        os._exit(0)
    os.wait()
    traces = Sequences.load(out / "traces")
    return (
        lambda here, resume: killed.run(here, traces, resume),
        lambda here: False,
        lambda here: torch.load(here / "parameters.pt").numpy().tobytes(),
    )


def main(kind: str, out: Path, only: list[int]) -> int:
    parts = functools.partial(prepares, part_bytes=60_000)
    run, broken, result = {"prepare": prepares, "parts": parts, "train": trains}[kind](out)
    code, operations = forked(lambda: run(out / "whole", False), out / "whole", None)
    assert code == 0
    wanted = result(out / "whole")
    found = []
    for number in [n for n in only if n <= operations] or range(1, operations + 1):
        here = out / "killed"
        shutil.rmtree(here, ignore_errors=True)
        code, _ = forked(lambda here=here: run(here, False), here, number)
        loaded = broken(here)
        again, _ = forked(lambda here=here: run(here, True), here, None)
        same = again == 0 and result(here) == wanted
        found.append({"at": number, "code": code, "loads_broken": loaded, "same": same})
    (out / "found.json").write_text(json.dumps({"operations": operations, "found": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), [int(n) for n in sys.argv[3:]]))
