"""The page in a real browser: Chromium, driven by playwright. Skipped where neither is installed.

`apt-get install chromium` or `playwright install chromium`, and `pip install playwright`.
"""

import base64
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import threading

import pytest
import uvicorn
from PIL import Image

sync_api = pytest.importorskip("playwright.sync_api")

import tracegrad as tg
from tracegrad.config import load
from tracegrad.view import Viewer, export_page
from tracegrad.view.app import application
from view_pages import HOSTILE, MODEL, record, whole, written

SOURCE = MODEL.parent / "traces.jsonl.zst"
PATIENCE_MS = 60_000
sync_api.expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error)[:80]}")
        yield opened
        opened.close()


class Served:
    """A session behind a real server on a free port."""

    def __init__(self, session):
        self.door = socket.create_server(("127.0.0.1", 0))
        self.server = uvicorn.Server(uvicorn.Config(application(session, "secret"), log_level="error"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.door]}, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.door.getsockname()[1]}/secret/"

    def close(self):
        self.server.should_exit = True
        self.thread.join(60)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the example's model over some of its traces: two passes, each trace in two steps."""
    from tracegrad import trainer
    from tracegrad.objective import presets
    from tracegrad.trainer.lora import load_model

    out = tmp_path_factory.mktemp("runs") / "first"
    sequences = tg.align(tg.read(SOURCE, limit=48), tg.Tokenizer.from_pretrained(MODEL), on_error="skip")
    told = {"train.epochs": 2, "train.groups_per_step": 3, "data.holdout": 0.0, "optimizer.lr": 1e-3}
    chosen = load(overrides=list(told.items()))
    model = load_model(MODEL)
    trainer.train(
        sequences, model, objective=presets.DAPO, config=chosen, out=out, tokenizer=MODEL, sinks=[], log=lambda _: None
    )
    return out


@pytest.fixture(scope="module")
def url(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    hostile = written(folder / "hostile.jsonl", [record(1, id=HOSTILE, messages=_hostile())])
    with Viewer([SOURCE, hostile, run], folder / "index", MODEL) as session:
        whole(session)
        served = Served(session)
        yield served.url
        served.close()


def _hostile():
    call = {"function": {"name": HOSTILE, "arguments": json.dumps({HOSTILE: "<svg onload=alert(1)>"})}}
    return [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE, "tool_calls": [call]}]


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    opened, wrong = context.new_page(), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("dialog", lambda dialog: wrong.append("a dialog") or dialog.dismiss())
    opened.on(
        "console", lambda said: wrong.append(said.text) if said.type == "error" and "400" not in said.text else None
    )
    yield opened
    context.close()
    assert not wrong


def says(page, text):
    """Waits until the count at the top says so."""
    sync_api.expect(page.locator("#state")).to_have_text(text)


def listed(page):
    return page.locator("#state").inner_text()


def test_the_list_is_sorted_filtered_and_searched(page, url):
    page.goto(url)
    page.wait_for_selector(".row b:text('g0000-0')")
    says(page, "2,561 traces")
    page.click("[data-sort=length]")
    first = page.locator(".row").first.locator(".n").nth(2).inner_text()
    assert first == "104"
    page.click("[data-sort=length]")
    assert page.locator("[data-sort=length]").inner_text() == "length ↑"
    page.locator("#histograms figure[data-name=reward] g[role=button]").last.click()
    says(page, re.compile(" of 2,561 traces$"))
    good = int(listed(page).split(" ")[0].replace(",", ""))
    assert 0 < good < 2561
    page.click("[data-tag='tool:price']")
    sync_api.expect(page.locator("#state")).not_to_have_text(re.compile(f"^{good:,} "))
    page.click("#clear")
    says(page, "2,561 traces")
    page.fill("#query", "pink drawer")
    says(page, re.compile("^[0-9]{1,3} of 2,561 traces$"))
    text = int(listed(page).split(" ")[0])
    page.check("#regex")
    page.fill("#query", "(pink|amber) drawer")
    page.wait_for_timeout(1000)
    assert int(listed(page).split(" ")[0]) >= text > 0
    page.fill("#query", "(")
    page.wait_for_selector("#problem:text('no regular expression')")


def test_keys_walk_through_the_list_the_traces_and_the_tokens(page, url):
    page.goto(url)
    page.wait_for_selector(".row b:text('g0000-0')")
    page.focus("#rows")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text('g0000-2')")
    page.keyboard.press("j")
    page.wait_for_selector("h1:text('g0000-3')")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    said = page.locator("#token").inner_text()
    assert "recorded" in said
    address = page.url
    assert "#trace-3-token-" in address
    page.keyboard.press("Escape")
    page.wait_for_selector("#list:not([hidden])")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".chosen")
    assert page.locator("#token").inner_text() == said


