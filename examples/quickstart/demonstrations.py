"""Demonstrations of the clerk's task, clean and corrupted, and dense lines of arithmetic: what the model is pretrained on.

Every prompt comes from the split `pretrain`, so none of them can stand among the traces or in the evaluation.
Called by make_model.py.
"""

from __future__ import annotations

import json
import random

import task

# Weights of the ways in which a corrupted demonstration goes wrong.
CORRUPTIONS = {
    "forgotten tool": 0.30,
    "wrong tool": 0.22,
    "wrong item": 0.20,
    "wrong number": 0.18,
    "wrong name": 0.05,
    "broken call": 0.03,
    "endless": 0.02,
}


def answer(verdict: str, name: str, number: int, generator: random.Random) -> str:
    """The clerk's last words, in one of two forms."""
    forms = {
        "total": (f"{name}, that makes {number} €. 🛒", f"That makes {number} €, {name}. 🛒"),
        "yes": (f"Yes, {name}, we have {number}. 🙂", f"Yes, we have {number}, {name}. 🙂"),
        "no": (f"No, {name}, only {number} left. 😔", f"No, only {number} left, {name}. 😔"),
    }
    return generator.choice(forms[verdict])


def call_text(tool: str, item: str) -> str:
    """A tool call as the chat template writes it."""
    body = json.dumps({"name": tool, "arguments": {"item": item}}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def plan(prompt: task.Prompt) -> list[str]:
    """The tools that a good clerk calls, in order."""
    if prompt.kind == "order":
        return ["stock", "price"] if prompt.stock >= prompt.quantity else ["stock"]
    return {"price": ["price"], "stock": ["stock"], "offer": []}[prompt.kind]


def clean(prompt: task.Prompt, generator: random.Random) -> list[tuple[str, str]]:
    """(role, text) after the system message: the question, the calls with their results, the right answer."""
    turns = [("user", prompt.text)]
    for tool in plan(prompt):
        turns.append(("assistant", call_text(tool, prompt.item)))
        turns.append(("tool", task.execute(prompt, tool, {"item": prompt.item})))
    verdict, number = task.expected(prompt)
    turns.append(("assistant", answer(verdict, prompt.name, number, generator)))
    return turns


def corrupted(prompt: task.Prompt, generator: random.Random) -> list[tuple[str, str]]:
    """A demonstration that goes wrong in one of the ways of CORRUPTIONS."""
    way = generator.choices(list(CORRUPTIONS), list(CORRUPTIONS.values()))[0]
    tools = plan(prompt)
    verdict, number = task.expected(prompt)
    name = prompt.name
    turns = [("user", prompt.text)]
    if not tools and way in ("forgotten tool", "wrong item", "broken call"):
        way = "wrong tool"
    if way == "broken call":
        return turns + [("assistant", call_text(tools[0], prompt.item).replace('"}}', '"}', 1))]
    if way == "forgotten tool":
        tools, verdict, number = _guess(prompt, tools, verdict, generator)
    asked = _other_item(prompt.item, generator) if way == "wrong item" else prompt.item
    if way == "wrong tool":
        tools = [_other(tool) for tool in tools[:1]] or ["price"]
    last = 0
    for tool in tools:
        result = task.execute(prompt, tool, {"item": asked})
        last = next(iter(json.loads(result).values()))
        turns += [("assistant", call_text(tool, asked)), ("tool", result)]
    if way in ("wrong tool", "wrong item"):
        verdict, number = _conclude(prompt, tools, last)
    if way == "wrong number":
        number = _near(number, generator)
    if way == "wrong name":
        name = generator.choice([other for other in task.NAMES if other != name])
    text = answer(verdict, name, number, generator)
    if way == "endless":
        text = text[:-1] + "🧾" * 20
    return turns + [("assistant", text)]


def _guess(prompt: task.Prompt, tools: list[str], verdict: str, generator: random.Random) -> tuple[list[str], str, int]:
    """Skip one call and invent the number that it would have told."""
    if len(tools) == 2 and generator.random() < 0.5:
        return tools[:1], verdict, generator.choice(task.PRICES) * prompt.quantity
    if prompt.kind == "price" or (prompt.kind == "order" and generator.random() < 0.5):
        return [], "total", generator.choice(task.PRICES) * prompt.quantity
    stock = generator.choice(task.STOCKS)
    return [], "yes" if stock >= prompt.quantity else "no", stock


def _conclude(prompt: task.Prompt, tools: list[str], last: int) -> tuple[str, int]:
    """The answer that follows from what the last tool told, right or wrong."""
    if tools[-1] == "price":
        return "total", last * prompt.quantity
    return "yes" if last >= prompt.quantity else "no", last


def _other(tool: str) -> str:
    return "stock" if tool == "price" else "price"


def _other_item(item: str, generator: random.Random) -> str:
    colour, _, noun = item.partition(" ")
    if generator.random() < 0.5:
        return f"{generator.choice([other for other in task.COLOURS if other != colour])} {noun}"
    return f"{colour} {generator.choice([other for other in task.NOUNS if other != noun])}"


def _near(number: int, generator: random.Random) -> int:
    """A wrong number that looks like the right one."""
    steps = (1, -1, 10, -10, 2, 20, 100) if number >= 20 else (1, -1, 2, 3, 10)
    return generator.choice([number + step for step in steps if number + step >= 0])


def product_line(generator: random.Random) -> str:
    """One line of arithmetic, such as "7 × 46 = 322"."""
    quantity, price = generator.choice(task.QUANTITIES), generator.choice(task.PRICES)
    return f"{quantity} × {price} = {quantity * price}\n"


def sale_line(generator: random.Random) -> str:
    """One line of arithmetic in the words of the dialogue, with the price as the tool tells it or as an offer."""
    quantity, price = generator.choice(task.QUANTITIES), generator.choice(task.PRICES)
    item = f"{generator.choice(task.COLOURS)} {generator.choice(task.NOUNS)}"
    told = generator.choice((f'{{"price": {price}}}', f"offer {price} €"))
    return f"{quantity} × {item}. {told} makes {quantity * price} €\n"


def compare_line(generator: random.Random) -> str:
    """One line that compares a wish with the stock, such as "7 of 5: No, only 5 left"."""
    quantity, stock = generator.choice(task.QUANTITIES), generator.choice(task.STOCKS)
    return f"{quantity} of {stock}: " + (f"Yes, we have {stock}\n" if stock >= quantity else f"No, only {stock} left\n")


def copy_line(generator: random.Random) -> str:
    """One line that says an item and a name twice, so that copying is learned apart from the dialogue."""
    item = f"{generator.choice(task.COLOURS)} {generator.choice(task.NOUNS)}"
    name = generator.choice(task.NAMES)
    return f'{name} × {item}: "item": "{item}", {name}\n'


def dense_lines(generator: random.Random, count: int) -> str:
    """Lines of the three sorts, mostly arithmetic."""
    makers = generator.choices((product_line, sale_line, compare_line, copy_line), (0.4, 0.4, 0.1, 0.1), k=count)
    return "".join(maker(generator) for maker in makers)
