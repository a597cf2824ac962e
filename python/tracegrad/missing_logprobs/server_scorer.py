"""Read predictions at sampled tokens from a running vLLM, by its `prompt_logprobs`."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError, ServerError
from tracegrad.missing_logprobs.predictions import LISTED, Predictions
from tracegrad.rollout.client import Servers

_REQUESTS = 16
"""Conversations that the server scores at once."""


class ServerScorer:
    """Predictions of a vLLM server: it reports the logprob of each prompt token and of the most probable ids.

    They are logprobs at temperature 1, before truncation and penalties, so predictions at another temperature are NaN.

    Args:
        url: base URL of the server.
        model: name of the served model; None asks the server.

    Raises:
        ServerError: if the server does not answer, or refuses the request.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.writes, self.dtype = int(os.environ.get("RANK", "0")) == 0, "of the server"
        self._url, self._model = url, model
        self.engine = asyncio.run(self._introduce())

    def share(self, value: Any) -> Any:
        """Return the value: each process does all the work."""
        return value

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise the error of this process."""
        if error is not None:
            raise error

    def predict(
        self, sequences: Sequences, tokens: NDArray[np.int64], listed: int, at: NDArray[np.int32] | None = None
    ) -> Predictions:
        """Return the predictions at these tokens, at temperature 1; NaN at tokens of another temperature.

        Args:
            sequences: of any number of traces, without images.
            tokens: ascending indices into `sequences.ids`.
            listed: number of most probable ids to return; at most 20, as vLLM returns no more by default.
            at: not supported: a server lists the ids that are the most probable under its own model.
        """
        if sequences.images is not None and len(sequences.images):
            raise ArgumentError(
                "TG-FILL-006: the conversations have images, which are not sent to the server as ids. Leave out server "
                "(--logprobs-from), so that they are measured here."
            )
        assert at is None
        listed = min(listed, LISTED)
        ids = np.full((len(tokens), listed), -1, np.int32)
        top = np.full((len(tokens), listed), -np.inf, np.float32)
        logprobs = np.full(len(tokens), np.nan, np.float32)
        branch = np.searchsorted(sequences.cu_seqlens, tokens, side="right") - 1
        jobs = []
        for number in np.unique(branch).tolist():
            rows = np.flatnonzero(branch == number)
            start = int(sequences.cu_seqlens[number])
            jobs.append((rows, sequences.ids[start : int(tokens[rows[-1]]) + 1].tolist(), tokens[rows] - start))
        for (rows, prompt, places), answer in zip(
            jobs, asyncio.run(self._ask([job[1:] for job in jobs], listed)), strict=True
        ):
            for row, place, ranked in zip(rows.tolist(), places.tolist(), answer, strict=True):
                logprobs[row] = ranked.pop(prompt[place], np.nan) if listed == 0 else ranked.get(prompt[place], np.nan)
                best = list(ranked.items())[:listed]
                ids[row, : len(best)] = [id_ for id_, _ in best]
                top[row, : len(best)] = [value for _, value in best]
        logprobs[np.abs(sequences.inv_temperature[tokens] - 1) > 1e-6] = np.nan
        return Predictions(logprobs, ids, top, np.asarray(sequences.ids[tokens], np.int32))

    async def _introduce(self) -> str:
        """Return the name and version of the engine, and set the model's name."""
        async with self._servers("") as servers:
            if self._model is None:
                self._model = (await self._get(servers, "/v1/models"))["data"][0]["id"]
            version = (await self._get(servers, "/version")).get("version", "")
        return f"vllm {version}".strip()

    async def _get(self, servers: Servers, path: str) -> Mapping[str, Any]:
        answer = await servers.request(servers.urls[0], path, method="GET")
        if not answer.ok or not isinstance(answer.body, dict):
            raise ServerError(
                f"TG-FILL-007: {self._url}{path} answered {answer.error or answer.words}. It must be a vLLM server. "
                "Check the URL (--logprobs-from)."
            )
        return answer.body

    def _servers(self, model: str) -> Servers:
        return Servers([self._url], model=model, connections=_REQUESTS)

    async def _ask(
        self, jobs: Sequence[tuple[Sequence[int], NDArray[np.int64]]], listed: int
    ) -> list[list[dict[int, float]]]:
        """Return the `prompt_logprobs` of each prompt at its places."""
        limit = asyncio.Semaphore(_REQUESTS)
        async with self._servers(self._model or "") as servers:

            async def one(number: int, prompt: Sequence[int], places: NDArray[np.int64]) -> list[dict[int, float]]:
                body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": listed}
                async with limit:
                    answer = await servers.post("/v1/completions", body, session=f"fill-{number}")
                try:
                    values = answer["choices"][0]["prompt_logprobs"]
                    if len(values) != len(prompt):
                        raise ValueError(f"{len(values)} values")
                    return [_ranked(values[place]) for place in places.tolist()]
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise ServerError(
                        f"TG-FILL-008: {self._url} returned no prompt_logprobs for each of {len(prompt)} tokens "
                        f"({error!s:.80}). It must be a vLLM server. Leave out --logprobs-from to measure here."
                    ) from error

            return await asyncio.gather(*(one(number, *job) for number, job in enumerate(jobs)))


def _ranked(entries: Mapping[str, Any] | None) -> dict[int, float]:
    """Return logprobs by id, the most probable first.

    >>> _ranked({"7": {"logprob": -2.0, "rank": 2}, "5": {"logprob": -0.2, "rank": 1}})
    {5: -0.2, 7: -2.0}
    """
    values = {int(id_): float(entry["logprob"]) for id_, entry in (entries or {}).items()}
    return dict(sorted(values.items(), key=lambda item: -item[1]))
