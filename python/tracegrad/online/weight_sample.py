"""Ask the servers for tokens to compare, beside what the trainer says of them: `Canary` and `Sample`.

`Canary` asks every server for requests that the run has just made, and once, at the start, a plain one that shows what
its logprobs are of and whether it reads text as the model's tokenizer does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.sampling import mismatch
from tracegrad.errors import TracegradError
from tracegrad.online.logprob_gap import Floats, Gap, SyncFault, cached_response
from tracegrad.online.options import Play
from tracegrad.online.server_pool import Link
from tracegrad.packing import Step, pack
from tracegrad.rollout.client import measured_kind
from tracegrad.rollout.token_client import sampling_params
from tracegrad.trainer import Run
from tracegrad.weight_sync import SyncError, probe_requests
from tracegrad.weight_sync.probe_requests import Probe, Said

LENGTH = 16
"""Sampled tokens of one request at most."""
PROBES = 64
"""Requests that are taken from one step at most."""
ROWS = 32
"""Branches of a step that are looked at again at most."""
PLAIN = [{"role": "user", "content": "Please say a few words about the weather, and then stop."}]
_UNSENT = ("stream", "stream_options", "n", "best_of", "model", "seed", "cache_salt", "max_tokens", "min_tokens")
_UNSENT += ("max_completion_tokens", "use_beam_search", "echo", "prompt_logprobs", "ignore_eos", "user", "metadata")


@dataclass(frozen=True)
class Row:
    """Token ids with the logprobs that a server gave: NaN for tokens that are not compared.

    Args:
        ids: [n].
        rollout: [n] float32, nats.
        inv_temperature: [n] float32: 1 for raw logprobs, 1/temperature for processed ones.
        server: which server sampled it, by its place in `Sample.urls`.
    """

    ids: NDArray[np.int64]
    rollout: Floats
    inv_temperature: Floats
    server: int = 0

    def answers(self) -> Iterator["Row"]:
        """Each run of tokens that are compared, after everything that stands before it.

        >>> rollout = np.float32([np.nan, -1, -2, np.nan, -3])
        >>> [part.rollout.tolist() for part in Row(np.arange(5), rollout, np.ones(5, np.float32)).answers()]
        [[nan, -1.0, -2.0], [nan, nan, nan, nan, -3.0]]
        """
        edges = np.flatnonzero(np.diff(np.r_[False, ~np.isnan(self.rollout), False]))
        for start, end in edges.reshape(-1, 2):
            rollout = np.where(np.arange(end) < start, np.float32(np.nan), self.rollout[:end])
            yield Row(self.ids[:end], rollout, self.inv_temperature[:end], self.server)


@dataclass(frozen=True)
class Sample:
    """Tokens that servers sampled, whole on every rank, with what both sides say of them.

    Args:
        rows: as the servers sampled them.
        step: the same, ready for a forward pass; its terms are the tokens that are compared.
        logprobs: [M] float32, the trainer's, nats.
        urls: of the servers.
    """

    rows: Sequence[Row]
    step: Step
    logprobs: Floats
    urls: tuple[str, ...] = ()

    @classmethod
    def of(cls, driven: Run, rows: Sequence[Row], **more: Any) -> "Sample":
        """Measure rows with the policy as it is. Every rank calls this with the same rows."""
        ends = np.cumsum([0, *(len(row.ids) for row in rows)])
        flat = [np.concatenate([getattr(row, name) for row in rows]) for name in ("ids", "rollout", "inv_temperature")]
        there = ~np.isnan(flat[1])
        kind = {"inv_temperature": flat[2], "logprob_kind": "processed"}
        sequences = Sequences.from_arrays(flat[0], ends, flat[1], there, **kind)
        budget = max(driven.config.pack.token_budget, max(len(row.ids) for row in rows))
        [step] = pack(sequences, np.zeros(len(rows)), token_budget=budget, per="trace")
        return cls(rows, step, driven.measure(step), **more)

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
        """[M]: the place in `urls` of the server that sampled each token."""
        return np.array([row.server for row in self.rows], np.int64)[self.step.trace]

    def gap(self, logprobs: Floats | None = None, server: int | None = None) -> Gap:
        """How far the servers are from the policy, or from other logprobs [M]; of one server or of all."""
        here = np.ones(len(self.step), bool) if server is None else self.server == server
        return Gap.of(self.logprobs if logprobs is None else logprobs, self.rollout, here)

    def gap_of_row(self, row: int) -> Gap:
        """How far the servers are from the policy in one row."""
        return Gap.of(self.logprobs, self.rollout, self.step.trace == row)

    def of_rows(self, rows: Sequence[int], driven: Run) -> "Sample":
        """Some of the rows alone. Every rank calls this."""
        return Sample.of(driven, [self.rows[row] for row in rows], urls=self.urls)

    def by_answer(self, driven: Run) -> "Sample":
        """One row for each answer, since those of one conversation may be of several servers. Every rank calls this."""
        return Sample.of(driven, [part for row in self.rows for part in row.answers()], urls=self.urls)


@dataclass
class Canary:
    """What asks the servers of a run. Over ranks the first one asks, and all run the forward pass.

    Args:
        driven: the policy.
        link: to the servers; None on the ranks that follow.
        play: of the run.
        tokenizer: of the policy.
        processed: the servers' logprobs are of the distribution that was sampled from, temperature included.
    """

    driven: Run
    link: Link | None
    play: Play
    tokenizer: Tokenizer
    processed: bool = True
    probes: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before: list[Probe] = []
        self._answers: list[Said] = []

    def prepare(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take the requests that are asked from what has been played: the first of each trajectory, as it was sent."""
        found = [probe for record in records if (probe := probe_of(record, self.play)) is not None]
        self.probes = found[:PROBES] or self.probes or [self._plain()]

    def ask(self, salt: str | None = None) -> Sample:
        """Ask every server for at least `weight_sync.probe_requests.TOKENS` tokens, and measure them.

        One request is sent twice, so that a cache of responses is found: the first time at the end of the asking, later
        by one of the asking before.

        Args:
            salt: of the requests' caches; a new one finds nothing cached.

        Raises:
            SyncError: if a server does not answer as it should.
            SyncFault: if two answers have one id.
        """

        probes, answers = [*self._before, *self.probes], self._answers
        length = sum(len(one.ids) for one in answers) / len(answers) if answers else None

        async def asked(servers: Any, _: Any) -> tuple[list[Said], list[float]]:
            said = await probe_requests.ask(servers, probes, length=length, again=not self._before, salt=salt)
            return said, [probes[one.number].temperature for one in said]

        said, temperatures = self._shared(asked)
        if (twice := probe_requests.repeated([*answers, *said])) is not None:
            raise SyncFault(cached_response(twice.id, twice.url))
        if salt is None:
            self._before, self._answers = self.probes[:1], said
        return self._measured(said, temperatures)

    def look(self) -> list[str]:
        """Ask every server one plain request, and say what a user should know of the answers.

        Sets `processed`.

        Raises:
            SyncFault: for a server with another tokenizer.
            ArgumentError: where some servers give raw logprobs and others processed ones.
        """
        probe = self._plain()

        async def asked(servers: Any, _: Any) -> tuple[str | None, list[Said]]:
            said = [await probe_requests.ask_one(servers, url, probe) for url in servers.ready]
            return await measured_kind(servers), [one for one in said if one is not None]

        try:
            kind, said = self._shared(asked)
        except SyncError as error:
            return [f"a plain request was refused, so it is not known how the server writes a conversation: {error}"]
        self.processed = (kind or ("raw" if self.play.temperature == 1.0 else "processed")) == "processed"
        lines = [line for one in said if (line := self._template_differs(one))]
        if self.processed:
            return lines
        return [
            *lines,
            "the servers' logprobs are raw. The check sees other weights, and cannot see a temperature, top_p, top_k, "
            "min_p or penalty that something between the run and a server sets. Start vLLM with --logprobs-mode "
            "processed_logprobs.",
        ]

    def _template_differs(self, one: Said) -> str:
        """What a user should know of how a server writes a conversation; raises for another tokenizer."""
        if self.play.ids == "tokens":
            return ""
        text = self.tokenizer.render(PLAIN, add_generation_prompt=True).text
        own = self.tokenizer.encode(text).tolist()
        if one.prompt_ids == own:
            return ""
        try:
            theirs = self.tokenizer.decode(np.asarray(one.prompt_ids, np.int32))
        except TracegradError:
            theirs = text
        if theirs == text or self._reads_otherwise(one.url, text, own):
            raise SyncFault(
                f"{one.url} has another tokenizer than the policy: the same conversation is the ids "
                f"{one.prompt_ids[:12]}... there and {own[:12]}... here. Every logprob would be of another token. "
                "Start the server with the policy's own folder, or its --tokenizer."
            )
        return (
            f"{one.url} has another chat template than the policy's folder: for a plain conversation it reads "
            f"{theirs[:120]!r}, and the folder's gives {text[:120]!r}. The run trains on what the server reads."
        )

    def _reads_otherwise(self, url: str, text: str, own: list[int]) -> bool:
        """Whether the server makes other ids of a text, where it can be asked."""

        async def asked(servers: Any, _: Any) -> list[int] | None:
            told = {"model": servers.model, "prompt": text, "add_special_tokens": False}
            answer = await servers.ask(url, "/tokenize", told)
            return answer.body.get("tokens") if answer.ok and isinstance(answer.body, dict) else None

        found = self._shared(asked)
        return found is not None and found != own

    def _plain(self) -> Probe:
        temperature = self.play.temperature
        told: dict[str, Any] = {"temperature": temperature, "top_p": 1.0, "max_tokens": LENGTH}
        if self.play.ids == "tokens":
            ids = self.tokenizer.render_ids(PLAIN, add_generation_prompt=True).tolist()
            return Probe(
                probe_requests.GENERATE, {"token_ids": ids, "sampling_params": {**told, "logprobs": 0}}, temperature
            )
        return Probe(probe_requests.CHAT, {"messages": PLAIN, **told}, temperature)

    def _shared(self, work: Any) -> Any:
        """What the first rank hears from the servers, on every rank."""
        said, error = None, None
        if self.link is not None:
            try:
                said = self.link.run(work)
            except TracegradError as raised:
                error = raised
        said, told = self.driven.ranks.shared((said, error and str(error)))
        if told:
            raise error or SyncError(told)
        return said

    def _measured(self, said: Sequence[Said], temperatures: Sequence[float]) -> Sample:
        urls = tuple(dict.fromkeys(one.url for one in said))
        rows = []
        for one, temperature in zip(said, temperatures, strict=True):
            ids = np.array([*one.prompt_ids, *one.ids], np.int64)
            rollout = np.r_[np.full(len(one.prompt_ids), np.nan), one.logprobs].astype(np.float32)
            warmth = np.full(len(ids), 1 / temperature if self.processed else 1.0, np.float32)
            if one.ids:
                rows.append(Row(ids, rollout, warmth, urls.index(one.url)))
        if not rows:
            raise SyncError(
                f"{', '.join(urls)} sampled no token for {len(said)} requests of the run. What they serve cannot be "
                "compared with the trainer. Look at their logs."
            )
        return Sample.of(self.driven, rows, urls=urls)


