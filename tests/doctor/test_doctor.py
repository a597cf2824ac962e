"""Each finding of the doctor, from real recordings spoiled in one way; what is not spoiled has none."""

import copy
import json
import shutil

import numpy as np
import pytest

import tracegrad as tg
from spoil import EXAMPLE, MODEL, answers, diagnosed, entries, first, names, recorded, responses, spoiled, zero
from tracegrad.doctor import CHECKS, Hits, Place, Severity, diagnose, render_lines
from truncated import entries_of, sample


def test_recordings_with_nothing_wrong_have_no_finding_two_lines_and_what_comes_next(tmp_path):
    found = diagnosed(recorded(), tmp_path)
    assert found.findings == ()
    assert (found.exit_code, found.severity) == (0, None)
    line, rewards, blank, reward, between, following = render_lines(found)
    assert line.startswith("clean    120 traces")
    told = [each["reward"] for each in recorded()]
    assert rewards == f"         rewards 0 to 1, mean {sum(told) / 120:.3g}; 15 groups of 8 traces"
    assert reward.startswith('reward   trained on is "reward", the total of each record')
    assert (blank, between, following) == ("", "", f"next     {found.next_command}")


def test_the_bundled_example_has_nothing_worse_than_notes_and_they_are_true():
    found = diagnose(str(EXAMPLE / "traces.jsonl.zst"), MODEL)
    notes = {"equal_rewards": 8, "truncated": 7, "history_rewritten": 1, "empty_answers": 1}
    assert names(found) == dict.fromkeys(notes, "NOTE")
    counts = {finding.name: finding.hits.count for finding in found.findings}
    # group_counts says 8 equal groups; finish_reason 'length' stands 7 times in the file, R20 and an empty answer once.
    assert counts == notes
    assert found.exit_code == 0


