"""Session files of agents (tests/golden/sessions), each as one conversation with the branches of its history."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad.cli import main
from tracegrad.data import read_options
from tracegrad.data.formats import registry, session_files, session_tree
from tracegrad.errors import FormatError, ReadError

GOLDEN = Path(__file__).parents[1] / "golden" / "sessions"
MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
CLAUDE, CODEX, OPENHANDS = GOLDEN / "claude_code.jsonl", GOLDEN / "rollout-codex.jsonl", GOLDEN / "openhands.json"
FILES = [CLAUDE, CODEX, OPENHANDS, GOLDEN / "openhands", *GOLDEN.glob("a*.json*")]


def lines_of(path):
    """The lines of a session file, without the one that is cut off."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def read(source):
    """The traces of a source, and what was left out."""
    stream = tg.stream(source)
    traces = [trace for part in stream for trace in part]
    return traces, {key.partition(": ")[2]: count for key, count in stream.tally().left_out.items()}


def seen(trace, generation):
    """The texts that an answer saw."""
    return [trace.pool[index]["content"] for index in generation.context]


def said(trace):
    return [trace.pool[generation.message]["content"] for generation in trace.generations]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_session_of_claude_code_is_its_conversation_and_its_subagents():
    (main_trace, side), left_out = read(CLAUDE)
    assert (main_trace.id, side.id, main_trace.model, side.model) == ("s-1", "s-1-ag1", "claude-opus-4", "claude-haiku")
    assert said(main_trace) == ["I look.", "There are two.", "None.", "One fol", "You are welcome."]
    first, second, hidden, rewound, compacted = main_trace.generations
    # Results of parallel tools continue different lines of the answer, and the next answer saw both.
    assert seen(main_trace, second) == ["How many files are here?", "I look.", "a b", "Two."]
    assert seen(main_trace, hidden)[4:] == ["There are two.", "And hidden ones?"]
    assert seen(main_trace, rewound)[4:] == ["There are two.", "And folders?"]
    assert seen(main_trace, compacted) == ["Summary: two files.", "Thanks."]
    message = main_trace.pool[first.message]
    assert message["reasoning_content"] == "Look first."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["Bash", "Task"]
    assert [each.finish_reason for each in main_trace.generations] == ["tool_calls", "stop", "stop", "length", "stop"]
    assert [seen(side, each) for each in side.generations] == [["Count them."]]
    assert main_trace.generations[0].temperature is None
    # Counted from the file: each answer is one id, and what is no trained answer has a reason.
    answers = {line["message"]["id"] for line in lines_of(CLAUDE) if line["type"] == "assistant"}
    reasons = ("messages of errors of the API", "answers of other models")
    others = sum(count for key, count in left_out.items() if key.startswith(reasons))
    assert len(answers) == len(main_trace.generations) + len(side.generations) + others
    assert left_out == {
        "last lines that are cut off": 1,
        "attachments (files, reminders, hooks): their text in the prompt is not recorded": 1,
        "messages of errors of the API": 1,
        "parts of answers: hidden reasoning, of which there is no text": 1,
        "answers of other models than the most frequent one of their session: they are context": 1,
        "system prompts and tool schemas: these sessions do not have them": 2,
    }


def claude(uuid, parent, kind="user", content="hi", **fields):
    message = {"role": kind, "content": content, **({"id": uuid, "model": "m"} if kind == "assistant" else {})}
    message |= fields.pop("message", {})
    base = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "isSidechain": False}
    return {**base, "message": message, **fields}


HI = [claude("u", None), claude("a", "u", "assistant", "A")]


