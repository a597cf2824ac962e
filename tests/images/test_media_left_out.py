"""What a reader of others' records takes no part of is found in the record: a picture there holds the whole trace."""

import copy
import json
from pathlib import Path

import pytest

import tracegrad as tg
from media_template import TEMPLATE
from vocabulary import load, model

GOLDEN = Path(__file__).parents[1] / "golden"
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
LISTS = ("content", "parts", "output", "input", "messages")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load(model(tmp_path_factory.mktemp("media"), TEMPLATE))


def golden() -> list:
    paths = sorted([*GOLDEN.glob("servers/*.jsonl"), *GOLDEN.glob("dumps/*.jsonl")])
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines()):
            found.append(pytest.param(line, id=f"{path.stem}-{number}"))
    return found


def read(row):
    return tg.Traces.from_records([row])


def typed_lists(value, key=""):
    """Every list of typed parts in a record that shows what was said, the places where a picture would stand."""
    if isinstance(value, list):
        parts = [each for each in value if isinstance(each, dict)]
        if key in LISTS and parts and all("type" in each for each in parts):
            yield value
        for each in value:
            yield from typed_lists(each, key)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in ("tools", "arguments"):
                yield from typed_lists(each, name)


def held(tokenizer, row):
    """Whether each generation is held for a picture; True too where the reader refuses the record."""
    try:
        traces = read(row)
    except tg.TracegradError:
        return True
    found = tg.align(traces, tokenizer, assume_canonical=True, text_only=True)
    sampled = found.turn >= 0
    return bool(found.has_unknown_media.all()) and sampled.any() and not found.trainable.any()


@pytest.mark.parametrize("line", golden())
def test_a_picture_anywhere_in_a_record_holds_the_trace(tokenizer, line):
    try:
        row = json.loads(line)
    except ValueError:
        pytest.skip("a line of a stream")
    if not isinstance(row, dict):
        pytest.skip("no record of its own")
    for index in range(len(list(typed_lists(row)))):
        with_picture = copy.deepcopy(row)
        list(typed_lists(with_picture))[index].append(PICTURE)
        assert held(tokenizer, with_picture), f"list {index} of typed parts"


def responses(output, *content):
    """A call of the Responses API whose input holds a function's output, and whose answer lists these parts."""
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "red"}, *content]}
    asked = [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    return {"request": {"input": asked}, "response": {"object": "response", "status": "completed", "output": [said]}}


def anthropic(*result):
    asked = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"image": "a"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(result)}]},
    ]
    answer = {"type": "message", "role": "assistant", "stop_reason": "end_turn", "content": []}
    said = [{"type": "text", "text": "red"}]
    return {"request": {"messages": asked}, "response": {**answer, "content": said, "usage": {"output_tokens": 1}}}


def ollama(**request):
    response = {"model": "m", "done": True, "done_reason": "stop", "response": "red"}
    return {"request": {"model": "m", "prompt": "q", **request}, "response": response}


def otel(*parts):
    message = [{"role": "user", "parts": [{"type": "text", "content": "q"}, *parts]}]
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "red"}], "finish_reason": "stop"}]
    told = {"gen_ai.input.messages": json.dumps(message), "gen_ai.output.messages": json.dumps(said)}
    return {"name": "chat", "attributes": told}


def chat(**columns):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "red"}]
    return {"messages": messages, **columns}


TEXT = {"type": "text", "text": "seen"}
DATA = {"type": "image", "source": {"data": "AAAA"}}


@pytest.mark.parametrize(
    ("shown", "plain"),
    [
        (responses([{"type": "input_image", "image_url": "data:x"}]), responses([{"type": "input_text", "text": "a"}])),
        (responses("ok", {"type": "output_image", "data": "A"}), responses("ok")),
        (anthropic(TEXT, DATA), anthropic(TEXT)),
        (anthropic(TEXT, {"type": "document", "source": {"data": "A"}}), anthropic(TEXT, {"type": "text", "text": ""})),
        (ollama(images=["AAAA"]), ollama(images=[])),
        (otel({"type": "blob", "modality": "image", "data": "AAAA"}), otel()),
        (otel({"type": "uri", "mime_type": "image/png", "uri": "a.png"}), otel({"type": "uri", "uri": "a.txt"})),
        (chat(images=["AAAA"]), chat(images=[])),
        (chat(image={"bytes": "AAAA"}), chat(image=None, metadata={"image": "AAAA", "images": ["AAAA"]})),
        (chat(videos=[7]), chat(video=None, image_size=7)),
    ],
)
def test_each_way_to_show_what_is_no_text_holds_and_its_neighbour_in_text_does_not(tokenizer, shown, plain):
    assert held(tokenizer, shown)
    found = tg.align(read(plain), tokenizer, assume_canonical=True, text_only=True)
    assert not found.has_unknown_media.any()
    assert found.trainable.any()


def test_the_finding_says_what_was_left_out(tokenizer):
    found = tg.align(read(chat(images=["AAAA"])), tokenizer, text_only=True)
    told = [
        text
        for code, text in zip(found.alignment_report.reason, found.alignment_report.detail, strict=True)
        if code == 32
    ]
    assert told
    assert '"images" in the record, which none of the messages has' in told[0]
