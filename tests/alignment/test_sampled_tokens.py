"""Every sampled token that was recorded is used, or counted: streams, lists of responses, ends of turns, stops."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.data.formats.openai import parse_json_or_events
from tracegrad.data.json_path import split_lines
from tracegrad.doctor import Place, bigram_logprobs, diagnose, lag_test, rescore
from tracegrad.doctor.checks_shift import leading_lag
from tracegrad.errors import FormatError
from vocabulary import (
    EXAMPLE,
    align,
    branch,
    ids_of,
    load,
    model,
    reasons,
    record,
    said,
    text,
    trained,
    trl_template,
    user,
)

EOS = 2
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
ARGUMENTS = '{"city": "Rome"}'


def called(arguments=ARGUMENTS, name="get"):
    return [{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}]


def entries(ids):
    return {"content": [{"token": f"token_id:{i}", "logprob": -0.1 - n / 99} for n, i in enumerate(ids)]}


def streamed(chatml, kept=lambda _: True, thought=0, counted=None, as_text=False):
    """One call, streamed, that lost the chunks which are not kept; its usage counts all 24 tokens."""
    ids, asked = [*ids_of(chatml, CALL), EOS], [user("weather?")]
    assert len(ids) == 24
    prompt = chatml.render_ids(asked, add_generation_prompt=True).tolist()

    def chunk(delta, **more):
        choice = {"index": 0, "delta": delta, "finish_reason": None, **more}
        return {"id": "r", "object": "chat.completion.chunk", "choices": [choice]}

    listed = list(zip(ids, entries(ids)["content"], strict=True))
    chunks = [{**chunk({"role": "assistant", "content": ""}), "prompt_token_ids": prompt}]
    chunks += [
        chunk({}, token_ids=[i], logprobs={"content": [entry]}) for n, (i, entry) in enumerate(listed) if kept(n)
    ]
    chunks[2]["choices"][0]["delta"] = {"tool_calls": [{"index": 0, **called()[0]}]}
    chunks[-1]["choices"][0]["finish_reason"] = "tool_calls"
    usage = {"prompt_tokens": 9, "completion_tokens": (counted or 24) + thought}
    usage |= {"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}
    chunks += [{"id": "r", "object": "chat.completion.chunk", "choices": [], "usage": usage}]
    if as_text:
        chunks = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
    return {"reward": 1, "request": {"messages": asked, "temperature": 1.0, "stream": True}, "response": chunks}


def found(folder, rows):
    """Names of the doctor's findings to their severities."""
    path = folder / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps({**row, "group": f"g{n // 2}", "reward": n % 2}) for n, row in enumerate(rows))
    )
    return {each.name: each.severity.name for each in diagnose(str(path), EXAMPLE).findings}


def test_a_whole_stream_is_exact_and_one_that_lost_chunks_is_not_trained(chatml):
    assert int(align(chatml, streamed(chatml)).trainable.sum()) == 24
    lost = align(chatml, streamed(chatml, lambda n: not 10 <= n < 16))
    assert int(lost.trainable.sum()) == 0
    assert reasons(lost) == {"R28"}
    assert lost.alignment_report.detail[0] == "the listed tokens spell 18 of the 24 tokens that usage counts"
    # Usage alone tells of a chunk whose tokens are not in a value: the line break and the closing tag.
    tail = align(chatml, streamed(chatml, lambda n: n not in (21, 22) and n != 0))
    assert int(tail.trainable.sum()) == 0
    # Servers count up to 2 tokens more than they list, and reasoning that they hide is another finding.
    assert int(align(chatml, streamed(chatml, counted=26)).trainable.sum()) == 24
    assert int(align(chatml, streamed(chatml, thought=50)).trainable.sum()) == 24


@pytest.mark.parametrize("as_text", [False, True])
def test_the_doctor_compares_streams_with_their_usage(chatml, tmp_path, as_text):
    assert found(tmp_path, [streamed(chatml, as_text=as_text)] * 8) == {}
    lost = found(tmp_path, [streamed(chatml, lambda n: not 10 <= n < 16, as_text=as_text)] * 8)
    assert lost["lost_chunks"] == "WRONG"
    assert lost["broken_turns"] == "WRONG"
    assert found(tmp_path, [streamed(chatml, thought=50, as_text=as_text)] * 8) == {"hidden_reasoning": "WRONG"}


