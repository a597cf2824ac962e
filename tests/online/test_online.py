"""The online loop against a policy behind HTTP: steps, proof, replay, resume, and what must stop a run."""

import asyncio
import itertools
import json
import math
import re
import shutil
import signal
import time
import urllib.request
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tracegrad as tg
from collect_run import questions
from few_probes import few  # noqa: F401
from online_runs import CONFIG, assert_same, run, weights
from policy_server import AGAIN, MODEL, PolicyServer
from stand_in import free_port, until
from tracegrad.cli import main
from tracegrad.online import SyncFault, buffer
from tracegrad.online.buffer import ConsumedGroups, GroupWriter
from tracegrad.online.collector import GroupFilter
from tracegrad.storage.run_dir import read_status
from tracegrad.trainer import checkpoint

torch.set_num_threads(1)


def short(prompts, completions, **columns):
    """Less is better, and no two are alike for long."""
    return [-float(len(completion[-1]["content"])) / 10 for completion in completions]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of three steps and its folder."""
    out = tmp_path_factory.mktemp("online") / "run"
    with PolicyServer() as server:
        found = run(server, out, steps=3)
        return found, out, server


def test_every_step_proves_that_the_push_before_it_arrived(done):
    found, out, server = done
    assert found.stopped == "done"
    assert read_status(out) == ("ended", "done")
    assert [row["step"] for row in found.rows] == [1, 2, 3]
    for row in found.rows:
        assert row["weight_check/tokens"] == row["tokens_trained"] > 0
        assert row["weight_check/max"] < 1e-4
        assert row["version"] == row["step"] - 1
    assert server.pushes == 4


def test_the_policy_that_is_saved_is_the_one_that_is_served(done):
    found, _, server = done
    served = dict(server.model.named_parameters())
    for name, value in weights(found.checkpoint).items():
        assert torch.equal(value, served[name]), name


def test_what_was_played_is_on_the_disk_by_groups_and_reads_as_any_file(done):
    _, out, _ = done
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == [0, 1, 2]
    [path] = (out / "played").glob("*.jsonl.zst")
    traces = tg.read(path)
    assert len(traces) == 3 * 2 * 4
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(MODEL))
    assert sequences.alignment_report.rate == 0
    assert sorted({int(v) for v in sequences.version[sequences.trainable]}) == [0, 1, 2]


def test_the_page_shows_the_whole_run_and_the_tokens_of_its_newest_step(done):
    _, out, _ = done
    page = (out / "report.html").read_text("utf-8")
    assert "Traces with the largest gradients in step 3" in page
    assert "3 steps have a reward, and 20 are needed" in page
    assert "<div><dt>traces</dt><dd>24</dd></div><div><dt>groups</dt><dd>6</dd></div>" in page  # of all three steps
    for title in ("reward", "logprobs of servers and trainer", "time of a step", "staleness", "failures"):
        assert f"<b>{title}</b>" in page
    assert "step 1: " in page  # what hovering over a curve says
    assert page.count("<details") == 8  # two groups of four
    assert all(
        f">{number}-{sample}<" in page or f"{number}-{sample}" in page for number in (4, 5) for sample in range(4)
    )


def test_a_replay_gives_the_same_parameters_bit_for_bit(done, tmp_path, capsys):
    found, out, _ = done
    again = tg.online.replay(out, MODEL, objective=tg.presets.DAPO_DIRECT, config=CONFIG, out=tmp_path / "again")
    assert read_status(tmp_path / "again") == ("ended", "done")
    command = ["replay", str(out), "--model", str(MODEL), "--out", str(tmp_path / "told")]
    assert main([*command, "--objective", "DAPO", "--objective.surrogate.high", "0.5"]) == 1
    said = capsys.readouterr().err
    # DAPO is the ratio theta/old with a weight old/rollout, DAPO_DIRECT the ratio theta/rollout without one.
    assert "ratio.den: 'rollout', now 'old'; surrogate.high: 0.28, now 0.5; weights.0: none, now Weight" in said
    assert not (tmp_path / "told").exists()
    assert main(command) == 0  # with the run's own objective
    kept = tg.config.load(out / "config.toml").objective
    assert (kept.preset, json.loads((out / "run.json").read_text())["config"]["objective.preset"]) == (
        "DAPO_DIRECT",
    ) * 2
    assert_same(weights(tmp_path / "told" / "checkpoint"), weights(found.checkpoint))
    assert again.steps == 3
    assert_same(weights(again.checkpoint), weights(found.checkpoint))
    assert all(before["loss"] == after["loss"] for before, after in zip(found.rows, again.rows, strict=True))


def test_a_replay_with_another_rate_says_how_far_it_strays_and_goes_on(done, tmp_path):
    found, out, _ = done
    config = tg.config.update(CONFIG, [("optimizer.lr", 5e-3)])
    again = tg.online.replay(out, MODEL, objective=tg.presets.DAPO_DIRECT, config=config, out=tmp_path / "again")
    assert [row["weight_check/max"] > 1e-4 for row in again.rows] == [False, True, True]
    assert len(again.rows) == len(found.rows)


def test_a_run_that_was_cut_goes_on_with_its_folder(done, tmp_path):
    """Cut after the second step was chosen and before it was saved: the same groups are taken again."""
    config = tg.config.update(CONFIG, [("checkpoint.every_steps", 1)])
    with PolicyServer() as server:
        first = run(server, tmp_path / "a", config=config, steps=2)
        shutil.rmtree(checkpoint.list_checkpoints(tmp_path / "a")[-1])
        again = run(server, tmp_path / "a", config=config, steps=2, resume=True)
    assert [row["step"] for row in again.rows] == [2]
    assert again.rows[0]["loss"] == first.rows[1]["loss"]
    assert len(tg.read(next((tmp_path / "a" / "played").glob("00000*")))) == 2 * 2 * 4


def test_a_folder_that_holds_a_run_is_not_begun_anew(done):
    _, out, server = done
    with pytest.raises(tg.errors.ArgumentError, match="TG-ONLINE-046"):
        run(server, out)


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        ("deaf", "still run the previous version's weights"),
        ("head", "output head is the previous version's"),
        ("hot", "temperature 1.5"),
        ("stale", "On a new prompt they agree"),
    ],
)
@pytest.mark.first_cases(1)
def test_a_server_that_samples_from_something_else_is_found_and_named(tmp_path, mistake, why):
    with PolicyServer(mistake) as server, pytest.raises(SyncFault) as raised:
        run(server, tmp_path, steps=4)
    assert "do not sample from version" in str(raised.value)
    assert why in str(raised.value)
    steps = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert len(steps) == (1 if mistake == "hot" else 2)


def test_a_gap_in_forked_trajectories_alone_is_of_their_prompts(tmp_path):
    """Half of the trajectories ask a second time with another history, whose last message the server leaves out."""

    async def agent(task_, policy):
        message = await policy.chat(task_["prompt"])
        if policy.session.name.endswith(("0", "1")):
            await policy.chat([*task_["prompt"], {"role": "user", "content": AGAIN}])
        return -float(len(message["content"] or ""))

    with PolicyServer("deaf to AGAIN") as server, pytest.raises(SyncFault) as raised:
        run(server, tmp_path, agent=agent, max_turns=2)
    said = str(raised.value)
    assert "other tokens agree" in said
    assert "in the trajectories 0-0, 0-1, 1-0 and 1 more (" in said
    with PolicyServer() as server:
        run(server, tmp_path / "clean", agent=agent, max_turns=2)


@pytest.mark.parametrize("mistake", ["deaf", "stale", None])
@pytest.mark.first_cases(1)
def test_a_canary_proves_the_push_where_a_step_holds_nothing_of_the_version(tmp_path, mistake):
    """The step before its own groups are done: all that it trains was sampled by the version before."""
    with PolicyServer(mistake) as server:
        if mistake is None:
            found = run(server, tmp_path, steps=4, steps_ahead=1)
            whole = [row for row in found.rows if row["staleness_max"] and not row["staleness_mean"] % 1]
            assert whole != []
            assert all(row["weight_check/tokens"] > 0 and row["weight_check/max"] < 1e-4 for row in found.rows)
            return
        with pytest.raises(SyncFault) as raised:
            run(server, tmp_path, steps=6, steps_ahead=1)
    assert "do not sample" in str(raised.value)


def test_an_agent_that_only_has_an_address_is_recorded_and_proven(tmp_path):
    def agent(task_, policy):
        body = json.dumps({"model": "any", "messages": task_["prompt"]}).encode()
        headers = {"Authorization": f"Bearer {policy.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{policy.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            [choice] = json.load(answer)["choices"]
        assert not choice.get("token_ids")
        assert not choice.get("logprobs")
        return -float(len(choice["message"]["content"] or "")) / 10

    with PolicyServer() as server:
        found = run(server, tmp_path, agent=agent)
    assert [row["weight_check/tokens"] for row in found.rows] == [row["tokens_trained"] for row in found.rows]
    assert all(row["weight_check/max"] < 1e-4 and row["rollout_logprob_coverage"] == 1 for row in found.rows)


def test_the_pace_keeps_the_players_within_the_staleness(tmp_path):
    seen, answered = [], []

    class Patient(PolicyServer):
        """It takes new weights when the players are as far ahead as they may be."""

        async def _control(self, request):
            if request.path == "/pause":
                ahead = min(8 * (self.pushes + 1), 24) if self.pushes else 0  # it is given the first weights too
                await until(lambda: len(answered) >= ahead)
            return await super()._control(request)

    async def agent(task_, policy):
        seen.append(policy.version)
        message = await policy.chat(task_["prompt"])
        answered.append(message)
        return -float(len(message["content"] or ""))

    with Patient() as server:
        found = run(server, tmp_path, agent=agent, steps=3, steps_ahead=1)
    assert seen == [0] * 16 + [1] * 8
    assert [row["staleness_max"] for row in found.rows] == [0, 1, 1]


def test_failures_are_kept_untrained_and_too_many_in_a_row_stop_the_run(tmp_path):
    numbers = itertools.count()

    async def sometimes(task_, policy):
        message = await policy.chat(task_["prompt"])
        if next(numbers) % 4 == 3:
            raise RuntimeError("the world is gone")
        return -float(len(message["content"] or ""))

    async def never(task_, policy):
        raise RuntimeError("the world is gone")

    with PolicyServer() as server:
        found = run(server, tmp_path / "some", agent=sometimes, steps=1)
        assert found.rows[0]["trajectories_failed"] == 2
        traces = tg.read(next((tmp_path / "some" / "played").iterdir()))
        assert int(np.isnan(traces.reward).sum()) == 2
        with pytest.raises(tg.TracegradError, match=r"TG-ONLINE-016.*0-0.*RuntimeError.*world.*gone"):
            run(server, tmp_path / "none", agent=never, max_consecutive_failures=8)


def test_a_group_that_the_trainer_can_see_is_counted(tmp_path, monkeypatch):
    """Who plays hears that its group is on the disk when the trainer has made a step of it."""
    write, rows = GroupWriter.write, tmp_path / "metrics.jsonl"

    def waits(writer, records):
        place = write(writer, records)
        while not (rows.exists() and rows.read_bytes()):
            time.sleep(0.01)
        return place

    monkeypatch.setattr(GroupWriter, "write", waits)
    with PolicyServer() as server:
        found = run(server, tmp_path, steps=1)
    assert found.rows[0]["trajectories"] == 8


def test_no_step_is_made_of_the_failures_that_stop_the_run(tmp_path, monkeypatch):
    """Who plays hears that its group is on the disk after a step could have been made of it."""
    write = GroupWriter.write

    def waits(writer, records):
        place = write(writer, records)
        for _ in range(200):
            time.sleep(0 if ConsumedGroups(tmp_path).steps else 0.01)
        return place

    async def never(task_, policy):
        raise RuntimeError("the world is gone")

    monkeypatch.setattr(GroupWriter, "write", waits)
    with PolicyServer() as server, pytest.raises(tg.TracegradError, match="TG-ONLINE-016"):
        run(server, tmp_path, agent=never, max_consecutive_failures=8, steps=1)
    assert ConsumedGroups(tmp_path).steps == []


@pytest.mark.parametrize("baseline", ["none", "group_mean"])
def test_what_fails_before_its_first_call_is_left_out_of_the_step(tmp_path, baseline):
    numbers = itertools.count()

    async def agent(task_, policy):
        if (number := next(numbers)) % 4 == 1:
            raise RuntimeError("no world to reset")
        await policy.chat(task_["prompt"])
        return float(number)  # no two are alike

    config = tg.config.update(CONFIG, [("advantage.baseline", baseline)])
    with PolicyServer() as server:
        found = run(server, tmp_path, agent=agent, steps=2, config=config)
    assert [(row["traces"], row["trajectories_failed"]) for row in found.rows] == [(6, 2), (6, 4)]


def test_a_temperature_of_the_agents_own_is_trained_as_it_was_sampled(tmp_path):
    heats = itertools.cycle([0.7, 1.3])

    async def agent(task_, policy):
        message = await policy.chat(task_["prompt"], temperature=next(heats))
        return -float(len(message["content"] or ""))

    with PolicyServer() as server:
        found = run(server, tmp_path, agent=agent, steps=2)
    assert all(
        row["weight_check/max"] < 1e-4 and row["weight_check/tokens"] == row["tokens_trained"] > 0 for row in found.rows
    )
    diagnosis = tg.doctor.diagnose(str(tmp_path / "played"), MODEL)
    assert not {"raw_at_temperature", "reshaped_sampling"} & {finding.name for finding in diagnosis.findings}


async def with_client(policy, body):
    """What an agent's own client gets."""
    headers, url = {"Authorization": f"Bearer {policy.key}"}, f"{policy.base_url}/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as answer:
        return await answer.text()


