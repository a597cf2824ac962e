"""Makes tests/golden/sessions: session files of agents.

python tests/golden/make_sessions.py NAME [NAME ...]

claude_code  by the schema; claude-code-log==1.7.0 validates each line with its models
codex        by the schema of openai/codex (protocol/src/protocol.rs, protocol/src/models.rs)
openhands    openhands-sdk==1.58.2: its events, as a list and as a folder of event files
autogen      autogen-core==0.7.5 and autogen-agentchat==0.7.5: LLMCallEvent, and TaskResult
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent / "sessions"
TIME = "2026-11-01T00:00:00.000Z"


def text(value):
    return [{"type": "text", "text": value}]


class Lines:
    """Lines of a session of Claude Code."""

    def __init__(self):
        self.lines = []

    def add(self, kind, uuid, parent, **fields):
        base = {"isSidechain": False, "userType": "external", "cwd": "/app", "sessionId": "s-1", "version": "2.0.76"}
        self.lines.append({"type": kind, "uuid": uuid, "parentUuid": parent, **base, "timestamp": TIME, **fields})

    def user(self, uuid, parent, content, **fields):
        self.add("user", uuid, parent, message={"role": "user", "content": content}, **fields)

    def assistant(self, uuid, parent, name, content, stop=None, model="claude-opus-4", **fields):
        message = {"id": name, "type": "message", "role": "assistant", "model": model, "content": content}
        message |= {"stop_reason": stop, "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 9}}
        self.add("assistant", uuid, parent, message=message, requestId=f"req-{name}", **fields)

    def result(self, uuid, parent, tool, content, **fields):
        block = {"type": "tool_result", "tool_use_id": tool, "content": content}
        self.user(uuid, parent, [block], toolUseResult={"stdout": "x"}, **fields)


def claude_code():
    """Parallel tools, a subagent, an error of the API, a rewind, a second model, a compaction, a broken last line."""
    made = Lines()
    made.lines.append({"type": "summary", "summary": "Count files", "leafUuid": "zz"})
    made.lines.append({"type": "file-history-snapshot", "messageId": "u1", "snapshot": {}, "isSnapshotUpdate": False})
    made.user("u1", None, "How many files are here?")
    made.add("attachment", "x1", "u1", attachment={"type": "todo_reminder"})
    made.assistant("a1", "x1", "m1", [{"type": "thinking", "thinking": "Look first.", "signature": "c2ln"}])
    made.assistant("a2", "a1", "m1", text("I look."))
    made.assistant("a3", "a2", "m1", [{"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}])
    made.assistant(
        "a4", "a3", "m1", [{"type": "tool_use", "id": "t2", "name": "Task", "input": {"prompt": "?"}}], "tool_use"
    )
    made.result("r1", "a3", "t1", "a b")
    made.user("s1", None, "Count them.", isSidechain=True, agentId="ag1")
    made.assistant("s2", "s1", "m2", text("Two."), "end_turn", "claude-haiku", isSidechain=True, agentId="ag1")
    made.result("r2", "a4", "t2", text("Two."))
    made.assistant("a5", "r2", "m3", text("There are two."), "end_turn")
    made.user("u2", "a5", "And hidden ones?")
    made.assistant("a6", "u2", "e1", text("API Error: 529"), "stop_sequence", "<synthetic>", isApiErrorMessage=True)
    made.assistant("a7", "u2", "m4", [{"type": "thinking", "thinking": "", "signature": "c2ln"}])
    made.assistant("a8", "a7", "m4", text("None."), "end_turn")
    made.user("u3", "a5", "And folders?")  # a rewind to the first answer
    made.assistant("a9", "u3", "m5", text("One fol"), "max_tokens")
    made.user("u4", "a9", "Go on.")
    made.assistant("b1", "u4", "m6", text("One."), "end_turn", "claude-sonnet")
    made.add("system", "c1", None, subtype="compact_boundary", content="Conversation compacted", logicalParentUuid="b1")
    made.user("c2", "c1", "Summary: two files.", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    made.user("c3", "c2", "Only shown.", isVisibleInTranscriptOnly=True)
    made.user("u5", "c3", "Thanks.")
    made.assistant("b2", "u5", "m7", text("You are welcome."), "end_turn")
    made.lines.append({"type": "queue-operation", "operation": "enqueue", "timestamp": TIME, "sessionId": "s-1"})
    from claude_code_log.factories.transcript_factory import create_transcript_entry

    for line in made.lines:
        if line["type"] in ("user", "assistant", "system", "summary"):
            create_transcript_entry(line)
    lines = "".join(json.dumps(line) + "\n" for line in made.lines)
    (HERE / "claude_code.jsonl").write_text(lines + '{"type":"user","uuid":"u9","parentUuid":"b2","mess')


def codex():
    """Tools, encrypted reasoning, a compaction with its history, a rollback, another model, and one without history."""

    def line(kind, **payload):
        return {"timestamp": TIME, "type": kind, "payload": payload}

    def message(role, value):
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": value}]}

    def item(value):
        return line("response_item", **value)

    def call(name, identity):
        return {"type": "function_call", "name": name, "arguments": '{"command":["ls"]}', "call_id": identity}

    def turn(model):
        return line("turn_context", cwd="/app", approval_policy="never", model=model, summary="auto")

    reasoning = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "Looking"}],
        "encrypted_content": "gA",
    }
    context = message("user", "<environment_context>\n  <cwd>/app</cwd>\n</environment_context>")
    lines = [
        line(
            "session_meta",
            id="c-1",
            timestamp=TIME,
            cwd="/app",
            cli_version="0.77.0",
            base_instructions={"text": "Be brief."},
        ),
        line("event_msg", type="task_started", turn_id="1"),
        turn("gpt-5-codex"),
        *map(item, [message("developer", "<permissions instructions>"), context, message("user", "How many files?")]),
        line("event_msg", type="user_message", message="How many files?"),
        *map(item, [reasoning, call("shell", "1"), call("shell", "2")]),
        line("event_msg", type="token_count", info=None),
        item({"type": "function_call_output", "call_id": "1", "output": "a b"}),
        item({"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "c"}]}),
        item({"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": "3"}),
        item({"type": "custom_tool_call_output", "call_id": "3", "output": "Done"}),
        item(message("assistant", "Two.")),
        line("event_msg", type="agent_message", message="Two."),
        item(message("user", "Wrong turn")),
        item(message("assistant", "Left.")),
        line("event_msg", type="thread_rolled_back", num_turns=1),
        turn("gpt-5-mini"),
        item(message("user", "And folders?")),
        item(message("assistant", "One.")),
        line(
            "compacted",
            message="",
            replacement_history=[context, message("user", "How many files?"), message("assistant", "Two.")],
        ),
        turn("gpt-5-codex"),
        item(message("user", "Thanks")),
        item(message("assistant", "Welcome.")),
        line("compacted", message="Two files, one folder."),
        item(message("user", "Bye")),
        item(message("assistant", "Bye.")),
    ]
    (HERE / "rollout-codex.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def openhands():
    """A batch of two actions, an error, a message, a condensation, and the end."""
    from openhands.sdk.context.view import View
    from openhands.sdk.event import (
        ActionEvent,
        AgentErrorEvent,
        Condensation,
        LLMConvertibleEvent,
        MessageEvent,
        ObservationEvent,
        SystemPromptEvent,
    )
    from openhands.sdk.llm import Message, MessageToolCall, TextContent
    from openhands.sdk.tool.builtins.think import ThinkAction, ThinkObservation

    def action(name, response, call, thought="", **fields):
        tool_call = MessageToolCall(id=call, name="think", arguments='{"thought": "t"}', origin="completion")
        return ActionEvent(
            id=name,
            thought=[TextContent(text=thought)] if thought else [],
            action=ThinkAction(thought="t"),
            tool_name="think",
            tool_call_id=call,
            tool_call=tool_call,
            llm_response_id=response,
            **fields,
        )

    def observation(name, call, of):
        seen = ThinkObservation.from_text(f"seen {call}")
        return ObservationEvent(id=name, tool_name="think", tool_call_id=call, observation=seen, action_id=of)

    def said(name, role, value, response=None):
        message = Message(role=role, content=[TextContent(text=value)])
        source = "agent" if role == "assistant" else "user"
        return MessageEvent(id=name, source=source, llm_message=message, llm_response_id=response)

    events = [
        SystemPromptEvent(id="e0", system_prompt=TextContent(text="Be brief."), tools=[]),
        said("e1", "user", "Think twice."),
        action("e2", "r1", "t1", "I think.", reasoning_content="Hm."),
        action("e3", "r1", "t2"),
        observation("e4", "t1", "e2"),
        observation("e5", "t2", "e3"),
        action("e6", "r2", "t3"),
        AgentErrorEvent(id="e7", tool_name="think", tool_call_id="t3", error="No."),
        said("e8", "assistant", "Done.", "r3"),
        Condensation(
            id="e9",
            forgotten_event_ids={"e2", "e3", "e4", "e5"},
            summary="It thought twice.",
            summary_offset=2,
            llm_response_id="rc",
        ),
        said("f0", "user", "More?"),
        said("f1", "assistant", "No.", "r4"),
    ]
    dumped = [json.loads(each.model_dump_json(exclude_none=True)) for each in events]
    (HERE / "openhands.json").write_text(json.dumps(dumped) + "\n")
    folder = HERE / "openhands" / "conversation-1" / "events"
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(dumped):
        (folder / f"event-{number:05}-{each['id']}.json").write_text(json.dumps(each))
    prompts = []
    for answer in ("e2", "e6", "e8", "f1"):
        before = events[: [each.id for each in events].index(answer)]
        messages = LLMConvertibleEvent.events_to_messages(View.from_events(before).events)
        prompts.append([[each.role, "".join(part.text for part in each.content)] for each in messages])
    (HERE / "openhands.truth").write_text(json.dumps(prompts) + "\n")


def autogen():
    """An agent with a tool, and a team of two agents with the replay client; the events of the first agent's client."""
    import asyncio
    import logging

    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core import EVENT_LOGGER_NAME, FunctionCall
    from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent, LLMStreamStartEvent, ToolCallEvent
    from autogen_core.models import CreateResult, RequestUsage
    from autogen_ext.models.replay import ReplayChatCompletionClient

    def count(folder: str) -> str:
        """Count files."""
        return "2"

    info = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    usage = RequestUsage(prompt_tokens=9, completion_tokens=3)
    call = CreateResult(
        finish_reason="function_calls",
        content=[FunctionCall(id="t1", name="count", arguments='{"folder": "/"}')],
        usage=usage,
        cached=False,
        thought="I count.",
    )

    async def results():
        client = ReplayChatCompletionClient([call, "There are two."], model_info=info)
        agent = AssistantAgent("counter", client, tools=[count], reflect_on_tool_use=True)
        yield await agent.run(task="How many files?")
        writer = AssistantAgent("writer", ReplayChatCompletionClient(["A poem.", "A better poem."], model_info=info))
        critic = AssistantAgent("critic", ReplayChatCompletionClient(["Too short."], model_info=info))
        yield await RoundRobinGroupChat([writer, critic], termination_condition=MaxMessageTermination(4)).run(
            task="Write."
        )

    async def dump():
        return [each.model_dump_json() async for each in results()]

    lines = asyncio.run(dump())
    (HERE / "autogen_results.jsonl").write_text("".join(line + "\n" for line in lines))
    logged = []
    logger = logging.getLogger(EVENT_LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.handlers = [
        type("Keep", (logging.Handler,), {"emit": lambda self, record: logged.append(str(record.msg))})()
    ]
    message = {"role": "assistant", "content": "There are two."}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    response = {"id": "c1", "object": "chat.completion", "created": 1, "model": "gpt-x", "choices": [choice]}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "user", "content": "How many files?"},
    ]
    schema = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
    logger.info(
        LLMCallEvent(messages=messages, response=response, prompt_tokens=9, completion_tokens=3, tools=[schema])
    )
    logger.info(ToolCallEvent(tool_name="count", arguments={"folder": "/"}, result="2"))
    logger.info(LLMStreamStartEvent(messages=messages))
    logger.info(LLMStreamEndEvent(response={"content": "Two."}, prompt_tokens=9, completion_tokens=3))
    (HERE / "autogen_events.jsonl").write_text("".join(line + "\n" for line in logged))


def ag2():
    """A person's agent asks an agent with scripted replies; the history is that of the one who asks."""
    from dataclasses import asdict

    from autogen import ConversableAgent

    replies = iter(
        [
            {
                "content": None,
                "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "count", "arguments": "{}"}}],
            },
            "There are two.",
            "Two again.",
        ]
    )
    person = ConversableAgent("person", llm_config=False, human_input_mode="NEVER", default_auto_reply="Sure?")
    person.register_function({"count": lambda: "2"})
    bot = ConversableAgent("bot", llm_config=False, human_input_mode="NEVER")
    bot.register_reply([ConversableAgent, None], lambda agent, **given: (True, next(replies)), position=0)
    result = person.initiate_chat(bot, message="How many files?", max_turns=3, silent=True)
    (HERE / "ag2.json").write_text(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
