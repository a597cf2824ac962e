"""The makers of make_dumps.py for recorders of API calls, spans and messages; not run alone."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

MODEL = "policy-7b"


def art(talk):
    """A trajectory of choices, and one whose history was compacted."""
    from art.trajectories import History, Trajectory
    from openai.types.chat.chat_completion import Choice

    choices = [Choice.model_validate(talk.completion(turn)["choices"][0]) for turn in (0, 1)]
    whole = [talk.messages[0], choices[0], talk.messages[2], choices[1]]
    metrics = {"accuracy": 1.0, "solved": True}
    one = Trajectory(messages_and_choices=whole, reward=0.75, initial_policy_version=7, metrics=metrics)
    rows = [{"prompt": None, "ids": talk.sampled[k], "logprobs": talk.logprobs[k]} for k in (0, 1)]
    named = {"accuracy": 1.0, "solved": 1.0}
    truth = {"generations": rows, "reward": 0.75, "rewards": named, "policy_version": 7}
    yield one.model_dump(mode="json"), truth
    split = Trajectory(
        messages_and_choices=whole[:2],
        additional_histories=[History(messages_and_choices=[{"role": "user", "content": "Summary"}, choices[1]])],
        reward=0.75,
    )
    yield split.model_dump(mode="json"), {"generations": rows, "reward": 0.75, "contexts": [[0], [2]]}


def litellm_log(talk):
    """What LiteLLM hands to a logger for two calls of a server that answers as vLLM does."""
    import litellm

    seen, logged = [], threading.Event()

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(talk.completion(len(seen) % 2)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    def log(kwargs, *_):
        seen.append(kwargs["standard_logging_object"])
        logged.set()

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    litellm.success_callback = [log]
    for turn in (0, 1):
        logged.clear()
        litellm.completion(
            model=f"hosted_vllm/{MODEL}",
            api_base=f"http://127.0.0.1:{server.server_port}/v1",
            api_key="none",
            messages=talk.before(turn),
            temperature=0.7,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        assert logged.wait(60)
    for turn, payload in enumerate(seen):
        record = json.loads(json.dumps(payload, default=str))
        yield record, talk.truth([turn], temperature=[0.7], finish_reason=["stop"])


def openai_batch(talk):
    """Lines of a batch's output with a body of OpenAI's own types, one of them joined with its input line."""
    from openai.types.chat import ChatCompletion

    body = ChatCompletion.model_validate(talk.completion(0)).model_dump(mode="json")
    response = {"status_code": 200, "request_id": "r", "body": body}
    output = {"id": "batch_req_1", "custom_id": "request-4", "response": response, "error": None}
    yield output, talk.truth([0], id="request-4", finish_reason=["stop"])
    asked = {"model": MODEL, "messages": talk.before(0), "temperature": 0.7, "logprobs": True}
    line = {"custom_id": "request-4", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    yield {**line, **output}, talk.truth([0], id="request-4", temperature=[0.7])


def atif(talk):
    """A trajectory of atif's own models."""
    from atif import Agent, Metrics, Step, Trajectory

    steps = []
    for turn in (0, 1):
        numbers = {"prompt_token_ids": talk.prompts[turn], "completion_token_ids": talk.sampled[turn]}
        metrics = Metrics(**numbers, logprobs=talk.logprobs[turn], completion_tokens=len(talk.sampled[turn]))
        asked, said = (talk.messages[2 * turn + k]["content"] for k in (0, 1))
        steps.append(Step(step_id=2 * turn + 1, source="user", message=asked))
        steps.append(Step(step_id=2 * turn + 2, source="agent", message=said, metrics=metrics))
    agent = Agent(name="terminus-2", version="1", model_name=MODEL)
    whole = Trajectory(schema_version="ATIF-v1.8", trajectory_id="t4", agent=agent, steps=steps, extra={"reward": 0.75})
    yield whole.to_json_dict(), talk.truth(id="t4", reward=0.75)


