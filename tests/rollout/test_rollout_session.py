"""A session keeps calls as they were sent and received, and its record aligns exactly."""

import asyncio
import json

import numpy as np
import pytest

import tracegrad as tg
from stand_in import Scripted, always, good_clerk, prompts
from tracegrad.errors import ArgumentError
from tracegrad.rollout import LimitReached, Limits, NoAnswer, Policy, Session
from tracegrad.rollout.session import COMPLETIONS, reward_value


def answer(text="4", ids=(19, 2)):
    choice = {"message": {"role": "assistant", "content": text}, "token_ids": list(ids), "logprobs": [-0.1] * len(ids)}
    return {"prompt_token_ids": [1, 5], "choices": [{"index": 0, "finish_reason": "stop", **choice}]}


def asked(*texts):
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_a_request_asks_for_ids_and_logprobs_and_says_how_it_samples():
    sent = Session("a", sampling={"max_tokens": 9}).open({**asked("2+2?"), "temperature": 0.5, "top_p": None}).request
    neutral = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    expected = {"temperature": 0.5, "top_p": 1.0, **neutral, "max_tokens": 9, "logprobs": True, "top_logprobs": 0}
    assert sent == {**asked("2+2?"), **expected, "return_token_ids": True}


def test_what_the_sender_asks_of_logprobs_is_left():
    session = Session("a")
    assert session.open({**asked("?"), "logprobs": True, "top_logprobs": 5}).request["top_logprobs"] == 5
    assert session.open({"prompt": "?", "logprobs": 3}, COMPLETIONS).request["logprobs"] == 3
    assert session.open({"prompt": "?"}, COMPLETIONS).request["logprobs"] == 0
    assert session.open({**asked("?"), "logprobs": False}).request["logprobs"] is True


def test_a_bound_on_tokens_is_not_given_twice():
    session = Session("a", sampling={"max_tokens": 9})
    assert "max_tokens" not in session.open({**asked("?"), "max_completion_tokens": 5}).request


def test_what_is_changed_after_sending_does_not_change_the_record():
    session, body = Session("a"), asked("one")
    session.open(body).close(answer())
    body["messages"][0]["content"] = "another"
    body["messages"].append({"role": "user", "content": "two"})
    session.open(body).close(answer())
    first, second = (call["request"]["messages"] for call in session.calls)
    assert [one["content"] for one in first] == ["one"]
    assert [one["content"] for one in second] == ["another", "two"]


def test_what_was_sent_before_is_held_once():
    session = Session("a")
    tools = [{"type": "function", "function": {"name": "price"}}]
    for texts in (["one"], ["one", "two"]):
        session.open({**asked(*texts), "tools": json.loads(json.dumps(tools))}).close(answer())
    first, second = (call["request"] for call in session.calls)
    assert first["messages"][0] is second["messages"][0]
    assert first["tools"] is second["tools"]


def test_a_call_says_its_version_and_that_it_came_back_under_another():
    versions = iter([4, 4, 4, 5])
    session = Session("a", version=lambda: next(versions))
    session.open(asked("?")).close(answer())
    session.open(asked("?")).close(answer())
    assert [call["policy_version"] for call in session.calls] == [4, 4]
    assert [call.get("received_version") for call in session.calls] == [None, 5]
    [trace] = tg.Traces.from_records([session.record()])
    assert [one.policy_version for one in trace.generations] == [4, 4]


def test_a_record_without_calls_and_one_with_lost_calls_are_read():
    session = Session("a")
    session.open(asked("?")).fail("the server is gone")
    record = session.record(group="g", messages=asked("?")["messages"], failure={"words": "gone"})
    [trace] = tg.Traces.from_records([record])
    assert np.isnan(tg.Traces.from_records([record]).reward[0])
    assert (trace.id, trace.group, len(trace.messages), len(trace.generations)) == ("a", "g", 1, 0)
    assert record["lost_calls"]["count"] == 1
    assert record["lost_calls"]["last"][0]["error"] == "the server is gone"


def test_lost_calls_are_bounded_and_counted():
    session = Session("a")
    for number in range(40):
        session.open(asked("?")).fail(f"lost {number}")
    lost = session.record()["lost_calls"]
    assert (lost["count"], len(lost["last"]), lost["last"][-1]["error"]) == (40, 16, "lost 39")


