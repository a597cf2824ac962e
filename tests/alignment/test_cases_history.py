"""Nasty records, by number, two: turns that stand in later prompts (cases 25 to 46, 54, 59).

The templates are those TRL ships, over the example's vocabulary with each family's own special tokens.
"""

import numpy as np
import pytest

from history_cases import (
    called,
    family,  # noqa: F401
    tool_turn,
)
from vocabulary import align, branch, ids_of, reasons, record, said, text, trained, user

WEATHER = {"name": "look", "arguments": '{"a":1}'}


def prompt(tokenizer, messages, **kwargs):
    return [int(i) for i in tokenizer.render_ids(messages, add_generation_prompt=True, **kwargs)]


def plain(message):
    return {k: v for k, v in message.items() if k != "generation"}


THOUGHT = "<think>\nwhy\n</think>\n\nred<|im_end|>"


def two_turns(tokenizer, first, second, reasoning=None):
    """A conversation whose prompts are recorded by ids, as the template renders them."""
    one = {"role": "assistant", "content": first.rpartition("\n")[2].removesuffix("<|im_end|>")}
    if reasoning:
        one["reasoning_content"] = reasoning
    a, b = [user("q")], [user("q"), one, user("r")]
    ids = [ids_of(tokenizer, first), ids_of(tokenizer, second)]
    message = said(one["content"], ids[0], prompt_token_ids=prompt(tokenizer, a))
    if reasoning:
        message["reasoning_content"] = reasoning
    last = said(second.removesuffix("<|im_end|>"), ids[1], prompt_token_ids=prompt(tokenizer, b))
    return record(user("q"), message, user("r"), last), ids


def test_case_25_a_thought_dropped_from_the_history_opens_a_branch_and_is_trained_once(family):
    tokenizer = family("qwen3")
    trace, ids = two_turns(tokenizer, THOUGHT, "lamp<|im_end|>", "why")
    found = align(tokenizer, trace)
    assert found.branches == 2
    assert trained(found) == ids[0] + ids[1]
    assert reasons(found) == {"R20"}


def test_case_26_with_the_training_template_it_is_one_branch(family):
    tokenizer = family("qwen3_training")
    trace, ids = two_turns(tokenizer, THOUGHT, "lamp<|im_end|>", "why")
    found = align(tokenizer, trace)
    assert found.branches == 1
    assert trained(found) == ids[0] + ids[1]
    assert len(found.alignment_report) == 0


def test_case_27_an_inserted_empty_thought_is_scaffold(family):
    tokenizer = family("qwen3_training")
    answers = [ids_of(tokenizer, t) for t in ("red<|im_end|>", "lamp<|im_end|>")]
    found = align(tokenizer, record(user("q"), said("red", answers[0]), user("r"), said("lamp", answers[1])))
    assert trained(found) == answers[0] + answers[1]
    assert reasons(found) <= {"R11"}
    thinks = ids_of(tokenizer, "<think>")
    assert not any(found.trainable[k] for k in range(found.tokens) if found.ids[k] in thinks and len(thinks) == 1)


def test_case_28_a_sampled_tool_call_stays_as_it_was_sampled(family):
    tokenizer = family("qwen2_5")
    sampled = '<tool_call>\n{"name": "look", "arguments": {"a":1}}\n</tool_call><|im_end|>'
    found = align(tokenizer, tool_turn(tokenizer, sampled))
    assert found.branches == 1
    assert trained(found)[: len(ids_of(tokenizer, sampled))] == ids_of(tokenizer, sampled)
    assert "R13" in reasons(found)


def test_case_29_arguments_given_as_text_are_rendered_as_the_object_they_say(family):
    tokenizer = family("glm4moe")
    sampled = "<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
    found = align(tokenizer, tool_turn(tokenizer, sampled, stop_reason=ids_of(tokenizer, "<|observation|>")[0]))
    assert "arg_key" in text(tokenizer, found.ids)
    assert trained(found)[: len(ids_of(tokenizer, sampled))] == ids_of(tokenizer, sampled)


