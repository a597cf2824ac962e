"""Tools: schemas equal transformers', and whatever goes wrong is a message that says so and a count."""

import asyncio
import json
import threading
import time
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from stand_in import until
from tracegrad.errors import ArgumentError
from tracegrad.rollout import Tools, schema


def plain(item: str, pieces: int, price: float, fresh: bool):
    """Buys something.

    Args:
        item: its name
        pieces: how many
        price: of one,
            in euros
        fresh: whether: fresh
    """


def defaults(item: str, pieces: int = 1, note: str | None = None) -> int:
    """Price of one item.

    More words about it.

    Args:
        item: The item.
        pieces: How many (choices: [1, 2, 3])
        note: A note (choices: ["tea ", "coffee"])

    Returns:
        The price.
    """
    return 1


def nested(items: list[dict[str, list[int]]], pair: tuple[int, str], any: Any, free: dict, bare: list):
    """Nests.

    Args:
        items: some
        pair: two
        any: thing
        free: form
        bare: list
    """


def choices(
    kind: Literal["price", "stock"],
    mixed: Literal["a", 1, None],
    old: Optional[Literal["x"]] = None,  # noqa: UP045
):
    """Chooses.

    Args:
        kind: of question
        mixed: types
        old: style
    """


def unions(a: int | str, b: Union[int, list[str]], c: Optional[int | float] = None, d: list | tuple = ()):  # noqa: UP007, UP045
    """Unites.

    Args:
        a: one
        b: other
        c: third
        d: fourth

    Raises:
        ValueError: never
    """


def nothing():
    """Takes nothing."""


class Shop:
    def price(self, item: str) -> int:
        """Price in the shop.

        Args:
            item: its name
        """
        return len(item)


FUNCTIONS = [plain, defaults, nested, choices, unions, nothing, Shop().price]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_schemas_are_those_of_transformers(function):
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)
    assert schema(function) == theirs


def test_what_transformers_refuses_for_want_of_words_is_told_without_them():
    def bare(item: str, other=3):
        return item

    told = schema(bare)["function"]
    assert told["description"] == ""
    assert told["parameters"] == {
        "type": "object",
        "properties": {"item": {"type": "string"}, "other": {}},
        "required": ["item"],
    }


@pytest.mark.parametrize(
    ("hint", "code"),
    [
        ("set[int]", "045"),
        ("tuple[int, ...]", "045"),
        ("tuple[int]", "045"),
        ("Literal[b'x']", "046"),
        ("Missing", "042"),
    ],
)
def test_hints_without_a_schema_are_refused_by_name(hint, code):
    space = {"Literal": Literal}
    exec(f"def wrong(item: {hint!r}): ...", space)
    with pytest.raises(ArgumentError, match=f"TG-ROLLOUT-{code}") as raised:
        schema(space["wrong"])
    assert "tool wrong" in str(raised.value)


def test_arguments_without_names_are_refused():
    def wrong(*items: str): ...

    with pytest.raises(ArgumentError, match=r"TG-ROLLOUT-043.*wrong"):
        schema(wrong)


def called(tools, *calls):
    """The contents that tool calls are answered with."""
    told = [
        {"id": f"c{number}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    answers = asyncio.run(tools.answers({"role": "assistant", "tool_calls": told}))
    assert [one["tool_call_id"] for one in answers] == [one["id"] for one in told]
    assert all(one["role"] == "tool" for one in answers)
    return [one["content"] for one in answers]


def price(item: str, pieces: int = 1) -> float:
    """Price."""
    if item == "lamp":
        return 12.5 * pieces
    raise KeyError(item)


async def stock(item: str) -> dict:
    """Stock."""
    await asyncio.sleep(0)
    return {"stock": 3, "item": item}


@pytest.mark.parametrize("run", ["thread", "order", "process"])
def test_calls_are_answered_wherever_they_run(run):
    tools = Tools([price, stock], run=run)
    arguments = [("price", '{"item": "lamp", "pieces": 2}'), ("stock", '{"item": "châle"}'), ("price", {"item": "x"})]
    answers = called(tools, *arguments)
    assert answers == ["25.0", '{"stock": 3, "item": "châle"}', '{"error": "KeyError: \'x\'"}']
    assert tools.counts == {"called": 2, "raised": 1}
    assert tools.failures["raised"].location.endswith("in price")
    assert "test_rollout_tools.py" in tools.failures["raised"].location
    tools.close()


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "words"),
    [
        ("cost", "{}", "unknown", "there is no tool cost; there are price, stock"),
        ("price", "{", "arguments", "the arguments of price are not JSON"),
        ("price", "[" * 100_000, "arguments", "the arguments of price are not JSON"),
        ("price", "[1]", "arguments", "the arguments of price are not a JSON object"),
        ("price", "{}", "arguments", "price lacks its argument item"),
        ("price", '{"item": "a", "colour": 1}', "arguments", "price has no argument colour"),
        ("price", '{"item": 3}', "arguments", "price, argument item: 3 is not of type string"),
        ("price", '{"item": "a", "pieces": true}', "arguments", "price, argument pieces: True is not of type integer"),
        (None, None, "unknown", "there is no tool None; there are price, stock"),
    ],
)
def test_wrong_calls_are_told_and_counted(name, arguments, kind, words):
    tools = Tools([price, stock])
    assert json.loads(called(tools, (name, arguments))[0]) == {"error": words}
    assert tools.counts == {kind: 1}


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (1, float, True),
        (True, float, False),
        (None, int | None, True),
        (None, int, False),
        ("b", Literal["a", "b"], True),
        (1, Literal["a", True], False),
        ([1, "a"], list[int], False),
        ({"a": [1]}, dict[str, list[int]], True),
        ({"a": ["1"]}, dict[str, list[int]], False),
        ([1, "a"], tuple[int, str], True),
        (["a"], int | list[str], True),
        ([1], int | list[str], False),
    ],
)
def test_values_are_held_to_their_hints(value, hint, fits):
    def take(value):
        return "taken"

    take.__annotations__ = {"value": hint}
    assert called(Tools([take]), ("take", {"value": value}))[0].startswith("taken") is fits


