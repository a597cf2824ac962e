"""Offer plain Python functions as tools: the calls of one message run together, each within a time limit.

Every failure (unknown name, wrong arguments, an exception, the time limit) becomes a tool message with the error and is
counted. Nothing is raised into the episode.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from tracegrad.errors import ArgumentError
from tracegrad.rollout.tool_schema import mismatch_reason, parameters, schema
from tracegrad.user_code import Failure, ProcessPool, UserCodeError, UserThread, await_within, failure_of

Message = dict[str, Any]
RESULT_CHARACTERS = 65536
CALLS = 64


class Tools:
    """Functions that a model may call.

    Args:
        functions: plain or asynchronous functions, or bound methods; their names must be unique.
        seconds: time limit of one call.
        run: where plain functions run. "thread": each in a new thread. "order": one after another in one thread, for
            functions that share mutable state. "process": in processes, which can be killed if a function hangs.
        text: converts a result to text; default: JSON, with strings unchanged.
        thread: thread for "order"; None starts one.

    `counts` counts the answered calls ("called") and the others by cause ("unknown", "arguments", "raised", "late",
    "died", "wrong", "too_many"). `failures` has the last failure of each cause.

    >>> def price(item: str) -> int:
    ...     '''Price of one item.'''
    ...     return 12
    >>> asyncio.run(Tools([price]).answer({"id": "c1", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}))
    {'role': 'tool', 'tool_call_id': 'c1', 'content': '12'}
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        *,
        seconds: float = 30.0,
        run: Literal["thread", "order", "process"] = "thread",
        text: Callable[[Any], str] | None = None,
        thread: UserThread | None = None,
    ) -> None:
        if run not in ("thread", "order", "process"):
            raise ArgumentError(f"TG-ROLLOUT-047: run is {run!r}. Pass 'thread', 'order' or 'process'.")
        self.functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            if name in self.functions:
                raise ArgumentError(
                    f"TG-ROLLOUT-048: two tools have the name {name}. Rename one, since models call tools by name."
                )
            self.functions[name] = function
        self.schemas = [schema(function) for function in self.functions.values()]
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, Failure] = {}
        self.seconds = seconds
        self._parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.schemas}
        self._text = text or _text
        plain = {
            name: function for name, function in self.functions.items() if not inspect.iscoroutinefunction(function)
        }
        self._processes = ProcessPool(plain, count=4) if run == "process" and plain else None
        self._order = (thread or UserThread()) if run == "order" else None

    async def answers(self, message: Mapping[str, Any], counts: Counter[str] | None = None) -> list[Message]:
        """Return the tool messages for all calls of an assistant message, in order; `counts` is updated too."""
        calls = list(enumerate(message.get("tool_calls") or []))
        if self._order is not None:
            return [await self.answer(call, number, counts) for number, call in calls]
        return await asyncio.gather(*(self.answer(call, number, counts) for number, call in calls))

    async def answer(self, call: Mapping[str, Any], number: int = 0, counts: Counter[str] | None = None) -> Message:
        """Return the tool message for one call."""
        kinds, content = await self._content(call, number)
        for counter in (self.counts, counts):
            if counter is not None:
                counter.update(kinds)
        return {"role": "tool", "tool_call_id": call.get("id") or "", "content": content}

    async def _content(self, call: Mapping[str, Any], number: int) -> tuple[list[str], str]:
        """Run a call; return the counters to increase and the content of the answer."""
        function = call.get("function") or {}
        name = str(function.get("name"))
        try:
            if number >= CALLS:
                raise _Refused("too_many", f"at most {CALLS} calls are answered in one message")
            arguments = self._arguments(name, function.get("arguments"))
            result = self._text(await self._run(name, arguments)).encode(errors="replace").decode()
        except _Refused as refusal:
            return self._failed(refusal.kind, Failure("wrong", str(refusal)))
        except UserCodeError as error:
            return self._failed(error.failure.kind, error.failure)
        except Exception as error:  # converting a user's result to text may raise anything
            return self._failed("raised", failure_of(error))
        if len(result) <= RESULT_CHARACTERS:
            return ["called"], result
        return ["called", "cut"], f"{result[:RESULT_CHARACTERS]}… ({len(result)} characters, cut)"

    def close(self) -> None:
        """Stop threads and processes."""
        if self._processes is not None:
            self._processes.close()
        if self._order is not None:
            self._order.close()

    def _failed(self, kind: str, failure: Failure) -> tuple[list[str], str]:
        self.failures[kind] = failure
        return [kind], json.dumps({"error": failure.message}, ensure_ascii=False)

    def _arguments(self, name: str, arguments: Any) -> dict[str, Any]:
        """Check the arguments of a call and return them as a dict."""
        if name not in self.functions:
            raise _Refused("unknown", f"there is no tool {name}; there are {', '.join(self.functions)}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise _Refused("arguments", f"the arguments of {name} are not JSON") from None
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise _Refused("arguments", f"the arguments of {name} are not a JSON object")
        expected = self._parameters[name]
        if extra := [key for key in arguments if key not in expected["properties"]]:
            raise _Refused("arguments", f"{name} has no argument {extra[0]}")
        if missing := [key for key in expected.get("required", ()) if key not in arguments]:
            raise _Refused("arguments", f"{name} lacks its argument {missing[0]}")
        for key, value in arguments.items():
            if reason := mismatch_reason(value, expected["properties"][key]):
                raise _Refused("arguments", f"{name}, argument {key}: {reason}")
        return arguments

    async def _run(self, name: str, arguments: dict[str, Any]) -> Any:
        function, label = self.functions[name], f"tool {name}"
        positional_only = [
            parameter.name
            for parameter in parameters(function)
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in arguments
        ]
        args = tuple(arguments.pop(key) for key in positional_only)
        if inspect.iscoroutinefunction(function):
            return await await_within(self.seconds, function(*args, **arguments), label)
        if self._processes is not None:
            return await self._processes.call(name, args, arguments, seconds=self.seconds)
        thread = self._order or UserThread()
        try:
            value = await thread.call(lambda: function(*args, **arguments), seconds=self.seconds, what=label)
        finally:
            if thread is not self._order:
                thread.close()
        return await await_within(self.seconds, value, label) if inspect.isawaitable(value) else value


class _Refused(Exception):
    """A call that is refused before its function runs."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