def test_usage_that_is_counted_up_in_every_chunk_is_that_of_the_last(chatml, tmp_path):
    row = streamed(chatml, thought=50)
    for n, chunk in enumerate(row["response"][:-1]):
        chunk["usage"] = {"completion_tokens": n, "completion_tokens_details": {"reasoning_tokens": 0}}
    both = {"calls": [{key: row[key] for key in ("request", "response")}] * 2}
    assert found(tmp_path, [row] * 8) == {"hidden_reasoning": "WRONG"}
    assert found(tmp_path, [both] * 8)["hidden_reasoning"] == "WRONG"


@pytest.mark.parametrize(
    ("spelled", "arguments", "name", "whole"),
    [
        (CALL, ARGUMENTS, "get", True),
        # Other notations of the same call: XML, Python, keys in another order, escapes, a number as a text.
        ("<function=get>\n<parameter=city>\nRome\n</parameter>\n</function>", ARGUMENTS, "get", True),
        ("[get(city='Rome', far=True, n=2)]", '{"n": 2, "city": "Rome", "far": true, "w": 0.5}', "get", False),
        ("[get(city='Rome', far=True, n=2)]", '{"n": 2, "city": "Rome", "far": true}', "get", True),
        ('{"name": "get", "arguments": {"a": "caf\\u00e9"}}', '{"a": "café"}', "get", True),
        ('{"name": "get", "arguments": {"a": "x\ty"}}', '{"a": "x\\ty"}', "get", True),
        ('to=functions.get<|x|>{"n":7}', '{"n": 7}', "get", True),
        # tool_choice names the function: what is sampled is its arguments.
        (ARGUMENTS, ARGUMENTS, "get", True),
        # A part is missing: a name, a value, a key, a number.
        ('{"name": "", "arguments": {"city": "Rome"}}', ARGUMENTS, "get", False),
        ('{"name": "get", "arguments": {"city": ""}}', ARGUMENTS, "get", False),
        ('{"name": "get", "arguments": {"": "Rome"}}', ARGUMENTS, "get", False),
        ('{"name": "get", "arguments": {"n": 1}}', '{"n": 17}', "get", False),
        ('{"name": "get", "arguments": {"a": "caf"}}', '{"a": "café"}', "get", False),
        # What was thought of before is not the call.
        ("<think>get Rome city</think>" + CALL.replace("Rome", ""), ARGUMENTS, "get", False),
        ("<think>get</think>" + CALL, ARGUMENTS, "get", True),
    ],
)
def test_ids_spell_the_names_and_values_of_the_calls_or_are_not_trained(chatml, spelled, arguments, name, whole):
    ids = [*ids_of(chatml, spelled), EOS]
    message = said(None, ids, tool_calls=called(arguments, name), finish_reason="tool_calls")
    got = align(chatml, record(user("q"), message))
    assert ("R28" not in reasons(got), trained(got) == ids) == (whole, whole)


def test_arguments_as_an_object_and_a_function_call_are_compared_too(chatml):
    ids = [*ids_of(chatml, CALL), EOS]
    for arguments, whole in (({"city": "Rome"}, True), ({"city": "Oslo"}, False)):
        message = said(None, ids, tool_calls=called(arguments))
        assert ("R28" not in reasons(align(chatml, record(user("q"), message)))) == whole
    message = {**said(None, ids), "function_call": {"name": "get", "arguments": '{"city": "Oslo"}'}}
    assert "R28" in reasons(align(chatml, record(user("q"), message)))


def answers():
    """What six servers give, of one text with its ids."""

    def openai(said, ids):
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        return {"object": "chat.completion", "choices": [{**choice, "token_ids": ids, "logprobs": entries(ids)}]}

    def legacy(said, ids):
        numbers = {"tokens": ["x"] * len(ids), "token_logprobs": [-0.1] * len(ids)}
        choice = {"index": 0, "text": said, "finish_reason": "stop", "token_ids": ids, "logprobs": numbers}
        return {"object": "text_completion", "choices": [choice]}

    def vllm(said, ids):
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": entries(ids)}
        return {"request_id": "r", "prompt_token_ids": [1], "choices": [choice]}

    def sglang(said, ids):
        meta = {"finish_reason": {"type": "stop", "matched": EOS}, "completion_tokens": len(ids)}
        return {
            "text": said,
            "output_ids": ids,
            "meta_info": {**meta, "output_token_logprobs": [[-0.1, i, None] for i in ids]},
        }

    def tgi(said, ids):
        tokens = [{"id": i, "logprob": -0.1, "text": "x", "special": i == EOS} for i in ids]
        return {"generated_text": said, "details": {"finish_reason": "eos_token", "prefill": [], "tokens": tokens}}

    def llama_cpp(said, ids):
        tokens = [{"id": i, "token": "x", "logprob": -0.1, "bytes": [120]} for i in ids]
        return {"content": said, "tokens": ids, "stop": True, "stop_type": "eos", "completion_probabilities": tokens}

    return [openai, legacy, vllm, sglang, tgi, llama_cpp]


