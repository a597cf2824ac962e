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
from tracegrad.data.codes import LEVEL_TEXT, MISMATCH_TEXT
from tracegrad.online.buffer import GroupWriter
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
    sequences = tg.align(tg.read(SOURCE, limit=16), tg.Tokenizer.from_pretrained(MODEL), on_error="skip")
    told = {"train.epochs": 2, "train.groups_per_step": 1, "data.holdout": 0.0, "optimizer.lr": 1e-3}
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


@pytest.fixture(scope="module")
def tab(browser):
    """The one page of the tests: each further one costs a quarter of a second of a processor."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    return context.new_page()


@pytest.fixture
def page(tab):
    wrong = []
    listeners = {
        "pageerror": lambda error: wrong.append(str(error)),
        "dialog": lambda dialog: wrong.append("a dialog") or dialog.dismiss(),
        "console": lambda said: wrong.append(said.text) if said.type == "error" and "400" not in said.text else None,
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(color_scheme="light")
    yield tab
    tab.goto("about:blank")
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    assert not wrong


PREFIX = "run-2026-11-28/task-0017/attempt-of-the-same-prompt-"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """40 traces whose ids share a long prefix: number n is about `amber number n`."""
    folder = tmp_path_factory.mktemp("small")
    traces = written(folder / "t.jsonl", [record(n, id=f"{PREFIX}{n}") for n in range(40)])
    with Viewer([traces], folder / "index") as session:
        served = Served(whole(session))
        yield served.url
        served.close()


def ids(page):
    """The ids of the rows that are in the page, in their order."""
    sync_api.expect(page.locator(".row b:text-is('…')")).to_have_count(0)
    rows = page.evaluate("[...document.querySelectorAll('.row b')].map((b) => [b.closest('.row').id, b.textContent])")
    return [name for _, name in sorted(rows, key=lambda row: int(row[0].removeprefix("row-")))]


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
    assert first == "201"  # the text of the hostile answer in the model's tokens
    page.click("[data-sort=length]")
    assert page.locator("[data-sort=length]").inner_text() == "length ↑"
    page.click("#filters summary")
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
    page.wait_for_selector("#problem:text('TG-VIEW-011')")


def test_keys_walk_through_the_list_the_traces_and_the_tokens(page, url):
    page.goto(url)
    page.wait_for_selector(".row b:text('g0000-0')")
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


def opens(page, n):
    """Presses Enter, and waits for the trace with this number."""
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("h1:visible")).to_have_text(f"{PREFIX}{n}")


def test_keys_work_from_the_start_after_escape_and_after_a_search(page, small):
    page.goto(small)
    says(page, "40 traces")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    opens(page, 1)
    page.keyboard.press("j")
    sync_api.expect(page.locator("h1:visible")).to_have_text(f"{PREFIX}2")
    page.keyboard.press("Escape")
    page.wait_for_selector("#list:not([hidden])")
    page.keyboard.press("j")
    opens(page, 3)  # the list continues at the trace that was open
    page.keyboard.press("Escape")
    page.wait_for_selector("#list:not([hidden])")
    page.keyboard.press("/")
    page.keyboard.type("number 3")
    says(page, "11 of 40 traces")  # 3 and 30 to 39
    page.keyboard.press("Escape")
    assert page.locator("#query").input_value() == "number 3"
    page.keyboard.press("j")
    opens(page, 30)
    page.keyboard.press("Escape")
    page.wait_for_selector("#list:not([hidden])")
    page.fill("#query", "no such number")
    says(page, "0 of 40 traces")  # so that the next count is of the next search
    page.fill("#query", "number 2")
    says(page, "11 of 40 traces")
    page.keyboard.press("Enter")  # of the search field
    sync_api.expect(page.locator("#rows")).to_be_focused()
    page.keyboard.press("j")
    opens(page, 20)


def test_tab_reaches_the_list_soon_and_the_column_titles_after_it(page, small):
    page.goto(small)
    says(page, "40 traces")
    focused = []
    while "rows" not in focused and len(focused) < 6:
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.id"))
    assert len(focused) <= 5
    assert focused[-1] == "rows"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.sort") == "reward"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("[data-sort=advantage]")).to_be_focused()
    sync_api.expect(page.locator("[data-sort=advantage]")).to_have_text("advantage ↓")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "export"


@pytest.mark.parametrize("size", [(1280, 900), (375, 800)])
def test_the_list_starts_above_the_fold_and_the_address_has_the_state_of_the_histograms(page, small, size):
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(small)
    says(page, "40 traces")
    assert not page.locator("#histograms").is_visible()
    page.locator(".row").nth(4).wait_for()
    assert page.locator(".row").nth(4).bounding_box()["y"] < size[1] / 2
    page.click("#filters summary")
    page.wait_for_selector("#histograms svg")
    sync_api.expect(page).to_have_url(re.compile("histograms=1"))
    page.reload()
    page.wait_for_selector("#histograms svg")


def test_the_address_has_the_list_and_back_undoes_a_change(page, small):
    page.goto(small)
    says(page, "40 traces")
    page.fill("#query", "number 1")
    says(page, "11 of 40 traces")
    page.click("[data-sort=staleness]")
    page.click("[data-sort=staleness]")
    page.click("#filters summary")
    page.click("[data-tag='tool:price']")
    says(page, "6 of 40 traces")  # 1, 11, 13, 15, 17, 19
    page.locator("#histograms figure[data-name=staleness] g[role=button]").first.click()
    says(page, "2 of 40 traces")  # version n % 3 of at most 2: 11 and 17
    shared, order = page.url, ids(page)
    assert order == [f"{PREFIX}11", f"{PREFIX}17"]
    page.reload()
    says(page, "2 of 40 traces")
    page.goto("about:blank")
    page.goto(shared)
    says(page, "2 of 40 traces")
    assert ids(page) == order
    assert page.locator("#query").input_value() == "number 1"
    page.keyboard.press("Enter")
    page.wait_for_selector("article")
    page.go_back()
    says(page, "2 of 40 traces")
    page.click("#clear")
    says(page, "40 traces")
    page.go_back()
    says(page, "2 of 40 traces")
    page.goto(small + "#list?q=number+1&sort=staleness:up")
    says(page, "11 of 40 traces")
    # version 2 has staleness 0: 11, 14, 17; version 1 has 1: 1, 10, 13, 16, 19; version 0 has 2: 12, 15, 18
    assert ids(page) == [f"{PREFIX}{n}" for n in (11, 14, 17, 1, 10, 13, 16, 19, 12, 15, 18)]
    page.goto(small + "#list?q=number+1&sort=none&filter=reward:x..y&filter=none:0..1&tag=none&run=none")
    says(page, "0 of 40 traces")  # no trace has this tag


def test_back_leads_through_the_changes_of_one_page(page, small):
    page.goto(small)
    says(page, "40 traces")
    page.click("[data-sort=turns]")
    page.fill("#query", "number 1")
    says(page, "11 of 40 traces")
    page.go_back()
    says(page, "40 traces")
    assert page.locator("#query").input_value() == ""
    assert page.locator("[data-sort=turns]").inner_text() == "turns ↓"
    page.go_back()
    sync_api.expect(page.locator("[data-sort=turns]")).to_have_text("turns")
    page.go_forward()
    page.go_forward()
    says(page, "11 of 40 traces")


def test_ids_are_found_and_distinguishable_on_a_narrow_page(page, small):
    page.set_viewport_size({"width": 375, "height": 800})
    page.goto(small)
    says(page, "40 traces")
    assert ids(page)[:3] == [f"{PREFIX}{n}" for n in range(3)]
    visible = page.evaluate("""[...document.querySelectorAll('.row')].slice(0, 9).map((row) => {
        const cell = row.querySelector('.trace').getBoundingClientRect(), end = row.querySelector('b .end');
        const box = end.getBoundingClientRect();
        return [end.textContent, box.width > 0 && box.left >= cell.left && box.right <= cell.right];
    })""")
    assert visible == [[f"{PREFIX}{n}"[-10:], True] for n in range(9)]
    page.fill("#query", f"{PREFIX}7")
    says(page, "1 of 40 traces")
    page.fill("#query", "task-0017")
    says(page, "40 traces")
    page.fill("#query", "PROMPT-3")
    says(page, "11 of 40 traces")


def test_levels_reasons_and_staleness_have_a_sentence(page, url, small):
    page.goto(small)
    says(page, "40 traces")
    level = f"Alignment level T0: {LEVEL_TEXT['T0']}."
    assert page.locator(f'.row [title="{level}"]').count() > 5
    assert "Policy versions between" in page.locator("[data-sort=staleness]").get_attribute("title")
    page.keyboard.press("Enter")
    page.wait_for_selector("article")
    assert page.locator(f'#facts [title="{level}"]').inner_text() == "level\nT0"
    assert page.locator("#facts [title^='Policy versions between']").count() == 1
    reason = "R03 lossy_text"
    page.goto(url + f"#list?histograms=1&tag=mismatch:{reason}")
    says(page, "26 of 2,561 traces")
    sentence = f"Mismatch R03: {MISMATCH_TEXT[reason]}."
    assert page.locator(f"[data-tag='mismatch:{reason}']").get_attribute("title") == sentence
    page.keyboard.press("Enter")
    page.wait_for_selector("article")
    assert page.locator(f"table.mismatches td[title='{sentence}']").count() >= 1


def faults(page):
    """The serious and critical faults that axe finds in the page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in found if fault["impact"] in ("serious", "critical")]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark"), (1280, "dark"), (375, "light")])
