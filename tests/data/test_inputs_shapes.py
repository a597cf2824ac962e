"""Records with other field names: which of them are read, and which are not guessed."""

import json
from pathlib import Path

import pytest

import tracegrad as tg
from messages import said, user
from tracegrad import config
from tracegrad.data import chat, infer_fields
from tracegrad.data.formats import registry
from tracegrad.errors import ArgumentError, FormatError
from tracegrad.trainer.steps import reward_column

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
ASKED = {"messages": [{"role": "user", "content": "2+2?"}], "temperature": 1}


def answered(*texts, **more):
    choices = [
        {"index": at, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        for at, text in enumerate(texts)
    ]
    return {"id": "chatcmpl-12345678", "choices": choices, "usage": {"completion_tokens": 9}, **more}


@pytest.mark.parametrize("names", [("requestBody", "responseBody"), ("Request-Body", "RESPONSE_BODY"), ("req", "res")])
def test_request_and_response_keys_are_recognized_in_any_case(names):
    asked, said = names
    [trace] = tg.read([{asked: json.dumps(ASKED), said: answered("4"), "runId": "x"}], map={"id": "runId"})
    assert ([each["content"] for each in trace.messages], trace.id) == (["2+2?", "4"], "x")


def test_each_choice_gets_its_own_entry_of_parallel_lists():
    record = {
        "request": ASKED,
        "response": answered("4", "5"),
        "rewards": ["1.0", 0],
        "scores": [3, 4],
        "of": [1, 2, 3],
    }
    one, two = tg.read([record])
    assert (one.reward, two.reward, one.group == two.group) == (1.0, 0.0, True)
    assert [each.messages[-1]["content"] for each in (one, two)] == ["4", "5"]
    assert tg.read([record], map={"reward": "scores"}).reward.tolist() == [3, 4]
    assert b"usage" not in one.record, "it counts the tokens of all choices"
    bare = tg.read([{"request": ASKED, "response": answered("4", "5")}])
    assert [each.messages[-1]["content"] for each in bare] == ["4", "5"], "each was sampled"
    assert bare.groups[0] == bare.groups[1] is not None


def test_answers_of_a_prompt_are_a_group_with_rewards_of_their_own():
    lists = {"prompt": "2+2?", "responses": ["4", "5"], "reward": [1, 0], "id": 7}
    told = {"question": "2+2?", "samples": [{"text": "4", "score": 1}, {"text": "5", "score": 0}], "group": "g"}
    traces = tg.read([lists, told])
    assert [trace.id for trace in traces][:2] == ["7-0", "7-1"]
    assert traces.groups[0] == traces.groups[1] != "g"
    assert traces.groups[2:] == ["g", "g"]
    assert tg.read([told], map={"reward": "score"}).reward.tolist() == [1, 0]


def test_a_rollout_of_nemo_gym_is_split_at_environment_messages():
    call = {"type": "function_call", "call_id": "c", "name": "price", "arguments": "{}"}
    told = {"prompt_token_ids": [1, 5], "generation_token_ids": [7, 2], "generation_log_probs": [-0.5, -0.1]}
    out = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "look"}]},
        {**call, **told},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It costs 3."}]},
    ]
    asked = {"input": [{"role": "user", "content": "A lamp?"}], "instructions": "You sell."}
    row = {"responses_create_params": asked, "response": {"output": out}, "reward": 1.0, "_ng_task_index": 4}
    [trace] = tg.read([row])
    assert [each["role"] for each in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trace.messages[2]["reasoning_content"] == "look"
    first, last = trace.generations
    assert (first.token_ids.tolist(), first.prompt_token_ids.tolist(), last.token_ids) == ([7, 2], [1, 5], None)
    assert (trace.reward, trace.group) == (1.0, "4")


def test_messages_under_another_name_are_read_if_there_is_one_list():
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    [trace] = tg.read([{"run": {"chatHistory": json.dumps(talk)}}])
    assert trace.messages[-1]["content"] == "4"
    with pytest.raises(FormatError):
        tg.read([{"one": talk, "two": [*talk[:1], {"role": "assistant", "content": "5"}]}])


def test_a_request_in_two_places_counts_once_and_different_ones_are_refused():
    response = {"choices": [{"index": 0, "message": said("4"), "finish_reason": "stop"}]}
    sent = {"model": "m", "temperature": 0.5, "messages": [user("2+2?")]}
    generic = {"model": "m", "messages": [{**user("2+2?"), "name": None}]}
    for requests in ({"first": sent, "generic": generic}, {"generic": generic, "first": sent}):
        [trace] = tg.read([{**requests, "back": response, "copy": json.loads(json.dumps(response))}])
        assert [each["content"] for each in trace.messages] == ["2+2?", "4"]
        assert (len(trace.generations), trace.generations[0].temperature) == (1, 0.5), "of the copy with more options"
    for other in ({"model": "m", "messages": [user("3+3?")]}, {**sent, "temperature": 1.0}):
        with pytest.raises(
            FormatError, match=r"TG-DATA-043: .*different messages in first\.messages and in kept\.inner\.messages"
        ):
            tg.read([{"first": sent, "kept": {"inner": other}, "back": response}])


HARNESSES = [
    (
        {"event_id": 0, "type": "sampling", "data": {"prompt": [user("q")], "sampled": ["4"]}},
        "an event of OpenAI's evals",
    ),
    ({"adapter_spec": {"method": "g"}, "request_states": [{"request": {"prompt": "q"}}]}, "a scenario state of HELM"),
    ({"question_id": 1, "model_id": "m", "choices": [{"index": 0, "turns": ["4"]}]}, "answers of MT-Bench"),
    ({"question_id": 1, "judge": ["j"], "user_prompt": "q", "judgment": "[[5]]", "score": 5}, "a judgment of MT-Bench"),
    ({"instruction": "q", "output_1": "4", "output_2": "5", "preference": 1.5}, "a comparison of alpaca_eval"),
]
BESIDE = [
    {"spec": {"eval_name": "sums.dev.v0", "run_id": "r"}},
    {"final_report": {"score": 0.5}, "run_id": "r"},
    {"scenario_spec": {"a": 1}, "adapter_spec": {"a": 1}, "metric_specs": [{"a": 1}]},
    {"name": "sums", "description": "d", "tags": ["a"], "definition_path": "p"},
    {"name": {"name": "exact_match"}, "count": 1, "sum_squared": 0, "mean": 0.5},
    {"instance_id": "id4", "train_trial_index": 0, "stats": [{"name": {"name": "exact_match"}}]},
    {"question_id": 1, "category": "stem", "turns": ["q"]},
]


@pytest.mark.parametrize(("record", "reason"), HARNESSES)
def test_records_of_harnesses_that_are_not_read_say_what_they_are(record, reason):
    with pytest.raises(FormatError, match=f"TG-DATA-043.*it is {reason}.*It is not read"):
        tg.read([record])
    [trace] = tg.read([*BESIDE, {"prompt": "q", "response": "4"}])
    assert trace.messages[-1]["content"] == "4"


def test_lines_of_an_array_and_rewards_as_text_are_explained(tmp_path):
    line = json.dumps({"prompt": "2+2?", "response": "4"})
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{line},\r\n{line} ,\r\n".encode())
    assert len(tg.read(tmp_path / "t.jsonl")) == 2
    with pytest.raises(FormatError, match=r"TG-FORMAT-021.*--map\.reward"):
        tg.read([{"request": ASKED, "response": answered("4"), "reward": "0.5"}])


def test_traces_are_grouped_by_a_text_prompt_and_not_without_one():
    dump = [{"input": text, "output": "4", "gts": "", "score": 1, "step": 1} for text in ("a", "a", "b")]
    stream = tg.stream(dump, map={"group": "prompt"})
    groups = tg.Traces.concatenate(list(stream)).groups
    assert groups[0] == groups[1] != groups[2]
    bare = tg.stream([{"messages": [{"role": "assistant", "content": "4"}]}] * 2, map={"group": "prompt"})
    assert tg.Traces.concatenate(list(bare)).groups == [None, None]
    assert "map      group: 2 traces have no prompt and are alone" in bare.lines()
    assert infer_fields.infer(dump).of("group")[0].evidence == "2 records begin with the same prompt"


def test_streamed_calls_are_joined_into_a_conversation():
    first = [{"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": part}}]} for part in "4!"]
    again = [*ASKED["messages"], {"role": "assistant", "content": "4!"}, {"role": "user", "content": "sure?"}]
    calls = [{"request": ASKED, "response": first}, {"request": {"messages": again}, "response": answered("yes")}]
    [trace] = tg.read(calls, map={"session": "prefix"})
    assert [each["content"] for each in trace.messages] == ["2+2?", "4!", "sure?", "yes"]


