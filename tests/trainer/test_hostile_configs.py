"""Files of a model's folder with values of the wrong kind or size: each is one error of ours, or works."""

import json
import os
import re
import shutil
import warnings

import pytest

from code_models import MODEL
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.cli import main
from tracegrad.data.sampling import model_defaults
from tracegrad.doctor.examination import max_position_embeddings
from tracegrad.errors import TracegradError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = "@@HERE@@"
VALUES = {
    "null": "null",
    "true": "true",
    "a text": '"x"',
    "a list": '["x", null]',
    "an object": '{"a": {"b": [1]}}',
    "-1": "-1",
    "0": "0",
    "1.5": "1.5",
    "1e308": "1e308",
    "2^63": str(1 << 63),
    "10^12": str(10**12),
    "10^9": str(10**9),
    "10^400": str(10**400),
    "5000 digits": "9" * 5000,
    "NaN": "NaN",
    "200 levels": "[" * 200 + "]" * 200,
    "100000 levels": "[" * 100_000 + "]" * 100_000,
    "half a character": '"\\ud800"',
    "a long text": json.dumps("x" * 100_000),
}
IN_CONFIG = (
    *json.loads((MODEL / "config.json").read_text()),
    *("torch_dtype", "quantization_config", "rope_scaling", "rope_theta", "text_config", "auto_map", "vision_config"),
    *("id2label", "label2id", "num_labels", "problem_type", "tokenizer_class", "is_encoder_decoder", "pruned_heads"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "chunk_size_feed_forward", "adapters"),
    *("_name_or_path", "attn_implementation", "rope_parameters.rope_type", "rope_parameters.factor", "image_token_id"),
    *("is_decoder", "add_cross_attention", "logit_scale", "layer_types.0", "base_model_tp_plan", "temperature", ""),
)
IN_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id", "pad_token_id", "")
IN_GENERATION += ("do_sample", "max_length", "cache_implementation", "compile_config", "watermarking_config")
IN_TOKENIZER = ("eos_token", "pad_token", "bos_token", "unk_token", "chat_template", "tokenizer_class", "auto_map", "")
IN_TOKENIZER += ("added_tokens_decoder", "added_tokens_decoder.5", "model_max_length", "add_prefix_space", "legacy")
IN_TOKENIZER += ("extra_special_tokens", "additional_special_tokens", "backend", "added_tokens_decoder.5.content")
KEYS = {
    "config.json": IN_CONFIG,
    "generation_config.json": IN_GENERATION,
    "tokenizer_config.json": IN_TOKENIZER,
    "special_tokens_map.json": ("eos_token", "pad_token", "eos_token.content", "additional_special_tokens", ""),
    "preprocessor_config.json": ("image_processor_type", "size", "patch_size", "auto_map", "image_mean", ""),
    "adapter_config.json": ("r", "lora_alpha", "target_modules", "bias", "base_model_name_or_path", "peft_type", ""),
}


def spoilt(folder, file, key, value):
    """Writes a file of the model anew with one value in the place of its own; without a key the whole file is it."""
    source = MODEL / file
    told = json.loads(source.read_text()) if source.exists() else {}
    at, names = told, key.split(".")
    for name in names[:-1]:
        at = at if isinstance(at, list) else at.setdefault(name, {}) if not isinstance(at.get(name), list) else at[name]
    if isinstance(at, list):
        at[int(names[-1])] = HERE
    else:
        at[names[-1]] = HERE
    (folder / file).write_text(json.dumps(told).replace(f'"{HERE}"', value) if key else value)


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model", copy_function=os.symlink)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
        shutil.copy(MODEL / name, tmp_path / "model")
    return tmp_path / "model"


def uses(folder, file):
    """What the package does with a folder, by name."""
    from tracegrad.images.processor import ImageRule, image_processor
    from tracegrad.model.structure import media_ids
    from tracegrad.trainer import resource_estimate
    from tracegrad.trainer.lora import load_model

    def tokens():
        tokenizer = Tokenizer.from_pretrained(folder, cache=False)
        tokenizer.encode("hello")
        tokenizer.render([{"role": "user", "content": "a"}])

    def load():
        model = load_model(folder)
        media_ids(model)
        model(input_ids=torch.tensor([[1, 2, 3]]))

    def forecasts():
        empty = resource_estimate._build_empty(folder)
        with resource_estimate._config_errors(folder):
            resource_estimate._count_per_token(empty)

    yield from [
        tokens,
        lambda: max_position_embeddings(folder),
        lambda: model_defaults(folder),
        lambda: ImageRule.of(folder),
    ]
    if file in ("config.json", "generation_config.json", "adapter_config.json"):
        yield from [load, forecasts]
    if file == "preprocessor_config.json":
        yield lambda: image_processor(folder)


@pytest.mark.parametrize("file", KEYS)
@pytest.mark.first_cases(2)
def test_a_value_of_each_key_is_an_error_of_ours_or_works(file, folder):
    names = list(VALUES)
    check(file, folder, {key: {names[at * 7 % len(names)]} for at, key in enumerate(KEYS[file])})


@pytest.mark.nightly
@pytest.mark.parametrize("file", KEYS)
def test_every_value_of_each_key_is_an_error_of_ours_or_works(file, folder):
    check(file, folder, {key: set(VALUES) for key in KEYS[file]})


def check(file, folder, chosen):
    """Uses the folder with each chosen value of each key."""
    weights = MODEL / "model.safetensors"
    if file == "adapter_config.json":
        os.symlink(weights, folder / "adapter_model.safetensors")
    refused = worked = 0
    for key, name in [(key, name) for key, names in chosen.items() for name in sorted(names)]:
        spoilt(folder, file, key, VALUES[name])
        for use in uses(folder, file):
            error = outcome(use, f"{key} {name}")
            worked += error is None
            refused += error is not None
            assert error is None or (error.isprintable() and len(error) < 2500), (key, name)
    assert refused
    assert worked


def outcome(use, case):
    """The error of ours that a use ends in, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use()
    except TracegradError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{case}: {error!r:.300}") from error
    return None


SIZES = [("vocab_size", 10**12), ("hidden_size", 10**9), ("num_hidden_layers", 10**9), ("num_attention_heads", 1 << 40)]
SIZES += [
    ("intermediate_size", 10**10),
    ("head_dim", 10**9),
    ("num_labels", 10**9),
    ("max_position_embeddings", 10**60),
]


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_a_model_that_is_larger_than_its_weights_is_refused_before_it_is_built(key, value, folder):
    from tracegrad.trainer.load_model import load_full_model

    spoilt(folder, "config.json", key, str(value))
    with pytest.raises(TracegradError, match=rf"TG-TRAIN-03[14]: {re.escape(str(folder))}"):
        load_full_model(folder)


MORE = ['"x"', "true", "1e308", str(10**400), "9" * 5000]


@pytest.mark.parametrize("value", ["[1]", "null", *(pytest.param(each, marks=pytest.mark.nightly) for each in MORE)])
@pytest.mark.parametrize("verb", ["doctor", "train"])
@pytest.mark.first_cases(2)
def test_a_command_over_such_a_folder_ends_in_one_line(verb, value, folder, group, tmp_path, capsys):
    spoilt(folder, "config.json", "hidden_size", value)
    more = ["--out", str(tmp_path / "run")] if verb == "train" else []
    code = main([verb, str(group), "--model", str(folder), *more])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "unexpected" not in err
    if verb == "train":
        assert code == 1
        assert err.strip().splitlines()[-1].startswith("tracegrad: error: ")
