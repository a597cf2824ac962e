"""Arithmetic behind `policy`, one file per operation; imported on use, with torch. No models, no batches.

In come tensors; out go logprobs, entropies or a loss with its gradient, without logits of all rows. One file per
operation, imported on use, with torch. No models, no batches. Its files, each using those before it alone: `plan`
(which road, and what it costs); `chunk` (the reference), `triton_rows`, `compiled` (the same faster); `head`,
`fused`; `stack`.
"""
