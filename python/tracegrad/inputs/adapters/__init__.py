"""Records of producers that the core does not read, made into records that it does: one small file for each producer.

A record goes to the first adapter that knows it; what none knows stays as it is. What is left out is counted and
said. Its files, each using those before it alone: `fitting`, `blocks`, `chunks`, `kept`; `langchain`, `loggers`,
`pairs`, `sharegpt`, `inspect_ai`, `nemo_gym`, `samples`, `choices`, `lm_eval`, `pydantic_ai`, `shapes`, `spans`,
`failed`; `table` (the order in which they are asked).
"""

from tracegrad.inputs.adapters.chunks import Gather, is_chunk
from tracegrad.inputs.adapters.fitting import is_failed
from tracegrad.inputs.adapters.spans import is_verdict
from tracegrad.inputs.adapters.table import ANSWERS, Adapted, adapt, needed, only_roots

__all__ = ["ANSWERS", "Adapted", "Gather", "adapt", "is_chunk", "is_failed", "is_verdict", "needed", "only_roots"]
