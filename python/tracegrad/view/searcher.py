"""Search in a separate process, which is killed and restarted if an expression takes too long.

The module has `Searcher` for the server, and the program of the process: one query per line, one answer per line.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.view.search import find

QUERY_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
"""Seconds that the process may take to start. This time does not count against the query."""
_MOST_LINE = 16 << 20


class Searcher:
    """Searches one index. Queries wait for each other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: asyncio.subprocess.Process | None = None
        self._busy = asyncio.Lock()

    async def ready(self) -> None:
        """Start the process if there is none, so that the first query does not wait for it."""
        async with self._busy:
            if self._process is None:
                await self._start()

    async def find(self, query: str, regex: bool, start: int) -> dict[str, Any]:
        """Return the `rows` that match and `next`, as `search.find` does.

        Raises:
            ArgumentError: for an invalid expression, or one that takes too long.
        """
        async with self._busy:
            process = self._process or await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([query, regex, start]).encode() + b"\n")
            try:
                await process.stdin.drain()
                line = await asyncio.wait_for(process.stdout.readline(), QUERY_TIMEOUT_S)
            except (asyncio.TimeoutError, OSError):
                line = b""
            except BaseException:  # The request was cancelled. The next query must not read its answer.
                await self.close()
                raise
            if not line.endswith(b"\n"):
                await self.close()
                raise ArgumentError(
                    f"TG-VIEW-012: {query[:80]!r}: took longer than {QUERY_TIMEOUT_S:.0f} seconds and was ended. "
                    "Nothing is found by it. Write an expression without nested repeats."
                )
        answer = json.loads(line)
        if "error" in answer:
            raise ArgumentError(answer["error"])
        return answer

    async def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        arguments = ("-m", "tracegrad.view.searcher", str(self._path))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=pipe, stdout=pipe, limit=_MOST_LINE
        )
        assert self._process.stdout is not None
        try:
            ready_line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            ready_line = b""
        except BaseException:
            await self.close()
            raise
        if not ready_line:
            await self.close()
            raise TracegradError("TG-VIEW-013: the search process has not started. Read its output.")
        return self._process


def answer(path: str, line: str) -> dict[str, Any]:
    """Return the answer to one line."""
    query, regex, start = json.loads(line)
    try:
        return find(path, query, regex, start)._asdict()
    except TracegradError as error:
        return {"error": str(error)}
    except Exception as error:  # If the process died, the page would report a timeout.
        return {
            "error": f"TG-VIEW-016: {type(error).__name__}: {error}"[:300]
            + ". Nothing is found. Ask for something else."
        }


def main() -> None:
    """Write an empty line when ready, then answer queries until standard input closes."""
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(sys.argv[1], line)), flush=True)


if __name__ == "__main__":
    main()
