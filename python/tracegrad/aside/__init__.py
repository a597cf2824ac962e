"""Functions of strangers, run beside the loop: in threads or in processes, within a time limit, their failures located.

In come a function, its arguments and a time limit; out comes its value or a `Failure`. Nothing here knows what the
functions are for; `rollout` runs tools and environments with it, `score` reward functions. Its files, each using
those before it alone: `failure`, `thread`, `processes`.
"""

from tracegrad.aside.failure import Failed, Failure, located
from tracegrad.aside.processes import Processes
from tracegrad.aside.thread import Thread, within

__all__ = ["Failed", "Failure", "Processes", "Thread", "located", "within"]
