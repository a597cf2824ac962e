"""The viewer without a browser: what the index finds, what is given to whom, and that strangers' text stays text."""

import base64
import gzip
import hashlib
import json
import os
import re
import shlex
import time
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import tracegrad as tg
from otlp_spans import call
from tracegrad import _core, config, recipes
from tracegrad.cli import main
from tracegrad.data.codes import LEVEL_TEXT, MISMATCH_TEXT
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.online.buffer import GroupWriter
from tracegrad.receive.folder import FolderLimits, Span, TraceFolder
from tracegrad.storage import manifest
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.trainer.token_log import FLOATS, StepTokens, step_name, write_step
from tracegrad.view import Viewer, database, pieces, runs, searcher, select_rows
from tracegrad.view.app import application
from tracegrad.view.export import page_of
from tracegrad.view.features import Titles, sampled_tokens
from tracegrad.view.runs import page, state_of
from tracegrad.view.search import find, literals
from view_pages import (
    HOSTILE,
    MODEL,
    record,
    session,  # noqa: F401
    whole,
    written,
)

HERE = "http://127.0.0.1:8000"


@pytest.fixture
def client(session):
    with TestClient(application(session, "secret"), base_url="http://127.0.0.1:8000") as client:
        yield client


def test_every_trace_has_its_numbers_in_the_order_of_the_file(session):
    columns = session.columns()
    assert session.rows == 1100
    assert columns["reward"][:5].tolist() == [1, 0, 0, 0, 1]
    assert columns["advantage"][:4].tolist() == [0.75, -0.25, -0.25, -0.25]  # of a group with mean 1/4
    assert columns["staleness"][:4].tolist() == [2, 1, 0, 2]  # the newest version is 2
    assert columns["length"][0] == 2
    assert columns["turns"][0] == 1
    assert columns["calls"][:2].tolist() == [0, 1]
    assert columns["level"][0] == 0
    assert np.isnan(columns["mismatches"]).all()  # nothing was aligned
    assert np.isnan(columns["gradient"]).all()  # and nothing trained
    assert session.tagged("tool:price").tolist() == list(range(1, 1100, 2))
    assert session.labels([3]) == [{"n": 3, "id": "t3", "group": "g0", "head": "How much is amber number 3?"}]


def test_text_is_found_by_its_trigrams_whatever_its_case(session):
    path = str(session.indexer.path)
    assert find(path, "AMBER number 77?", False).rows == [77]
    assert find(path, "7?", False).rows == [n for n in range(1100) if n % 10 == 7]
    assert find(path, r"amber number 1\d7\?", True).rows == list(range(107, 198, 10))
    assert find(path, "nowhere at all", False) == ([], None)
    with pytest.raises(ArgumentError, match="TG-VIEW-011"):
        find(path, "(", True)


def test_the_trigrams_narrow_what_is_read(session, monkeypatch):
    """The law of the index: a search reads the candidates alone, and without it finds the same."""
    path, read = str(session.indexer.path), []
    from tracegrad.view import search

    texts = search._texts
    monkeypatch.setattr(search, "_texts", lambda *told: (read.append(row[0]) or row for row in texts(*told)))
    rows = find(path, "amber number 777", False).rows
    assert (rows, len(read)) == ([777], 1)
    assert find(path, "amber number (777)", True).rows == [777]
    assert len(read) - 1 == 1100  # "amber number " is in all of them


def test_a_search_ends_in_time_and_goes_on_where_it_stopped(session):
    path, rows, start, asked = str(session.indexer.path), [], 0, 0
    while start is not None:
        found = find(path, "amber", False, start, seconds=0.0)
        rows, start, asked = rows + found.rows, found.next, asked + 1
    assert rows == list(range(1100))
    assert asked > 1000


def test_what_an_expression_must_hold_is_what_its_matches_hold():
    for expression, text in (
        (r"b[ai]rch \w+ saffron", "birch x saffron"),
        ("(?:abc)+def", "abcabcdef"),
        ("a|bcd", "a"),
    ):
        assert re.search(expression, text)
        assert all(run in text for run in literals(expression))


