"""Align mode: rendered ids, each with the logprob of the sampled token that it is."""

import numpy as np
import pytest

from history_cases import called, family, tool_turn  # noqa: F401
from tracegrad.errors import ArgumentError
from vocabulary import align, ids_of, reasons, record, said, text, trained, user

EOS = 2


def whole(tokenizer, *answers):
    """A trace of canonical answers."""
    turns = [m for a in answers for m in (user("q"), said(a, [*ids_of(tokenizer, a), EOS]))]
    return record(*turns)


def test_canonical_turns_are_the_same_in_both_modes(chatml):
    trace = whole(chatml, "red lamp", "two")
    splice, rendered = align(chatml, trace), align(chatml, trace, mode="align")
    assert rendered.ids.tolist()[: splice.tokens] == splice.ids.tolist()
    assert trained(rendered) == trained(splice)
    count = splice.tokens
    assert np.array_equal(rendered.rollout_logprobs[:count], splice.rollout_logprobs, equal_nan=True)
    assert len(rendered.alignment_report) == 0


def cut(tokenizer):
    """ " shop" sampled letter by letter, where the tokenizer has one token for it."""
    letters = [i for letter in " shop" for i in ids_of(tokenizer, letter)]
    assert len(ids_of(tokenizer, " shop")) == 1
    return [*ids_of(tokenizer, "red"), *letters, *ids_of(tokenizer, " lamp"), EOS]


def test_a_rendered_token_that_is_several_sampled_ones_is_masked_and_strict_masks_what_follows(chatml):
    ids = cut(chatml)
    trace = record(user("q"), said("red shop lamp", ids))
    red, lamp = ids_of(chatml, "red"), ids_of(chatml, " lamp")
    strict = align(chatml, trace, mode="align")
    assert trained(strict) == red
    assert reasons(strict) == {"R01"}
    assert f"exact_prefix_len {len(red)}" in strict.alignment_report.detail[0]
    loose = align(chatml, trace, mode="align", strict=False)
    assert trained(loose) == [*red, *lamp, EOS]
    summed = align(chatml, trace, mode="align", strict=False, merge="sum")
    assert trained(summed) == [*red, *ids_of(chatml, " shop"), *lamp, EOS]
    # The five letters are tokens start to start + 4 of the turn; token k has logprob -0.5 - 0.01 k.
    start = len(red)
    expected = sum(-0.5 - 0.01 * k for k in range(start, start + 5))
    assert summed.rollout_logprobs[summed.trainable][start] == pytest.approx(expected, abs=1e-6)


def test_case_28_in_align_mode_only_the_changed_interval_is_masked(family):
    tokenizer = family("qwen2_5")
    sampled = '<tool_call>\n{"name": "look", "arguments": {"a":1}}\n</tool_call><|im_end|>'
    found = align(tokenizer, tool_turn(tokenizer, sampled), mode="align", strict=False)
    shown = text(tokenizer, found.ids)
    assert '{"a": 1}' in shown
    masked = [k for k in np.flatnonzero(~found.trainable) if k > np.flatnonzero(found.turn == 0)[0]]
    inside = [k for k in masked if k < np.flatnonzero(found.turn == 0)[-1]]
    assert 0 < len(inside) <= 4
    assert "R13" in reasons(found)


def test_case_33_in_align_mode_trimmed_tokens_have_no_place(family):
    tokenizer = family("llama3")
    sampled = ids_of(tokenizer, "\n\nred lamp<|eot_id|>")
    found = align(tokenizer, record(user("q"), said("\n\nred lamp", sampled)), mode="align", strict=False)
    assert text(tokenizer, trained(found)) == "red lamp<|eot_id|>"


def test_case_08_a_harmony_tool_call_is_exact_when_spliced_and_its_mismatch_is_named_when_rendered(family):
    tokenizer = family("gptoss")
    sampled = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    sampled += '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a":1}<|call|>'
    ids = ids_of(tokenizer, sampled)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    turn = said("<reasoning>why</reasoning>", ids, tool_calls=[call])
    trace = record(user("q"), turn, template_kwargs={"strftime_now": "2025-03-07"})
    spliced = align(tokenizer, trace)
    assert trained(spliced) == ids
    found = align(tokenizer, trace, mode="align")
    assert {"R13", "R14", "R15"} <= reasons(found)
    assert text(tokenizer, ids[-1:]) == "<|call|>"


def test_options_without_effect_are_refused(chatml):
    with pytest.raises(ArgumentError, match="TG-ALIGN-002"):
        align(chatml, whole(chatml, "red"), merge="sum")
    with pytest.raises(ArgumentError, match="TG-ALIGN-003"):
        align(chatml, whole(chatml, "red"), mode="align", allow_unknown_ids=True)
    with pytest.raises(ArgumentError, match=r"TG-ARGS-008.*mode"):
        align(chatml, whole(chatml, "red"), mode="guess")
