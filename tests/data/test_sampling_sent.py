"""What requests of ours say of sampling: each option that a server would else take from the model's own file."""

import asyncio
import pickle

import aiohttp
import pytest
from aiohttp import web

import tracegrad as tg
from stand_in import StandIn
from tracegrad import rollout
from tracegrad.data.sampling import NEUTRAL, fields_in_error
from tracegrad.errors import RefusedFields
from tracegrad.rollout.client import ServerError, Servers
from tracegrad.rollout.proxy import Proxy

USER = [{"role": "user", "content": "2+2?"}]
LISTED = {"content": [{"token": "token_id:19", "logprob": -0.1}, {"token": "token_id:2", "logprob": -0.2}]}
SAID = {"message": {"role": "assistant", "content": "4"}, "token_ids": [19, 2], "logprobs": LISTED}
CHAT = {"prompt_token_ids": [1, 5], "choices": [{"index": 0, "finish_reason": "stop", **SAID}]}
OFF = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def without(*names, status=400):
    """A server that refuses a request for the first of these fields that it has."""

    def answer(request, body):
        wrong = next((name for name in names if name in body), None)
        told = {"error": {"message": f"Unrecognized request argument supplied: {wrong}"}}
        return CHAT if wrong is None else web.json_response(told, status=status)

    return answer


async def ask(task, policy):
    await policy.chat(USER, **task)
    return 1.0


def played(*tasks, answer):
    """The trajectories of tasks that are played one after another, and the requests that the server got."""

    async def run():
        async with StandIn(answer) as stand, Servers([stand.url], model="m", timeout_s=10) as servers:
            found = [await rollout.run_rollout(ask, task, chat=servers.chat) for task in tasks]
            return found, stand.asked("/v1/chat/completions")

    return asyncio.run(run())


def test_a_request_says_every_option_that_a_server_would_take_from_the_models_file():
    [one], [sent] = played({}, answer=without())
    assert {name: sent[name] for name in ("temperature", *NEUTRAL)} == {"temperature": 1, "top_p": 1, **OFF}
    assert one.record["calls"][0].keys() == {"request", "response"}
    [_], [sent] = played({"top_k": 5, "min_p": None, "presence_penalty": 0.5}, answer=without())
    assert {name: sent[name] for name in NEUTRAL} == {"top_p": 1, **OFF, "top_k": 5, "presence_penalty": 0.5}


@pytest.mark.parametrize("status", [400, 422])
def test_a_field_that_the_server_refuses_is_left_out_from_then_on_and_recorded_as_unknown(status):
    (one, two), sent = played({}, {}, answer=without("top_k", "min_p", status=status))
    assert [sorted({"top_k", "min_p"} & body.keys()) for body in sent] == [["min_p", "top_k"], ["min_p"], [], []]
    for each in (one, two):
        [call] = each.record["calls"]
        assert each.error is None
        assert call["sampling_defaults"] == "unknown"
        assert sorted(call["refused_sampling"]) == ["min_p", "top_k"]
        assert {"top_k", "min_p"}.isdisjoint(call["request"])
    [generation] = tg.Trace.from_dict(one.record).generations
    assert (generation.temperature, generation.top_p) == (1.0, 1.0)
    assert "top_k" not in generation.sampling


def test_what_the_agent_asked_for_is_not_left_out():
    [one], sent = played({"top_k": 5}, answer=without("top_k"))
    assert len(sent) == 1
    assert "Unrecognized request argument supplied: top_k" in one.error
    [one], sent = played({}, answer=lambda request, body: 400)
    assert (len(sent), "said 400" in one.error) == (1, True)


async def test_a_refusal_that_names_no_field_is_an_error():
    async with StandIn(without("seed")) as stand, Servers([stand.url], model="m", timeout_s=10) as servers:
        with pytest.raises(ServerError, match=r"TG-ROLLOUT-058.*seed"):
            await servers.chat({"messages": USER, "seed": 3, **NEUTRAL}, session="s")
    assert fields_in_error("no_top_k, top_p and 'min_p': bad", ["top_k", "top_p", "min_p"]) == ("top_p", "min_p")


def test_a_refusal_comes_from_another_process_with_the_names_of_its_fields():
    refused = RefusedFields("the servers refuse top_k", ["top_k"])
    again = pickle.loads(pickle.dumps(refused))
    assert (type(again), str(again), again.names) == (RefusedFields, "the servers refuse top_k", ("top_k",))


async def test_the_proxy_leaves_a_refused_field_out_too():
    records = []
    async with StandIn(without("top_k", "min_p")) as stand:
        async with (
            Proxy(stand.url, key="k" * 20, finished=records.append) as proxy,
            aiohttp.ClientSession() as client,
        ):
            for name in ("one", "two"):
                head = {"Authorization": f"Bearer {'k' * 20}"}
                place = f"{proxy.url}/s/{name}/v1/chat/completions"
                async with client.post(place, json={"messages": USER, "model": "m"}, headers=head) as answer:
                    assert answer.status == 200
                ours = {"messages": USER, "model": "m", "top_k": 5}
                async with client.post(place, json=ours, headers=head) as answer:
                    assert (answer.status, "top_k" in await answer.text()) == (400, True)
        sent = [body for body in stand.asked("/v1/chat/completions") if body.get("top_k") != 5]
    assert [sorted({"top_k", "min_p"} & body.keys()) for body in sent] == [["min_p", "top_k"], ["min_p"], [], []]
    assert [call["sampling_defaults"] for record in records for call in record["calls"]] == ["unknown"] * 2
