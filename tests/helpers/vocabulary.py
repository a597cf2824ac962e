"""Models without weights for tests of alignment: the example's vocabulary under other templates, and records."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tracegrad as tg

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def model(folder: Path, template: str, specials: Sequence[str] = (), eos: str = "<|im_end|>", **config: Any) -> Path:
    """A model directory: the example's byte-level BPE, more special tokens behind its own, and `template`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text())
    size = 640
    for text in specials:
        token = {"id": size, "content": text, "special": True, "normalized": False}
        tokenizer["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
        size += 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, **config}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def trl_template(name: str) -> str:
    """A chat template that TRL ships."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def load(folder: Path) -> tg.Tokenizer:
    """The model as tracegrad reads it."""
    return tg.Tokenizer.from_pretrained(folder)


def ids_of(tokenizer: tg.Tokenizer, text: str) -> list[int]:
    """Canonical ids of `text`."""
    return [int(i) for i in tokenizer.encode(text)]


def said(content: str | None, ids: Sequence[int] | None = None, **generation: Any) -> dict[str, Any]:
    """An assistant message with what was sampled; logprobs are -0.5 - 0.01 k unless given."""
    message = {k: generation.pop(k) for k in ("tool_calls", "reasoning_content") if k in generation}
    if ids is not None:
        generation.setdefault("token_ids", list(ids))
        generation.setdefault("logprobs", [-0.5 - 0.01 * k for k in range(len(ids))])
    generation.setdefault("finish_reason", "stop")
    return {"role": "assistant", "content": content, **message, "generation": generation}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def record(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A native record."""
    return {"format": "tracegrad/1", "id": "t", "logprob_kind": "raw", "messages": list(messages), **more}


def align(tokenizer: tg.Tokenizer, *records: dict[str, Any], **options: Any) -> tg.Sequences:
    return tg.align(tg.Traces.from_records(list(records)), tokenizer, **options)


def reasons(sequences: tg.Sequences) -> set[str]:
    """`R01`, ... of the findings."""
    return {name[:3] for name in sequences.alignment_report.table()}


def text(tokenizer: tg.Tokenizer, ids: Any) -> str:
    return tokenizer.decode(ids)


def trained(sequences: tg.Sequences) -> list[int]:
    return [int(i) for i in sequences.ids[sequences.trainable]]


def branch(sequences: tg.Sequences, number: int) -> list[int]:
    return [int(i) for i in sequences.ids[sequences.cu_seqlens[number] : sequences.cu_seqlens[number + 1]]]
