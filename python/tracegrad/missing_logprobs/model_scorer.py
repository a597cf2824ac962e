"""Compute predictions at sampled tokens with forward passes of a model, on one or several processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tracegrad._core import __version__
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.missing_logprobs.predictions import Predictions
from tracegrad.model.forward import read_states
from tracegrad.model.lm_head import inverse_of, token_logprobs
from tracegrad.model.lm_head_chunked import logits_of, slices
from tracegrad.model.structure import head_of
from tracegrad.packing import Batch, pack
from tracegrad.trainer.distributed import Ranks, autocast, device_named
from tracegrad.trainer.lora import load_model

_TABLE_BYTES = 64 << 20
"""Size of one table of logits [rows, V], in bytes."""


class ModelScorer:
    """Predictions by forward passes of a model. With several processes, each scores a part of the traces.

    Args:
        folder: a transformers causal LM, or LoRA adapters with their base.
        device: "auto" for CUDA if it is available, or a torch device.
        dtype: "auto" for bfloat16 on CUDA and float32 elsewhere, "float32" or "bfloat16".
        tokens_per_row: tokens of one forward pass, or those of the longest conversation.
        ranks: the processes, which all make the same calls; default those of torchrun.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokens_per_row: int = 8192,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks.join()
        self.device = device_named(device)
        is_bf16 = dtype == "bfloat16" or (dtype == "auto" and self.device.type == "cuda")
        self.precision = torch.bfloat16 if is_bf16 else torch.float32
        self.writes = self.ranks.first
        self.engine, self.dtype = f"tracegrad {__version__}", "bfloat16" if is_bf16 else "float32"
        self.model: Any = load_model(Path(folder)).to(self.device).eval()
        self._tokens_per_row, self._folder = tokens_per_row, folder

    def share(self, value: Any) -> Any:
        """Return the value of the first process."""
        return self.ranks.broadcast(value)

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise an error of one process on all of them."""
        self.ranks.raise_on_all(error)

    @torch.no_grad()
    def predict(
        self, sequences: Sequences, tokens: NDArray[np.int64], listed: int, at: NDArray[np.int32] | None = None
    ) -> Predictions:
        """Return the predictions at these tokens [M], at `sequences.inv_temperature`, over the whole vocabulary.

        Args:
            sequences: of any number of traces.
            tokens: ascending indices into `sequences.ids`.
            listed: number of most probable ids to return, at most that of the vocabulary; 0 for none.
            at: [M, K] the ids to return in their place, -1 for none; equal after the same ids.
        """
        selected = np.zeros(sequences.tokens, bool)
        selected[tokens] = True
        scored = replace(sequences, trainable=selected, support=None, penalties=None)
        logprobs = np.full(sequences.tokens, np.nan, np.float32)
        vocabulary = head_of(self.model).weight.shape[0]
        if at is not None and at.max(initial=-1) >= vocabulary:
            raise ArgumentError(
                f"TG-FILL-012: {self._folder} has {vocabulary:,} ids, and the other checkpoint predicts id "
                f"{int(at.max()):,}. Checkpoints with another vocabulary cannot be compared. Leave it out of "
                "compare_with (--compare-with)."
            )
        listed = min(listed, vocabulary) if at is None else at.shape[1]
        place = np.cumsum(selected) - 1
        ids = np.full((len(tokens), listed), -1, np.int32)
        top = np.full((len(tokens), listed), -np.inf, np.float32)
        longest = int(np.diff(sequences.cu_seqlens).max(initial=1))
        if len(tokens):
            plan = pack(
                scored,
                np.zeros(sequences.traces),
                tokens_per_row=max(self._tokens_per_row, longest),
                per="trace",
                ranks=self.ranks.world,
                rank=self.ranks.rank,
                share_prefixes=self.device.type == "cuda",  # On CPU a row's common prefix is computed once by `stack`.
            )
            for step in plan:
                for batch in step.batches:
                    own = step.origin[batch.term]
                    wanted = None if at is None else self._by_row(batch, at[place[own]])
                    values = self._predict_batch(batch.to(self.device), listed, wanted)
                    logprobs[own] = values[0].float().cpu().numpy()
                    if listed:
                        ids[place[own]] = values[1].int().cpu().numpy()
                        top[place[own]] = values[2].float().cpu().numpy()
        if not self.ranks.is_single:
            logprobs, ids, top = self._merge(logprobs, ids, top, place, tokens)
        return Predictions(logprobs[tokens], ids, top, np.asarray(sequences.ids[tokens], np.int32))

    def _by_row(self, batch: Batch, at: NDArray[np.int32]) -> torch.Tensor:
        """Return the ids [U, K] of each logit row, given those of each token [m, K]."""
        rows = np.zeros((len(batch.read), at.shape[1]), np.int64)
        rows[batch.logit_row] = at
        return torch.from_numpy(rows).to(self.device)

    def _predict_batch(self, batch: Batch, listed: int, at: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return logprobs [m], and if any are listed the ids and their logprobs [m, K]."""
        head = head_of(self.model)
        with autocast(self.device.type, self.precision):
            hidden = read_states(self.model, batch)
            if not listed:
                options = {"bias": head.bias, "softcap": head.softcap, "logit_scale": head.logit_scale}
                target, inverse = batch.target, batch.inv_temperature
                logp, _ = token_logprobs(hidden, head.weight, target, inv_temperature=inverse, **options)
                return (logp[batch.logit_row],)
        head = head._replace(
            weight=head.weight.to(hidden.dtype), bias=None if head.bias is None else head.bias.to(hidden.dtype)
        )
        inverse = inverse_of(batch.inv_temperature, hidden)
        parts: list[tuple[torch.Tensor, ...]] = []
        for here in slices(len(hidden), max(1, _TABLE_BYTES // (4 * head.weight.shape[0]))):
            scores = logits_of(hidden[here], head)
            scores = scores if inverse is None else scores * inverse[here, None]
            logp = scores.log_softmax(-1)
            if at is None:
                top, ids = logp.topk(listed, dim=-1)
            else:
                ids = at[here]
                top = logp.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
            parts.append((logp.gather(1, batch.target[here, None])[:, 0], ids, top))
        return tuple(torch.cat(column)[batch.logit_row] for column in zip(*parts, strict=True))

    def _merge(
        self,
        logprobs: NDArray[np.float32],
        ids: NDArray[np.int32],
        top: NDArray[np.float32],
        place: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Return the predictions of all ranks."""
        held = ~np.isnan(logprobs)
        merged = self.ranks.merge(np.nan_to_num(logprobs), held)
        if ids.shape[1]:
            mine = held[tokens]
            parts = self.ranks.all_gather((np.flatnonzero(mine), ids[mine], top[mine]))
            for rows, their_ids, their_top in parts:
                ids[rows], top[rows] = their_ids, their_top
        return merged, ids, top
