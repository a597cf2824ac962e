"""Several servers behind one chat: who is asked, what is asked again, what is an error, what is bounded."""

import asyncio

import pytest
from aiohttp import web

from stand_in import CHAT, StandIn, drop, hang, until
from tracegrad.errors import ArgumentError
from tracegrad.rollout.client import ServerError, Servers, normalize_url

BODY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "vllm_xargs": {"a": [1, None]}}
FAST = {"model": "clerk", "probe_s": 0.05, "timeout_s": 60.0, "connect_s": 30.0}


def once(fault, then=CHAT):
    """Answers with `fault` the first time, with `then` from then on."""
    asked = iter([fault])

    def answer(request, body):
        found = next(asked, then)
        return found(request) if callable(found) else found

    return answer


async def chatting(answers, sessions=("s",), **options):
    """Ask stand-ins with these answers once for each session; what came back, the stand-ins, and the servers."""
    stands = [StandIn(answer) for answer in answers]
    for stand in stands:
        await stand.__aenter__()
    try:
        async with Servers([stand.url for stand in stands], **{**FAST, **options}) as servers:
            found = [await servers.chat(BODY, session=session) for session in sessions]
            return found, stands, servers
    finally:
        for stand in stands:
            await stand.__aexit__()


async def test_the_body_goes_through_unchanged_but_for_model_and_salt():
    async with StandIn() as stand, Servers([stand.url + "/v1/"], key="secret", **FAST) as servers:
        assert await servers.chat(BODY, session="s", salt="v7") == CHAT
        await servers.chat(BODY, session="s")
        assert stand.seen == [
            ("/v1/chat/completions", {**BODY, "model": "clerk", "cache_salt": "v7"}),
            ("/v1/chat/completions", {**BODY, "model": "clerk"}),
        ]
        assert stand.headers[0]["Authorization"] == "Bearer secret"


async def test_a_session_stays_and_a_new_one_goes_to_the_least_loaded():
    free = asyncio.Event()

    async def slow(request, body):
        await free.wait()
        return CHAT

    first, second = StandIn(slow), StandIn(slow)
    async with first, second, Servers([first.url, second.url], **FAST) as servers:
        asked = [asyncio.ensure_future(servers.chat({"n": n}, session=f"s{n}")) for n in range(6)]
        await until(lambda: sum(row["in_flight"] for row in servers.state()) == 6)
        assert [row["in_flight"] for row in servers.state()] == [3, 3]
        free.set()
        await asyncio.gather(*asked)
        for _ in range(3):
            for n in range(6):
                await servers.chat({"n": n}, session=f"s{n}")
        assert {body["n"] for _, body in first.seen}.isdisjoint({body["n"] for _, body in second.seen})


@pytest.mark.parametrize(
    "fault", [drop, 500, 502, 503, 408, 429], ids=lambda fault: getattr(fault, "__name__", str(fault))
)
def test_what_is_of_the_moment_is_asked_again(fault):
    found, [stand], servers = asyncio.run(chatting([once(fault)]))
    assert found == [CHAT]
    assert len(stand.seen) == 2
    # A dropped connection is asked again on a new one, which counts as nothing.
    assert servers.retried == (fault is not drop)


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
async def test_what_the_server_judged_is_an_error_at_once_with_its_words_and_a_cure(status):
    stand = StandIn(lambda request, body: status)
    async with stand, Servers([stand.url], **FAST) as servers:
        with pytest.raises(
            ServerError, match=f"TG-ROLLOUT-058: {stand.url}/v1/chat/completions .*{status}.*said {status}"
        ):
            await servers.chat(BODY, session="s")
    assert len(stand.seen) == 1


async def test_a_redirect_is_not_followed_as_the_token_would_go_along():
    async with StandIn() as other:
        moved = web.Response(status=307, headers={"Location": f"{other.url}/v1/chat/completions"})
        stand = StandIn(lambda request, body: moved)
        async with stand, Servers([stand.url], **FAST, key="secret") as servers:
            with pytest.raises(ServerError, match=r"TG-ROLLOUT-058.*307"):
                await servers.chat(BODY, session="s")
            assert not other.seen


