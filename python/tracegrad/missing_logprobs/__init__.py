"""Measure the logprobs that recorded tokens lack, with the checkpoint that wrote them."""

from tracegrad.missing_logprobs.checkpoint_test import CheckpointTest, SampledTokens, check_checkpoint
from tracegrad.missing_logprobs.fill_file import CheckpointRefused, FillReport, fill

__all__ = ["CheckpointRefused", "CheckpointTest", "FillReport", "SampledTokens", "check_checkpoint", "fill"]
