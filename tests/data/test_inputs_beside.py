"""Records with an answer in a field next to its messages: only the answer is trained, no earlier message."""

import itertools
import json
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad import _core
from tracegrad.cli import main
from tracegrad.data import infer_fields
from tracegrad.data.formats import openai, prompt_response, registry
from tracegrad.errors import FormatError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
USER = {"role": "user", "content": "2+2?"}
BEFORE = [{"role": "assistant", "content": "Four, I think."}, {"role": "user", "content": "Sure?"}]
TOOL = [
    {"role": "assistant", "content": "Let me look.", "tool_calls": []},
    {"role": "tool", "content": "4", "tool_call_id": "c"},
]
SAID = {"role": "assistant", "content": "Yes: 4."}
ANSWER = SAID["content"]
CHOICE = {"index": 0, "finish_reason": "stop", "message": SAID}
RESPONSE = {"id": "chatcmpl-12345678", "object": "chat.completion", "choices": [CHOICE]}
CHUNKS = [
    {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": part}}]}
    for part in ("Yes: ", "4.")
]
EVENTS = "".join(f"data: {json.dumps(each)}\n\n" for each in CHUNKS) + "data: [DONE]\n\n"
ANTHROPIC = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": ANSWER}], "model": "claude"}
GEMINI = {"candidates": [{"content": {"role": "model", "parts": [{"text": ANSWER}]}, "finishReason": "STOP"}]}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ANSWER}]}
RESPONSES_API = {"object": "response", "output": [ITEM]}
OLLAMA = {"model": "m", "message": SAID, "done": True}
RAW = {"response": RESPONSE, "text": json.dumps(RESPONSE), "chunks": CHUNKS, "events": EVENTS}
SHAPED = {**RAW, "message": SAID, "messages": [SAID], "choice": CHOICE, "choices": [CHOICE]}
OTHERS = {"anthropic": ANTHROPIC, "gemini": GEMINI, "responses": RESPONSES_API, "ollama": OLLAMA}
LANGCHAIN = {"type": "ai", "data": {"content": ANSWER}}
FREE = ("chunks", "reply", "llm_output", "assistantMessage", "bot")


def beside():
    """Yield names of fields, some that adapters know, and values that each can have as the answer."""
    for key in openai.RESPONSES:
        yield from ((key, kind, value) for kind, value in {**RAW, **OTHERS}.items())
    for key in prompt_response.ANSWERS:
        yield from (
            (key, kind, value) for kind, value in {"words": ANSWER, "message": SAID, "messages": [SAID]}.items()
        )
    for key in prompt_response.ANSWER_LISTS:
        if key != "choices":
            yield key, "list of words", [ANSWER]
        yield key, "list of objects", [{"text": ANSWER}]
        yield key, "list of messages", [SAID]
    for key in FREE:
        yield from ((key, kind, value) for kind, value in SHAPED.items())
        yield key, "langchain", LANGCHAIN


CASES = {f"{key}: {kind}": (key, value) for key, kind, value in beside()}
TALKS = {
    "user": [USER],
    "earlier answer": [USER, *BEFORE],
    "two": [USER, *BEFORE, {"role": "assistant", "content": "I think so."}, {"role": "user", "content": "Really?"}],
}


@pytest.mark.parametrize("name", CASES)
def test_the_trained_text_is_the_answer_beside_the_messages(name, tmp_path):
    key, value = CASES[name]
    for (kind, talk), outer in itertools.product(TALKS.items(), ({}, {"session_id": "s", "reward": 1.0, "n": 3})):
        record = {**outer, "messages": talk, key: value}
        [trace] = tg.read([record])
        where = f"{kind}, {record}"
        assert [trace.messages[each.message]["content"] for each in trace.generations] == [ANSWER], where
        assert [each["content"] for each in trace.messages] == [*(each["content"] for each in talk), ANSWER], where
        assert trace.reward == outer.get("reward"), where
        assert not _core.Traces.plain([json.dumps(record).encode()], registry._KEYS)[0], where


