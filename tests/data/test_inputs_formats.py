"""What producers' own code wrote (tests/golden/make_inputs.py): each is read with its messages, logprobs and scores."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from messages import said
from tracegrad.data import infer_fields
from tracegrad.data.formats import adapt, eval_log
from tracegrad.errors import FormatError, ReadError

GOLDEN = Path(__file__).parents[1] / "golden" / "inputs"
LOGPROBS = [-0.25, -0.5, -0.75, -1.0]


def read(name, **told):
    return tg.read(GOLDEN / name, **told)


def asks_and_answers(trace, temperature=0.5):
    assert [(each["role"], each["content"]) for each in trace.messages] == [
        ("user", "A lamp?"),
        ("assistant", "It costs 3."),
    ]
    [turn] = trace.generations
    assert (turn.tokens, turn.finish_reason, turn.temperature) == (4, "stop", temperature)
    np.testing.assert_array_equal(turn.logprobs, LOGPROBS)


@pytest.mark.parametrize("name", ["langchain_dict", "langchain_dumpd", "langchain_model_dump"])
def test_langchain_messages_in_three_spellings(name):
    [trace] = read(f"{name}.jsonl", map={"reward": "score", "group": "thread_id"})
    assert [each["role"] for each in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = trace.messages[2]["tool_calls"][0]
    assert (call["id"], call["function"]["name"]) == ("c1", "price")
    assert json.loads(call["function"]["arguments"]) == {"item": "lamp"}
    assert trace.messages[3]["tool_call_id"] == "c1"
    assert [turn.finish_reason for turn in trace.generations] == ["tool_calls", "stop"]
    np.testing.assert_array_equal(trace.generations[1].logprobs, LOGPROBS)
    assert (trace.reward, trace.group) == (1.0, "th1")


def test_langsmith_runs_that_are_no_calls_are_left_out_and_counted():
    stream = tg.stream(GOLDEN / "langsmith_runs.jsonl")
    [trace] = tg.Traces.concatenate(list(stream))
    asks_and_answers(trace)
    assert "convert  3 records of langsmith, 2 of them hold no call and are left out" in stream.lines()


@pytest.mark.parametrize(
    ("name", "reward"),
    [("inputs_outputs", "feedback"), ("bodies", "ok"), ("messages_response", None), ("chunk_lists", None)],
)
def test_calls_of_the_openai_client_under_loggers_names(name, reward):
    [trace] = read(f"openai_{name}.jsonl", map={"reward": reward} if reward else None)
    asks_and_answers(trace)
    assert trace.reward == (1.0 if reward else None)


def test_a_list_of_chunks_is_one_answer_whose_prompt_is_not_known():
    [trace] = read("openai_chunks.json")
    [turn] = trace.generations
    np.testing.assert_array_equal(turn.logprobs, LOGPROBS)
    assert trace.messages[-1]["content"] == "It costs 3."
    chunks = json.loads((GOLDEN / "openai_chunks.json").read_text())
    other = [{**chunk, "id": "other"} for chunk in chunks]
    assert len(tg.read([*chunks, *other])) == 2


def test_litellm_by_its_callback_and_its_payload():
    [trace] = read("litellm_callback.jsonl", map={"reward": "metadata.rating"})
    assert (trace.messages[-1]["content"], trace.reward, trace.generations[0].temperature) == ("It costs 3.", 0.5, 0.5)
    [trace] = read("litellm_standard.jsonl")
    assert trace.messages[-1]["content"] == "It costs 3."


def test_an_inspect_log_gives_samples_by_their_epochs_with_scores():
    stream = tg.stream(GOLDEN / "inspect.eval")
    traces = tg.Traces.concatenate(list(stream))
    assert [re.sub("-[0-9a-f]{8}-", " ", trace.id, count=1)[:6] for trace in traces] == [
        "lamp 1",
        "lamp 2",
        "vase 1",
        "vase 2",
    ]
    assert len({trace.id for trace in traces}) == 4
    assert [trace.group[:5] for trace in traces] == ["lamp-", "lamp-", "vase-", "vase-"]
    assert len({trace.group for trace in traces}) == 2
    assert [dict(trace.rewards) for trace in traces] == [{"match": each} for each in (1.0, 1.0, 0.0, 0.0)]
    asks_and_answers(traces[0], temperature=1.0)
    whole = {"eval": {}, "samples": [json.loads(each) for each in eval_log.samples(str(GOLDEN / "inspect.eval"))]}
    assert [trace.id for trace in tg.read([whole])] == [trace.id for trace in traces]


def test_samples_of_several_tasks_that_have_one_number_are_of_several_groups():
    sample = {"id": 1, "epoch": 1, "output": {}, "scores": {}, "input": "Translate: Haus"}
    sample["messages"] = [{"role": "user", "content": "Translate: Haus"}, {"role": "assistant", "content": "house"}]
    system = {"role": "system", "content": "You translate."}
    told = [
        {"uuid": "a"},
        {"uuid": "b"},
        {"epoch": 2},
        {"input": "Capital of Peru?"},
        {"scores": {"fluent": {"value": 1}}},
    ]
    told += [{"messages": [system, *sample["messages"]]}, {"messages": [*sample["messages"][:1], said("home")]}]
    traces = tg.read([{**sample, **each} for each in told])
    groups = [trace.group for trace in traces]
    assert groups[0] == groups[1] == groups[2] == groups[6]
    assert len(set(groups)) == 4
    assert len({trace.id for trace in traces[:6]}) == 6


def test_a_zip_that_is_no_log_and_a_log_that_was_cut_are_refused(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("x.json", "{}")
    with pytest.raises(ReadError, match="TG-DATA-017"):
        tg.read(tmp_path / "a.zip")
    (tmp_path / "b.eval").write_bytes((GOLDEN / "inspect.eval").read_bytes()[:2000])
    with pytest.raises(ReadError, match=r"TG-DATA-014.*b\.eval.*File"):
        tg.read(tmp_path / "b.eval")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_bad_sample_is_located(tmp_path, name):
    (tmp_path / name).write_text(
        json.dumps({"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": 3}]})
    )
    with pytest.raises(tg.TracegradError, match=rf"TG-FORMAT-013.*{name}"):
        tg.read(tmp_path / name)


def test_text_forms():
    talk = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s", "id": 3}
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "id": "p", "score_chosen": 0.9, "rejected-score": "0.25"}
    full = {
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
    }
    asked = {"instruction": "add", "input": "2+2", "output": "4"}
    traces = tg.read([talk, pair, full, asked, {"prompt": "a", "response": "b", "logprobs": [-0.5], "token_ids": [7]}])
    said = [[(each["role"], each["content"]) for each in trace.messages] for trace in traces]
    assert said[0] == [("system", "s"), ("user", "a"), ("assistant", "b")]
    assert said[1:5] == [[("user", "a"), ("assistant", text)] for text in "bcbc"]
    assert [trace.reward for trace in traces[1:5]] == [1.0, 0.0, 1.0, 0.0]
    assert [trace.rewards.get("score") for trace in traces[1:5]] == [pytest.approx(0.9), 0.25, None, None]
    assert traces[1].group == traces[2].group == traces[3].group
    assert [trace.id for trace in traces[1:3]] == ["p-chosen", "p-rejected"]
    assert said[5] == [("user", "add\n\n2+2"), ("assistant", "4")]
    assert traces[6].generations[0].logprobs.tolist() == [-0.5]
    assert all(len(trace.generations) == 1 for trace in traces)


def test_forms_that_the_core_reads_are_no_adapters_affair():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "trace-format.md").read_text()
    lines = [line.strip() for line in text.split("\n") if line.startswith("{") and line.rstrip().endswith("}")]
    records = [json.loads(line) for line in lines if line.count("{") == line.count("}")]
    assert len(records) > 15
    for record in records:
        assert adapt(record) is None, record


def run(inputs, outputs, error=None):
    return {"id": "r", "run_type": "llm", "inputs": inputs, "outputs": outputs, "error": error}


def test_a_run_of_langsmith_that_failed_is_a_failed_call_also_where_langchain_left_an_empty_answer():
    asked = {"messages": [[{"type": "human", "data": {"content": "A lamp?"}}]]}
    empty = {"generations": [[{"text": "", "message": {"type": "ai", "data": {"content": ""}}}]]}
    error = "BadRequest('400')Traceback (most recent call last):\n  File x"
    records = [run(asked, empty, error), run(asked, None, "timeout"), run(asked, None)]
    report = tg.read([*records, run(asked, {"output": said("3")})], on_error="skip").read_report
    assert (report.traces, report.bad) == (1, 2)
    assert [each.partition("failed: ")[2][:22] for each in report.errors] == [
        "BadRequest('400'). No ",
        "timeout. No generation",
    ]


def test_a_run_of_a_model_of_texts_is_a_call_whose_prompt_the_user_said():
    info = {"finish_reason": "stop", "logprobs": None}
    outputs = {"generations": [[{"text": "It costs 3.", "generation_info": info, "type": "Generation"}]]}
    [trace] = tg.read([run({"prompts": ["A lamp?"]}, outputs)])
    assert [(each["role"], each["content"]) for each in trace.messages] == [
        ("user", "A lamp?"),
        ("assistant", "It costs 3."),
    ]
    assert trace.generations[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("scores", "rewards"),
    [
        ({"right": "C", "style": {"brief": 0.5, "kind": "I"}}, {"right": 1, "style.brief": 0.5, "style.kind": 0}),
        ({"style": {"brief": 0.5, "kind": 1}, "right": "C"}, {"style.brief": 0.5, "style.kind": 1, "right": 1}),
        ({"style": {"brief": 0.5}}, {"style.brief": 0.5}),
        ({"right": None}, {}),
    ],
)
def test_scores_of_scorers_are_rewards_by_their_names_and_none_is_the_total(scores, rewards):
    told = {name: {"value": value} for name, value in scores.items()}
    messages = [{"role": "user", "content": "A lamp?"}, said("3")]
    [trace] = tg.read([{"id": 1, "epoch": 1, "input": "A lamp?", "messages": messages, "output": {}, "scores": told}])
    assert (trace.reward, {**trace.rewards}) == (None, rewards)


def root(number, inputs, outputs, **more):
    return {
        "id": f"r{number}",
        "run_type": "chain",
        "parent_run_id": None,
        "inputs": inputs,
        "outputs": outputs,
        **more,
    }


def test_roots_of_langsmith_alone_are_conversations_and_beside_their_runs_they_are_not(tmp_path):
    human, ai = {"type": "human", "content": "A lamp?"}, {"type": "ai", "content": "3"}
    roots = [
        root(0, {"messages": [human]}, {"messages": [{**human, "id": "given by the graph"}, ai]}),
        root(1, {"messages": [human]}, {"messages": [ai]}),
        root(2, {"question": "A lamp?"}, {"answer": "3"}),
        root(3, {"messages": [human]}, {"output": ai}),
        root(4, {"n": 1}, {"n": 2}),
        root(5, {"messages": [human]}, None, error="TimeoutError()"),
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(roots))
    traces = tg.read(path, on_error="skip")
    assert [trace.id for trace in traces] == ["r0", "r1", "r2", "r3"]
    for trace in traces:
        assert [(each["role"], each["content"]) for each in trace.messages] == [("user", "A lamp?"), ("assistant", "3")]
    assert traces.read_report.bad == 1
    path.write_text(json.dumps([*roots[:2], {**run({"messages": [[human]]}, {"output": ai}), "parent_run_id": "r0"}]))
    assert [trace.id for trace in tg.read(path)] == ["r"]


def test_assistant_messages_of_a_data_set_are_not_sampled_if_others_are_generated():
    def message(role, content, **fields):
        return {"role": role, "content": content, **fields}

    asked = [
        message("user", "Hi", source="input"),
        message("assistant", "Hello", source="input"),
        message("user", "A lamp?"),
        message("assistant", "It depends."),
        message("user", "Depends?"),
    ]
    answer = message("assistant", "3 €", source="generate")
    content = [{"token": "3", "logprob": -0.5}, {"token": " €", "logprob": -1.5}]
    # Other producers than rLLM have a model_output, such as evalscope: the response of the server.
    output = {"choices": [{"message": answer, "logprobs": {"content": content}, "stop_reason": "stop"}]}
    record = {"messages": [*asked, answer], "model_output": output, "score": 1}
    [trace] = tg.read([record])
    assert [(trace.messages[each.message]["content"], each.logprobs) for each in trace.generations] == [("3 €", None)]
    [guess] = infer_fields.infer([record, record], names=["logprobs"]).guesses
    [trace] = tg.read(
        [record], map=dict(zip(*[iter(each.replace("--map.", "") for each in guess.flags())] * 2, strict=True))
    )
    assert [each.logprobs.tolist() for each in trace.generations] == [[-0.5, -1.5]]
    [trace] = tg.read([{"messages": [*asked, {**answer, "source": "input"}]}])
    assert len(trace.generations) == 3


def test_longer_names_that_say_whose_the_text_is():
    [trace] = tg.read([{"user_query": "A lamp?", "model_output": "3", "best_answer": "4"}])
    assert [each["content"] for each in trace.messages] == ["A lamp?", "3"]
    with pytest.raises(FormatError, match="TG-FORMAT-044"):
        tg.read([{"question": "A lamp?", "model_output": "3", "ai_response": "4"}])


def test_what_says_that_more_is_worse_is_no_reward_and_words_are_told_as_numbers():
    words = ["excellent", "fair", "poor"]
    rows = [
        {"question": "A?", "response": "3", "quality": word, "is_incorrect": at > 0} for at, word in enumerate(words)
    ]
    [found] = infer_fields.infer(rows, names=["reward"]).guesses
    assert found.path == "quality"
    assert found.evidence.endswith("3 values, 'excellent' is 0.95, 'fair' is 0.5, 'poor' is 0.3)")


def test_the_words_of_a_scale_keep_its_order_with_different_numbers_and_are_told():
    words = ["perfect", "excellent", "great", "very good", "good", "fair", "poor", "bad", "very poor", "terrible"]
    rows = [{"question": "A?", "response": "3", "quality": word, "checks": {"tone": word}} for word in words]
    for path in ("quality", "checks.tone", "checks"):
        stream = tg.stream(rows, map={"reward": path})
        given = [each.rewards["tone"] if path == "checks" else each.reward for part in stream for each in part]
        assert given == sorted(set(given), reverse=True), path
        assert "'excellent' is 0.95, 'great' is 0.9" in " ".join(stream.lines()), path