def test_a_trace_of_a_run_shows_what_each_step_made_of_it(page, url):
    page.goto(url)
    page.wait_for_selector(".row b:text('g0000-0')")
    page.click("[data-sort=pull]")
    page.locator(".row").first.click()
    page.wait_for_selector("button.step >> nth=1")
    assert page.locator("button.step").count() == 2
    chosen = page.locator("button.step[aria-pressed=true]").inner_text()
    numbers = page.locator("[data-t]").first.get_attribute("data-n")
    assert "trained" in numbers
    assert "old/rollout" in numbers
    page.locator("button.step").first.click()
    sync_api.expect(page.locator("button.step[aria-pressed=true]")).not_to_have_text(chosen)
    assert page.locator("[data-t]").first.get_attribute("data-n") != numbers
    page.keyboard.press("6")
    assert page.locator("#by-entropy").is_checked()
    page.click("text=its group side by side")
    page.wait_for_selector(".beside mark")
    page.click("#to-runs")
    page.wait_for_selector("input[data-run=first]")
    assert "done" in page.locator("#runs-page").inner_text() or "running" in page.locator("#runs-page").inner_text()
    assert page.locator("#runs-page svg polyline").count() > 3


def test_a_hostile_trace_runs_nothing(page, url):
    page.goto(url + "#trace-2560")
    page.wait_for_selector("article")
    assert "alert(1)" in page.locator("#words").inner_text()
    assert page.locator("#trace img, #trace script, #trace svg").count() == 0
    page.goto(url)
    page.wait_for_selector(".row")
    page.fill("#query", "alert(1)")
    page.wait_for_selector(".row b:text('script')")
    page.wait_for_timeout(200)


MARKED = """# A title
Some *weak*, **strong** and `code <b>` words,
and a second line.

- one
- **two**
1. first

> said before

```python
# not a title
x = "**not strong**"
```
[a link](javascript:alert(1)) ![a picture](http://127.0.0.1:9/x.png) <img src=x onerror=alert(1)>
2 * 3 * 4 and a lone ` and ** here"""


def test_a_picture_stands_in_its_message_with_and_without_markdown(page, tmp_path):
    out = io.BytesIO()
    Image.new("RGB", (300, 200), (10, 200, 30)).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    parts = ["**before**", {"type": "image_url", "image_url": {"url": url}}, "**behind**"]
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    traces = written(tmp_path / "t.jsonl", [record(1, messages=[{"role": "user", "content": content}])])
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    with Viewer([traces], tmp_path / "index") as session:
        served = Served(whole(session))
        page.goto(served.url + "#trace-0")
        picture = page.locator("article .said img")
        sync_api.expect(picture).to_be_visible()
        assert picture.evaluate("one => [one.naturalWidth, one.naturalHeight]") == [96, 64]
        page.keyboard.press("m")
        laid = page.locator("article .rendered")
        assert laid.locator("strong").all_inner_texts() == ["before", "behind"]
        assert laid.locator("img").evaluate("one => one.naturalWidth") == 96
        order = laid.evaluate("one => [...one.querySelectorAll('strong, img')].map((each) => each.tagName)")
        assert order == ["STRONG", "IMG", "STRONG"]
        page.goto("about:blank")
        served.close()
    assert not [address for address in asked if not address.startswith((served.url, "data:image/png;", "about:"))]


def test_messages_are_laid_out_as_markdown_where_that_is_asked_for(page, tmp_path):
    answer = {"role": "assistant", "content": MARKED}
    traces = written(tmp_path / "t.jsonl", [record(1, messages=[{"role": "user", "content": HOSTILE}, answer])])
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    with Viewer([traces], tmp_path / "index") as session:
        served = Served(whole(session))
        page.goto(served.url + "#trace-0")
        page.wait_for_selector("article")
        assert page.locator("article.assistant").inner_text().split("\n", 1)[1] == MARKED
        page.keyboard.press("m")
        laid = page.locator("article.assistant .rendered")
        assert laid.locator("[role=heading]").inner_text() == "A title"
        assert laid.locator("em").all_inner_texts() == ["weak"]
        assert laid.locator("strong").all_inner_texts() == ["strong", "two"]
        assert laid.locator("ul li").all_inner_texts() == ["one", "two"]
        assert laid.locator("ol li").all_inner_texts() == ["first"]
        assert laid.locator("blockquote").inner_text() == "said before"
        assert laid.locator("pre").inner_text() == '# not a title\nx = "**not strong**"'
        assert laid.locator("p code").all_inner_texts() == ["code <b>"]
        assert laid.locator("p").last.inner_text() == "\n".join(MARKED.split("\n")[-2:])
        assert page.locator("article a, article img, article script").count() == 0
        assert page.locator("article.user .rendered").inner_text().startswith("</script><script>alert(1)")
        page.screenshot(path=tmp_path / "markdown.png")
        page.uncheck("#markdown")
        assert page.locator(".rendered").count() == 0
        assert page.locator("article.assistant").inner_text().split("\n", 1)[1] == MARKED
        page.goto("about:blank")
        served.close()
    assert not [address for address in asked if not address.startswith((served.url, "data:", "about:"))]