def test_failures_count_in_a_row_alone():
    turns = iter(range(100))
    found, _, servers = asyncio.run(
        chatting([lambda request, body: CHAT if next(turns) % 2 else 500], sessions="abcd", max_consecutive_failures=2)
    )
    assert found == [CHAT] * 4
    assert servers.state()[0]["out"] is None
    assert servers.retried == 4


async def test_a_server_that_never_answers_well_is_an_error_that_names_it_and_the_tries():
    stand = StandIn(lambda request, body: 500)
    async with stand, Servers([stand.url], **FAST, retries=2, max_consecutive_failures=9) as servers:
        with pytest.raises(ServerError, match=rf"TG-ROLLOUT-009.*{stand.url}"):
            await servers.chat(BODY, session="s")
    assert len(stand.seen) == 3


async def drip(request, body):
    """One byte at a time, for longer than any test waits."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(100_000):
        await response.write(b" ")
        await asyncio.sleep(0.05)
    return response


@pytest.mark.parametrize("answer", [lambda request, body: hang(request), drip], ids=["hangs", "drips"])
async def test_a_server_that_is_silent_or_slow_holds_nobody_longer_than_was_told(answer):
    async with StandIn(answer) as stand, Servers([stand.url], **{**FAST, "timeout_s": 0.5}) as servers:
        with pytest.raises(ServerError, match="TG-ROLLOUT-009"):
            await asyncio.wait_for(servers.chat(BODY, session="s"), 60)


async def test_silence_within_one_request_is_bounded_apart():
    stand = StandIn(once(hang))
    async with stand, Servers([stand.url], **FAST, read_s=1.0) as servers:
        assert await servers.chat(BODY, session="s") == CHAT


def huge(request, body):
    return web.Response(text='{"a": "' + "x" * 300_000 + '"}', content_type="application/json")


def packed(request, body):
    response = web.json_response({"a": "x" * 1000})
    response.enable_compression(web.ContentCoding.gzip)
    response.headers["Content-Encoding"] = "gzip"
    return response


def words(request, body):
    return web.Response(text="<html>\x1b[2Jwelcome</html>")


def nested(request, body):
    return web.Response(text="[" * 100_000, content_type="application/json")


def listed(request, body):
    return web.json_response([1])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (huge, "TG-ROLLOUT-058.*100,000.*answer_bytes"),
        (packed, "TG-ROLLOUT-058.*compressed"),
        (words, "TG-ROLLOUT-058.*x1b.*welcome"),
        (nested, r"TG-ROLLOUT-058.*\[\[\["),
        (listed, r"TG-ROLLOUT-058.*200: \[1\]"),
    ],
)
async def test_an_answer_that_is_no_answer_is_an_error_and_bounded(answer, said):
    async with StandIn(answer) as stand, Servers([stand.url], **FAST, answer_bytes=100_000) as servers:
        with pytest.raises(ServerError, match=said):
            await servers.chat(BODY, session="s")
        assert len(stand.seen) == 1


async def test_one_of_two_gone_is_left_out_and_its_sessions_move():
    stays, goes = StandIn(), StandIn()
    async with stays, goes, Servers([goes.url, stays.url], **FAST, max_consecutive_failures=2) as servers:
        await servers.chat(BODY, session="s")
        assert len(goes.seen) == 1
        await goes.__aexit__()
        assert await servers.chat(BODY, session="s") == CHAT
        [row] = [row for row in servers.state() if row["url"] == goes.url]
        assert "failed 2 times in a row" in row["out"]
        await servers.chat(BODY, session="new")
        assert len(stays.seen) == 2


async def test_a_server_that_comes_back_is_asked_again_once_healthy_and_admitted():
    admitted = []

    async def admission(url):
        admitted.append(url)
        return len(admitted) > 2

    broken = [True]
    stand = StandIn(lambda request, body: 500 if broken[0] else CHAT)
    async with stand, Servers([stand.url], **FAST, max_consecutive_failures=2) as servers:
        servers.admission = admission
        asked = asyncio.ensure_future(servers.chat(BODY, session="s"))
        await until(lambda: len(stand.asked("/health")) >= 3)
        assert len(stand.asked("/v1/chat/completions")) == 2
        assert not admitted  # /health says 500
        broken[0] = False
        assert await asked == CHAT
        assert admitted == [stand.url] * 3


async def test_all_servers_gone_is_an_error_that_names_each_after_the_time_told():
    async with StandIn() as stand:
        url = stand.url
    async with Servers([url], **{**FAST, "timeout_s": 2.0}, max_consecutive_failures=1) as servers:
        with pytest.raises(ServerError, match=rf"TG-ROLLOUT-013.*{url}"):
            await servers.chat(BODY, session="s")


async def test_what_an_evicted_server_was_asked_is_asked_of_another():
    bad, good = StandIn(lambda request, body: hang(request)), StandIn()
    async with bad, good, Servers([bad.url, good.url], **FAST) as servers:
        asked = asyncio.ensure_future(servers.chat(BODY, session="s"))
        await until(lambda: bad.seen)
        servers.evict(bad.url, "its weights are old")
        assert await asked == CHAT
        assert servers.urls == [good.url]
        servers.evict(good.url, "too")
        with pytest.raises(ServerError, match=rf"TG-ROLLOUT-012.*{bad.url}.*{good.url}"):
            await servers.chat(BODY, session="s")


async def test_a_call_that_is_given_up_leaves_nothing_in_flight():
    async with StandIn(lambda request, body: hang(request)) as stand, Servers([stand.url], **FAST) as servers:
        asked = asyncio.ensure_future(servers.chat(BODY, session="s"))
        await until(lambda: stand.seen)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert servers.state()[0]["in_flight"] == 0
        await until(lambda: not [task for task in asyncio.all_tasks() if "Wire.request" in repr(task)])


async def test_each_asks_every_server_once_and_tells_what_each_said():
    async with StandIn(lambda request, body: 500) as bad, StandIn(lambda request, body: {"success": False}) as no:
        async with StandIn(lambda request, body: {}) as good, StandIn() as gone:
            pass
        async with good, Servers([bad.url, no.url, good.url, gone.url], **FAST) as servers:
            answers = await servers.request_all("/pause?mode=keep", timeout_s=60)
            assert [answer.ok for answer in answers] == [False, False, True, False]
            assert [answer.status for answer in answers] == [500, 200, 200, 0]
            assert bad.seen == [("/pause?mode=keep", None)]
            assert "Connect" in answers[3].words


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "TG-ROLLOUT-002"),
        ("ftp://a", "TG-ROLLOUT-002"),
        ("http://a:x", "TG-ROLLOUT-001"),
        ("http://u:p@a", "TG-ROLLOUT-003"),
    ],
)
def test_urls_are_checked(url, said):
    with pytest.raises(ArgumentError, match=said):
        normalize_url(url)


@pytest.mark.parametrize(
    "url", ["http://a/v1?key=geheim", "ftp://me:geheim@a", "http://a#geheim", "http://me:geheim@a"]
)
def test_a_url_that_is_refused_is_named_without_its_secret(url):
    with pytest.raises(ArgumentError) as raised:
        normalize_url(url)
    assert "geheim" not in str(raised.value)


async def test_arguments_are_checked():
    for arguments in [[], "http://a", ["http://a", "http://a/v1"]]:
        with pytest.raises(ArgumentError):
            Servers(arguments, model="m")
    for bad in [{"timeout_s": 0}, {"max_consecutive_failures": 0}, {"timeout_s": float("inf")}]:
        with pytest.raises(ArgumentError, match="TG-ROLLOUT-007"):
            Servers(["http://a"], model="m", **bad)
    async with Servers(["http://127.0.0.1:9"], **FAST) as servers:
        with pytest.raises(ArgumentError, match="TG-ROLLOUT-004"):
            await servers.chat({"temperature": float("nan")}, session="s")
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-010"):
        await servers.chat({}, session="s")
