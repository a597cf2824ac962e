"""Pictures of traces: which there are, where they stand among the tokens, and what a model is given of them.

In come the files that records hold and the folder of a model; out go lengths for `align`, places for `pack`, and the
tensors that a tower takes. The files, each using those before it alone: `table`, `decoding`,
`processor`, `rule`, `spans`, `row`, `kept`. No torch, but in
functions that return tensors.
"""

from tracegrad.pictures.row import RowImages
from tracegrad.pictures.rule import Rule
from tracegrad.pictures.spans import Images
from tracegrad.pictures.table import Pictures

__all__ = ["Images", "Pictures", "RowImages", "Rule"]
