"""The viewer on a large file, in a real browser: first screen, jumps, sorting, filtering, searches, index, memory.

    python benches/view.py --folder DIR --out benches/results/view.json

Makes DIR/traces-100000.jsonl (1.1 GB, kept, and used again), serves it by `tracegrad view` with an index of its own,
and drives Chromium by playwright. `--traces 2000` is a small run. Exits with 1 if a must is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

RARE, COMMON = "saffron tundra", "lantern"
MUST = {"first screen": 2000, "first screen, index there": 2000, "jump in the list": 200, "sort": 200, "filter": 200}
MUST |= {f"search, first answer: {kind}": 200 for kind in ("rare text", "common word", "expression", "bare expression")}
SEARCHES = {
    "rare text": (RARE, False),
    "common word": (COMMON, False),
    "expression": (r"saffron\s+tundra", True),
    "bare expression": (r"[a-z]{13}\d", True),
}
UNTIL = """(ready) => new Promise((done) => {
  const begun = performance.now();
  const look = () => (ready() ? done(performance.now() - begun) : requestAnimationFrame(look));
  look();
})"""


def make(path: Path, traces: int) -> None:
    """Conversations of 10 KB with token lists, in groups of eight; each word but two is drawn from 4,000."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(3, 12))) for _ in range(4000)]
    paragraphs = [" ".join(rng.choices(words, k=110)) for _ in range(3000)]
    lists = [_tokens(rng) for _ in range(500)]
    draft = path.with_suffix(".tmp")
    with open(draft, "w", encoding="utf-8") as file:
        for n in range(traces):
            told = rng.choices(paragraphs, k=6)
            if n % 310 == 7:
                told[3] += f" {RARE}"
            if n % 20 == 3:
                told[1] += f" {COMMON}"
            said = [{"role": "user", "content": told[0]}]
            for turn in range(2):
                call = {"type": "function", "function": {"name": words[n % 7], "arguments": '{"item": "x"}'}}
                said.append({"role": "assistant", "content": told[2 * turn + 1], "tool_calls": [call]})
                said.append({"role": "tool", "content": told[2 * turn + 2]})
            said.append({"role": "assistant", "content": told[5]})
            head = f'{{"id": "t{n}", "group": "g{n // 8}", "reward": {int(rng.random() < 0.4)}, "messages": ['
            parts = [json.dumps(message) for message in said]
            for at in (1, 3, 5):
                parts[at] = f'{parts[at][:-1]}, "generation": {rng.choice(lists)}}}'
            file.write(f"{head}{', '.join(parts)}]}}\n")
    draft.rename(path)


def _tokens(rng: random.Random) -> str:
    count = rng.randint(40, 120)
    logprobs = [round(-rng.expovariate(2), 6) for _ in range(count)]
    return json.dumps({"token_ids": [rng.randrange(150_000) for _ in range(count)], "logprobs": logprobs})