def test_calls_without_ids_are_counted():
    session = Session("a")
    session.open(asked("?")).close(answer())
    bare = answer()
    del bare["prompt_token_ids"]
    session.open(asked("?")).close(bare)
    session.open(asked("?")).close({"choices": [{"message": {}}], "usage": {"completion_tokens": 7}})
    assert (session.without_ids, session.tokens) == (2, 2 + 2 + 7)


@pytest.mark.parametrize("value", ["1.0", float("inf"), [1.0], object()])
def test_what_is_no_reward_is_refused(value):
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-038"):
        reward_value(value)


def test_numpy_numbers_are_rewards():
    assert reward_value(np.float32(0.5)) == 0.5
    assert reward_value(np.bool_(True)) == 1.0


def policy(stand_in, **limits):
    return Policy(Session("a"), stand_in.chat, limits=Limits(**limits), sticky="g7", salt=lambda: "v3")


def test_a_conversation_of_tools_aligns_as_sampled_with_no_mismatch(example):
    [prompt] = [one for one in prompts(40, "order") if one.stock >= one.quantity][:1]
    stand_in = Scripted(example, good_clerk(prompt))
    import record as quickstart
    import task

    async def converse():
        one, messages = policy(stand_in), prompt.messages()
        while True:
            messages.append(await one.chat(messages, tools=task.TOOLS, max_tokens=64))
            if messages[-1]["finish_reason"] == "stop":
                return one.session, messages
            messages += quickstart.tool_messages(prompt, messages[-1])

    session, messages = asyncio.run(converse())
    assert task.check(prompt, messages) == 1.0
    assert len(session.calls) == 3
    traces = tg.Traces.from_records([session.record(rewards={"correct": 1.0, "short": None})])
    sequences = tg.align(traces, stand_in.tokenizer)
    assert sequences.alignment_report.rate == 0
    assert len(sequences.cu_seqlens) == 2
    sampled = [id for call in session.calls for id in call["response"]["choices"][0]["token_ids"]]
    assert sequences.ids[sequences.trainable].tolist() == sampled
    last = session.calls[-1]["response"]
    assert sequences.ids.tolist() == last["prompt_token_ids"] + last["choices"][0]["token_ids"]
    np.testing.assert_allclose(
        sequences.rollout_logprobs[sequences.trainable], [-0.25 - one / 4096 for one in sampled], rtol=1e-6
    )
    assert all("finish_reason" not in message for body in stand_in.seen for message in body["messages"])
    assert stand_in.asked[0] == ("g7", "v3")


def test_limits_of_turns_and_tokens(example):
    stand_in = Scripted(example, always("2 × 20 = 40 €"))

    async def talk(one, times):
        for _ in range(times):
            await one.chat([{"role": "user", "content": "?"}])

    one = policy(stand_in, max_turns=2)
    with pytest.raises(LimitReached, match=r"TG-ROLLOUT-055.*2"):
        asyncio.run(talk(one, 3))
    assert (one.ended, len(one.session.calls)) == ("turns", 2)
    one = policy(stand_in, max_tokens=20)
    with pytest.raises(LimitReached, match=r"TG-ROLLOUT-056.*20"):
        asyncio.run(talk(one, 9))
    assert one.session.tokens == 20
    assert one.session.calls[-1]["request"]["max_tokens"] == 20 - one.session.calls[0]["response"]["usage"][
        "completion_tokens"
    ] * (len(one.session.calls) - 1)


@pytest.mark.parametrize("answer", [{}, [], {"choices": []}, {"choices": [{"message": None}]}, "text", None])
def test_an_answer_without_a_message_is_lost_and_said(answer):
    async def chat(body, *, session, salt):
        return answer

    one = Policy(Session("a"), chat)
    with pytest.raises(NoAnswer, match="TG-ROLLOUT-028"):
        asyncio.run(one.chat([{"role": "user", "content": "?"}]))
    assert one.session.calls == []
    assert one.session.record()["lost_calls"]["count"] == 1


def test_without_a_proxy_there_is_no_address():
    one = Policy(Session("a"), None)
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-027"):
        _ = one.base_url