def test_an_expression_without_end_is_ended_and_the_next_search_answers(tmp_path, monkeypatch):
    traces = written(tmp_path / "t.jsonl", [record(0, messages=[{"role": "user", "content": "a" * 64 + "!"}])])
    with Viewer([traces], tmp_path / "index") as opened:
        whole(opened)
        with TestClient(application(opened, "secret"), base_url="http://127.0.0.1") as client:
            with monkeypatch.context() as patch:
                patch.setattr(searcher, "QUERY_TIMEOUT_S", 0.5)
                late = client.get("/secret/search", params={"q": "(a+)+$", "regex": "1"})
            assert late.status_code == 400
            assert "took longer" in late.json()["error"]
            assert client.get("/secret/search", params={"q": "aaa!"}).json() == {"rows": [0], "next": None}


def test_only_who_knows_the_token_and_asks_this_machine_is_let_in(client):
    assert client.get("/secret/state").json()["rows"] == 1100
    for path in ("/", "/state", "/wrong/state", "/secretx/state", "/secret"):
        assert client.get(path, follow_redirects=False).status_code in (404, 307)
    assert client.get("/wrong/state").status_code == 404
    assert client.get("/secret/state", headers={"host": "evil.example"}).status_code == 404
    assert client.post("/secret/state").status_code == 405


def test_every_answer_forbids_scripts_of_strangers(client):
    for path in ("", "state", "columns", "trace/0", "static/main.js", "runs", "nothing"):
        policy = client.get(f"/secret/{path}").headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'")
    page = client.get("/secret/").text
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"<script(?! src=\"static/)", page)
    assert client.get("/secret/static/..%2fapp.py").status_code == 404


def test_columns_and_rows_come_as_the_page_reads_them(client, session):
    names = client.get("/secret/state").json()["names"]
    table = np.frombuffer(client.get("/secret/columns").content, "<f4").reshape(len(names), -1)
    np.testing.assert_array_equal(table[names.index("reward")], session.columns()["reward"])
    assert client.get("/secret/rows?n=1,2,x").json()[1]["id"] == "t2"
    assert np.frombuffer(client.get("/secret/tag?name=tool:price").content, "<i4")[0] == 1
    assert "TG-VIEW-008: row 5000" in client.get("/secret/trace/5000").json()["error"]