@pytest.mark.parametrize("server", range(6))
def test_a_list_of_whole_responses_is_an_answer_each(chatml, tmp_path, server):
    make = answers()[server]
    said = {"four": [*ids_of(chatml, "four"), EOS], "five six": [*ids_of(chatml, "five six"), EOS]}
    row = {"request": {"messages": [user("q")]}, "response": [make(*each) for each in said.items()]}
    # One record is one trace: the first answer, the other is counted; `choice` names another.
    traces = tg.Traces.from_records([row])
    assert traces.read_report.unused_choices == 1
    for choice, ids in enumerate(said.values()):
        one = tg.Traces.from_records([{**row, "choice": choice}])[0]
        assert one.generations[0].token_ids.tolist() == ids
    with pytest.raises(FormatError, match=r"TG-FORMAT-010.*2"):
        tg.Traces.from_records([{**row, "choice": 2}])
    # `read` makes a trace of each, of one group, with its own reward.
    (tmp_path / "n.jsonl").write_text(json.dumps({**row, "reward": [1, 0]}))
    read = tg.read(tmp_path / "n.jsonl")
    assert [each.generations[0].token_ids.tolist() for each in read] == list(said.values())
    assert [each.reward for each in read] == [1.0, 0.0]
    assert len({each.group for each in read}) == 1


def test_answers_of_ollama_that_are_alike_are_kept_and_a_failed_one_is_not(tmp_path):
    def answer(word):
        logprobs = [{"token": word, "logprob": -0.1}]
        return {"model": "m", "response": word, "done": True, "done_reason": "stop", "logprobs": logprobs}

    def read(*response):
        (tmp_path / "n.jsonl").write_text(json.dumps({"request": {"prompt": "q"}, "response": list(response)}))
        return [each.messages[-1]["content"] for each in tg.read(tmp_path / "n.jsonl")]

    assert read(answer("a"), answer("b")) == ["a", "b"]
    assert read(*[answer("a")] * 4) == ["a"] * 4
    assert read(answer("a"), {"error": "busy"}, answer("b")) == ["a", "b"]


def test_chunks_that_hold_a_whole_choice_each_are_one_stream():
    def chunk(index, text):
        return {"id": "s", "choices": [{"index": index, "text": text, "finish_reason": "stop"}]}

    row = {"request": {"prompt": "q"}, "response": [chunk(0, "a"), chunk(1, "b")]}
    traces = tg.Traces.from_records([row, {**row, "choice": 1}])
    assert [trace.messages[-1]["content"] for trace in traces] == ["a", "b"]


def span(trace, n, content, reply):
    said = {"role": "assistant", "parts": [{"type": "text", "content": reply}]}
    asked = {"role": "user", "parts": [{"type": "text", "content": content}]}
    attributes = {"gen_ai.input.messages": json.dumps([asked]), "gen_ai.output.messages": json.dumps([said])}
    listed = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    return {"traceId": trace, "spanId": f"{n}", "name": "chat", "startTimeUnixNano": str(n), "attributes": listed}


