"""The viewer under odd names, odd numbers, several viewers at once, and places that cannot be written."""

import asyncio
import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from tracegrad.cli import main
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.view import Viewer, export, select_rows, serve
from tracegrad.view.app import application
from view_pages import record, whole, written

NAMES = ["a?b", "a#b", "a%41b", "%", "a&mode=rwc", "a b", "a'b", 'a"b', "a\nb", "?mode=memory&cache=shared"]
LONG = "9" * 5000
ODD = [
    "-1",
    "8",
    "99",
    "9" * 15,
    "9" * 16,
    "9" * 24,
    LONG,
    "x",
    "1.5",
    "1e3",
    "²",
    "١",
    "%FF",
    "%ED%A0%80",
    "%00",
    " 1",
]


def opened(session):
    return TestClient(application(session, "secret"), base_url="http://127.0.0.1:8000")


def address(name):
    return os.fsdecode(name) if isinstance(name, bytes) else name


@pytest.mark.parametrize("name", [*NAMES, b"a\xff", b"\xed\xa0\x80?"])
@pytest.mark.first_cases(2)
def test_names_of_traces_indexes_and_exports_may_hold_what_sqlite_and_utf8_do_not(name, tmp_path):
    name = address(name)
    traces = written(tmp_path / f"{name}.jsonl", [record(n) for n in range(8)])
    with Viewer([traces], tmp_path / f"{name} index") as session:
        whole(session)
        assert session.indexer.problems == []
        rows = select_rows(session, [], "amber number", "", 100)
        assert rows == list(range(8))
        page = tmp_path / f"{name}.html"
        assert export.export_page(session, rows, page) == page.stat().st_size
        with opened(session) as client:
            assert client.get("/secret/search", params={"q": "amber number 3"}).json()["rows"] == [3]
            assert client.get("/secret/trace/1").json()["id"] == "t1"
            assert client.get("/secret/state").json()["rows"] == 8
            assert client.get("/secret/export?n=1,2").status_code == 200
    assert sorted(os.listdir(tmp_path)) == sorted([traces.name, f"{name} index", page.name])  # nothing beside them


@pytest.fixture
def session(tmp_path):
    with Viewer([written(tmp_path / "t.jsonl", [record(n) for n in range(8)])], tmp_path / "index") as session:
        yield whole(session)


@pytest.fixture
def client(session):
    with opened(session) as client:
        yield client


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.first_cases(2)
def test_odd_numbers_are_refused_or_taken_for_none_and_never_an_error_of_the_server(odd, client):
    for path in ("trace/{}", "message/{}", "group/{}", "message/{}?message=0", "export?n={}"):
        assert 400 <= client.get(f"/secret/{path.format(odd)}").status_code < 500, path
    for path in ("rows?n={}", "rows?n=1,{},2", "trace/1?step={}", "search?q=amber&start={}", "trace/1?run={}"):
        assert client.get(f"/secret/{path.format(odd)}").status_code == 200, path
    for path in ("message/0?message={}", "message/0?message=0&start={}", "runs?run={}", "tag?name={}", "static/{}"):
        assert client.get(f"/secret/{path.format(odd)}").status_code < 500, path


@pytest.mark.parametrize(
    "path", ["", "state", "columns", "rows", "tag", "search", "trace/1", "group/1", "runs", "export"]
)
def test_every_address_answers_other_methods_with_405(path, client):
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "ODD"):
        assert client.request(method, f"/secret/{path}").status_code == 405, method


@pytest.mark.parametrize(
    ("method", "path"),
    [
        # As `OPTIONS *` and `CONNECT host:port` name them.
        *(("OPTIONS", path) for path in ("*", "", "nothing", "host:80")),
        *(("GET", f"/secret{path}") for path in ("/state/", "/\udcff/", "/trace/1/", "", "/rows/\udcff/")),
    ],
)
def test_a_target_that_is_no_path_or_has_a_slash_too_many_is_not_found(method, path, session):
    sent = []
    scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"127.0.0.1:1")]}

    async def send(message):
        sent.append(message)

    asyncio.run(application(session, "secret")({**scope, "query_string": b"", "scheme": "http"}, None, send))
    assert sent[0]["status"] == 404


EXPRESSIONS = {
    f"a{{{LONG}}}": 400,
    "(" * 3000: 400,
    "(?<=a*)b": 400,
    "\\N{x}": 400,
    "(?P<1>a)": 400,
    "[[a]": 200,
    "\ud800\ud800\ud800": 200,
    "a\0b": 200,
}


@pytest.mark.parametrize("query", EXPRESSIONS, ids=lambda query: ascii(query)[:20])
@pytest.mark.first_cases(2)
def test_odd_searches_are_answered(query, session):
    from tracegrad.view.searcher import Searcher

    async def ask(regex):
        searcher = Searcher(session.indexer.path)
        try:
            return await searcher.find(query, regex, 0)
        finally:
            await searcher.close()

    assert asyncio.run(ask(False))["rows"] == []
    if EXPRESSIONS[query] == 200:
        assert "rows" in asyncio.run(ask(True))
    else:
        with pytest.raises(ArgumentError, match="TG-VIEW-011"):
            asyncio.run(ask(True))
    assert select_rows(session, [], query, "", 10) == []


