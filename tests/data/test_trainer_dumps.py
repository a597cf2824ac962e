"""Rows, groups and trials that trainers' own code wrote (tests/golden/trainers), against what it was given."""

import json
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.cli import main
from tracegrad.data.formats import registry
from tracegrad.errors import FormatError

GOLDEN = Path(__file__).parents[1] / "golden" / "trainers"
MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
LEFT_OUT = {
    "atropos": {},
    "harbor": {"rewards that an exception made invalid (`has_valid_reward`)": 1},
    "nemo_gym_chat": {},
    "nemo_rl": {"answers that `sample_loss_mask` excludes: they are context, and their reward counts": 1},
    "prime_rl": {
        "rewards: prime-rl's token export has advantages alone": 2,
        "tokens with a cross-entropy weight alone: the policy did not sample them": 2,
    },
}
ADAPTERS = {"harbor": "harbor_trial"}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_the_trainer_was_given_is_read_back(name):
    stream = tg.stream(GOLDEN / f"{name}.jsonl")
    traces = [trace for part in stream for trace in part]
    truths = json.loads((GOLDEN / f"{name}.truth.json").read_text())
    assert len(traces) == len(truths)
    for trace, truth in zip(traces, truths, strict=True):
        for key in ("id", "group", "reward"):
            assert key not in truth or getattr(trace, key) == truth[key], key
        assert trace.rewards == truth.get("rewards", {})
        assert len(trace.generations) == len(truth["generations"])
        for generation, wanted in zip(trace.generations, truth["generations"], strict=True):
            assert generation.token_ids.tolist() == wanted["ids"]
            assert generation.prompt_token_ids.tolist() == wanted["prompt"]
            np.testing.assert_array_equal(generation.logprobs, np.float32(wanted["logprobs"]))
            assert (generation.missing, generation.invalid) == (0, 0)
            assert generation.temperature == (pytest.approx(truth["temperature"]) if "temperature" in truth else None)
            assert "finish_reason" not in truth or generation.finish_reason == truth["finish_reason"]
    report, tally = stream.read_report, stream.tally()
    assert report.tokens == sum(len(each["ids"]) for truth in truths for each in truth["generations"])
    adapter = ADAPTERS.get(name, name)
    assert tally.left_out == {f"{adapter}: {reason}": count for reason, count in LEFT_OUT[name].items()}
    printed = "\n".join(stream.lines())
    assert f"records of {adapter}" in printed
    assert all(f"left out: {count:,} {reason}" in printed for reason, count in LEFT_OUT[name].items())


@pytest.mark.parametrize("name", LEFT_OUT)
def test_doctor_reports_it_and_names_a_command(name, capsys):
    assert main(["doctor", str(GOLDEN / f"{name}.jsonl"), "--model", str(MODEL), "--json"]) in (0, 1)
    json.loads(capsys.readouterr().out)


