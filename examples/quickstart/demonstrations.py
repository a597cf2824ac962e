"""Demonstrations of the clerk's task, clean and corrupted, and dense lines of arithmetic, for pretraining.

Every prompt is of the split `pretrain`, so none of them can be in the traces or in the evaluation.
Called by make_model.py.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

import task

# Weights of the errors in corrupted demonstrations.
CORRUPTIONS = {
    "forgotten tool": 0.32,
    "wrong tool": 0.26,
    "wrong item": 0.16,
    "wrong number": 0.16,
    "wrong name": 0.05,
    "broken call": 0.03,
    "endless": 0.02,
}


@dataclass(frozen=True)
class Answer:
    """Return the content of the clerk's last answer; `price` is the price of one piece, for a total."""

    verdict: str
    name: str
    number: int
    quantity: int
    price: int


def answer_text(answer: Answer, generator: random.Random) -> str:
    """The clerk's last words, in one of two forms; a total is worked out loud."""
    name, number = answer.name, answer.number
    sum_of = f"{answer.quantity} × {answer.price} = {number} €"
    forms = {
        "total": (f"{name}, {sum_of}. 🛒", f"{sum_of}, {name}. 🛒"),
        "yes": (f"Yes, {name}, we have {number}. 🙂", f"Yes, we have {number}, {name}. 🙂"),
        "no": (f"No, {name}, only {number} left. 😔", f"No, only {number} left, {name}. 😔"),
    }
    return generator.choice(forms[answer.verdict])


