"""Pictures in every form that records have them in: the same digest at the same place, and the file found again."""

import base64
import json

import pyarrow as pa
import pytest

import tracegrad as tg
import vlm

FILES = [vlm.picture(56, 56, 1), vlm.picture(84, 56, 2, kind="JPEG")]
DATA = [base64.b64encode(file).decode() for file in FILES]
URLS = [f"data:image/{kind};base64,{data}" for kind, data in zip(("png", "jpeg"), DATA, strict=True)]


def chat(*parts, **more):
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "x"}], **more}


def anthropic(content):
    response = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "x"}],
        "stop_reason": "end_turn",
    }
    return {"request": {"messages": [{"role": "user", "content": content}]}, "response": response}


def source(number):
    kind = ("image/png", "image/jpeg")[number]
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": DATA[number]}}


def gemini(*parts):
    answer = {"candidates": [{"content": {"role": "model", "parts": [{"text": "x"}]}, "finishReason": "STOP"}]}
    return {"request": {"contents": [{"role": "user", "parts": list(parts)}]}, "response": answer}


def responses(*items):
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}]
    answer = {"object": "response", "status": "completed", "output": output}
    return {"request": {"input": list(items)}, "response": answer}


def inline(number):
    return {"inlineData": {"mimeType": "image/png", "data": DATA[number]}}


def text(said):
    return {"type": "text", "text": said}


CALL = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
FORMS = {
    "chat": chat(
        text("a"),
        {"type": "image_url", "image_url": {"url": URLS[0]}},
        text("b"),
        {"type": "image_url", "image_url": URLS[1]},
    ),
    "anthropic": anthropic([text("a"), source(0), text("b"), source(1)]),
    "gemini": gemini({"text": "a"}, inline(0), {"text": "b"}, inline(1)),
    "responses": responses(
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": URLS[0]},
                {"type": "input_text", "text": "b"},
                {"type": "input_image", "image_url": URLS[1]},
            ],
        }
    ),
    "column": chat(
        {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}, images=URLS
    ),
    "qwen": chat({"text": "a"}, {"image": URLS[0]}, {"text": "b"}, {"image": URLS[1]}),
}


def shown(messages):
    """Of the first message with parts: its texts, and the numbers of its pictures."""
    content = next(message["content"] for message in messages if isinstance(message["content"], list))
    names = [f"blake3:{digest}" for digest in map(hexed, FILES)]
    return [names.index(part["image"]) if "image" in part else part["text"] for part in content]


def hexed(file):
    from tracegrad import _core

    return _core.picture_digest(file).hex()


def read(record):
    traces = tg.Traces.from_records([record])
    assert [traces.images.bytes_of(row) for row in range(len(traces.images))] == FILES
    for data in DATA:
        assert data not in json.dumps(traces[0].messages)
    return traces[0]


@pytest.mark.parametrize("form", FORMS)
def test_text_and_pictures_keep_their_order(form):
    assert shown(read(FORMS[form]).messages) == ["a", 0, "b", 1]


def test_pictures_in_the_results_of_tools():
    told = anthropic([text("q")])
    blocks = [text("a"), source(0), text("b"), source(1)]
    told["request"]["messages"] += [
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": blocks}]},
    ]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URLS[0]}]
    parts += [{"type": "input_text", "text": "b"}, {"type": "input_image", "image_url": URLS[1]}]
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = [
        {"role": "user", "content": "q"},
        called,
        {"type": "function_call_output", "call_id": "c", "output": parts},
    ]
    for record in (told, responses(*items)):
        messages = read(record).messages
        assert shown(messages) == ["a", 0, "b", 1]
        assert next(message for message in messages if isinstance(message["content"], list))["role"] == "tool"


def test_rows_of_trl_and_of_tables():
    ask = [{"role": "user", "content": "a"}]
    row = {"prompt": ask, "completion": [{"role": "assistant", "content": "x"}], "images": URLS}
    assert shown(read(row).messages) == [0, 1, "a"]
    single = tg.Traces.from_records([{**row, "images": None, "image": URLS[0]}])
    assert shown(single[0].messages) == [0, "a"]
    images = [{"bytes": file, "path": None} for file in FILES]
    table = pa.Table.from_pylist([{"messages": [*ask, {"role": "assistant", "content": "x"}], "images": images}])
    found = tg.read(table)
    assert shown(found[0].messages) == [0, 1, "a"]
    assert [found.images.bytes_of(row) for row in (0, 1)] == FILES


def test_a_record_that_is_no_strict_json_gives_its_pictures_back(tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({**FORMS["chat"], "reward": float("nan"), "other": float("inf")}) + "\n")
    found = tg.read(path)
    assert [found.images.bytes_of(row) for row in (0, 1)] == FILES


def test_a_column_beside_a_picture_that_stands_there_loses_neither():
    part = {"type": "image_url", "image_url": URLS[0]}
    found = tg.Traces.from_records([chat(part, {"type": "image"}, images=[URLS[1]])])
    assert shown(found[0].messages) == [0, 1]
    assert {found.images.bytes_of(row) for row in (0, 1)} == set(FILES)


def test_pictures_in_python_pickles_and_joined_sets():
    import pickle

    one, two = (tg.Traces.from_records([chat({"type": "image_url", "image_url": url})]) for url in URLS)
    both = pickle.loads(pickle.dumps(one + two + one))
    assert [both.images.bytes_of(row) for row in range(len(both.images))] == FILES
