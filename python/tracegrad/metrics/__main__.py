"""Writes the tables of docs/metrics.md anew: `python -m tracegrad.metrics docs/metrics.md`."""

import sys
from pathlib import Path

from tracegrad.metrics import COMPLETIONS, OFF_POLICY, REWARDS, TOOLS, TRAINING, with_tables
from tracegrad.metrics.peers import PEERS

SAMPLED = (*COMPLETIONS, *TOOLS)
TABLES = {"learner": TRAINING, "rewards": REWARDS, "completions": SAMPLED, "off-policy": OFF_POLICY, **PEERS}

if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