@pytest.mark.parametrize("door", ["chat", "base_url"])
@pytest.mark.parametrize(
    ("raw", "more", "words"),
    [
        (False, {"top_p": 0.8}, r"TG-ONLINE-016.*sets.*top_p=0\.8"),
        (True, {"frequency_penalty": 1.5}, r"TG-ONLINE-016.*sets.*frequency_penalty=1\.5"),
        (False, {"bad_words": ["a"]}, r"TG-ONLINE-016.*sets.*bad_words"),
        (True, {"temperature": 0.7}, r"TG-ONLINE-016.*sets.*temperature=0\.7"),
        (False, {"n": 2}, r"TG-ONLINE-016.*sets n=2"),
    ],
    ids=str,
)
def test_a_request_that_the_trainer_cannot_follow_ends_the_run_by_its_name(tmp_path, door, raw, more, words):
    async def agent(task_, policy):
        if door == "chat":
            await policy.chat(task_["prompt"], **more)
        else:  # a client that takes no for an answer
            await with_client(policy, {"model": "clerk", "messages": task_["prompt"], **more})
        return 1.0

    with PolicyServer() as server:
        server.raw = raw
        with pytest.raises(tg.TracegradError, match=words):
            run(server, tmp_path, agent=agent, max_consecutive_failures=4, steps=1)
    assert server.calls == 1  # before anything is played, by the check of the weights


