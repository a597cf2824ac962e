"""The task of the quickstart: a shop clerk who looks up prices and stock with tools and answers with one number.

Prompts, tools, their hidden world and the checker; nothing here needs torch or a model.
Called by make_model.py (demonstrations), rollout.py (episodes) and record.py (requests to a server).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("price", "stock", "order", "offer")
SPLITS = ("pretrain", "traces", "evaluation")

COMMON_NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Hanna", "Ivan", "Julia", "Karim",
    "Lena", "Marco", "Nora", "Oscar", "Paula", "Rosa", "Samir", "Tina", "Victor", "Wanda",
    "Zoë", "José", "Łukasz", "Jürgen", "Chloé", "Åsa", "Søren", "Íñigo", "Renée", "Müge",
)  # fmt: skip
# The tokenizer is not trained on these: their characters are split into several tokens, like rare text.
RARE_NAMES = ("李", "김", "さき", "Ọlá", "Thảo", "ऋषि")
NAMES = COMMON_NAMES + RARE_NAMES

COLOURS = ("red", "blue", "green", "black", "white", "yellow", "silver", "brown", "pink", "grey")
NOUNS = (
    "lamp", "chair", "table", "clock", "candle", "basket", "mirror", "kettle", "teapot", "cushion",
    "blanket", "bottle", "pillow", "carpet", "drawer", "piñata", "cafetière", "châle", "bucket", "ladder",
    "hammer", "button", "ribbon", "saddle",
)  # fmt: skip
QUANTITIES = tuple(range(2, 7))
PRICES = tuple(range(10, 50))
STOCKS = tuple(range(0, 10))
EMOJI = ("🙂", "🎁", "☕", "🌿", "👋", "🙏")

SYSTEM = "You are the clerk of a shop. Look up prices and stock, then answer the customer by name."


def _tool(name: str, description: str) -> dict:
    item = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": item}}


TOOLS = (_tool("price", "Price of one item in €."), _tool("stock", "How many of an item are left."))

PHRASES = {
    "price": (
        "{name} here. What do {quantity} × {item} cost?",
        "Hello, I am {name}. How much for {quantity} × {item}?",
        "{name}: what is the total for {quantity} × {item}?",
    ),
    "stock": (
        "{name} here. Do you have {quantity} × {item}?",
        "Hello, I am {name}. Are {quantity} × {item} in stock?",
        "{name}: is the stock enough for {quantity} × {item}?",
    ),
    "order": (
        "{name} here. If you have {quantity} × {item}, what do they cost?",
        "Hello, I am {name}. I take {quantity} × {item} if in stock. How much?",
        "{name}: if the stock is enough, what is the total for {quantity} × {item}?",
    ),
    "offer": (
        "{name} here. The offer is {offer} € for one. What do {quantity} × {item} cost?",
        "Hello, I am {name}. One is on offer for {offer} €. How much for {quantity} × {item}?",
        "{name}: at the offer of {offer} €, what is the total for {quantity} × {item}?",
    ),
}


@dataclass(frozen=True)
class Prompt:
    """One customer's question; `key` names it whatever its phrasing, and decides its split and its hidden world."""

    kind: str
    name: str
    item: str
    quantity: int
    offer: int | None
    text: str

    @property
    def key(self) -> str:
        return f"{self.kind}|{self.name}|{self.item}|{self.quantity}|{self.offer or ''}"

    @property
    def split(self) -> str:
        return split_of(self.key)

    @property
    def needs_tool(self) -> bool:
        return self.kind != "offer"

    @property
    def price(self) -> int:
        """The price of one piece for this customer: the offer, or the price of the hidden world."""
        return self.offer or look_up(self.key, "price", self.item)

    @property
    def stock(self) -> int:
        return look_up(self.key, "stock", self.item)

    def messages(self) -> list[dict]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]


def _number(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:6], "big")


def split_of(key: str) -> str:
    """The one split that a prompt key belongs to: six eighths pretrain, one traces, one evaluation."""
    bucket = _number("split", key) % 8
    return "evaluation" if bucket == 7 else "traces" if bucket == 6 else "pretrain"


def look_up(key: str, tool: str, item: str) -> int:
    """The number that a tool reports: fixed by prompt, tool and item, and not to be guessed from the text."""
    values = PRICES if tool == "price" else STOCKS
    return values[_number("world", key, tool, item) % len(values)]


def prompts(split: str, seed: int) -> Iterator[Prompt]:
    """Endless prompts of one split, none with an earlier key of this stream."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    generator = random.Random(f"{split}/{seed}")
    seen: set[str] = set()
    while True:
        prompt = _draw(generator)
        if prompt.split == split and prompt.key not in seen:
            seen.add(prompt.key)
            yield prompt


def _draw(generator: random.Random) -> Prompt:
    kind = generator.choice(KINDS)
    name = generator.choice(NAMES)
    item = f"{generator.choice(COLOURS)} {generator.choice(NOUNS)}"
    quantity = generator.choice(QUANTITIES)
    offer = generator.choice(PRICES) if kind == "offer" else None
    text = generator.choice(PHRASES[kind]).format(name=name, item=item, quantity=quantity, offer=offer)
    if generator.random() < 0.2:
        text += " " + generator.choice(EMOJI)
    return Prompt(kind, name, item, quantity, offer, text)


def execute(prompt: Prompt, tool: str, arguments: object) -> str:
    """Return the result of a tool in the prompt's world, as JSON text; a wrong call returns an error."""
    if tool not in ("price", "stock"):
        return json.dumps({"error": "no such tool"})
    item = arguments.get("item") if isinstance(arguments, dict) else None
    colour, _, noun = item.partition(" ") if isinstance(item, str) else ("", "", "")
    if colour not in COLOURS or noun not in NOUNS:
        return json.dumps({"error": "no such item"})
    return json.dumps({tool: look_up(prompt.key, tool, item)})


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


def parse_tool_calls(text: str) -> tuple[str | None, list[dict]]:
    """Split sampled text into content and tool calls, as vLLM's hermes parser does; malformed calls stay content."""
    if "<tool_call>" not in text:
        return text, []
    try:
        bodies = [json.loads(whole or rest) for whole, rest in _CALL.findall(text)]
        calls = [
            {"name": body["name"], "arguments": json.dumps(body["arguments"], ensure_ascii=False)} for body in bodies
        ]
    except (ValueError, KeyError, TypeError):
        return text, []
    return text[: text.find("<tool_call>")] or None, calls


def arguments_of(function: dict) -> object:
    """The arguments of a tool call as a value: they travel as JSON text, or in some records as a dict already."""
    arguments = function["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def expected(prompt: Prompt) -> tuple[str, int]:
    """The verdict ("total", "yes" or "no") and the number that a right answer states."""
    if prompt.kind in ("stock", "order") and prompt.stock < prompt.quantity:
        return "no", prompt.stock
    if prompt.kind == "stock":
        return "yes", prompt.stock
    return "total", prompt.price * prompt.quantity


def check(prompt: Prompt, messages: list[dict]) -> float:
    """1.0 if the last message answers rightly: verdict, last number and the customer's name; else 0.0.

    A last message that is a tool call, or was truncated by the length limit, scores 0.0.
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or last.get("finish_reason") == "length":
        return 0.0
    text = last.get("content") or ""
    verdict, number = expected(prompt)
    said = "yes" if text.startswith("Yes,") else "no" if text.startswith("No,") else "total"
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", text)]
    named = re.search(rf"(?<!\w){re.escape(prompt.name)}(?!\w)", text) is not None
    return float(said == verdict and numbers[-1:] == [number] and named)