@pytest.mark.parametrize(
    ("lines", "answers", "reason"),
    [
        (HI, ["A"], None),
        ([*HI, HI[1]], ["A"], None),  # a line twice
        ([claude("a", None, "assistant", "A")], [], "earlier lines are not in the file"),
        ([claude("u", "gone"), HI[1]], [], "earlier lines are not in the file"),
        (
            [*HI, claude("v", "a"), claude("b", "v", "assistant", "B", message={"model": "<synthetic>"})],
            ["A"],
            "wrote in",
        ),
        (
            [*HI, claude("v", "a", sessionId="t"), claude("b", "v", "assistant", "B", sessionId="t")],
            ["B"],
            "copied from",
        ),
        (
            [HI[0], claude("r", "u", "assistant", [{"type": "redacted_thinking", "data": "x"}])],
            [""],
            "hidden reasoning",
        ),
        (
            [*HI, claude("v", "a", isSidechain=True), claude("b", "v", "assistant", "B", isSidechain=True)],
            ["A"],
            "earlier lines are not in the file",
        ),
        (
            [*HI, claude("w", None), claude("c", "w", "assistant", "A", message={"id": "a"})],
            ["A"],
            "an earlier branch has too",
        ),
        ([HI[0], claude("p", "u", "progress", ""), claude("a", "p", "assistant", "A")], ["A"], None),
    ],
)
def test_an_answer_of_claude_code_is_trained_only_if_the_model_gave_it_after_a_known_prompt(
    lines, answers, reason, tmp_path
):
    traces, left_out = read({"session_file": "claude_code", "lines": lines})
    assert [text for trace in traces for text in said(trace)] == answers
    assert (reason is None) or [key for key in left_out if reason in key]
    others = [key for key in left_out if not key.startswith("system prompts")]
    assert len(others) == (reason is not None)


def test_a_rollout_of_codex_is_one_conversation_with_branches():
    [trace], left_out = read(CODEX)
    assert (trace.id, trace.model) == ("c-1", "gpt-5-codex")
    context = "<environment_context>\n  <cwd>/app</cwd>\n</environment_context>"
    begin = ["Be brief.", "<permissions instructions>", context, "How many files?"]
    tools = [*begin, "", "a b", "c"]
    assert [seen(trace, each) for each in trace.generations] == [
        begin,
        tools,
        [*tools, "", "Done"],
        [*tools, "", "Done", "Two.", "Wrong turn"],  # rolled back: not in the next prompt
        ["Be brief.", context, "How many files?", "Two.", "Thanks"],  # the history that the compaction recorded
    ]
    assert said(trace) == ["", "", "Two.", "Left.", "Welcome."]
    calls = [[call["id"] for call in trace.pool[each.message].get("tool_calls", [])] for each in trace.generations]
    assert calls == [["1", "2"], ["3"], [], [], []]
    assert not any("reasoning_content" in message for message in trace.pool)  # a summary is not what was sampled
    kinds = Counter(line["payload"].get("type") for line in lines_of(CODEX) if line["type"] == "response_item")
    assert kinds["function_call"] + kinds["custom_tool_call"] == 3
    assert left_out == {
        "reasoning that is encrypted or a summary: its text is unknown": 1,
        "answers after a compaction that does not record its history: they are context": 1,
        "answers of other models than the most frequent one of their session: they are context": 1,
        "tool schemas: a rollout does not have them": 1,
    }


def test_the_answer_after_a_rollback_and_of_a_fork():
    lines = lines_of(CODEX)
    for line in lines:
        if line["type"] == "turn_context":
            line["payload"]["model"] = "m"
    [trace], _ = read({"session_file": "codex", "lines": lines})
    after = next(each for each in trace.generations if trace.pool[each.message]["content"] == "One.")
    assert seen(trace, after)[-3:] == ["Done", "Two.", "And folders?"]
    lines[0]["payload"]["forked_from_id"] = "c-0"
    fork = {"type": "session_meta", "payload": {"id": "c-0", "base_instructions": {"text": "Be long."}}}
    traces, left_out = read({"session_file": "codex", "lines": [lines[0], fork, *lines[1:]]})
    assert traces == []
    assert [count for key, count in left_out.items() if "forked from" in key] == [7]
    item = {"type": "response_item", "payload": {"type": "message", "role": "user", "content": []}}
    plain = {"type": "session_meta", "payload": {"id": "c"}}
    reply = {"type": "response_item", "payload": {"type": "reasoning", "content": [{"text": "Hm."}]}}
    odd = {"type": "response_item", "payload": {"type": "odd"}}
    other = {"type": "inter_agent_communication", "payload": {}}
    [trace], left_out = read({"session_file": "codex", "lines": [plain, item, reply, odd, other]})
    assert trace.messages[-1]["reasoning_content"] == "Hm."
    assert {"system prompts that are not recorded", "items of the type 'odd'"} < left_out.keys()
    assert "lines of the type 'inter_agent_communication': later answers may have seen them" in left_out


