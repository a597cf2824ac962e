"""Token in, token out against a server in the test process: what is asked, what is recorded, and what is refused."""

import asyncio
import itertools
import json

import numpy as np
import pytest

import task as clerk
import tracegrad as tg
from shop_contracts import read, shop_tools
from stand_in import END, StandIn, good_clerk, prompts
from tracegrad.errors import ArgumentError
from tracegrad.online import RolloutConfig
from tracegrad.rollout import Limits, NoAnswer, one_turn, run_rollout, with_tools
from tracegrad.rollout.client import Servers
from tracegrad.rollout.token_client import DERENDER, GENERATE, Tokens, sampling_params


class Policy:
    """Answers generate, derender and chat requests by a script; what it samples is written byte by byte, as no encoder
    would."""

    def __init__(self, example, script):
        self.tokenizer = tg.Tokenizer.from_pretrained(example / "model")
        self.script = script
        self.spans = None
        self.seen = []

    def drawn(self, messages):
        text = self.script(messages)
        ids = [self.tokenizer._core.id_of_bytes(bytes([byte])) for byte in text.encode()]
        return [*ids, *self.tokenizer.eos_ids]

    def __call__(self, request, body):
        self.seen.append((request.path, body))
        if body == {}:
            return 400
        if request.path == GENERATE:
            return self.generate(body)
        if request.path == DERENDER:
            return self.derender(body)
        ids = self.drawn(body["messages"])
        prompt = self.tokenizer.render_ids(body["messages"], body.get("tools"), add_generation_prompt=True).tolist()
        listed = [{"token": "", "logprob": -0.5} for _ in ids]
        choice = {"index": 0, "message": self.message(ids[:-1]), "token_ids": ids, "logprobs": {"content": listed}}
        return {"prompt_token_ids": prompt, "choices": [{**choice, "finish_reason": "stop"}]}

    def generate(self, body):
        text = self.tokenizer.decode(body["token_ids"])
        messages = [{"role": "tool"}] * text.count("<tool_response>")
        ids = self.drawn(messages)
        listed = [{"token_id": one, "logprob": -0.5, "rank": 1, "top_logprobs": []} for one in ids]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": listed}, "finish_reason": "stop"}
        return {"request_id": "g", "choices": [{**choice, "stop_reason": None, "weight_versions": self.spans}]}

    def derender(self, body):
        [choice] = body["generate_response"]["choices"]
        assert body["chat_request"]["messages"]
        return {"object": "chat.completion", "choices": [{"index": 0, "message": self.message(choice["token_ids"])}]}

    def message(self, ids):
        content, calls = clerk.parse_tool_calls(self.tokenizer.decode(ids))
        calls = [{"id": f"c{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
        return {"role": "assistant", "content": content, "reasoning": None, "tool_calls": calls}


@pytest.fixture
def order():
    return next(one for one in prompts(60, "order") if one.stock >= one.quantity)


@pytest.fixture
def policy(example, order):
    return Policy(example, good_clerk(order))


def played(policy, contract, task, by="tokens", **options):
    async def run():
        async with StandIn(policy) as server, Servers([server.url], model="clerk", retries=0) as servers:
            chat = Tokens(servers, policy.tokenizer) if by == "tokens" else servers.chat
            return await run_rollout(contract, task, chat=chat, **options)

    return asyncio.run(run())


def test_turns_with_tools_are_one_branch_by_tokens_and_fork_by_chat(policy, order):
    task = {"question": order, "prompt": order.messages()}
    branches = {}
    for by in ("tokens", "chat"):
        found = played(policy, with_tools(shop_tools(order)), task, by)
        assert found.error is None
        assert [one["role"] for one in found.completion] == ["assistant", "tool", "assistant", "tool", "assistant"]
        sequences = tg.align(read(found), policy.tokenizer)
        assert sequences.alignment_report.rate == 0
        branches[by] = sequences.branches
        if by == "tokens":
            calls = found.record["calls"]
            reasons = [call["response"]["choices"][0]["finish_reason"] for call in calls]
            assert reasons == ["tool_calls", "tool_calls", "stop"]
            last = calls[-1]["response"]
            assert sequences.ids.tolist() == last["prompt_token_ids"] + last["choices"][0]["token_ids"]
            assert np.nanmax(np.abs(sequences.rollout_logprobs + 0.5)) == 0
            assert set(sequences.alignment_report.table()) <= {"R01 noncanonical_bpe", "R13 toolcall_reformatted"}
    assert branches == {"tokens": 1, "chat": 3}


def test_the_ids_that_were_asked_hold_every_sampled_one(policy, order):
    played(policy, with_tools(shop_tools(order)), {"prompt": order.messages()})
    asked = [body for path, body in policy.seen if path == GENERATE]
    assert len(asked) == 3
    for before, after in itertools.pairwise(asked):
        drawn = policy.generate(before)["choices"][0]["token_ids"]
        held = before["token_ids"] + drawn
        assert after["token_ids"][: len(held)] == held
    # Each option is said, so that a model's generation_config.json sets none.
    told = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0}
    told |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert all(body["sampling_params"] == told for body in asked)


def test_versions_of_one_answer_are_told_token_by_token(policy, order):
    policy.script = lambda messages: "12 lamps"
    policy.spans = [{"version": "default", "start": 0, "end": 2}, {"version": "6", "start": 2, "end": 5}]
    policy.spans.append({"version": "7", "start": 5, "end": 9})
    found = played(policy, one_turn(), order.messages(), version=lambda: 5)
    sequences = tg.align(read(found), policy.tokenizer)
    assert sequences.version[-9:].tolist() == [5, 5, 6, 6, 6, 7, 7, 7, 7]


def test_the_stop_token_is_kept_in_the_ids_and_not_in_the_text(policy, order):
    policy.script = lambda messages: "12 lamps"
    found = played(policy, one_turn(), order.messages())
    assert found.completion == [{"role": "assistant", "content": "12 lamps"}]
    assert found.finish_reason == "stop"
    [call] = found.record["calls"]
    assert call["response"]["choices"][0]["token_ids"][-1:] == list(policy.tokenizer.eos_ids)
    policy.script = lambda messages: ""
    assert played(policy, one_turn(), order.messages()).completion == [{"role": "assistant", "content": ""}]


def test_calls_that_are_made_again_go_on_from_the_history_that_they_name(policy, order):
    policy.script = lambda messages: "12 lamps"

    async def twice(task, asked):
        first = await asked.chat(task)
        longer = [*task, first, {"role": "user", "content": "Sure?"}]
        await asyncio.gather(asked.chat(longer), asked.chat(longer))
        await asked.chat(longer)
        await asked.chat([{"role": "user", "content": "another"}])

    found = played(policy, twice, order.messages())
    assert found.error is None
    asked = [body["token_ids"] for path, body in policy.seen if path == GENERATE]
    assert asked[1] == asked[2] == asked[3]
    held = asked[0] + policy.drawn([])
    assert asked[1][: len(held)] == held
    assert policy.tokenizer.decode(asked[4]).startswith("<|im_start|>user\nanother")


def test_a_server_without_the_paths_is_refused_with_the_flag_it_needs(policy):
    async def check(answer):
        async with StandIn(answer) as server, Servers([server.url], model="clerk", retries=0) as servers:
            await Tokens(servers, policy.tokenizer).check()

    asyncio.run(check(policy))
    for missing in (GENERATE, DERENDER):
        with pytest.raises(ArgumentError, match=rf"TG-ROLLOUT-039.*{missing}"):
            asyncio.run(check(lambda request, body, missing=missing: 404 if request.path == missing else 400))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"stop": ["x"]}, "TG-ROLLOUT-040.*stop="),
        ({"n": 2}, "TG-ROLLOUT-040.*n=2"),
        ({"tool_choice": "required"}, "TG-ROLLOUT-040.*tool_choice"),
        ({"temprature": 0.5}, r"TG-ROLLOUT-040.*Did.*you.*mean"),
        ({"response_format": {"type": "json_object"}}, "TG-ROLLOUT-040.*response_format"),
    ],
)
def test_what_a_request_with_ids_cannot_say_is_refused(field, words):
    with pytest.raises(ArgumentError, match=words):
        sampling_params({"messages": [], **field})
    assert sampling_params({"messages": [], "n": 1, "stop": None, "tool_choice": "auto", "top_k": 3}) == {
        "top_k": 3,
        "logprobs": 0,
    }


