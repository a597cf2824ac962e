"""Requests to a real vLLM: the ids it made of each prompt are those that `align` makes of the record without them."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import tracegrad as tg
from prompt_cases import CASES, LLAMA, PREFILL, SAMPLE, called, talk, text, tools, user
from prompt_templates import GOLDEN, beginning, with_template

pytestmark = pytest.mark.vllm
SHARED = Path(__file__).parents[3] / "shared"
FAMILIES = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "deepseek-ai-DeepSeek-V3.1",
    "microsoft-Phi-3.5-mini-instruct",
    "ibm-granite-granite-3.3-2B-Instruct",
    "GLM-4.6",
    "HuggingFaceTB-SmolLM3-3B",
)
"""Templates of models, where the folder that has them is there."""
OF_FAMILIES = {
    "parts": user(text("What is two plus two?"), text("Be short.")),
    "a text": talk(("system", "s"), ("user", "hi")),
    "developer": talk(("developer", "rhymes"), ("user", "hi")),
    "no arguments": called(""),
    "three turns": talk(("user", "a"), ("assistant", "b"), ("user", "c")),
    "reasoning": talk(("user", "a"), {"role": "assistant", "content": "b", "reasoning_content": "t"}, ("user", "c")),
    "effort": user("q", reasoning_effort="none"),
    "prefill": talk(("user", "q"), ("assistant", "Sure: "), **PREFILL),
    "a tool": tools({"name": "now", "parameters": {"type": "object", "properties": {}}}),
}


def post(url, request, template):
    """The response to a request, None where the server refuses it."""
    asked = {"model": "clerk", "temperature": 1, "max_tokens": 2, "logprobs": True, "return_token_ids": True, **request}
    body = json.dumps(asked if template is None else {**asked, "chat_template": template}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 400:
            return None
        raise


def compared(url, request, template, tokenizer):
    """Prompt ids of the server and ours, of one record; None for a request that it refuses."""
    response = post(url, request, template)
    if response is None:
        return None
    theirs = response.pop("prompt_token_ids")
    sequences = tg.align(tg.Traces.from_records([{"reward": 1, "request": request, "response": response}]), tokenizer)
    assert sequences.alignment_report.server_profiles == {"vllm": 1}, sequences.alignment_report.server_profiles
    return theirs, beginning(sequences)


def differences(url, cases, folder):
    """The cases in which the prompts differ, and those that the server refuses, by name."""
    differ, refused = {}, set()
    for name, (template, request) in cases.items():
        tokenizer = with_template(template, folder)
        found = compared(url, request, template, tokenizer)
        if found is None:
            refused.add(name)
        elif found[0] != found[1]:
            differ[name] = tuple(map(tokenizer.decode, found))
        if CASES.get(name) == (template, request) and found is not None:
            assert tokenizer.decode(found[0]) == GOLDEN[name], name
    return differ, refused


def test_prompts_are_those_of_the_server(served, tmp_path_factory):
    differ, refused = differences(served, {name: CASES[name] for name in SAMPLE}, tmp_path_factory.mktemp("prompts"))
    assert differ == {}
    assert refused == {"image to a text model"}


@pytest.mark.nightly
def test_all_prompts_are_those_of_the_server(served, tmp_path_factory):
    differ, refused = differences(served, CASES, tmp_path_factory.mktemp("prompts"))
    assert differ == {}
    assert refused == {name for name, written in GOLDEN.items() if written is None}
    assert len(CASES) - len(refused) >= 80


@pytest.mark.nightly
def test_prompts_of_real_templates_are_those_of_the_server(served, tmp_path_factory):
    folder = SHARED / "data" / "templates" / "llamacpp"
    templates = {name: folder / f"{name}.jinja" for name in FAMILIES if (folder / f"{name}.jinja").exists()}
    if len(templates) < 8:
        pytest.skip("the templates of models are not there")
    sources = {name: path.read_text() for name, path in templates.items()}
    cases = {f"{kind}, {name}": (sources[name], request) for name in sources for kind, request in OF_FAMILIES.items()}
    differ, refused = differences(served, cases, tmp_path_factory.mktemp("prompts"))
    assert differ == {}
    assert len(cases) - len(refused) >= 80, sorted(refused)


@pytest.mark.nightly
def test_prompts_that_were_once_rendered_otherwise(served, tmp_path_factory):
    recorded = SHARED / "cases" / "server_prompts.json"
    if not recorded.exists():
        pytest.skip("the recorded cases are not there")
    listed = json.loads(recorded.read_text())["cases"]
    cases = {case["name"]: (case["chat_template"], case["request"]) for case in listed}
    assert differences(served, cases, tmp_path_factory.mktemp("prompts")) == ({}, set())


def test_a_conversation_is_followed_through_the_rules(served, tmp_path_factory):
    """Two turns: the second prompt has the first answer as it was sampled, developers joined and parts joined."""
    tokenizer = with_template(LLAMA, tmp_path_factory.mktemp("prompts"))
    messages = [
        {"role": "developer", "content": [text("a"), text("b")]},
        {"role": "user", "content": [text("say"), text("it")]},
    ]
    first = post(served, {"messages": messages}, LLAMA)
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    longer = [*messages, answer, {"role": "developer", "content": "c"}, {"role": "user", "content": "more"}]
    second = post(served, {"messages": longer}, LLAMA)
    calls = [
        {"request": {"messages": asked}, "response": response}
        for asked, response in ((messages, first), (longer, second))
    ]
    prompts = [call["response"].pop("prompt_token_ids") for call in calls]
    sequences = tg.align(tg.Traces.from_records([{"reward": 1, "calls": calls}]), tokenizer)
    starts = sequences.cu_seqlens[:-1]
    # The second system text is another one: the prompt goes on in no branch.
    assert sequences.branches == 2
    for at, prompt in zip(starts, prompts, strict=True):
        assert sequences.ids[at : at + len(prompt)].tolist() == prompt
