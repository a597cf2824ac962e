"""vLLM's own objects from memory: the same traces as their JSON, by id and never by order.

The classes here have the fields of vllm 0.32's; tests/weight_sync/test_with_vllm.py runs the real ones.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.data.sampling import options_on
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError
from tracegrad.integrations.vllm import traces_from_outputs
from vocabulary import EXAMPLE, load


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Flat:
    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)

    @classmethod
    def of(cls, steps):
        flat = cls()
        for step in steps:
            flat.start_indices.append(len(flat.token_ids))
            for token, entry in (step or {}).items():
                flat.token_ids.append(token)
                flat.logprobs.append(entry.logprob)
                flat.ranks.append(entry.rank)
            flat.end_indices.append(len(flat.token_ids))
        return flat


@dataclass
class Completion:
    index: int
    text: str
    token_ids: Any
    logprobs: Any
    cumulative_logprob: float | None = None
    finish_reason: str | None = "stop"
    stop_reason: Any = None
    routed_experts: Any = None
    sampling_mask: Any = None
    weight_versions: Any = None


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt: str | None = None


# the sampled id is neither first nor best in the second step, absent in the third, and -inf in the last
IDS = [5, 6, 7, 8]
STEPS = [{5: Logprob(-0.1, 1)}, {9: Logprob(-0.05, 1), 6: Logprob(-2.5, 4)}, None, {8: Logprob(float("-inf"))}]
EXPECTED = np.float32([-0.1, -2.5, np.nan, np.nan])


def request(logprobs, **more):
    return Request("r7", [1, 2, 3], [Completion(0, " abcd", IDS, logprobs, **more)])


@pytest.mark.parametrize("logprobs", [STEPS, Flat.of(STEPS)], ids=["dicts", "flat"])
def test_the_sampled_id_is_picked_by_id(logprobs):
    generation = traces_from_outputs([request(logprobs)])[0].generations[0]
    np.testing.assert_array_equal(generation.logprobs, EXPECTED)
    assert generation.token_ids.tolist() == IDS
    assert generation.prompt_token_ids.tolist() == [1, 2, 3]
    assert generation.missing == 2


@pytest.mark.parametrize("ids", [tuple(IDS), np.int64(IDS), np.int32(IDS)], ids=["tuple", "int64", "int32"])
def test_ids_may_be_any_sequence(ids):
    completion = Completion(0, " abcd", ids, None)
    assert traces_from_outputs([Request("r", [1], [completion])])[0].generations[0].token_ids.tolist() == IDS


def test_the_objects_and_their_json_give_the_same_generations():
    steps = STEPS[:2]
    completion = Completion(0, " ab", IDS[:2], steps, cumulative_logprob=-2.6, stop_reason=6)
    ours = traces_from_outputs([Request("r7", [1, 2, 3], [completion])], logprob_kind="unknown")[0].generations[0]
    record = json.loads(json.dumps(asdict(Request("r7", [1, 2, 3], [completion]))))
    [theirs] = Traces.from_records([record])[0].generations
    for name in ("token_ids", "logprobs", "prompt_token_ids"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    for name in ("finish_reason", "stop_reason", "cumulative_logprob", "text"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_completions_of_a_request_are_a_group_with_a_reward_each():
    outputs = [Request(name, [1], [Completion(i, "x", [i], None) for i in range(2)]) for name in ("a", "b")]
    traces = traces_from_outputs(outputs, rewards=[[1, 0], [0.5, float("nan")]], temperature=0.7, policy_version=4)
    assert [(t.id, t.group, t.reward) for t in traces] == [
        ("a-0", "a", 1.0),
        ("a-1", "a", 0.0),
        ("b-0", "b", 0.5),
        ("b-1", "b", None),
    ]
    [generation] = traces[0].generations
    assert (generation.logprob_kind, generation.policy_version) == ("raw", 4)
    assert generation.temperature == pytest.approx(0.7)


def test_messages_stand_before_what_was_sampled():
    asked = [{"role": "user", "content": "2+2?"}]
    trace = traces_from_outputs([request(STEPS)], messages=[asked])[0]
    assert trace.messages == [*asked, {"role": "assistant", "content": " abcd"}]
    assert trace.generations[0].prompt_token_ids.tolist() == [1, 2, 3]


def test_experts_masks_and_versions_come_along():
    more = {
        "routed_experts": np.arange(6 * 2 * 1, dtype=np.int16).reshape(6, 2, 1),
        "sampling_mask": [[5, 9], [6], [7], [8]],
        "weight_versions": [{"version": "v7", "start": 0, "end": 4}],
    }
    record = json.loads(traces_from_outputs([request(STEPS, **more)])[0].record)
    assert record["outputs"][0]["sampling_mask"] == more["sampling_mask"]
    assert traces_from_outputs([request(STEPS, **more)])[0].generations[0].versions == [(0, 4, 7)]


HIDDEN = float("-inf")
# Processed logprobs of top_k 2: the ids that it excludes are -inf. The sampled id is listed in addition to the first
# three, here as one of them.
TRUNCATED = [
    {5: Logprob(-0.5, 1), 9: Logprob(-0.93275, 2), 4: Logprob(HIDDEN, 3)},
    {6: Logprob(-2.0, 2), 7: Logprob(-0.14541, 1), 3: Logprob(HIDDEN, 3)},
]


@pytest.mark.parametrize("kind", ["dicts", "flat", "flat, the sampled id twice", "JSON of dicts", "JSON of flat"])
def test_the_listed_ids_prove_the_support(kind):
    steps = Flat.of(TRUNCATED) if "flat" in kind else TRUNCATED
    if "twice" in kind:  # as vLLM appends them: the sampled id, then the most probable ones
        steps = Flat(
            [0, 4], [4, 8], [5, 5, 9, 4, 6, 7, 6, 3], [-0.5, -0.5, -0.93275, HIDDEN, -2.0, -0.14541, -2.0, HIDDEN]
        )
        steps.ranks = [1, 1, 2, 3, 2, 1, 2, 3]
    tokenizer = load(EXAMPLE)
    completion = Completion(0, tokenizer.decode([5, 6]), [5, 6], steps, finish_reason="length")
    request = Request("r", [1, 2], [completion])
    options = {"logprob_kind": "processed", "temperature": 0.7, "sampling": {"top_k": 2}}
    if "JSON" in kind:
        record = json.loads(json.dumps(asdict(request)).replace("-Infinity", '"-Infinity"'))
        traces = Traces.from_records([{**record, "logprob_kind": "processed", "temperature": 0.7, "top_k": 2}])
    else:
        traces = traces_from_outputs([request], **options)
    sequences = tg.align(traces, tokenizer)
    terms = sequences.terms
    assert sequences.support is not None
    assert [row.tolist() for row in sequences.support.rows(terms)] == [[5, 9], [6, 7]]
    assert sequences.rollout_logprobs[terms].tolist() == pytest.approx([-0.5, -2.0])
    assert (options_on(int(sequences.replayed[0])), sequences.reshaped[0]) == (("top_k",), 0)


def test_a_sampling_mask_of_the_objects_is_the_support():
    tokenizer, steps = load(EXAMPLE), [{5: Logprob(-0.5, 1)}, {6: Logprob(-2.0, 2)}]
    masks, text = [[5, 9], [6, 7]], tokenizer.decode([5, 6])
    completion = Completion(0, text, [5, 6], steps, finish_reason="length", sampling_mask=masks)
    options = {"logprob_kind": "processed", "temperature": 1.0, "top_p": 0.9}
    sequences = tg.align(traces_from_outputs([Request("r", [1, 2], [completion])], **options), tokenizer)
    assert [row.tolist() for row in sequences.support.rows(sequences.terms)] == [[5, 9], [6, 7]]


def test_what_is_no_request_output_is_refused():
    with pytest.raises(ArgumentError, match=r"TG-INTEG-027.*outputs\[0.*dict.*request_id"):
        traces_from_outputs([{"outputs": []}])
    with pytest.raises(ArgumentError, match=r"TG-INTEG-026.*2.*1"):
        traces_from_outputs([request(STEPS)], rewards=[1, 2])
    with pytest.raises(ArgumentError, match=r"TG-INTEG-028.*rewards\[0.*2.*1"):
        traces_from_outputs([request(STEPS)], rewards=[[1, 2]])