def agent_lightning(talk):
    """Spans of Agent Lightning's own model and the triplets that its own adapter makes of them."""
    from agentlightning.adapter.triplet import LlmProxyTraceToTriplet
    from agentlightning.types import OtelResource, Span, TraceStatus

    def span(number, name, attributes):
        return Span(
            rollout_id="ro-4",
            attempt_id="at-1",
            sequence_id=number,
            trace_id="0" * 31 + "1",
            span_id=f"{number:016x}",
            parent_id=None,
            name=name,
            status=TraceStatus(status_code="OK"),
            attributes=attributes,
            events=[],
            links=[],
            start_time=float(number),
            end_time=float(number) + 0.5,
            context=None,
            parent=None,
            resource=OtelResource(attributes={}, schema_url=""),
        )

    def called(turn):
        attributes = {f"gen_ai.prompt.{k}.{key}": m[key] for k, m in enumerate(talk.before(turn)) for key in m}
        attributes |= {
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": talk.messages[2 * turn + 1]["content"],
            "gen_ai.completion.0.finish_reason": "stop",
            "gen_ai.response.id": f"chatcmpl-{turn}",
            "gen_ai.request.temperature": 0.7,
            "prompt_token_ids": talk.prompts[turn],
            "response_token_ids": talk.sampled[turn],
            "logprobs.content": json.dumps(talk.entries(turn)),
        }
        return attributes

    spans = [span(2 * k + 1, "openai.chat.completion", called(k)) for k in (0, 1)]
    reward = span(
        4, "agentlightning.annotation", {"agentlightning.reward.0.name": "x", "agentlightning.reward.0.value": 0.75}
    )
    traced = [one.model_dump(mode="json") for one in (spans[1], reward, spans[0])]
    more = {"id": "ro-4", "reward": 0.75, "temperature": [0.7, 0.7], "finish_reason": ["stop", "stop"]}
    yield {"rollout_id": "ro-4", "spans": traced}, talk.truth(**more)
    raw = [
        span(
            2 * k + 1,
            "raw_gen_ai_request",
            {
                "llm.hosted_vllm.id": f"chatcmpl-{k}",
                "llm.hosted_vllm.prompt_token_ids": repr(talk.prompts[k]),
                "llm.hosted_vllm.choices": repr([{"index": 0, "token_ids": talk.sampled[k], "stop_reason": None}]),
            },
        )
        for k in (0, 1)
    ]
    bare = [{"prompt": talk.prompts[k], "ids": talk.sampled[k], "logprobs": None} for k in (0, 1)]
    everything = [*raw, reward]
    yield (
        {"rollout_id": "ro-5", "spans": [one.model_dump(mode="json") for one in everything]},
        {"generations": bare, "reward": 0.75},
    )
    triplets = [one.model_dump(mode="json") for one in LlmProxyTraceToTriplet().adapt(everything)]
    yield {"rollout_id": "ro-6", "triplets": triplets}, {"generations": bare, "reward": 0.75}


def otel(talk):
    """A span as the SDK writes it, with the conventions' messages."""
    from opentelemetry.sdk.trace import TracerProvider

    span = TracerProvider().get_tracer("golden").start_span("chat policy-7b")
    parts = [{"role": m["role"], "parts": [{"type": "text", "content": m["content"]}]} for m in talk.before(1)]
    said = {"role": "assistant", "parts": [{"type": "text", "content": "390."}], "finish_reason": "stop"}
    span.set_attribute("gen_ai.input.messages", json.dumps(parts))
    span.set_attribute("gen_ai.output.messages", json.dumps([said]))
    span.set_attribute("gen_ai.request.temperature", 0.7)
    span.end()
    row = {"prompt": None, "ids": None, "logprobs": None, "content": "390."}
    yield json.loads(span.to_json()), {"generations": [row], "temperature": [0.7], "finish_reason": ["stop"]}