@pytest.mark.parametrize(
    "spoil",
    [
        lambda choice: choice.pop("token_ids"),
        lambda choice: choice.pop("logprobs"),
        lambda choice: choice["logprobs"]["content"].pop(),
        lambda choice: choice["token_ids"].__setitem__(0, "5"),
        lambda choice: choice["token_ids"].__setitem__(0, True),
        lambda choice: choice["logprobs"]["content"].__setitem__(0, {"logprob": "x"}),
        lambda choice: choice["token_ids"].__setitem__(0, 10**12),
        lambda choice: choice["token_ids"].__setitem__(0, -1),
    ],
)
def test_an_answer_that_tells_its_tokens_wrongly_is_lost_and_said_so(policy, order, spoil):
    exact = policy.generate

    def generate(body):
        answer = exact(body)
        spoil(answer["choices"][0])
        return answer

    policy.generate = generate
    policy.message = lambda ids: {"role": "assistant", "content": "x"}
    found = played(policy, one_turn(), order.messages())
    assert found.record["reward"] is None
    assert found.record["lost_calls"]["count"] == 1
    words = ("NoAnswer", "not in the model's vocabulary", "TG-BORDER-017")
    assert any(word in found.error for word in words), found.error


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{}, {}]}])
def test_a_parser_that_gives_no_message_is_no_answer(policy, order, answer):
    policy.derender = lambda body: answer
    found = played(policy, one_turn(), order.messages())
    assert NoAnswer.__name__ in found.error
    assert END not in json.dumps(found.record)


def test_limits_hold_on_the_road_of_tokens_too(policy, order):
    policy.script = lambda messages: "12 lamps"

    async def on_and_on(task, asked):
        messages = list(task)
        while True:
            messages += [await asked.chat(messages), {"role": "user", "content": "more"}]

    found = played(policy, on_and_on, order.messages(), limits=Limits(max_turns=3))
    assert (found.ended, len(found.record["calls"])) == ("turns", 3)
    policy.seen.clear()
    played(policy, on_and_on, order.messages(), limits=Limits(max_tokens=20))
    asked = [body["sampling_params"]["max_tokens"] for path, body in policy.seen if path == GENERATE]
    assert asked == [20, 11, 2]


def test_a_run_that_asks_for_neither_road_is_refused():
    with pytest.raises(ArgumentError, match="TG-ONLINE-021"):
        RolloutConfig(input="token")  # type: ignore[arg-type]