def test_another_tokenizer_is_found(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    plain = sorted(i for i in vocabulary.values() if i not in special)
    turned = dict(zip(plain, plain[50:] + plain[:50], strict=True))
    tokenizer["model"]["vocab"] = {piece: turned.get(i, i) for piece, i in vocabulary.items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = diagnosed(recorded(), tmp_path, model=model)
    assert names(found)["wrong_tokenizer"] == "WRONG"
    assert found.exit_code == 1
    assert found.findings[0].name == "wrong_tokenizer"
    assert first(found).trace == recorded()[0]["id"]


def shift(content, lag):
    logprobs = [entry["logprob"] for entry in content]
    moved = [*logprobs[1:], logprobs[-1]] if lag > 0 else [logprobs[0], *logprobs[:-1]]
    for entry, logprob in zip(content, moved, strict=True):
        entry["logprob"] = logprob


@pytest.mark.parametrize(("lag", "side"), [(1, "the next token"), (-1, "the token before")])
def test_logprobs_shifted_within_each_turn_are_found_with_their_direction(tmp_path, lag, side):
    found = diagnosed(spoiled(lambda record: [shift(content, lag) for content in entries(record)]), tmp_path)
    assert names(found) == {"shifted_logprobs": "WRONG"}
    assert f"they follow {side}" in found.findings[0].hits.description
    assert (first(found).trace, first(found).turn) == (recorded()[0]["id"], 0)


@pytest.mark.parametrize("lag", [1, -1])
def test_logprobs_shifted_over_a_whole_trace_are_found(tmp_path, lag):
    def across(record):
        shift([entry for content in entries(record) for entry in content], lag)

    assert names(diagnosed(spoiled(across), tmp_path)) == {"shifted_logprobs": "WRONG"}


def test_logprobs_shifted_in_one_of_two_recorders_are_found_with_the_recorder_they_come_from(tmp_path):
    def one(record):
        for content in entries(record):
            if record["metadata"]["shape"] == "token_ids":
                shift(content, 1)

    found = diagnosed(spoiled(one), tmp_path)
    assert names(found) == {"shifted_logprobs": "WRONG"}
    assert "at alignment level T0" in found.findings[0].hits.description


def test_lists_that_begin_with_null_are_found_even_where_counts_are_too_few_to_tell(tmp_path):
    def head(record):
        for content in entries(record):
            shift(content, -1)
            content[0]["logprob"] = None

    records = recorded()[:8]
    for record in records:
        head(record)
    found = diagnosed(records, tmp_path)
    assert names(found)["shifted_logprobs"] == "WRONG"
    assert "starts with null" in found.findings[0].hits.description

    def lose(record):
        for content in entries(record):
            content[0]["logprob"] = None

    assert names(diagnosed(spoiled(lose), tmp_path)) == {"missing_logprobs": "COSTS", "mismatches": "COSTS"}


@pytest.mark.parametrize("lag", [1, -1])
def test_logprobs_that_their_own_alternatives_contradict_are_found(tmp_path, lag):
    def alternatives(record):
        for content in entries(record):
            for entry in content:
                entry["top_logprobs"] = [{name: entry[name] for name in ("token", "logprob", "bytes")}]

    few = recorded()[:8]
    for record in few:
        alternatives(record)
    assert names(diagnosed(few, tmp_path)) == {}
    for record in few:
        for content in entries(record):
            shift(content, lag)
    found = diagnosed(few, tmp_path)
    assert names(found) == {"shifted_logprobs": "WRONG"}
    assert "top_logprobs list" in found.findings[0].hits.description
    assert first(found).trace == few[0]["id"]


def test_zeros_in_place_of_logprobs_are_found(tmp_path):
    found = diagnosed(spoiled(zero, every=5), tmp_path)
    assert names(found) == {"filled_logprobs": "WRONG"}
    assert (
        "all 20 logprobs are 0" in found.findings[0].hits.description
        or "logprobs are 0" in found.findings[0].hits.description
    )


def test_a_short_list_padded_with_zeros_is_found(tmp_path):
    def pad(record):
        for content in entries(record):
            for entry in content[-5:]:
                entry["logprob"] = 0.0

    assert names(diagnosed(spoiled(pad, every=5), tmp_path)) == {"filled_logprobs": "WRONG"}


def test_single_zeros_of_a_confident_model_are_no_finding(tmp_path):
    def round_off(record):
        for content in entries(record):
            for entry in content:
                entry["logprob"] = -0.0 if entry["logprob"] > -1e-4 else entry["logprob"]

    assert names(diagnosed(spoiled(round_off), tmp_path)) == {}


def warm(record, kind="raw"):
    record["temperature"], record["logprob_kind"] = 0.7, kind
    for call in record.get("calls", ()):
        call["request"]["temperature"] = 0.7


@pytest.mark.parametrize("kind", ["raw", "unknown"])
def test_raw_logprobs_at_another_temperature_are_found_and_processed_ones_are_right(tmp_path, kind):
    found = diagnosed(spoiled(lambda record: warm(record, kind)), tmp_path)
    assert names(found) == {"raw_at_temperature": "WRONG"}
    assert "temperature 0.7" in found.findings[0].hits.description
    assert found.next_command.endswith("--out runs/first --objective TOPR_POSITIVE --text-only"), "no ratio is needed"
    assert "avoids the problem" in render_lines(found)[2]
    assert names(diagnosed(spoiled(lambda record: warm(record, "processed")), tmp_path)) == {}
    told = diagnosed(spoiled(lambda record: warm(record, kind)), tmp_path, logprob_kind="processed")
    assert names(told) == {}


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("top_p", 0.9, 1.0),
        ("top_k", 1, -1),
        ("frequency_penalty", -1.5, 0.0),
        ("repetition_penalty", 1.05, 1),
        ("logit_bias", {"5": 1}, {}),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tool_choice", "required", "auto"),
    ],
)
@pytest.mark.first_cases(4)
def test_what_reshapes_the_distribution_is_found_of_either_kind_and_what_is_off_is_not(
    tmp_path, kind, name, value, off
):
    def with_option(value):
        def spoil(record):
            record["logprob_kind"] = kind
            record["metadata"] = {"task": {"prompt": "?", "model": "x", "regex": "a+"}}  # a column, and no request
            for call in record.get("calls", [record])[-1:]:
                call["request"] = {**call.get("request", {"messages": []}), "model": "clerk", name: value}

        return spoil

    found = diagnosed(spoiled(with_option(value)), tmp_path)
    assert names(found) == {"reshaped_sampling": "WRONG"}
    assert found.findings[0].hits.description.startswith(f"{name}={value!r}, logprobs {kind}")
    # The last call of 90 records, and each of the 51 turns of 30 conversations, whose request is that of all turns.
    assert found.findings[0].hits.count == 141
    assert found.next_command.endswith("--out runs/first --objective TOPR_POSITIVE --text-only"), "no ratio is needed"
    assert names(diagnosed(spoiled(with_option(off)), tmp_path)) == {}


