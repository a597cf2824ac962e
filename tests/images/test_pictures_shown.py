"""Pictures as they are shown: on the page of a run, in the viewer, by the doctor, in the account of what was read."""

import base64
import io
import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

import tracegrad as tg
import vlm
from picture_calls import PAD, PICTURES, call, read, shown
from picture_pages import GOLDEN, golden
from tracegrad.cli import main
from tracegrad.images.image_files import MediaFile
from tracegrad.prepare.summary import IngestSummary
from tracegrad.report import token_map, write_report
from tracegrad.report.token_map import Thumbnails, small
from tracegrad.trainer.token_log import subset
from tracegrad.view import Viewer, app, detail, export, pieces
from view_pages import whole, written

SECRET = b"a stranger's words"


@pytest.fixture(scope="module")
def recorded(tokenizer):
    return tg.align(tg.read(GOLDEN), tokenizer)


def steps(sequences):
    """A step in which every trained token has the same gradient magnitude."""
    at = sequences.terms
    one = np.ones(len(at), np.float32)
    floats = dict.fromkeys(("ratio", "weight", "advantages", "logprobs", "gradient"), one)
    return [SimpleNamespace(origin=at, keep=one > 0, clipped=one < 0, **floats)]


def page(sequences, tokenizer, path, **more):
    write_report(path, rows=[], sequences=sequences, tokenizer=tokenizer, terms=steps(sequences), **more)
    return path.read_text("utf-8")


def drawn(html):
    """(alt, file) of each picture that is drawn, in order."""
    found = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)">', html)
    return [(alt, base64.b64decode(data)) for alt, data in found]


def tables_of(files):
    return vlm.Files(files).pictures()