def test_members_of_one_row_are_a_group_and_texts_come_with_certain_answers():
    [record] = map(json.loads, (GOLDEN / "atropos.jsonl").read_text().splitlines())
    names = ("tokens", "masks", "scores", "inference_logprobs", "messages")
    traces = tg.read([record, {**record, **{name: record[name][::-1] for name in names}}])
    groups = [trace.group for trace in traces]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert [each["content"] for each in traces[0].messages] == [each["content"] for each in record["messages"][0]]
    # One answer that is not the last message: which message it is would be guessed.
    said = [*record["messages"][1], {"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]
    record["messages"][1] = [*said, {"role": "user", "content": "?"}]
    bare = tg.read([record])[1]
    assert bare.messages == [{"role": "assistant", "content": None}]
    assert bare.generations[0].token_ids.tolist() == traces[1].generations[0].token_ids.tolist()
    # As many answers as assistant messages, or one answer and a last message of the assistant.
    record["messages"][1] = said
    assert [bool(each.generations) for each in tg.read([record])] == [True, True]
    assert tg.read([record])[1].generations[0].message == 3


def test_a_group_of_nemo_rl_is_a_prompt_of_one_file(tmp_path):
    rows = (GOLDEN / "nemo_rl.jsonl").read_text()
    for name in ("train_data_step1.jsonl", "train_data_step2.jsonl"):
        (tmp_path / name).write_text(rows)
    groups = [trace.group for trace in tg.read(tmp_path)]
    assert groups[0] == groups[1] != groups[2]
    assert {*groups[:3]}.isdisjoint(groups[3:])


ATROPOS = {"tokens": [[1, 2, 3]], "masks": [[-100, 2, 3]], "scores": [1.0]}
NEMO_RL = {"content": [["a"]], "rewards": [1.0], "input_lengths": [2], "token_ids": [[1, 2, 0]], "idx": 0}
NEMO_RL |= {"token_loss_mask": [[0, 1, 0]], "generation_logprobs": [[0, -0.5, 0]]}
PRIME_RL = {"export_sequence_idx": 0, "step": 1, "rank": 0, "micro_step": 0, "token_ids": [1, 2], "loss_mask": [0, 1]}
TRIAL = {"trial_name": "a", "task_name": "t", "agent_info": {}, "agent_result": {"rollout_details": []}}
DETAIL = {"prompt_token_ids": [[1], [1, 2, 3]], "completion_token_ids": [[2], [4]], "logprobs": [[-0.5], [-0.25]]}


def trial(**detail):
    return {**TRIAL, "agent_result": {"rollout_details": [{**DETAIL, **detail}]}}


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({**ATROPOS, "masks": [[-100, 2, 1]]}, r"masks\[0\]\[2\] is 1, and the token is 3"),
        ({**ATROPOS, "masks": [[-100, 2]]}, r"`masks\[0\]` is a list of 2, and there are 3 tokens"),
        ({**ATROPOS, "scores": [1.0, 0.0]}, "`scores` is a list of 2, and there are 1 answers"),
        ({**ATROPOS, "inference_logprobs": [[-0.5]]}, "list of logprobs` is a list of 1, and there are 3 tokens"),
        ({"content": [[{"role": "user", "content": "a"}]], "rewards": [1.0], "idx": 0}, "behind the chat template"),
        ({**NEMO_RL, "token_loss_mask": [[0, 1]]}, "`token_loss_mask` is a list of 2, and there are 3 tokens"),
        ({**NEMO_RL, "input_lengths": [4]}, "there are 3 tokens"),
        ({**PRIME_RL, "loss_mask": [0]}, "`loss_mask` is a list of 1, and there are 2 tokens"),
        ({**PRIME_RL, "rl_weights": [0.0]}, "`rl_weights` is a list of 1"),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "response": {"choices": [{"message": {"role": "assistant", "content": each}} for each in "bc"]},
                "provider_specific_fields": {"generation_token_ids": [5, 2]},
            },
            "generation_token_ids` is a list of 2, and there are 2 answers",
        ),
        (trial(prompt_token_ids=[[1]]), r"rollout_details\[0\] has 1 prompts and 2 answers"),
    ],
)
def test_what_would_be_guessed_is_refused_at_its_line(record, what):
    with pytest.raises(FormatError, match=rf"TG-\w+-\d+: .*:1: .*{what}"):
        tg.read([record])


@pytest.mark.parametrize(
    ("record", "counts", "sampled", "reason"),
    [
        ({**ATROPOS, "group_overrides": {"sft": True}}, 1, [], "supervised groups"),
        ({**ATROPOS, "overrides": [{"set_advantage_to_zero": True}]}, 1, [0], "set_advantage_to_zero"),
        ({**ATROPOS, "overrides": [{"set_advantage_to_zero": False}]}, 0, [2], ""),
        ({**NEMO_RL, "token_ids": [], "token_loss_mask": []}, 1, [], "dynamic sampling"),
        (trial(logprobs=[[-0.5]]), 1, [2], "lists of logprobs"),
        (TRIAL, 1, [], "collect_rollout_details"),
        ({**PRIME_RL, "rl_weights": [0.0, 0.0], "ref_kl_weights": [0.0, 1.0]}, 1, [1], "rewards"),
    ],
)
def test_what_is_left_out_is_counted_by_its_reason(record, counts, sampled, reason):
    conversion = registry.convert_first_match(record)
    assert sum(conversion.left_out.values()) == counts
    assert all(reason in each for each in conversion.left_out)
    assert bool(conversion.records) == bool(sampled)
    if sampled:
        assert [sum(len(g.token_ids) for g in trace.generations) for trace in tg.read([record])] == sampled


def test_a_message_that_pads_a_rollout_of_nemo_gym_is_left_out():
    def said(prompt, ids, text):
        tokens = {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": [-0.5] * len(ids)}
        return {"type": "message", "role": "assistant", "content": [{"text": text}], **tokens}

    params = {"responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]}}
    for output, answers, padding in (
        ([said([1], [2], "4"), said([1], [2], "")], 1, 1),  # the last answer again
        ([said([0], [0], "")], 0, 1),  # nothing was sampled
        ([said([1], [2], "4"), said([1, 2, 3], [2], "4")], 2, 0),
    ):
        record = {**params, "response": {"output": output}}
        conversion = registry.convert_first_match(record)
        assert sum(conversion.left_out.values()) == padding
        assert [len(each.generations) for each in tg.read([record])] == ([answers] if answers else [])