def test_two_bos_tokens_are_found(tmp_path):
    def twice(record):
        for response in responses(record):
            if response["prompt_token_ids"]:
                response["prompt_token_ids"].insert(0, response["prompt_token_ids"][0])

    found = diagnosed(spoiled(twice), tmp_path)
    assert names(found)["double_bos"] == "COSTS"
    assert set(names(found)) <= {"double_bos", "other_prompt"}
    assert first(found).turn == 0


def test_a_missing_stop_token_is_found(tmp_path):
    def cut(record):
        for answer in answers(record):
            answer["logprobs"]["content"].pop()
            if answer.get("token_ids"):
                answer["token_ids"].pop()

    found = diagnosed(spoiled(cut), tmp_path)
    assert names(found)["missing_stop_tokens"] == "COSTS"
    assert set(names(found)) <= {"missing_stop_tokens", "history_rewritten"}
    assert found.exit_code == 0


def test_cut_completions_are_found_by_their_finish_reason_or_without_one(tmp_path):
    def cut(record, said):
        (answer,) = list(answers(record))[-1:]
        answer["finish_reason"] = said
        answer["logprobs"]["content"].pop()
        if answer.get("token_ids"):
            answer["token_ids"].pop()

    for said in ("length", None):
        found = diagnosed(spoiled(lambda record, said=said: cut(record, said)), tmp_path)
        assert names(found) == {"truncated": "COSTS"}, said
    few = diagnosed(spoiled(lambda record: cut(record, "length"), every=40), tmp_path)
    assert names(few) == {"truncated": "NOTE"}


def test_groups_with_equal_rewards_are_found(tmp_path):
    def equal(records, every):
        groups = sorted({record["group"] for record in records})[::every]
        for record in records:
            if record["group"] in groups:
                record["reward"] = 1.0
        return records

    assert names(diagnosed(equal(recorded(), 10), tmp_path)) == {"equal_rewards": "NOTE"}
    found = diagnosed(equal(recorded(), 1), tmp_path)
    assert names(found) == {"equal_rewards": "WRONG"}
    assert "every reward is 1" in found.findings[0].hits.description
    assert (first(found).line, found.findings[0].hits.count) == (1, 15)


def test_traces_that_stand_alone_in_their_group_are_found(tmp_path):
    found = diagnosed(spoiled(lambda record: record.pop("group")), tmp_path)
    assert names(found) == {"lone_traces": "WRONG"}
    assert "no group" in found.findings[0].hits.description


