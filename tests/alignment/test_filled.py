"""Filled logprobs: level T7 for tokens without a recorded one, and never for others."""

import copy

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.alignment.mismatch import count_inexact, describe_inexact
from tracegrad.alignment.sequences import Sequences
from tracegrad.data.codes import FILLED, LEVELS, TEXT_ONLY
from tracegrad.data.sampling import options_on
from tracegrad.doctor import diagnose
from tracegrad.view.detail import of_trace
from tracegrad.view.features import Codes, Titles, rows_of
from vocabulary import EXAMPLE, align, ids_of, load, reasons

IDS = [81, 84, 2]  # "o", "r", <|im_end|>; the canonical ids of "or" are [361]
DIFFERENT = "R37 filled_ids_differ"
MISSING = "R23 missing_logprob"


@pytest.fixture(scope="module")
def tokenizer():
    return load(EXAMPLE)


def filled(logprobs, ids=IDS, kind="raw", **more):
    return {"ids": ids, "logprobs": logprobs, "kind": kind, **more}


def record(call, *, message=None, **more):
    answer = {"role": "assistant", "content": "or", "token_ids": IDS, "finish_reason": "stop"}
    messages = [{"role": "user", "content": "2+2?"}, answer | (message or {})]
    return {
        "id": "a",
        "reward": 1.0,
        "messages": messages,
        "tracegrad_filled": {"model": "9f", "calls": [call]},
        **more,
    }


def sampled(sequences):
    """Return level, logprob (None if NaN), inverse temperature and `trainable` of each sampled token."""
    own = np.flatnonzero(sequences.source == 2)
    logprobs = [None if np.isnan(value) else value for value in sequences.rollout_logprobs[own].tolist()]
    scale = sequences.inv_temperature[own].tolist()
    return sequences.alignment_level[own].tolist(), logprobs, scale, sequences.trainable[own].tolist()


def test_all_logprobs_are_filled_if_none_is_recorded(tokenizer):
    call = filled([-0.25, -0.5, -1.0], kind="processed", temperature=2.0)
    found = align(tokenizer, record(call, logprob_kind="raw", temperature=0.5))
    # kind and temperature are those of the filled entry: 1 / 2
    assert sampled(found) == ([FILLED] * 3, [-0.25, -0.5, -1.0], [0.5] * 3, [True] * 3)
    assert (found.logprob_kind.tolist(), found.temperature.tolist()) == ([2], [2.0])
    assert reasons(found) == set()
    assert (found.alignment_report.recorded, found.alignment_report.exact) == (3, 0)
    assert found.levels() == {"T7": {"tokens": 3, "trainable": 3, "generations": 1}}


def test_raw_filled_logprobs_are_not_scaled(tokenizer):
    found = align(tokenizer, record(filled([-0.25, -0.5, -1.0]), logprob_kind="processed", temperature=0.5))
    assert sampled(found)[2] == [1.0] * 3
    assert (found.logprob_kind.tolist(), found.temperature.tolist()) == ([1], [0.5])


def test_an_absent_temperature_is_that_of_the_generation(tokenizer):
    found = align(tokenizer, record(filled([-0.25, -0.5, -1.0], kind="processed"), temperature=0.5))
    assert sampled(found)[2] == [2.0] * 3


def test_a_token_that_is_not_filled_is_missing(tokenizer):
    found = align(tokenizer, record(filled([-0.25, None, float("nan")])))
    assert sampled(found)[:2] == ([FILLED, LEVELS.index("T1"), LEVELS.index("T1")], [-0.25, None, None])
    assert found.alignment_report.table()[MISSING]["tokens"] == 2


def test_a_recorded_logprob_is_kept_and_stays_exact(tokenizer):
    message = {"logprobs": [-0.125, None, None]}
    call = filled([-9.0, -0.5, None], temperature=1.0)
    found = align(tokenizer, record(call, message=message, logprob_kind="raw", temperature=1.0))
    ids = LEVELS.index("T1")
    assert sampled(found)[:2] == ([ids, FILLED, ids], [-0.125, -0.5, None])
    assert found.alignment_report.exact == 1
    assert found.alignment_report.table()[MISSING]["tokens"] == 1
    assert found.levels()["T1"]["tokens"] == 2