def test_an_evaluation_may_decode_greedily_and_a_run_may_not_heat_raw_servers(tmp_path):
    async def agent(task_, policy):
        message = await policy.chat(task_["prompt"], **({"top_k": 1} if "greedy" in task_ else {}))
        return -float(len(message["content"] or ""))

    greedy = [{**task, "greedy": True} for task in questions(count=2)]
    with PolicyServer() as server:
        found = run(server, tmp_path / "a", agent=agent, steps=1, eval_tasks=greedy)
        assert [row["eval_tasks"] for row in found.rows if "eval_tasks" in row] == [2, 2]
        server.raw = True
        with pytest.raises(tg.TracegradError, match=r"TG-ONLINE-014.*request.*sets.*temperature=0\.7"):
            run(server, tmp_path / "b", steps=1, temperature=0.7)


def test_a_trainer_that_waits_says_for_what(tmp_path):
    async def stuck(task_, policy):
        await asyncio.sleep(60)

    with PolicyServer() as server, pytest.raises(tg.TracegradError, match=r"TG-ONLINE-013.*0-0"):
        run(server, tmp_path, agent=stuck, stall_timeout_s=0.5)


@pytest.mark.nightly
def test_a_signal_ends_a_run_whose_server_is_gone_and_it_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr("tracegrad.online.server_pool.WARN_AFTER_S", 1)
    played, port, said = itertools.count(1), free_port(), []

    async def agent(task_, policy):
        message = await policy.chat(task_["prompt"])
        if next(played) == 8:  # the last of the first step
            await asyncio.to_thread(server.__exit__)
        return -float(len(message["content"] or ""))

    def say(line):
        said.append(line)
        if "no server is reachable" in line:
            signal.raise_signal(signal.SIGINT)

    with PolicyServer(port=port) as server:
        found = run(server, tmp_path, agent=agent, steps=2, log=say)
    assert (found.stopped, found.exit_code) == ("signal", 130)
    assert "no server is reachable" in said[-1]
    [row] = found.rows
    assert row["time/rollout_wait"] > 1  # for the server that was gone, which is no time of the push
    assert row["time/weight_sync"] < row["time/rollout_wait"]
    with PolicyServer(port=port) as server:
        again = run(server, tmp_path, steps=2, resume=True)
    assert [row["step"] for row in again.rows] == [2]
    assert again.rows[0]["weight_check/max"] < 1e-4