def call_text(tool: str, item: str) -> str:
    """A tool call as the chat template writes it."""
    body = json.dumps({"name": tool, "arguments": {"item": item}}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def plan(prompt: task.Prompt) -> list[str]:
    """The tools that a good clerk calls, in order."""
    if prompt.kind == "order":
        return ["stock", "price"] if prompt.stock >= prompt.quantity else ["stock"]
    return {"price": ["price"], "stock": ["stock"], "offer": []}[prompt.kind]


def right_answer(prompt: task.Prompt) -> Answer:
    """Return the answer of a good clerk."""
    verdict, number = task.expected(prompt)
    return Answer(verdict, prompt.name, number, prompt.quantity, prompt.price)


def clean(prompt: task.Prompt, generator: random.Random) -> list[tuple[str, str]]:
    """(role, text) after the system message: the question, the calls with their results, the right answer."""
    turns = [("user", prompt.text)]
    for tool in plan(prompt):
        turns += call_turns(prompt, tool, prompt.item)
    return [*turns, ("assistant", answer_text(right_answer(prompt), generator))]


def call_turns(prompt: task.Prompt, tool: str, item: str) -> list[tuple[str, str]]:
    """A tool call and its result."""
    return [("assistant", call_text(tool, item)), ("tool", task.execute(prompt, tool, {"item": item}))]


def corrupted(prompt: task.Prompt, generator: random.Random) -> list[tuple[str, str]]:
    """Return a demonstration with one of the errors of CORRUPTIONS."""
    way = generator.choices(list(CORRUPTIONS), list(CORRUPTIONS.values()))[0]
    tools, answer, asked = plan(prompt), right_answer(prompt), prompt.item
    if not tools and way in ("forgotten tool", "wrong item", "broken call"):
        way = "wrong tool"
    if way == "broken call":
        return [("user", prompt.text), ("assistant", call_text(tools[0], asked).replace('"}}', '"}', 1))]
    if way == "forgotten tool":
        tools, answer = _guess(prompt, tools, answer, generator)
    elif way == "wrong item":
        asked = _other_item(asked, generator)
        answer = _conclude(prompt, tools[-1], asked, answer)
    elif way == "wrong tool":
        tools = [_other(tool) for tool in tools[:1]] or ["price"]
        answer = _conclude(prompt, tools[-1], asked, answer)
    elif way == "wrong number":
        answer = _miscount(answer, generator)
    elif way == "wrong name":
        answer = replace(answer, name=generator.choice([name for name in task.NAMES if name != prompt.name]))
    turns = [("user", prompt.text)]
    for tool in tools:
        turns += call_turns(prompt, tool, asked)
    text = answer_text(answer, generator)
    if way == "endless":
        text = text[:-1] + "🧾" * 20
    return [*turns, ("assistant", text)]


def _guess(prompt: task.Prompt, tools: list[str], answer: Answer, generator: random.Random) -> tuple[list[str], Answer]:
    """Skip a call and invent its result."""
    skip_both = len(tools) == 1 or generator.random() < 0.5
    if tools[-1] == "price":
        price = generator.choice(task.PRICES)
        answer = replace(answer, verdict="total", price=price, number=price * prompt.quantity)
        return [] if skip_both else tools[:1], answer
    stock = generator.choice(task.STOCKS)
    return [], replace(answer, verdict="yes" if stock >= prompt.quantity else "no", number=stock)


def _conclude(prompt: task.Prompt, tool: str, item: str, answer: Answer) -> Answer:
    """Return the answer that follows from the last tool result, right or wrong."""
    told = task.look_up(prompt.key, tool, item)
    if tool == "price":
        return replace(answer, verdict="total", price=told, number=told * prompt.quantity)
    return replace(answer, verdict="yes" if told >= prompt.quantity else "no", number=told)


def _miscount(answer: Answer, generator: random.Random) -> Answer:
    """A wrong number that looks like the right one: a misread price, or a slip in the sum or the stock."""
    if answer.verdict == "total" and generator.random() < 0.5:
        price = generator.choice([price for price in task.PRICES if price != answer.price])
        return replace(answer, price=price, number=price * answer.quantity)
    steps = (1, -1, 10, -10, 2, 20) if answer.verdict == "total" else (1, -1, 2, 3)
    return replace(answer, number=generator.choice([answer.number + n for n in steps if answer.number + n >= 0]))


def _other(tool: str) -> str:
    return "stock" if tool == "price" else "price"


def _other_item(item: str, generator: random.Random) -> str:
    colour, _, noun = item.partition(" ")
    if generator.random() < 0.5:
        return f"{generator.choice([other for other in task.COLOURS if other != colour])} {noun}"
    return f"{colour} {generator.choice([other for other in task.NOUNS if other != noun])}"


def product_line(generator: random.Random) -> str:
    """One line of arithmetic, such as "7 × 46 = 322"."""
    quantity, price = generator.choice(task.QUANTITIES), generator.choice(task.PRICES)
    return f"{quantity} × {price} = {quantity * price}\n"


def sale_line(generator: random.Random) -> str:
    """Return one line of arithmetic in the words of the dialogue, with the price of the tool result or an offer."""
    quantity, price = generator.choice(task.QUANTITIES), generator.choice(task.PRICES)
    item = f"{generator.choice(task.COLOURS)} {generator.choice(task.NOUNS)}"
    told = generator.choice((f'{{"price": {price}}}', f"offer {price} €"))
    return f"{quantity} × {item}. {told} {quantity} × {price} = {quantity * price} €\n"


def compare_line(generator: random.Random) -> str:
    """One line that compares a wish with the stock, such as "7 of 5: No, only 5 left"."""
    quantity, stock = generator.choice(task.QUANTITIES), generator.choice(task.STOCKS)
    return f"{quantity} of {stock}: " + (f"Yes, we have {stock}\n" if stock >= quantity else f"No, only {stock} left\n")


def copy_line(generator: random.Random) -> str:
    """Return one line with an item and a name twice, so that copying is learned separately from the dialogue."""
    item = f"{generator.choice(task.COLOURS)} {generator.choice(task.NOUNS)}"
    name = generator.choice(task.NAMES)
    return f'{name} × {item}: "item": "{item}", {name}\n'


def dense_lines(generator: random.Random, count: int) -> str:
    """Lines of the three sorts, mostly arithmetic."""
    makers = generator.choices((product_line, sale_line, compare_line, copy_line), (0.4, 0.4, 0.1, 0.1), k=count)
    return "".join(maker(generator) for maker in makers)
