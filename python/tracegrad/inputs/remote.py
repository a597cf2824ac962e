"""Addresses of fsspec (s3://, gs://, az://, hf://, https://): what they name, and their bytes through a pipe.

fsspec is imported on use (extra `cloud`). A thread copies into the pipe, so that no more than a few blocks are held.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tracegrad.errors import ArgumentError, ReadError, shown
from tracegrad.inputs.suffixes import SUFFIXES, refuse_other, suffix

BLOCK = 1 << 20


def listed(address: str) -> list[tuple[str, int]]:
    """The files that an address names, with their bytes: itself, those below a folder, or those of a pattern.

    Raises:
        ReadError: if there is none, or it cannot be asked.
        ArgumentError: if fsspec, or what it needs for this kind of address, is not installed.
    """
    with _system(address) as (system, path):
        if any(mark in path for mark in "*?["):
            found = {name: told for name, told in system.glob(path, detail=True).items() if told["type"] == "file"}
        elif system.isdir(path):
            inside = system.find(path, detail=True)
            found = {name: told for name, told in inside.items() if suffix(name) in SUFFIXES}
        else:
            found = {path: system.info(path)}
    if not found:
        raise ReadError(f"{address}: nothing there has such a name. There are no traces to read. Check the address.")
    for name in found:
        refuse_other(name)
    return [(system.unstrip_protocol(name), int(found[name].get("size") or 0)) for name in sorted(found)]


@contextmanager
def _system(address: str) -> Iterator[tuple[Any, str]]:
    """The file system of an address and the path there; what goes wrong with them within is told as of the address."""
    try:
        import fsspec
    except ImportError as error:
        raise ArgumentError(
            f"{error}. Addresses such as {address[:60]} need it. pip install 'tracegrad[cloud]'"
        ) from error
    try:
        yield fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ArgumentError(
            f"{address}: {error}. Nothing can be read from there without it. pip install what it names."
        ) from error
    except Exception as error:
        raise _unreadable(address, error) from error


def _unreadable(address: str, error: Exception) -> ReadError:
    why = f"{type(error).__name__}: {shown(str(error))[:200]}".rstrip(": ")
    return ReadError(f"{address}: {why}. It cannot be read. Check the address, and the credentials of fsspec for it.")


def local_copy(address: str, folder: str) -> str:
    """A whole file brought into a folder: what is read from its end (Parquet, Arrow, zip) needs all of it."""
    with _system(address) as (system, path):
        target = os.path.join(folder, os.path.basename(path.rstrip("/")) or "file")
        system.get_file(path, target)
    return target


def head(address: str, count: int = 8) -> bytes:
    """The first bytes of a file."""
    with _system(address) as (system, path):
        return bytes(system.read_block(path, 0, count))


class Pipe:
    """The bytes of an address, from a path that any reader can open; `check` after the end says what went wrong."""

    def __init__(self, address: str) -> None:
        with _system(address) as (system, path):
            self._file = system.open(path, "rb", block_size=4 * BLOCK)
        self._address = address
        self._error: Exception | None = None
        self._out, self._in = os.pipe()
        self.path = f"/dev/fd/{self._out}"
        self._thread = threading.Thread(target=self._copy, name=f"read {address[:40]}", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        try:
            with self._file, os.fdopen(self._in, "wb", buffering=0) as pipe:
                while block := self._file.read(BLOCK):
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
            raise _unreadable(self._address, self._error) from self._error