def test_an_export_with_spans_of_several_traces_is_a_trace_for_each(tmp_path):
    silent = {"traceId": "c", "spanId": "9", "name": "GET /", "startTimeUnixNano": "5", "attributes": []}
    spans = [span("a", 1, "2+2?", "4"), span("b", 2, "3+3?", "6"), silent]
    row = {"resourceSpans": [{"resource": {"n": 1}, "scopeSpans": [{"scope": {"name": "s"}, "spans": spans}]}]}
    row["resourceSpans"].append({"scopeSpans": [{"spans": [span("a", 3, "sure?", "yes")]}]})
    for records in ([row], [{"messages": [user("q"), said("a")]}, row]):  # also where the first record needs no look
        (tmp_path / "spans.jsonl").write_text("\n".join(map(json.dumps, records)))
        traces = tg.read(tmp_path / "spans.jsonl")
        got = {trace.id: (len(trace.generations), trace.messages[-1]["content"]) for trace in traces}
        assert {key: got[key] for key in "ab"} == {"a": (2, "yes"), "b": (1, "6")}
        assert len(traces) == len(records) + 1
    with pytest.raises(FormatError, match=r"TG-FORMAT-073.*2"):
        tg.Traces.from_records([row])


SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh"


def test_lines_end_in_line_feeds_alone():
    assert split_lines(f"{SEPARATORS}\r\nx\ny\r\n\n") == [SEPARATORS, "x", "y", ""]
    assert split_lines("") == []


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff", ": hello\n\n", "retry: 5\n", "id: 1\n", "event: x\n"])
def test_a_stream_in_text_is_split_at_line_feeds_whatever_its_key_is(tmp_path, begin, end):
    separators = SEPARATORS.translate({ord(c): None for c in "\x0b\x0c\x1c\r"})  # JSON escapes control characters
    parts = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in (separators, "!")]
    parts[-1]["choices"][0]["finish_reason"] = "stop"
    body = begin + "".join(f"data: {json.dumps(each, ensure_ascii=False)}{end * 2}" for each in parts)
    assert parse_json_or_events(body) == parts
    request = {"messages": [user("q")], "model": "m"}
    for asked, answered in (("request", "response"), ("input", "output"), ("request_body", "response_body")):
        (tmp_path / "s.jsonl").write_text(json.dumps({asked: request, answered: body}))
        assert tg.read(tmp_path / "s.jsonl")[0].messages[-1]["content"] == f"{separators}!", asked


def test_a_turn_ends_where_its_text_ends(chatml):
    def turn(spelled, content, **more):
        ids = [i for part in spelled for i in ([part] if isinstance(part, int) else ids_of(chatml, part))]
        got = align(chatml, record(user("q"), said(content, ids, **more)))
        left = len(ids) - len(trained(got))
        assert trained(got) == ids[: len(ids) - left]
        assert got.alignment_report.count.tolist() == ([left] if left else [])
        assert reasons(got) <= {"R08"}
        return text(chatml, trained(got))

    # A stop string whose tokens are kept, unsaid, under any finish reason but one that holds text back.
    assert turn(["yo. END more"], "yo. ", stop_reason="END") == "yo. "
    assert turn(["yo.", " END more"], "yo.") == "yo."
    assert turn(["yo", " END"], "yo", finish_reason="length") == "yo"
    # A second message behind the stop token, which was sampled; also one that says the same again.
    assert turn(["yo", EOS, "\n", 1, "user\nhm", EOS], "yo") == "yo<|im_end|>"
    assert turn(["yo", EOS, "\n", 1, "assistant\nyo", EOS], "yo", stop_reason=EOS) == "yo<|im_end|>"
    # Reasoning before it is no overrun, nor white space that a server trims.
    assert turn(["<think>\nyo yo\n</think>\n\nyo", EOS], "yo") == "<think>\nyo yo\n</think>\n\nyo<|im_end|>"
    assert turn(["<think>\nyo\n</think>\n\nyo END x"], "yo").endswith("</think>\n\nyo")
    assert turn(["yo\n\n", EOS], "yo") == "yo\n\n<|im_end|>"
    assert turn(["so yo", EOS], "yo") == "so yo<|im_end|>"
    # Behind a call, what stands behind its stop token.
    ids = [*ids_of(chatml, CALL), EOS, *ids_of(chatml, "\nmore")]
    cut = align(chatml, record(user("q"), said(None, ids, tool_calls=called(), finish_reason="tool_calls")))
    assert trained(cut) == ids[: ids.index(EOS) + 1]
    assert reasons(cut) == {"R08"}
    # Words before a call are no whole of the turn.
    whole = said("yo", [*ids_of(chatml, f"yo\n{CALL}"), EOS], tool_calls=called(), finish_reason="tool_calls")
    assert len(trained(align(chatml, record(user("q"), whole)))) == len(whole["generation"]["token_ids"])


