"""The check of the servers' weights: each mistake that a server can make is found before the next update, and named."""

import asyncio
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

import tracegrad as tg
from online_runs import CONFIG, run
from policy_server import AGAIN, MODEL, PolicyServer
from tracegrad.online import RolloutConfig, SyncFault, weight_check, weight_sample
from tracegrad.online.logprob_gap import BF16_MEDIAN, BF16_P99, LogprobGap, WeightSyncBounds, explained_share, explains
from tracegrad.online.mismatch_causes import distributions
from tracegrad.online.weight_sample import LENGTH, ProbeRow, ProbeSampler, Sample, probe_of
from tracegrad.weight_sync import probe_requests

BF16 = tg.config.update(CONFIG, [("train.dtype", "bf16")])
ADAPTERS = tg.config.update(CONFIG, [("train.lora_rank", 4), ("optimizer.lr", 2e-2)])


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer tokens of each server: the stand-in samples one request after the other."""
    monkeypatch.setattr(probe_requests, "TOKENS", 64)
    monkeypatch.setattr(probe_requests, "AT_ONCE", 6)


def fault(server, out, **told):
    with server, pytest.raises(SyncFault) as raised:
        run(server, out, **told)
    print(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_p": 0.8}, r"with top_p 0\.8"),
        pytest.param({"top_k": 3}, "with top_k 3,", marks=pytest.mark.nightly),
        pytest.param({"min_p": 0.2}, r"with min_p 0\.(1[5-9]|2)", marks=pytest.mark.nightly),
        ({"frequency_penalty": 1.5}, r"with frequency_penalty 1\.5,"),
        pytest.param({"presence_penalty": 0.7}, r"with presence_penalty 0\.7,", marks=pytest.mark.nightly),
        ({"repetition_penalty": 1.3}, r"with repetition_penalty 1\.3,"),
        ({"top_k": 5, "top_p": 0.9}, "only the likeliest tokens"),
    ],
)
@pytest.mark.first_cases(2)
def test_sampling_that_nobody_asked_for_is_named_with_its_value(tmp_path, sampling, named):
    said = fault(PolicyServer(sampling=sampling), tmp_path)
    assert said.startswith("TG-ONLINE-020: step 1:")
    assert re.search(named, said), said


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4}


def test_rollouts_with_penalties_are_compared_with_them(tmp_path):
    with PolicyServer() as server:
        found = run(server, tmp_path, **PENALTIES)
    for row in found.rows:
        assert row["weight_check/max"] < 1e-3
        assert abs(row["old_rollout_ratio_max"] - 1) < 1e-3
        assert row["tokens_lost"] == 0


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"repetition_penalty": 1.0, "presence_penalty": 0.0}, "without the penalties"),
        ({"presence_penalty": 1.0}, r"with (presence|frequency)_penalty 0\.6 in addition to its penalties"),
    ],
)
def test_penalties_that_a_server_does_not_follow_are_named(tmp_path, sampling, named):
    said = fault(PolicyServer(sampling=sampling), tmp_path, **PENALTIES)
    assert re.search(named, said), said


@pytest.mark.parametrize(
    ("mistake", "step", "named"),
    [
        ("layer", 2, "weights of layer 1 are the previous version's"),
        ("cached", 0, "response cache"),
        ("bf16", 1, "most likely compute in bfloat16"),
        ("tokenizer", 0, "another tokenizer than the policy"),
    ],
)
@pytest.mark.first_cases(1)
def test_a_mistake_of_a_server_is_named(tmp_path, mistake, step, named, monkeypatch):
    monkeypatch.setattr(probe_requests, "TOKENS", 256 if mistake == "cached" else 64)
    said = fault(PolicyServer(mistake), tmp_path)
    assert said.startswith(f"TG-ONLINE-020: step {step}:") or not step
    assert named in said


@pytest.mark.nightly
def test_an_answer_that_is_given_again_after_a_push_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_requests, "TOKENS", 256)
    server = PolicyServer("cached")

    class Before(dict):
        """Answers to what was asked before the last push: each is given once more; none to what was played."""

        def __setitem__(self, same, answer):
            super().__setitem__((same, server.pushes), answer)

        def __contains__(self, same):
            found = [push for asked, push in self.keys() if asked == same]
            return json.loads(same)["max_tokens"] == LENGTH and bool(found) and max(found) < server.pushes

        def __getitem__(self, same):
            answer = super().__getitem__(max(key for key in self.keys() if key[0] == same))
            self[same] = answer
            return answer

    server.answered = Before()
    assert fault(server, tmp_path, steps=6).startswith("TG-ONLINE-049")


def test_the_first_request_of_an_asking_is_asked_once_more_in_the_next(monkeypatch):
    """The first time it is asked twice; prompts that are new to a cache say nothing of that, and stay out of it."""
    told = []

    async def ask(servers, probes, *, length, repeat_first, salt):
        told.append(([probe.body["prompt"] for probe in probes], length, repeat_first))
        return [
            probe_requests.ProbeAnswer("http://a", n, [1], [2] * 3, [-0.5] * 3, f"{len(told)}-{n}")
            for n in range(len(probes))
        ]

    monkeypatch.setattr(probe_requests, "send_probes", ask)
    monkeypatch.setattr(ProbeSampler, "_measured", lambda self, said, temperatures: said)
    ranks = SimpleNamespace(broadcast=lambda value: value)
    link = SimpleNamespace(run=lambda work: asyncio.run(work(None, None)))
    asking = ProbeSampler(SimpleNamespace(ranks=ranks), link, RolloutConfig(), None)
    for prompts, salt in (("ab", None), ("cd", "new"), ("cd", None), ("ef", None)):
        asking.probes = [probe_requests.Probe(probe_requests.COMPLETIONS, {"prompt": each}) for each in prompts]
        asking.ask(salt)
    assert told == [(["a", "b"], None, True), *[(["a", "c", "d"], 3.0, False)] * 2, (["c", "e", "f"], 3.0, False)]


@pytest.mark.nightly
def test_weights_older_than_the_version_before_are_named(tmp_path):
    """At version 2 the server has those that the run began with."""
    server = PolicyServer("restarted")
    assert "initial weights of the run" in fault(server, tmp_path, steps=4)


def test_an_adapter_with_another_factor_is_named(tmp_path):
    said = fault(PolicyServer("scaled"), tmp_path, config=ADAPTERS, weight_sync="lora", steps=4)
    assert "add the adapter with the factor 4, and the trainer with 2" in said


def test_one_of_several_servers_is_named(tmp_path):
    with PolicyServer() as good, PolicyServer("deaf") as bad, pytest.raises(SyncFault) as raised:
        run(good, tmp_path, servers=[good.url, bad.url], steps=4)
    assert f"Only {bad.url} of 2 servers differs. They still run the previous version's weights" in str(raised.value)


@pytest.mark.nightly
def test_a_second_server_behind_one_address_is_said(tmp_path):
    said = fault(PolicyServer("half"), tmp_path, steps=4)
    assert re.search(r"\d+ of \d+ answers agree: one address may serve several servers", said)


@pytest.mark.nightly
def test_a_second_server_behind_one_address_is_said_of_conversations(tmp_path, monkeypatch):
    """The first answer of each is of the pushed weights, the second of those before: no conversation agrees whole."""
    monkeypatch.setattr(probe_requests, "TOKENS", 0)
    server = PolicyServer()
    answer = server._answer

    def of_two(body):
        if body["messages"][-1]["content"] != AGAIN:
            return answer(body)
        server.adapted["old"] = server.bare
        return {**answer({**body, "model": "old"}), "model": body["model"]}

    server._answer = of_two

    async def agent(task_, policy):
        said = [*task_["prompt"], await policy.chat(task_["prompt"])]
        message = await policy.chat([*said, {"role": "user", "content": AGAIN}])
        return -float(len(message["content"] or "")) / 10

    said = fault(server, tmp_path, agent=agent, steps=4, max_turns=2)
    assert said.startswith("TG-ONLINE-020: step 2:")
    agreeing, answers = map(int, re.search(r"(\d+) of (\d+) answers agree: one address may serve", said).groups())
    assert agreeing == answers / 2
    assert "They still run the previous version's weights" in said


@pytest.mark.parametrize(
    "mistake", ["deaf", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("layer", "half"))]
)
def test_a_push_that_was_missed_in_bf16_is_found_before_the_next_update(tmp_path, mistake, monkeypatch):
    """Every push but the first is missed, the second among them: nothing is learnt from it what clean is."""
    monkeypatch.setattr(probe_requests, "TOKENS", 256)
    monkeypatch.setattr(probe_requests, "AT_ONCE", 16)
    said = fault(PolicyServer(mistake), tmp_path, config=BF16, steps=6)
    assert said.startswith("TG-ONLINE-020: step 2:")
    if mistake == "deaf":
        assert "still run the previous version's weights" in said


@pytest.mark.nightly
def test_truncated_sampling_within_the_bounds_of_bf16_is_found(tmp_path, monkeypatch):
    """A top_p that moves no token beyond the bounds moves all of them one way."""
    monkeypatch.setattr(probe_requests, "TOKENS", 256)
    monkeypatch.setattr(probe_requests, "AT_ONCE", 16)
    said = fault(PolicyServer(sampling={"top_p": 0.9}), tmp_path, config=BF16, steps=4)
    assert "nats higher on average, which rounding does not explain" in said


@pytest.mark.nightly
def test_a_penalty_within_the_bounds_of_bf16_is_named(tmp_path, monkeypatch):
    """It moves few tokens, those up and others down: neither the bounds nor an average show it."""
    monkeypatch.setattr(probe_requests, "TOKENS", 256)
    monkeypatch.setattr(probe_requests, "AT_ONCE", 16)
    said = fault(PolicyServer(sampling={"presence_penalty": 0.3}), tmp_path, config=BF16, steps=4)
    assert re.search(r"They sample with (presence|frequency)_penalty 0\.\d+, which", said), said


def test_a_cause_that_one_token_speaks_for_explains_nothing():
    drawn = np.random.default_rng(1)
    now = drawn.normal(-1, 0.5, 400).astype(np.float32)
    rollout = now + drawn.normal(0, 0.01, 400).astype(np.float32)
    rollout[0] += np.float32(0.9)
    one = now + drawn.normal(0, 1e-3, 400).astype(np.float32)
    one[0] = rollout[0]
    assert ((rollout - one) ** 2).sum() < 0.1 * ((rollout - now) ** 2).sum()
    assert not explains(now, one, rollout)
    # A slope over one token is that of its rounding: it leans nowhere.
    assert WeightSyncBounds(bf16=True).slope_to_previous(now, one, rollout) == 0
    every = now + drawn.normal(0, 0.05, 400).astype(np.float32)
    assert explains(now, every, every + (rollout - now) * (np.abs(rollout - now) < 0.1))


def test_a_difference_counts_by_the_rounding_of_its_token():
    """100 nearly certain tokens moved by 0.02 nats with the cause, 10 doubtful ones by 0.1 by rounding.

    In nats the cause gives 0.04 of 0.14 squares. In roundings of 0.051 and 0.866 it gives 15.4 of 15.5.
    """
    now = np.r_[np.full(100, -0.01), np.full(10, -2.0)].astype(np.float32)
    sign = np.float32((-1.0) ** np.arange(110))
    other = now + np.where(np.arange(110) < 100, np.float32(0.02), np.float32(0)) * sign
    rollout = np.where(np.arange(110) < 100, other, now + np.float32(0.1) * sign)
    assert explained_share(now, other, rollout)[0] == pytest.approx(15.38 / 15.51, abs=1e-3)
    assert explains(now, other, rollout)
    assert not explains(now, now + np.float32(0.002) * sign, rollout)


@pytest.mark.nightly
def test_a_clean_bf16_run_is_no_alarm(tmp_path):
    with PolicyServer() as server:
        found = run(server, tmp_path, config=BF16, steps=4)
    assert [row["step"] for row in found.rows] == [1, 2, 3, 4]
    assert all(0 < row["weight_check/p50"] <= BF16_MEDIAN and row["weight_check/p99"] <= BF16_P99 for row in found.rows)


def test_that_logprobs_are_raw_is_said_with_what_the_check_cannot_see(tmp_path):
    said = []
    with PolicyServer() as server:
        server.raw = True
        run(server, tmp_path, steps=1, log=said.append)
    assert any("logprobs are raw. The check detects other weights, but not a temperature" in line for line in said)


def test_another_chat_template_is_said_and_the_run_goes_on(tmp_path):
    said = []
    with PolicyServer("template") as server:
        run(server, tmp_path, steps=1, log=said.append)
    assert any("another chat template" in line and "Be brief." in line for line in said)


@pytest.mark.parametrize("tokens", [64, 0], ids=["asked", "not asked"])
@pytest.mark.first_cases(1)
def test_tokens_that_claim_the_version_before_are_compared_with_it(tmp_path, monkeypatch, tokens):
    """All that the step trains says that it is of version 0, and comes from elsewhere."""
    monkeypatch.setattr(weight_check, "MAX_TIME_SHARE", 1.0)
    monkeypatch.setattr(probe_requests, "TOKENS", tokens)
    with PolicyServer() as server:
        answer = server._answer

        def hotter(body):
            server.mistake = "hot" if server.pushes == 1 and body["max_tokens"] == 12 and body.get("played") else None
            return answer(body)

        server._answer = hotter

        async def agent(task_, policy):
            told = {"played": True} if server.pushes == 1 and policy.session.name.startswith(("2-", "3-")) else {}
            message = await policy.chat(task_["prompt"], **told)
            return -float(len(message["content"] or "")) / 10

        with pytest.raises(SyncFault) as raised:
            run(server, tmp_path, agent=agent, steps=4, steps_ahead=1)
    assert "of the previous version and were compared with its weights" in str(raised.value)
    assert "temperature 1.5" in str(raised.value)


class Noise:
    """A sample of so many tokens that are so many nats off."""

    def __init__(self, nats, tokens=64):
        self.off = np.float32(nats) * np.sin(np.arange(tokens, dtype=np.float32))

    def gap(self):
        return LogprobGap.of(np.zeros_like(self.off), self.off)


@pytest.fixture
def search(monkeypatch):
    """`Check._search` of a bf16 run after `taken` pushes, where no cause explains anything: what it asks anew."""
    told = {"tried": 0, "salts": [], "fresh": 0.1}

    def explain(*_):
        told["tried"] += 1
        return weight_check.UNKNOWN

    def ask(salt):
        told["salts"].append(salt)
        return Noise(told["fresh"])

    monkeypatch.setattr(weight_check, "explain", explain)
    driven = SimpleNamespace(steps_done=1, ranks=SimpleNamespace(broadcast=lambda value: value))
    looked = weight_check.WeightSyncCheck(driven, None, WeightSyncBounds(bf16=True), SimpleNamespace(ask=ask))

    def searched(nats, taken=None, spent=None):
        driven.steps_done = driven.steps_done if taken is None else taken
        looked._spent = looked._spent if spent is None else spent
        looked._search(2, Noise(nats))
        return told["tried"], len(told["salts"])

    return searched, told


def test_keys_and_values_of_older_weights_are_found_where_new_prompts_are_nearer(search):
    """0.9 nats against 0.1 of prompts with a new salt: more than `MIN_STANDARD_ERRORS` standard errors of 64 and 64
    ranks."""
    searched, told = search
    with pytest.raises(SyncFault, match=r"TG-ONLINE-020.*caches.*keys.*values.*older"):
        searched(0.9)
    assert told["salts"] == ["check-1"]


def test_noise_that_new_prompts_have_too_is_no_fault_and_is_what_later_noise_is_compared_with(search):
    searched, told = search
    told["fresh"] = 0.9
    assert searched(0.9) == (1, 1)
    # Of the same push, no noisier, and the time is spent: nothing is tried. A hundredth of the time is enough again.
    assert searched(1.2, spent=1e9) == (1, 1)
    assert searched(0.9, spent=0.0) == (2, 1)
    # Twice the squares are noisier, and each of the first three pushes is looked at, whatever it costs.
    assert searched(1.3, spent=1e9) == (3, 2)
    assert [searched(0.9, taken=taken, spent=1e9) for taken in (2, 3, 4)] == [(4, 2), (5, 2), (5, 2)]


def test_before_the_first_push_causes_are_tried_and_no_cache_is_blamed(search):
    searched, _ = search
    assert searched(0.9, taken=0) == (1, 0)


def test_a_short_gap_in_float32_is_clean_to_a_ten_thousandth():
    at = np.float32([-1.0, -2.0])
    assert WeightSyncBounds().holds(LogprobGap.of(at, at + np.float32(9e-5)))
    assert not WeightSyncBounds().holds(LogprobGap.of(at, at + np.float32(2e-4)))
    assert WeightSyncBounds().holds(LogprobGap(0))


def test_the_bounds_of_bf16_are_the_same_in_every_run():
    """After a first step whose gap is that of a missed push no other one holds."""
    proof = WeightSyncBounds(bf16=True)
    for nats in (15.0, 9.0, 9.0):
        gap = LogprobGap.of(np.zeros(9, np.float32), np.full(9, nats, np.float32))
        assert not proof.holds(gap)
    few_off = np.r_[np.zeros(250), np.full(6, 0.4)].astype(np.float32)
    assert not proof.holds(LogprobGap.of(few_off, np.zeros(256, np.float32)))
    assert proof.holds(LogprobGap.of(few_off[:-4], np.zeros(252, np.float32)))


def test_leaning_towards_the_version_before_is_certain_or_nothing():
    drawn = np.random.default_rng(0)
    now = drawn.normal(-1, 0.5, 400).astype(np.float32)
    before = (now + drawn.normal(0, 0.02, 400)).astype(np.float32)
    noise = drawn.normal(0, 0.01, 400).astype(np.float32)
    proof = WeightSyncBounds(bf16=True, noise_mean_square=1e-4)
    assert proof.slope_to_previous(now, before, now + noise) == 0
    assert 0.8 < proof.slope_to_previous(now, before, before + noise) < 1.2
    assert 0.3 < proof.slope_to_previous(now, before, (now + before) / 2 + noise) < 0.7
    # What rounding of `now` gives by itself, where the update is as small as rounding.
    rounded = now + drawn.normal(0, 0.01, 400).astype(np.float32)
    still = now + drawn.normal(0, 0.01, 400).astype(np.float32)
    assert WeightSyncBounds(bf16=True, noise_mean_square=2e-4).slope_to_previous(rounded, still, now + noise) == 0


def test_a_request_is_asked_again_as_it_was_sent_but_for_its_length():
    messages = [{"role": "user", "content": "?"}]
    request = {"messages": messages, "temperature": 0.5, "stream": True, "n": 2, "max_tokens": 900, "tools": [{}]}
    probe = probe_of({"calls": [{"request": request, "response": {}}]}, RolloutConfig())
    assert probe.path == probe_requests.CHAT
    assert probe.body == {"messages": messages, "temperature": 0.5, "max_tokens": 16, "tools": [{}]}
    assert probe.temperature == 0.5
    text = probe_of({"calls": [{"request": {"prompt": "2+2="}, "response": {}}]}, RolloutConfig())
    assert (text.path, text.temperature) == (probe_requests.COMPLETIONS, 1.0)
    told = {"calls": [{"request": {"messages": messages}, "response": {"prompt_token_ids": [1, 2]}}]}
    ids = probe_of(told, RolloutConfig(input="token_ids"))
    assert (ids.path, ids.body["token_ids"]) == (probe_requests.GENERATE, [1, 2])
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for other in ({"temperature": 0}, {"response_format": {"type": "json_object"}}, {"messages": [picture]}):
        assert probe_of({"calls": [{"request": {**request, **other}, "response": {}}]}, RolloutConfig()) is None
    assert probe_of({"messages": messages}, RolloutConfig()) is None


def test_wrong_weights_are_noticed_by_tokens_with_penalties_and_support(tmp_path):
    """Two answers; the second one has penalties, and its first token a support."""
    import torch
    from transformers import AutoModelForCausalLM

    from tracegrad.alignment.penalties import Penalties
    from tracegrad.alignment.ragged import Ragged
    from tracegrad.trainer import Trainer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    driven = Trainer(model, tg.presets.DAPO_DIRECT, CONFIG, out=tmp_path, total_steps=1)
    driven.create_run_dir()
    ids = np.array([20, 21, 22, 23, 22, 23, 22], np.int32)
    turn = np.array([-1, -1, 0, -1, 1, 1, 1], np.int32)
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.int64)[None]).logits[0].double()
    penalized = logits.clone()
    # Before token 4 the prompt is 20 to 23, and each token after it also has a presence penalty for the answer so far.
    for at, answer in ((4, []), (5, [22]), (6, [22, 23])):
        row = penalized[at - 1]
        for id in (20, 21, 22, 23):
            row[id] = row[id] / 1.5 if row[id] > 0 else row[id] * 1.5
        row[answer] -= 0.25
        row[7] += 2.0
    own = [logits[1].log_softmax(-1)[22]]
    own += [penalized[3][22] - penalized[3][[22, 40, 7]].logsumexp(-1)]
    own += [penalized[at - 1].log_softmax(-1)[ids[at]] for at in (5, 6)]
    rollout = np.full(7, np.nan, np.float32)
    rollout[[2, 4, 5, 6]] = torch.stack(own).numpy()
    one = np.ones(1, np.float32)
    penalties = Penalties(
        np.array([1]), 1.5 * one, 0.25 * one, 0 * one, np.array([1]), np.array([7], np.int32), 2 * one
    )
    support = Ragged(np.array([0, 0, 0, 0, 0, 3, 3, 3]), np.array([7, 22, 40], np.int32))
    more = {"turn": turn, "support": support, "penalties": penalties}
    sequences = tg.Sequences.from_arrays(ids, [0, 7], rollout, turn >= 0, **more)

    def sampled():
        return weight_sample.sample_of(driven, sequences, np.ones(7, bool), np.zeros(1, bool))

    bounds, sample = WeightSyncBounds(bf16=False), sampled()
    assert bounds.holds(sample.gap())
    assert np.allclose(sample.by_answer(driven).logprobs, rollout[[2, 4, 5, 6]], atol=1e-5)
    assert np.allclose(distributions(driven, sample).logprobs, rollout[[2, 4, 5, 6]], atol=1e-5)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.05)
    assert not bounds.holds(sampled().gap())


def test_the_distributions_of_a_sample_are_the_models_own(tmp_path):
    """Their logprobs are those of the packed forward, and the ids before each token are told apart."""
    import torch
    from transformers import AutoModelForCausalLM

    from tracegrad.trainer import Trainer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    driven = Trainer(model, tg.presets.DAPO_DIRECT, CONFIG, out=tmp_path, total_steps=1)
    driven.create_run_dir()
    ids = np.arange(20, 32)
    rollout = np.full(12, np.nan, np.float32)
    rollout[[5, 6, 7, 10, 11]] = -1.0
    warmth = np.full(12, 2.0, np.float32)
    sample = Sample.of(
        driven, [ProbeRow(ids[:4], np.float32([np.nan, -1, -1, -1]), warmth[:4]), ProbeRow(ids, rollout, warmth)]
    )
    found = distributions(driven, sample)
    assert np.allclose(found.logprobs, sample.logprobs, atol=1e-5)
    assert found.target.tolist() == [21, 22, 23, 25, 26, 27, 30, 31]
    assert [each.tolist() for each in found.output] == [[], [21], [21, 22], [], [25], [25, 26], [], [30]]
    assert [len(each) for each in found.prompt] == [1, 1, 1, 5, 5, 5, 10, 10]
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None]).logits[0, 10]
    assert np.allclose(found.logits[-1], logits.numpy(), atol=1e-4)
