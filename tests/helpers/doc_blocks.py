"""The fenced blocks of README and docs/, and the commands in them as a user would type them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARK = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` says why it does not run, "" where it does."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages, page by page, in the order in which they stand."""
    return [block for page in PAGES for block in of_page(page) if not languages or block.language in languages]


def of_page(page: Path) -> Iterator[Block]:
    """The blocks of a page.

    Raises:
        ValueError: for a block that is not closed.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    begun, language = None, ""
    for at, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if begun is None:
            begun, language = at, line.strip().removeprefix("```")
            continue
        mark = MARK.fullmatch(lines[begun - 1].strip()) if begun else None
        text = "\n".join(lines[begun + 1 : at])
        yield Block(_name(page), begun + 1, language, text, mark[1] if mark else "")
        begun = None
    if begun is not None:
        raise ValueError(f"{page.name}:{begun + 1}: a block begins and does not end")


def _name(page: Path) -> str:
    """The path of a page below docs/; the name of another one."""
    return page.relative_to(ROOT / "docs").as_posix() if ROOT / "docs" in page.parents else page.name


def indented(page: Path) -> list[int]:
    """Lines of code that stand in a page without a fence, of which no test would know."""
    lines, inside, found = page.read_text(encoding="utf-8").splitlines(), False, []
    for at, line in enumerate(lines):
        inside ^= line.lstrip().startswith("```")
        if not inside and line.startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            found.append(at + 1)
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a block, in words: without remarks, and of what is optional one at a time.

    >>> commands("tracegrad online run.toml [--server URL | --python PATH] [--a.b 1 ...]  # plays")[1:]
    [['tracegrad', 'online', 'run.toml', '--server', 'URL'], ['tracegrad', 'online', 'run.toml', '--python', 'PATH'], \
['tracegrad', 'online', 'run.toml', '--a.b', '1']]
    """
    found = []
    for line in text.splitlines():
        optional = re.findall(r"(?<=\s)\[(.*?)\]", line)
        always = shlex.split(re.sub(r"\s\[.*?\]", "", line), comments=True)
        if not always:
            continue
        found.append(always)
        for part in optional:
            found += [[*always, *shlex.split(way.replace("...", ""))] for way in part.split(" | ")]
    return found