def test_keys_of_runs_and_counters_are_not_sessions():
    calls = [
        {"request": ASKED, "response": answered(str(n)), "run_id": n % 2, "rollout_index": n % 4} for n in range(200)
    ]
    assert infer_fields.infer(calls, config.FieldMap(group="run_id")).of("session") == []


def test_several_rewards_without_a_total_need_a_choice():
    rows = [[float("nan"), 1, 0], [float("nan"), 0, 0]]
    told = {"rewards": rows, "reward_names": ("reward", "right", "short")}
    s = tg.Sequences.from_arrays([5, 6] * 2, [0, 2, 4], [float("nan"), -0.5] * 2, [False, True] * 2, **told)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-003.*2.*right.*short"):
        reward_column(s)
    assert reward_column(s, ["right"]).tolist() == [1, 0]
    one = {"rewards": [row[:2] for row in rows], "reward_names": ("reward", "right")}
    s = tg.Sequences.from_arrays([5, 6] * 2, [0, 2, 4], [float("nan"), -0.5] * 2, [False, True] * 2, **one)
    assert reward_column(s).tolist() == [1, 0]


def test_a_call_is_found_at_any_path_and_under_any_name():
    events = "".join(
        f"data: {json.dumps({'id': 'c', 'choices': [{'index': 0, 'delta': {'content': part}}]})}\n\n" for part in "4!"
    )
    rows = [
        {"request": {"url": "/v1", "body": json.dumps(ASKED)}, "response": {"status": 200, "body": events}, "ok": 1},
        {"attributes": {"in.value": json.dumps(ASKED), "out.value": json.dumps(answered("4!"))}, "ok": 1},
        {"span": {"input": ASKED["messages"], "output": [{"role": "assistant", "content": "4!"}]}, "ok": 1},
        {"messages": ASKED["messages"], "response": {"raw": answered("4!")}, "ok": 1},
        {"messages": ASKED["messages"], "outputs": ["4!"], "ok": 1},
    ]
    for row in rows:
        [trace] = tg.read([row], map={"reward": "ok"})
        assert [each["content"] for each in trace.messages] == ["2+2?", "4!"]
        assert (len(trace.generations), trace.reward) == (1, 1.0)
    assert tg.read(rows[:2], map={"reward": "ok"})[1].generations[0].temperature == 1.0


