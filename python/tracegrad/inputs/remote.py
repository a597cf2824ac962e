"""Addresses of fsspec (s3://, gs://, az://, hf://, https://): what they name, and their bytes through a pipe.

fsspec is imported on use (extra `cloud`). A thread copies into the pipe, so that no more than a few blocks are held.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any

from tracegrad.addresses import system, unreadable
from tracegrad.errors import ArgumentError, ReadError, redacted
from tracegrad.inputs.paths import in_numbers
from tracegrad.inputs.suffixes import SUFFIXES, refuse_other, suffix

BLOCK = 1 << 20


def listed(address: str) -> list[tuple[str, int]]:
    """The files that an address names, with their bytes: itself, those below a folder, or those of a pattern.

    Raises:
        ReadError: if there is none, or it cannot be asked.
        ArgumentError: if fsspec, or what it needs for this kind of address, is not installed.
    """
    with system(address) as (files, path):
        if any(mark in path for mark in "*?["):
            found = {name: told for name, told in files.glob(path, detail=True).items() if told["type"] == "file"}
        elif files.isdir(path):
            inside = files.find(path, detail=True)
            if f"{path.rstrip('/')}/manifest.json" in inside:
                raise ArgumentError(
                    f"{address} holds prepared shards. They are aligned already. Give that address to train alone, or "
                    "those of the traces."
                )
            found = {name: told for name, told in inside.items() if suffix(name) in SUFFIXES}
        else:
            found = {path: files.info(path)}
    if not found:
        raise ReadError(f"{address}: nothing there has such a name. There are no traces to read. Check the address.")
    for name in found:
        refuse_other(name)
    return [(files.unstrip_protocol(name), int(found[name].get("size") or 0)) for name in sorted(found, key=in_numbers)]


def local_copy(address: str, folder: str) -> str:
    """A whole file brought into a folder: what is read from its end (Parquet, Arrow, zip) needs all of it."""
    with system(address) as (files, path):
        target = os.path.join(folder, os.path.basename(path.split("?")[0].rstrip("/")) or "file")
        files.get_file(path, target)
    return target


def head(address: str, count: int = 8) -> bytes:
    """The first bytes of a file."""
    with system(address) as (files, path):
        return bytes(files.read_block(path, 0, count))


class Pipe:
    """The bytes of an address, from a path that any reader can open; `check` after the end says what went wrong."""

    def __init__(self, address: str) -> None:
        with system(address) as (files, path):
            self._begin(files.open(path, "rb", block_size=4 * BLOCK), address)

    def _begin(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._error: Exception | None = None
        self._out, self._in = os.pipe()
        self.path = f"/dev/fd/{self._out}"
        self._thread = threading.Thread(target=self._copy, name=f"read {redacted(name)[:40]}", daemon=True)
        self._thread.start()

    def _blocks(self) -> Iterator[bytes]:
        while block := self._file.read(BLOCK):
            yield block

    def _copy(self) -> None:
        try:
            with self._file, os.fdopen(self._in, "wb", buffering=0) as pipe:
                for block in self._blocks():
                    pipe.write(block)
        except BrokenPipeError:
            pass  # its reader needs no more
        except Exception as error:
            self._error = error

    def opened(self) -> None:
        """Lets go of the end that is read, once another has opened it."""
        os.close(self._out)

    def check(self) -> None:
        """After the last byte.

        Raises:
            ReadError: if the address broke off.
        """
        self._thread.join(timeout=60)
        if self._error is not None:
            raise unreadable(self._name, self._error) from self._error


class Piece(Pipe):
    """Some bytes of a file of lines, behind as many line breaks as stand before them: so its lines have their numbers.

    Raises:
        ReadError: if it cannot be opened.
    """

    def __init__(self, path: str, start: int, end: int, line: int) -> None:
        self._left, self.breaks = end - start, line - 1
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 (the thread that copies closes it)
        except OSError as error:
            raise ReadError(f"{path}: cannot be read ({error.strerror}). Check that the file is there.") from error
        file.seek(start)
        self._begin(file, path)

    def _blocks(self) -> Iterator[bytes]:
        for done in range(0, self.breaks, BLOCK):
            yield b"\n" * min(BLOCK, self.breaks - done)
        while self._left:
            if not (block := self._file.read(min(BLOCK, self._left))):
                raise OSError("the file has become shorter while it was read")
            self._left -= len(block)
            yield block