def said(trace):
    return [trace.messages[each.message]["content"] for each in trace.generations]


CUT = {
    "by the user": {"messages": [USER, *BEFORE]},
    "after a tool": {"messages": [USER, *TOOL]},
    "with what was asked for": {"messages": [USER, *TOOL], "answer": "4", "answers": ["4", "four"]},
    "with a message of what was asked for": {
        "messages": [USER, *BEFORE],
        "expected_output": SAID,
        "meta": {"gold": SAID},
    },
    "with sampled tokens": {"messages": [USER, {**BEFORE[0], "token_ids": [7]}, USER], "answer": "4", "answers": ["4"]},
    "in a span": {"messages": [USER, *BEFORE], "span_id": "s", "parent_id": None, "trace_id": "t"},
    "beside a list of others": {"messages": [USER, *BEFORE], "shots": [{"messages": [USER, SAID]}]},
    "with a result that is no answer": {"messages": [USER, *BEFORE], "result": {"status": "max_turns"}, "output": ""},
}


@pytest.mark.parametrize("name", CUT)
def test_a_conversation_that_was_cut_off_is_read_as_it_stands(name):
    record = {**CUT[name], "reward": 0.0}
    [trace] = tg.read([record])
    assert said(trace) == [each["content"] for each in record["messages"] if each["role"] == "assistant"]
    assert len(trace.messages) == len(record["messages"])
    assert registry.convert_first_match(record) is None
    assert not _core.Traces.plain([json.dumps(record).encode()], registry._KEYS)[0], (
        "whether more is beside it is looked at"
    )


ODD, OPEN = {"said": "Yes: 4.", "is_streaming": True}, [USER, *BEFORE]
PREFILLED = [*OPEN, {"role": "assistant", "content": "Yes"}]
HUMAN, AI = {"type": "human", "data": {"content": "2+2?"}}, {"type": "ai", "data": {"content": "Four, I think."}}
UNREAD = {
    "as Python shows it": {"messages": OPEN, "response": f"ChatCompletion(id='c', a={SAID})"},
    "in a list": {"messages": OPEN, "response": [ODD, ODD]},
    "with the keys of an answer": {"messages": OPEN, "output": {"content": "Yes: 4.", "score": 1}},
    "next to a request": {"request": {"messages": OPEN}, "response": ODD},
    "next to a request that begins the answer": {"request": {"messages": PREFILLED}, "response": {"body": ODD}},
    "next to an input": {"input": PREFILLED, "output": ODD},
    "next to a conversation": {"talk": OPEN, "completion": ODD},
    "in an object": {"data": {"sent": {"messages": OPEN, "model": "m"}, "got": ODD}},
    "with a message elsewhere": {"request": {"messages": OPEN}, "response": ODD, "note": SAID},
    "next to an expected answer": {"prompt": "2+2?", "response": ODD, "answer": "4"},
    "next to expected answers": {"prompt": "2+2?", "responses": [ODD], "answers": ["4", "four"]},
    "next to LangChain's messages": {"input": [HUMAN, AI, HUMAN], "output": ODD},
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_record_whose_response_is_not_read_is_refused(name, tmp_path):
    key = next(key for record in (UNREAD[name], *UNREAD[name].values()) for key in ODD_KEYS if key in record)
    with pytest.raises(FormatError, match=r"TG-(DATA-043|FORMAT-018)") as error:
        tg.read([UNREAD[name]])
    assert f"its {key} (" in str(error.value) or name == "with a message elsewhere"
    assert "keys said, is_streaming" in str(error.value) or name not in ("next to a request", "in an object")
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [{"messages": [USER, SAID]}] * 40 + [UNREAD[name]]))
    stream = tg.stream(path, on_error="skip")
    assert [said(each) for part in stream for each in part] == [[ANSWER]] * 40
    assert stream.read_report.bad == 1