def test_two_possible_calls_are_ambiguous():
    body = {"one": ASKED, "two": {**ASKED, "messages": [user("3+3?")]}, "answer": answered("4")}
    with pytest.raises(FormatError):
        tg.read([{"log": body}])


def test_a_list_of_calls_is_one_conversation_or_several_records():
    more = [*ASKED["messages"], {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    steps = [{"asked": ASKED["messages"], "raw": answered("4")}, {"asked": more, "raw": answered("yes")}, {"end": 1}]
    [trace] = tg.read([{"steps": steps, "score": 1}], map={"reward": "score"})
    assert (len(trace.generations), trace.reward) == (2, 1.0)
    entries = [{"messages": ASKED["messages"], "said": answered(text), "stars": text} for text in "45"]
    export = {"version": 3, "entries": entries}
    assert tg.read([export], map={"reward": "stars"}).reward.tolist() == [4.0, 5.0]
    assert infer_fields.infer([export]).flags(["reward"]) == ["--map.reward", "stars"]


def test_a_row_without_a_call_has_the_reward_of_its_conversation():
    rows = []
    for name, score in (("a", 1), ("b", 0)):
        asked = {"messages": [{"role": "user", "content": name}], "temperature": 1}
        again = {"messages": [*asked["messages"], {"role": "assistant", "content": "4"}, *ASKED["messages"]]}
        for at, request in enumerate((asked, again)):
            told = {"attributes": {"in": json.dumps(request), "out": json.dumps(answered("4"))}, "start_time": at}
            rows.append({"context": {"trace_id": name}, "parent_id": "x", **told})
        rows.append({"context": {"trace_id": name}, "parent_id": None, "attributes": {"eval.score": score}})
    rows.append({"context": {"trace_id": "c"}, "parent_id": None, "attributes": {"eval.score": 1}})
    found = infer_fields.infer(rows)
    assert found.lines(["reward"]) == [
        'guess    3 of 3 records without a call have a number "attributes.eval.score" (0 to 1, mean 0.667, 2 values): '
        "--map.reward attributes.eval.score"
    ]
    flags = found.flags(["reward", "session"])
    told = {key.removeprefix("--map."): path for key, path in zip(flags[::2], flags[1::2], strict=True)}
    stream = tg.stream(rows, map=told)
    one, two = tg.Traces.concatenate(list(stream))
    assert [(each.reward, len(each.generations)) for each in (one, two)] == [(1.0, 2), (0.0, 2)]
    assert (
        "         3 records without a call add their values, such as scores, to their conversations" in stream.lines()
    )
    assert len(tg.read(rows)) == 4, "a row without a call is no trace"


def test_words_for_good_and_bad_are_rewards_and_printed():
    talk = [*ASKED["messages"], {"role": "assistant", "content": "4"}]
    rows = [{"messages": talk, "human_vote": word} for word in ("Up", "down", "up")]
    assert infer_fields.infer(rows).flags(["reward"]) == ["--map.reward", "human_vote"]
    stream = tg.stream(rows, map={"reward": "human_vote"})
    assert tg.Traces.concatenate(list(stream)).reward.tolist() == [1.0, 0.0, 1.0]
    assert stream.lines()[0].endswith("0 to 1, 'Up' is 1, 'down' is 0, 'up' is 1")
    with pytest.raises(FormatError, match=r"TG-DATA-043.*human_vote .*'maybe'"):
        tg.read([{**rows[0], "human_vote": "maybe"}], map={"reward": "human_vote"})


def test_loglikelihood_records_of_lm_eval_have_no_call():
    row = {"doc_id": 1, "arguments": {"gen_args_0": {"arg_0": "2+2?", "arg_1": " 4"}}, "resps": [[[-0.5, True]]]}
    asked = {"doc_id": 1, "arguments": {"gen_args_0": {"arg_0": "2+2?", "arg_1": {"temperature": 0.7}}}}
    stream = tg.stream([row, {**asked, "resps": [["4", "5"]], "exact": 1}], map={"reward": "exact"})
    traces = tg.Traces.concatenate(list(stream))
    assert [trace.messages[-1]["content"] for trace in traces] == ["4", "5"]
    assert [trace.generations[0].temperature for trace in traces] == pytest.approx([0.7, 0.7])
    assert "convert  2 records of lm_eval, 1 of them hold no call and are left out" in stream.lines()


def test_a_history_of_parts_is_a_trace_with_its_tools_and_logprobs():
    call = {"part_kind": "tool-call", "tool_name": "add", "args": {"a": 1}, "tool_call_id": "c"}
    returned = {"part_kind": "tool-return", "tool_name": "add", "content": {"sum": 4}, "tool_call_id": "c"}
    listed = [{"token": "4", "logprob": -0.5, "bytes": [52]}]
    history = [
        {"kind": "request", "instructions": "be", "parts": [{"part_kind": "user-prompt", "content": "2+2?"}]},
        {"kind": "response", "parts": [call]},
        {"kind": "request", "instructions": "be", "parts": [returned]},
        {
            "kind": "response",
            "parts": [{"part_kind": "thinking", "content": "so"}, {"part_kind": "text", "content": "4"}],
            "provider_details": {"logprobs": listed, "finish_reason": "stop"},
        },
    ]
    [trace] = tg.read([{"history": history, "ok": True}], map={"reward": "ok"})
    assert [each["role"] for each in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trace.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (trace.messages[3]["content"], trace.messages[3]["tool_call_id"]) == ('{"sum": 4}', "c")
    assert trace.messages[4]["reasoning_content"] == "so"
    assert trace.generations[1].logprobs.tolist() == [-0.5]


LISTED = {"content": [{"token": "4", "logprob": -0.5, "bytes": [52]}]}
CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}, "logprobs": LISTED}
REPLY = {"reply": CHOICE["message"], "finish_reason": "stop", "logprobs": LISTED}


@pytest.mark.parametrize("told", [{"choice": CHOICE}, {"row": [CHOICE]}, REPLY])
def test_a_choice_outside_a_response_keeps_its_logprobs(told):
    [trace] = tg.read([{"request": {**ASKED, "n": 4}, **told}])
    [turn] = trace.generations
    assert (trace.messages[-1]["content"], turn.finish_reason, turn.has_bytes) == ("4", "stop", True)
    assert turn.logprobs.tolist() == [-0.5]


def test_usage_next_to_a_choice_counts_all_choices_of_its_response():
    [trace] = tg.read([{"request": {**ASKED, "n": 4}, "choice": CHOICE, "usage": {"completion_tokens": 28}}])
    assert b"usage" not in trace.record


def test_a_list_of_choices_is_a_response_with_rewards_of_its_own():
    other = {**CHOICE, "index": 1, "message": {"role": "assistant", "content": "5"}}
    one, two = tg.read([{"request": ASKED, "drawn": [CHOICE, other], "rewards": [1, 0]}])
    assert [(each.messages[-1]["content"], each.reward) for each in (one, two)] == [("4", 1.0), ("5", 0.0)]
    assert one.group == two.group


def shared(turns, number):
    """Return a ShareGPT conversation. All of them have the same start."""
    said = [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]]
    said += [[{"from": "human", "value": f"{number}?"}, {"from": "gpt", "value": "4"}] for _ in range(turns - 1)]
    return {"id": f"c{number}", "conversations": [each for turn in said for each in turn], "score": number % 2}