class Served:
    """`tracegrad view` as a separate process."""

    def __init__(self, path: Path, index: Path) -> None:
        command = [sys.executable, "-m", "tracegrad.cli", "view", str(path), "--index", str(index)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def peak_bytes(self) -> int:
        """Peak memory of it and its children together."""
        return sum(_peak(pid) for pid in (self.process.pid, *_children(self.process.pid)))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def _children(pid: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended already
            continue
        if int(fields[1]) == pid:
            yield int(entry.parent.name)


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


DRAWN = "[...document.querySelectorAll('.row b')].every((each) => each.textContent !== '…')"
FIRST = "document.querySelector('.row').dataset.row"


def opened(browser: Browser, served: Served) -> tuple[Page, float]:
    """A page, and the milliseconds until its first rows have their words."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    begun = time.perf_counter()
    page.goto(served.url)
    page.evaluate(f"() => ({UNTIL})(() => document.querySelector('.row b') && {DRAWN})")
    return page, 1000 * (time.perf_counter() - begun)


def done(page: Page, seconds: float) -> None:
    """Waits until all is in the index."""
    end = time.monotonic() + seconds
    while page.evaluate("document.getElementById('state').textContent.includes('reading')"):
        if time.monotonic() > end:
            raise SystemExit(f"the index was not done in {seconds:g} s")
        time.sleep(0.2)


def spent(page: Page, act: str, ready: str) -> float:
    """Milliseconds in the page from an action until a condition is true."""
    return page.evaluate(f"() => {{ {act}; return ({UNTIL})(() => {ready}); }}")


def jumps(page: Page, count: int = 40) -> list[float]:
    """Jumps all over the list, each until every row in sight has its words."""
    found = []
    for place in random.Random(1).sample(range(1, 1000), count):
        go = "const rows = document.getElementById('rows'), before = " + FIRST + "; "
        go += f"rows.scrollTop = rows.scrollHeight * {place / 1000}"
        found.append(spent(page, go, f"{FIRST} !== before && {DRAWN}"))
    return found


def searched(page: Page, text: str, regex: bool) -> tuple[float, float, int]:
    """Milliseconds to the first answer and to the last, and the traces found."""
    code = """async ([text, regex]) => {
      const begun = performance.now();
      let first = 0, rows = 0, start = 0;
      while (start !== null) {
        const found = await window.tracegrad.store.search(text, regex, start);
        first = first || performance.now() - begun;
        rows += found.rows.length;
        start = found.next;
      }
      return [first, performance.now() - begun, rows];
    }"""
    first, last, rows = page.evaluate(code, [text, regex])
    return first, last, int(rows)


def measured(browser: Browser, path: Path, index: Path, most_s: float) -> dict[str, Any]:
    """All figures of one file, milliseconds by name."""
    found: dict[str, Any] = {}
    served = Served(path, index)
    begun = time.perf_counter()
    page, found["first screen"] = opened(browser, served)
    done(page, most_s)
    found["index_s"], found["peak while it is made_bytes"] = time.perf_counter() - begun, served.peak_bytes()
    page.close()
    served.close()
    served = Served(path, index)
    page, found["first screen, index there"] = opened(browser, served)
    done(page, most_s)
    every = jumps(page)
    found["jump in the list"], found["jump, median"] = max(every), sorted(every)[len(every) // 2]
    back = f"document.getElementById('rows').scrollTop = 0; const before = {FIRST}; "
    sort = back + "document.querySelector('[data-sort=length]').click()"
    found["sort"] = spent(page, sort, f"{FIRST} !== before && {DRAWN}")
    page.click("#filters summary")
    page.wait_for_selector("#histograms figure[data-name=reward] g[role=button]")
    bar = "document.querySelector('#histograms figure[data-name=reward] g[role=button]')"
    said = "document.getElementById('state').textContent"
    dispatch = f"const before = {said}; {bar}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"
    found["filter"] = spent(page, dispatch, f"{said} !== before && {DRAWN}")
    page.click("#clear")
    for name, (text, regex) in SEARCHES.items():
        first, last, rows = searched(page, text, regex)
        found[f"search, first answer: {name}"], found[f"search, all: {name}"] = first, last
        found[f"search, traces: {name}"] = rows
    found["peak of searches_bytes"] = served.peak_bytes()
    page.close()
    served.close()
    found["index_bytes"] = sum(file.stat().st_size for file in index.rglob("*") if file.is_file())
    return found


def main() -> int:
    """Make the file, measure, print the table and store it; 1 if a must is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the file and its index stand: 3 GB")
    parser.add_argument("--traces", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=900, help="the most that the index may take")
    parser.add_argument("--make", action="store_true", help="make the file and stop")
    parser.add_argument(
        "--name", default="view", help="of the row in the file of results, in place of one of that name"
    )
    parser.add_argument("--out", type=Path, help="file of results")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path, index = options.folder / f"traces-{options.traces}.jsonl", options.folder / "index"
    if not path.exists():
        make(path, options.traces)
    if options.make:
        return 0
    shutil.rmtree(index, ignore_errors=True)
    load = os.getloadavg()[0]
    with sync_playwright() as playwright:
        chromium = next((each for each in map(shutil.which, ("chromium", "google-chrome")) if each), None)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = measured(browser, path, index, options.seconds)
    print(f"{options.traces:,} traces, {path.stat().st_size / 1e9:.2f} GB, load {load:.1f} at the start")
    for name, value in found.items():
        must = f"  must {MUST[name]:,} ms{'' if value <= MUST[name] else '  MISSED'}" if name in MUST else ""
        unit = {"s": "s", "bytes": "MB"}.get(name.rpartition("_")[2], "" if "traces:" in name else "ms")
        print(f"{name:<42} {value / (1e6 if unit == 'MB' else 1):>10,.0f} {unit}{must}")
    if options.out:
        row = {"name": options.name, "traces": options.traces, "bytes": path.stat().st_size}
        row |= {"load": [load, os.getloadavg()[0]], **found, "must": MUST}
        row |= {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        row |= {"python": platform.python_version(), "command": "python benches/view.py --folder DIR"}
        before = json.loads(options.out.read_text()) if options.out.exists() else []
        rows = [*(each for each in before if each["name"] != options.name), row]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(found[name] > must for name, must in MUST.items()))


if __name__ == "__main__":
    sys.exit(main())
