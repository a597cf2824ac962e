"""Find out how a chat template changes conversations, by rendering small ones (`probe`).

Alignment does not rely on these results. They predict which templates will fork, trim or insert text, and `prepare`
prints them. No tokenizer is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from tracegrad.errors import TemplateError

_BODY, _NEXT, _RESULT = "qzbodyqz", "qznextqz", "qzresultqz"
_USER = {"role": "user", "content": "qzaskqz"}
_MORE = {"role": "user", "content": _NEXT}
_DAYS = ("2001-02-03", "2004-05-06")


class Renderer(Protocol):
    """A `Tokenizer` or a `Template`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any: ...


@dataclass(frozen=True)
class TemplateProbe:
    """The behaviour of one template with one set of variables. None if the template rejects the test conversation.

    Args:
        prompt_is_prefix: the generation prompt is a prefix of the finished turn. If not, a turn does not follow its
            prompt (for example, `<think>` is opened in the prompt and dropped in the turn).
        history_is_prefix: a finished turn is a prefix of the continued conversation. If not, every turn forks.
        tool_history_is_prefix: the same if a tool result follows.
        has_generation: `{% generation %}` marks the assistant's text.
        trims: whitespace around an assistant's text is removed.
        drops_thoughts: a `<think>` block is left out of earlier turns.
        inserts_think: an empty `<think>` block is written into a turn without one.
        prints_date: the prompt depends on the date.
        default_system: text is written before the first message if there is no system message.
        text_arguments: tool arguments that are not a JSON object are rendered unchanged.
        turn_end: the text after an assistant's text.
    """

    prompt_is_prefix: bool | None
    history_is_prefix: bool | None
    tool_history_is_prefix: bool | None
    has_generation: bool
    trims: bool | None
    drops_thoughts: bool | None
    inserts_think: bool | None
    prints_date: bool
    default_system: bool | None
    text_arguments: bool | None
    turn_end: str | None

    def warnings(self) -> list[str]:
        """Return the behaviour that costs tokens or branches, one line each."""
        warnings = {
            "the generation prompt is no prefix of the finished turn": self.prompt_is_prefix is False,
            "an earlier turn is rendered otherwise than when it was sampled: turns fork": self.history_is_prefix
            is False,
            "a turn before a tool result is rendered otherwise: turns fork": self.tool_history_is_prefix is False,
            "whitespace around answers is cut": self.trims,
            "thoughts are dropped from earlier turns": self.drops_thoughts,
            "an empty thought is inserted": self.inserts_think,
            "the date of the day is printed: pin it with strftime_now": self.prints_date,
            "a default system prompt is written": self.default_system,
        }
        return [text for text, applies in warnings.items() if applies]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def probe(template: Renderer, **kwargs: Any) -> TemplateProbe:
    """Render a dozen small conversations and compare the results.

    Args:
        template: a `Tokenizer` or a `Template`.
        kwargs: template variables that the real conversations have, such as enable_thinking.

    >>> from tracegrad.alignment.tokenizer import Template
    >>> found = probe(Template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|{% endfor %}"
    ...                        "{% if add_generation_prompt %}<assistant>{% endif %}"))
    >>> found.prompt_is_prefix, found.history_is_prefix, found.trims, found.turn_end
    (True, True, True, '|')
    """

    def text(messages: Sequence[Mapping[str, Any]], prompt: bool = False, **extra: Any) -> str | None:
        try:
            rendered = template.render(messages, None, prompt, **{"strftime_now": _DAYS[0], **kwargs, **extra})
        except TemplateError:
            return None
        return rendered.text

    def assistant(content: str, **extra: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": content, **extra}

    prompt_text, turn_text = text([_USER], prompt=True), text([_USER, assistant(_BODY)])
    continued = text([_USER, assistant(_BODY), _MORE])
    call = _tool_call_message({"a": 1})
    result = {"role": "tool", "content": _RESULT, "tool_call_id": "call00001", "name": "look"}
    tool_turn, with_result = text([_USER, call]), text([_USER, call, result])
    with_spaces = text([_USER, assistant(f"\n {_BODY} \n")])
    with_thought = text([_USER, assistant(f"<think>\nqzwhyqz\n</think>\n\n{_BODY}"), _MORE, assistant(_NEXT)])
    plain, other_day = text([_USER], prompt=True), text([_USER], prompt=True, strftime_now=_DAYS[1])
    closer = None if turn_text is None else turn_text.rpartition(_BODY)[2]
    return TemplateProbe(
        prompt_is_prefix=_is_prefix(turn_text, prompt_text),
        history_is_prefix=_is_prefix(continued, turn_text),
        tool_history_is_prefix=_is_prefix(with_result, tool_turn),
        has_generation=_has_generation(template),
        trims=None if with_spaces is None else f"\n {_BODY} \n" not in with_spaces,
        drops_thoughts=None if with_thought is None else "qzwhyqz" not in with_thought,
        inserts_think=None if turn_text is None or prompt_text is None else "<think>" in turn_text,
        prints_date=other_day is not None and plain != other_day,
        default_system=None if plain is None else _default_system(plain, text),
        text_arguments="qz not json" in (text([_USER, _tool_call_message("qz not json")]) or ""),
        turn_end=closer,
    )


def _tool_call_message(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def _is_prefix(text: str | None, prefix: str | None) -> bool | None:
    return None if text is None or prefix is None else text.startswith(prefix)


def _has_generation(template: Renderer) -> bool:
    return bool(getattr(getattr(template, "_core", None), "has_generation", False))


def _default_system(plain: str, text: Any) -> bool:
    """Return whether the template writes a default text in the position of a system message."""
    with_system = text([{"role": "system", "content": "qzsystemqz"}, _USER], prompt=True)
    if with_system is None or "qzsystemqz" not in with_system:
        return False
    header, _, after = with_system.partition("qzsystemqz")
    separator, actual = after.partition("qzaskqz")[0], plain.partition("qzaskqz")[0]
    is_framed = actual.startswith(header) and actual.endswith(separator)
    return is_framed and len(actual) > len(header) + len(separator)