@pytest.mark.parametrize(
    "more", [{"kind": "processed", "temperature": 0.5}, {"temperature": 1.0}], ids=["kind", "temperature"]
)
def test_another_distribution_than_the_recorded_one_is_not_used(tokenizer, more):
    message = {"logprobs": [-0.125, None, None]}
    found = align(
        tokenizer, record(filled([None, -0.5, -1.0], **more), message=message, logprob_kind="raw", temperature=0.5)
    )
    assert sampled(found)[1] == [-0.125, None, None]
    assert FILLED not in sampled(found)[0]
    assert found.alignment_report.table()[DIFFERENT]["tokens"] == 2
    assert found.alignment_report.table()[MISSING]["tokens"] == 2


def test_the_callers_kind_is_that_of_the_recorded_logprobs(tokenizer):
    message = {"logprobs": [-0.125, None, None]}
    unknown = record(filled([None, -0.5, -1.0]), message=message, temperature=1.0)
    assert "R37" in reasons(align(tokenizer, unknown))
    assert sampled(align(tokenizer, unknown, logprob_kind="raw"))[1] == [-0.125, -0.5, -1.0]


@pytest.mark.parametrize("ids", [[81, 85, 2], [81, 84], [81, 84, 2, 2]])
def test_logprobs_of_other_ids_are_not_used(tokenizer, ids):
    found = align(tokenizer, record(filled([-0.5] * len(ids), ids, "processed", temperature=2.0), temperature=0.5))
    assert sampled(found)[:3] == ([LEVELS.index("T1")] * 3, [None] * 3, [1.0] * 3)
    assert found.alignment_report.table()[DIFFERENT]["tokens"] == len(ids)
    assert found.alignment_report.table()[MISSING]["tokens"] == 3
    assert found.logprob_kind.tolist() == [0]


def test_bytes_of_tokens_are_filled_by_the_ids_that_they_give(tokenizer):
    content = [{"token": text, "bytes": list(text.encode()), "logprob": None} for text in ("o", "r")]
    message = {"token_ids": None, "logprobs": {"content": content}}
    found = align(tokenizer, record(filled([-0.5, -1.0], IDS[:2]), message=message))
    assert sampled(found)[:2] == ([FILLED] * 2, [-0.5, -1.0])
    other = align(tokenizer, record(filled([-1.0], [361]), message=message))
    assert sampled(other)[:2] == ([LEVELS.index("T2")] * 2, [None] * 2)
    assert other.alignment_report.table()[DIFFERENT]["tokens"] == 1


def text(call, **more):
    return record(call, message={"token_ids": None}, **more)


def test_text_is_filled_if_the_ids_are_the_canonical_ones_with_the_stop_token(tokenizer):
    assert ids_of(tokenizer, "or") == [361]
    call = filled([-0.5, -1.0], [361, 2], "processed", temperature=2.0)
    found = align(tokenizer, text(call, temperature=0.5))
    assert found.ids[found.source == 2].tolist() == [361, 2]
    assert sampled(found) == ([FILLED] * 2, [-0.5, -1.0], [0.5] * 2, [True] * 2)
    assert reasons(found) == set()
    assert found.alignment_report.exact == 0


@pytest.mark.parametrize("text_only", [False, True])
def test_a_text_token_that_is_not_filled_is_text_only(tokenizer, text_only):
    found = align(tokenizer, text(filled([-0.5, None], [361, 2])), text_only=text_only)
    assert sampled(found) == ([FILLED, TEXT_ONLY], [-0.5, None], [1.0] * 2, [True, text_only])


@pytest.mark.parametrize("ids", [[361], IDS, [361, 3]])
def test_text_with_other_ids_stays_text(tokenizer, ids):
    call = filled([-0.5] * len(ids), ids, "processed", temperature=2.0)
    found = align(tokenizer, text(call, temperature=0.5))
    assert sampled(found)[:2] == ([TEXT_ONLY] * 2, [None] * 2)
    assert not found.trainable.any()
    assert found.alignment_report.table() == {DIFFERENT: {"findings": 1, "traces": 1, "tokens": len(ids)}}


def test_assumed_ids_have_recorded_logprobs_and_are_not_filled(tokenizer):
    message = {"token_ids": None, "logprobs": [-0.25, -0.25]}
    call = filled([-0.5, -1.0], [361, 2])
    found = align(tokenizer, record(call, message=message), assume_canonical=True)
    assert sampled(found)[1] == [-0.25] * 2
    assert FILLED not in sampled(found)[0]


