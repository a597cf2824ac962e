"""Loading warns where transformers 5 builds a tokenizer anew from `tokenizer_class` and gives other ids.

transformers itself is the judge.
"""

import json
import shutil
import warnings
from pathlib import Path

import pytest

import tracegrad as tg
from made_tokenizers import built

transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5."):
    pytest.skip("transformers 5 is the judge", allow_module_level=True)

MODEL = Path("examples/quickstart/model")
CLASSES = [
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "CohereTokenizer",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
]
TYPES = ["llama", "mistral", "qwen2", "gemma2", "cohere", "gpt_neox", "nobody_knows"]


def warned(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = tg.Tokenizer.from_pretrained(folder, cache=False)
    said = [str(each.message) for each in caught if "transformers 5 builds" in str(each.message)]
    assert bool(said) == (tokenizer._core.rebuilt is not None)
    return said, tokenizer


def prepared(folder, name, model_type, **config):
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "tokenizer_class": name, **config}))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))


UNKNOWN = {"CodeLlamaTokenizer", "GemmaTokenizer"}
"""Classes that fail on any text where the vocabulary has no <unk>, as that of the bundled model."""


def agrees(folder, name=""):
    """Both ids of the warning are what the two libraries give; without one, they give the same."""
    said, ours = warned(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    encode = lambda text: theirs.encode(text, add_special_tokens=False)  # noqa: E731
    if said:
        rebuilt = ours._core.rebuilt
        text, ids, other = rebuilt["text"], rebuilt["ids"], rebuilt["other"]
        assert ids == ours.encode(text).tolist() != other == encode(text)
        assert str(ids) in said[0]
        assert str(other) in said[0]
    elif name not in UNKNOWN:
        for text in ("Hello world, it is 4", " a  b\n c", "don't 12345", "It is 4"):
            assert encode(text) == ours.encode(text).tolist(), text
    return bool(said)


@pytest.mark.parametrize("name", CLASSES)
def test_the_bundled_model_under_each_class(tmp_path, name):
    """It is byte-level BPE."""
    results = {}
    for model_type in TYPES:
        folder = tmp_path / model_type
        shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        for each in folder.iterdir():
            each.chmod(0o644)
        prepared(folder, name, model_type)
        results[model_type] = agrees(folder, name)
    assert not (any(results.values()) and name in ("PreTrainedTokenizerFast", "TokenizersBackend")) or results["qwen2"]


@pytest.mark.parametrize("kind", ["first", "always", "prepend", "never"])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("LlamaTokenizer", {}),
        ("LlamaTokenizer", {"legacy": True}),
        ("LlamaTokenizer", {"add_prefix_space": False}),
        ("GemmaTokenizer", {}),
    ],
)
def test_sentencepiece_tokenizers(tmp_path, kind, name, more):
    built(kind, tmp_path)
    prepared(tmp_path, name, "nobody_knows", **more)
    found = agrees(tmp_path)
    scheme = "never" if more.get("add_prefix_space") is False else "always" if more.get("legacy") else "first"
    if name == "LlamaTokenizer":  # "first" and "always" differ behind added tokens alone
        assert found == (kind != scheme)


def test_the_table_is_that_of_the_installed_transformers():
    from transformers.models.auto import tokenization_auto as auto

    if transformers.__version__ != "5.24.0":
        pytest.skip("the table is of 5.24")
    rows = [line.split(" ") for line in Path("rust/core/src/tokenizer/transformers.txt").read_text().splitlines()]
    known = {key: name.removesuffix("Fast") for key, name in auto.TOKENIZER_MAPPING_NAMES.items() if name}
    assert {row[0]: row[1] for row in rows} == known
    assert {row[0] for row in rows if len(row) > 2} == auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & known.keys()


def test_the_warning_is_given_again_by_a_load_that_takes_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEGRAD_CACHE", str(tmp_path / "kept"))
    folder = tmp_path / "model"
    folder.mkdir()
    built("never", folder)
    prepared(folder, "LlamaTokenizer", "nobody_knows")
    for _ in range(2):
        with pytest.warns(UserWarning, match="as LlamaTokenizer and encodes 'Hello world"):
            tg.Tokenizer.from_pretrained(folder)


def test_a_class_of_the_models_own_is_not_judged(tmp_path):
    built("never", tmp_path)
    prepared(tmp_path, "LlamaTokenizer", "nobody_knows", auto_map={"AutoTokenizer": ["own.Own", None]})
    assert warned(tmp_path)[0] == []
