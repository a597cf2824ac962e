"""What is known of traces without their tokens, and where the tokens of some of them are taken from.

In come `Sequences`, or folders that `prepare` wrote; out go the columns of all traces (`Catalog`), and `Sequences` of
the few that a step needs. A plan is made from the columns alone. Its files, each using those before it alone: `table`
(the columns of all inputs), `select` (some traces of `Sequences`), `source` (tokens in memory), `folders` (tokens in
shards that are mapped when they are needed).
"""

from tracegrad.catalog.folders import Shards
from tracegrad.catalog.select import selected
from tracegrad.catalog.source import InMemory, Source, source_of
from tracegrad.catalog.table import Catalog, numbered

__all__ = ["Catalog", "InMemory", "Shards", "Source", "numbered", "selected", "source_of"]