@pytest.mark.nightly
def test_evaluations_and_waits_for_groups_are_reported_and_a_signal_ends_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("tracegrad.progress.EVERY_S", 0.0)
    said, signals = [], itertools.count()

    async def agent(task_, policy):
        if "slow" in task_:
            await asyncio.sleep(2.5 if next(signals) < 2 else 60)
        return float(len((await policy.chat(task_["prompt"]))["content"] or ""))

    def say(line):
        said.append(line)
        if line.startswith("evaluation-1: 0 of 2"):
            signal.raise_signal(signal.SIGINT)

    slow = [{**task, "slow": True} for task in questions(count=2)]
    with PolicyServer() as server:
        found = run(server, tmp_path, agent=agent, steps=1, eval_tasks=slow, log=say)
    assert found.stopped == "signal"
    assert [row["eval_tasks"] for row in found.rows if "eval_tasks" in row] == [2]
    lines = [re.sub(r"\d+ s", "N s", line) for line in said]
    assert "evaluation-0: 0 of 2 tasks rolled out in N s, none is done yet" in lines
    waits = r"waiting for rollouts  [05]?0 %  [01] of 2 groups with unequal rewards  N s (so far|left)"
    assert any(re.fullmatch(waits, line) for line in lines)
    assert lines[-1] == "evaluation after step 1: skipped because of a signal"


