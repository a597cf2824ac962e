"""Makes tests/golden/logs: what loggers and evaluation harnesses write, by their own code.

python tests/golden/make_logs.py NAME [NAME ...]

langfuse     langfuse==3.15.0: traces as `langfuse.api.trace.list` returns them (5.0 has no type of traces)
"""

import datetime
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


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        globals()[name]()
