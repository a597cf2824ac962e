"""Everything that can be named as input, and strangers' records made into traces.

Here are `read` and `stream`, and `Map`, which says where records hold what a trace needs. `candidates` finds that out.
"""

from tracegrad.config import Map
from tracegrad.inputs.progress import Bar, Progress
from tracegrad.inputs.reading import InputStream, read, stream, together

__all__ = ["Bar", "InputStream", "Map", "Progress", "read", "stream", "together"]
