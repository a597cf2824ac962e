"""Give prompts that a real vLLM rendered, and tokenizers with their templates."""

import json
import shutil
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad.data.codes import SAMPLED

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vllm_prompts.json").read_text())
"""What vLLM 0.32 rendered for each case, as text; None where it refuses the request."""

TOKENIZERS = {}


def with_template(template, folder):
    """The bundled tokenizer with another chat template."""
    if template not in TOKENIZERS:
        place = folder / f"model-{len(TOKENIZERS)}"
        shutil.copytree(MODEL, place, ignore=shutil.ignore_patterns("*.safetensors"))
        if template is not None:
            (place / "chat_template.jinja").unlink()
            (place / "chat_template.jinja").write_text(template)
        TOKENIZERS[template] = tg.Tokenizer.from_pretrained(place)
    return TOKENIZERS[template]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prompts")


def beginning(sequences):
    """The ids before the first sampled token of the last branch."""
    start = int(sequences.cu_seqlens[-2])
    return sequences.ids[start : start + int((sequences.source[start:] == SAMPLED).argmax())].tolist()
