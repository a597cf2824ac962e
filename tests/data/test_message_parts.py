"""Text, calls and results in other fields of messages, prefixes next to them, and files whose records are messages."""

import gzip
import json
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad.data.formats import message_parts, session_files
from tracegrad.errors import FormatError, ReadError, TracegradError

FILES = Path(__file__).parent / "strangers" / "fifth"

ASK = {"role": "user", "content": "2+2?"}
CALL = {"type": "tool_call", "id": "c", "name": "add", "input": {"a": 2}}
RESULT = {"type": "tool_result", "id": "c", "output": [{"type": "text", "text": "4"}]}
TEXT = {"type": "text", "text": "It is 4."}
FIFTH = {
    # Messages by role, calls, answers with text, letters of the answers: counted in the files' own fields.
    "semantic_kernel.jsonl.gz": ({"system": 2, "user": 4, "assistant": 10, "tool": 6}, 6, 5, 237),
    "agentscope.jsonl.gz": ({"user": 4, "assistant": 10, "tool": 7}, 7, 8, 301),
    "kani.json.gz": ({"system": 1, "user": 2, "assistant": 4, "tool": 2}, 2, 4, 173),
    "gptme.jsonl.gz": ({"system": 6, "user": 3, "assistant": 5, "tool": 3}, 3, 4, 144),
    "open_interpreter.json": ({"user": 2, "assistant": 2}, 0, 2, 136),
}


def said(*parts, **fields):
    return {"role": "assistant", "content": [*parts], **fields}


def read(*messages, **fields):
    return [message for trace in tg.read([{"messages": [ASK, *messages], **fields}]) for message in trace.messages]


@pytest.mark.parametrize("name", FIFTH)
def test_each_answer_call_and_result_of_an_application_is_a_message(name):
    messages = [message for trace in tg.read(FILES / name) for message in trace.messages]
    roles, calls, texts, letters = FIFTH[name]
    answers = [each for each in messages if each["role"] == "assistant"]
    assert {role: sum(each["role"] == role for each in messages) for role in roles} == roles
    assert len(messages) == sum(roles.values())
    assert sum(len(each.get("tool_calls") or ()) for each in answers) == calls
    assert sum(bool(each["content"]) for each in answers) == texts
    assert sum(len(each["content"] or "") for each in answers) == letters
    ids = [call["id"] for each in answers for call in each.get("tool_calls") or ()]
    assert [each["tool_call_id"] for each in messages if each["role"] == "tool"] == ids


