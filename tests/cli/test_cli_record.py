"""`tracegrad record` and `tracegrad proxy`: what is played or passed is on the disk by whole groups, and reads."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import task
import tracegrad as tg
from few_probes import few  # noqa: F401
from policy_server import MODEL, PolicyServer
from running_commands import WITHOUT_TORCH, Running, read_to
from shop_files import folder, played, server  # noqa: F401
from stand_in import Scripted, Served, always, free_port, until
from tracegrad.cli import main
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.online.buffer import UnscoredGroups
from tracegrad.online.collector import Collector, GroupFilter
from tracegrad.online.rollout_workers import GroupScore
from tracegrad.rollout.proxy import Proxy
from tracegrad.storage.run_dir import RunDirectory

EXAMPLES = Path(__file__).parents[2] / "examples" / "online"
AGENT = """
import asyncio
import pathlib

import zstandard

at_once = most = 0


async def wide(task_, policy):
    global at_once, most
    at_once += 1
    most = max(most, at_once)
    await policy.chat([{"role": "user", "content": "2?"}])
    await asyncio.sleep(0.05)
    at_once -= 1
    print("most", most)
    return 1.0


async def twice(task_, policy):
    for _ in range(2):
        await policy.chat(task_["prompt"])
    return {"a": 1.0, "b": 2.0}


async def slow(task_, policy):
    await asyncio.sleep(30)


async def failing(task_, policy):
    raise RuntimeError("the world is gone")


async def half(task_, policy):
    if policy.session.name.endswith("-0"):
        raise RuntimeError("the world is gone")
    await policy.chat(task_["prompt"])
    return 7.0


def length(prompts, completions, **columns):
    return [-float(len(each if isinstance(each, str) else each[-1]["content"])) for each in completions]


def by_number(prompts, completions, number, **columns):
    # Raises for the first group, has no reward for the second, and leaves what it sees on the disk.
    [number] = set(number)
    kept = pathlib.Path(f"o/unscored/{number}.jsonl.zst").read_bytes()
    pathlib.Path(f"seen-{number}").write_bytes(zstandard.ZstdDecompressor().decompress(kept).splitlines()[0])
    if number == 0:
        raise KeyError("lamp")
    return [None if number == 1 else 0.5 for _ in completions]


