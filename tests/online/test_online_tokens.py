"""An online run by ids: what it asks, that its proof holds and nothing forks, and what is refused before it begins."""

import pytest

import tracegrad as tg
from few_probes import few  # noqa: F401
from online_runs import run
from policy_server import MODEL, PolicyServer
from tracegrad.errors import ArgumentError
from tracegrad.online import OnlineConfig, RolloutConfig, servers


async def twice(task, policy):
    """Two turns, and less is better."""
    messages = list(task["prompt"])
    first = await policy.chat(messages)
    second = await policy.chat([*messages, first, {"role": "user", "content": "more"}])
    return -float(len(first["content"] + second["content"])) / 10


def test_a_run_by_ids_proves_its_pushes_and_forks_nowhere(tmp_path):
    forks = {}
    for ids in ("token_ids", "messages"):
        with PolicyServer() as server:
            found = run(server, tmp_path / ids, agent=twice, max_turns=2, temperature=1.8, input=ids)
            assert found.stopped == "done"
            assert (server.generated > 0, server.calls > 0) == (ids == "token_ids", ids == "messages")
        assert all(row["weight_check/tokens"] > 0 and row["weight_check/max"] < 1e-4 for row in found.rows)
        forks[ids] = sum(row["branches_extra"] for row in found.rows)
    # Sampled hot, the same text tokenises otherwise than it was drawn.
    assert forks["token_ids"] == 0 < forks["messages"], forks


def test_servers_without_the_paths_end_a_run_by_ids_before_it_begins(tmp_path):
    with PolicyServer() as server:
        server.scales_out = False
        with pytest.raises(ArgumentError, match=r"TG-ROLLOUT-039.*--enable-scale-out"):
            run(server, tmp_path / "run", input="token_ids")
        assert (server.generated, server.calls) == (1, 0)  # the check has tried


def test_an_agent_with_its_own_client_is_told_that_it_has_no_address(tmp_path):
    async def by_address(task, policy):
        return policy.base_url

    with PolicyServer() as server, pytest.raises(tg.TracegradError, match=r"TG-ONLINE-016.*rollout\.input"):
        run(server, tmp_path / "run", agent=by_address, input="token_ids", max_consecutive_failures=2)


@pytest.fixture
def launched(monkeypatch):
    """Return a function that opens the servers of a run with options, and returns the arguments of the server."""
    started = []

    class Stop(Exception):
        pass

    def launch(python, model, *, name, arguments, **more):
        started.append(arguments)
        raise Stop

    monkeypatch.setattr("tracegrad.rollout.launch.launch", launch)

    def arguments_of(out, engine, **options):
        with (
            pytest.raises(Stop),
            servers.open_servers(
                MODEL, [], None, "python", engine, OnlineConfig(), RolloutConfig(**options), out, print
            ),
        ):
            pass
        return started[-1]

    return arguments_of


def test_a_server_that_a_run_starts_has_the_flag(launched, tmp_path):
    assert ["--enable-scale-out" in launched(tmp_path, {}, input=ids) for ids in ("messages", "token_ids")] == [
        False,
        True,
    ]


def test_a_server_that_a_run_starts_lists_as_many_ids_as_rollouts_ask_for(launched, tmp_path):
    def most(engine, **options):
        return [each for each in launched(tmp_path, engine, **options) if each.startswith("--max-logprobs")]

    assert [most({}), most({}, top_logprobs=20)] == [[], []]
    assert most({}, top_p=0.9, top_logprobs=64) == ["--max-logprobs=64"]
    assert most({"max_logprobs": 100}, top_p=0.9, top_logprobs=64) == ["--max-logprobs=100"]
