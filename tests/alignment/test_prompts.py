"""Prompts as servers render them, without a server: what a real vLLM answered, and the sources of the others."""

import json
import shutil

import numpy as np
import pytest

import tracegrad as tg
from prompt_cases import (
    CALL,
    CASES,
    DOCUMENTS,
    DUMP,
    EFFORT,
    FLAGS,
    LLAMA,
    NOW,
    PARTS,
    RESULT,
    Q,
    called,
    talk,
    text,
    tools,
    user,
)
from prompt_templates import (
    GOLDEN,
    MODEL,
    beginning,
    folder,  # noqa: F401
    with_template,
)
from tracegrad.data.codes import SAMPLED, SERVERS


def record(tokenizer, request, **more):
    ids = [*tokenizer.encode("yo").tolist(), 2]
    logprobs = {"content": [{"token": f"token_id:{one}", "logprob": -0.1} for one in ids]}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yo"}}
    return {
        "reward": 1,
        "request": request,
        "response": {"choices": [{**choice, "token_ids": ids, "logprobs": logprobs}]},
        **more,
    }


def prompt(tokenizer, request, server_profile=None, **more):
    """The text before the first sampled token."""
    traces = tg.Traces.from_records([record(tokenizer, request, **more)])
    return tokenizer.decode(beginning(tg.align(traces, tokenizer, server_profile=server_profile)))


@pytest.mark.parametrize("name", [name for name, written in GOLDEN.items() if written is not None])
def test_a_prompt_is_as_vllm_wrote_it(name, folder):
    template, request = CASES[name]
    assert prompt(with_template(template, folder), request) == GOLDEN[name]


def test_every_case_has_an_answer_of_the_server():
    assert set(GOLDEN) == set(CASES)


HEAD = "<|im_start|>assistant\n"


def llama(*turns):
    """What LLAMA writes of these roles and texts."""
    return "".join(f"<|im_start|>{role}\n\n{words}<|im_end|>" for role, words in turns) + f"{HEAD}\n"


def dumped(*messages):
    """What DUMP writes of these messages, keys in this order."""
    return f"{json.dumps(messages)}null{HEAD}"


def schema(**function):
    return json.dumps([{"type": "function", "function": function}])


F = {"name": "f", "arguments": {}}
OBJECT = {"type": "object"}

