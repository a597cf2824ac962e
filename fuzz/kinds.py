"""Small tokenizer.json files of every kind, for a fuzzer to change: models with all parts before and after them."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

GLYPHS = [chr(code) for code in chain(range(33, 127), range(161, 173), range(174, 512)) if code < 324][:256]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<unk>", "▁", "a", "b", "ab", "▁a", "##b", "Ġ", "Ġa", "é", "[CLS]", "e", "l", "o", "lo", *BYTES]
PARTS = "\\p{L}+|\\s+(?!\\S)|[^\\s\\p{L}]+"
BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")

MODELS: list[dict[str, Any]] = [
    {
        "type": "BPE",
        "vocab": {word: at for at, word in enumerate(WORDS)},
        "merges": [["a", "b"], ["l", "o"]],
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    },
    {
        "type": "BPE",
        "vocab": {word: at for at, word in enumerate([*GLYPHS, "ab", "lo"])},
        "merges": ["a b", "l o"],
        "ignore_merges": True,
    },
    {
        "type": "Unigram",
        "vocab": [[word, -1.0 - at / 9] for at, word in enumerate(WORDS)],
        "unk_id": 0,
        "byte_fallback": False,
    },
    {
        "type": "WordPiece",
        "vocab": {word: at for at, word in enumerate(WORDS)},
        "unk_token": "<unk>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
    {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(WORDS)}, "unk_token": "<unk>"},
]
NORMALIZERS: list[dict[str, Any] | None] = [
    None,
    *({"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
    {"type": "Strip", "strip_left": True, "strip_right": False},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Replace", "pattern": {"Regex": "l{2,}|\\s+"}, "content": "lo"},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}]},
]
SPLITTERS: list[dict[str, Any] | None] = [
    None,
    *({"type": kind} for kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")),
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    {"type": "Digits", "individual_digits": True},
    {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "CharDelimiterSplit", "delimiter": "l"},
    {"type": "FixedLength", "length": 3},
    *(
        {"type": "Split", "pattern": {"Regex": PARTS}, "behavior": behavior, "invert": invert}
        for behavior in BEHAVIORS
        for invert in (False, True)
    ),
    {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, {"type": "Whitespace"}]},
]
ENDS: list[dict[str, Any] | None] = [
    None,
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    {"type": "BertProcessing", "sep": ["a", 2], "cls": ["[CLS]", 10]},
    {
        "type": "RobertaProcessing",
        "sep": ["a", 2],
        "cls": ["[CLS]", 10],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["a"]}},
    },
]
DECODERS: list[dict[str, Any] | None] = [
    None,
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
]


def added(at: int, content: str, special: bool) -> dict[str, Any]:
    flags = {name: bool(at & 1 << bit) for bit, name in enumerate(("single_word", "lstrip", "rstrip", "normalized"))}
    return {"id": at, "content": content, "special": special, **flags}


def small() -> list[bytes]:
    """Yield every model, and every part at least once."""
    made = []
    for number in range(len(MODELS) * len(SPLITTERS)):
        model = MODELS[number % len(MODELS)]
        size = len(model["vocab"])
        told = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added(size, "<a>", True), added(size + 1, "lo w", number % 2 == 0)],
            "normalizer": NORMALIZERS[number % len(NORMALIZERS)],
            "pre_tokenizer": SPLITTERS[number % len(SPLITTERS)],
            "post_processor": ENDS[number // len(MODELS) % len(ENDS)],
            "decoder": DECODERS[number // len(MODELS) % len(DECODERS)],
            "model": model,
        }
        made.append(json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode())
    return made
