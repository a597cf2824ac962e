"""Tokenizers of every kind beside transformers and tiktoken, and which code makes their ids."""

import importlib
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenizer_files import CORPUS, EXAMPLE, _adversarial, _byte_level, _check_ids, _installed, _small, _write
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.errors import TokenizerError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

# tiktoken's cache names a file by the SHA-1 of the address it came from; litellm ships three so.
OPENAI = {
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "p50k_base": "ec7223a39ce59f226a68acc30dc1af2788490e15",
}


def _litellm(file: str) -> Path:
    folder = _installed("litellm", "")
    found = next(folder.rglob(file), None)
    if found is None:
        pytest.skip(f"this litellm has no {file}")
    return found


def _unigram(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", "<s>"]
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return _write(tmp_path / "unigram", tokenizer)


def _sentencepiece_bpe(tmp_path: Path) -> Path:
    """As Llama 2's: no pre-tokenizer, spaces replaced and one put before, bytes for what is unknown."""
    alphabet = sorted(set("".join(CORPUS).replace(" ", "▁")) | {"▁"})
    words = ["▁T", "he", "▁The", "er", "▁c", "le", "▁cl", "▁▁"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, *words]
    merges = [("▁", "T"), ("h", "e"), ("▁T", "he"), ("e", "r"), ("▁", "c"), ("l", "e"), ("▁c", "l"), ("▁", "▁")]
    model = tokenizers.models.BPE(
        {piece: at for at, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return _write(tmp_path / "sentencepiece", tokenizer)


@pytest.mark.parametrize(("make", "spelling"), [(_unigram, "sentencepiece"), (_sentencepiece_bpe, "sentencepiece")])
def test_ids_of_unigram_and_sentencepiece_are_those_of_transformers(
    make: Any, spelling: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    directory = make(tmp_path)
    ours = Tokenizer.from_pretrained(directory)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    assert spelling in repr(ours)
    assert ours.report.cache_disabled_reason is not None
    _check_ids(ours, theirs, pytestconfig.getoption("--strings"))
    for text in _adversarial(200, ["<s>"]):
        ids, ends = ours.encode_with_ends(text)
        assert np.all(np.diff(ends) >= 0)
        assert (ends[-1] if len(ids) else 0) == (len(text.encode()) if len(ids) else 0)


def test_ids_of_anthropics_tokenizer_are_those_of_transformers(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    file = _litellm("anthropic_tokenizer.json")
    shutil.copy(file, tmp_path / "tokenizer.json")
    ours = Tokenizer.from_pretrained(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    _check_ids(ours, theirs, pytestconfig.getoption("--strings"))


@pytest.mark.parametrize("family", OPENAI)
def test_a_tiktoken_file_of_openai_gives_tiktokens_ids(
    family: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    load, public = pytest.importorskip("tiktoken.load"), pytest.importorskip("tiktoken_ext.openai_public")
    file = _litellm(OPENAI[family])
    shutil.copy(file, tmp_path / f"{family}.tiktoken")
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.report.backend == "fastokens", ours.report
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: load.load_tiktoken_bpe(str(file)))
        theirs = tiktoken.Encoding(**getattr(public, family)())
    texts = _adversarial(pytestconfig.getoption("--strings"), ["<|endoftext|>"])
    ids, offsets = ours.encode_batch(texts)
    expected = theirs.encode_batch(texts, allowed_special="all", num_threads=2)
    assert ids.tolist() == [token for row in expected for token in row]
    assert len(offsets) == len(texts) + 1
    assert ours.decode(ours.encode("naïve <|endoftext|>")) == "naïve <|endoftext|>"


def test_qwen_tiktoken_gives_the_ids_of_qwens_own_tokenizer(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _installed("qwen_agent", "utils/qwen.tiktoken")
    # The package as a folder: its own __init__ wants microphones and browsers.
    package = types.ModuleType("qwen_agent")
    package.__path__ = [str(file.parents[1])]
    monkeypatch.setitem(sys.modules, "qwen_agent", package)
    own = importlib.import_module("qwen_agent.utils.tokenization_qwen")
    shutil.copy(file, tmp_path / "qwen.tiktoken")
    ours, theirs = Tokenizer.from_pretrained(tmp_path), own.QWenTokenizer(str(file))
    assert (ours.report.backend, len(ours)) == ("fastokens", 151_643 + 3 + 205)
    for text in _adversarial(min(2000, pytestconfig.getoption("--strings")), ["<|im_end|>", "<|extra_204|>"]):
        expected = theirs.tokenizer.encode(own.unicodedata.normalize("NFC", text), allowed_special="all")
        assert ours.encode(text).tolist() == expected


def test_added_tokens_of_the_config_stand_beside_a_tiktoken_file(tmp_path: Path) -> None:
    shutil.copy(_installed("qwen_agent", "utils/qwen.tiktoken"), tmp_path / "qwen.tiktoken")
    added = {"151657": {"content": "<tool_call>", "special": False, "normalized": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.encode("<|im_end|><tool_call>").tolist() == [151645, 151657]
    assert len(ours.encode("<|extra_0|>")) > 1


def test_a_tiktoken_file_of_no_known_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(TokenizerError, match=r"TG-TOKENIZER-015.*2.*071f2265f21c065d"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_fast_backend_that_differs_is_not_used(tmp_path: Path) -> None:
    tokenizer = _byte_level(_small())
    tokenizer.add_tokens([tokenizers.AddedToken("whole", single_word=True, normalized=False)])
    ours = Tokenizer.from_pretrained(_write(tmp_path / "words", tokenizer))
    assert ours.report.backend == "tokenizers"
    assert "whole words" in ours.report.reason
    assert "neighbours" in (ours.report.cache_disabled_reason or "")
    fast = Tokenizer.from_pretrained(EXAMPLE, cache=False).report
    assert fast.probes > 1700
    assert fast.reason == f"same ids as tokenizers for {fast.probes} of {fast.probes} probes"


def test_a_text_seen_before_has_the_same_ids_and_ends(tmp_path: Path) -> None:
    ours = Tokenizer.from_pretrained(_write(tmp_path / "small", _small()))
    text = "<|im_start|>user\nThe clerk 你好 é<|im_end|>" * 3
    first = [array.tolist() for array in ours.encode_with_ends(text)]
    assert [array.tolist() for array in ours.encode_with_ends(text)] == first
    assert ours.encode(text).tolist() == first[0]
