"""New weights reach the servers or it is said that they did not: order, second tries, evictions, files, guards."""

import asyncio
import threading

import pytest
import torch
from aiohttp import web
from safetensors import safe_open
from safetensors.torch import load_file

from stand_in import CHAT, StandIn, drop, free_port, hang, until
from tracegrad.errors import ArgumentError
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import Eviction, File, SyncError, vllm_arguments
from tracegrad.weight_sync.auth import Guard
from tracegrad.weight_sync.weights import deduplicate, write

PUSH = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
INIT = "/init_weight_transfer_engine"
AGAIN = [INIT, PUSH[0], "/finish_weight_update", *PUSH[1:]]
FAST = {"model": "clerk", "probe_s": 0.05, "timeout_s": 60.0, "connect_s": 30.0}
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Vllm(StandIn):
    """Answers as vLLM does; `fault(path, times asked)` may give another answer. Refuses what a real one dies of."""

    def __init__(self, fault=lambda path, times: None, port=0):
        super().__init__(self.reply, port)
        self.fault = fault
        self.paused = self.half = False
        self.version = "0"
        self.loaded = {}

    def reply(self, request, body):
        path = request.path
        found = self.fault(path, len(self.asked(path)))
        if found is not None:
            if path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
                self.half = True
            return found(request) if callable(found) else found
        if path == "/pause":
            self.paused = True
        elif path == "/update_weights":
            assert self.paused
            self.loaded = load_file(body["update_info"]["path"])
        elif path == "/finish_weight_update":
            self.half = False
            self.version = (body or {}).get("weight_version", self.version)
        elif path == "/resume":
            assert not self.half, "a server with half its weights dies at the next request"
            self.paused = False
        elif path == "/weight_info":
            return {"weight_version": self.version}
        elif path.startswith("/v1"):
            return {**CHAT, "version": self.version}
        return {}

    @property
    def paths(self):
        return [path for path, _ in self.seen]


def pushing(*faults, tmp_path, pushes=1, **options):
    """Push to one server for each fault; the results and the servers."""

    async def run():
        stands = [Vllm(fault) for fault in faults]
        for stand in stands:
            await stand.__aenter__()
        try:
            async with Servers([stand.url for stand in stands], **FAST) as servers:
                sync = File(servers, tmp_path / "weights", **{"timeout_s": 60.0, **options})
                return [await sync.push(WEIGHTS, version) for version in range(1, pushes + 1)], stands, servers
        finally:
            for stand in stands:
                await stand.__aexit__()

    return asyncio.run(run())


def never(path, times):
    return None


def test_a_push_pauses_updates_finishes_and_resumes_in_this_order(tmp_path):
    pushed, [stand], _ = pushing(never, tmp_path=tmp_path, pushes=2)
    assert stand.paths == [INIT, *PUSH, *PUSH]
    assert [(one.version, one.updated, one.evicted, one.repeated) for one in pushed] == [
        (1, (stand.url,), (), 0),
        (2, (stand.url,), (), 0),
    ]
    assert stand.asked("/finish_weight_update") == [{"weight_version": "1"}, {"weight_version": "2"}]
    info = stand.asked("/update_weights")[1]["update_info"]
    assert info["path"] == str(tmp_path / "weights" / "weights-00000002.safetensors")
    assert info["bytes"] == (tmp_path / "weights" / "weights-00000002.safetensors").stat().st_size
    assert all(torch.equal(stand.loaded[name], WEIGHTS[name]) for name in WEIGHTS)
    assert pushed[0].seconds > 0
    assert pushed[0].lines() == []


FAULTS = {"raises": 500, "success false": {"success": False}, "hangs": hang, "refuses": 400, "drops": drop}
PATIENCE_S = dict.fromkeys(FAULTS, 60.0) | {"hangs": 2.0}
"""Only what hangs is waited for so long; what answers is given the time that a machine under load may take."""


OFTEN = ("/pause", "/update_weights")
"""Where something hangs in every run of the tests; elsewhere it does nightly, for each takes its two seconds."""
ONCE = [
    pytest.param(fault, path, marks=pytest.mark.nightly if fault == "hangs" and path not in OFTEN else ())
    for fault in FAULTS
    for path in ("/pause", *PUSH[1:], INIT)
]


@pytest.mark.parametrize(("fault", "path"), ONCE)
def test_what_fails_once_is_sent_once_more_and_never_resumed_before(path, fault, tmp_path):
    def answer(asked, times):
        return FAULTS[fault] if asked == path and times == 1 else None

    [pushed], [stand], servers = pushing(answer, tmp_path=tmp_path, timeout_s=PATIENCE_S[fault])
    assert (pushed.updated, pushed.evicted, pushed.repeated) == ((stand.url,), (), 1)
    assert stand.version == "1"
    assert not stand.paused
    assert stand.paths[-len(AGAIN) :] == AGAIN
    assert servers.urls == [stand.url]


