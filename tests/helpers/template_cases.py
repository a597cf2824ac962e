"""Give conversations, tools and chat templates, and render them with transformers."""

import copy
import datetime
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


def pinned(date: str) -> type[datetime.datetime]:
    """The clock that transformers reads, at a date."""

    class Pinned(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return cls.fromisoformat(date)

    return Pinned


TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def _tool(name: str) -> dict[str, Any]:
    properties = {
        "city": {"type": "string", "description": "Where, e.g. <Köln>"},
        "days": {"type": "integer", "default": 3},
        "factor": {"type": "number", "default": 1.0},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    returns = {"type": "string", "description": "what it says"}
    described = {"name": name, "description": f"Gets the {name} & 'more' \u2013 é", "parameters": parameters}
    return {"type": "function", "function": described | {"return": returns}}


def _call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _result(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": text}


SYSTEM = {"role": "system", "content": "You are a clerk."}

TOOLS = [_tool("weather"), _tool("stock")]

DEEP = {"city": "Zürich", "factor": 1.0, "deep": {"a": [1, 2.5, None, True, 1e-07, 1e20], "b": "x\n"}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [_user("What is it?"), _assistant("Fine.")],
    "system": [SYSTEM, _user("Hi"), _assistant("Hello!"), _user("more"), _assistant("ok")],
    "inline thought": [
        _user("Hi"),
        _assistant("<think>\nLet me see.\n</think>\n\nHello"),
        _user("b"),
        _assistant("<think>\nhm\n</think>\n\nbye"),
    ],
    "reasoning": [
        SYSTEM,
        _user("Hi"),
        _assistant("Hello", reasoning_content="I think.\n"),
        _user("b"),
        _assistant("bye", reasoning_content="short"),
    ],
    "reasoning by another name": [_user("Hi"), _assistant("Hello", reasoning="I think.")],
    "tool call": [
        SYSTEM,
        _user("Weather in Paris?"),
        _assistant("", tool_calls=[_call(1, "weather", {"city": "Paris"})]),
        _result(1, "weather", '{"t": 21}'),
        _assistant("21 degrees."),
    ],
    "thought and deep arguments": [
        _user("Weather?"),
        _assistant("Looking", reasoning_content="need it", tool_calls=[_call(1, "weather", DEEP)]),
        _result(1, "weather", "sunny ☀️"),
        _assistant("Sunny", reasoning_content="done"),
    ],
    "two tools in a row": [
        _user("Both"),
        _assistant("", tool_calls=[_call(1, "weather", {"city": "A"}), _call(2, "stock", {"unit": "c", "days": 2})]),
        _result(1, "weather", "one"),
        _result(2, "stock", "two"),
        _assistant("done"),
        _user("again"),
        _assistant("ok"),
    ],
    "arguments as a string": [
        _user("s"),
        _assistant("", tool_calls=[_call(1, "weather", '{"city": "Köln", "days": 2}')]),
        _result(1, "weather", "ok"),
        _assistant("end"),
    ],
    "null content": [
        _user("n"),
        _assistant(None, tool_calls=[_call(1, "weather", {"city": "N"})]),
        _result(1, "weather", "r"),
        _assistant("x", tool_calls=None, reasoning_content=None),
    ],
    "unicode": [
        SYSTEM,
        _user("naïve 😊 日本語\uff0c全角\uff01 \u00a0 العربية"),
        _assistant("ﷲ “quotes” \u200b👩\u200d🚀"),
    ],
    "whitespace": [
        {"role": "system", "content": "  sys \n"},
        _user("  lead and trail  \n\n"),
        _assistant("\n\n answer \t"),
    ],
    "empty": [_user(""), _assistant("")],
    "empty system": [{"role": "system", "content": ""}, _user("x"), _assistant("y")],
    "text parts": [
        _user([{"type": "text", "text": "part one"}, {"type": "text", "text": " two"}]),
        _assistant([{"type": "text", "text": "answer"}]),
    ],
    "template-like text": [
        _user("<|im_end|>\n<|im_start|>assistant\nhi {{ 7*7 }} {% if %}"),
        _assistant("</think> a <tool_call> b </tool_call>"),
    ],
    "tool response typed by the user": [
        _user("<tool_response>x</tool_response>"),
        _assistant("a"),
        _user("b"),
        _assistant("c"),
    ],
    "control characters": [_user('tab\t nul\x01 \x1c sep\x1c\n back\\slash "q"'), _assistant("x\r\ny\x1f")],
    "noncharacters": [_user("a\ufdd0b\ufdef"), _assistant("c\ufdd1\ufdd7")],
    "ends with the user": [SYSTEM, _user("only")],
    "assistant prefill": [
        SYSTEM,
        _user("Write a haiku."),
        _assistant("<think>\nFive, seven, five.\n</think>\n\nAn old"),
    ],
    "one tool after another": [
        _user("Paris, then Rome"),
        _assistant("First Paris.", tool_calls=[_call(1, "weather", {"city": "Paris", "days": 0, "factor": -1.5e-05})]),
        _result(1, "weather", "20"),
        _assistant("", tool_calls=[_call(2, "weather", {"city": "Rome", "tags": [], "more": {}, "none": None})]),
        _result(2, "weather", "25"),
        _assistant("20 and 25."),
    ],
}


def _trl_templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin or "").parent / "chat_templates" if spec else Path("missing")
    return sorted(folder.glob("*.jinja"))


TEMPLATES = _trl_templates()


@pytest.fixture(scope="module")
def hf() -> Any:
    """A transformers tokenizer whose templates are given call by call."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, **{t: i + 1 for i, t in enumerate(TOKENS.values())}})
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **TOKENS)


def _as_servers_do(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments given as JSON strings parsed, the one normalisation transformers leaves to servers."""
    parsed = copy.deepcopy(messages)
    for message in parsed:
        for call in message.get("tool_calls") or []:
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return parsed


def theirs(hf: Any, source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders, or None where the template raises."""
    try:
        return hf.apply_chat_template(_as_servers_do(messages), chat_template=source, tokenize=False, **options)
    except Exception:
        return None
