"""Code of a model's folder is never run, and nobody is asked whether it may be."""

import ast
import json
import shutil

import pytest

import sources
from code_models import MODEL, ROOT
from tracegrad.errors import ReadError

OURS = {"Tokenizer", "tg.Tokenizer", "tracegrad.Tokenizer"}


def trusting(nodes):
    """The lines of calls of transformers that load something and do not say that its code is not trusted."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("from_pretrained", "from_config"):
                owner = ast.unparse(node.func.value)
                told = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if owner not in OURS and "PeftModel" not in owner and told.get("trust_remote_code") != "False":
                    yield node.lineno
            elif node.func.attr == "pipeline" and ast.unparse(node.func).endswith("transformers.pipeline"):
                yield node.lineno


@pytest.mark.parametrize("folder", ["python/tracegrad", "examples", "benches"])
def test_no_call_of_transformers_asks_or_trusts(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in trusting(sources.nodes(path))]
    assert found == []


def test_a_call_that_asks_is_found():
    text = "AutoModel.from_pretrained(x)\nT.from_config(c, trust_remote_code=True)\nTokenizer.from_pretrained(x)"
    assert sorted(trusting(ast.walk(ast.parse(text)))) == [1, 2]


CODE = "open('{}', 'w').close()\nfrom transformers import LlamaConfig as Own, LlamaForCausalLM as OwnModel\n"


def spoilt(folder, file, more):
    """A copy of the model whose file names code beside it, which would leave a mark."""
    shutil.copytree(MODEL, folder)
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **more}))
    (folder / "own.py").write_text(CODE.format(folder / "ran"))
    return folder


def load(folder):
    from tracegrad.trainer.load_model import load_full_model

    return load_full_model(folder)


def forecast(folder):
    from tracegrad.trainer.resource_estimate import _build_empty

    return _build_empty(folder)


def picture(folder):
    from tracegrad.images.processor import image_processor

    return image_processor(folder)


def whole(folder):
    from tracegrad.images.processor import multimodal_processor

    return multimodal_processor(folder)


MAP = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
CONFIG = {"auto_map": MAP, "model_type": "own"}
KINDS = {
    "model": (load, "config.json", CONFIG),
    "model of a hub": (load, "config.json", {**CONFIG, "auto_map": {k: f"x/y--{v}" for k, v in MAP.items()}}),
    "forecast": (forecast, "config.json", CONFIG),
    "picture": (picture, "preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "own.Own"}}),
    "processor": (whole, "processor_config.json", {"auto_map": {"AutoProcessor": "own.Own"}}),
    "processor, by tokenizer": (whole, "tokenizer_config.json", {"auto_map": {"AutoProcessor": "own.Own"}}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_brings_code_is_refused_without_a_question(tmp_path, monkeypatch, name):
    pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *what: asked.append(what) or "y")
    loads, file, more = KINDS[name]
    folder = spoilt(tmp_path / "model", file, more)
    with pytest.raises(ReadError, match=f"TG-(TRAIN-096|IMAGE-014): {folder}"):
        loads(folder)
    assert not asked
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("loads", [load, forecast])
@pytest.mark.parametrize(
    "more",
    [
        {"_attn_implementation": "kernels-community/flash-attn3"},
        {"attn_implementation": "some/one@main:forward"},
        {"_attn_implementation_internal": "a/b"},
        {"attn_implementation": {"": "sdpa", "text_config": "a/b:c"}},
        {"text_config": {"_attn_implementation": "paged|a/b"}},
        {"vision_config": {"attn_implementation": "flash_attention_2"}},
        {"_experts_implementation": "a/b"},
    ],
    ids=str,
)
def test_attention_of_a_hub_is_refused(tmp_path, monkeypatch, loads, more):
    pytest.importorskip("transformers")
    folder = spoilt(tmp_path / "model", "config.json", more)
    with pytest.raises(ReadError, match=r"TG-TRAIN-035.*config\.json"):
        loads(folder)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_of_torch_is_taken(tmp_path, name):
    pytest.importorskip("transformers")
    assert load(spoilt(tmp_path / "model", "config.json", {"attn_implementation": name})) is not None