@pytest.mark.first_cases(2)  # each width and each scheme once
def test_a_checker_finds_no_serious_fault(browser, url, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(url)
    for part, selector in (
        ("#list", ".row"),
        ("#list?histograms=1&sort=gradient&tag=mismatch:R03 lossy_text", "#histograms svg"),
        ("#trace-3", "button.step"),
        ("#runs", "#runs-page svg"),
    ):
        page.evaluate("(hash) => { location.hash = hash; }", part)
        page.wait_for_selector(f"{selector} >> visible=true")
        assert faults(page) == [], part
        if "mismatch" in part:
            says(page, "26 of 2,561 traces")
            page.keyboard.press("Enter")
            page.wait_for_selector("table.mismatches >> visible=true")
            assert faults(page) == []
    page.evaluate("document.body.append(document.createElement('input'))")
    assert [name for name, _ in faults(page)] == ["label"]  # the checker finds what is there
    context.close()


def test_a_trace_of_a_run_shows_what_each_step_made_of_it(page, url):
    page.goto(url)
    page.wait_for_selector(".row b:text('g0000-0')")
    page.click("[data-sort=gradient]")
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
    page.click("text=compare its group")
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
    page.wait_for_selector(".row b:has-text('script')")
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
        picture = page.locator("article .content img")
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
    "stars": ("*a" * 30_000, "a"),
    "ticks": ("`" * 60_000, "`"),
    "lines": ("- a\n" * 15_000, "a"),
    "unclosed": ("```\n" + "a\n" * 25_000, "a"),
    "paragraph": ("a\n" * 33_000, "a"),
    "marks": ("*a*" * 33_000, "a"),
}