@pytest.mark.parametrize("fault", ["raises", "success false", "hangs"])
def test_what_fails_twice_stays_paused_and_is_evicted_and_the_run_goes_on_with_the_other(fault, tmp_path):
    def answer(asked, times):
        return FAULTS[fault] if asked == "/update_weights" else None

    [pushed], [bad, good], servers = pushing(answer, never, tmp_path=tmp_path, timeout_s=PATIENCE_S[fault])
    assert pushed.updated == (good.url,)
    assert [one.url for one in pushed.evicted] == [bad.url]
    assert "/update_weights" in pushed.evicted[0].why
    assert pushed.lines() == [str(pushed.evicted[0])]
    assert bad.paths.count("/update_weights") == 2
    assert bad.paused
    assert "/resume" not in bad.paths
    assert servers.urls == [good.url]


def test_no_server_left_is_an_error_with_what_each_said(tmp_path):
    def answer(asked, times):
        return 500 if asked == "/update_weights" else None

    with pytest.raises(SyncError, match=r"TG-SYNC-019.*500"):
        pushing(answer, answer, tmp_path=tmp_path)


async def test_a_server_that_is_gone_gets_the_weights_before_it_is_asked_again(tmp_path):
    first, second = Vllm(), Vllm(port=free_port())
    async with first, second, Servers([first.url, second.url], **FAST) as servers:
        sync = File(servers, tmp_path)
        await sync.push(WEIGHTS, 1)
        await second.__aexit__()
        pushed = await sync.push(WEIGHTS, 2)
        assert (pushed.updated, pushed.unreachable, pushed.evicted) == ((first.url,), (second.url,), ())
        assert second.url in pushed.lines()[0]
        # Started again, it holds the weights that it was started with.
        async with Vllm(port=second.port) as back:
            await until(lambda: not [row for row in servers.state() if row["out"]])
            assert back.version == "2"
            assert back.paths.index("/resume") > back.paths.index("/finish_weight_update")
            answers = [await servers.chat({}, session=str(n)) for n in range(4)]
            assert {answer["version"] for answer in answers} == {"2"}
            assert back.asked("/v1/chat/completions") or first.asked("/v1/chat/completions")


async def test_a_server_that_was_only_cut_off_is_not_sent_what_it_has(tmp_path):
    async with Vllm() as stand, Servers([stand.url], **FAST) as servers:
        await File(servers, tmp_path).push(WEIGHTS, 1)
        servers.suspend(stand.url, "cut off")
        assert await servers.usable(60.0)
        assert stand.paths.count("/update_weights") == 1


async def test_a_server_that_comes_back_during_a_push_is_not_sent_two_updates_at_once(tmp_path):
    seen = asyncio.Event()

    async def slowly(request):
        await seen.wait()
        return web.json_response({})

    async with Vllm(lambda path, times: slowly if path == "/update_weights" else None) as stand:
        stand.half = False
        async with Servers([stand.url], **FAST) as servers:
            sync = File(servers, tmp_path)
            pushing = asyncio.ensure_future(sync.push(WEIGHTS, 1))
            await until(lambda: stand.asked("/update_weights"))
            servers.suspend(stand.url, "cut off")  # asked for its health, then brought up to date
            await until(lambda: stand.asked("/health"))
            await asyncio.sleep(0.1)  # for what must not come
            seen.set()
            assert (await pushing).updated
            assert await servers.usable(60.0)
            steps = [path for path in stand.paths if path in PUSH]
            assert steps == PUSH * (len(steps) // len(PUSH))
            assert len(steps) == 2 * len(PUSH)


async def test_all_gone_waits_and_then_is_an_error(tmp_path):
    async with Vllm() as stand:
        pass
    async with Servers([stand.url], **FAST) as servers:
        with pytest.raises(SyncError, match=rf"TG-SYNC-019.*{stand.url}"):
            await File(servers, tmp_path, timeout_s=0.4).push(WEIGHTS, 1)


def test_caches_are_cleared_unless_told_otherwise(tmp_path):
    _, [stand], _ = pushing(never, tmp_path=tmp_path, clear_cache=False)
    assert stand.paths[1] == "/pause?mode=keep&clear_cache=false"


def full(*_):
    raise OSError(28, "full")


def test_files_are_written_whole_and_old_ones_removed(tmp_path, monkeypatch):
    pushing(never, tmp_path=tmp_path, pushes=4)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "weights-00000003.safetensors",
        "weights-00000004.safetensors",
    ]
    path = tmp_path / "one.safetensors"
    write(path, WEIGHTS, 7)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "version": "7"}
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=r"TG-SYNC-023.*c.*str"):
        write(path, {**WEIGHTS, "c": "no tensor"}, 8)
    assert path.read_bytes() == before
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="Errno 28"):
        write(path, WEIGHTS, 9)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["one.safetensors"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "w.safetensors"
    big = {"a": torch.zeros(1 << 20)}
    write(path, big, 0)
    stop, torn = threading.Event(), []

    def read():
        while not stop.is_set():
            values = load_file(path)["a"]
            if not bool((values == values[0]).all()):
                torn.append(values)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 20):
        write(path, {"a": torch.full((1 << 20,), float(version))}, version)
    stop.set()
    reader.join()
    assert not torn


