"""Handle images of traces: their files, their places among the tokens, and the inputs of the vision encoder.

torch is imported in functions that return tensors.
"""

from tracegrad.images.image_set import Images
from tracegrad.images.processor import ImageRule
from tracegrad.images.spans import ImageSpans, RowImages

__all__ = ["ImageRule", "ImageSpans", "Images", "RowImages"]