def test_markdown_that_is_made_to_take_long_does_not_and_is_whole(page, tmp_path):
    said = [[{"role": "assistant", "content": text}] for text, _ in LONG.values()]
    traces = written(tmp_path / "t.jsonl", [record(n, messages=messages) for n, messages in enumerate(said)])
    click = "document.getElementById('markdown').click()"
    with Viewer([traces], tmp_path / "index") as session:
        served = Served(whole(session))
        for n, (name, (text, letter)) in enumerate(LONG.items()):
            page.goto("about:blank")
            page.goto(f"{served.url}#trace-{n}")
            page.click("article button.more")
            page.wait_for_selector("article button.more", state="detached")
            timed = f"(() => {{ const t = performance.now(); {click}; return performance.now() - t; }})()"
            assert page.evaluate(timed) < 5_000, name  # 60,000 characters by the square are more
            shown = page.locator(".rendered").evaluate("each => each.textContent")
            assert shown.count(letter) == text.count(letter), name
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
        assert page.locator("article.user .content").inner_text() == "> bad"
        assert page.locator("article.user .rendered").count() == 0
        page.goto("about:blank")
        served.close()


def test_nothing_runs_off_a_narrow_page_of_either_scheme(page, url):
    page.set_viewport_size({"width": 390, "height": 800})
    for part in ("", "#trace-3", "#trace-2560", "#runs"):
        page.goto("about:blank")
        page.goto(url + part)
        page.wait_for_selector({"": ".row", "#runs": "input[data-run]"}.get(part, "article"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, part
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 21, 24)") == (scheme == "dark")


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


def test_new_metrics_rollouts_and_matches_appear_without_a_reload(page, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    metrics = written(run / "metrics.jsonl", [{"step": 1, "reward": 0.25, "trajectories": 8}])
    traces = written(tmp_path / "t.jsonl", [record(1), record(2)])
    with Viewer([traces, run], tmp_path / "index") as session:
        served = Served(whole(session))
        asked = []
        page.on("response", lambda response: asked.append((response.url.rsplit("/", 1)[1], response.status)))
        page.goto(served.url + "#runs")
        page.wait_for_selector("td:text('0.25 → 0.25')")
        with open(metrics, "a") as file:
            file.write(json.dumps({"step": 2, "reward": 0.75, "trajectories": 16}) + "\n")
        page.wait_for_selector("td:text('0.25 → 0.75')")
        page.click("#to-list")
        page.fill("#query", "number 1")
        says(page, "1 of 2 traces")
        with GroupWriter(run / "played") as writer:  # the folder did not exist before
            writer.write([record(3, id="new 3"), record(1, id="new 1")])
            says(page, "2 of 4 traces")
        page.wait_for_timeout(2500)
        assert ("state", 304) in asked  # nothing new is a short answer
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
    page.click("text=compare its group")
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
