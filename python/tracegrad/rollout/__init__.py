"""Trajectories played against a served policy and recorded exactly: contracts, tools, environments, a proxy.

In come a contract (`async (task, policy) -> float | dict | None`), a task and servers; out goes a record that
`tracegrad.read` takes. `play` plays one. No trainer and no torch here. Its files, each using those before it alone:
`jsons`, `http`, `shapes`, `session`, `policy` (the calls of one trajectory); `progress`, `server`, `keeper`, `launch`,
`engine`, `inside` (who answers); `schema`, `tools`, `environment`; `verifiers_worker`, `verifiers`; `tokens`, `play`,
`adapters`; `exchange`, `passing`, `journal`, `proxy` (any program, recorded).
"""

from tracegrad.rollout.adapters import one_turn, with_tools
from tracegrad.rollout.environment import Environment, environment, trl_environment
from tracegrad.rollout.play import Played, play
from tracegrad.rollout.policy import LimitReached, Limits, NoAnswer, Policy
from tracegrad.rollout.schema import schema
from tracegrad.rollout.session import Session, prompt_of
from tracegrad.rollout.tokens import Tokens
from tracegrad.rollout.tools import Tools
from tracegrad.rollout.verifiers import Verifiers as verifiers

__all__ = [
    "Environment",
    "LimitReached",
    "Limits",
    "NoAnswer",
    "Played",
    "Policy",
    "Session",
    "Tokens",
    "Tools",
    "environment",
    "one_turn",
    "play",
    "prompt_of",
    "schema",
    "trl_environment",
    "verifiers",
    "with_tools",
]
