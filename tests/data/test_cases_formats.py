"""Hard cases that are decided while a record is read: the outcome of each is what the record can prove, and no more."""

import json
import math

import numpy as np
import pytest

import tracegrad as tg

REQUEST = {"messages": [{"role": "user", "content": "?"}], "temperature": 1.0}


def generation_of(record):
    return tg.Trace.from_dict(record).generations[-1]


def chat(logprobs, content="Hi", **choice):
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "logprobs": logprobs, **choice}
    return {"request": REQUEST, "response": {"choices": [choice]}}


def entry(token, logprob=-0.5, data=None):
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()) if data is None else data}


def reasons(generation):
    return [name[:3] for name, _, _ in generation.notes]


def test_case_02_tokens_past_the_stop_string_are_kept_and_noted():
    tokens = [" dog", ".", "\n", "\n", "The", " quick", " brown", " fox"]
    logprobs = {"tokens": tokens, "token_logprobs": [-1.0] * 8, "text_offset": [39] + [43] * 7}
    choice = {"index": 0, "text": " dog", "finish_reason": "stop", "logprobs": logprobs}
    generation = generation_of({"request": {"prompt": "x" * 39, "stop": "."}, "response": {"choices": [choice]}})
    assert (generation.tokens, generation.text, generation.stop_reason) == (8, " dog", ".")
    # Seven of the eight lie behind the text.
    assert [(name[:3], count) for name, count, _ in generation.notes] == [("R08", 7)]


def test_case_07_a_stream_with_every_chunk_doubled_is_read_once():
    delta = {"tool_calls": [{"index": 0, "id": "k", "function": {"name": "f", "arguments": "{"}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    chunks = [
        {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"id": "c", "choices": [{"index": 0, "delta": delta, "logprobs": {"content": [entry("token_id:314")]}}]},
        {"id": "c", "choices": [{"index": 0, "delta": more, "logprobs": {"content": [entry("token_id:3417")]}}]},
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    trace = tg.Trace.from_dict({"request": REQUEST, "response": [each for each in chunks for _ in range(2)]})
    assert trace.generations[0].token_ids.tolist() == [314, 3417]
    assert trace.messages[-1]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert reasons(trace.generations[0]) == ["R30"]


def test_case_08_harmony_tokens_on_empty_deltas_are_kept():
    texts = ["<|channel|>", "final", "<|message|>", "Earth", "<|return|>"]
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "Earth"} if text == "Earth" else {}}], "id": "c"}
        for text in texts
    ]
    for each, text in zip(chunks, texts, strict=True):
        each["choices"][0]["logprobs"] = {"content": [entry(text)]}
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    trace = tg.Trace.from_dict({"request": REQUEST, "response": chunks})
    assert (trace.generations[0].tokens, trace.messages[-1]["content"]) == (5, "Earth")
    assert trace.generations[0].notes == []


def test_case_09_the_list_counts_where_the_server_rewrote_the_content():
    listed = {"content": [entry(text) for text in ("<|channel|>", "analysis", "<|message|>", "hm", "Earth")]}
    generation = generation_of(chat(listed, content="<reasoning>hm</reasoning>Earth"))
    assert generation.tokens == 5


def test_case_12_silent_parts_of_a_character_stay_and_the_closing_token_has_it_all():
    listed = {"content": [*[entry("", data=[]) for _ in range(3)], entry("😊")]}
    generation = generation_of(chat(listed, content="😊"))
    assert (generation.tokens, generation.has_bytes, generation.notes) == (4, True, [])
    assert generation.logprobs.sum() == pytest.approx(-2.0)


def test_case_13_bytes_of_a_replacement_character_are_no_bytes():
    listed = [entry("\ufffd") for _ in range(4)]
    response = {"model": "m", "response": "😊", "done": True, "done_reason": "stop", "logprobs": listed}
    generation = generation_of({"request": {"model": "m", "prompt": "?"}, "response": response})
    assert (generation.tokens, generation.has_bytes, generation.has_texts) == (4, False, True)
    assert [(name[:3], count) for name, count, _ in generation.notes] == [("R03", 4)]


def test_case_18_the_words_token_id_5_are_not_an_id():
    listed = {"content": [entry(text) for text in ("token", "_id", ":", "5")]}
    assert generation_of(chat(listed, content="token_id:5")).token_ids is None
    one = {"content": [entry("token_id:5"), entry(" is")]}
    assert generation_of(chat(one, content="token_id:5 is")).token_ids is None


@pytest.mark.parametrize(
    ("written", "missing", "invalid"),
    [("NaN", 1, 0), ("null", 1, 0), ("-Infinity", 1, 0), ('"NaN"', 1, 0), ("1e-9", 0, 1), ("0.3", 0, 1)],
)
def test_case_20_a_number_that_is_no_logprob_is_masked_and_counted(written, missing, invalid, tmp_path):
    path = tmp_path / "one.jsonl"
    record = json.dumps(chat({"content": [entry("Hi", logprob="HERE")]}))
    path.write_text(record.replace('"HERE"', written) + "\n")
    generation = tg.read(path)[0].generations[0]
    assert math.isnan(generation.logprobs[0])
    assert (generation.missing, generation.invalid) == (missing, invalid)


