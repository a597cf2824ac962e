"""What a record determines of the sampled ids, without templates, branches or trainers.

Here are `recover_ids` and its result. `sequence.align` makes trainable sequences of the same ids; this is for looking,
for tables, and for other trainers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Traces


@dataclass(frozen=True)
class Recovered:
    """The sampled tokens of G generations, end to end. S tokens.

    Args:
        ids: [S] int32, -1 where the record does not determine the id.
        tier: [S] uint8, index into `codes.TIERS`.
        logprobs: [S] float32, nats, NaN where not recorded.
        cu_tokens: [G+1] int64: generation g is tokens cu_tokens[g]:cu_tokens[g+1]; empty where the record lists no
            tokens, or those of another tokenizer.
        trace: [G] int32, row of the trace.
        turn: [G] int32, generation of its trace.
        reason: [S] uint8, index into `Drift.reasons`: why the id is not known, 0 where it is.
    """

    ids: NDArray[np.int32]
    tier: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    cu_tokens: NDArray[np.int64]
    trace: NDArray[np.int32]
    turn: NDArray[np.int32]
    reason: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def known(self) -> NDArray[np.bool_]:
        """[S] bool: where the id is known."""
        return self.ids >= 0


def recover_ids(traces: Traces, tokenizer: Tokenizer) -> Recovered:
    """The ids that each generation's record determines by ids, bytes, texts and count; never a guess."""
    return Recovered(**_core.recover_ids(traces.core, tokenizer._core))