# For each: template, request, and the text for each server; those left out are as vLLM. From their sources.
OTHERS = {
    "parts": (
        LLAMA,
        user(text("a"), text("b")),
        {"vllm": llama(("user", "a\nb")), "sglang": llama(("user", "a b")), "tgi": llama(("user", "ab"))},
    ),
    "a text where parts are wanted": (
        PARTS,
        user("two"),
        # In that of SGLang and of TGI the template goes over the letters of the text.
        {
            "vllm": f"user: two<|im_end|>\n{HEAD}",
            "sglang": f"user:<|im_end|>\n{HEAD}",
            "tgi": f"user:<|im_end|>\n{HEAD}",
        },
    ),
    "a template that names media": (
        "{# image #}" + LLAMA.replace("m['content'] | trim", "m['content'] | length | string"),
        user(text("abc"), text("d")),
        {"vllm": llama(("user", 5)), "sglang": llama(("user", 2)), "tgi": llama(("user", 4))},
    ),
    "developers": (
        LLAMA,
        talk(("developer", "d"), ("user", "q"), ("developer", "e"), ("user", "r")),
        {
            "vllm": llama(("system", "d\n\ne"), ("user", "q"), ("user", "r")),
            "sglang": llama(("developer", "d"), ("user", "q"), ("developer", "e"), ("user", "r")),
            "llama.cpp": llama(("system", "d"), ("user", "q"), ("system", "e"), ("user", "r")),
            "tgi": llama(("developer", "d"), ("user", "q"), ("developer", "e"), ("user", "r")),
            "openai": llama(("system", "d"), ("user", "q"), ("system", "e"), ("user", "r")),
        },
    ),
    "tool of parts": (
        DUMP,
        talk(Q, {**RESULT, "content": [text("1"), text("2")], "mark": 1}),
        {
            "vllm": dumped(Q, {"role": "tool", "content": "1\n2", "tool_call_id": "c"}),
            "sglang": dumped(Q, {"role": "tool", "content": "1 2", "tool_call_id": "c"}),
            "tgi": dumped(Q, {"role": "tool", "content": "12"}),
            "openai": dumped(Q, {"role": "tool", "tool_call_id": "c", "content": "1\n2", "mark": 1}),
        },
    ),
    "calls": (
        DUMP,
        talk(Q, {"content": None, "role": "assistant", "tool_calls": [CALL], "reasoning_content": "t"}, RESULT),
        {
            "vllm": dumped(
                Q,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "c", "function": {"arguments": {}, "name": "f"}, "type": "function"}],
                    "reasoning": "t",
                    "reasoning_content": "t",
                },
                {"role": "tool", "content": "7", "tool_call_id": "c"},
            ),
            "sglang": dumped(
                Q,
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "t",
                    "tool_calls": [{"id": "c", "index": None, "type": "function", "function": F}],
                },
                {"role": "tool", "content": "7", "tool_call_id": "c"},
            ),
            "llama.cpp": dumped(
                Q,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "c", "type": "function", "function": F}],
                    "reasoning_content": "t",
                },
                {"role": "tool", "content": "7", "tool_call_id": "c"},
            ),
            "tgi": dumped(Q, {"role": "assistant", "content": ""}, {"role": "tool", "content": "7"}),
            "openai": dumped(
                Q,
                {
                    "thinking": "t",
                    "content": "",
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "function", "function": F}],
                    "reasoning_content": "t",
                },
                {"role": "tool", "tool_call_id": "c", "content": "7"},
            ),
        },
    ),
    "tools": (
        "{{ tools | tojson }}",
        tools({"parameters": OBJECT, "name": "now"}),
        {
            "vllm": schema(name="now", description=None, parameters=OBJECT),
            "sglang": schema(description=None, name="now", parameters=OBJECT, strict=False),
            "llama.cpp": schema(name="now", description="", parameters=OBJECT),
            "tgi": schema(parameters=OBJECT, name="now"),
            "openai": schema(parameters=OBJECT, name="now"),
        },
    ),
    "variables": (
        EFFORT,
        user("q", reasoning_effort="none", chat_template_kwargs={"reasoning_effort": "low"}),
        {
            "vllm": f"[effort none][no thinking][user]q{HEAD}",
            "sglang": f"[effort low][user]q{HEAD}",
            "tgi": f"[user]q{HEAD}",
        },
    ),
    "thinking": (
        "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}",
        user("q", enable_thinking=False),
        {"vllm": "", "llama.cpp": "[True]", "openai": "[False]"},
    ),
    "documents": (
        DOCUMENTS,
        user("q", documents=[{"title": "a", "text": "b"}]),
        {
            "vllm": f"<doc>a: b</doc>[user]q{HEAD}",
            "sglang": f"[user]q{HEAD}",
            "llama.cpp": f"[user]q{HEAD}",
            "tgi": f"[user]q{HEAD}",
        },
    ),
    "variables of no value": (
        FLAGS,
        user("q", chat_template_kwargs={"style": "auto", "enable_thinking": None}),
        {
            "vllm": f"[user]q{HEAD}",
            "sglang": f"[None][auto][user]q{HEAD}",
            "llama.cpp": f"[None][auto][user]q{HEAD}",
            "openai": f"[None][auto][user]q{HEAD}",
        },
    ),
    "a header of Claude Code": (
        LLAMA,
        talk(("system", "x-anthropic-billing-header: 1\nBe short."), ("user", "q")),
        {
            "vllm": llama(("system", "Be short."), ("user", "q")),
            **dict.fromkeys(SERVERS[1:], llama(("system", "x-anthropic-billing-header: 1\nBe short."), ("user", "q"))),
        },
    ),
    "arguments that are no object": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}",
        called('{"a": 1'),
        {"vllm": "{}", "sglang": '"{\\"a\\": 1"', "llama.cpp": '"{\\"a\\": 1"', "tgi": ""},
    ),
    "media": (
        "{% for m in messages %}{% for p in m.content %}{{ p | tojson if p is mapping else p }}{% endfor %}"
        "{% endfor %}",
        user({"type": "image_url", "image_url": {"url": "http://a/b.png"}, "mark": 1}, text("q", mark=2)),
        {
            "vllm": '{"type": "image", "mark": 1}{"type": "text", "text": "q", "mark": 2}',
            "sglang": '{"type": "image"}{"type": "text", "text": "q"}',
            "tgi": "![](http://a/b.png)q",
        },
    ),
    "an answer stands last": (
        None,
        talk(("user", "q"), ("assistant", "Sure: ")),
        {
            "vllm": f"<|im_start|>user\nq<|im_end|>\n{HEAD}Sure: <|im_end|>\n{HEAD}",
            "sglang": f"<|im_start|>user\nq<|im_end|>\n<|im_start|>user\nSure: <|im_end|>\n{HEAD}",
            "llama.cpp": f"<|im_start|>user\nq<|im_end|>\n{HEAD}Sure: ",
            "tgi": f"<|im_start|>user\nq<|im_end|>\n{HEAD}Sure:",
        },
    ),
    "prefill": (
        LLAMA,
        talk(("user", "q"), ("assistant", "Sure: "), continue_final_message=True, add_generation_prompt=False),
        {
            # LLAMA trims, so that transformers cuts before the tag and the space.
            "vllm": llama(("user", "q")) + "Sure:",
            "sglang": llama(("user", "q")) + "Sure: ",
            "llama.cpp": llama(("user", "q")) + "Sure: ",
            # What stands in the text is "Sure:", which is not the content: nothing is cut.
            "tgi": llama(("user", "q"), ("assistant", "Sure:")),
        },
    ),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", OTHERS)
