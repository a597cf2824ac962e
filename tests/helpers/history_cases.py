"""Render rewritten histories and tool turns by the templates of several model families."""

import pytest

from vocabulary import ids_of, load, model, record, said, trl_template, user

QWEN = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]

HARMONY = ["<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"]

GLM = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]

LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

FAMILIES = {
    "qwen3": (QWEN, "<|im_end|>", {}),
    "qwen3_training": (QWEN, "<|im_end|>", {}),
    "qwen2_5": (QWEN, "<|im_end|>", {}),
    "gptoss": (HARMONY, "<|return|>", {}),
    "glm4moe": (GLM, "<|user|>", {}),
    "llama3_1": (LLAMA, "<|eot_id|>", {"bos_token": "<|begin_of_text|>"}),
    "llama3": (LLAMA, "<|eot_id|>", {"bos_token": "<|begin_of_text|>"}),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """The tokenizer of a family, by the name of its template."""
    made = {}

    def make(name):
        if name not in made:
            specials, eos, config = FAMILIES[name]
            made[name] = load(model(tmp_path_factory.mktemp(name), trl_template(name), specials, eos, **config))
        return made[name]

    return make


def called(arguments='{"a":1}', content="", **more):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"content": content, "tool_calls": [call], **more}


def tool_turn(tokenizer, sampled, arguments='{"a":1}', **more):
    first = said(
        "", ids_of(tokenizer, sampled), **{k: v for k, v in called(arguments).items() if k != "content"}, **more
    )
    result = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "look"}
    return record(user("q"), first, result, said("done", ids_of(tokenizer, "done<|im_end|>")))
