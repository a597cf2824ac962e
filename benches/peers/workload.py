"""One recording, the same bytes for everybody: agents' conversations with tools, eight of each prompt.

Here is `make`, which writes the files of `FILES` into a folder. Text comes from Python's standard library, so a version
of Python makes the same bytes anywhere; ids come from the `tokenizers` package, so none of our code is used.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 8
# Of `text.jsonl`, for each group: its lines are repeated.
TEXT_BYTES = 2 << 20
TURNS = 6
# The text after a comma and a colon: as JavaScript and vLLM write, as Python's json does, and neither.
LAYOUTS = {"compact": (",", ":"), "python": (", ", ": "), "spaced": (" , ", " : ")}
END = "<|im_end|>"


@dataclass
class Turn:
    """The sampled turn: a message, and its tokens."""

    message: dict[str, Any]
    ids: list[int]
    logprobs: list[float]
    rivals: list[tuple[int, float]] = field(repr=False, default_factory=list)


@dataclass
class Conversation:
    """One trace: messages given and turns sampled, in order."""

    name: str
    group: str
    reward: float
    tools: list[dict[str, Any]] | None
    entries: list[dict[str, Any] | Turn]


def corpus(size: int) -> str:
    """The standard library's sources without its tests, end to end, at most `size` characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, have = [], 0
    for path in sorted(root.rglob("*.py")):
        if have < size and not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            parts.append(text)
            have += len(text)
    return "".join(parts)[:size]


def schemas(count: int = 14) -> list[dict[str, Any]]:
    """Tool schemas of the length that coding agents give theirs."""
    verbs = (
        "read",
        "write",
        "search",
        "list",
        "move",
        "run",
        "diff",
        "test",
        "plan",
        "fetch",
        "open",
        "edit",
        "log",
        "ask",
    )
    found = []
    for verb in verbs[:count]:
        properties = {
            "path": {"type": "string", "description": f"What to {verb}, from the root of the working tree."},
            "limit": {"type": "integer", "description": "The most lines that come back; 200 where it is left out."},
        }
        parameters = {"type": "object", "properties": properties, "required": ["path"]}
        about = f"Use this to {verb} something in the working tree; it answers with text and never asks back."
        function = {"name": f"{verb}_file", "description": about, "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found


class Writer:
    """Draws conversations from a corpus with one tokenizer; the same seed draws the same ones."""

    def __init__(self, model: Path, text: str, seed: int = 0) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.lines = [line for line in text.splitlines() if line.strip()]
        self.chance = random.Random(seed)
        self.vocabulary = self.tokenizer.get_vocab()
        self.spelling = {token: spelling for spelling, token in self.vocabulary.items()}
        self.end = self.vocabulary[END]

    def words(self, size: int) -> str:
        """Some adjacent lines, about `size` characters, with a number of their own."""
        at = self.chance.randrange(len(self.lines) - 200)
        taken: list[str] = []
        have = 0
        while have < size:
            taken.append(self.lines[at])
            have += len(self.lines[at]) + 1
            at += 1
        odd = self.chance.choice(("naïve", "你好", "😊", "42 €", "done"))
        return f"{odd} {self.chance.randrange(10**6)}: " + "\n".join(taken)

    def turn(self, message: dict[str, Any], said: str) -> Turn:
        """Samples a message: its canonical ids, in one of fifty turns with a token split in two, and numbers."""
        ids = [*self.tokenizer.encode(said, add_special_tokens=False).ids, self.end]
        if self.chance.random() < 0.02:
            self._cut(ids)
        logprobs = [float(np.float32(-(self.chance.expovariate(4.0) ** 2))) for _ in ids]
        rivals = [(token, value) for token, value in zip(ids, logprobs, strict=True)]
        for at, value in enumerate(logprobs):
            if value < -0.7:
                rivals[at] = (self.chance.randrange(100, 100_000), float(np.float32(-0.5 + value / 100)))
        return Turn(message, ids, logprobs, rivals)

    def _cut(self, ids: list[int]) -> None:
        for at, token in enumerate(ids[:-1]):
            spelling = self.spelling[token]
            halves = self.vocabulary.get(spelling[:1]), self.vocabulary.get(spelling[1:])
            if len(spelling) > 3 and spelling.isascii() and None not in halves:
                ids[at : at + 1] = halves  # type: ignore[assignment]
                return

    def group(self, number: int) -> Iterator[Conversation]:
        """Eight traces of one prompt; in three groups of four with tools, in one a plain dialogue."""
        tools = schemas() if number % 4 != 1 else None
        system = {"role": "system", "content": "You are careful. " + self.words(300)}
        user = {"role": "user", "content": self.words(900)}
        for row in range(GROUP):
            entries: list[dict[str, Any] | Turn] = [system, user]
            for turn in range(TURNS):
                last = turn == TURNS - 1
                entries += self._exchange(tools, f"c{row}{turn}", last)
            name, reward = f"g{number:04d}-{row}", self.chance.random()
            yield Conversation(name, f"g{number:04d}", reward, tools, entries)

    def _exchange(self, tools: Any, call: str, last: bool) -> list[dict[str, Any] | Turn]:
        content = self.words(300 if tools and not last else 700)
        if not tools or last:
            turn = self.turn({"role": "assistant", "content": content}, content)
            return [turn] if last else [turn, {"role": "user", "content": self.words(900)}]
        name = self.chance.choice(tools)["function"]["name"]
        arguments = json.dumps({"path": f"src/{self.chance.randrange(10**4)}.py", "limit": self.chance.randrange(900)})
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}],
        }
        said = f'{content}\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        answer = {"role": "tool", "tool_call_id": call, "name": name, "content": self.words(1200)}
        return [self.turn(message, said), answer]