numbered = [{"prompt": "2?", "number": number} for number in range(3)]
"""


@pytest.fixture
def record(folder, server, monkeypatch):
    """Records with the files of `folder`, two short trajectories of each task unless it is told."""
    (folder / "more.py").write_text(AGENT)
    monkeypatch.chdir(folder)
    for module in ("more", "shop_clerk"):
        sys.modules.pop(module, None)

    def run(*arguments, tasks="shop_clerk.py:fresh", samples="2", quick=("--rollout.max_tokens", "8")):
        told = ["--server", server.url, "--out", "o", "--tasks", tasks, *(["--group-size", samples] if samples else ())]
        return main(["record", *told, *arguments, *quick])

    return run


def test_tasks_are_played_once_in_their_order_and_written_by_groups(record, folder, capsys):
    assert record("shop_clerk.py:agent") == 0
    traces = played(folder / "o")
    assert sorted(traces.groups) == ["0", "0", "1", "1", "2", "2"]
    mine = {}
    exec((folder / "shop_clerk.py").read_text(), mine)
    for trace in traces:
        assert trace.metadata["task"] == mine["fresh"][int(trace.group)]
        assert trace.reward == pytest.approx(-len(trace.messages[-1]["content"] or "") / 10)
    said = capsys.readouterr().out
    assert "recorded 6 trajectories in 3 groups; 0 failed" in said
    assert f"mean reward {traces.reward.mean():.3f}" in said
    [path] = (folder / "o" / "played").iterdir()
    assert main(["doctor", str(path), "--model", str(MODEL)]) == 0
    assert "6 traces" in capsys.readouterr().out
    assert tg.align(traces, tg.Tokenizer.from_pretrained(MODEL)).alignment_report.rate == 0


def test_a_group_has_as_many_trajectories_as_it_is_told(record, folder):
    assert record("shop_clerk.py:agent", "--groups", "1", samples="3") == 0
    assert (
        record("shop_clerk.py:agent", "--groups", "1", samples=None, quick=("--out", "p", "--rollout.max_tokens", "2"))
        == 0
    )
    assert (len(played(folder / "o")), len(played(folder / "p"))) == (3, 8)


def test_a_folder_is_added_to_where_that_is_told(record, folder, capsys):
    assert record("shop_clerk.py:agent", "--groups", "2") == 0
    assert record("shop_clerk.py:agent") == 1
    err = capsys.readouterr().err
    assert "TG-ONLINE-024: o already contains 2 groups" in err
    assert "resume=" not in err
    assert record("shop_clerk.py:agent", "--resume") == 0
    assert "2 trajectories in 1 groups in addition to 2 from before" in capsys.readouterr().out
    assert sorted(played(folder / "o").groups) == ["0", "0", "1", "1", "2", "2"]


def test_where_no_group_came_to_stand_no_file_is_left(record, folder, capsys):
    assert record("shop_clerk.py:agent", "--server", "http://127.0.0.1:9") == 1
    assert "lists no model" in capsys.readouterr().err
    assert not list((folder / "o" / "played").iterdir())
    assert record("shop_clerk.py:agent", "--groups", "1", "--rollout.max_tokens", "2") == 0
    assert record("shop_clerk.py:agent", "--groups", "1", "--resume") == 0
    assert len(list((folder / "o" / "played").iterdir())) == 1
    assert "0 trajectories in 0 groups in addition to 1 from before" in capsys.readouterr().out


def test_so_many_groups_are_played_at_once(record, capsys):
    assert record("more.py:wide", "--concurrency", "1", tasks="tasks.jsonl") == 0
    assert set(re.findall(r"most (\d+)", capsys.readouterr().out)) <= {"1", "2"}
    sys.modules["more"].most = 0
    assert record("more.py:wide", "--out", "p", tasks="tasks.jsonl") == 0
    assert "most 4" in capsys.readouterr().out
    assert record("more.py:wide", "--concurrency", "0", tasks="tasks.jsonl") == 1


def test_options_of_playing_and_what_only_training_has(record, folder, server, capsys):
    quick = ("--rollout.max_tokens", "5", "--rollout.temperature", "0.7", "--rollout.max_turns", "1")
    assert record("more.py:twice", "--logprob-kind", "processed", quick=quick) == 0
    trace = played(folder / "o")[0]
    record_ = trace.to_dict()
    assert record_["logprob_kind"] == "processed"
    assert len(trace.generations) == 1  # it wanted two
    assert trace.generations[0].tokens <= 5
    assert "0.7" in json.dumps(record_)
    assert record("shop_clerk.py:agent", "--out", "p", quick=()) == 0
    assert played(folder / "p")[0].to_dict()["logprob_kind"] == "raw"
    for name in ("online.steps", "online.weight_sync", "optimizer.lr"):
        assert record("shop_clerk.py:agent", f"--{name}", "1") == 1
        assert f"{name} has no effect on record" in capsys.readouterr().err


def test_rewards_and_tools_take_the_place_of_an_agent(record, folder, server):
    rewards = ["--rewards", "shop_clerk.py:short", "--rewards", "shop_clerk.py:one"]
    assert record(*rewards, "--tools", "shop_clerk.py:price") == 0
    trace = played(folder / "o")[0]
    assert set(trace.rewards) == {"short", "one"}
    assert trace.tools[0]["function"]["name"] == "price"
    assert record("--out", "p", *rewards[2:], "--tools", "shop_clerk.py:shop") == 0
    assert played(folder / "p")[0].tools[0]["function"]["name"] == "price"
    assert record("shop_clerk.py:Theirs", "--out", "q") == 0
    assert set(played(folder / "q")[0].rewards) == {"Theirs"}


def test_a_key_is_read_from_its_file(record, folder, capsys):
    with PolicyServer() as server:
        server.key = "a secret of the servers"
        (folder / "key").write_text(server.key)
        told = [
            "record",
            "shop_clerk.py:agent",
            "--server",
            server.url,
            "--tasks",
            "shop_clerk.py:fresh",
            "--groups",
            "1",
        ]
        told += ["--group-size", "1", "--rollout.max_tokens", "2"]
        assert main([*told, "--out", "o"]) == 1
        assert main([*told, "--out", "p", "--key-file", "gone"]) == 1
        assert "gone: No such file" in capsys.readouterr().err
        assert main([*told, "--out", "q", "--key-file", "key"]) == 0
    assert len(played(folder / "q")) == 1


def test_what_cannot_be_recorded_is_said(record, capsys):
    def said(*arguments, **told):
        assert record(*arguments, **told) == 1
        return capsys.readouterr().err

    assert "agent, environment and rewards are all missing" in said()
    assert "agent and tools are both set" in said("shop_clerk.py:agent", "--tools", "shop_clerk.py:price")
    assert "gone.jsonl: No such file" in said("shop_clerk.py:agent", tasks="gone.jsonl")
    assert "TG-CLI-037" in said("shop_clerk.py:agnet")
    assert "--groups" not in said("shop_clerk.py:agent", "--groups", "0")
    assert "in a row have failed" in said("more.py:failing", "--rollout.max_consecutive_failures", "2")
    assert "oldest trajectory in flight" in said("more.py:slow", "--out", "p", "--rollout.stall_timeout_s", "0.3")
    assert "lists no model" in said("shop_clerk.py:agent", "--out", "q", "--server", "http://127.0.0.1:9")


def test_failures_that_end_with_the_tasks_are_said(record, capsys, monkeypatch):
    """Who waits hears that all is played before the task that played the last group has raised what stops the run."""
    plays = Collector._group

    async def group(collector, number, task):
        try:
            await plays(collector, number, task)
        except TracegradError:
            await asyncio.sleep(60)

    monkeypatch.setattr(Collector, "_group", group)
    assert record("more.py:failing", "--rollout.max_consecutive_failures", "2") == 1
    assert "in a row have failed" in capsys.readouterr().err


def test_it_needs_no_torch(folder, server):
    (folder / "plain.py").write_text(
        "async def agent(task, policy):\n    await policy.chat([{'role': 'user', 'content': 'q'}])\n    return 1.0\n"
    )
    told = ["record", str(folder / "plain.py") + ":agent", "--server", server.url, "--out", str(folder / "o")]
    told += ["--tasks", str(folder / "tasks.jsonl"), "--group-size", "1", "--rollout.max_tokens", "2"]
    done = subprocess.run([*WITHOUT_TORCH, *told], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(played(folder / "o")) == 2


# --- the proxy ---


QUESTION = {"model": "clerk", "messages": [{"role": "user", "content": "2 × 20?"}], "max_tokens": 6, "temperature": 1.0}


def test_any_program_is_recorded_by_path_or_header_and_its_reward_ends_it(tmp_path, server):
    with Running(tmp_path / "o", server.url) as proxy:
        assert oct((tmp_path / "o" / "key").stat().st_mode)[-3:] == "600"
        assert proxy.key not in "".join(proxy.said)
        assert proxy.ask("/s/a/v1/chat/completions", QUESTION, key="wrong key")[0] == 401
        for _ in range(2):
            status, answer = proxy.ask("/s/a/v1/chat/completions", QUESTION)
            assert status == 200
            assert not answer["choices"][0]["token_ids"]
        assert proxy.ask("/v1/chat/completions", QUESTION, x_tracegrad_session="b", x_tracegrad_group="7")[0] == 200
        assert proxy.ask("/s/a/reward", {"reward": 0.5, "group": "7"}) == (200, {"calls": 2})
        [path] = (tmp_path / "o" / "played").iterdir()
        assert len(tg.read(path)) == 1  # before the program goes on
        assert proxy.ask("/s/b/reward", {"rewards": {"x": 1, "y": None}})[0] == 200
        assert proxy.ask("/s/open/v1/chat/completions", QUESTION)[0] == 200
        code, rest = proxy.stop()
    assert (code, "recorded 3 trajectories" in rest) == (0, True)
    a, b, left = tg.read(path)
    assert (a.id, a.group, a.reward, len(a.generations)) == ("a", "7", 0.5, 2)
    assert (b.id, b.group, b.rewards["x"], len(b.generations)) == ("b", "7", 1.0, 1)
    assert (left.id, left.metadata["ended"]) == ("open", "stopped")
    assert left.reward is None
    sequences = tg.align(tg.read(path), tg.Tokenizer.from_pretrained(MODEL))
    assert sequences.levels()["T0"]["generations"] == 4
    assert a.to_dict()["logprob_kind"] == "raw"


def test_the_example_in_another_language_asks_as_the_clerk_is_asked(tmp_path, server):
    script = EXAMPLES / "any_program.sh"
    with Running(tmp_path / "o", server.url) as proxy:
        told = [script, proxy.url, tmp_path / "o" / "key"]
        done = subprocess.run(["sh", *told], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        proxy.stop()
    traces = tg.read(tmp_path / "o" / "played")
    assert [(trace.id, trace.group, len(trace.generations)) for trace in traces] == [
        (f"lamp-{sample}", "lamp", 1) for sample in (1, 2, 3, 4)
    ]
    for trace in traces:
        assert [message["role"] for message in trace.messages] == ["system", "user", "assistant"]
        assert trace.messages[0]["content"] == task.SYSTEM
    assert f'SYSTEM = "{task.SYSTEM}"' in (EXAMPLES / "verifiers_clerk.py").read_text()


def test_options_of_the_proxy(tmp_path):
    port = free_port()
    with PolicyServer() as server:
        server.key = "a secret of the servers"
        (tmp_path / "secret").write_text(server.key)
        more = ["--port", str(port), "--model", "clerk", "--session-timeout", "0.2", "--logprob-kind", "processed"]
        with Running(tmp_path / "o", server.url, *more, "--key-file", str(tmp_path / "secret")) as proxy:
            assert proxy.url == f"http://127.0.0.1:{port}"
            assert proxy.ask("/s/a/v1/chat/completions", {**QUESTION, "model": "another"})[0] == 200
            [path] = (tmp_path / "o" / "played").iterdir()
            asyncio.run(until(lambda: path.stat().st_size))
            [trace] = tg.read(path)
            assert trace.metadata["ended"] == "idle"
            assert trace.to_dict()["logprob_kind"] == "processed"
            told = ["proxy", "--server", server.url, "--out", str(tmp_path / "p"), "--port", str(port)]
            told += ["--key-file", str(tmp_path / "secret")]
            done = subprocess.run([*WITHOUT_TORCH, *told], capture_output=True, text=True, check=False)
            assert done.returncode == 1
            assert f"port {port}: Address already in use" in done.stderr
            key = proxy.key
            assert proxy.stop(signal.SIGTERM)[0] == 0
        with Running(tmp_path / "o", server.url, "--key-file", str(tmp_path / "secret")) as again:
            assert again.key == key
            assert again.stop()[0] == 0


def test_a_proxy_without_its_server_does_not_begin(tmp_path, capsys, server):
    assert main(["proxy", "--server", "http://127.0.0.1:9", "--out", str(tmp_path / "o")]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert main(["proxy", "--server", server.url, "--server", "http://127.0.0.1:9", "--out", str(tmp_path / "o")]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["proxy", "--server", server.url, "--out", str(tmp_path / "o"), "--rollout.max_turns", "3"]) == 1
    assert "no effect on proxy" in capsys.readouterr().err


def test_sessions_outlive_a_proxy_that_is_killed(tmp_path, server):
    out = tmp_path / "o"
    with Running(out, server.url) as proxy:
        assert proxy.ask("/v1/chat/completions", QUESTION, x_tracegrad_session="a", x_tracegrad_group="7")[0] == 200
        assert proxy.ask("/s/written/v1/chat/completions", QUESTION)[0] == 200
        assert sorted(path.name for path in (out / "open").iterdir()) == ["a.jsonl", "written.jsonl"]
        left = (out / "open" / "written.jsonl").read_bytes()
        assert proxy.ask("/s/written/reward", {"reward": 1})[0] == 200
        proxy.process.kill()
        proxy.process.wait(60)
    (out / "open" / "written.jsonl").write_bytes(left)  # as where it is killed before this was removed
    with Running(out, server.url) as proxy:
        assert "1 sessions of an earlier proxy" in "".join(proxy.said)
        told = ["proxy", "--server", server.url, "--out", str(out)]
        done = subprocess.run([*WITHOUT_TORCH, *told], capture_output=True, text=True, check=False)
        assert (done.returncode, "in use by another running proxy" in done.stderr) == (1, True), done.stderr
        assert proxy.ask("/s/a/v1/chat/completions", {**QUESTION, "stream": True, "n": 1})[0] == 200
        proxy.process.kill()
        proxy.process.wait(60)
    with Running(out, server.url) as proxy:
        assert proxy.ask("/s/a/reward", {"reward": 0.5}) == (200, {"calls": 2})
        assert list((out / "open").iterdir()) == []
        assert "recorded 1 trajectories" in proxy.stop()[1]
    traces = [trace for path in sorted((out / "played").iterdir()) if path.stat().st_size for trace in tg.read(path)]
    assert [(trace.id, trace.group, len(trace.generations)) for trace in traces] == [
        ("written", None, 1),
        ("a", "7", 2),
    ]


def test_a_proxy_has_several_servers_and_does_without_one_that_is_gone(tmp_path):
    with PolicyServer() as one, Running(tmp_path / "o", one.url) as alone:
        alone.stop()
        with PolicyServer() as other, Running(tmp_path / "o", one.url, "--server", other.url) as proxy:
            for name in "abab":
                assert proxy.ask(f"/s/{name}/v1/chat/completions", QUESTION)[0] == 200
            assert (one.calls, other.calls) == (2, 2)
            other.__exit__()
            for name in "abab":
                assert proxy.ask(f"/s/{name}/v1/chat/completions", QUESTION)[0] == 200
            assert (one.calls, other.calls) == (6, 2)


def test_a_session_that_could_not_be_written_stays_open_and_its_reward_can_be_sent_again(example):
    kept, full, swept = [], [True], asyncio.Event()

    def finished(record):
        if idle := record["metadata"]["ended"] == "idle":
            swept.set()
        if full[0] or idle:  # an idle session never fits, so that the sweep cannot be before the reward
            raise TracegradError("No space left on device. Make room.")
        kept.append(record)

    async def main_():
        stand_in = Scripted(example, always("40 €"))
        async with contextlib.AsyncExitStack() as stack:
            served = Served(stand_in, 0.0, None)
            await stack.enter_async_context(served)
            proxy = await stack.enter_async_context(Proxy(served.url, finished=finished, key="a long key", idle_s=0.2))
            headers = {"Authorization": "Bearer a long key"}
            import aiohttp

            async with aiohttp.ClientSession(headers=headers) as client:

                async def ask(path, body):
                    async with client.post(proxy.url + path, json=body) as answer:
                        return answer.status, await answer.text()

                assert (await ask("/s/a/v1/chat/completions", QUESTION))[0] == 200
                status, text = await ask("/s/a/reward", {"reward": 1.0})
                assert (status, "No space left" in text) == (507, True)
                await swept.wait()  # the sweep cannot write it either
                full[0] = False
                assert (await ask("/s/a/reward", {"reward": 1.0}))[0] == 200
                assert (await ask("/s/a/reward", {"reward": 1.0}))[0] == 409

    asyncio.run(asyncio.wait_for(main_(), 60))
    assert [each["reward"] for each in kept] == [1.0]


def test_names_of_rewards_that_nobody_trains_on_are_free():
    GroupFilter(any_reward_name=True).check([{"rewards": {"a": 1.0}}])
    unknown = [{"reward": None, "rewards": {"a": None}}] * 2  # a function raised, or does not apply
    GroupFilter().check(unknown)
    GroupFilter(("a",)).check(unknown)
    for trained, records in ((GroupFilter(("b",)), unknown), (GroupFilter(), [{"rewards": {"a": None}}])):
        with pytest.raises(ArgumentError, match="TG-ONLINE-012"):
            trained.check(records)


# --- rewards that fail, and groups that are played and not scored ---


def test_a_reward_that_fails_is_counted_located_and_shown_and_others_are_scored(record, folder, capsys):
    assert record("--rewards", "more.py:by_number", "--rewards", "more.py:length", tasks="more.py:numbered") == 0
    out = capsys.readouterr().out
    where = f"{folder / 'more.py'}:{AGENT[: AGENT.index('raise KeyError')].count(chr(10)) + 1} in by_number"
    first = f"task 0, trajectory 0-0: reward function by_number: KeyError: 'lamp' ({where})"
    assert f"failed   {first}\n         Traceback (most recent call last):\n" in out
    assert "recorded 6 trajectories in 3 groups; 2 failed\n" in out
    assert f"failed   reward function by_number, 2 trajectories; the first: {first}\n" in out
    traces = played(folder / "o")
    by_group = {group: [trace for trace in traces if trace.group == group] for group in "012"}
    for trace in by_group["0"]:
        assert trace.reward is None
        assert trace.rewards["length"] == -len(trace.messages[-1]["content"])
        assert trace.metadata["reward_failures"] == {"by_number": f"KeyError: 'lamp' ({where})"}
    assert [trace.reward - trace.rewards["length"] for trace in by_group["1"]] == [0.0, 0.0]
    assert [trace.reward - trace.rewards["length"] for trace in by_group["2"]] == [0.5, 0.5]
    # Each group was on the disk when it was scored, as a record that reads and has no reward, and is there once.
    for number in range(3):
        [seen] = tg.read([json.loads((folder / f"seen-{number}").read_text())])
        assert (seen.group, seen.reward, seen.rewards, len(seen.generations)) == (str(number), None, {}, 1)
    assert list((folder / "o" / "unscored").iterdir()) == []
    assert sorted(traces.groups) == ["0", "0", "1", "1", "2", "2"]


def test_trajectories_without_a_reward_are_no_failures_and_are_said(record, folder, capsys):
    quick = (
        "--rollout.max_tokens",
        "2",
        "--rollout.max_consecutive_failures",
        "2",
        "--groups",
        "2",
        "--concurrency",
        "1",
    )
    assert record("--rewards", "more.py:by_number", tasks="more.py:numbered", quick=quick) == 1
    err = capsys.readouterr().err
    assert "2 trajectories in a row have failed" in err
    assert "task 0, trajectory 0-0: reward function by_number: KeyError: 'lamp'" in err
    assert 'raise KeyError("lamp")' in err
    assert played(folder / "o").groups == ["0", "0"]
    assert record("--rewards", "more.py:by_number", "--resume", "--json", tasks="more.py:numbered", quick=quick) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["failed"], told["without_reward"], told["reward"], told["failures"]) == (0, 2, None, {})


def test_functions_are_not_given_the_trajectories_that_failed(record, folder, capsys):
    assert record("more.py:half", "--rewards", "more.py:length") == 0
    for trace in played(folder / "o"):
        if trace.id.endswith("-0"):
            assert (trace.reward, trace.to_dict()["failure"]["message"]) == (None, "RuntimeError: the world is gone")
        else:
            assert trace.reward == trace.rewards["length"] == -len(trace.messages[-1]["content"])
            assert trace.rewards["own"] == 7.0
    out = capsys.readouterr().out
    assert "recorded 6 trajectories in 3 groups; 3 failed" in out
    # The groups are played side by side, so any of them may fail first.
    assert re.search(r"failed   playing, 3 trajectories; the first: task [012]-0: RuntimeError: the world is gone", out)


def test_a_group_that_was_not_scored_is_scored_when_the_folder_is_taken_up_and_not_played(
    record, folder, server, capsys, monkeypatch
):
    """The scoring of the second group ends the process; here by an error that nothing of it raises."""
    scores = GroupScore.__call__

    async def ends(score, group):
        if group[0].record["group"] == "1":
            await until(lambda: not list((folder / "o" / "unscored").glob("0.*")))
            raise TracegradError("the process ends here")
        return await scores(score, group)

    how = ("more.py:half", "--rewards", "more.py:length", "--groups", "2", "--concurrency", "2")
    with monkeypatch.context() as patched:
        patched.setattr(GroupScore, "__call__", ends)
        assert record(*how) == 1
    capsys.readouterr()
    asked = server.calls
    kept = tg.read(folder / "o" / "unscored" / "1.jsonl.zst")
    assert [(trace.id, trace.reward, trace.rewards.get("own")) for trace in kept] == [
        ("1-0", None, None),
        ("1-1", None, 7.0),
    ]
    assert main(["doctor", str(folder / "o" / "unscored"), "--model", str(MODEL)]) in (0, 1)
    assert "2 traces" in capsys.readouterr().out
    assert sorted(played(folder / "o").groups) == ["0", "0"]
    assert record(*how) == 1
    assert "o already contains 1 groups and 1 unscored groups" in capsys.readouterr().err
    shutil.copy(folder / "o" / "unscored" / "1.jsonl.zst", folder / "o" / "unscored" / "0.jsonl.zst")
    assert record(*how, "--resume") == 0
    out = capsys.readouterr().out
    assert "scoring  1 groups in o/unscored that were not scored yet" in out  # group 0 was
    assert "2 trajectories in 1 groups in addition to 1 from before; 1 failed" in out
    assert server.calls == asked
    traces = [trace for path in sorted((folder / "o" / "played").iterdir()) for trace in tg.read(path)]
    assert [trace.id for trace in traces] == ["0-0", "0-1", "1-0", "1-1"]
    assert traces[3].messages == kept[1].messages
    assert traces[3].reward == traces[3].rewards["length"] == -len(kept[1].messages[-1]["content"])
    assert traces[3].rewards["own"] == 7.0
    assert list((folder / "o" / "unscored").iterdir()) == []


@pytest.mark.parametrize("change", ["bytes", "another task", "no record", "size"])
def test_a_group_that_cannot_be_scored_is_said_and_left_where_it_is(record, folder, capsys, change):
    told = {"id": "0-0", "group": "0", "reward": None, "metadata": {"task": {"prompt": "else"}, "ended": "done"}}
    told["metadata"]["seconds"] = 1.0
    path = folder / "o" / "unscored" / "0.jsonl.zst"
    with RunDirectory(folder / "o").lock():
        UnscoredGroups(folder / "o").write(0, [told if change == "another task" else {"id": "0-0"}])
    if change == "bytes":
        path.write_bytes(b"no zstd, and longer than a header is")
    if change == "size":
        path.write_bytes(b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(9))
    before = path.read_bytes()
    assert record("--rewards", "more.py:length", "--resume", tasks="more.py:numbered") == 1
    err = capsys.readouterr().err
    assert "TG-ONLINE-001: o/unscored/0.jsonl.zst: " in err
    assert {"bytes": "frame", "another task": "another task", "no record": "metadata", "size": "claims"}[change] in err
    assert path.read_bytes() == before


KILLS = """
import os, signal
def kills(completions, **columns):
    os.kill(os.getppid(), signal.SIGKILL)