def test_servers_differ(name, server, folder):
    template, request, written = OTHERS[name]
    assert prompt(with_template(template, folder), request, server) == written.get(server, written["vllm"])


FINGERPRINTS = {
    "vllm-0.32.0-tp1-5c1a2b3d": "vllm",
    "b6123-1a2b3c4d": "llama.cpp",
    "3.0.1-sha-bb9095a": "tgi",
    "3.3.6-native": "tgi",
    "2.4.1-dev0-native": "tgi",
    "fp_44709d6fcb": None,
    "bold-move": None,
}


@pytest.mark.parametrize("fingerprint", FINGERPRINTS)
def test_the_record_names_its_server(fingerprint, folder):
    tokenizer, named = with_template(None, folder), FINGERPRINTS[fingerprint]
    one = record(tokenizer, user("q"))
    one["response"]["system_fingerprint"] = fingerprint
    found = tg.align(tg.Traces.from_records([one]), tokenizer).alignment_report.server_profiles
    assert found == {named or "vllm (assumed)": 1}


def test_which_rules_were_taken_is_reported(folder):
    tokenizer = with_template(None, folder)
    bare, said = record(tokenizer, user("q")), record(tokenizer, user("q"), server="sglang")
    url = record(tokenizer, user("q"), server="http://127.0.0.1:8000")
    exact = record(tokenizer, user("q"))
    exact["response"]["prompt_token_ids"] = [5]
    traces = tg.Traces.from_records([bare, said, url, exact])
    assert tg.align(traces, tokenizer).alignment_report.server_profiles == {"sglang": 1, "vllm (assumed)": 2}
    assert tg.align(traces, tokenizer, server_profile="tgi").alignment_report.server_profiles == {"tgi": 3}
    weighed = record(tokenizer, user("q"))
    weighed["response"]["metadata"] = {"weight_version": "7"}
    assert tg.align(tg.Traces.from_records([weighed]), tokenizer).alignment_report.server_profiles == {"sglang": 1}
    with pytest.raises(tg.TracegradError, match=r"TG-ARGS-008.*server_profile"):
        tg.align(traces, tokenizer, server_profile="ollama")


