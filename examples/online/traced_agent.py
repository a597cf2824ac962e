"""An agent that traces itself with OpenTelemetry, as agents in production do, and scores its answers.

    pip install openai opentelemetry-sdk opentelemetry-exporter-otlp-proto-http 'tracegrad[receive]'
    tracegrad receive --out out/received &
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 \
        python examples/online/traced_agent.py --server http://127.0.0.1:8000 --tasks 16 --samples 4

Then `tracegrad doctor` and `tracegrad train` take out/received, with `--map.group prompt`.
"""

from __future__ import annotations

import argparse
import itertools
import json

import openai
from clerk import TOOLS, customers, look_up, right
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

tracer = trace.get_tracer("shop")


def ask(client: openai.OpenAI, messages: list[dict]) -> dict:
    """Ask the model, in a span by the conventions for generative AI. Ids and logprobs make it exact training data."""
    request = {"model": "policy", "messages": messages, "tools": list(TOOLS), "temperature": 1.0, "max_tokens": 64}
    with tracer.start_as_current_span("chat") as span:
        answer = client.chat.completions.create(**request, logprobs=True, extra_body={"return_token_ids": True})
        choice = answer.choices[0]
        message = choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        span.set_attributes(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": request["model"],
                "gen_ai.request.temperature": request["temperature"],
                "gen_ai.request.max_tokens": request["max_tokens"],
                "gen_ai.tool.definitions": json.dumps(TOOLS),
                "gen_ai.input.messages": json.dumps(messages),
                "gen_ai.output.messages": json.dumps([{**message, "finish_reason": choice.finish_reason}]),
                "prompt_token_ids": answer.prompt_token_ids,
                "response_token_ids": choice.token_ids,
                "logprobs.content": json.dumps([entry.model_dump() for entry in choice.logprobs.content]),
            }
        )
    return message


def answer_customer(client: openai.OpenAI, task: dict) -> None:
    """Answer one customer, in a span with the score of the answer."""
    messages = list(task["prompt"])
    with tracer.start_as_current_span("clerk", attributes={"task": messages[-1]["content"]}) as span:
        for _ in range(4):
            messages.append(ask(client, messages))
            for call in messages[-1].get("tool_calls", ()):
                with tracer.start_as_current_span(f"execute_tool {call['function']['name']}") as tool:
                    item = json.loads(call["function"]["arguments"]).get("item")
                    result = look_up(task["customer"], call["function"]["name"], item)
                    tool.set_attributes({"gen_ai.operation.name": "execute_tool", "item": str(item)})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if messages[-1]["role"] == "assistant":
                break
        span.set_attribute("reward", right(task["customer"], messages))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True, help="OpenAI-compatible server, such as vLLM")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="answers to each task")
    options = parser.parse_args()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    client = openai.OpenAI(base_url=f"{options.server}/v1", api_key="none")
    for task in itertools.islice(customers(), options.tasks):
        for _ in range(options.samples):
            answer_customer(client, task)
    provider.shutdown()  # sends the spans that wait


if __name__ == "__main__":
    main()
