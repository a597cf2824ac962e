"""Align recorded traces with a tokenizer: `align` returns `Sequences`, `recover_ids` only the sampled ids."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core, _validation
from tracegrad.alignment.mismatch import AlignmentReport, find_wrong_context
from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.token_sets import TokenSets
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import LOGPROB_KINDS, SERVERS
from tracegrad.data.trace import Trace, Traces
from tracegrad.errors import ArgumentError
from tracegrad.images import ImageRule, Images, ImageSpans
from tracegrad.images.spans import offsets


@dataclass(frozen=True)
class RecoveredIds:
    """The S sampled tokens of G generations, concatenated.

    Args:
        ids: [S] int32, -1 if the record does not determine the id.
        alignment_level: [S] uint8, index into `codes.LEVELS`.
        logprobs: [S] float32, nats, NaN if not recorded.
        cu_tokens: [G+1] int64: generation g is tokens cu_tokens[g]:cu_tokens[g+1]. It is empty if the record lists no
            tokens, or tokens of another tokenizer.
        trace: [G] int32, row of the trace.
        turn: [G] int32, index of the generation in its trace.
        reason: [S] uint8, index into `AlignmentReport.reasons`: the reason why the id is unknown, 0 if it is known.
    """

    ids: NDArray[np.int32]
    alignment_level: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    cu_tokens: NDArray[np.int64]
    trace: NDArray[np.int32]
    turn: NDArray[np.int32]
    reason: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """[S] bool: whether the id is known."""
        return self.ids >= 0


def recover_ids(traces: Traces, tokenizer: Tokenizer) -> RecoveredIds:
    """Return the ids that the record of each generation determines by its ids, bytes, texts and token count.

    No id is guessed.
    """
    return RecoveredIds(**_core.recover_ids(traces.core, tokenizer._core))


def align(
    traces: Traces | Trace,
    tokenizer: Tokenizer,
    *,
    mode: str = "splice",
    merge: str = "mask",
    strict: bool = True,
    allow_unknown_ids: bool = False,
    text_only: bool = False,
    assume_canonical: bool = False,
    logprob_kind: str | None = None,
    sampling_defaults: Mapping[str, Any] | None = None,
    server_profile: str | None = None,
    on_error: str = "raise",
    image_rule: ImageRule | None = None,
) -> Sequences:
    """Convert recorded traces to the ids of the trainer. Sampled ids are kept, and the template supplies other ids.

    Args:
        traces: the result of `read`, or one trace of it.
        tokenizer: of the model that will be trained.
        mode: "splice" keeps the sampled ids. "align" uses the ids of the rendered conversation, each with the logprob
            of the sampled token that it equals; it is for trainers that render the conversation again.
        merge: in align mode, the logprob of a rendered token that equals several sampled tokens: "mask" for none, "sum"
            for the sum of their logprobs, which is the probability of one way to write it.
        strict: in align mode, mask all tokens of a turn after the first one that differs from the sampled token,
            because the policy saw other ids there.
        allow_unknown_ids: after an unknown id, continue with the canonical tokens of its text, untrained and counted.
        text_only: make text without logprobs (level T6) trainable, for weighted fine-tuning.
        assume_canonical: train on the canonical tokens of a text or message whose tokens are not recorded, if their
            number equals the number of logprobs (levels T4 and T5). They are often, but not certainly, the sampled
            ones.
        logprob_kind: the kind of the logprobs ("raw", "processed", "unknown"); it overrides the records.
        sampling_defaults: the servers' values of sampling options that a request leaves out, such as
            {"temperature": 0.6, "top_k": 20}; None: temperature 1 and no other option. `sampling.model_defaults` reads
            them from a model's generation_config.json.
        server_profile: the server that rendered the prompts that are not recorded as ids: "vllm", "sglang",
            "llama.cpp", "tgi" or "openai". Each changes a request differently before its template gets it. None uses
            the server that the record names, else vLLM. `alignment_report.server_profiles` counts the traces of each.
        on_error: "raise", or "skip" to leave out traces that cannot be aligned; `alignment_report.errors` lists them.
        image_rule: the rule by which the model writes images as ids; None reads it from the folder of the tokenizer.
            Tokens sampled after an image without placeholder ids are not trained.

    Returns:
        Sequences; `alignment_report` lists the mismatches between records and template. In splice mode, a turn with a
        gap in its
        tokens and all later tokens of its branch are not trained. The same holds for all tokens after a turn whose tool
        call is not among its tokens.

    Raises:
        AlignmentError, TemplateError, TokenizerError: for the first trace that cannot be aligned.
        ArgumentError: if an argument has an invalid value.

    >>> from tracegrad import Tokenizer, read
    >>> sampled = {"role": "assistant", "content": "4", "token_ids": [22, 2], "logprobs": [-0.5, -0.125]}
    >>> traces = read([{"messages": [{"role": "user", "content": "2+2?"}, sampled], "reward": 1.0}])
    >>> tokenizer = Tokenizer.from_pretrained("examples/quickstart/model")
    >>> sequences = align(traces, tokenizer)
    >>> tokenizer.decode(sequences.ids)
    '<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>'
    >>> sequences.ids[sequences.trainable].tolist(), sequences.rollout_logprobs[sequences.trainable].tolist()
    ([22, 2], [-0.5, -0.125])
    """
    _validation.instance(traces, "traces", (Traces, Trace), "Pass what read() gave.")
    _validation.instance(tokenizer, "tokenizer", Tokenizer, "Pass Tokenizer.from_pretrained(directory).")
    flags = {
        "strict": strict,
        "allow_unknown_ids": allow_unknown_ids,
        "text_only": text_only,
        "assume_canonical": assume_canonical,
    }
    for name, value in flags.items():
        _validation.flag(value, name)
    _validation.one_of(on_error, "on_error", ("raise", "skip"))
    _validation.one_of(logprob_kind, "logprob_kind", (None, *LOGPROB_KINDS))
    _validation.one_of(server_profile, "server_profile", (None, *SERVERS))
    _check_mode(mode, merge, strict, allow_unknown_ids or text_only or assume_canonical)
    core = traces.core.take([traces.index]) if isinstance(traces, Trace) else traces.core
    table = Images.of_records(core)
    rule = (image_rule or _rule(tokenizer)) if len(table) else None
    fields = _core.align_traces(
        core,
        tokenizer._core,
        allow_unknown_ids=allow_unknown_ids,
        text_only=text_only,
        assume_canonical=assume_canonical,
        mode=mode,
        merge=merge,
        strict=strict,
        logprob_kind=logprob_kind,
        server=server_profile,
        skip_errors=on_error == "skip",
        rule=rule and _rule_for_core(rule, table),
        sampling_defaults=_defaults(sampling_defaults),
    )
    spans = fields.pop("images")
    columns = {
        name.removeprefix("mismatch_"): fields.pop(name) for name in list(fields) if name.startswith("mismatch_")
    }
    report = AlignmentReport(
        **{**columns, "reason": columns["reason"].astype(np.uint8), "detail": tuple(columns["detail"])},
        recorded=fields.pop("recorded"),
        exact=fields.pop("exact"),
        errors=tuple(fields.pop("errors")),
        left_out=tuple(fields.pop("left_out")),
        server_profiles=fields.pop("servers"),
    )
    if mode == "splice":
        fields["trainable"] = fields["trainable"] & ~find_wrong_context(core, tokenizer, report, fields)
    names: dict[str, Any] = {name: tuple(fields.pop(name)) for name in ("reward_names", "group_names", "trace_ids")}
    fields["rewards"] = fields["rewards"].reshape(-1, len(names["reward_names"]))
    extra_columns = fields.pop("extras").items()
    extras = {
        name: column["values"].reshape(-1, *column["shape"])
        if column["shape"]
        else Ragged(column["offsets"], column["values"])
        for name, column in extra_columns
    }
    images = _images(spans, rule, table) if rule and spans else None
    kept = extras.pop("sampling_mask", None)
    arrays = fields.pop("penalties")
    penalties = arrays and Penalties(**arrays)
    support = TokenSets.from_rows(kept) if isinstance(kept, Ragged) and len(kept.values) else None
    return Sequences(
        **fields, **names, alignment_report=report, extras=extras, images=images, support=support, penalties=penalties
    )


class CoreImageRule(NamedTuple):
    """The image rule for the core: the placeholder id, ids around it, and the ids of each image by (width, height)."""

    pad: int
    frames: list[int]
    expansions: dict[tuple[int, int], list[int]]


def _rule_for_core(rule: ImageRule, table: Images) -> CoreImageRule:
    expansions = rule.expansions(table.width, table.height)
    frame_ids = {*rule.frames, *(id_ for ids in expansions.values() for id_ in ids)}
    return CoreImageRule(rule.pad, sorted(frame_ids), expansions)


def _defaults(sampling_defaults: Mapping[str, Any] | None) -> str | None:
    """Return the options as JSON; None if there are none."""
    if sampling_defaults is None:
        return None
    _validation.instance(sampling_defaults, "sampling_defaults", Mapping, "Pass a mapping of options.")
    try:
        return json.dumps(dict(sampling_defaults), default=str) if sampling_defaults else None
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"TG-ALIGN-001: sampling_defaults is not what JSON can say: {error}") from None


def _rule(tokenizer: Tokenizer) -> ImageRule | None:
    return ImageRule.of(tokenizer.folder) if tokenizer.folder else None


def _images(spans: dict[str, Any], rule: ImageRule, table: Images) -> ImageSpans:
    row = {digest.tobytes(): number for number, digest in enumerate(table.digest)}
    used = np.array([row[digest.tobytes()] for digest in spans["digest"].reshape(-1, 32)], np.int64)
    return ImageSpans(
        cu_images=offsets(spans["counts"]),
        cu_features=offsets(spans["features"]),
        position=spans["at"],
        image=spans["picture"],
        rule=rule,
        pictures=table.take(used),
    )


def _check_mode(mode: str, merge: str, strict: bool, of_splice: bool) -> None:
    _validation.one_of(mode, "mode", ("splice", "align"))
    _validation.one_of(merge, "merge", ("mask", "sum"))
    if mode == "splice" and (merge != "mask" or not strict):
        raise ArgumentError(
            "TG-ALIGN-002: merge and strict have no effect in splice mode, which keeps sampled ids. Leave them out."
        )
    if mode == "align" and of_splice:
        raise ArgumentError(
            "TG-ALIGN-003: allow_unknown_ids, text_only and assume_canonical have no effect in align mode. Leave them "
            "out, or splice."
        )
