"""Read traces from files, folders, patterns, addresses, tables and rows: `read` at once, `stream` in batches.

`FieldMap` names the fields of your records that contain the reward, group, session and so on. `infer_fields` guesses
them. `formats` converts records of other producers.
"""

from tracegrad.config import FieldMap
from tracegrad.data.reader import InputStream, Progress, ProgressBar, concatenate, read, stream

__all__ = ["FieldMap", "InputStream", "Progress", "ProgressBar", "concatenate", "read", "stream"]
