"""Check recorded traces for problems that raise no error and would ruin training.

`examine` takes whatever `read` takes, with a model's tokenizer, and returns a `Diagnosis`: findings with their places,
costs and cures. `CHECKS` lists the checks (docs/doctor.md), and `lag_test` is the test for shifted logprobs, for any
trainer. torch is used by `rescore` alone.
"""

from tracegrad.doctor.examination import CHECKS, Diagnosis, examine
from tracegrad.doctor.finding import Check, Finding, Hits, Place, Severity
from tracegrad.doctor.render import lines
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
    "examine",
    "lag_test",
    "lines",
]