def test_case_21_zero_of_either_sign_is_a_logprob():
    generation = generation_of(chat({"content": [entry("H", 0.0), entry("i", -0.0)]}))
    np.testing.assert_array_equal(generation.logprobs, [0.0, 0.0])
    assert (generation.missing, generation.invalid) == (0, 0)


def test_case_24_usage_that_counts_two_more_is_no_error():
    record = chat({"content": [entry("Hi")]})
    record["response"]["usage"] = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert generation_of(record).notes == []


def test_case_55_prompt_logprobs_with_sorted_keys_do_not_move_the_prompt():
    steps = [None, {"10": {"logprob": -0.3, "rank": 1}, "8948": {"logprob": -1.2, "rank": 3}}]
    output = {"index": 0, "text": "a", "token_ids": [6], "finish_reason": "stop", "cumulative_logprob": -4.0}
    output["logprobs"] = [{"5": {"logprob": -0.1, "rank": 1}, "6": {"logprob": -4.0, "rank": 9}}]
    record = {"request_id": "r", "prompt_token_ids": [1, 8948], "prompt_logprobs": steps, "outputs": [output]}
    generation = generation_of(record)
    assert generation.prompt_token_ids.tolist() == [1, 8948]
    # The sampled token's own entry, not the first one.
    assert generation.logprobs.tolist() == [-4.0]


def test_case_56_flat_logprobs_with_the_sampled_token_also_among_the_likely_ones():
    flat = {"start_indices": [0, 1], "end_indices": [1, 4], "token_ids": [5, 6, 9, 6], "ranks": [1, 2, 1, 2]}
    flat |= {"logprobs": [-0.5, -4.0, -0.25, -4.0], "decoded_tokens": [" a", " b", " c", " b"]}
    output = {"index": 0, "text": " a b", "token_ids": [5, 6], "logprobs": flat, "finish_reason": "length"}
    generation = generation_of({"request_id": "r", "prompt_token_ids": [1], "outputs": [output]})
    assert (generation.token_ids.tolist(), generation.logprobs.tolist()) == ([5, 6], [-0.5, -4.0])


def test_case_57_of_a_cumulative_stream_the_last_chunk_counts():
    def part(end):
        listed = [[-0.5, i, None] for i in range(end)]
        meta = {"id": "s", "completion_tokens": end, "output_token_logprobs": listed, "finish_reason": None}
        return {"text": "ab"[:end], "output_ids": list(range(end)), "meta_info": meta}

    last = part(2)
    last["meta_info"]["finish_reason"] = {"type": "stop", "matched": 1}
    generation = generation_of({"request": {"text": "?"}, "response": [part(1), last]})
    assert (generation.token_ids.tolist(), generation.text, generation.stop_reason) == ([0, 1], "ab", 1)


def test_case_58_deltas_that_are_repeated_when_done_are_counted_once():
    places = {"output_index": 0, "content_index": 0}
    deltas = [
        {"type": "response.output_text.delta", "delta": text, "logprobs": [entry(text)], **places}
        for text in ("Hi", "!")
    ]
    both = [each["logprobs"][0] for each in deltas]
    done = {"type": "response.output_text.done", "text": "Hi!", "logprobs": both, **places}
    part = {"type": "output_text", "text": "Hi!", "logprobs": both}
    message = {"type": "message", "role": "assistant", "content": [part]}
    response = {"object": "response", "status": "completed", "output": [message]}
    events = [*deltas, done, {"type": "response.completed", "response": response}]
    for cut in (events, [*deltas, {"type": "response.completed", "response": {**response, "output": []}}]):
        trace = tg.Trace.from_dict({"request": {"input": "?"}, "response": cut})
        assert (trace.generations[0].tokens, trace.messages[-1]["content"]) == (2, "Hi!")


def test_case_60_logprobs_without_texts_are_kept_as_they_are():
    for count in (1, 2):
        message = {"role": "assistant", "content": "ok", "logprobs": {"content": [{"logprob": -0.5}] * count}}
        generation = generation_of({"messages": [{"role": "user", "content": "?"}, message]})
        assert (generation.tokens, generation.has_texts, generation.has_bytes) == (count, False, False)


def test_case_63_a_refusals_tokens_are_the_generation():
    record = chat({"content": None, "refusal": [entry("I"), entry(" can't")]}, content=None)
    record["response"]["choices"][0]["message"]["refusal"] = "I can't"
    assert generation_of(record).tokens == 2
    assert tg.Trace.from_dict(record).messages[-1]["content"] == "I can't"


def test_case_64_probabilities_become_logprobs_with_a_note():
    listed = [
        {"id": 87, "token": "x", "bytes": [120], "prob": 0.5},
        {"id": 88, "token": "y", "bytes": [121], "prob": 0.0},
    ]
    response = {"content": "xy", "tokens": [87, 88], "completion_probabilities": listed, "stop_type": "limit"}
    generation = generation_of({"request": {"prompt": "?"}, "response": response})
    assert generation.logprobs[0] == pytest.approx(math.log(0.5))
    assert math.isnan(generation.logprobs[1])
    assert (generation.finish_reason, generation.logprob_kind) == ("length", "processed")
    assert [(name[:3], count) for name, count, _ in generation.notes] == [("R24", 2)]