def test_finished_conversations_with_a_common_start_are_not_joined(tmp_path):
    whole = [shared(1, 0), shared(2, 1), *(shared(3, number) for number in range(2, 8))]
    whole[2:] = [{**each, "conversations": each["conversations"][2:]} for each in whole[2:]]
    path = tmp_path / "whole.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in whole))
    assert not read_found(path).of("session"), "one of seven goes on another by chance"
    path.write_text("".join(json.dumps(shared(turns, number)) + "\n" for number in range(4) for turns in (1, 2, 3)))
    assert read_found(path).of("session")[0].path == "prefix", "logged turn by turn"


def read_found(path):
    return infer_fields.infer([json.loads(line) for line in path.read_text().splitlines()])


def test_blocks_of_anthropic_become_messages_for_templates():
    asked = {"type": "text", "text": "Where is it?"}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "Oslo"}]}
    called = {"type": "tool_use", "id": "c", "name": "look", "input": {"for": "it"}}
    talk = [
        {"role": "user", "content": [asked]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I look.", "signature": "s"}, called]},
        {"role": "user", "content": [found, {"type": "text", "text": "And?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "In "}, {"type": "text", "text": "Oslo."}]},
    ]
    schema = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    [trace] = tg.read([{"system": [{"type": "text", "text": "Be kind."}], "tools": [schema], "messages": talk}])
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"for": "it"}'}}
    assert trace.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Oslo"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "In Oslo."},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert trace.tools == [{"type": "function", "function": function}]
    assert len(trace.generations) == 2


def test_parts_that_are_not_text_stay_in_a_message_of_blocks():
    picture = {"type": "image", "source": {"type": "base64", "data": "A"}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}
    [trace] = tg.read([{"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, picture]}, said]}])
    assert trace.messages[0]["content"] == [{"type": "text", "text": "what?"}, picture]
    assert trace.messages[1]["content"] == "a cat"


def test_hidden_blocks_are_left_out_and_openai_blocks_are_kept():
    hidden = {"type": "redacted_thinking", "data": "x"}
    said = {"role": "assistant", "content": [hidden, {"type": "text", "text": "4"}]}
    schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    record = {"messages": [{"role": "user", "content": "2+2?"}, said], "tools": [schema]}
    [trace] = tg.read([record])
    assert (trace.messages[1], trace.tools) == ({"role": "assistant", "content": "4"}, [schema])
    found = registry.convert_first_match({**record, "response": answered("5")})
    assert found is None or found.name != "anthropic_talk", "the answer stands beside the messages"


def test_the_prompt_is_the_text_with_the_question():
    schema = "Table t(a). Which rows are there?"
    record = {"question": "Which rows are there?", "input_text": schema, "gold_sql": "x", "generated_text": "SELECT a"}
    [trace] = tg.read([record])
    assert [each["content"] for each in trace.messages] == [schema, "SELECT a"]
    [other] = tg.read([{**record, "input_text": "Table t(a)."}])
    assert other.messages[0]["content"] == "Which rows are there?", "it does not hold the question"
    [short] = tg.read([{**record, "question": "a?", "input_text": "Is it a?"}])
    assert short.messages[0]["content"] == "a?", "so few letters stand in others by chance"


def answer_to(prompt, answer="4", **more):
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], **more}


def test_the_prompts_of_an_export_are_counted_one_by_one():
    prompts = ["a", "a", "b", "b", "b", "c"]
    export = {"made": 1, "runs": [answer_to(prompt, str(at), score=at % 2) for at, prompt in enumerate(prompts)]}
    [found] = infer_fields.infer([export]).of("group")
    assert (found.evidence, found.partial) == ("5 records begin with one of 2 prompts that others share", True)
    calls = [{"calls": [{"request": {}, "response": {}}], "input": prompt} for prompt in prompts]
    assert infer_fields._by_prompt(calls) == [(each, 1) for each in calls], "no messages say that they are alike"


@pytest.mark.parametrize(
    ("records", "partial"),
    [
        ([answer_to("a", score=1), answer_to("a", score=0)] * 2, False),
        ([answer_to("a", score=1), answer_to("a", score=0), answer_to("a")], True),
        ([answer_to("a", score=1), answer_to("a", score=0), answer_to("b", score=1)], True),
        ([answer_to(str(at), task=each, score=at % 2) for at, each in enumerate("aaabbb")], False),
        ([answer_to(str(at), task=each, score=at % 2) for at, each in enumerate("aaabbc")], True),
    ],
)
def test_the_command_allows_single_traces_if_they_are_expected(records, partial, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    following = tg.doctor.diagnose(path, MODEL).next_command
    assert "--map.group" in following
    assert ("--advantage.single_sample_group zero" in following) == partial


@pytest.mark.parametrize(("tasks", "alone"), [("aabb", False), ("aabbc", True)])
def test_the_command_allows_single_traces_of_given_groups(tasks, alone, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(answer_to("q", task=each, score=at)) + "\n" for at, each in enumerate(tasks)))
    following = tg.doctor.diagnose(path, MODEL, map=config.FieldMap(group="task", reward="score")).next_command
    assert ("--advantage.single_sample_group zero" in following) == alone


def test_rarely_shared_prompts_use_a_batch_baseline(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [answer_to(prompt, score=at % 3) for at, prompt in enumerate("aabcdefghij")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    following = tg.doctor.diagnose(path, MODEL).next_command
    assert "--map.group" not in following
    assert following.endswith("--advantage.baseline batch_mean")
    [found] = infer_fields.infer(path).of("group")
    assert found.line() == "guess    2 records begin with the same prompt: --map.group prompt", "it is still said"


def test_the_overall_rating_is_first_and_a_weight_is_last():
    rows = [
        answer_to(q, accuracy=at % 5, overall=at % 4, weight=at / 9, tone=at % 3) for at, q in enumerate("aabbaabb")
    ]
    assert [each.path for each in infer_fields.infer(rows).of("reward")] == ["overall", "accuracy", "weight"]
    [alone] = infer_fields.infer([answer_to(q, weight=at / 9) for at, q in enumerate("aabb")]).of("reward")
    assert alone.path == "weight"


@pytest.mark.parametrize(
    ("record", "texts"),
    [
        ({"messages": json.dumps([user("a"), said("b")])}, ["a", "b"]),
        ({"messages": json.dumps([user("a")]), "response": "b"}, ["a", "b"]),
        (
            {"messages": json.dumps([user("a")]), "response": {"choices": [{"message": said("b")}]}},
            ["a", "b"],
        ),
        (
            {"contents": [{"role": "user", "parts": [{"text": "a"}]}, {"role": "model", "parts": [{"text": "b"}]}]},
            ["a", "b"],
        ),
        ({"history": [{"role": "user", "parts": ["a"]}, {"role": "model", "parts": ["b"]}]}, ["a", "b"]),
        (
            {
                "request": {
                    "modelId": "m",
                    "system": [{"text": "s"}],
                    "messages": [{"role": "user", "content": [{"text": "a"}]}],
                    "inferenceConfig": {"temperature": 0.5, "topP": 0.75},
                },
                "response": {"output": {"message": {"role": "assistant", "content": [{"text": "b"}]}}},
            },
            ["s", "a", "b"],
        ),
    ],
)
def test_messages_as_json_text_and_parts_without_a_type_are_read(record, texts):
    [trace] = tg.read([{**record, "score": 1}], map={"reward": "score"})
    assert [chat.text_of(message["content"]) for message in trace.messages] == texts
    assert (len(trace.generations), trace.reward) == (1, 1.0)
    if "inferenceConfig" in record.get("request", {}):
        assert (trace.generations[0].temperature, trace.generations[0].top_p) == (0.5, 0.75)


def test_a_call_of_the_user_is_refused():
    parts = [{"functionCall": {"name": "f", "args": {}}}]
    with pytest.raises(FormatError, match=r"TG-DATA-043.*message 0 has a call"):
        tg.read([{"contents": [{"role": "user", "parts": parts}, {"role": "model", "parts": [{"text": "b"}]}]}])


SPAN = {"id": "o", "traceId": "t", "startTime": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    "row",
    [
        {**SPAN, "type": "SPAN", "name": "agent", "input": {"q": 1}, "output": {"a": 2}},
        {**SPAN, "type": "SPAN", "input": {"messages": [user("a")]}, "output": said("b")},  # as the generation below it
        {**SPAN, "type": "AGENT", "input": [user("a")], "output": "b"},
        {**SPAN, "type": "EVENT"},
        {"kind": "chain", "run_id": "1", "inputs": {"q": "x"}, "outputs": {"a": 1}},
        {"run_id": "r", "status": "finished", "config": {"model": "m"}, "turns": 3},
        {"type": "summary", "tokens": 30},
        {"summary": {"calls": 3}},
    ],
)
def test_rows_above_calls_are_counted_and_no_errors(row):
    stream = tg.stream([row, {"messages": [user("a"), said("b")]}])
    assert sum(map(len, stream)) == 1
    assert stream.lines() == ["convert  1 records of parent_row, 1 of them hold no call and are left out"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "x", "solution": "y"},
        {"run_id": "r", "note": "x" * 300},
        {"kind": "llm", "run_id": "1", "inputs": {"q": "x"}, "outputs": {"a": 1}},
        {"summary": "x" * 300},
    ],
)
def test_a_row_that_may_be_a_call_stays_an_error(row):
    with pytest.raises(FormatError, match="TG-FORMAT-044"):
        tg.read([row, {"messages": [user("a"), said("b")]}])
