"""Searches in a process of its own, which is ended where an expression takes too long and started anew.

Here is `Searcher` for the server, and what the process runs: a question a line, an answer a line.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.view.search import find

SECONDS = 5.0
BEGIN_S = 60.0
"""In which the process begins; no expression is to blame for that."""
_MOST_LINE = 16 << 20


class Searcher:
    """Asks one index; a question waits for the one before it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: asyncio.subprocess.Process | None = None
        self._one = asyncio.Lock()

    async def ready(self) -> None:
        """Starts the process if there is none, so that the first question need not wait for it."""
        async with self._one:
            if self._process is None:
                await self._begin()

    async def find(self, query: str, regex: bool, start: int) -> dict[str, Any]:
        """`rows` that match and `next`, as `search.find` gives them."""
        async with self._one:
            process = self._process or await self._begin()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([query, regex, start]).encode() + b"\n")
            try:
                await process.stdin.drain()
                line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
            except (asyncio.TimeoutError, OSError):
                line = b""
            except BaseException:  # a request was given up: what is asked for next must not get this one's answer
                await self.close()
                raise
            if not line.endswith(b"\n"):
                await self.close()
                raise ArgumentError(
                    f"{query[:80]!r}: took longer than {SECONDS:.0f} seconds and was ended. Nothing is found by it. "
                    "Write an expression without nested repeats."
                )
        found = json.loads(line)
        if "error" in found:
            raise ArgumentError(found["error"])
        return found

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _begin(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        told = ("-m", "tracegrad.view.searcher", str(self._path))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *told, stdin=pipe, stdout=pipe, limit=_MOST_LINE
        )
        assert self._process.stdout is not None
        try:
            begun = await asyncio.wait_for(self._process.stdout.readline(), BEGIN_S)
        except asyncio.TimeoutError:
            begun = b""
        except BaseException:
            await self.close()
            raise
        if not begun:
            await self.close()
            raise TracegradError("what searches has not begun. Nothing can be looked for. Look at what it printed.")
        return self._process


def answer(path: str, line: str) -> dict[str, Any]:
    """The answer to one line."""
    query, regex, start = json.loads(line)
    try:
        return find(path, query, regex, start)._asdict()
    except TracegradError as error:
        return {"error": str(error)}
    except Exception as error:  # a process that ended with a traceback would be blamed on the time
        return {"error": f"{type(error).__name__}: {error}"[:300] + ". Nothing is found. Ask for something else."}


def main() -> None:
    """Says that it has begun, and answers until nobody asks any more."""
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(sys.argv[1], line)), flush=True)


if __name__ == "__main__":
    main()
