"""No id is wrong and no token is lost without a count, whatever the vocabulary is and whatever a record claims."""

import copy
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import tracegrad as tg
from oracle import Oracle, shown
from recorded_turns import QUIET, trace, turns
from tracegrad.alignment.align import recover_ids
from vocabulary import EXAMPLE, align, ids_of, load, model, reasons, record, said, trained, user

CHATML = (EXAMPLE / "chat_template.jinja").read_text()
WORDS = [
    "\u2581",
    "\u2581\u2581",
    "\u2581a",
    "a",
    "b",
    "ab",
    "\u2581ab",
    "\u2581b",
    "é",
    "\u2581é",
    "!",
    "日",
    "\u2581x",
]
LETTERS = ["a", "b", "ing", "##ing", "##b", "play", "##a", ".", "##.", "ab"]


def fallback(strips):
    """A vocabulary with byte fallback, as Gemma has it, or with the dummy prefix that Llama takes off again."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] + [(word, -3.0 - len(word)) for word in WORDS]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if strips else "never")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made, range(3, 3 + 256 + len(WORDS))


def words():
    """A vocabulary of words and their continuations, as BERT has it."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[PAD]", "[SEP]", *LETTERS])}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[PAD]", "[SEP]"])
    return made, range(3, 3 + len(LETTERS))