def test_a_hostile_trace_stays_text(tmp_path):
    call = {"function": {"name": HOSTILE, "arguments": json.dumps({HOSTILE: HOSTILE})}}
    said = [{"role": HOSTILE, "content": HOSTILE, "name": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    said[1]["tool_calls"] = [call]
    traces = written(tmp_path / "t.jsonl", [record(n, messages=said, id=HOSTILE, group=HOSTILE) for n in range(2)])
    with Viewer([traces], tmp_path / "index") as opened:
        whole(opened)
        found = pieces.trace(opened, 0)
        put_in_as_they_are = ("facts", "messages", "tokens", "mismatches", "why", "history")
        for html in (*(found[name] for name in put_in_as_they_are), pieces.group_html(opened, 0)):
            assert not re.search("<script|<img|\u202e", html)
        page = page_of(opened, [0, 1])
        ours = list(re.findall(r"<script>(.*?)</script>", page, re.S))
        allowed = re.findall(r"'(sha256-[^']+)'", page.split("style-src")[0])
        hashes = ["sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in ours]
        assert hashes == allowed
        assert page.count("<script") == len(ours) + 3  # the data, and two traces
        assert "<img" not in page


def test_a_long_message_is_folded_and_comes_in_parts(tmp_path):
    text = "x" * 300_000 + "END"
    traces = written(tmp_path / "t.jsonl", [record(0, messages=[{"role": "user", "content": text}])])
    with Viewer([traces], tmp_path / "index") as opened:
        whole(opened)
        html = pieces.trace(opened, 0)["messages"]
        assert len(html) < 6_000
        [start] = re.findall(r'data-start="(\d+)"', html)
        assert int(start) == 4_000
        part = pieces.message(opened, 0, 0, 4_000)
        assert 200_000 < len(part) < 201_000
        assert pieces.message(opened, 0, 0, 204_000).endswith("END")
        with pytest.raises(ArgumentError, match=r"TG-VIEW-009.*7"):
            pieces.message(opened, 0, 7, 0)


def test_with_a_model_levels_mismatches_and_tokens_are_those_of_align(tmp_path):
    source = MODEL.parent / "traces.jsonl.zst"
    with Viewer([source], tmp_path / "index", MODEL) as opened:
        whole(opened)
        traces = tg.read(source, limit=40)
        sequences = tg.align(traces, tg.Tokenizer.from_pretrained(MODEL), on_error="skip", allow_unknown_ids=True)
        worst = [
            max(sequences.alignment_level[a:b][sequences.alignment_level[a:b] < 255], default=np.nan)
            for a, b in _spans(sequences)
        ]
        np.testing.assert_array_equal(opened.columns()["level"][:40], np.array(worst, np.float32))
        n = int(np.flatnonzero(opened.columns()["mismatches"] > 0)[0])
        assert re.search("<b>R[0-9]{2} ", pieces.trace(opened, n)["mismatches"])
        found = pieces.trace(opened, 3)
        assert found["tokens"].count("data-t=") == int((tg.align(traces[3], _tokenizer()).source == 2).sum())
        exec(found["python_token"].replace("987654321", "195"), told := {})
        assert told["trace"].id == found["id"]


def test_length_and_advantage_are_those_of_the_model_and_of_the_run(tmp_path):
    """Of text the record has no length. A run has its own advantages, such as those of a baseline over the batch."""
    text, listed = record(1, id="text", reward=1), record(2, id="listed", reward=0, group="g0")
    del text["messages"][-1]["generation"]
    source = written(tmp_path / "t.jsonl", [text, listed])
    sequences = tg.align(tg.read(source), _tokenizer(), text_only=True)
    lengths = np.bincount(sequences.trace[np.searchsorted(sequences.cu_seqlens, sequences.terms, "right") - 1])

    def shown(*paths, model=None):
        with Viewer([source, *paths], tmp_path / "index", model) as opened:
            columns = whole(opened).columns()
            return *(columns[name].tolist() for name in ("length", "advantage")), pieces.trace(opened, 0)["facts"]

    length, advantage, facts = shown()
    np.testing.assert_equal(length, [np.nan, 2])
    assert advantage == [0.5, -0.5]
    assert "<dt>recorded tokens</dt><dd>none</dd>" in facts
    assert "<dt>logprobs</dt><dd>none</dd>" in facts
    length, _, facts = shown(model=MODEL)
    assert length == lengths.tolist()
    assert f"<dt>length</dt><dd>{lengths[0]}</dd>" in facts
    run = tmp_path / "run"
    (run / "terms").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    sequences.save(run / "terms" / "tokens-00001")
    first = sequences.terms[:1]
    values = {name: np.full(1, 0.16, np.float32) for name in FLOATS}
    place = first, np.zeros(1, np.int32), np.zeros(1, np.uint8)
    write_step(run / "terms" / step_name(1, rank=0), StepTokens(1, "tokens-00001", ("trained",), *place, values))
    length, advantage, _ = shown(run)
    assert length == lengths.tolist()
    np.testing.assert_equal(advantage, [np.float32(0.16), np.nan])


def test_a_turn_that_later_branches_repeat_counts_once():
    # Two branches of one trace: turn 0 of 2 tokens is in both, turn 1 of 1 token in the second. Another trace has 1.
    sampled = np.array([0, 1, 1, 0, 1, 1, 0, 1, 0, 1], bool)
    turn = np.array([-1, 0, 0, -1, 0, 0, -1, 1, -1, 0], np.int32)
    sequences = tg.Sequences.from_arrays(
        np.arange(10), [0, 3, 8, 10], np.where(sampled, -0.5, np.nan), sampled, trace=[0, 0, 1], turn=turn
    )
    assert sampled_tokens(sequences).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("batches", "titles"),
    [
        ([[["4+4?", "And 6+6?"], ["1+1?"]]], ["4+4?", "1+1?"]),
        ([[["same", "then a"], ["same", "then b"], ["same"]]], ["then a", "then b", "same"]),
        ([[["same", "same"], ["same", "same"], []]], ["same", "same", ""]),
        ([[["x" * 50 + " a"], ["x" * 50 + " b"]]], ["… a", "… b"]),
        ([[["x" * 38 + " a"], ["x" * 38 + " b"]]], ["x" * 38 + " a", "x" * 38 + " b"]),
        ([[["x" * 70000]], [["x" * 70000]]], ["x" * 160] * 2),
        # What came before counts: of the first alone nothing differs.
        ([[["x" * 50 + " a"]], [["x" * 50 + " b"]]], ["x" * 50 + " a", "… b"]),
    ],
)
def test_a_title_is_the_first_user_message_that_differs(batches, titles):
    made = Titles()
    assert [title for batch in batches for title in made.of(batch)] == titles


def _tokenizer():
    return tg.Tokenizer.from_pretrained(MODEL)


def _spans(sequences):
    for trace in range(sequences.traces):
        branches = np.flatnonzero(sequences.trace == trace)
        yield int(sequences.cu_seqlens[branches[0]]), int(sequences.cu_seqlens[branches[-1] + 1])


def test_prepared_shards_are_shown_by_their_tokens(tmp_path):
    assert (
        main(["prepare", str(MODEL.parent / "traces.jsonl.zst"), "--model", str(MODEL), "--out", str(tmp_path / "p")])
        == 0
    )
    with Viewer([tmp_path / "p"], tmp_path / "index", MODEL) as opened:
        whole(opened)
        assert opened.rows == tg.Sequences.load(tmp_path / "p").traces
        found = find(str(opened.indexer.path), "clerk of a shop", False, seconds=30.0)
        assert len(found.rows) == opened.rows
        assert "data-t=" in pieces.trace(opened, 7)["tokens"]


def test_the_index_is_used_again_and_made_again_when_the_file_has_changed(tmp_path):
    traces = written(tmp_path / "t.jsonl", [record(n) for n in range(5)])
    with Viewer([traces], tmp_path / "index") as opened:
        place = whole(opened).indexer.path
        time.sleep(0.1)
    with Viewer([traces], tmp_path / "index") as again:
        assert again.indexer.path == place
        assert again.indexer.done
        assert again.rows == 5
    written(traces, [record(n) for n in range(7)])
    with Viewer([traces], tmp_path / "index") as changed:
        assert whole(changed).rows == 7
        assert changed.indexer.path != place
    assert (place.parent.stat().st_mode & 0o777) == 0o700


def test_a_file_that_grows_is_followed_and_half_a_line_waited_for(tmp_path):
    traces = written(tmp_path / "t.jsonl", [record(n) for n in range(3)])
    with Viewer([traces], tmp_path / "index") as opened:
        whole(opened)
        line = json.dumps(record(3)) + "\n"
        with open(traces, "a") as file:
            file.write(line[:40])
            file.flush()
            time.sleep(1.3)
            assert opened.rows == 3
            file.write(line[40:])
        end = time.monotonic() + 60
        while opened.rows < 4 and time.monotonic() < end:
            time.sleep(0.05)
        assert opened.labels([3])[0]["id"] == "t3"


def test_a_session_of_an_agent_that_grows_is_not_read_line_by_line(tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "sessions" / "rollout-codex.jsonl"
    session = tmp_path / golden.name
    session.write_bytes(golden.read_bytes())
    with Viewer([session], tmp_path / "index") as opened:
        whole(opened)
        with open(session, "a") as file:
            file.write(json.dumps(record(3)) + "\n")
        time.sleep(1.3)
        assert opened.rows == 1


def test_a_folder_that_receives_traces_is_followed_into_new_files(tmp_path):
    limits = FolderLimits(file_bytes=1)

    def receive(*numbers):
        with TraceFolder(tmp_path / "o", limits) as folder:
            for number in numbers:
                entry = [{"resource": {}}, {"scope": {}}, {**call(number, 1)}]
                folder.add([Span(f"{number:032x}", f"{1:016x}", True, json.dumps(entry).encode())])
            folder.write_whole(0, 0)

    receive(1, 2)
    with Viewer([tmp_path / "o"], tmp_path / "index") as opened:
        assert whole(opened).rows == 2
        receive(3, 4)
        end = time.monotonic() + 60
        while opened.rows < 4 and time.monotonic() < end:
            time.sleep(0.05)
        assert [label["id"] for label in opened.labels(range(4))] == [f"{n:032x}" for n in (1, 2, 3, 4)]
        assert opened.trace(3).messages[-1]["content"] == "4"
        file = tmp_path / "o" / "traces-00001.jsonl"  # somebody removed its lines, and another trace came
        file.write_text(file.read_text().replace(f"{1:032x}", f"{5:032x}").replace('"resource":{},', ""))
        while opened.rows < 5 and time.monotonic() < end:
            time.sleep(0.05)
        assert opened.labels([4])[0]["id"] == f"{5:032x}"


def test_a_file_that_cannot_be_read_is_said_and_the_others_are_shown(tmp_path):
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"messages": 3}\n')[:-4])
    written(tmp_path / "good.jsonl", [record(0)])
    with Viewer([tmp_path], tmp_path / "index") as opened:
        whole(opened)
        assert opened.rows == 1
        assert "bad.jsonl.gz" in opened.state()["problems"][0]


def test_what_holds_nothing_is_refused_with_what_to_name(tmp_path):
    with pytest.raises(ReadError, match="TG-VIEW-007"):
        Viewer([tmp_path / "no"], tmp_path / "index")
    with pytest.raises(ReadError, match="TG-DATA-037"):
        Viewer([tmp_path], tmp_path / "index")


def test_what_is_exported_is_chosen_by_numbers_tags_text_and_order(session):
    assert select_rows(session, ["reward>0.5"], "", "", 3) == [0, 4, 8]
    assert select_rows(session, ["tool:price", "staleness<=0"], "", "", 2) == [5, 11]
    assert select_rows(session, [], "number 77?", "", 9) == [77]
    assert select_rows(session, ["reward=0"], "", "staleness", 2) == [3, 6]
    with pytest.raises(ArgumentError, match=r"TG-VIEW-006.*rewards"):
        select_rows(session, ["rewards>0"], "", "", 9)
    with pytest.raises(ArgumentError, match="TG-VIEW-005"):
        select_rows(session, ["reward>x"], "", "", 9)
    with pytest.raises(ArgumentError, match=r"TG-VIEW-002.*2,000"):
        page_of(session, [])


def test_the_command_line_exports_and_says_what(tmp_path, capsys):
    traces = written(tmp_path / "t.jsonl", [record(n) for n in range(9)])
    told = ["view", str(traces), "--index", str(tmp_path / "index"), "--export", str(tmp_path / "x.html")]
    assert main([*told, "--where", "reward>0", "--sort", "reward"]) == 0
    assert "3 of 9 traces" in capsys.readouterr().out
    page = (tmp_path / "x.html").read_text()
    assert '"id": "t8"' in page
    assert '"id": "t7"' not in page
    assert main(["view", str(traces), "--where", "reward>0"]) == 1
    assert "Add --export FILE" in capsys.readouterr().err


def test_runs_have_their_state_and_the_settings_that_differ(tmp_path):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        run = tmp_path / name
        run.mkdir()
        (run / "config.toml").write_text(f"[optimizer]\nlr = {rate}\n")
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": s / 9}) + "\n" for s in range(3)))
    now = time.time()
    assert state_of(tmp_path / "a", now) == "running"
    assert state_of(tmp_path / "a", now + 999) == "stopped"
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"stopped": "done", "alignment_report": {"R01 <b>": 1}}))
    assert state_of(tmp_path / "a", now) == "done"
    html = page([tmp_path / "a", tmp_path / "b"], ["a", "b"])
    assert "<td>optimizer.lr</td><td>0.1</td><td>0.2</td>" in html
    assert html.count("<polyline") == 2
    assert "R01 <b>" not in html
    assert "--out" in page([])


