"""The doctor: why training on a file of traces would be wrong, what it would cost, and the cure.

In comes whatever `read` takes, with a model's tokenizer; out goes a `Diagnosis`: findings with their places, costs
and cures. Here are `examine` and what it returns, `CHECKS` (docs/doctor.md lists them), and `lag_test`, the test for
shifted logprobs that any trainer can use. No torch but for `rescore`; the command line calls this. Its files, each
using those before it alone: `finding`, `vocabulary`, `look` (a batch as columns); `tops`, `history`, `tokens`,
`numbers`, `pictures` (checks batch by batch); `lags`, `zeros`, `whole`, `rescore`, `shift`, `file` (checks of a whole
file); `follow`, `examination`; `text`, `page`.
"""

from tracegrad.doctor.examination import CHECKS, Diagnosis, examine
from tracegrad.doctor.finding import Check, Finding, Hits, Place, Severity
from tracegrad.doctor.lags import LagTest, bigram_logprobs, lag_test
from tracegrad.doctor.text import lines

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