ODD_KEYS = ("response", "responses", "output", "completion", "got")
RUN = {"id": "r", "run_type": "chain", "inputs": {"messages": OPEN}, "outputs": {"said": ANSWER}}
READ = {
    "Anthropic's, in a body": (
        {"body": {"messages": OPEN}, "url": "/"},
        {"status": 200, "body": json.dumps({**ANTHROPIC, "stop_reason": "end_turn"})},
    ),
    "a serialized object": (
        {"messages": OPEN},
        {"$type": "x.Message", "value": {**ANTHROPIC, "stop_reason": "end_turn"}},
    ),
    "serialized chunks": ({"body": {"messages": OPEN}}, {"body": [{"_class": "c", "data": each} for each in CHUNKS]}),
}


@pytest.mark.parametrize("name", READ)
def test_the_body_or_the_fields_of_a_response_are_its_answer(name):
    request, response = READ[name]
    [trace] = tg.read([{"request": request, "response": response, "reward": 1.0}])
    assert (said(trace), trace.reward) == ([ANSWER], 1.0)
    assert trace.generations[0].finish_reason == (None if "chunks" in name else "stop")


def test_answers_next_to_messages_of_langchain_and_the_earlier_answers_of_root_runs(tmp_path):
    for output in (ANSWER, {"type": "ai", "data": {"content": ANSWER}}):
        [trace] = tg.read([{"input": [HUMAN, AI, HUMAN], "output": output}])
        assert said(trace) == [ANSWER]
    path = tmp_path / "runs.jsonl"
    rows = [RUN, {**RUN, "id": "s", "outputs": {"messages": [*OPEN, SAID]}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = tg.stream(path)
    assert [said(each) for part in stream for each in part] == [[BEFORE[0]["content"], ANSWER]]


@pytest.mark.parametrize("identity", ["", "c"])
def test_a_stream_of_azure_begins_with_the_results_of_its_filter(identity, tmp_path):
    first = {"id": identity, "object": "", "model": "", "choices": [], "prompt_filter_results": []}
    path = tmp_path / "chunks.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [first, *CHUNKS] * 2))
    for source in ([[first, *CHUNKS]], [{"request": {"messages": OPEN}, "chunks": [first, *CHUNKS]}], path):
        assert [said(each) for each in tg.read(source)] == [[ANSWER]] * (2 if source == path else 1)


def test_what_is_plain_to_python_is_plain_to_the_core():
    talk = {"messages": [USER, SAID], "reward": 1.0}
    weighed = [
        {"messages": [USER, {**SAID, **told}]} for told in ({"sampled": False}, {"trainable": False}, {"weight": 0})
    ]
    calls = [{"request": {"messages": [USER]}, "response": {"choices": [CHOICE] * count}} for count in (1, 2)]
    rows = [talk, {**talk, "response": None}, *weighed, *calls, {"calls": calls[:1]}, *CUT.values()]
    rows += [{"messages": TALKS["two"], key: value} for key, value in CASES.values()]
    plain = _core.Traces.plain([json.dumps(row).encode() for row in rows], registry._KEYS)
    assert [registry._is_plain(row) for row in rows] == plain
    assert sum(plain) == 4


def test_a_record_far_behind_the_first_ones_is_looked_at_too(tmp_path):
    talk = {"messages": [USER, SAID], "pad": "x" * 9000}
    beside = {"messages": [USER, *BEFORE], "chunks": CHUNKS}
    several = {"request": {"messages": [USER]}, "response": {"choices": [CHOICE, {**CHOICE, "index": 1}]}}
    rows = [*[talk] * 40, beside, {"messages": [USER, *BEFORE]}, talk, several, talk]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = tg.stream(path, batch=30)
    traces = tg.Traces.concatenate(list(stream))
    assert [said(each) for each in traces] == [[ANSWER]] * 41 + [[BEFORE[0]["content"]]] + [[ANSWER]] * 4
    assert [each.location[1] for each in traces][39:] == [40, 41, 42, 43, 44, 44, 45]
    report = stream.read_report
    assert (report.records, report.traces, report.generations, report.unused_choices) == (46, 46, 46, 0)
    assert {name: count for name, (count, _) in report.formats.items()} == {"chat": 43, "stream": 1, "call": 2}
    assert report.bytes == sum(len(json.dumps(row)) for row in rows)
    assert stream.lines() == ["convert  1 records of logged_call", "convert  1 records of choices"]
    assert len(tg.read(path, limit=42)) == 42
    assert [len(tg.read(path, limit=count)) for count in (44, 45)] == [44, 45]


def test_what_is_bad_far_behind_the_first_ones_is_settled_as_is_told(tmp_path):
    talk = {"messages": [USER, SAID], "pad": "x" * 9000}
    bad = {"messages": [USER, *BEFORE], "responses": ["4", "5"], "finish_reason": ["stop"] * 3}
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*[talk] * 20, bad, talk]))
    with pytest.raises(tg.errors.FormatError, match=r"TG-READ-006.*traces\.jsonl:21: `finish_reason`.*3.*2"):
        tg.read(path)
    stream = tg.stream(path, on_error="skip")
    assert sum(map(len, stream)) == 21
    assert (stream.read_report.records, stream.read_report.bad, stream.read_report.traces) == (22, 1, 21)
    assert len(tg.read(path, on_error="quarantine")) == 21
    assert json.loads((tmp_path / "traces.jsonl-again.quarantine.raw").read_text()) == bad


