"""Chat templates beside transformers' own rendering, the laws of provenance, and templates that misbehave."""

import collections
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from template_cases import (
    CONVERSATIONS,
    DEEP,
    TEMPLATES,
    TOKENS,
    TOOLS,
    _assistant,
    _user,
    hf,  # noqa: F401
    theirs,
)
from tracegrad.alignment.tokenizer import FIELDS, Rendered, Template
from tracegrad.errors import ArgumentError, TemplateError

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "model" / "chat_template.jinja"
QWEN = [path for path in TEMPLATES if path.name.startswith("qwen")]


def _ours(template: Template, messages: list[dict[str, Any]], **options: Any) -> Rendered | None:
    try:
        return template.render(messages, **options)
    except TemplateError:
        return None


def _check_provenance(rendered: Rendered, messages: list[dict[str, Any]]) -> None:
    size = len(rendered.text.encode())
    bounds = np.stack([rendered.start, rendered.end], axis=1).ravel()
    assert np.all(np.diff(bounds) >= 0)
    assert np.all(rendered.start < rendered.end)
    assert size >= (bounds[-1] if len(bounds) else 0)
    for message, field, text in rendered.pieces():
        if field != "content":
            continue
        content = messages[message]["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        written = [*parts, *(json.dumps(part, ensure_ascii=False)[1:-1] for part in parts)]
        assert any(text in part for part in written), (message, text)


def _compare(hf: Any, path: Path, options: list[dict[str, Any]]) -> int:
    """Renders every conversation both ways; returns how many were equal. They may refuse what we render, not we."""
    source = path.read_text(encoding="utf-8")
    template = Template(source, TOKENS)
    equal = 0
    for name, messages in CONVERSATIONS.items():
        for option in options:
            expected = theirs(hf, source, messages, **option)
            if expected is None:
                continue
            rendered = _ours(template, messages, **option)
            assert rendered is not None, (path.name, name, option)
            assert rendered.text == expected, (path.name, name, option)
            assert rendered.exact_provenance, (path.name, name, option)
            _check_provenance(rendered, messages)
            equal += 1
    return equal


@pytest.mark.parametrize("path", [*QWEN, EXAMPLE], ids=lambda path: path.stem)
def test_qwen_templates_and_the_examples_render_as_transformers_renders_them(hf: Any, path: Path) -> None:
    thoughts: list[dict[str, Any]] = [{}, {"enable_thinking": False}] if "enable_thinking" in path.read_text() else [{}]
    options = [
        {"tools": tools, "add_generation_prompt": prompt, **thought}
        for tools in (None, TOOLS)
        for prompt in (False, True)
        for thought in thoughts
    ]
    assert _compare(hf, path, options) >= 12 * len(options)


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path not in QWEN], ids=lambda path: path.stem)
def test_other_templates_of_trl_render_as_transformers_renders_them(hf: Any, path: Path) -> None:
    options: list[dict[str, Any]] = [{"add_generation_prompt": True}, {"tools": TOOLS}]
    # Two for the vision templates, which take lists of parts and nothing else.
    assert _compare(hf, path, options) >= 2


@pytest.mark.parametrize("path", [p for p in TEMPLATES if "generation %}" in p.read_text()], ids=lambda path: path.stem)
def test_generation_ranges_are_those_of_transformers(path: Path) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = path.read_text(encoding="utf-8")
    compiled, template = utils._compile_jinja_template(source), Template(source, TOKENS)
    seen = 0
    for name in ("unicode", "reasoning", "noncharacters", "text parts"):
        messages = CONVERSATIONS[name]
        rendered = _ours(template, messages)
        if rendered is None:
            continue
        chat = utils._alias_reasoning_fields(messages)
        text, ranges = utils._render_with_assistant_indices(compiled, chat, None, None, False, **TOKENS)
        assert rendered.text == text
        data = text.encode()
        chars = [[len(data[:start].decode()), len(data[:end].decode())] for start, end in rendered.generation]
        assert chars == [list(pair) for pair in ranges]
        seen += len(chars)
    assert template.has_generation
    assert seen > 0


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)

texts = st.text(st.sampled_from("ab \n\té😊<>|/\ufdd0\ufdd1\ufdd5\ufdefthinktool_"), max_size=24)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=6))
def test_whatever_the_messages_hold_spans_are_their_text_and_no_mark_leaks(conversation: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in conversation]
    rendered = Template(CHATML).render(messages)
    assert rendered.text == "".join(f"<|im_start|>{r}\n{t}<|im_end|>\n" for r, t in conversation)
    assert rendered.exact_provenance
    assert rendered.pieces() == [(i, "content", text) for i, (_, text) in enumerate(conversation) if text]


@pytest.mark.parametrize("path", QWEN, ids=lambda path: path.stem)
def test_a_final_answer_is_found_whole(path: Path) -> None:
    messages = [_user("  q "), _assistant("the answer"), _user("r"), _assistant("It is 7.\n- ünï")]
    rendered = Template(path.read_text(encoding="utf-8"), TOKENS).render(messages)
    assert (3, "content", "It is 7.\n- ünï") in rendered.pieces()
    assert (1, "content", "the answer") in rendered.pieces()