def test_runs_say_the_recipe_that_they_follow_and_what_the_doctor_found(tmp_path, capsys):
    told = {
        "dapo": config.to_toml(recipes.find("DAPO").resolve()[0]),
        "other": '[objective]\npreset = "DAPO"\nsurrogate.high = 0.5\n',
    }
    for name, text in told.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(text)
    recorded = written(tmp_path / "its <traces>.jsonl", [record(n, group="a") for n in range(2)])
    made_of = {"traces": [{"path": str(recorded)}], "model": {"path": str(MODEL)}}
    (tmp_path / "dapo" / "summary.json").write_text(json.dumps({"provenance": made_of}))
    html = page([tmp_path / "dapo", tmp_path / "other"], ["dapo", "other"])
    assert "<b>dapo</b></td><td>not started</td><td>DAPO</td><td>DAPO</td>" in html
    assert "<b>other</b></td><td>not started</td><td></td><td>DAPO</td>" in html
    assert html.count("This command writes it") == 1
    command = shlex.split(unescape(html.split('<pre class="call">')[1].split("</pre>")[0]))
    assert command[-2:] == [">", str(tmp_path / "dapo" / "doctor.json")]
    main(command[1:-2])
    said = capsys.readouterr().out
    (tmp_path / "dapo" / "doctor.json").write_text(said)
    finding = json.loads(said)["findings"][0]
    html = page([tmp_path / "dapo"])
    assert "This command writes it" not in html
    assert (
        f"<td>{finding['severity']}</td><td>{finding['title']}</td><td>{finding['count']} of {finding['of']} " in html
    )
    (tmp_path / "dapo" / "doctor.json").write_text(json.dumps({"findings": [{"title": "<script>"}, 3], "verdict": {}}))
    assert "<script>" not in page([tmp_path / "dapo"])