def probe_of(record: Mapping[str, Any], play: Play) -> Probe | None:
    """The first request of a trajectory, as it is asked again: short, alone, and at the path that it was played at.

    None for one that cannot be compared: with pictures, or with options that the trainer cannot follow.

    >>> request = {"messages": [{"role": "user", "content": "2+2?"}], "temperature": 0.5, "stream": True}
    >>> probe_of({"calls": [{"request": request, "response": {}}]}, Play()).body["max_tokens"]
    16
    """
    try:
        call = record["calls"][0]
        request = {name: value for name, value in call["request"].items() if name not in _UNSENT and value is not None}
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if mismatch(request, "processed") or not _text_alone(request.get("messages")):
        return None
    temperature = float(request.get("temperature", 1.0))
    request["max_tokens"] = LENGTH
    if play.ids == "tokens":
        response = call.get("response")
        prompt = response.get("prompt_token_ids") if isinstance(response, Mapping) else None
        told = {"token_ids": prompt, "sampling_params": {**sampling_params(request), "logprobs": 0}}
        return Probe(probe_requests.GENERATE, told, temperature) if prompt else None
    if "messages" in request:
        return Probe(probe_requests.CHAT, request, temperature)
    return Probe(probe_requests.COMPLETIONS, request, temperature) if isinstance(request.get("prompt"), str) else None


def _text_alone(messages: Any) -> bool:
    """Whether messages hold no picture, sound or video."""
    parts = [
        part
        for message in messages or []
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)


def sample_of(driven: Run, sequences: Sequences, here: NDArray[np.bool_], without: NDArray[np.bool_]) -> Sample | None:
    """Tokens of a step once more, from at most `ROWS` of its branches; None where there are none.

    Args:
        sequences: of the step, the same on every rank.
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
        ids, warmth = sequences.ids[part].astype(np.int64), sequences.inv_temperature[part]
        rows.append(Row(ids[:last], rollout[:last], warmth[:last]))
    return Sample.of(driven, rows) if rows else None
