"""Handle images of traces: their files, their places among the tokens, and the inputs of the vision encoder.

torch is imported in functions that return tensors.
"""

from tracegrad.images.image_set import Pictures
from tracegrad.images.processor import Rule
from tracegrad.images.spans import Images, RowImages

__all__ = ["Images", "Pictures", "RowImages", "Rule"]