def spaces():
    """Byte-level, with an added token that an ordinary entry spells too, as GPT-NeoX has runs of spaces."""
    made = tokenizers.Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))
    made.add_tokens([tokenizers.AddedToken("price", normalized=False)])
    document = json.loads(made.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != "price"]
    token = {"id": 640, "content": " the", "special": False, "normalized": False}
    document["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
    return tokenizers.Tokenizer.from_str(json.dumps(document)), range(3, 641)


KINDS = {"gemma": lambda: fallback(False), "llama": lambda: fallback(True), "words": words, "spaces": spaces}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """Its name, the tokenizers library's tokenizer, ours, and the ids that may be drawn."""
    theirs, drawn = KINDS[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": theirs.id_to_token(2)}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return request.param, theirs, load(folder), drawn


def recovered(tokenizer, message):
    return recover_ids(tg.Traces.from_records([record(user("q"), message)]), tokenizer).ids.tolist()


def told(theirs, ours, ids, how):
    """What recorders write of these ids: bytes, each one's own text, or what it adds to the text."""
    whole = theirs.decode(ids)
    more = {"logprobs": [-0.5] * len(ids), "finish_reason": "length"}
    if how == "bytes":
        return said(whole, bytes=[list(ours.decode_bytes([i])) for i in ids], **more)
    if how == "alone":
        return said(
            whole, tokens=[t if not t.endswith("\ufffd") else "" for t in (theirs.decode([i]) for i in ids)], **more
        )
    texts = [theirs.decode(ids[: k + 1]).removeprefix(theirs.decode(ids[:k])) for k in range(len(ids))]
    return said(whole, tokens=["" if t.endswith("\ufffd") else t for t in texts], **more)


@QUIET
@given(st.data(), st.sampled_from(["bytes", "alone", "added"]))
def test_no_id_is_wrong_on_any_vocabulary(kind, data, how):
    _, theirs, ours, drawn = kind
    ids = data.draw(st.lists(st.sampled_from(drawn), min_size=1, max_size=8))
    found = recovered(ours, told(theirs, ours, ids, how))
    assert all(mine in (-1, true) for mine, true in zip(found, ids, strict=True)) if found else True


@QUIET
@given(st.data())
def test_bytes_say_an_id_where_only_one_entry_has_them(kind, data):
    name, theirs, ours, drawn = kind
    ids = data.draw(st.lists(st.sampled_from(drawn), min_size=2, max_size=8))
    if name in ("llama", "words"):
        return  # What these show of a token is not its bytes: the test above.
    bytes_of = {i: ours.decode_bytes([i]) for i in drawn}
    fitting = [[j for j in drawn if bytes_of[j] == bytes_of[i]] for i in ids]
    expected = [one[0] if len(one) == 1 else -1 for one in fitting]
    assert recovered(ours, told(theirs, ours, ids, "bytes")) == expected


def test_what_an_exhaustive_search_determines_with_byte_fallback(tmp_path):
    theirs, drawn = fallback(False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    ours = load(tmp_path)
    pieces = {i: ours.decode_bytes([i]) for i in range(len(ours))}
    oracle, rng, determined = Oracle(pieces, {0, 1, 2}), np.random.default_rng(5), 0
    common = [i for i in drawn if i >= 259 or pieces[i] in (b" ", b"a", b"\xc3", b"\xa9", b"\xe6", b"\x97", b"\xa5")]
    for _ in range(150):
        ids = rng.choice(common, rng.integers(1, 7)).tolist()
        front, texts = b"", []
        for i in ids:
            text, front = shown(front, pieces[i])
            texts.append(text)
        whole = b"".join(pieces[i] for i in ids).decode("utf-8", "replace").rstrip("\ufffd")
        fitting = oracle.possible(texts, whole, hides_specials=True, skips_specials=True, goes_on=False)
        message = said(whole, tokens=texts, logprobs=[-0.5] * len(ids), finish_reason="length")
        found = recovered(ours, message)
        assert all(i in fit for i, fit in zip(ids, fitting, strict=True)), texts
        assert found == [next(iter(fit)) if len(fit) == 1 else -1 for fit in fitting], (texts, whole)
        determined += sum(len(fit) == 1 for fit in fitting)
    assert determined > 100


def test_a_space_that_two_entries_have_is_assumed_on_request_only(tmp_path):
    theirs, _ = fallback(False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    ours = load(tmp_path)
    row = record(
        user("q"), said(" é", bytes=[[32], [0xC3], [0xA9]], logprobs=[-0.1, -0.2, -0.3], finish_reason="length")
    )
    found, asked, allow_unknown_ids = (
        align(ours, row, **more) for more in ({}, {"assume_canonical": True}, {"allow_unknown_ids": True})
    )
    assert trained(found) == []
    assert reasons(found) == {"R33"}
    assert found.alignment_report.count.tolist() == [1, 3]  # the doubt, and what is left out for it
    space, lead, rest = 3 + 256, 3 + 0xC3, 3 + 0xA9
    assert trained(asked) == [space, lead, rest]
    assert asked.alignment_level[asked.trainable].tolist() == [4, 2, 2]
    assert trained(allow_unknown_ids) == [lead, rest]


# Bounds of the model.

ROWS = 700
SAMPLED = [30, 40, 2]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """640 ids of the tokenizer, 700 of the model."""
    folder = model(tmp_path_factory.mktemp("wide"), CHATML)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5, "text_config": {"vocab_size": ROWS}}))
    return load(folder)


def bare(folder):
    return load(model(folder, CHATML))


def test_the_bound_is_the_models_then_the_arguments_then_the_tokenizers(wide, tmp_path):
    assert wide.model_vocab_size == ROWS
    assert bare(tmp_path).model_vocab_size == len(bare(tmp_path)) == 640
    assert tg.Tokenizer.from_pretrained(tmp_path, vocab_size=900).model_vocab_size == 900
    for wrong in (0, -1, 2.5, "9", 1 << 31):
        with pytest.raises(tg.errors.ArgumentError, match="TG-ALIGN-027"):
            tg.Tokenizer.from_pretrained(tmp_path, vocab_size=wrong)


@pytest.mark.parametrize("id_", [640, 699])
def test_an_id_that_only_the_model_has_is_a_token(wide, id_):
    ids = [30, id_, 2]
    prompt = [9, id_, 10]
    found = align(wide, record(user("q"), said(wide.decode([30]), ids, prompt_token_ids=prompt)))
    assert trained(found) == ids
    assert found.ids.tolist() == prompt + ids
    assert found.alignment_report.exact == 3
    assert "R25" not in reasons(found)
    assert wide.decode_bytes(ids) == wide.decode_bytes([30, 2])


@pytest.mark.parametrize("id_", [ROWS, 999_999, 2**31 - 1])
@pytest.mark.parametrize("where", ["prompt", "sampled", "mask"])
@pytest.mark.parametrize("mode", ["splice", "align"])
def test_an_id_that_the_model_does_not_have_loses_the_turn_and_all_of_it_is_counted(wide, id_, where, mode):
    ids, prompt = [*SAMPLED], [1, 2]
    (prompt if where == "prompt" else ids if where == "sampled" else []).insert(1, id_)
    output = {"token_ids": ids, "text": wide.decode(SAMPLED[:2]), "finish_reason": "stop"}
    row = record(user("q"), said(wide.decode(SAMPLED[:2]), ids, prompt_token_ids=prompt))
    if where == "mask":
        return test_a_sampling_mask_is_bounded_too(wide, min(id_, 2**31 - 1))
    found = align(wide, row, mode=mode)
    assert output["token_ids"] == ids
    if where == "prompt" and mode == "align":
        assert found.ids.max() < ROWS  # the recorded prompt is not used
        return None
    assert not found.trainable.any()
    assert found.ids.max(initial=0) < ROWS
    rows = found.alignment_report.reason == 25
    assert found.alignment_report.count[rows].tolist() == [len(ids)]
    assert found.alignment_report.recorded == len(ids)
    assert found.alignment_report.exact == 0
    return None


@pytest.mark.parametrize("id_", [ROWS, 2**31 - 1])
def test_a_sampling_mask_is_bounded_too(wide, id_):
    choice = {"index": 0, "token_ids": SAMPLED, "finish_reason": "stop", "logprobs": {"content": None}}
    choice["logprobs"] = {"content": [{"token": f"token_id:{i}", "logprob": -0.5, "bytes": None} for i in SAMPLED]}
    request = {"model": "m", "token_ids": [9, 10], "sampling_params": {"temperature": 1.0}}

    def found(masks):
        response = {"request_id": "r", "choices": [{**choice, "sampling_mask": masks}]}
        record = {"id": "t", "logprob_kind": "processed", "calls": [{"request": request, "response": response}]}
        return align(wide, record)

    masks = [[i, i + 1] for i in SAMPLED]
    right, wrong = found(masks), found([masks[0], [*masks[1], id_], masks[2]])
    assert trained(right) == SAMPLED
    assert right.support is not None
    assert trained(wrong) == []
    assert wrong.alignment_report.count[wrong.alignment_report.reason == 25].tolist() == [3]


def test_what_the_tokenizer_makes_is_bounded_by_the_model_too(tmp_path):
    # A model of 300 rows beside a tokenizer of 640: rendered prompts, texts and bytes give ids that it does not have.
    folder = model(tmp_path, CHATML)
    (folder / "config.json").write_text('{"vocab_size": 300}')
    narrow, free = load(folder), ids_of(load(folder), "price")
    assert max(free) >= 300
    messages = [said("price"), said("price", bytes=[list(b"price")], logprobs=[-0.5]), said("ab", ids_of(narrow, "ab"))]
    for message in messages:
        for options in ({}, {"mode": "align"}, {"text_only": True}):
            found = align(narrow, record(user("the price of two red lamps"), message), **options)
            assert found.ids.max(initial=0) < 300
            assert not found.trainable.any()
            assert "R25" in reasons(found)


# The law of counting.

LOST = {2, 3, 8, 20, 22, 25, 26, 27, 30, 33}
HELD_BACK = {31, 32}


def spoil(turn, how, at):
    """One hostile change of a recorded turn."""
    ids = turn.get("token_ids") or []
    at %= max(1, len(ids))
    pieces = [TOKENIZER.decode_bytes([i]) for i in ids]
    if how == "outside":
        ids[at] = 999_999
    elif how == "other":
        ids[at] = 300 if ids[at] != 300 else 301
    elif how == "prompt":
        turn["prompt_token_ids"][at % len(turn["prompt_token_ids"])] = 2**31 - 1
    elif how == "unknown":
        turn.pop("token_ids")
        turn["bytes"] = [list(p) if k != at else list(b"zq\xff\xfezq") for k, p in enumerate(pieces)]
    elif how == "hidden":
        turn.pop("token_ids")
        turn["tokens"] = [
            "" if p.decode("utf-8", "replace").endswith("\ufffd") else p.decode("utf-8", "replace") for p in pieces
        ]
    elif how == "count":
        turn["logprobs"] = turn["logprobs"][:-1]
    elif how == "bare":
        turn.pop("token_ids")
    elif how == "missing":
        turn["logprobs"] = [None if k == at else v for k, v in enumerate(turn["logprobs"])]
    elif how == "stopped":
        turn["stop_reason"] = "zz"


TOKENIZER = load(EXAMPLE)
HOW = st.sampled_from(
    ["none", "outside", "other", "prompt", "unknown", "hidden", "count", "bare", "missing", "stopped", "image"]
)


@QUIET
@given(turns, st.lists(st.tuples(HOW, st.integers(0, 11)), min_size=4, max_size=4))
def test_every_recorded_token_is_trained_or_counted_by_a_finding_of_its_turn(generated, changes):
    row = trace(generated)
    said_turns = [m for m in row["messages"] if m["role"] == "assistant"]
    for message, (how, at) in zip(said_turns, changes, strict=False):
        if how == "image":
            message["images"] = ["AAAA"]
        else:
            spoil(message["generation"], how, at)
    recorded = []
    for message in said_turns:
        turn = message["generation"]
        recorded.append(len(next(turn[k] for k in ("token_ids", "bytes", "tokens", "logprobs") if k in turn)))
    found = align(TOKENIZER, copy.deepcopy(row))
    report = found.alignment_report
    assert report.recorded == sum(recorded)
    left_out = 0
    for turn, count in enumerate(recorded):
        here = found.turn == turn
        rows = {
            int(c) for c, t, r in zip(report.count, report.turn, report.reason, strict=True) if t == turn and r in LOST
        }
        back = {
            int(c)
            for c, t, r in zip(report.count, report.turn, report.reason, strict=True)
            if t == turn and r in HELD_BACK
        }
        known = here & (found.alignment_level <= 4) & (found.source == 2)
        # A turn stands once with its own tokens; later branches repeat it untrained.
        starts = found.cu_seqlens[:-1]  # a trace that is left out whole has no branch, or an empty one
        first = starts[np.add.reduceat(known, starts) > 0][:1] if len(known) else starts[:0]
        held = (
            int(known[first[0] : found.cu_seqlens[np.searchsorted(found.cu_seqlens, first[0], "right")]].sum())
            if len(first)
            else 0
        )
        lost = count - held
        left_out += lost
        assert lost == 0 or lost in rows, (turn, lost, report.detail)
        untrained = held - int((found.trainable & known).sum())
        assert untrained == 0 or untrained in back, (turn, untrained, report.detail)
    exact = found.trainable & ~np.isnan(found.rollout_logprobs) & (found.alignment_level < 4)
    assert report.exact == exact.sum()
    assert int(np.isin(report.reason, list(LOST)).sum()) >= (left_out > 0)
