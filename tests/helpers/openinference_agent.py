"""Ask a server with OpenAI's client, instrumented by OpenInference: `python openinference_agent.py SERVER`."""

import sys

import openai
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
OpenAIInstrumentor().instrument(tracer_provider=provider)
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
for number in range(4):
    with provider.get_tracer("agent").start_as_current_span("agent", attributes={"reward": number / 2}):
        client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "2+2?"}],
            temperature=1.0,
            max_tokens=8,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
provider.shutdown()
