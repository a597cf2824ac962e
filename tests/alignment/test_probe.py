"""The probe against what is known of real templates (prefixes, trimming, thoughts, dates, default system prompts)."""

import json

import pytest

from tracegrad.alignment.template_probe import probe
from tracegrad.alignment.tokenizer import Template
from vocabulary import EXAMPLE, load, trl_template

# Template: prompt is prefix, history is prefix, trims, drops thoughts, prints the date, default system prompt.
TABLE = {
    "qwen2_5": (True, True, False, False, False, True),
    "qwen3": (True, False, False, True, False, False),
    "qwen3_training": (True, True, False, False, False, False),
    "gptoss": (True, False, False, False, True, False),
    "llama3": (True, True, True, False, False, False),
    "llama3_1": (True, True, True, False, False, False),
    "glm4moe": (True, True, True, True, False, False),
    "gemma": (True, True, True, False, False, False),
    "phi3": (True, False, False, False, False, False),
    "deepseek_r1_distill": (False, True, False, True, False, False),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_probe_finds_what_is_known_of_a_template(name):
    found = probe(Template(trl_template(name), {"bos_token": "<bos>", "eos_token": "<eos>"}))
    row = (found.prompt_is_prefix, found.history_is_prefix, found.trims)
    assert (*row, found.drops_thoughts, found.prints_date, found.default_system) == TABLE[name]


def test_generation_tags_are_seen():
    assert probe(Template(trl_template("qwen3_training"))).has_generation
    assert not probe(Template(trl_template("qwen3"))).has_generation


def test_a_template_that_refuses_says_nothing_about_it():
    found = probe(Template("{{ raise_exception('no') }}"))
    assert found.prompt_is_prefix is found.trims is found.turn_end is None
    assert found.warnings() == []


def test_variables_change_what_is_found():
    template = Template(
        "{% if today is defined %}{{ strftime_now('%Y') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert not probe(template).prints_date
    assert probe(template, today=True).prints_date


def test_a_tokenizer_has_a_probe_that_can_be_kept():
    found = load(EXAMPLE).probe()
    assert found.turn_end == "<|im_end|>\n"
    assert found.warnings() == []
    assert json.loads(json.dumps(found.as_dict()))["history_is_prefix"] is True