def sessions():
    """Yield streamed calls of two sessions. Only the last call of a session has a rating."""
    talk = [USER]
    for session, thumb in (("a", "up"), ("b", "down")):
        for turn in range(3):
            chunks = [{**each, "id": f"{session}{turn}"} for each in CHUNKS]
            told = {"session_id": session, "turn": turn, "thumbs": thumb if turn == 2 else None}
            yield {**told, "messages": talk[: 2 * turn + 1], "chunks": chunks}
            talk = [*talk[: 2 * turn + 1], SAID, {"role": "user", "content": f"And then {turn}?"}]
        talk = [USER]


def test_a_key_that_is_suggested_joins_what_it_says():
    rows = list(sessions())
    flags = infer_fields.infer(rows).flags(["reward", "session"])
    assert flags == ["--map.reward", "thumbs", "--map.session", "session_id", "--map.order", "turn"]
    one, two = tg.read(rows, map={"reward": "thumbs", "session": "session_id"})
    assert [(len(each.generations), each.reward) for each in (one, two)] == [(3, 1.0), (3, 0.0)]
    assert said(one) == [ANSWER] * 3
    whole = [{"session_id": name, "messages": [USER, *BEFORE], "score": at} for at, name in enumerate("aabb")]
    found = infer_fields.infer([*rows[:2], *whole]).of("session")
    assert [each.path for each in found] == ["prefix"], "these are no calls, so the key may name samples"
    assert len(tg.read(whole, map={"session": "session_id"})) == 2
    whole[1]["messages"] = [USER, {"role": "tool", "content": "4"}]
    with pytest.raises(tg.errors.FormatError, match=r"TG-READ-006.*do.*not.*continue"):
        tg.read(whole, map={"session": "session_id"})


def test_prompts_are_counted_of_conversations_where_calls_are_joined():
    [found] = [each for each in infer_fields.infer(list(sessions())).of("group") if each.path == "prompt"]
    assert found.evidence == "2 conversations begin with the same prompt"


def choice(at, text):
    return {"index": at, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}


DRAWN = [choice(at, text) for at, text in enumerate("4567")]
CALL = {"request": {"messages": [USER], "n": 4}, "response": {"id": "chatcmpl-12345678", "choices": DRAWN}}


