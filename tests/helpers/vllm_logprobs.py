"""Compute the trainer's logprobs of what a vLLM sampled."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def recomputed(example, sequences):
    """[T] float32: the trainer's logprob of each token after those before it, NaN for the first of a branch."""
    model = AutoModelForCausalLM.from_pretrained(example / "model", dtype=torch.float32).eval()
    logprobs = np.full(sequences.tokens, np.nan, np.float32)
    for start, end in zip(sequences.cu_seqlens[:-1], sequences.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(sequences.ids[start:end]).long()[None]
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1)
        logprobs[start + 1 : end] = scores.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return logprobs
