"""Peers' metrics under the peers' own names, by the peers' own definitions: for dashboards that already exist.

Each function gives `Measured`: sums of a part of a step, added over parts and ranks, then named. Nothing here imports a
peer; tests/parity/test_*_metrics.py run them beside theirs. Its files, each
using those before it alone: `art`, `nemo`, `skyrl`, `trl`, `verl_rows`, `verl`.
"""

from tracegrad.metrics.peers.art import ART, as_art
from tracegrad.metrics.peers.nemo import NEMO, as_nemo
from tracegrad.metrics.peers.skyrl import SKYRL, as_skyrl, as_skyrl_policy
from tracegrad.metrics.peers.trl import TRL, as_trl_loss, as_trl_rewards, as_trl_sampling
from tracegrad.metrics.peers.verl import as_verl, as_verl_actor
from tracegrad.metrics.peers.verl_rows import VERL

PEERS = {"TRL": TRL, "verl": VERL, "SkyRL": SKYRL, "ART": ART, "NeMo-RL": NEMO}
"""Peer to the rows of its table."""

__all__ = [
    "ART",
    "NEMO",
    "PEERS",
    "SKYRL",
    "TRL",
    "VERL",
    "as_art",
    "as_nemo",
    "as_skyrl",
    "as_skyrl_policy",
    "as_trl_loss",
    "as_trl_rewards",
    "as_trl_sampling",
    "as_verl",
    "as_verl_actor",
]