def kept_record(logprobs, kept, *, kind="processed", **more):
    options = {"top_p": 0.9, "temperature": 1.0} | more
    return record(filled(logprobs, kind=kind, temperature=1.0, kept=kept), **options)


def support(sequences):
    own = np.flatnonzero(sequences.source == 2)
    return sequences.support and [row.tolist() for row in sequences.support.rows(own)]


def test_kept_ids_are_the_support_of_the_filled_tokens(tokenizer):
    found = align(tokenizer, kept_record([-0.25, 0.0, -0.5], [[90, 81], [84], None]))
    assert support(found) == [[81, 90], [84], []]
    assert (found.reshaped.tolist(), options_on(int(found.replayed[0]))) == ([0], ("top_p",))
    assert sampled(found)[1] == [-0.25, 0.0, -0.5]


@pytest.mark.parametrize(
    ("logprobs", "kept", "kind"),
    [
        ([-0.25, -0.5, -0.5], [[81, 90], [84], None], "processed"),  # one id was kept, and its probability is not 1
        ([-0.25, 0.0, -0.5], [[81, 90], [84], None], "raw"),
        ([-0.25, 0.0, -0.5], None, "processed"),
    ],
    ids=["not over the mask", "raw", "absent"],
)
def test_without_kept_ids_the_option_stays_in_reshaped(tokenizer, logprobs, kept, kind):
    found = align(tokenizer, kept_record(logprobs, kept, kind=kind))
    assert support(found) is None
    assert (options_on(int(found.reshaped[0])), found.replayed.tolist()) == (("top_p",), [0])
    assert sampled(found)[:2] == ([FILLED] * 3, logprobs)


def test_a_token_that_its_kept_ids_do_not_contain_is_not_filled(tokenizer):
    found = align(tokenizer, kept_record([-0.25, 0.0, -0.5], [[90, 81], [85], [2, 3]]))
    assert sampled(found)[1] == [-0.25, None, -0.5]
    assert support(found) == [[81, 90], [], [2, 3]]
    assert found.alignment_report.table()[MISSING]["tokens"] == 1


def test_a_kept_id_outside_the_vocabulary_refuses_the_filled_logprobs(tokenizer):
    found = align(tokenizer, kept_record([-0.25, -0.5, -0.5], [[81, 999_999], None, None]))
    assert reasons(found) == {"R23", "R37"}
    assert support(found) is None


def test_kept_ids_of_filled_tokens_are_joined_with_the_recorded_masks(tokenizer):
    top = {"token_ids": IDS, "logprobs": [-0.25, None, -0.5], "sampling_mask": [[81, 90], [84, 85], [2, 3]]}
    message = {"generation": top, "token_ids": None}
    call = filled([None, -0.125, -9.0], kind="processed", temperature=1.0, kept=[[7], [84, 86], [7]])
    found = align(tokenizer, record(call, message=message, top_p=0.9, temperature=1.0, logprob_kind="processed"))
    assert sampled(found)[1] == [-0.25, -0.125, -0.5]
    masks = support(found)
    assert masks is not None
    assert masks[1] == [84, 86]


def test_penalties_of_processed_filled_logprobs_are_replayed(tokenizer):
    prompt = {"prompt_token_ids": [1, 5, 6], "repetition_penalty": 1.5, "temperature": 1.0}
    answer = {"role": "assistant", "content": "or", "token_ids": IDS, "generation": prompt}
    call = filled([-0.25, -0.5, -0.5], kind="processed", temperature=1.0)
    given = {"messages": [{"role": "user", "content": "a"}, answer], "tracegrad_filled": {"calls": [call]}}
    found = align(tokenizer, given)
    assert sampled(found)[0] == [FILLED] * 3
    assert options_on(int(found.replayed[0])) == ("repetition_penalty",)
    assert found.reshaped.tolist() == [0]
    raw = copy.deepcopy(given)
    raw["tracegrad_filled"]["calls"][0]["kind"] = "raw"
    assert options_on(int(align(tokenizer, raw).reshaped[0])) == ("repetition_penalty",)


