"""The packages that peers use, stage by stage: orjson, jinja2 as transformers compiles it, and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timing import fastest

Found = dict[str, Any]


def orjson(folder: Path, file: str, rounds: int) -> Found:
    """A JSONL file to dicts, line by line."""
    import orjson

    def run() -> None:
        with (folder / file).open("rb") as lines:
            for line in lines:
                orjson.loads(line)

    took = fastest(run, 4 * rounds)
    return {"seconds": took.seconds, "cpu_s": took.cpu_s, "bytes": (folder / file).stat().st_size}


def jinja2(folder: Path, file: str, rounds: int) -> Found:
    """Conversations to text by Qwen3's template, compiled once."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from models import template
    from ours import conversations, hash_of

    compiled = _compile_jinja_template(template("qwen3"))
    chats = conversations(folder / file)
    run = lambda: [compiled.render(messages=chat["messages"], tools=chat["tools"]) for chat in chats]  # noqa: E731
    took = fastest(run, 4 * rounds)
    texts = [hash_of(text) for text in took.result]
    size = sum(len(text.encode()) for text in took.result)
    return {"seconds": took.seconds, "cpu_s": took.cpu_s, "conversations": len(chats), "bytes": size, "texts": texts}


def tokenizers(folder: Path, file: str, rounds: int) -> Found:
    """Some of the pieces to ids, one after another; and all cores by `encode_batch_fast`."""
    from tokenizers import Tokenizer

    from ours import SOME, texts

    tokenizer = Tokenizer.from_file(str(folder.parent / file / "tokenizer.json"))
    pieces = texts(12 << 20)[:SOME]
    run = lambda: sum(len(tokenizer.encode(piece, add_special_tokens=False).ids) for piece in pieces)  # noqa: E731
    took = fastest(run, min(rounds, 2))
    batch = fastest(lambda: tokenizer.encode_batch_fast(pieces, add_special_tokens=False), min(rounds, 2))
    ids = [token for one in batch.result for token in one.ids]
    return {"seconds": min(took.seconds, batch.seconds), "tokens": took.result, "ids": hash(tuple(ids))}