def test_calls_and_results_in_an_answer_become_messages_in_their_order():
    two = {**CALL, "id": "d", "name": "sub"}
    other = {**RESULT, "id": "d", "output": "0"}
    _, first, *results, last = read(
        said(
            TEXT, CALL, two, other, RESULT, {"type": "text", "text": "Done."}, finish_reason="stop", name="bot", id="m"
        )
    )
    assert (first["content"], [each["id"] for each in first["tool_calls"]]) == ("It is 4.", ["c", "d"])
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in results] == [
        ("tool", "d", "0"),
        ("tool", "c", "4"),
    ]
    assert (last["content"], last["id"], last["name"], first["name"], "id" in first) == (
        "Done.",
        "m",
        "bot",
        "bot",
        False,
    )
    untold = [{**each, "id": None} for each in (CALL, RESULT)]
    assert [each["content"] for each in read(said(*untold, TEXT))[1:]] == ["", "4", "It is 4."]
    thought = {"type": "thinking", "thinking": "so"}
    assert read(said(thought, CALL))[1]["reasoning_content"] == "so"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (said(TEXT, RESULT), "a result whose call is not before it"),
        (said(CALL, {**RESULT, "id": "x"}, TEXT), "a result whose call is not before it"),
        (said(CALL, {**RESULT, "name": "sub"}), "a result whose call is not before it"),
        (said(TEXT, CALL, TEXT), "text on both sides of a call"),
        (said(CALL, {**CALL, "id": "d"}, RESULT, TEXT, {**RESULT, "id": "d"}), "between its calls and their results"),
        (said(CALL, RESULT, TEXT, logprobs={"content": []}), "token ids or logprobs are of all of them"),
        ({"role": "user", "content": [CALL]}, "a call among its parts"),
        (said(CALL, tool_calls=[{"id": "e", "function": {"name": "n", "arguments": "{}"}}]), "a call among its parts"),
    ],
)
def test_a_message_with_several_readings_is_refused(message, words):
    with pytest.raises(FormatError, match=f"TG-DATA-043: .*message 1 .*{words}"):
        read(message, {"role": "assistant", "content": "4"})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "items": [{"content_type": "text", "text": "It is"}, {"kind": "text", "text": " 4."}]},
        {"role": "assistant", "parts": ["It is 4."], "text": "It is 4."},
        {"role": "assistant", "content": "", "value": "It is 4."},
        {"role": "assistant", "message": "It is 4."},
        {"role": "assistant", "content": [{"type": "text", "text": {"value": "It is 4.", "annotations": []}}]},
        {"role": "assistant", "content": None, "blocks": [{"block_type": "text", "text": "It is 4."}]},
    ],
)
def test_text_under_another_key_is_the_content(message):
    assert read(message)[1]["content"] == "It is 4."
    assert tg.read([{"history": [ASK, message]}])[0].messages[1]["content"] == "It is 4."


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({"role": "user", "parts": ["a"], "text": "b"}, "parts"),
        ({"role": "user", "items": [{"type": "riddle", "text": "b"}]}, "items"),
        ({"role": "user", "wording": "b"}, "wording"),
        ({"role": "user", "message": {"text": "b"}}, "message"),
        ({"role": "user", "content": None, "spoken": {"text": "b"}}, "spoken"),
    ],
)
def test_a_message_without_content_names_the_field_that_may_have_it(message, key, tmp_path):
    path = tmp_path / "a.jsonl"
    good = {"messages": [ASK, {"role": "assistant", "content": "4"}]}
    path.write_text("\n".join(map(json.dumps, [*[good] * 40, {"messages": [message, *good["messages"]]}])))
    with pytest.raises(FormatError, match=f"TG-FORMAT-092: .*a.jsonl:41: .*no content; its text may be in `{key}`"):
        tg.read(path)


def test_empty_answers_stay_empty():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    for fields in ({"content": None}, {"content": "", "metadata": {"text": "a b"}}, {"content": None, "model": "a b"}):
        assert not read({"role": "assistant", **fields})[1]["content"]
    assert read({"role": "assistant", "content": None, "tool_calls": [call]})[1]["tool_calls"] == [call]


