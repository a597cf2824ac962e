"""Makes the golden files of strangers' formats by their producers' own code; run by an interpreter that has them.

    pip install langchain-core langchain-openai langsmith inspect-ai openai litellm
    python tests/golden/make_inputs.py tests/golden/inputs

No server is asked: an httpx transport answers as OpenAI's API does, with logprobs.
"""

import json
import sys
import tempfile
from pathlib import Path

import httpx
import langsmith
import litellm
import openai
from inspect_ai import Task
from inspect_ai import eval as run_eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from langchain_core.load import dumpd
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage, messages_to_dict
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import LangChainTracer
from langchain_openai import ChatOpenAI

OUT = Path(sys.argv[1])
TEXT = "It costs 3."
PIECES = ["It", " costs", " 3", "."]
CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}


def listed():
    return {
        "content": [
            {"token": piece, "logprob": -0.25 * (at + 1), "bytes": list(piece.encode()), "top_logprobs": []}
            for at, piece in enumerate(PIECES)
        ],
        "refusal": None,
    }


def completion(text=TEXT, call=None):
    message = {"role": "assistant", "content": None if call else text, "refusal": None}
    choice = {"index": 0, "finish_reason": "tool_calls" if call else "stop", "message": message, "logprobs": None}
    if call:
        message["tool_calls"] = [call]
    else:
        choice["logprobs"] = listed()
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def chunks():
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    for at, entry in enumerate(listed()["content"]):
        delta = {"content": entry["token"], **({"role": "assistant"} if at == 0 else {})}
        logprobs = {"content": [entry], "refusal": None}
        yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}


def answered(request):
    body = json.loads(request.content)
    if body.get("stream"):
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks()) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})
    wants_tool = body.get("tools") and body["messages"][-1]["role"] == "user"
    return httpx.Response(200, json=completion(call=CALL if wants_tool else None))


CLIENT = httpx.Client(transport=httpx.MockTransport(answered))
MODEL = ChatOpenAI(model="m", api_key="x", http_client=CLIENT, logprobs=True, temperature=0.5, max_retries=0)
SDK = openai.OpenAI(api_key="x", http_client=CLIENT, base_url="http://localhost/v1")


def jsonl(name, rows):
    (OUT / name).write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))


def of_langchain():
    tools = MODEL.bind_tools([TOOL])
    talk = [SystemMessage("You sell."), HumanMessage("A lamp?")]
    talk.append(tools.invoke(talk))
    talk.append(ToolMessage("3", tool_call_id="c1"))
    talk.append(tools.invoke(talk))
    more = {"score": 1.0, "thread_id": "th1"}
    jsonl("langchain_dict.jsonl", [{"messages": messages_to_dict(talk), **more}])
    jsonl("langchain_dumpd.jsonl", [{"messages": [dumpd(each) for each in talk], **more}])
    jsonl("langchain_model_dump.jsonl", [{"messages": [each.model_dump(mode="json") for each in talk], **more}])
    rows = {}

    class Kept(LangChainTracer):
        """LangSmith's tracer, with what it would send kept."""

        def _persist_run_single(self, run):
            pass

        def _update_run_single(self, run):
            rows[run.id] = json.loads(run.model_dump_json(exclude={"child_runs", "parent_run"}))

    chain = RunnableLambda(lambda text: [HumanMessage(text)]) | MODEL
    chain.invoke(
        "A lamp?", config={"callbacks": [Kept(client=langsmith.Client(api_key="x", api_url="http://localhost:1"))]}
    )
    jsonl("langsmith_runs.jsonl", rows.values())


def of_openai():
    asked = {"model": "m", "messages": [{"role": "user", "content": "A lamp?"}], "logprobs": True, "temperature": 0.5}
    said = SDK.chat.completions.create(**asked).model_dump()
    jsonl("openai_inputs_outputs.jsonl", [{"inputs": asked, "outputs": said, "feedback": "1"}])
    jsonl("openai_bodies.jsonl", [{"request_body": json.dumps(asked), "response_body": json.dumps(said), "ok": True}])
    jsonl("openai_messages_response.jsonl", [{"messages": asked["messages"], "temperature": 0.5, "response": said}])
    stream = [chunk.model_dump() for chunk in SDK.chat.completions.create(**asked, stream=True)]
    (OUT / "openai_chunks.json").write_text(json.dumps(stream))
    jsonl("openai_chunk_lists.jsonl", [{"request": asked, "response": stream}])


def of_litellm():
    kept = []

    class Log(litellm.integrations.custom_logger.CustomLogger):
        def log_success_event(self, kwargs, response_obj, start_time, end_time):
            kept.append((dict(kwargs), response_obj.model_dump()))

    litellm.callbacks = [Log()]
    said = {"model": "openai/m", "messages": [{"role": "user", "content": "A lamp?"}], "temperature": 0.5}
    litellm.completion(**said, mock_response=TEXT)
    import time

    for _ in range(100):
        if kept:
            break
        time.sleep(0.1)
    kwargs, response = kept[0]
    asked = {key: kwargs[key] for key in ("model", "messages", "temperature") if key in kwargs}
    jsonl("litellm_callback.jsonl", [{"kwargs": asked, "response_obj": response, "metadata": {"rating": 0.5}}])
    jsonl("litellm_standard.jsonl", [kwargs["standard_logging_object"]])


def of_inspect():
    choice = ChatCompletionChoice(
        message=ChatMessageAssistant(content=TEXT),
        stop_reason="stop",
        logprobs=Logprobs(
            content=[
                Logprob(token=piece, logprob=-0.25 * (at + 1), bytes=list(piece.encode()))
                for at, piece in enumerate(PIECES)
            ]
        ),
    )
    usage = ModelUsage(input_tokens=9, output_tokens=5, total_tokens=14)
    outputs = [ModelOutput(model="mockllm/model", choices=[choice], usage=usage) for _ in range(4)]
    task = Task(
        dataset=[Sample(id="lamp", input="A lamp?", target="3."), Sample(id="vase", input="A vase?", target="4.")],
        solver=generate(),
        scorer=match(location="end"),
        epochs=2,
    )
    for kind in ("eval", "json"):
        with tempfile.TemporaryDirectory() as folder:
            model = get_model("mockllm/model", custom_outputs=list(outputs))
            run_eval(task, model=model, log_dir=folder, log_format=kind, display="none", max_samples=1)
            [path] = [each for each in Path(folder).iterdir() if each.suffix == f".{kind}"]
            (OUT / f"inspect.{kind}").write_bytes(path.read_bytes())


OUT.mkdir(parents=True, exist_ok=True)
of_langchain()
of_openai()
of_litellm()
of_inspect()