def test_a_conversation_goes_on_behind_what_was_left_out(chatml):
    ids = [*ids_of(chatml, "yo"), EOS, *ids_of(chatml, "\nmore")]
    got = align(chatml, record(user("q"), said("yo", ids), user("r"), said("no", [*ids_of(chatml, "no"), EOS])))
    assert got.branches == 1
    assert "yo<|im_end|>\n<|im_start|>user\nr" in text(chatml, got.ids)


GLM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<|observation|>\n' + m.content }}{% else %}{{ '<|assistant|>\n' + (m.content or '') }}"
    "{% for c in m.tool_calls %}"
    "{{ '\n<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
USER, ASSISTANT, OBSERVATION = 640, 641, 642


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    folder = model(tmp_path_factory.mktemp("glm"), GLM, ["<|user|>", "<|assistant|>", "<|observation|>"])
    (folder / "config.json").write_text('{"vocab_size": 643}')
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, USER, OBSERVATION]}))
    return load(folder)


def marked(tokenizer, got):
    pairs = zip(got.ids.tolist(), got.trainable.tolist(), strict=True)
    return "".join(f"[{text(tokenizer, [i])}]" if on else text(tokenizer, [i]) for i, on in pairs).replace("][", "")


def talk(**of_first):
    return [
        user("hi"),
        {"role": "assistant", "content": "yo", **of_first},
        user("and"),
        {"role": "assistant", "content": "no"},
    ]


def test_the_marker_of_the_next_role_is_the_stop_token_of_text(glm, chatml):
    got = align(glm, {"reward": 1, "messages": talk()}, text_only=True)
    assert marked(glm, got) == "<|user|>\nhi<|assistant|>\n[yo<|user|>]\nand<|assistant|>\n[no]"
    assert got.branches == 1
    # Nothing stands behind the last turn: that no stop is trained there is counted.
    assert reasons(got) == {"R06"}
    assert got.alignment_report.recorded == 5
    assert align(glm, {"messages": talk()}).trainable.sum() == 0
    calls = [{"type": "function", "function": {"name": "get", "arguments": "{}"}}]
    tool = [*talk(tool_calls=calls)[:2], {"role": "tool", "content": "7"}, {"role": "assistant", "content": "no"}]
    got = align(glm, {"messages": tool}, text_only=True)
    assert "[yo\n<tool_call>get</tool_call><|observation|>]\n7" in marked(glm, got)
    assert got.branches == 1
    got = align(chatml, {"messages": talk()}, text_only=True)
    assert marked(chatml, got).count("[yo<|im_end|>]") == 1


def test_a_marker_behind_text_in_recorded_prompt_ids_is_its_stop_token_too(glm):
    prompts = [glm.render_ids(talk()[:n], add_generation_prompt=True).tolist() for n in (1, 3)]
    messages = talk()
    for message, prompt in zip(messages[1::2], prompts, strict=True):
        message["prompt_token_ids"] = prompt
    got = align(glm, {"messages": messages}, text_only=True)
    assert marked(glm, got) == "<|user|>\nhi<|assistant|>\n[yo<|user|>]\nand<|assistant|>\n[no]"
    assert got.branches == 1


@pytest.mark.parametrize(
    ("reason", "stops"),
    [("stop", True), ("tool_calls", True), ("function_call", True), ("end_turn", True)]
    + [
        (reason, False)
        for reason in ("length", "content_filter", "abort", "error", "repetition", "max_tokens", "other")
    ],
)
def test_no_stop_token_is_trained_behind_text_that_was_cut(glm, chatml, reason, stops):
    for tokenizer, stop in ((glm, "<|user|>"), (chatml, "<|im_end|>")):
        got = align(tokenizer, {"messages": talk(finish_reason=reason)}, text_only=True)
        assert (f"[yo{stop}]" in marked(tokenizer, got)) == stops
        assert got.branches == 1
        assert (f"[yo]{stop}" in marked(tokenizer, got)) != stops


def test_a_sampled_marker_is_counted_once_and_another_stop_stays_before_it(glm):
    for stop, behind in ((USER, ""), (EOS, "<|user|>")):
        first = said("yo", [*ids_of(glm, "yo"), stop])
        got = align(glm, record(user("hi"), first, user("and"), said("no", [*ids_of(glm, "no"), USER])))
        shown = f"[yo{text(glm, [stop])}]{behind}\nand"
        assert shown in marked(glm, got)
        assert got.branches == 1


