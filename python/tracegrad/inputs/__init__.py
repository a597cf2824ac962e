"""Everything that can be named as input, and strangers' records made into traces.

In come names of files, folders, patterns and addresses, tables, or rows; out go `Traces`, read at once or as a
stream. Here are `read`, `stream`, and `Map`, which says where records hold what a trace needs. `candidates` finds
that out. Its files, each using those before it alone: `options`, `suffixes`, `paths`, `remote`, `places` (names to
files); `chat`, `calls`, `evals`, `sources`; `mapping`, `sessions`, `adapters` (records that are changed first);
`again`, `progress`, `tally`, `reading`; `first_calls`, `candidates`.
"""

from tracegrad.config import Map
from tracegrad.inputs.progress import Bar, Progress
from tracegrad.inputs.reading import InputStream, read, stream, together

__all__ = ["Bar", "InputStream", "Map", "Progress", "read", "stream", "together"]