def test_duplicated_generations_are_found_by_record_by_response_and_by_tokens(tmp_path):
    records = recorded()
    assert names(diagnosed([*records, records[8]], tmp_path)) == {"duplicated": "COSTS"}
    other = copy.deepcopy(records[0])
    other["id"], other["reward"] = "another", 0.5
    found = diagnosed([*records, other], tmp_path)
    assert names(found) == {"duplicated": "COSTS"}
    assert "same ids" in found.findings[0].hits.description
    assert first(found).trace == "another"
    surprising = max(records, key=lambda record: -sum(e["logprob"] for content in entries(record) for e in content))
    again = copy.deepcopy(surprising)
    again["id"] = "third"
    for response in responses(again):
        response["id"] = f"{response['id']}0"
    found = diagnosed([*records, again], tmp_path)
    assert names(found) == {"duplicated": "COSTS"}
    assert "same logprobs" in found.findings[0].hits.description
    assert first(found).line == 121


def test_messages_with_the_same_ids_are_duplicates_and_a_log_of_them_is_wrong(tmp_path):
    def talk(number, *texts):
        roles = ("user", "assistant")
        messages = [
            {"role": roles[at % 2], "content": text, "id": f"message-{number}-{at}"} for at, text in enumerate(texts)
        ]
        return {"messages": messages, "score": number % 2, "topic": f"topic {number // 4}"}

    talks = [talk(number, "Hello", "Hi", f"Question {number}?", "Yes") for number in range(8)]
    copies = [{**talks[0], "source": "another file"}]
    found = diagnosed([*talks, *copies], tmp_path)
    assert names(found)["duplicated"] == "COSTS"
    hits = next(finding.hits for finding in found.findings if finding.name == "duplicated")
    assert (hits.count, "same ids and texts" in hits.description) == (1, True)
    assert "recorded_twice" not in names(found)
    assert names(diagnosed([*talks, *talks[:4]], tmp_path))["recorded_twice"] == "WRONG"
    assert diagnosed([*talks, *talks[:4]], tmp_path).next_command is None
    for talk_ in talks:  # Short ids are numbers in a conversation.
        for message in talk_["messages"]:
            message["id"] = message["id"][-1]
    assert "duplicated" not in names(diagnosed([*talks, *[{**each, "n": 1} for each in talks]], tmp_path))
    # If each record has all messages so far, the command joins them.
    so_far = [{**each, "messages": each["messages"][:count]} for each in talks for count in (2, 4, 4)]
    for at, message in enumerate(message for each in so_far for message in each["messages"]):
        message["id"] = f"{message['content']}-{at % 4}-long"
    found = diagnosed(so_far, tmp_path)
    assert names(found)["recorded_twice"] == "WRONG"
    assert found.next_command.startswith("tracegrad doctor")
    assert "--map.session prefix" in found.next_command


def test_turns_right_after_another_turn_are_found_unless_the_prompt_is_recorded(tmp_path):
    def talk(number, *parts, **fields):
        answers = [{"role": "assistant", "content": part, **fields} for part in parts]
        return {"messages": [{"role": "user", "content": f"{number}?"}, *answers], "score": number % 2, "topic": "t"}

    whole = [talk(number, "Yes") for number in range(24)]
    assert "consecutive_turns" not in names(diagnosed(whole, tmp_path))
    found = diagnosed([*whole, talk(24, "Let me see.", "Yes")], tmp_path)
    assert names(found)["consecutive_turns"] == "COSTS"
    hits = next(finding.hits for finding in found.findings if finding.name == "consecutive_turns")
    assert (hits.count, hits.total, hits.first.line, hits.first.turn) == (1, 26, 25, 1)
    parts = [talk(number, "Let me see.", "Yes") for number in range(4)]
    assert names(diagnosed([*whole, *parts], tmp_path))["consecutive_turns"] == "WRONG"
    recorded_prompts = [talk(number, "Let me see.", "Yes", prompt_token_ids=[1, 2]) for number in range(4)]
    assert "consecutive_turns" not in names(diagnosed([*whole, *recorded_prompts], tmp_path))
    context = talk(0, "Let me see.", "Yes")
    context["messages"][1]["sampled"] = False
    rewritten = {"calls": [], "score": 1, "topic": "t"}
    for asked in (["a"], ["b", "c"]):
        request = {"messages": [{"role": "user", "content": text} for text in asked]}
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "finish_reason": "stop"}
        rewritten["calls"].append({"request": request, "response": {"choices": [choice]}})
    assert "consecutive_turns" not in names(diagnosed([*whole, context, rewritten], tmp_path))


