"""Laws of alignment, on traces drawn at random: nothing sampled is lost or invented; less of a record is not more.

A drawn turn is any list of ids of the vocabulary: cut characters, special tokens, nothing canonical.
"""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracegrad as tg
from recorded_turns import EOS, QUIET, TOKENIZER, content, trace, turns, values
from tracegrad.alignment.align import recover_ids
from tracegrad.doctor import lag_test
from vocabulary import align, record, said, user

canonical = st.lists(
    st.text(st.sampled_from("abc red12é€😊さ\n{}"), min_size=1, max_size=20).map(
        lambda text: [*map(int, TOKENIZER.encode(text)), EOS]
    ),
    min_size=1,
    max_size=3,
)


@QUIET
@given(turns)
def test_every_sampled_token_stands_once_with_its_own_logprob(generated):
    found = align(TOKENIZER, trace(generated))
    assert found.branches == 1
    for number, ids in enumerate(generated):
        here = found.trainable & (found.turn == number)
        assert found.ids[here].tolist() == ids
        assert found.rollout_logprobs[here].tolist() == np.float32(values(number, ids)).tolist()
    assert found.trainable.sum() == sum(map(len, generated))
    assert found.alignment_report.recorded == found.alignment_report.exact == found.trainable.sum()


@QUIET
@given(turns)
def test_the_bytes_of_the_ids_are_those_of_the_record(generated):
    found = align(TOKENIZER, trace(generated))
    for number, ids in enumerate(generated):
        assert TOKENIZER.decode_bytes(found.ids[found.turn == number]) == TOKENIZER.decode_bytes(ids)


@QUIET
@given(turns)
def test_every_array_has_the_length_it_should_have(generated):
    found = align(TOKENIZER, trace(generated), trace(generated[:1], id="u"))
    tokens = ("ids", "source", "trainable", "rollout_logprobs", "turn", "version", "alignment_level", "inv_temperature")
    assert {len(getattr(found, name)) for name in tokens} == {found.cu_seqlens[-1]}
    assert len(found.trace) == len(found.cu_seqlens) - 1
    assert (
        len(found.alignment_report.reason)
        == len(found.alignment_report.detail)
        == len(found.alignment_report.trace)
        == len(found.alignment_report.count)
    )


def stripped(full, kind):
    """The record without ids, its tokens told by bytes of their own or by texts."""
    bare = copy.deepcopy(full)
    for message in bare["messages"][1::2]:
        ids = message["generation"].pop("token_ids")
        message["generation"].pop("prompt_token_ids")
        pieces = [TOKENIZER.decode_bytes([i]) for i in ids]
        if kind == "bytes":
            message["generation"]["bytes"] = [list(piece) for piece in pieces]
        else:
            message["generation"]["tokens"] = [piece.decode() for piece in pieces]
    return bare


@QUIET
@given(turns)
def test_bytes_of_tokens_say_what_ids_say(generated):
    traces = tg.Traces.from_records([stripped(trace(generated), "bytes")])
    assert recover_ids(traces, TOKENIZER).ids.tolist() == [i for ids in generated for i in ids]


@QUIET
@given(canonical)
def test_texts_of_tokens_say_what_ids_say_where_each_is_a_text(generated):
    def whole(ids):
        return all("\ufffd" not in TOKENIZER.decode([i]) for i in ids)

    generated = [ids for ids in generated if whole(ids)] or [[EOS]]
    full = trace(generated)
    traces = tg.Traces.from_records([stripped(full, "text")])
    assert recover_ids(traces, TOKENIZER).ids.tolist() == [i for ids in generated for i in ids]
    assert align(TOKENIZER, stripped(full, "text")).ids.tolist() == align(TOKENIZER, full).ids.tolist()


@QUIET
@given(turns)
def test_what_a_recorder_hides_is_never_guessed_wrong(generated):
    shown = [[TOKENIZER.decode([i]) for i in ids] for ids in generated]
    # The simplest of recorders: nothing for what is no text of its own.
    messages = []
    for ids, texts in zip(generated, shown, strict=True):
        hidden = ["" if text.endswith("\ufffd") else text for text in texts]
        messages += [user("q"), said(content(ids), tokens=hidden, logprobs=values(0, ids))]
    found = recover_ids(tg.Traces.from_records([record(*messages)]), TOKENIZER)
    true = np.array([i for ids in generated for i in ids])
    assert (found.ids[found.is_known] == true[found.is_known]).all()


@QUIET
@given(turns)
def test_writing_and_reading_keeps_all_of_it(tmp_path_factory, generated):
    folder = tmp_path_factory.mktemp("law")
    traces = tg.Traces.from_records([trace(generated)])
    tg.write(traces, folder / "t.jsonl")
    before, after = tg.align(traces, TOKENIZER), tg.align(tg.read(folder / "t.jsonl"), TOKENIZER)
    after.save(folder / "s")
    for other in (after, tg.Sequences.load(folder / "s")):
        assert np.array_equal(before.ids, other.ids)
        assert np.array_equal(before.trainable, other.trainable)
        assert np.array_equal(before.rollout_logprobs, other.rollout_logprobs, equal_nan=True)
        assert before.alignment_report.detail == other.alignment_report.detail


@QUIET
@given(st.lists(turns, min_size=2, max_size=5), st.integers(1, 4))
def test_the_result_does_not_depend_on_chunks(many, size):
    records = [trace(generated, id=str(k)) for k, generated in enumerate(many)]
    whole = align(TOKENIZER, *records)
    parts = [align(TOKENIZER, *records[k : k + size]) for k in range(0, len(records), size)]
    for name in ("ids", "source", "trainable", "turn", "alignment_level"):
        assert np.concatenate([getattr(p, name) for p in parts]).tolist() == getattr(whole, name).tolist()


def test_case_62_logprobs_that_belong_to_the_next_token_are_seen_by_the_lag():
    rng = np.random.default_rng(0)
    ids = [*rng.integers(259, 600, 400).tolist(), EOS]
    true = np.float32(-rng.exponential(1.0, len(ids)))
    for shift in (-1, 0, 1):
        recorded_values = np.roll(true, shift).tolist()
        found = align(TOKENIZER, record(user("q"), said(content(ids), ids, logprobs=recorded_values)))
        trainer = np.full(found.tokens, np.nan, np.float32)
        trainer[found.trainable] = true
        told = lag_test(found.rollout_logprobs, trainer, found.cu_seqlens)
        # Recorded values rolled by +1 belong to the token before: trainer's at lag -1.
        assert told.best == -shift
        assert told.correlation[-shift] == pytest.approx(1.0, abs=0.02)
