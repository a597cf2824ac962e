"""Numbers keep their digits: what templates, names and Python see of JSON is what Python's `json` reads and writes."""

import json
import math

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.alignment.tokenizer import Template
from tracegrad.errors import TracegradError

transformers = pytest.importorskip("transformers")

MODEL = "examples/quickstart/model"
NUMBERS = [
    "90071992547409931234567",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "-9223372036854775809",
    "170141183460469231731687303715884105727",
    "-170141183460469231731687303715884105729",
    "1" + "0" * 400,
    "1e400",
    "-1e400",
    "1.10",
    "1E5",
    "1e16",
    "-0.0",
    "-0",
    "0",
    "1e-7",
    "5e-324",
    "123456789012345678901234567890.5",
    "9007199254740993",
    "0.1",
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{{ m.note }}|{{ m.note|tojson }}|{{ 'n' ~ m.note }}|"
    "{{ m.note|string }}|"
    "{{ m.note == m.same }}{{ m.note != m.same }}{{ m.note is number }}{{ m.note is string }}{{ m.note is mapping }}"
    "{{ m.note > 5 }}{{ m.note <= m.other }}{{ m.note < m.other }}{{ 5 < m.note }}{{ m.note > 2.5 }}{{ [m.note] }}"
    "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments|tojson }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t|tojson }}{{ t }}{% endfor %}{{ limit }}{{ limit|tojson(indent=1) }}"
)


@pytest.fixture(scope="module")
def theirs():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def ours():
    return Template(TEMPLATE)


def told(text, other):
    arguments = f'{{"a": [{text}, {{"b": {text}}}], "c": "{text}"}}'
    messages = (
        f'[{{"role": "user", "content": "x", "note": {text}, "same": {text}, "other": {other}}}, '
        f'{{"role": "assistant", "content": "y", "note": {other}, "same": 1, "other": {text}, "tool_calls": '
        f'[{{"id": {text}, "function": {{"name": "f", "arguments": {arguments}}}}}]}}]'
    )
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"maximum": {text}}}}}}}]'
    return messages, tools, f'{{"limit": {text}}}'


@pytest.mark.parametrize("text", NUMBERS)
@pytest.mark.parametrize("other", ["3", "-7.5", "99999999999999999999999999999999999999999999999999"])
def test_templates_see_what_pythons_json_reads(ours, theirs, text, other):
    messages, tools, kwargs = (json.loads(each) for each in told(text, other))
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, chat_template=TEMPLATE, **kwargs)
    if all(map(math.isfinite, (value for value in (json.loads(text),) if isinstance(value, float)))):
        assert ours.render(messages, tools=tools, **kwargs).text == expected
    as_text = told(text, other)
    found = ours._core.render(as_text[0], as_text[1], False, as_text[2])["text"]
    assert found == expected


@pytest.mark.parametrize("text", NUMBERS)
def test_a_record_keeps_the_digits_of_messages_tools_and_variables(tmp_path, theirs, text):
    """As an object and as a string of arguments, read by the scanner and by the parser of what the scanner gives up."""
    for odd in ("", '"ids": [1.5e0, NaN], '):
        for arguments in (f'{{"id": {text}}}', json.dumps(f'{{"id": {text}}}')):
            messages = (
                '[{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "c", '
                f'"type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}]}}]'
            )
            tools = '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": '
            tools += f'{{"maximum": {text}}}}}}}]'
            (tmp_path / "t.jsonl").write_text(f'{{{odd}"reward": 1, "messages": {messages}, "tools": {tools}}}\n')
            [trace] = tg.read(tmp_path / "t.jsonl")
            assert repr(trace.tools) == repr(json.loads(tools))
            tok = tg.Tokenizer.from_pretrained(MODEL)
            sequences = tg.align(tg.read(tmp_path / "t.jsonl"), tok, text_only=True)
            whole = json.loads(messages)
            if isinstance(whole[1]["tool_calls"][0]["function"]["arguments"], str):
                whole[1]["tool_calls"][0]["function"]["arguments"] = json.loads(f'{{"id": {text}}}')
            expected = theirs.apply_chat_template(whole, tools=json.loads(tools), tokenize=False)
            body = expected[: expected.rindex("<|im_end|>") + len("<|im_end|>")]
            assert tok.decode([int(i) for i in sequences.ids]) == body


