"""Draw docs/view.png: the page of `tracegrad view` on the bundled traces. Needs Chromium and playwright.

python tools/draw_view.py docs/view.png
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart"
SIZE = {"width": 1360, "height": 860}


def draw(url: str, path: Path) -> None:
    """Save a picture of the list with open histograms."""
    with sync_playwright() as playwright:
        chromium = next((each for each in map(shutil.which, ("chromium", "google-chrome")) if each), None)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport=SIZE, color_scheme="light").new_page()
        page.goto(f"{url}#list?histograms=1")
        page.wait_for_selector("#histograms svg")
        page.wait_for_function("!document.getElementById('state').textContent.includes('reading')", timeout=120_000)
        page.wait_for_function("[...document.querySelectorAll('.row b')].every((each) => each.textContent !== '…')")
        page.screenshot(path=path)
        browser.close()


def main() -> None:
    """Serve the traces, draw the page, and stop the server."""
    traces, model = EXAMPLE / "traces.jsonl.zst", EXAMPLE / "model"
    with tempfile.TemporaryDirectory() as index:
        command = ["-m", "tracegrad.cli", "view", str(traces), "--model", str(model), "--index", index]
        with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                draw(server.stdout.readline().split()[-1], Path(sys.argv[1]))
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
