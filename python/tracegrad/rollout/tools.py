"""Plain Python functions as tools: the calls of one message run together, each within a time limit.

Whatever goes wrong (unknown name, wrong arguments, an exception, the time limit) is a tool message that says so, and is
counted; nothing is raised into the episode. Called by `env` and by whoever plays episodes of their own.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from tracegrad.errors import ArgumentError
from tracegrad.rollout.tool_schema import misfit, parameters, schema
from tracegrad.user_code import Failed, Failure, Processes, Thread, located, within

Message = dict[str, Any]
RESULT_CHARACTERS = 65536
CALLS = 64


class Tools:
    """Functions that a model may call.

    Args:
        functions: plain or asynchronous functions, or bound methods; none twice by one name.
        seconds: time limit of one call.
        run: where plain functions run: "thread", each in one of its own; "order", one after another in one thread, for
            functions that share what they change; "process", from which a hanging one can be removed.
        text: a result as text; JSON by default, a string as it is.
        thread: the one for "order"; one is started where it is None.

    `counts` holds how many calls were answered ("called") and what became of the others ("unknown", "arguments",
    "raised", "late", "died", "wrong", "too_many"); `failures` the last of each.

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
        thread: Thread | None = None,
    ) -> None:
        if run not in ("thread", "order", "process"):
            raise ArgumentError(f"run is {run!r}. Pass 'thread', 'order' or 'process'.")
        self.functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            if name in self.functions:
                raise ArgumentError(f"two tools are named {name}. A model calls them by name. Rename one.")
            self.functions[name] = function
        self.schemas = [schema(function) for function in self.functions.values()]
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, Failure] = {}
        self.seconds = seconds
        self._told = {one["function"]["name"]: one["function"]["parameters"] for one in self.schemas}
        self._text = text or _text
        plain = {name: each for name, each in self.functions.items() if not inspect.iscoroutinefunction(each)}
        self._processes = Processes(plain, count=4) if run == "process" and plain else None
        self._order = (thread or Thread()) if run == "order" else None

    async def answers(self, message: Mapping[str, Any], counts: Counter[str] | None = None) -> list[Message]:
        """The tool messages for all calls of an assistant message, in their order; `counts` are counted up as well."""
        calls = list(enumerate(message.get("tool_calls") or []))
        if self._order is not None:
            return [await self.answer(call, number, counts) for number, call in calls]
        return await asyncio.gather(*(self.answer(call, number, counts) for number, call in calls))

    async def answer(self, call: Mapping[str, Any], number: int = 0, counts: Counter[str] | None = None) -> Message:
        """The tool message for one call."""
        kinds, content = await self._content(call, number)
        for counter in (self.counts, counts):
            if counter is not None:
                counter.update(kinds)
        return {"role": "tool", "tool_call_id": call.get("id") or "", "content": content}

    async def _content(self, call: Mapping[str, Any], number: int) -> tuple[list[str], str]:
        """What becomes of a call, and what is answered."""
        function = call.get("function") or {}
        name = str(function.get("name"))
        try:
            if number >= CALLS:
                raise _Refused("too_many", f"at most {CALLS} calls are answered in one message")
            arguments = self._arguments(name, function.get("arguments"))
            result = self._text(await self._run(name, arguments)).encode(errors="replace").decode()
        except _Refused as refused:
            return self._failed(refused.kind, Failure("wrong", str(refused)))
        except Failed as failed:
            return self._failed(failed.failure.kind, failed.failure)
        except Exception as error:  # the text of a stranger's result
            return self._failed("raised", located(error))
        if len(result) <= RESULT_CHARACTERS:
            return ["called"], result
        return ["called", "cut"], f"{result[:RESULT_CHARACTERS]}… ({len(result)} characters, cut)"

    def close(self) -> None:
        """Ends threads and processes."""
        if self._processes is not None:
            self._processes.close()
        if self._order is not None:
            self._order.close()

    def _failed(self, kind: str, failure: Failure) -> tuple[list[str], str]:
        self.failures[kind] = failure
        return [kind], json.dumps({"error": failure.words}, ensure_ascii=False)

    def _arguments(self, name: str, given: Any) -> dict[str, Any]:
        """The arguments of a call, as the function takes them."""
        if name not in self.functions:
            raise _Refused("unknown", f"there is no tool {name}; there are {', '.join(self.functions)}")
        if isinstance(given, str):
            try:
                given = json.loads(given or "{}")
            except (ValueError, RecursionError):
                raise _Refused("arguments", f"the arguments of {name} are not JSON") from None
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise _Refused("arguments", f"the arguments of {name} are not a JSON object")
        told = self._told[name]
        if more := [key for key in given if key not in told["properties"]]:
            raise _Refused("arguments", f"{name} has no argument {more[0]}")
        if missing := [key for key in told.get("required", ()) if key not in given]:
            raise _Refused("arguments", f"{name} lacks its argument {missing[0]}")
        for key, value in given.items():
            if reason := misfit(value, told["properties"][key]):
                raise _Refused("arguments", f"{name}, argument {key}: {reason}")
        return given

    async def _run(self, name: str, arguments: dict[str, Any]) -> Any:
        function, what = self.functions[name], f"tool {name}"
        alone = [one.name for one in parameters(function) if one.kind is one.POSITIONAL_ONLY and one.name in arguments]
        args = tuple(arguments.pop(key) for key in alone)
        if inspect.iscoroutinefunction(function):
            return await within(self.seconds, function(*args, **arguments), what)
        if self._processes is not None:
            return await self._processes.call(name, args, arguments, seconds=self.seconds)
        thread = self._order or Thread()
        try:
            value = await thread.call(lambda: function(*args, **arguments), seconds=self.seconds, what=what)
        finally:
            if thread is not self._order:
                thread.close()
        return await within(self.seconds, value, what) if inspect.isawaitable(value) else value


class _Refused(Exception):
    """A call that no function gets to see."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