def test_ids_are_found_whole_and_in_part(session):
    path = str(session.indexer.path)
    assert find(path, "t77", False).rows == [77, *range(770, 780)]
    assert find(path, "T109", False).rows == [109, *range(1090, 1100)]
    assert find(path, "^t77$", True).rows == [77]  # an expression for an id does not cross into the text
    assert find(path, r"t1\nHow", True).rows == []


def test_columns_tags_levels_and_reasons_have_their_sentences(session, client):
    meanings = client.get("/secret/state").json()["meanings"]
    assert not set(session.columns()) - {"group"} - meanings.keys()
    assert meanings["level:T6"] == f"Alignment level T6: {LEVEL_TEXT['T6']}."
    assert meanings["mismatch:R18 date_injected"] == "Mismatch R18: the template prints a date."
    assert set(MISMATCH_TEXT) == set(_core.MISMATCH_REASONS[1:])
    for text in meanings.values():
        assert text.endswith(".")


def test_the_reference_and_the_page_explain_reasons_in_the_same_words():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "alignment.md").read_text()
    rows = re.findall(r"^\| (R\d\d \w+) \| (.*?) \|", text, re.M)
    assert {reason: meaning.replace("`", "") for reason, meaning in rows} == MISMATCH_TEXT


def test_what_has_not_changed_is_not_sent_again(client, tmp_path):
    first = client.get("/secret/state")
    again = client.get("/secret/state", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "default-src 'none'" in again.headers["content-security-policy"]
    assert client.get("/secret/state", headers={"if-none-match": '"other"'}).json() == first.json()


def test_a_change_of_a_run_is_sent(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.25, "trajectories": 8}\n')
    pages = []
    whole_page = runs.page
    monkeypatch.setattr(runs, "page", lambda *chosen: pages.append(1) or whole_page(*chosen))
    with (
        Viewer([run], tmp_path / "index") as opened,
        TestClient(application(opened, "secret"), base_url=HERE) as client,
    ):
        tag = client.get("/secret/runs").headers["etag"]
        for _ in range(5):
            assert client.get("/secret/runs", headers={"if-none-match": tag}).status_code == 304
        assert len(pages) == 1  # an unchanged run costs no reading and no page
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 2, "reward": 0.75, "trajectories": 16}\n')
        changed = client.get("/secret/runs", headers={"if-none-match": tag})
        assert "0.25 → 0.75" in changed.json()["html"]
        with manifest.lock(run):
            locked = client.get("/secret/runs", headers={"if-none-match": changed.headers["etag"]})
            assert "<td>running</td>" in locked.json()["html"]