def test_a_tag_with_half_a_character_has_no_rows(session):
    assert select_rows(session, ["tool:\ud800"], "", "", 10) == []


def test_an_index_that_is_gone_is_an_answer(session, client):
    session._database.close()
    for path in ("state", "trace/1", "rows?n=1", "tag?name=x"):
        answer = client.get(f"/secret/{path}")
        assert answer.status_code == 410
        assert "Open the viewer again" in answer.json()["error"]


def test_several_viewers_that_build_one_index_at_once_each_have_all_of_it(tmp_path):
    traces = written(tmp_path / "t.jsonl", [record(n) for n in range(700)])

    def view(_):
        with Viewer([traces], tmp_path / "index") as session:
            whole(session)
            return (
                session.rows,
                select_rows(session, [], "amber", "", 1000) == list(range(700)),
                session.indexer.problems,
            )

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(view, range(5))) == [(700, True, [])] * 5
    assert len(os.listdir(tmp_path / "index")) == 1  # those of their own are gone


def test_what_a_killed_viewer_left_is_removed_and_a_damaged_index_is_made_anew(tmp_path):
    traces, index = written(tmp_path / "t.jsonl", [record(n) for n in range(8)]), tmp_path / "index"

    def rows():
        with Viewer([traces], index) as session:
            return whole(session).rows

    assert rows() == 8
    (place,) = index.iterdir()
    left = index / f"{place.name}-left"
    left.mkdir()
    (left / "lock").touch()
    for damage in (b"garbage" * 500, b"", (place / "index.sqlite").read_bytes()[:5000]):
        (place / "index.sqlite").write_bytes(damage)
        assert rows() == 8
        assert not left.exists()
    (place / "index.sqlite").unlink()
    (place / "index.sqlite").mkdir()
    assert rows() == 8
    sqlite3.connect(place / "index.sqlite").close()


def test_places_that_cannot_be_written_are_named(tmp_path, session):
    (tmp_path / "file").touch()
    for place in ("file", "file/in", "n" * 300):
        with pytest.raises(ReadError, match="TG-VIEW-010"):
            Viewer([tmp_path / "t.jsonl"], tmp_path / place)
    for place in ("file/in.html", "none/in.html", "n" * 300, "index"):
        with pytest.raises(ReadError, match=r"TG-(REPORT|VIEW|STORE)-0"):
            export.export_page(session, [1], tmp_path / place)


@pytest.mark.parametrize("port", ["-1", "65536", "70000", LONG[:30], LONG, "x", "1.5", ""])
def test_a_port_that_is_none_is_one_line(port, tmp_path, capsys, session):
    try:
        code = main(["view", str(tmp_path / "t.jsonl"), "--index", str(tmp_path / "other"), f"--port={port}"])
    except SystemExit as ended:
        code = ended.code
    err = capsys.readouterr().err
    assert code in (1, 2)
    assert "port" in err
    assert "unexpected" not in err
    assert len(err) < 3000
    if port.lstrip("-").isdigit() and len(port) < 31:
        with pytest.raises(ArgumentError, match="TG-VIEW-014"):
            serve(session, port=int(port))


@pytest.mark.parametrize("limit", ["-1", "0", "-" + LONG[:30]])
def test_a_limit_of_none_is_refused(limit, tmp_path, capsys, session):
    traces = str(tmp_path / "t.jsonl")
    page = tmp_path / "o.html"
    assert main(["view", traces, "--index", str(tmp_path / "other"), "--export", str(page), f"--limit={limit}"]) == 1
    assert "--limit" in capsys.readouterr().err
    assert not page.exists()


def test_a_run_whose_numbers_are_odd_is_shown(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    odd = [
        "1e999",
        "NaN",
        "-Infinity",
        "1" + "0" * 400,
        "true",
        '"x"',
        "null",
        "[1]",
        '{"a": 1}',
        '"\\ud800"',
        "1" * 5000,
    ]
    lines = [f'{{"step": {value}, "reward": {value}, "loss": {value}, "eval_reward": {value}}}' for value in odd]
    summary = {"before": {"success": "x", "ci95": [1, None]}, "after": {"success": 1e999, "ci95": ["a", "b"]}}
    (run / "summary.json").write_text(
        json.dumps({**summary, "alignment_report": {"x": 10**400}, "recorded": "x", "exact": [1]})
    )
    (run / "doctor.json").write_text(json.dumps({"findings": [1, {"count": 10**400, "title": None}]}))
    for number in range(len(lines)):
        (run / "metrics.jsonl").write_text("\n".join(lines[: number + 1]) + "\n")
        with Viewer([run], tmp_path / "index") as session, opened(session) as client:
            assert client.get("/secret/runs").status_code == 200, odd[number][:20]