def opened(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


# --- report ---


def test_a_picture_stands_once_among_the_tokens_where_its_pads_are(tokenizer, tmp_path):
    found = tg.align(read(call(tokenizer, shown("look", 0, "and", 1, 0), reward=1.0)), tokenizer)
    html = page(found, tokenizer, tmp_path / "report.html")
    assert [alt.split(", ")[0] for alt, _ in drawn(html)] == ["picture 56 x 56", "picture 84 x 56", "picture 56 x 56"]
    assert "image_pad" not in html  # pads are not listed
    names = [found.images.pictures.digest[row].tobytes().hex() for row in found.images.image]
    assert [alt.split("blake3 ")[1] for alt, _ in drawn(html)] == names
    order = [html.index("look"), *(hit.start() for hit in re.finditer("<img ", html))]
    order.insert(2, html.index("and", order[1]))
    assert order == sorted(order)
    assert html.count("4 tokens, not trained") == 2
    for (_, png), number in zip(drawn(html), (0, 1, 0), strict=True):
        assert np.abs(opened(png) - opened(PICTURES[number])).mean() < 12  # 256 colours of those that noise has
    assert np.abs(opened(drawn(html)[0][1]) - opened(PICTURES[2])).mean() > 40


def test_nothing_of_the_file_gets_into_the_page(tokenizer, tmp_path):
    """Text chunks, EXIF, bytes behind the end: a picture is drawn anew."""
    info, exif = PngImagePlugin.PngInfo(), Image.Exif()
    info.add_text("Comment", SECRET.decode())
    exif[0x010E] = SECRET.decode()
    image = Image.open(io.BytesIO(PICTURES[0]))
    files = []
    for kind, more in (("PNG", {"pnginfo": info}), ("JPEG", {"exif": exif}), ("PNG", {"exif": exif})):
        out = io.BytesIO()
        image.save(out, kind, **more)
        files.append(out.getvalue() + SECRET)
    assert all(file.count(SECRET) == 2 for file in files)
    for row, file in enumerate(files):
        png = small(tables_of(files), row)
        assert SECRET not in png
        assert png not in file
        assert set(re.findall(rb"(?s)....(IHDR|PLTE|IDAT|IEND|tEXt|eXIf|iTXt|zTXt|iCCP)", png)) == {
            b"IHDR", b"PLTE", b"IDAT", b"IEND"
        }  # fmt: skip


def test_a_large_picture_is_made_small():
    png = small(tables_of([vlm.picture(640, 480, 1)]), 0)
    assert opened(png).shape == (72, 96, 3)
    assert len(png) < 12_000
    assert opened(small(tables_of([vlm.picture(40, 1000, 1)]), 0)).shape == (96, 4, 3)


def test_a_page_draws_so_many_distinct_pictures_and_says_of_the_others_their_size(tmp_path):
    files = [vlm.picture(16, 8 * n, n) for n in range(1, 6)]
    table, own = tables_of(files), Thumbnails(most=3)
    found = [own.html(table, row) for row in (0, 1, 0, 2, 3, 4, 0)]
    assert [len(drawn(each)) for each in found] == [1, 1, 1, 1, 0, 0, 1]
    assert ">picture 16 x 32</span>" in found[4]
    own.room = 0  # as after 2 MB of them
    assert not drawn(own.html(table, 0))


def test_the_pictures_that_are_decoded_for_a_page_have_so_many_pixels_together(monkeypatch):
    monkeypatch.setattr(token_map, "MOST_PIXELS", 400)
    monkeypatch.setattr(token_map, "PAGE_PIXELS", 1000)
    broken = vlm.picture(20, 20, 9)[:-60]
    table = tables_of([vlm.picture(20, 20, 1), broken, vlm.picture(21, 20, 2), vlm.picture(20, 20, 3)])
    cache = {}
    own = Thumbnails(drawn=cache)
    found = [own.html(table, row) for row in (0, 1, 2, 3, 0)]
    assert [len(drawn(each)) for each in found] == [1, 0, 0, 0, 1]
    assert "cannot be decoded" in found[1]  # and took as long as another
    assert "at most 400 are decoded" in found[2]  # and took nothing
    assert "the pictures of this page have more than 1,000 pixels" in found[3]
    # The next page has what was drawn for another one, and pixels of its own.
    assert [len(drawn(Thumbnails(drawn=cache).html(table, row))) for row in (0, 3)] == [1, 1]


def test_a_page_of_the_largest_pictures_takes_seconds(tmp_path):
    side = int(token_map.MOST_PIXELS**0.5)
    out = io.BytesIO()
    Image.new("1", (side, side)).save(out, "PNG")
    files = [out.getvalue() + bytes([number]) for number in range(40)]  # other bytes behind the end are another file
    table, own, started = tables_of(files), Thumbnails(), time.process_time()
    assert sum(len(drawn(own.html(table, row))) for row in range(40)) == 4
    assert time.process_time() - started < 20


def test_boxes_of_many_places_leave_the_page_small(tokenizer, tmp_path):
    found = tg.align(read(call(tokenizer, shown("look", 0), reward=1.0)), tokenizer)
    many, images = 5000, found.images
    pads = np.flatnonzero(found.ids == PAD)
    more = np.arange(pads[-1] + 1, pads[-1] + 1 + many)
    ids = np.insert(found.ids, pads[-1] + 1, [PAD] * many)
    columns = {
        name: np.insert(getattr(found, name), pads[-1] + 1, [getattr(found, name)[pads[-1]]] * many)
        for name in ("source", "trainable", "rollout_logprobs", "turn", "version", "alignment_level", "inv_temperature")
    }
    at = np.concatenate([images.position, more]).astype(np.int32)
    cu = np.concatenate([images.cu_features, 4 + np.arange(1, many + 1)])
    every = {"cu_images": np.array([0, 1 + many]), "cu_features": cu, "image": np.zeros(1 + many, np.int32)}
    every |= {"position": at, "pictures": replace(images.pictures, sources=(Gone(),))}
    found = replace(found, ids=ids, cu_seqlens=np.array([0, len(ids)]), images=replace(images, **every), **columns)
    html = page(found, tokenizer, tmp_path / "report.html")
    assert 500 < html.count('class="picture box"') < 2000
    assert "more tokens are not shown" in html
    assert len(html) < 400_000


class Gone:
    def has_picture(self, digest):
        return False


def test_a_picture_that_is_broken_or_gone_is_a_box_with_the_reason(tokenizer, tmp_path, monkeypatch):
    found = tg.align(read(call(tokenizer, shown(0, "and", 1), reward=1.0)), tokenizer)
    images = found.images
    gone = replace(found, images=replace(images, pictures=replace(images.pictures, sources=(Gone(),))))
    html = page(gone, tokenizer, tmp_path / "gone.html")
    assert not drawn(html)
    assert html.count(": only its digest is recorded") == 2
    assert "picture 84 x 56: TG-IMAGE-006: the image" in html
    whole = vlm.picture(56, 56, 9)
    cut = vlm.Files([whole[: len(whole) // 2] + whole[-12:]])
    table = replace(tables_of([whole]), digest=cut_digest(cut), sources=(cut,))
    box = Thumbnails().html(table, 0)
    assert not drawn(box)
    assert "cannot be decoded" in box
    monkeypatch.setattr(token_map, "MOST_PIXELS", 100)
    assert "at most 100 are decoded" in Thumbnails().html(tables_of([PICTURES[0]]), 0)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    html = page(found, tokenizer, tmp_path / "bare.html")
    assert not drawn(html)
    assert html.count("decoded by Pillow, which is not installed") == 2


def cut_digest(files):
    return np.array([list(digest) for digest in files.files], np.uint8)


def test_what_an_error_says_of_a_strangers_file_is_text():
    class Hostile(Gone):
        def has_picture(self, digest):
            return True

        def picture_bytes(self, digest):
            raise tg.errors.ReadError('"><script>alert(1)</script><img src=https://evil.example/x onerror=alert(1)>')

    table = replace(tables_of([PICTURES[0]]), sources=(Hostile(),), media_type=('image/"><script>',))
    box = Thumbnails().html(table, 0)
    assert re.findall("<[^>]*>", box)[1:] == ["</span>"]
    for needle in ("<script", "<img", "https://", "src=", "onerror="):
        assert needle not in box


def test_marks_between_parts_of_a_picture_stay_tokens(tmp_path):
    split = vlm.split_folder(tmp_path / "model")
    tokenizer = tg.Tokenizer.from_pretrained(split)
    from transformers import AutoProcessor

    messages = [shown("look", 0)]
    whole = AutoProcessor.from_pretrained(split)
    text = tokenizer.render(messages, add_generation_prompt=True).text
    ids = whole(text=[text], images=[[Image.open(io.BytesIO(PICTURES[0])).convert("RGB")]])["input_ids"][0]
    found = tg.align(read(call(tokenizer, *messages, ids=[int(each) for each in ids], reward=1.0)), tokenizer)
    html = page(found, tokenizer, tmp_path / "report.html")
    assert len(drawn(html)) == 1
    assert html.count("row_2_col_1") == 1
    assert "20 tokens, not trained" in html


def test_the_page_loads_nothing(recorded, tokenizer, tmp_path):
    html = page(recorded, tokenizer, tmp_path / "report.html")
    assert len(drawn(html)) > 10
    assert "img-src data:" in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    sources = re.findall(r'\b(?:src|href)="([^"]*)"', html)
    assert sources
    assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", source) for source in sources)


def test_text_alone_gives_the_page_that_it_gave(tokenizer, tmp_path):
    text = tg.align(read(call(tokenizer, {"role": "user", "content": "x"}, reward=1.0)), tokenizer)
    html = page(text, tokenizer, tmp_path / "report.html")
    assert "<img" not in html
    assert "img-src" not in html
    assert 'class="picture' not in html


def test_pictures_of_a_saved_folder_are_drawn_from_it(recorded, tokenizer, tmp_path):
    recorded.save(tmp_path / "kept")
    again = tg.Sequences.load(tmp_path / "kept")
    assert isinstance(again.images.pictures.sources[0], MediaFile)
    one, two = (page(each, tokenizer, tmp_path / "report.html") for each in (recorded, again))
    assert drawn(one) == drawn(two)
    media = tmp_path / "kept" / "media.bin"
    media.write_bytes(bytes(len(media.read_bytes())))
    html = page(tg.Sequences.load(tmp_path / "kept"), tokenizer, tmp_path / "report.html")
    assert not drawn(html)
    assert "are not those that were written" in html


# --- view ---


def opened_at(records, tmp_path, model=None):
    return Viewer([written(tmp_path / "t.jsonl", records)], tmp_path / "index", model)


def test_a_message_shows_its_picture_and_not_its_handle(tokenizer, folder, tmp_path):
    record = call(tokenizer, shown("look", 0, "and", 1, 2), reward=1.0)
    with opened_at([record], tmp_path, folder) as session:
        found = pieces.trace(whole(session), 0)
        said = found["messages"]
        assert [alt.split(",")[0] for alt, _ in drawn(said)] == [
            "picture 56 x 56", "picture 84 x 56", "picture 56 x 56"
        ]  # fmt: skip
        assert "blake3:" not in said
        assert "[image]" not in said
        assert said.index("look") < said.index("<img") < said.index("and\n") < said.rindex("<img")
        assert drawn(found["tokens"]) == drawn(said)
        assert "image_pad" not in found["tokens"]
        assert "[image]" in session.text(0)  # as a search reads it
        policy = app.POLICY
        assert "img-src 'self' data:" in policy


def test_parts_of_a_long_message_show_each_picture_once(tokenizer, tmp_path):
    record = call(tokenizer, shown("x" * 3994, 0, "y" * 10_000, 1, "z"), reward=1.0)
    with opened_at([record], tmp_path) as session:
        first = pieces.trace(whole(session), 0)["messages"]
        # "[image]" begins at 3995 and ends behind the 4,000 characters that are shown at once.
        assert len(drawn(first)) == 1
        rest = pieces.message(session, 0, 0, detail.FOLD)
        assert [alt.split(",")[0] for alt, _ in drawn(rest)] == ["picture 84 x 56"]
        assert re.sub("<[^>]*>", "", first).count("x" * 3994) == 1
        assert re.sub("<[^>]*>", "", rest).replace("\n", "") == "y" * 10_000 + "z"


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_message_in_parts_is_the_message(cut):
    said = [("ab\n", ""), ("[image]", "d"), ("[image]", "e"), ("cd\n", "")]
    parts, start = [], 0
    while start is not None:
        html = detail.message_html(said, 0, start, cut, lambda digest: f"({digest})")
        more = re.search(r'<button.*data-start="(\d+)".*', html)
        parts.append(html[: more.start()] if more else html)
        start = int(more[1]) if more else None
    assert "".join(parts) == "ab\n\n(d)\n(e)\ncd\n"


def test_a_handle_that_a_stranger_wrote_is_a_box(tmp_path):
    handle = "blake3:" + "ab" * 32
    told = [{"type": "image", "image": handle}, {"type": "image", "image": "blake3:<script>"}]
    record = {"messages": [{"role": "user", "content": told}, {"role": "assistant", "content": "x"}], "id": "t"}
    with opened_at([record], tmp_path) as session:
        said = pieces.trace(whole(session), 0)["messages"]
        assert not drawn(said)
        assert said.count("it is not in the record") == 1
        assert "<script" not in said


def test_an_exported_page_draws_so_many_pictures_in_all(tokenizer, folder, tmp_path, monkeypatch):
    records = [call(tokenizer, shown("look", n), reward=1.0, id=str(n)) for n in range(3)]
    records.append({**call(tokenizer, {"role": "user", "content": "x"}), "id": "text"})
    with opened_at(records, tmp_path, folder) as session:
        html = export.page_of(whole(session), [0, 1, 2, 3]).replace("\\u003c", "<").replace("\\u003e", ">")
        assert len(re.findall(r'<img alt=\\"picture', html)) == 6  # in messages and among tokens
        assert "; img-src data:" in html
        monkeypatch.setattr(export, "Thumbnails", lambda **told: Thumbnails(1, **told))
        html = export.page_of(session, [0, 1, 2, 3]).replace("\\u003c", "<").replace("\\u003e", ">")
        assert len(re.findall(r'<img alt=\\"picture', html)) == 2
        assert "img-src data:" not in export.page_of(session, [3])


# --- account ---


def test_the_account_says_how_many_pictures_stand_in_how_many_traces(tokenizer):
    records = [call(tokenizer, shown(*numbers), id=str(n)) for n, numbers in enumerate([(0, 1, 0), (2,), (0,)])]
    records.append({**call(tokenizer, {"role": "user", "content": "x"}), "id": "text"})
    found = tg.align(read(*records), tokenizer)
    whole_of, parts = IngestSummary("x"), IngestSummary("x")
    whole_of.add(found)
    assert "pictures 5 places of 3 pictures in 3 traces" in whole_of.lines()
    assert whole_of.as_dict()["pictures"] == {"places": 5, "pictures": 3, "traces": 3}
    for row in range(4):  # a picture of several parts counts once
        part = IngestSummary("x")
        part.add(subset(found, [row])[0])
        parts.merge(json.loads(json.dumps(part.counts())))
    assert parts.images == whole_of.images
    text = IngestSummary("x")
    text.add(subset(found, [3])[0])
    assert not any(line.startswith("pictures") for line in text.lines())
    assert "pictures" not in text.as_dict()


def test_one_picture_is_one(tokenizer):
    one = IngestSummary("x")
    one.add(tg.align(read(call(tokenizer, shown(0))), tokenizer))
    assert "pictures 1 place of 1 picture in 1 trace" in one.lines()


def test_prepare_says_what_it_wrote(folder, tokenizer, tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", golden("one", "two", "twice"))
    assert main(["prepare", str(path), "--model", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "pictures 5 places of 2 pictures in 3 traces" in capsys.readouterr().out
    told = json.loads((tmp_path / "out" / "alignment_report.json").read_text())
    assert told["pictures"] == {"places": 5, "pictures": 2, "traces": 3}


def test_what_a_run_has_kept_is_shown_with_its_pictures(folder, tokenizer, tmp_path, capsys):
    """From records over a step to report.html, summary.json, and the viewer on the run alone."""
    rows = [{**row, "reward": float(n % 2), "group": "g"} for n, row in enumerate(golden("one", "two", "four", "tool"))]
    path = written(tmp_path / "t.jsonl", rows)
    told = ["--model", str(folder), "--out", str(tmp_path / "run"), "--token_log.mode", "all", "--data.holdout", "0"]
    assert main(["train", str(path), *told]) == 0
    assert "pictures 9 places of 4 pictures in 4 traces" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["pictures"] == {"places": 9, "pictures": 4, "traces": 4}
    assert len(drawn((tmp_path / "run" / "report.html").read_text())) == 9
    path.unlink()
    with Viewer([tmp_path / "run"], tmp_path / "index") as session:
        whole(session)
        named = {session.locate(n)[0]: n for n in range(session.rows)}
        found = pieces.trace(session, named["four"])
        assert len(drawn(found["tokens"])) == 4
        assert found["messages"] == ""
        assert found["steps"] == 1
