"""Requests with top_p, top_k or min_p: the kept ids are asked for, or the request is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from tracegrad import Sequences
from tracegrad.alignment.ragged import Ragged
from tracegrad.data.sampling import refusal_reason
from tracegrad.errors import ArgumentError
from tracegrad.online.options import RolloutConfig
from tracegrad.online.weight_sample import probe_of, sample_of
from tracegrad.rollout.session import COMPLETIONS, Session, UnfitRequest
from tracegrad.rollout.token_client import chat_completion_of, parse_choice, sampling_params

MESSAGES = {"messages": [{"role": "user", "content": "q"}]}


def opened(body, required=None, **sampling):
    session = Session("a", sampling=sampling, logprob_kind="processed", for_training=True)
    return session.open(MESSAGES | body, *([] if required is None else [required])).request


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_a_request_that_truncates_asks_for_the_kept_ids(option):
    for body, sampling in ((option, {}), ({}, option)):
        request = opened(body, top_logprobs=64, **sampling)
        assert (request["top_logprobs"], request["return_tokens_as_token_ids"]) == (64, True)
        with pytest.raises(UnfitRequest, match="TG-ROLLOUT-057"):
            opened(body, **sampling)
    # The sender's own number counts.
    assert opened(option | {"top_logprobs": 5})["top_logprobs"] == 5


def test_other_requests_are_as_before():
    request = opened({}, top_logprobs=64)
    assert request["top_logprobs"] == 0
    assert "return_tokens_as_token_ids" not in request
    # The legacy endpoint has no alternatives with ids.
    with pytest.raises(UnfitRequest, match="TG-ROLLOUT-057"):
        opened({"top_p": 0.9}, COMPLETIONS, top_logprobs=64)


def test_penalties_need_processed_logprobs_and_text():
    request = {"top_p": 0.9, "top_logprobs": 8}
    assert refusal_reason(request, "raw") is refusal_reason(request, "processed") is None
    assert refusal_reason(request | {"temperature": 0.7}, "raw") is None  # the logprob over the support has it
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"5": 1}}
    assert refusal_reason(penalties, "processed") is refusal_reason(request | penalties, "processed") is None
    assert refusal_reason(penalties | {"temperature": 0.7}, "processed") is None
    for name, value in penalties.items():
        for options in ({name: value}, request | {name: value}):
            reason = refusal_reason(options, "raw")
            assert name in reason
            assert "processed_logprobs" in reason
            assert "rollout.top_logprobs" not in reason
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "repetition_penalty" in refusal_reason({"repetition_penalty": 1.2, "messages": [picture]}, "processed")
    assert refusal_reason({"messages": [picture]}, "processed") is None
    assert "rollout.top_logprobs" in refusal_reason({"top_p": 0.9}, "processed")
    assert "processed_logprobs" not in refusal_reason({"repetition_penalty": 1.2, "bad_words": ["x"]}, "raw")


def test_a_server_that_refuses_a_penalty_of_the_run_is_not_asked_without_it():
    session = Session("a", sampling={"repetition_penalty": 1.1}, logprob_kind="processed", for_training=True)
    call = session.open(MESSAGES)
    assert call.request["repetition_penalty"] == 1.1
    assert not call.drop(["repetition_penalty"])
    assert call.drop(["presence_penalty"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"min_p": 1.0},
        {"top_logprobs": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ArgumentError, match="TG-ONLINE-021"):
        RolloutConfig(**wrong)


def test_alternatives_come_back_from_token_requests():
    top = [{"token_id": 5, "logprob": -0.1}, {"token_id": 6, "logprob": -2.0}]
    content = [{"token_id": 5, "logprob": -0.1, "top_logprobs": top}, {"token_id": 7, "logprob": -0.3}]
    choice = parse_choice({"choices": [{"token_ids": [5, 7], "logprobs": {"content": content}}]})
    answer = chat_completion_of({"choices": [{"message": {}}]}, [1], choice)
    [first, second] = answer["choices"][0]["logprobs"]["content"]
    assert first == {"token": "token_id:5", "logprob": -0.1, "top_logprobs": top}
    assert second == {"token": "token_id:7", "logprob": -0.3}
    request = {"top_logprobs": 64, "return_tokens_as_token_ids": True, "top_p": 0.9, **MESSAGES}
    assert sampling_params(request) == {"top_p": 0.9, "logprobs": 64}


def test_a_probe_samples_from_the_whole_vocabulary():
    request = {**MESSAGES, "top_p": 0.9, "top_k": 20, "top_logprobs": 64, "return_tokens_as_token_ids": True}
    request |= {"repetition_penalty": 1.2, "logit_bias": {"5": 1}}
    probe = probe_of({"calls": [{"request": request, "response": {}}]}, RolloutConfig())
    assert (probe.body["top_p"], probe.body["top_k"]) == (1.0, -1)
    assert probe.body["repetition_penalty"] == 1.0
    assert not {"top_logprobs", "return_tokens_as_token_ids", "logit_bias"} & {*probe.body}


def test_tokens_of_a_step_are_compared_again_over_their_support():
    rows = Ragged(np.array([0, 0, 2, 2, 2, 5]), np.array([6, 9, 1, 2, 8], np.int32))
    trainable = np.array([False, True, True, False, True])
    logprobs = np.where(trainable, -1.0, np.nan)
    sequences = Sequences.from_arrays([5, 6, 7, 5, 8], [0, 3, 5], logprobs, trainable, support=rows)
    trainer = SimpleNamespace(
        config=SimpleNamespace(pack=SimpleNamespace(tokens_per_row=8)), compute_logprobs=lambda step: step.advantages
    )
    sample = sample_of(trainer, sequences, np.ones(5, bool), np.zeros(2, bool))
    [batch] = sample.step.batches
    found = [batch.support.ids[batch.support.offsets[row] : batch.support.offsets[row + 1]] for row in batch.logit_row]
    assert {term: ids.tolist() for term, ids in zip(batch.term.tolist(), found, strict=True)} == {
        0: [6, 9],
        1: [],
        2: [1, 2, 8],
    }
    [first] = sample.rows[0].answers()
    assert [ids.tolist() for ids in first.support] == [[], [6, 9], []]
