"""Fill a real trace store with its own package, run with the Python that has it.

python trace_stores.py phoenix|mlflow URL begin         # three traces; the last line is their ids
python trace_stores.py phoenix|mlflow URL score A B C   # a score of trace A, and one of a span of trace B
"""

import json
import os
import sys
import time

MESSAGES = "llm.{}_messages.0.message."


def mlflow_begin():
    import mlflow

    mlflow.set_experiment("shop")
    traces = []
    for number in range(3):
        with mlflow.start_span("agent", span_type="AGENT") as root:
            with mlflow.start_span("chat", span_type="CHAT_MODEL") as span:
                question = {"role": "user", "content": f"{number}+2?"}
                answer = {"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop", "index": 0}
                span.set_inputs({"model": "m", "messages": [question], "temperature": 0.5})
                span.set_outputs({"model": "m", "choices": [answer]})
            root.set_outputs("4")
        traces.append(root.trace_id.removeprefix("tr-"))
    mlflow.flush_trace_async_logging()
    return traces


def mlflow_score(first, second, _):
    import mlflow

    mlflow.log_feedback(trace_id=f"tr-{first}", name="correct", value=True, rationale="it is")
    mlflow.log_expectation(trace_id=f"tr-{first}", name="correct", value=0.0)  # not a score
    span = mlflow.get_trace(f"tr-{second}").data.spans[-1].span_id
    mlflow.log_feedback(trace_id=f"tr-{second}", span_id=span, name="correct", value=0.25)


def phoenix_begin(url):
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=Resource.create({"openinference.project.name": "shop"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/v1/traces")))
    tracer = provider.get_tracer("shop")
    traces = []
    for number in range(3):
        with tracer.start_as_current_span("agent", attributes={"openinference.span.kind": "AGENT"}) as root:
            values = {"openinference.span.kind": "LLM", "llm.model_name": "m"}
            values |= {"llm.invocation_parameters": json.dumps({"temperature": 0.5})}
            for side, role, text in (("input", "user", f"{number}+2?"), ("output", "assistant", "4")):
                values |= {MESSAGES.format(side) + "role": role, MESSAGES.format(side) + "content": text}
            with tracer.start_as_current_span("chat", attributes=values):
                pass
        traces.append(f"{root.get_span_context().trace_id:032x}")
    provider.shutdown()
    wait_for_spans(url, 6)
    return traces


def wait_for_spans(url, count):
    """The server stores spans after it has answered."""
    from phoenix.client import Client

    client = Client(base_url=url)
    while "shop" not in {each["name"] for each in client.projects.list()}:
        time.sleep(0.5)
    while len(client.spans.get_spans(project_identifier="shop")) < count:
        time.sleep(0.5)


def phoenix_score(url, first, second, _):
    from phoenix.client import Client

    client = Client(base_url=url)
    client.traces.add_trace_annotation(
        trace_id=first, annotation_name="correct", annotator_kind="HUMAN", score=1.0, sync=True
    )
    spans = client.spans.get_spans(project_identifier="shop", trace_ids=[second], parent_id=None)
    [span] = [each["context"]["span_id"] for each in spans if each["name"] == "chat"]
    client.spans.add_span_annotation(
        span_id=span, annotation_name="correct", annotator_kind="CODE", score=0.25, label="no", sync=True
    )


if __name__ == "__main__":
    kind, url, step, *traces = sys.argv[1:]
    os.environ["MLFLOW_TRACKING_URI"] = url
    if step == "begin":
        print(json.dumps(mlflow_begin() if kind == "mlflow" else phoenix_begin(url)))
    elif kind == "mlflow":
        mlflow_score(*traces)
    else:
        phoenix_score(url, *traces)
