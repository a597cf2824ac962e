"""Writes the findings of docs/doctor.md anew: `python -m tracegrad.doctor docs/doctor.md`."""

import sys
from pathlib import Path

from tracegrad.doctor.page import with_findings

if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_findings(page.read_text(encoding="utf-8")), encoding="utf-8")
