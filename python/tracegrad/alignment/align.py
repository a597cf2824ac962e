"""Align recorded traces with a tokenizer: `align` makes `Sequences`, `recover_ids` only the sampled ids."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core, _validation
from tracegrad.alignment.mismatch import Drift, untrained
from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import LOGPROB_KINDS, SERVERS
from tracegrad.data.trace import Trace, Traces
from tracegrad.errors import ArgumentError
from tracegrad.images import Images, Pictures, Rule
from tracegrad.images.spans import offsets


@dataclass(frozen=True)
class Recovered:
    """The sampled tokens of G generations, end to end. S tokens.

    Args:
        ids: [S] int32, -1 where the record does not determine the id.
        tier: [S] uint8, index into `codes.TIERS`.
        logprobs: [S] float32, nats, NaN where not recorded.
        cu_tokens: [G+1] int64: generation g is tokens cu_tokens[g]:cu_tokens[g+1]; empty where the record lists no
            tokens, or those of another tokenizer.
        trace: [G] int32, row of the trace.
        turn: [G] int32, generation of its trace.
        reason: [S] uint8, index into `Drift.reasons`: why the id is not known, 0 where it is.
    """

    ids: NDArray[np.int32]
    tier: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    cu_tokens: NDArray[np.int64]
    trace: NDArray[np.int32]
    turn: NDArray[np.int32]
    reason: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def known(self) -> NDArray[np.bool_]:
        """[S] bool: where the id is known."""
        return self.ids >= 0


def recover_ids(traces: Traces, tokenizer: Tokenizer) -> Recovered:
    """The ids that each generation's record determines by ids, bytes, texts and count; never a guess."""
    return Recovered(**_core.recover_ids(traces.core, tokenizer._core))


def align(
    traces: Traces | Trace,
    tokenizer: Tokenizer,
    *,
    mode: str = "splice",
    merge: str = "mask",
    strict: bool = True,
    lenient: bool = False,
    text_only: bool = False,
    assume_canonical: bool = False,
    logprob_kind: str | None = None,
    sampling_defaults: Mapping[str, Any] | None = None,
    server_profile: str | None = None,
    on_error: str = "raise",
    pictures: Rule | None = None,
) -> Sequences:
    """Recorded traces to the ids the trainer will use: sampled ids are the data, the template supplies the rest.

    Args:
        traces: what `read` gave, or one of them.
        tokenizer: of the model that will be trained.
        mode: "splice" keeps the sampled ids; "align" takes those of the rendered conversation, each with the logprob of
            the sampled token that it is. For trainers that render again.
        merge: in align mode, what a rendered token gets that is several sampled ones: "mask" nothing, "sum" the sum of
            their logprobs, which is the probability of one way to write it.
        strict: in align mode, mask what follows the first token of a turn that is not the sampled one: the policy saw
            other ids there.
        lenient: go on after an id that cannot be known, with the canonical tokens of its text, untrained and counted.
        text_only: make text without logprobs (tier T6) trainable, for weighted fine-tuning.
        assume_canonical: train on the canonical tokens of a text or message whose tokens are not recorded, where their
            number is that of the logprobs (tiers T4 and T5): often the sampled ones, not known to be.
        logprob_kind: what the logprobs are of ("raw", "processed", "unknown"), over what the records say.
        sampling_defaults: what the servers took if a request leaves a sampling option out, such as
            {"temperature": 0.6, "top_k": 20}; None: temperature 1 and nothing else. `sampling.model_defaults` reads it
            from a model's generation_config.json.
        server_profile: which server rendered the prompts that are not recorded as ids: "vllm", "sglang", "llama.cpp",
            "tgi" or "openai". Each does something else to a request before its template gets it. None takes the server
            that the record names, else vLLM. `drift.server_profiles` counts the traces of each.
        on_error: "raise", or "skip" to leave out traces that cannot be aligned; `drift.errors` lists them.
        pictures: how the model writes pictures in ids; None takes what the folder of the tokenizer says. What was
            sampled behind a picture that has no place in the ids is held.

    Returns:
        Sequences; `drift` says where records and template differ. Spliced, a turn with a gap in its tokens is not
        trained, nor what stands behind it or behind a turn whose tool call is not among its tokens.

    Raises:
        AlignmentError, TemplateError, TokenizerError: for the first trace that cannot be aligned.
        ArgumentError: if an argument is none of its values.
    """
    _validation.instance(traces, "traces", (Traces, Trace), "Pass what read() gave.")
    _validation.instance(tokenizer, "tokenizer", Tokenizer, "Pass Tokenizer.from_pretrained(directory).")
    named = {"strict": strict, "lenient": lenient, "text_only": text_only, "assume_canonical": assume_canonical}
    for name, value in named.items():
        _validation.flag(value, name)
    _validation.one_of(on_error, "on_error", ("raise", "skip"))
    _validation.one_of(logprob_kind, "logprob_kind", (None, *LOGPROB_KINDS))
    _validation.one_of(server_profile, "server_profile", (None, *SERVERS))
    _check_mode(mode, merge, strict, lenient or text_only or assume_canonical)
    core = traces.core.take([traces.index]) if isinstance(traces, Trace) else traces.core
    table = Pictures.of_records(core)
    rule = (pictures or _rule(tokenizer)) if len(table) else None
    found = _core.align_traces(
        core,
        tokenizer._core,
        lenient=lenient,
        text_only=text_only,
        assume_canonical=assume_canonical,
        mode=mode,
        merge=merge,
        strict=strict,
        logprob_kind=logprob_kind,
        server=server_profile,
        skip_errors=on_error == "skip",
        rule=rule and _told(rule, table),
        sampling_defaults=_defaults(sampling_defaults),
    )
    placed = found.pop("images")
    columns = {name[6:]: found.pop(name) for name in list(found) if name.startswith("drift_")}
    drift = Drift(
        **{**columns, "reason": columns["reason"].astype(np.uint8), "detail": tuple(columns["detail"])},
        recorded=found.pop("recorded"),
        exact=found.pop("exact"),
        errors=tuple(found.pop("errors")),
        left_out=tuple(found.pop("left_out")),
        server_profiles=found.pop("servers"),
    )
    if mode == "splice":
        found["trainable"] = found["trainable"] & ~untrained(core, tokenizer, drift, found)
    names: dict[str, Any] = {name: tuple(found.pop(name)) for name in ("reward_names", "group_names", "trace_ids")}
    found["rewards"] = found["rewards"].reshape(-1, len(names["reward_names"]))
    parts = found.pop("extras").items()
    extras = {name: of.reshape(-1, *shape) if shape else Ragged(at, of) for name, (shape, at, of) in parts}
    images = _images(placed, rule, table) if rule and placed else None
    return Sequences(**found, **names, drift=drift, extras=extras, images=images)


