"""Roll out agents, tools and environments against a served policy, and record every trajectory exactly.

An agent is `async (task, policy) -> float | dict | None`. `run_rollout` runs one and returns a record for
`tracegrad.read`. `proxy` records programs in any language. Works without torch.
"""

from tracegrad.rollout.env import Environment, environment_contract, trl_environment
from tracegrad.rollout.policy import LimitReached, Limits, NoAnswer, Policy
from tracegrad.rollout.run_agent import RolloutResult, one_turn, run_rollout, with_tools
from tracegrad.rollout.session import Session, prompt_of
from tracegrad.rollout.token_client import Tokens
from tracegrad.rollout.tool_schema import schema
from tracegrad.rollout.tools import Tools
from tracegrad.rollout.verifiers import VerifiersEnvironment as verifiers

__all__ = [
    "Environment",
    "LimitReached",
    "Limits",
    "NoAnswer",
    "Policy",
    "RolloutResult",
    "Session",
    "Tokens",
    "Tools",
    "environment_contract",
    "one_turn",
    "prompt_of",
    "run_rollout",
    "schema",
    "trl_environment",
    "verifiers",
    "with_tools",
]
