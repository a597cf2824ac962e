"""One number for each term of all data: in memory, or in a file of the run that goes with the process.

Here is `scratch`. What is kept there is the epochs'.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracegrad import outputs
from tracegrad.errors import TracegradError

_AT_ONCE = 1 << 20


def scratch(terms: int, folder: Path | None) -> NDArray[np.float32]:
    """[terms] float32, all NaN.

    Args:
        terms: how many.
        folder: where a file holds them, whose name is gone when this returns and whose room is given back when nothing
            refers to the array any more; None for memory.

    Raises:
        TracegradError: if the disk has no room for them.
    """
    if folder is None or not terms:
        return np.full(terms, np.nan, np.float32)
    path = folder / f".logprobs-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with outputs.create(path) as file:
            path.unlink()
            # Written, as a map of a file without room would end the process, and macOS has no posix_fallocate.
            for first in range(0, terms, _AT_ONCE):
                file.write(np.full(min(_AT_ONCE, terms - first), np.nan, np.float32).data)
            file.flush()
            values = np.memmap(file, np.float32, "r+", shape=(terms,))
    except OSError as error:
        raise TracegradError(
            f"{folder}: {error.strerror}. The logprobs of {terms:,} terms have no place there. Make room, or give "
            "another --out."
        ) from error
    return values
