"""Read traces from files, folders, patterns, addresses, tables and rows: `read` at once, `stream` in batches.

`Map` names the fields of your records that contain the reward, group, session and so on. `infer_fields` guesses them.
`formats` converts records of other producers.
"""

from tracegrad.config import Map
from tracegrad.data.reader import Bar, InputStream, Progress, read, stream, together

__all__ = ["Bar", "InputStream", "Map", "Progress", "read", "stream", "together"]
