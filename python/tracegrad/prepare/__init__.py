"""From files of traces to aligned sequences: at once for training, or shard by shard on any number of processes.

In come names of inputs, a model's folder and options; out go `Sequences` (`load`, `shard`), or a folder of shards with
an account of how exactly it went (`prepare`), at a path or an address. No torch. The input is cut into parts by what
stands in it; a part gives the same bytes whoever does it, on this machine or on Ray. docs/trace-format.md states what a
prepared folder is. Its files, each using those before it alone: `cuts` (where a file of lines is cut), `parts` (what is
read together), `place` (folders that shards go to), `shard` (records to a shard), `part` (doing one part), `worker`,
`workers` (processes), `on_ray`, `load`, `run` (all parts, and the manifest last).
"""

from tracegrad.prepare.load import check_prepared, is_prepared, load
from tracegrad.prepare.parts import PART_BYTES, Part, cut
from tracegrad.prepare.place import write_json
from tracegrad.prepare.run import PLAN, prepare
from tracegrad.prepare.shard import MOST_SHARDFULS, SHARD_BYTES, Sources, shard, shards_of

__all__ = [
    "MOST_SHARDFULS",
    "PART_BYTES",
    "PLAN",
    "SHARD_BYTES",
    "Part",
    "Sources",
    "check_prepared",
    "cut",
    "is_prepared",
    "load",
    "prepare",
    "shard",
    "shards_of",
    "write_json",
]