def test_tasks_that_end_end_the_run(tmp_path):
    with PolicyServer() as server:
        found = run(server, tmp_path, tasks=iter(questions(count=3)), steps=9)
    assert found.stopped == "tasks"
    assert read_status(tmp_path) == ("ended", "tasks")
    assert found.steps == 2
    assert found.rows[-1]["groups"] == 1


def test_groups_that_teach_nothing_are_refilled(tmp_path):
    async def equal(task_, policy):
        await policy.chat(task_["prompt"])
        return 1.0

    config = tg.config.update(CONFIG, [("advantage.baseline", "group_mean")])
    said = []
    with PolicyServer() as server:
        found = run(server, tmp_path, agent=equal, steps=1, max_resample_factor=3, config=config)
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [len(step["groups"]) for step in steps] == [6]
    assert steps[0]["dull"] == [0, 1, 2, 3, 4, 5]
    assert found.rows == said == []


@pytest.mark.parametrize("why", ["cut off", "left", "no reward"])
def test_a_step_in_which_there_is_nothing_to_learn_changes_nothing(tmp_path, why):
    async def nothing(task_, policy):
        await policy.chat(task_["prompt"])
        return 0.0

    config = CONFIG if why == "no reward" else replace(CONFIG, filter=tg.config.Filter(mask_truncated=True))
    told = {"agent": nothing} if why == "no reward" else {"max_tokens": 1}
    with PolicyServer() as server:
        server.says_ends = why != "left"
        found = run(server, tmp_path, config=config, **told)
    assert (found.stopped, found.rows) == ("done", [])
    assert_same(weights(found.checkpoint), load_file(MODEL / "model.safetensors"))


