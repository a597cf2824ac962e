"""Sample tokens from the servers and compute the trainer's logprobs for them: `ProbeSampler` and `Sample`.

`ProbeSampler` sends every server requests that the run has just made. Once, at the start, it sends a plain request
that shows the kind of the logprobs and whether the server's tokenizer is the model's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.token_sets import TokenSets
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.sampling import CANONICAL_NAMES, NEUTRAL, PENALTIES, REPLAYED, is_text_only, mismatch
from tracegrad.errors import TracegradError
from tracegrad.online.logprob_gap import Floats, LogprobGap, SyncFault, cached_response
from tracegrad.online.options import RolloutConfig
from tracegrad.online.server_pool import ServerPool
from tracegrad.packing import Step, pack
from tracegrad.rollout.client import measure_logprob_kind
from tracegrad.rollout.token_client import sampling_params
from tracegrad.trainer import Trainer
from tracegrad.weight_sync import SyncError, probe_requests
from tracegrad.weight_sync.probe_requests import Probe, ProbeAnswer

LENGTH = 16
"""Maximum number of sampled tokens in one request."""
PROBES = 64
"""Maximum number of requests from one step."""
ROWS = 32
"""Maximum number of branches of a step that are compared again."""
PLAIN = [{"role": "user", "content": "Please say a few words about the weather, and then stop."}]
_UNSENT = ("stream", "stream_options", "n", "best_of", "model", "seed", "cache_salt", "max_tokens", "min_tokens")
_UNSENT += ("max_completion_tokens", "use_beam_search", "echo", "prompt_logprobs", "ignore_eos", "user", "metadata")


@dataclass(frozen=True)
class ProbeRow:
    """Token ids with the logprobs that a server returned: NaN for tokens that are not compared.

    Args:
        ids: [n].
        rollout: [n] float32, nats.
        inv_temperature: [n] float32: 1 for raw logprobs, 1/temperature for processed ones.
        server: index of the server in `Sample.urls`.
        support: for each token the ids from which it was sampled, as in `Sequences`; None for the whole vocabulary.
        turn: [n] int32, the answer to which each token belongs, -1 if it was not sampled; None: the compared tokens
            are one answer.
        penalties: of the answers, numbered as in `turn`; None if there are none.
    """

    ids: NDArray[np.int64]
    rollout: Floats
    inv_temperature: Floats
    server: int = 0
    support: TokenSets | None = None
    turn: NDArray[np.int32] | None = None
    penalties: Penalties | None = None

    @property
    def turns(self) -> NDArray[np.int32]:
        """[n] int32: `turn`, or its default."""
        return np.where(np.isnan(self.rollout), -1, 0).astype(np.int32) if self.turn is None else self.turn

    def answers(self) -> Iterator["ProbeRow"]:
        """Yield each run of compared tokens with all tokens before it.

        >>> rollout = np.float32([np.nan, -1, -2, np.nan, -3])
        >>> [part.rollout.tolist() for part in ProbeRow(np.arange(5), rollout, np.ones(5, np.float32)).answers()]
        [[nan, -1.0, -2.0], [nan, nan, nan, nan, -3.0]]
        """
        edges = np.flatnonzero(np.diff(np.r_[False, ~np.isnan(self.rollout), False]))
        for start, end in edges.reshape(-1, 2):
            rollout = np.where(np.arange(end) < start, np.float32(np.nan), self.rollout[:end])
            support = None if self.support is None else self.support.take(np.arange(end))
            yield replace(
                self,
                ids=self.ids[:end],
                rollout=rollout,
                inv_temperature=self.inv_temperature[:end],
                support=support,
                turn=self.turns[:end],
            )


@dataclass(frozen=True)
class Sample:
    """Tokens that servers sampled, the same on every rank, with the logprobs of both sides.

    Args:
        rows: the tokens by answer.
        step: the same tokens, packed for a forward pass; its terms are the compared tokens.
        logprobs: [M] float32, the trainer's, nats.
        urls: URLs of the servers.
    """

    rows: Sequence[ProbeRow]
    step: Step
    logprobs: Floats
    urls: tuple[str, ...] = ()

    @classmethod
    def of(cls, trainer: Trainer, rows: Sequence[ProbeRow], **more: Any) -> "Sample":
        """Compute the logprobs of rows with the current policy. Every rank must call this with the same rows."""
        ends = np.cumsum([0, *(len(row.ids) for row in rows)])
        arrays = [
            np.concatenate([getattr(row, name) for row in rows])
            for name in ("ids", "rollout", "inv_temperature", "turns")
        ]
        is_compared = ~np.isnan(arrays[1])
        support = TokenSets.concatenate([(row.support, np.arange(len(row.ids))) for row in rows])
        penalties = Penalties.concatenate([(row.penalties, np.arange(row.turns.max() + 1)) for row in rows])
        sequences = Sequences.from_arrays(
            arrays[0],
            ends,
            arrays[1],
            is_compared,
            inv_temperature=arrays[2],
            turn=arrays[3],
            logprob_kind="processed",
            support=support,
            penalties=penalties,
        )
        budget = max(trainer.config.pack.tokens_per_row, max(len(row.ids) for row in rows))
        [step] = pack(sequences, np.zeros(len(rows)), tokens_per_row=budget, per="trace")
        return cls(rows, step, trainer.compute_logprobs(step), **more)

    @property
    def rollout(self) -> Floats:
        """[M] float32, the servers', nats."""
        return self.step.rollout_logprobs

    @property
    def off(self) -> Floats:
        """[M] float32: rollout - logprobs, nats."""
        return self.rollout - self.logprobs

    @property
    def server(self) -> NDArray[np.int64]:
        """[M]: index in `urls` of the server that sampled each token."""
        return np.array([row.server for row in self.rows], np.int64)[self.step.trace]

    def gap(self, logprobs: Floats | None = None, server: int | None = None) -> LogprobGap:
        """Return the gap between the servers and the policy, or other logprobs [M]; of one server or of all."""
        here = np.ones(len(self.step), bool) if server is None else self.server == server
        return LogprobGap.of(self.logprobs if logprobs is None else logprobs, self.rollout, here)

    def gap_of_row(self, row: int) -> LogprobGap:
        """Return the gap between the servers and the policy in one row."""
        return LogprobGap.of(self.logprobs, self.rollout, self.step.trace == row)

    def of_rows(self, rows: Sequence[int], trainer: Trainer) -> "Sample":
        """Return a sample of only these rows. Every rank must call this."""
        return Sample.of(trainer, [self.rows[row] for row in rows], urls=self.urls)

    def by_answer(self, trainer: Trainer) -> "Sample":
        """Return a sample with one row per answer, since a conversation may use several servers.

        Every rank must call this.
        """
        return Sample.of(trainer, [part for row in self.rows for part in row.answers()], urls=self.urls)