def test_calls_of_one_message_run_together():
    both = threading.Barrier(2, timeout=60)

    def meet(n: int) -> int:
        """Meets the other."""
        both.wait()
        return n

    assert called(Tools([meet]), ("meet", {"n": 1}), ("meet", {"n": 2})) == ["1", "2"]


def test_calls_in_order_run_in_one_thread_one_after_another():
    threads, running = [], []

    def step(n: int) -> int:
        """Steps."""
        threads.append(threading.get_ident())
        running.append(n)
        time.sleep(0.01)
        assert running.pop() == n
        return n

    assert called(Tools([step], run="order"), *(("step", {"n": n}) for n in range(4))) == ["0", "1", "2", "3"]
    assert len(set(threads)) == 1


over, ended = threading.Event(), []


def hang(seconds: float) -> str:
    """Hangs, until that is over."""
    over.wait(seconds)
    ended.append(seconds)
    return "late"


async def hang_softly(seconds: float) -> str:
    """Hangs, and swallows its cancellation."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
    ended.append(seconds)
    return "late"


@pytest.mark.parametrize(
    ("run", "function"), [("thread", hang), ("order", hang), ("process", hang), ("thread", hang_softly)]
)
def test_a_late_tool_is_told_counted_and_located(run, function):
    over.clear()
    ended.clear()
    tools = Tools([function], seconds=1.0, run=run)
    assert json.loads(called(tools, (function.__name__, {"seconds": 99.0}))[0])["error"].endswith("longer than 1 s")
    assert ended == []  # nobody has waited for it
    over.set()
    if function is hang and run != "process":
        asyncio.run(until(lambda: ended))  # before the next test
    assert tools.counts == {"late": 1}
    assert f"in {function.__name__}" in tools.failures["late"].location
    tools.close()


def test_after_a_late_one_the_next_call_is_answered():
    over.clear()
    ended.clear()
    tools = Tools([hang], seconds=2.0, run="order")
    asyncio.run(tools.answers({"tool_calls": [{"function": {"name": "hang", "arguments": {"seconds": 99.0}}}]}))
    assert called(tools, ("hang", {"seconds": 0.0})) == ["late"]
    over.set()
    asyncio.run(until(lambda: len(ended) == 2))


def test_a_tool_that_ends_its_process_is_told():
    def gone() -> str:
        """Ends everything."""
        import os

        os._exit(3)

    def here() -> str:
        """Answers."""
        return "here"

    tools = Tools([gone, here], run="process")
    assert "ended its process (exit status 3)" in called(tools, ("gone", {}))[0]
    assert called(tools, ("here", {})) == ["here"]
    tools.close()


def test_a_tool_that_exits_is_told_and_nothing_ends():
    def leave() -> str:
        """Leaves."""
        raise SystemExit(2)

    assert "SystemExit: 2" in called(Tools([leave]), ("leave", {}))[0]


def test_long_and_odd_results_are_bounded():
    def long() -> str:
        """Long."""
        return "x" * 100_000

    def odd() -> str:
        """Half a character."""
        return "a\ud83d"

    def strange() -> object:
        """No JSON."""
        return {"what": {1, 2}, "self": float("nan")}

    class Hostile:
        def __str__(self):
            raise ValueError("no text")

    def hostile() -> object:
        """No text either."""
        return Hostile()

    tools = Tools([long, odd, strange, hostile])
    first, second, third, fourth = called(tools, ("long", {}), ("odd", {}), ("strange", {}), ("hostile", {}))
    assert len(first) < 66_000
    assert first.endswith("(100000 characters, cut)")
    assert second == "a?"
    assert "{1, 2}" in third
    assert "no text" in fourth


def test_a_flood_of_calls_is_not_run():
    tools = Tools([price])
    answers = called(tools, *[("price", {"item": "lamp"})] * 100)
    assert answers[:64] == ["12.5"] * 64
    assert tools.counts == {"called": 64, "too_many": 36}


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-048"):
        Tools([price, price])
