"""Roll out agents, tools and environments against a served policy, and record every trajectory exactly.

An agent is `async (task, policy) -> float | dict | None`. `play` runs one and returns a record for `tracegrad.read`.
`proxy` records programs in any language. Works without torch.
"""

from tracegrad.rollout.env import Environment, environment, trl_environment
from tracegrad.rollout.policy import LimitReached, Limits, NoAnswer, Policy
from tracegrad.rollout.run_agent import Played, one_turn, play, with_tools
from tracegrad.rollout.session import Session, prompt_of
from tracegrad.rollout.token_client import Tokens
from tracegrad.rollout.tool_schema import schema
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