def test_what_python_gets_of_a_record_is_what_json_reads():
    said = b'{"role": "assistant", "content": "x"}'
    record = b'{"reward": 1, "messages": [{"role": "user", "content": "go", "n": [%s]}, ' + said + b"]}"
    text = ", ".join(each for each in NUMBERS)
    [trace] = tg.Traces.from_records([record % text.encode()])
    assert repr(trace.pool[0]["n"]) == repr(json.loads(f"[{text}]"))


@pytest.mark.parametrize("text", ["90071992547409931234567", "-9223372036854775809", "18446744073709551616"])
def test_ids_and_groups_are_named_by_their_digits(text):
    record = b'{"id": %s, "group": %s, "reward": 1, "messages": [{"role": "user", "content": "a"}]}' % (
        (text.encode(),) * 2
    )
    [trace] = tg.Traces.from_records([record])
    assert (trace.id, trace.group) == (text, text)


def test_the_digits_of_a_call_stay_when_one_of_its_histories_keeps_arguments_as_an_object():
    text = "90071992547409931234567"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"id": {text}}}'}}
    as_object = {**call, "function": {"name": "f", "arguments": {"id": int(text)}}}
    ask, tool = {"role": "user", "content": "go"}, {"role": "tool", "content": "ok", "tool_call_id": "c"}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    again = {**said, "tool_calls": [as_object]}
    respond = lambda message: {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}  # noqa: E731
    calls = [
        {"request": {"messages": [ask]}, "response": respond(said)},
        {"request": {"messages": [ask, again, tool]}, "response": respond({"role": "assistant", "content": "done"})},
    ]
    [trace] = tg.Traces.from_records([{"calls": calls}])
    assert len(trace.pool) == 4


def test_integers_beyond_128_bits_are_not_calculated_with():
    template = Template("{{ limit + 1 }}")
    assert template.render([], limit=2**64).text == str(2**64 + 1)
    assert template.render([], limit=-(2**100)).text == str(1 - 2**100)
    with pytest.raises(TracegradError):
        template.render([], limit=10**60)


def test_an_object_with_the_reserved_key_stays_an_object_unless_it_is_such_a_number():
    template = Template("{{ limit }}")
    assert template.render([], limit={"\0number": "12"}).text == str({"\0number": "12"})


def test_a_reward_of_many_digits_is_its_float():
    [trace] = tg.Traces.from_records(
        [b'{"reward": 18446744073709551616, "messages": [{"role": "user", "content": "a"}]}']
    )
    assert trace.reward == np.float32(2.0**64)
    with pytest.raises(TracegradError, match="TG-FORMAT-022"):
        tg.Traces.from_records([b'{"reward": 1e400, "messages": [{"role": "user", "content": "a"}]}'])


@pytest.mark.parametrize("place", ["beside", "metadata"])
def test_an_integer_of_more_digits_than_python_reads_is_a_text_and_ends_no_scoring(place):
    many = "9" * 5000
    said = '"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]'
    beside = f'"metadata": {{"n": {many}}}' if "metadata" in place else f'"n": {many}'
    traces = tg.Traces.from_records([f"{{{said}, {beside}}}".encode(), f'{{{said}, "n": 1}}'.encode()])
    assert traces[0].to_dict().get("n", traces[0].metadata.get("n")) == many

    def length(completions, n):
        return [float(len(str(one))) for one in n]

    done = tg.rewards(traces, length)
    assert [done.rows[at][0] for at in range(2)] == [5000.0, 1.0]
    assert many in done.traces[0].record.decode()
