"""Check recorded traces for problems that raise no error but would corrupt training.

`diagnose` reads the same inputs as `tracegrad.read`, and needs the model's tokenizer. It returns a `Diagnosis`:
findings with their places, their impact and a fix. `CHECKS` lists all checks (docs/reference/findings.md). `lag_test`
detects shifted logprobs in plain arrays, so it works with any trainer. Only `rescore` needs torch.
"""

from tracegrad.doctor.examination import CHECKS, Diagnosis, diagnose
from tracegrad.doctor.finding import Check, Finding, Hits, Place, Severity
from tracegrad.doctor.render import render_lines
from tracegrad.doctor.shift_test import LagTest, bigram_logprobs, lag_test

__all__ = [
    "CHECKS",
    "Check",
    "Diagnosis",
    "Finding",
    "Hits",
    "LagTest",
    "Place",
    "Severity",
    "bigram_logprobs",
    "diagnose",
    "lag_test",
    "render_lines",
]
