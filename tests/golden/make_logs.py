"""Makes tests/golden/logs: what loggers and evaluation harnesses write, by their own code.

python tests/golden/make_logs.py NAME [NAME ...]

langfuse     langfuse==3.15.0: traces as `langfuse.api.trace.list` returns them (5.0 has no type of traces)
google_adk   google-adk==2.13.0: a session as `adk run --save_session` writes it, of two agents with scripted models
garak        garak==0.17.1: lines of a report
haystack     haystack-ai==3.4.1: messages of an agent
lighteval    lighteval==0.13.0: rows of details, as JSON
llama_stack  openai==2.30.0: recordings as llama-stack==0.7.3 stores them (`testing/api_recorder.py`), one per line
"""

import asyncio
import datetime
import gzip
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent / "logs"
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def langfuse():
    """Traces whose input and output are messages, or values of an application."""
    from langfuse.api.resources.commons.types.trace_with_details import TraceWithDetails

    system = {"role": "system", "content": "Add."}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    steps = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c"}]
    steps[1]["content"] = "4"
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    earlier = [USER, ANSWER, {"role": "user", "content": "3+3?"}]
    human, ai = {"type": "human", "content": "2+2?"}, {"type": "ai", "content": "4"}
    values = {
        "message": ([system, USER], ANSWER),
        "text": ({"messages": earlier}, "6"),
        "steps": ({"messages": [USER], "tools": [schema]}, [*steps, ANSWER]),
        "repeated": ([USER], {"messages": [USER, *steps, ANSWER]}),
        "response": ([USER], {"choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]}),
        "graph": ({"messages": [human]}, {"messages": [human, ai]}),
        "arguments": ({"args": [], "kwargs": {"question": "2+2?"}}, "4"),
        "texts": ("2+2?", "4"),
        "unanswered": ([USER], None),
        "echo": ([USER], [USER]),
        "another": ([USER], [{"role": "user", "content": "3+3?"}, ANSWER]),
    }
    lines = []
    for name, (given, output) in values.items():
        trace = TraceWithDetails(
            id=name,
            timestamp=datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
            name="agent",
            input=given,
            output=output,
            session_id="s",
            metadata={"grade": 0.5},
            tags=[],
            public=False,
            environment="default",
            html_path=f"/project/p/traces/{name}",
            latency=1.5,
            total_cost=0.0,
            observations=["o1", "o2"],
            scores=["s1"],
        )
        lines.append(trace.json() + "\n")
    (HERE / "langfuse_traces.jsonl").write_text("".join(lines))


def google_adk():
    """A call of a tool, an answer with ids and logprobs, another agent, and an answer after it."""
    from google.adk.agents import LlmAgent
    from google.adk.events import Event, EventActions
    from google.adk.models import BaseLlm, LlmResponse
    from google.adk.runners import Runner
    from google.adk.sessions import InMemorySessionService
    from google.genai import types

    def answer(*parts, model="desk-1", **fields):
        content = types.Content(role="model", parts=list(parts))
        return LlmResponse(content=content, model_version=model, finish_reason=types.FinishReason.STOP, **fields)

    def call(name, **args):
        return types.Part(function_call=types.FunctionCall(name=name, args=args))

    chosen = [("There", 7, -0.5), (" are", 8, -0.25), (" two.", 9, -1.0), ("<end>", 2, -0.125)]
    chosen = [types.LogprobsResultCandidate(token=a, token_id=b, log_probability=c) for a, b, c in chosen]
    script = [
        answer(types.Part(text="Let me look.", thought=True), types.Part(text="I look."), call("count", folder="/")),
        answer(types.Part(text="There are two."), logprobs_result=types.LogprobsResult(chosen_candidates=chosen)),
        answer(call("transfer_to_agent", agent_name="other")),
        answer(types.Part(text="Hello."), model="other-1"),
        answer(types.Part(text="Welcome back.")),
    ]

    class Scripted(BaseLlm):
        async def generate_content_async(self, llm_request, stream=False):
            yield script.pop(0)

    def count(folder: str) -> dict:
        """Count the files."""
        return {"files": 2}

    other = LlmAgent(name="other", model=Scripted(model="other"), disallow_transfer_to_parent=True)
    other.disallow_transfer_to_peers = True
    desk = LlmAgent(name="desk", model=Scripted(model="desk"), tools=[count], sub_agents=[other])

    async def run():
        service = InMemorySessionService()
        runner = Runner(app_name="app", agent=desk, session_service=service)
        await service.create_session(app_name="app", user_id="u", session_id="s", state={})
        for text in ("How many files?", "The other agent, please.", "Hello?"):
            message = types.Content(role="user", parts=[types.Part(text=text)])
            async for _ in runner.run_async(user_id="u", session_id="s", new_message=message):
                pass
        session = await service.get_session(app_name="app", user_id="u", session_id="s")
        mark = EventActions(state_delta={"grade": 0.5})
        await service.append_event(session, Event(author="system", invocation_id="mark", actions=mark))
        return await service.get_session(app_name="app", user_id="u", session_id="s")

    session = asyncio.run(run())
    (HERE / "adk.session.json").write_text(session.model_dump_json(indent=1, exclude_none=True, by_alias=True) + "\n")
    (HERE / "adk_snake.json.gz").write_bytes(gzip.compress(session.model_dump_json().encode(), 9, mtime=0))


def garak():
    """Two attempts with two generations each, as the lines of a report: before and after the detectors."""
    from garak.attempt import ATTEMPT_COMPLETE, ATTEMPT_STARTED, Attempt, Conversation, Message, Turn

    lines = [{"entry_type": "init", "garak_version": "0.17.1", "run": "r"}]
    for number, scores in enumerate(({"dan.DAN": [1.0, 0.0], "mitigation.Bypass": [0.25, None]}, {})):
        turns = [Turn("system", Message("Be kind.")), Turn("user", Message("Say it.", lang="en"))]
        attempt = Attempt(probe_classname="dan.DAN", status=ATTEMPT_STARTED, seq=number, goal="say it")
        attempt.uuid, attempt.prompt = f"attempt-{number}", Conversation(turns)
        attempt.outputs = ["It.", Message("No.") if number == 0 else Message(None)]
        lines.append(attempt.as_dict())
        attempt.status, attempt.detector_results = ATTEMPT_COMPLETE, scores
        lines.append(attempt.as_dict())
    lines.append({"entry_type": "eval", "probe": "dan.DAN", "detector": "dan.DAN", "passed": 1, "total_evaluated": 2})
    (HERE / "garak.report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def lighteval():
    """Details of a task with two samples of each prompt, of a task with one, and of a choice by likelihoods."""
    from dataclasses import asdict

    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.requests import Doc, SamplingMethod

    lines = []
    for name, texts, metric, method in (
        ("two", ["4", "5"], {"avg@n:n=2": 0.5}, SamplingMethod.GENERATIVE),
        ("one", ["4"], {"exact": 1.0, "f1": 0.5}, SamplingMethod.GENERATIVE),
        ("choice", [], {"acc": 1.0}, SamplingMethod.LOGPROBS),
    ):
        doc = Doc(query="2+2?", choices=["4"], gold_index=0, id="7", task_name=name, sampling_methods=[method])
        response = ModelResponse(input=[USER], text=texts)
        fields = {"doc": asdict(doc), "model_response": asdict(response), "metric": metric}  # DetailsLogger.Detail
        fields["doc"]["sampling_methods"] = [method.name]  # As in the Parquet files.
        lines.append(json.dumps(fields) + "\n")
    (HERE / "lighteval_details.jsonl").write_text("".join(lines))


def haystack():
    """The messages of an agent, as an application stores them: `ChatMessage.to_dict` of each."""
    from haystack.dataclasses import ChatMessage, ToolCall

    calls = [ToolCall(tool_name="add", arguments={"a": at}, id=f"c{at}") for at in range(2)]
    messages = [
        ChatMessage.from_system("Add."),
        ChatMessage.from_user("2+2?"),
        ChatMessage.from_assistant("I add.", tool_calls=calls, reasoning="Twice."),
        *(ChatMessage.from_tool(str(at), origin=call) for at, call in enumerate(calls)),
        ChatMessage.from_assistant("4", meta={"finish_reason": "stop"}),
    ]
    record = {"messages": [each.to_dict() for each in messages], "mark": 0.5}
    (HERE / "haystack.json").write_text(json.dumps(record) + "\n")


def llama_stack():
    """Recordings of a stream of Azure, a stream with a tool call, a whole response and a failed call."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    def stored(kind, fields, number):  # `_serialize_response` and `_normalize_response`
        fields = {"id": f"rec-{number}", "created": 0, "model": "m", **fields}
        part = kind.model_construct(**fields).model_dump(mode="json")
        return {"__type__": f"{kind.__module__}.{kind.__qualname__}", "__data__": part}

    def listed(*tokens):
        return {
            "content": [
                {"token": each, "bytes": [*each.encode()], "logprob": -0.5, "top_logprobs": []} for each in tokens
            ]
        }

    def chunk(delta, *tokens, end=None):
        choice = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": listed(*tokens) if tokens else None}
        return {"object": "chat.completion.chunk", "choices": [choice]}

    def call(at, **fields):
        return {"tool_calls": [{"index": 0, "function": fields, **({"id": at, "type": "function"} if at else {})}]}

    safe = {"hate": {"filtered": False, "severity": "safe"}}
    filtered = {
        "object": "",
        "model": "",
        "choices": [],
        "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": safe}],
    }
    usage = {"completion_tokens": 2, "prompt_tokens": 20, "total_tokens": 22}
    last = {"object": "chat.completion.chunk", "choices": [], "usage": usage}
    earlier = [USER, ANSWER, {"role": "user", "content": "3+3?"}]
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    streams = [
        (
            {"messages": earlier},
            [
                filtered,
                chunk({"role": "assistant", "content": ""}),
                chunk({"content": "It is"}, "It", " is"),
                chunk({"content": " 6"}, " 6"),
                chunk({}, end="stop"),
                last,
            ],
        ),
        (
            {"messages": [USER], "tools": [schema]},
            [
                chunk({"role": "assistant"}),
                chunk(call("c", name="add", arguments=""), "<add>"),
                chunk(call(None, arguments='{"a": 2}'), '{"a":', " 2}"),
                chunk({}, end="tool_calls"),
            ],
        ),
    ]
    bodies = [
        (body, [stored(ChatCompletionChunk, each, number) for each in chunks], {"is_streaming": True})
        for number, (body, chunks) in enumerate(streams)
    ]
    choice = {"index": 0, "finish_reason": "stop", "message": ANSWER, "logprobs": listed("4")}
    whole = stored(ChatCompletion, {"object": "chat.completion", "choices": [choice]}, 2)
    bodies.append(({"messages": [USER], "temperature": 0.5}, whole, {"is_streaming": False}))
    error = {"is_streaming": False, "is_exception": True, "exception_message": "Error code: 429"}
    bodies.append(({"messages": earlier}, None, error))
    lines = []
    for number, (body, answer, more) in enumerate(bodies):
        body = {"model": "m", "logprobs": True, **body}
        request = {"method": "POST", "url": "https://localhost/v1/chat/completions", "headers": {}, "body": body}
        request |= {"endpoint": "/v1/chat/completions", "model": "m", "provider_metadata": {}}
        record = {"test_id": f"tests/test_{number}.py", "request": request, "response": {"body": answer, **more}}
        lines.append(json.dumps({**record, "id_normalization_mapping": {}}) + "\n")
    (HERE / "llama_stack.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        globals()[name]()
