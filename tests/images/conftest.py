"""A model folder of a vision-language model and its tokenizer."""

import pytest

import tracegrad as tg
import vlm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vlm.folder(tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return tg.Tokenizer.from_pretrained(folder)
