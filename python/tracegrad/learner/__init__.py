"""Training from recorded sequences: one step, the loop around it, and checkpoints to resume from exactly.

In come `Sequences`, or `Shards`, and `Options`, or single steps from anywhere; out go trained parameters, checkpoints,
and a row of metrics for each step. Its files, each using those before it alone: `rates`, `plan` (functions of counts
alone); `ranks`, `memory`, `parallel` (one model on several ranks); `ending`; `model`, `adapters`, `adapted`;
`progress`, `away` (a folder that not all ranks see), `state`, `weights`; `compared`, `filters`, `reward_kl`,
`off_policy_value`, `fitting`, `planned`, `mixture`, `feed` (which traces, with which advantage, in which steps);
`mixed_reference`, `settle`, `setup`, `traffic`, `forecast`; `idle`, `entropy`, `step`, `record`, `row`, `checkpoint`,
`run` (one step at a time, no data set); `keeper`, `known`, `epochs`, `measured`, `shown`, `loop` (traces as one source
of steps).
"""

from tracegrad.learner.adapted import merge_adapters
from tracegrad.learner.loop import train
from tracegrad.learner.memory import Memory
from tracegrad.learner.off_policy_value import OffPolicyValue, estimate
from tracegrad.learner.parallel import Placed, Policy, prepare
from tracegrad.learner.ranks import Ranks
from tracegrad.learner.record import TermRecord, Trained
from tracegrad.learner.run import Run
from tracegrad.learner.step import Outcome, measure, optimizer_step

__all__ = [
    "Memory",
    "OffPolicyValue",
    "Outcome",
    "Placed",
    "Policy",
    "Ranks",
    "Run",
    "TermRecord",
    "Trained",
    "estimate",
    "measure",
    "merge_adapters",
    "optimizer_step",
    "prepare",
    "train",
]
