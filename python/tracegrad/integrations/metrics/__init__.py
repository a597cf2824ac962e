"""Peers' metrics under the peers' own names, by the peers' own definitions: for dashboards that already exist.

Each function gives `Measured`: sums of a part of a step, added over parts and ranks, then named. Nothing here imports a
peer; tests/parity/test_*_metrics.py run them beside theirs.
"""

from tracegrad.integrations.metrics.art import ART, as_art
from tracegrad.integrations.metrics.skyrl import SKYRL, as_skyrl, as_skyrl_policy
from tracegrad.integrations.metrics.trl import TRL, as_trl_loss, as_trl_rewards, as_trl_sampling
from tracegrad.integrations.metrics.verl import VERL, as_verl, as_verl_actor

PEERS = {"TRL": TRL, "verl": VERL, "SkyRL": SKYRL, "ART": ART}
"""Peer to the rows of its table."""

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