def test_text_of_a_begun_answer_is_what_comes_behind_it(folder):
    tokenizer = with_template(None, folder)
    one = {
        "reward": 1,
        "request": CASES["prefill"][1],
        "response": {
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yo"}}]
        },
    }
    sequences = tg.align(tg.Traces.from_records([one]), tokenizer, text_only=True)
    assert (
        tokenizer.decode(sequences.ids.tolist())
        == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nSure: yo<|im_end|>"
    )
    assert tokenizer.decode(sequences.ids[sequences.trainable].tolist()) == "yo<|im_end|>"


def test_a_record_of_messages_is_rendered_by_the_same_rules(folder):
    tokenizer = with_template(None, folder)
    talked = [*called("")["messages"][:2]]
    sequences = tg.align(tg.Traces.from_records([{"reward": 1, "messages": talked}]), tokenizer, text_only=True)
    assert (
        tokenizer.decode(sequences.ids[sequences.trainable].tolist())
        == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    )


def test_variables_of_the_record_go_before_those_of_the_request(folder):
    tokenizer = with_template(EFFORT, folder)
    asked = user("q", reasoning_effort="low")
    assert prompt(tokenizer, asked, template_kwargs={"reasoning_effort": "high"}).startswith("[effort high]")


def test_messages_keep_their_places_where_systems_are_joined(folder):
    """The answer is found behind the joined system text, and the next prompt goes on in its branch."""
    tokenizer = with_template(None, folder)
    first = [("user", "a"), ("developer", "d")]
    ids = [*tokenizer.encode("yo").tolist(), 2]
    logprobs = {"content": [{"token": f"token_id:{one}", "logprob": -0.1} for one in ids]}
    answer = {
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "yo"},
                "token_ids": ids,
                "logprobs": logprobs,
            }
        ]
    }
    calls = [
        {"request": talk(*first), "response": answer},
        {"request": talk(*first, ("assistant", "yo"), ("user", "b")), "response": answer},
    ]
    sequences = tg.align(tg.Traces.from_records([{"reward": 1, "calls": calls}]), tokenizer)
    assert sequences.branches == 1
    assert sequences.alignment_report.table() == {}
    assert tokenizer.decode(sequences.ids.tolist()) == (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"
    )
    assert int((sequences.source == SAMPLED).sum()) == 2 * len(ids)


def test_recorded_prompt_ids_are_compared_with_the_server_s_prompt(folder):
    """Parts are no difference where the ids are those of the joined text."""
    tokenizer = with_template(LLAMA, folder)
    request = user(text("a"), text("b"))
    one = record(tokenizer, request)
    one["response"]["prompt_token_ids"] = tokenizer.encode(
        GOLDEN["two parts, llama"].replace("What is two plus two?\nBe short.", "a\nb")
    ).tolist()
    sequences = tg.align(tg.Traces.from_records([one]), tokenizer)
    assert sequences.alignment_report.table() == {}
    given = np.flatnonzero(sequences.source == 0)
    assert tokenizer.decode(sequences.ids[given].tolist()) == "a\nb"


def test_gpt_oss_keeps_its_thinking(folder, tmp_path):
    """Servers write its prompts without the template, with reasoning where the template reads `thinking`."""
    shows = "{% for m in messages %}{% if m.thinking %}<{{ m.thinking }}>{% endif %}{{ m.content }}{% endfor %}"
    asked = talk(Q, {"role": "assistant", "content": "a", "reasoning_content": "t"}, Q)
    assert prompt(with_template(shows, folder), asked) == "qaq"
    shutil.copytree(MODEL, tmp_path / "oss", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "oss" / "config.json").read_text())
    for name, content in (
        ("config.json", json.dumps({**config, "model_type": "gpt_oss"})),
        ("chat_template.jinja", shows),
    ):
        (tmp_path / "oss" / name).unlink()
        (tmp_path / "oss" / name).write_text(content)
    assert prompt(tg.Tokenizer.from_pretrained(tmp_path / "oss"), asked) == "q<t>aq"


def test_tools_are_as_the_record_has_them_where_nothing_is_known(folder):
    shown = with_template("{{ tools | tojson }}", folder)
    assert json.loads(prompt(shown, tools({**NOW, "mark": 1}), "openai"))[0]["function"]["mark"] == 1
