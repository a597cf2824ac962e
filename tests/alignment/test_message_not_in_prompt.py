"""The text of each message, tool call and tool result is in its prompt, or it is a finding; that needs no profile."""

import json
import shutil
from pathlib import Path

import pytest

import tracegrad as tg
from vocabulary import user

MODEL = Path("examples/quickstart/model")
TEMPLATES = Path(__file__).parents[2].parent / "shared" / "data" / "templates"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m['content'] %}{% if p['type']=='text' %}{{ ' ' + p['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def model(folder, template):
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for each in folder.iterdir():
        each.chmod(0o644)
    (folder / "chat_template.jinja").write_text(template)
    return tg.Tokenizer.from_pretrained(folder)


def call(messages, answer="yo", **response):
    said = {"role": "assistant", "content": answer}
    choice = {"index": 0, "finish_reason": "stop", "message": said}
    return {"id": "t", "reward": 1, "request": {"messages": messages}, "response": {"choices": [choice], **response}}


def found(record, tokenizer, **options):
    options = {"text_only": True, **options}
    report = tg.align(tg.Traces.from_records([record]), tokenizer, **options).alignment_report
    rows = [n for n, code in enumerate(report.reason) if report.reasons[code] == "R36 message_not_in_prompt"]
    return [(int(report.trace[n]), int(report.turn[n]), report.detail[n]) for n in rows]


def test_a_role_of_which_the_template_writes_nothing_is_found(tokenizer):
    """Case 4, should the request come to the template as it is."""
    template = MODEL.joinpath("chat_template.jinja").read_text()
    record = call([{"role": "remark", "content": "Answer in rhymes."}, user("hi")])
    assert "remark" not in template
    assert found(record, tokenizer) == [(0, 0, "the text of message 0 (remark) is not in the prompt")]
    assert found(record, tokenizer, mode="align", text_only=False) == found(record, tokenizer)


def test_a_text_for_a_template_that_takes_parts_is_found(tmp_path):
    """Case 3b: a loop over a text goes over its letters, none of which is a part."""
    tokenizer = model(tmp_path / "parts", PARTS)
    rendered = tokenizer.render([user("two plus two?")]).text
    expected = [] if "two plus two?" in rendered else [(0, 0, "the text of message 0 (user) is not in the prompt")]
    record = call([user("two plus two?")])
    shown = [] if "two plus two?" in text_before(record, tokenizer) else expected
    assert found(record, tokenizer) == shown
    assert found(call([user([{"type": "text", "text": "two plus two?"}])], ""), tokenizer) == []


def text_before(record, tokenizer):
    sequences = tg.align(tg.Traces.from_records([record]), tokenizer, text_only=True)
    return tokenizer.decode(
        [int(i) for i, trained in zip(sequences.ids, sequences.trainable, strict=True) if not trained]
    )


def weather(arguments):
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<call>{{ WRITTEN }}"
    "</call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ODD = 'São "Paulo"\nand\t\\ more'


@pytest.mark.parametrize(
    ("written", "arguments", "expected"),
    [
        ("c.function.name ~ c.function.arguments|tojson", {"city": ODD, "days": [1, 2.50, True, None]}, None),
        ("c.function.name ~ c.function.arguments|tojson(ensure_ascii=true)", {"city": ODD}, None),
        ("c.function.name ~ c.function.arguments.city", {"city": ODD}, None),
        ("c.function.name ~ c.function.arguments.city", {"city": ODD, "days": "three"}, "an argument of a tool call"),
        ("c.function.arguments|tojson", {"city": ODD}, "the name of a tool call"),
        ("c.function.name", {"city": {"in": [ODD]}}, "an argument of a tool call"),
        ("c.function.name ~ c.function.arguments|tojson", '{"city": "Rome", "id": 90071992547409931234567}', None),
        ("c.function.name ~ c.function.arguments|tojson", "no json", None),
        ("c.function.name", "no json", None),
    ],
)
def test_calls_are_looked_for_by_name_and_by_each_value(tmp_path, written, arguments, expected):
    tokenizer = model(tmp_path / "calls", CALLS.replace("WRITTEN", written))
    messages = [user("weather?"), weather(arguments), {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"}]
    details = [detail for _, _, detail in found(call(messages), tokenizer)]
    assert details == ([f"{expected} of message 1 (assistant) is not in the prompt"] if expected else [])
    # vLLM makes {} of arguments that are no JSON, SGLang hands them on.
    lost = written == "c.function.name" and arguments == "no json"
    assert len(found(call(messages), tokenizer, server_profile="sglang")) == len(details) + lost


def test_a_tool_result_is_looked_for(tmp_path):
    template = (
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
        "[assistant]"
    )
    messages = [user("weather?"), weather({"city": "Rome"}), {"role": "tool", "content": "sunny", "tool_call_id": "a"}]
    tokenizer = model(tmp_path / "tool", template)
    assert found(call(messages), tokenizer)[-1] == (0, 0, "the text of message 2 (tool) is not in the prompt")


def test_recorded_prompt_ids_are_decoded_where_they_are_not_those_of_the_template(tokenizer):
    ids = lambda text: [int(i) for i in tokenizer.encode(text)]  # noqa: E731
    turn = {
        "role": "assistant",
        "content": "yo",
        "token_ids": [*ids("yo"), 2],
        "logprobs": [-0.1] * (len(ids("yo")) + 1),
    }
    messages = [{"role": "system", "content": "Be brief."}, user("What is 2+2?"), turn]
    whole = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    for prompt, missing in (
        (whole, []),
        (whole.replace("\n", "\n\n"), []),
        (whole.replace("Be brief.", "Be verbose."), [(0, 0, "the text of message 0 (system) is not in the prompt")]),
        (whole.replace("2+2", "3+3"), [(0, 0, "the text of message 1 (user) is not in the prompt")]),
    ):
        record = {"reward": 1, "messages": [*messages[:2], {**turn, "prompt_token_ids": ids(prompt)}]}
        assert found(record, tokenizer) == missing


def test_each_message_is_said_once_with_its_turn_and_no_more_than_eight_of_a_trace(tokenizer):
    odd = [{"role": "remark", "content": f"note {n}"} for n in range(12)]
    first = {"role": "assistant", "content": "one"}
    record = {"reward": 1, "messages": [odd[0], user("a"), first, odd[1], user("b"), {**first, "content": "two"}]}
    assert [(turn, detail.split(" is ")[0]) for _, turn, detail in found(record, tokenizer)] == [
        (0, "the text of message 0 (remark)"),
        (1, "the text of message 3 (remark)"),
    ]
    assert len(found(call([*odd, user("a")]), tokenizer)) == 8


def test_reasoning_media_and_white_space_may_be_missing(tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content.split('</think>')[-1]|trim }}"
        "{% else %}{% for p in m.content %}{{ p.text or '' }}{% endfor %}{% endif %}{% endfor %}[assistant]"
    )
    tokenizer = model(tmp_path / "think", template)
    said = {"role": "assistant", "content": "<think>\nhidden\n</think>\n\nshown  text ", "reasoning_content": "more"}
    parts = [{"type": "text", "text": " look "}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    assert found(call([user("  a\n"), said, user(parts), said, user(" \n")]), tokenizer) == []


def test_what_is_said_beside_calls_may_be_dropped_by_the_template_and_no_other_text(tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{{ m.tool_calls|tojson }}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}[assistant]"
    )
    tokenizer = model(tmp_path / "beside", template)
    messages = [user("weather?"), {**weather({"city": "Rome"}), "content": "Let me look."}, user("and?")]
    assert found(call(messages), tokenizer) == []
    drops = template.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' else '' }}")
    tokenizer = model(tmp_path / "all", drops)
    plain = {"role": "assistant", "content": "Let me look."}
    assert found(call([user("weather?"), plain, user("and?")]), tokenizer) == [
        (0, 0, "the text of message 1 (assistant) is not in the prompt")
    ]


def test_the_doctor_finds_it_and_says_where(tmp_path, capsys):
    from tracegrad.cli import main

    rows = [call([{"role": "remark", "content": "Answer in rhymes."}, user("hi")]) for _ in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["doctor", str(tmp_path / "t.jsonl"), "--model", str(MODEL), "--json"]) == 1
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    one = findings["missing_messages"]
    assert (one["severity"], one["count"], one["first"]["line"], one["first"]["turn"]) == ("wrong", 4, 1, 0)
    assert one["found"] == "the text of message 0 (remark) is not in the prompt"


def test_the_tokenizer_files_have_none():
    tokenizer = tg.Tokenizer.from_pretrained(MODEL)
    files = sorted(Path("examples/quickstart").glob("*.jsonl*"))
    assert files
    for file in files:
        report = tg.align(tg.read(file), tokenizer).alignment_report
        assert "R36 message_not_in_prompt" not in report.table()


TALKS = {
    "plain": [user("What is two plus two?"), ("It is four.", {}), user("And  three\nplus three? ")],
    "system": [
        {"role": "system", "content": "Be brief, please."},
        user(" hello <b> & 'x' "),
        ("Hi there.", {}),
        user("bye"),
    ],
    "thought": [user("q one"), ("<think>\nhidden\n</think>\n\nanswer one", {}), user("q two")],
    "reasoning": [user("q one"), ("answer one", {"reasoning_content": "hidden"}), user("q two")],
}
IN_PARTS = {"idefics3", "idefics3_training", "smolvlm", "smolvlm_training"}
"""Templates that write text parts and nothing of a text."""


@pytest.mark.skipif(not TEMPLATES.exists(), reason="the templates of others are not here")
def test_templates_of_others_show_what_ordinary_conversations_say(tmp_path):
    missing, rendered = set(), 0
    for file in sorted(TEMPLATES.rglob("*.jinja")):
        tokenizer = model(tmp_path / "any", file.read_text(encoding="utf-8"))
        for talk in TALKS.values():
            messages = [each if isinstance(each, dict) else assistant(*each) for each in talk]
            try:
                missing |= {file.stem} if found(call(messages), tokenizer) else set()
                rendered += 1
            except tg.TracegradError:
                pass
    assert missing <= IN_PARTS
    assert rendered > 400


def assistant(content, more):
    return {"role": "assistant", "content": content, **more}
