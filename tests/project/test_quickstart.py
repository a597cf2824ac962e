"""Tests of the quickstart's task and of the two files that lie beside it; they need zstandard, but no torch."""

import itertools
import json
import random
from pathlib import Path

import pytest
import zstandard

import demonstrations
import task

HERE = Path(__file__).parents[2] / "examples" / "quickstart"


def first(split: str, count: int, seed: int = 0) -> list[task.Prompt]:
    return list(itertools.islice(task.prompts(split, seed), count))


@pytest.fixture(scope="module")
def records() -> list[dict]:
    with (HERE / "traces.jsonl.zst").open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file).read().decode()
    return [json.loads(line) for line in text.splitlines()]


def conversation(record: dict) -> list[dict]:
    """System, user and what followed, with a finish reason on each assistant message."""
    if "messages" in record:
        return record["messages"]
    last = record["calls"][-1]
    choice = last["response"]["choices"][0]
    return [*last["request"]["messages"], {**choice["message"], "finish_reason": choice["finish_reason"]}]


def test_no_prompt_stands_in_two_splits():
    keys = {split: {prompt.key for prompt in first(split, 3000)} for split in task.SPLITS}
    texts = {split: {prompt.text for prompt in first(split, 3000)} for split in task.SPLITS}
    for one, other in itertools.combinations(task.SPLITS, 2):
        assert not keys[one] & keys[other]
        assert not texts[one] & texts[other]


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    assert first("evaluation", 50) == first("evaluation", 50)
    assert first("evaluation", 50) != first("evaluation", 50, seed=1)


def test_a_clean_demonstration_is_right_and_a_corrupted_one_seldom():
    generator = random.Random(0)
    right = 0.0
    for prompt in first("pretrain", 500):
        clean = [{"role": role, "content": text} for role, text in demonstrations.clean(prompt, generator)]
        assert task.check(prompt, clean) == 1.0
        corrupted = [{"role": role, "content": text} for role, text in demonstrations.corrupted(prompt, generator)]
        right += task.check(prompt, corrupted)
    assert right / 500 < 0.2


def test_a_wrong_call_is_answered_with_an_error():
    prompt = first("evaluation", 1)[0]
    assert json.loads(task.execute(prompt, "weather", {})) == {"error": "no such tool"}
    assert json.loads(task.execute(prompt, "price", {"item": "red moon"})) == {"error": "no such item"}
    assert json.loads(task.execute(prompt, "price", 7)) == {"error": "no such item"}


def test_a_malformed_call_stays_content():
    broken = '<tool_call>\n{"name": "price", "arguments": {"item": "red lamp"}\n</tool_call>'
    assert task.parse_tool_calls(broken) == (broken, [])
    good = '<tool_call>\n{"name": "price", "arguments": {"item": "red piñata"}}\n</tool_call>'
    assert task.parse_tool_calls(good) == (None, [{"name": "price", "arguments": '{"item": "red piñata"}'}])


def test_an_answer_cut_by_the_length_limit_scores_nothing():
    prompt = first("evaluation", 1)[0]
    text = demonstrations.answer_text(demonstrations.right_answer(prompt), random.Random(0))
    message = {"role": "assistant", "content": text, "finish_reason": "stop"}
    assert task.check(prompt, [message]) == 1.0
    assert task.check(prompt, [{**message, "finish_reason": "length"}]) == 0.0


def test_the_files_keep_to_their_limits(records):
    assert sum(file.stat().st_size for file in (HERE / "model").iterdir()) <= 3_000_000
    assert (HERE / "traces.jsonl.zst").stat().st_size <= 3_000_000
    assert len(records) >= 2000


def test_every_group_has_two_samples_of_each_shape(records):
    for _, group in itertools.groupby(records, key=lambda record: record["group"]):
        shapes = sorted(record["metadata"]["shape"] for record in group)
        assert shapes == sorted(["token_ids", "token_id_strings", "strings", "messages"] * 2)


def test_recorded_rewards_are_what_the_checker_says_and_no_evaluation_prompt_stands_in_the_traces(records):
    prompts = {prompt.key: prompt for prompt in first("traces", len(records) // 8)}
    evaluation = {prompt.text for seed in range(3) for prompt in first("evaluation", 512, seed)}
    for record in records:
        messages = conversation(record)
        key = record["metadata"]["prompt_key"]
        assert task.split_of(key) == "traces"
        assert messages[1]["content"] == prompts[key].text
        assert messages[1]["content"] not in evaluation
        assert task.check(prompts[key], messages) == record["reward"]