def test_recorded_rewards_are_not_shown_as_progress(tmp_path):
    sample = {"ope_ess": 80.0, "ope_ess_fraction": 0.625, "ope_traces": 128, "ope_clamped": 0, "ope_reliable": 1}
    before = {"step": 0, "ope": 0.44, "ope_low": 0.34, "ope_high": 0.55, "ope_recorded_reward": 0.445, **sample}
    after = {**before, "step": 2, "reward": 0.75, "ope": 0.73, "ope_low": 0.62, "ope_high": 0.84}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")

    def cells(*rows, **summary):
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "summary.json").write_text(json.dumps(summary))
        table = unescape(runs.page([run]).partition("</table>")[0])
        return re.findall("<td>([^<]*)</td>", table)[-2:]  # reward, outcome

    known = "Off-policy estimate: before training 0.44 [0.34, 0.55], after step 2 0.73 [0.62, 0.84]"
    assert cells(before, {"step": 1, "reward": 0.25}, after) == ["", known]
    unknown = cells(before, {"step": 1, "reward": 0.25}, {**after, "ope_reliable": 0})
    assert unknown == ["", "Off-policy estimate: unknown"]
    online = [{"step": step, "reward": step / 4, "trajectories": 8 * step} for step in (1, 2)]
    assert cells(*online) == ["0.25 → 0.5", "Reward of the rollouts: unknown"]
    rates = [{"success": share, "ci95": [share - 0.04, share + 0.04], "n": 512} for share in (0.39, 0.68)]
    success = "before 39.0 % [35.0, 43.0], n = 512, after 68.0 % [64.0, 72.0], n = 512"
    assert cells(after, before=rates[0], after=rates[1]) == ["", f"Success on fresh prompts: {success}"]