def test_calls_under_another_key_are_moved_only_if_their_place_is_known():
    told = {"name": "add", "arguments": {"a": 2}, "id": "c"}
    result = {"role": "tool", "content": "4", "tool_call_id": "c"}
    text = {"role": "assistant", "content": "Wait.", "actions": [told]}
    moved = read(text, result, {"role": "assistant", "content": "4"})
    assert moved[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert [each["content"] for each in moved] == ["2+2?", "Wait.", "4", "4"]
    inside = read({"role": "assistant", "content": "", "actions": [{**told, "output": 4}]})
    assert [(each["role"], each["content"]) for each in inside[1:]] == [("assistant", ""), ("tool", "4")]
    for odd in (text, {**text, "actions": [{**told, "output": "4"}]}, {**text, "actions": [told, "x"]}):
        with pytest.raises(FormatError, match=r"TG-(DATA-043|FORMAT-094): .*tool calls under `actions`"):
            read(odd)
    with pytest.raises(TracegradError, match=r"TG-READ-006: .*message 1 has tool calls under `toolsCalled`"):
        tg.read(FILES / "deepeval.json.gz")
    schema = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    assert not message_parts.needs_conversion({"role": "assistant", "content": "4", "tools": [schema]})


@pytest.mark.parametrize("key", ["messages", "turns", "history"])
def test_a_prefix_next_to_the_conversation_is_in_front_of_it(key):
    talk = [ASK, {"role": "assistant", "content": "4"}]
    system = {"role": "system", "content": "Be brief."}

    def texts(**fields):
        return [each["content"] for each in tg.read([{key: talk, **fields}])[0].messages]

    whole = ["Be brief.", "2+2?", "4"]
    assert texts(system_prompt="Be brief.") == texts(instructions="Be brief.") == texts(prefix=[system]) == whole
    assert texts(system_message=system) == whole
    assert texts(system="Be brief.", system_messages=[system]) == whole
    assert texts(examples=[ASK], instructions="2+2?") == whole[1:]
    with pytest.raises(
        FormatError, match=f"TG-DATA-043: .*messages under `few_shot` are not in the conversation under `{key}`"
    ):
        texts(few_shot=[{"role": "user", "content": "1+1?"}, {"role": "user", "content": "2"}])
    with pytest.raises(FormatError, match=r"TG-DATA-043: .*messages under `system` are not those at its start"):
        texts(system="Be long.", prefix=[system])
    told = {"role": "assistant", "content": [CALL, RESULT, TEXT]}
    assert len(tg.read([{"state": {"context": [ASK, told]}}])[0].messages) == 4
    talk = [system, *talk]
    assert texts(system_prompt="Be {style}.") == texts(prefix=[system]) == whole
    with pytest.raises(FormatError, match=r"TG-DATA-043: .*messages under `prefix`"):
        texts(prefix=[{**system, "content": "Be long."}])


def lines_of(*messages):
    return "\n".join(map(json.dumps, messages))


@pytest.mark.parametrize("text", [lines_of, lambda *messages: json.dumps(messages, indent=1)], ids=["lines", "array"])
def test_each_file_of_messages_is_one_conversation(tmp_path, text):
    for number in range(2):
        answer = {"role": "assistant", "text": str(number), "timestamp": "2026-01-01T00:00:05"}
        system = {"timestamp": "2026-01-01T00:00:00", "role": "system", "content": "x" * 200}
        (tmp_path / f"{number}.json").write_text(text(system, ASK, answer))
    stream = tg.stream(tmp_path)
    traces = [trace for part in stream for trace in part]
    assert [[each["content"] for each in trace.messages][1:] for trace in traces] == [["2+2?", "0"], ["2+2?", "1"]]
    assert stream.lines() == ["convert  2 records of message_lines"]


SAID = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([*[ASK, SAID] * 8, {"score": 1}], "record 17 is no message"),
        ([{**ASK, "thread_id": 1}, {**SAID, "thread_id": 2}], "several conversations: `thread_id` has 2 values"),
        ([{**ASK, "id": "a"}, {**SAID, "id": "b"}, {**SAID, "parent_id": "a"}], "answers another one"),
        ([{**ASK, "created_at": 5}, {**SAID, "created_at": 4}], "older than its first"),
        ([SYSTEM, ASK, SAID, SYSTEM, ASK, SAID], "occurs a second time"),
        ([ASK, {**SAID, "type": "code"}], "message 2 is of the type 'code'"),
        ([ASK, ASK], "none of its messages is of the assistant"),
        ([ASK, SAID, {"role": "system", "content": "4", "call_id": "c"}], "the result of a call that none has"),
        (
            [ASK, {**SAID, "content": "\n@add(c): {}\nmore"}, {"role": "system", "content": "4", "call_id": "c"}],
            "message 2 has text after a call",
        ),
    ],
)
def test_a_file_of_messages_that_is_not_one_conversation_is_refused(messages, words, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of(*messages))
    with pytest.raises(TracegradError, match=f"TG-(READ-006|DATA-043): .*{words}"):
        tg.read(path)


def test_other_files_are_not_read_as_messages(tmp_path):
    path = tmp_path / "a.jsonl"
    api = {"id": "m", "type": "message", "role": "assistant", "content": [TEXT], "usage": {}, "stop_reason": "end_turn"}
    for records in ([SAID, SAID], [api, api], [{"messages": [ASK, SAID], "role": "x"}], [ASK]):
        path.write_text(lines_of(*records))
        assert session_files.producer_of_file(str(path), path.read_bytes()[:4096]) is None
    path.write_bytes(gzip.compress(lines_of(ASK, SAID, {"role": "user"}).encode()[:-6]))
    with pytest.raises((FormatError, ReadError)):
        tg.read(path)


def test_cut_off_messages_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of(ASK, SAID, ASK)[:-5])
    with pytest.raises(TracegradError, match=r"TG-(READ-006|DATA-043): .*its last message is cut off"):
        tg.read(path)