class Tokens:
    """Writes sampled tokens as `logprobs.content`: a JSON fragment for each id, made once."""

    def __init__(self, writer: Writer, layout: str, named: str) -> None:
        self.writer = writer
        self.comma, self.colon = LAYOUTS[layout]
        self.named = named
        self.made: dict[int, tuple[str, str]] = {}
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.byte_of = {glyph: byte for byte, glyph in bytes_to_unicode().items()}

    def _parts(self, token: int) -> tuple[str, str]:
        """Text of a token before and after its logprob."""
        if token not in self.made:
            spelling = self.writer.spelling[token]
            added = not set(spelling) <= self.byte_of.keys() or spelling.startswith("<|")
            data = list(spelling.encode()) if added else [self.byte_of[glyph] for glyph in spelling]
            if self.named == "ids":
                text, data = f"token_id:{token}", [] if token == self.writer.end else data
            else:
                text = bytes(data).decode(errors="backslashreplace")
            listed = json.dumps(data, separators=(self.comma, self.colon))
            head = f'{{"token"{self.colon}{json.dumps(text, ensure_ascii=False)}{self.comma}"logprob"{self.colon}'
            self.made[token] = head, f'{self.comma}"bytes"{self.colon}{listed}'
        return self.made[token]

    def listed(self, turn: Turn) -> str:
        """The list of a turn's tokens."""
        entries = []
        for token, logprob, (rival, value) in zip(turn.ids, turn.logprobs, turn.rivals, strict=True):
            head, tail = self._parts(token)
            there, behind = self._parts(rival)
            top = f'{self.comma}"top_logprobs"{self.colon}[{there}{value!r}{behind}}}]'
            entries.append(f"{head}{logprob!r}{tail}{top}}}")
        return "[" + self.comma.join(entries) + "]"


def chat_lines(conversations: Iterable[Conversation], tokens: Tokens) -> Iterator[str]:
    """OpenAI chat JSON: the messages, and the choices as the server returned them among them."""
    mark = '"\x00"'
    separators = (tokens.comma, tokens.colon)
    for one in conversations:
        entries = [
            {"index": 0, "finish_reason": "stop", "message": entry.message, "logprobs": {"content": "\x00"}}
            if isinstance(entry, Turn)
            else entry
            for entry in one.entries
        ]
        record = {**_head(one), "messages": entries}
        pieces = json.dumps(record, ensure_ascii=False, separators=separators).replace("\\u0000", "\x00").split(mark)
        turns = [entry for entry in one.entries if isinstance(entry, Turn)]
        filled = [pieces[0], *(tokens.listed(turn) + piece for turn, piece in zip(turns, pieces[1:], strict=True))]
        yield "".join(filled) + "\n"


