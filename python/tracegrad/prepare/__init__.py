"""Prepare traces for training: aligned at once (`load`), or as a folder of shards (`prepare`) by many processes.

The input is cut into parts by its content, and a part gives the same bytes on whichever process or machine it is done.
docs/trace-format.md describes a prepared folder. No torch.
"""

from tracegrad.prepare.output import write_json
from tracegrad.prepare.part import MOST_SHARDFULS, SHARD_BYTES, Sources, shard, shards_of
from tracegrad.prepare.run import PLAN, check_prepared, is_prepared, load, prepare
from tracegrad.prepare.split import PART_BYTES, Part, cut

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