def turns(texts, logprobs, picks):
    """Flat previous ids, ids, logprobs and offsets of the answers that are picked."""
    before = np.concatenate([[-1, *texts[k][:-1]] for k in picks])
    ids, values = (np.concatenate([each[k] for k in picks]) for each in (texts, logprobs))
    return before, ids, values, np.concatenate([[0], np.cumsum([len(texts[k]) for k in picks])])


@pytest.mark.parametrize("answers", [2, 3, 8, 20])
def test_answers_that_repeat_are_no_independent_draws(answers):
    rng = np.random.default_rng(answers)
    shifted = 0
    for _ in range(50):
        texts = [rng.integers(0, 100, 6) for _ in range(answers)]
        logprobs = [-rng.exponential(1.0, 6) for _ in range(answers)]
        before, ids, values, cu = turns(texts, logprobs, rng.integers(answers, size=150))
        test = lag_test(values, bigram_logprobs(before, ids), cu)
        assert test.turns == 150
        assert test.draws <= answers
        shifted += leading_lag(test) != 0
    assert shifted == 0


def test_the_error_of_repeated_turns_is_that_of_one():
    # Two answers, 20 times each: the lead is that of the two alone, worked out as clusters of equal turns.
    recorded, reference = [-1.0, -9, -2, -8, -3, -7, -4], [-7.0, -1, -9, -2, -8, -3, -5]
    other, of_other = [-2.0, -3, -1, -6, -5, -4, -8], [-1.0, -2, -3, -1, -6, -5, -4]
    once = lag_test([*recorded, *other], [*reference, *of_other], [0, 7, 14])
    often = lag_test([*recorded, *other] * 20, [*reference, *of_other] * 20, np.arange(41) * 7)
    assert often.turns == 40
    assert often.draws == once.draws == 2
    assert often.lead[1] == pytest.approx(once.lead[1])
    assert often.lead[-1] == pytest.approx(once.lead[-1])


WORDS = ["yes", "no", "two", "five"]


def rows(chatml, logprobs, temperature=1.0, groups=4, words=None, count=60):
    """Answers drawn from a few words or numbers; `logprobs` gives the numbers of one answer of so many tokens."""
    rng, out = np.random.default_rng(1), []
    for n in range(count):
        asked = [user(f"what is {n // groups}?")]
        answer = words(n) if words else WORDS[rng.integers(4)]
        ids = [*ids_of(chatml, answer), EOS]
        told = {} if temperature is None else {"temperature": temperature}
        message = said(answer, ids, logprobs=[float(each) for each in logprobs(rng, ids)])
        message["generation"]["prompt_token_ids"] = chatml.render_ids(asked, add_generation_prompt=True).tolist()
        out.append({**record(*asked, message), "id": f"{n}", **told})
    return out


def modelled(rng, ids):
    """Logprobs of a policy that is nearly sure of many tokens: log-uniform below 1, exactly 0 where float32 ends."""
    drawn = -np.exp(rng.uniform(-20, 1, len(ids)))
    return np.where(drawn > -6e-8, 0.0, drawn)


def drawn_and(zero):
    """Logprobs of a policy that is sure of nothing, 0 where `zero` says so."""
    return lambda rng, ids: np.where(zero(rng, len(ids)), 0.0, -rng.exponential(1.0, len(ids)) - 0.01)


def numbers(n):
    return f"it is {n * 37 % 1000} or {n * 53 % 97}"


def test_zeros_that_no_model_gave_are_found(chatml, tmp_path):
    def name(found_):
        return {key: value for key, value in found_.items() if key != "filled_logprobs"}

    wrong = {"made_up_zeros": "WRONG"}
    everywhere = drawn_and(lambda rng, n: np.ones(n, bool))
    at_stops = drawn_and(lambda rng, n: np.arange(n) == n - 1)
    scattered = drawn_and(lambda rng, n: rng.random(n) < 0.1)
    assert name(found(tmp_path, rows(chatml, everywhere))) == wrong
    assert name(found(tmp_path, rows(chatml, everywhere, groups=1))) == wrong
    assert name(found(tmp_path, rows(chatml, at_stops, temperature=None, groups=1, words=numbers))) == wrong
    assert name(found(tmp_path, rows(chatml, scattered, groups=1, words=numbers))) == wrong