def test_turns_of_another_model_are_found(tmp_path):
    def talk(number, **model):
        messages = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "Yes", **model}]
        return {"messages": messages, "score": number % 2, "topic": f"topic {number // 4}"}

    def call(number, answered_by):
        answer = {"role": "assistant", "content": "Yes"}
        request = {"model": "alias", "messages": [{"role": "user", "content": f"{number}?"}]}
        response = {"model": answered_by, "choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]}
        return {"request": request, "response": response, "score": number % 2, "topic": f"topic {number // 4}"}

    unnamed = [talk(number) for number in range(20, 24)]
    one = [*(call(number, "policy") for number in range(8)), *(talk(9, model="policy") for _ in range(2)), *unnamed]
    assert "several_models" not in names(diagnosed(one, tmp_path))
    found = diagnosed([*one, call(30, "guard"), talk(31, model="guard"), talk(32, model="judge")], tmp_path)
    assert names(found)["several_models"] == "COSTS"
    hits = next(finding.hits for finding in found.findings if finding.name == "several_models")
    assert (hits.count, hits.total, hits.first.line) == (3, 13, 15)
    assert hits.description == "'guard' in 2, 'judge' in 1; most are of 'policy'"


def test_a_stream_that_lost_chunks_is_found_by_its_text_and_by_its_usage(tmp_path):
    def lose(record):
        for answer in answers(record):
            del answer["logprobs"]["content"][2:6]
            if answer.get("token_ids"):
                del answer["token_ids"][2:6]

    found = diagnosed(spoiled(lose), tmp_path)
    assert names(found)["lost_chunks"] == "WRONG"
    said = {finding.name: finding.hits.description for finding in found.findings}["lost_chunks"]
    assert "listed, usage counts" in said or "bytes of a content" in said


def test_usage_of_several_choices_is_no_sign_of_lost_chunks(tmp_path):
    def more(record):
        for response in responses(record):
            response["usage"]["completion_tokens"] *= 2
            response["choices"].append({**copy.deepcopy(response["choices"][0]), "index": 1})

    assert names(diagnosed(spoiled(more), tmp_path)) == {"unused_choices": "WRONG"}, "of the single calls"


def test_usage_of_choices_that_were_asked_for_and_lie_elsewhere_is_no_sign_of_lost_chunks(tmp_path):
    def alone(asked):
        def more(record):
            for call in record.get("calls", ()):
                call["request"]["n"] = asked
                call["response"]["usage"]["completion_tokens"] *= 4

        return more

    assert "lost_chunks" not in names(diagnosed(spoiled(alone(4)), tmp_path))
    assert names(diagnosed(spoiled(alone(1)), tmp_path))["lost_chunks"] == "WRONG"


def test_an_n_that_is_no_request_s_hides_no_lost_chunks(tmp_path):
    def noted(record):
        record["metadata"] = {"n": 2}
        for response in responses(record):
            response["usage"]["completion_tokens"] *= 4

    assert names(diagnosed(spoiled(noted), tmp_path))["lost_chunks"] == "WRONG"


def test_conversations_that_end_before_an_answer_are_counted(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": [*talk, *talk[:1]] if at < 2 else talk, "reward": at % 2, "group": "g"} for at in range(50)]
    assert names(diagnosed(rows, tmp_path))["unanswered"] == "NOTE"
    assert "unanswered" not in names(diagnosed(rows[2:], tmp_path))
    call = {"id": "c", "type": "function", "function": {"name": "submit", "arguments": "{}"}}
    work = [talk[0], {**talk[1], "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "done"}]
    rows = [{"messages": work, "reward": at % 2, "group": "g"} for at in range(4)]
    found = diagnosed(rows, tmp_path)
    assert "unanswered" not in names(found), "the last call submits the work"
    assert names(found)["unrecorded_tools"] == "COSTS", "the prompt lacks the schemas, also before text"
    tools = [{"type": "function", "function": {"name": "submit", "parameters": {}}}]
    assert "unrecorded_tools" not in names(diagnosed([{**row, "tools": tools} for row in rows], tmp_path))
    assert render_lines(found)[0].startswith(
        "wrong    4 traces, 4 turns, 0 tokens to train with logprobs, and all turns as text (--text-only) in "
    )


def test_the_fix_is_that_of_the_cause_and_counts_say_what_they_leave_out(tmp_path):
    def finding(rows, name="nothing_to_train"):
        return next(each for each in diagnosed(rows, tmp_path).findings if each.name == name)

    answer = {"role": "assistant", "content": "b c", "token_ids": [7_000_000, 8_000_000], "logprobs": [-0.5, -0.5]}
    foreign = [
        {"messages": [{"role": "user", "content": "a"}, answer], "reward": at % 2, "group": "g"} for at in (0, 1)
    ]
    assert finding(foreign).fix == finding(foreign, "wrong_tokenizer").fix
    assert finding(foreign).hits.description == "2 of 2 turns are of another tokenizer"
    assert finding(foreign).as_dict()["fix"] == finding(foreign).fix
    bare = [{"choices": [{"index": 0, "message": {"role": "assistant", "content": "b"}}]}] * 2
    assert finding(bare).fix == "Record the request with each response (or prompt_token_ids)."
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": talk, "reward": reward, "group": group} for reward, group in ((1, "a"), (0, "b"), (None, "c"))]
    assert finding(rows, "lone_traces").hits.description == "group 'a'; not counted are 1 group without a reward"
    assert diagnosed(rows, tmp_path).rewards.endswith("; 2 groups of 1 traces with a reward (1 groups have none)")


def test_hidden_reasoning_is_found_where_usage_tells_of_it(tmp_path):
    def think(record):
        for response in responses(record):
            response["usage"]["completion_tokens"] += 300
            response["usage"]["completion_tokens_details"] = {"reasoning_tokens": 300}

    found = diagnosed(spoiled(think), tmp_path)
    assert names(found) == {"hidden_reasoning": "WRONG"}
    assert "300 of reasoning" in found.findings[0].hits.description


def test_a_system_prompt_that_the_template_puts_in_is_found_unless_prompt_ids_confirm_it(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    path = model / "chat_template.jinja"
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful clerk.<|im_end|>\n{% endif %}"
    path.write_text(default + path.read_text())

    def bare(record):
        for call in record.get("calls", ()):
            call["request"]["messages"] = [m for m in call["request"]["messages"] if m["role"] != "system"]
            call["request"].pop("tools")
            call["response"]["prompt_token_ids"] = None
        if "messages" in record:
            record["messages"] = [m for m in record["messages"] if m["role"] != "system"]
            record.pop("tools", None)

    found = diagnosed(spoiled(bare), tmp_path, model=model)
    assert names(found) == {"injected_system": "COSTS", "unrecorded_tools": "COSTS"}
    assert "You are a helpful clerk." in found.findings[0].hits.description
    assert names(diagnosed(spoiled(bare), tmp_path)) == {"unrecorded_tools": "COSTS"}
    tokenizer = tg.Tokenizer.from_pretrained(model)

    def confirmed(record):
        bare(record)
        for call in record["calls"]:
            ids = tokenizer.render_ids(call["request"]["messages"], None, True)
            call["response"]["prompt_token_ids"] = ids.tolist()

    records = [record for record in recorded() if "calls" in record]
    for record in records:
        confirmed(record)
    assert "injected_system" not in names(diagnosed(records, tmp_path, model=model))


def test_stale_policy_versions_are_found(tmp_path):
    records = recorded()
    for at, record in enumerate(records):
        record["policy_version"] = at // 6
    found = diagnosed(records, tmp_path)
    assert names(found) == {"stale_versions": "COSTS"}
    assert found.findings[0].hits.description == "version 0, the newest is 19"
    assert names(diagnosed(spoiled(lambda record: record.update(policy_version=7)), tmp_path)) == {}


def test_traces_longer_than_the_model_reads_are_found(tmp_path):
    found = diagnosed(recorded(), tmp_path, max_tokens=250)
    assert names(found) == {"overlong": "COSTS"}
    assert found.findings[0].hits.description.endswith("tokens, the limit is 250")
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 220}))
    assert names(diagnosed(recorded(), tmp_path, model=model)) == {"overlong": "COSTS"}
    (model / "config.json").write_text("{}")
    assert names(diagnosed(recorded(), tmp_path, model=model)) == {}


def test_prompts_of_a_held_out_file_are_found(tmp_path):
    from spoil import save

    records = recorded()
    held = save(records[:8] + records[96:104], tmp_path / "held.jsonl")
    found = diagnosed(records, tmp_path, held_out=[str(held)])
    assert names(found) == {"contaminated": "WRONG"}
    assert found.findings[0].hits.count == 16
    other = save(records[64:], tmp_path / "other.jsonl")
    assert names(diagnosed(records[:56], tmp_path, held_out=[str(other)])) == {}


def test_a_place_is_one_line_that_an_editor_opens_and_names_no_trace_that_has_no_name():
    assert str(Place("a.jsonl", 3, "t1", 0, 5)) == "a.jsonl:3 trace 't1' turn 0 token 5"
    assert str(Place("a.jsonl", 3, "a.jsonl:3", 2)) == "a.jsonl:3 turn 2"
    assert str(Place("a.jsonl", 3, "")) == "a.jsonl:3"


def test_the_thresholds_of_a_check_are_its_severities():
    by_name = {check.name: check for check in CHECKS}
    assert len(by_name) == len(CHECKS)
    check = by_name["truncated"]
    assert check.finding(Hits(0, 100)) is None
    assert check.finding(Hits(4, 100)).severity == Severity.NOTE
    assert check.finding(Hits(5, 100)).severity == Severity.COSTS
    assert np.isclose(check.finding(Hits(5, 100)).share, 0.05)


def test_truncated_sampling_is_replayed_from_the_record_or_wrong(tmp_path):
    rows = []
    for seed in range(4):
        record, *_ = sample(np.random.default_rng(seed), 12, "processed", 150, spread=4.0, top_p=0.8, top_k=40)
        rows.append(record | {"id": str(seed), "group": "g", "reward": float(seed % 2)})
    for seed in range(4, 20):  # most tokens are the only ones kept, and have the logprob 0
        record, *_ = sample(np.random.default_rng(seed), 12, "processed", 150, spread=40.0, top_p=0.5, temperature=0.8)
        rows.append(record | {"id": str(seed), "group": "h", "reward": float(seed % 2)})
    found = diagnosed(rows, tmp_path)
    assert names(found)["replayed_sampling"] == "NOTE"
    assert not {"reshaped_sampling", "made_up_zeros", "filled_logprobs"} & {*names(found)}
    [finding] = [each for each in found.findings if each.name == "replayed_sampling"]
    assert (finding.hits.count, finding.hits.total) == (20, 20)
    assert finding.hits.description == "top_p=0.8, top_k=40"
    assert "TOPR_POSITIVE" not in found.next_command
    for entry in entries_of(rows[3]):
        entry["top_logprobs"] = []
    found = diagnosed(rows, tmp_path)
    counts = {each.name: each.hits.count for each in found.findings}
    assert (counts["replayed_sampling"], counts["reshaped_sampling"]) == (19, 1)
