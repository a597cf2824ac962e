"""Prepare traces for training, in memory (`load`) or as a folder of shards by many processes (`prepare`).

The input is split into parts by content. A part yields the same bytes on any process or machine.
docs/reference/trace-format.md specifies a prepared folder. This package does not need torch.
"""

from tracegrad.prepare.output import write_json
from tracegrad.prepare.part import MAX_SHARDS_PER_GROUP, SHARD_BYTES, Sources, names_of, shard, shards_of
from tracegrad.prepare.run import PLAN, check_prepared, is_prepared, load, prepare
from tracegrad.prepare.split import PART_BYTES, Part, split_inputs

__all__ = [
    "MAX_SHARDS_PER_GROUP",
    "PART_BYTES",
    "PLAN",
    "SHARD_BYTES",
    "Part",
    "Sources",
    "check_prepared",
    "is_prepared",
    "load",
    "names_of",
    "prepare",
    "shard",
    "shards_of",
    "split_inputs",
    "write_json",
]