def test_a_later_branch_repeats_a_filled_token_without_its_logprob(tokenizer):
    def call(prompt, ids):
        message = {"role": "assistant", "content": None}
        choice = {"message": message, "prompt_token_ids": prompt, "token_ids": ids, "finish_reason": "length"}
        return {"request": {"messages": [{"role": "user", "content": "q"}]}, "response": {"choices": [choice]}}

    calls = [call([5], [10, 11]), call([5, 10, 20], [12])]
    given = {"calls": calls, "tracegrad_filled": {"calls": [filled([-0.25, -0.5], [10, 11]), filled([-1.0], [12])]}}
    found = align(tokenizer, given)
    assert found.ids.tolist() == [5, 10, 11, 5, 10, 20, 12]
    assert found.trainable.tolist() == [False, True, True, False, False, False, True]
    assert np.nan_to_num(found.rollout_logprobs, nan=9).tolist() == [9, -0.25, -0.5, 9, 9, 9, -1.0]
    assert found.levels()["T7"]["tokens"] == 3


def test_align_mode_uses_filled_logprobs(tokenizer):
    given = record(filled([-0.5, -1.0], [361, 2]), message={"token_ids": [361, 2]})
    found = align(tokenizer, given, mode="align")
    assert sampled(found)[:2] == ([FILLED] * 2, [-0.5, -1.0])
    assert found.alignment_report.exact == 0


def test_merged_tokens_of_which_one_is_filled_are_filled(tokenizer):
    given = record(filled([-0.5, -1.0, None]))
    found = align(tokenizer, given, mode="align", merge="sum", strict=False)
    # "o" and "r" are one rendered token: -0.5 - 1.0
    own = np.flatnonzero(found.alignment_level == FILLED)
    assert found.ids[own].tolist() == [361]
    assert found.rollout_logprobs[own].tolist() == [-1.5]


def test_stored_sequences_keep_the_level(tokenizer, tmp_path):
    found = align(tokenizer, record(filled([-0.25, -0.5, -1.0])))
    found.save(tmp_path / "shard")
    loaded = Sequences.load(tmp_path / "shard", verify=True)
    assert loaded.alignment_level.tolist() == found.alignment_level.tolist()


def test_inexact_and_filled_tokens_are_counted_apart():
    assert count_inexact(10, 6, {"T0": {"tokens": 6}, "T7": {"tokens": 3}}) == (1, 3)
    assert count_inexact(10, 6, {"T0": {"tokens": 6}}) == (4, 0)
    assert count_inexact(10, 9, {"T7": {"tokens": 3}}) == (0, 1)
    sentences = "0 % of 10 recorded tokens have no exact id and logprob. The logprobs of 1 are filled: "
    assert describe_inexact(10, 9, {"T7": {"tokens": 3}}).startswith(sentences)
    assert "trained as text" in describe_inexact(10, 0, {"T6": {"tokens": 10}})
    assert describe_inexact(10, 6, {}) == "40 % of 10 recorded tokens have no exact id and logprob."


def test_the_advice_counts_filled_tokens(tokenizer):
    given = record(
        filled([-0.25, None, None]), message={"logprobs": [None, -0.5, None]}, logprob_kind="raw", temperature=1.0
    )
    measured = tg.recipes.recommendation.measure(align(tokenizer, given))
    assert (measured.terms, measured.missing, measured.filled) == (3, pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_the_doctor_counts_filled_turns_apart_and_tests_recorded_logprobs_only(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    answers = [record(filled([-0.25, -0.5, -1.0])) | {"id": f"t{k}", "group": "g", "reward": k % 2} for k in range(4)]
    tg.write(tg.Traces.from_records(answers), path)
    found = diagnose(path, EXAMPLE)
    names = {finding.name: finding for finding in found.findings}
    assert (names["measured_logprobs"].severity.name, names["measured_logprobs"].hits.count) == ("NOTE", 4)
    assert {"no_logprobs", "mismatches", "missing_logprobs"}.isdisjoint(names)


def test_view_shows_the_level_and_the_number_of_filled_logprobs(tokenizer):
    traces = tg.Traces.from_records([record(filled([-0.25, None, -1.0]))])
    assert dict(of_trace(traces[0]))["filled logprobs"] == "2, measured afterwards"
    assert "level:T7" in rows_of(traces, 0, 0, Codes(), None, Titles())[0].tags
    assert "level:T7" in rows_of(traces, 0, 0, Codes(), tokenizer, Titles())[0].tags