def langfuse(talk):
    """An observation of Langfuse's own API types."""
    import datetime

    from langfuse.api import ObservationV2

    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    record = ObservationV2(
        id="obs-4",
        trace_id="trace-4",
        start_time=began,
        project_id="p",
        type="GENERATION",
        input=talk.before(1),
        output=talk.messages[3],
        model=MODEL,
        model_parameters={"temperature": 0.7},
    )
    record = json.loads(record.json())
    row = {"prompt": None, "ids": None, "logprobs": None, "content": "390."}
    yield record, {"generations": [row], "id": "obs-4", "temperature": [0.7]}


def slime(talk):
    """`Sample.to_dict` after slime 624b824, a sample of two calls of the engine."""
    sample = {"group_index": 4, "index": 9, "prompt": talk.messages[:1], "tokens": talk.prompts[0] + talk.response}
    sample |= {
        "response": "",
        "response_length": len(talk.response),
        "label": "390",
        "reward": 0.75,
        "loss_mask": talk.mask,
    }
    sample |= {"weight_versions": ["7", "8"], "rollout_log_probs": talk.filled, "remove_sample": False}
    yield (
        {**sample, "status": "completed", "metadata": {}},
        talk.truth(id="9", group="4", reward=0.75, policy_version=[7, 8], finish_reason=[None, "stop"]),
    )
    one = {"tokens": talk.prompts[0] + talk.sampled[0], "response": talk.messages[1]["content"], "loss_mask": None}
    one |= {"response_length": len(talk.sampled[0]), "rollout_log_probs": talk.logprobs[0], "weight_versions": []}
    one |= {"reward": {"score": 1.0, "style": 0.25, "note": "x"}, "status": "truncated"}
    rewards = {"score": 1.0, "style": 0.25}
    yield {**sample, **one}, talk.truth([0], id="9", reward=None, rewards=rewards, finish_reason=["length"])


def rllm(talk):
    """`Trajectory.to_dict` and an episode of one trajectory after rLLM 9beb6e0."""
    steps = []
    for turn in (0, 1):
        numbers = {"prompt_ids": talk.prompts[turn], "logprobs": talk.logprobs[turn]}
        content = talk.messages[2 * turn + 1]["content"]
        output = {
            "text": content,
            "content": content,
            **numbers,
            "completion_ids": talk.sampled[turn],
            "finish_reason": "stop",
        }
        step = {**numbers, "response_ids": talk.sampled[turn], "chat_completions": talk.messages[: 2 * turn + 2]}
        steps.append(
            {**step, "model_response": content, "model_output": output, "reward": 0.0, "weight_version": 7 + turn}
        )
    whole = {"uid": "t4", "name": "solver", "task": {"question": "?"}, "steps": steps, "reward": 0.75, "info": {}}
    more = {"reward": 0.75, "policy_version": [7, 8], "finish_reason": ["stop", "stop"]}
    yield whole, talk.truth(id="t4", **more)
    episode = {"id": "task-4:2", "task": {}, "is_correct": True, "trajectories": [whole], "metrics": {}, "info": {}}
    yield episode, talk.truth(id="task-4:2", group="task-4", **more)


def tau_bench(talk):
    """A result after tau-bench 59a200c."""
    row = {"task_id": 4, "reward": 1.0, "info": {}, "traj": talk.messages, "trial": 2}
    yield row, talk.texts(id="4-2", group="4", reward=1.0)


def swe_agent(talk):
    """A trajectory file after SWE-agent 3ea751c; the first answer is a demonstration."""
    history = [{**m, "agent": "main", "message_type": "x"} for m in talk.messages]
    history[1]["is_demo"] = True
    row = {"prompt": None, "ids": None, "logprobs": None, "content": "390."}
    yield {"environment": "main", "trajectory": [], "history": history, "info": {}}, {"generations": [row]}


MORE = {
    m.__name__: m
    for m in (art, litellm_log, openai_batch, atif, agent_lightning, otel, langfuse, slime, rllm, tau_bench, swe_agent)
}