@pytest.mark.parametrize(
    ("turns", "before"),
    [(1, ["<skill>", "A", "1", "dev", "B"]), (2, ["<skill>", "A", "1"]), (3, ["<skill>"]), (9, ["<skill>"]), (0, None)],
)
def test_a_rollback_removes_turns_and_the_context_before_them(turns, before):
    def item(role, text):
        return {"type": "response_item", "payload": {"type": "message", "role": role, "content": [{"text": text}]}}

    talk = [("user", "<skill>"), ("user", "A"), ("assistant", "1"), ("developer", "dev"), ("user", "B"), ("user", "C")]
    back = {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": turns}}
    lines = [*(item(*each) for each in talk), back, item("user", "D"), item("assistant", "2")]
    [trace], _ = read({"session_file": "codex", "lines": lines})
    assert seen(trace, trace.generations[-1]) == [*(before or [text for _, text in talk]), "D"]


@pytest.mark.parametrize("source", [OPENHANDS, GOLDEN / "openhands", GOLDEN], ids=["list", "folder", "among others"])
def test_events_of_openhands_are_the_prompts_that_it_would_send(source):
    traces, left_out = read(source)
    wanted = json.loads((GOLDEN / "openhands.truth").read_text())
    trace = next(each for each in traces if each.id == ("openhands" if source == OPENHANDS else "conversation-1"))
    found = [[(trace.pool[at]["role"], trace.pool[at]["content"]) for at in each.context] for each in trace.generations]
    assert found == [[tuple(message) for message in prompt] for prompt in wanted]
    assert said(trace) == ["I think.", "", "Done.", "No."]
    first = trace.pool[trace.generations[0].message]
    assert (len(first["tool_calls"]), first["reasoning_content"]) == (2, "Hm.")
    if source == GOLDEN:
        assert {"c-1", "conversation-1", "openhands", "s-1", "s-1-ag1"} < {each.id for each in traces}
    else:
        assert left_out == {}


def test_event_files_are_in_the_order_of_their_numbers_whatever_their_ids(tmp_path):
    (tmp_path / "c" / "events").mkdir(parents=True)
    files = sorted((GOLDEN / "openhands" / "conversation-1" / "events").iterdir())
    for number, (file, name) in enumerate(zip(files, "fedcba987654", strict=True)):
        (tmp_path / "c" / "events" / f"event-{number:05}-{name}3b.json").write_bytes(file.read_bytes())
    [trace], [wanted] = read(tmp_path)[0], read(GOLDEN / "openhands")[0]
    assert [seen(trace, each) for each in trace.generations] == [seen(wanted, each) for each in wanted.generations]


def test_old_events_of_openhands_have_the_response_of_the_model():
    def call(identity):
        return {"id": identity, "type": "function", "function": {"name": "run", "arguments": "{}"}}

    said_by_model = {"role": "assistant", "content": "I run.", "tool_calls": [call("t1"), call("t2")]}
    response = {"id": "r1", "model": "m", "choices": [{"message": said_by_model}]}

    def event(identity, **fields):
        return {"id": identity, "timestamp": "x", "source": "agent", **fields}

    def run(identity, tool):
        return event(
            identity, action="run", args={}, tool_call_metadata={"tool_call_id": tool, "model_response": response}
        )

    def result(identity, tool):
        return event(identity, observation="run", content=f"out {tool}", tool_call_metadata={"tool_call_id": tool})

    events = [
        event(
            0, action="system", args={"content": "Be.", "tools": [{"type": "function", "function": {"name": "run"}}]}
        ),
        event(1, source="user", action="message", args={"content": "Run."}),
        run(2, "t1"),
        run(3, "t2"),
        result(4, "t1"),
        result(5, "t2"),
        event("six", action="message", args={"content": "Ran."}),
        event(7, observation="agent_state_changed", content=""),
        event(8, action="condensation", args={"forgotten_events_start_id": 2, "forgotten_events_end_id": 10**15}),
        event(9, action="message", args={"content": "Bye."}),
    ]
    assert session_files.producer_of(events[:4]) == "openhands"
    [trace], left_out = read({"session_file": "openhands", "name": "x", "lines": events})
    assert [seen(trace, each) for each in trace.generations] == [
        ["Be.", "Run."],
        ["Be.", "Run.", "I run.", "out t1", "out t2"],
        ["Be.", "Run.", "Ran."],  # the condensation removed the calls
    ]
    assert said(trace) == ["I run.", "Ran.", "Bye."]
    assert [call["id"] for call in trace.pool[trace.generations[0].message]["tool_calls"]] == ["t1", "t2"]
    assert trace.tools == [{"type": "function", "function": {"name": "run"}}]
    assert list(left_out) == ["events agent_state_changed without a message"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_doctor_reports_a_session_as_json(path, capsys):
    assert main(["doctor", str(path), "--model", str(MODEL), "--json"]) in (0, 1)
    json.loads(capsys.readouterr().out)


def test_a_session_is_found_by_its_first_lines_in_every_container(tmp_path):
    plain = CODEX.read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain))
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(plain))
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "session_meta"}], "parentUuid": 1}\n')
    assert [place.kind for place in tg.data.sources.expand([tmp_path])] == ["session", "session", "file"]
    assert [trace.id for trace in read(tmp_path / "b.jsonl.zst")[0]] == ["c-1"]
    assert [trace.id for trace in read(tmp_path / "a.jsonl.gz")[0]] == ["c-1"]