def test_zeros_of_models_are_not_found(chatml, tmp_path):
    def none(*args, **options):
        return "made_up_zeros" not in found(tmp_path, rows(chatml, *args, **options))

    everywhere = drawn_and(lambda rng, n: np.ones(n, bool))
    assert none(modelled, groups=1)
    assert none(modelled, groups=1, temperature=None, words=numbers)
    assert none(lambda rng, ids: modelled(rng, ids).round(3), groups=1)
    # Greedy, or at a low temperature: every answer to a prompt is the same.
    alike = {"words": lambda n: WORDS[n // 4 % 4]}
    for temperature in (0.0, 0.1, None):
        assert none(everywhere, temperature=temperature, **alike)


def test_ids_that_are_placeholders_are_found(chatml, tmp_path):
    def with_ids(ids):
        out = rows(chatml, lambda rng, each: -rng.random(len(each)))
        for row in out:
            generation = row["messages"][1]["generation"]
            generation.update(token_ids=ids, logprobs=[-0.5 - k / 9 for k in range(len(ids))])
        return found(tmp_path, out)

    assert with_ids([0] * 6)["placeholder_ids"] == with_ids(list(range(6)))["placeholder_ids"] == "WRONG"
    assert "placeholder_ids" not in with_ids([40, 33, 90, 12, 55, 41])
    # A policy that says one token again and again did sample it.
    loops = rows(chatml, lambda rng, ids: -rng.random(len(ids)), words=lambda n: "\n\n\n\n\n\n a")
    assert "placeholder_ids" not in found(tmp_path, loops)


def test_files_of_a_session_are_in_the_order_of_their_numbers(tmp_path):
    def call(n, before):
        messages = [m for k in range(n) for m in (user(f"q{k}"), {"role": "assistant", "content": f"a{k}"})]
        request = {"messages": [*before, *messages, user(f"q{n}")]}
        answer = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": f"a{n}"}}
        return {"session": "s", "request": request, "response": {"choices": [answer]}}

    for n in range(12):
        (tmp_path / f"s{n}.jsonl").write_text(json.dumps(call(n, [])))
    names = [str(tmp_path / f"s{n}.jsonl") for n in sorted(range(12), key=str)]  # as a shell lists them
    for source in (tmp_path, str(tmp_path / "*.jsonl"), names):
        for session in ("session", "prefix"):
            (trace,) = tg.read(source, map=tg.FieldMap(session=session))
            assert [m["content"] for m in trace.messages[1::2]] == [f"a{n}" for n in range(12)], session
    # By prefix, calls are joined though a later one stands before the one that it goes on.
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "log.jsonl").write_text("\n".join(json.dumps(call(n, [])) for n in (2, 0, 1)))
    (trace,) = tg.read(tmp_path / "all", map=tg.FieldMap(session="prefix"))
    assert len(trace.generations) == 3


def test_a_placeholder_of_pictures_that_was_sampled_is_text(tmp_path, chatml):
    # verl#7038: a text policy drew `<|image_pad|>`, and the trainer looked for the picture of it.
    folder = model(tmp_path, (EXAMPLE / "chat_template.jinja").read_text(), ["<|image_pad|>", "<|vision_start|>"])
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 642, "image_token_id": 640, "model_type": "qwen2_vl"})
    )
    tokenizer = load(folder)
    first, second = [*ids_of(tokenizer, "yo"), 641, 640, 640, EOS], [*ids_of(tokenizer, "no"), EOS]
    got = align(tokenizer, record(user("q"), said("yo", first), user("r"), said("no", second)))
    assert trained(got) == first + second
    assert got.images is None or not len(got.images)


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_what_a_template_hides_of_a_demonstration_may_be_sampled_again(tmp_path):
    # ART#910: the search for the hidden text ran past the reply that says it again, and its tokens were dropped.
    tokenizer = load(model(tmp_path, THINKS))
    shown = {"role": "assistant", "content": "<think>count them</think>4", "sampled": False}
    ids = [*ids_of(tokenizer, "<think>count them</think>4"), EOS]
    got = align(tokenizer, record(user("2+2?"), shown, user("again"), said("<think>count them</think>4", ids)))
    assert trained(got) == ids
    assert "assistant\n4<|im_end|>\n<|im_start|>user\nagain" in text(tokenizer, got.ids)
    assert got.branches == 1