def _told(rule: Rule, table: Pictures) -> tuple[int, list[int], dict[tuple[int, int], list[int]]]:
    """What the core is told of pictures: their id, ids that stand around it, and what stands for each size."""
    expansions = rule.expansions(table.width, table.height)
    around = {*rule.frames, *(each for ids in expansions.values() for each in ids)}
    return rule.pad, sorted(around), expansions


def _defaults(sampling_defaults: Mapping[str, Any] | None) -> str | None:
    """The options as JSON; None if there are none."""
    if sampling_defaults is None:
        return None
    _validation.instance(sampling_defaults, "sampling_defaults", Mapping, "Pass a mapping of options.")
    try:
        return json.dumps(dict(sampling_defaults), default=str) if sampling_defaults else None
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"sampling_defaults is not what JSON can say: {error}") from None


def _rule(tokenizer: Tokenizer) -> Rule | None:
    return Rule.of(tokenizer.folder) if tokenizer.folder else None


def _images(placed: dict[str, Any], rule: Rule, table: Pictures) -> Images:
    row = {digest.tobytes(): number for number, digest in enumerate(table.digest)}
    used = np.array([row[digest.tobytes()] for digest in placed["digest"].reshape(-1, 32)], np.int64)
    return Images(
        cu_images=offsets(placed["counts"]),
        cu_features=offsets(placed["features"]),
        at=placed["at"],
        picture=placed["picture"],
        rule=rule,
        pictures=table.take(used),
    )


def _check_mode(mode: str, merge: str, strict: bool, of_splice: bool) -> None:
    _validation.one_of(mode, "mode", ("splice", "align"))
    _validation.one_of(merge, "merge", ("mask", "sum"))
    if mode == "splice" and (merge != "mask" or not strict):
        raise ArgumentError("merge and strict have no effect in splice mode, which keeps sampled ids. Leave them out.")
    if mode == "align" and of_splice:
        raise ArgumentError(
            "lenient, text_only and assume_canonical have no effect in align mode. Leave them out, or splice."
        )
