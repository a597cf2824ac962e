"""Write small tokenizers, and compare their ids with transformers'."""

import base64
import importlib.util
import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracegrad.alignment.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")


tokenizers = pytest.importorskip("tokenizers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "model"

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


@cache
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
