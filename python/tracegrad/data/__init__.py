"""Read traces from files, folders, patterns, addresses, tables and rows: `read` at once, `stream` one at a time.

`Map` says where your records hold what a trace needs; `infer_fields` guesses it. Records of other producers are
converted by `formats`.
"""

from tracegrad.config import Map
from tracegrad.data.reader import Bar, InputStream, Progress, read, stream, together

__all__ = ["Bar", "InputStream", "Map", "Progress", "read", "stream", "together"]
