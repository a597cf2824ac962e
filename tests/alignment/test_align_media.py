"""What was sampled behind a picture, a sound or a video is held and counted, never trained: ids do not show it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracegrad as tg
from media_template import TEMPLATE
from recorded_turns import QUIET
from spoil import MODEL, diagnosed, names, recorded, spoiled
from tracegrad.prepare.summary import IngestSummary
from vocabulary import align, ids_of, load, model, reasons, record, said, trained, user

PAD = 640
WORDS = [{"type": "text", "text": "look"}, {"type": "input_text", "text": "here"}, {"text": "and here"}, "there", None]
MEDIA = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "image_url", "image_url": None, "uuid": "x"},
    {"type": "input_image", "image_url": "https://example.org/a.png"},
    {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
    {"type": "image"},
    {"image": "a.png"},
    {"text": "a caption", "image": "a.png"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "a.wav"}},
    {"type": "video_url", "video_url": {"url": "a.mp4"}},
    {"type": "video"},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "document", "source": {"type": "url", "url": "a.pdf"}},
    {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
    {"type": "something_of_next_year"},
    7,
    [],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load(model(tmp_path_factory.mktemp("media"), TEMPLATE, ["<|image_pad|>", "<|vision_start|>"]))


def asked(*parts, role="user", **more):
    return {"role": role, "content": list(parts), **more}


def answer(tokenizer, text="red", **more):
    return said(text, ids_of(tokenizer, text + "<|im_end|>"), **more)


def assert_held(found, turns):
    """Every sampled token stands in a branch, untrained, and is counted once under R32."""
    assert reasons(found) >= {"R32"}
    rows = found.alignment_report.reason == 32
    assert found.alignment_report.turn[rows].tolist() == turns
    for turn, count in zip(turns, found.alignment_report.count[rows], strict=True):
        here = found.turn == turn
        assert count == here.sum() > 0
        assert not (found.trainable & here).any()
    assert found.has_unknown_media.any()
    assert found.alignment_report.exact == found.trainable.sum()


@QUIET
@given(st.lists(st.sampled_from(WORDS), max_size=3), st.sampled_from(MEDIA), st.integers(0, 3), st.booleans())
def test_a_part_that_is_no_text_holds_what_was_sampled_behind_it(tokenizer, words, part, at, recorded):
    parts = [*words[:at], part, *words[at:]]
    prompt = {"prompt_token_ids": ids_of(tokenizer, "<|im_start|>user\nlook<|im_end|>")} if recorded else {}
    found = align(tokenizer, record(asked(*parts), answer(tokenizer, **prompt)))
    assert trained(found) == []
    assert_held(found, [0])
    assert "part of message 0" in found.alignment_report.detail[found.alignment_report.reason.tolist().index(32)]


@QUIET
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4))
def test_parts_of_text_alone_are_trained(tokenizer, words):
    found = align(tokenizer, record(asked(*words), answer(tokenizer)))
    assert trained(found) == ids_of(tokenizer, "red<|im_end|>")
    assert not found.has_unknown_media.any()
    assert found.alignment_report.rate == 0


@pytest.mark.parametrize("key", ["images", "image", "audio", "videos", "multi_modal_data"])
def test_media_beside_the_content_of_a_message_are_seen(tokenizer, key):
    assert_held(align(tokenizer, record({**user("look"), key: ["AAAA"]}, answer(tokenizer))), [0])
    for nothing in (None, []):
        found = align(tokenizer, record({**user("look"), key: nothing}, answer(tokenizer)))
        assert found.trainable.any()
        assert not found.has_unknown_media.any()


def test_turns_before_a_picture_are_trained_and_all_behind_it_are_held(tokenizer):
    turns = [
        user("q"),
        answer(tokenizer),
        asked(*MEDIA[:1]),
        answer(tokenizer, "two"),
        user("r"),
        answer(tokenizer, "lamp"),
    ]
    found = align(tokenizer, record(*turns))
    assert trained(found) == ids_of(tokenizer, "red<|im_end|>")
    assert_held(found, [1, 2])


def test_text_is_not_trained_behind_a_picture_even_on_request(tokenizer):
    found = align(tokenizer, record(asked(*MEDIA[:1]), said("red")), text_only=True)
    assert trained(found) == []
    assert_held(found, [0])


@pytest.mark.parametrize("count", [1, 2, 300])
def test_a_placeholder_in_a_prompt_of_ids_alone_holds_the_turn(tokenizer, count):
    head, tail = ids_of(tokenizer, "<|im_start|>user\n"), ids_of(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
    held = answer(tokenizer, prompt_token_ids=[*head, *[PAD] * count, *tail])
    assert_held(align(tokenizer, record(held)), [0])
    free = answer(tokenizer, prompt_token_ids=[*head, *tail])
    assert align(tokenizer, record(free)).trainable.any()


def test_a_placeholder_that_was_sampled_is_text(tokenizer):
    head = ids_of(tokenizer, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    drawn = [PAD, PAD, 2]
    again = [*head, *drawn, *ids_of(tokenizer, "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n")]
    first, second = (said("", drawn, prompt_token_ids=head), answer(tokenizer, prompt_token_ids=again))
    found = align(tokenizer, record(first, second))
    assert trained(found) == [*drawn, *ids_of(tokenizer, "red<|im_end|>")]
    assert not found.has_unknown_media.any()


def test_a_placeholder_that_only_the_server_repeated_holds_the_turn(tmp_path):
    # The token's name says nothing, and no message says that there is a picture.
    tokenizer = load(model(tmp_path, TEMPLATE, ["<|blob|>"]))
    head, tail = ids_of(tokenizer, "<|im_start|>user\n"), ids_of(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
    prompt = [*head, *[PAD] * 9, *tail]
    found = align(tokenizer, record(user("<|blob|>"), answer(tokenizer, prompt_token_ids=prompt)))
    assert reasons(found) == {"R29", "R32"}
    assert_held(found, [0])


def test_a_placeholder_that_config_names_is_one(tmp_path):
    folder = model(tmp_path, TEMPLATE, ["<|blob|>"])
    head = ids_of(load(folder), "<|im_start|>user\n<|im_end|>")
    row = record(answer(load(folder), prompt_token_ids=[*head, PAD]))
    assert align(load(folder), row).trainable.any()
    (folder / "config.json").write_text(json.dumps({"vision_config": {"image_token_index": PAD}}))
    assert_held(align(load(folder), row), [0])


def test_a_history_without_its_picture_is_a_branch_that_is_trained(tokenizer):
    call = {"model": "m", "messages": [asked(*MEDIA[:1])]}
    free = {"model": "m", "messages": [user("a picture of a lamp")]}
    ids = ids_of(tokenizer, "red<|im_end|>")

    def made(request):
        entries = [{"token": f"token_id:{i}", "logprob": -0.5, "bytes": None} for i in ids]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "red"}}
        return {
            "request": request,
            "response": {"choices": [{**choice, "token_ids": ids, "logprobs": {"content": entries}}]},
        }

    found = align(tokenizer, {"id": "t", "logprob_kind": "raw", "calls": [made(call), made(free)]})
    assert found.branches == 2
    assert_held(found, [0])
    assert (found.trainable & (found.turn == 1)).sum() == len(ids)


@pytest.mark.parametrize("recorded", [True, False])
def test_align_mode_holds_them_too(tokenizer, recorded):
    prompt = {"prompt_token_ids": [PAD, *ids_of(tokenizer, "<|im_start|>user\nlook")]} if recorded else {}
    message = user("look") if recorded else asked(*MEDIA[:1])
    found = align(tokenizer, record(message, answer(tokenizer, **prompt)), mode="align")
    assert trained(found) == []
    assert found.has_unknown_media.all()
    assert found.alignment_report.exact == 0


def test_what_holds_media_is_known_of_what_was_saved(tokenizer, tmp_path):
    rows = [record(user("q"), answer(tokenizer), id="a"), record(asked(*MEDIA[:1]), answer(tokenizer), id="b")]
    found = align(tokenizer, *rows)
    found.save(tmp_path / "saved")
    assert found.has_unknown_media.tolist() == [False, True]
    assert tg.Sequences.load(tmp_path / "saved").has_unknown_media.tolist() == [False, True]


def test_the_doctor_calls_a_file_with_pictures_wrong(tmp_path):
    def with_picture(row):
        for request in [call["request"] for call in row.get("calls", ())] or [row]:
            request["messages"][0]["images"] = ["AAAA"]

    found = diagnosed(spoiled(with_picture, every=60), tmp_path)
    assert names(found)["media"] == "WRONG"
    assert found.findings[0].hits.count >= 4
    assert found.exit_code == 1


def test_the_doctor_counts_turns_whose_ids_are_guessed(tmp_path):
    def bare(row):
        for message in row["messages"]:
            message.pop("token_ids", None)
            if "logprobs" in message:
                text = message["content"]
                message["logprobs"] = [-0.5] * (len(load(MODEL).encode(text)) + 1)

    rows = [row for row in recorded() if "messages" in row and not any("tool_calls" in m for m in row["messages"])][:8]
    for row in rows:
        bare(row)
    found = diagnosed(rows, tmp_path)
    assert names(found)["guessed_ids"] == "COSTS"
    assert found.trained_tokens == 0
    account = IngestSummary("f")
    for asked in (False, True):
        account.add(tg.align(tg.Traces.from_records(rows), load(MODEL), assume_canonical=asked))
        [line] = [line for line in account.lines() if line.startswith("guessed")]
        assert f"{account.levels['T5']['generations']:,} turns" in line
        assert ("not trained" in "".join(account.lines())) is not asked