def test_lines_without_their_file_a_broken_line_and_a_long_session_are_refused(tmp_path, monkeypatch):
    lines = lines_of(CODEX)
    with pytest.raises(FormatError, match=r"TG-DATA-043.*:1: .*codex"):
        tg.read(lines)
    with pytest.raises(FormatError, match=r"TG-DATA-043.*:1: .*claude_code"):
        tg.read([HI[0]])
    text = CODEX.read_text().splitlines()
    path = tmp_path / "rollout.jsonl"
    path.write_text("\n".join([*text[:3], '{"type": "response', *text[3:]]))
    with pytest.raises(FormatError, match=r"TG-\w+-\d+.*line 4 "):
        tg.read(path)
    monkeypatch.setattr(session_files, "MOST_BYTES", 1000)
    with pytest.raises(ReadError, match=r"TG-DATA-046: .*claude_code.jsonl: .*1,000"):
        tg.read(CLAUDE)
    monkeypatch.setattr(session_tree, "MOST_CONTEXT", 10)
    with pytest.raises(FormatError, match=r"TG-\w+-\d+.* 10 messages"):
        tg.read({"session_file": "codex", "lines": lines})


def test_a_session_without_answers_is_no_trace_and_is_counted():
    conversion = registry.convert_first_match({"session_file": "claude_code", "lines": HI[:1]})
    assert (conversion.name, conversion.records) == ("claude_code", [])
    assert registry.convert_first_match({"session_file": "codex", "lines": []}).records == []
    assert registry.convert_first_match({"session_file": "openhands", "lines": []}).records == []
    assert read_options.MOST_BYTES == session_files.MOST_BYTES


def test_events_of_autogen_are_calls_and_the_others_are_counted():
    stream = tg.stream(GOLDEN / "autogen_events.jsonl")
    [trace] = [trace for part in stream for trace in part]
    assert [message["content"] for message in trace.messages] == ["Be brief.", "How many files?", "There are two."]
    assert (trace.model, trace.tools[0]["function"]["name"], len(trace.generations)) == ("gpt-x", "count", 1)
    assert (stream.tally().adapted, stream.tally().records_without_call) == ({"autogen": 4}, {"autogen": 3})
    [(reason, count)] = stream.tally().left_out.items()
    assert (reason.startswith("autogen: answers of streamed calls"), count) == (True, 1)