def text_lines(conversations: Iterable[Conversation]) -> Iterator[str]:
    """The same without tokens."""
    for one in conversations:
        messages = [entry.message if isinstance(entry, Turn) else entry for entry in one.entries]
        yield json.dumps({**_head(one), "messages": messages}, ensure_ascii=False) + "\n"


def id_lines(conversations: Iterable[Conversation], render: Any) -> Iterator[str]:
    """Prompt and completion ids with their logprobs; `render(messages, tools)` gives the ids of a prompt."""
    for one in conversations:
        messages: list[dict[str, Any]] = []
        held: list[int] = []
        for at, entry in enumerate(one.entries):
            if not isinstance(entry, Turn):
                messages.append(entry)
                continue
            given = one.entries[:at] if not held else one.entries[at - 1 : at]
            held += render(given, one.tools, bool(held))
            generation = {"prompt_token_ids": list(held), "token_ids": entry.ids, "logprobs": entry.logprobs}
            messages.append({**entry.message, "generation": generation})
            held += entry.ids
        yield json.dumps({"format": "tracegrad/1", **_head(one), "messages": messages}, ensure_ascii=False) + "\n"


def _head(one: Conversation) -> dict[str, Any]:
    tools = {"tools": one.tools} if one.tools else {}
    return {"id": one.name, "group": one.group, "reward": one.reward, "temperature": 1.0, **tools}


def make(folder: Path, model: Path, groups: int) -> dict[str, Any]:
    """Write the files and `workload.json` with their counts; do nothing if they exist.

    `chat-ids.jsonl` names tokens as vLLM does with return_tokens_as_token_ids, `chat-text.jsonl` by their text;
    `chat-ids-python.jsonl` and `chat-ids-spaced.jsonl` are the first in other layouts; `text.jsonl` has no tokens;
    `ids.jsonl` has prompt and completion ids; `other.jsonl` is another recording, to warm up with.
    """
    told = folder / "workload.json"
    if told.exists() and json.loads(told.read_text())["groups"] == groups:
        return json.loads(told.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(model, corpus(4 << 20))
    conversations = [one for number in range(groups) for one in writer.group(number)]
    for layout in LAYOUTS:
        name = "chat-ids.jsonl" if layout == "compact" else f"chat-ids-{layout}.jsonl"
        _write(folder / name, chat_lines(conversations, Tokens(writer, layout, "ids")))
    _write(folder / "chat-text.jsonl", chat_lines(conversations, Tokens(writer, "compact", "text")))
    other = Writer(model, corpus(4 << 20)[2 << 20 :], seed=1)
    _write(folder / "other.jsonl", chat_lines(list(other.group(0)), Tokens(other, "compact", "ids")))
    texts = list(text_lines(one for number in range(groups, groups * 4) for one in writer.group(number)))
    _write(folder / "text.jsonl", texts * max(1, groups * TEXT_BYTES // sum(map(len, texts))))
    _write(folder / "ids.jsonl", id_lines(conversations, _chatml(writer)))
    turns = [entry for one in conversations for entry in one.entries if isinstance(entry, Turn)]
    counts = {
        "groups": groups,
        "traces": len(conversations),
        "turns": len(turns),
        "sampled": sum(len(turn.ids) for turn in turns),
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.glob("*.jsonl"))},
    }
    told.write_text(json.dumps(counts, indent=1) + "\n")
    return counts


def _chatml(writer: Writer) -> Any:
    """Ids of the text between two sampled texts, as the Qwen template writes it."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=writer.tokenizer)
    theirs.chat_template = _template()

    def render(given: list[dict[str, Any]], tools: Any, follows: bool) -> list[int]:
        ids = theirs.apply_chat_template(given, tools=tools if not follows else None, add_generation_prompt=True)
        ids = ids["input_ids"] if not isinstance(ids, list) else ids
        # Behind the sampled end stands the line break of the turn.
        return writer.tokenizer.encode("\n", add_special_tokens=False).ids + ids if follows else ids

    return render


def _template() -> str:
    from models import template

    return template("qwen3_instruct_2507")


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