@dataclass
class ProbeSampler:
    """Sends probe requests to the servers of a run. The first rank sends them; all ranks run the forward pass.

    Args:
        trainer: trainer with the policy.
        server_pool: connection to the servers; None on other ranks.
        rollout: rollout options of the run.
        tokenizer: tokenizer of the policy.
        processed: whether the servers' logprobs are of the sampled distribution, including the temperature.
    """

    trainer: Trainer
    server_pool: ServerPool | None
    rollout: RolloutConfig
    tokenizer: Tokenizer
    processed: bool = True
    probes: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._repeated_probes: list[Probe] = []
        self._answers: list[ProbeAnswer] = []

    def prepare(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Choose the probes: the first request of each trajectory, as it was sent."""
        matches = [probe for record in records if (probe := probe_of(record, self.rollout)) is not None]
        self.probes = matches[:PROBES] or self.probes or [self._plain_probe()]

    def ask(self, salt: str | None = None) -> Sample:
        """Probe every server for at least `weight_sync.probe_requests.TOKENS` tokens and compute their logprobs.

        One request is sent twice to detect a cache of responses: in the first call at its end, later with one of the
        call before.

        Args:
            salt: salt of the requests' caches; with a new one, nothing is cached.

        Raises:
            SyncError: if a server does not answer correctly.
            SyncFault: if two answers have one id.
        """

        probes, answers = [*self._repeated_probes, *self.probes], self._answers
        length = sum(len(answer.ids) for answer in answers) / len(answers) if answers else None

        async def send_probes(servers: Any, _: Any) -> tuple[list[ProbeAnswer], list[float]]:
            results = await probe_requests.send_probes(
                servers, probes, length=length, repeat_first=not self._repeated_probes, salt=salt
            )
            return results, [probes[answer.number].temperature for answer in results]

        results, temperatures = self._run_on_first_rank(send_probes)
        if (duplicate := probe_requests.find_repeated_id([*answers, *results])) is not None:
            raise SyncFault(cached_response(duplicate.id, duplicate.url))
        if salt is None:
            self._repeated_probes, self._answers = self.probes[:1], results
        return self._measured(results, temperatures)

    def inspect_servers(self) -> list[str]:
        """Send one plain request to every server and return log lines about the answers.

        Sets `processed`.

        Raises:
            SyncFault: for a server with another tokenizer.
            ArgumentError: if some servers return raw logprobs and others processed ones.
        """
        probe = self._plain_probe()

        async def send_probe(servers: Any, _: Any) -> tuple[str | None, list[ProbeAnswer]]:
            answers = [await probe_requests.send_probe(servers, url, probe) for url in servers.ready]
            return await measure_logprob_kind(servers), [answer for answer in answers if answer is not None]

        try:
            kind, answers = self._run_on_first_rank(send_probe)
        except SyncError as error:
            return [f"a plain request was refused, so the server's chat template was not checked: {error}"]
        self.processed = (kind or ("raw" if self.rollout.temperature == 1.0 else "processed")) == "processed"
        lines = [line for answer in answers if (line := self._template_difference(answer))]
        if self.processed:
            return lines
        return [
            *lines,
            "the servers' logprobs are raw. The check detects other weights, but not a temperature, top_p, top_k, "
            "min_p or penalty that is set between the run and a server. Start vLLM with --logprobs-mode "
            "processed_logprobs.",
        ]

    def _template_difference(self, answer: ProbeAnswer) -> str | None:
        """Return a log line if a server has another chat template, else None; raise SyncFault for another tokenizer."""
        if self.rollout.input == "token_ids":
            return None
        text = self.tokenizer.render(PLAIN, add_generation_prompt=True).text
        local = self.tokenizer.encode(text).tolist()
        if answer.prompt_ids == local:
            return None
        try:
            theirs = self.tokenizer.decode(np.asarray(answer.prompt_ids, np.int32))
        except TracegradError:
            theirs = text
        if theirs == text or self._encodes_differently(answer.url, text, local):
            raise SyncFault(
                f"TG-ONLINE-047: {answer.url} has another tokenizer than the policy: the server encodes a conversation "
                f"as {answer.prompt_ids[:12]}, the policy as {local[:12]} (first 12 ids). Every logprob would be for "
                "another token. Start the server with the policy's folder, or pass it as --tokenizer."
            )
        return (
            f"{answer.url} has another chat template than the policy's folder: it renders a plain conversation as "
            f"{theirs[:120]!r}, and the folder's template as {text[:120]!r}. The run trains on the server's prompts."
        )

    def _encodes_differently(self, url: str, text: str, local: list[int]) -> bool:
        """Return whether the server encodes a text to other ids, if it has /tokenize."""

        async def tokenize(servers: Any, _: Any) -> list[int] | None:
            request = {"model": servers.model, "prompt": text, "add_special_tokens": False}
            answer = await servers.request(url, "/tokenize", request)
            return answer.body.get("tokens") if answer.ok and isinstance(answer.body, dict) else None

        ids = self._run_on_first_rank(tokenize)
        return ids is not None and ids != local

    def _plain_probe(self) -> Probe:
        temperature = self.rollout.temperature
        sampling: dict[str, Any] = {"temperature": temperature, "top_p": 1.0, "max_tokens": LENGTH}
        if self.rollout.input == "token_ids":
            ids = self.tokenizer.render_ids(PLAIN, add_generation_prompt=True).tolist()
            return Probe(
                probe_requests.GENERATE, {"token_ids": ids, "sampling_params": {**sampling, "logprobs": 0}}, temperature
            )
        return Probe(probe_requests.CHAT, {"messages": PLAIN, **sampling}, temperature)

    def _run_on_first_rank(self, work: Any) -> Any:
        """Run work with the servers on the first rank, and return its result or raise its error on every rank."""
        result, error = None, None
        if self.server_pool is not None:
            try:
                result = self.server_pool.run(work)
            except TracegradError as raised:
                error = raised
        result, message = self.trainer.ranks.broadcast((result, error and str(error)))
        if message:
            raise error or SyncError(message)
        return result

    def _measured(self, answers: Sequence[ProbeAnswer], temperatures: Sequence[float]) -> Sample:
        urls = tuple(dict.fromkeys(answer.url for answer in answers))
        rows = []
        for answer, temperature in zip(answers, temperatures, strict=True):
            ids = np.array([*answer.prompt_ids, *answer.ids], np.int64)
            rollout = np.r_[np.full(len(answer.prompt_ids), np.nan), answer.logprobs].astype(np.float32)
            inv_temperature = np.full(len(ids), 1 / temperature if self.processed else 1.0, np.float32)
            if answer.ids:
                rows.append(ProbeRow(ids, rollout, inv_temperature, urls.index(answer.url)))
        if not rows:
            raise SyncError(
                f"TG-ONLINE-048: {', '.join(urls)} sampled no token for {len(answers)} requests of the run, so their "
                "weights cannot be checked. Read their logs."
            )
        return Sample.of(self.trainer, rows, urls=urls)


def probe_of(record: Mapping[str, Any], rollout: RolloutConfig) -> Probe | None:
    """Return the first request of a trajectory as a probe: short, single, and at the same path.

    Return None for a request that cannot be compared: with images, or with options that the trainer cannot reproduce.
    A probe has no top_p, top_k, min_p, penalties and logit_bias, so that it shows the logprobs of the policy itself.

    >>> request = {"messages": [{"role": "user", "content": "2+2?"}], "temperature": 0.5, "stream": True}
    >>> probe_of({"calls": [{"request": request, "response": {}}]}, RolloutConfig()).body["max_tokens"]
    16
    """
    try:
        call = record["calls"][0]
        request = {name: value for name, value in call["request"].items() if name not in _UNSENT and value is not None}
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    replayed = {name for name in request if CANONICAL_NAMES.get(name, name) in (*REPLAYED, *PENALTIES)}
    request = {
        name: NEUTRAL[CANONICAL_NAMES.get(name, name)] if name in replayed else value
        for name, value in request.items()
        if name not in ("top_logprobs", "return_tokens_as_token_ids", "logit_bias")
    }
    if mismatch(request, "processed") or not is_text_only(request.get("messages")):
        return None
    temperature = float(request.get("temperature", 1.0))
    request["max_tokens"] = LENGTH
    if rollout.input == "token_ids":
        response = call.get("response")
        prompt = response.get("prompt_token_ids") if isinstance(response, Mapping) else None
        body = {"token_ids": prompt, "sampling_params": {**sampling_params(request), "logprobs": 0}}
        return Probe(probe_requests.GENERATE, body, temperature) if prompt else None
    if "messages" in request:
        return Probe(probe_requests.CHAT, request, temperature)
    return Probe(probe_requests.COMPLETIONS, request, temperature) if isinstance(request.get("prompt"), str) else None


def sample_of(
    trainer: Trainer, sequences: Sequences, here: NDArray[np.bool_], without: NDArray[np.bool_]
) -> Sample | None:
    """Sample tokens of a step again, from at most `ROWS` of its branches; None if there are none.

    Args:
        trainer: trainer with the policy.
        sequences: sequences of the step, the same on every rank.
        here: [T] bool, tokens that are compared.
        without: [R] bool, traces that are left out.
    """
    if sequences.images is not None:
        return None
    here = here & sequences.trainable & ~np.isnan(sequences.rollout_logprobs)
    cu = sequences.cu_seqlens
    here &= ~np.repeat(without[sequences.trace], np.diff(cu))
    counts = np.add.reduceat(here, cu[:-1]) if len(here) else np.zeros(0, np.int64)
    chosen = np.flatnonzero(counts)
    chosen = (
        chosen[np.unique(np.linspace(0, len(chosen) - 1, ROWS).round().astype(np.int64))] if len(chosen) else chosen
    )
    rows = []
    for branch in chosen:
        part = slice(cu[branch], cu[branch + 1])
        rollout = np.where(here[part], sequences.rollout_logprobs[part], np.float32(np.nan))
        last = int(np.flatnonzero(here[part])[-1]) + 1
        ids, inv_temperature = sequences.ids[part].astype(np.int64), sequences.inv_temperature[part]
        tokens = np.arange(cu[branch], cu[branch] + last)
        support = None if sequences.support is None else sequences.support.take(tokens)
        turn = sequences.turn[part][:last]
        generations = sequences.cu_turns[sequences.trace[branch]] + np.arange(turn.max() + 1)
        penalties = Penalties.concatenate([(sequences.penalties, generations)])
        rows.append(
            ProbeRow(
                ids[:last], rollout[:last], inv_temperature[:last], support=support, turn=turn, penalties=penalties
            )
        )
    return Sample.of(trainer, rows) if rows else None