def test_a_result_of_autogen_is_one_trace_for_each_agent_as_it_saw_the_team():
    traces, left_out = read(GOLDEN / "autogen_results.jsonl")
    told = [[(each["role"], each.get("name"), each["content"]) for each in trace.messages] for trace in traces]
    assert told == [
        [
            ("user", "user", "How many files?"),
            ("assistant", None, None),
            ("tool", None, "2"),
            ("assistant", None, "There are two."),
        ],
        [
            ("user", "user", "Write."),
            ("assistant", None, "A poem."),
            ("user", "critic", "Too short."),
            ("assistant", None, "A better poem."),
        ],
        [
            ("user", "user", "Write."),
            ("user", "writer", "A poem."),
            ("assistant", None, "Too short."),
            ("user", "writer", "A better poem."),
        ],
    ]
    assert traces[0].messages[1]["reasoning_content"] == "I count."
    assert traces[0].messages[1]["tool_calls"][0]["function"] == {"name": "count", "arguments": '{"folder": "/"}'}
    lines = (GOLDEN / "autogen_results.jsonl").read_text().splitlines()
    sampled = sum(bool(each["models_usage"]) for line in lines for each in json.loads(line)["messages"])
    assert sum(len(trace.generations) for trace in traces) == sampled == 5
    assert sum(left_out.values()) == 3
    # A summary of a tool's result is no answer, and what a code executor saw is not known.
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    talk = [
        {"source": "user", "type": "TextMessage", "content": "q", "models_usage": None},
        {"source": "a", "type": "ToolCallSummaryMessage", "content": "2", "models_usage": None},
        {"source": "a", "type": "TextMessage", "content": "A", "models_usage": usage},
        {"source": "b", "type": "CodeGenerationEvent", "content": "B", "models_usage": usage},
    ]
    [trace], left_out = read([{"messages": talk, "reward": 1.0}])
    assert ([message["content"] for message in trace.messages], trace.reward) == (["q", "A"], 1.0)
    assert left_out["agents with code or memory: what they saw is not recorded"] == 1


def test_a_chat_of_ag2_is_read_from_the_side_of_its_model():
    [trace], left_out = read(GOLDEN / "ag2.json")
    assert [(each["role"], each["content"]) for each in trace.messages] == [
        ("user", "How many files?"),
        ("assistant", None),
        ("tool", "2"),
        ("assistant", "There are two."),
        ("user", "Sure?"),
        ("assistant", "Two again."),
    ]
    assert len(trace.generations) == 3
    assert len(left_out) == 1
    record = json.loads((GOLDEN / "ag2.json").read_text())
    [named] = tg.read([{**record, "chat_history": [{"name": None, **each} for each in record["chat_history"]]}])
    assert named.messages == trace.messages
    # The one that executes tools is not the model, whoever began; what a person typed is context.
    begun = [{"content": "hi", "role": "assistant", "name": "bot"}, *record["chat_history"]]
    [trace], left_out = read([{**record, "chat_history": begun, "human_input": ["Two again."]}])
    assert [trace.pool[each.message]["content"] for each in trace.generations] == [None, "There are two."]
    assert left_out["messages that a person wrote or that began the chat: they are context"] == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda talk: [*talk, {"content": "x", "role": "user", "name": "third"}],
        lambda talk: [{**each, "name": "person"} for each in talk],
        lambda talk: [*talk, {"content": "x", "role": "tool", "name": "bot"}],
    ],
    ids=["three speakers", "one speaker", "both execute"],
)
def test_a_chat_of_ag2_whose_model_is_not_certain_is_refused(change):
    record = json.loads((GOLDEN / "ag2.json").read_text())
    with pytest.raises(FormatError, match=r"TG-DATA-043.*:1: .*person"):
        tg.read([{**record, "chat_history": change(record["chat_history"])}])


def test_logs_without_readable_answers_are_refused_with_the_reason(tmp_path):
    log = tmp_path / "server.log"
    log.write_text('time=2026-11-01T00:00:00.000Z level=INFO source=routes.go:1528 msg="Listening on [::]:11434"\n')
    with pytest.raises(ReadError, match=r"TG-DATA-047: .*server.log:1"):
        tg.read(log)
    body = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], "stream": False, "options": {"top_k": 5}}
    assert tg.read([body], on_error="skip").read_report.reasons == {"failed_call": 1}
    said = {"role": "assistant", "content": "4"}
    for whole in (
        {**body, "messages": [*body["messages"], said]},
        {"request": body, "response": {"model": "m", "message": said, "done": True}},
        {**body, "response": {"choices": [{"message": said}]}},
    ):
        assert [len(each.generations) for each in tg.read([whole])] == [1]
    call = {
        "invocation_id": "i",
        "wrapper_id": 1,
        "thread_id": 2,
        "request": {"messages": []},
        "response": "Chat(id=1)",
    }
    with pytest.raises(FormatError, match=r"TG-DATA-043.*:1: .*str\(response\)"):
        tg.read([call])
    assert registry.convert_first_match({"wrapper_id": 1, "thread_id": 2, "agent_name": "a"}).records == []