def test_who_plays_and_who_trains_agree_on_what_a_group_teaches(tmp_path):
    def rewarded(*rewards):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        return [{"messages": messages, **each} for each in rewards]

    groups = {
        "": rewarded({"reward": 1.0}, {"reward": 0.0}, {"reward": None}),
        "b": rewarded({"rewards": {"a": 1.0, "b": 1.0}}, {"rewards": {"a": 1.0, "b": 0.0}}),
        "equal": rewarded({"reward": 1.0, "rewards": {"a": 0.0}}, {"reward": 1.0, "rewards": {"a": 1.0}}),
    }
    for name, records in groups.items():
        signal = GroupFilter(("b",) if name == "b" else ())
        found = [signal.rewards_of_records(records), signal.rewards_of_traces(tg.Traces.from_records(records))]
        np.testing.assert_array_equal(*found)
        assert [signal.has_no_signal(each) for each in found] == [name == "equal"] * 2
        assert not GroupFilter(signal.reward_names, is_group_relative=False).has_no_signal(found[0])
    assert GroupFilter(is_group_relative=False).has_no_signal(np.float32([np.nan]))
    assert GroupFilter(tolerance=0.5).has_no_signal(np.float32([0.5, 1.0]))
    assert not GroupFilter(tolerance=0.25).has_no_signal(np.float32([0.5, 1.0]))
    question, answer = rewarded({})[0]["messages"]
    ends = [{"messages": [question, answer | {"finish_reason": why}], "reward": 1.0} for why in ("stop", "length")]
    ends.append(ends[1] | {"reward": None})
    zeroing = GroupFilter.of(tg.config.update(CONFIG, [("filter.zero_truncated", True)]))
    for found in (zeroing.rewards_of_records(ends), zeroing.rewards_of_traces(tg.Traces.from_records(ends))):
        np.testing.assert_array_equal(found, [1.0, 0.0, np.nan])
    masking = GroupFilter.of(
        tg.config.update(CONFIG, [("filter.mask_zero_std_groups", True), ("advantage.baseline", "group_mean")])
    )
    assert not masking.has_no_signal(np.float32([1.0, 1.0]))


def test_of_rewards_by_name_the_one_that_is_named_is_trained_on(tmp_path):
    async def agent(task_, policy):
        message = await policy.chat(task_["prompt"])
        return {"brevity": -float(len(message["content"] or "")), "other": 1.0}

    config = tg.config.update(CONFIG, [("advantage.baseline", "group_mean"), ("data.reward", "brevity")])
    with PolicyServer() as server:
        found = run(server, tmp_path / "named", agent=agent, steps=1, config=config)
        with pytest.raises(tg.errors.ArgumentError, match=r"TG-ONLINE-012.*brevity"):
            run(server, tmp_path / "none", agent=agent, steps=1)
    [path] = (tmp_path / "none" / "played").iterdir()
    assert set(tg.read(path)[0].rewards) == {"brevity", "other"}  # it is on the disk all the same
    assert found.rows[0]["groups_zero_std"] == 0
    assert found.rows[0]["reward"] < 0


def loud(prompts, completions, answer, log_metric, log_extra, **columns):
    log_metric("characters", sum(map(len, completions)) / len(completions))
    log_metric("loss", 9.0)
    log_extra("first", [text[:1] for text in completions])
    return [float(len(text)) + value for text, value in zip(completions, answer, strict=True)]


async def halves(prompts, completions, **columns):
    return [None if len(text) % 2 else 1.0 for text in completions]


