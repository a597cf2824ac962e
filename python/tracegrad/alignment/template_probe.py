"""What a chat template does to a conversation, found by rendering small ones.

Here is `probe` and its result. Alignment never trusts a template to keep what was sampled; the probe says beforehand
which one will fork, trim or insert, and `prepare` prints it. No tokenizer is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from tracegrad.errors import TemplateError

_BODY, _NEXT, _RESULT = "qzbodyqz", "qznextqz", "qzresultqz"
_USER = {"role": "user", "content": "qzaskqz"}
_MORE = {"role": "user", "content": _NEXT}
_DAYS = ("2001-02-03", "2004-05-06")


class Renders(Protocol):
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
    """What one template does under one set of variables. None where the template refuses the conversation asked.

    Args:
        prompt_is_prefix: the generation prompt is a prefix of the finished turn; if not, a turn cannot be found behind
            its prompt (`<think>` is opened in the one and dropped in the other).
        history_is_prefix: a finished turn is a prefix of the conversation that goes on; if not, every turn forks.
        tool_history_is_prefix: the same where a tool result follows.
        has_generation: `{% generation %}` marks what the assistant writes.
        trims: whitespace around an assistant's text is cut.
        drops_thoughts: a `<think>` block is left out of earlier turns.
        inserts_think: an empty `<think>` block is written into a turn without one.
        prints_date: the prompt differs from day to day.
        default_system: text is written before the first message where there is no system message.
        text_arguments: tool arguments that are no JSON object are rendered as they are.
        closer: what is written behind an assistant's text.
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
    closer: str | None

    def warnings(self) -> list[str]:
        """What will cost tokens or branches, one line each."""
        found = {
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
        return [text for text, holds in found.items() if holds]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def probe(template: Renders, **kwargs: Any) -> TemplateProbe:
    """Renders a dozen small conversations and compares them.

    Args:
        template: a `Tokenizer` or a `Template`.
        kwargs: template variables that the real conversations have, such as enable_thinking.

    >>> from tracegrad.alignment.tokenizer import Template
    >>> found = probe(Template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|{% endfor %}"
    ...                        "{% if add_generation_prompt %}<assistant>{% endif %}"))
    >>> found.prompt_is_prefix, found.history_is_prefix, found.trims, found.closer
    (True, True, True, '|')
    """

    def text(messages: Sequence[Mapping[str, Any]], prompt: bool = False, **more: Any) -> str | None:
        try:
            rendered = template.render(messages, None, prompt, **{"strftime_now": _DAYS[0], **kwargs, **more})
        except TemplateError:
            return None
        return rendered.text

    def said(content: str, **more: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": content, **more}

    asked, whole = text([_USER], prompt=True), text([_USER, said(_BODY)])
    onward = text([_USER, said(_BODY), _MORE])
    call = _called({"a": 1})
    result = {"role": "tool", "content": _RESULT, "tool_call_id": "call00001", "name": "look"}
    tool, answered = text([_USER, call]), text([_USER, call, result])
    spaced = text([_USER, said(f"\n {_BODY} \n")])
    thought = text([_USER, said(f"<think>\nqzwhyqz\n</think>\n\n{_BODY}"), _MORE, said(_NEXT)])
    plain, other_day = text([_USER], prompt=True), text([_USER], prompt=True, strftime_now=_DAYS[1])
    behind = None if whole is None else whole.rpartition(_BODY)[2]
    return TemplateProbe(
        prompt_is_prefix=_starts(whole, asked),
        history_is_prefix=_starts(onward, whole),
        tool_history_is_prefix=_starts(answered, tool),
        has_generation=_has_generation(template),
        trims=None if spaced is None else f"\n {_BODY} \n" not in spaced,
        drops_thoughts=None if thought is None else "qzwhyqz" not in thought,
        inserts_think=None if whole is None or asked is None else "<think>" in whole,
        prints_date=other_day is not None and plain != other_day,
        default_system=None if plain is None else _default_system(plain, text),
        text_arguments="qz not json" in (text([_USER, _called("qz not json")]) or ""),
        closer=behind,
    )


def _called(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def _starts(whole: str | None, part: str | None) -> bool | None:
    return None if whole is None or part is None else whole.startswith(part)


def _has_generation(template: Renders) -> bool:
    return bool(getattr(getattr(template, "_core", None), "has_generation", False))


def _default_system(plain: str, text: Any) -> bool:
    """Whether something stands where a system message would."""
    given = text([{"role": "system", "content": "qzsystemqz"}, _USER], prompt=True)
    if given is None or "qzsystemqz" not in given:
        return False
    header, _, rest = given.partition("qzsystemqz")
    between, before = rest.partition("qzaskqz")[0], plain.partition("qzaskqz")[0]
    framed = before.startswith(header) and before.endswith(between)
    return framed and len(before) > len(header) + len(between)