LONG = {
    "stars": ("*a" * 60_000, "a"),
    "ticks": ("`" * 120_000, "`"),
    "lines": ("- a\n" * 30_000, "a"),
    "unclosed": ("```\n" + "a\n" * 50_000, "a"),
    "paragraph": ("a\n" * 66_000, "a"),
    "marks": ("*a*" * 66_000, "a"),
}


@pytest.mark.parametrize("name", LONG)
def test_markdown_that_is_made_to_take_long_does_not_and_is_whole(page, tmp_path, name):
    text, letter = LONG[name]
    traces = written(tmp_path / "t.jsonl", [record(1, messages=[{"role": "assistant", "content": text}])])
    with Viewer([traces], tmp_path / "index") as session:
        served = Served(whole(session))
        page.goto(served.url + "#trace-0")
        page.click("article button.more")
        page.wait_for_selector("article button.more", state="detached")
        click = "document.getElementById('markdown').click()"
        spent = page.evaluate(f"(() => {{ const t = performance.now(); {click}; return performance.now() - t; }})()")
        assert spent < 20_000  # 120,000 characters by the square are more
        assert page.locator(".rendered").evaluate("each => each.textContent").count(letter) == text.count(letter)
        page.goto("about:blank")
        served.close()


def test_a_message_that_cannot_be_laid_out_is_shown_as_it_was_sent(page, tmp_path):
    said = [{"role": "user", "content": "> bad"}, {"role": "assistant", "content": "**good**"}]
    traces = written(tmp_path / "t.jsonl", [record(1, messages=said)])
    with Viewer([traces], tmp_path / "index") as session:
        served = Served(whole(session))
        page.goto(served.url + "#trace-0")
        page.wait_for_selector("article")
        page.evaluate("""(() => {
            const make = document.createElement.bind(document);
            document.createElement = (kind) => { if (kind === "blockquote") throw Error("none"); return make(kind); };
        })()""")
        page.check("#markdown")
        assert page.locator("article.assistant .rendered strong").inner_text() == "good"
        assert page.locator("article.user .said").inner_text() == "> bad"
        assert page.locator("article.user .rendered").count() == 0
        page.goto("about:blank")
        served.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_runs_off_a_narrow_page(browser, url, scheme):
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    for part in ("", "#trace-3", "#trace-2560", "#runs"):
        page.goto("about:blank")
        page.goto(url + part)
        page.wait_for_selector({"": ".row", "#runs": "input[data-run]"}.get(part, "article"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, part
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(18, 21, 24)") == (scheme == "dark")
    context.close()


def test_the_page_follows_a_file_that_grows(page, tmp_path):
    traces = written(tmp_path / "t.jsonl", [record(n) for n in range(3)])
    with Viewer([traces], tmp_path / "index") as session:
        served = Served(whole(session))
        page.goto(served.url)
        says(page, "3 traces")
        with open(traces, "a") as file:
            file.write(json.dumps(record(3)) + "\n")
        says(page, "4 traces")
        page.goto("about:blank")
        served.close()


def test_the_exported_page_needs_no_server(page, run, tmp_path):
    hostile = written(tmp_path / "hostile.jsonl", [record(1, id=HOSTILE, messages=_hostile())])
    with Viewer([SOURCE, hostile, run], tmp_path / "index", MODEL) as session:
        whole(session)
        export_page(session, [0, 1, 2, 3, 40, 2560], tmp_path / "x.html")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "x.html").as_uri())
    page.wait_for_selector(".row b:text('g0000-0')")
    says(page, "6 traces")
    page.fill("#query", "alert(1)")
    says(page, "1 of 6 traces")
    page.locator(".row").first.click()
    page.wait_for_selector("article")
    page.keyboard.press("Escape")
    page.fill("#query", "")
    says(page, "6 traces")
    page.locator(".row").nth(1).click()
    page.wait_for_selector("[data-t]")
    page.click("text=its group side by side")
    page.wait_for_selector(".beside")
    page.click("#to-runs")
    page.wait_for_selector("#runs-page svg")
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []


def test_the_command_serves_until_it_is_told_to_end(page, tmp_path):
    traces = written(tmp_path / "t.jsonl", [record(n) for n in range(3)])
    told = [sys.executable, "-m", "tracegrad.cli", "view", str(traces), "--index", str(tmp_path / "index")]
    served = subprocess.Popen(told, stdout=subprocess.PIPE, text=True)
    try:
        page.goto(served.stdout.readline().split()[-1])
        page.wait_for_selector(".row b:text('t0')")
        page.goto("about:blank")
        served.terminate()
        assert served.wait(60) in (0, -15, 143)
    finally:
        served.kill()
        served.wait()


def _is_wrong(said):
    """An error of the page; not the answer to an expression that is none, which is meant."""
    return said.type == "error" and "400" not in said.text
