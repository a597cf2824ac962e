"""Metrics of other trainers, with their names and definitions, for existing dashboards.

Each function returns `MetricSums`: sums over a part of a step. They are added over parts and ranks, and then named. The
other trainers are not imported; tests/parity/test_*_metrics.py compare the results with their code.
"""

from tracegrad.integrations.metrics.art import ART, as_art
from tracegrad.integrations.metrics.skyrl import SKYRL, as_skyrl, as_skyrl_policy
from tracegrad.integrations.metrics.trl import TRL, as_trl_loss, as_trl_rewards, as_trl_sampling
from tracegrad.integrations.metrics.verl import VERL, as_verl, as_verl_actor

PEERS = {"TRL": TRL, "verl": VERL, "SkyRL": SKYRL, "ART": ART}
"""The metrics of each peer."""

__all__ = [
    "ART",
    "PEERS",
    "SKYRL",
    "TRL",
    "VERL",
    "as_art",
    "as_skyrl",
    "as_skyrl_policy",
    "as_trl_loss",
    "as_trl_rewards",
    "as_trl_sampling",
    "as_verl",
    "as_verl_actor",
]
