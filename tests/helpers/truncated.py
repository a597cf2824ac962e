"""Tokens sampled with top-p, top-k and min-p by vLLM's formulas, and the records that servers write of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.token_sets import TokenSets

SIZE = 640  # of the example's vocabulary


def log_softmax(scores: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        shifted = scores - scores.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def truncated(logits: np.ndarray, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> np.ndarray:
    """Scores of one position with -inf for ids that vLLM's sampler excludes: min-p, then top-k, then top-p.

    Source: vllm 0.32, `v1/sample/logits_processor/builtin.py` and `v1/sample/ops/topk_topp_sampler.py`.
    """
    scores = logits.astype(np.float64) / temperature
    if min_p:
        p = np.exp(log_softmax(scores))
        scores = np.where(p < min_p * p.max(), -np.inf, scores)
    if top_k:
        scores = np.where(scores < np.sort(scores)[-top_k], -np.inf, scores)
    if top_p < 1:
        order = np.argsort(scores, kind="stable")
        cumulated = np.exp(log_softmax(scores))[order].cumsum()
        out = cumulated <= 1 - top_p
        out[-1] = False
        scores[order[out]] = -np.inf
    return scores


def sample(rng: np.random.Generator, tokens: int, kind: str, listed: int, *, spread=2.0, **options: Any):
    """Sample tokens, and return (record, kept ids of each token, logprob of each token over them).

    Args:
        kind: "raw" or "processed": the logprobs that the server returns.
        listed: number of the most probable ids that it lists.
        spread: of the logits.
    """
    entries, supports, logprobs = [], [], []
    for _ in range(tokens):
        logits = (spread * rng.standard_normal(SIZE)).astype(np.float32)
        scores = truncated(logits, **options)
        sampled_from = log_softmax(scores)
        token = int(rng.choice(SIZE, p=np.exp(sampled_from)))
        shown = log_softmax(logits.astype(np.float64)) if kind == "raw" else sampled_from
        shown = np.maximum(shown.astype(np.float32), -9999.0)  # JSON has no -inf, and vLLM writes this number
        # The sampled id first, then the most probable ones.
        top = [token, *[each for each in np.argsort(-shown, kind="stable").tolist() if each != token]][:listed]
        tops = [{"token_id": each, "logprob": float(shown[each])} for each in top]
        entries.append({"token_id": token, "logprob": float(shown[token]), "top_logprobs": tops})
        supports.append(sorted(np.flatnonzero(np.isfinite(scores)).tolist()))
        logprobs.append(float(sampled_from[token]))
    choice = {"index": 0, "finish_reason": "length", "token_ids": [entry["token_id"] for entry in entries]}
    response = {"request_id": "r", "choices": [{**choice, "logprobs": {"content": entries}}]}
    request = {"token_ids": [5, 6, 7], "sampling_params": {name: value for name, value in options.items() if value}}
    record = {"id": "t", "logprob_kind": kind, "reward": 1.0, "calls": [{"request": request, "response": response}]}
    return record, supports, logprobs


def entries_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the sampled tokens of a record."""
    return record["calls"][0]["response"]["choices"][0]["logprobs"]["content"]


def restricted(sequences: Sequences, vocabulary: int, seed: int = 1) -> Sequences:
    """Return the sequences with a support for two of three trained tokens: 1 to 20 ids, its own among them."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = [[] for _ in range(sequences.tokens)]
    for number, token in enumerate(sequences.terms.tolist()):
        if number % 3:
            own = int(sequences.ids[token])
            others = np.setdiff1d(np.arange(vocabulary), own)
            rows[token] = sorted([own, *rng.choice(others, rng.integers(0, 20), replace=False).tolist()])
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    values = np.array([i for row in rows for i in row], np.int32)
    return replace(sequences, support=TokenSets.from_rows(Ragged(offsets, values)))