@pytest.mark.parametrize("end", ["\n", "<", "yo\n<|im_", "\nuser\n", " "])
def test_text_that_was_cut_where_it_looks_like_what_the_template_writes_next_ends_there(chatml, end):
    # ART#868: a cut text whose end is the beginning of the template's next part lost its boundary.
    content = f"so{end}"
    ids = ids_of(chatml, content)
    talk_ = [user("q"), said(content, ids, finish_reason="length"), user("r"), said("no", [*ids_of(chatml, "no"), EOS])]
    got = align(chatml, record(*talk_))
    prompt = chatml.render_ids([user("q")], add_generation_prompt=True).tolist()
    behind = ids_of(chatml, "<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n")
    assert got.ids.tolist() == [*prompt, *ids, *behind, *ids_of(chatml, "no"), EOS]
    assert trained(got) == [*ids, *ids_of(chatml, "no"), EOS]


@pytest.mark.parametrize("sampled", [CALL, f"{CALL}\n", f"{CALL}\n\n", CALL.removesuffix("\n</tool_call>")])
def test_closing_markup_and_white_space_of_a_call_stand_once(chatml, sampled):
    # ART#924: the template writes the call again, with markup and without white space that the policy did not sample.
    ids = ids_of(chatml, sampled)
    turn = said(None, ids, tool_calls=called(), finish_reason="length")
    tool = {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    got = align(chatml, record(user("q"), turn, tool, said("no", [*ids_of(chatml, "no"), EOS])))
    whole = text(chatml, got.ids)
    assert got.branches == 1
    assert whole.count("</tool_call>") == sampled.count("</tool_call>")
    assert f"assistant\n{sampled}<|im_end|>\n<|im_start|>" in whole
    assert trained(got) == [*ids, *ids_of(chatml, "no"), EOS]


def tool_templates():
    """Names of the templates that TRL ships."""
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else Path("/nonexistent")
    return sorted(path.stem for path in folder.glob("*.jinja"))


def test_tool_messages_that_follow_one_another_stand_as_the_whole_conversation_has_them(tmp_path):
    # slime#2264: rendered one by one, two tool messages became two turns of a user.
    two = [{**called()[0], "id": f"call{n}abcd", "function": {"name": "get", "arguments": {"n": n}}} for n in (1, 2)]
    answers = [
        {"role": "tool", "name": "get", "tool_call_id": each["id"], "content": f"seen {n}"}
        for n, each in enumerate(two)
    ]
    talk_ = [
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": two},
        *answers,
        {"role": "assistant", "content": "no"},
    ]
    checked = []
    for name in tool_templates():
        specials = ["<|user|>", "<|assistant|>", "<|observation|>"] if name.startswith("glm") else []
        tokenizer = load(model(tmp_path / name, trl_template(name), specials))
        try:
            prompt = tokenizer.render_ids(talk_[:-1], add_generation_prompt=True).tolist()
            got = align(tokenizer, {"messages": talk_}, text_only=True, server_profile="sglang")
        except tg.TracegradError:
            continue  # a template without tools
        if "seen 0" not in text(tokenizer, prompt):
            continue
        assert branch(got, got.branches - 1)[: len(prompt)] == prompt, name
        checked.append(name)
    assert len(checked) > 30 or not tool_templates()


def test_recorded_logprobs_that_are_the_trainers_own_are_found():
    own = rescore.own_logprobs.run
    recomputed = -np.random.default_rng(0).exponential(1.0, 200).astype(np.float32).astype(np.float64) - 0.01
    first = [Place(file="f", line=1, record=None, trace="t", turn=0, token=None)]

    def hits(recorded, tokens=200):
        cu = np.array([0, tokens])
        got = rescore.LogprobComparison(np.asarray(recorded)[:tokens], recomputed[:tokens], cu, first, None)
        return own(got).count

    assert hits(recomputed) == 200
    # A server's differ by the order of sums; few tokens, and certain ones, say nothing.
    assert hits(recomputed * (1 + 3e-7)) == hits(recomputed, 63) == 0
    most = recomputed.copy()
    most[:3] -= 1e-6
    assert hits(most) == 0
    assert rescore.own_logprobs.finding(
        own(rescore.LogprobComparison(recomputed, recomputed, np.array([0, 200]), first, None))
    )