def test_tied_tensors_are_stored_once_and_parts_of_one_memory_apart():
    whole = torch.arange(12.0).reshape(4, 3)
    kept = deduplicate({"embed": whole, "head": whole, "part": whole[:2], "turned": whole.T, "empty": torch.zeros(0)})
    assert list(kept) == ["embed", "part", "turned", "empty"]
    assert torch.equal(kept["part"], whole[:2])
    assert torch.equal(kept["turned"], whole.T)
    with pytest.raises(ArgumentError, match="TG-SYNC-022"):
        deduplicate({})


async def test_a_file_that_exists_is_pushed_as_it_is(tmp_path):
    async with Vllm() as stand, Servers([stand.url], **FAST) as servers:
        sync = File(servers, tmp_path / "never")
        write(tmp_path / "own.safetensors", WEIGHTS, 1)
        for version in (1, 2, 3):
            await sync.push(tmp_path / "own.safetensors", version)
        assert stand.version == "3"
        assert (tmp_path / "own.safetensors").exists()
        with pytest.raises(ArgumentError, match="TG-SYNC-005"):
            await sync.push(tmp_path / "other", 4)
        for bad in (-1, "7", True, 1.5):
            with pytest.raises(ArgumentError, match="TG-SYNC-018"):
                await sync.push(WEIGHTS, bad)


class Far(Servers):
    """Servers that are said to lie beyond this machine."""

    def __init__(self, stand, **options):
        super().__init__([stand.url], **FAST, **options)
        self.stand = stand

    @property
    def urls(self):
        return ["http://10.0.0.5:8000"]

    async def request(self, url, path, *rest, **options):
        return await super().request(self.stand.url, path, *rest, **options)


@pytest.mark.parametrize("guarded", [False, True])
async def test_an_open_server_beyond_this_machine_is_refused(guarded, tmp_path):
    stand = Vllm()
    stand.fault = lambda path, times: (
        401 if guarded and stand.headers[-1].get("Authorization") != "Bearer secret" else None
    )
    async with stand:
        async with Far(stand) as servers:
            said = "TG-SYNC-002" if guarded else r"TG-SYNC-001.*200"
            with pytest.raises(ArgumentError, match=said):
                await File(servers, tmp_path).push(WEIGHTS, 1)
            assert stand.paths == ["/is_paused"]
        async with Far(stand, key="secret") as servers:
            if guarded:
                assert (await File(servers, tmp_path).push(WEIGHTS, 1)).updated
            else:
                with pytest.raises(ArgumentError, match="TG-SYNC-001"):
                    await File(servers, tmp_path).push(WEIGHTS, 1)


async def test_the_guard_lets_in_who_has_the_token(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ArgumentError, match="TG-SYNC-003"):
        Guard(lambda *_: None)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    let_in, sent = [], []

    async def app(scope, receive, send):
        let_in.append(scope["path"])

    async def send(message):
        sent.append(message)

    guard = Guard(app)
    for kind, path, token in [
        ("http", "/pause", None),
        ("http", "/v1/models", b"Bearer other"),
        ("websocket", "/v1/realtime", None),
        ("http", "/health/../pause", None),
        ("http", "/health", None),
        ("http", "/pause", b"Bearer secret"),
    ]:
        headers = [] if token is None else [(b"authorization", token)]
        await guard({"type": kind, "path": path, "headers": headers}, None, send)
    assert let_in == ["/health", "/pause"]
    said = [message.get("status", message.get("code")) for message in sent if "body" not in message]
    assert said == [401, 401, 1008, 401]


def test_what_a_server_must_be_started_with(tmp_path):
    flags, environment = vllm_arguments("file", package_folder=tmp_path / "beside", require_key=True)
    assert '{"backend": "tracegrad_file"}' in flags
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert (tmp_path / "beside" / "tracegrad" / "weight_sync" / "worker.py").exists()
    assert vllm_arguments("lora", versions=4)[0] == ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"]
    with pytest.raises(ArgumentError, match="TG-SYNC-020"):
        vllm_arguments("disk")


def test_who_is_left_out_is_said_in_a_sentence():
    assert str(Eviction("http://a", "it hung")) == "http://a is evicted for the rest of the run: it hung"