def test_the_rollouts_of_a_run_appear_when_their_folder_does(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    with Viewer([run], tmp_path / "index") as opened:
        assert whole(opened).rows == 0
        with GroupWriter(run / "played") as writer:
            writer.write([record(0), record(1)])
        end = time.monotonic() + 60
        while opened.rows < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert [label["id"] for label in opened.labels([0, 1])] == ["t0", "t1"]


@pytest.mark.parametrize(
    ("lock", "state"),
    [
        ("ended done", "done"),
        ("ended signal", "stopped by a signal"),
        ("failed RuntimeError", "crashed (RuntimeError)"),
        ("stopped", "stopped"),
        ("running elsewhere", "unknown (begun on another machine)"),
        (None, "crashed"),  # killed: it still says that it runs, and nobody holds the lock
    ],
)
def test_a_run_has_the_state_that_its_lock_records(tmp_path, lock, state):
    run = RunDirectory(tmp_path / "run")
    assert state_of(run.path) == "not started"
    with run.lock():
        run.begin()
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
        os.utime(run.path / "metrics.jsonl", (1, 1))
        assert state_of(run.path) == "running"  # a long step is no end
        head, _, running = (run.path / manifest.LOCK).read_text().partition("\n")
    # A later end counts, although an earlier part of the run wrote its summary.
    (run.path / "summary.json").write_text('{"stopped": "signal"}' if lock is None else "{}")
    (run.path / manifest.LOCK).write_text(f"{head}\n{running.strip() if lock is None else lock}\n")
    assert state_of(run.path) == state
    assert f"<td>{state}</td>" in page([run.path])


def test_all_settings_that_differ_and_the_mismatches_of_two_runs_are_tables(tmp_path, monkeypatch):
    counts = {"a": {"R18 date_injected": {"traces": 2, "tokens": 1234}}, "b": {"R01 noncanonical_bpe": {"traces": 5}}}
    for name, report in counts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(
            json.dumps({"alignment_report": report, "recorded": 200, "exact": 150})
        )
    monkeypatch.setattr(runs, "_config", lambda path: {f"setting.{n}": f"{path.name}{n}" for n in range(99)})
    html = page([tmp_path / "a", tmp_path / "b"], ["a", "b"])
    for n in range(99):
        assert f"<tr><td>setting.{n}</td><td>a{n}</td><td>b{n}</td></tr>" in html
    table = html.split("<h2>Alignment mismatches</h2>")[1]
    assert "a: 25 % of 200 recorded tokens" in table
    heads = re.findall('<th scope="col">(.*?)</th>', table)
    assert heads == ["mismatch", "a: traces", "a: tokens", "b: traces", "b: tokens"]
    rows = [re.findall('<td class="n">(.*?)</td>', row) for row in table.split("<tr>")[2:]]
    assert rows == [["0", "0", "5", "?"], ["2", "1,234", "0", "0"]]
    assert f'title="Mismatch R18: {MISMATCH_TEXT["R18 date_injected"]}."' in table


def test_what_searches_is_there_before_it_is_asked(client):
    def searchers():
        lines = [path.read_bytes() for path in Path("/proc/self/task").glob("*/children")]
        told = [Path(f"/proc/{pid}/cmdline").read_bytes() for line in lines for pid in line.decode().split()]
        return sum(b"tracegrad.view.searcher" in each for each in told)

    client.get("/secret/state")
    assert searchers() == 0
    assert client.get("/secret/rows?n=0").json()[0]["id"] == "t0"
    assert searchers() == 1
    client.get("/secret/rows?n=1")
    assert client.get("/secret/search?q=amber").json()["rows"]
    assert searchers() == 1


def test_a_database_that_is_no_index_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"not a database" * 100)
    with pytest.raises(ReadError, match="TG-VIEW-001"):
        database.connect(tmp_path / "x", write=True)