@pytest.mark.parametrize(
    "arguments",
    ['{"a":"\\u00e9"}', '{"b":1,"a":2}', '{"x":1.0}', '{"n":123456789012345678901234567890}', '{"a":1,"a":2}'],
)
def test_case_30_whatever_json_makes_of_it_the_sampled_text_wins(family, arguments):
    tokenizer = family("qwen2_5")
    sampled = '<tool_call>\n{"name": "look", "arguments": ' + arguments + "}\n</tool_call><|im_end|>"
    found = align(tokenizer, tool_turn(tokenizer, sampled, arguments))
    assert text(tokenizer, trained(found)).startswith(sampled)
    assert found.branches == 1


def test_case_31_arguments_that_are_no_json_are_kept(family):
    tokenizer = family("qwen2_5")
    sampled = '<tool_call>\n{"name": "look", "arguments": {"a":}\n</tool_call><|im_end|>'
    found = align(tokenizer, tool_turn(tokenizer, sampled, '{"a":'))
    assert text(tokenizer, trained(found)).startswith(sampled)


def test_case_32_an_id_that_the_parser_gave_has_no_token(family):
    tokenizer = family("qwen2_5")
    sampled = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    trace = tool_turn(tokenizer, sampled)
    whole = align(tokenizer, trace)
    trace["messages"][1]["tool_calls"][0]["id"] = trace["messages"][2]["tool_call_id"] = "call_9f"
    assert align(tokenizer, trace).ids.tolist() == whole.ids.tolist()


def test_case_33_trimmed_whitespace_is_kept_as_it_was_sampled(family):
    tokenizer = family("llama3")
    sampled = ids_of(tokenizer, "\n\nred<|eot_id|>")
    last = ids_of(tokenizer, "lamp<|eot_id|>")
    found = align(tokenizer, record(user("q"), said("\n\nred", sampled), user("r"), said("lamp", last)))
    assert trained(found) == sampled + last
    assert found.branches == 1
    assert reasons(found) == {"R12"}


@pytest.mark.parametrize("content", ["", None], ids=["case_34_empty", "case_35_null"])
def test_case_34_and_case_35_a_turn_of_tool_calls_alone(family, content):
    tokenizer = family("qwen2_5")
    sampled = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    trace = tool_turn(tokenizer, sampled)
    trace["messages"][1]["content"] = content
    found = align(tokenizer, trace)
    assert text(tokenizer, trained(found)) == sampled + "done<|im_end|>"
    assert found.branches == 1


def test_case_36_a_turn_cut_by_length_is_closed_where_another_follows(family):
    tokenizer = family("qwen2_5")
    first, last = ids_of(tokenizer, "red la"), ids_of(tokenizer, "lamp<|im_end|>")
    trace = record(user("q"), said("red la", first, finish_reason="length"), user("r"), said("lamp", last))
    found = align(tokenizer, trace)
    end = int(np.flatnonzero(found.turn == 0)[-1])
    assert text(tokenizer, found.ids[end + 1 : end + 2]) == "<|im_end|>"
    assert not found.trainable[end + 1]
    assert "R09" in reasons(found)


def test_case_38_a_double_bos_is_named_and_kept(family):
    tokenizer = family("llama3")
    ids = prompt(tokenizer, [user("q")])
    answer = ids_of(tokenizer, "red<|eot_id|>")
    found = align(tokenizer, record(user("q"), said("red", answer, prompt_token_ids=[ids[0], *ids])))
    assert branch(found, 0) == [ids[0], *ids, *answer]
    assert reasons(found) == {"R16"}
    missing = align(tokenizer, record(user("q"), said("red", answer, prompt_token_ids=ids[1:])))
    assert branch(missing, 0) == [*ids[1:], *answer]
    assert reasons(missing) == {"R16"}


