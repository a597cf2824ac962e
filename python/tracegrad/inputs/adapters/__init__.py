"""Records of producers that the core does not read, made into records that it does: one small file for each producer.

A record goes to the first adapter that knows it; what none knows stays as it is. What is left out is counted and said.
"""

from tracegrad.inputs.adapters.chunks import Gather, is_chunk
from tracegrad.inputs.adapters.table import ANSWERS, Adapted, adapt, needed

__all__ = ["ANSWERS", "Adapted", "Gather", "adapt", "is_chunk", "needed"]