def test_calls_reasoning_and_schemas_have_fields_of_their_own() -> None:
    path = next(path for path in QWEN if path.stem == "qwen3")
    rendered = Template(path.read_text(encoding="utf-8"), TOKENS).render(
        CONVERSATIONS["thought and deep arguments"], TOOLS
    )
    found = {(message, field): text for message, field, text in rendered.pieces()}
    assert json.loads(rendered.text[rendered.text.index("<tools>\n") + 8 :].split("\n")[0]) == TOOLS[0]
    schemas = [json.loads(text) for message, field, text in rendered.pieces() if field == "tool_schema"]
    assert schemas == TOOLS
    assert found[1, "reasoning"] == "need it"
    assert json.loads(found[1, "tool_call"]) == DEEP
    assert (found[2, "content"], found[3, "content"], found[3, "reasoning"]) == ("sunny ☀️", "Sunny", "done")


def test_a_template_that_cuts_strings_says_that_provenance_was_searched() -> None:
    template = Template("{% for m in messages %}[{{ m.content[2:] }}]{{ m.content|length }};{% endfor %}")
    rendered = template.render([_user("hello"), _user("world")])
    assert rendered.text == "[llo]5;[rld]5;"
    assert not rendered.exact_provenance


def test_one_message_that_marks_would_disturb_does_not_cost_the_others_their_provenance() -> None:
    source = "{% for m in messages %}[{{ m.content if m.role == 'user' else m.content|length }}]{% endfor %}"
    rendered = Template(source).render([_user("hello"), _assistant("four"), _user("world")])
    assert rendered.text == "[hello][4][world]"
    assert [piece for piece in rendered.pieces() if piece[0] != 1] == [(0, "content", "hello"), (2, "content", "world")]
    assert not rendered.exact_provenance


def test_an_input_that_holds_every_noncharacter_is_rendered_and_searched() -> None:
    text = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    rendered = Template(CHATML).render([_user(text), _assistant("ok")])
    assert rendered.pieces() == [(0, "content", text), (1, "content", "ok")]
    assert not rendered.exact_provenance


def test_trimmed_whitespace_is_no_content() -> None:
    rendered = Template("{% for m in messages %}[{{ m.content|trim }}\n]{% endfor %}").render(
        [_user(" a \n"), _user("b")]
    )
    assert rendered.text == "[a\n][b\n]"
    assert rendered.pieces() == [(0, "content", "a"), (1, "content", "b")]


@pytest.mark.parametrize("source", ["{% if %}", "{% nope %}", "{% endfor %}", "{{ 'a }}", "{% generation %}"])
def test_a_template_that_is_no_jinja_does_not_compile(source: str) -> None:
    with pytest.raises(TemplateError, match=r"TG-TEMPLATE-0(04|12)"):
        Template(source)


def test_long_conversations_have_fuel_enough() -> None:
    path = next(path for path in QWEN if path.stem == "qwen3")
    messages = [message for _ in range(3000) for message in (_user("q"), _assistant("a"))]
    text = Template(path.read_text(encoding="utf-8"), TOKENS).render_text(messages)
    assert text.count("<|im_start|>") == 6000


def test_the_clock_can_be_pinned() -> None:
    template = Template("{{ strftime_now('%d %b %Y') }}|{{ messages[0].content }}")
    assert template.render([_user("x")], strftime_now="2025-03-07").text == "07 Mar 2025|x"
    today = time.strftime("%d %b %Y")
    assert template.render_text([_user("x")]).split("|")[0] in (today, time.strftime("%d %b %Y"))
    with pytest.raises(ArgumentError, match="TG-TEMPLATE-010"):
        template.render([_user("x")], strftime_now="yesterday")


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        (["hi"], {}, r"TG-TEMPLATE-002.*0"),
        ([_user(float("nan"))], {}, "TG-BORDER-010"),
        ([_user("\ud83d")], {}, "TG-BORDER-010"),
        ([_user({1, 2})], {}, "TG-BORDER-009"),
        ([_user("x")], {"documents": [{1, 2}]}, r"TG-BORDER-009.*template.*variables"),
    ],
)
def test_what_is_not_json_is_refused_with_its_place(messages: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Template(CHATML).render(messages, **options)


def test_render_text_is_the_text_of_render() -> None:
    template = Template(CHATML)
    messages = CONVERSATIONS["two tools in a row"]
    assert template.render_text(messages, TOOLS) == template.render(messages, TOOLS).text


def test_field_numbers_are_indices_of_their_names() -> None:
    assert FIELDS == ("content", "tool_call", "reasoning", "tool_schema")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), st.lists(VALUES, min_size=1, max_size=4))
def test_objects_are_rendered_as_their_json_text_is(values: list[Any], schemas: list[Any]) -> None:
    """Also where schemas before differ from these in nothing but 1 and 1.0, or 0.0 and -0.0."""
    template = Template("{{ messages[0].content | tojson }} {{ tools | tojson }} {{ more | tojson }}")
    for value in values:
        floats: list[Any] = [float(one) if type(one) is int else one for one in schemas]
        others: list[list[Any]] = [schemas, floats, [0.0], [-0.0], [0]]
        for tools in others:
            messages = [_user([value])]
            text = json.dumps(messages), json.dumps(tools), False, json.dumps({"more": [value]})
            assert template.render_text(messages, tools, more=[value]) == template._core.render_text(*text)


def test_tools_that_changed_are_rendered_as_they_are_now() -> None:
    """The list is the same object, the schema in it another."""
    template = Template("{{ tools | tojson }}")
    tools: list[Any] = [{"name": "a", "tags": ("x", "y")}]
    assert template.render_text([_user("")], tools) == '[{"name": "a", "tags": ["x", "y"]}]'
    tools[0]["tags"] = ["x", "z"]
    assert template.render_text([_user("")], tools) == '[{"name": "a", "tags": ["x", "z"]}]'
    tools[0] = collections.OrderedDict(tools[0])
    assert template.render_text([_user("")], tools) == '[{"name": "a", "tags": ["x", "z"]}]'