def test_case_39_the_date_is_that_of_the_recorded_prompt(family):
    tokenizer = family("gptoss")
    ids = prompt(tokenizer, [user("q")], strftime_now="2025-03-07")
    answer = ids_of(tokenizer, "<|channel|>final<|message|>red<|return|>")
    found = align(tokenizer, record(user("q"), said("red", answer, prompt_token_ids=ids)))
    assert branch(found, 0) == [*ids, *answer]
    assert reasons(found) == {"R18"}
    given = text(tokenizer, found.ids[found.source == 0])
    assert given == "q"
    unsaid = align(tokenizer, record(user("q"), said("red", answer)))
    assert "R18" in reasons(unsaid)


def test_case_40_a_default_system_prompt_that_the_server_had_not_is_named(family):
    tokenizer = family("qwen2_5")
    ids = ids_of(tokenizer, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    answer = ids_of(tokenizer, "red<|im_end|>")
    found = align(tokenizer, record(user("q"), said("red", answer, prompt_token_ids=ids)))
    assert branch(found, 0) == [*ids, *answer]
    assert reasons(found) == {"R17"}


def calls(tokenizer, *made):
    """A call log of (messages, answer)."""
    log = []
    for messages, answer in made:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
        ids = ids_of(tokenizer, f"{answer}<|im_end|>")
        choice |= {
            "token_ids": ids,
            "logprobs": {"content": [{"token": f"token_id:{i}", "logprob": -0.5} for i in ids]},
        }
        log.append({"request": {"model": "m", "messages": messages}, "response": {"choices": [choice]}})
    return {"id": "t", "logprob_kind": "raw", "calls": log}


def answer(content):
    return {"role": "assistant", "content": content}


def test_case_41_a_summary_in_place_of_the_history_opens_a_branch(family):
    tokenizer = family("qwen2_5")
    first = [user("q")]
    second = [*first, answer("red"), user("r")]
    found = align(tokenizer, calls(tokenizer, (first, "red"), (second, "lamp"), ([user("summary")], "two")))
    assert found.trace.tolist() == [0, 0]
    assert {"R19", "R20"} <= reasons(found)
    assert text(tokenizer, trained(found)) == "red<|im_end|>lamp<|im_end|>two<|im_end|>"


def test_case_42_parallel_samples_are_branches_and_all_stay(family):
    tokenizer = family("qwen2_5")
    found = align(tokenizer, calls(tokenizer, ([user("q")], "red"), ([user("q")], "red")))
    assert found.branches == 2
    assert text(tokenizer, trained(found)) == "red<|im_end|>red<|im_end|>"
    assert "R30" not in reasons(found)
    assert "R19" not in reasons(found)


def test_case_43_of_a_call_made_again_only_the_used_answer_stays(family):
    tokenizer = family("qwen2_5")
    onward = [user("q"), answer("lamp"), user("r")]
    found = align(tokenizer, calls(tokenizer, ([user("q")], "red"), ([user("q")], "lamp"), (onward, "two")))
    assert found.branches == 1
    assert text(tokenizer, trained(found)) == "lamp<|im_end|>two<|im_end|>"
    assert reasons(found) == {"R30"}
    assert found.alignment_report.count.tolist() == [len(ids_of(tokenizer, "red<|im_end|>"))]


def test_case_44_a_stop_token_that_is_also_the_next_header_counts_once(family):
    tokenizer = family("glm4moe")
    stop = ids_of(tokenizer, "<|observation|>")
    sampled = [*ids_of(tokenizer, "<think></think>\n<tool_call>look\n</tool_call>"), *stop]
    before = prompt(tokenizer, [user("q")])
    after = [*before, *sampled, *ids_of(tokenizer, "\n<tool_response>\n4\n</tool_response><|assistant|>")]
    final = ids_of(tokenizer, "\ndone<|user|>")
    result = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    one = said("", sampled, prompt_token_ids=before, stop_reason=stop[0], tool_calls=called("{}")["tool_calls"])
    two = said("done", final, prompt_token_ids=after)
    found = align(tokenizer, record(user("q"), one, result, two))
    assert found.branches == 1
    assert branch(found, 0).count(stop[0]) == 1
    assert trained(found) == [*sampled, *final]


def test_case_45_a_return_that_is_an_end_in_the_history_is_one_named_edit(family):
    tokenizer = family("gptoss")
    pinned = {"strftime_now": "2025-03-07"}
    first = ids_of(tokenizer, "<|channel|>final<|message|>red<|return|>")
    last = ids_of(tokenizer, "<|channel|>final<|message|>lamp<|return|>")
    before = prompt(tokenizer, [user("q")], **pinned)
    after = prompt(tokenizer, [user("q"), answer("red"), user("r")], **pinned)
    one, two = (said(t, i, prompt_token_ids=p) for t, i, p in (("red", first, before), ("lamp", last, after)))
    found = align(tokenizer, record(user("q"), one, user("r"), two, template_kwargs=pinned))
    assert found.branches == 1
    assert trained(found) == first + last
    assert reasons(found) == {"R07"}
    assert len(found.alignment_report) == 1


def test_case_46_the_separator_behind_a_turn_is_the_templates(family):
    tokenizer = family("qwen2_5")
    first, last = ids_of(tokenizer, "red<|im_end|>"), ids_of(tokenizer, "lamp<|im_end|>")
    found = align(tokenizer, record(user("q"), said("red", first), user("r"), said("lamp", last)))
    end = int(np.flatnonzero(found.turn == 0)[-1])
    assert text(tokenizer, found.ids[end + 1 : end + 2]) == "\n"
    assert found.source[end + 1] == 1
    # A server that saw no separator: what it saw is kept, and named once the template's own prompt goes on behind it.
    system = ids_of(tokenizer, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    bare = [*system, *first, *ids_of(tokenizer, "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n")]
    line = ids_of(tokenizer, "\n")
    third = [*system, *first, *line, *bare[len(system) + len(first) :], *last, *line]
    third += ids_of(tokenizer, "<|im_start|>user\ns<|im_end|>\n<|im_start|>assistant\n")
    turns = [said("red", first, prompt_token_ids=system), said("lamp", last, prompt_token_ids=bare)]
    turns.append(said("two", ids_of(tokenizer, "two<|im_end|>"), prompt_token_ids=third))
    found = align(tokenizer, record(user("q"), turns[0], user("r"), turns[1], user("s"), turns[2]))
    assert found.branches == 1
    assert text(tokenizer, trained(found)) == "red<|im_end|>lamp<|im_end|>two<|im_end|>"


def test_case_54_an_expanded_image_shifts_nothing_that_is_text(family):
    tokenizer = family("qwen2_5")
    content = "look <|vision_start|><|image_pad|><|vision_end|> there"
    ids = prompt(tokenizer, [user(content)])
    pad = ids_of(tokenizer, "<|image_pad|>")[0]
    at = ids.index(pad)
    expanded = ids[:at] + [pad] * 256 + ids[at + 1 :]
    sampled = ids_of(tokenizer, "red<|im_end|>")
    found = align(tokenizer, record(user(content), said("red", sampled, prompt_token_ids=expanded)))
    assert branch(found, 0) == [*expanded, *sampled]
    assert reasons(found) == {"R29", "R32"}
    assert found.alignment_report.count.tolist() == [255, len(sampled)]
    assert not found.trainable.any()
    assert text(tokenizer, found.ids[(found.source == 0) & (found.ids != pad)]).startswith("look ")


def test_case_59_two_answers_in_a_row_and_a_prefill_that_was_continued(family):
    tokenizer = family("qwen2_5")
    row = record(user("q"), {**answer("red"), "sampled": False}, said("lamp", ids_of(tokenizer, "lamp<|im_end|>")))
    found = align(tokenizer, row)
    assert text(tokenizer, trained(found)) == "lamp<|im_end|>"
    assert "red<|im_end|>\n<|im_start|>assistant\nlamp" in text(tokenizer, found.ids)
    continued = align(tokenizer, {**row, "template_kwargs": {"continue_final_message": True}})
    assert text(tokenizer, continued.ids).endswith("<|im_start|>assistant\nredlamp<|im_end|>")
    assert text(tokenizer, trained(continued)) == "lamp<|im_end|>"