def test_each_choice_is_a_trace_with_what_is_its_own_wherever_it_stands():
    told = {"by": "x", "right": [True, False, None, True], "in": {"grades": [{"score": at} for at in range(4)]}}
    rows = tg.read([{**CALL, "evaluation": told}], map={"reward": "evaluation.right"}, on_error="skip")
    assert [said(each) for each in rows] == [["4"], ["5"], ["6"], ["7"]]
    assert [each.reward for each in rows] == [1.0, 0.0, None, 1.0]
    assert len(set(rows.groups)) == 1
    scores = tg.read([{**CALL, "evaluation": told}], map={"reward": "evaluation.in.grades.score"})
    assert [each.reward for each in scores] == [0.0, 1.0, 2.0, 3.0]
    words = tg.read([{**CALL, "verdicts": ["good", "bad", "bad", "good"]}], map={"reward": "verdicts"})
    assert [each.reward for each in words] == [0.75, 0.25, 0.25, 0.75]


def test_one_reward_beside_several_choices_is_nobodys_and_is_counted(tmp_path, capsys):
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(json.dumps({**CALL, "judge": {"score": at % 2}}) + "\n" for at in range(6)))
    stream = tg.stream(path)
    assert [said(each) for each in tg.Traces.concatenate(list(stream))] == [["4"]] * 6
    assert stream.read_report.unused_choices == 18
    assert main(["doctor", str(path), "--model", str(MODEL), "--map.reward", "judge.score"]) == 1
    out = capsys.readouterr().out
    assert "18 of 24 choices" in out
    assert "\nnext " not in out
    told = [json.loads(line) | {"choice": 1} for line in path.read_text().splitlines()]
    assert [said(each) for each in tg.read(told)] == [["5"]] * 6, "the record says which one was used"


def test_choices_of_streams_and_of_other_apis_are_traces_too():
    chunks = [{"id": "c", "object": "chat.completion.chunk", "choices": [{"index": at, "delta": {"content": text}}]}
              for at, text in enumerate("45")]  # fmt: skip
    parts = [{"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": "STOP"} for text in "45"]
    asked = {"contents": [{"role": "user", "parts": [{"text": "2+2?"}]}]}
    log = {"call_type": "completion", "status": "success", "model_parameters": {"temperature": 0.5, "n": 4}, **CALL}
    log = {key: value for key, value in log.items() if key != "request"} | {"messages": [USER]}
    for record, texts in (
        ({"request": {"messages": [USER]}, "response": chunks}, "45"),
        ({"messages": [USER, *BEFORE], "chunks": chunks}, "45"),
        ({"request": asked, "response": {"candidates": parts}}, "45"),
        ({"prompt_token_ids": [5], **CALL["response"]}, "4567"),
        (log, "4567"),
    ):
        traces = tg.read([{**record, "tags": {"votes": [1, 0, 1, 0][: len(texts)]}}], map={"reward": "tags.votes"})
        assert [said(each) for each in traces] == [[text] for text in texts], record
        assert [each.reward for each in traces] == [1.0, 0.0, 1.0, 0.0][: len(texts)]
        assert len(set(traces.groups)) == 1
        assert len({each.id for each in traces}) == len(texts)
    assert tg.read([log])[0].generations[0].temperature == 0.5


ASKED = {
    "chat": ({"messages": [USER]}, RESPONSE),
    "anthropic": ({"messages": [USER], "system": "be", "max_tokens": 9}, ANTHROPIC),
    "gemini": ({"contents": [{"role": "user", "parts": [{"text": "2+2?"}]}]}, GEMINI),
    "responses": ({"input": "2+2?", "instructions": "be"}, RESPONSES_API),
}


@pytest.mark.parametrize("key", openai.REQUESTS)
@pytest.mark.parametrize("api", ASKED)
def test_a_request_is_found_beside_its_response_under_any_of_its_names(api, key, tmp_path):
    asked, response = ASKED[api]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"doc": at, key: asked, "response": response}) + "\n" for at in "aab"))
    traces = tg.read(path)
    for trace in traces:
        said = [(message["role"], message["content"]) for message in trace.messages if message["role"] != "system"]
        assert said == [("user", "2+2?"), ("assistant", ANSWER)]
    assert infer_fields.infer(path).of("group")[0].path == "doc"