"""


@pytest.mark.nightly
def test_what_is_played_outlives_a_process_that_is_killed_while_it_is_scored(record, folder, server):
    (folder / "kills.py").write_text(KILLS)
    told = ["record", "--server", server.url, "--out", "o", "--tasks", "tasks.jsonl", "--group-size", "2"]
    command = [*WITHOUT_TORCH, *told, "--rollout.max_tokens", "2", "--rewards"]
    done = subprocess.run([*command, "kills.py:kills"], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    asked = server.calls
    kept = len(list((folder / "o" / "unscored").iterdir()))
    assert kept > 0
    done = subprocess.run([*command, "more.py:length", "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"scoring  {kept} groups" in done.stdout
    assert server.calls - asked == 2 * (2 - kept)
    traces = [trace for path in (folder / "o" / "played").iterdir() if path.stat().st_size for trace in tg.read(path)]
    assert sorted(trace.id for trace in traces) == ["0-0", "0-1", "1-0", "1-1"]
    assert all(trace.reward is not None for trace in traces)


def test_waiting_for_a_line_ends_if_it_does_not_come():
    words = "print('a', flush=True); import time; time.sleep(600)"
    command = [sys.executable, "-c", words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert read_to(process, "a") == ["a\n"]
        with pytest.raises(AssertionError):
            read_to(process, "b", timeout_s=0.2)
    assert process.returncode == -signal.SIGKILL