def test_reward_functions_score_groups_and_their_weighted_sum_is_trained_on(tmp_path):
    """For one task the first of them raises: its group has no reward, and the run takes another one."""
    tasks = [
        {"prompt": f"I am {name}.", "answer": value} for name, value in (("Ben", 0.5), ("Anna", 2.0), ("Jo", None))
    ]
    how, said = {"rewards": [loud, halves], "reward_weights": [1.0, 10.0]}, []
    with PolicyServer() as server:
        told = {"how": how, "tasks": tasks, "eval_tasks": tasks[:2], "log": said.append}
        found = run(server, tmp_path, **told, steps=1, max_resample_factor=2)
    before, row, after = found.rows
    [step] = ConsumedGroups(tmp_path).steps
    assert (len(step.groups), len(step.trained)) == (3, 2)
    groups = [buffer.read(tmp_path / "played", place) for place in step.trained]
    rewards = []
    for trace in (trace for traces in groups for trace in traces):
        text, value = trace.messages[-1]["content"] or "", trace.metadata["task"]["answer"]
        second = None if len(text) % 2 else 1.0
        expected = {"loud": len(text) + value, "halves": math.nan if second is None else 1.0}
        assert trace.rewards == pytest.approx(expected, nan_ok=True)
        assert trace.reward == pytest.approx(len(text) + value + 10 * (second or 0))
        assert trace.metadata["log_extra"] == {"first": text[:1]}
        rewards.append(trace.reward)
    lengths = [[len(trace.messages[-1]["content"] or "") for trace in traces] for traces in groups]
    assert row["characters"] == pytest.approx(np.mean(lengths))
    assert row["log_metric/loss"] == 9.0 != row["loss"]
    traces = [trace for path in sorted((tmp_path / "evaluation").iterdir()) for trace in tg.read(path)]
    for found, played in ((before, traces[:2]), (after, traces[2:])):
        assert found["eval_characters"] == np.mean([len(trace.messages[-1]["content"] or "") for trace in played])
        assert (found["eval_loss"], found["eval_tasks"]) == (9.0, 2)
    sampled = [len(turn.token_ids) for traces in groups for trace in traces for turn in trace.generations]
    given = [len(turn.prompt_token_ids) for traces in groups for trace in traces for turn in trace.generations[:1]]
    assert row["completions/mean_length"] == np.mean(sampled)
    assert row["num_tokens"] == sum(sampled) + sum(given)
    cut = [trace.generations[-1].finish_reason == "length" for traces in groups for trace in traces]
    assert row["completions/clipped_ratio"] == np.mean(cut)
    assert "tools/call_frequency" not in row
    assert row["reward"] == pytest.approx(np.mean(rewards))
    assert (row["groups_zero_std"], row["trajectories_failed"], row["trajectories_without_reward"]) == (1, 4, 0)
    [place] = set(step.groups) - set(step.trained)
    failed = buffer.read(tmp_path / "played", place)
    assert {trace.metadata["task"]["answer"] for trace in failed} == {None}
    assert np.isnan(failed.reward).all()
    group = failed[0].group
    first, second, *_ = [line for line in said if line.startswith(("failed", "         "))]
    assert first.startswith(
        f"failed   task {group}, trajectory {group}-0: reward function loud: TypeError: unsupported"
    )
    assert first.endswith(" in loud)") or " in <listcomp>)" in first
    assert second == "         Traceback (most recent call last):"
    assert not list((tmp_path / "unscored").iterdir())


def price(item: str) -> int:
    """Price of one item.

    Args:
        item: the item.
    """
    return 7


def test_plain_functions_are_tools(tmp_path):
    how = {"tools": [price], "rewards": [loud_of_messages]}
    with PolicyServer() as server:
        found = run(server, tmp_path, how=how, steps=1, max_tokens=64, max_turns=3)
    traces = tg.read(next((tmp_path / "played").iterdir()))
    assert traces[0].tools[0]["function"]["name"] == "price"
    answered = [m for trace in traces for m in trace.messages if m["role"] == "tool"]
    assert found.rows[0]["branches_extra"] == 0
    assert len(answered) == sum(len(trace.generations) - 1 for trace in traces)
    assert found.rows[0]["tools/call_frequency"] == len(answered) / len(traces)
    assert all("called" in trace.metadata["tools"] for trace in traces)


def loud_of_messages(prompts, completions, **columns):
    return [float(sum(len(message["content"] or "") for message in messages)) for messages in completions]


def test_the_trainer_hears_of_a_group_and_of_the_end_of_the_tasks_without_looking_again_and_again(
    tmp_path, monkeypatch
):
    heard = []

    def wait(link, seconds):
        heard.append(link.news.wait(seconds))
        link.news.clear()

    monkeypatch.setattr("tracegrad.online.training_loop.POLL_S", 60.0)
    monkeypatch.setattr("tracegrad.online.server_pool.ServerPool.wait", wait)
    with PolicyServer() as server:
        found = run(server, tmp_path / "run", tasks=iter(questions(count=4)), steps=3)
    assert found.stopped == "tasks"
    assert heard != []
    assert all(heard)


@pytest.mark.parametrize("name", ["api_key", "hf_token"])
def test_secrets_among_the_engine_arguments_are_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(tg.errors.ArgumentError, match=rf"TG-ONLINE-035.*{name}") as raised:
        run(None, tmp_path / "out", how={"engine": {name: "geheim"}, "rewards": [len]}, servers="in-process")
    assert "geheim" not in str(raised.value)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").glob("run.json")) == []
